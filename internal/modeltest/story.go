package modeltest

import (
	"cmp"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// NewStory invents a sequence of related function calls: few keys, one clock, and a policy that changes now and then.
// It returns an error if the model panics.
func NewStory(r *rand.Rand, steps int) ([]Step, error) { return NewStoryOf(r, steps, RandomPolicy) }

// NewStoryOf does the same as NewStory, with policies from randomPolicy.
func NewStoryOf(r *rand.Rand, steps int, randomPolicy func(r *rand.Rand) model.Rules) (story []Step, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("after %v: panic: %v\n%s", story, p, debug.Stack())
		}
	}()
	asModel := NewRows()
	policy := randomPolicy(r)
	clock := int64(1)<<50 + r.Int64N(1<<51)
	var goals []int64 // times at which a recent decision says that something changes
	takes := map[RowID][]model.Take{}

	for range steps {
		switch r.IntN(20) {
		case 0:
			policy = randomPolicy(r)
		case 1, 2:
			policy = ChangedPolicy(r, policy)
		}
		clock = NextClock(r, clock, policy, goals)
		s := Step{Policy: policy, Durable: r.IntN(4) == 0, Name: "a", Clock: clock}
		if r.IntN(4) == 0 {
			s.Name = "b"
		}
		s.Brief = r.IntN(2) == 0
		ordinary := r.IntN(2) == 0 // only takes, no refunds or grants
		s.Skip = !ordinary && r.IntN(3) == 0
		several := 1 + r.IntN(8)
		if ordinary && r.IntN(2) == 0 {
			several = 1
		}
		for range several {
			cost := RandomCost(r, policy.Numbers().Limit)
			if ordinary {
				cost = RandomTake(r, policy.Numbers().Limit)
			}
			e := Element{
				Key:   [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)],
				Cost:  cost,
				Count: randomCount(r, policy.Numbers().Limit, cost),
			}
			if e.Charge = !ordinary && cost > 0 && r.IntN(4) == 0; e.Charge {
				row := Part{ID: RowID{s.Name, e.Key}, Durable: s.Durable, Policy: policy}
				e.Cost = RandomCharge(r, policy, asModel.State(row), clock)
			} else if !ordinary && (cost < 0 || r.IntN(6) == 0) && r.IntN(5) > 0 {
				e.Cost, e.Count, e.Refund = RandomRefund(r, policy, takes[RowID{s.Name, e.Key}], e.Cost, e.Count)
			}
			s.Elements = append(s.Elements, e)
		}
		if r.IntN(4) > 0 { // sort the keys as a limiter does
			slices.SortStableFunc(s.Elements, func(a, b Element) int {
				return cmp.Or(len(b.Key)-len(a.Key), strings.Compare(a.Key, b.Key))
			})
		}
		story = append(story, s)
		asModel.Decide(s)
		goals = goals[:0]
		for _, e := range s.Elements {
			if e.Decision.RetryAfter != model.Never {
				goals = append(goals, clock+e.Decision.RetryAfter)
			}
			goals = append(goals, clock+e.Decision.ResetAfter)
			if e.Cost > 0 && e.Decision.Granted > 0 {
				id := RowID{s.Name, e.Key}
				takes[id] = append(takes[id], e.Decision.TakenBy(policy, e.Cost, 1+r.Int64N(e.Decision.Granted)))
			}
		}
	}
	return story, nil
}

