package bench

import (
	"fmt"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// oneCallerResult compares a single caller's decision with the shortest round trip to the same server.
type oneCallerResult struct {
	Decision  []float64 `json:"decision_p50_us"` // one figure for each round
	SelectOne []float64 `json:"select_1_p50_us"`
}

// oneCaller alternates decisions and SELECT 1 on the same pool, so that both run under the same conditions.
func (a *arena) oneCaller(plan plan) (result oneCallerResult) {
	a.b.Helper()
	w := plan.groups[0][0]
	w.far = false
	decide, ping := a.contender(slidingWindow, w), a.contender(selectOne, w)
	timed := func(take take, key string) time.Duration {
		begun := time.Now()
		_, err := take(a.ctx(), key)
		took := time.Since(begun)
		require.NoError(a.b, err)
		return took
	}
	for round := range plan.Rounds {
		a.progress("round %d of %d: one caller, in turn with SELECT 1", round+1, plan.Rounds)
		next := w.keys(uint64(round))(0)
		var decisions, pings []time.Duration
		for begun := time.Now(); time.Since(begun) < plan.WarmUp+plan.Measured; {
			measured := time.Since(begun) >= plan.WarmUp
			decision, ping := timed(decide.take, next()), timed(ping.take, "")
			decide.expected++
			if measured {
				decisions, pings = append(decisions, decision), append(pings, ping)
			}
		}
		slices.Sort(decisions)
		slices.Sort(pings)
		result.Decision = append(result.Decision, microseconds(testkit.Quantile(decisions, 0.5)))
		result.SelectOne = append(result.SelectOne, microseconds(testkit.Quantile(pings, 0.5)))
	}
	require.Equal(a.b, decide.expected, decide.taken())
	return result
}

// cachedDenialResult is the cost of denying a key whose denial is remembered.
type cachedDenialResult struct {
	Nanoseconds []float64 `json:"ns"` // one figure for each round
	Allocations float64   `json:"allocations"`
}

// cachedDenial does not use testing.Benchmark, because that would wait until the running benchmark ends.
func (a *arena) cachedDenial(plan plan) (result cachedDenialResult) {
	a.b.Helper()
	a.progress("a cached denial")
	limiter := limitertest.New(a.b, a.near, ratelimit.Config{
		Name: "cached", Policy: ratelimit.SlidingWindow{Limit: 1, Window: window},
	}, ratelimit.ClientConfig{Schema: a.migratedSchema(), Timeout: patience, DenialMaxAge: time.Hour})
	ctx := a.ctx()
	deny := func() {
		if !denies(ctx, limiter, "user:123") {
			a.b.Error("not denied")
		}
	}
	_, err := limiter.Allow(ctx, "user:123")
	require.NoError(a.b, err)
	deny()

	statements := a.near.Stat().AcquireCount()
	result.Allocations = testing.AllocsPerRun(1000, deny)
	for range plan.Rounds {
		// The figure is the median of many short runs, so a run that loses its CPU does not count.
		const calls = 1_000
		runs := make([]time.Duration, 1_000)
		for i := range runs {
			begun := time.Now()
			for range calls {
				deny()
			}
			runs[i] = time.Since(begun)
		}
		slices.Sort(runs)
		result.Nanoseconds = append(result.Nanoseconds, float64(testkit.Quantile(runs, 0.5).Nanoseconds())/calls)
	}
	require.Equal(a.b, statements, a.near.Stat().AcquireCount(), "the database was asked")
	return result
}

// memoryResult is the memory of limiters, in bytes.
type memoryResult struct {
	Idle       float64 `json:"idle_limiter"`
	Goroutines int     `json:"goroutines_of_idle_limiters"`
	DeniedKeys int     `json:"denied_keys"`
	Denied     float64 `json:"limiter_with_denied_keys"`
	LongKeys   int     `json:"denied_keys_of_512_bytes"`
	DeniedLong float64 `json:"limiter_with_denied_keys_of_512_bytes"`
}

func (a *arena) memory(plan plan) (result memoryResult) {
	a.b.Helper()
	a.progress("memory: %d idle limiters", plan.idleLimiters)
	schema := a.migratedSchema()
	pool := a.newPool(inSchema(schema)) // with ClientConfig.Schema, a client keeps its own copy of the statements
	limiter := func(name string, limit int64) *ratelimit.Limiter {
		return limitertest.New(a.b, pool, ratelimit.Config{
			Name: name, Policy: ratelimit.SlidingWindow{Limit: limit, Window: window},
		}, ratelimit.ClientConfig{Timeout: patience})
	}
	ask := func(limiter *ratelimit.Limiter, key string) ratelimit.Result {
		result, err := limiter.Allow(a.ctx(), key)
		require.NoError(a.b, err)
		return result
	}

	ask(
		limiter("first", ample),
		"user:123",
	) // opens a connection, whose memory for a statement belongs to none of the figures below
	idle := make([]*ratelimit.Limiter, plan.idleLimiters)
	before, goroutines := heap(), runtime.NumGoroutine()
	for i := range idle {
		idle[i] = limiter(fmt.Sprintf("idle-%d", i), ample)
		ask(idle[i], "user:123")
	}
	result.Idle = float64(heap()-before) / float64(len(idle))
	result.Goroutines = max(runtime.NumGoroutine()-goroutines, 0)

	denied := func(name string, data dataset) float64 {
		a.progress("memory: %d denied keys of %d bytes", data.size, len(data.key(data.size-1)))
		limiter := limiter(name, 1)
		a.fillBySQL(schema+".rate_limit_ephemeral", name, data)
		before := heap()
		const callers = 1000
		admitted := make([]bool, callers)
		errs := make([]error, callers)
		var asking sync.WaitGroup
		for i := range callers {
			asking.Go(func() {
				for j := i; j < data.size && errs[i] == nil && !admitted[i]; j += callers {
					var decision ratelimit.Result
					decision, errs[i] = limiter.Allow(a.ctx(), data.key(j))
					admitted[i] = decision.Allowed
				}
			})
		}
		asking.Wait()
		for i := range callers {
			require.NoError(a.b, errs[i])
			require.False(a.b, admitted[i])
		}
		grown := heap() - before
		runtime.KeepAlive(limiter)
		runtime.KeepAlive(data) // the figure in before includes the memory of data
		return float64(grown)
	}
	result.DeniedKeys = plan.deniedKeys
	result.Denied = denied("short", newDataset("", "user:", plan.deniedKeys, 1))
	result.LongKeys = plan.deniedKeys / 10
	result.DeniedLong = denied("long", newDataset("", strings.Repeat("k", 506), result.LongKeys, 1))
	runtime.KeepAlive(idle) // nothing frees the memory of idle while the denials are measured
	return result
}

// heap returns the heap in use after two garbage collections. The second one empties sync.Pools.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}
