package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// eachHoldingLimiter runs a test for each algorithm, on Postgres and in memory, with a clock that stands still until
// the test moves it.
func eachHoldingLimiter(
	t *testing.T, limit int64, test func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config),
) {
	t.Helper()
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		t.Run("on Postgres", func(t *testing.T) { test(t, pool, config) })
		t.Run("in memory", func(t *testing.T) { test(t, &memdb.DB{}, config) })
	})
}

// movable returns a client configuration whose clock moves only by the result.
func movable() (ratelimit.ClientConfig, func(time.Duration)) {
	var at atomic.Int64
	at.Store(time.Now().Truncate(time.Second).UnixMicro())
	config := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return time.UnixMicro(at.Load()) }}}
	return config, func(by time.Duration) { at.Add(by.Microseconds()) }
}

func hold(t *testing.T, l *ratelimit.Limiter, n int64, ttl time.Duration) ratelimit.HoldResult {
	t.Helper()
	result, err := l.Hold(t.Context(), "personal", n, ttl)
	require.NoError(t, err)
	require.Equal(t, result.Allowed, result.Hold != nil)
	return result
}

func settle(t *testing.T, h *ratelimit.Hold, used ...int64) ratelimit.Settlement {
	t.Helper()
	settlement, err := h.Settle(t.Context(), used...)
	require.NoError(t, err)
	return settlement
}

func remaining(t *testing.T, l *ratelimit.Limiter) int64 {
	t.Helper()
	result, err := l.Peek(t.Context(), "personal")
	require.NoError(t, err)
	return result.Remaining
}

func TestHoldSetsUnitsAside(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		client, pass := movable()
		l := limitertest.New(t, db, config, client)
		now := client.Test.Now()

		first := hold(t, l, 4, time.Minute)
		require.EqualValues(t, 6, first.Remaining)
		require.EqualValues(t, 4, first.Held)
		require.True(t, first.Hold.EndsAt().Equal(now.Add(time.Minute)))
		require.GreaterOrEqual(t, first.ResetAfter, time.Minute)
		require.ErrorIs(t, func() error { _, err := l.Refund(t.Context(), first.Result); return err }(), ratelimit.ErrNothingToRefund)
		hold(t, l, 5, 2*time.Minute)
		e, err := l.Explain(t.Context(), "personal")
		require.NoError(t, err)
		require.EqualValues(t, 9, e.State.Held)
		require.EqualValues(t, 1, e.State.Remaining)

		// The denials say when enough has ended.
		denied := hold(t, l, 5, time.Minute)
		require.False(t, denied.Allowed)
		require.Equal(t, time.Minute, denied.RetryAfter)
		require.EqualValues(t, 9, denied.Held)
		result, err := l.AllowN(t.Context(), "personal", 6)
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Equal(t, 2*time.Minute, result.RetryAfter)
		result, err = l.AllowN(t.Context(), "personal", 1)
		require.NoError(t, err)
		require.True(t, result.Allowed)

		pass(time.Minute - time.Microsecond)
		require.Zero(t, remaining(t, l))
		pass(time.Microsecond)
		require.EqualValues(t, 4, remaining(t, l))
		pass(time.Minute)
		require.EqualValues(t, 9, remaining(t, l))
	})
}

func TestSettleCountsWhatWasUsed(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		client, pass := movable()
		l := limitertest.New(t, db, config, client)
		low := hold(t, l, 5, time.Minute).Hold
		exact := hold(t, l, 3, time.Minute).Hold
		cancelled := hold(t, l, 2, time.Minute).Hold
		require.Zero(t, remaining(t, l))

		want := ratelimit.Settlement{Used: 2, Each: []int64{2}, At: client.Test.Now()}
		require.Equal(t, want, settle(t, low, 2))
		require.EqualValues(t, 3, remaining(t, l))
		pass(time.Second)
		require.Equal(t, want, settle(t, low, 7), "a repetition repeats the first answer")
		require.Equal(t, want, settle(t, low, 0))
		require.EqualValues(t, 3, remaining(t, l))
		settle(t, exact, 3)
		require.EqualValues(t, 3, remaining(t, l))
		settlement, err := cancelled.Cancel(t.Context())
		require.NoError(t, err)
		require.Zero(t, settlement.Used)
		require.EqualValues(t, 5, remaining(t, l))

		// Above what was held, and above the limit.
		high := hold(t, l, 1, time.Minute).Hold
		require.EqualValues(t, 25, settle(t, high, 25).Used)
		result, err := l.Allow(t.Context(), "personal")
		require.NoError(t, err)
		require.False(t, result.Allowed)

		// Too much: the hold stays as it is.
		require.NoError(t, l.Reset(t.Context(), "personal"))
		large := hold(t, l, 4, time.Minute).Hold
		_, err = large.Settle(t.Context(), 111)
		require.Equal(t, &ratelimit.ChargeError{Charge: 111, Accepted: 110}, err)
		require.EqualValues(t, 6, remaining(t, l))
		require.EqualValues(t, 110, settle(t, large, 110).Used)
	})
}

