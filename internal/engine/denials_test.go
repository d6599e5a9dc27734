package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

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

// testDenials is a cache of denials, used under one policy.
type testDenials struct {
	*engine.Denials
	policy model.Rules
	space  *engine.Space
}

func newTestDenials(policy ratelimit.Policy, maxAge time.Duration) (testDenials, *limitertest.Clock) {
	clock := &limitertest.Clock{At: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	return testDenials{engine.NewDenials(maxAge, clock.Now), limitertest.Rule(policy), &engine.Space{}}, clock
}

func (d testDenials) deny(key string, n int64) (ratelimit.Result, bool) {
	var o engine.Outcome
	ok := d.Lookup(d.space, d.policy, key, n, &o)
	return limitertest.ResultOf(&o), ok
}

func (d testDenials) changed(key string, since *engine.Changes) { d.Forget(d.space, key, since) }

func (d testDenials) remember(key string, denied model.Decision, asked, told time.Duration, since *engine.Changes) {
	d.Remember(&engine.Part{Space: d.space, Rules: d.policy, Key: key, Decision: denied}, asked, told, since)
}

// remembersDenial returns whether the limiter remembers a denial of a key for a cost of n.
func remembersDenial(l *ratelimit.Limiter, key string, n int64) bool {
	return limitertest.Engine(l).Denials.Lookup(limitertest.Space(l), limitertest.Model(l.Config().Policy).Rules[0], key, n, &engine.Outcome{})
}

// rememberDenied takes a key's whole limit at the clock's time, and lets d remember the denial that follows.
func rememberDenied(d testDenials, key string, clock *limitertest.Clock) {
	at := clock.At.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, d.policy.Numbers().Limit)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.At
	since := d.Snapshot()
	d.remember(key, denied, d.Elapsed(), d.Elapsed(), &since)
}

// Two limiters get the same requests, and only one of them remembers denials. There is only one process, its clock
// never goes back, and all resets are calls of the limiter. So the results of both limiters must be equal in every
// field.
func TestDenialsNeverChangeADecision(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	ctx := context.Background()
	pool := pgtest.New(t).Pool
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.SlidingWindow{Limit: 5, Window: 3 * time.Second},
		ratelimit.TokenBucket{Capacity: 5, Refill: 3, Every: 2 * time.Second},
		ratelimit.SlidingLog{Limit: 5, Window: 3 * time.Second},
		ratelimit.CalendarWindow{Limit: 5, Unit: ratelimit.CalendarMinute, Zone: "Asia/Kolkata"},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			clock := &limitertest.Clock{At: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
			config := ratelimit.Config{
				Name:   fmt.Sprintf("%T remembers", policy),
				Policy: policy,
			}
			clientConfig := ratelimit.ClientConfig{Timeout: time.Minute, Test: ratelimit.TestConfig{Now: clock.Now}}
			remembers := limitertest.New(t, pool, config, clientConfig)
			config.Name, config.NoDenialCache = fmt.Sprintf("%T asks", policy), true
			asks := limitertest.New(t, pool, config, clientConfig)

			local, last := 0, map[string][2]ratelimit.Result{}
			sources := map[bool]ratelimit.Source{false: ratelimit.SourceDatabase, true: ratelimit.SourceCachedDenial}
			for step := range 300 * limitertest.Rounds(t) {
				key := []string{"a", "b"}[random.IntN(2)]
				if random.IntN(40) == 0 {
					require.NoError(t, remembers.Reset(ctx, key))
					require.NoError(t, asks.Reset(ctx, key))
				}
				switch random.IntN(40) {
				case 0:
					for _, limiter := range []*ratelimit.Limiter{remembers, asks} {
						_, err := limiter.Grant(ctx, key, 2)
						require.NoError(t, err)
					}
				case 1:
					if limitertest.Receipt(last[key][0]).Left() > 0 {
						for i, limiter := range []*ratelimit.Limiter{remembers, asks} {
							_, err := limiter.Refund(ctx, last[key][i])
							require.NoError(t, err)
						}
					}
				}
				cost := 1 + random.Int64N(5)
				asked := policy
				if random.IntN(10) == 0 {
					asked = []ratelimit.Policy{
						ratelimit.FixedWindow{Limit: 6, Window: 2 * time.Second}, ratelimit.SlidingWindow{Limit: 7, Window: 4 * time.Second},
						ratelimit.TokenBucket{Capacity: 5, Refill: 4, Every: 2 * time.Second},
					}[random.IntN(3)]
				}
				remembered := remembersDenial(limitertest.Under(remembers, asked), key, cost)
				if remembered {
					local++
				}
				got, err := limitertest.Under(remembers, asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				want, err := limitertest.Under(asks, asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				require.Equal(t, sources[remembered], got.Source)
				if got.Allowed {
					last[key] = [2]ratelimit.Result{got, want}
				}
				got.Source = want.Source
				require.Equal(t, limitertest.Plain(want), limitertest.Plain(got), "step %d of seed %d, cost %d", step, seed, cost)
				clock.At = clock.At.Add(time.Duration(random.Int64N(400_000)) * time.Microsecond)
			}
			require.Greater(t, local, 20*limitertest.Rounds(t), "hardly a call was decided locally")
		})
	}
}

