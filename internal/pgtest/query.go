package pgtest

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Querier asks questions of a database: a pool, a connection or a transaction.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Executor runs statements too: a pool, a connection or a transaction.
type Executor interface {
	Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Exec runs a statement that must succeed. Without arguments it may run several statements.
func Exec(t testing.TB, db Executor, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// Scalar runs a query for one value.
func Scalar[T any](t testing.TB, db Querier, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	value, err := pgx.CollectOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return value
}

// Each is a call of rate_limit_all in which each of the keys is a request of its own. All arguments are SQL: the
// limiter's name, an array of keys, whether they are durable, the code of an algorithm with limit, span and refill, as
// "1, 10, 60000000, 0", and what follows.
func Each(name, keys, durable, policy, more string) string {
	n := "cardinality(" + keys + ")"
	of := func(value, kind string) string { return "array_fill((" + value + ")::" + kind + ", ARRAY[" + n + "])" }
	all := []string{
		"ARRAY(SELECT generate_series(1, " + n + "))", of(name, "text"), keys, of(durable, "boolean"),
	}
	kind := "smallint"
	for number := range strings.SplitSeq(policy, ", ") {
		all = append(all, of(number, kind))
		kind = "bigint"
	}
	return "rate_limit_all(" + strings.Join(all, ", ") + more + ")"
}

// Connect returns a connection of the test's own, outside all pools.
func Connect(t testing.TB, db *DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Begin begins a transaction on a connection of its own. The test has to end it.
func Begin(t testing.TB, db *DB) pgx.Tx {
	t.Helper()
	tx, err := Connect(t, db).Begin(t.Context())
	require.NoError(t, err)
	return tx
}

// WaitUntilBlocked returns when so many sessions of the database wait for a lock that another session has.
func WaitUntilBlocked(t testing.TB, db Querier, sessions int) {
	t.Helper()
	blocked := `
		SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`
	if Shards() > 0 {
		blocked = "SELECT sum(n)::integer FROM test_blocked() AS n"
	}
	testkit.WaitUntil(t, func() bool { return sessions == Scalar[int](t, db, blocked) })
}

// Rewrite replaces parts of a function in the test's database. The result is a broken variant, with which a check
// can show that it notices mistakes. oldNew are pairs of a text that must be in the function, and of what
// replaces it. The pool of a proxy stands for all its shards.
func Rewrite(t testing.TB, db Executor, function string, oldNew ...string) {
	t.Helper()
	for _, db := range shardsOf(db) {
		source := Scalar[string](t, db, "SELECT pg_get_functiondef($1::regproc)", function)
		for i := 0; i < len(oldNew); i += 2 {
			require.Contains(t, source, oldNew[i])
			source = strings.ReplaceAll(source, oldNew[i], oldNew[i+1])
		}
		Exec(t, db, source)
	}
}

// Table returns the name of one of the two tables.
func Table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}

// Fill adds rows of a limiter to a table, with the keys "key 1" and on in this order. All of them expire at
// expiresAt.
func Fill(t testing.TB, db Executor, table, name string, rows int, expiresAt time.Time) {
	t.Helper()
	Exec(t, db, "INSERT INTO "+table+` (prefix, key, expires_at)
		SELECT $1, 'key ' || n, $2 FROM generate_series(1, $3::integer) AS n`, name, expiresAt.UnixMicro(), rows)
}

// Scans is what statements have read of a table.
type Scans struct {
	Sequential int64 // scans of the whole table
	Rows       int64 // rows that these have read
	IndexRows  int64 // rows that were found through an index
}

// ScansOfAGrownTable returns what statements read of a table on a session that has planned them before the table
// grew. plan runs them on the small table. It is called often enough that the session may keep a plan. grow makes
// the table large, and run runs the statements again.
func ScansOfAGrownTable(t testing.TB, conn *pgx.Conn, table, mode string, plan, grow, run func()) (scans Scans) {
	t.Helper()
	Exec(t, conn, "ALTER TABLE "+table+" SET (autovacuum_enabled = off)")
	Exec(t, conn, "SET plan_cache_mode = "+mode)
	Exec(t, conn, "ANALYZE "+table)
	for range 10 { // past the five calls after which a session may keep a plan
		plan()
	}
	grow()

	// They are counted in a transaction, where the session's own counters can be read at once.
	Exec(t, conn, "BEGIN")
	run()
	row := conn.QueryRow(t.Context(), `
		SELECT pg_stat_get_xact_numscans($1::regclass), pg_stat_get_xact_tuples_returned($1::regclass),
			(SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid))
				FROM pg_index WHERE indrelid = $1::regclass)::bigint`, table)
	require.NoError(t, row.Scan(&scans.Sequential, &scans.Rows, &scans.IndexRows))
	Exec(t, conn, "COMMIT")
	return scans
}

// Objects lists what is in a database: all schemas, relations, functions and types, or those in one schema. It
// includes the oids, so that whatever was made anew shows.
func Objects(t testing.TB, db Querier, schema ...string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		SELECT format('%s %s %s %s', o.kind, n.nspname, o.name, o.oid)
		FROM (
			SELECT 'schema', '', oid, oid FROM pg_namespace WHERE $1::text[] IS NULL
			UNION ALL SELECT 'relation', relname, oid, relnamespace FROM pg_class
			UNION ALL SELECT 'function', proname, oid, pronamespace FROM pg_proc
			UNION ALL SELECT 'type', typname, oid, typnamespace FROM pg_type
		) AS o (kind, name, oid, namespace)
		JOIN pg_namespace AS n ON n.oid = o.namespace
		WHERE $1 IS NULL OR n.nspname = ANY ($1)
		ORDER BY 1`, schema)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// LeaveToRules has a function whose name begins with rate_limit_take_ leave everything to its sibling, which decides a
// single key by itself, and the rest by rate_limit_all.
func LeaveToRules(t testing.TB, db Executor, take string) {
	t.Helper()
	if take != "rate_limit_take_sliding_log" { // which always does
		RewriteTwins(t, db, take, "WHERE units <=", "WHERE false AND units <=", "units_of := ", "units_of := NULL; -- ")
	}
}

// LeaveToAll has it leave everything to rate_limit_all. So do the others, of which some decide by one statement before.
func LeaveToAll(t testing.TB, db Executor, take string) {
	t.Helper()
	LeaveToRules(t, db, take)
	for _, twin := range twins(Left) {
		source := Scalar[string](t, shardsOf(db)[0], "SELECT prosrc FROM pg_proc WHERE oid = $1::regproc", twin)
		if strings.Contains(source, "WHEN valid THEN n") {
			Rewrite(t, db, twin, "WHEN valid THEN n", "WHEN false THEN n")
		}
	}
}

// Left is the function that decides what is left by those whose names begin with rate_limit_take_.
const Left = "_rate_limit_left_ephemeral"

// twins are a function for rate_limit_ephemeral, and that for rate_limit_durable.
func twins(function string) []string {
	if of, ok := strings.CutSuffix(function, "_ephemeral"); ok {
		return []string{function, of + "_durable"}
	}
	return []string{function, "_" + function + "_durable"}
}

// RewriteTwins is Rewrite of a function for rate_limit_ephemeral, and of that for rate_limit_durable.
func RewriteTwins(t testing.TB, db Executor, function string, oldNew ...string) {
	t.Helper()
	for i, twin := range twins(function) {
		texts := slices.Clone(oldNew)
		for j := range texts {
			if i > 0 {
				texts[j] = strings.ReplaceAll(texts[j], "ephemeral", "durable")
			}
		}
		Rewrite(t, db, twin, texts...)
	}
}