// RandomRefund draws a refund of a take or a part of it, even if the take was already given back. It can also draw a
// take that never happened. RandomRefund returns the cost, the count and the takes.
func RandomRefund(r *rand.Rand, p model.Rules, takes []model.Take, cost, count int64) (int64, int64, []model.Take) {
	if len(takes) == 0 || r.IntN(6) == 0 {
		extreme := func() int64 {
			return [...]int64{math.MinInt64, -1, 0, 1, 1 << 61, math.MaxInt64, r.Int64() >> r.IntN(64)}[r.IntN(7)]
		}
		k := model.Take{
			Units: extreme(), Spent: extreme(), Since: extreme(), In: extreme(), At: extreme(), Ended: extreme(),
		}
		if len(takes) > 0 {
			known := takes[r.IntN(len(takes))]
			if r.IntN(2) == 0 {
				k.Since = known.Since
			}
			if r.IntN(2) == 0 {
				k.In = known.In
			}
		}
		return min(cost, -1), count, []model.Take{k}
	}
	k := takes[len(takes)-1-r.IntN(min(len(takes), 4))]
	if r.IntN(3) == 0 {
		from := r.Int64N(k.Units)
		k = k.Portion(p, from, from+1+r.Int64N(k.Units-from))
	}
	if r.IntN(2) == 0 { // a refund of a lease
		k.Ended = k.Units + r.Int64N(3)
	}
	return -k.Units, 1, []model.Take{k}
}

// OneOf draws one element of the slice all.
func OneOf[T any](r *rand.Rand, all []T) T { return all[r.IntN(len(all))] }

// magnitude draws a number from 1 to limit. Small and large orders of magnitude are likely, and 1 and limit are
// frequent.
func magnitude(r *rand.Rand, limit int64) int64 {
	switch r.IntN(12) {
	case 0:
		return limit
	case 1:
		return 1
	case 2:
		return max(limit-1, 1)
	}
	return min(max(r.Int64()>>(63-(1+r.IntN(bits.Len64(uint64(limit))))), 1), limit)
}

// RandomPolicy draws a policy of any algorithm.
func RandomPolicy(r *rand.Rand) model.Rules {
	window := magnitude(r, model.MaxSpan)
	if r.IntN(3) == 0 {
		window = 1 + r.Int64N(20)
	}
	limit := magnitude(r, model.MaxProduct/window)
	switch r.IntN(8) {
	case 0, 1, 2, 3:
		limit = 1 + r.Int64N(min(20, model.MaxProduct/window))
	case 4:
		limit = model.MaxProduct / window
	}
	n := algorithm.Numbers{Algorithm: OneOf(r, algorithm.All()).Code, Limit: limit, Span: model.Duration(window)}
	switch n.Algorithm {
	case algorithm.SlidingLog:
		n.Limit = min(limit, model.MaxLogLimit)
	case algorithm.CalendarWindow:
		if n.Zone = algorithm.Epoch; r.IntN(3) > 0 {
			n.Span, n.Zone = OneOf(r, Units()), OneOf(r, SteadyZones())
		}
	}
	if !n.Refills() {
		return model.Of(n)
	}
	slowest := model.CeilDiv(limit*window, model.MaxSpan)
	refill := slowest + magnitude(r, math.MaxInt64-slowest)
	if r.IntN(2) == 0 {
		refill = slowest + r.Int64N(20)
	}
	n.Refill = refill
	return model.Of(n)
}

// ChangedPolicy changes a policy as an operator might: it makes numbers a little higher or lower, or switches to the
// other kind of window.
func ChangedPolicy(r *rand.Rand, p model.Rules) model.Rules {
	vary := func(n int64) int64 {
		if r.IntN(2) == 0 {
			return n
		}
		return max(n/4*r.Int64N(8)+r.Int64N(8)-4, 1)
	}
	length := func(d time.Duration) time.Duration {
		return model.Duration(vary(model.Micros(d)) % (2 * model.MaxSpan))
	}
	var changed model.Rules
	switch p := p.(type) {
	case model.FixedWindow:
		p.Limit, p.Window = vary(p.Limit), length(p.Window)
		if changed = p; r.IntN(3) == 0 {
			changed = model.SlidingWindow(p)
		}
	case model.SlidingWindow:
		p.Limit, p.Window = vary(p.Limit), length(p.Window)
		if changed = p; r.IntN(3) == 0 {
			changed = []model.Rules{model.FixedWindow(p), model.SlidingLog(p)}[r.IntN(2)]
		}
	case model.SlidingLog:
		p.Limit, p.Window = vary(p.Limit), length(p.Window)
		if changed = p; r.IntN(3) == 0 {
			changed = model.SlidingWindow(p)
		}
	case model.TokenBucket:
		p.Capacity, p.Refill, p.Every = vary(p.Capacity), vary(p.Refill), length(p.Every)
		changed = p
	case model.CalendarWindow:
		p.Limit = vary(p.Limit)
		if p.Zone == algorithm.Epoch {
			p.Span = length(p.Span)
		}
		if r.IntN(3) == 0 {
			p.Span, p.Zone = OneOf(r, Units()), OneOf(r, append(SteadyZones(), algorithm.Epoch))
		}
		if changed = p; r.IntN(6) == 0 {
			changed = model.FixedWindow{Limit: p.Limit, Window: p.Span}
		}
	}
	if !InRange(changed) {
		return p
	}
	return changed
}

