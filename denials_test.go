package ratelimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// setClock is a clock that tests move.
type setClock struct{ at time.Time }

func (c *setClock) now() time.Time { return c.at }

// testDenials are denials under one policy.
type testDenials struct {
	*denials
	policy Policy
}

func newTestDenials(policy Policy, maxAge time.Duration) (testDenials, *setClock) {
	clock := &setClock{at: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
	return testDenials{newDenials(maxAge, clock.now), policy}, clock
}

func (d testDenials) deny(key string, n int64) (Result, bool) {
	return d.denials.deny(d.policy, key, n)
}

// rememberDenied takes all of a key's limit at the clock, and has what a denial then says remembered.
func rememberDenied(d testDenials, key string, clock *setClock) {
	at := clock.at.UnixMicro()
	s, _ := d.policy.decide(state{}, at, d.policy.limit())
	_, denied := d.policy.decide(s, at, 1)
	denied.decidedAt = clock.at
	since := d.leave()
	d.remember(d.policy, key, denied, d.local(), d.local(), &since)
}

// The two limiters get the same requests; only one remembers denials. With one process, a clock that goes forward, and resets
// that come through the limiter, not a field of a result may differ.
func TestDenialsNeverChangeADecision(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	pool := pgtest.New(t).Pool
	for _, policy := range []Policy{
		FixedWindow{Limit: 5, Window: 3 * time.Second},
		SlidingWindow{Limit: 5, Window: 3 * time.Second},
		TokenBucket{Capacity: 5, Refill: 3, Every: 2 * time.Second},
		SlidingLog{Limit: 5, Window: 3 * time.Second},
	} {
		t.Run(fmt.Sprintf("%T", policy), func(t *testing.T) {
			t.Parallel()
			seed := rand.Uint64()
			random := rand.New(rand.NewPCG(seed, 0))
			clock := &setClock{at: time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)}
			config := Config{Name: fmt.Sprintf("%T remembers", policy), Policy: policy, Timeout: time.Minute, Test: TestConfig{Now: clock.now}}
			remembers, err := New(pool, config)
			require.NoError(t, err)
			config.Name, config.NoDenialCache = fmt.Sprintf("%T asks", policy), true
			asks, err := New(pool, config)
			require.NoError(t, err)

			local, last := 0, map[string][2]Result{}
			sources := map[bool]Source{false: SourceDatabase, true: SourceCachedDenial}
			for step := range 600 * rounds(t) {
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
					if last[key][0].receipt.leftover() > 0 {
						for i, limiter := range []*Limiter{remembers, asks} {
							_, err := limiter.Refund(ctx, last[key][i])
							require.NoError(t, err)
						}
					}
				}
				cost := 1 + random.Int64N(5)
				asked := policy
				if random.IntN(10) == 0 {
					asked = []Policy{
						FixedWindow{Limit: 6, Window: 2 * time.Second}, SlidingWindow{Limit: 7, Window: 4 * time.Second},
						TokenBucket{Capacity: 5, Refill: 4, Every: 2 * time.Second},
					}[random.IntN(3)]
				}
				_, remembered := remembers.denials.deny(asked, key, cost)
				if remembered {
					local++
				}
				got, err := remembers.with(t, asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				want, err := asks.with(t, asked).AllowN(ctx, key, cost)
				require.NoError(t, err)
				require.Equal(t, sources[remembered], got.Source)
				if got.Allowed {
					last[key] = [2]Result{got, want}
				}
				got.Source = want.Source
				require.Equal(t, utc(want), utc(got), "step %d of seed %d, cost %d", step, seed, cost)
				clock.at = clock.at.Add(time.Duration(random.Int64N(400_000)) * time.Microsecond)
			}
			require.Greater(t, local, 40, "hardly a call was decided locally")
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

// The database decided somewhere between asked and told. The local denial ends no later than the true one, and what it tells
// is no earlier than the truth.
func TestDenialAllowsForTheTimeThatTheStatementTook(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Second}, time.Minute)
	at := clock.at.UnixMicro()
	s, _ := d.policy.decide(state{}, at, 1)
	_, denied := d.policy.decide(s, at, 1)
	denied.decidedAt = clock.at
	asked, since := d.local(), d.leave()
	clock.at = clock.at.Add(10 * time.Millisecond)
	d.remember(d.policy, "key", denied, asked, d.local(), &since)

	result, ok := d.deny("key", 1)
	require.True(t, ok)
	require.Equal(t, time.Second, result.RetryAfter)
	require.Equal(t, at, result.DecidedAt.UnixMicro())
	clock.at = clock.at.Add(990 * time.Millisecond)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

func TestDenialDecidedBeforeAResetIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	before := d.leave()
	at := clock.at.UnixMicro()
	s, _ := d.policy.decide(state{}, at, 1)
	_, denied := d.policy.decide(s, at, 1)
	denied.decidedAt = clock.at
	d.changed("key", nil)
	d.remember(d.policy, "key", denied, d.local(), d.local(), &before)
	_, ok := d.deny("key", 1)
	require.False(t, ok)

	rememberDenied(d, "key", clock)
	_, ok = d.deny("key", 1)
	require.True(t, ok)
	d.changed("key", nil)
	_, ok = d.deny("key", 1)
	require.False(t, ok)
}

// With two statements under way, a denial that comes back after something else did is not remembered: it may have been decided
// before that. What its own statement has granted, it knows, and what happens to most other keys is of no matter.
func TestDenialThatComesBackLateIsNotRemembered(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 10, Window: time.Hour}, time.Second)
	at := clock.at.UnixMicro()
	taken, _ := d.policy.decide(state{}, at, 10)
	_, denied := d.policy.decide(taken, at, 1)
	denied.decidedAt = clock.at
	remembered := func(since changes) bool {
		d.remember(d.policy, "key", denied, d.local(), d.local(), &since)
		_, ok := d.deny("key", 1)
		return ok
	}

	late := d.leave()
	d.changed("key", nil)
	require.False(t, remembered(late))
	own := d.leave()
	d.changed("key", &own)
	require.True(t, remembered(own), "10 of 64 were granted, and 54 were not")
	d.changed("key", nil)
	require.False(t, remembered(own))

	others := 0
	for i := range 1000 {
		since := d.leave()
		d.changed(fmt.Sprint("other ", i), nil)
		if !remembered(since) {
			others++
		}
	}
	require.Less(t, others, 50, "of which one in %d is to be expected", len(changes{}.of))
}

