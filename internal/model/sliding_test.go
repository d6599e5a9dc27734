package model_test

import (
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestSlidingWindow(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.SlidingWindow
		steps  []modelStep
	}{
		{"40 before weigh 30 after a quarter of the window", model.SlidingWindow{50, time.Minute}, []modelStep{
			{at("12:00:00"), 40, granted(10, 2*minute)},
			{at("12:01:00"), 10, granted(0, 2*minute)},
			{at("12:01:15"), 0, free(10, 105*second)}, // 40 × 0.75 + 10 = 40 of 50 are used
			{at("12:01:15"), 11, denied(10, 1500*second/1000, 105*second)},
			{at("12:01:15"), 10, granted(0, 105*second)},
			{at("12:01:15.000001"), 1, denied(0, 1500*second/1000-1, 105*second-1)},
		}},
		{"8 before weigh 5.6 after 30 % of the window", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 8, granted(2, 2*minute)},
			{at("12:01:08"), 3, granted(0, 112*second)},
			{at("12:01:18"), 2, denied(1, 4500*second/1000, 102*second)}, // 5.6 + 3 + 2 = 10.6 is above 10
			{at("12:01:18"), 1, granted(0, 102*second)},                  // 5.6 + 3 + 1 = 9.6 fits into 10
		}},
		{"400 before weigh 100 at a quarter to", model.SlidingWindow{500, time.Hour}, []modelStep{
			{at("22:00:00"), 400, granted(100, 2*hour)},
			{at("23:40:00"), 250, granted(116, 80*minute)},
			{at("23:45:00"), 1, granted(149, 75*minute)}, // 100 + 250 + 1 = 351 of 500 are used
			{at("23:45:00"), 150, denied(149, 9*second, 75*minute)},
			{at("23:45:09"), 150, granted(0, 75*minute-9*second)},
		}},
		{"the limit's twofold does not pass around the edge", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 1, granted(9, 2*minute)},
			{at("12:00:59.999999"), 9, granted(0, minute+1)},
			{at("12:01:00"), 1, denied(0, 6*second, minute)},
			{at("12:01:06"), 1, granted(0, 114*second)},
			{at("12:01:12"), 1, granted(0, 108*second)},
			{at("12:01:12"), 1, denied(0, 6*second, 108*second)},
		}},
		{"windows follow each other without a gap", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 10, granted(0, 2*minute)},
			{at("12:00:59.999999"), 0, denied(0, 6*second+1, minute+1)},
			{at("12:01:00"), 0, denied(0, 6*second, minute)},
			{at("12:01:00.000001"), 0, denied(0, 6*second-1, minute-1)},
			{at("12:01:05.999999"), 1, denied(0, 1, 54*second+1)},
			{at("12:01:06"), 0, free(1, 54*second)},
			{at("12:01:59.999999"), 10, denied(9, 1, 1)},
			{at("12:01:59.999999"), 1, granted(8, minute+1)}, // the window of 12:01 has not ended yet
			// at 12:02 a window begins, where the other 8 would still fit
			{at("12:02:00"), 10, denied(9, minute, minute)},
			{at("12:02:00"), 9, granted(0, 2*minute)},
			{at("12:04:00"), 10, granted(0, 2*minute)},
		}},
		{"after two windows without a request one starts at the next", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 4, granted(6, 2*minute)},
			{at("12:01:59.999999"), 0, free(9, 1)},
			{at("12:02:00"), 0, free(10, 0)},
			{at("12:02:17"), 10, granted(0, 2*minute)},
			{at("12:03:16.999999"), 1, denied(0, 6*second+1, minute+1)},
			{at("12:03:17"), 1, denied(0, 6*second, minute)},
			{at("12:03:23"), 1, granted(0, 114*second)},
		}},
		{"costs", model.SlidingWindow{10, time.Minute}, []modelStep{
			{c0, 0, free(10, 0)},
			{c0, 11, denied(10, model.Never, 0)},
			{c0, 10, granted(0, 2*minute)},
			{c1, 11, denied(0, model.Never, 119*second)},
			{c1, 10, denied(0, 119*second, 119*second)},
			{c1, 9, denied(0, 113*second, 119*second)},
			{c1, 0, denied(0, 65*second, 119*second)},
			{c0 + 2*minute - 1, 10, denied(9, 1, 1)},
			{c0 + 2*minute, 10, granted(0, 2*minute)},
		}},
		{"a cost that fits only when the window before is gone", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 5, granted(5, 2*minute)},
			{at("12:01:30"), 2, granted(5, 90*second)},
			{at("12:01:30"), 8, denied(5, 30*second, 90*second)}, // 2 + 8 = 10, once the window of 12:00 no longer counts
			{at("12:01:30"), 9, denied(5, 60*second, 90*second)}, // 2 × 1/2 + 9 = 10 in the middle of the next window
			{at("12:02:00"), 8, granted(0, 2*minute)},
		}},
		{"the clock steps back by less than a window", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 10, granted(0, 2*minute)},
			{at("12:01:30"), 5, granted(0, 90*second)},
			{at("12:01:15"), 1, denied(0, 21*second, 105*second)}, // 7.5 + 5 of 10 are used
			{at("12:00:50"), 1, denied(0, 46*second, 130*second)}, // the row's WindowStart is 12:01:00
			{at("12:00:00"), 1, denied(0, 96*second, 180*second)},
			{at("12:01:35.999999"), 1, denied(0, 1, 84*second+1)},
			{at("12:01:36"), 1, granted(0, 84*second)},
		}},
		{"a grant on a row ahead of the clock", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 4, granted(6, 2*minute)},
			{at("11:59:30"), 6, granted(0, 150*second)},
			{at("11:59:30"), 1, denied(0, 96*second, 150*second)},
			{at("12:01:05.999999"), 1, denied(0, 1, 54*second+1)},
			{at("12:01:06"), 1, granted(0, 114*second)},
		}},
		{"the clock steps back by more than a window", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:10:00"), 10, granted(0, 2*minute)},
			{at("12:09:00"), 1, denied(0, 126*second, 180*second)},
			{at("12:08:59.999999"), 0, denied(0, 66*second, 2*minute)}, // a Peek does not pull the row back to the clock
			{at("12:09:00"), 1, denied(0, 126*second, 180*second)},
			{at("12:08:59.999999"), 11, denied(0, model.Never, 2*minute)}, // a cost above the limit does not pull the row back
			{at("12:09:00"), 1, denied(0, 126*second, 180*second)},
			{at("12:08:59.999999"), 1, denied(0, 66*second, 2*minute)}, // a denial pulls the row back
			{at("12:09:00"), 1, denied(0, 66*second-1, 2*minute-1)},
			{at("12:10:05.999998"), 1, denied(0, 1, 54*second+1)},
			{at("12:10:05.999999"), 1, granted(0, 114*second)},
		}},
		{"usage of both windows is kept when the clock jumps back", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 10, granted(0, 2*minute)},
			{at("12:01:30"), 3, granted(2, 90*second)},
			{at("03:00:00"), 1, denied(0, 24*second, 2*minute)}, // 10 + 3 are used now, and 6 + 3 after 24 s
			{at("03:00:23.999999"), 1, denied(0, 1, 96*second+1)},
			{at("03:00:24"), 1, granted(0, 96*second)},
			{at("02:00:00"), 6, denied(0, 60*second, 2*minute)},
			{at("02:00:59.999999"), 6, denied(5, 1, minute+1)},
			{at("02:01:00"), 6, granted(0, 2*minute)},
		}},
		{"a jump forward is one limit", model.SlidingWindow{10, time.Minute}, []modelStep{
			{at("01:00:00"), 10, granted(0, 2*minute)},
			{at("23:00:00"), 10, granted(0, 2*minute)},
			{at("23:00:00"), 1, denied(0, 66*second, 2*minute)},
		}},
		{"the shortest window", model.SlidingWindow{2, time.Microsecond}, []modelStep{
			{c0, 2, granted(0, 2)},
			{c0, 1, denied(0, 2, 2)},
			{c0 + 1, 1, denied(0, 1, 1)},
			{c0 - 1, 1, denied(0, 3, 3)},
			{c0 + 2, 2, granted(0, 2)},
		}},
		{"weights of a few microseconds round up", model.SlidingWindow{3, 7 * time.Microsecond}, []modelStep{
			{c0, 2, granted(1, 14)},
			{c0 + 7, 1, granted(0, 14)},
			{c0 + 10, 1, denied(0, 1, 11)}, // 2 × 4/7 + 1 + 1 > 3
			{c0 + 11, 1, granted(0, 10)},   // 2 × 3/7 + 1 + 1 ≤ 3
			{c0 + 13, 1, denied(0, 1, 8)},  // 2 × 1/7 + 2 + 1 > 3
			{c0 + 14, 1, granted(0, 14)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, model.State{}, test.steps...)
		})
	}
}

