package model

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// Concurrency has the rules of ratelimit.Concurrency. It counts nothing. Its only state is the live slots of the key:
// see Key.Acquire. So the rules decide as if no slot was live, and the row stays as it is.
type Concurrency struct{ Limit int64 }

var _ Rules = Concurrency{}

// MaxSlots is the largest limit. Up to here, the shares of two groups of a line can be compared exactly in floating
// point.
const MaxSlots = 1_000_000

func (p Concurrency) Lasts() int64 { return 0 }

func (p Concurrency) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.Concurrency, Limit: p.Limit}
}

// LeaseOf returns no units, because a lease counts units and Concurrency does not.
func (p Concurrency) LeaseOf(State, int64, int64) (spare, lasts int64) { return 0, 0 }

func (p Concurrency) ResetAfter(Decision, int64) int64 { return 0 }

func (p Concurrency) Refund(s State, clock int64, _ Take) (State, Decision) {
	return p.Decide(s, clock, 0)
}

func (p Concurrency) Roll(State, int64) (rolled State, moved bool) { return State{}, false }

func (p Concurrency) Decide(s State, _, n int64) (State, Decision) {
	d := Decision{Remaining: p.Limit}
	switch {
	case n > p.Limit:
		d.RetryAfter = Never
	case n > 0:
		d.Granted = 1
	}
	return s, d
}
