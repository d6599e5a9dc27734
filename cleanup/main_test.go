package cleanup

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	// amply is a time that nothing comes near, however slow the machine.
	amply = time.Minute

	// tick is how often a test looks whether an event has come.
	tick = 2 * time.Millisecond

	// margin is how long rate_limit_sweep spares a row that has expired.
	margin = time.Minute
)

// t0 is a time of the tests' clocks.
var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func frozen(at time.Time) ratelimit.TestConfig {
	return ratelimit.TestConfig{Now: func() time.Time { return at }}
}

func newSweeper(t *testing.T, db ratelimit.DBTX, config Config) *Sweeper {
	t.Helper()
	sweeper, err := New(db, config)
	require.NoError(t, err)
	return sweeper
}

// runOnce runs a pass that must succeed.
func runOnce(t *testing.T, sweeper *Sweeper) Result {
	t.Helper()
	result, err := sweeper.RunOnce(t.Context())
	require.NoError(t, err)
	return result
}

func newLimiter(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Timeout = amply
	limiter, err := ratelimit.New(db, config)
	require.NoError(t, err)
	return limiter
}

// policies are one of each kind, with a limit of 10, as good as new after an hour or two.
func policies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 10, Window: time.Hour},
		"sliding window": ratelimit.SlidingWindow{Limit: 10, Window: time.Hour},
		"token bucket":   ratelimit.TokenBucket{Capacity: 10, Refill: 10, Every: time.Hour},
		"sliding log":    ratelimit.SlidingLog{Limit: 10, Window: time.Hour},
	}
}

func table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}

// fill adds rows of a limiter to a table, in the order of their keys, all of which expire at that time.
func fill(t *testing.T, db ratelimit.DBTX, table, name string, rows int, expiresAt time.Time) {
	t.Helper()
	exec(t, db, "INSERT INTO "+table+" (prefix, key, expires_at) SELECT $1, 'key ' || n, $2 FROM generate_series(1, $3::integer) AS n",
		name, expiresAt.UnixMicro(), rows)
}

// keys lists the keys of a table.
func keys(t *testing.T, db ratelimit.DBTX, table string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT key FROM "+table+" ORDER BY key")
	require.NoError(t, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return keys
}

func rowCount(t *testing.T, db ratelimit.DBTX, table string) int64 {
	t.Helper()
	return scalar[int64](t, db, "SELECT count(*) FROM "+table)
}

// pageCount is how many pages both tables have.
func pageCount(t *testing.T, db ratelimit.DBTX) int64 {
	t.Helper()
	return scalar[int64](t, db, `SELECT (pg_relation_size('rate_limit_ephemeral') + pg_relation_size('rate_limit_durable'))
		/ current_setting('block_size')::bigint`)
}

// exec runs a statement that must succeed.
func exec(t *testing.T, db ratelimit.DBTX, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// scalar runs a query for one value.
func scalar[T any](t *testing.T, db ratelimit.DBTX, sql string, args ...any) T {
	t.Helper()
	var value T
	require.NoError(t, db.QueryRow(t.Context(), sql, args...).Scan(&value))
	return value
}

// connect returns a connection of the test's own, outside all pools.
func connect(t *testing.T, db *pgtest.DB) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// begin begins a transaction on a connection of its own. The test ends it.
func begin(t *testing.T, db *pgtest.DB) pgx.Tx {
	t.Helper()
	tx, err := connect(t, db).Begin(t.Context())
	require.NoError(t, err)
	return tx
}

// waitUntilBlocked returns when so many sessions of the database wait for a lock that another session has.
func waitUntilBlocked(t *testing.T, pool *pgxpool.Pool, sessions int) {
	t.Helper()
	waitUntil(t, func() bool {
		return sessions == scalar[int](t, pool, `
			SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
	})
}

// waitUntil returns when condition is true.
func waitUntil(t *testing.T, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for deadline := time.Now().Add(amply); !condition(); <-ticker.C {
		require.True(t, time.Now().Before(deadline), "what the test waits for does not happen")
	}
}

// later runs a call in the background; what it returns is how to wait for it.
func later[T any](call func() (T, error)) func() (T, error) {
	var result T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err = call()
	}()
	return func() (T, error) {
		<-done
		return result, err
	}
}

// together runs n calls at the same time and waits for all of them.
func together(n int, call func(i int)) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	wg.Wait()
}

// rewrite replaces part of a function in the test's database: a broken variant, for a check to prove itself on.
func rewrite(t *testing.T, db ratelimit.DBTX, function, old, replacement string) {
	t.Helper()
	source := scalar[string](t, db, "SELECT pg_get_functiondef($1::regproc)", function)
	require.Contains(t, source, old)
	exec(t, db, strings.ReplaceAll(source, old, replacement))
}

// naive is a sweeper as one would write it in a minute, for tests to prove themselves on. It deletes by key what a look without
// a lock has found to expire by that time, and waits for rows that are locked.
func naive(ctx context.Context, db ratelimit.DBTX, expired time.Time) error {
	for _, durable := range []bool{false, true} {
		if _, err := db.Exec(ctx, fmt.Sprintf(`
			DELETE FROM %[1]s AS d
			USING (SELECT prefix, key FROM %[1]s WHERE expires_at <= $1 OFFSET 0) AS e
			WHERE d.prefix = e.prefix AND d.key = e.key`, table(durable)), expired.UnixMicro()); err != nil {
			return err
		}
	}
	return nil
}
