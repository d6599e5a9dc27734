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

// Querier is a pool, a connection or a transaction that can query a database.
type Querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// Executor is a Querier that can also run statements.
type Executor interface {
	Querier
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
}

// Exec runs a statement, and fails the test on an error. Without arguments, sql may have several statements.
func Exec(t testing.TB, db Executor, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// Scalar returns the only value of a query's result.
func Scalar[T any](t testing.TB, db Querier, sql string, args ...any) T {
	t.Helper()
	rows, err := db.Query(t.Context(), sql, args...)
	require.NoError(t, err)
	value, err := pgx.CollectOneRow(rows, pgx.RowTo[T])
	require.NoError(t, err)
	return value
}

// Each returns a call of rate_limit_all with one request for each key. All arguments are SQL: the limiter's name, an
// array of keys, whether the keys are durable, an algorithm's code with limit, span and refill ("1, 10, 60000000, 0"),
// and the other arguments.
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

// Clear deletes the rows of all keys, so that the next part of a test can use the database.
func Clear(t testing.TB, db *DB) {
	t.Helper()
	for _, db := range shardsOf(db.Pool) {
		Exec(t, db, `DELETE FROM rate_limit_ephemeral; DELETE FROM rate_limit_durable;
			DELETE FROM rate_limit_ephemeral_hold; DELETE FROM rate_limit_durable_hold`)
	}
}

// Connect returns a connection that is not part of a pool.
func Connect(t testing.TB, db *DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// Begin begins a transaction on a new connection. The test must end the transaction.
func Begin(t testing.TB, db *DB) pgx.Tx {
	t.Helper()
	tx, err := Connect(t, db).Begin(t.Context())
	require.NoError(t, err)
	return tx
}

// WaitUntilBlocked waits until the given number of sessions of the database wait for a lock of another session.
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

// Rewrite replaces parts of a function in the test's database, on all shards if there are any. Tests use Rewrite to
// show that a check notices a broken function. oldNew has pairs: a text that the function must contain, and its
// replacement.
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

// Table returns the name of the table for durable or ephemeral keys.
func Table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}

// Fill adds rows of a limiter to a table, with the keys "key 1", "key 2" and so on. All rows expire at expiresAt.
func Fill(t testing.TB, db Executor, table, name string, rows int, expiresAt time.Time) {
	t.Helper()
	Exec(t, db, "INSERT INTO "+table+` (prefix, key, expires_at)
		SELECT $1, 'key ' || n, $2 FROM generate_series(1, $3::integer) AS n`, name, expiresAt.UnixMicro(), rows)
}

// Scans counts what statements read from a table.
type Scans struct {
	Sequential int64 // full scans of the table
	Rows       int64 // rows that full scans read
	IndexRows  int64 // rows that index scans found
}

// ScansOfAGrownTable returns what statements read from a table that grew after the statements were planned. The
// function plan runs the statements on the small table, so often that the session may keep a plan. The function grow
// makes the table large. The function run repeats the statements.
func ScansOfAGrownTable(t testing.TB, conn *pgx.Conn, table, mode string, plan, grow, run func()) Scans {
	t.Helper()
	Exec(t, conn, "ALTER TABLE "+table+" SET (autovacuum_enabled = off)")
	Exec(t, conn, "SET plan_cache_mode = "+mode)
	Exec(t, conn, "ANALYZE "+table)
	for range 10 { // a session may keep a plan after five calls
		plan()
	}
	grow()

	// Within a transaction a session can read its own counters at once. They may still contain what the session has
	// read before the transaction, so subtract that.
	Exec(t, conn, "BEGIN")
	before := scansOf(t, conn, table)
	run()
	after := scansOf(t, conn, table)
	Exec(t, conn, "COMMIT")
	return Scans{after.Sequential - before.Sequential, after.Rows - before.Rows, after.IndexRows - before.IndexRows}
}

// scansOf returns the session's counters of a table that the session has not yet reported to the server's statistics.
func scansOf(t testing.TB, conn *pgx.Conn, table string) (scans Scans) {
	t.Helper()
	row := conn.QueryRow(t.Context(), `
		SELECT pg_stat_get_xact_numscans($1::regclass), pg_stat_get_xact_tuples_returned($1::regclass),
			(SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid))
				FROM pg_index WHERE indrelid = $1::regclass)::bigint`, table)
	require.NoError(t, row.Scan(&scans.Sequential, &scans.Rows, &scans.IndexRows))
	return scans
}

// FirstScan calls run until it returns a number above 0, at most ten times, and returns the last number. The tests of
// functions without their planner setting need it: on a busy server a session may have to plan again, and then it plans
// for the large table.
func FirstScan(run func() int64) (scanned int64) {
	for attempt := 0; scanned == 0 && attempt < 10; attempt++ {
		scanned = run()
	}
	return scanned
}

// Objects lists the schemas, relations, functions and types of a database or schema. The list contains oids, so that it
// shows recreated objects.
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

// LeaveToRules changes a function whose name begins with rate_limit_take_, so that it decides nothing itself. The
// changed function leaves everything to the function Left.
func LeaveToRules(t testing.TB, db Executor, take string) {
	t.Helper()
	if take != "rate_limit_take_sliding_log" { // the function for logs always leaves everything to Left
		RewriteTwins(t, db, take, "WHERE units <=", "WHERE false AND units <=", "units_of := ", "units_of := NULL; -- ")
	}
}

// LeaveToAll lets a function whose name begins with rate_limit_take_ leave everything to rate_limit_all. LeaveToAll
// changes the function Left, so it changes the decisions of all such functions.
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

// Left is the function that decides the requests that the rate_limit_take_ functions do not decide themselves.
const Left = "_rate_limit_left_ephemeral"

// twins returns the names of the function for rate_limit_ephemeral and of its copy for rate_limit_durable.
func twins(function string) []string {
	if of, ok := strings.CutSuffix(function, "_ephemeral"); ok {
		return []string{function, of + "_durable"}
	}
	return []string{function, "_" + function + "_durable"}
}

// RewriteTwins calls Rewrite for the function and for its copy for the other table.
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
