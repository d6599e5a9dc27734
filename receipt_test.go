package ratelimit_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
)

// With a receipt, another process can give back what this process could give back with the result. A receipt works for
// all policies, after a partial refund, and for credit.
func TestReceipts(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, ratelimit.SlidingWindow{Limit: 10, Window: time.Hour},
		ratelimit.TokenBucket{Capacity: 10, Refill: 3, Every: 7 * time.Minute}, ratelimit.SlidingLog{Limit: 10, Window: time.Hour},
		ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"},
		ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, ratelimit.TokenBucket{Capacity: 20, Refill: 1, Every: time.Minute}),
	} {
		config := ratelimit.Config{
			Name: policy.String(), Policy: policy, Durable: true,
		}
		clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return time.UnixMicro(limitertest.C0) }}}
		here, there := limitertest.New(t, db.Pool, config, clientConfig), limitertest.New(t, db.Pool, config, clientConfig)
		var left [2]ratelimit.Balance
		for i, key := range []string{"refunded here", "refunded there"} {
			_, err := here.Grant(t.Context(), key, 2)
			require.NoError(t, err)
			_, err = here.AllowN(t.Context(), key, 5)
			require.NoError(t, err)
			taken, err := here.AllowN(t.Context(), key, 7) // 2 of the 7 units are credit
			require.NoError(t, err)
			require.True(t, taken.Allowed, policy)
			_, err = here.RefundN(t.Context(), taken, 3)
			require.NoError(t, err)
			if i == 0 {
				left[i], err = here.Refund(t.Context(), taken)
				require.NoError(t, err)
				continue
			}
			text, err := taken.Receipt()
			require.NoError(t, err)
			require.Regexp(t, "^[A-Za-z0-9_-]+$", text)
			_, err = here.Refund(t.Context(), taken)
			require.ErrorIs(t, err, ratelimit.ErrNothingToRefund, "the receipt gives it back now")
			_, err = taken.Receipt()
			require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)

			parsed, err := there.ParseReceipt(text)
			require.NoError(t, err)
			require.True(t, parsed.Allowed)
			_, err = there.RefundN(t.Context(), parsed, 5)
			require.ErrorIs(t, err, ratelimit.ErrInvalidCost, "4 are left")
			tx := pgtest.Begin(t, db)
			_, err = there.WithTx(tx).RefundN(t.Context(), parsed, 4)
			require.NoError(t, err)
			require.NoError(t, tx.Rollback(t.Context()))
			left[i], err = there.Refund(t.Context(), parsed)
			require.NoError(t, err)
			_, err = there.Refund(t.Context(), parsed)
			require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
		}
		require.Equal(t, left[0].Remaining, left[1].Remaining, policy)
		require.Equal(t, left[0].ResetAfter, left[1].ResetAfter, policy)
	}
}

// A text that is not a receipt of this limiter is refused before any statement is sent.
func TestWhatIsNoReceipt(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	taken, err := limiter.Allow(t.Context(), "somebody's key")
	require.NoError(t, err)
	text, err := taken.Receipt()
	require.NoError(t, err)
	require.NotContains(t, text, "somebody")
	content, ok := receipttext.Open(text)
	require.True(t, ok)
	forged := func(oldNew ...string) string {
		other := strings.NewReplacer(oldNew...).Replace(string(content))
		require.NotEqual(t, string(content), other, oldNew)
		return receipttext.Seal([]byte(other))
	}
	for name, bad := range map[string]string{
		"nothing": "", "something": "receipt", "a part": text[:len(text)-2], "more": text + "AA",
		"changed": text[:30] + "x" + text[31:], "only a sum": receipttext.Seal(nil),
		"of a newer release": forged("fixed ", "leap "), "of two policies": forged(`"fixed 100/1h`, `"fixed 100/1h fixed 100/2h`),
		"of nothing": forged(`"units":1`, `"units":0`), "of too much": forged(`"units":1`, `"units":1101`, `"Units":1`, `"Units":1101`),
		"of less": forged(`"Units":1`, `"Units":2`), "without a key": forged("somebody's key", ""),
		"without parts": forged(`"parts":[`, `"other":[`), "more credit than that": forged(`"Spent":0`, `"Spent":2`),
	} {
		_, err := limiter.ParseReceipt(bad)
		wrong, ok := errors.AsType[*ratelimit.ReceiptError](err)
		require.True(t, ok, "%s: %v", name, err)
		require.NotContains(t, wrong.Error(), "somebody", name)
	}
	for _, config := range []ratelimit.Config{
		{Name: "other", Policy: limitertest.Hourly}, {Name: "test", Policy: limitertest.Hourly, Durable: true},
	} {
		_, err := limitertest.New(t, db.Pool, config).ParseReceipt(text)
		_, ok := errors.AsType[*ratelimit.RefundError](err)
		require.True(t, ok, "%v", err)
	}
	_, err = ratelimit.Result{}.Receipt()
	require.ErrorIs(t, err, ratelimit.ErrNothingToRefund)
}

// A refund of a result that was read from JSON returns ErrNoReceipt.
func TestResultsFromJSONCannotBeGivenBack(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	taken, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	text, err := json.Marshal(taken)
	require.NoError(t, err)
	var read ratelimit.Result
	require.NoError(t, json.Unmarshal(text, &read))
	require.Equal(t, taken.Remaining, read.Remaining)
	for name, refund := range map[string]func() error{
		"Refund":  func() error { _, err := limiter.Refund(t.Context(), read); return err },
		"RefundN": func() error { _, err := limiter.RefundN(t.Context(), read, 1); return err },
		"Receipt": func() error { _, err := read.Receipt(); return err },
		"WithTx":  func() error { _, err := limiter.WithTx(pgtest.Begin(t, db)).Refund(t.Context(), read); return err },
	} {
		require.ErrorIs(t, refund(), ratelimit.ErrNoReceipt, name)
		require.NotErrorIs(t, refund(), ratelimit.ErrNothingToRefund, name)
	}
	_, err = limiter.Refund(t.Context(), taken)
	require.NoError(t, err)
}