// RandomCost draws a cost. A negative cost is a refund or a grant.
func RandomCost(r *rand.Rand, limit int64) int64 {
	switch r.IntN(10) {
	case 0, 1:
		return 0
	case 2:
		return limit + 1 + r.Int64N(3)
	case 3:
		return [...]int64{math.MaxInt64, 1 << 62, limit}[r.IntN(3)]
	case 4, 5:
		return magnitude(r, limit)
	case 6:
		return magnitude(r, min(limit, 10))
	case 7:
		return -magnitude(r, math.MaxInt64)
	case 8:
		return [...]int64{-1, -2, -limit, math.MinInt64}[r.IntN(4)]
	}
	return 1 + r.Int64N(min(limit, 3))
}

// RandomTake draws the cost of a take that may fit.
func RandomTake(r *rand.Rand, limit int64) int64 {
	switch r.IntN(4) {
	case 0:
		return magnitude(r, limit)
	case 1:
		return 1 + r.Int64N(min(limit, 3))
	}
	return 1
}

// RandomCharge draws the size of a charge that a row may accept.
func RandomCharge(r *rand.Rand, p model.Rules, s model.State, clock int64) int64 {
	_, _, fits := model.Charge(p, s, clock, 0)
	switch r.IntN(6) {
	case 0:
		return max(fits, 1)
	case 1:
		return fits + 1
	case 2:
		return magnitude(r, max(fits, 1))
	}
	return magnitude(r, p.Numbers().Limit)
}

func randomCount(r *rand.Rand, limit, cost int64) int64 {
	switch r.IntN(12) {
	case 0:
		return 1 + r.Int64N(1000)
	case 1:
		if cost == 0 || cost > 1<<51 ||
			cost < -1<<51 { // the model loops over units, and a key may hold credit of 2^61
			return math.MaxInt64
		}
		if cost > 0 && limit/cost < 1000 {
			return 2000
		}
	case 2, 3, 4:
		return 1 + r.Int64N(5)
	}
	return 1
}

// NextClock draws the time of the next call. The time stays, passes, or jumps by up to several windows. The time is
// often one of the goals, or a microsecond before or after a goal.
func NextClock(r *rand.Rand, clock int64, policy model.Rules, goals []int64) int64 {
	const first, last = 1, 1 << 55 // from 1970 to the year 3111
	window := Reach(policy)
	switch choice := r.IntN(20); {
	case choice < 4:
	case choice < 10 && len(goals) > 0:
		clock = goals[r.IntN(len(goals))] + r.Int64N(3) - 1
	case choice < 12:
		clock += window*r.Int64N(4) + r.Int64N(3) - 1
	case choice < 14:
		clock -= window*r.Int64N(3) + r.Int64N(3) - 1
	case choice < 18:
		clock += magnitude(r, 3*window)
	default:
		clock -= magnitude(r, 3*window)
	}
	return min(max(clock, first), last)
}
