package ratelimit

import (
	"context"
	"fmt"
	"math/big"
	"slices"
	"strings"
	"testing"
	"time"
	_ "time/tzdata" // so that the tests know time zones wherever they run

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func calendarUnits() []Unit {
	return []Unit{CalendarMinute, CalendarHour, CalendarDay, CalendarWeek, CalendarMonth}
}

// steadyZones are time zones whose rules have been the same for long, so that this process and a server agree on
// them. Among them are changes of half an hour, and changes a minute after midnight.
func steadyZones() []string {
	return []string{
		"", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/St_Johns", "Asia/Kolkata",
	}
}

// clockAt is a time as clocks show it, with their offset, such as "2026-03-29T03:00:00+02:00".
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
	in := func(unit Unit, zone string) CalendarWindow { return CalendarWindow{Limit: 10, Unit: unit, Zone: zone} }
	for _, test := range []struct {
		name   string
		policy CalendarWindow
		steps  []modelStep
	}{
		{"a month ends at midnight of its zone", in(CalendarMonth, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-31T12:00:00+02:00"), 10, granted(0, 12*hour)},
			{clockAt("2026-03-31T12:00:00+02:00"), 1, denied(0, 12*hour, 12*hour)},
			{clockAt("2026-03-31T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-04-01T00:00:00+02:00"), 10, granted(0, 30*day)},
			{clockAt("2026-04-30T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-05-01T00:00:00+02:00"), 1, granted(9, 31*day)},
		}},
		{"months of 28, 29 and 31 days less an hour", in(CalendarMonth, "Europe/Berlin"), []modelStep{
			{clockAt("2026-02-01T00:00:00+01:00"), 1, granted(9, 28*day)},
			{clockAt("2026-03-01T00:00:00+01:00"), 1, granted(9, 31*day-hour)},
			{clockAt("2026-10-01T00:00:00+02:00"), 1, granted(9, 31*day+hour)},
			{clockAt("2028-02-01T00:00:00+01:00"), 1, granted(9, 29*day)},
			{clockAt("2100-02-01T00:00:00+01:00"), 1, granted(9, 28*day)},
			{clockAt("2100-12-31T23:59:59.999999+01:00"), 1, granted(9, 1)},
		}},
		{"UTC is the default", in(CalendarMonth, ""), []modelStep{
			{clockAt("2026-01-31T23:59:59Z"), 1, granted(9, second)},
			{clockAt("2026-02-01T00:00:00Z"), 1, granted(9, 28*day)},
		}},
		{"a day of 23 hours, and one of 25", in(CalendarDay, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-29T00:00:00+01:00"), 10, granted(0, 23*hour)},
			{clockAt("2026-03-29T23:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-03-30T00:00:00+02:00"), 1, granted(9, day)},
			{clockAt("2026-10-25T00:00:00+02:00"), 10, granted(0, 25*hour)},
			{clockAt("2026-10-25T23:00:00+01:00"), 1, denied(0, hour, hour)},
			{clockAt("2026-10-26T00:00:00+01:00"), 1, granted(9, day)},
		}},
		{"an hour that comes twice", in(CalendarHour, "Europe/Berlin"), []modelStep{
			{clockAt("2026-10-25T02:30:00+02:00"), 10, granted(0, hour/2)},
			{clockAt("2026-10-25T02:59:59.999999+02:00"), 1, denied(0, 1, 1)},
			{clockAt("2026-10-25T02:00:00+01:00"), 10, granted(0, hour)},
			{clockAt("2026-10-25T03:00:00+01:00"), 1, granted(9, hour)},
		}},
		{"an hour that is left out", in(CalendarHour, "Europe/Berlin"), []modelStep{
			{clockAt("2026-03-29T01:30:00+01:00"), 10, granted(0, hour/2)},
			{clockAt("2026-03-29T03:00:00+02:00"), 1, granted(9, hour)},
		}},
		{"a midnight that is left out", in(CalendarDay, "America/Sao_Paulo"), []modelStep{
			{clockAt("2018-11-03T23:30:00-03:00"), 10, granted(0, hour/2)},
			{clockAt("2018-11-04T01:00:00-02:00"), 10, granted(0, 23*hour)},
			{clockAt("2018-11-05T00:00:00-02:00"), 1, granted(9, day)},
		}},
		{"a midnight that comes twice", in(CalendarDay, "America/St_Johns"), []modelStep{
			{clockAt("2010-11-06T23:59:59-02:30"), 1, granted(9, hour+second)},
			{clockAt("2010-11-07T00:00:30-02:30"), 8, granted(1, hour-30*second)},
			{clockAt("2010-11-06T23:01:00-03:30"), 2, denied(1, 59*minute, 59*minute)},
			{clockAt("2010-11-07T00:00:00-03:30"), 1, granted(9, day)},
		}},
		{"a new key in the minute after the first midnight", in(CalendarDay, "America/St_Johns"), []modelStep{
			{clockAt("2010-11-07T00:00:30-02:30"), 1, granted(9, hour-30*second)},
		}},
		{"a day that is left out", in(CalendarDay, "Pacific/Apia"), []modelStep{
			{clockAt("2011-12-29T23:00:00-10:00"), 10, granted(0, hour)},
			{clockAt("2011-12-31T00:00:00+14:00"), 1, granted(9, day)},
		}},
		{"clocks go back by half an hour", in(CalendarHour, "Australia/Lord_Howe"), []modelStep{
			{clockAt("2026-04-05T01:59:00+11:00"), 10, granted(0, minute)},
			{clockAt("2026-04-05T01:30:00+10:30"), 10, granted(0, hour/2)},
			{clockAt("2026-04-05T02:00:00+10:30"), 1, granted(9, hour)},
		}},
		{"clocks go forward by half an hour", in(CalendarHour, "Australia/Lord_Howe"), []modelStep{
			{clockAt("2026-10-04T01:50:00+10:30"), 10, granted(0, 10*minute)},
			{clockAt("2026-10-04T02:30:00+11:00"), 1, granted(9, hour/2)},
		}},
		{"an hour that is cut short", in(CalendarHour, "Asia/Pyongyang"), []modelStep{
			{clockAt("2018-05-04T23:10:00+08:30"), 10, granted(0, 20*minute)},
			{clockAt("2018-05-05T00:00:00+09:00"), 1, granted(9, hour)},
		}},
		{"the hours of half an offset", in(CalendarHour, "Asia/Kolkata"), []modelStep{
			{clockAt("2026-07-01T12:15:00+05:30"), 1, granted(9, 45*minute)},
			{clockAt("2026-07-01T13:00:00+05:30"), 1, granted(9, hour)},
		}},
		{"a week starts on Monday", in(CalendarWeek, "America/New_York"), []modelStep{
			{clockAt("2026-07-05T23:59:59-04:00"), 10, granted(0, second)}, // a Sunday
			{clockAt("2026-07-06T00:00:00-04:00"), 1, granted(9, 7*day)},
			{clockAt("2026-10-26T00:00:00-04:00"), 1, granted(9, 7*day+hour)},
			{clockAt("2026-12-28T00:00:00-05:00"), 1, granted(9, 7*day)}, // as the year ends
		}},
		{"costs", in(CalendarMinute, ""), []modelStep{
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
		{"the clock steps back by less than a window", in(CalendarMinute, ""), []modelStep{
			{at("12:10:05"), 6, granted(4, 55*second)},
			{at("12:10:01"), 1, granted(3, 59*second)},
			{at("12:09:59.999999"), 1, granted(2, minute+1)}, // it stays in the window
			{at("12:09:05"), 3, denied(2, 115*second, 115*second)},
			{at("12:10:59.999999"), 3, denied(2, 1, 1)},
			{at("12:11:00"), 1, granted(9, minute)},
		}},
		{"the clock steps back by more than a window", in(CalendarMinute, ""), []modelStep{
			{at("12:10:05"), 10, granted(0, 55*second)},
			{at("12:09:05"), 1, denied(0, 115*second, 115*second)},
			{at("12:09:04.999999"), 0, denied(0, minute, minute)}, // a Peek does not pull the row back
			{at("12:09:05"), 1, denied(0, 115*second, 115*second)},
			{at("12:09:04.999999"), 1, denied(0, minute, minute)}, // a denial does, for a whole window
			{at("12:09:05"), 1, denied(0, minute-1, minute-1)},
			{at("12:10:04.999999"), 1, granted(9, 55*second+1)},
		}},
		{"the largest limit", CalendarWindow{model.MaxProduct, CalendarMonth, ""}, []modelStep{
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
	p := CalendarWindow{Limit: 10, Unit: CalendarMinute}
	s := playModel(t, p, model.State{}, modelStep{at("12:00:00"), 8, granted(2, minute)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s, modelStep{at("12:00:01"), 3, denied(2, 59*second, 59*second)}))
	}
	playModel(t, p, s, modelStep{at("12:00:01"), 2, granted(0, 59*second)})
}

func TestCalendarWindowLimitChangesAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, CalendarWindow{10, CalendarMinute, ""}, model.State{}, modelStep{at("12:00:00"), 7, granted(3, minute)})
	playModel(t, CalendarWindow{15, CalendarMinute, ""}, s,
		modelStep{at("12:00:01"), 9, denied(8, 59*second, 59*second)},
		modelStep{at("12:00:01"), 8, granted(0, 59*second)})
	playModel(t, CalendarWindow{4, CalendarMinute, ""}, s,
		modelStep{at("12:00:01"), 1, denied(0, 59*second, 59*second)},
		modelStep{at("12:00:01"), 5, denied(0, model.Never, 59*second)},
		modelStep{at("12:01:00"), 4, granted(0, minute)})
}

// The window that a key is in ends when it was said to.
func TestCalendarWindowKeepsItsEndUnderAnotherZoneOrALongerUnit(t *testing.T) {
	t.Parallel()
	const day = 24 * hour
	s := playModel(t, CalendarWindow{10, CalendarDay, "Europe/Berlin"}, model.State{},
		modelStep{clockAt("2026-07-01T12:00:00+02:00"), 7, granted(3, 12*hour)})
	playModel(t, CalendarWindow{10, CalendarDay, "America/New_York"}, s,
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 4, denied(3, 11*hour, 11*hour)},
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 3, granted(0, 11*hour)},
		modelStep{clockAt("2026-07-02T00:00:00+02:00"), 10, granted(0, 6*hour)},
		modelStep{clockAt("2026-07-02T00:00:00-04:00"), 1, granted(9, day)})
	playModel(t, CalendarWindow{1000, CalendarMonth, "Europe/Berlin"}, s,
		modelStep{clockAt("2026-07-01T13:00:00+02:00"), 3, granted(990, 11*hour)},
		modelStep{clockAt("2026-07-02T00:00:00+02:00"), 3, granted(997, 30*day)})
}

