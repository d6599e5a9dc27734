package engine_test

import (
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
)

const fleet = 16 // the number of processes for which the defaults of Lease were chosen

func newFleet(t *testing.T, policy ratelimit.Policy, lease *ratelimit.Lease) (limiters []*ratelimit.Limiter) {
	t.Helper()
	db := &memdb.DB{}
	for range fleet {
		limiters = append(limiters, limitertest.New(t, db, ratelimit.Config{
			Name: "api", Policy: policy, Lease: lease,
		}))
	}
	return limiters
}

func heldByFleet(limiters []*ratelimit.Limiter) (held int64) {
	for _, l := range limiters {
		held += limitertest.Engine(l).Leases.Held(limitertest.Space(l), limitertest.Model(l.Config().Policy), "key")
	}
	return held
}

// ask calls Allow at intervals of pace for a given time. It returns how many calls were allowed.
func ask(t *testing.T, l *ratelimit.Limiter, pace, lasts time.Duration) (allowed int64) {
	t.Helper()
	for end := time.Now().Add(lasts); time.Now().Before(end); limitertest.Elapse(pace) {
		result, err := l.Allow(t.Context(), "key")
		if err != nil {
			t.Error(err)
			return 0
		}
		if result.Allowed {
			allowed++
		}
	}
	return allowed
}

// askTogether runs ask for all limiters at once. It returns how many calls of each limiter were allowed.
func askTogether(t *testing.T, limiters []*ratelimit.Limiter, lasts time.Duration, pace func(i int) time.Duration) []int64 {
	t.Helper()
	allowed := make([]int64, len(limiters))
	var asking sync.WaitGroup
	for i, l := range limiters {
		asking.Go(func() {
			limitertest.Elapse(time.Duration(i) * pace(i) / fleet)
			allowed[i] = ask(t, l, pace(i), lasts)
		})
	}
	asking.Wait()
	return allowed
}

func sumOf(counts []int64) (sum int64) {
	for _, n := range counts {
		sum += n
	}
	return sum
}

// After a burst, all processes together hold at most a hundredth of the limit, and nothing when their leases have
// ended.
func TestLeasesHoardNothing(t *testing.T) {
	t.Parallel()
	const limit = 1_000_000
	for name, policy := range map[string]ratelimit.Policy{
		"fixed":   ratelimit.FixedWindow{Limit: limit, Window: time.Hour},
		"sliding": ratelimit.SlidingWindow{Limit: limit, Window: time.Hour},
		"bucket":  ratelimit.TokenBucket{Capacity: limit, Refill: 100, Every: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				limiters := newFleet(t, policy, &ratelimit.Lease{})
				pace := func(int) time.Duration { return 10 * time.Microsecond }
				allowed := sumOf(askTogether(t, limiters, 50*time.Millisecond, pace))
				require.EqualValues(t, fleet*5_000, allowed)
				held := heldByFleet(limiters)
				require.Positive(t, held)
				require.LessOrEqual(t, held, int64(limit/100))
				limitertest.Elapse(31 * time.Second)
				require.Zero(t, heldByFleet(limiters))
				result, err := limiters[0].Peek(t.Context(), "key")
				require.NoError(t, err)
				kept := limit - allowed - result.Remaining
				require.LessOrEqual(t, kept, int64(limit/128+1), "none, but what a bucket keeps free")
			})
		})
	}
}

// Processes that share a nearly full bucket need fewer statements with leases. Leases of a bucket are short, and a
// process must first make room in the bucket.
func TestLeasesOfAFullBucketSaveStatements(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var statements atomic.Int64
		db := &memdb.DB{}
		var limiters []*ratelimit.Limiter
		for range fleet {
			observer := &ratelimit.Observer{Statement: func(ratelimit.StatementEvent) { statements.Add(1) }}
			limiters = append(limiters, limitertest.New(t, db, ratelimit.Config{
				Name: "api", Policy: ratelimit.TokenBucket{Capacity: 100_000, Refill: 100_000, Every: time.Minute}, Lease: &ratelimit.Lease{},
			}, ratelimit.ClientConfig{Observer: observer}))
		}
		for _, pace := range []time.Duration{20 * time.Millisecond, 100 * time.Millisecond} {
			statements.Store(0)
			calls := sumOf(askTogether(t, limiters, 20*time.Second, func(int) time.Duration { return pace }))
			require.Less(t, statements.Load(), calls*3/4)
		}
	})
}

// If demand exceeds the limit, a window admits at least 97 % of the limit, and never more than the limit.
func TestLeasesUseTheLimit(t *testing.T) {
	t.Parallel()
	const limit = 20_000
	synctest.Test(t, func(t *testing.T) {
		limiters := newFleet(t, ratelimit.FixedWindow{Limit: limit, Window: 4 * time.Second}, &ratelimit.Lease{})
		pace := func(int) time.Duration { return 2 * time.Millisecond }
		for range 2 {
			admitted := sumOf(askTogether(t, limiters, 4*time.Second, pace))
			require.GreaterOrEqual(t, admitted, int64(limit*97/100))
			require.LessOrEqual(t, admitted, int64(limit))
			limitertest.Elapse(time.Second)
		}
	})
}

// If demand exceeds the refill, a bucket with leases admits at least 97 % of what it admits without leases.
func TestLeasesUseABucket(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var admitted [2]int64
		for i, lease := range []*ratelimit.Lease{nil, {}} {
			limiters := newFleet(t, ratelimit.TokenBucket{Capacity: 20_000, Refill: 2_000, Every: time.Second}, lease)
			admitted[i] = sumOf(askTogether(t, limiters, 5*time.Second, func(int) time.Duration { return 2 * time.Millisecond }))
		}
		require.InDelta(t, 30_000, admitted[0], 1)
		require.GreaterOrEqual(t, admitted[1], admitted[0]*97/100)
		require.LessOrEqual(t, admitted[1], admitted[0])
	})
}

// If one process asks a hundred times as often as the others, each process gets as much as without leases.
func TestLeasesStarveNobody(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var shares [2][]int64
		for i, lease := range []*ratelimit.Lease{nil, {}} {
			limiters := newFleet(t, ratelimit.TokenBucket{Capacity: 5_000, Refill: 500, Every: time.Second}, lease)
			// During the first askTogether, the busiest process empties the bucket. The second askTogether measures
			// what follows.
			pace := func(i int) time.Duration {
				if i == 0 {
					return time.Millisecond
				}
				return 97 * time.Millisecond
			}
			askTogether(t, limiters, 10*time.Second, pace)
			shares[i] = askTogether(t, limiters, 10*time.Second, pace)
		}
		for i := 1; i < fleet; i++ {
			require.GreaterOrEqual(t, shares[1][i], shares[0][i]*9/10, "%v", shares)
			require.Positive(t, shares[1][i])
		}
		require.GreaterOrEqual(t, sumOf(shares[1]), sumOf(shares[0])*97/100)
	})
}
