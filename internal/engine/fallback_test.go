package engine_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
)

func newTestFallback(clock *limitertest.Clock) *engine.Fallback {
	return engine.NewFallback(clock.Now)
}

// decideBy decides a request for a key under one policy, by the fallback.
func decideBy(f *engine.Fallback, policy ratelimit.Policy, key string, n int64) (model.Decision, time.Time) {
	var r engine.Request
	r.Add(&engine.Space{Name: "test"}, limitertest.Model(policy), key, n, nil)
	f.Take(&r, limitertest.Model(policy).Rules)
	d := r.Parts[0].Decision
	at := d.DecidedAt
	d.DecidedAt = time.Time{}
	return d, at
}

// A limiter of several policies takes from all of them, or from none.
func TestFallbackOfSeveralPolicies(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		policy := ratelimit.All(ratelimit.FixedWindow{Limit: 30, Window: time.Second}, ratelimit.FixedWindow{Limit: 50, Window: time.Hour})
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: policy, OnFailure: ratelimit.FallbackLocal(0.1)})
		db.Set(limitertest.TurnedAway)
		ask := func(n int64) ratelimit.Result {
			t.Helper()
			result, err := l.AllowN(t.Context(), "key", n)
			require.NoError(t, err)
			require.Equal(t, ratelimit.SourceFallback, result.Source)
			require.Equal(t, time.Now(), result.DecidedAt)
			result = limitertest.Plain(result)
			result.DecidedAt = time.Time{}
			return result
		}
		require.Equal(
			t,
			ratelimit.Result{Allowed: true, Source: ratelimit.SourceFallback, Limit: 30, Remaining: 1, ResetAfter: time.Hour},
			ask(2),
		)
		require.Equal(
			t,
			ratelimit.Result{Source: ratelimit.SourceFallback, Limit: 30, Remaining: 1, RetryAfter: time.Second, ResetAfter: time.Hour},
			ask(2),
		)
		require.Equal(
			t,
			ratelimit.Result{Allowed: true, Source: ratelimit.SourceFallback, Limit: 30, Remaining: 1, ResetAfter: time.Hour},
			ask(0),
		)
		require.Equal(
			t,
			ratelimit.Result{Source: ratelimit.SourceFallback, Limit: 30, Remaining: 1, RetryAfter: time.Hour, ResetAfter: time.Hour},
			ask(4),
		)
		limitertest.Elapse(time.Second)
		require.Equal(
			t,
			ratelimit.Result{Allowed: true, Source: ratelimit.SourceFallback, Limit: 30, Remaining: 0, ResetAfter: time.Hour - time.Second},
			ask(3),
		)
		limitertest.Elapse(time.Second)
		require.Equal(
			t,
			ratelimit.Result{
				Source:     ratelimit.SourceFallback,
				Limit:      50,
				Remaining:  0,
				RetryAfter: time.Hour - 2*time.Second,
				ResetAfter: time.Hour - 2*time.Second,
			},
			ask(1),
		)
		f := limitertest.Engine(l).Fallback
		row := f.Hash(&engine.Part{Space: limitertest.Space(l), Name: "test", Key: "key"})
		require.Equal(
			t,
			int64(3),
			f.One(model.FixedWindow{Limit: 3, Window: time.Second}, row, 0, 0, time.Now().UnixMicro(), false).Remaining,
		)
	})
}

// The fallback decides as the model does, for each key and each algorithm.
func TestFallbackDecidesAsTheModel(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.SlidingWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.TokenBucket{Capacity: 5, Refill: 3, Every: 2 * time.Second},
	} {
		seed := rand.Uint64()
		random := rand.New(rand.NewPCG(seed, 0))
		clock := &limitertest.Clock{At: limitertest.T0}
		f := newTestFallback(clock)
		states := map[string]model.State{}
		for step := range 10_000 {
			key := string(rune('a' + random.IntN(10)))
			cost := random.Int64N(7)
			var want model.Decision
			states[key], want = limitertest.Rule(policy).Decide(states[key], clock.At.UnixMicro(), cost)
			got, now := decideBy(f, policy, key, cost)
			require.Equal(t, want, got, "step %d of seed %d", step, seed)
			require.Equal(t, clock.At, now)
			clock.At = clock.At.Add(time.Duration(random.Int64N(400_000)) * time.Microsecond)
		}
	}
}

