package cleanup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// journal is a Logger's output.
type journal struct {
	mu     sync.Mutex
	buffer bytes.Buffer
}

func (j *journal) Write(p []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.buffer.Write(p)
}

// entries are the lines that were logged.
func (j *journal) entries(t *testing.T) (entries []map[string]any) {
	t.Helper()
	j.mu.Lock()
	defer j.mu.Unlock()
	for line := range bytes.Lines(j.buffer.Bytes()) {
		var entry map[string]any
		require.NoError(t, json.Unmarshal(line, &entry))
		entries = append(entries, entry)
	}
	return entries
}

func (j *journal) logger() *slog.Logger { return slog.New(slog.NewJSONHandler(j, nil)) }

func TestOneLineForEachPassThatDeletedSomething(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var j journal
	sweeper := newSweeper(t, db.Pool, Config{BatchSize: 4, Share: 1, Logger: j.logger()})
	runOnce(t, sweeper)
	require.Empty(t, j.entries(t))
	for pass := 1; pass <= 3; pass++ {
		fill(t, db.Pool, table(false), "a", 10, t0)
		runOnce(t, sweeper)
		runOnce(t, sweeper)
		entries := j.entries(t)
		require.Len(t, entries, pass)
		entry := entries[pass-1]
		require.Equal(t, "INFO", entry["level"])
		require.Equal(t, "ratelimit: swept", entry["msg"])
		require.EqualValues(t, 10, entry["deleted"])
		require.EqualValues(t, 3, entry["batches"])
		require.Equal(t, true, entry["complete"])
		require.Positive(t, entry["took"])
		require.NotContains(t, j.buffer.String(), "key 1")
	}
}

// failing fails the first calls.
type failing struct {
	ratelimit.DBTX
	mu   sync.Mutex
	errs []error
}

func (f *failing) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.errs) > 0 {
		err := f.errs[0]
		f.errs = f.errs[1:]
		return failedRow{err}
	}
	return f.DBTX.QueryRow(ctx, sql, args...)
}

type failedRow struct{ err error }

func (r failedRow) Scan(...any) error { return r.err }

// Run does a pass at once and then one in each interval, whatever becomes of the one before, until its context ends.
func TestRun(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db.Pool, table(false), "a", 5, t0)
	var j journal
	flaky := &failing{DBTX: db.Pool, errs: []error{errors.New("the network is down")}}
	sweeper := newSweeper(t, flaky, Config{Interval: time.Second, Logger: j.logger()})
	ctx, cancel := context.WithCancel(t.Context())
	wait := later(func() (any, error) { return nil, sweeper.Run(ctx) })

	waitUntil(t, func() bool { return len(j.entries(t)) == 2 })
	fill(t, db.Pool, table(false), "a", 5, t0)
	waitUntil(t, func() bool { return len(j.entries(t)) == 3 })
	require.Zero(t, rowCount(t, db.Pool, table(false)))
	cancel()
	_, err := wait()
	require.NoError(t, err)

	entries := j.entries(t)
	require.Len(t, entries, 3)
	require.Equal(t, "WARN", entries[0]["level"])
	require.Contains(t, fmt.Sprint(entries[0]["error"]), "the network is down")
	for _, entry := range entries[1:] {
		require.Equal(t, "INFO", entry["level"])
	}
}

// Whatever the number of processes, the tables are read once in an interval.
func TestSweepersShareTheInterval(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const interval = 10 * time.Minute
	pass := func(at time.Time) Result {
		least := interval
		result, err := newSweeper(t, db.Pool, Config{Interval: interval, Test: frozen(at)}).pass(t.Context(), &least)
		require.NoError(t, err)
		return result
	}
	require.True(t, pass(t0).Complete)
	for _, after := range []time.Duration{0, time.Microsecond, interval} {
		require.True(t, pass(t0.Add(after)).Skipped)
	}
	require.True(t, pass(t0.Add(interval+time.Microsecond)).Complete)
	require.True(t, pass(t0).Complete, "a clock that has stepped back stops nobody")

	// A pass that was cut off is gone on with at once.
	fill(t, db.Pool, table(true), "a", 3, t0)
	exec(t, db.Pool, "UPDATE rate_limit_sweeper SET durable = true")
	require.True(t, pass(t0).Complete)
	require.True(t, pass(t0).Skipped)

	// RunOnce is for whoever wants a pass now.
	require.True(t, runOnce(t, newSweeper(t, db.Pool, Config{Test: frozen(t0)})).Complete)
}

func TestRunLeavesTheIntervalToTheirPasses(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db.Pool, table(false), "a", 5, t0)
	ctx, cancel := context.WithCancel(t.Context())
	runs := make([]func() (any, error), 3)
	for i := range runs {
		sweeper := newSweeper(t, db.Pool, Config{})
		runs[i] = later(func() (any, error) { return nil, sweeper.Run(ctx) })
	}
	waitUntil(t, func() bool { return rowCount(t, db.Pool, table(false)) == 0 })
	completed := scalar[time.Time](t, db.Pool, "SELECT completed_at FROM rate_limit_sweeper")
	watched := &stopwatch{DBTX: db.Pool}
	late := newSweeper(t, watched, Config{})
	runs = append(runs, later(func() (any, error) { return nil, late.Run(ctx) }))
	waitUntil(t, func() bool { return len(watched.times()) == 1 })
	cancel()
	for _, wait := range runs {
		_, err := wait()
		require.NoError(t, err)
	}
	require.Equal(t, completed, scalar[time.Time](t, db.Pool, "SELECT completed_at FROM rate_limit_sweeper"))
}

// With a share of a tenth, each batch but the last is followed by a pause nine times as long.
func TestShareOfTime(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db.Pool, table(false), "a", 100, t0)
	watched := &stopwatch{DBTX: db.Pool}
	result := runOnce(t, newSweeper(t, watched, Config{BatchSize: 10, Share: 0.1}))
	require.True(t, result.Complete)
	times := watched.times()
	require.Len(t, times, result.Batches)
	var asked time.Duration
	for _, took := range times[:len(times)-1] {
		asked += took
	}
	require.Greater(t, result.Took, asked*99/10)
}

// stopwatch takes the time of each query.
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

func (s *stopwatch) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	began := time.Now()
	return timedRow{row: s.DBTX.QueryRow(ctx, sql, args...), watch: s, began: began}
}

type timedRow struct {
	row   pgx.Row
	watch *stopwatch
	began time.Time
}

func (r timedRow) Scan(targets ...any) error {
	err := r.row.Scan(targets...)
	r.watch.mu.Lock()
	defer r.watch.mu.Unlock()
	r.watch.took = append(r.watch.took, time.Since(r.began))
	return err
}
