package engine_test

import (
	"context"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// leaseTest is a limiter with leases on a model of a database, and the events that its observer has received.
type leaseTest struct {
	*ratelimit.Limiter

	t  *testing.T
	db *limitertest.ModelDB

	mu      sync.Mutex
	leases  ratelimit.LeaseEvent // the sum of all events
	decided int                  // how many requests statements have decided
}

// withLeases runs a test in a synctest bubble. The limit is 100,000, and a lease has at most 1,000 units.
func withLeases(t *testing.T, change func(*ratelimit.Config), test func(t *testing.T, l *leaseTest)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &leaseTest{t: t, db: limitertest.NewModelDB()}
		config := ratelimit.Config{
			Name: "api", Policy: ratelimit.FixedWindow{Limit: 100_000, Window: time.Hour},
			Lease: &ratelimit.Lease{MaxShare: 0.01},
		}
		if change != nil {
			change(&config)
		}
		l.Limiter = limitertest.New(t, l.db, config, ratelimit.ClientConfig{
			Observer: &ratelimit.Observer{Lease: l.observe, Statement: l.observeStatement},
		})
		test(t, l)
	})
}

func (l *leaseTest) observeStatement(e ratelimit.StatementEvent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.decided += e.Size
}

func (l *leaseTest) observe(e ratelimit.LeaseEvent) {
	require.Equal(l.t, "api", e.Limiter)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.leases.Taken += e.Taken
	l.leases.Returned += e.Returned
	l.leases.Stranded += e.Stranded
}

// told waits until nothing is under way, and returns the sum of all events.
func (l *leaseTest) told() ratelimit.LeaseEvent {
	synctest.Wait()
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.leases
}

// allow calls Allow n times, and returns how many statements were sent for these calls.
func (l *leaseTest) allow(key string, n int) (asked int) {
	l.t.Helper()
	before := l.db.Statements()
	for range n {
		result, err := l.Allow(l.t.Context(), key)
		require.NoError(l.t, err)
		require.True(l.t, result.Allowed)
	}
	synctest.Wait() // until unused units have gone back
	return l.db.Statements() - before
}

func (l *leaseTest) held(key string) int64 {
	return limitertest.Engine(l.Limiter).Leases.Held(limitertest.Space(l.Limiter), limitertest.Model(l.Limiter.Config().Policy), key)
}

func (l *leaseTest) left(key string) int64 {
	l.t.Helper()
	result, err := l.Peek(l.t.Context(), key)
	require.NoError(l.t, err)
	return result.Remaining - l.held(key)
}

// A key that is used once or rarely gets no lease. If a lease is used up early, the size of the next lease doubles.
func TestLeasesFollowTheDemand(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		for range 3 {
			require.Equal(t, 1, l.allow("seldom", 1))
			require.Zero(t, l.held("seldom"))
			limitertest.Elapse(31 * time.Second)
		}
		require.Equal(t, 1, l.allow("now and then", 1))
		limitertest.Elapse(7 * time.Second)
		require.Equal(t, 1, l.allow("now and then", 1))
		require.EqualValues(t, 2, l.held("now and then"), "half of 30 s / 7 s")
		require.Equal(t, 1, l.allow("key", 1))
		for size := 4; size < 1000; size *= 2 {
			require.Equal(t, 1, l.allow("key", 1), "before %d", size)
			require.EqualValues(t, size, l.held("key"))
			require.Zero(t, l.allow("key", size))
		}
		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 989, l.held("key"), "a hundredth of what remained")

		l.allow("slowly", 1+5)
		require.Equal(t, 1, l.allow("slowly", 1))
		limitertest.Elapse(16 * time.Second)
		require.Zero(t, l.allow("slowly", 8))
		require.Equal(t, 1, l.allow("slowly", 1))
		require.EqualValues(t, 8, l.held("slowly"), "as much as was enough for more than half of the time")
	})
}

