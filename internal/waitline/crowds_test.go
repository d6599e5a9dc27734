package waitline_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// One statement serves many callers. Each window needs at most three statements, however many callers wait.
func TestThousandWaitersNeedFewStatements(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 100, Window: time.Second}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		w := limitertest.NewWaits(t)
		for who := range 1000 {
			w.Start(t.Context(), limiter, who, 1)
		}
		remaining := map[int64]int{}
		for _, e := range w.All(limiter) {
			require.NoError(t, e.Err)
			remaining[e.Result.Remaining]++
		}
		require.Len(t, remaining, 100) // each caller got its own Remaining
		require.EqualValues(t, 1000, db.Taken())
		require.LessOrEqual(t, db.Statements(), 3*10)
		require.Less(t, time.Since(w.Begin), 9*(time.Second+time.Second/50+10*time.Millisecond)) // the limit is used almost fully
	})

	limitertest.InBubble(
		t,
		ratelimit.TokenBucket{Capacity: 5, Refill: 10, Every: time.Second},
		func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
			w := limitertest.NewWaits(t)
			for who := range 1000 {
				w.Start(t.Context(), limiter, who, 1)
			}
			require.Len(t, w.All(limiter), 1000)
			require.LessOrEqual(t, db.Statements(), 2*1000)
			require.Less(
				t,
				time.Since(w.Begin),
				99600*time.Millisecond,
			) // no token that flowed in during a pause is lost
		},
	)
}

// Several processes that share a key admit as much together as one process alone.
func TestWaitersOfSeveralProcesses(t *testing.T) {
	t.Parallel()

	const limit, processes, each = 10, 4, 100
	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: limit, Window: time.Second}, func(t *testing.T, one *ratelimit.Limiter, db *limitertest.ModelDB) {
		var limiters []*ratelimit.Limiter
		w := limitertest.NewWaits(t)
		for process := range processes {
			config := one.Config()
			limiters = append(limiters, limitertest.New(t, db, config))
			for who := range each {
				w.Start(t.Context(), limiters[process], process, 1)
				_ = who
			}
		}
		ended := w.All(limiters...)
		require.EqualValues(t, processes*each, db.Taken())

		// By the database's time, no window exceeds the limit, and almost no time is lost.
		var at []time.Time
		for _, e := range ended {
			require.NoError(t, e.Err)
			at = append(at, e.Result.DecidedAt)
		}
		slices.SortFunc(at, time.Time.Compare)
		for i := limit; i < len(at); i += limit {
			require.GreaterOrEqual(t, at[i].Sub(at[i-limit]), time.Second)
		}
		require.Less(t, time.Since(w.Begin), (processes*each/limit-1)*(time.Second+time.Second/50+20*time.Millisecond))

		// Each process serves some of the first half of the callers.
		first := map[int]bool{}
		for _, e := range ended[:len(ended)/2] {
			first[e.Who] = true
		}
		require.Len(t, first, processes)
		require.LessOrEqual(t, db.Statements(), processes*3*processes*each/limit)
	})
}

