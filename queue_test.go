package ratelimit

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// modelResults are what calls of these costs for one key, one after the other at the same time, are to be told by
// the model.
func modelResults(p model.Rules, at time.Time, costs ...int64) []Result {
	return modelResultsFrom(p, model.State{}, at, costs...)
}

// modelResultsFrom are those that follow on a state.
func modelResultsFrom(p model.Rules, s model.State, at time.Time, costs ...int64) []Result {
	results := make([]Result, len(costs))
	for i, cost := range costs {
		var d model.Decision
		s, d = modeltest.Element{Cost: cost, Count: 1}.Decide(p, s, at.UnixMicro())
		results[i] = Result{
			Allowed:    d.Granted == 1 || cost == 0 && d.RetryAfter == 0,
			Limit:      p.Numbers().Limit,
			Remaining:  d.Remaining,
			RetryAfter: model.Duration(d.RetryAfter),
			ResetAfter: model.Duration(d.ResetAfter),
			DecidedAt:  at,
		}
	}
	return results
}

// utc makes results comparable: a time in another zone is another time.Time, and what was taken stands in no literal.
func utc(r Result) Result {
	return Result{
		Allowed: r.Allowed, Source: r.Source, Limit: r.Limit, Remaining: r.Remaining, RetryAfter: r.RetryAfter,
		ResetAfter: r.ResetAfter, DecidedAt: r.DecidedAt.UTC(), Shadow: r.Shadow,
	}
}

func tally(results []Result) map[Result]int {
	counts := map[Result]int{}
	for _, r := range results {
		counts[utc(r)]++
	}
	return counts
}

// fastPolicies have uneven numbers, so that a result shows which decision it was.
func fastPolicies() map[string]single {
	return map[string]single{
		"fixed window":   FixedWindow{Limit: 100, Window: 7 * time.Second},
		"sliding window": SlidingWindow{Limit: 100, Window: 7 * time.Second},
		"token bucket":   TokenBucket{Capacity: 100, Refill: 3, Every: 7 * time.Second},
		"sliding log":    SlidingLog{Limit: 100, Window: 7 * time.Second},
		"calendar":       CalendarWindow{Limit: 100, Unit: CalendarMinute},
	}
}

func TestCoalescedCallsAreToldWhatCallsInARowAre(t *testing.T) {
	t.Parallel()

	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const keys, calls = 3, 130
			limiter := newLimiter(
				t,
				pgtest.New(t).Pool,
				Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: true,
				},
				ClientConfig{Test: frozen(t0)},
			)

			for _, cost := range []int64{1, 7} {
				results, errs := make([]Result, keys*calls), make([]error, keys*calls)
				testkit.Together(keys*calls, func(i int) {
					results[i], errs[i] = limiter.AllowN(
						t.Context(),
						fmt.Sprintf("cost %d, key %d", cost, i/calls),
						cost,
					)
				})
				require.NoError(t, errors.Join(errs...))
				want := tally(modelResults(policy.one(), t0, slices.Repeat([]int64{cost}, calls)...))
				for key := range keys {
					require.Equal(t, want, tally(results[key*calls:(key+1)*calls]))
				}
			}
		})
	}
}

