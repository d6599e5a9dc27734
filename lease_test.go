package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestLeaseConfig(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	window := ratelimit.FixedWindow{Limit: 1, Window: time.Second}
	for _, c := range []struct {
		field  string
		db     ratelimit.DBTX
		lease  ratelimit.Lease
		policy ratelimit.Policy
	}{
		{"Config.Lease", pgtest.Connect(t, db), ratelimit.Lease{}, window},
		{"Config.Lease", db.Pool, ratelimit.Lease{}, ratelimit.SlidingLog{Limit: 1, Window: time.Second}},
		{"Config.Lease", db.Pool, ratelimit.Lease{}, ratelimit.All(window, ratelimit.SlidingLog{Limit: 1, Window: time.Second})},
		{"Config.Lease", db.Pool, ratelimit.Lease{}, ratelimit.All(window, ratelimit.Concurrency{Limit: 1})},
		{"Config.Lease.MaxShare", db.Pool, ratelimit.Lease{MaxShare: 0.11}, window},
		{"Config.Lease.MaxShare", db.Pool, ratelimit.Lease{MaxShare: -1}, window},
		{"Config.Lease.MaxShare", db.Pool, ratelimit.Lease{MaxShare: math.NaN()}, window},
		{"Config.Lease.MaxLength", db.Pool, ratelimit.Lease{MaxLength: time.Microsecond}, window},
		{"Config.Lease.MaxLength", db.Pool, ratelimit.Lease{MaxLength: -time.Second}, window},
	} {
		_, err := ratelimit.New(c.db, ratelimit.Config{Name: "api", Policy: c.policy, Lease: &c.lease})
		wrong, ok := errors.AsType[*ratelimit.ConfigError](err)
		require.True(t, ok, "%v", err)
		require.Equal(t, c.field, wrong.Field)
	}
	l, err := ratelimit.New(db.Pool, ratelimit.Config{Name: "api", Policy: window, Lease: &ratelimit.Lease{}})
	require.NoError(t, err)
	require.Equal(t, &ratelimit.Lease{MaxShare: 1.0 / 2048, MaxLength: 30 * time.Second}, l.Config().Lease)
}

func leasePolicies(limit int64) map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed":    ratelimit.FixedWindow{Limit: limit, Window: time.Hour},
		"sliding":  ratelimit.SlidingWindow{Limit: limit, Window: time.Hour},
		"bucket":   ratelimit.TokenBucket{Capacity: limit, Refill: 1, Every: 71 * 365 * 24 * time.Hour / 100_000},
		"calendar": limitertest.SlowCalendar(limit),
		"all":      ratelimit.All(ratelimit.FixedWindow{Limit: limit + 5, Window: time.Hour}, ratelimit.SlidingWindow{Limit: limit, Window: time.Hour}),
	}
}

// Several processes take from one key until nothing is left. Unused units of leases are given back, so together the
// processes get exactly the limit.
func TestLeasesAddUpToTheLimit(t *testing.T) {
	t.Parallel()
	const limit, processes, callers = 5_000, 4, 3
	db := pgtest.New(t)
	for name, policy := range leasePolicies(limit) {
		t.Run(name, func(t *testing.T) {
			var leased, admitted, taken, returned, stranded atomic.Int64
			observer := &ratelimit.Observer{
				Decision: func(e ratelimit.DecisionEvent) {
					if e.Result.Source == ratelimit.SourceLease {
						leased.Add(e.Cost)
					}
				},
				Lease: func(e ratelimit.LeaseEvent) {
					taken.Add(e.Taken)
					returned.Add(e.Returned)
					stranded.Add(e.Stranded)
				},
			}
			limiters := make([]*ratelimit.Limiter, processes)
			for i := range limiters {
				limiters[i] = limitertest.Of(t, limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{Observer: observer}), ratelimit.Config{
					Name: name, Policy: policy, Lease: &ratelimit.Lease{MaxShare: 1.0 / 64},
				})
			}
			takeAll := func() {
				var running sync.WaitGroup
				for _, l := range limiters {
					for c := range callers {
						running.Go(func() {
							for n := int64(1 + c); n > 0; {
								result, err := l.AllowN(context.Background(), "key", n)
								switch {
								case err != nil:
									t.Error(err)
									return
								case result.Allowed:
									admitted.Add(n)
								default:
									n--
								}
							}
						})
					}
				}
				running.Wait()
				for _, l := range limiters {
					require.NoError(t, limitertest.Client(l).ReturnLeases(context.Background()))
				}
			}
			takeAll()
			takeAll()
			require.EqualValues(t, limit, admitted.Load()+stranded.Load())
			require.Equal(t, taken.Load(), leased.Load()+returned.Load()+stranded.Load())
			require.Greater(t, leased.Load(), int64(limit/2))
		})
	}
}

func BenchmarkLease(b *testing.B) {
	db := pgtest.New(b)
	client, err := ratelimit.NewClient(db.Pool, ratelimit.ClientConfig{})
	require.NoError(b, err)
	l, err := client.Limiter(ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 1e9, Window: time.Hour}, Lease: &ratelimit.Lease{}})
	require.NoError(b, err)
	ctx := context.Background()
	for range 100 {
		_, err := l.Allow(ctx, "key")
		require.NoError(b, err)
	}
	for _, parallel := range []bool{false, true} {
		b.Run(fmt.Sprint("parallel=", parallel), func(b *testing.B) {
			b.ReportAllocs()
			ask := func() {
				if result, err := l.Allow(ctx, "key"); err != nil || !result.Allowed {
					b.Error(result, err)
				}
			}
			if parallel {
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						ask()
					}
				})
				return
			}
			for b.Loop() {
				ask()
			}
		})
	}
}