func TestHoldsThatHaveEnded(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		client, pass := movable()
		l := limitertest.New(t, db, config, client)
		extended := hold(t, l, 4, time.Minute).Hold
		late := hold(t, l, 5, time.Minute).Hold
		pass(30 * time.Second)
		require.NoError(t, extended.Extend(t.Context(), time.Minute))
		require.True(t, extended.EndsAt().Equal(client.Test.Now().Add(time.Minute)))
		require.NoError(t, extended.Extend(t.Context(), time.Second), "it ends no earlier")
		require.True(t, extended.EndsAt().Equal(client.Test.Now().Add(time.Minute)))
		pass(30 * time.Second)
		require.EqualValues(t, 6, remaining(t, l))
		require.ErrorIs(t, late.Extend(t.Context(), time.Minute), ratelimit.ErrHoldEnded)
		settlement := settle(t, late, 3)
		require.True(t, settlement.Late)
		require.EqualValues(t, 3, settlement.Used)
		require.EqualValues(t, 3, remaining(t, l))
		pass(30 * time.Second)
		require.EqualValues(t, 7, remaining(t, l))
		require.ErrorIs(t, extended.Extend(t.Context(), time.Minute), ratelimit.ErrHoldEnded)

		reset := hold(t, l, 4, time.Minute).Hold
		require.NoError(t, l.Reset(t.Context(), "personal"))
		require.EqualValues(t, 10, remaining(t, l))
		require.ErrorIs(t, reset.Extend(t.Context(), time.Minute), ratelimit.ErrHoldEnded)
		require.True(t, settle(t, reset, 1).Late)

		forgotten := hold(t, l, 4, time.Minute).Hold
		pass(24*time.Hour + time.Minute)
		_, err := forgotten.Settle(t.Context(), 1)
		require.ErrorIs(t, err, ratelimit.ErrHoldUnknown)
		require.ErrorIs(t, forgotten.Extend(t.Context(), time.Minute), ratelimit.ErrHoldUnknown)
	})
}

// Another process settles a hold by its text.
func TestHoldFromText(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		ctx := t.Context()
		h := hold(t, limitertest.New(t, db, config), 6, time.Minute).Hold
		text := h.String()
		require.NotContains(t, text, "personal")
		require.NotContains(t, fmt.Sprintf("%v %+v %#v %s", h, h, h, h), "personal")

		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{})
		l := limitertest.Of(t, client, config)
		found, err := l.HoldFromText(ctx, text)
		require.NoError(t, err)
		require.Equal(t, text, found.String())
		require.True(t, h.EndsAt().Equal(found.EndsAt()))
		require.NoError(t, found.Extend(ctx, 2*time.Minute))
		require.Greater(t, found.EndsAt(), h.EndsAt())

		other, durable := config, config
		other.Name, durable.Durable = "other", !config.Durable
		var refused *ratelimit.HoldError
		_, err = limitertest.Of(t, client, other).HoldFromText(ctx, text)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "other", refused.Limiter)
		require.NotContains(t, err.Error(), "personal")
		_, err = limitertest.Of(t, client, durable).HoldFromText(ctx, text)
		require.ErrorAs(t, err, &refused)
		_, err = ratelimit.HoldFromText(ctx, text, l, limitertest.New(t, db, config))
		require.ErrorAs(t, err, &refused)
		_, err = ratelimit.HoldFromText(ctx, text)
		require.ErrorAs(t, err, &refused)
		for _, bad := range []string{
			"x", text[1:], text[:len(text)-1], text + "d", strings.ToUpper(text), text + " ", " " + text, strings.ReplaceAll(text, "-", ""),
			text + "\n", map[bool]string{true: strings.TrimSuffix(text, "d") + "e", false: strings.TrimSuffix(text, "e") + "d"}[config.Durable],
		} {
			_, err = l.HoldFromText(ctx, bad)
			require.ErrorAs(t, err, &refused, bad)
		}
		digit := map[bool]string{true: "1", false: "0"}[text[0] == '0']
		_, err = l.HoldFromText(ctx, digit+text[1:])
		require.ErrorIs(t, err, ratelimit.ErrHoldUnknown)

		// Limiters that the hold does not belong to may be passed too.
		found, err = ratelimit.HoldFromText(ctx, text, limitertest.Of(t, client, other), l)
		require.NoError(t, err)
		require.Equal(t, []int64{0, 2}, settle(t, found, 7, 2).Each)
		require.EqualValues(t, 8, remaining(t, l))
		require.EqualValues(t, 2, settle(t, h, 5).Used)
	})
}

