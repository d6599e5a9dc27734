package model_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// chargeStep charges n, or asks for -n if n is below 0.
type chargeStep struct {
	at   int64
	n    int64
	want model.Decision
}

func TestChargeCountsWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.Rules
		steps  []chargeStep
	}{
		{"a fixed window owes until it ends", model.FixedWindow{10, time.Minute}, []chargeStep{
			{c0, -9, granted(1, minute)},
			{c1, 30, granted(0, 59*second)}, // the window counts 39 of 10
			{c2, -1, denied(0, 58*second, 58*second)},
			{c2, 72, denied(0, 58*second, 58*second)}, // 111 would be more than 10 + 10 × 10
			{c2, 71, granted(0, 58*second)},
			{c2, 1, denied(0, 58*second, 58*second)},
			{c0 + minute, -10, granted(0, minute)},
		}},
		{"a sliding window owes until the next one ends", model.SlidingWindow{10, time.Minute}, []chargeStep{
			{c0, 40, granted(0, 2*minute)},
			{c0, 71, denied(0, minute+46*second+500_000, 2*minute)}, // as in the next step
			// In the last 13.5 s of the next window, the 40 count as 40 × 13.5 / 60 = 9, so 1 fits into 10.
			{c0, -1, denied(0, minute+46*second+500_000, 2*minute)},
			{c0 + minute + 46*second + 500_000, -1, granted(0, 2*minute-46*second-500_000)},
		}},
		{"a log owes until its entries leave", model.SlidingLog{10, time.Minute}, []chargeStep{
			{c0, -9, granted(1, minute)},
			{c1, 8, granted(0, minute)},                   // the log counts 17
			{c2, -1, denied(0, 58*second, minute-second)}, // 8 units are left when the first 9 leave
			{c2, -3, denied(0, 59*second, 59*second)},
			{c0 + minute, -2, granted(0, minute)},
			{c0 + minute, 101, denied(0, second, minute)},
			{c0 + minute, 100, granted(0, minute)},
		}},
		{"a log has several entries of one time", model.SlidingLog{1000, time.Minute}, []chargeStep{
			{c0, -400, granted(600, minute)},
			{c0, 3000, granted(0, minute)}, // entries of 1,000, 1,000, 1,000 and 400
			{c1, 7600, granted(0, minute)},
			{c1, 1, denied(0, minute, minute)},
			{c0 + minute, -1, denied(0, second, second)},
			{c1 + minute, -1000, granted(0, minute)},
		}},
		{"a calendar window owes until it ends", model.CalendarWindow{10, minutely, "UTC"}, []chargeStep{
			{at("12:00:20"), 25, granted(0, 40*second)},
			{at("12:00:50"), -1, denied(0, 10*second, 10*second)},
			{at("12:00:50"), 86, denied(0, 10*second, 10*second)},
			{at("12:01:00"), -10, granted(0, minute)},
		}},
		{"a bucket owes until it is refilled", model.TokenBucket{10, 1, time.Second}, []chargeStep{
			{c0, 25, granted(0, 25*second)},              // 15 tokens are owed
			{c5, -1, denied(0, 11*second, 20*second)},    // 10 tokens are owed
			{c5, 91, denied(0, 11*second, 20*second)},    // 101 tokens would be owed
			{c5, 90, granted(0, 110*second)},             // 100 tokens are owed: ten fill times, and one to get full
			{c5 + 101*second, -1, granted(0, 10*second)}, // 1 token is left
			{c5 + 102*second - 1, -1, denied(0, 1, 9*second+1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var s model.State
			for i, step := range test.steps {
				if step.n < 0 {
					s = playModel(t, test.policy, s, modelStep{step.at, -step.n, step.want})
					continue
				}
				next, got, err := checkCharge(test.policy, s, step.at, step.n)
				require.NoError(t, err)
				got.State, got.Taken = model.State{}, model.Take{}
				require.Equal(t, step.want, got, "step %d", i)
				s = next
			}
		})
	}
}

func TestChargeSpendsGrantedCreditBeforeTheKeyOwes(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]model.Rules{
		"fixed": model.FixedWindow{10, time.Minute}, "sliding": model.SlidingWindow{10, time.Minute},
		"log": model.SlidingLog{10, time.Minute}, "bucket": model.TokenBucket{10, 1, time.Hour},
		"calendar": model.CalendarWindow{10, minutely, "UTC"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, _, err := checkedGrant(p, model.State{}, c0, 5)
			require.NoError(t, err)
			s, d, err := checkCharge(p, s, c0, 13) // 10 + 3 of credit
			require.NoError(t, err)
			require.EqualValues(t, 2, d.Remaining)
			s, d, err = checkCharge(p, s, c0, 13) // 2 of credit, and 11 are owed
			require.NoError(t, err)
			require.Zero(t, d.Remaining)
			// New credit can be spent at once. New credit does not reduce what the key owes.
			s, _, err = checkedGrant(p, s, c0, 4)
			require.NoError(t, err)
			s, d, err = checkDecision(p, s, c0, 3)
			require.NoError(t, err)
			require.EqualValues(t, 1, d.Granted)
			_, _, fits := model.Charge(p, s, c0, 0)
			require.EqualValues(t, 100-11+1, fits)
		})
	}
}