func TestDenialHoldsUntilItsRetryTimeAndForLargerCosts(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: 100 * time.Millisecond}, time.Minute)
	rememberDenied(d, "key", clock)

	result, ok := d.deny("key", 1)
	require.True(t, ok)
	require.Equal(t, 100*time.Millisecond, result.RetryAfter)
	result, ok = d.deny("key", 4)
	require.True(t, ok)
	require.Equal(t, 400*time.Millisecond, result.RetryAfter)

	clock.At = clock.At.Add(100*time.Millisecond - time.Microsecond)
	_, ok = d.deny("key", 1)
	require.True(t, ok)
	clock.At = clock.At.Add(time.Microsecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok, "1 may fit now")
	_, ok = d.deny("key", 2)
	require.True(t, ok, "2 cannot fit yet")
}

func TestDenialIsForgottenAtItsMaxAge(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	rememberDenied(d, "key", clock)
	clock.At = clock.At.Add(time.Second - time.Microsecond)
	_, ok := d.deny("key", 1)
	require.True(t, ok)
	clock.At = clock.At.Add(time.Microsecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

func TestDenialIsNotTrustedWhenTheLocalClockHasGoneBack(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	rememberDenied(d, "key", clock)
	clock.At = clock.At.Add(-time.Microsecond)
	_, ok := d.deny("key", 1)
	require.False(t, ok)
}

// The database decided at some time between asked and told. So the remembered denial must end no later than the real
// denial, and RetryAfter and ResetAfter must not be too short.
func TestDenialAllowsForTheTimeThatTheStatementTook(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Second}, time.Minute)
	at := clock.At.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, 1)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.At
	asked, since := d.Elapsed(), d.Snapshot()
	clock.At = clock.At.Add(10 * time.Millisecond)
	d.remember("key", denied, asked, d.Elapsed(), &since)

	result, ok := d.deny("key", 1)
	require.True(t, ok)
	require.Equal(t, time.Second, result.RetryAfter)
	require.Equal(t, at, result.DecidedAt.UnixMicro())
	clock.At = clock.At.Add(990 * time.Millisecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// For every cost, the numbers of a remembered denial are those of the model at the denial's DecidedAt.
func TestCachedDenialTellsTheTruthAtItsTime(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 1000, Window: time.Second},
		ratelimit.SlidingWindow{Limit: 1000, Window: time.Second},
		ratelimit.TokenBucket{Capacity: 1000, Refill: 1000, Every: time.Second},
		ratelimit.SlidingLog{Limit: 1000, Window: time.Second},
		ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMinute},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			elapse := func(clock *limitertest.Clock, most time.Duration) {
				clock.At = clock.At.Add(time.Duration(random.Int64N(int64(most/time.Microsecond))) * time.Microsecond)
			}
			told := 0
			for range 2000 * limitertest.Rounds(t) {
				d, clock := newTestDenials(policy, time.Minute)
				var taken model.State
				for range 4 {
					elapse(clock, 500*time.Millisecond)
					_, left := limitertest.Rule(policy).Decide(taken, clock.At.UnixMicro(), 0)
					taken, _ = limitertest.Rule(policy).Decide(
						taken,
						clock.At.UnixMicro(),
						left.Remaining-random.Int64N(left.Remaining+1)/2,
					)
				}
				asked, since := d.Elapsed(), d.Snapshot()
				elapse(clock, 200*time.Millisecond)
				denied := model.Decision{State: taken, DecidedAt: clock.At}
				elapse(clock, 200*time.Millisecond)
				d.remember("key", denied, asked, d.Elapsed(), &since)
				for range 4 {
					elapse(clock, 200*time.Millisecond)
					cost := 1 + random.Int64N(1000)
					got, ok := d.deny("key", cost)
					if !ok {
						continue
					}
					told++
					_, want := limitertest.Rule(policy).Decide(taken, got.DecidedAt.UnixMicro(), cost)
					require.Zero(t, want.Granted, "seed %d", seed)
					require.Equal(t, want.Remaining, got.Remaining, "seed %d, cost %d", seed, cost)
					require.Equal(t, model.Duration(want.RetryAfter), got.RetryAfter, "seed %d, cost %d", seed, cost)
					require.Equal(t, model.Duration(want.ResetAfter), got.ResetAfter, "seed %d, cost %d", seed, cost)
					_, now := limitertest.Rule(policy).Decide(taken, clock.At.UnixMicro(), cost)
					require.Zero(t, now.Granted, "seed %d: it fits by now", seed)
				}
			}
			require.Greater(t, told, 1000, "hardly a denial was told")
		})
	}
}

func TestDenialDecidedBeforeAResetIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	before := d.Snapshot()
	at := clock.At.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, 1)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.At
	d.changed("key", nil)
	d.remember("key", denied, d.Elapsed(), d.Elapsed(), &before)
	_, ok := d.deny("key", 1)
	require.False(t, ok)

	rememberDenied(d, "key", clock)
	_, ok = d.deny("key", 1)
	require.True(t, ok)
	d.changed("key", nil)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// Two statements are under way. If a denial arrives after the answer to a change of the key, the denial is not
// remembered, because it may have been decided before the change. A denial includes the grants of its own statement.
// Changes of most other keys do not matter.
func TestDenialThatComesBackLateIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, time.Second)
	at := clock.At.UnixMicro()
	taken, _ := d.policy.Decide(model.State{}, at, 10)
	_, denied := d.policy.Decide(taken, at, 1)
	denied.DecidedAt = clock.At
	remembered := func(since engine.Changes) bool {
		d.remember("key", denied, d.Elapsed(), d.Elapsed(), &since)
		_, ok := d.deny("key", 1)
		return ok
	}

	late := d.Snapshot()
	d.changed("key", nil)
	require.False(t, remembered(late))
	own := d.Snapshot()
	d.changed("key", &own)
	require.True(t, remembered(own), "10 of 64 were granted, and 54 were not")
	d.changed("key", nil)
	require.False(t, remembered(own))

	others := 0
	for i := range 1000 {
		since := d.Snapshot()
		d.changed(fmt.Sprint("other ", i), nil)
		if !remembered(since) {
			others++
		}
	}
	require.Less(t, others, 50, "of which one in %d is to be expected", len(engine.Changes{}.Of))
}

// If only the last of several merged requests are denied, their denial is remembered.
func TestDenialOfSomeIsRemembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := ratelimit.FixedWindow{Limit: 10, Window: time.Hour}
		l := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "test", Policy: policy})
		elements := []modeltest.Element{{Key: "key", Cost: 1, Count: 64}}
		require.NoError(t, decideAndRemember(t.Context(), l, elements))
		require.Equal(t, int64(10), elements[0].Decision.Granted)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceCachedDenial, result.Source)
	})
}

