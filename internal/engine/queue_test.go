package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// fastPolicies returns policies with odd numbers, so that each decision has different results.
func fastPolicies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 100, Window: 7 * time.Second},
		"sliding window": ratelimit.SlidingWindow{Limit: 100, Window: 7 * time.Second},
		"token bucket":   ratelimit.TokenBucket{Capacity: 100, Refill: 3, Every: 7 * time.Second},
		"sliding log":    ratelimit.SlidingLog{Limit: 100, Window: 7 * time.Second},
		"calendar":       ratelimit.CalendarWindow{Limit: 100, Unit: ratelimit.CalendarMinute},
	}
}

func TestCoalescedCallsAreToldWhatCallsInARowAre(t *testing.T) {
	t.Parallel()

	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const keys, calls = 3, 130
			limiter := limitertest.New(
				t,
				pgtest.New(t).Pool,
				ratelimit.Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: true,
				},
				ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)},
			)

			for _, cost := range []int64{1, 7} {
				results, errs := make([]ratelimit.Result, keys*calls), make([]error, keys*calls)
				testkit.Together(keys*calls, func(i int) {
					results[i], errs[i] = limiter.AllowN(
						t.Context(),
						fmt.Sprintf("cost %d, key %d", cost, i/calls),
						cost,
					)
				})
				require.NoError(t, errors.Join(errs...))
				want := limitertest.Tally(limitertest.ModelResults(limitertest.Rule(policy), limitertest.T0, slices.Repeat([]int64{cost}, calls)...))
				for key := range keys {
					require.Equal(t, want, limitertest.Tally(results[key*calls:(key+1)*calls]))
				}
			}
		})
	}
}

func TestPeeksAreCoalesced(t *testing.T) {
	t.Parallel()

	policy := ratelimit.FixedWindow{Limit: 2, Window: time.Minute}
	limiter := limitertest.New(
		t,
		pgtest.New(t).Pool,
		ratelimit.Config{
			Name:          "test",
			Policy:        policy,
			NoDenialCache: true,
		},
		ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)},
	)
	for taken := range 3 {
		results, errs := make([]ratelimit.Result, 50), make([]error, 50)
		testkit.Together(50, func(i int) { results[i], errs[i] = limiter.Peek(t.Context(), "key") })
		require.NoError(t, errors.Join(errs...))
		want := limitertest.ModelResults(limitertest.Rule(policy), limitertest.T0, append(slices.Repeat([]int64{1}, taken), 0)...)[taken]
		require.Equal(t, map[ratelimit.Result]int{want: 50}, limitertest.Tally(results))

		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
}

func TestCallsOfOneBatchAreDecidedInOrderOfArrival(t *testing.T) {
	t.Parallel()

	seed := limitertest.Seed(t)
	for name, policy := range fastPolicies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limiter := limitertest.New(
				t,
				pgtest.New(t).Pool,
				ratelimit.Config{
					Name:          "test",
					Policy:        policy,
					NoDenialCache: true,
				},
				ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)},
			)
			r := rand.New(rand.NewPCG(seed, 0))
			for round := range 25 * limitertest.Rounds(t) {
				// The calls of a few keys are mixed. Several calls in a row have the same cost. Most costs fit, and
				// some never fit.
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
					calls[key] = requestsFor(limiter, name, costs[key]...)
					if r.IntN(2) == 0 {
						n := 1 + r.Int64N(50)
						_, err := limiter.Grant(t.Context(), name, n)
						require.NoError(t, err)
						states[key], _ = model.Grant(limitertest.Rule(policy), model.State{}, limitertest.T0.UnixMicro(), n)
					}
				}
				for waiting := slices.Clone(calls); len(waiting) > 0; {
					key := r.IntN(len(waiting))
					batch = append(batch, waiting[key][0])
					if waiting[key] = waiting[key][1:]; len(waiting[key]) == 0 {
						waiting = slices.Delete(waiting, key, key+1)
					}
				}

				send(limiter, batch)
				for key := range costs {
					results, errs := outcomes(calls[key])
					require.NoError(t, errors.Join(errs...))
					for i := range results {
						results[i] = limitertest.Plain(results[i])
					}
					require.Equal(
						t,
						limitertest.ModelResultsFrom(limitertest.Rule(policy), states[key], limitertest.T0, costs[key]...),
						results,
						"%s=%d, round %d: costs %v",
						modeltest.SeedVariable,
						seed,
						round,
						costs[key],
					)
				}
			}
		})
	}
}

