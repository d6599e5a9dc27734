package ratelimit

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

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// setClock is a clock that tests move.
type setClock struct{ at time.Time }

func (c *setClock) now() time.Time { return c.at }

// testDenials are denials under one policy.
type testDenials struct {
	*engine.Denials
	policy model.Rules
	space  *engine.Space
}

func newTestDenials(policy single, maxAge time.Duration) (testDenials, *setClock) {
	clock := &setClock{at: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	return testDenials{engine.NewDenials(maxAge, clock.now), policy.one(), &engine.Space{}}, clock
}

func (d testDenials) deny(key string, n int64) (Result, bool) {
	var o engine.Outcome
	ok := d.Lookup(d.space, d.policy, key, n, &o)
	return resultOf(&o), ok
}

func (d testDenials) changed(key string, since *engine.Changes) { d.Forget(d.space, key, since) }

func (d testDenials) remember(key string, denied model.Decision, asked, told time.Duration, since *engine.Changes) {
	d.Remember(&engine.Part{Space: d.space, Rules: d.policy, Key: key, Decision: denied}, asked, told, since)
}

// remembersDenial tells whether a denial of a key is remembered that denies a cost of n.
func (l *Limiter) remembersDenial(key string, n int64) bool {
	return l.client.engine.Denials.Lookup(l.space, l.model.Rules[0], key, n, &engine.Outcome{})
}

// rememberDenied takes all of a key's limit at the clock, and has what a denial then says remembered.
func rememberDenied(d testDenials, key string, clock *setClock) {
	at := clock.at.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, d.policy.Numbers().Limit)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.at
	since := d.Snapshot()
	d.remember(key, denied, d.Elapsed(), d.Elapsed(), &since)
}

