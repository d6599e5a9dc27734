package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Random calls of AllowAll, with new and known keys in any order, run together with other calls, batches and resets.
func TestRandomSetsDoNotDeadlock(t *testing.T) {
	t.Parallel()

	const workers, calls = 16, 20
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 4)
	errs := make([]error, workers)
	testkit.Together(workers, func(w int) {
		r := rand.New(rand.NewPCG(limitertest.Seed(t), uint64(w)))
		client, err := ratelimit.NewClient(pools[w%len(pools)], ratelimit.ClientConfig{MaxInFlight: 3})
		errs[w] = errors.Join(errs[w], err)
		var limiters []*ratelimit.Limiter
		for i := range 6 {
			policies := []ratelimit.Policy{
				ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year},
				ratelimit.SlidingWindow{Limit: 40, Window: limitertest.Year},
				ratelimit.TokenBucket{Capacity: 50, Refill: 1, Every: limitertest.Year},
				ratelimit.SlidingLog{Limit: 60, Window: limitertest.Year},
				limitertest.SlowCalendar(70),
			}
			l, err := client.Limiter(ratelimit.Config{Name: fmt.Sprint(i), Policy: policies[i%5], Durable: i%2 == 1})
			errs[w] = errors.Join(errs[w], err)
			limiters = append(limiters, l)
		}
		several, err := client.Limiter(
			ratelimit.Config{Name: "several", Policy: ratelimit.All(limiters[0].Config().Policy, limiters[1].Config().Policy)},
		)
		errs[w] = errors.Join(errs[w], err)
		limiters = append(limiters, several)
		tag := ""
		key := func() string {
			return tag + []string{"a", "bb", "c", "dd", "everybody", fmt.Sprint("new ", r.IntN(1000))}[r.IntN(6)]
		}
		for range calls {
			tag = fmt.Sprintf("{%d}", r.IntN(3)) // the keys of a set are on one shard
			l := limiters[r.IntN(len(limiters))]
			var err error
			switch r.IntN(10) {
			case 0:
				_, err = l.Allow(t.Context(), key())
			case 1:
				_, err = l.Refund(t.Context(), limitertest.Forged(l, key(), 1))
			case 2:
				_, err = l.Grant(t.Context(), key(), 1)
			case 3:
				err = decide(t.Context(), l,
					limitertest.Engine(l).Database.DB,
					[]modeltest.Element{
						{Key: tag + "dd", Cost: 1, Count: 1},
						{Key: tag + "a", Cost: 1, Count: 1},
						{Key: key(), Cost: 1, Count: 1},
					},
					ownTransaction(l),
				)
			case 4:
				err = l.Reset(t.Context(), key())
			default:
				var requests []ratelimit.Request
				for _, i := range r.Perm(len(limiters))[:1+r.IntN(len(limiters))] {
					requests = append(requests, limiters[i].Request(key(), 1))
				}
				_, err = ratelimit.AllowAll(t.Context(), requests...)
			}
			errs[w] = errors.Join(errs[w], err)
		}
	})
	require.NoError(t, errors.Join(errs...))
	require.Zero(t, deadlocks(t, db, pools...))
}

// A negative control: AllowAll deadlocks if rows are not locked in the lock order. In one variant, the function does
// not sort the rows. In another variant, the function treats any given order as the lock order.
func TestLockingSetsInTheOrderGivenDeadlocks(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for name, oldNew := range map[string][]string{
		"as it is":    nil,
		"not sorted":  {"_rate_limit_rows_in_lock_order", `(ORDER BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C")`, "(ORDER BY e.part)"},
		"not checked": {"_rate_limit_check", "in_order := in_order AND (", "in_order := in_order OR ("},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if oldNew != nil {
				pgtest.Rewrite(t, db.Pool, oldNew[0], oldNew[1:]...)
			}
			pool := limitertest.SmallPools(t, db, 1)[0]
			limiterA, limiterB, limiterC := limitertest.ThreeLimits(t, pool, 10, 10, 10)
			part := func(limiter *ratelimit.Limiter, key string) modeltest.Part {
				_, err := limiter.Allow(t.Context(), key) // makes the row
				require.NoError(t, err)
				return modeltest.Part{
					ID:      modeltest.RowID{Name: limiter.Config().Name, Key: key},
					Durable: limiter.Config().Durable,
					Policy:  limitertest.Model(limiter.Config().Policy).Rules[0],
					Cost:    1,
				}
			}
			a, b, c := part(limiterA, "x"), part(limiterB, "x"), part(limiterC, "m")
			ask := func(parts ...modeltest.Part) func() (any, error) { // in the order given; AllowAll would sort
				args := limitertest.AllArguments(limitertest.AllArrays([]modeltest.Request{{Parts: parts, Count: 1}})...)
				return testkit.Later(func() (any, error) { return pool.Exec(context.Background(), engine.Text("all", ""), args...) })
			}
			holder := limitertest.Hold(t, db, limiterC.Config(), "m")
			one := ask(a, c, b) // locks the row of a, and then waits for c
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			other := ask(b, a)
			if oldNew != nil {
				pgtest.WaitUntilBlocked(t, db.Pool, 2)
			}
			require.NoError(t, holder.Commit(t.Context()))
			_, err1 := one()
			_, err2 := other()
			if oldNew == nil {
				require.NoError(t, errors.Join(err1, err2))
				require.Zero(t, deadlocks(t, db, pool))
				return
			}
			requireDeadlock(t, errors.Join(err1, err2))
		})
	}
}
