package model_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestSlidingLog(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.SlidingLog
		steps  []modelStep
	}{
		{"each leaves a window after it was taken", model.SlidingLog{3, time.Minute}, []modelStep{
			{at("12:00:00"), 1, granted(2, minute)},
			{at("12:00:10"), 1, granted(1, minute)},
			{at("12:00:20"), 1, granted(0, minute)},
			{at("12:00:30"), 1, denied(0, 30*second, 50*second)},
			{at("12:00:30"), 2, denied(0, 40*second, 50*second)},
			{at("12:00:30"), 3, denied(0, 50*second, 50*second)},
			{at("12:00:59.999999"), 1, denied(0, 1, 20*second+1)},
			{at("12:01:00"), 2, denied(1, 10*second, 20*second)},
			{at("12:01:00"), 1, granted(0, minute)},
			{at("12:01:09.999999"), 1, denied(0, 1, 50*second+1)},
			{at("12:01:20"), 2, granted(0, minute)},
		}},
		{"nothing but the limit passes around any edge", model.SlidingLog{10, time.Minute}, []modelStep{
			{at("12:00:00"), 1, granted(9, minute)},
			{at("12:00:59.999999"), 9, granted(0, minute)},
			{at("12:01:00"), 1, granted(0, minute)},
			{at("12:01:00"), 1, denied(0, minute-1, minute)},
			{at("12:01:59.999998"), 9, denied(0, 1, 2)},
			{at("12:01:59.999999"), 9, granted(0, minute)},
		}},
		{"costs leave as they came", model.SlidingLog{10, time.Minute}, []modelStep{
			{c0, 0, free(10, 0)},
			{c0, 11, denied(10, model.Never, 0)},
			{c0, 6, granted(4, minute)},
			{c1, 3, granted(1, minute)},
			{c2, 1, granted(0, minute)},
			{c3, 6, denied(0, 57*second, 59*second)},
			{c3, 7, denied(0, 58*second, 59*second)},
			{c3, 9, denied(0, 58*second, 59*second)},
			{c3, 10, denied(0, 59*second, 59*second)},
			{c3, 11, denied(0, model.Never, 59*second)},
			{c0 + minute, 7, denied(6, second, 2*second)},
			{c0 + minute, 6, granted(0, minute)},
		}},
		{"what is taken at one time is one entry", model.SlidingLog{5, time.Minute}, []modelStep{
			{c0, 2, granted(3, minute)},
			{c0, 1, granted(2, minute)},
			{c0, 3, denied(2, minute, minute)},
			{c1, 2, granted(0, minute)},
			{c0 + minute, 3, granted(0, minute)},
			{c1 + minute, 2, granted(0, minute)},
		}},
		{"the clock steps back by less than a window", model.SlidingLog{3, time.Minute}, []modelStep{
			{at("12:01:00"), 2, granted(1, minute)},
			{at("12:00:30"), 1, granted(0, 90*second)}, // the log has this unit at 12:01:00
			{at("12:00:00"), 1, denied(0, 2*minute, 2*minute)},
			{at("12:01:59.999999"), 1, denied(0, 1, 1)},
			{at("12:02:00"), 3, granted(0, minute)},
		}},
		{"the clock jumps back, and usage is kept", model.SlidingLog{3, time.Minute}, []modelStep{
			{at("12:01:00"), 1, granted(2, minute)},
			{at("12:01:20"), 2, granted(0, minute)},
			{at("12:00:20"), 1, denied(0, 100*second, 2*minute)},
			{at("12:00:19.999999"), 0, denied(0, 40*second, minute)}, // a Peek does not pull the row back to the clock
			{at("12:00:20"), 1, denied(0, 100*second, 2*minute)},
			// a denial pulls the row back; the entry has been in the log for 20 s
			{at("12:00:19.999999"), 1, denied(0, 40*second, minute)},
			{at("12:00:59.999998"), 1, denied(0, 1, 20*second+1)},
			{at("12:00:59.999999"), 1, granted(0, minute)},
			{at("12:01:19.999999"), 2, granted(0, minute)},
			{at("03:00:00"), 2, denied(0, minute, minute)},
			{at("03:00:40"), 1, granted(0, minute)},
		}},
		{"a grant on a row that the clock has left behind", model.SlidingLog{3, time.Minute}, []modelStep{
			{at("12:01:00"), 1, granted(2, minute)},
			{at("12:01:20"), 1, granted(1, minute)},
			{at("03:00:00"), 1, granted(0, minute)},
			{at("03:00:00"), 1, denied(0, 40*second, minute)},
			{at("03:00:40"), 1, granted(0, minute)},
			{at("03:01:00"), 2, granted(0, minute)},
		}},
		{"a jump forward is one limit", model.SlidingLog{3, time.Minute}, []modelStep{
			{at("01:00:00"), 3, granted(0, minute)},
			{at("23:00:00"), 3, granted(0, minute)},
			{at("23:00:00"), 1, denied(0, minute, minute)},
		}},
		{"the shortest window", model.SlidingLog{2, time.Microsecond}, []modelStep{
			{c0, 2, granted(0, 1)},
			{c0, 1, denied(0, 1, 1)},
			{c0 - 1, 1, denied(0, 2, 2)},
			{c0 + 1, 2, granted(0, 1)},
		}},
		{"the longest window, over more than 285 years", model.SlidingLog{2, model.MaxSpan * time.Microsecond}, []modelStep{
			{c0, 1, granted(1, model.MaxSpan)},
			{c0 + model.MaxSpan - 1, 1, granted(0, model.MaxSpan)},
			{c0 + model.MaxSpan - 1, 1, denied(0, 1, model.MaxSpan)},
			{c0 + 2*model.MaxSpan - 2, 1, granted(0, model.MaxSpan)},
			{c0 + 3*model.MaxSpan - 3, 1, granted(0, model.MaxSpan)},
			{c0 + 4*model.MaxSpan - 4, 1, granted(0, model.MaxSpan)},
			{c0 + 5*model.MaxSpan - 5, 2, denied(1, 1, 1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, model.State{}, test.steps...)
		})
	}
}