// A text of no known hold leaves the caller's transaction as it is.
func TestHoldFromTextOnATransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller")
	db := pgtest.New(t)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		tx := limitertest.Begin(t, db.Pool)
		l := limitertest.New(t, tx, config)
		_, err := l.HoldFromText(t.Context(), "00000000-0000-4000-8000-000000000000.e")
		require.ErrorIs(t, err, ratelimit.ErrHoldUnknown)
		found, err := l.HoldFromText(t.Context(), hold(t, l, 4, time.Minute).Hold.String())
		require.NoError(t, err)
		require.EqualValues(t, 3, settle(t, found, 3).Used)
		require.NoError(t, tx.Commit(t.Context()))
	})
}

// HoldFromText forgets holds by the clock of the test, as Settle does.
func TestHoldFromTextByTheClockOfATest(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		for _, at := range []time.Time{limitertest.T0, limitertest.T0.Add(100 * limitertest.Year)} {
			now := at
			l := limitertest.New(t, db, config, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})
			text := hold(t, l, 4, time.Minute).Hold.String()
			now = at.Add(24*time.Hour + time.Minute - time.Microsecond)
			found, err := l.HoldFromText(t.Context(), text)
			require.NoError(t, err)
			require.True(t, found.EndsAt().Equal(at.Add(time.Minute)))
			now = at.Add(24*time.Hour + time.Minute)
			_, err = l.HoldFromText(t.Context(), text)
			require.ErrorIs(t, err, ratelimit.ErrHoldUnknown)
		}
	})
}

func TestHoldAll(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]ratelimit.DBTX{"on Postgres": pgtest.New(t).NewPool(t, nil), "in memory": &memdb.DB{}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx := t.Context()
			client := limitertest.NewClient(t, db, ratelimit.ClientConfig{})
			day := limitertest.Of(t, client, ratelimit.Config{
				Name: "day", Durable: true, Policy: ratelimit.FixedWindow{Limit: 100, Window: limitertest.Year},
			})
			rate := limitertest.Of(t, client, ratelimit.Config{Name: "rate", Policy: ratelimit.All(
				ratelimit.SlidingWindow{Limit: 30, Window: limitertest.Year}, ratelimit.SlidingLog{Limit: 20, Window: limitertest.Year})})
			left := func(l *ratelimit.Limiter, key string, want int64) {
				t.Helper()
				result, err := l.Peek(ctx, key)
				require.NoError(t, err)
				require.Equal(t, want, result.Remaining)
			}
			held, err := ratelimit.HoldAll(ctx, time.Minute, day.Request("{a}", 40), rate.Request("{a}:x", 15))
			require.NoError(t, err)
			require.True(t, held.Allowed)
			require.EqualValues(t, 15, held.Each[1].Held)
			require.True(t, strings.HasSuffix(held.Hold.String(), ".ed"))
			left(day, "{a}", 60)
			left(rate, "{a}:x", 5)
			denied, err := ratelimit.HoldAll(ctx, time.Minute, day.Request("{a}", 40), rate.Request("{a}:x", 6))
			require.NoError(t, err)
			require.False(t, denied.Allowed)
			require.Nil(t, denied.Hold)
			require.Zero(t, denied.Each[0].RetryAfter)
			require.InDelta(t, time.Minute, denied.RetryAfter, float64(30*time.Second))
			left(day, "{a}", 60)

			// One number for each, or one for all. Either all are settled, or none.
			_, err = held.Hold.Settle(ctx, 1, 2, 3)
			var refused *ratelimit.HoldError
			require.ErrorAs(t, err, &refused)
			_, err = held.Hold.Settle(ctx)
			require.ErrorAs(t, err, &refused)
			_, err = held.Hold.Settle(ctx, 30, 500)
			require.Equal(t, &ratelimit.ChargeError{Charge: 500, Accepted: 220}, err)
			_, err = held.Hold.Settle(ctx, 30, 1<<62+1)
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
			_, err = held.Hold.Settle(ctx, 30, -1)
			require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
			left(day, "{a}", 60)
			require.NoError(t, held.Hold.Extend(ctx, time.Hour))
			settlement := settle(t, held.Hold, 30, 0)
			require.Equal(t, []int64{30, 0}, settlement.Each)
			require.EqualValues(t, 30, settlement.Used)
			require.Equal(t, settlement, settle(t, held.Hold, 5))
			left(day, "{a}", 70)
			left(rate, "{a}:x", 20)

			// Two keys of one limiter share the number of the limiter that finds the hold.
			held, err = ratelimit.HoldAll(ctx, time.Minute, rate.Request("{a}:x", 4), day.Request("{a}", 7), rate.Request("{a}:yy", 5))
			require.NoError(t, err)
			found, err := ratelimit.HoldFromText(ctx, held.Hold.String(), day, rate)
			require.NoError(t, err)
			_, err = day.HoldFromText(ctx, held.Hold.String())
			require.ErrorAs(t, err, &refused)
			_, err = day.HoldFromText(ctx, strings.TrimSuffix(held.Hold.String(), "d"))
			require.ErrorAs(t, err, &refused)
			require.Equal(t, []int64{9, 3}, settle(t, found, 9, 3).Each)
			require.Equal(t, []int64{3, 9, 3}, settle(t, held.Hold, 1, 1, 1).Each)
			left(day, "{a}", 61)
			left(rate, "{a}:x", 17)
			left(rate, "{a}:yy", 17)

			_, err = ratelimit.HoldAll(ctx, time.Minute, day.Request("{a}", 1), rate.Request("", 1))
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
		})
	}
}

