package ratelimit

import (
	"fmt"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// CalendarWindow admits Limit in each minute, hour, day, week or month of the calendar, as clocks in the Zone show it.
// Quotas are sold like that: 1,000 a month. As with a [FixedWindow], all of the limit may come at once, and 2 × Limit
// around the edge of two windows.
//
// With CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"}, a key that has taken 1,000 by
// noon of 31 March is told to retry after 12 h. From midnight in Berlin on it has 1,000 again.
//
// Windows begin as Postgres's date_trunc says, by the server's time zone data: a day may last 23 or 25 hours.
// docs/algorithms.md has the details, and what happens if Unit or Zone change. The server must know the Zone, or calls
// return a [*ConfigError]. Where no database decides ([FallbackLocal], package ratelimittest), this process's time zone
// data count; a fallback without data for the Zone takes UTC.
type CalendarWindow struct {
	Limit int64 // in units of cost: at least 1, and at most 2^62
	Unit  Unit
	// Zone is a name with a slash from the IANA time zone database, such as Europe/Berlin. Defaults to UTC. Other
	// names, such as CET, Etc/GMT+3 and Japan, are refused, because Go and Postgres may read them differently.
	Zone string
}

// Unit is a unit of the calendar: the window of a [CalendarWindow].
type Unit string

const utcName = "UTC"

// These are all units.
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
	// In these folders, a server may have files that count leap seconds, and copies of other files.
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
