package ratelimit

import (
	"fmt"
	"strings"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// CalendarWindow admits Limit in each minute, hour, day, week or month of the calendar in Zone. It is for quotas that
// are sold, such as 1,000 a month. As with a [FixedWindow], a key may take all of Limit at once, and 2 × Limit around
// the edge of two windows.
//
// With CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"}, a key that has taken 1,000 by
// noon of 31 March is told to retry after 12 h. At midnight in Berlin the key has 1,000 again.
//
// Postgres's date_trunc computes the edges of windows from the server's time zone data. So a day may last 23 or 25
// hours. docs/algorithms.md has the details, and says what happens when Unit or Zone change. If the server does not
// know Zone, calls return a [*ConfigError]. [FallbackLocal] uses the time zone data of this process, or UTC if that
// data does not have Zone.
type CalendarWindow struct {
	Limit int64 // in units of cost: at least 1, and at most 2^62
	Unit  Unit
	// Zone is an IANA time zone name with a slash, such as Europe/Berlin. Defaults to UTC. [New] refuses names such as
	// CET, Etc/GMT+3 and Japan, because Go and Postgres may read them differently.
	Zone string
}

// Unit is how long a [CalendarWindow] lasts in the calendar.
type Unit string

const utcName = "UTC"

// These are all the units.
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

// isZone tells whether zone has the form of a [CalendarWindow].Zone.
func isZone(zone string) bool {
	if zone == "" || zone == utcName {
		return true
	}
	if len(zone) > 64 || !strings.Contains(zone, "/") {
		return false
	}
	// In these folders, a server may have time zone files that count leap seconds.
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

func calendarOf(n algorithm.Numbers) single {
	if n.Zone == algorithm.Epoch {
		return FixedWindow{Limit: n.Limit, Window: n.Span, Align: true}
	}
	p := CalendarWindow{Limit: n.Limit, Unit: Unit(algorithm.UnitName(n.Span)), Zone: n.Zone}
	if p.Zone == utcName {
		p.Zone = ""
	}
	return p
}