func TestCalendarWindowStartsAnewUnderAShorterUnit(t *testing.T) {
	t.Parallel()
	const day = 24 * hour
	s := playModel(t, CalendarWindow{100, CalendarMonth, ""}, model.State{},
		modelStep{clockAt("2026-07-10T12:00:00Z"), 50, granted(50, 21*day+12*hour)})
	playModel(t, CalendarWindow{10, CalendarDay, ""}, s,
		modelStep{clockAt("2026-07-10T13:00:00Z"), 10, granted(0, 11*hour)},
		modelStep{clockAt("2026-07-11T00:00:00Z"), 10, granted(0, day)})
	// Unless it is over soon.
	s = playModel(t, CalendarWindow{100, CalendarMonth, ""}, model.State{},
		modelStep{clockAt("2026-07-30T12:00:00Z"), 50, granted(50, 36*hour)})
	playModel(t, CalendarWindow{10, CalendarDay, ""}, s,
		modelStep{clockAt("2026-07-30T13:00:00Z"), 1, denied(0, 35*hour, 35*hour)},
		modelStep{clockAt("2026-08-01T00:00:00Z"), 10, granted(0, day)})
}

// Granted credit outlasts the window, also in the units that are shorter than its two windows.
func TestCalendarWindowCreditIsKeptForTwoWindows(t *testing.T) {
	t.Parallel()
	p := CalendarWindow{10, CalendarMinute, "Asia/Kolkata"}
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

// What was taken in a window of the same name, before a Reset or under another policy, is not given back to this one.
func TestCalendarWindowRefundsOnlyItsOwnTakes(t *testing.T) {
	t.Parallel()
	p := CalendarWindow{10, CalendarMonth, ""}
	before, d := p.Decide(model.State{}, c0, 5)
	back, _, err := checkRefund(p, before, c1, d.Taken)
	require.NoError(t, err)
	require.True(t, equalsNoRow(p, back, c1))
	s := playModel(t, p, model.State{}, modelStep{c2, 3, granted(7, p.end(c2)-c2)}) // after a Reset
	next, _, err := checkRefund(p, s, c3, d.Taken)
	require.NoError(t, err)
	require.Equal(t, s, next)
}

func TestCalendarWindowProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d dice) ruled { return d.calendar() })
}