// Unused units go back before the lease ends. The next lease has as many units as were used of the last lease.
func TestLeasesGoBack(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5+9+17)
		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 32, l.held("key"))
		l.allow("key", 5)
		left := l.left("key")
		limitertest.Elapse(24 * time.Second)
		synctest.Wait()
		require.Equal(t, left, l.left("key"))
		limitertest.Elapse(3 * time.Second)
		synctest.Wait()
		require.Zero(t, l.held("key"))
		require.Equal(t, left+27, l.left("key"))
		require.Equal(t, ratelimit.LeaseEvent{Taken: 60, Returned: 27}, l.told())

		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 5, l.held("key"))
		limitertest.Elapse(90 * time.Second) // the lease goes back, and the entry of the key is deleted
		synctest.Wait()
		require.Equal(t, ratelimit.LeaseEvent{Taken: 65, Returned: 32}, l.told())
		require.Zero(t, limitertest.Engine(l.Limiter).Leases.Due, "no timer at rest")
		for i := range limitertest.Engine(l.Limiter).Leases.Stripes.Load() {
			require.Empty(t, limitertest.Engine(l.Limiter).Leases.Stripes.Load()[i].Keys)
		}
	})
}

// Near the limit, each call asks the database and takes nothing ahead.
func TestNoLeasesNearTheLimit(t *testing.T) {
	t.Parallel()
	withLeases(t, func(c *ratelimit.Config) { c.Lease = &ratelimit.Lease{} }, func(t *testing.T, l *leaseTest) {
		_, err := l.AllowN(t.Context(), "key", 100_000-2047)
		require.NoError(t, err)
		require.Equal(t, 2047, l.allow("key", 2047))
		require.Zero(t, l.told())
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
	})
}

func TestLeasedResults(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.db.Set(func(context.Context) error { limitertest.Elapse(3 * time.Millisecond); return nil })
		l.allow("key", 1)
		began := time.Now()
		asked, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, asked.Source)
		limitertest.Elapse(40 * time.Millisecond)
		leased, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.True(t, leased.Allowed)
		require.Equal(t, ratelimit.SourceLease, leased.Source)
		require.EqualValues(t, 100_000, leased.Limit)
		require.EqualValues(t, 99_997, leased.Remaining)
		require.Zero(t, leased.RetryAfter)
		require.Equal(t, asked.DecidedAt.Add(40*time.Millisecond), leased.DecidedAt)
		require.Equal(t, asked.ResetAfter-40*time.Millisecond, leased.ResetAfter)
		require.False(t, leased.DecidedAt.After(time.Now()))
		require.False(t, leased.DecidedAt.Before(began.Add(40*time.Millisecond)))
	})
}

// All other methods work for a key with a lease.
func TestMethodsBesideALease(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		ctx := t.Context()
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 8, l.held("key"))

		peeked, err := l.Peek(ctx, "key")
		require.NoError(t, err)
		require.True(t, peeked.Allowed)
		require.EqualValues(t, 100_000-7, peeked.Remaining, "with what is held")

		sets, err := ratelimit.AllowAll(ctx, l.Request("key", 1))
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, sets.Each[0].Source)
		require.EqualValues(t, 8, l.held("key"))

		several, err := l.AllowN(ctx, "key", 9) // more than the lease has
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, several.Source)
		waited, err := l.WaitN(ctx, "key", 2)
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceLease, waited.Source)

		// The database decides a refund of leased units. Each unit goes back once.
		synctest.Wait() // until the lease's unused units are back
		before := l.left("key")
		leased, err := l.AllowN(ctx, "key", 3)
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceLease, leased.Source)
		_, err = l.RefundN(ctx, leased, 1)
		require.NoError(t, err)
		_, err = l.Refund(ctx, leased)
		require.NoError(t, err)
		_, err = l.Refund(ctx, leased)
		require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
		_, err = l.Refund(ctx, waited)
		require.NoError(t, err)
		require.Equal(t, before+5, l.left("key"))

		// The database also decides a refund by a receipt.
		leased, err = l.AllowN(ctx, "key", 2)
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceLease, leased.Source)
		before = l.left("key")
		receipt, err := leased.Receipt()
		require.NoError(t, err)
		_, err = l.Refund(ctx, leased)
		require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
		parsed, err := l.ParseReceipt(receipt)
		require.NoError(t, err)
		_, err = l.Refund(ctx, parsed)
		require.NoError(t, err)
		require.Equal(t, before+2, l.left("key"))

		// A lease is not spent under another policy. The lease goes back at the next call for the key.
		held, returned := l.held("key"), l.told().Returned
		require.Positive(t, held)
		other, err := l.With(ratelimit.FixedWindow{Limit: 50, Window: time.Hour})
		require.NoError(t, err)
		_, err = other.Allow(ctx, "key")
		require.NoError(t, err)
		synctest.Wait()
		require.Zero(t, l.held("key"))
		require.Equal(t, held, l.told().Returned-returned)

	})
}