// Random callers come, wait, give up and get cancelled, in two processes. Each process serves its callers in order. The
// units taken are those of the served callers, plus at most those of the callers who left. Nothing stays in the lines.
func TestRandomCrowds(t *testing.T) {
	t.Parallel()

	seed := limitertest.Seed(t)
	for round := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, round))
		policy := []ratelimit.Policy{
			ratelimit.FixedWindow{Limit: 10, Window: time.Second}, ratelimit.SlidingWindow{Limit: 10, Window: time.Second},
			ratelimit.TokenBucket{Capacity: 10, Refill: 7, Every: time.Second},
		}[r.IntN(3)]
		limitertest.InBubble(t, policy, func(t *testing.T, one *ratelimit.Limiter, db *limitertest.ModelDB) {
			two := limitertest.New(
				t,
				db,
				ratelimit.Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: r.IntN(2) == 0,
				},
			)
			limiters := []*ratelimit.Limiter{one, two}
			crowds := []*limitertest.Waits{limitertest.NewWaits(t), limitertest.NewWaits(t)}
			costs := map[int]int64{}
			var cancelled int64
			for who := range 120 {
				cost := []int64{1, 1, 1, 2, 3, 10}[r.IntN(6)]
				costs[who] = cost
				ctx, cancel := context.WithCancel(t.Context())
				switch r.IntN(4) {
				case 0:
					ctx, cancel = context.WithTimeout(t.Context(), time.Duration(r.Int64N(int64(10*time.Second))))
				case 1:
					until := time.Duration(r.Int64N(int64(5 * time.Second)))
					go func() {
						select {
						case <-time.After(until):
							cancel()
						case <-t.Context().Done():
						}
					}()
				}
				defer cancel()
				process := r.IntN(2)
				crowds[process].Add(ctx, limiters[process], who, cost)
				if r.IntN(3) == 0 {
					<-time.After(time.Duration(r.Int64N(int64(200 * time.Millisecond))))
				}
			}
			var told int64
			for process, crowd := range crowds {
				last := -1
				for _, e := range crowd.All(limiters[process]) {
					if e.Err != nil {
						cancelled += costs[e.Who]
						continue
					}
					told += costs[e.Who]
					require.True(t, e.Result.Allowed)
					require.Greater(t, e.Who, last, "%s=%d, round %d", modeltest.SeedVariable, seed, round)
					last = e.Who
				}
			}
			require.GreaterOrEqual(t, db.Taken(), told)
			require.LessOrEqual(t, db.Taken(), told+cancelled)
		})
	}
}

// 1000 callers of two processes wait on a real database, in real time. The admitted rate is that of the policy.
func TestThousandWaitersOnADatabase(t *testing.T) {
	t.Parallel()

	const limit, window = 100, 20 * time.Millisecond
	db := pgtest.New(t)
	for name, policy := range map[string]ratelimit.Policy{
		"fixed window": ratelimit.FixedWindow{Limit: limit, Window: window},
		"token bucket": ratelimit.TokenBucket{Capacity: limit, Refill: limit, Every: window},
	} {
		var limiters []*ratelimit.Limiter
		var asked []*limitertest.Statements
		for range 2 {
			pool, counted := limitertest.TracedPool(t, db)
			limiters, asked = append(
				limiters,
				limitertest.New(t, pool, ratelimit.Config{Name: name, Policy: policy}),
			), append(
				asked,
				counted,
			)
		}
		results, errs := make([]ratelimit.Result, 1000), make([]error, 1000)
		left := testkit.Offspring(t, func(context.Context) {
			testkit.Together(1000, func(i int) { results[i], errs[i] = limiters[i%2].Wait(t.Context(), "key") })
		})
		require.NoError(t, errors.Join(errs...))
		var at []time.Time
		for _, result := range results {
			require.True(t, result.Allowed)
			at = append(at, result.DecidedAt)
		}
		slices.SortFunc(at, time.Time.Compare)
		if name == "fixed window" {
			for i := 2 * limit; i < len(at); i++ {
				require.Greater(t, at[i].Sub(at[i-2*limit]), window)
			}
			require.GreaterOrEqual(t, at[999].Sub(at[0]), 9*window)
			require.Less(t, asked[0].Count()+asked[1].Count(), 500) // about 60: three for each window and process
		} else {
			for i := range at {
				for j := i + limit; j < len(at); j++ {
					require.GreaterOrEqual(t, at[j].Sub(at[i]), time.Duration(j-i+1-limit)*window/limit-time.Microsecond)
				}
			}
		}
		testkit.WaitUntil(t, func() bool { return left() == 0 })
		for _, limiter := range limiters {
			require.True(t, limitertest.Lines(limiter).Empty())
		}
	}
}
