// Package algorithm is the one table of the algorithms, and the text form of the policies that use them.
package algorithm

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Algorithm is a line of the table.
type Algorithm struct {
	Code     int16  // in the rows, and for rate_limit_all
	Word     string // that a policy's text begins with
	Example  string // of such a text
	File     string // the NAME of NAME.go, internal/model/NAME.go, sql/NAME.sql and internal/engine/call/NAME.sql
	Function string // which takes from keys of one limiter
	// Arguments of the function, for the numbers of a policy: the limit, the refill if there is one, the span, and the
	// time zone if there is one.
	Arguments []string
}

// The codes.
const (
	FixedWindow int16 = 1 + iota
	SlidingWindow
	TokenBucket
	SlidingLog
	CalendarWindow
)

// All returns the table, in the order of the codes.
//
// A new algorithm needs a line here. NAME.go has its policy, and a case of policyOf in policy.go makes it of numbers.
// internal/model/NAME.go has its rules, and a case of model.Of makes them of numbers; NAME_test.go lies beside that.
// sql/NAME.sql has the rules in SQL, and internal/engine/call/NAME.sql the statement that calls its function. The
// function goes into deploy/grants.sql, docs/operating.md and, with the
// types of its arguments, cmd/pgratelimit/internal/cli/sql/foreign.sql. An example of its text form goes into
// docs/algorithms.md. Then run make sql. TestEveryAlgorithmIsComplete tells which of these is missing. Once a release
// has the functions, internal/gensql needs a further migration for it.
//
// If something flows in, as into a TokenBucket, if there is a log, as of a SlidingLog, or a time zone, as of a
// CalendarWindow, look for these names and codes in internal/engine, model.go and credit.go of internal/model, text.go
// here, sql/all.sql, sql/refund.sql, sql/takeall.sql and sql/policy.sql, too.
func All() []Algorithm { return slices.Clone(table[:]) }

//nolint:gochecknoglobals // nobody changes it, and With asks it for each request
var (
	window = []string{"max_count", "window_us"}
	bucket = []string{"capacity", "refill", "every_us"}
	zoned  = []string{"max_count", "window_us", "zone"}
	table  = [...]Algorithm{
		{FixedWindow, "fixed", "fixed 100/1m", "fixed", "rate_limit_take_fixed_window", window},
		{SlidingWindow, "sliding", "sliding 100/1m", "sliding", "rate_limit_take_sliding_window", window},
		{TokenBucket, "bucket", "bucket 20 5/10s", "tokenbucket", "rate_limit_take_token_bucket", bucket},
		{SlidingLog, "log", "log 100/1m", "slidinglog", "rate_limit_take_sliding_log", window},
		{
			CalendarWindow, "every", "every 1000/month Europe/Berlin", "calendar", "rate_limit_take_calendar_window",
			zoned,
		},
	}
)

// ByWord returns the algorithm whose texts begin with a word.
func ByWord(word string) (Algorithm, bool) {
	for _, a := range table {
		if a.Word == word {
			return a, true
		}
	}
	return Algorithm{}, false
}

// ByCode returns the algorithm of a code that exists.
func ByCode(code int16) Algorithm { return table[code-1] }

// Refills tells whether a policy has a refill, besides limit and span.
func (a *Algorithm) Refills() bool { return slices.Contains(a.Arguments, "refill") }

// Zoned tells whether a policy has a time zone.
func (a *Algorithm) Zoned() bool { return slices.Contains(a.Arguments, "zone") }

// Functions names the functions that applications call: those that decide, and the one that resets.
func Functions() []string {
	var names []string
	for _, a := range table {
		names = append(names, a.Function)
	}
	return append(names, "rate_limit_all", "rate_limit_take_all", "rate_limit_reset")
}

// Examples lists a text for each algorithm, in quotation marks, for people to read.
func Examples() string {
	var quoted []string
	for _, a := range table {
		quoted = append(quoted, `"`+a.Example+`"`)
	}
	last := len(quoted) - 1
	return strings.Join(quoted[:last], ", ") + " or " + quoted[last]
}

// Numbers are a policy's data. Two policies for one row are the same if their Numbers are equal.
type Numbers struct {
	Algorithm int16
	Limit     int64 // of a bucket, its capacity
	// Span is the window; of a bucket, the time in which Refill flows in. A month of the calendar counts as 31 days,
	// however long it is.
	Span   time.Duration
	Refill int64  // of a bucket; else 0
	Zone   string // of a calendar window; else empty
}

// Refills tells whether there is a refill, besides limit and span.
func (n Numbers) Refills() bool { return table[n.Algorithm-1].Refills() }

// Zoned tells whether there is a time zone.
func (n Numbers) Zoned() bool { return table[n.Algorithm-1].Zoned() }

//nolint:gochecknoglobals // nobody changes it
var units = [...]struct {
	name string
	span time.Duration
}{{"minute", time.Minute}, {"hour", time.Hour}, {"day", day}, {"week", 7 * day}, {"month", 31 * day}}

// UnitSpan is the Span of windows of a unit of the calendar, or 0 if there is no such unit.
func UnitSpan(name string) time.Duration {
	for _, u := range units {
		if u.name == name {
			return u.span
		}
	}
	return 0
}

// UnitName is the unit of the calendar with a Span, or empty if there is none.
func UnitName(span time.Duration) string {
	for _, u := range units {
		if u.span == span {
			return u.name
		}
	}
	return ""
}

// UnitNames lists the units of the calendar, for people to read.
func UnitNames() string { return `"minute", "hour", "day", "week" or "month"` }

// MaxPolicies is how many policies a limiter may have.
const MaxPolicies = 8

// RowName is the name of the rows that a limiter keeps for its i-th policy, from 0.
func RowName(limiter string, i int) string {
	if i == 0 {
		return limiter
	}
	return fmt.Sprintf("%s/%d", limiter, i+1)
}

// RowNames are the names of all rows that a limiter may have.
func RowNames(limiter string) []string {
	names := make([]string, MaxPolicies)
	for i := range names {
		names[i] = RowName(limiter, i)
	}
	return names
}
