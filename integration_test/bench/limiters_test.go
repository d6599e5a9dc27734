package bench

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// BenchmarkManyLimiters measures 20 limiters of a process, with one client for all limiters and with a client for each,
// under many callers and under few. The rounds of both variants alternate. For each figure it reports both variants,
// and the ratio of the first to the second:
//
//	go test -run '^$' -bench '^BenchmarkManyLimiters$' -benchtime 1x ./bench
func BenchmarkManyLimiters(b *testing.B) {
	settings := map[string]string{"autovacuum": "off"}
	server, err := pgserver.Start(b.Context(), pgserver.Config{Fsync: true, Settings: settings})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, server.Close()) })
	a := &arena{b: b, server: server, url: server.URL()}
	a.admin, err = pgx.Connect(a.ctx(), server.URL())
	require.NoError(b, err)
	b.Cleanup(func() { _ = a.admin.Close(context.Background()) })
	require.NoError(b, migrations.Up(a.ctx(), a.newPool(nil)))
	for _, callers := range []int{64, 3} {
		b.Run(fmt.Sprintf("%d-callers-each", callers), func(b *testing.B) { a.of(b).manyLimiters(b, callers) })
	}
}

func (a *arena) manyLimiters(b *testing.B, callers int) {
	b.Helper()
	const rounds = 3
	var all [2][]figures // with one client, and with a client for each limiter
	for b.Loop() {
		for round := range rounds {
			for i := range all {
				i := (i + round) % len(all)
				all[i] = append(all[i], a.limitersRound(i == 0, callers, uint64(round)))
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	one, many := median(all[0]), median(all[1])
	for name := range one {
		b.ReportMetric(one[name], name+"-one-client")
		b.ReportMetric(many[name], name+"-a-client-each")
		b.ReportMetric(one[name]/many[name], name+"-ratio")
	}
}

// limitersRound calls 20 limiters on a new pool. The pool has enough connections for all of them.
func (a *arena) limitersRound(oneClient bool, callers int, seed uint64) figures {
	a.b.Helper()
	const limiters, keys, warmUp, measured = 20, 10_000, 300 * time.Millisecond, time.Second
	pool := a.newPool(func(config *pgxpool.Config) { config.MaxConns = 3 * limiters })
	defer pool.Close()
	a.exec("TRUNCATE rate_limit_ephemeral")
	config := ratelimit.ClientConfig{Timeout: patience}
	shared, err := ratelimit.NewClient(pool, config)
	require.NoError(a.b, err)
	asks := make([]take, limiters)
	for i := range asks {
		limit := ratelimit.Config{Name: fmt.Sprint("limiter ", i), Policy: sliding.policy(ample)}
		var limiter *ratelimit.Limiter
		if oneClient {
			limiter = limitertest.Of(a.b, shared, limit)
		} else {
			limiter = limitertest.New(a.b, pool, limit, config)
		}
		asks[i] = func(ctx context.Context, key string) (bool, error) {
			result, err := limiter.Allow(ctx, key)
			return result.Allowed, err
		}
	}

	before := cpuTime(a.postgresPIDs()...)
	loads := make([]*load, limiters)
	for i, ask := range asks {
		loads[i] = startLoad(a.ctx(), ask, func(caller int) func() string {
			random := rand.New(rand.NewPCG(seed, uint64(i*callers+caller)))
			return func() string { return "user:" + strconv.Itoa(random.IntN(keys)) }
		}, loadOptions{callers: callers, timed: 16})
	}
	a.wait(warmUp)
	for _, l := range loads {
		l.measure()
	}
	begun := time.Now()
	a.wait(measured)
	for _, l := range loads {
		l.phase.Store(stopped) // stops all loads at once
	}
	elapsed := time.Since(begun).Seconds()
	var total, admitted, inTime int64
	var latencies []time.Duration
	for _, l := range loads {
		t, err := l.stop()
		require.NoError(a.b, err)
		total, admitted, inTime = total+t.total, admitted+t.admitted, inTime+t.measured
		latencies = append(latencies, t.latencies...)
	}
	slices.Sort(latencies)
	seen := figures{
		"decisions/s": float64(inTime) / elapsed,
		"p99-µs":      float64(testkit.Quantile(latencies, 0.99).Microseconds()),
		// The pool opens a new connection only if all open ones are in use, and keeps the new one.
		"connections":        float64(pool.Stat().TotalConns()),
		"server-µs/decision": float64((cpuTime(a.postgresPIDs()...) - before).Microseconds()) / float64(total),
	}
	require.Equal(a.b, total, admitted, "denied what it must admit")
	require.Equal(a.b, admitted, a.count("SELECT coalesce(sum(count), 0)::bigint FROM rate_limit_ephemeral"))
	if oneClient {
		require.LessOrEqual(a.b, seen["connections"], 3.0) // the third one is for held keys
	}
	return seen
}