// If a key is used under another algorithm, its state begins again, as in the database.
func TestFallbackKeepsAlgorithmsApart(t *testing.T) {
	t.Parallel()
	f := newTestFallback(&limitertest.Clock{At: limitertest.T0})
	_, _ = decideBy(f, ratelimit.FixedWindow{Limit: 5, Window: time.Hour}, "key", 5)
	d, _ := decideBy(f, ratelimit.FixedWindow{Limit: 7, Window: time.Hour}, "key", 0)
	require.Equal(t, int64(2), d.Remaining)
	d, _ = decideBy(f, ratelimit.TokenBucket{Capacity: 5, Refill: 1, Every: time.Hour}, "key", 1)
	require.Equal(t, int64(4), d.Remaining)
	require.Equal(t, engine.LocalSize(limitertest.Rule(limitertest.Hourly)), f.Used)
}

// A flood of keys uses bounded memory, however long the keys are. A flood of keys does not reset known keys. If the
// memory is full, new keys share one limit. Expired keys make room for new ones.
func TestFallbackIsBounded(t *testing.T) {
	t.Parallel()
	clock := &limitertest.Clock{At: limitertest.T0}
	f := newTestFallback(clock)
	policy := ratelimit.FixedWindow{Limit: 2, Window: time.Minute}
	maxLocal := engine.LocalMemory / engine.LocalSize(limitertest.Rule(policy))
	require.Equal(t, 65536, maxLocal)
	allowed := func(key string) bool {
		d, _ := decideBy(f, policy, key, 1)
		return d.Granted == 1
	}
	require.True(t, allowed("known"))
	require.True(t, allowed("known"))
	require.True(t, allowed("half"))
	filler := strings.Repeat("x", 490)
	admitted := 0
	for i := range 3 * maxLocal {
		if allowed(fmt.Sprint(filler, i)) {
			admitted++
		}
	}
	require.Equal(t, maxLocal-2+2, admitted)
	require.Len(t, f.States, maxLocal+1)
	require.False(t, allowed("known"))
	require.True(t, allowed("half"))
	require.False(t, allowed("half"))

	clock.At = clock.At.Add(time.Minute - time.Microsecond)
	require.False(t, allowed("new"))
	clock.At = clock.At.Add(time.Microsecond)
	require.True(t, allowed("new"), "from the share that is shared")
	require.True(t, allowed("newer"))
	require.False(t, allowed("new"), "it was looked for room a moment ago")
	require.Len(t, f.States, maxLocal+1)
	clock.At = clock.At.Add(time.Second)
	require.True(t, allowed("new"))
	require.True(t, allowed("new"))
	require.False(t, allowed("new"))
	require.True(t, allowed("newer"))
	require.Len(t, f.States, 3) // one of them is the shared state
	require.Equal(t, 3*engine.LocalSize(limitertest.Rule(policy)), f.Used)
}

