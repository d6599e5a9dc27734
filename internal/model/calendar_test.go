package model_test

import (
	"fmt"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// These are the units of the calendar.
const (
	minutely = time.Minute
	hourly   = time.Hour
	daily    = 24 * time.Hour
	weekly   = 7 * daily
	monthly  = 31 * daily
)

// clockAt parses a time with its offset, such as "2026-03-29T03:00:00+02:00", and returns microseconds.
func clockAt(text string) int64 {
	t, err := time.Parse(time.RFC3339Nano, text)
	if err != nil {
		panic(err)
	}
	return t.UnixMicro()
}

func TestCalendarWindow(t *testing.T) {
	t.Parallel()
	const day = 24 * hour
	in := func(unit time.Duration, zone string) model.CalendarWindow {
		return model.CalendarWindow{Limit: 10, Span: unit, Zone: zone}
	}
	for _, test := range []struct {
		name   string
		policy model.CalendarWindow
		steps  []modelStep
	}{
		{"a month ends at midnight of its zone", in(monthly, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-31T12:00:00+02:00"), 10, granted(0, 12*hour)},
			{clockAt("2026-03-31T12:00:00+02:00"), 1, denied(0, 12*hour, 12*hour)},
			{clockAt("2026-03-31T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-04-01T00:00:00+02:00"), 10, granted(0, 30*day)},
			{clockAt("2026-04-30T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-05-01T00:00:00+02:00"), 1, granted(9, 31*day)},
		}},
		{"months of 28, 29 and 31 days less an hour", in(monthly, "Europe/Berlin"), []modelStep{
			{clockAt("2026-02-01T00:00:00+01:00"), 1, granted(9, 28*day)},
			{clockAt("2026-03-01T00:00:00+01:00"), 1, granted(9, 31*day-hour)},
			{clockAt("2026-10-01T00:00:00+02:00"), 1, granted(9, 31*day+hour)},
			{clockAt("2028-02-01T00:00:00+01:00"), 1, granted(9, 29*day)},
			{clockAt("2100-02-01T00:00:00+01:00"), 1, granted(9, 28*day)},
			{clockAt("2100-12-31T23:59:59.999999+01:00"), 1, granted(9, 1)},
		}},
		{"UTC is the default", in(monthly, "UTC"), []modelStep{
			{clockAt("2026-01-31T23:59:59Z"), 1, granted(9, second)},
			{clockAt("2026-02-01T00:00:00Z"), 1, granted(9, 28*day)},
		}},
		{"a day of 23 hours, and one of 25", in(daily, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-29T00:00:00+01:00"), 10, granted(0, 23*hour)},
			{clockAt("2026-03-29T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-03-30T00:00:00+02:00"), 1, granted(9, day)},
			{clockAt("2026-10-25T00:00:00+02:00"), 10, granted(0, 25*hour)},
			{clockAt("2026-10-25T23:00:00+01:00"), 1, denied(0, hour, hour)},
			{clockAt("2026-10-26T00:00:00+01:00"), 1, granted(9, day)},
		}},
		{"an hour that comes twice", in(hourly, "Europe/Berlin"), []modelStep{
			{clockAt("2026-10-25T02:30:00+02:00"), 10, granted(0, hour/2)},
			{clockAt("2026-10-25T02:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-10-25T02:00:00+01:00"), 10, granted(0, hour)},
			{clockAt("2026-10-25T03:00:00+01:00"), 1, granted(9, hour)},
		}},
		{"an hour that is left out", in(hourly, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-29T01:30:00+01:00"), 10, granted(0, hour/2)},
			{clockAt("2026-03-29T03:00:00+02:00"), 1, granted(9, hour)},
		}},
		{"a midnight that is left out", in(daily, "America/Sao_Paulo"), []modelStep{
			{clockAt("2018-11-03T23:30:00-03:00"), 10, granted(0, hour/2)},
			{clockAt("2018-11-04T01:00:00-02:00"), 10, granted(0, 23*hour)},
			{clockAt("2018-11-05T00:00:00-02:00"), 1, granted(9, day)},
		}},
		{"a midnight that comes twice", in(daily, "America/St_Johns"), []modelStep{
			{clockAt("2010-11-06T23:59:59-02:30"), 1, granted(9, hour+second)},
			{clockAt("2010-11-07T00:00:30-02:30"), 8, granted(1, hour-30*second)},
			{clockAt("2010-11-06T23:01:00-03:30"), 2, denied(1, 59*minute, 59*minute)},
			{clockAt("2010-11-07T00:00:00-03:30"), 1, granted(9, day)},
		}},
		{"a new key in the minute after the first midnight", in(daily, "America/St_Johns"), []modelStep{
			{clockAt("2010-11-07T00:00:30-02:30"), 1, granted(9, hour-30*second)},
		}},
		{"a day that is left out", in(daily, "Pacific/Apia"), []modelStep{
			{clockAt("2011-12-29T23:00:00-10:00"), 10, granted(0, hour)},
			{clockAt("2011-12-31T00:00:00+14:00"), 1, granted(9, day)},
		}},
		{"clocks go back by half an hour", in(hourly, "Australia/Lord_Howe"), []modelStep{
			{clockAt("2026-04-05T01:59:00+11:00"), 10, granted(0, minute)},
			{clockAt("2026-04-05T01:30:00+10:30"), 10, granted(0, hour/2)},
			{clockAt("2026-04-05T02:00:00+10:30"), 1, granted(9, hour)},
		}},
		{"clocks go forward by half an hour", in(hourly, "Australia/Lord_Howe"), []modelStep{
			{clockAt("2026-10-04T01:50:00+10:30"), 10, granted(0, 10*minute)},
			{clockAt("2026-10-04T02:30:00+11:00"), 1, granted(9, hour/2)},
		}},
		{"an hour that is cut short", in(hourly, "Asia/Pyongyang"), []modelStep{
			{clockAt("2018-05-04T23:10:00+08:30"), 10, granted(0, 20*minute)},
			{clockAt("2018-05-05T00:00:00+09:00"), 1, granted(9, hour)},
		}},
		{"the hours of half an offset", in(hourly, "Asia/Kolkata"), []modelStep{
			{clockAt("2026-07-01T12:15:00+05:30"), 1, granted(9, 45*minute)},
			{clockAt("2026-07-01T13:00:00+05:30"), 1, granted(9, hour)},
		}},
		{"a week starts on Monday", in(weekly, "America/New_York"), []modelStep{
			{clockAt("2026-07-05T23:59:59-04:00"), 10, granted(0, second)}, // this day is a Sunday
			{clockAt("2026-07-06T00:00:00-04:00"), 1, granted(9, 7*day)},
			{clockAt("2026-10-26T00:00:00-04:00"), 1, granted(9, 7*day+hour)},
			{clockAt("2026-12-28T00:00:00-05:00"), 1, granted(9, 7*day)}, // the week reaches into the next year
		}},
		{"windows of 30 seconds since the epoch", in(30*time.Second, algorithm.Epoch), []modelStep{
			{at("12:00:20"), 10, granted(0, 10*second)},
			{at("12:00:29.999999"), 1, denied(0, 1, 1)},
			{at("12:00:30"), 10, granted(0, 30*second)},
			{at("12:01:30"), 1, granted(9, 30*second)},
		}},
		{"a week since the epoch begins on Thursday", in(7*daily, algorithm.Epoch), []modelStep{
			{clockAt("2026-07-01T23:59:59Z"), 10, granted(0, second)},
			{clockAt("2026-07-02T00:00:00Z"), 1, granted(9, 7*day)},
		}},
		{"costs", in(minutely, "UTC"), []modelStep{
			{at("12:00:10"), 0, free(10, 0)},
			{at("12:00:10"), 11, denied(10, model.Never, 0)},
			{at("12:00:10"), 4, granted(6, 50*second)},
			{at("12:00:11"), 0, free(6, 49*second)},
			{at("12:00:11"), 11, denied(6, model.Never, 49*second)},
			{at("12:00:11"), 7, denied(6, 49*second, 49*second)},
			{at("12:00:11"), 6, granted(0, 49*second)},
			{at("12:00:12"), 0, denied(0, 48*second, 48*second)},
			{at("12:01:00"), 0, free(10, 0)},
			{at("12:01:00"), 10, granted(0, minute)},
		}},
		{"the clock steps back by less than a window", in(minutely, "UTC"), []modelStep{
			{at("12:10:05"), 6, granted(4, 55*second)},
			{at("12:10:01"), 1, granted(3, 59*second)},
			{at("12:09:59.999999"), 1, granted(2, minute+1)}, // the take counts in the row's window, which is ahead of the clock
			{at("12:09:05"), 3, denied(2, 115*second, 115*second)},
			{at("12:10:59.999999"), 3, denied(2, 1, 1)},
			{at("12:11:00"), 1, granted(9, minute)},
		}},
		{"the clock steps back by more than a window", in(minutely, "UTC"), []modelStep{
			{at("12:10:05"), 10, granted(0, 55*second)},
			{at("12:09:05"), 1, denied(0, 115*second, 115*second)},
			{at("12:09:04.999999"), 0, denied(0, minute, minute)}, // a Peek does not pull the row back to the clock
			{at("12:09:05"), 1, denied(0, 115*second, 115*second)},
			{at("12:09:04.999999"), 1, denied(0, minute, minute)}, // a denial pulls the row back, for a whole window
			{at("12:09:05"), 1, denied(0, minute-1, minute-1)},
			{at("12:10:04.999999"), 1, granted(9, 55*second+1)},
		}},
		{"the largest limit", model.CalendarWindow{model.MaxProduct, monthly, "UTC"}, []modelStep{
			{clockAt("2026-07-31T23:59:59.999999Z"), model.MaxProduct, granted(0, 1)},
			{clockAt("2026-07-31T23:59:59.999999Z"), 1, denied(0, 1, 1)},
			{clockAt("2026-08-01T00:00:00Z"), model.MaxProduct - 1, granted(1, 31*day)},
			{clockAt("2026-08-01T00:00:00Z"), model.MaxProduct, denied(1, 31*day, 31*day)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, model.State{}, test.steps...)
		})
	}
}

func TestCalendarWindowDenialConsumesNothing(t *testing.T) {
	t.Parallel()
	p := model.CalendarWindow{Limit: 10, Span: minutely, Zone: "UTC"}
	s := playModel(t, p, model.State{}, modelStep{at("12:00:00"), 8, granted(2, minute)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s, modelStep{at("12:00:01"), 3, denied(2, 59*second, 59*second)}))
	}
	playModel(t, p, s, modelStep{at("12:00:01"), 2, granted(0, 59*second)})
}

func TestCalendarWindowLimitChangesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.CalendarWindow{10, minutely, "UTC"}, model.State{}, modelStep{at("12:00:00"), 7, granted(3, minute)})
	playModel(t, model.CalendarWindow{15, minutely, "UTC"}, s,
		modelStep{at("12:00:01"), 9, denied(8, 59*second, 59*second)},
		modelStep{at("12:00:01"), 8, granted(0, 59*second)})
	playModel(t, model.CalendarWindow{4, minutely, "UTC"}, s,
		modelStep{at("12:00:01"), 1, denied(0, 59*second, 59*second)},
		modelStep{at("12:00:01"), 5, denied(0, model.Never, 59*second)},
		modelStep{at("12:01:00"), 4, granted(0, minute)})
}

// A key's window ends at the announced time, even after the policy changed to another unit or zone.
func TestCalendarWindowKeepsItsEndUnderAnotherZoneOrALongerUnit(t *testing.T) {
	t.Parallel()
	const day = 24 * hour
	s := playModel(t, model.CalendarWindow{10, daily, "Europe/Berlin"}, model.State{},
		modelStep{clockAt("2026-07-01T12:00:00+02:00"), 7, granted(3, 12*hour)})
	playModel(t, model.CalendarWindow{10, daily, "America/New_York"}, s,
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 4, denied(3, 11*hour, 11*hour)},
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 3, granted(0, 11*hour)},
		modelStep{clockAt("2026-07-02T00:00:00+02:00"), 10, granted(0, 6*hour)},
		modelStep{clockAt("2026-07-02T00:00:00-04:00"), 1, granted(9, day)})
	playModel(t, model.CalendarWindow{1000, monthly, "Europe/Berlin"}, s,
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 3, granted(990, 11*hour)},
		modelStep{clockAt("2026-07-02T00:00:00+02:00"), 3, granted(997, 30*day)})
}