// Some other limiters return a RetryAfter of 60 s, deny again after it, and then return 120 s.
func TestSlidingWindowRetryAfterLooksIntoTheNextWindow(t *testing.T) {
	t.Parallel()
	p := model.SlidingWindow{10, time.Minute}
	s := playModel(t, p, model.State{}, modelStep{at("12:00:00"), 10, granted(0, 2*minute)})
	for _, step := range []modelStep{
		{at("12:00:05"), 1, denied(0, 61*second, 115*second)},
		{at("12:00:05"), 2, denied(0, 67*second, 115*second)},
		{at("12:00:05"), 10, denied(0, 115*second, 115*second)},
		{at("12:01:00"), 1, denied(0, 6*second, 60*second)},
		{at("12:01:05.999999"), 1, denied(0, 1, 54*second+1)},
		{at("12:01:06"), 1, granted(0, 114*second)},
		{at("12:01:11.999999"), 2, denied(1, 1, 48*second+1)},
		{at("12:01:12"), 2, granted(0, 108*second)},
	} {
		playModel(t, p, s, step)
	}
}

// In some other limiters, the product of a large count and a long time overflowed 64 bits and became negative. Then
// every request passed.
func TestSlidingWindowProductsNeverOverflow(t *testing.T) {
	t.Parallel()
	playModel(t, model.SlidingWindow{2048, model.MaxSpan * time.Microsecond}, model.State{},
		modelStep{c0, 2048, granted(0, 2*model.MaxSpan)},
		modelStep{c0, 2048, denied(0, 2*model.MaxSpan, 2*model.MaxSpan)},
		modelStep{c0 + model.MaxSpan, 1, denied(0, model.MaxSpan/2048, model.MaxSpan)},
		modelStep{c0 + model.MaxSpan + 1, 1, denied(0, model.MaxSpan/2048-1, model.MaxSpan-1)},
		modelStep{c0 + model.MaxSpan + model.MaxSpan/2, 1025, denied(1024, model.MaxSpan/2048, model.MaxSpan/2)},
		modelStep{c0 + model.MaxSpan + model.MaxSpan/2, 1024, granted(0, model.MaxSpan+model.MaxSpan/2)},
		modelStep{c0 + 2*model.MaxSpan - 1, 1024, denied(1023, 1, model.MaxSpan+1)},
		modelStep{c0 + 2*model.MaxSpan, 1024, granted(0, 2*model.MaxSpan)})

	// Only the largest limit, in the shortest window, can leave this count. Then a policy with the longest window reads
	// this count.
	s := playModel(t, model.SlidingWindow{model.MaxProduct, time.Microsecond}, model.State{},
		modelStep{c0, model.MaxProduct - 1, granted(1, 2)},
		modelStep{c0, model.MaxProduct - 1, denied(1, 2, 2)},
		modelStep{c0 + 1, 2, denied(1, 1, 1)},
		modelStep{c0 + 1, 1, granted(0, 2)})
	for _, limit := range []int64{1, 2, 2047, 2048} {
		playModel(t, model.SlidingWindow{limit, model.MaxSpan * time.Microsecond}, s,
			modelStep{c0 + 2, 1, denied(0, 1, 1)},
			modelStep{c0 + 2, limit, denied(0, 1, 1)},
			modelStep{c0 + 3, limit, granted(0, 2*model.MaxSpan)})
	}
}