// slowCalendarModel looks for the end of a window by what the clocks show, where they never change by less than an hour.
type slowCalendarModel struct {
	limit int64
	unit  Unit
	zone  *time.Location
	start *int64
	count *big.Rat
}

// shows is what a calendar and a clock show of a time, up to the unit.
func (m *slowCalendarModel) shows(t int64) string {
	local := time.UnixMicro(t).In(m.zone)
	switch m.unit {
	case CalendarMinute:
		return local.Format("2006-01-02 15:04 Z07")
	case CalendarHour:
		return local.Format("2006-01-02 15 Z07")
	case CalendarWeek:
		year, week := local.ISOWeek()
		return fmt.Sprint(year, week)
	case CalendarDay:
		return local.Format("2006-01-02")
	}
	return local.Format("2006-01")
}

func (m *slowCalendarModel) end(t int64) int64 {
	const longest = 32 * 24 * hour
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
	testAgainstSlowModel(t, func(d dice) (ruled, slowModel) {
		p := d.calendar()
		p.Zone = []string{"", "Europe/Berlin", "America/New_York", "Asia/Tokyo"}[d(4)]
		zone, err := time.LoadLocation(p.Zone)
		require.NoError(t, err)
		return p, &slowCalendarModel{limit: p.Limit, unit: p.Unit, zone: zone}
	})
}