// An element of several requests, the last of which were denied, is remembered.
func TestDenialOfSomeIsRemembered(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := FixedWindow{Limit: 10, Window: time.Hour}
		l := newLimiter(t, newModelDB(policy), Config{Name: "test", Policy: policy})
		elements := []element{{key: "key", cost: 1, count: 64}}
		require.NoError(t, l.decideAndRemember(t.Context(), elements, l.settings))
		require.Equal(t, int64(10), elements[0].decision.granted)
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
	_ = d.leave()
	require.Nil(t, d.shards.Load())
	require.LessOrEqual(t, unsafe.Sizeof([denialShards]denialShard{}), uintptr(1024))
}

// The first denial comes back when there is nothing yet to count changes in.
func TestFirstDenial(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		meanwhile  func(d testDenials, since *changes)
		remembered bool
	}{
		"nothing happens":            {func(testDenials, *changes) {}, true},
		"its own statement grants":   {func(d testDenials, since *changes) { d.changed("key", since) }, true},
		"another grants":             {func(d testDenials, _ *changes) { d.changed("key", nil) }, false},
		"another grants a neighbour": {func(d testDenials, _ *changes) { d.changed("other key", nil) }, false},
		"another is denied, and the key is granted": {func(d testDenials, _ *changes) {
			rememberDenied(d, "other key", &setClock{at: t0})
			d.changed("key", nil)
		}, false},
		"another is denied, and it is granted itself": {func(d testDenials, since *changes) {
			rememberDenied(d, "other key", &setClock{at: t0})
			d.changed("key", since)
		}, true},
	} {
		d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
		s, _ := d.policy.decide(state{}, clock.at.UnixMicro(), 1)
		_, denied := d.policy.decide(s, clock.at.UnixMicro(), 1)
		denied.decidedAt = clock.at
		since := d.leave()
		c.meanwhile(d, &since)
		d.remember(d.policy, "key", denied, d.local(), d.local(), &since)
		_, ok := d.deny("key", 1)
		require.Equal(t, c.remembered, ok, name)
	}
}

// An attacker with a million keys fills the memory of denials, and nothing else: what is not remembered is asked.
func TestDenialsStayBounded(t *testing.T) {
	t.Parallel()
	d, clock := newTestDenials(FixedWindow{Limit: 1, Window: time.Hour}, time.Second)
	for i := range 1_000_000 {
		rememberDenied(d, fmt.Sprint("key ", i), clock)
		clock.at = clock.at.Add(5 * time.Microsecond) // five seconds in all
	}
	remembered := 0
	shards := d.shards.Load()
	for i := range shards {
		remembered += len(shards[i].young) + len(shards[i].old)
	}
	require.LessOrEqual(t, remembered, 2*maxDenials)
	require.Greater(t, remembered, maxDenials/2)
}

//nolint:paralleltest // AllocsPerRun counts everybody's
func TestCachedDenialNeedsNoMemory(t *testing.T) {
	l := deniedLimiter(t, SlidingWindow{Limit: 10, Window: time.Hour})
	require.Zero(t, testing.AllocsPerRun(100, func() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			t.Error("not denied")
		}
	}))
}

// deniedLimiter returns a limiter without a database that remembers a denial of user:123.
func deniedLimiter(t testing.TB, policy Policy) *Limiter {
	d := newDenials(time.Hour, nil)
	rememberDenied(testDenials{d, policy}, "user:123", &setClock{at: time.Now()})
	return &Limiter{core: &core{denials: d, shared: true}, policy: policy}
}

func BenchmarkCachedDenial(b *testing.B) {
	for _, policy := range []Policy{
		FixedWindow{Limit: 10, Window: time.Hour},
		SlidingWindow{Limit: 10, Window: time.Hour},
		TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour},
		SlidingLog{Limit: 10, Window: time.Hour},
	} {
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			l := deniedLimiter(b, policy)
			b.ReportAllocs()
			for b.Loop() {
				if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
					b.Fatal("not denied")
				}
			}
		})
		b.Run(fmt.Sprintf("%T/parallel", policy), func(b *testing.B) {
			l := deniedLimiter(b, policy)
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