func TestSlidingWindowLargestLimit(t *testing.T) {
	t.Parallel()
	playModel(t, model.SlidingWindow{model.MaxProduct, time.Microsecond}, model.State{},
		modelStep{c0, model.MaxProduct, granted(0, 2)},
		modelStep{c0, 1, denied(0, 2, 2)},
		modelStep{c0, model.MaxProduct, denied(0, 2, 2)}, // count + n is 2^63
		modelStep{c0, model.MaxProduct + 1, denied(0, model.Never, 2)},
		modelStep{c0 + 1, model.MaxProduct, denied(0, 1, 1)},
		modelStep{c0 + 2, model.MaxProduct, granted(0, 2)})
}

func TestSlidingWindowRaisedLimitHelpsAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingWindow{10, time.Minute}, model.State{},
		modelStep{c0, 10, granted(0, 2*minute)},
		modelStep{c1, 1, denied(0, 65*second, 119*second)})
	playModel(t, model.SlidingWindow{15, time.Minute}, s,
		modelStep{c1, 6, denied(5, 65*second, 119*second)}, // 9 + 6 = 15 after 66 s
		modelStep{c1, 5, granted(0, 119*second)},
		modelStep{c1, 1, denied(0, 63*second, 119*second)})
	playModel(t, model.SlidingWindow{15, time.Minute}, s,
		modelStep{c0 + minute, 5, granted(0, 2*minute)})
}

