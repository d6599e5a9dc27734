package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A customer's request fails after the customer has changed to another policy, and perhaps used it. One limiter has the
// first policy, and With returns a limiter with the second policy.
func TestRefundAfterAChangeOfPolicy(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool
	now := limitertest.T0
	for _, test := range []struct {
		free, paid       ratelimit.Policy
		takes, paidTakes int64
		later            time.Duration
		remain, refunded int64
		muchLater        time.Duration
		remainThen       int64
	}{
		// A refill under the new policy stays in the bucket. Usage that has ended under the old policy is not given
		// back.
		{ratelimit.TokenBucket{Capacity: 10, Refill: 10, Every: time.Hour}, ratelimit.TokenBucket{Capacity: 1000, Refill: 1000, Every: time.Minute}, 9, 0, 30 * time.Second, 500, 501, time.Minute, 1000},
		{ratelimit.SlidingWindow{Limit: 100, Window: 6 * time.Second}, ratelimit.SlidingWindow{Limit: 100, Window: 4 * time.Second}, 10, 0, 6 * time.Second, 94, 95, 8 * time.Second, 100},
		// Usage under the policy with the longer window still counts until this window ends.
		{ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, ratelimit.FixedWindow{Limit: 20, Window: time.Hour}, 9, 10, time.Second, 0, 1, 2 * time.Minute, 1},
		{ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}, ratelimit.SlidingWindow{Limit: 20, Window: time.Hour}, 9, 10, time.Second, 0, 1, 3 * time.Minute, 1},
		{ratelimit.SlidingLog{Limit: 10, Window: time.Minute}, ratelimit.SlidingLog{Limit: 20, Window: time.Hour}, 9, 10, time.Second, 0, 1, 2 * time.Minute, 1},
	} {
		for _, byPaid := range []bool{false, true} {
			name := fmt.Sprint(test.free, " and ", test.paid, byPaid)
			now = limitertest.T0
			free := limitertest.New(
				t,
				pool,
				ratelimit.Config{
					Name:   name,
					Policy: test.free,
				},
				ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}},
			)
			paid := limitertest.With(t, free, test.paid)
			remain := func(want int64) {
				t.Helper()
				peeked, err := paid.Peek(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, want, peeked.Remaining, name)
			}
			_, err := free.AllowN(t.Context(), "key", test.takes)
			require.NoError(t, err)
			slow, err := free.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, slow.Allowed)
			if test.paidTakes > 0 {
				result, err := paid.AllowN(t.Context(), "key", test.paidTakes)
				require.NoError(t, err)
				require.True(t, result.Allowed)
			}
			now = limitertest.T0.Add(test.later)
			remain(test.remain)
			by := free
			if byPaid {
				by = paid
			}
			_, err = by.Refund(t.Context(), slow)
			require.NoError(t, err)
			remain(test.refunded)
			now = limitertest.T0.Add(test.muchLater)
			remain(test.remainThen)
		}
	}
}

// A refund writes only the row of its key, and only if it gives something back.
func TestRefundWritesOnlyWhatItGivesBack(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
		limiter := limitertest.New(t, pool, config, clientConfig)
		refund := func(taken ratelimit.Result, n, remaining int64) ratelimit.Balance {
			balance, err := limiter.RefundN(t.Context(), taken, n)
			require.NoError(t, err)
			require.Equal(t, limitertest.T0, balance.DecidedAt.UTC())
			require.EqualValues(t, 10, balance.Limit)
			require.Equal(t, remaining, balance.Remaining)
			return balance
		}
		version := func() string {
			return pgtest.Scalar[string](
				t,
				db.Pool,
				"SELECT string_agg(format('%s %s', ctid, xmin), ' ' ORDER BY prefix) FROM "+pgtest.Table(config.Durable),
			)
		}

		refund(limitertest.Forged(limiter, "key", 3), 3, 10)
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable)) // a refund makes no row

		seven, err := limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		require.Positive(t, refund(seven, 3, 6).ResetAfter)
		require.EqualValues(t, 4, limitertest.Taken(t, db.Pool, config, "key"))

		require.Zero(t, refund(seven, 4, 10).ResetAfter)
		row := pgtest.StoredRows(t, db.Pool, config.Durable)[modeltest.RowID{Name: "test", Key: "key"}]
		require.Equal(t, limitertest.T0.UnixMicro(), row.ExpiresAt)
		before := version()
		refund(limitertest.Forged(limiter, "key", 3), 1, 10)
		require.Equal(t, before, version(), "it had nothing to give back")

		// Calls for other keys do not wait for a locked row, but a refund of its key does.
		seven, err = limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		tx := limitertest.Hold(t, db, config, "key")
		waiting := testkit.Later(func() (ratelimit.Balance, error) { return limiter.Refund(context.Background(), seven) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := waiting()
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
	})
}

func TestRefundIsKeptOrTakenAgainWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		eight, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		refund := func(tx pgx.Tx, n, remaining int64) {
			balance, err := limiter.WithTx(tx).RefundN(t.Context(), eight, n)
			require.NoError(t, err)
			require.Equal(t, remaining, balance.Remaining)
		}

		tx := limitertest.Begin(t, db.Pool)
		refund(tx, 3, 5)
		inner := limitertest.Savepoint(t, tx)
		refund(inner, 5, 10)
		require.NoError(t, inner.Rollback(t.Context()))
		refund(tx, 1, 6)
		peek, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 2, peek.Remaining) // the transaction's refund is not visible to others yet
		require.NoError(t, tx.Rollback(t.Context()))
		require.EqualValues(t, 8, limitertest.Taken(t, db.Pool, config, "key"))

		tx = limitertest.Begin(t, db.Pool)
		refund(tx, 3, 5)
		other := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 5) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 10, limitertest.Taken(t, db.Pool, config, "key"))
	})
}

// Callers take units and give them back. At no time is more than the limit taken. At the end, the callers' sums equal
// what the row counts.
func TestRefundsAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	const callers, calls = 16, 30
	// The clock stands still, because a refund does not return tokens that have been refilled.
	clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 2)
	limitertest.EachSlowPolicyAllAndTable(t, 20, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiters := []*ratelimit.Limiter{limitertest.New(t, pools[0], config, clientConfig), limitertest.New(t, pools[1], config, clientConfig)}
		var out, refunded atomic.Int64 // out counts the units that are surely taken, and not being refunded
		errs := make([]error, callers)
		testkit.Together(callers, func(i int) {
			limiter := limiters[i%2]
			var mine []ratelimit.Result
			for call := range calls {
				n := 1 + int64((i+call)%5)
				var result ratelimit.Result
				if len(mine) > 0 && call%3 > 0 {
					at := call % len(mine)
					result = mine[at]
					mine = slices.Delete(mine, at, at+1)
					n = limitertest.Receipt(result).Left()
					out.Add(-n)
					if _, errs[i] = limiter.Refund(t.Context(), result); errs[i] != nil {
						return
					}
					refunded.Add(n)
					continue
				}
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); errs[i] != nil {
					return
				}
				if result.Allowed {
					mine = append(mine, result)
					if now := out.Add(n); now > 20 {
						errs[i] = fmt.Errorf("%d of 20 are taken", now)
						return
					}
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, out.Load(), limitertest.Taken(t, db.Pool, config, "key"))
		require.Greater(t, refunded.Load(), int64(100))
	})
}

// Bad refunds fail before a statement is sent.
func TestWhatCannotBeRefunded(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	config := ratelimit.Config{Name: "a", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}}
	// A busy machine may stand still for a second.
	limiter := limitertest.New(t, pool, config, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
	take := func(n int64) ratelimit.Result {
		result, err := limiter.AllowN(t.Context(), "personal", n)
		require.NoError(t, err)
		return result
	}
	six := take(6)
	denied := take(5)
	require.False(t, denied.Allowed)
	cached := take(5)
	require.Equal(t, ratelimit.SourceCachedDenial, cached.Source)
	for name, result := range map[string]ratelimit.Result{"the zero Result": {}, "a denial": denied, "one that was remembered": cached, "a Peek": take(0)} {
		_, err := limiter.Refund(t.Context(), result)
		require.ErrorIs(t, err, ratelimit.ErrNothingToRefund, name)
		_, err = limiter.RefundN(t.Context(), result, 1)
		require.ErrorIs(t, err, ratelimit.ErrNothingToRefund, name)
	}

	// A limiter with another name, table, schema or database cannot refund the result. A limiter with another policy
	// can refund it.
	other := func(pool *pgxpool.Pool, change func(*ratelimit.Config, *ratelimit.ClientConfig)) {
		config, clientConfig := config, ratelimit.ClientConfig{}
		change(&config, &clientConfig)
		l := limitertest.New(t, pool, config, clientConfig)
		_, err := l.Refund(t.Context(), six)
		var refused *ratelimit.RefundError
		require.ErrorAs(t, err, &refused)
		require.NotContains(t, err.Error(), "personal")
	}
	other(pool, func(c *ratelimit.Config, _ *ratelimit.ClientConfig) { c.Name = "b" })
	other(pool, func(c *ratelimit.Config, _ *ratelimit.ClientConfig) { c.Durable = true })
	other(pool, func(_ *ratelimit.Config, c *ratelimit.ClientConfig) { c.Schema = "public" })
	other(db.NewPool(t, nil), func(*ratelimit.Config, *ratelimit.ClientConfig) {})

	back, err := limitertest.With(t, limitertest.New(t, pool, config), ratelimit.FixedWindow{Limit: 3, Window: limitertest.Year}).RefundN(t.Context(), six, 2)
	require.NoError(t, err)
	require.EqualValues(t, 6, back.Remaining) // under the policy of the take

	// Each unit is given back only once, whichever call comes first.
	var given atomic.Int64
	testkit.Together(8, func(int) {
		if _, err := limiter.RefundN(context.Background(), six, 1); err == nil {
			given.Add(1)
		}
	})
	require.EqualValues(t, 4, given.Load())
	_, err = limiter.Refund(t.Context(), six)
	require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
	require.Zero(t, limitertest.Taken(t, db.Pool, config, "personal"))

	// A transaction may be repeated, so its refund can be repeated too.
	four := take(4)
	for range 2 {
		tx := pgtest.Begin(t, db)
		result, err := limiter.WithTx(tx).Refund(t.Context(), four)
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.EqualValues(t, 4, limitertest.Receipt(four).Left())
}
