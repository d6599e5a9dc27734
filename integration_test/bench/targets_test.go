package bench

import (
	"fmt"
	"strings"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// target is a figure that this library is to reach.
type target struct {
	Row      string   `json:"row"`
	AtLeast  string   `json:"at_least"`
	Aim      string   `json:"aim"`
	Measured string   `json:"measured"`
	Value    *float64 `json:"value"` // nil: not measured
	Met      string   `json:"met"`
}

// goal is what is to be reached at least, and what is aimed at; 0 is no aim. Where the aim is lower, less is better.
type goal struct {
	atLeast, aim float64
	format       string // of a figure
}

// denialBound is what the documentation of this library's cache of denials promises not to exceed.
const denialBound = 16 << 20

// judge compares what was measured with what is to be reached.
func (r *report) judge() {
	for _, t := range []struct {
		title, id    string
		atLeast, aim float64
	}{
		{"uniform keys, 64 callers, sliding window, against redis_rate", uniform64ID, 1.3, 2},
		{"uniform keys, 512 callers, against redis_rate", uniform512ID, 2, 4},
		{"one hot key, 64 callers, against redis_rate", hot64ID, 2.5, 5},
		{"one hot key, 512 callers, against redis_rate", hot512ID, 10, 20},
	} {
		result := r.result(t.id)
		r.target(t.title, goal{t.atLeast, t.aim, "%.2f"}, ratios(result.find(slidingWindow), result.redis()))
	}
	uniform64, hot64 := r.result(uniform64ID), r.result(hot64ID)
	r.target("uniform keys, 64 callers, against the five-round-trip transaction", goal{8, 15, "%.1f"},
		ratios(uniform64.find(slidingWindow), uniform64.find(fiveRoundTrips)))
	r.target("one hot key, 64 callers, against the five-round-trip transaction", goal{50, 100, "%.1f"},
		ratios(hot64.find(slidingWindow), hot64.find(fiveRoundTrips)))

	var oneCaller []float64
	for i, decision := range r.OneCaller.Decision {
		oneCaller = append(oneCaller, decision/r.OneCaller.SelectOne[i])
	}
	r.target(
		"one caller, p50, against `SELECT 1` through the same pool, call by call in turn",
		goal{2, 1.4, "%.2f"},
		oneCaller,
	)

	uniform512 := r.result(uniform512ID)
	r.target("durable with asynchronous commit against ephemeral, uniform keys, 512 callers", goal{0.6, 0.9, "%.2f"},
		ratios(uniform512.find(durable), uniform512.find(slidingWindow)))
	r.target("a cached denial", goal{200, 60, "%.0f ns"}, r.Denial.Nanoseconds)
	r.target("a cached denial: allocations", goal{0, 0, "%.0f"}, []float64{r.Denial.Allocations})

	few, many := r.result(fewRowsID), r.result(manyRowsID)
	r.target(many.data.title+" against "+few.data.title+", uniform keys, 64 callers", goal{0.7, 0.9, "%.2f"},
		ratios(many.find(slidingWindow), few.find(slidingWindow)))

	alone := r.result(oneCallerID)
	r.target("AllowAll of three limits, times what Allow takes, one caller", goal{1.6, 0, "%.2f"},
		ratios(alone.find(slidingWindow), alone.find(allOfThree)))
	for _, several := range []*subject{allOfTwo, allOfThree} {
		title := strings.TrimPrefix(several.title, "ratelimit, ")
		r.target(
			title+", against Allow, uniform keys, 64 callers",
			goal{0.4, 0.5, "%.2f"},
			ratios(uniform64.find(several), uniform64.find(slidingWindow)),
		)
	}

	for _, t := range []struct{ title, id string }{
		{"HOT share, uniform keys, 64 callers", uniform64ID},
		{"HOT share, uniform keys, 512 callers", uniform512ID},
		{"HOT share, one hot key, 64 callers", hot64ID},
		{"HOT share, one hot key, 512 callers", hot512ID},
	} {
		r.target(t.title, goal{95, 99, "%.2f %%"}, r.result(t.id).find(slidingWindow).all(hotShare))
	}
	for _, t := range []struct {
		title, id    string
		atLeast, aim float64
	}{
		{"one hot key, 16 processes of 2 callers, with leases, against redis_rate", hotSixteenID, 3, 20},
		{"5,000 keys, 16 processes of 2 callers, with leases, against redis_rate", busyID, 1.5, 0},
	} {
		result := r.result(t.id)
		r.target(t.title, goal{t.atLeast, t.aim, "%.2f"}, ratios(result.find(leased), result.redis()))
	}
	r.target("memory of an idle limiter", goal{1 << 10, 0, "%.0f bytes"}, []float64{r.Memory.Idle})
	r.target(fmt.Sprintf("memory with %s denied keys", svg.Thousands(r.Memory.DeniedKeys)),
		goal{denialBound, 0, "%.0f bytes"}, []float64{r.Memory.Denied})
	r.target(fmt.Sprintf("memory with %s denied keys of 512 bytes", svg.Thousands(r.Memory.LongKeys)),
		goal{denialBound, 0, "%.0f bytes"}, []float64{r.Memory.DeniedLong})
}

// target adds a row, with the median of what was measured.
func (r *report) target(title string, goal goal, measured []float64) {
	lower := goal.aim < goal.atLeast || goal.atLeast == 0
	t := target{
		Row:      title,
		AtLeast:  fmt.Sprintf(goal.format, goal.atLeast),
		Aim:      "–",
		Measured: "not measured",
		Met:      "not measured",
	}
	if lower {
		t.AtLeast = "at most " + t.AtLeast
	}
	if goal.aim > 0 {
		t.Aim = fmt.Sprintf(goal.format, goal.aim)
	}
	if len(measured) > 0 {
		value := middle(measured)
		reached := func(wanted float64) bool { return lower && value <= wanted || !lower && value >= wanted }
		t.Value, t.Measured, t.Met = &value, fmt.Sprintf(goal.format, value), "no"
		if reached(goal.atLeast) {
			t.Met = "yes"
		}
		if goal.aim > 0 && reached(goal.aim) {
			t.Met = "yes, the aim too"
		}
	}
	r.Targets = append(r.Targets, t)
}
