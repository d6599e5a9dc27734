package model_test

import (
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestFixedWindow(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.FixedWindow
		steps  []modelStep
	}{
		{"one each second", model.FixedWindow{5, 8 * time.Second}, []modelStep{
			{c0, 1, granted(4, 8*second)},
			{c1, 1, granted(3, 7*second)},
			{c2, 1, granted(2, 6*second)},
			{c3, 1, granted(1, 5*second)},
			{c4, 1, granted(0, 4*second)},
			{c5, 1, denied(0, 3*second, 3*second)},
			{c6, 1, denied(0, 2*second, 2*second)},
			{c7, 1, denied(0, 1*second, 1*second)},
			{c8, 1, granted(4, 8*second)},
			{c9, 1, granted(3, 7*second)},
		}},
		{"a window starts at the first request after the one before has ended", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("12:00:37"), 10, granted(0, minute)},
			{at("12:01:00"), 1, denied(0, 37*second, 37*second)},
			{at("12:01:36.999999"), 1, denied(0, 1, 1)},
			{at("12:01:37"), 1, granted(9, minute)},
			{at("12:02:36.999999"), 1, granted(8, 1)},
			{at("12:05:11"), 10, granted(0, minute)},
			{at("12:06:10.999999"), 1, denied(0, 1, 1)},
			{at("12:06:11.000001"), 1, granted(9, minute)},
		}},
		{"twice the limit passes around the edge", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), 1, granted(9, minute)},
			{at("12:00:59.999999"), 9, granted(0, 1)},
			{at("12:01:00"), 10, granted(0, minute)},
		}},
		{"costs", model.FixedWindow{10, time.Minute}, []modelStep{
			{c0, 0, free(10, 0)},
			{c0, 11, denied(10, model.Never, 0)},
			{c0, 4, granted(6, minute)},
			{c1, 0, free(6, 59*second)},
			{c1, 11, denied(6, model.Never, 59*second)},
			{c1, 10, denied(6, 59*second, 59*second)},
			{c1, 7, denied(6, 59*second, 59*second)},
			{c1, 6, granted(0, 59*second)},
			{c2, 0, denied(0, 58*second, 58*second)},
			{c2, 11, denied(0, model.Never, 58*second)},
			{c0 + minute, 0, free(10, 0)},
			{c0 + minute, 10, granted(0, minute)},
		}},
		{"the clock steps back by less than a window", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("12:10:00"), 6, granted(4, minute)},
			{at("12:10:40"), 1, granted(3, 20*second)},
			{at("12:10:20"), 1, granted(2, 40*second)},
			{at("12:09:30"), 2, granted(0, 90*second)},
			{at("12:09:00"), 1, denied(0, 2*minute, 2*minute)},
			{at("12:10:59.999999"), 1, denied(0, 1, 1)},
			{at("12:11:00"), 1, granted(9, minute)},
		}},
		{"the clock steps back by more than a window", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("12:10:00"), 10, granted(0, minute)},
			{at("12:09:00"), 1, denied(0, 2*minute, 2*minute)},
			{at("12:08:59.999999"), 0, denied(0, minute, minute)}, // a Peek does not pull the row back to the clock
			{at("12:09:00"), 1, denied(0, 2*minute, 2*minute)},
			{at("12:08:59.999999"), 11, denied(0, model.Never, minute)}, // a cost above the limit does not pull the row back
			{at("12:09:00"), 1, denied(0, 2*minute, 2*minute)},
			{at("12:08:59.999999"), 1, denied(0, minute, minute)}, // a denial pulls the row back
			{at("12:09:00"), 1, denied(0, 59*second+999_999, 59*second+999_999)},
			{at("12:09:59.999998"), 1, denied(0, 1, 1)},
			{at("12:09:59.999999"), 1, granted(9, minute)},
		}},
		{"usage is kept when the clock jumps back", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("12:10:00"), 6, granted(4, minute)},
			{at("03:00:00"), 5, denied(4, minute, minute)},
			{at("03:00:30"), 4, granted(0, 30*second)},
			{at("02:00:00"), 1, denied(0, minute, minute)},
			{at("02:00:59.999999"), 1, denied(0, 1, 1)},
			{at("02:01:00"), 1, granted(9, minute)},
			{at("01:00:00"), 1, granted(8, minute)},
		}},
		{"a jump forward is one window", model.FixedWindow{10, time.Minute}, []modelStep{
			{at("01:00:00"), 10, granted(0, minute)},
			{at("23:00:00"), 10, granted(0, minute)},
			{at("23:00:00"), 1, denied(0, minute, minute)},
		}},
		{"the shortest window", model.FixedWindow{2, time.Microsecond}, []modelStep{
			{c0, 2, granted(0, 1)},
			{c0, 1, denied(0, 1, 1)},
			{c0 - 1, 1, denied(0, 2, 2)},
			{c0 + 1, 2, granted(0, 1)},
		}},
		{"the longest window", model.FixedWindow{2048, model.MaxSpan * time.Microsecond}, []modelStep{
			{c0, 2048, granted(0, model.MaxSpan)},
			{c0 + model.MaxSpan - 1, 1, denied(0, 1, 1)},
			{c0 + model.MaxSpan, 2048, granted(0, model.MaxSpan)},
		}},
		{"the largest limit", model.FixedWindow{model.MaxProduct, time.Microsecond}, []modelStep{
			{c0, model.MaxProduct, granted(0, 1)},
			{c0, model.MaxProduct, denied(0, 1, 1)},
			{c0, 1, denied(0, 1, 1)},
			{c0, model.MaxProduct + 1, denied(0, model.Never, 1)},
			{c0 + 1, model.MaxProduct - 1, granted(1, 1)},
			{c0 + 1, model.MaxProduct, denied(1, 1, 1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, model.State{}, test.steps...)
		})
	}
}

