package ratelimit

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

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// step is one call of a function.
type step struct {
	policy   ruled
	durable  bool
	name     string // short; replay puts something before it
	clock    int64
	skip     bool      // rows that somebody holds are passed over
	brief    bool      // costs and counts that are all 1 are left out
	elements []element // with the decisions that the model makes
}

func (s step) String() string {
	var elements strings.Builder
	for _, e := range s.elements {
		fmt.Fprintf(&elements, " {key: %q, cost: %d, count: %d, refund: %+v}", e.key, e.cost, e.count, e.refund)
	}
	return fmt.Sprintf(
		"at %d, %q in %s, %#v, skip %v, brief %v:%s",
		s.clock,
		s.name,
		pgtest.Table(s.durable),
		s.policy,
		s.skip,
		s.brief,
		elements.String(),
	)
}

// takes tells whether the function that only takes can be asked. Through a proxy, all keys have to be on one shard.
func (s step) takes() bool {
	_, log := s.policy.(SlidingLog)
	shards := max(pgtest.Shards(), 1)
	return !s.skip && (len(s.elements) == 1 || !log) && !slices.ContainsFunc(s.elements, func(e element) bool {
		return e.cost < 1 || shardkey.Of(e.key, shards) != shardkey.Of(s.elements[0].key, shards)
	})
}

// rows is the model of both tables.
type rows map[bool]map[rowID]storedRow

// timeRead is the time of a decision as the statements read it: see queryDecisions.
func timeRead(clock int64) time.Time {
	return time.UnixMicro(int64(math.RoundToEven(float64(clock) / 1e6 * 1e6))).UTC()
}

// decide has the model make the decisions of a step: an element of count k is k requests, one after the other.
func (m rows) decide(s step) {
	for i := range s.elements {
		e := &s.elements[i]
		id := rowID{s.name, e.key}
		var current model.State // of no row, and of a row of another algorithm
		if row := m[s.durable][id]; row.algorithm == s.policy.Numbers().Algorithm {
			current = row.State
		}

		var granted int64
		var last model.Decision
		credit := modeltest.CreditOf(s.policy, current, s.clock)
		requests := e.count
		if e.cost < 0 {
			requests = 1 // all at once
		}
		for asked := int64(0); asked < requests; asked++ {
			next, d := e.decide(s.policy, current, s.clock)
			granted += d.Granted
			last = d
			if next == current { // and so for all further ones
				break
			}
			current = next
			m[s.durable][id] = storedRow{s.policy.Numbers().Algorithm, current}
		}
		if last.Granted = granted; e.cost < 0 {
			last.Granted = e.count
		}
		last.DecidedAt = timeRead(s.clock)
		if s.takes() {
			last.DecidedAt = time.UnixMicro(s.clock).UTC() // read exactly
		}
		last.State = modeltest.Told(last.State)
		last.Taken.Units, last.Taken.Spent = 0, 0
		if e.cost > 0 {
			last.Taken.Spent = credit - modeltest.CreditOf(s.policy, current, s.clock)
		}
		e.decision = last
	}
}

// decide is the model's decision of one of its requests, or of what they give together.
func (e element) decide(p ruled, s model.State, clock int64) (model.State, model.Decision) {
	if e.cost >= 0 {
		return p.Decide(s, clock, e.cost)
	}
	units := int64(math.MaxInt64)
	if e.count <= -(math.MaxInt64 / e.cost) {
		units = -e.count * e.cost
	}
	if e.refund == nil {
		return model.Grant(p, s, clock, min(units, model.MaxCredit))
	}
	k := e.refund[0]
	k.Units, k.Spent = units, min(max(k.Spent, 0), units)
	return p.Refund(s, clock, k)
}

// newStory makes up requests that hang together: few keys, one clock, and policies that change now and then. The
// error is a panic of the model.
func newStory(r *rand.Rand, steps int) ([]step, error) { return newStoryOf(r, steps, randomPolicy) }

// newStoryOf is newStory with policies drawn by a function.
func newStoryOf(r *rand.Rand, steps int, randomPolicy func(r *rand.Rand) ruled) (story []step, err error) {
	defer func() {
		if p := recover(); p != nil {
			err = fmt.Errorf("after %v: panic: %v\n%s", story, p, debug.Stack())
		}
	}()
	asModel := rows{false: {}, true: {}}
	policy := randomPolicy(r)
	clock := int64(1)<<50 + r.Int64N(1<<51)
	var goals []int64 // times at which something happens, of recent decisions
	takes := map[rowID][]model.Take{}

	for range steps {
		switch r.IntN(20) {
		case 0:
			policy = randomPolicy(r)
		case 1, 2:
			policy = changedPolicy(r, policy)
		}
		clock = nextClock(r, clock, policy, goals)
		s := step{policy: policy, durable: r.IntN(4) == 0, name: "a", clock: clock}
		if r.IntN(4) == 0 {
			s.name = "b"
		}
		s.brief = r.IntN(2) == 0
		ordinary := r.IntN(2) == 0 // takes alone
		s.skip = !ordinary && r.IntN(3) == 0
		several := 1 + r.IntN(8)
		if ordinary && r.IntN(2) == 0 {
			several = 1
		}
		for range several {
			cost := randomCost(r, policy.Numbers().Limit)
			if ordinary {
				cost = randomTake(r, policy.Numbers().Limit)
			}
			e := element{
				key:   [...]string{"x", "y", "Y", "ä", "x:1"}[r.IntN(5)],
				cost:  cost,
				count: randomCount(r, policy.Numbers().Limit, cost),
			}
			if !ordinary && (cost < 0 || r.IntN(6) == 0) && r.IntN(5) > 0 {
				e.cost, e.count, e.refund = randomRefund(r, policy, takes[rowID{s.name, e.key}], e.cost, e.count)
			}
			s.elements = append(s.elements, e)
		}
		if r.IntN(4) > 0 { // as the limiter sends them
			slices.SortStableFunc(s.elements, func(a, b element) int {
				return cmp.Or(len(b.key)-len(a.key), strings.Compare(a.key, b.key))
			})
		}
		story = append(story, s)
		asModel.decide(s)
		goals = goals[:0]
		for _, e := range s.elements {
			if e.decision.RetryAfter != model.Never {
				goals = append(goals, clock+e.decision.RetryAfter)
			}
			goals = append(goals, clock+e.decision.ResetAfter)
			if e.cost > 0 && e.decision.Granted > 0 {
				id := rowID{s.name, e.key}
				takes[id] = append(takes[id], e.decision.TakenBy(policy, e.cost, 1+r.Int64N(e.decision.Granted)))
			}
		}
	}
	return story, nil
}