// Without a proxy, all keys may be held together. A proxy does not look for a hold of keys that its shards may part.
func TestHoldAllOfKeysThatAShardMayPart(t *testing.T) {
	t.Parallel()
	db, ctx := pgtest.New(t), t.Context()
	l := limitertest.New(t, db.NewPool(t, nil), ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
	})
	const shards = 4 // of the proxy, if there is one
	beside := "b"    // a key that is on one shard with a by chance
	for shardkey.Of(beside, shards) != shardkey.Of("a", shards) {
		beside += "b"
	}
	for _, keys := range [][2]string{{"{a}:x", "{a}:y"}, {"{a}:z", "a"}, {"a", beside}} {
		held, err := ratelimit.HoldAll(ctx, time.Minute, l.Request(keys[0], 3), l.Request(keys[1], 3))
		require.NoError(t, err)
		apart := shardkey.Tag(keys[0]) != shardkey.Tag(keys[1])
		require.Equal(t, map[bool]byte{true: '8', false: '4'}[apart], held.Hold.String()[14], keys)
		found, err := l.HoldFromText(ctx, held.Hold.String())
		if apart && pgtest.Shards() > 0 {
			require.ErrorIs(t, err, ratelimit.ErrSharded)
			require.Equal(t, []int64{1, 1}, settle(t, held.Hold, 1).Each)
			continue
		}
		require.NoError(t, err)
		require.EqualValues(t, 1, settle(t, found, 1).Used)
		require.Equal(t, []int64{1, 1}, settle(t, held.Hold, 2).Each)
	}
}

func TestBadHolds(t *testing.T) {
	t.Parallel()
	l := limitertest.New(t, &memdb.DB{}, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
	var refused *ratelimit.HoldError
	h := hold(t, l, 1, 24*time.Hour).Hold
	for _, ttl := range []time.Duration{0, -time.Second, time.Millisecond - 1, 24*time.Hour + 1, 100 * limitertest.Year} {
		_, err := l.Hold(t.Context(), "key", 1, ttl)
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "invalid_hold", ratelimit.ErrorKind(err))
		_, err = ratelimit.HoldAll(t.Context(), ttl, l.Request("key", 1))
		require.ErrorAs(t, err, &refused)
		require.ErrorAs(t, h.Extend(t.Context(), ttl), &refused)
	}
	for n, want := range map[int64]error{0: ratelimit.ErrInvalidCost, -1: ratelimit.ErrInvalidCost, 11: ratelimit.ErrCostExceedsLimit} {
		result, err := l.Hold(t.Context(), "key", n, time.Minute)
		require.ErrorIs(t, err, want)
		require.Nil(t, result.Hold)
	}
	_, err := l.Hold(t.Context(), "", 1, time.Minute)
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	result, err := l.Hold(ended, "key", 1, time.Minute)
	require.ErrorIs(t, err, context.Canceled)
	require.Nil(t, result.Hold)
	_, err = h.Settle(ended, 1)
	require.ErrorIs(t, err, context.Canceled)
	for _, none := range []*ratelimit.Hold{nil, {}, nil} {
		_, err := none.Settle(t.Context(), 1)
		require.ErrorAs(t, err, &refused)
		require.ErrorAs(t, none.Extend(t.Context(), time.Minute), &refused)
		require.Empty(t, none.String())
		require.Zero(t, none.EndsAt())
	}
	var config *ratelimit.ConfigError
	_, err = h.WithTx(nil).Cancel(t.Context())
	require.ErrorAs(t, err, &config)
	require.EqualValues(t, 9, remaining(t, l))
}