// The memory of all states is bounded, whatever policies the callers of With use for a key.
func TestFallbackIsBoundedThroughWith(t *testing.T) {
	t.Parallel()
	clock := &limitertest.Clock{At: limitertest.T0}
	f := newTestFallback(clock)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	requireAccounted := func() {
		t.Helper()
		used := 0
		for _, known := range f.States {
			used += known.Size
			require.LessOrEqual(
				t,
				int(unsafe.Sizeof(uint64(0))+unsafe.Sizeof(known))+len(known.State.Log),
				known.Size,
				"seed %d",
				seed,
			)
		}
		require.Equal(t, used, f.Used, "seed %d", seed)
		require.LessOrEqual(t, used, engine.LocalMemory+engine.LocalSize(model.SlidingLog{Limit: model.MaxLogLimit}), "seed %d", seed)
	}
	policies := []ratelimit.Policy{
		limitertest.Hourly, ratelimit.SlidingLog{Limit: 1, Window: time.Minute}, ratelimit.SlidingLog{Limit: 50, Window: time.Hour},
		ratelimit.SlidingLog{Limit: model.MaxLogLimit, Window: time.Hour}, ratelimit.TokenBucket{Capacity: 5, Refill: 1, Every: time.Minute},
		ratelimit.CalendarWindow{Limit: 5, Unit: ratelimit.CalendarMinute, Zone: "Asia/Kolkata"},
	}
	for range 20_000 {
		_, _ = decideBy(f, policies[random.IntN(len(policies))], fmt.Sprint(random.IntN(5)), 1+random.Int64N(2))
		clock.At = clock.At.Add(time.Duration(random.IntN(1000)) * time.Millisecond)
	}
	requireAccounted()

	// Fill the memory with keys, and then use some of these keys under the largest policy.
	small, large := ratelimit.SlidingLog{Limit: 2, Window: time.Hour}, ratelimit.SlidingLog{Limit: model.MaxLogLimit, Window: time.Hour}
	for i := range engine.LocalMemory / engine.LocalSize(limitertest.Rule(small)) {
		_, _ = decideBy(f, small, fmt.Sprint("key ", i), 1)
		clock.At = clock.At.Add(time.Microsecond)
	}
	requireAccounted()
	for i := range 2000 {
		_, _ = decideBy(f, large, fmt.Sprint("key ", i), 1)
		clock.At = clock.At.Add(time.Microsecond)
	}
	requireAccounted()
	clock.At = clock.At.Add(2 * time.Hour)
	for i := range engine.LocalMemory / engine.LocalSize(limitertest.Rule(large)) {
		d, _ := decideBy(f, large, fmt.Sprint("key ", i), 1)
		require.EqualValues(t, model.MaxLogLimit-1, d.Remaining, "it has a state of its own, since the others have expired")
	}
	requireAccounted()
}

// The fallback uses the monotonic clock, so changes of the machine's clock do not matter.
func TestFallbackCountsElapsedTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := engine.NewFallback(nil)
		policy := ratelimit.FixedWindow{Limit: 1, Window: time.Minute}
		_, _ = decideBy(f, policy, "key", 1)
		limitertest.Elapse(time.Minute - time.Microsecond)
		d, _ := decideBy(f, policy, "key", 1)
		require.Equal(t, model.Decision{RetryAfter: 1, ResetAfter: 1, State: d.State, Taken: d.Taken}, d)
		limitertest.Elapse(time.Microsecond)
		d, _ = decideBy(f, policy, "key", 1)
		require.EqualValues(t, 1, d.Granted)
	})
}

func TestCostAboveTheShareIsDenied(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Set(limitertest.TurnedAway)
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FallbackLocal(0.1)})
		result, err := l.AllowN(t.Context(), "key", 11)
		require.NoError(t, err)
		require.Equal(
			t,
			ratelimit.Result{Source: ratelimit.SourceFallback, Limit: 100, Remaining: 10, RetryAfter: engine.BreakerPause, DecidedAt: time.Now()},
			result,
		)
		result, err = l.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		require.Equal(
			t,
			ratelimit.Result{Allowed: true, Source: ratelimit.SourceFallback, Limit: 100, ResetAfter: time.Hour, DecidedAt: time.Now()},
			result,
		)
	})
}

func TestShares(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		limit int64
		share float64
		want  int64
	}{
		{100, 1, 100}, {100, 0.29, 29}, {100, 0.57, 57}, {10, 0.25, 2}, {10, 0.29, 2}, {10, 0.1, 1}, {3, 1. / 3, 1}, {30, 1. / 3, 10},
		{10, 0.0001, 1}, {1, math.SmallestNonzeroFloat64, 1}, {7, math.Nextafter(1, 0), 7},
		{1 << 62, 1, 1 << 62}, {1<<62 - 1, 1, 1<<62 - 1}, {1 << 62, 0.5, 1 << 61},
	} {
		if c.limit < 1<<60 {
			require.Equal(t, c.want, engine.ShareOf(c.limit, c.share), "%v of %d", c.share, c.limit)
		} else {
			require.InEpsilon(t, c.want, engine.ShareOf(c.limit, c.share), 1e-11)
			require.LessOrEqual(t, engine.ShareOf(c.limit, c.share), c.limit)
		}
	}
	for limit := int64(1); limit <= 1000; limit++ {
		for n := int64(1); n <= 50; n++ {
			require.Equal(t, max(limit/n, 1), engine.ShareOf(limit, 1/float64(n)), "a %dth of %d", n, limit)
		}
	}
}