func TestCalendarWindowNeverGrantsMoreThanTheLimitInAWindow(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	for range 500 {
		p := d.calendar()
		var s model.State
		var last model.Decision
		var end, taken int64
		clock := d.magnitude(0, 1<<52)
		for range 40 {
			clock = d.forwards(p, s, clock, last)
			n := d.cost(p.Limit, peek(p, s, clock).Remaining)
			if s, last = p.Decide(s, clock, n); last.Granted == 0 {
				continue
			}
			if p.end(clock) != end {
				end, taken = p.end(clock), 0
			}
			require.LessOrEqual(t, n, p.Limit-taken, "%+v: %d at %d, after %d until %d", p, n, clock, taken, end)
			taken += n
		}
	}
}

func TestCalendarWindowNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d dice) (p ruled, first, rate, span int64, whole bool) {
		c := d.calendar()
		c.Limit = min(c.Limit, 1<<50)
		// Few windows are shorter than nine tenths of the longest: the first, and an hour that is cut short.
		return c, 3 * c.Limit, c.Limit, c.spanMicros() / 10 * 9, true
	})
}

func FuzzCalendarWindow(f *testing.F) {
	f.Add(int64(10), byte(4), byte(1), int64(20), byte(0), byte(2), []byte("a request at each of some clocks"))
	f.Add(int64(model.MaxProduct), byte(2), byte(4), int64(1), byte(1), byte(3), []byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8"))
	f.Fuzz(func(t *testing.T, limit int64, unit, zone byte, limit2 int64, unit2, zone2 byte, steps []byte) {
		draw := func(limit int64, unit, zone byte) ruled {
			units, zones := calendarUnits(), steadyZones()
			return CalendarWindow{limit, units[int(unit)%len(units)], zones[int(zone)%len(zones)]}
		}
		fuzzModel(t, steps, draw(limit, unit, zone), draw(limit2, unit2, zone2))
	})
}

// calendarSamples are times in fifty years, at which windows of a time zone are compared: on both sides of every change
// of its clocks that this process knows, and a time in each year.
func calendarSamples(zone *time.Location) (times []int64) {
	from, to := time.Date(1987, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2037, 1, 1, 0, 0, 0, 0, time.UTC)
	for year := from; year.Before(to); year = year.AddDate(1, 0, 0) {
		times = append(times, year.UnixMicro()+int64(year.Year())*3_141_592_653)
	}
	for t := from; ; {
		_, end := t.In(zone).ZoneBounds()
		if end.IsZero() || end.After(to) {
			return times
		}
		if !end.After(t) { // as Go says of the last day of leap years, from its own time zone data
			t = t.Add(24 * time.Hour)
			continue
		}
		t = end
		times = append(times, t.UnixMicro()-45*minute, t.UnixMicro()-1, t.UnixMicro())
	}
}

// compareCalendars has a database find the windows of samples, and compares each with the database's own date_trunc:
// no boundary lies between the sample and the window's end, and a window starts there. It returns what is wrong. agree
// counts the zones of which the database knows the same offsets as this process. For these, the model must find the
// same ends.
func compareCalendars(t *testing.T, db pgtest.Executor, zones []string) (wrong []string, agree int) {
	t.Helper()
	for chunk := range slices.Chunk(zones, 50) {
		var names []string
		var times, offsets []int64
		ends := make([][]int64, len(calendarUnits()))
		for _, name := range chunk {
			zone, err := time.LoadLocation(name)
			if err != nil {
				zone = time.UTC // the server has samples, too
			}
			for _, clock := range calendarSamples(zone) {
				_, offset := time.UnixMicro(clock).In(zone).Zone()
				names, times, offsets = append(names, name), append(times, clock), append(offsets, int64(offset))
				for i, unit := range calendarUnits() {
					ends[i] = append(ends[i], CalendarWindow{Unit: unit, Zone: name}.end(clock))
				}
			}
		}
		rows, err := db.Query(t.Context(), `
			WITH s AS (
				SELECT s.zone, s.clock, timestamptz 'epoch' + s.clock * interval '1 microsecond' AS instant, s.clock_offset, s.ends
				FROM unnest($1::text[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[], $8::bigint[])
					AS r (zone, clock, clock_offset, minute, hour, day, week, month)
				CROSS JOIN LATERAL (SELECT r.zone, r.clock, r.clock_offset, ARRAY[minute, hour, day, week, month] AS ends) AS s
			), w AS (
				SELECT s.*, u.unit, s.ends[u.place] AS model_end, e.window_end, date_trunc(u.unit, s.instant, s.zone) AS label,
					timestamptz 'epoch' + e.window_end / 1000000 * interval '1 second' AS ends_at,
					date_trunc(u.unit, timestamptz 'epoch' + (e.window_end / 1000000 * interval '1 second' - interval '1 microsecond'),
						s.zone) AS last,
					s.clock_offset = extract(epoch FROM (s.instant AT TIME ZONE s.zone) - (s.instant AT TIME ZONE 'UTC')) AS same_offset
				FROM s
				CROSS JOIN unnest('{minute,hour,day,week,month}'::text[],
					'{60000000,3600000000,86400000000,604800000000,2678400000000}'::bigint[]) WITH ORDINALITY AS u (unit, window_us, place)
				CROSS JOIN LATERAL (SELECT _rate_limit_window_end(s.clock, u.window_us, s.zone) AS window_end OFFSET 0) AS e
			)
			SELECT w.zone, bool_and(w.same_offset),
				array_agg(concat_ws(' ', w.zone, w.unit, w.instant, 'until', w.ends_at)) FILTER (WHERE (
					w.instant < w.ends_at
					-- Up to its last microsecond it is the same window. By date_trunc, the minute between two midnights is in
					-- the day that has still to come, and the hour behind it in the one before.
					AND CASE WHEN w.label <= w.instant THEN w.last IN (w.label, w.ends_at)
						ELSE w.label = w.ends_at AND (w.last <= w.instant OR w.last = w.ends_at) END
					-- Then another one starts. An hour may start within one of an earlier offset.
					AND (w.label = w.ends_at OR date_trunc(w.unit, w.ends_at, w.zone) > w.label)
					AND (w.unit IN ('minute', 'hour') OR date_trunc(w.unit, w.ends_at, w.zone) = w.ends_at)
				) IS NOT TRUE),
				array_agg(concat_ws(' ', w.zone, w.unit, w.instant, 'until', w.ends_at, 'and in Go', w.model_end))
					FILTER (WHERE w.model_end <> w.window_end)
			FROM w GROUP BY w.zone`,
			names, times, offsets, ends[0], ends[1], ends[2], ends[3], ends[4])
		require.NoError(t, err)
		var zone string
		var same bool
		var broken, different []string
		_, err = pgx.ForEachRow(rows, []any{&zone, &same, &broken, &different}, func() error {
			wrong = append(wrong, broken...)
			if same {
				agree++
				wrong = append(wrong, different...)
			}
			return nil
		})
		require.NoError(t, err)
	}
	return wrong, agree
}

// serverZones are the names of time zones that a database knows, and a policy may have.
func serverZones(t *testing.T, db pgtest.Executor) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT name FROM pg_timezone_names ORDER BY name")
	require.NoError(t, err)
	zones, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return slices.DeleteFunc(zones, func(zone string) bool { return !isZone(zone) })
}