// randomRefund is a refund: of all or part of something that was taken, whether it was given back already or not,
// or of what nobody has.
func randomRefund(r *rand.Rand, p ruled, takes []model.Take, cost, count int64) (int64, int64, []model.Take) {
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
	if r.IntN(2) == 0 { // of a lease
		k.Ended = k.Units + r.Int64N(3)
	}
	return -k.Units, 1, []model.Take{k}
}

func oneOf[T any](r *rand.Rand, all []T) T { return all[r.IntN(len(all))] }

// magnitude is a number from 1 to limit of any order of magnitude, and often the one or the other end.
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

func randomPolicy(r *rand.Rand) ruled {
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
	switch r.IntN(5) {
	case 0:
		return FixedWindow{Limit: limit, Window: model.Duration(window)}
	case 1:
		return SlidingWindow{Limit: limit, Window: model.Duration(window)}
	case 2:
		return SlidingLog{Limit: min(limit, model.MaxLogLimit), Window: model.Duration(window)}
	case 3:
		return CalendarWindow{Limit: limit, Unit: oneOf(r, calendarUnits()), Zone: oneOf(r, steadyZones())}
	}
	slowest := model.CeilDiv(limit*window, model.MaxSpan)
	refill := slowest + magnitude(r, math.MaxInt64-slowest)
	if r.IntN(2) == 0 {
		refill = slowest + r.Int64N(20)
	}
	return TokenBucket{Capacity: limit, Refill: refill, Every: model.Duration(window)}
}

// changedPolicy is what an operator might make of a policy: a little more or less of something, or the other kind
// of window.
func changedPolicy(r *rand.Rand, p ruled) ruled {
	vary := func(n int64) int64 {
		if r.IntN(2) == 0 {
			return n
		}
		return max(n/4*r.Int64N(8)+r.Int64N(8)-4, 1)
	}
	var changed ruled
	switch p := p.(type) {
	case FixedWindow:
		p.Limit, p.Window = vary(p.Limit), model.Duration(vary(model.Micros(p.Window))%(2*model.MaxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = SlidingWindow(p)
		}
	case SlidingWindow:
		p.Limit, p.Window = vary(p.Limit), model.Duration(vary(model.Micros(p.Window))%(2*model.MaxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = []ruled{FixedWindow(p), SlidingLog(p)}[r.IntN(2)]
		}
	case SlidingLog:
		p.Limit, p.Window = vary(p.Limit), model.Duration(vary(model.Micros(p.Window))%(2*model.MaxSpan))
		if changed = p; r.IntN(3) == 0 {
			changed = SlidingWindow(p)
		}
	case TokenBucket:
		p.Capacity, p.Refill, p.Every = vary(p.Capacity), vary(p.Refill), model.Duration(vary(model.Micros(p.Every))%(2*model.MaxSpan))
		changed = p
	case CalendarWindow:
		if p.Limit = vary(p.Limit); r.IntN(3) == 0 {
			p.Unit = oneOf(r, calendarUnits())
		}
		if r.IntN(3) == 0 {
			p.Zone = oneOf(r, steadyZones())
		}
		if changed = p; r.IntN(6) == 0 {
			changed = FixedWindow{p.Limit, model.Duration(p.spanMicros())}
		}
	}
	if changed.validate() != nil {
		return p
	}
	return changed
}

func randomCost(r *rand.Rand, limit int64) int64 {
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

// randomTake is a cost that may fit.
func randomTake(r *rand.Rand, limit int64) int64 {
	switch r.IntN(4) {
	case 0:
		return magnitude(r, limit)
	case 1:
		return 1 + r.Int64N(min(limit, 3))
	}
	return 1
}

func randomCount(r *rand.Rand, limit, cost int64) int64 {
	switch r.IntN(12) {
	case 0:
		return 1 + r.Int64N(1000)
	case 1:
		if cost == 0 || cost > 1<<51 ||
			cost < -1<<51 { // a model is no closed formula, and a key may hold credit of 2^61
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

// nextClock lets time stand still, go on, or jump, by any magnitude up to several windows; often to the very
// microsecond at which something is to happen, or to one beside it.
func nextClock(r *rand.Rand, clock int64, policy ruled, goals []int64) int64 {
	const first, last = 1, 1 << 55 // 1970, and the year 3111
	window := modeltest.Reach(policy)
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