// If one caller of Wait spends from a lease, callers behind it do not get the error that the database is away.
func TestWaitersBesideALease(t *testing.T) {
	t.Parallel()
	withLeases(t, func(c *ratelimit.Config) { c.OnFailure = ratelimit.FailOpen() }, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		var waiting sync.WaitGroup
		for range 12 {
			waiting.Go(func() {
				result, err := l.Wait(t.Context(), "key")
				require.NoError(t, err)
				require.Contains(t, []ratelimit.Source{ratelimit.SourceDatabase, ratelimit.SourceLease}, result.Source)
			})
		}
		waiting.Wait()
	})
}

// If a lease has too few units for a call, its units go back first, so that the call can get all remaining units.
func TestAllThatRemainsCanBeHad(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		leased, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceLease, leased.Source)
		all, err := l.AllowN(t.Context(), "key", leased.Remaining)
		require.NoError(t, err)
		require.True(t, all.Allowed)
		require.Zero(t, all.Remaining)
	})
}

// After a pause, a lease is small, because other processes may have taken nearly all units.
func TestLeasesByWhatWasKnownLongAgo(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		other := limitertest.New(t, l.db, ratelimit.Config{
			Name: "api", Policy: l.Config().Policy,
		})
		for l.held("key") != 512 {
			l.allow("key", 1)
		}
		left := l.left("key")
		_, err := other.AllowN(t.Context(), "key", left-600)
		require.NoError(t, err)
		limitertest.Elapse(time.Second)
		l.allow("key", 512)
		taken := l.told().Taken
		require.Equal(t, 1, l.allow("key", 1))
		require.Equal(t, taken, l.told().Taken)
		require.EqualValues(t, 599, l.left("key"))
		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 5, l.held("key"), "a hundredth")
	})
}

// If other processes have just taken nearly all units, a lease gets only its share of the remaining units.
func TestLeasesAreAShareOfWhatIsLeft(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5+9+17)
		require.Equal(t, 1, l.allow("key", 1))
		require.EqualValues(t, 32, l.held("key"))
		other := limitertest.New(t, l.db, ratelimit.Config{Name: "api", Policy: l.Config().Policy})
		_, err := other.AllowN(t.Context(), "key", l.left("key")-1000)
		require.NoError(t, err)
		require.Equal(t, 1, l.allow("key", 32+1)-1) // one call asks the database, and units go back
		require.EqualValues(t, 9, l.held("key"), "a hundredth of 999")
	})
}

// ReturnLeases also waits for units that are already on their way back.
func TestReturnLeasesWaits(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		l.db.Set(func(context.Context) error { limitertest.Elapse(5 * time.Second); return nil })
		limitertest.Elapse(27 * time.Second) // the lease is on its way back
		require.Zero(t, l.held("key"))
		require.Zero(t, l.told().Returned)
		require.NoError(t, limitertest.Client(l.Limiter).ReturnLeases(t.Context()))
		require.Equal(t, ratelimit.LeaseEvent{Taken: 12, Returned: 8}, l.told())

		l.db.Set(nil)
		l.allow("other", 1+5)
		require.Equal(t, 1, l.allow("other", 1))
		l.db.Set(func(context.Context) error {
			limitertest.Elapse(5 * time.Second)
			return limitertest.TurnedAway(t.Context())
		})
		limitertest.Elapse(27 * time.Second)
		err := limitertest.Client(l.Limiter).ReturnLeases(t.Context())
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		var store *ratelimit.StoreError
		require.ErrorAs(t, err, &store)
		require.Equal(t, ratelimit.LeaseEvent{Taken: 24, Returned: 8, Stranded: 8}, l.told())
	})
}

// If units go back during a slow statement, callers do not have to wait for that statement.
func TestCallersDoNotWaitBehindWhatGoesBack(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		slow := true
		l.db.Set(func(context.Context) error {
			if slow {
				slow = false
				limitertest.Elapse(5 * time.Second)
			}
			return nil
		})
		var calls sync.WaitGroup
		calls.Go(func() { _, _ = l.Allow(t.Context(), "slow") })
		synctest.Wait()
		calls.Go(func() { _ = limitertest.Client(l.Limiter).ReturnLeases(t.Context()) })
		synctest.Wait()
		began := time.Now()
		l.allow("other", 1)
		require.Less(t, time.Since(began), time.Second)
		calls.Wait()
	})
}

