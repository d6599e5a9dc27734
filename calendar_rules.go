package ratelimit

import (
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// calendarWindow is the rules of a CalendarWindow.
type calendarWindow struct {
	Limit int64
	Span  time.Duration // of a minute, hour, day or week, or 31 days for a month
	Zone  string
}

var _ rules = calendarWindow{}

// span is how long the unit lasts; a month at most.
func (p calendarWindow) spanMicros() int64 { return micros(p.Span) }

func (p calendarWindow) Lasts() int64 { return 2 * p.spanMicros() }

func (p calendarWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.CalendarWindow, Limit: p.Limit, Span: p.Span, Zone: p.Zone}
}

func (p calendarWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return never, min(longest, p.spanMicros()/leasesInWindow, min(s.windowStart+s.scale, s.expiresAt)-clock)
}

func (p calendarWindow) ResetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.Lasts())
}

func (p calendarWindow) Refund(s state, clock int64, t take) (state, decision) {
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	if t.in == s.windowStart && t.in == rolled.windowStart {
		back = min(t.units-t.spent, rolled.count)
	}
	s.count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p calendarWindow) Roll(s state, clock int64) (rolled state, moved bool) {
	span := p.spanMicros()
	if s.scale > 2*span { // the window of a longer unit
		s.count = 0
	}
	if clock >= s.expiresAt || s.count == 0 && s.credit == 0 {
		s = state{windowStart: clock, expiresAt: s.expiresAt}
	} else if s.windowStart-clock > span {
		// The clock has jumped back: keep the usage, from now on. If it were kept only until the calendar's window
		// ends, a clock that jumps back again and again could come by one end after the other.
		s.windowStart, s.scale, s.expiresAt = clock, span, clock+span
		if s.credit > 0 {
			s.expiresAt = clock + p.Lasts()
		}
		moved = true
	}
	t := max(clock, s.windowStart)
	if s.count == 0 || t-s.windowStart >= s.scale {
		s.count, s.windowStart, s.scale = 0, t, p.end(t)-t
		s = s.unlessNew()
	}
	return s, moved
}

func (p calendarWindow) Decide(s state, clock, n int64) (state, decision) {
	stored := s
	s, moved := p.Roll(s, clock)
	t := max(clock, s.windowStart)
	changed := moved && 0 < n && n <= p.Limit // see FixedWindow.decide

	room := max(p.Limit-s.count, 0)
	d := decision{remaining: room + s.credit}
	if 0 < n && n <= min(d.remaining, p.Limit) {
		changed = true
		d.taken.spent = max(n-room, 0)
		s.count += n - d.taken.spent
		s.credit -= d.taken.spent
		s.expiresAt = t + p.Lasts()
		d.granted = 1
		d.remaining -= n
	}
	end := min(s.windowStart+s.scale, s.expiresAt)
	switch {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case n > p.Limit:
		d.retryAfter = never
	default:
		d.retryAfter = end - clock
	}
	switch {
	case s.credit > 0:
		d.resetAfter = s.expiresAt - clock
	case s.count > 0:
		d.resetAfter = end - clock
	}
	if changed {
		s.expiresAt = clock + d.resetAfter
		stored = s
	}
	d.state = s
	d.taken.units, d.taken.since, d.taken.in = d.granted*n, s.since, s.windowStart
	return stored, d
}

// end is when the window ends that the clock is in. It does as _rate_limit_window_end in sql/calendar.sql does.
func (p calendarWindow) end(clock int64) int64 {
	zone, err := location(p.Zone)
	if err != nil {
		zone = time.UTC
	}
	at, span := time.UnixMicro(clock).Unix(), p.spanMicros()/1e6
	begins := p.begins(at, zone)
	if begins > at {
		return 1e6 * begins
	}
	within := span - 1
	if span >= daySeconds {
		within = span * 3 / 2
	}
	if next := p.begins(begins+within, zone); next > at {
		return 1e6 * next
	}
	return 1e6 * (begins + span)
}

const daySeconds = 24 * 60 * 60

// begins is date_trunc of Postgres, in seconds since 1970.
func (p calendarWindow) begins(at int64, zone *time.Location) int64 {
	local := time.Unix(at, 0).In(zone)
	year, month, day := local.Date()
	switch p.Span {
	case algorithm.UnitSpan("week"):
		day -= int(local.Weekday()+6) % 7
	case algorithm.UnitSpan("month"):
		day = 1
	case algorithm.UnitSpan("day"):
	default:
		_, offset := local.Zone()
		seconds, span := at+int64(offset), p.spanMicros()/1e6
		return at - ((seconds%span)+span)%span
	}
	midnight := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()

	// Of a local time that does not exist or exists twice, Postgres takes the later one: see DetermineTimeZoneOffset
	// in its source. It looks at the first change of the clocks since the day before.
	before := time.Unix(midnight-daySeconds, 0).In(zone)
	_, offset := before.Zone()
	_, change := before.ZoneBounds()
	if change.IsZero() {
		return midnight - int64(offset)
	}
	_, offsetAfter := change.Zone()
	old, changed := midnight-int64(offset), midnight-int64(offsetAfter)
	switch {
	case old < change.Unix() && changed < change.Unix():
		return old
	case old > change.Unix() && changed >= change.Unix():
		return changed
	}
	return max(old, changed)
}

var locations sync.Map //nolint:gochecknoglobals // a cache: time.LoadLocation reads a file each time

// location is the time zone of a name, by the data that this process has.
func location(name string) (*time.Location, error) {
	if known, ok := locations.Load(name); ok {
		return known.(*time.Location), nil //nolint:forcetypeassert // nothing else is stored
	}
	zone, err := time.LoadLocation(name)
	if err == nil {
		locations.Store(name, zone)
	}
	return zone, err
}
