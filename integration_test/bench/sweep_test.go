package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/integration_test/svg"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// BenchmarkSweep measures the cost of sweeping, and its effect on callers:
//
//	go test -run '^$' -bench '^BenchmarkSweep$' -benchtime 1x -timeout 60m .
//
// These environment variables make the benchmark smaller. BENCH_SWEEP_ROWS is the number of rows, half of them expired
// (2,000,000 by default). A table without expired rows has five times as many rows. BENCH_SWEEP_ROUND is the length of
// a round (10s by default).
func BenchmarkSweep(b *testing.B) {
	rows, round := 2_000_000, 10*time.Second
	var err error
	if text := os.Getenv("BENCH_SWEEP_ROWS"); text != "" {
		rows, err = strconv.Atoi(text)
		require.NoError(b, err)
	}
	if text := os.Getenv("BENCH_SWEEP_ROUND"); text != "" {
		round, err = time.ParseDuration(text)
		require.NoError(b, err)
	}

	// Autovacuum would affect only a part of the figures.
	settings := map[string]string{"shared_buffers": "256MB", "max_wal_size": "8GB", "autovacuum": "off"}
	server, err := pgserver.Start(b.Context(), pgserver.Config{Fsync: true, Settings: settings})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, server.Close()) })
	a := &arena{b: b, server: server, url: server.URL()}
	a.admin, err = pgx.Connect(a.ctx(), server.URL())
	require.NoError(b, err)
	b.Cleanup(func() { _ = a.admin.Close(context.Background()) })
	a.near = a.newPool(nil)
	require.NoError(b, migrations.Up(a.ctx(), a.near))

	for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
		for _, share := range []float64{1, 0.2} {
			title := fmt.Sprintf(
				"%s of %s rows in %s expired, share %v",
				svg.Thousands(rows/2),
				svg.Thousands(rows),
				table,
				share,
			)
			b.Run(title, func(b *testing.B) { a.of(b).sweepOnce(b, table, rows, 2, share) })
		}
	}
	for _, share := range []float64{1, 0.2} {
		title := fmt.Sprintf("none of %s rows expired, share %v", svg.Thousands(5*rows), share)
		b.Run(title, func(b *testing.B) { a.of(b).sweepOnce(b, "rate_limit_ephemeral", 5*rows, 0, share) })
	}
	for _, durable := range []bool{false, true} {
		title := fmt.Sprintf("Allow beside it, durable %v", durable)
		b.Run(title, func(b *testing.B) { a.of(b).allowBesideSweeps(b, rows, round, durable) })
	}
}

// of returns the arena for a part of the benchmark. An error fails only this part.
func (a *arena) of(b *testing.B) *arena {
	part := *a
	part.b = b
	return &part
}

