package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// If another transaction commits a change while doctor --fix runs, the change is not lost. The two wait for each other.
func TestFixLosesNothingThatCommitsMeanwhile(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC;
		ALTER TABLE rate_limit_ephemeral ALTER count SET DEFAULT 5;
		ALTER TABLE rate_limit_policy ALTER mode SET DEFAULT 'off'`, pgx.QueryExecModeSimpleProtocol)
	tx := pgtest.Begin(t, db)
	require.True(t, pgtest.Scalar[bool](t, tx, "SELECT allowed FROM rate_limit_allow('login', 'a', 'fixed 1/365d')"))
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ban('login', 'b', '1 hour', '1 week', '1 day', 'too many')")

	fix := testkit.Later(func() (outcome, error) { return invoke(t, db.URL, "doctor", "--fix", "--timeout=10m"), nil })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	require.NoError(t, tx.Commit(t.Context()))
	o, err := fix()
	require.NoError(t, err)
	require.Contains(t, o.afterWaiting().done(t), "repaired")
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_allow('login', 'a', 'fixed 1/365d')"))
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::integer FROM rate_limit_policy WHERE key = 'b'"))
}

// If another session has locked the tables, doctor --fix names the session and changes nothing.
func TestFixSaysWhoHasTheTables(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_ephemeral ALTER count SET DEFAULT 5")
	holder := pgtest.Connect(t, db)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, "SELECT rate_limit_allow('login', 'secret', 'fixed 1/365d')")
	o := invoke(t, db.URL, "doctor", "--fix", "--timeout=10s")
	require.Equal(t, exitFailed, o.code)
	pid := holder.PgConn().PID()
	require.Regexp(t, fmt.Sprintf(`(?m)^pgratelimit doctor: nothing was changed, .*process %d \(.*pg_terminate_backend\(%[1]d\)`, pid),
		o.stderr)
	require.NotContains(t, o.stderr, "secret")
	require.NoError(t, tx.Rollback(t.Context()))
}

// doctor --fix locks all tables that it may change.
func TestFixLocksAllTables(t *testing.T) {
	t.Parallel()

	made, ok := catalog.Made(3)
	require.True(t, ok)
	var tables []string
	for object := range made {
		if name, ok := strings.CutPrefix(object, "table "); ok {
			tables = append(tables, name)
		}
	}
	require.ElementsMatch(t, tables, slices.Clone(cli.AllTables))
}

// A call that has used one of the limiter's tables goes on while doctor --fix waits for all tables. The test notices if
// rate_limit_settle uses the tables of holds first, or if doctor --fix locks the tables in another order.
func TestFixDoesNotDeadlockWithCalls(t *testing.T) {
	t.Parallel()
	testFixAmongCalls(t, "settle", "take")
}

func TestThoroughFixDoesNotDeadlockWithCalls(t *testing.T) {
	t.Parallel()
	testFixAmongCalls(t, "extend")
}

func testFixAmongCalls(t *testing.T, calls ...string) {
	t.Helper()
	const stop = "PERFORM pg_advisory_xact_lock_shared(1); "
	for _, broken := range []bool{false, true} {
		for _, c := range []struct{ call, function, next, first string }{
			{"settle", "_rate_limit_end_hold", "id := left(hold, 36)::uuid;", "LOCK TABLE public.rate_limit_ephemeral"},
			{"extend", "_rate_limit_end_hold", "id := left(hold, 36)::uuid;", "LOCK TABLE public.rate_limit_ephemeral"},
			{"take", "rate_limit_all", "missing := making AND (rows[i]).tid IS NULL;", ""},
		} {
			if !slices.Contains(calls, c.call) {
				continue
			}
			t.Run(fmt.Sprintf("%s, broken: %v", c.call, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				hold := pgtest.Scalar[string](t, db.Pool, "SELECT hold FROM rate_limit_hold('api', 'a', 'fixed 10/1d')")
				call := map[string]string{
					"settle": "rate_limit_settle('" + hold + "', 1)",
					"extend": "rate_limit_extend('" + hold + "', '1 hour')",
					"take":   pgtest.Each("'api'", "ARRAY['b', 'c']", "false", "1, 10, 60000000, 0", ""),
				}[c.call]
				order := slices.Clone(cli.AllTables)
				if c.call == "take" { // the second row is in the other table
					call = strings.Replace(call, "array_fill((false)::boolean, ARRAY[cardinality(ARRAY['b', 'c'])])", "ARRAY[false, true]", 1)
					pgtest.Exec(t, db.Pool, "SELECT FROM "+call) // makes the rows
					pgtest.Rewrite(t, db.Pool, c.function, c.next, c.next+" IF i = 2 THEN "+stop+"END IF;")
					if broken {
						slices.Reverse(order)
					}
				} else {
					pgtest.Rewrite(t, db.Pool, c.function, c.next, stop+c.next)
					if broken {
						pgtest.Rewrite(t, db.Pool, c.function, c.first, "-- ")
					}
				}
				stopper, caller, fixer := pgtest.Connect(t, db), pgtest.Connect(t, db), pgtest.Begin(t, db)
				pgtest.Exec(t, stopper, "SELECT pg_advisory_lock(1)")
				called := testkit.Later(func() (pgconn.CommandTag, error) { return caller.Exec(t.Context(), "SELECT FROM "+call) })
				pgtest.WaitUntilBlocked(t, db.Pool, 1)
				fixed := testkit.Later(func() (pgconn.CommandTag, error) {
					return fixer.Exec(t.Context(), "LOCK TABLE "+strings.Join(order, ", ")+" IN ACCESS EXCLUSIVE MODE")
				})
				pgtest.WaitUntilBlocked(t, db.Pool, 2)
				pgtest.Exec(t, stopper, "SELECT pg_advisory_unlock(1)")
				_, err1 := called()
				_, err2 := fixed()
				if err := errors.Join(err1, err2); broken {
					require.ErrorContains(t, err, "40P01")
				} else {
					require.NoError(t, err)
				}
			})
		}
	}
}

// doctor --fix repairs a changed or missing column without dropping the table, and keeps others' additions to it.
func TestThoroughFixAltersColumnsInPlace(t *testing.T) {
	t.Parallel()

	for _, change := range []string{
		"ALTER TABLE rate_limit_durable ALTER count SET DEFAULT 5",
		"ALTER TABLE rate_limit_durable ALTER count DROP DEFAULT",
		"ALTER TABLE rate_limit_durable ALTER scale SET DEFAULT 5",
		"ALTER TABLE rate_limit_durable ALTER count DROP NOT NULL; UPDATE rate_limit_durable SET count = NULL WHERE key = 'b'",
		"ALTER TABLE rate_limit_durable ALTER count TYPE integer",
		"ALTER TABLE rate_limit_durable ALTER count TYPE numeric, ALTER count DROP NOT NULL, ALTER count DROP DEFAULT",
		`ALTER TABLE rate_limit_durable ALTER prefix TYPE varchar(200) COLLATE "default"`,
		"ALTER TABLE rate_limit_durable ALTER log SET STORAGE MAIN",
		"ALTER TABLE rate_limit_durable DROP credit, DROP since, DROP log, DROP expires_at",
		"ALTER TABLE rate_limit_policy ALTER id DROP IDENTITY, ALTER mode DROP NOT NULL",
		"ALTER TABLE rate_limit_policy ALTER id SET GENERATED BY DEFAULT, DROP valid_until",
		"ALTER TABLE rate_limit_policy ALTER comment DROP NOT NULL, DROP changed_by, DROP automatic",
	} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC;
				INSERT INTO rate_limit_durable (prefix, key, count) VALUES ('a', 'a', 7), ('a', 'b', 0);
				INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('api', 'a', 'fixed 1/1m', 'why');
				CREATE PUBLICATION p FOR TABLE rate_limit_durable, rate_limit_policy;
				ALTER TABLE rate_limit_durable REPLICA IDENTITY FULL, ENABLE ROW LEVEL SECURITY,
					SET (autovacuum_vacuum_scale_factor = 0.01);
				GRANT SELECT (key) ON rate_limit_durable TO pg_monitor`, pgx.QueryExecModeSimpleProtocol)
			added := func() string {
				return pgtest.Scalar[string](t, db.Pool, `SELECT string_agg(concat_ws(' ', c.oid, relreplident, relrowsecurity,
					reloptions, (SELECT count(*) FROM pg_publication_rel WHERE prrelid = c.oid),
					(SELECT attacl FROM pg_attribute WHERE attrelid = c.oid AND attname = 'key')), ', ' ORDER BY c.oid)
					FROM pg_class AS c WHERE relname IN ('rate_limit_durable', 'rate_limit_policy')`)
			}
			before := added()
			pgtest.Exec(t, db.Pool, change, pgx.QueryExecModeSimpleProtocol)
			require.Equal(t, cli.Problem, examined(t, db.URL)["objects"].Level)
			require.Contains(t, invoke(t, db.URL, "doctor", "--fix").stdout, "repaired")
			found := examined(t, db.URL)["objects"]
			require.Equal(t, cli.Fine, found.Level, found)
			require.Equal(t, before, added())
			require.Equal(t, "7 0", pgtest.Scalar[string](t, db.Pool,
				"SELECT string_agg(count::text, ' ' ORDER BY key) FROM rate_limit_durable"))
			pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('api', 'off', 'why')")
			require.Equal(t, 2, pgtest.Scalar[int](t, db.Pool, "SELECT max(id)::integer FROM rate_limit_policy"))
		})
	}
}