func TestCalendarWindowStartsAnewUnderAShorterUnit(t *testing.T) {
	t.Parallel()
	const day = 24 * hour
	s := playModel(t, model.CalendarWindow{100, monthly, "UTC"}, model.State{},
		modelStep{clockAt("2026-07-10T12:00:00Z"), 50, granted(50, 21*day+12*hour)})
	playModel(t, model.CalendarWindow{10, daily, "UTC"}, s,
		modelStep{clockAt("2026-07-10T13:00:00Z"), 10, granted(0, 11*hour)},
		modelStep{clockAt("2026-07-11T00:00:00Z"), 10, granted(0, day)})
	// A window of at most two days goes on under the daily unit.
	s = playModel(t, model.CalendarWindow{100, monthly, "UTC"}, model.State{},
		modelStep{clockAt("2026-07-30T12:00:00Z"), 50, granted(50, 36*hour)})
	playModel(t, model.CalendarWindow{10, daily, "UTC"}, s,
		modelStep{clockAt("2026-07-30T13:00:00Z"), 1, denied(0, 35*hour, 35*hour)},
		modelStep{clockAt("2026-08-01T00:00:00Z"), 10, granted(0, day)})
}

// Granted credit outlasts the window, even if the policy changes to a shorter unit.
func TestCalendarWindowCreditIsKeptForTwoWindows(t *testing.T) {
	t.Parallel()
	p := model.CalendarWindow{10, minutely, "Asia/Kolkata"}
	s, d, err := checkedGrant(p, model.State{}, at("12:00:50"), 5)
	require.NoError(t, err)
	require.Equal(t, granted(15, 2*minute), d)
	s = playModel(t, p, s,
		modelStep{at("12:00:50"), 10, granted(5, 2*minute)},
		modelStep{at("12:00:51"), 6, denied(5, 9*second, 119*second)},
		modelStep{at("12:01:00"), 10, granted(5, 2*minute)},
		modelStep{at("12:02:59.999999"), 0, free(15, 1)},
		modelStep{at("12:02:00"), 10, granted(5, 2*minute)},
		modelStep{at("12:02:10"), 5, granted(0, 50*second)})
	playModel(t, p, s, modelStep{at("12:02:11"), 1, denied(0, 49*second, 49*second)})
}

