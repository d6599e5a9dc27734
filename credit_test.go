package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestGrantMakesARowAndIsWritten(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		balance, err := limiter.Grant(t.Context(), "key", 5)
		require.NoError(t, err)
		require.EqualValues(t, 15, balance.Remaining)
		require.EqualValues(t, 10, balance.Limit)
		require.Positive(t, balance.ResetAfter)
		require.Len(t, pgtest.StoredRows(t, db.Pool, config.Durable), len(limitertest.Model(limiter.Config().Policy).Rules))

		_, err = limiter.AllowN(t.Context(), "key", 11)
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
		for _, want := range []int64{8, 1} {
			result, err := limiter.AllowN(t.Context(), "key", 7)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, want, result.Remaining)
		}
		denied, err := limiter.AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		require.False(t, denied.Allowed)

		// The grant removes the remembered denial.
		_, err = limiter.Grant(t.Context(), "key", 1)
		require.NoError(t, err)
		result, err := limiter.AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Zero(t, result.Remaining)

		// The grant is lost with a Reset.
		_, err = limiter.Grant(t.Context(), "key", 5)
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		result, err = limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
	})
}

func TestGrantIsKeptOrUndoneWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		grant := func(tx pgx.Tx, n, remaining int64) {
			balance, err := limiter.WithTx(tx).Grant(t.Context(), "key", n)
			require.NoError(t, err)
			require.Equal(t, remaining, balance.Remaining)
		}
		remaining := func() int64 {
			result, err := limiter.Peek(t.Context(), "key")
			require.NoError(t, err)
			return result.Remaining
		}
		tx := limitertest.Begin(t, db.Pool)
		grant(tx, 5, 15)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))

		tx = limitertest.Begin(t, db.Pool)
		grant(tx, 5, 15)
		inner := limitertest.Savepoint(t, tx)
		grant(inner, 7, 22)
		require.NoError(t, inner.Rollback(t.Context()))
		grant(tx, 1, 16)
		require.EqualValues(t, 10, remaining())
		other := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 10) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.EqualValues(t, 6, result.Remaining)
	})
}

// Many callers grant, take and refund at once. Each unit is spent once.
func TestCreditIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	const callers, calls = 16, 30
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 2)
	limitertest.EachSlowPolicyAllAndTable(t, 20, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiters := []*ratelimit.Limiter{limitertest.New(t, pools[0], config), limitertest.New(t, pools[1], config)}
		var allowance, out atomic.Int64
		allowance.Store(20)
		errs := make([]error, callers)
		testkit.Together(callers, func(i int) {
			limiter := limiters[i%2]
			for call := 0; call < calls && errs[i] == nil; call++ {
				n := 1 + int64((i+call)%5)
				if (i+call)%6 == 0 {
					allowance.Add(n)
					_, errs[i] = limiter.Grant(t.Context(), "key", n)
					continue
				}
				var result ratelimit.Result
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); result.Allowed {
					if now := out.Add(n); now > allowance.Load() {
						errs[i] = fmt.Errorf("%d of %d are taken", now, allowance.Load())
					}
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		result, err := limiters[0].Peek(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, allowance.Load()-out.Load(), result.Remaining)
		require.Greater(t, out.Load(), int64(100))
	})
}

func TestGrantOfABadAmount(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
	tx := pgtest.Begin(t, db)
	for n, want := range map[int64]error{
		0: ratelimit.ErrInvalidCost, -1: ratelimit.ErrInvalidCost, math.MinInt64: ratelimit.ErrInvalidCost, model.MaxCredit + 1: ratelimit.ErrCostExceedsLimit, math.MaxInt64: ratelimit.ErrCostExceedsLimit,
	} {
		result, err := limiter.Grant(t.Context(), "personal", n)
		require.Zero(t, result)
		_, errTx := limiter.WithTx(tx).Grant(t.Context(), "personal", n)
		for _, err := range []error{err, errTx} {
			require.ErrorIs(t, err, want)
			require.NotEqual(t, errors.Is(err, ratelimit.ErrInvalidCost), errors.Is(err, ratelimit.ErrCostExceedsLimit))
			require.NotContains(t, err.Error(), "personal")
		}
		if n > model.MaxCredit {
			require.EqualError(
				t,
				err,
				fmt.Sprintf("ratelimit: cost exceeds the limit: %d is more than the credit that a key can hold, "+
					"2305843009213693952; grant less", n),
			)
		}
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Empty(t, pgtest.StoredRows(t, db.Pool, false))
}