func TestHoldsInTransactions(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		ctx := t.Context()
		l := limitertest.New(t, pool, config)
		h := hold(t, l, 4, time.Minute).Hold

		tx := limitertest.Begin(t, db.Pool)
		require.NoError(t, h.WithTx(tx).Extend(ctx, time.Hour))
		require.EqualValues(t, 3, settle(t, h.WithTx(tx), 3).Used)
		within, err := l.WithTx(tx).Hold(ctx, "personal", 2, time.Minute)
		require.NoError(t, err)
		require.EqualValues(t, 5, within.Remaining)
		require.NoError(t, tx.Rollback(ctx))
		require.EqualValues(t, 6, remaining(t, l))
		_, err = within.Hold.Cancel(ctx)
		require.ErrorIs(t, err, ratelimit.ErrHoldUnknown)

		tx = limitertest.Begin(t, db.Pool)
		settle(t, h.WithTx(tx), 3)
		held, err := ratelimit.HoldAll(ctx, time.Minute, l.WithTx(tx).Request("personal", 2))
		require.NoError(t, err)
		require.NoError(t, tx.Commit(ctx))
		require.EqualValues(t, 5, remaining(t, l))
		require.EqualValues(t, 3, settle(t, h, 1).Used)
		require.EqualValues(t, 1, settle(t, held.Hold, 1).Used)
		require.EqualValues(t, 6, remaining(t, l))
	})
}

// The policy that is in force at the settlement counts.
func TestHoldsAndPoliciesThatChange(t *testing.T) {
	t.Parallel()
	eachHoldingLimiter(t, 10, func(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) {
		ctx := t.Context()
		l := limitertest.New(t, db, config)
		raised := config.Policy
		if _, ok := limitertest.SlowPolicies(10)["fixed window"].(ratelimit.FixedWindow); ok {
			for name, policy := range limitertest.SlowPolicies(10) {
				if policy == config.Policy {
					raised = limitertest.SlowPolicies(50)[name]
				}
			}
		}
		held, err := limitertest.With(t, l, raised).Hold(ctx, "personal", 4, time.Minute)
		require.NoError(t, err)
		found, err := l.HoldFromText(ctx, held.Hold.String())
		require.NoError(t, err)
		_, err = found.Settle(ctx, 111)
		require.Equal(t, &ratelimit.ChargeError{Charge: 111, Accepted: 110}, err)
		require.EqualValues(t, 5, settle(t, found, 5).Used)
		require.EqualValues(t, 5, remaining(t, l))

		// A policy with more parts cannot settle, and says so.
		rules := limitertest.SlowPolicies(40)
		longer, err := l.With(ratelimit.All(config.Policy, rules["fixed window"]))
		if err == nil {
			h := hold(t, l, 3, time.Minute).Hold
			found, err := longer.HoldFromText(ctx, h.String())
			require.NoError(t, err)
			_, err = found.Settle(ctx, 1)
			var refused *ratelimit.HoldError
			require.ErrorAs(t, err, &refused)
			require.ErrorAs(t, found.Extend(ctx, time.Minute), &refused)
			settle(t, h, 1)
		}
	})
}