func TestFixedWindowDenialConsumesNothing(t *testing.T) {
	t.Parallel()
	p := model.FixedWindow{10, time.Minute}
	s := playModel(t, p, model.State{}, modelStep{c0, 8, granted(2, minute)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s, modelStep{c1, 3, denied(2, 59*second, 59*second)}))
	}
	playModel(t, p, s, modelStep{c1, 2, granted(0, 59*second)})
}

func TestFixedWindowRaisedLimitHelpsAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.FixedWindow{10, time.Minute}, model.State{},
		modelStep{c0, 10, granted(0, minute)},
		modelStep{c1, 1, denied(0, 59*second, 59*second)})
	playModel(t, model.FixedWindow{15, time.Minute}, s,
		modelStep{c1, 6, denied(5, 59*second, 59*second)},
		modelStep{c1, 5, granted(0, 59*second)},
		modelStep{c1, 1, denied(0, 59*second, 59*second)})
}

func TestFixedWindowCostAboveTheLimitNeverFits(t *testing.T) {
	t.Parallel()
	p := model.FixedWindow{10, time.Minute}
	playModel(t, p, model.State{}, modelStep{c0, 11, denied(10, model.Never, 0)}, modelStep{c0, model.MaxProduct, denied(10, model.Never, 0)})
	s := playModel(t, p, model.State{}, modelStep{c0, 3, granted(7, minute)})
	require.Equal(t, s, playModel(t, p, s, modelStep{c1, 11, denied(7, model.Never, 59*second)}))
}

func TestFixedWindowLoweredLimitDeniesUntilTheWindowEnds(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.FixedWindow{10, time.Minute}, model.State{}, modelStep{c0, 7, granted(3, minute)})
	playModel(t, model.FixedWindow{8, time.Minute}, s,
		modelStep{c1, 2, denied(1, 59*second, 59*second)},
		modelStep{c1, 1, granted(0, 59*second)})
	playModel(t, model.FixedWindow{4, time.Minute}, s,
		modelStep{c1, 1, denied(0, 59*second, 59*second)},
		modelStep{c1, 5, denied(0, model.Never, 59*second)},
		modelStep{c0 + minute - 1, 1, denied(0, 1, 1)},
		modelStep{c0 + minute, 4, granted(0, minute)})
}

func TestFixedWindowLongerWindowAppliesFromTheNextGrant(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.FixedWindow{10, time.Minute}, model.State{}, modelStep{c0, 6, granted(4, minute)})
	longer := model.FixedWindow{10, time.Hour}
	// Until the new policy takes from the row, the row keeps the time of expiry that the old policy set.
	playModel(t, longer, s,
		modelStep{c1, 5, denied(4, 59*second, 59*second)},
		modelStep{c0 + minute - 1, 5, denied(4, 1, 1)},
		modelStep{c0 + minute, 5, granted(5, hour)})
	playModel(t, longer, s,
		modelStep{c1, 4, granted(0, hour-second)},
		modelStep{c0 + minute, 1, denied(0, hour-minute, hour-minute)},
		modelStep{c0 + hour, 1, granted(9, hour)})
}

func TestFixedWindowShorterWindowAppliesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.FixedWindow{10, time.Hour}, model.State{}, modelStep{c0, 10, granted(0, hour)})
	shorter := model.FixedWindow{10, time.Minute}
	playModel(t, shorter, s,
		modelStep{c1, 1, denied(0, 59*second, 59*second)},
		modelStep{c0 + minute - 1, 1, denied(0, 1, 1)},
		modelStep{c0 + minute, 1, granted(9, minute)})
	// The row's WindowStart may be ahead of the clock by at most the length of the new window.
	playModel(t, shorter, s, modelStep{c0 - minute, 1, denied(0, 2*minute, 2*minute)})
	playModel(t, shorter, s,
		modelStep{c0 - minute - 1, 1, denied(0, minute, minute)},
		modelStep{c0 - 1, 1, granted(9, minute)})
}

func TestFixedWindowExpiredRowEqualsNoRow(t *testing.T) {
	t.Parallel()
	p := model.FixedWindow{10, time.Minute}
	row := model.State{Count: 10, WindowStart: c0, ExpiresAt: c5} // the row expires before its window ends
	require.False(t, equalsNoRow(p, row, c5-1))
	for _, clock := range []int64{c5, c5 + 1, c0 + minute - 1, c0 + minute, c0 + hour} {
		require.True(t, equalsNoRow(p, row, clock))
	}
}

func TestFixedWindowProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d modeltest.Dice) model.Rules {
		limit, window := d.Window()
		return model.FixedWindow{limit, window}
	})
}

// slowFixed is the definition of a fixed window. A window starts at the first request after the last window ended. A
// request is allowed if count + n ≤ Limit.
type slowFixed struct {
	limit, window int64
	start         *int64
	count         *big.Rat
}

func (m *slowFixed) at(t int64) (start int64, count *big.Rat) {
	if m.start == nil || t-*m.start >= m.window {
		return t, rat(0)
	}
	return *m.start, m.count
}

func (m *slowFixed) fits(t, n int64) bool {
	_, count := m.at(t)
	return new(big.Rat).Add(count, rat(n)).Cmp(rat(m.limit)) <= 0
}

func (m *slowFixed) take(t, n int64) {
	start, count := m.at(t)
	m.start, m.count = &start, new(big.Rat).Add(count, rat(n))
}

func (m *slowFixed) state(t int64) model.State {
	start, count := m.at(t)
	return model.State{WindowStart: start, Count: whole(count)}
}

func TestFixedWindowEqualsTheDesignInRationals(t *testing.T) {
	t.Parallel()
	testAgainstSlowModel(t, func(d modeltest.Dice) (model.Rules, slowModel) {
		limit, window := d.Window()
		return model.FixedWindow{limit, window}, &slowFixed{limit: limit, window: model.Micros(window)}
	})
}

func TestFixedWindowNeverGrantsMoreThanTheLimitInAWindow(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 500 {
		limit, length := d.Window()
		p := model.FixedWindow{limit, length}
		var s model.State
		var last model.Decision
		var start, taken int64
		clock := d.Magnitude(0, 1<<52)
		for range 40 {
			clock = d.Forwards(p, s, clock, last)
			n := d.Cost(limit, peek(p, s, clock).Remaining)
			if s, last = p.Decide(s, clock, n); last.Granted == 0 {
				continue
			}
			if taken == 0 || clock-start >= model.Micros(length) {
				start, taken = clock, 0
			}
			require.LessOrEqual(t, n, limit-taken, "%+v: %d at %d, after %d since %d", p, n, clock, taken, start)
			taken += n
		}
	}
}

func TestFixedWindowNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool) {
		limit, window := d.Window()
		return model.FixedWindow{limit, window}, limit, limit, model.Micros(window), true
	})
}

func FuzzFixedWindow(f *testing.F) {
	fuzzWindows(f, func(limit int64, window time.Duration) model.Rules { return model.FixedWindow{limit, window} })
}
