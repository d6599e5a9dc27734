package ratelimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestChargeIsCountedAboveTheLimit(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		charge := func(n, remaining, owed int64) ratelimit.Charged {
			t.Helper()
			got, err := limiter.Charge(t.Context(), "personal", n)
			require.NoError(t, err)
			if remaining > 0 { // otherwise the first policy of an All has no more left than the last
				require.EqualValues(t, 10, got.Limit)
			}
			require.Equal(t, remaining, got.Remaining)
			require.Equal(t, owed, got.Owed)
			require.Equal(t, remaining == 0, got.RetryAfter > 0)
			return got
		}
		require.Zero(t, charge(0, 10, 0).ResetAfter)
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))
		require.Positive(t, charge(4, 6, 0).ResetAfter)
		result, err := limiter.AllowN(t.Context(), "personal", 5)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 1, result.Remaining)
		owing := charge(31, 0, 30)
		result, err = limiter.Allow(t.Context(), "personal")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.InDelta(t, owing.RetryAfter, result.RetryAfter, float64(time.Hour))
		require.Less(t, result.RetryAfter, owing.RetryAfter+time.Second)

		// The key may owe 100.
		rows := pgtest.StoredRows(t, db.Pool, config.Durable)
		_, err = limiter.Charge(t.Context(), "personal", 71)
		require.ErrorIs(t, err, ratelimit.ErrOwesTooMuch)
		require.NotContains(t, err.Error(), "personal")
		require.Equal(t, &ratelimit.ChargeError{Charge: 71, Accepted: 70}, err)
		require.Equal(t, rows, pgtest.StoredRows(t, db.Pool, config.Durable))
		charge(70, 0, 100)

		// A charge is given back as a take is.
		_, err = limiter.Refund(t.Context(), owing.Result())
		require.NoError(t, err)
		require.ErrorIs(t, func() error { _, err := limiter.Refund(t.Context(), owing.Result()); return err }(), ratelimit.ErrNothingToRefund)
		_, err = limiter.Charge(t.Context(), "personal", -1)
		require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
	})
}

// At one instant, refunds undo charges, also by a receipt. (A bucket that owes gives back what was charged last.)
func TestRefundsUndoCharges(t *testing.T) {
	t.Parallel()
	now := ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
	db := pgtest.New(t)
	pool, otherPool := db.NewPool(t, nil), db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config, now)
		_, err := limiter.Grant(t.Context(), "key", 3)
		require.NoError(t, err)
		first, err := limiter.Charge(t.Context(), "key", 25) // 10, 3 of credit and 12 that are owed
		require.NoError(t, err)
		require.EqualValues(t, 12, first.Owed)
		second, err := limiter.Charge(t.Context(), "key", 60)
		require.NoError(t, err)
		require.EqualValues(t, 72, second.Owed)

		text, err := second.Result().Receipt()
		require.NoError(t, err)
		there := limitertest.New(t, otherPool, config, now)
		parsed, err := there.ParseReceipt(text)
		require.NoError(t, err)
		_, err = there.RefundN(t.Context(), parsed, 20)
		require.NoError(t, err)
		_, err = there.Refund(t.Context(), parsed)
		require.NoError(t, err)
		left, err := limiter.Charge(t.Context(), "key", 0)
		require.NoError(t, err)
		require.EqualValues(t, 12, left.Owed)
		balance, err := limiter.Refund(t.Context(), first.Result())
		require.NoError(t, err)
		require.EqualValues(t, 13, balance.Remaining)
	})
}

func TestChargeIsKeptOrUndoneWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		tx := limitertest.Begin(t, db.Pool)
		charged, err := limiter.WithTx(tx).Charge(t.Context(), "key", 15)
		require.NoError(t, err)
		require.EqualValues(t, 5, charged.Owed)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))

		tx = limitertest.Begin(t, db.Pool)
		_, err = limiter.WithTx(tx).Charge(t.Context(), "key", 15)
		require.NoError(t, err)
		_, err = limiter.WithTx(tx).Charge(t.Context(), "key", 96) // an error that leaves the transaction as it is
		require.Equal(t, &ratelimit.ChargeError{Charge: 96, Accepted: 95}, err)
		other := testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "key") })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.False(t, result.Allowed)
	})
}

// While the database is away, a charge is an error, whatever OnFailure says: nobody could count it.
func TestChargeIsNotAnsweredByOnFailure(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]ratelimit.FailureMode{
		"open": ratelimit.FailOpen(), "closed": ratelimit.FailClosed(), "local": ratelimit.FallbackLocal(1),
	} {
		db := limitertest.NewModelDB()
		limiter := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, OnFailure: mode,
		})
		charged, err := limiter.Charge(t.Context(), "key", 12)
		require.NoError(t, err)
		require.EqualValues(t, 2, charged.Owed)
		db.Set(limitertest.TurnedAway)
		for range 10 { // the breaker opens meanwhile
			_, err = limiter.Charge(t.Context(), "key", 1)
			require.ErrorIs(t, err, ratelimit.ErrUnavailable, name)
		}
	}
}

// A remembered denial is forgotten with a charge, so that the next one says how much longer it lasts.
func TestDenialAfterAChargeTellsTheTruth(t *testing.T) {
	t.Parallel()
	limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour},
	}, ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)})
	_, err := limiter.AllowN(t.Context(), "key", 10)
	require.NoError(t, err)
	for _, want := range []struct {
		source     ratelimit.Source
		retryAfter time.Duration
	}{
		{ratelimit.SourceDatabase, time.Hour}, {ratelimit.SourceCachedDenial, time.Hour},
		{ratelimit.SourceDatabase, 6 * time.Hour}, {ratelimit.SourceCachedDenial, 6 * time.Hour},
	} {
		if want.source == ratelimit.SourceDatabase && want.retryAfter > time.Hour {
			_, err = limiter.Charge(t.Context(), "key", 5)
			require.NoError(t, err)
		}
		result, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Equal(t, want.source, result.Source)
		require.Equal(t, want.retryAfter, result.RetryAfter)
	}
}

// Policies in the table decide too. A row of mode off counts nothing, and a ban stops no charge.
func TestChargesUnderPoliciesOfTheTable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES
		('test', 'large', 'enforce', 'fixed 20/365d', 'why'), ('test', 'off', 'off', NULL, 'why'), ('test', 'banned', 'deny', NULL, 'why')`)
	policies := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, Policies: policies,
	})
	limitertest.WaitUntilKnown(t, policies, db.Pool)
	for key, want := range map[string]int64{"small": 15, "large": 5, "off": 0, "banned": 15} {
		charged, err := limiter.Charge(t.Context(), key, 25)
		require.NoError(t, err)
		require.Equal(t, want, charged.Owed, key)
	}
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 3)
}