// The windows are those of Postgres's own date_trunc: in all time zones that the server knows, around every change of
// their clocks in fifty years.
func TestCalendarWindowsAreThoseOfThePostgresCalendar(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	db := pgtest.New(t)
	zones := serverZones(t, db.Pool)
	require.Greater(t, len(zones), 300)
	wrong, agree := compareCalendars(t, db.Pool, zones)
	require.Empty(t, wrong)
	t.Logf("%d time zones; of %d, this process has the same data", len(zones), agree)
	steady := steadyZones()[1:]
	wrong, agree = compareCalendars(t, db.Pool, steady)
	require.Empty(t, wrong)
	require.Equal(t, len(steady), agree)
}

// Negative control: the comparison sees windows that end at another time.
func TestMistakesInTheCalendarAreSeen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	for right, wrong := range map[string]string{
		"window_us / 2 * 3":               "window_us / 2 * 5",     // the next window but one
		"ELSE window_us / 2":              "ELSE window_us / 3",    // a day of 25 hours, a month of 31 days
		"window_us - 1000000":             "window_us + 1000000",   // the next hour may have begun within this one
		"ends := begins;":                 "ends := ends;",         // the second midnight
		"begins + window_us *":            "instant + window_us *", // not by the calendar
		"date_trunc(unit, instant, zone)": "date_trunc(unit, instant, 'UTC')",
		"date_trunc(unit, later, zone)":   "begins + window_us * interval '1 microsecond'", // 24 hours, 31 days
	} {
		t.Run(right, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, "_rate_limit_window_end", right, wrong,
				"IF ends <= instant THEN\n        RAISE", "IF false THEN\n        RAISE") // which would see one of them
			seen, _ := compareCalendars(t, db.Pool, []string{"Europe/Berlin", "America/St_Johns", "Australia/Lord_Howe"})
			require.NotEmpty(t, seen)
		})
	}
}

