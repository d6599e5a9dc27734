package ratelimit

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"regexp"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const (
	// amply is a Config.Timeout that no call comes near, however slow the machine, and the longest that a test waits for
	// an event that is certain to come.
	amply = time.Minute

	// tick is how often a test looks whether the event has come.
	tick = 2 * time.Millisecond

	year = 365 * 24 * time.Hour
)

// rounds is how many times as long as usual tests of random events go on: as the variable says, or once.
func rounds(t *testing.T) int {
	t.Helper()
	text := os.Getenv("RATELIMIT_TEST_ROUNDS")
	if text == "" {
		return 1
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err)
	require.Positive(t, n)
	return n
}

// t0 is a time of the tests' clocks.
var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// slowPolicies are policies of that limit under which time plays no part in a test.
func slowPolicies(limit int64) map[string]Policy {
	return map[string]Policy{
		"fixed window":   FixedWindow{Limit: limit, Window: year},
		"sliding window": SlidingWindow{Limit: limit, Window: year},
		"token bucket":   TokenBucket{Capacity: limit, Refill: 1, Every: 24 * time.Hour},
		"sliding log":    SlidingLog{Limit: limit, Window: year},
	}
}

// eachSlowPolicyAndTable runs a test for every algorithm on both tables, side by side, with a complete Config.
func eachSlowPolicyAndTable(t *testing.T, limit int64, test func(t *testing.T, config Config)) {
	t.Helper()
	eachPolicyAndTable(t, slowPolicies(limit), test)
}

// eachSlowPolicyAllAndTable is the same with all of them at once, too, of which the last has the smallest limit.
func eachSlowPolicyAllAndTable(t *testing.T, limit int64, test func(t *testing.T, config Config)) {
	t.Helper()
	policies, larger := slowPolicies(limit), slowPolicies(2*limit)
	policies["all"] = All(larger["fixed window"], larger["token bucket"], larger["sliding window"], policies["sliding log"])
	eachPolicyAndTable(t, policies, test)
}

func eachPolicyAndTable(t *testing.T, policies map[string]Policy, test func(t *testing.T, config Config)) {
	t.Helper()
	for name, policy := range policies {
		for _, durable := range []bool{false, true} {
			config := Config{Name: "test", Policy: policy, Durable: durable, Timeout: amply}
			t.Run(fmt.Sprintf("%s in %s", name, table(durable)), func(t *testing.T) {
				t.Parallel()
				test(t, config)
			})
		}
	}
}

func table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}

func newLimiter(t *testing.T, db DBTX, config Config) *Limiter {
	t.Helper()
	limiter, err := New(db, config)
	require.NoError(t, err)
	return limiter
}

// frozen is a Test.Now that stands still.
func frozen(at time.Time) TestConfig { return TestConfig{Now: func() time.Time { return at }} }

// storedRow is a row of one of the tables.
type storedRow struct {
	algorithm int16
	state
}

// rowID is where a row stands in its table.
type rowID struct{ name, key string }

const rowColumns = `prefix, key, algorithm, count, prev_count, window_start, credit, coalesce(scale, 0), expires_at, log, coalesce(since, 0), coalesce(capacity, 0), coalesce(refill, 0), coalesce(returned, 0)`

func scanRow(rows pgx.CollectableRow) (id rowID, row storedRow, err error) {
	var log []int64
	err = rows.Scan(&id.name, &id.key, &row.algorithm, &row.count, &row.prevCount, &row.windowStart, &row.credit, &row.scale, &row.expiresAt, &log,
		&row.since, &row.capacity, &row.refill, &row.returned)
	row.log = newEntries(log)
	return id, row, err
}

// storedRows reads a whole table.
func storedRows(t *testing.T, db DBTX, durable bool) map[rowID]storedRow {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT "+rowColumns+" FROM "+table(durable))
	require.NoError(t, err)
	stored := map[rowID]storedRow{}
	for rows.Next() {
		id, row, err := scanRow(rows)
		require.NoError(t, err)
		stored[id] = row
	}
	require.NoError(t, rows.Err())
	return stored
}