// A share of any policy is a valid policy within the exact range, and allows no more than the share in the long run.
func TestScaledPolicies(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.TokenBucket{Capacity: 100, Refill: 5, Every: 10 * time.Second}
	require.Equal(t, ratelimit.FixedWindow{Limit: 20, Window: time.Hour}, limitertest.Policy(engine.Scaled(limitertest.Rule(limitertest.Hourly).Numbers(), 0.2)))
	require.Equal(
		t,
		ratelimit.SlidingWindow{Limit: 20, Window: time.Hour},
		limitertest.Policy(engine.Scaled(limitertest.Rule(ratelimit.SlidingWindow{Limit: limitertest.Hourly.Limit, Window: time.Hour}).Numbers(), 0.2)),
	)
	require.Equal(
		t,
		ratelimit.TokenBucket{Capacity: 10, Refill: 5, Every: 100 * time.Second},
		limitertest.Policy(engine.Scaled(limitertest.Rule(bucket).Numbers(), 0.1)),
	)
	require.Equal(t, bucket, limitertest.Policy(engine.Scaled(limitertest.Rule(bucket).Numbers(), 1)))
	inRange := func(n algorithm.Numbers) error {
		_, err := ratelimit.ParsePolicy(n.String())
		return err
	}
	require.NoError(t, inRange(
		engine.Scaled(limitertest.Rule(ratelimit.TokenBucket{Capacity: 8914236150213484, Refill: 4, Every: time.Microsecond}).Numbers(), 0.237),
	))

	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 0))
	number := func() int64 { return 1 + random.Int64N(1<<random.IntN(63)) }
	valid := 0
	for valid < 20_000 {
		limit, span := number(), model.Duration(min(number(), model.MaxSpan))
		share := math.Exp(-40 * random.Float64() * random.Float64())
		for _, policy := range []ratelimit.Policy{
			ratelimit.FixedWindow{Limit: limit, Window: span}, ratelimit.SlidingWindow{Limit: limit, Window: span},
			ratelimit.TokenBucket{Capacity: limit, Refill: number(), Every: span}, ratelimit.CalendarWindow{Limit: limit, Unit: ratelimit.CalendarWeek, Zone: "Asia/Tokyo"},
		} {
			if inRange(limitertest.Rule(policy).Numbers()) != nil {
				continue
			}
			valid++
			numbers := engine.Scaled(limitertest.Rule(policy).Numbers(), share)
			require.NoError(t, inRange(numbers), "%v of %v, seed %d", share, policy, seed)
			scaled := limitertest.Policy(numbers)
			require.LessOrEqual(t, limitertest.Rule(scaled).Numbers().Limit, limitertest.Rule(policy).Numbers().Limit)
			if bucket, ok := scaled.(ratelimit.TokenBucket); ok && bucket.Every > time.Millisecond &&
				bucket.Every < model.Duration(model.MaxSpan/2) {
				of, _ := policy.(ratelimit.TokenBucket)
				require.LessOrEqual(t, share*float64(bucket.Every), float64(of.Every)*1.001)
				require.GreaterOrEqual(t, share*float64(bucket.Every), float64(of.Every)*0.999)
			}
		}
	}
}

// The comment of FallbackLocal promises this bound of memory.
//
//nolint:paralleltest // measures the memory of the process
func TestFallbackMemory(t *testing.T) {
	var before, after runtime.MemStats
	f := newTestFallback(&limitertest.Clock{At: limitertest.T0})
	runtime.GC()
	runtime.ReadMemStats(&before)
	for i := range engine.LocalMemory / engine.LocalSize(limitertest.Rule(limitertest.Hourly)) {
		_, _ = decideBy(f, limitertest.Hourly, fmt.Sprint("user:", i), 1)
	}
	runtime.GC()
	runtime.ReadMemStats(&after)
	require.Len(t, f.States, engine.LocalMemory/engine.LocalSize(limitertest.Rule(limitertest.Hourly)))
	t.Logf("%d bytes", after.HeapAlloc-before.HeapAlloc)
	require.Less(t, after.HeapAlloc-before.HeapAlloc, uint64(engine.LocalMemory))
}

func BenchmarkFallback(b *testing.B) {
	f := engine.NewFallback(nil)
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for i := 0; pb.Next(); i++ {
			_, _ = decideBy(f, limitertest.Hourly, "user:123", 1)
		}
	})
}