func TestSlidingLogDenialConsumesNothing(t *testing.T) {
	t.Parallel()
	p := model.SlidingLog{10, time.Minute}
	s := playModel(t, p, model.State{}, modelStep{c0, 8, granted(2, minute)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s,
			modelStep{c1, 3, denied(2, 59*second, 59*second)},
			modelStep{c2, 11, denied(2, model.Never, 58*second)}))
	}
	playModel(t, p, s, modelStep{c1, 2, granted(0, minute)})
}

func TestSlidingLogHoldsNoMoreThanTheLimit(t *testing.T) {
	t.Parallel()
	p := model.SlidingLog{model.MaxLogLimit, time.Minute}
	var s model.State
	var d model.Decision
	for i := range int64(3550) { // 1,200 requests a minute; the last 200 are denied
		s, d = p.Decide(s, c0+i*second/20, 1)
		require.LessOrEqual(t, len(s.Log)/8, model.MaxLogLimit)
	}
	require.Len(t, s.Log, 8*model.MaxLogLimit)
	require.Zero(t, d.Granted)
	require.Len(t, d.State.Log, 8, "a denial of 1 needs one entry of 1,000")
}

func TestSlidingLogRaisedLimitHelpsAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingLog{2, time.Minute}, model.State{},
		modelStep{c0, 1, granted(1, minute)},
		modelStep{c1, 1, granted(0, minute)},
		modelStep{c2, 1, denied(0, 58*second, 59*second)})
	playModel(t, model.SlidingLog{5, time.Minute}, s,
		modelStep{c2, 4, denied(3, 58*second, 59*second)},
		modelStep{c2, 5, denied(3, 59*second, 59*second)},
		modelStep{c2, 3, granted(0, minute)})
}

func TestSlidingLogLoweredLimitDeniesUntilEnoughHasDrained(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingLog{10, time.Minute}, model.State{},
		modelStep{c0, 4, granted(6, minute)},
		modelStep{c1, 3, granted(3, minute)},
		modelStep{c2, 2, granted(1, minute)})
	playModel(t, model.SlidingLog{3, time.Minute}, s,
		modelStep{c3, 1, denied(0, 58*second, 59*second)},
		modelStep{c3, 2, denied(0, 59*second, 59*second)},
		modelStep{c3, 4, denied(0, model.Never, 59*second)},
		modelStep{c0 + minute, 1, denied(0, second, 2*second)},
		modelStep{c1 + minute, 1, granted(0, minute)},
		modelStep{c2 + minute, 2, granted(0, minute)})
}

func TestSlidingLogLongerWindowAppliesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingLog{3, time.Minute}, model.State{},
		modelStep{at("12:00:00"), 1, granted(2, minute)},
		modelStep{at("12:00:30"), 1, granted(1, minute)})
	longer := model.SlidingLog{3, time.Hour}
	// Until the new policy takes from the row, the row keeps the time of expiry that the old policy set.
	playModel(t, longer, s,
		modelStep{at("12:01:10"), 2, denied(1, 20*second, 20*second)},
		modelStep{at("12:01:30"), 2, granted(1, hour)})
	playModel(t, longer, s,
		modelStep{at("12:01:10"), 1, granted(0, hour)},
		modelStep{at("12:01:30"), 1, denied(0, 58*minute+30*second, 59*minute+40*second)},
		modelStep{at("13:00:00"), 1, granted(0, hour)})
}

func TestSlidingLogShorterWindowAppliesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.SlidingLog{3, time.Hour}, model.State{},
		modelStep{at("12:00:00"), 1, granted(2, hour)},
		modelStep{at("12:00:30"), 1, granted(1, hour)},
		modelStep{at("12:20:00"), 1, granted(0, hour)})
	shorter, longer := model.SlidingLog{3, time.Minute}, model.SlidingLog{3, time.Hour}
	playModel(t, shorter, s,
		modelStep{at("12:20:30"), 3, denied(2, 30*second, 30*second)},
		modelStep{at("12:21:00"), 3, granted(0, minute)})
	// A take removes the entries that the shorter window no longer covers. A denial keeps these entries.
	playModel(t, longer, s, modelStep{at("12:20:30"), 1, denied(0, 39*minute+30*second, 59*minute+30*second)})
	s = playModel(t, shorter, s, modelStep{at("12:20:30"), 1, granted(1, minute)})
	playModel(t, longer, s, modelStep{at("12:20:30"), 2, denied(1, minute, minute)})
	// A denial that pulls the row back to the clock removes old entries too. Here two entries leave the log.
	s = playModel(t, shorter, s, modelStep{at("12:20:40"), 1, granted(0, minute)})
	playModel(t, model.SlidingLog{3, 10 * time.Second}, s,
		modelStep{at("12:20:00"), 3, denied(2, 10*second, 10*second)},
		modelStep{at("12:20:10"), 3, granted(0, 10*second)})
}

func TestSlidingLogExpiredRowEqualsNoRow(t *testing.T) {
	t.Parallel()
	p := model.SlidingLog{10, time.Minute}
	row := model.State{
		Count:       10,
		WindowStart: c0,
		ExpiresAt:   c5,
		Log:         model.Entries("").With(c0, 10),
	} // the row expires before its window ends
	require.False(t, equalsNoRow(p, row, c5-1))
	for _, clock := range []int64{c5, c5 + 1, c0 + minute - 1, c0 + minute, c0 + hour} {
		require.True(t, equalsNoRow(p, row, clock))
	}
}

func TestSlidingLogProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d modeltest.Dice) model.Rules { return d.Log() })
}

// slowLog is the definition of a log: the units taken within the window before t, plus n, are at most the limit.
type slowLog struct {
	limit, window int64
	taken         []struct{ at, n int64 }
}

func (m *slowLog) sum(t int64) (sum int64) {
	for _, one := range m.taken {
		if one.at+m.window > t {
			sum += one.n
		}
	}
	return sum
}

func (m *slowLog) fits(t, n int64) bool { return m.sum(t)+n <= m.limit }

func (m *slowLog) take(t, n int64) { m.taken = append(m.taken, struct{ at, n int64 }{t, n}) }

func (m *slowLog) state(t int64) model.State {
	s := model.State{Count: m.sum(t), WindowStart: t}
	for _, one := range m.taken {
		if one.n > 0 && s.Count > 0 {
			s.WindowStart = one.at
		}
	}
	return s
}

func TestSlidingLogEqualsItsDefinition(t *testing.T) {
	t.Parallel()
	testAgainstSlowModel(t, func(d modeltest.Dice) (model.Rules, slowModel) {
		p := d.Log()
		return p, &slowLog{limit: p.Limit, window: model.Micros(p.Window)}
	})
}

func TestSlidingLogNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool) {
		log := d.Log()
		return log, log.Limit, log.Limit, model.Micros(log.Window), true
	})
}

func FuzzSlidingLog(f *testing.F) {
	f.Add(int64(10), minute, int64(20), minute, []byte("a request at each of some clocks, at some costs"))
	f.Add(
		int64(1000),
		int64(model.MaxSpan),
		int64(1),
		int64(1),
		[]byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"),
	)
	f.Add(
		int64(1000),
		int64(1),
		int64(999),
		int64(model.MaxSpan),
		[]byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5\xf4\xf3\xf2\xf1\xf0"),
	)
	f.Add(int64(1), int64(3), int64(3), int64(1), []byte("the clock steps back and the policy changes"))
	f.Fuzz(func(t *testing.T, limit, window, limit2, window2 int64, steps []byte) {
		fuzzModel(t, steps, model.SlidingLog{limit, model.Duration(window)}, model.SlidingLog{limit2, model.Duration(window2)})
	})
}
