package command

import (
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// copied is a database of TestCopiesOfTheDatabase, with a connection to it.
type copied struct {
	*pgxpool.Pool
	url string
}

// policies returns the rows of rate_limit_policy, and the history of their changes.
func (c copied) policies(t *testing.T) (rows, history string) {
	t.Helper()
	return pgtest.Scalar[string](t, c, "SELECT string_agg(p::text, E'\n' ORDER BY id) FROM rate_limit_policy AS p"),
		pgtest.Scalar[string](t, c, "SELECT string_agg(h::text, E'\n' ORDER BY version) FROM rate_limit_policy_history AS h")
}

// TestCopiesOfTheDatabase runs the commands in docs/backup.md unchanged, and checks its statements.
func TestCopiesOfTheDatabase(t *testing.T) {
	t.Parallel()

	blocks := shellAndSQL(t, "docs/backup.md")
	require.Len(t, blocks, 6)
	binary := buildCommand(t)
	servers := [2]*pgserver.Server{}
	for i := range servers {
		servers[i] = pgtest.Server(t, pgserver.Config{Settings: map[string]string{"wal_level": "logical"}})
	}
	connect := func(server *pgserver.Server, name string, migrate bool) copied {
		parsed, err := url.Parse(server.URL())
		require.NoError(t, err)
		admin, err := pgxpool.New(t.Context(), server.URL())
		require.NoError(t, err)
		defer admin.Close()
		pgtest.Exec(t, admin, "CREATE DATABASE "+name+" TEMPLATE template0")
		parsed.Path = "/" + name
		pool, err := pgxpool.New(t.Context(), parsed.String())
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		if migrate {
			require.NoError(t, migrations.Up(t.Context(), pool))
		}
		return copied{pool, parsed.String()}
	}
	old := connect(servers[0], "shop", true)
	binDir := pgtest.Scalar[string](t, old, "SELECT setting FROM pg_config WHERE name = 'BINDIR'")
	if _, err := exec.LookPath(filepath.Join(binDir, "pg_restore")); err != nil {
		t.Skip("backup and restore: install the server's programs (Debian: postgresql)")
	}
	dir := t.TempDir()
	shell := func(to copied, script string) error {
		cmd := exec.CommandContext(t.Context(), "bash", "-euxo", "pipefail", "-c", script)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "PATH="+filepath.Dir(binary)+":"+binDir+":"+os.Getenv("PATH"),
			"DATABASE_URL="+old.url, "NEW_DATABASE_URL="+to.url)
		output, err := cmd.CombinedOutput()
		t.Logf("%s", output)
		return err
	}
	const add = "INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('api', $1, 'deny', 'why')"
	for _, key := range []string{"a", "b", "c"} {
		pgtest.Exec(t, old, add, key)
	}
	pgtest.Exec(t, old, "DELETE FROM rate_limit_policy WHERE key = 'c'")
	const take = "SELECT rate_limit_allow('api', 'key', 'fixed 5/1d', durable => $1)"
	pgtest.Exec(t, old, take, true)
	pgtest.Exec(t, old, take, false)
	rows, history := old.policies(t)
	same := func(c copied) {
		t.Helper()
		itsRows, itsHistory := c.policies(t)
		require.Equal(t, rows, itsRows)
		require.Equal(t, history, itsHistory)
		require.Equal(t, 1, pgtest.Scalar[int](t, c, "SELECT count(*) FROM rate_limit_durable"))
		require.Zero(t, pgtest.Scalar[int](t, c, "SELECT count(*) FROM rate_limit_ephemeral"))
	}
	// goesOn changes policies in a copy, and migrates the copy.
	goesOn := func(c copied, id, version int) {
		t.Helper()
		pgtest.Exec(t, c, "SELECT rate_limit_ban('api', 'ban', '1h', '1h', '1h', 'why')")
		require.Equal(t, id, pgtest.Scalar[int](t, c, "SELECT id FROM rate_limit_policy WHERE key = 'ban'"))
		require.Equal(t, version, pgtest.Scalar[int](t, c, "SELECT max(version) FROM rate_limit_policy_history"))
		require.NoError(t, migrations.DownTo(t.Context(), c.Pool, 2))
		require.NoError(t, migrations.Up(t.Context(), c.Pool))
		require.NoError(t, shell(c, `pgratelimit doctor --database-url "$NEW_DATABASE_URL"`))
	}

	// The first part of docs/backup.md is dump and restore.
	restored := connect(servers[0], "restored", false)
	require.NoError(t, shell(restored, blocks[0]))
	same(restored)
	goesOn(restored, 4, 5)
	migrated := connect(servers[0], "migrated", true)
	require.NoError(t, shell(migrated, blocks[1]))
	same(migrated)
	goesOn(migrated, 4, 5)
	careless := connect(servers[0], "careless", true)
	require.Error(t, shell(careless, strings.Replace(blocks[1], " --disable-triggers --exit-on-error", "", 1)))
	require.Equal(t, 2, pgtest.Scalar[int](t, careless, "SELECT count(*) FROM rate_limit_policy"))
	require.NoError(t, shell(careless, blocks[2]))
	_, itsHistory := careless.policies(t)
	require.Equal(t, history, itsHistory)
	goesOn(careless, 4, 5)

	// The second part is logical replication.
	green := connect(servers[1], "shop", true)
	policies, err := ratelimit.NewPolicies(green.Pool, ratelimit.PoliciesConfig{})
	require.NoError(t, err)
	limiter, err := ratelimit.New(green.Pool, ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, Policies: policies,
	})
	require.NoError(t, err)
	go policies.Run(t.Context())
	banned := func(key string) bool {
		result, err := limiter.Peek(t.Context(), key)
		require.NoError(t, err)
		return result.Source == ratelimit.SourcePolicy
	}
	require.Error(t, errorOf(old.Exec(t.Context(), "CREATE PUBLICATION short FOR TABLE rate_limit_ephemeral")))
	pgtest.Exec(t, old, blocks[3])
	parsed, err := url.Parse(old.url)
	require.NoError(t, err)
	subscribe := strings.Replace(blocks[4], "host=old dbname=shop", parsed.String(), 1)
	require.NotEqual(t, blocks[4], subscribe)
	pgtest.Exec(t, green, subscribe, pgx.QueryExecModeSimpleProtocol)
	testkit.WaitUntil(t, func() bool { return banned("a") && banned("b") })
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[bool](t, green, "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel")
	})
	same(green)
	pgtest.Exec(t, old, add, "d")
	pgtest.Exec(t, old, "DELETE FROM rate_limit_policy WHERE key = 'a'")
	testkit.WaitUntil(t, func() bool { return banned("d") && !banned("a") })
	rows, history = old.policies(t)
	same(green)

	// If a trigger runs for replicated rows, the replication stops until the trigger is disabled for these rows.
	pgtest.Exec(t, green, "ALTER TABLE rate_limit_policy ENABLE ALWAYS TRIGGER rate_limit_policy_note")
	pgtest.Exec(t, old, add, "e")
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[bool](t, green, "SELECT bool_and(pid IS NULL) FROM pg_stat_subscription")
	})
	require.False(t, banned("e"))
	require.Error(t, shell(green, `pgratelimit doctor --database-url "$NEW_DATABASE_URL"`))
	pgtest.Exec(t, green, "ALTER TABLE rate_limit_policy ENABLE TRIGGER rate_limit_policy_note") // the command that doctor prints
	testkit.WaitUntil(t, func() bool { return banned("e") })

	// Without rate_limit_policy_history, a process learns of a change only when it reads all rows again.
	pgtest.Exec(t, old, "ALTER PUBLICATION limits DROP TABLE rate_limit_policy_history")
	pgtest.Exec(t, old, add, "f")
	testkit.WaitUntil(t, func() bool { return banned("f") })
	_, itsHistory = green.policies(t)
	require.Equal(t, 7, strings.Count(itsHistory, "\n")+1)

	// The next statements switch over to the new database.
	pgtest.Exec(t, green, blocks[5], pgx.QueryExecModeSimpleProtocol)
	next := 1 + pgtest.Scalar[int](t, green, "SELECT max(id) FROM rate_limit_policy")
	goesOn(green, next, 8)
	testkit.WaitUntil(t, func() bool { return banned("ban") })
}

func errorOf[T any](_ T, err error) error { return err }
