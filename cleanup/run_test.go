package cleanup

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

func TestOneLineForEachPassThatDeletedSomething(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var j testkit.Journal
	sweeper := newSweeper(t, db.Pool, Config{BatchSize: 4, Share: 1, Logger: j.JSONLogger()})
	runOnce(t, sweeper)
	require.Empty(t, j.Entries(t))
	for pass := 1; pass <= 3; pass++ {
		pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 10, t0)
		runOnce(t, sweeper)
		runOnce(t, sweeper)
		entries := j.Entries(t)
		require.Len(t, entries, pass)
		entry := entries[pass-1]
		require.Equal(t, "INFO", entry["level"])
		require.Equal(t, "ratelimit: swept", entry["msg"])
		require.EqualValues(t, 10, entry["deleted"])
		require.EqualValues(t, 3, entry["batches"])
		require.Equal(t, true, entry["complete"])
		require.Positive(t, entry["took"])
		require.NotContains(t, j.String(), "key 1")
	}
}

// failing is a database whose first calls fail.
type failing struct {
	ratelimit.DBTX
	mu   sync.Mutex
	errs []error
}

func (f *failing) next() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.errs) == 0 {
		return nil
	}
	err := f.errs[0]
	f.errs = f.errs[1:]
	return err
}

func (f *failing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if err := f.next(); err != nil {
		return nil, err
	}
	return f.DBTX.Query(ctx, sql, args...)
}

// Run does a pass at once, and then one in each interval until its context ends, even if a pass fails.
func TestRun(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 5, t0)
	var j testkit.Journal
	down := errors.New("the network is down")
	flaky := &failing{DBTX: db.Pool, errs: []error{down, down}}
	sweeper := newSweeper(t, flaky, Config{Interval: time.Second, Logger: j.JSONLogger()})
	ctx, cancel := context.WithCancel(t.Context())
	wait := testkit.Later(func() (any, error) { return nil, sweeper.Run(ctx) })

	testkit.WaitUntil(t, func() bool { return len(j.Entries(t)) == 3 })
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 5, t0)
	testkit.WaitUntil(t, func() bool { return len(j.Entries(t)) == 4 })
	require.Zero(t, rowCount(t, db.Pool, pgtest.Table(false)))
	cancel()
	_, err := wait()
	require.NoError(t, err)

	entries := j.Entries(t)
	require.Len(t, entries, 4, "one line for both failures, one for their end, and one for each pass that deleted")
	require.Equal(t, "WARN", entries[0]["level"])
	require.Contains(t, fmt.Sprint(entries[0]["error"]), "the network is down")
	for _, entry := range entries[1:] {
		require.Equal(t, "INFO", entry["level"])
	}
}

// Sweepers of several processes together do one pass in each interval.
func TestSweepersShareTheInterval(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const interval = 10 * time.Minute
	pass := func(at time.Time) Result {
		least := interval
		result, err := newSweeper(
			t,
			db.Pool,
			Config{Interval: interval, Test: limitertest.Frozen(at)},
		).pass(t.Context(), &least)
		require.NoError(t, err)
		return result
	}
	require.True(t, pass(t0).Complete)
	for _, after := range []time.Duration{0, time.Microsecond, interval} {
		require.True(t, pass(t0.Add(after)).Skipped)
	}
	require.True(t, pass(t0.Add(interval+time.Microsecond)).Complete)
	require.True(t, pass(t0).Complete, "a clock that has stepped back stops nobody")

	// If a pass has not reached the end of the tables, the next pass continues it at once.
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 3, t0)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_sweeper SET durable = true")
	require.True(t, pass(t0).Complete)
	require.True(t, pass(t0).Skipped)

	// RunOnce does a pass even within the interval.
	require.True(t, runOnce(t, newSweeper(t, db.Pool, Config{Test: limitertest.Frozen(t0)})).Complete)
}

func TestRunLeavesTheIntervalToTheirPasses(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 5, t0)
	ctx, cancel := context.WithCancel(t.Context())
	runs := make([]func() (any, error), 3)
	for i := range runs {
		sweeper := newSweeper(t, db.Pool, Config{})
		runs[i] = testkit.Later(func() (any, error) { return nil, sweeper.Run(ctx) })
	}
	testkit.WaitUntil(t, func() bool { return rowCount(t, db.Pool, pgtest.Table(false)) == 0 })
	completed := pgtest.Scalar[time.Time](t, db.Pool, "SELECT completed_at FROM rate_limit_sweeper")
	watched := &stopwatch{DBTX: db.Pool}
	late := newSweeper(t, watched, Config{})
	runs = append(runs, testkit.Later(func() (any, error) { return nil, late.Run(ctx) }))
	testkit.WaitUntil(t, func() bool { return len(watched.times()) == 1 })
	cancel()
	for _, wait := range runs {
		_, err := wait()
		require.NoError(t, err)
	}
	require.Equal(t, completed, pgtest.Scalar[time.Time](t, db.Pool, "SELECT completed_at FROM rate_limit_sweeper"))
}