// Without a denial, the cache of a limiter uses no memory. After all denials are forgotten, it uses a kilobyte.
func TestDenialsOfAnIdleLimiterAreSmall(t *testing.T) {
	t.Parallel()
	d, _ := newTestDenials(limitertest.Hourly, time.Second)
	_, ok := d.deny("key", 1)
	require.False(t, ok)
	d.changed("key", nil)
	_ = d.Snapshot()
	require.Nil(t, d.Stripes.Load())
	require.LessOrEqual(t, unsafe.Sizeof([engine.DenialStripes]engine.DenialStripe{}), uintptr(1024))
}

// When the first denial arrives, there are no stripes yet to count changes.
func TestFirstDenial(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		meanwhile  func(d testDenials, since *engine.Changes)
		remembered bool
	}{
		"nothing happens":            {func(testDenials, *engine.Changes) {}, true},
		"its own statement grants":   {func(d testDenials, since *engine.Changes) { d.changed("key", since) }, true},
		"another grants":             {func(d testDenials, _ *engine.Changes) { d.changed("key", nil) }, false},
		"another grants a neighbour": {func(d testDenials, _ *engine.Changes) { d.changed("other key", nil) }, false},
		"another is denied, and the key is granted": {func(d testDenials, _ *engine.Changes) {
			rememberDenied(d, "other key", &limitertest.Clock{At: limitertest.T0})
			d.changed("key", nil)
		}, false},
		"another is denied, and it is granted itself": {func(d testDenials, since *engine.Changes) {
			rememberDenied(d, "other key", &limitertest.Clock{At: limitertest.T0})
			d.changed("key", since)
		}, true},
	} {
		d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
		s, _ := d.policy.Decide(model.State{}, clock.At.UnixMicro(), 1)
		_, denied := d.policy.Decide(s, clock.At.UnixMicro(), 1)
		denied.DecidedAt = clock.At
		since := d.Snapshot()
		c.meanwhile(d, &since)
		d.remember("key", denied, d.Elapsed(), d.Elapsed(), &since)
		_, ok := d.deny("key", 1)
		require.Equal(t, c.remembered, ok, name)
	}
}

// Denials get older even if the clock shows the zero time at New and is set later. New does not read the clock.
func TestDenialsAgeThoughTheClockBeganAtZero(t *testing.T) {
	t.Parallel()
	clock := &limitertest.Clock{}
	read := 0
	now := func() time.Time { read++; return clock.Now() }
	l := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{
		Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FallbackLocal(0.5),
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now}})
	require.Zero(t, read)
	clock.At = limitertest.T0
	d := testDenials{limitertest.Engine(l).Denials, limitertest.Rule(limitertest.Hourly), limitertest.Space(l)}
	rememberDenied(d, "key", clock)
	_, ok := d.deny("key", 1)
	require.True(t, ok)
	clock.At = clock.At.Add(time.Second)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// An attacker with a million keys cannot make the cache of denials larger than its bound.
func TestDenialsStayBounded(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	for i := range 1_000_000 {
		rememberDenied(d, fmt.Sprint("key ", i), clock)
		clock.At = clock.At.Add(5 * time.Microsecond) // five seconds for all iterations together
	}
	remembered := 0
	stripes := d.Stripes.Load()
	for i := range stripes {
		remembered += len(stripes[i].Young) + len(stripes[i].Old)
	}
	require.LessOrEqual(t, remembered, 2*engine.MaxDenials)
	require.Greater(t, remembered, engine.MaxDenials/2)
}

//nolint:paralleltest // AllocsPerRun counts all goroutines' allocations
func TestCachedDenialNeedsNoMemory(t *testing.T) {
	l := deniedLimiter(t, ratelimit.SlidingWindow{Limit: 10, Window: time.Hour}, nil)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			t.Error("not denied")
		}
	}))
}

