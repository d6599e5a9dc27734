package ratelimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

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
	d.remember(d.policy, key, denied, d.local(), d.local(), d.resets.Load())
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

			local := 0
			sources := map[bool]Source{false: SourceDatabase, true: SourceCachedDenial}
			for step := range 1500 {
				key := []string{"a", "b"}[random.IntN(2)]
				if random.IntN(40) == 0 {
					require.NoError(t, remembers.Reset(ctx, key))
					require.NoError(t, asks.Reset(ctx, key))
				}
				if random.IntN(20) == 0 {
					give := random.IntN(2)
					for _, limiter := range []*Limiter{remembers, asks} {
						_, err := [...]func(context.Context, string, int64) (Result, error){limiter.Refund, limiter.Grant}[give](ctx, key, 2)
						require.NoError(t, err)
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
				got.Source = want.Source
				got.DecidedAt, want.DecidedAt = got.DecidedAt.UTC(), want.DecidedAt.UTC()
				require.Equal(t, want, got, "step %d of seed %d, cost %d", step, seed, cost)
				clock.at = clock.at.Add(time.Duration(random.Int64N(400_000)) * time.Microsecond)
			}
			require.Greater(t, local, 100, "hardly a call was decided locally")
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
	asked := d.local()
	clock.at = clock.at.Add(10 * time.Millisecond)
	d.remember(d.policy, "key", denied, asked, d.local(), 0)

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
	before := d.resets.Load()
	at := clock.at.UnixMicro()
	s, _ := d.policy.decide(state{}, at, 1)
	_, denied := d.policy.decide(s, at, 1)
	denied.decidedAt = clock.at
	d.reset("key")
	d.remember(d.policy, "key", denied, d.local(), d.local(), before)
	_, ok := d.deny("key", 1)
	require.False(t, ok)

	rememberDenied(d, "key", clock)
	_, ok = d.deny("key", 1)
	require.True(t, ok)
	d.reset("key")
	_, ok = d.deny("key", 1)
	require.False(t, ok)
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
