// Package algorithm has a table of the rate limit algorithms. The package also parses policies such as "fixed 100/1m".
package algorithm

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// Algorithm is a row of the table of algorithms.
type Algorithm struct {
	Code     int16  // the algorithm's code in table rows and in calls of rate_limit_all
	Word     string // the first word of a policy's text
	Example  string // an example of a policy's text
	File     string // the NAME in NAME.go, internal/model/NAME.go, sql/NAME.sql and internal/engine/call/NAME.sql
	Function string // the SQL function that takes from keys of one limiter; "" for Concurrency
	// Arguments are the names of Function's arguments for the policy's numbers and its time zone.
	Arguments []string
}

// The codes of the algorithms.
const (
	FixedWindow int16 = 1 + iota
	SlidingWindow
	TokenBucket
	SlidingLog
	CalendarWindow
	Concurrency
)

// All returns the algorithms from whose keys units are taken, in the order of their codes. Concurrency is not one of
// them: it only has slots.
//
// CONTRIBUTING.md lists the places to edit for a new algorithm. TestEveryAlgorithmIsComplete reports missing places.
func All() []Algorithm { return slices.Clone(table[:Concurrency-1]) }

//nolint:gochecknoglobals // the table never changes, and With reads the table for each request
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
		{Code: Concurrency, Word: "concurrent", Example: "concurrent 5", File: "concurrency"},
	}
)

// ByWord returns the algorithm with this Word.
func ByWord(word string) (Algorithm, bool) {
	for _, a := range table {
		if a.Word == word {
			return a, true
		}
	}
	return Algorithm{}, false
}

// Known tells whether an algorithm has this code.
func Known(code int16) bool { return code >= 1 && int(code) <= len(table) }

// ByCode returns the algorithm with this code. ByCode panics if the code is unknown.
func ByCode(code int16) Algorithm { return table[code-1] }

// Refills tells whether the algorithm's policies have a refill.
func (a *Algorithm) Refills() bool { return slices.Contains(a.Arguments, "refill") }

// Zoned tells whether the algorithm's policies have a time zone.
func (a *Algorithm) Zoned() bool { return slices.Contains(a.Arguments, "zone") }

// Functions returns the names of the SQL functions that applications call, including rate_limit_reset.
func Functions() []string {
	var names []string
	for _, a := range All() {
		names = append(names, a.Function)
	}
	return append(names, "rate_limit_all", "rate_limit_take_all", "rate_limit_reset")
}

// Examples returns an example of a policy's text for each algorithm, in quotation marks, for error messages.
func Examples() string {
	var quoted []string
	for _, a := range table {
		quoted = append(quoted, `"`+a.Example+`"`)
	}
	last := len(quoted) - 1
	return strings.Join(quoted[:last], ", ") + " or " + quoted[last]
}

// Numbers are the data of a policy. Policies are equal if their Numbers are equal.
type Numbers struct {
	Algorithm int16
	Limit     int64 // a token bucket's capacity, or the limit of a window
	// Span is the length of the window, or the time in which a bucket gains Refill tokens. A month counts as 31 days.
	// Concurrency has no Span.
	Span   time.Duration
	Refill int64  // a token bucket's refill; 0 for all other algorithms
	Zone   string // a calendar window's time zone, or Epoch; "" for all other algorithms
}

// Epoch stands in place of a time zone for windows that are aligned to the beginning of 1970 in UTC. Their Span is any
// duration, and not a unit of the calendar.
const Epoch = "epoch"

// Refills tells whether the policy has a refill.
func (n Numbers) Refills() bool { return table[n.Algorithm-1].Refills() }

// HasSlots tells whether the policy has slots, of which nothing can be taken.
func (n Numbers) HasSlots() bool { return n.Algorithm == Concurrency }

// Zoned tells whether the policy has a time zone.
func (n Numbers) Zoned() bool { return table[n.Algorithm-1].Zoned() }

//nolint:gochecknoglobals // nobody changes it
var units = [...]struct {
	name string
	span time.Duration
}{{"minute", time.Minute}, {"hour", time.Hour}, {"day", day}, {"week", 7 * day}, {"month", 31 * day}}

// UnitSpan returns the Span of a calendar unit, or 0 if the unit is unknown.
func UnitSpan(name string) time.Duration {
	for _, u := range units {
		if u.name == name {
			return u.span
		}
	}
	return 0
}

// UnitName returns the calendar unit that has this Span, or "" if there is none.
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

// MaxPolicies is how many policies a limiter may have.
const MaxPolicies = 8

// RowName returns the limiter name that table rows have for policy i of a limiter. The first policy is 0.
func RowName(limiter string, i int) string {
	if i == 0 {
		return limiter
	}
	return fmt.Sprintf("%s/%d", limiter, i+1)
}

// RowNames returns the limiter names that a limiter's table rows can have.
func RowNames(limiter string) []string {
	names := make([]string, MaxPolicies)
	for i := range names {
		names[i] = RowName(limiter, i)
	}
	return names
}
