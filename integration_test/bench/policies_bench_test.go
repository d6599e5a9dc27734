package bench

import (
	"context"
	"fmt"
	"log/slog"
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

// BenchmarkPolicies measures what it costs the server that 50 processes know the policies, at rest and while 100 of them
// change each second. It also tells how long the last change of 1,000 took until all 50 knew it.
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
		b.ReportMetric(resting*100, "%-of-a-core-at-rest")
		b.ReportMetric(working*100, "%-of-a-core-at-100-changes/s")
		stop()
		running.Wait()
	}
	b.ReportMetric(0, "ns/op")
}