func TestPeeksAreCoalesced(t *testing.T) {
	t.Parallel()

	policy := FixedWindow{Limit: 2, Window: time.Minute}
	limiter := newLimiter(
		t,
		pgtest.New(t).Pool,
		Config{
			Name:          "test",
			Policy:        policy,
			NoDenialCache: true,
		},
		ClientConfig{Test: frozen(t0)},
	)
	for taken := range 3 {
		results, errs := make([]Result, 50), make([]error, 50)
		testkit.Together(50, func(i int) { results[i], errs[i] = limiter.Peek(t.Context(), "key") })
		require.NoError(t, errors.Join(errs...))
		want := modelResults(policy.one(), t0, append(slices.Repeat([]int64{1}, taken), 0)...)[taken]
		require.Equal(t, map[Result]int{want: 50}, tally(results))

		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
}

// outcomes waits for calls.
func outcomes(batch []*engine.Request) (results []Result, errs []error) {
	for _, c := range batch {
		<-c.Done
		var result Result
		if c.Err == nil {
			o := c.Outcome()
			result = resultOf(&o)
		}
		results, errs = append(results, result), append(errs, c.Err)
	}
	return results, errs
}

func TestCallsOfOneBatchAreDecidedInOrderOfArrival(t *testing.T) {
	t.Parallel()

	seed := testSeed(t)
	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := newLimiter(
				t,
				pgtest.New(t).Pool,
				Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: true,
				},
				ClientConfig{Test: frozen(t0)},
			)
			r := rand.New(rand.NewPCG(seed, 0))
			for round := range 100 {
				// A few keys whose calls are shuffled together. Costs come in runs, most of which fit, and some
				// that never will.
				costs := make([][]int64, 1+r.IntN(4))
				calls := make([][]*engine.Request, len(costs))
				states := make([]model.State, len(costs))
				var batch []*engine.Request
				for key := range costs {
					for range 1 + r.IntN(8) {
						cost := [...]int64{1, 1, 5, 40, -1, -50}[r.IntN(6)]
						costs[key] = append(costs[key], slices.Repeat([]int64{cost}, 1+r.IntN(4))...)
					}
					name := fmt.Sprint("round ", round, ", key ", key)
					calls[key] = limiter.requestsFor(name, costs[key]...)
					if r.IntN(2) == 0 {
						n := 1 + r.Int64N(50)
						_, err := limiter.Grant(t.Context(), name, n)
						require.NoError(t, err)
						states[key], _ = model.Grant(policy.one(), model.State{}, t0.UnixMicro(), n)
					}
				}
				for waiting := slices.Clone(calls); len(waiting) > 0; {
					key := r.IntN(len(waiting))
					batch = append(batch, waiting[key][0])
					if waiting[key] = waiting[key][1:]; len(waiting[key]) == 0 {
						waiting = slices.Delete(waiting, key, key+1)
					}
				}

				limiter.send(batch)
				for key := range costs {
					results, errs := outcomes(calls[key])
					require.NoError(t, errors.Join(errs...))
					for i := range results {
						results[i] = utc(results[i])
					}
					require.Equal(
						t,
						modelResultsFrom(policy.one(), states[key], t0, costs[key]...),
						results,
						"%s=%d, round %d: costs %v",
						seedVariable,
						seed,
						round,
						costs[key],
					)
				}
			}
		})
	}
}

func TestGroupMergesOnlyNeighboursOfAKey(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, &pgxpool.Pool{}, Config{Name: "test", Policy: hourly})
	batch := slices.Concat(
		limiter.requestsFor("a", 1, 1),
		limiter.requestsFor("b", 1),
		limiter.requestsFor("a", 1, 2),
		limiter.requestsFor("b", 1),
		limiter.requestsFor("a", 1),
		limiter.requestsFor("a", 2),
		limiter.requestsFor("b", -1, -1, 1),
	)
	type merged struct {
		key         string
		cost, count int64
	}
	var got []merged
	for _, e := range engine.MergeAlike(batch) {
		got = append(got, merged{e.Parts[0].Key, e.Parts[0].Cost, e.Count})
	}
	require.Equal(
		t,
		[]merged{
			{"a", 1, 3},
			{"a", 2, 1},
			{"a", 1, 1},
			{"a", 2, 1},
			{"b", 1, 2},
			{"b", -1, 1},
			{"b", -1, 1},
			{"b", 1, 1},
		},
		got,
	)
	require.Len(t, engine.MergeAlike(batch[:1]), 1)
	require.Empty(t, engine.MergeAlike(nil))
}

func TestBoardTakesCallsInOrder(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(
		t,
		&pgxpool.Pool{},
		Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: time.Second}},
		ClientConfig{MaxBatch: 3},
	)
	for key, cost := range []int64{1, 1, 1, 1, 0, 0, 2, 0, 1, 1, 1} {
		limiter.client.engine.Queues.First().Push(limiter.requestsFor(fmt.Sprint(key), cost)[0])
	}
	// Those that look and those that take leave apart, by turns, and no more than MaxBatch at once.
	for _, want := range []string{"0 1 2", "4 5 7", "3 6 8", "9 10", ""} {
		var keys []string
		for _, c := range limiter.client.engine.Queues.First().NextBatch(nil) {
			keys = append(keys, c.Parts[0].Key)
		}
		require.Equal(t, want, strings.Join(keys, " "))
	}
	require.Zero(t, limiter.client.engine.Queues.First().Waiting)
}