func TestBoardTakesCallsInOrder(t *testing.T) {
	t.Parallel()

	limiter := limitertest.New(
		t,
		&pgxpool.Pool{},
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Second}},
		ratelimit.ClientConfig{MaxBatch: 3},
	)
	for key, cost := range []int64{1, 1, 1, 1, 0, 0, 2, 0, 1, 1, 1} {
		limitertest.Engine(limiter).Queues.First().Push(requestsFor(limiter, fmt.Sprint(key), cost)[0])
	}
	// Looks and takes are sent in separate statements, by turns. No statement has more than MaxBatch requests.
	for _, want := range []string{"0 1 2", "4 5 7", "3 6 8", "9 10", ""} {
		var keys []string
		for _, c := range limitertest.Engine(limiter).Queues.First().NextBatch(nil) {
			keys = append(keys, c.Parts[0].Key)
		}
		require.Equal(t, want, strings.Join(keys, " "))
	}
	require.Zero(t, limitertest.Engine(limiter).Queues.First().Waiting)
}

// Sets of AllowAll that share a limit can still share a statement.
func TestSetsAreCoalesced(t *testing.T) {
	t.Parallel()

	const calls = 200
	db := pgtest.New(t)
	pool, counted := limitertest.TracedPool(t, db)
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{MaxInFlight: 1})
	if pgtest.Shards() > 0 { // the client would learn of the shards during the test
		require.True(t, limitertest.EngineOf(client).Queues.Learn(pgtest.Shards()))
	}
	a := limitertest.Of(t, client, ratelimit.Config{Name: "address", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
	b := limitertest.Of(t, client,
		ratelimit.Config{Name: "user", Policy: ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: 24 * time.Hour}, Durable: true},
	)
	c := limitertest.Of(t, client, ratelimit.Config{Name: "all", Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}})
	holder := pgtest.Begin(t, db.Of("all"))
	pgtest.Exec(t, holder, "LOCK TABLE rate_limit_ephemeral")
	blocked := testkit.Later(func() (ratelimit.Result, error) { return a.Allow(context.Background(), "{all}blocked") })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	finished := make([]func() (ratelimit.Results, error), calls)
	for i := range calls {
		finished[i] = testkit.Later(func() (ratelimit.Results, error) {
			return ratelimit.AllowAll(
				context.Background(),
				a.Request(fmt.Sprint("{all}", i), 1),
				b.Request(fmt.Sprint("{all}", i), 1),
				c.Request("all", 1),
			)
		})
	}
	testkit.WaitUntil(t, func() bool { return inQueue(limitertest.Client(a)) == calls })
	require.NoError(t, holder.Commit(t.Context()))
	_, err := blocked()
	require.NoError(t, err)
	for _, call := range finished {
		results, err := call()
		require.NoError(t, err)
		require.True(t, results.Allowed)
	}
	require.EqualValues(t, calls, limitertest.Taken(t, db.Pool, c.Config(), "all"))
	require.Less(t, counted.Count(), calls) // usually 4, and more on a slow machine
}

func TestBoardTakesCallsOfOnePolicy(t *testing.T) {
	t.Parallel()

	free := limitertest.New(
		t,
		&pgxpool.Pool{},
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Second}},
		ratelimit.ClientConfig{MaxBatch: 3},
	)
	paid := limitertest.With(t, free, ratelimit.FixedWindow{Limit: 2, Window: time.Second})
	again := limitertest.With(t, free, ratelimit.FixedWindow{Limit: 1, Window: time.Second})
	other := limitertest.Under(free, ratelimit.SlidingWindow{Limit: 1, Window: time.Second})
	for key, by := range []*ratelimit.Limiter{free, paid, again, other, free, paid, free, other, again, paid, free} {
		limitertest.Engine(free).Queues.First().Push(requestsFor(by, fmt.Sprint(key), 1)[0])
	}
	for _, want := range []string{"0 2 4", "1 5 9", "3 7", "6 8 10", ""} {
		var keys []string
		for _, c := range limitertest.Engine(free).Queues.First().NextBatch(nil) {
			keys = append(keys, c.Parts[0].Key)
		}
		require.Equal(t, want, strings.Join(keys, " "))
	}
	require.Zero(t, limitertest.Engine(free).Queues.First().Waiting)
}