// A time zone that the server does not know is told to whoever asks with it, at once and by its name, and to nobody
// else whose calls leave in the same statements.
func TestUnknownTimeZone(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	client := newClient(t, db.Pool, ClientConfig{Timeout: amply})
	good := client.limiter(t, Config{Name: "good", Policy: slowCalendar(1000)})
	bad := client.limiter(t, Config{
		Name: "bad", Policy: CalendarWindow{Limit: 1000, Unit: CalendarMonth, Zone: "Mars/Phobos"}, OnFailure: FailOpen(),
	})
	plain := client.limiter(t, Config{Name: "plain", Policy: FixedWindow{Limit: 1000, Window: year}})
	requireUnknown := func(err error) {
		t.Helper()
		var refused *ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "Config.Policy.Zone", refused.Field)
		require.Contains(t, refused.Reason, `"Mars/Phobos"`)
	}
	testkit.Together(48, func(g int) {
		ctx, key := context.Background(), fmt.Sprint(g)
		for i := range 10 {
			switch l := []*Limiter{good, bad, plain}[g%3]; {
			case i%2 == 0:
				result, err := l.Allow(ctx, key)
				if l == bad {
					requireUnknown(err)
					continue
				}
				require.NoError(t, err)
				require.True(t, result.Allowed)
				require.Equal(t, SourceDatabase, result.Source)
			case l == bad:
				_, err := AllowAll(ctx, plain.Request("{"+key+"}all", 1), bad.Request(key, 1))
				requireUnknown(err)
			default:
				results, err := AllowAll(ctx, plain.Request("{"+key+"}all", 1), good.Request(key, 1))
				require.NoError(t, err)
				require.True(t, results.Allowed)
			}
		}
	})
	for name, call := range everyCall(bad, "key") {
		if !strings.Contains(name, "Reset") { // which needs no window
			requireUnknown(call())
		}
	}
	_, err := good.under(CalendarWindow{Limit: 1000, Unit: CalendarMonth, Zone: "Mars/Phobos"}).Allow(t.Context(), "0")
	requireUnknown(err) // although the key's window is known
	require.Equal(t, int64(0), pgtest.Scalar[int64](t, db.Pool,
		"SELECT count(*) FROM rate_limit_ephemeral WHERE prefix = 'bad'"))
	require.Equal(t, int64(32*5), pgtest.Scalar[int64](t, db.Pool, // that many were allowed with good, by AllowAll
		"SELECT sum(count)::bigint FROM rate_limit_ephemeral WHERE prefix = 'plain' AND key ~ 'all'"))

	_, err = db.Pool.Exec(t.Context(), "SELECT * FROM rate_limit_allow('sql', 'key', 'every 5/day Mars/Phobos')")
	require.ErrorContains(t, err, `"Mars/Phobos"`)
}