func TestHoldsAndModes(t *testing.T) {
	t.Parallel()
	db, ctx := pgtest.New(t), t.Context()
	pool := db.NewPool(t, nil)
	policies := limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{})
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
	config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, Policies: policies}
	l := limitertest.Of(t, client, config)
	config.Name, config.Durable = "other", true
	other := limitertest.Of(t, client, config)
	before := hold(t, l, 4, time.Minute).Hold
	mode := func(mode, policy string) {
		t.Helper()
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "test", "", "", mode, policy)
		limitertest.WaitUntilKnown(t, policies, db.Pool)
	}

	mode("off", "")
	empty := hold(t, l, 100, time.Minute).Hold
	require.Empty(t, empty.String())
	require.Zero(t, empty.EndsAt())
	require.NoError(t, empty.Extend(ctx, time.Minute))
	require.Equal(t, ratelimit.Settlement{Each: []int64{0}}, settle(t, empty, 70))
	found, err := l.HoldFromText(ctx, "")
	require.NoError(t, err)
	settle(t, found, 1)
	half, err := ratelimit.HoldAll(ctx, time.Minute, l.Request("{a}", 100), other.Request("{a}", 5))
	require.NoError(t, err)
	require.True(t, half.Allowed)
	require.Equal(t, []int64{0, 3}, settle(t, half.Hold, 80, 3).Each)
	require.Zero(t, settle(t, before, 4).Used, "a row of mode off counts nothing")

	mode("deny", "")
	denied := hold(t, l, 1, time.Minute)
	require.False(t, denied.Allowed)
	require.Equal(t, ratelimit.SourcePolicy, denied.Source)
	held, err := ratelimit.HoldAll(ctx, time.Minute, l.Request("{a}", 1), other.Request("{a}", 1))
	require.NoError(t, err)
	require.False(t, held.Allowed)
	require.Nil(t, held.Hold)
	require.Equal(t, int64(7), func() int64 { r, err := other.Peek(ctx, "{a}"); require.NoError(t, err); return r.Remaining }())

	mode("enforce", "fixed 20/8760h")
	require.EqualValues(t, 15, hold(t, l, 5, time.Minute).Remaining)
}

// Denied holds lead to a ban, as denials of Allow do.
func TestDeniedHoldsLeadToABan(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	policies := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}, Policies: policies,
		Ban: &ratelimit.Ban{Denials: 3, Within: time.Hour, First: time.Hour},
	})
	require.True(t, hold(t, l, 1, time.Hour).Allowed)
	for range 3 {
		require.False(t, hold(t, l, 1, time.Minute).Allowed)
	}
	testkit.WaitUntil(t, func() bool { return hold(t, l, 1, time.Minute).Source == ratelimit.SourcePolicy })
}

// A settlement ends remembered denials of the key, and of a denial beside holds nothing is remembered.
func TestHoldsAndRememberedDenials(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool, otherPool := db.NewPool(t, nil), db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		l := limitertest.New(t, pool, config, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
		source := func(n int64) ratelimit.Source {
			t.Helper()
			result, err := l.AllowN(t.Context(), "personal", n)
			require.NoError(t, err)
			require.False(t, result.Allowed)
			return result.Source
		}
		h := hold(t, l, 10, time.Minute).Hold
		require.Equal(t, ratelimit.SourceDatabase, source(1))
		require.Equal(t, ratelimit.SourceDatabase, source(1), "denied beside holds")
		settle(t, h, 10)
		require.Equal(t, ratelimit.SourceDatabase, source(1))
		require.Equal(t, ratelimit.SourceCachedDenial, source(1))
		require.Equal(t, ratelimit.SourceCachedDenial, hold(t, l, 1, time.Minute).Source)

		// The key is full without its hold, which may end or be settled at any time.
		require.NoError(t, l.Reset(t.Context(), "personal"))
		h = hold(t, l, 5, time.Minute).Hold
		_, err := l.Charge(t.Context(), "personal", 10)
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, source(1))
		require.Equal(t, ratelimit.SourceDatabase, source(1), "denied with a hold")
		settle(t, h, 0)
		require.Equal(t, ratelimit.SourceDatabase, source(1))
		require.Equal(t, ratelimit.SourceCachedDenial, source(1))

		other := limitertest.New(t, otherPool, config)
		require.NoError(t, other.Reset(t.Context(), "personal"))
		h = hold(t, other, 1, time.Minute).Hold
		require.Equal(t, ratelimit.SourceCachedDenial, source(1), "the other process does not tell")
		found, err := l.HoldFromText(t.Context(), h.String())
		require.NoError(t, err)
		settle(t, found, 1)
		result, err := l.Allow(t.Context(), "personal")
		require.NoError(t, err)
		require.True(t, result.Allowed)
	})
}

// A late settlement counts for the limiters whose part of the hold is still known. It also ends remembered denials of
// their keys.
func TestSettlingAPartEndsRememberedDenials(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	config, pass := movable()
	config.DenialMaxAge = time.Hour
	client := limitertest.NewClient(t, db.NewPool(t, nil), config)
	policy := ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}
	first := limitertest.Of(t, client, ratelimit.Config{Name: "first", Policy: policy})
	second := limitertest.Of(t, client, ratelimit.Config{Name: "second", Policy: policy})
	held, err := ratelimit.HoldAll(t.Context(), time.Minute, first.Request("key", 1), second.Request("key", 1))
	require.NoError(t, err)
	pass(time.Hour)
	for _, l := range []*ratelimit.Limiter{first, second} {
		_, err := l.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		for _, want := range []ratelimit.Source{ratelimit.SourceDatabase, ratelimit.SourceCachedDenial} {
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			require.Equal(t, want, result.Source)
		}
	}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral_hold WHERE prefix = 'first'")
	require.True(t, settle(t, held.Hold, 1, 1).Late)
	for l, want := range map[*ratelimit.Limiter]ratelimit.Source{first: ratelimit.SourceCachedDenial, second: ratelimit.SourceDatabase} {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, want, result.Source)
	}
}

