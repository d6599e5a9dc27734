package ratelimit

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// model is a policy of one row and its rules, for tests that need both.
type ruled interface {
	single
	rules
}

func (p FixedWindow) Numbers() algorithm.Numbers              { return p.one().Numbers() }
func (p FixedWindow) Lasts() int64                            { return p.one().Lasts() }
func (p FixedWindow) Roll(s state, clock int64) (state, bool) { return p.one().Roll(s, clock) }
func (p FixedWindow) Decide(s state, clock, n int64) (state, decision) {
	return p.one().Decide(s, clock, n)
}
func (p FixedWindow) Refund(s state, clock int64, k take) (state, decision) {
	return p.one().Refund(s, clock, k)
}
func (p FixedWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p FixedWindow) ResetAfter(last decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p SlidingWindow) Numbers() algorithm.Numbers              { return p.one().Numbers() }
func (p SlidingWindow) Lasts() int64                            { return p.one().Lasts() }
func (p SlidingWindow) Roll(s state, clock int64) (state, bool) { return p.one().Roll(s, clock) }
func (p SlidingWindow) Decide(s state, clock, n int64) (state, decision) {
	return p.one().Decide(s, clock, n)
}
func (p SlidingWindow) Refund(s state, clock int64, k take) (state, decision) {
	return p.one().Refund(s, clock, k)
}
func (p SlidingWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p SlidingWindow) ResetAfter(last decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p TokenBucket) Numbers() algorithm.Numbers              { return p.one().Numbers() }
func (p TokenBucket) Lasts() int64                            { return p.one().Lasts() }
func (p TokenBucket) Roll(s state, clock int64) (state, bool) { return p.one().Roll(s, clock) }
func (p TokenBucket) Decide(s state, clock, n int64) (state, decision) {
	return p.one().Decide(s, clock, n)
}
func (p TokenBucket) Refund(s state, clock int64, k take) (state, decision) {
	return p.one().Refund(s, clock, k)
}
func (p TokenBucket) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p TokenBucket) ResetAfter(last decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p SlidingLog) Numbers() algorithm.Numbers              { return p.one().Numbers() }
func (p SlidingLog) Lasts() int64                            { return p.one().Lasts() }
func (p SlidingLog) Roll(s state, clock int64) (state, bool) { return p.one().Roll(s, clock) }
func (p SlidingLog) Decide(s state, clock, n int64) (state, decision) {
	return p.one().Decide(s, clock, n)
}
func (p SlidingLog) Refund(s state, clock int64, k take) (state, decision) {
	return p.one().Refund(s, clock, k)
}
func (p SlidingLog) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p SlidingLog) ResetAfter(last decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p CalendarWindow) Numbers() algorithm.Numbers              { return p.one().Numbers() }
func (p CalendarWindow) Lasts() int64                            { return p.one().Lasts() }
func (p CalendarWindow) Roll(s state, clock int64) (state, bool) { return p.one().Roll(s, clock) }
func (p CalendarWindow) Decide(s state, clock, n int64) (state, decision) {
	return p.one().Decide(s, clock, n)
}
func (p CalendarWindow) Refund(s state, clock int64, k take) (state, decision) {
	return p.one().Refund(s, clock, k)
}
func (p CalendarWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().LeaseOf(s, clock, longest)
}
func (p CalendarWindow) ResetAfter(last decision, units int64) int64 {
	return p.one().ResetAfter(last, units)
}

func (p TokenBucket) full() int64                     { return p.one().(tokenBucket).full() }
func (p TokenBucket) fillTime(credit int64) int64     { return p.one().(tokenBucket).fillTime(credit) }
func (p TokenBucket) lend(s state, units int64) state { return p.one().(tokenBucket).lend(s, units) }
func (p CalendarWindow) spanMicros() int64            { return p.one().(calendarWindow).spanMicros() }
func (p CalendarWindow) end(clock int64) int64        { return p.one().(calendarWindow).end(clock) }

// modelOf is the policy that has these rules.
func modelOf(r rules) ruled { return policyOf(r.Numbers()).(ruled) }

// rulesOf are the rules of policies.
func rulesOf(policies ...ruled) (several []rules) {
	for _, p := range policies {
		several = append(several, p.one())
	}
	return several
}
