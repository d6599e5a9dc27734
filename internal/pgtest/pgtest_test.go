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

	"github.com/pgratelimit/ratelimit/internal/pgfind"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

// childVariable marks a test binary that another one has started.
const childVariable = "PGTEST_TEST_CHILD"

func TestMain(m *testing.M) { Main(m) }

func TestNewGivesEachTestItsOwnDatabase(t *testing.T) {
	t.Parallel()

	urls := make([]string, 4)
	t.Run("group", func(t *testing.T) {
		for i := range urls {
			t.Run(fmt.Sprint(i), func(t *testing.T) {
				t.Parallel()
				db := New(t)
				urls[i] = db.URL

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

	for _, url := range urls {
		config, err := pgx.ParseConfig(url)
		require.NoError(t, err)
		require.NotContains(t, databases(t, sharedURL(t)), config.Database)
	}
}

func TestNewDropsADatabaseThatIsStillInUse(t *testing.T) {
	t.Parallel()

	var conn *pgx.Conn
	t.Run("test that leaves a connection", func(t *testing.T) {
		var err error
		conn, err = pgx.Connect(t.Context(), New(t).URL)
		require.NoError(t, err)
	})
	t.Cleanup(func() { _ = conn.Close(context.Background()) })

	require.NotContains(t, databases(t, sharedURL(t)), conn.Config().Database)
}

func TestEmptyHasNoTables(t *testing.T) {
	t.Parallel()

	var tables int
	err := Empty(t).Pool.QueryRow(t.Context(),
		"SELECT count(*) FROM pg_tables WHERE schemaname NOT IN ('pg_catalog', 'information_schema')").Scan(&tables)
	require.NoError(t, err)
	require.Zero(t, tables)
}

func TestNewPool(t *testing.T) {
	t.Parallel()

	db := Empty(t)
	configured := db.NewPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 1
		config.ConnConfig.RuntimeParams["search_path"] = "other"
	})
	for _, pool := range []struct {
		*pgxpool.Pool
		maxConns   int32
		searchPath string
	}{
		{db.Pool, maxConns, `"$user", public`},
		{db.NewPool(t, nil), maxConns, `"$user", public`},
		{configured, 1, "other"},
	} {
		var database, searchPath string
		err := pool.QueryRow(t.Context(), "SELECT current_database(), current_setting('search_path')").
			Scan(&database, &searchPath)
		require.NoError(t, err)
		require.Equal(t, db.Pool.Config().ConnConfig.Database, database)
		require.Equal(t, pool.searchPath, searchPath)
		require.Equal(t, pool.maxConns, pool.Config().MaxConns)
	}
}

func TestServerIsTheTestsOwn(t *testing.T) {
	t.Parallel()

	var url string
	t.Run("test with a server", func(t *testing.T) {
		server := Server(t, pgserver.Config{})
		url = server.URL()
		require.NotEqual(t, url, sharedURL(t))

		require.NoError(t, server.Kill())
		require.NoError(t, server.Restart(t.Context()))
		require.Equal(t, []string{"postgres"}, databases(t, url))
	})

	_, err := pgx.Connect(t.Context(), url)
	require.Error(t, err)
	require.NotEmpty(t, databases(t, sharedURL(t)))
}

// Several test binaries at once on one server make one template. The last one to leave removes it, and what others
// have left that were killed. Whatever else is there stays.
func TestSharedServer(t *testing.T) {
	t.Parallel()

	server := Server(t, pgserver.Config{})
	template, err := templateName()
	require.NoError(t, err)
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(context.Background())
	theirs := []string{"postgres", "ratelimit_test_of_somebody", "ratelimit_template_", "my_ratelimit_test_" + left}
	for _, name := range append(theirs[1:], template+"_unfinished", testPrefix+left) {
		_, err = conn.Exec(t.Context(), "CREATE DATABASE "+quote(name))
		require.NoError(t, err)
	}
	stranger := testPrefix + strings.Repeat("b", 26)
	for _, sql := range []string{"CREATE ROLE other", "CREATE DATABASE " + stranger + " OWNER other"} {
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	theirs = append(theirs, stranger)

	run := func() {
		children := make([]*exec.Cmd, 4)
		for i := range children {
			children[i] = child(t, server.URL())
			children[i].Stdout, children[i].Stderr = t.Output(), t.Output()
			require.NoError(t, children[i].Start())
		}
		for _, child := range children {
			require.NoError(t, child.Wait())
		}
	}
	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_lock_shared($1)", usersLock)
	require.NoError(t, err)
	const oid = "SELECT oid FROM pg_database WHERE datname = $1"
	run()
	first := Scalar[uint32](t, conn, oid, template)
	run()
	require.Equal(t, first, Scalar[uint32](t, conn, oid, template), "the second run has made the template again")
	require.ElementsMatch(t, append(theirs, template, testPrefix+left), databases(t, server.URL()))

	_, err = conn.Exec(t.Context(), "SELECT pg_advisory_unlock_shared($1)", usersLock)
	require.NoError(t, err)
	run()
	require.ElementsMatch(t, theirs, databases(t, server.URL()))
}

// left is the name of a database that a test binary has left which was killed, without the prefix.
const left = "abcdefghijklmnopqrstuvwxyz"

func TestNoPostgresFailsTheTest(t *testing.T) {
	t.Parallel()

	output, err := child(t, "postgres://127.0.0.1:1/postgres").CombinedOutput()
	require.Error(t, err)
	require.Contains(t, string(output), "--- FAIL: TestInChild")
	require.Contains(t, string(output), "pgserver: use the server of the given URL")
}

func TestServerOfItsOwnIsNotFound(t *testing.T) {
	t.Parallel()

	for given, want := range map[bool]string{true: "--- SKIP: TestInChild", false: "--- FAIL: TestInChild"} {
		url := ""
		if given {
			url = sharedURL(t)
		}
		child := child(t, url)
		child.Env = append(child.Env, childVariable+"=not found")
		output, err := child.CombinedOutput()
		require.Equal(t, given, err == nil, "%s", output)
		require.Contains(t, string(output), want)
	}
}

func TestServerOfAnotherVersionFailsTheTest(t *testing.T) {
	t.Parallel()

	for _, url := range []string{sharedURL(t), ""} { // one that was given, and one that is found
		child := child(t, url)
		child.Env = append(child.Env, "RATELIMIT_TEST_POSTGRES_MAJOR=1")
		output, err := child.CombinedOutput()
		require.Error(t, err)
		require.Contains(t, string(output), "--- FAIL: TestInChild")
		require.Contains(t, string(output), "RATELIMIT_TEST_POSTGRES_MAJOR is 1, and the server is PostgreSQL 1")
	}
}

// TestInChild is what the children of these tests run.
func TestInChild(t *testing.T) {
	t.Parallel()

	if os.Getenv(childVariable) == "" {
		return
	}
	if os.Getenv(childVariable) == "not found" {
		need(t, &pgfind.NotFoundError{})
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
		{"postgres://user:p%40ss@localhost:5432/postgres?sslmode=disable", "postgres://user:p%40ss@localhost:5432/x?sslmode=disable"},
		{"postgresql:///postgres?host=/tmp&dbname=other", "postgresql:///x?host=%2Ftmp"},
		{"postgres://localhost/?options=-c%20jit%3Doff", "postgres://localhost/x?options=-c%20jit%3Doff"},
		{"host=localhost dbname=postgres", "host=localhost dbname=postgres dbname=x"},
	} {
		got, err := withDatabase(test.connString, "x")
		require.NoError(t, err)
		require.Equal(t, test.want, got)

		config, err := pgx.ParseConfig(got)
		require.NoError(t, err)
		require.Equal(t, "x", config.Database)
	}

	_, err := withDatabase("postgres://user:secret@local host", "x")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

func BenchmarkNew(b *testing.B) {
	New(b) // starts the server and makes the template
	for b.Loop() {
		name, err := shared.create(b.Context(), shared.template)
		require.NoError(b, err)
		require.NoError(b, shared.drop(b.Context(), name))
	}
}

// sharedURL is the URL of the server that New and Empty use.
func sharedURL(t *testing.T) string {
	t.Helper()
	require.NoError(t, shared.start())
	return shared.server.URL()
}

// child is this test binary again, with only TestInChild to run, on the server of the given URL.
func child(t *testing.T, url string) *exec.Cmd {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^TestInChild$")
	cmd.Env = append(os.Environ(), urlVariable+"="+url, childVariable+"=1")
	return cmd
}

// databases lists what is on a server, without the templates that every server has.
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