// If a limiter has several policies and its bucket is nearly full, nothing is leased, and no policy loses units.
func TestLeasesOfSeveralPolicies(t *testing.T) {
	t.Parallel()
	change := func(c *ratelimit.Config) {
		c.Policy = ratelimit.All(
			ratelimit.TokenBucket{Capacity: 20_000, Refill: 2000, Every: time.Second}, ratelimit.FixedWindow{Limit: 1_000_000, Window: time.Hour})
	}
	withLeases(t, change, func(t *testing.T, l *leaseTest) {
		l.allow("key", 50)
		require.Zero(t, l.told())
		_, err := l.AllowN(t.Context(), "key", 500)
		require.NoError(t, err)
		for range 200 {
			l.allow("key", 10)
			limitertest.Elapse(time.Millisecond)
		}
		require.NoError(t, limitertest.Client(l.Limiter).ReturnLeases(t.Context()))
		require.Positive(t, l.told().Taken-l.told().Returned, "something was spent")
		require.Zero(t, l.told().Stranded)
		window := limitertest.New(t, l.db, ratelimit.Config{
			Name: "api/2", Policy: ratelimit.FixedWindow{Limit: 1_000_000, Window: time.Hour},
		})
		seen, err := window.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 1_000_000-50-500-2000, seen.Remaining)
	})
}

// While the database is away, calls spend a lease until it ends. Units that cannot go back count as used.
func TestLeasesWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		require.Equal(t, 1, l.allow("key", 1))
		l.db.Set(limitertest.TurnedAway)
		require.Zero(t, l.allow("key", 5))
		require.ErrorIs(t, limitertest.Client(l.Limiter).ReturnLeases(t.Context()), ratelimit.ErrUnavailable)
		require.Equal(t, ratelimit.LeaseEvent{Taken: 12, Stranded: 3}, l.told())
		_, err := l.Allow(t.Context(), "key")
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		canceled, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, limitertest.Client(l.Limiter).ReturnLeases(canceled), context.Canceled)
	})
}

// If the answer comes after the end of a lease, no unit of the lease is spent. All units taken ahead go back at once,
// even those that would have made room in a bucket.
func TestLeaseThatEndsOnItsWay(t *testing.T) {
	t.Parallel()
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 100_000, Window: 160 * time.Millisecond},
		ratelimit.TokenBucket{Capacity: 128_000, Refill: 50_000, Every: time.Second}, // leases 1,000 for 20 ms
	} {
		withLeases(t, func(c *ratelimit.Config) { c.Policy = policy }, func(t *testing.T, l *leaseTest) {
			l.allow("key", 1)
			l.db.Set(func(context.Context) error { limitertest.Elapse(21 * time.Millisecond); return nil })
			l.allow("key", 1)
			require.Zero(t, l.held("key"))
			limitertest.Elapse(22 * time.Millisecond)
			synctest.Wait()
			told := l.told()
			require.Positive(t, told.Taken)
			require.Equal(t, ratelimit.LeaseEvent{Taken: told.Taken, Returned: told.Taken}, told)
		})
	}
}

// If a bucket fills up during a lease, it still has room for all units of the lease.
func TestLeaseOfAFullBucket(t *testing.T) {
	t.Parallel()
	withLeases(t, func(c *ratelimit.Config) {
		c.Policy = ratelimit.TokenBucket{Capacity: 128_000, Refill: 1000, Every: time.Second} // leases 1,000 for 1 s
	}, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1)
		l.allow("key", 1)
		require.EqualValues(t, 5, l.held("key"), "and one that the caller left")
		require.Equal(t, ratelimit.LeaseEvent{Taken: 1003, Stranded: 998}, l.told())
		l.allow("key", 6)
		require.EqualValues(t, 10, l.held("key"))
		require.Equal(t, ratelimit.LeaseEvent{Taken: 1013, Stranded: 998}, l.told(), "the room is still there")
	})
}

// A new row of rate_limit_policy is in force at once, even for a leased key. Keys with a shadow policy get no lease.
func TestLeasesUnderPolicies(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	policies := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 100_000, Window: time.Hour}, Policies: policies,
		Lease: &ratelimit.Lease{MaxShare: 0.01},
	})
	leased := func() bool {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Source == ratelimit.SourceLease
	}
	testkit.WaitUntil(t, leased)
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "ke", "deny", "")
	limitertest.WaitUntilKnown(t, policies, db.Pool)
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourcePolicy, result.Source)
	require.False(t, result.Allowed)

	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "shadow", "fixed 5/1h")
	limitertest.WaitUntilKnown(t, policies, db.Pool)
	for range 10 {
		require.False(t, leased())
	}
}

