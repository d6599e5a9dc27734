package bench

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// BenchmarkPolicies measures the server's cost of 50 processes with Policies, at rest and with 100 changes a second. It
// also measures how long it takes until all 50 processes know the last of 1,000 changes. Finally, it measures a change
// just after all listening connections were killed.
//
//	go test -run '^$' -bench '^BenchmarkPolicies$' -benchtime 1x ./bench
func BenchmarkPolicies(b *testing.B) {
	const processes, rate, changes, rest = 50, 100, 1000, 5 * time.Second
	settings := map[string]string{"autovacuum": "off", "max_connections": "300"}
	server, err := pgserver.Start(b.Context(), pgserver.Config{Fsync: true, Settings: settings})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, server.Close()) })
	a := &arena{b: b, server: server, url: server.URL()}
	a.admin, err = pgx.Connect(a.ctx(), server.URL())
	require.NoError(b, err)
	b.Cleanup(func() { _ = a.admin.Close(context.Background()) })
	pool := a.newPool(func(config *pgxpool.Config) { config.MaxConns = 4 })
	require.NoError(b, migrations.Up(a.ctx(), pool))
	b.ResetTimer()
	for b.Loop() {
		a.exec("DELETE FROM rate_limit_policy")
		ctx, stop := context.WithCancel(a.ctx())
		var all []*ratelimit.Policies
		var running sync.WaitGroup
		for range processes {
			p, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{Logger: slog.New(slog.DiscardHandler)})
			require.NoError(b, err)
			all = append(all, p)
			running.Go(func() { p.Run(ctx) })
		}
		everyone := func(is func(ratelimit.PoliciesStatus) bool) {
			for _, p := range all {
				testkit.WaitUntil(b, func() bool { return is(p.Status()) })
			}
		}
		everyone(func(s ratelimit.PoliciesStatus) bool { return s.Listening })

		before, began := cpuTime(a.postgresPIDs()...), time.Now()
		<-time.After(rest)
		resting := (cpuTime(a.postgresPIDs()...) - before).Seconds() / time.Since(began).Seconds()

		before, began = cpuTime(a.postgresPIDs()...), time.Now()
		ticker := time.NewTicker(time.Second / rate)
		for i := range changes {
			<-ticker.C
			a.exec("INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('api', $1, 'sliding 100/1m', 'test')",
				fmt.Sprint("customer:", i))
		}
		ticker.Stop()
		working := (cpuTime(a.postgresPIDs()...) - before).Seconds() / time.Since(began).Seconds()
		last := time.Now()
		everyone(func(s ratelimit.PoliciesStatus) bool { return s.Rows == changes })
		b.ReportMetric(time.Since(last).Seconds()*1e3, "ms-until-all-know")
		a.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()
			AND (query LIKE 'LISTEN%' OR query LIKE '%rate_limit_policies%')`)
		a.exec("DELETE FROM rate_limit_policy WHERE key = 'customer:0'")
		last = time.Now()
		everyone(func(s ratelimit.PoliciesStatus) bool { return s.Rows == changes-1 })
		b.ReportMetric(time.Since(last).Seconds()*1e3, "ms-until-all-know-after-a-kill")
		b.ReportMetric(resting*100, "%-of-a-core-at-rest")
		b.ReportMetric(working*100, "%-of-a-core-at-100-changes/s")
		stop()
		running.Wait()
	}
	b.ReportMetric(0, "ns/op")
}

// BenchmarkPoliciesLoad measures how long a process takes to read 100,000 rows. It also measures the reading of a
// million rows, of which the process may keep 200,000. It reports memory, and the slowest decision while reading.
//
//	go test -run '^$' -bench '^BenchmarkPoliciesLoad$' -benchtime 1x ./bench
func BenchmarkPoliciesLoad(b *testing.B) {
	server, err := pgserver.Start(b.Context(), pgserver.Config{Settings: map[string]string{"autovacuum": "off"}})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, server.Close()) })
	a := &arena{b: b, server: server, url: server.URL()}
	a.admin, err = pgx.Connect(a.ctx(), server.URL())
	require.NoError(b, err)
	b.Cleanup(func() { _ = a.admin.Close(context.Background()) })
	pool := a.newPool(nil)
	require.NoError(b, migrations.Up(a.ctx(), pool))
	a.exec("INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('api', 'free', 'off', 'test')")
	for _, rows := range []int{100_000, 1_000_000} {
		a.exec(`INSERT INTO rate_limit_policy (name, key, policy, comment)
			SELECT 'api', 'customer:' || i, 'sliding 100/1m', 'test' FROM generate_series((SELECT count(*) FROM rate_limit_policy), $1) AS i`,
			rows)
		b.Run(fmt.Sprint(rows), func(b *testing.B) {
			for b.Loop() {
				p, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{Logger: slog.New(slog.DiscardHandler)})
				require.NoError(b, err)
				limiter, err := ratelimit.New(pool, ratelimit.Config{
					Name: "api", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}, Policies: p,
				})
				require.NoError(b, err)
				before := heapInUse()
				ctx, stop := context.WithCancel(a.ctx())
				var running sync.WaitGroup
				began := time.Now()
				running.Go(func() { p.Run(ctx) })
				testkit.WaitUntil(b, func() bool { return p.Status().Rows > 0 })
				b.ReportMetric(time.Since(began).Seconds(), "s-to-load")
				// The process keeps the first answer until the next one arrives. The first answer has all rows, even
				// rows without room in the process. Age is 0 before the next answer.
				loaded := time.Now()
				testkit.WaitUntil(b, func() bool {
					age := p.Status().Age
					return age > 0 && age < time.Since(loaded)
				})
				held := p.Status()
				b.ReportMetric(float64(held.Rows), "rows-held")
				b.ReportMetric((heapInUse()-before)/float64(held.Rows), "bytes/row")

				// The process reads all rows again while decisions continue.
				slowest, n := time.Duration(0), 0
				a.exec("DELETE FROM rate_limit_policy_history")
				a.exec("UPDATE rate_limit_policy SET comment = 'again' WHERE key = 'free'")
				for until := time.Now().Add(4 * time.Second); time.Now().Before(until); n++ {
					began := time.Now()
					_, err := limiter.Allow(ctx, "free")
					require.NoError(b, err)
					slowest = max(slowest, time.Since(began))
				}
				b.ReportMetric(slowest.Seconds()*1e3, "ms-slowest-decision")
				stop()
				running.Wait()
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}

// heapInUse returns the bytes of the heap in use after a garbage collection.
func heapInUse() float64 {
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return float64(stats.HeapAlloc)
}
