package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Many callers ask for a new key at once, over several pools and limiters. Exactly Limit callers are admitted, and each
// has a different Remaining.
func TestExactlyLimitAreAdmitted(t *testing.T) {
	t.Parallel()

	const limit, goroutines = 120, 200
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 4)
	limitertest.EachSlowPolicyAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		for variant, client := range map[string]ratelimit.ClientConfig{
			"coalesced": {}, "one call in each statement": {MaxBatch: 1, MaxInFlight: 16},
		} {
			config := config
			config.NoDenialCache = client.MaxBatch == 1
			limiters := make([]*ratelimit.Limiter, 2*len(pools))
			for i := range limiters {
				limiters[i] = limitertest.New(t, pools[i%len(pools)], config, client)
			}
			for round := range 2 * limitertest.Rounds(t) {
				key := fmt.Sprint(variant, " ", round)
				results, errs := make([]ratelimit.Result, goroutines), make([]error, goroutines)
				testkit.Together(
					goroutines,
					func(i int) { results[i], errs[i] = limiters[i%len(limiters)].Allow(t.Context(), key) },
				)
				require.NoError(t, errors.Join(errs...))

				var remaining []int64
				for _, r := range results {
					require.EqualValues(t, limit, r.Limit)
					if r.Allowed {
						remaining = append(remaining, r.Remaining)
						continue
					}
					require.Zero(t, r.Remaining)
					require.Positive(t, r.RetryAfter)
				}
				slices.Sort(remaining)
				require.Len(t, remaining, limit)
				require.Equal(t, int64(0), remaining[0])
				require.Len(t, slices.Compact(remaining), limit)
				require.EqualValues(t, limit, limitertest.Taken(t, db.Pool, config, key))
			}
		}
	})
}

// Costs of all sizes for one key never add up to more than Limit. A cost that still fits is never refused.
func TestCostsAddUpToTheLimit(t *testing.T) {
	t.Parallel()

	const limit = 1000
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 2)
	limitertest.EachSlowPolicyAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiters := []*ratelimit.Limiter{limitertest.New(t, pools[0], config), limitertest.New(t, pools[1], config)}
		var mu sync.Mutex
		var granted int64
		errs := make([]error, 100)
		testkit.Together(100, func(i int) {
			for call := range 10 {
				cost := int64(1 + (i*7+call*3)%9)
				result, err := limiters[i%2].AllowN(t.Context(), "key", cost)
				if errs[i] = errors.Join(errs[i], err); result.Allowed {
					mu.Lock()
					granted += cost
					mu.Unlock()
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, granted, limitertest.Taken(t, db.Pool, config, "key"))
		require.Greater(t, granted, int64(limit-9)) // if less were granted, the largest cost would still fit

		// The rest of the limit can still be taken, but no unit more.
		result, err := limiters[0].AllowN(t.Context(), "key", limit-granted)
		require.NoError(t, err)
		require.Zero(t, result.Remaining)
		result, err = limiters[1].Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
	})
}

func TestRowDeletedWhileWeWaitForIt(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		_, err := limiter.AllowN(t.Context(), "key", 4)
		require.NoError(t, err)

		sweeper := limitertest.Begin(t, db.Pool)
		pgtest.Exec(t, sweeper, "DELETE FROM "+pgtest.Table(config.Durable))
		wait := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, sweeper.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 7, result.Remaining)
		require.EqualValues(t, 3, limitertest.Taken(t, db.Pool, config, "key"))
	})
}

func TestRowDeletedAndMadeAgainWhileWeWaitForIt(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		_, err := limiter.AllowN(t.Context(), "key", 9)
		require.NoError(t, err)

		// Another transaction resets the key and takes 2 units.
		somebody := limitertest.Begin(t, db.Pool)
		require.NoError(t, limiter.WithTx(somebody).Reset(t.Context(), "key"))
		_, err = limiter.WithTx(somebody).AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		wait := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 5, result.Remaining)
		require.EqualValues(t, 5, limitertest.Taken(t, db.Pool, config, "key"))
	})
}

// Another process deletes rows at full speed. Only the counts in the deleted rows are lost: between two deletions of a
// row, at most Limit units are admitted, and no call fails.
func TestSweeperAtFullSpeed(t *testing.T) {
	t.Parallel()

	const limit, calls, keys = 3, 40, 3
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 3)
	config := ratelimit.Config{
		Name:          "test",
		Policy:        ratelimit.FixedWindow{Limit: limit, Window: limitertest.Year},
		NoDenialCache: true,
	}

	ctx, stop := context.WithCancel(t.Context())
	sweeps := testkit.Later(func() (sweeps int64, err error) {
		for i := 0; ctx.Err() == nil; i++ {
			// The process deletes one row at a time. If it locked one row and waited for another, it could deadlock
			// with a batch.
			key := fmt.Sprint(i % keys)
			tag, err := db.Of(key).Pool.Exec(
				context.Background(),
				"DELETE FROM rate_limit_ephemeral WHERE key = $1",
				key,
			)
			if err != nil {
				return 0, err
			}
			sweeps += tag.RowsAffected()
		}
		return sweeps, nil
	})
	var mu sync.Mutex
	var granted int64
	errs := make([]error, 12)
	testkit.Together(12, func(i int) {
		limiter, err := limitertest.New(t, pools[i%len(pools)], config, ratelimit.ClientConfig{MaxBatch: 4}), error(nil)
		for call := 0; call < calls && err == nil; call++ {
			var result ratelimit.Result
			if result, err = limiter.Allow(context.Background(), fmt.Sprint((i+call)%keys)); result.Allowed {
				mu.Lock()
				granted++
				mu.Unlock()
			}
		}
		errs[i] = err
	})
	stop()
	swept, err := sweeps()
	require.NoError(t, errors.Join(append(errs, err)...))
	require.LessOrEqual(t, granted, (swept+keys)*limit)
	require.GreaterOrEqual(t, granted, int64(keys*limit))
}

func TestTwoTransactionsMakeTheSameNewKey(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		for _, commit := range []bool{true, false} {
			pgtest.Clear(t, db)
			limiter := limitertest.New(t, pool, config)
			first, second := limitertest.Begin(t, db.Pool), limitertest.Begin(t, db.Pool)
			_, err := limiter.WithTx(first).AllowN(t.Context(), "key", 8)
			require.NoError(t, err)
			inTx := testkit.Later(func() (ratelimit.Result, error) { return limiter.WithTx(second).AllowN(context.Background(), "key", 3) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)

			var want ratelimit.Result
			if commit {
				require.NoError(t, first.Commit(t.Context()))
				want = ratelimit.Result{Allowed: false, Limit: 10, Remaining: 2}
			} else {
				require.NoError(t, first.Rollback(t.Context()))
				want = ratelimit.Result{Allowed: true, Limit: 10, Remaining: 7}
			}
			got, err := inTx()
			require.NoError(t, err)
			require.Equal(t, want, ratelimit.Result{Allowed: got.Allowed, Limit: got.Limit, Remaining: got.Remaining})
			require.NoError(t, second.Commit(t.Context()))
			require.Equal(t, 10-want.Remaining, limitertest.Taken(t, db.Pool, config, "key"))
		}
	})
}
