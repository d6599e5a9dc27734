package policytable_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// replicated runs statements without triggers, as logical replication does.
func replicated(t *testing.T, db *pgtest.DB, statements ...string) {
	t.Helper()
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SET LOCAL session_replication_role = replica")
	for _, sql := range statements {
		pgtest.Exec(t, tx, sql)
	}
	require.NoError(t, tx.Commit(t.Context()))
}

// notListening is a pool on which Run cannot listen.
type notListening struct{ *pgxpool.Pool }

func (p notListening) Use(ctx context.Context, use func(*pgx.Conn) error) error {
	return pg.Use(ctx, p.Pool, use)
}

// Processes obey changes that no trigger announces, whether they listen or only poll, and whatever else changes
// meanwhile. A row that cannot be read is logged once, however often it is read.
func TestPoliciesThatNoTriggerTellsOf(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	var journal testkit.Journal
	listens := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	asks := limitertest.RunningPolicies(t, notListening{db.Pool}, ratelimit.PoliciesConfig{})
	require.NoError(t, limitertest.Table(listens).Await(t.Context(), testkit.Amply))
	require.NoError(t, limitertest.Table(asks).Await(t.Context(), testkit.Amply))
	testkit.WaitUntil(t, func() bool { return listens.Status().Listening })
	var limiters []*ratelimit.Limiter
	for _, p := range []*ratelimit.Policies{listens, asks} {
		limiters = append(limiters, limitertest.New(t, db.Pool, ratelimit.Config{
			Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p,
		}))
	}
	const row = "INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES ('api', 'key', %s, 'test')"
	for _, step := range []struct {
		sql  string
		want string
	}{
		{fmt.Sprintf(row, "'enforce', 'fixed 20/1h'"), "fixed 20/1h"},
		{"UPDATE rate_limit_policy SET policy = 'fixed 30/1h'", "fixed 30/1h"},
		{"DELETE FROM rate_limit_policy", "fixed 10/1h"},
		{"INSERT INTO rate_limit_policy (name, mode, policy, comment) VALUES ('n', 'enforce', 'none', 'test')", "fixed 10/1h"},
		{fmt.Sprintf(row, "'enforce', 'fixed 40/1h'"), "fixed 40/1h"},
		{"TRUNCATE rate_limit_policy", "fixed 10/1h"},
		{fmt.Sprintf(row, "'enforce', 'fixed 50/1h'"), "fixed 50/1h"},
	} {
		replicated(t, db, step.sql)
		for i, l := range limiters {
			testkit.WaitUntil(t, func() bool {
				e, err := l.Explain(t.Context(), "key")
				require.NoError(t, err)
				return shorten(e.Policy) == step.want
			}, step.sql, i)
		}
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "another", "", "", "off", "") // the triggers announce this change
	}
	require.Len(t, journal.Lines(), 1, journal.String())

	// ALTER TABLE turns the triggers off, so they announce no change.
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy DISABLE TRIGGER ALL")
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 60/1h' WHERE key = 'key'")
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy ENABLE TRIGGER ALL")
	for _, l := range limiters {
		testkit.WaitUntil(t, func() bool {
			e, err := l.Explain(t.Context(), "key")
			require.NoError(t, err)
			return shorten(e.Policy) == "fixed 60/1h"
		})
	}
}

// A database that replaced another one has other changes with the same version numbers. A process notices the
// replacement, although it never reads all rows again.
func TestOtherChangesOfTheSameNumber(t *testing.T) {
	t.Parallel()

	databases := []*pgtest.DB{pgtest.New(t), pgtest.New(t)}
	old := databases[0]
	p, err := ratelimit.NewPolicies(old.Pool, ratelimit.PoliciesConfig{})
	require.NoError(t, err)
	limitertest.Table(p).PerRow = time.Hour
	l := limitertest.New(t, old.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	banned := func(db *pgtest.DB) (keys []string) {
		require.NoError(t, limitertest.Table(p).ReadChanges(t.Context(), db.Pool, testkit.Amply))
		for _, key := range []string{"both", "old", "new", "later"} {
			result, err := l.Peek(t.Context(), key)
			require.NoError(t, err)
			if result.Source == ratelimit.SourcePolicy {
				keys = append(keys, key)
			}
		}
		return keys
	}
	for i, keys := range [][]string{{"both", "old"}, {"both", "new"}} {
		for _, key := range keys {
			pgtest.Exec(t, databases[i].Pool, limitertest.AddPolicy, "api", key, "", "deny", "")
		}
	}
	require.Equal(t, []string{"both", "old"}, banned(databases[0]))
	require.Equal(t, []string{"both", "new"}, banned(databases[1])) // version 2 in both databases
	require.Equal(t, []string{"both", "old"}, banned(databases[0]))
	pgtest.Exec(t, databases[1].Pool, limitertest.AddPolicy, "api", "later", "", "deny", "")
	require.Equal(t, []string{"both", "new", "later"}, banned(databases[1])) // version 3
	require.Equal(t, []string{"both", "old"}, banned(databases[0]))          // this version is older than the last one
	pgtest.Exec(t, databases[0].Pool, limitertest.AddPolicy, "api", "later", "", "deny", "")
	require.Equal(t, []string{"both", "old", "later"}, banned(databases[0]))

}

// Rows from replication have IDs ahead of the sequences. The next writer continues after them, and reuses no ID of the
// history.
func TestSequencesBehindTheRows(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	for name, sql := range map[string]string{
		"ban":    "SELECT rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why')",
		"insert": "INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('n', 'off', 'why')",
		"copied": "INSERT INTO rate_limit_policy (name, mode, comment) SELECT 'n', 'off', 'why' FROM generate_series(1, 5)",
		"update": "UPDATE rate_limit_policy SET comment = 'other'; INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('n', 'off', 'why')",
	} {
		db := pgtest.New(t)
		if name == "insert" {
			pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "n", "own", "", "enforce", "fixed 1/1h") // this insert starts the sequences
			pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
			replicated(t, db, "DELETE FROM rate_limit_policy_history")
		}
		replicated(t, db, `INSERT INTO rate_limit_policy (id, name, key, mode, comment) OVERRIDING SYSTEM VALUE
				SELECT n, 'n', n, 'off', 'why' FROM generate_series(1, 20) AS n`,
			`INSERT INTO rate_limit_policy_history (version, at, by, action, policy_id) OVERRIDING SYSTEM VALUE
				SELECT n, now(), 'somebody', CASE WHEN n > 30 THEN 'delete' ELSE 'insert' END, CASE WHEN n > 30 THEN n - 10 ELSE n END
				FROM generate_series(1, 40) AS n`)
		conn := pgtest.Connect(t, db)
		_, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
		require.NoError(t, err, name)
		require.Equal(t, int64(31), pgtest.Scalar[int64](t, db.Pool, "SELECT min(id) FROM rate_limit_policy WHERE id > 20"), name)
		require.Equal(t, int64(41), pgtest.Scalar[int64](t, db.Pool,
			"SELECT min(version) FROM rate_limit_policy_history WHERE version > 40"), name)
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "n", "next", "", "enforce", "fixed 1/1h")
		require.True(t, pgtest.Scalar[bool](t, db.Pool, `SELECT max(p.id) = max(h.policy_id) AND count(DISTINCT h.version) >= 42
			FROM rate_limit_policy AS p, rate_limit_policy_history AS h`), name)
	}
}