// The two limiters get the same requests, and only one remembers denials. With one process, a clock that goes
// forward, and resets that come through the limiter, no field of a result may differ.
func TestDenialsNeverChangeADecision(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	ctx := context.Background()
	pool := pgtest.New(t).Pool
	for _, policy := range []single{
		FixedWindow{Limit: 5, Window: 3 * time.Second},
		SlidingWindow{Limit: 5, Window: 3 * time.Second},
		TokenBucket{Capacity: 5, Refill: 3, Every: 2 * time.Second},
		SlidingLog{Limit: 5, Window: 3 * time.Second},
		CalendarWindow{Limit: 5, Unit: CalendarMinute, Zone: "Asia/Kolkata"},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			clock := &setClock{at: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
			config := Config{
				Name:   fmt.Sprintf("%T remembers", policy),
				Policy: policy,
			}
			clientConfig := ClientConfig{Timeout: time.Minute, Test: TestConfig{Now: clock.now}}
			remembers := newLimiter(t, pool, config, clientConfig)
			config.Name, config.NoDenialCache = fmt.Sprintf("%T asks", policy), true
			asks := newLimiter(t, pool, config, clientConfig)

			local, last := 0, map[string][2]Result{}
			sources := map[bool]Source{false: SourceDatabase, true: SourceCachedDenial}
			for step := range 300 * rounds(t) {
				key := []string{"a", "b"}[random.IntN(2)]
				if random.IntN(40) == 0 {
					require.NoError(t, remembers.Reset(ctx, key))
					require.NoError(t, asks.Reset(ctx, key))
				}
				switch random.IntN(40) {
				case 0:
					for _, limiter := range []*Limiter{remembers, asks} {
						_, err := limiter.Grant(ctx, key, 2)
						require.NoError(t, err)
					}
				case 1:
					if last[key][0].taken.Receipt.Left() > 0 {
						for i, limiter := range []*Limiter{remembers, asks} {
							_, err := limiter.Refund(ctx, last[key][i])
							require.NoError(t, err)
						}
					}
				}
				cost := 1 + random.Int64N(5)
				asked := policy
				if random.IntN(10) == 0 {
					asked = []single{
						FixedWindow{Limit: 6, Window: 2 * time.Second}, SlidingWindow{Limit: 7, Window: 4 * time.Second},
						TokenBucket{Capacity: 5, Refill: 4, Every: 2 * time.Second},
					}[random.IntN(3)]
				}
				remembered := remembers.under(asked).remembersDenial(key, cost)
				if remembered {
					local++
				}
				got, err := remembers.under(asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				want, err := asks.under(asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				require.Equal(t, sources[remembered], got.Source)
				if got.Allowed {
					last[key] = [2]Result{got, want}
				}
				got.Source = want.Source
				require.Equal(t, utc(want), utc(got), "step %d of seed %d, cost %d", step, seed, cost)
				clock.at = clock.at.Add(time.Duration(random.Int64N(400_000)) * time.Microsecond)
			}
			require.Greater(t, local, 20*rounds(t), "hardly a call was decided locally")
		})
	}
}

func TestDenialHoldsUntilItsRetryTimeAndForLargerCosts(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(TokenBucket{Capacity: 10, Refill: 1, Every: 100 * time.Millisecond}, time.Minute)
	rememberDenied(d, "key", clock)

	result, ok := d.deny("key", 1)
	require.True(t, ok)
	require.Equal(t, 100*time.Millisecond, result.RetryAfter)
	result, ok = d.deny("key", 4)
	require.True(t, ok)
	require.Equal(t, 400*time.Millisecond, result.RetryAfter)

	clock.at = clock.at.Add(100*time.Millisecond - time.Microsecond)
	_, ok = d.deny("key", 1)
	require.True(t, ok)
	clock.at = clock.at.Add(time.Microsecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok, "1 may fit now")
	_, ok = d.deny("key", 2)
	require.True(t, ok, "2 cannot fit yet")
}

func TestDenialIsForgottenAtItsMaxAge(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	rememberDenied(d, "key", clock)
	clock.at = clock.at.Add(time.Second - time.Microsecond)
	_, ok := d.deny("key", 1)
	require.True(t, ok)
	clock.at = clock.at.Add(time.Microsecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

func TestDenialIsNotTrustedWhenTheLocalClockHasGoneBack(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	rememberDenied(d, "key", clock)
	clock.at = clock.at.Add(-time.Microsecond)
	_, ok := d.deny("key", 1)
	require.False(t, ok)
}

// The database decided somewhere between asked and told. The local denial ends no later than the true one, and the
// times that it tells are no earlier than the true ones.
func TestDenialAllowsForTheTimeThatTheStatementTook(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Second}, time.Minute)
	at := clock.at.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, 1)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.at
	asked, since := d.Elapsed(), d.Snapshot()
	clock.at = clock.at.Add(10 * time.Millisecond)
	d.remember("key", denied, asked, d.Elapsed(), &since)

	result, ok := d.deny("key", 1)
	require.True(t, ok)
	require.Equal(t, time.Second, result.RetryAfter)
	require.Equal(t, at, result.DecidedAt.UnixMicro())
	clock.at = clock.at.Add(990 * time.Millisecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// A denial whose statement took time is told with a DecidedAt. For every cost, it says what the model says at that
// time.
func TestCachedDenialTellsTheTruthAtItsTime(t *testing.T) {
	t.Parallel()
	for _, policy := range []single{
		FixedWindow{Limit: 1000, Window: time.Second},
		SlidingWindow{Limit: 1000, Window: time.Second},
		TokenBucket{Capacity: 1000, Refill: 1000, Every: time.Second},
		SlidingLog{Limit: 1000, Window: time.Second},
		CalendarWindow{Limit: 1000, Unit: CalendarMinute},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			elapse := func(clock *setClock, most time.Duration) {
				clock.at = clock.at.Add(time.Duration(random.Int64N(int64(most/time.Microsecond))) * time.Microsecond)
			}
			told := 0
			for range 2000 * rounds(t) {
				d, clock := newTestDenials(policy, time.Minute)
				var taken model.State
				for range 4 {
					elapse(clock, 500*time.Millisecond)
					_, left := policy.one().Decide(taken, clock.at.UnixMicro(), 0)
					taken, _ = policy.one().Decide(
						taken,
						clock.at.UnixMicro(),
						left.Remaining-random.Int64N(left.Remaining+1)/2,
					)
				}
				asked, since := d.Elapsed(), d.Snapshot()
				elapse(clock, 200*time.Millisecond)
				denied := model.Decision{State: taken, DecidedAt: clock.at}
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
					_, want := policy.one().Decide(taken, got.DecidedAt.UnixMicro(), cost)
					require.Zero(t, want.Granted, "seed %d", seed)
					require.Equal(t, want.Remaining, got.Remaining, "seed %d, cost %d", seed, cost)
					require.Equal(t, model.Duration(want.RetryAfter), got.RetryAfter, "seed %d, cost %d", seed, cost)
					require.Equal(t, model.Duration(want.ResetAfter), got.ResetAfter, "seed %d, cost %d", seed, cost)
					_, now := policy.one().Decide(taken, clock.at.UnixMicro(), cost)
					require.Zero(t, now.Granted, "seed %d: it fits by now", seed)
				}
			}
			require.Greater(t, told, 1000, "hardly a denial was told")
		})
	}
}

func TestDenialDecidedBeforeAResetIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	before := d.Snapshot()
	at := clock.at.UnixMicro()
	s, _ := d.policy.Decide(model.State{}, at, 1)
	_, denied := d.policy.Decide(s, at, 1)
	denied.DecidedAt = clock.at
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

// With two statements under way, a denial that comes back after the answer to something else is not remembered,
// because it may have been decided earlier. A denial knows what its own statement has granted. What happens to
// most other keys does not matter.
func TestDenialThatComesBackLateIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 10, Window: time.Hour}, time.Second)
	at := clock.at.UnixMicro()
	taken, _ := d.policy.Decide(model.State{}, at, 10)
	_, denied := d.policy.Decide(taken, at, 1)
	denied.DecidedAt = clock.at
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