// A newer window can have the same start, after a Reset or under another policy. A refund of an older take gives it
// nothing.
func TestCalendarWindowRefundsOnlyItsOwnTakes(t *testing.T) {
	t.Parallel()
	p := model.CalendarWindow{10, monthly, "UTC"}
	before, d := p.Decide(model.State{}, c0, 5)
	back, _, err := checkRefund(p, before, c1, d.Taken)
	require.NoError(t, err)
	require.True(t, equalsNoRow(p, back, c1))
	s := playModel(t, p, model.State{}, modelStep{c2, 3, granted(7, p.End(c2)-c2)}) // as after a Reset
	next, _, err := checkRefund(p, s, c3, d.Taken)
	require.NoError(t, err)
	require.Equal(t, s, next)
}

func TestCalendarWindowProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d modeltest.Dice) model.Rules { return d.Calendar() })
}

// slowCalendarModel finds the end of a window from the time that clocks show. It needs a zone whose clock changes are
// at least one hour. Without a zone, windows are aligned to the epoch.
type slowCalendarModel struct {
	limit int64
	unit  time.Duration
	zone  *time.Location
	start *int64
	count *big.Rat
}

// shows returns a time as a calendar and a clock show it, down to the unit.
func (m *slowCalendarModel) shows(t int64) string {
	if m.zone == nil {
		return fmt.Sprint(t / model.Micros(m.unit))
	}
	local := time.UnixMicro(t).In(m.zone)
	switch m.unit {
	case minutely:
		return local.Format("2006-01-02 15:04 Z07")
	case hourly:
		return local.Format("2006-01-02 15 Z07")
	case weekly:
		year, week := local.ISOWeek()
		return fmt.Sprint(year, week)
	case daily:
		return local.Format("2006-01-02")
	}
	return local.Format("2006-01")
}

