package ratelimit

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// leasePolicies are policies of a limit that is large enough to be leased from.
func leasePolicies(limit int64) map[string]Policy {
	return map[string]Policy{
		"fixed":    FixedWindow{Limit: limit, Window: time.Hour},
		"sliding":  SlidingWindow{Limit: limit, Window: time.Hour},
		"bucket":   TokenBucket{Capacity: limit, Refill: 1, Every: 71 * 365 * 24 * time.Hour / 100_000},
		"calendar": slowCalendar(limit),
		"all":      All(FixedWindow{Limit: limit + 5, Window: time.Hour}, SlidingWindow{Limit: limit, Window: time.Hour}),
	}
}

// Several processes take from one key until nothing is left. All that is left of leases comes back, so together they
// get the limit, to the unit.
func TestLeasesAddUpToTheLimit(t *testing.T) {
	t.Parallel()
	const limit, processes, callers = 20_000, 4, 3
	for name, policy := range leasePolicies(limit) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			var leased, admitted, taken, returned, stranded atomic.Int64
			observer := &Observer{
				Decision: func(e DecisionEvent) {
					if e.Result.Source == SourceLease {
						leased.Add(e.Cost)
					}
				},
				Lease: func(e LeaseEvent) {
					taken.Add(e.Taken)
					returned.Add(e.Returned)
					stranded.Add(e.Stranded)
				},
			}
			limiters := make([]*Limiter, processes)
			for i := range limiters {
				limiters[i] = newClient(t, db.Pool, ClientConfig{Observer: observer}).limiter(t, Config{
					Name: "api", Policy: policy, Lease: &Lease{MaxShare: 1.0 / 64},
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
					require.NoError(t, l.client.ReturnLeases(context.Background()))
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
	client, err := NewClient(db.Pool, ClientConfig{})
	require.NoError(b, err)
	l, err := client.Limiter(Config{Name: "api", Policy: FixedWindow{Limit: 1e9, Window: time.Hour}, Lease: &Lease{}})
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