// sweepOnce measures one pass over a table. The argument every is the number of rows per expired row; 0 means none.
func (a *arena) sweepOnce(b *testing.B, table string, rows, every int, share float64) {
	b.Helper()
	sweeper, err := cleanup.New(a.near, cleanup.Config{Share: share, MaxDuration: time.Hour})
	require.NoError(b, err)
	var wal, vacuumWAL, before, after, vacuumed int64
	var vacuum time.Duration
	var result cleanup.Result
	for b.Loop() {
		b.StopTimer()
		a.fillToSweep(table, rows, every)
		before = a.sizeOf(table)
		start := a.walPosition()
		b.StartTimer()
		result, err = sweeper.RunOnce(a.ctx())
		b.StopTimer()
		require.NoError(b, err)
		require.True(b, result.Complete)
		expired := 0
		if every > 0 {
			expired = rows / every
		}
		require.EqualValues(b, expired, result.Deleted)
		require.EqualValues(b, rows-expired, a.count("SELECT count(*) FROM "+table))
		wal, after = a.walPosition()-start, a.sizeOf(table)

		start = a.walPosition()
		began := time.Now()
		a.exec("VACUUM " + table)
		vacuum, vacuumWAL, vacuumed = time.Since(began), a.walPosition()-start, a.sizeOf(table)
		b.StartTimer()
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(result.Took.Seconds(), "s")
	b.ReportMetric(float64(result.Batches), "batches")
	b.ReportMetric(float64(wal)/1e6, "WAL-MB")
	b.ReportMetric(float64(before)/1e6, "MB-before")
	b.ReportMetric(float64(after)/1e6, "MB-swept")
	b.ReportMetric(float64(vacuumed)/1e6, "MB-vacuumed")
	b.ReportMetric(vacuum.Seconds(), "vacuum-s")
	b.ReportMetric(float64(vacuumWAL)/1e6, "vacuum-WAL-MB")
}

// fillToSweep empties both tables, and fills one of them.
func (a *arena) fillToSweep(table string, rows, every int) {
	a.b.Helper()
	a.exec("TRUNCATE rate_limit_ephemeral, rate_limit_durable, rate_limit_sweeper")
	a.exec(`
		INSERT INTO `+table+` (prefix, key, algorithm, count, window_start, expires_at)
		SELECT 'bench', 'user:' || i, 2, 1, clock,
			CASE WHEN $2 > 0 AND i % greatest($2, 1) = 0 THEN clock - 3600000000 ELSE clock + 86400000000 END
		FROM generate_series(1, $1::integer) AS i, (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock) AS c`,
		rows, every)
	a.exec("VACUUM " + table) // sets the hint bits, which the first reader would write otherwise
	a.exec("CHECKPOINT")
}

// sizeOf returns the size of a table and its index in bytes.
func (a *arena) sizeOf(table string) int64 {
	a.b.Helper()
	return a.count("SELECT pg_total_relation_size($1::text::regclass)", table)
}

func (a *arena) walPosition() int64 {
	a.b.Helper()
	return a.count("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
}

// allowBesideSweeps measures Allow in rounds, without and with a sweeper. The sweeper makes no pauses, and deletes rows
// as soon as they expire. Keys expire all the time. At the beginning of each round, half of the table's rows have
// expired.
func (a *arena) allowBesideSweeps(b *testing.B, rows int, round time.Duration, durable bool) {
	b.Helper()
	const callers, keys, rounds = 16, 100_000, 3
	table := "rate_limit_ephemeral"
	if durable {
		table = "rate_limit_durable"
	}
	limiter := limitertest.New(b, a.near, ratelimit.Config{
		Name: "beside", Policy: ratelimit.FixedWindow{Limit: ample, Window: 50 * time.Millisecond}, Durable: durable,
	}, ratelimit.ClientConfig{Timeout: patience})
	take := func(ctx context.Context, key string) (bool, error) {
		result, err := limiter.Allow(ctx, key)
		return result.Allowed, err
	}
	source := func(caller int) func() string {
		rng := rand.New(rand.NewPCG(1, uint64(caller)))
		return func() string { return "key:" + strconv.Itoa(rng.IntN(keys)) }
	}
	var all [2]tally
	var swept, passes int64
	for b.Loop() {
		for i := range 2 * rounds {
			a.fillToSweep(table, rows, 2)
			load := startLoad(a.ctx(), take, source, loadOptions{callers: callers, timed: 1})
			a.wait(round / 10)
			ctx, stop := context.WithCancel(a.ctx())
			done := make(chan error, 1)
			go func() {
				if i%2 == 0 {
					done <- nil
					return
				}
				n, d, err := a.sweepUntil(ctx)
				passes, swept = passes+n, swept+d
				done <- err
			}()
			load.measure()
			a.wait(round)
			t, err := load.stop()
			stop()
			require.NoError(b, err)
			require.NoError(b, <-done)
			all[i%2].measured += t.measured
			all[i%2].elapsed += t.elapsed
			all[i%2].latencies = append(all[i%2].latencies, t.latencies...)
		}
	}
	require.Positive(b, swept)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(float64(swept)/all[1].elapsed.Seconds(), "swept/s")
	b.ReportMetric(float64(passes), "passes")
	for i, name := range []string{"without", "with"} {
		slices.Sort(all[i].latencies)
		b.ReportMetric(all[i].perSecond(), "calls/s-"+name)
		for _, q := range []float64{0.5, 0.99} {
			b.ReportMetric(
				float64(testkit.Quantile(all[i].latencies, q).Microseconds()),
				fmt.Sprintf("p%v-µs-%s", 100*q, name),
			)
		}
	}
}

// sweepUntil makes passes until the context ends.
func (a *arena) sweepUntil(ctx context.Context) (passes, deleted int64, err error) {
	sweeper, err := cleanup.New(a.near, cleanup.Config{Share: 1, Test: ratelimit.TestConfig{
		// rate_limit_sweep keeps an expired row for a minute, so this sweeper's clock is a minute ahead.
		Now: func() time.Time { return time.Now().Add(time.Minute) },
	}})
	for ; err == nil && ctx.Err() == nil; passes++ {
		var result cleanup.Result
		result, err = sweeper.RunOnce(context.WithoutCancel(ctx))
		deleted += result.Deleted
	}
	return passes, deleted, err
}
