package engine_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

// During a flood of keys, busy keys still get leases, and no lease ends early.
func TestLeasesInAFloodOfKeys(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("before", 2)
		require.EqualValues(t, 4, l.held("before"))
		leases, n := limitertest.Engine(l.Limiter).Leases, 0
		for i := range 2 * engine.MaxLeased {
			key := fmt.Sprint(i)
			leases.Make(key).Entry(limitertest.Space(l.Limiter), key, 0, true)
		}
		l.allow("after", 2)
		require.EqualValues(t, 4, l.held("before"))
		require.EqualValues(t, 4, l.held("after"))
		for i := range leases.Stripes.Load() {
			n += len(leases.Stripes.Load()[i].Keys)
		}
		require.LessOrEqual(t, n, engine.MaxLeased)
	})
}

// While one call takes units ahead, the other calls of the process take only their own cost.
func TestOneCallTakesALease(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		l.allow("key", 1+5)
		taken := l.told().Taken
		l.db.Set(func(context.Context) error { limitertest.Elapse(time.Second); return nil })
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() { require.NoError(t, limitertest.ErrorOf(l.Allow(t.Context(), "key"))) })
			synctest.Wait()
		}
		calls.Wait()
		require.EqualValues(t, 8, l.told().Taken-taken)
	})
}

// Any of several merged requests can be the request that takes units ahead.
func TestLeaseOfRequestsThatAreAlike(t *testing.T) {
	t.Parallel()
	l := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "api", Policy: limitertest.Hourly})
	var requests []*engine.Request
	for _, ahead := range []int64{0, 4, 0} {
		r := newRequest(l, "key", 1)
		r.Ahead = ahead
		requests = append(requests, r)
	}
	leaders := engine.MergeAlike(requests)
	require.Len(t, leaders, 1)
	require.EqualValues(t, 4, leaders[0].Ahead)
	require.EqualValues(t, 3+4, leaders[0].Count)
}

// StatementEvent.Size counts calls, and does not count units taken ahead.
func TestObserverOfStatementsThatLease(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		require.Equal(t, 2, l.allow("key", 1+5))
		require.Equal(t, 2, l.decided)
	})
}

// If unused units of leases go back, other processes are not notified, because units go back too often.
func TestWhatGoesBackFromLeasesIsNotAnnounced(t *testing.T) {
	t.Parallel()
	withLeases(t, func(c *ratelimit.Config) {
		policies, err := ratelimit.NewPolicies(limitertest.NewModelDB(), ratelimit.PoliciesConfig{})
		require.NoError(t, err)
		close(limitertest.Table(policies).Ready)
		c.Policies = policies
	}, func(t *testing.T, l *leaseTest) {
		l.allow("key", 2)
		leased, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.NoError(t, limitertest.Client(l.Limiter).ReturnLeases(t.Context()))
		require.EqualValues(t, 3, l.told().Returned)
		require.Empty(t, limitertest.Table(l.Config().Policies).Telling)
		_, err = l.Refund(t.Context(), leased)
		require.NoError(t, err)
		require.Len(t, limitertest.Table(l.Config().Policies).Telling, 1)
	})
}

// If a limiter has several policies, and its bucket has more tokens than the process knew, the process gives back all
// units taken ahead. So no more is admitted than the bucket allows, and no units are lost.
func TestLeasesOfSeveralPoliciesFromAFullerBucket(t *testing.T) {
	t.Parallel()
	const limit = 2560
	withLeases(t, func(c *ratelimit.Config) {
		bucket := ratelimit.TokenBucket{Capacity: limit, Refill: 1, Every: time.Second} // a lease: 20 for 20 s
		c.Policy, c.Lease = ratelimit.All(bucket, ratelimit.FixedWindow{Limit: 2 * limit, Window: time.Hour}), &ratelimit.Lease{MaxShare: 0.1}
	}, func(t *testing.T, l *leaseTest) {
		_, err := l.AllowN(t.Context(), "key", 1000)
		require.NoError(t, err)
		for l.held("key") != 32 {
			l.allow("key", 1)
		}
		l.allow("key", 32)
		clear(l.db.Rows[false])
		taken := l.told().Taken
		l.allow("key", 1)
		require.EqualValues(t, 64, l.told().Taken-taken)
		limitertest.Elapse(16 * time.Second)
		spent := l.held("key")
		l.allow("key", int(spent))
		require.EqualValues(t, limit, spent+l.left("key"))
	})
}