func TestSlidingWindowCostAboveTheLimitNeverFits(t *testing.T) {
	t.Parallel()
	p := model.SlidingWindow{10, time.Minute}
	playModel(t, p, model.State{}, modelStep{c0, 11, denied(10, model.Never, 0)}, modelStep{c0, model.MaxProduct, denied(10, model.Never, 0)})
	s := playModel(t, p, model.State{}, modelStep{c0, 3, granted(7, 2*minute)})
	require.Equal(t, s, playModel(t, p, s,
		modelStep{c1, 11, denied(7, model.Never, 119*second)},
		modelStep{c0 + minute, 11, denied(7, model.Never, minute)}))
}

func TestSlidingWindowDenialConsumesNothing(t *testing.T) {
	t.Parallel()
	p := model.SlidingWindow{10, time.Minute}
	s := playModel(t, p, model.State{}, modelStep{c0, 8, granted(2, 2*minute)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s,
			modelStep{c1, 3, denied(2, 66*second+second/2, 119*second)}, // 8 × 52.5/60 = 7
			modelStep{c0 + 61*second, 4, denied(2, 14*second-0, 59*second)}))
	}
	playModel(t, p, s, modelStep{c1, 2, granted(0, 119*second)})
}

func TestSlidingWindowLoweredLimitDeniesUntilEnoughHasDrained(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingWindow{10, time.Minute}, model.State{}, modelStep{at("12:00:00"), 8, granted(2, 2*minute)})
	playModel(t, model.SlidingWindow{4, time.Minute}, s,
		modelStep{at("12:00:00"), 1, denied(0, 97500*second/1000, 2*minute)}, // 8 × 22.5/60 = 3
		modelStep{at("12:00:00"), 5, denied(0, model.Never, 2*minute)},
		modelStep{at("12:01:37.499999"), 1, denied(0, 1, 22500*second/1000+1)},
		modelStep{at("12:01:37.5"), 1, granted(0, 82500*second/1000)})
}

func TestSlidingWindowLongerWindowAppliesFromTheNextGrant(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingWindow{10, time.Minute}, model.State{}, modelStep{at("12:00:00"), 6, granted(4, 2*minute)})
	longer := model.SlidingWindow{10, time.Hour}
	// Until the new policy takes from the row, the row expires when the old policy promised.
	playModel(t, longer, s,
		modelStep{at("12:01:30"), 5, denied(4, 30*second, 30*second)},
		modelStep{at("12:01:59.999999"), 5, denied(4, 1, 1)},
		modelStep{at("12:02:00"), 5, granted(5, 2*hour)})
	playModel(t, longer, s,
		modelStep{at("12:01:30"), 4, granted(0, 118*minute+30*second)},
		modelStep{at("12:02:00"), 1, denied(0, 64*minute, 118*minute)},
		modelStep{at("13:06:00"), 1, granted(0, 114*minute)})
}

func TestSlidingWindowShorterWindowAppliesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingWindow{10, time.Hour}, model.State{}, modelStep{at("12:00:00"), 10, granted(0, 2*hour)})
	shorter := model.SlidingWindow{10, time.Minute}
	for _, step := range []modelStep{
		{at("12:00:30"), 1, denied(0, 36*second, 90*second)},
		{at("12:01:05.999999"), 1, denied(0, 1, 54*second+1)},
		{at("12:01:06"), 1, granted(0, 114*second)},
		{at("12:01:59.999999"), 10, denied(9, 1, 1)},
		{at("12:02:00"), 10, granted(0, 2*minute)},
		{at("12:30:00"), 10, granted(0, 2*minute)},
		// The row's WindowStart may be ahead of the clock by at most the length of the new window.
		{at("11:59:00"), 1, denied(0, 126*second, 3*minute)},
		{at("11:58:59.999999"), 1, denied(0, 66*second, 2*minute)},
	} {
		playModel(t, shorter, s, step)
	}
}

// The clock jumps back after the window became longer. A denial pulls the row back, and then the longer window counts.
func TestSlidingWindowLongerWindowAfterAJumpBack(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingWindow{10, time.Second}, model.State{}, modelStep{at("12:01:31"), 10, granted(0, 2*second)})
	playModel(t, model.SlidingWindow{10, time.Minute}, s,
		modelStep{at("12:00:30.999999"), 10, denied(0, 2*minute, 2*minute)},
		modelStep{at("12:02:30.999998"), 10, denied(9, 1, 1)},
		modelStep{at("12:02:30.999999"), 10, granted(0, 2*minute)})
}