// deniedLimiter returns a limiter that remembers a denial of user:123, and has no database.
func deniedLimiter(t testing.TB, policy ratelimit.Policy, observer *ratelimit.Observer) *ratelimit.Limiter {
	l := limitertest.New(t, &pgxpool.Pool{}, ratelimit.Config{Name: "test", Policy: policy},
		ratelimit.ClientConfig{DenialMaxAge: time.Hour, Observer: observer})
	rememberDenied(testDenials{limitertest.Engine(l).Denials, limitertest.Rule(policy), limitertest.Space(l)}, "user:123", &limitertest.Clock{At: time.Now()})
	return l
}

func BenchmarkCachedDenial(b *testing.B) {
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 10, Window: time.Hour},
		ratelimit.SlidingWindow{Limit: 10, Window: time.Hour},
		ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour},
		ratelimit.SlidingLog{Limit: 10, Window: time.Hour},
		ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarDay},
	} {
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			l := deniedLimiter(b, policy, nil)
			b.ReportAllocs()
			for b.Loop() {
				if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
					b.Fatal("not denied")
				}
			}
		})
		b.Run(fmt.Sprintf("%T/parallel", policy), func(b *testing.B) {
			l := deniedLimiter(b, policy, nil)
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
						b.Error("not denied")
					}
				}
			})
		})
	}
}

// The limiters of a client share one cache of denials. Limiters of the same name and table use each other's denials, and
// no others.
func TestDenialsOfLimitersStayApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := ratelimit.FixedWindow{Limit: 1, Window: time.Hour}
		db := limitertest.NewModelDB()
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
		limiters := []*ratelimit.Limiter{
			limitertest.Of(t, client, ratelimit.Config{Name: "a", Policy: policy}), limitertest.Of(t, client, ratelimit.Config{Name: "b", Policy: policy}),
			limitertest.Of(t, client, ratelimit.Config{Name: "a", Policy: policy, Durable: true}),
		}
		ask := func(l *ratelimit.Limiter, allowed bool, source ratelimit.Source) {
			t.Helper()
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, allowed, result.Allowed)
			require.Equal(t, source, result.Source)
		}
		for _, l := range limiters {
			ask(l, true, ratelimit.SourceDatabase)
			ask(l, false, ratelimit.SourceDatabase)
			ask(l, false, ratelimit.SourceCachedDenial)
		}
		for i, l := range limiters {
			_, err := l.Grant(t.Context(), "key", 1)
			require.NoError(t, err)
			for j, other := range limiters {
				require.Equal(t, i != j, remembersDenial(other, "key", 1))
			}
			ask(l, true, ratelimit.SourceDatabase)
			ask(l, false, ratelimit.SourceDatabase)
		}
		again := limitertest.Of(t, client, limiters[0].Config()) // another limiter with the same config
		ask(again, false, ratelimit.SourceCachedDenial)
		_, err := again.Grant(t.Context(), "key", 1)
		require.NoError(t, err)
		ask(limiters[0], true, ratelimit.SourceDatabase)
	})
}

// If a key gets units while a denial is under way, the denial is not remembered, even if it is the first denial.
func TestDenialsOnTheirWayAreForgotten(t *testing.T) {
	t.Parallel()

	for _, isFirst := range []bool{true, false} {
		for _, told := range []bool{true, false} {
			d, clock := newTestDenials(ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, time.Hour)
			if !isFirst {
				rememberDenied(d, "other", clock)
			}
			since := d.Snapshot()
			if told {
				d.ForgetIf(func(k engine.DenialKey) bool { return k.Key == "key" })
			}
			taken, _ := d.policy.Decide(model.State{}, clock.At.UnixMicro(), 1)
			_, denied := d.policy.Decide(taken, clock.At.UnixMicro(), 1)
			denied.DecidedAt = clock.At
			d.remember("key", denied, d.Elapsed(), d.Elapsed(), &since)
			_, remembered := d.deny("key", 1)
			require.Equal(t, told, !remembered)
			_, remembered = d.deny("other", 1)
			require.Equal(t, !isFirst, remembered)
		}
	}
}