func TestBucketOwesUnderAnotherPolicy(t *testing.T) {
	t.Parallel()
	s, _, err := checkCharge(model.TokenBucket{10, 1, 2 * time.Second}, model.State{}, c0, 35)
	require.NoError(t, err)
	// The bucket owes 25 tokens of 2 s each, which is 50 s. A second later, 49 s are left.
	owes := func(p model.TokenBucket, clock int64) int64 { return rollForward(p, s, clock).Count - p.Full() }
	require.Equal(t, 49*second, owes(model.TokenBucket{10, 1, 2 * time.Second}, c1))
	require.Equal(t, 49*second, owes(model.TokenBucket{20, 1, 2 * time.Second}, c1))
	// With another Every, the bucket owes 25 tokens of 3 s at c0.
	require.Equal(t, 75*second-second, owes(model.TokenBucket{10, 1, 3 * time.Second}, c1))
	require.Equal(t, 50*second-second, owes(model.TokenBucket{2, 1, 2 * time.Second}, c1))
	// A bucket with a capacity of 2 owes at most 20 tokens, or what flows in within a week.
	require.Equal(t, 20*model.Micros(model.BookedAhead)-second, owes(model.TokenBucket{2, 1, model.BookedAhead}, c1))
	require.Equal(t, 22*model.Micros(model.BookedAhead/21)-second, owes(model.TokenBucket{2, 1, model.BookedAhead / 21}, c1))
	// A part of a token is rounded up: 1 and a third become 2.
	s, _, err = checkCharge(model.TokenBucket{10, 1, 3 * time.Microsecond}, model.State{}, c0, 11)
	require.NoError(t, err)
	s, _, err = checkCharge(model.TokenBucket{10, 1, 3 * time.Microsecond}, s, c0+2, 1)
	require.NoError(t, err)
	require.EqualValues(t, 4, s.Count-10*3)
	require.EqualValues(t, 2, owes(model.TokenBucket{10, 1, time.Microsecond}, c0+2))
}

func TestMaxOwedStaysWithinTheExactRange(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		policy model.Rules
		want   int64
	}{
		{model.FixedWindow{100, time.Minute}, 1000},
		{model.SlidingLog{1000, time.Minute}, 10_000},
		{model.FixedWindow{model.MaxProduct, time.Microsecond}, 0},
		{model.FixedWindow{model.MaxProduct / 4, time.Microsecond}, model.MaxProduct / 4 * 3},
		{model.SlidingWindow{2048, model.MaxSpan * time.Microsecond}, 0},
		{model.CalendarWindow{model.MaxProduct, minutely, "UTC"}, 0},
		{model.CalendarWindow{1 << 58, minutely, "UTC"}, 10 << 58},
		{model.TokenBucket{10, 1, time.Second}, 100},
		{model.TokenBucket{5, 1, model.MaxSpan / 10 * time.Microsecond}, 5}, // 71 years
		{model.TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond}, 0},
	} {
		require.Equal(t, test.want, model.MaxOwed(test.policy), "%T%+v", test.policy, test.policy)
		_, _, fits := model.Charge(test.policy, model.State{}, c0, 0)
		require.Equal(t, test.policy.Numbers().Limit+test.want, fits)
		s, _, err := checkCharge(test.policy, model.State{}, c0, fits)
		require.NoError(t, err)
		_, _, err = checkDecision(test.policy, s, c0, 1)
		require.NoError(t, err)
	}
}