// In an outage, OnFailure answers Hold as it answers Allow, by a hold that counts nothing. All other calls are errors.
func TestHoldsInAnOutage(t *testing.T) {
	t.Parallel()
	for mode, source := range map[ratelimit.FailureMode]ratelimit.Source{
		ratelimit.FailOpen(): ratelimit.SourceFailedOpen, ratelimit.FailClosed(): ratelimit.SourceFailedClosed,
		ratelimit.FallbackLocal(1): ratelimit.SourceFallback, ratelimit.ReturnError(): ratelimit.SourceDatabase,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.New(t).NewPool(t, nil)
			l := limitertest.New(t, pool, ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, OnFailure: mode,
			})
			h := hold(t, l, 1, time.Minute).Hold
			pool.Close()
			result, err := l.Hold(t.Context(), "personal", 1, time.Minute)
			require.Equal(t, source, result.Source)
			if mode == ratelimit.ReturnError() {
				require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			} else {
				require.NoError(t, err)
				require.Equal(t, mode != ratelimit.FailClosed(), result.Allowed)
			}
			require.Equal(t, result.Allowed, result.Hold != nil)
			if result.Allowed {
				require.Empty(t, result.Hold.String())
				_, err := result.Hold.Settle(t.Context(), 7)
				require.NoError(t, err)
				require.NoError(t, result.Hold.Extend(t.Context(), time.Minute))
			}
			_, err = h.Settle(t.Context(), 1)
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			require.ErrorIs(t, h.Extend(t.Context(), time.Minute), ratelimit.ErrUnavailable)
			_, err = l.HoldFromText(t.Context(), h.String())
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			_, err = ratelimit.HoldAll(t.Context(), time.Minute, l.Request("personal", 1))
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		})
	}
}

// losing is a database whose answers get lost.
type losing struct {
	ratelimit.DBTX

	lost atomic.Bool
}

func (db *losing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	rows, err := db.DBTX.Query(ctx, sql, args...)
	if err != nil || !db.lost.Load() {
		return rows, err
	}
	for rows.Next() { // the statement is over
	}
	rows.Close()
	return nil, io.ErrUnexpectedEOF
}

// After an unknown outcome, the caller has a hold to cancel, and a settlement can be repeated.
func TestHoldsAfterAnUnknownOutcome(t *testing.T) {
	t.Parallel()
	given := pgtest.New(t)
	pool := given.NewPool(t, nil)
	limitertest.EachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, given)
		db := &losing{DBTX: pool}
		l := limitertest.New(t, db, config)
		db.lost.Store(true)
		result, err := l.Hold(t.Context(), "personal", 4, time.Minute)
		require.ErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
		require.False(t, result.Allowed)
		require.Zero(t, result.Hold.EndsAt())
		all, err := ratelimit.HoldAll(t.Context(), time.Minute, l.Request("personal", 5))
		require.ErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
		_, err = result.Hold.Settle(t.Context(), 2)
		require.ErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
		db.lost.Store(false)
		held, err := l.Peek(t.Context(), "personal")
		require.NoError(t, err)
		require.EqualValues(t, 5, held.Held)
		require.EqualValues(t, 3, held.Remaining)
		require.EqualValues(t, 2, settle(t, result.Hold, 9).Used)
		_, err = all.Hold.Cancel(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 8, remaining(t, l))
	})
}

