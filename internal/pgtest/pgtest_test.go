package pgtest

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

// childVariable tells a test binary that another test binary started it.
const childVariable = "PGTEST_TEST_CHILD"

func TestMain(m *testing.M) { Main(m) }

func TestNewGivesEachTestItsOwnDatabase(t *testing.T) {
	t.Parallel()

	urls := make([]string, 4)
	var inUse *pgx.Conn
	t.Run("group", func(t *testing.T) {
		for i := range urls {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				db := New(t)
				urls[i] = db.URL
				if i == 0 {
					conn, err := pgx.Connect(context.Background(), db.URL)
					require.NoError(t, err)
					inUse = conn
				}
				_, err := db.Pool.Exec(
					t.Context(),
					"INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('test', $1)",
					fmt.Sprint(i),
				)
				require.NoError(t, err)

				rows, err := db.Pool.Query(t.Context(), "SELECT key FROM rate_limit_ephemeral")
				require.NoError(t, err)
				keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err)
				require.Equal(t, []string{fmt.Sprint(i)}, keys)
			})
		}
	})

	require.NotNil(t, inUse)
	defer inUse.Close(context.Background())
	for _, url := range urls { // the databases are dropped, although one has a connection
		config, err := pgx.ParseConfig(url)
		require.NoError(t, err)
		require.NotContains(t, databases(t, sharedURL(t)), config.Database)
	}
}

// The role of NewPool can call the functions, and cannot read the tables.
func TestNewPoolIsAnApplications(t *testing.T) {
	t.Parallel()
	NotThroughProxy(t, "a role that is not the owner")

	db := New(t)
	if !Scalar[bool](t, db.Pool, "SELECT pg_has_role('pg_monitor', 'MEMBER')") {
		t.Skip("another role: the URL of the server has to name a superuser") // the tests' servers have a superuser
	}
	application := db.NewPool(t, nil)
	allow := "SELECT count(*) FROM rate_limit_take_fixed_window('name', '{key}', 1, 1000000)"
	require.EqualValues(t, 1, Scalar[int64](t, application, allow))
	const look = "SELECT count(*) FROM rate_limit_ephemeral"
	_, err := application.Exec(t.Context(), look)
	require.ErrorContains(t, err, "permission denied for table rate_limit_ephemeral")
	require.EqualValues(t, 1, Scalar[int64](t, db.OwnerPool(t, nil), look))
}

func TestPoolsOfAnEmptyDatabase(t *testing.T) {
	t.Parallel()

	db := Empty(t)
	require.Zero(t, Scalar[int](t, db.Pool,
		"SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')"))
	require.EqualValues(t, maxConns, db.NewPool(t, nil).Config().MaxConns)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "other" })
	require.Equal(t, "other", Scalar[string](t, pool, "SHOW search_path"))
	require.Equal(t, db.Pool.Config().ConnConfig.Database, Scalar[string](t, pool, "SELECT current_database()"))
}

func TestServerIsTheTestsOwn(t *testing.T) {
	t.Parallel()

	var url string
	t.Run("test with a server", func(t *testing.T) {
		url = Server(t, pgserver.Config{}).URL()
		require.Equal(t, []string{"postgres"}, databases(t, url))
	})
	_, err := pgx.Connect(t.Context(), url)
	require.Error(t, err)
}

// Several test binaries on one server create only one template, and it remains. Test binaries drop templates of other
// migrations, and no other databases.
func TestSharedServer(t *testing.T) {
	t.Parallel()

	server := Server(t, pgserver.Config{})
	template, err := templateName()
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	theirs := []string{"ratelimit_test_of_somebody", "ratelimit_template_", "my_" + template}
	for _, name := range append(theirs, template+"_unfinished", templatePrefix+strings.Repeat("0", 16)) {
		Exec(t, conn, "CREATE DATABASE "+quote(name))
	}
	var first uint32
	for round := range 2 {
		children := make([]*exec.Cmd, 3)
		for i := range children {
			children[i] = child(t, server.URL())
			children[i].Stdout, children[i].Stderr = t.Output(), t.Output()
			require.NoError(t, children[i].Start())
		}
		for _, child := range children {
			require.NoError(t, child.Wait())
		}
		made := Scalar[uint32](t, conn, "SELECT oid FROM pg_database WHERE datname = $1", template)
		require.True(t, round == 0 || made == first, "the second round has made the template again")
		first = made
		require.ElementsMatch(t, append(theirs, "postgres", template), databases(t, server.URL()))
	}
}

func TestWithoutTheServer(t *testing.T) {
	t.Parallel()

	const major, none = "RATELIMIT_TEST_POSTGRES_MAJOR=1", "FAIL: TestInChild"
	for _, test := range []struct{ url, variable, outcome, text string }{
		{"postgres://127.0.0.1:1/postgres", "", none, "pgserver: use the server of the given URL"},
		{sharedURL(t), major, none, "RATELIMIT_TEST_POSTGRES_MAJOR is 1, and the server is PostgreSQL 1"},
		{"", major + "\nDOCKER_HOST=tcp://127.0.0.1:1", none, "no Postgres to run on"},
		{sharedURL(t), childVariable + "=not found", "SKIP: TestInChild", "a server of the test's own"},
		{"", childVariable + "=not found", none, "no Postgres to run on"},
	} {
		child := child(t, test.url)
		child.Env = append(child.Env, strings.Split(test.variable, "\n")...)
		output, err := child.CombinedOutput()
		require.Equal(t, test.outcome == none, err != nil, "%s", output)
		require.Contains(t, string(output), "--- "+test.outcome)
		require.Contains(t, string(output), test.text)
	}
}

// TestInChild runs in the child processes of the other tests.
func TestInChild(t *testing.T) {
	t.Parallel()

	if os.Getenv(childVariable) == "" {
		return
	}
	if os.Getenv(childVariable) == "not found" {
		need(t, pgserver.ErrNotFound)
	}
	for i := range 4 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			require.NoError(t, New(t).Pool.Ping(t.Context()))
		})
	}
}

func TestWithDatabase(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ connString, want string }{
		{"postgres://localhost", "postgres://localhost/x"},
		{"postgres://u:p%40ss@localhost/postgres?options=-c%20jit%3Doff", "postgres://u:p%40ss@localhost/x?options=-c%20jit%3Doff"},
		{"host=localhost dbname=postgres", "host=localhost dbname=postgres dbname=x"},                   // libpq uses the last dbname
		{"postgresql:///postgres?host=/tmp&dbname=other&database=third", "postgresql:///x?host=%2Ftmp"}, // parameters override the path
	} {
		got, err := withDatabase(test.connString, "x")
		require.NoError(t, err)
		require.Equal(t, test.want, got)
	}
	_, err := withDatabase("postgres://user:secret@local host", "x")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

// sharedURL returns the URL of the server that New and Empty use.
func sharedURL(t *testing.T) string {
	t.Helper()
	require.NoError(t, shared.start())
	return shared.server.URL()
}

// child returns a command that runs TestInChild of this test binary on the server at the given URL.
func child(t *testing.T, url string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^TestInChild$")
	cmd.Env = append(os.Environ(), urlVariable+"="+url, childVariable+"=1")
	return cmd
}

// databases lists the names of a server's databases, except for the standard templates.
func databases(t *testing.T, url string) []string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())

	rows, err := conn.Query(
		t.Context(),
		"SELECT datname FROM pg_database WHERE datname NOT IN ('template0', 'template1')",
	)
	require.NoError(t, err)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return names
}