func TestWaitersUnderAnotherPolicyStandInTheirOwnLine(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, paid *ratelimit.Limiter, _ *limitertest.ModelDB) {
		free := limitertest.With(t, paid, ratelimit.FixedWindow{Limit: 1, Window: time.Hour})
		w := limitertest.NewWaits(t)
		known := testDenials{limitertest.Engine(free).Denials, limitertest.Model(free.Config().Policy).Rules[0], limitertest.Space(free)}
		since := known.Snapshot()
		known.remember(
			"key",
			model.Decision{
				State: model.State{
					Count:       1,
					WindowStart: time.Now().UnixMicro(),
					ExpiresAt:   time.Now().Add(time.Hour).UnixMicro(),
				},
				DecidedAt: time.Now(),
			},
			known.Elapsed(),
			known.Elapsed(),
			&since,
		)
		ctx, cancel := context.WithCancel(t.Context())
		w.Add(ctx, free, 0, 1)
		w.Add(t.Context(), limitertest.With(t, paid, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}), 1, 1)
		w.Add(t.Context(), paid, 2, 1)
		<-time.After(10 * time.Millisecond)
		require.Equal(t, []int{1, 2}, limitertest.WhoOf(w.Told()))
		synctest.Wait()
		lines, _, _ := limitertest.Lines(paid).Waiting("key")
		require.Equal(t, 1, lines)
		cancel()
		w.All(free, paid)
	})
}

// BenchmarkObservedDenial measures the cost of an observer, in comparison with BenchmarkCachedDenial.
func BenchmarkObservedDenial(b *testing.B) {
	calls := 0
	observer := &ratelimit.Observer{Decision: func(ratelimit.DecisionEvent) { calls++ }}
	l := deniedLimiter(b, ratelimit.SlidingWindow{Limit: 10, Window: time.Hour}, observer)
	b.ReportAllocs()
	for b.Loop() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			b.Fatal("not denied")
		}
	}
}

// After a refund by the same limiter, a remembered denial is forgotten, even if the result of the refund is unknown.
func TestRefundForgetsTheDenial(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		clientConfig := ratelimit.ClientConfig{DenialMaxAge: time.Hour}
		limiter := limitertest.New(t, pool, config, clientConfig)
		exhaust := func() (all ratelimit.Result) {
			for _, want := range []bool{true, false, false} {
				result, err := limiter.AllowN(t.Context(), "key", 10)
				require.NoError(t, err)
				require.Equal(t, want, result.Allowed)
				if want {
					all = result
				}
			}
			remembered := remembersDenial(limiter, "key", 1)
			require.True(t, remembered)
			return all
		}
		_, err := limiter.Refund(t.Context(), exhaust())
		require.NoError(t, err)
		all := exhaust()
		tx := limitertest.Begin(t, db.Pool)
		_, err = limiter.WithTx(tx).Refund(t.Context(), all)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		all = exhaust()

		// The caller leaves before the refund is done. The refund goes on.
		tx = limitertest.Hold(t, db, config, "key")
		ctx, leave := context.WithCancel(t.Context())
		waiting := testkit.Later(func() (ratelimit.Balance, error) { return limiter.Refund(ctx, all) })
		waitUntilHeld(t, db.Pool, limiter) // until the lane waits in place of the caller's own statement
		leave()
		_, err = waiting()
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, tx.Commit(t.Context()))
		testkit.WaitUntil(t, func() bool {
			result, err := limiter.Peek(t.Context(), "key")
			return err == nil && result.Remaining == 10
		})
		testkit.WaitUntil(t, func() bool {
			all, err = limiter.AllowN(t.Context(), "key", 10)
			return err == nil && all.Allowed
		})
		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)

		pgtest.Exec(t, db.Pool, "ALTER TABLE "+pgtest.Table(config.Durable)+" RENAME TO elsewhere")
		_, err = limiter.Refund(t.Context(), all)
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
		require.EqualValues(t, 10, limitertest.Receipt(all).Left(), "it was surely not given back")
		pgtest.Exec(t, db.Pool, "ALTER TABLE elsewhere RENAME TO "+pgtest.Table(config.Durable))
		remembered := remembersDenial(limiter, "key", 1)
		require.False(t, remembered)
	})
}
