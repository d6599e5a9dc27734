package ratelimit

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// model is a policy of one row and its rules, for tests that need both.
type model interface {
	single
	rules
}

func (p FixedWindow) numbers() algorithm.Numbers              { return p.one().numbers() }
func (p FixedWindow) lasts() int64                            { return p.one().lasts() }
func (p FixedWindow) roll(s state, clock int64) (state, bool) { return p.one().roll(s, clock) }
func (p FixedWindow) decide(s state, clock, n int64) (state, decision) {
	return p.one().decide(s, clock, n)
}
func (p FixedWindow) refund(s state, clock int64, k take) (state, decision) {
	return p.one().refund(s, clock, k)
}
func (p FixedWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().leaseOf(s, clock, longest)
}
func (p FixedWindow) resetAfter(last decision, units int64) int64 {
	return p.one().resetAfter(last, units)
}

func (p SlidingWindow) numbers() algorithm.Numbers              { return p.one().numbers() }
func (p SlidingWindow) lasts() int64                            { return p.one().lasts() }
func (p SlidingWindow) roll(s state, clock int64) (state, bool) { return p.one().roll(s, clock) }
func (p SlidingWindow) decide(s state, clock, n int64) (state, decision) {
	return p.one().decide(s, clock, n)
}
func (p SlidingWindow) refund(s state, clock int64, k take) (state, decision) {
	return p.one().refund(s, clock, k)
}
func (p SlidingWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().leaseOf(s, clock, longest)
}
func (p SlidingWindow) resetAfter(last decision, units int64) int64 {
	return p.one().resetAfter(last, units)
}

func (p TokenBucket) numbers() algorithm.Numbers              { return p.one().numbers() }
func (p TokenBucket) lasts() int64                            { return p.one().lasts() }
func (p TokenBucket) roll(s state, clock int64) (state, bool) { return p.one().roll(s, clock) }
func (p TokenBucket) decide(s state, clock, n int64) (state, decision) {
	return p.one().decide(s, clock, n)
}
func (p TokenBucket) refund(s state, clock int64, k take) (state, decision) {
	return p.one().refund(s, clock, k)
}
func (p TokenBucket) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().leaseOf(s, clock, longest)
}
func (p TokenBucket) resetAfter(last decision, units int64) int64 {
	return p.one().resetAfter(last, units)
}

func (p SlidingLog) numbers() algorithm.Numbers              { return p.one().numbers() }
func (p SlidingLog) lasts() int64                            { return p.one().lasts() }
func (p SlidingLog) roll(s state, clock int64) (state, bool) { return p.one().roll(s, clock) }
func (p SlidingLog) decide(s state, clock, n int64) (state, decision) {
	return p.one().decide(s, clock, n)
}
func (p SlidingLog) refund(s state, clock int64, k take) (state, decision) {
	return p.one().refund(s, clock, k)
}
func (p SlidingLog) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().leaseOf(s, clock, longest)
}
func (p SlidingLog) resetAfter(last decision, units int64) int64 {
	return p.one().resetAfter(last, units)
}

func (p CalendarWindow) numbers() algorithm.Numbers              { return p.one().numbers() }
func (p CalendarWindow) lasts() int64                            { return p.one().lasts() }
func (p CalendarWindow) roll(s state, clock int64) (state, bool) { return p.one().roll(s, clock) }
func (p CalendarWindow) decide(s state, clock, n int64) (state, decision) {
	return p.one().decide(s, clock, n)
}
func (p CalendarWindow) refund(s state, clock int64, k take) (state, decision) {
	return p.one().refund(s, clock, k)
}
func (p CalendarWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	return p.one().leaseOf(s, clock, longest)
}
func (p CalendarWindow) resetAfter(last decision, units int64) int64 {
	return p.one().resetAfter(last, units)
}

func (p TokenBucket) full() int64                     { return p.one().(tokenBucket).full() }
func (p TokenBucket) fillTime(credit int64) int64     { return p.one().(tokenBucket).fillTime(credit) }
func (p TokenBucket) lend(s state, units int64) state { return p.one().(tokenBucket).lend(s, units) }
func (p CalendarWindow) span() int64                  { return p.one().(calendarWindow).span() }
func (p CalendarWindow) end(clock int64) int64        { return p.one().(calendarWindow).end(clock) }

// modelOf is the policy that has these rules.
func modelOf(r rules) model { return policyOf(r.numbers()).(model) }

// rulesOf are the rules of policies.
func rulesOf(policies ...model) (several []rules) {
	for _, p := range policies {
		several = append(several, p.one())
	}
	return several
}
