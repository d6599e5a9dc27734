package ratelimit

import (
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Many are served at once where there is room, and however many wait, it takes a handful of statements for each window.
func TestThousandWaitersNeedFewStatements(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 100, Window: time.Second}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		w := newWaits(t)
		for who := range 1000 {
			w.start(t.Context(), limiter, who, 1)
		}
		remaining := map[int64]int{}
		for _, e := range w.all(limiter) {
			require.NoError(t, e.err)
			remaining[e.result.Remaining]++
		}
		require.Len(t, remaining, 100) // each was told his own
		require.EqualValues(t, 1000, db.taken())
		require.LessOrEqual(t, db.statements(), 3*10)
		require.Less(t, time.Since(w.begin), 9*(time.Second+time.Second/50+10*time.Millisecond)) // the rate is used
	})

	inBubble(
		t,
		TokenBucket{Capacity: 5, Refill: 10, Every: time.Second},
		func(t *testing.T, limiter *Limiter, db *modelDB) {
			w := newWaits(t)
			for who := range 1000 {
				w.start(t.Context(), limiter, who, 1)
			}
			require.Len(t, w.all(limiter), 1000)
			require.LessOrEqual(t, db.statements(), 2*1000)
			require.Less(
				t,
				time.Since(w.begin),
				99600*time.Millisecond,
			) // tokens that flow in during a pause are not lost
		},
	)
}

// Processes that share a key admit together what one does, and each gets its part.
func TestWaitersOfSeveralProcesses(t *testing.T) {
	t.Parallel()

	const limit, processes, each = 10, 4, 100
	inBubble(t, FixedWindow{Limit: limit, Window: time.Second}, func(t *testing.T, one *Limiter, db *modelDB) {
		var limiters []*Limiter
		w := newWaits(t)
		for process := range processes {
			config := one.Config()
			limiters = append(limiters, newLimiter(t, db, config))
			for who := range each {
				w.start(t.Context(), limiters[process], process, 1)
				_ = who
			}
		}
		ended := w.all(limiters...)
		require.EqualValues(t, processes*each, db.taken())

		// In the database's time: no more than the limit in any window, and hardly a moment is lost.
		var at []time.Time
		for _, e := range ended {
			require.NoError(t, e.err)
			at = append(at, e.result.DecidedAt)
		}
		slices.SortFunc(at, time.Time.Compare)
		for i := limit; i < len(at); i += limit {
			require.GreaterOrEqual(t, at[i].Sub(at[i-limit]), time.Second)
		}
		require.Less(t, time.Since(w.begin), (processes*each/limit-1)*(time.Second+time.Second/50+20*time.Millisecond))

		// Nobody has to wait until another process has none left.
		first := map[int]bool{}
		for _, e := range ended[:len(ended)/2] {
			first[e.who] = true
		}
		require.Len(t, first, processes)
		require.LessOrEqual(t, db.statements(), processes*3*processes*each/limit)
	})
}

// Random crowds: costs, arrivals, deadlines and cancellations; several processes. Whoever is served is served in
// order, what was told is what was taken but for those who left, and nothing is left behind.
func TestRandomCrowds(t *testing.T) {
	t.Parallel()

	seed := testSeed(t)
	for round := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, round))
		policy := []single{
			FixedWindow{Limit: 10, Window: time.Second}, SlidingWindow{Limit: 10, Window: time.Second},
			TokenBucket{Capacity: 10, Refill: 7, Every: time.Second},
		}[r.IntN(3)]
		inBubble(t, policy, func(t *testing.T, one *Limiter, db *modelDB) {
			two := newLimiter(
				t,
				db,
				Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: r.IntN(2) == 0,
				},
			)
			limiters := []*Limiter{one, two}
			crowds := []*waits{newWaits(t), newWaits(t)}
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
				crowds[process].add(ctx, limiters[process], who, cost)
				if r.IntN(3) == 0 {
					<-time.After(time.Duration(r.Int64N(int64(200 * time.Millisecond))))
				}
			}
			var told int64
			for process, crowd := range crowds {
				last := -1
				for _, e := range crowd.all(limiters[process]) {
					if e.err != nil {
						cancelled += costs[e.who]
						continue
					}
					told += costs[e.who]
					require.True(t, e.result.Allowed)
					require.Greater(t, e.who, last, "%s=%d, round %d", seedVariable, seed, round)
					last = e.who
				}
			}
			require.GreaterOrEqual(t, db.taken(), told)
			require.LessOrEqual(t, db.taken(), told+cancelled)
		})
	}
}

// The same with a real database, in real time: two processes, and as many admitted in any time as the policy says.
func TestThousandWaitersOnADatabase(t *testing.T) {
	t.Parallel()

	const limit, window = 100, 20 * time.Millisecond
	db := pgtest.New(t)
	for name, policy := range map[string]single{
		"fixed window": FixedWindow{Limit: limit, Window: window},
		"token bucket": TokenBucket{Capacity: limit, Refill: limit, Every: window},
	} {
		var limiters []*Limiter
		var asked []*statements
		for range 2 {
			pool, counted := tracedPool(t, db)
			limiters, asked = append(
				limiters,
				newLimiter(t, pool, Config{Name: name, Policy: policy}),
			), append(
				asked,
				counted,
			)
		}
		results, errs := make([]Result, 1000), make([]error, 1000)
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
			require.Less(t, asked[0].count()+asked[1].count(), 500) // about 60: three for each window and process
		} else {
			for i := range at {
				for j := i + limit; j < len(at); j++ {
					require.GreaterOrEqual(t, at[j].Sub(at[i]), time.Duration(j-i+1-limit)*window/limit-time.Microsecond)
				}
			}
		}
		testkit.WaitUntil(t, func() bool { return left() == 0 })
		for _, limiter := range limiters {
			require.True(t, limiter.waiting.Empty())
		}
	}
}
