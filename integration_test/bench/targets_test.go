package bench

import (
	"fmt"

	"github.com/pgratelimit/ratelimit/integration_test/svg"
)

// target is a figure that this library should reach.
type target struct {
	Row      string   `json:"row"`
	AtLeast  string   `json:"at_least"`
	Aim      string   `json:"aim"`
	Measured string   `json:"measured"`
	Value    *float64 `json:"value"` // nil means that it was not measured
	Met      string   `json:"met"`
}

// goal has the required value and the desired value. 0 means that there is no desired value.
type goal struct {
	reach, aim float64
	format     string // the format of a figure
	less       bool   // whether a smaller figure is better
}

func atLeast(reach, aim float64, format string) goal { return goal{reach, aim, format, false} }
func atMost(reach, aim float64, format string) goal  { return goal{reach, aim, format, true} }

// denialBound is the bound in the documentation of this library's cache of denials.
const denialBound = 16 << 20

// judge compares the results with the targets.
func (r *report) judge() {
	byRedis := func(s *subject) func(*result) []float64 {
		return func(of *result) []float64 { return ratios(of.find(s), of.redis()) }
	}
	byUpdate := func(of *result) []float64 { return ratios(of.find(slidingWindow), of.find(plainUpdate)) }
	// longerThanUpdate returns the ratio of a single call's time to an UPDATE's.
	longerThanUpdate := func(of *result) (all []float64) {
		ours, updates := of.find(slidingWindow).all(p50), of.find(plainUpdate).all(p50)
		for i := range min(len(ours), len(updates)) {
			all = append(all, ours[i]/updates[i])
		}
		return all
	}
	byAllow := func(of *result) []float64 { return ratios(of.find(held), of.find(slidingWindow)) }
	longerThanAllow := func(of *result) (all []float64) {
		pairs, allows := of.find(held).all(p50), of.find(slidingWindow).all(p50)
		for i := range min(len(pairs), len(allows)) {
			all = append(all, pairs[i]/allows[i])
		}
		return all
	}
	const factor = "%.2f"
	for _, t := range []struct {
		id, title string
		measured  func(*result) []float64
		goal      goal
	}{
		{uniform64ID, "64 callers, keys there, against redis_rate", byRedis(slidingWindow), atLeast(1.9, 2.5, factor)},
		{uniform64ID, "64 callers, Hold and Settle, against Allow", byAllow, atLeast(0.35, 0.5, factor)},
		{oneCallerID, "one caller, Hold and Settle, p50, times that of Allow", longerThanAllow, atMost(2.4, 2, factor)},
		{uniform512ID, "512 callers, keys there, against redis_rate", byRedis(slidingWindow), atLeast(2.4, 4, factor)},
		{new64ID, "64 callers, new keys, against redis_rate", byRedis(slidingWindow), atLeast(1.3, 2, factor)},
		{new512ID, "512 callers, new keys, against redis_rate", byRedis(slidingWindow), atLeast(2, 3, factor)},
		{hot64ID, "64 callers, one hot key, against redis_rate", byRedis(slidingWindow), atLeast(3, 5, factor)},
		{hot512ID, "512 callers, one hot key, against redis_rate", byRedis(slidingWindow), atLeast(12, 20, factor)},
		{oneCallerID, "one caller, key there, p50, times that of `UPDATE` by key", longerThanUpdate, atMost(1.7, 1.3, factor)},
		{new1ID, "one caller, new key, p50, times that of `UPDATE` by key", longerThanUpdate, atMost(2, 1.5, factor)},
		{sixteenID, "16 processes of 2 callers, keys there, against `UPDATE` by key", byUpdate, atLeast(0.6, 0.9, factor)},
		{newSixteenID, "16 processes of 2 callers, new keys, against `UPDATE` by key", byUpdate, atLeast(0.7, 0.9, factor)},
		{hotSixteenID, "16 processes of 2 callers, one hot key, against `UPDATE` by key", byUpdate, atLeast(0.8, 1.2, factor)},
		{fourID, "4 processes of 8 callers, keys there, against redis_rate", byRedis(slidingWindow), atLeast(1.3, 2, factor)},
		{hotSixteenID, "16 processes of 2 callers, one hot key, leases, against redis_rate", byRedis(leased), atLeast(3, 20, factor)},
		{busyID, "16 processes of 2 callers, 5,000 keys, leases, against redis_rate", byRedis(leased), atLeast(1.5, 0, factor)},
	} {
		r.target(t.title, t.goal, t.measured(r.result(t.id)))
	}
	uniform64, hot64 := r.result(uniform64ID), r.result(hot64ID)
	r.target("uniform keys, 64 callers, against the five-round-trip transaction", atLeast(8, 15, "%.1f"),
		ratios(uniform64.find(slidingWindow), uniform64.find(fiveRoundTrips)))
	r.target("one hot key, 64 callers, against the five-round-trip transaction", atLeast(50, 100, "%.1f"),
		ratios(hot64.find(slidingWindow), hot64.find(fiveRoundTrips)))

	var oneCaller []float64
	for i, decision := range r.OneCaller.Decision {
		oneCaller = append(oneCaller, decision/r.OneCaller.SelectOne[i])
	}
	r.target(
		"one caller, p50, against `SELECT 1` through the same pool, call by call in turn",
		atMost(2, 1.4, factor),
		oneCaller,
	)

	uniform512 := r.result(uniform512ID)
	r.target("durable with asynchronous commit against ephemeral, uniform keys, 512 callers", atLeast(0.6, 0.9, factor),
		ratios(uniform512.find(durable), uniform512.find(slidingWindow)))
	r.target("a cached denial", atMost(200, 60, "%.0f ns"), r.Denial.Nanoseconds)
	r.target("a cached denial: allocations", atMost(0, 0, "%.0f"), []float64{r.Denial.Allocations})

	few, many := r.result(fewRowsID), r.result(manyRowsID)
	r.target(many.data.title+" against "+few.data.title+", uniform keys, 64 callers", atLeast(0.7, 0.9, factor),
		ratios(many.find(slidingWindow), few.find(slidingWindow)))

	alone := r.result(oneCallerID)
	r.target("AllowAll of three limits, times what Allow takes, one caller", atMost(1.6, 0, factor),
		ratios(alone.find(slidingWindow), alone.find(allOfThree)))
	r.target("AllowAll of two limits, one shared, against Allow, 64 callers", atLeast(0.4, 0.5, factor),
		ratios(uniform64.find(allOfTwo), uniform64.find(slidingWindow)))
	r.target("AllowAll of three limits, one shared, against Allow, 64 callers", atLeast(0.45, 0.6, factor),
		ratios(uniform64.find(allOfThree), uniform64.find(slidingWindow)))

	for _, t := range []struct{ title, id string }{
		{"HOT share, uniform keys, 64 callers", uniform64ID},
		{"HOT share, uniform keys, 512 callers", uniform512ID},
		{"HOT share, one hot key, 64 callers", hot64ID},
		{"HOT share, one hot key, 512 callers", hot512ID},
	} {
		r.target(t.title, atLeast(95, 99, "%.2f %%"), r.result(t.id).find(slidingWindow).all(hotShare))
	}
	r.target("memory of an idle limiter", atMost(1<<10, 0, "%.0f bytes"), []float64{r.Memory.Idle})
	r.target(fmt.Sprintf("memory with %s denied keys", svg.Thousands(r.Memory.DeniedKeys)),
		atMost(denialBound, 0, "%.0f bytes"), []float64{r.Memory.Denied})
	r.target(fmt.Sprintf("memory with %s denied keys of 512 bytes", svg.Thousands(r.Memory.LongKeys)),
		atMost(denialBound, 0, "%.0f bytes"), []float64{r.Memory.DeniedLong})
}

// target adds a row with the median of the measurements.
func (r *report) target(title string, goal goal, measured []float64) {
	t := target{
		Row:      title,
		AtLeast:  fmt.Sprintf(goal.format, goal.reach),
		Aim:      "–",
		Measured: "not measured",
		Met:      "not measured",
	}
	if goal.less {
		t.AtLeast = "at most " + t.AtLeast
	}
	if goal.aim > 0 {
		t.Aim = fmt.Sprintf(goal.format, goal.aim)
	}
	if len(measured) > 0 {
		value := middle(measured)
		reached := func(wanted float64) bool { return goal.less && value <= wanted || !goal.less && value >= wanted }
		t.Value, t.Measured, t.Met = &value, fmt.Sprintf(goal.format, value), "no"
		if reached(goal.reach) {
			t.Met = "yes"
		}
		if goal.aim > 0 && reached(goal.aim) {
			t.Met = "yes, the aim too"
		}
	}
	r.Targets = append(r.Targets, t)
}
