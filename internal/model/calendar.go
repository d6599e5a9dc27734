package model

import (
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// CalendarWindow has the rules of ratelimit.CalendarWindow. With the Zone algorithm.Epoch, it has the rules of a
// ratelimit.FixedWindow that is aligned to the epoch.
type CalendarWindow struct {
	Limit int64
	Span  time.Duration // a minute, an hour, a day, a week, or 31 days for a month; with Epoch any duration
	Zone  string
}

var _ Rules = CalendarWindow{}

// SpanMicros returns the longest time that the unit can last: 31 days for a month.
func (p CalendarWindow) SpanMicros() int64 { return Micros(p.Span) }

func (p CalendarWindow) Lasts() int64 { return 2 * p.SpanMicros() }

func (p CalendarWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.CalendarWindow, Limit: p.Limit, Span: p.Span, Zone: p.Zone}
}

func (p CalendarWindow) LeaseOf(s State, clock, longest int64) (spare, lasts int64) {
	return Never, min(longest, p.SpanMicros()/leasesInWindow, min(s.WindowStart+s.Scale, s.ExpiresAt)-clock)
}

func (p CalendarWindow) ResetAfter(last Decision, units int64) int64 {
	return creditResetAfter(last, units, p.Lasts())
}

func (p CalendarWindow) Refund(s State, clock int64, t Take) (State, Decision) {
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	if t.In == s.WindowStart && t.In == rolled.WindowStart {
		back = min(t.Units-t.Spent, rolled.Count)
	}
	s.Count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.WindowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p CalendarWindow) Roll(s State, clock int64) (rolled State, moved bool) {
	span := p.SpanMicros()
	if s.Scale > 2*span { // Count is from a longer unit's window
		s.Count = 0
	}
	if clock >= s.ExpiresAt || s.Count == 0 && s.Credit == 0 {
		s = State{WindowStart: clock, ExpiresAt: s.ExpiresAt}
	} else if s.WindowStart-clock > span {
		// The clock has jumped back, so the usage counts for a full Span from now on. Otherwise, a clock that jumps
		// back again and again could pass the end of a window each time.
		s.WindowStart, s.Scale, s.ExpiresAt = clock, span, clock+span
		if s.Credit > 0 {
			s.ExpiresAt = clock + p.Lasts()
		}
		moved = true
	}
	t := max(clock, s.WindowStart)
	if s.Count == 0 || t-s.WindowStart >= s.Scale {
		s.Count, s.WindowStart, s.Scale = 0, t, p.End(t)-t
		s = s.unlessNew()
	}
	return s, moved
}

func (p CalendarWindow) Decide(s State, clock, n int64) (State, Decision) {
	stored := s
	s, moved := p.Roll(s, clock)
	t := max(clock, s.WindowStart)
	changed := moved && 0 < n && n <= p.Limit // as in FixedWindow.Decide

	room := max(p.Limit-s.Count, 0)
	d := Decision{Remaining: room + s.Credit}
	if 0 < n && n <= min(d.Remaining, p.Limit) {
		changed = true
		d.Taken.Spent = max(n-room, 0)
		s.Count += n - d.Taken.Spent
		s.Credit -= d.Taken.Spent
		s.ExpiresAt = t + p.Lasts()
		d.Granted = 1
		d.Remaining -= n
	}
	end := min(s.WindowStart+s.Scale, s.ExpiresAt)
	switch {
	case d.Granted == 1 || n == 0 && d.Remaining > 0:
	case n > p.Limit:
		d.RetryAfter = Never
	default:
		d.RetryAfter = end - clock
	}
	switch {
	case s.Credit > 0:
		d.ResetAfter = s.ExpiresAt - clock
	case s.Count > 0:
		d.ResetAfter = end - clock
	}
	if changed {
		s.ExpiresAt = clock + d.ResetAfter
		stored = s
	}
	d.State = s
	d.Taken.Units, d.Taken.Since, d.Taken.In = d.Granted*n, s.Since, s.WindowStart
	return stored, d
}

// End returns the end of the window at the time clock. It computes the same as _rate_limit_window_end in
// sql/calendar.sql.
func (p CalendarWindow) End(clock int64) int64 {
	if span := p.SpanMicros(); p.Zone == algorithm.Epoch {
		return clock - clock%span + span
	}
	zone, err := Location(p.Zone)
	if err != nil {
		zone = time.UTC
	}
	at, span := time.UnixMicro(clock).Unix(), p.SpanMicros()/1e6
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

// begins computes Postgres's date_trunc, in seconds since 1970.
func (p CalendarWindow) begins(at int64, zone *time.Location) int64 {
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
		seconds, span := at+int64(offset), p.SpanMicros()/1e6
		return at - ((seconds%span)+span)%span
	}
	midnight := time.Date(year, month, day, 0, 0, 0, 0, time.UTC).Unix()

	// If a local time does not exist or exists twice, Postgres takes the later time: see DetermineTimeZoneOffset in its
	// source code. Postgres looks at the first change of the clocks since the day before.
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

// Location returns the time zone with this name, from this process's time zone data. Windows that are aligned to the
// epoch need none, so it returns UTC.
func Location(name string) (*time.Location, error) {
	if name == algorithm.Epoch {
		return time.UTC, nil
	}
	if known, ok := locations.Load(name); ok {
		return known.(*time.Location), nil //nolint:forcetypeassert // only *time.Location values are stored
	}
	zone, err := time.LoadLocation(name)
	if err == nil {
		locations.Store(name, zone)
	}
	return zone, err
}