// doctor --fix sets each sequence beyond all used ids, even if an id is only in the history.
func TestFixGivesNoIDAgain(t *testing.T) {
	t.Parallel()
	testNextID(t, "DROP TABLE rate_limit_policy")
}

func TestThoroughFixGivesNoIDAgain(t *testing.T) {
	t.Parallel()
	testNextID(t, "ALTER TABLE rate_limit_policy ALTER id DROP IDENTITY", "ALTER TABLE rate_limit_policy DROP comment")
}

func testNextID(t *testing.T, changes ...string) {
	t.Helper()
	for _, change := range changes {
		db := pgtest.New(t)
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, policy, comment)
			SELECT 'api', i, 'fixed 1/1m', 'why' FROM generate_series(1, 5) AS i;
			DELETE FROM rate_limit_policy WHERE id > 3; `+change, pgx.QueryExecModeSimpleProtocol)
		invoke(t, db.URL, "doctor", "--fix", "--yes")
		pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('api', 'off', 'why')")
		require.Equal(t, 6, pgtest.Scalar[int](t, db.Pool, "SELECT max(id)::integer FROM rate_limit_policy"), change)
	}
}

// If a column seems to be renamed, doctor --fix changes nothing. doctor's advice renames the column.
func TestFixLeavesARenamedColumnToItsOwner(t *testing.T) {
	t.Parallel()
	testRenamed(t, "key")
}

func TestThoroughFixLeavesARenamedColumnToItsOwner(t *testing.T) {
	t.Parallel()
	testRenamed(t, "count")
}

func testRenamed(t *testing.T, columns ...string) {
	t.Helper()
	for _, column := range columns {
		db := pgtest.New(t)
		pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC;
			INSERT INTO rate_limit_durable (prefix, key, count) VALUES ('a', 'a', 7);
			ALTER TABLE rate_limit_durable RENAME `+column+` TO "my old"`, pgx.QueryExecModeSimpleProtocol)
		invoke(t, db.URL, "doctor", "--fix", "--yes").complains(t, exitFailed, "nothing was changed", "under another name")
		found := examined(t, db.URL)["objects"]
		require.Contains(t, found.Do, `RENAME COLUMN "my old" TO "`+column+`"`)
		require.NotContains(t, found.Do, "DROP COLUMN")
		require.NotContains(t, found.Do, "loses all rows")
		follow(t, db, found.Do)
		require.Equal(t, cli.Fine, examined(t, db.URL)["objects"].Level)
		require.Equal(t, 7, pgtest.Scalar[int](t, db.Pool, "SELECT count::integer FROM rate_limit_durable WHERE key = 'a'"))
	}
}
