package model_test

import (
	"math"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// creditStep grants credit, or asks for n. If n is negative, the step gives back -n units of the last take.
type creditStep struct {
	at    int64
	grant int64
	n     int64
	want  model.Decision
}

func TestCreditIsSpentAfterTheOrdinaryRoom(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.Rules
		steps  []creditStep
	}{
		{"fixed window", model.FixedWindow{10, time.Minute}, []creditStep{
			{c0, 5, 0, granted(15, minute)},
			{c1, 0, 11, denied(15, model.Never, 59*second)}, // one request may cost at most the limit
			// a window starts, and the credit lives for one window from now on
			{c1, 0, 4, granted(11, minute)},
			{c2, 0, 8, granted(3, minute)}, // 6 units from the window, 2 from the credit
			{c3, 0, 4, denied(3, 58*second, 59*second)},
			{c3, 0, -4, granted(7, 59*second)}, // gives back only ordinary units, no credit
			{c3, 0, 7, granted(0, 58*second)},  // the credit is spent, so ResetAfter is the window's end
			{c4, 0, 1, denied(0, 57*second, 57*second)},
			{c4, 2, 0, granted(2, minute)},
			{c4, 3, 0, granted(5, minute)},
			{c1 + minute, 0, 10, granted(5, minute)},
			{c1 + minute, 0, -100, granted(15, minute)},
			{c0 + 2*minute, 0, 10, granted(5, minute)},
			{c0 + 3*minute - 1, 0, 0, free(5, 1)},
			{c0 + 3*minute, 0, 0, free(10, 0)}, // the credit expires one window after the last take
		}},
		{"sliding window", model.SlidingWindow{10, time.Minute}, []creditStep{
			{at("12:00:00"), 5, 0, granted(15, 2*minute)},
			{at("12:00:30"), 0, 10, granted(5, 2*minute)}, // a window starts
			{at("12:00:40"), 0, 3, granted(2, 2*minute)},
			{at("12:00:40"), 0, 3, denied(2, 56*second, 2*minute)}, // at 12:01:36, 9 of the first window's 10 units count
			{at("12:01:36"), 0, 3, granted(0, 114*second)},
			{at("12:02:30"), 4, 0, granted(13, 2*minute)}, // at a window's start, the previous window counts fully
			{at("12:03:30"), 0, 10, granted(4, 2*minute)},
			{at("12:05:29.999999"), 0, 0, free(14-1, 1)}, // the 10 units count 0.000…, rounded up to 1
			{at("12:05:30"), 0, 0, free(10, 0)},
		}},
		{"token bucket", model.TokenBucket{10, 1, time.Second}, []creditStep{
			{c0, 5, 0, granted(15, 10*second)},
			{c1, 0, 8, granted(7, 10*second)},
			{c1, 0, 4, granted(3, 10*second)},          // 2 tokens from the bucket, 2 from the credit
			{c1, 0, 6, denied(3, 3*second, 10*second)}, // the request needs a refill of 3 tokens
			{c4, 0, 6, granted(0, 10*second)},          // the credit is spent
			{c4, 0, 1, denied(0, 1*second, 10*second)}, // without credit, the bucket decides as usual
			{c4, 3, 0, granted(3, 10*second)},
			{c9, 0, 0, free(8, 5*second)},
			{c4 + 10*second, 0, 0, free(10, 0)},
		}},
		{"sliding log", model.SlidingLog{10, time.Minute}, []creditStep{
			{c0, 5, 0, granted(15, minute)},
			{c1, 0, 11, denied(15, model.Never, 59*second)},
			{c1, 0, 4, granted(11, minute)},
			{c2, 0, 8, granted(3, minute)}, // 6 units into the log, 2 from the credit
			{c3, 0, 2, granted(1, minute)}, // takes only credit, and the credit lives for one more window
			{c4, 0, 4, denied(1, 57*second, 59*second)},
			// at c1 + minute, 4 entries leave the log; with 1 unit of credit, 5 units are free
			{c4, 0, 6, denied(1, 58*second, 59*second)},
			{c4, 0, -6, granted(7, 59*second)}, // gives back the 6 entries of c2
			{c4, 0, -1, granted(8, 59*second)}, // gives back an entry of c1
			{c5, 0, 8, granted(0, minute)},
			{c5, 0, 1, denied(0, 56*second, minute)},
			{c6, 2, 0, granted(2, minute)},
			{c7, 0, 2, granted(0, 58*second)}, // the credit is spent, so only the entries count
			{c1 + minute, 0, 3, granted(0, minute)},
			{c2 + minute, 7, 0, granted(7, minute)},
			{c3 + minute, 0, -100, granted(10, 59*second)}, // gives back the 3 units taken at c1 + minute
			{c3 + minute, 0, -100, granted(17, 59*second)},
			{c2 + 2*minute - 1, 0, 0, free(17, 1)},
			{c2 + 2*minute, 0, 0, free(10, 0)},
		}},
		{"the largest numbers", model.FixedWindow{model.MaxProduct, time.Microsecond}, []creditStep{
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)},
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)}, // the most credit that a key can hold
			{c0, 0, model.MaxProduct, granted(model.MaxCredit, 1)},
			{c0, 0, model.MaxProduct, denied(model.MaxCredit, 1, 1)},
			{c0, 0, model.MaxCredit, granted(0, 1)},
		}},
		{"the largest bucket", model.TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond}, []creditStep{
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)},
			{c0, 0, model.MaxProduct, granted(model.MaxCredit, 1)},
			{c0, 0, model.MaxCredit, granted(0, 1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var s model.State
			for i, step := range test.steps {
				if step.grant > 0 {
					next, got, err := checkedGrant(test.policy, s, step.at, step.grant)
					require.NoError(t, err)
					require.Equal(t, step.want, got, "step %d: Grant of %d from %+v", i, step.grant, s)
					s = next
				} else if step.n < 0 {
					k := model.Take{Units: -step.n, In: rollForward(test.policy, s, step.at).WindowStart}
					next, got, err := checkRefund(test.policy, s, step.at, k)
					require.NoError(t, err)
					require.Equal(t, step.want, got, "step %d", i)
					s = next
				} else {
					s = playModel(t, test.policy, s, modelStep{step.at, step.n, step.want})
				}
			}
		})
	}
}