// An element of several requests, the last of which were denied, is remembered.
func TestDenialOfSomeIsRemembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := FixedWindow{Limit: 10, Window: time.Hour}
		l := newLimiter(t, newModelDB(), Config{Name: "test", Policy: policy})
		elements := []modeltest.Element{{Key: "key", Cost: 1, Count: 64}}
		require.NoError(t, l.decideAndRemember(t.Context(), elements))
		require.Equal(t, int64(10), elements[0].Decision.Granted)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, SourceCachedDenial, result.Source)
	})
}

// A limiter that has not been denied anything holds nothing, and one whose denials are forgotten holds a kilobyte.
func TestDenialsOfAnIdleLimiterAreSmall(t *testing.T) {
	t.Parallel()
	d, _ := newTestDenials(hourly, time.Second)
	_, ok := d.deny("key", 1)
	require.False(t, ok)
	d.changed("key", nil)
	_ = d.Snapshot()
	require.Nil(t, d.Stripes.Load())
	require.LessOrEqual(t, unsafe.Sizeof([engine.DenialStripes]engine.DenialStripe{}), uintptr(1024))
}

// The first denial comes back when there is nothing yet to count changes in.
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
			rememberDenied(d, "other key", &setClock{at: t0})
			d.changed("key", nil)
		}, false},
		"another is denied, and it is granted itself": {func(d testDenials, since *engine.Changes) {
			rememberDenied(d, "other key", &setClock{at: t0})
			d.changed("key", since)
		}, true},
	} {
		d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
		s, _ := d.policy.Decide(model.State{}, clock.at.UnixMicro(), 1)
		_, denied := d.policy.Decide(s, clock.at.UnixMicro(), 1)
		denied.DecidedAt = clock.at
		since := d.Snapshot()
		c.meanwhile(d, &since)
		d.remember("key", denied, d.Elapsed(), d.Elapsed(), &since)
		_, ok := d.deny("key", 1)
		require.Equal(t, c.remembered, ok, name)
	}
}

// A clock that stands at the zero time when the limiter is made, and is set later, ages denials all the same. New does
// not read it.
func TestDenialsAgeThoughTheClockBeganAtZero(t *testing.T) {
	t.Parallel()
	clock := &setClock{}
	read := 0
	now := func() time.Time { read++; return clock.now() }
	l := newLimiter(t, newModelDB(), Config{
		Name: "test", Policy: hourly, OnFailure: FallbackLocal(0.5),
	}, ClientConfig{Test: TestConfig{Now: now}})
	require.Zero(t, read)
	clock.at = t0
	d := testDenials{l.client.engine.Denials, hourly.one(), l.space}
	rememberDenied(d, "key", clock)
	_, ok := d.deny("key", 1)
	require.True(t, ok)
	clock.at = clock.at.Add(time.Second)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// An attacker with a million keys fills the memory of denials, and nothing else. The database is asked about what
// is not remembered.
func TestDenialsStayBounded(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	for i := range 1_000_000 {
		rememberDenied(d, fmt.Sprint("key ", i), clock)
		clock.at = clock.at.Add(5 * time.Microsecond) // five seconds in all
	}
	remembered := 0
	stripes := d.Stripes.Load()
	for i := range stripes {
		remembered += len(stripes[i].Young) + len(stripes[i].Old)
	}
	require.LessOrEqual(t, remembered, 2*engine.MaxDenials)
	require.Greater(t, remembered, engine.MaxDenials/2)
}

//nolint:paralleltest // AllocsPerRun counts everybody's
func TestCachedDenialNeedsNoMemory(t *testing.T) {
	l := deniedLimiter(t, SlidingWindow{Limit: 10, Window: time.Hour}, nil)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			t.Error("not denied")
		}
	}))
}

// deniedLimiter returns a limiter without a database that remembers a denial of user:123.
func deniedLimiter(t testing.TB, policy single, observer *Observer) *Limiter {
	l := newLimiter(t, &pgxpool.Pool{}, Config{Name: "test", Policy: policy},
		ClientConfig{DenialMaxAge: time.Hour, Observer: observer})
	rememberDenied(testDenials{l.client.engine.Denials, policy.one(), l.space}, "user:123", &setClock{at: time.Now()})
	return l
}

func BenchmarkCachedDenial(b *testing.B) {
	for _, policy := range []single{
		FixedWindow{Limit: 10, Window: time.Hour},
		SlidingWindow{Limit: 10, Window: time.Hour},
		TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour},
		SlidingLog{Limit: 10, Window: time.Hour},
		CalendarWindow{Limit: 10, Unit: CalendarDay},
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