func (m *slowCalendarModel) end(t int64) int64 {
	longest := 32 * 24 * hour
	if m.zone == nil {
		longest = model.Micros(m.unit)
	}
	return search(t+1, t+longest, func(u int64) bool { return m.shows(u) != m.shows(t) })
}

func (m *slowCalendarModel) at(t int64) (start int64, count *big.Rat) {
	if m.start == nil || t >= m.end(*m.start) {
		return t, rat(0)
	}
	return *m.start, m.count
}

func (m *slowCalendarModel) fits(t, n int64) bool {
	_, count := m.at(t)
	return new(big.Rat).Add(count, rat(n)).Cmp(rat(m.limit)) <= 0
}

func (m *slowCalendarModel) take(t, n int64) {
	start, count := m.at(t)
	m.start, m.count = &start, new(big.Rat).Add(count, rat(n))
}

func (m *slowCalendarModel) state(t int64) model.State {
	start, count := m.at(t)
	return model.State{WindowStart: start, Scale: m.end(start) - start, Count: whole(count)}
}

func TestCalendarWindowEqualsWhatTheClocksShow(t *testing.T) {
	t.Parallel()
	testAgainstSlowModel(t, func(d modeltest.Dice) (model.Rules, slowModel) {
		p := d.Calendar()
		if p.Zone == algorithm.Epoch {
			return p, &slowCalendarModel{limit: p.Limit, unit: p.Span}
		}
		p.Zone = []string{"UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo"}[d(4)]
		zone, err := time.LoadLocation(p.Zone)
		require.NoError(t, err)
		return p, &slowCalendarModel{limit: p.Limit, unit: p.Span, zone: zone}
	})
}

func TestCalendarWindowNeverGrantsMoreThanTheLimitInAWindow(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 500 {
		p := d.Calendar()
		var s model.State
		var last model.Decision
		var end, taken int64
		clock := d.Magnitude(0, 1<<52)
		for range 40 {
			clock = d.Forwards(p, s, clock, last)
			n := d.Cost(p.Limit, peek(p, s, clock).Remaining)
			if s, last = p.Decide(s, clock, n); last.Granted == 0 {
				continue
			}
			if p.End(clock) != end {
				end, taken = p.End(clock), 0
			}
			require.LessOrEqual(t, n, p.Limit-taken, "%+v: %d at %d, after %d until %d", p, n, clock, taken, end)
			taken += n
		}
	}
}

func TestCalendarWindowNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool) {
		c := d.Calendar()
		c.Limit = min(c.Limit, 1<<50)
		// Almost all windows last nine tenths of SpanMicros or more. The first window and an hour with a clock change
		// may be shorter.
		if span = c.SpanMicros(); c.Zone != algorithm.Epoch {
			span = span / 10 * 9
		}
		return c, 3 * c.Limit, c.Limit, span, true
	})
}

func FuzzCalendarWindow(f *testing.F) {
	f.Add(int64(10), byte(4), byte(1), int64(20), byte(0), byte(2), []byte("a request at each of some clocks"))
	f.Add(int64(model.MaxProduct), byte(2), byte(4), int64(1), byte(1), byte(3), []byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8"))
	f.Fuzz(func(t *testing.T, limit int64, unit, zone byte, limit2 int64, unit2, zone2 byte, steps []byte) {
		draw := func(limit int64, unit, zone byte) model.Rules {
			units, zones := modeltest.Units(), append(modeltest.SteadyZones(), algorithm.Epoch)
			return model.CalendarWindow{limit, units[int(unit)%len(units)], zones[int(zone)%len(zones)]}
		}
		fuzzModel(t, steps, draw(limit, unit, zone), draw(limit2, unit2, zone2))
	})
}

// If a process does not know a time zone, the model uses UTC, because a fallback has to decide.
func TestCalendarWindowOfAnUnknownTimeZoneFallsBackToUTC(t *testing.T) {
	t.Parallel()
	p := model.CalendarWindow{Limit: 10, Span: daily, Zone: "Mars/Phobos"}
	require.True(t, modeltest.InRange(p))
	for range 2 {
		require.Equal(t, clockAt("2026-07-02T00:00:00Z"), p.End(clockAt("2026-07-01T12:00:00Z")))
	}
}