func TestSlidingWindowExpiredRowEqualsNoRow(t *testing.T) {
	t.Parallel()
	p := model.SlidingWindow{10, time.Minute}
	row := model.State{Count: 1, PrevCount: 10, WindowStart: c0, ExpiresAt: c5} // the row expires before its window ends
	require.False(t, equalsNoRow(p, row, c5-1))
	for _, clock := range []int64{c5, c5 + 1, c0 + minute - 1, c0 + minute, c0 + 2*minute - 1, c0 + 2*minute, c0 + hour} {
		require.True(t, equalsNoRow(p, row, clock))
	}
}

func TestSlidingWindowProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d modeltest.Dice) model.Rules {
		limit, window := d.Window()
		return model.SlidingWindow{limit, window}
	})
}

// slowSliding is the definition of a sliding window. A request is allowed if prev × (W − e)/W + count + n ≤ Limit.
type slowSliding struct {
	limit, window int64
	start         *int64
	prev, count   *big.Rat
}

func (m *slowSliding) at(t int64) (start int64, prev, count *big.Rat) {
	switch {
	case m.start == nil || t >= *m.start+2*m.window || t >= *m.start+m.window && m.count.Sign() == 0:
		return t, rat(0), rat(0)
	case t >= *m.start+m.window:
		return *m.start + m.window, m.count, rat(0)
	}
	return *m.start, m.prev, m.count
}

// sum returns the estimated usage of the window that ends at t.
func (m *slowSliding) sum(t int64) *big.Rat {
	start, prev, count := m.at(t)
	share := new(big.Rat).Sub(rat(1), big.NewRat(t-start, m.window))
	return share.Mul(share, prev).Add(share, count)
}

func (m *slowSliding) fits(t, n int64) bool {
	sum := m.sum(t)
	return sum.Add(sum, rat(n)).Cmp(rat(m.limit)) <= 0
}

func (m *slowSliding) take(t, n int64) {
	start, prev, count := m.at(t)
	m.start, m.prev, m.count = &start, prev, new(big.Rat).Add(count, rat(n))
}

func (m *slowSliding) state(t int64) model.State {
	start, prev, count := m.at(t)
	return model.State{WindowStart: start, PrevCount: whole(prev), Count: whole(count)}
}

func TestSlidingWindowEqualsTheDesignInRationals(t *testing.T) {
	t.Parallel()
	testAgainstSlowModel(t, func(d modeltest.Dice) (model.Rules, slowModel) {
		limit, window := d.Window()
		return model.SlidingWindow{limit, window}, &slowSliding{limit: limit, window: model.Micros(window)}
	})
}

func TestSlidingWindowWeightedSumNeverExceedsTheLimit(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 500 {
		limit, length := d.Window()
		p := model.SlidingWindow{limit, length}
		slow := &slowSliding{limit: limit, window: model.Micros(length)} // slow only adds up what p granted
		var s model.State
		var last model.Decision
		clock := d.Magnitude(0, 1<<52)
		for range 40 {
			clock = d.Forwards(p, s, clock, last)
			n := d.Cost(limit, peek(p, s, clock).Remaining)
			if s, last = p.Decide(s, clock, n); last.Granted == 1 {
				slow.take(clock, n)
			}
			require.LessOrEqual(t, slow.sum(clock).Cmp(rat(limit)), 0, "%+v: %d at %d", p, n, clock)
		}
	}
}

func TestSlidingWindowNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool) {
		limit, window := d.Window()
		return model.SlidingWindow{limit, window}, limit, limit, model.Micros(window), true
	})
}

func FuzzSlidingWindow(f *testing.F) {
	fuzzWindows(f, func(limit int64, window time.Duration) model.Rules { return model.SlidingWindow{limit, window} })
}

// TestSQLEqualsModel found this bug: the sum of a count and a cost of 2^62 each overflowed to a negative number.
func TestSlidingWindowDoesNotAddACountThatFillsTheRangeToACostThatDoes(t *testing.T) {
	t.Parallel()
	policy := model.SlidingWindow{Limit: model.MaxProduct, Window: time.Microsecond}
	taken, first := policy.Decide(model.State{}, 1000, model.MaxProduct)
	require.Equal(t, int64(1), first.Granted)
	_, second := policy.Decide(taken, 1000, model.MaxProduct)
	require.Zero(t, second.Granted)
	require.Equal(t, int64(2), second.RetryAfter)
}
