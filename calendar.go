package ratelimit

import (
	"fmt"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// CalendarWindow admits Limit in each minute, hour, day, week or month of the calendar, as the clocks of a time
// zone show it. That is how quotas are sold: 1,000 a month. Otherwise it is like a [FixedWindow], whose windows
// start at a key's first request: all of a limit may come at once, and around the edge of two windows 2 × Limit may.
//
// With CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"}, a key that has taken 1,000 by
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

const utcName = "UTC"

// The units of the calendar.
const (
	CalendarMinute Unit = "minute"
	CalendarHour   Unit = "hour"
	CalendarDay    Unit = "day"
	CalendarWeek   Unit = "week" // from Monday to Sunday
	CalendarMonth  Unit = "month"
)

func (p CalendarWindow) String() string { return p.one().Numbers().String() }

func (p CalendarWindow) one() model.Rules {
	zone := p.Zone
	if zone == "" {
		zone = utcName
	}
	return model.CalendarWindow{Limit: p.Limit, Span: algorithm.UnitSpan(string(p.Unit)), Zone: zone}
}

func (p CalendarWindow) rules() []model.Rules { return []model.Rules{p.one()} }

func (p CalendarWindow) validate() error {
	switch {
	case p.Limit < 1 || p.Limit > model.MaxProduct:
		return &ConfigError{Field: "Config.Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and must be at least 1 and at most 2^62", p.Limit)}
	case algorithm.UnitSpan(string(p.Unit)) == 0:
		return &ConfigError{Field: "Config.Policy.Unit", Reason: fmt.Sprintf(
			"is %q, and must be %s", string(p.Unit), algorithm.UnitNames())}
	case !isZone(p.Zone):
		return &ConfigError{Field: "Config.Policy.Zone", Reason: fmt.Sprintf(
			"is %.100q, and must be UTC or a name with a slash, such as Europe/Berlin; "+
				"for an abbreviation or offset, write the name of a place where it is in use", p.Zone)}
	}
	return nil
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

// calendarOf is the policy of these numbers.
func calendarOf(n algorithm.Numbers) single {
	p := CalendarWindow{Limit: n.Limit, Unit: Unit(algorithm.UnitName(n.Span)), Zone: n.Zone}
	if p.Zone == utcName {
		p.Zone = ""
	}
	return p
}