func TestCreditStaysWhenThePolicyChanges(t *testing.T) {
	t.Parallel()
	s, _ := model.Grant(model.FixedWindow{10, time.Minute}, model.State{}, c0, 5)
	playModel(t, model.FixedWindow{3, time.Hour}, s, modelStep{c1, 3, granted(5, hour)}, modelStep{c1, 3, granted(2, hour)})
	s, _ = model.Grant(model.SlidingWindow{10, time.Minute}, model.State{}, c0, 5)
	playModel(
		t,
		model.SlidingWindow{3, time.Hour},
		s,
		modelStep{c1, 3, granted(5, 2*hour)},
		modelStep{c1, 3, granted(2, 2*hour)},
	)
	s, _ = model.Grant(model.SlidingLog{10, time.Minute}, model.State{}, c0, 5)
	playModel(t, model.SlidingLog{3, time.Hour}, s, modelStep{c1, 3, granted(5, hour)}, modelStep{c1, 3, granted(2, hour)})
	s, _ = model.Grant(model.TokenBucket{10, 1, time.Second}, model.State{}, c0, 5)
	playModel(
		t,
		model.TokenBucket{3, 1, time.Hour},
		s,
		modelStep{c1, 3, granted(5, 3*hour)},
		modelStep{c1, 3, granted(2, 3*hour)},
	)
}

// Requests and grants follow in random order. The units taken stay within the limit plus the granted credit.
func TestNeverMoreThanTheLimitAndWhatWasGranted(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	spent := 0
	for range 500 {
		limit, window := d.Window()
		limit = min(limit, 1<<40)
		p := []model.Rules{
			model.FixedWindow{limit, window}, model.SlidingWindow{limit, window}, model.TokenBucket{limit, 1 + limit, window},
			model.SlidingLog{limit, window}, d.Calendar(),
		}[d(5)]
		if calendar, ok := p.(model.CalendarWindow); ok {
			calendar.Limit = limit
			p = calendar
		}
		if !modeltest.InRange(p) {
			continue
		}
		var s model.State
		allowance, taken := limit, int64(0)
		for range 40 {
			var got model.Decision
			if d(5) == 0 {
				n := d.Magnitude(1, limit)
				s, got = model.Grant(p, s, c0, n)
				allowance += n
			} else {
				n := d.Cost(limit, peek(p, s, c0).Remaining)
				s, got = p.Decide(s, c0, n)
				taken += got.Granted * n
			}
			require.Equal(t, allowance-taken, got.Remaining, "%T%+v", p, p)
		}
		if taken > limit {
			spent++
		}
	}
	require.Greater(t, spent, 50)
}