// Many callers hold and settle at once, over several pools. What they have counted adds up, and their calls share
// statements.
func TestHoldsAddUp(t *testing.T) {
	t.Parallel()
	const limit, goroutines = 1000, 64
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 2)
	limitertest.EachSlowPolicyAllAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		var calls, statements atomic.Int64
		client := ratelimit.ClientConfig{Observer: &ratelimit.Observer{Statement: func(e ratelimit.StatementEvent) {
			statements.Add(1)
			calls.Add(int64(e.Size))
		}}}
		var limiters []*ratelimit.Limiter
		for _, pool := range pools {
			limiters = append(limiters, limitertest.New(t, pool, config, client))
		}
		var counted atomic.Int64
		errs := make([]error, goroutines)
		testkit.Together(goroutines, func(i int) {
			l := limiters[i%2]
			for call := range 4 {
				n := int64(1 + (i+call)%5)
				held, err := l.Hold(t.Context(), "personal", n, time.Hour)
				if err != nil || !held.Allowed {
					errs[i] = fmt.Errorf("hold: %v, %w", held.Allowed, err)
					return
				}
				var wg sync.WaitGroup
				for range 2 { // the second settlement changes nothing
					wg.Go(func() {
						if _, err := held.Hold.Settle(context.Background(), n-1); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				counted.Add(n - 1)
			}
		})
		require.NoError(t, errors.Join(errs...))
		result, err := limiters[0].Peek(t.Context(), "personal")
		require.NoError(t, err)
		require.Zero(t, result.Held)
		require.Equal(t, limit-counted.Load(), result.Remaining)
		if !doortest.Between() { // calls to a service share statements with those of other processes, unseen here
			require.Greater(t, calls.Load(), 2*statements.Load(), "calls share statements")
		}
	})
}

// The limit is never exceeded while holds come and go: what is counted, what is held and what is taken fit into it.
func TestHoldsNeverExceedTheLimit(t *testing.T) {
	t.Parallel()
	const limit, goroutines = 40, 48
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 2)
	limitertest.EachSlowPolicyAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiters := []*ratelimit.Limiter{limitertest.New(t, pools[0], config), limitertest.New(t, pools[1], config)}
		var counted, denied atomic.Int64
		testkit.Together(goroutines, func(i int) {
			l := limiters[i%2]
			for call := range 4 {
				if (i+call)%3 == 0 {
					if result, err := l.Allow(t.Context(), "personal"); err != nil {
						t.Error(err)
					} else if result.Allowed {
						counted.Add(1)
					}
					continue
				}
				held, err := l.Hold(t.Context(), "personal", 3, time.Hour)
				switch {
				case err != nil:
					t.Error(err)
				case !held.Allowed:
					denied.Add(1)
				default:
					if _, err := held.Hold.Settle(t.Context(), 1); err != nil {
						t.Error(err)
					}
					counted.Add(1)
				}
			}
		})
		result, err := limiters[0].Peek(t.Context(), "personal")
		require.NoError(t, err)
		require.Equal(t, limit-counted.Load(), result.Remaining)
		require.GreaterOrEqual(t, result.Remaining, int64(0))
		require.Positive(t, denied.Load())
	})
}

// Calls that share a statement all learn when the last hold ends.
func TestResetAfterOfSharedStatementsBesideAHold(t *testing.T) {
	t.Parallel()
	for name, db := range map[string]ratelimit.DBTX{"on Postgres": pgtest.New(t).NewPool(t, nil), "in memory": &memdb.DB{}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, _ := movable()
			client.MaxInFlight = 1
			l := limitertest.New(t, db, ratelimit.Config{
				Name: "test", Policy: ratelimit.TokenBucket{Capacity: 1000, Refill: 1, Every: time.Second},
			}, client)
			hold(t, l, 10, time.Hour)
			results := make([]ratelimit.Result, 64)
			testkit.Together(len(results), func(i int) {
				var err error
				if results[i], err = l.Allow(context.Background(), "personal"); err != nil {
					t.Error(err)
				}
			})
			for _, r := range results {
				require.True(t, r.Allowed)
				require.Equal(t, time.Hour, r.ResetAfter)
			}
		})
	}
}

// The observer is told of holds as of takes.
func TestObserverSeesHolds(t *testing.T) {
	t.Parallel()
	var events []ratelimit.DecisionEvent
	l := limitertest.New(t, &memdb.DB{}, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
		ratelimit.ClientConfig{Observer: &ratelimit.Observer{Decision: func(e ratelimit.DecisionEvent) { events = append(events, e) }}})
	hold(t, l, 8, time.Minute)
	hold(t, l, 3, time.Minute)
	_, err := l.Hold(t.Context(), "", 1, time.Minute)
	require.Error(t, err)
	_, err = ratelimit.HoldAll(t.Context(), time.Minute, l.Request("personal", 2))
	require.NoError(t, err)
	_, err = ratelimit.HoldAll(t.Context(), 0, l.Request("personal", 2))
	require.Error(t, err)
	var outcomes []string
	for _, e := range events {
		outcomes = append(outcomes, fmt.Sprint(e.Cost, " ", e.Outcome()))
	}
	require.Equal(t, []string{"8 allowed", "3 denied", "1 error", "2 allowed", "2 error"}, outcomes)
}