// taken is how much of a slow policy's limit a key has taken.
func taken(t *testing.T, db DBTX, config Config, key string) int64 {
	t.Helper()
	return takenOf(config, storedRows(t, db, config.Durable), key)
}

func takenOf(config Config, stored map[rowID]storedRow, key string) int64 {
	row, ok := stored[rowID{config.Name, key}]
	if bucket, isBucket := config.Policy.(TokenBucket); ok && isBucket {
		return bucket.Capacity - row.credit/row.scale
	}
	return row.count
}

// exec runs a statement that must succeed.
func exec(t *testing.T, db DBTX, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// scalar runs a query for one value.
func scalar[T any](t *testing.T, db DBTX, sql string, args ...any) T {
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

// hold begins a transaction that has locked the row of a key, as somebody's AllowTx does until his transaction ends. The
// row must exist.
func hold(t *testing.T, db *pgtest.DB, config Config, key string) pgx.Tx {
	t.Helper()
	tx := begin(t, db)
	tag, err := tx.Exec(t.Context(), "SELECT FROM "+table(config.Durable)+" WHERE prefix = $1 AND key = $2 FOR UPDATE", config.Name, key)
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
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

// waiting is how many calls wait for the next statement.
func (l *Limiter) waiting() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.queue)
}

// waitUntilHeld returns when the lane of a limiter waits for a row.
func waitUntilHeld(t *testing.T, pool *pgxpool.Pool, l *Limiter) {
	t.Helper()
	waitUntil(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return len(l.held) > 0
	})
	waitUntilBlocked(t, pool, 1)
}

// inLane is how many calls wait for the lane.
func (l *Limiter) inLane() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.lane)
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
func rewrite(t *testing.T, db DBTX, function string, oldNew ...string) {
	t.Helper()
	source := scalar[string](t, db, "SELECT pg_get_functiondef($1::regproc)", function)
	for i := 0; i < len(oldNew); i += 2 {
		require.Contains(t, source, oldNew[i])
		source = strings.ReplaceAll(source, oldNew[i], oldNew[i+1])
	}
	exec(t, db, source)
}

// functionOf is the function that decides by a policy.
func functionOf(policy Policy) string {
	return regexp.MustCompile(`rate_limit_\w+`).FindString(policy.statement())
}

// neverFew has the functions decide a few keys as they decide many: in one statement.
func neverFew(t *testing.T, db DBTX) {
	t.Helper()
	for _, policy := range slowPolicies(1) {
		rewrite(t, db, functionOf(policy), "few := n BETWEEN", "few := false AND n BETWEEN")
	}
}

// neverCheap has the functions leave everything to rate_limit_all.
func neverCheap(t *testing.T, db DBTX) {
	t.Helper()
	neverFew(t, db)
	for _, policy := range slowPolicies(1) {
		if _, log := policy.(SlidingLog); !log {
			rewrite(t, db, functionOf(policy), "IF NOT few AND", "IF false AND")
		}
	}
}

// offspring runs a function, and returns how to count the goroutines that it has started, and these have started, and that
// have not ended.
func offspring(t *testing.T, run func(ctx context.Context)) (count func() int) {
	t.Helper()
	label := pprof.Labels("offspring", t.Name()) // which a goroutine inherits
	pprof.Do(t.Context(), label, run)
	return func() int {
		var profile bytes.Buffer
		if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
			return -1
		}
		// Each group of goroutines with the same stack begins with a line like "3 @ 0x43e3a0 …", and then that of its labels.
		var total, group int
		for line := range strings.Lines(profile.String()) {
			if before, _, ok := strings.Cut(line, " @ "); ok {
				group = 0
				_, _ = fmt.Sscan(before, &group)
			}
			if strings.HasPrefix(line, "# labels:") && strings.Contains(line, fmt.Sprintf("%q", t.Name())) {
				total += group
			}
		}
		return total
	}
}