// After a reset, this process does not spend units that it took before the reset, and giving them back adds nothing.
func TestResetForgetsALease(t *testing.T) {
	t.Parallel()
	const limit = 10_000
	var sum atomic.Int64
	l := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: limit, Window: time.Hour}, Lease: &ratelimit.Lease{MaxShare: 0.01},
	}, ratelimit.ClientConfig{Observer: &ratelimit.Observer{
		Lease: func(e ratelimit.LeaseEvent) { sum.Add(e.Taken - e.Returned - e.Stranded) },
	}})
	for range 7 {
		_, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
	leases := limitertest.Engine(l).Leases
	require.Positive(t, leases.Held(limitertest.Space(l), limitertest.Model(l.Config().Policy), "key"))
	require.NoError(t, l.Reset(t.Context(), "key"))
	require.Zero(t, leases.Held(limitertest.Space(l), limitertest.Model(l.Config().Policy), "key"))
	require.NoError(t, limitertest.Client(l).ReturnLeases(t.Context()))
	require.EqualValues(t, 4, sum.Load(), "what was spent")
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, limit-1, result.Remaining)
}

// Refunds of a lease's units need memory only for the gaps between the refunded units, in any order of refunds.
func TestRefundsFromALeaseTakeNoMemory(t *testing.T) {
	t.Parallel()

	for name, order := range map[string]func(n int) []int{
		"in order":      func(n int) []int { return slices.Collect(counting(0, n, 1)) },
		"backwards":     func(n int) []int { return slices.Collect(counting(n-1, -1, -1)) },
		"every other":   func(n int) []int { return slices.AppendSeq(slices.Collect(counting(0, n, 2)), counting(1, n, 2)) },
		"in any order":  rand.New(rand.NewPCG(1, 2)).Perm,
		"each of twice": func(n int) []int { return slices.AppendSeq(slices.Collect(counting(0, n, 1)), counting(0, n, 1)) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			withLeases(t, nil, func(t *testing.T, l *leaseTest) {
				var of *engine.Receipt
				var spent []ratelimit.Result
				for len(spent) < 200 {
					result, err := l.Allow(t.Context(), "key")
					require.NoError(t, err)
					if result.Source != ratelimit.SourceLease || limitertest.Receipt(result) != of {
						of, spent = limitertest.Receipt(result), nil
					}
					if result.Source == ratelimit.SourceLease {
						spent = append(spent, result)
					}
				}
				refunded := map[int]bool{}
				for _, i := range order(len(spent)) {
					_, err := l.Refund(t.Context(), spent[i])
					if refunded[i] {
						require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
					} else {
						require.NoError(t, err)
					}
					refunded[i] = true
					require.LessOrEqual(t, len(of.Back.Ranges), len(spent)+1-len(refunded))
				}
				require.Len(t, of.Back.Ranges, 1)
			})
		})
	}
}

// Takes from a lease are refunded in parts, and some refunds fail. The test keeps a record for each single unit. Left
// must agree with this record.
func TestWhatIsLeftOfALease(t *testing.T) {
	t.Parallel()

	r := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var back engine.GivenBack
		var firsts, lefts []int64
		const units = 3
		for i := range int64(12) {
			firsts, lefts = append(firsts, 5+i*units), append(lefts, units)
		}
		for range 200 {
			i, left := r.IntN(len(firsts)), r.Int64N(units+1)
			was := r.Int64N(units + 1)
			require.Equal(t, was == lefts[i], back.Swap(firsts[i], units, was, left))
			if was == lefts[i] {
				lefts[i] = left
			}
			for j := range firsts {
				require.Equal(t, lefts[j], back.Leftover(firsts[j], units))
			}
			for j := 1; j < len(back.Ranges); j++ {
				require.Less(t, back.Ranges[j-1].To, back.Ranges[j].From)
			}
		}
	}
}

// counting yields the numbers in the range [from, to), in steps of step.
func counting(from, to, step int) iter.Seq[int] {
	return func(yield func(int) bool) {
		for i := from; i*step < to*step && yield(i); i += step {
		}
	}
}
