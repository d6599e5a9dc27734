// Package algorithm has the table of the algorithms, and the text form of the policies that use them.
package algorithm

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Algorithm is a row of the table.
type Algorithm struct {
	Code     int16  // its code in rows and for rate_limit_all
	Word     string // the first word of a policy's text
	Example  string // an example of such a text
	File     string // the NAME in NAME.go, internal/model/NAME.go, sql/NAME.sql and internal/engine/call/NAME.sql
	Function string // it takes from keys of one limiter
	// These are the function's arguments for a policy's numbers: the limit, the refill if any, the span, and the time
	// zone if any.
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

// All returns the table in the order of the codes.
//
// A new algorithm needs a row here. NAME.go has its policy, and policyOf in policy.go gets a case that makes the policy
// from numbers. internal/model/NAME.go has its rules, with NAME_test.go beside it, and model.Of gets a case that makes
// the rules from numbers. sql/NAME.sql has the rules in SQL, and internal/engine/call/NAME.sql the statement that calls
// its function. Add the function to deploy/grants.sql and docs/operating.md. With its argument types, add it to
// cmd/pgratelimit/internal/cli/sql/foreign.sql. Add an example of its text form to docs/algorithms.md. Then run make
// sql. TestEveryAlgorithmIsComplete says which of these is missing. After the functions are released, internal/gensql
// needs another migration for it.
//
// The algorithm may also have a refill like TokenBucket, a log like SlidingLog, or a time zone like CalendarWindow.
// Then search for these names and codes in internal/engine, in model.go and credit.go of internal/model, in text.go
// here, and in sql/all.sql, sql/refund.sql, sql/takeall.sql and sql/policy.sql, too.
func All() []Algorithm { return slices.Clone(table[:]) }

//nolint:gochecknoglobals // it never changes, and With reads it for each request
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

// ByCode returns the algorithm with this code. The code must exist.
func ByCode(code int16) Algorithm { return table[code-1] }

// Refills tells whether its policies have a refill, besides limit and span.
func (a *Algorithm) Refills() bool { return slices.Contains(a.Arguments, "refill") }

// Zoned tells whether its policies have a time zone.
func (a *Algorithm) Zoned() bool { return slices.Contains(a.Arguments, "zone") }

// Functions names the functions that applications call: those that decide, and the one for resets.
func Functions() []string {
	var names []string
	for _, a := range table {
		names = append(names, a.Function)
	}
	return append(names, "rate_limit_all", "rate_limit_take_all", "rate_limit_reset")
}

// Examples lists a text for each algorithm, in quotation marks, for error messages.
func Examples() string {
	var quoted []string
	for _, a := range table {
		quoted = append(quoted, `"`+a.Example+`"`)
	}
	last := len(quoted) - 1
	return strings.Join(quoted[:last], ", ") + " or " + quoted[last]
}

// Numbers are a policy's data. Two policies for one row are equal if their Numbers are.
type Numbers struct {
	Algorithm int16
	Limit     int64 // for a bucket, its capacity
	// Span is the window; for a bucket, the time in which Refill flows in. Every calendar month counts as 31 days.
	Span   time.Duration
	Refill int64  // for a bucket; else 0
	Zone   string // for a calendar window; else empty
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

// UnitSpan is the Span for a calendar unit, or 0 if the unit is unknown.
func UnitSpan(name string) time.Duration {
	for _, u := range units {
		if u.name == name {
			return u.span
		}
	}
	return 0
}

// UnitName is the calendar unit with this Span, or empty if there is none.
func UnitName(span time.Duration) string {
	for _, u := range units {
		if u.span == span {
			return u.name
		}
	}
	return ""
}

// UnitNames lists the calendar units for error messages.
func UnitNames() string { return `"minute", "hour", "day", "week" or "month"` }

// MaxPolicies is the most policies that a limiter may have.
const MaxPolicies = 8

// RowName is the name in a limiter's rows for its i-th policy, counted from 0.
func RowName(limiter string, i int) string {
	if i == 0 {
		return limiter
	}
	return fmt.Sprintf("%s/%d", limiter, i+1)
}

// RowNames are the names of all rows that a limiter can have.
func RowNames(limiter string) []string {
	names := make([]string, MaxPolicies)
	for i := range names {
		names[i] = RowName(limiter, i)
	}
	return names
}
