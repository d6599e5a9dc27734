package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// smallPools are several pools of one database, as several processes have.
func smallPools(t *testing.T, db *pgtest.DB, n int) []*pgxpool.Pool {
	t.Helper()
	// The pools' statements wait for a row for 25 ms at most. So deadlocks are looked for earlier than that, where the
	// role may say so.
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN
		IF (SELECT rolsuper FROM pg_roles WHERE rolname = session_user) THEN
			EXECUTE format('ALTER DATABASE %I SET deadlock_timeout = ''5ms''', current_database());
		END IF;
	END $$`)
	pools := make([]*pgxpool.Pool, n)
	for i := range pools {
		pools[i] = db.NewPool(t, func(config *pgxpool.Config) {
			config.MaxConns = 4
			config.ConnConfig.RuntimeParams["application_name"] = "limiter"
		})
	}
	return pools
}

// Many callers ask for a new key at once, over several pools and limiters. Exactly Limit are admitted, each with
// another Remaining.
func TestExactlyLimitAreAdmitted(t *testing.T) {
	t.Parallel()

	const limit, goroutines = 120, 200
	eachSlowPolicyAndTable(t, limit, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		pools := smallPools(t, db, 4)
		for variant, client := range map[string]ClientConfig{
			"coalesced": {}, "one call in each statement": {MaxBatch: 1, MaxInFlight: 16},
		} {
			config := config
			config.NoDenialCache = client.MaxBatch == 1
			limiters := make([]*Limiter, 2*len(pools))
			for i := range limiters {
				limiters[i] = newLimiter(t, pools[i%len(pools)], config, client)
			}
			for round := range 2 * rounds(t) {
				key := fmt.Sprint(variant, " ", round)
				results, errs := make([]Result, goroutines), make([]error, goroutines)
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
				require.EqualValues(t, limit, taken(t, db.Pool, config, key))
			}
		}
	})
}

// Costs of all sizes for one key never add up to more than Limit, and nothing is left that would have fitted.
func TestCostsAddUpToTheLimit(t *testing.T) {
	t.Parallel()

	const limit = 1000
	eachSlowPolicyAndTable(t, limit, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		pools := smallPools(t, db, 2)
		limiters := []*Limiter{newLimiter(t, pools[0], config), newLimiter(t, pools[1], config)}
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
		require.Equal(t, granted, taken(t, db.Pool, config, "key"))
		require.Greater(t, granted, int64(limit-9)) // or the largest cost would have fitted

		// What is left can still be had, and nothing more.
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

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 4)
		require.NoError(t, err)

		sweeper := pgtest.Begin(t, db)
		pgtest.Exec(t, sweeper, "DELETE FROM "+pgtest.Table(config.Durable))
		wait := testkit.Later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, sweeper.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 7, result.Remaining)
		require.EqualValues(t, 3, taken(t, db.Pool, config, "key"))
	})
}

func TestRowDeletedAndMadeAgainWhileWeWaitForIt(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 9)
		require.NoError(t, err)

		// Reset, and one more taken, in one transaction of somebody's.
		somebody := pgtest.Begin(t, db)
		require.NoError(t, limiter.WithTx(somebody).Reset(t.Context(), "key"))
		_, err = limiter.WithTx(somebody).AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		wait := testkit.Later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 5, result.Remaining)
		require.EqualValues(t, 5, taken(t, db.Pool, config, "key"))
	})
}

// The look finds "a" missing and stops there. While the INSERT waits for somebody else's "a", the row of "m" is
// deleted, which the look has not reached. The row of "n" is deleted too, and made again.
func TestRowDeletedBetweenLookAndInsert(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		for _, commit := range []bool{true, false} {
			db := pgtest.New(t)
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			for _, key := range []string{"m", "n", "z"} {
				_, err := limiter.AllowN(t.Context(), key, 4)
				require.NoError(t, err)
			}

			somebody := pgtest.Begin(t, db)
			_, err := limiter.WithTx(somebody).AllowN(t.Context(), "a", 5)
			require.NoError(t, err)
			wait := limiter.takeLater("z", "n", "m", "a")
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			pgtest.Exec(t, db.Pool, "DELETE FROM "+pgtest.Table(config.Durable)+" WHERE key IN ('m', 'n')")
			_, err = limiter.AllowN(t.Context(), "n", 2)
			require.NoError(t, err)
			if commit {
				require.NoError(t, somebody.Commit(t.Context()))
			} else {
				require.NoError(t, somebody.Rollback(t.Context()))
			}

			elements, err := wait()
			require.NoError(t, err)
			want := map[string]int64{"a": 1, "m": 1, "n": 3, "z": 5}
			if commit {
				want["a"] += 5
			}
			for _, e := range elements {
				require.EqualValues(t, 1, e.Decision.Granted, e.Key)
				require.Equal(t, 10-want[e.Key], e.Decision.Remaining, e.Key)
				require.Equal(t, want[e.Key], taken(t, db.Pool, config, e.Key), e.Key)
			}
		}
	})
}

// Somebody deletes rows at full speed. That takes nothing away but what the rows hold: between two sweeps at most
// Limit are admitted, and no call fails.
func TestSweeperAtFullSpeed(t *testing.T) {
	t.Parallel()

	const limit, calls, keys = 3, 150, 3
	db := pgtest.New(t)
	pools := smallPools(t, db, 3)
	config := Config{
		Name:          "test",
		Policy:        FixedWindow{Limit: limit, Window: year},
		NoDenialCache: true,
	}

	ctx, stop := context.WithCancel(t.Context())
	sweeps := testkit.Later(func() (sweeps int64, err error) {
		for i := 0; ctx.Err() == nil; i++ {
			// The sweeper takes one row at a time. If it held one row and waited for another, it would deadlock
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
		limiter, err := newLimiter(t, pools[i%len(pools)], config, ClientConfig{MaxBatch: 4}), error(nil)
		for call := 0; call < calls && err == nil; call++ {
			var result Result
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

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		for _, commit := range []bool{true, false} {
			db := pgtest.New(t)
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			first, second := pgtest.Begin(t, db), pgtest.Begin(t, db)
			_, err := limiter.WithTx(first).AllowN(t.Context(), "key", 8)
			require.NoError(t, err)
			inTx := testkit.Later(func() (Result, error) { return limiter.WithTx(second).AllowN(context.Background(), "key", 3) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)

			var want Result
			if commit {
				require.NoError(t, first.Commit(t.Context()))
				want = Result{Allowed: false, Limit: 10, Remaining: 2}
			} else {
				require.NoError(t, first.Rollback(t.Context()))
				want = Result{Allowed: true, Limit: 10, Remaining: 7}
			}
			got, err := inTx()
			require.NoError(t, err)
			require.Equal(t, want, Result{Allowed: got.Allowed, Limit: got.Limit, Remaining: got.Remaining})
			require.NoError(t, second.Commit(t.Context()))
			require.Equal(t, 10-want.Remaining, taken(t, db.Pool, config, "key"))
		}
	})
}