// With a Share of 0.1, each batch except the last is followed by a pause that is nine times as long.
func TestShareOfTime(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
	watched := &stopwatch{DBTX: db.Pool}
	result := runOnce(t, newSweeper(t, watched, Config{BatchSize: 10, Share: 0.1}))
	require.True(t, result.Complete)
	times := watched.times()
	require.Len(t, times, result.Batches)
	var asked time.Duration
	for _, took := range times[:len(times)-1] {
		asked += took + min(9*took, maxPause)
	}
	require.Greater(t, result.Took, asked*99/100)
}

// stopwatch measures the time of each query.
type stopwatch struct {
	ratelimit.DBTX
	mu   sync.Mutex
	took []time.Duration
}

func (s *stopwatch) times() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.took
}

func (s *stopwatch) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	began := time.Now()
	rows, err := s.DBTX.Query(ctx, sql, args...)
	return timedRows{Rows: rows, watch: s, began: began}, err
}

type timedRows struct {
	pgx.Rows
	watch *stopwatch
	began time.Time
}

func (r timedRows) Close() {
	r.Rows.Close()
	r.watch.mu.Lock()
	defer r.watch.mu.Unlock()
	r.watch.took = append(r.watch.took, time.Since(r.began))
}

// turnTracer counts the statements of a connection. withoutTurn counts the statements that begin or end while no caller
// has the connection's turn.
type turnTracer struct{ statements, withoutTurn atomic.Int64 }

func (t *turnTracer) look(conn *pgx.Conn) {
	t.statements.Add(1)
	if turn := turn.Of(conn); turn.TryTake() {
		turn.Pass()
		t.withoutTurn.Add(1)
	}
}

func (t *turnTracer) TraceQueryStart(ctx context.Context, conn *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	t.look(conn)
	return ctx
}

func (t *turnTracer) TraceQueryEnd(_ context.Context, conn *pgx.Conn, _ pgx.TraceQueryEndData) {
	t.look(conn)
}

// A sweeper and limiters on one connection never use it at the same time.
func TestSweeperOnASharedConnectionTakesTurns(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var tracer turnTracer
	pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = &tracer })
	pooled, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(pooled.Release)
	tracer.withoutTurn.Store(0) // drops the statements that opened the connection
	limiter := limitertest.New(t, pooled.Conn(), ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour},
	})
	for name, conn := range map[string]ratelimit.DBTX{"connection": pooled.Conn(), "pooled connection": pooled} {
		sweeper := newSweeper(t, conn, Config{Share: 1})
		before := tracer.statements.Load()
		runOnce(t, sweeper)
		require.Greater(t, tracer.statements.Load(), before, name)
		require.Zero(t, tracer.withoutTurn.Load(), name)

		errs := make([]error, 24)
		testkit.Together(len(errs), func(i int) {
			for range 10 {
				_, err1 := limiter.Allow(context.Background(), "key")
				_, err2 := sweeper.RunOnce(context.Background())
				errs[i] = errors.Join(errs[i], err1, err2)
			}
		})
		require.NoError(t, errors.Join(errs...), name)
	}
}

// If waiting does not fix an error, Run returns it. Run also logs the error, because a go statement drops what Run
// returns. The Logger defaults to slog.Default.
//
//nolint:paralleltest // it replaces slog.Default
func TestRunLogsWhyItEnds(t *testing.T) {
	db := pgtest.Empty(t)
	before := slog.Default()
	defer slog.SetDefault(before)
	var j testkit.Journal
	slog.SetDefault(j.JSONLogger())
	require.ErrorIs(t, newSweeper(t, db.Pool, Config{}).Run(t.Context()), ratelimit.ErrNotMigrated)
	require.ErrorIs(t, newSweeper(t, db.Pool, Config{Logger: slog.New(slog.DiscardHandler)}).Run(t.Context()),
		ratelimit.ErrNotMigrated)
	entries := j.Entries(t)
	require.Len(t, entries, 1)
	require.Equal(t, "ERROR", entries[0]["level"])
	require.Contains(t, entries[0]["msg"], "the sweeper has ended")
	require.Contains(t, entries[0]["error"], "not migrated")
}
