package ratelimit

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// CalendarWindow admits Limit in each minute, hour, day, week or month of the calendar, as the clocks of a time
// zone show it. That is how quotas are sold: 1,000 a month. Otherwise it is like a [FixedWindow], whose windows
// start at a key's first request: all of a limit may come at once, and around the edge of two windows 2 × Limit may.
//
// With CalendarWindow{Limit: 1000, Unit: ratelimit.Month, Zone: "Europe/Berlin"}, a key that has taken 1,000 by
// noon of 31 March is told to retry after 12 h, and from midnight in Berlin on it has 1,000 again.
//
// A window ends when the next one starts, by Postgres's date_trunc with the time zone data of the database's server.
// So a day lasts 23 or 25 hours when daylight saving begins or ends, a month 28 to 31 days, and a week starts on
// Monday. A midnight that the clocks leave out is when they go forward over it. Of a midnight that comes twice, the
// second one counts. An hour that comes twice is two windows. If clocks change by half an hour, the hour that the
// change falls into is cut short, or the next one begins within it.
//
// The window that a key is in ends when it was said to, even if Unit, Zone or the server's data change meanwhile.
// The exception is a change to a shorter Unit. If the window lasts for more than two of the new ones from its first
// take on, a new one starts at once, and forgets what was taken. So each change admits a limit more at most.
//
// Credit ([Limiter.Grant]) is kept for two windows: 2 days of 24 hours, or 62 days.
//
// The server must know the Zone, or calls return a [*ConfigError]. Where there is no database (FallbackLocal, package
// ratelimittest), the time zone data of this process is used, which the package time/tzdata can bring. A fallback
// without data for the Zone takes UTC.
type CalendarWindow struct {
	Limit int64 // in units of cost: at least 1, and at most 2^62
	Unit  Unit
	// Zone is a name from the IANA time zone database that has a slash in it, such as Europe/Berlin, or UTC. Other
	// names that Postgres knows are not accepted, because they can mean other things elsewhere: abbreviations (CET),
	// offsets (<+03>-3, Etc/GMT+3) and the old names of countries (Japan). Defaults to UTC.
	Zone string
}

// Unit is a unit of the calendar: the window of a [CalendarWindow].
type Unit string

// The units of the calendar.
const (
	Minute Unit = "minute"
	Hour   Unit = "hour"
	Day    Unit = "day"
	Week   Unit = "week" // from Monday to Sunday
	Month  Unit = "month"
)

const utcName = "UTC"

var _ model = CalendarWindow{}

func (p CalendarWindow) String() string { return p.numbers().String() }

func (p CalendarWindow) models() []model { return []model{p} }

func (p CalendarWindow) validate() error {
	switch {
	case p.Limit < 1 || p.Limit > maxProduct:
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and must be at least 1 and at most 2^62", p.Limit)}
	case p.span() == 0:
		return &ConfigError{Field: "Config.Policy.Unit", Reason: fmt.Sprintf(
			"is %q, and must be %s", string(p.Unit), algorithm.UnitNames())}
	case !isZone(p.Zone):
		return &ConfigError{Field: "Config.Policy.Zone", Reason: fmt.Sprintf(
			"is %.100q, and must be UTC or a name with a slash, such as Europe/Berlin; "+
				"for an abbreviation or offset, write the name of a place where it is in use", p.Zone)}
	}
	return nil
}

// span is how long the unit lasts; a month at most.
func (p CalendarWindow) span() int64 { return micros(algorithm.UnitSpan(string(p.Unit))) }

func (p CalendarWindow) lasts() int64 { return 2 * p.span() }

func (p CalendarWindow) numbers() algorithm.Numbers {
	zone := p.Zone
	if zone == "" {
		zone = utcName
	}
	return algorithm.Numbers{
		Algorithm: algorithm.CalendarWindow, Limit: p.Limit, Span: duration(p.span()), Zone: zone,
	}
}

// calendarWindow is the policy of these numbers.
func calendarWindow(n algorithm.Numbers) model {
	p := CalendarWindow{Limit: n.Limit, Unit: Unit(algorithm.UnitName(n.Span)), Zone: n.Zone}
	if p.Zone == utcName {
		p.Zone = ""
	}
	return p
}

func (p CalendarWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return never, min(longest, p.span()/leasesInWindow, min(s.windowStart+s.scale, s.expiresAt)-clock)
}

func (p CalendarWindow) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.lasts())
}

func (p CalendarWindow) refund(s state, clock int64, t take) (state, decision) {
	rolled, _ := p.roll(s, clock)
	back := int64(0)
	if t.in == s.windowStart && t.in == rolled.windowStart {
		back = min(t.units-t.spent, rolled.count)
	}
	s.count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p CalendarWindow) roll(s state, clock int64) (rolled state, moved bool) {
	span := p.span()
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
			s.expiresAt = clock + p.lasts()
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

func (p CalendarWindow) decide(s state, clock, n int64) (state, decision) {
	stored := s
	s, moved := p.roll(s, clock)
	t := max(clock, s.windowStart)
	changed := moved && 0 < n && n <= p.Limit // see FixedWindow.decide

	room := max(p.Limit-s.count, 0)
	d := decision{remaining: room + s.credit}
	if 0 < n && n <= min(d.remaining, p.Limit) {
		changed = true
		d.taken.spent = max(n-room, 0)
		s.count += n - d.taken.spent
		s.credit -= d.taken.spent
		s.expiresAt = t + p.lasts()
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
func (p CalendarWindow) end(clock int64) int64 {
	zone, err := location(p.Zone)
	if err != nil {
		zone = time.UTC
	}
	at, span := time.UnixMicro(clock).Unix(), p.span()/1e6
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
func (p CalendarWindow) begins(at int64, zone *time.Location) int64 {
	local := time.Unix(at, 0).In(zone)
	year, month, day := local.Date()
	switch p.Unit {
	case Week:
		day -= int(local.Weekday()+6) % 7
	case Month:
		day = 1
	case Day:
	default:
		_, offset := local.Zone()
		seconds, span := at+int64(offset), p.span()/1e6
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

// isZone tells whether a text has the form of a Zone.
func isZone(zone string) bool {
	if zone == "" || zone == utcName {
		return true
	}
	if len(zone) > 64 || !strings.Contains(zone, "/") {
		return false
	}
	// Of these folders the server may have files that count leap seconds, and others that are there twice.
	first, _, _ := strings.Cut(strings.ToLower(zone), "/")
	if first == "right" || first == "posix" {
		return false
	}
	for part := range strings.SplitSeq(zone, "/") {
		other := func(r rune) bool { return !isLetter(r) && r != '_' && r != '-' }
		if part == "" || part[0] < 'A' || part[0] > 'Z' || strings.IndexFunc(part, other) >= 0 {
			return false
		}
	}
	return true
}

func isLetter(r rune) bool { return 'A' <= r && r <= 'Z' || 'a' <= r && r <= 'z' }

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