// In memory, the time zones are those that this process knows.
func TestUnknownTimeZoneInMemory(t *testing.T) {
	t.Parallel()
	client := newClient(t, &memory.DB{}, ClientConfig{Timeout: amply})
	bad := client.limiter(t, Config{Name: "bad", Policy: CalendarWindow{Limit: 10, Unit: CalendarDay, Zone: "Mars/Phobos"}})
	good := client.limiter(t, Config{Name: "good", Policy: CalendarWindow{Limit: 10, Unit: CalendarDay, Zone: "Asia/Tokyo"}})
	testkit.Together(20, func(g int) {
		if g%2 == 0 {
			result, err := good.Allow(context.Background(), fmt.Sprint(g))
			require.NoError(t, err)
			require.True(t, result.Allowed)
			return
		}
		_, err := bad.Allow(context.Background(), fmt.Sprint(g))
		var refused *ConfigError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, "Config.Policy.Zone", refused.Field)
		require.Contains(t, refused.Reason, `"Mars/Phobos"`)
	})
}

// A fallback has to decide, so it takes UTC for a time zone that this process does not know.
func TestCalendarWindowOfAnUnknownTimeZoneFallsBackToUTC(t *testing.T) {
	t.Parallel()
	p := CalendarWindow{Limit: 10, Unit: CalendarDay, Zone: "Mars/Phobos"}
	require.NoError(t, p.validate())
	for range 2 {
		require.Equal(t, clockAt("2026-07-02T00:00:00Z"), p.end(clockAt("2026-07-01T12:00:00Z")))
	}
}
