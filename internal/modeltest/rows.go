package modeltest

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// RowID identifies a row within its table.
type RowID struct{ Name, Key string }

// Row is a row of rate_limit_durable or rate_limit_ephemeral.
type Row struct {
	Algorithm int16
	model.State
}

// Rows is the model of both tables. Rows[true] is rate_limit_durable, and Rows[false] is rate_limit_ephemeral.
type Rows map[bool]map[RowID]Row

// NewRows returns the model of empty tables.
func NewRows() Rows { return Rows{false: {}, true: {}} }

// Element asks for one key in a statement: it is Count requests of the same cost.
type Element struct {
	Key         string
	Cost, Count int64
	Charge      bool         // for a positive cost: it is a charge of Count × Cost
	Delay       *int64       // it is a reservation that may be ready so much later; otherwise nil
	Refund      []model.Take // for a negative cost; nil means a grant
	Decision    model.Decision
}

// Step is one call of a function in the database.
type Step struct {
	Policy   model.Rules
	Durable  bool
	Name     string // short, so that a test can add a prefix
	Clock    int64
	Skip     bool      // the function skips locked rows
	Brief    bool      // leave out costs and counts if all are 1
	Elements []Element // with the model's decisions
}

func (s Step) String() string {
	var elements strings.Builder
	for _, e := range s.Elements {
		fmt.Fprintf(&elements, " {key: %q, cost: %d, count: %d, charge: %v, refund: %+v}",
			e.Key, e.Cost, e.Count, e.Charge, e.Refund)
	}
	return fmt.Sprintf("at %d, %q, durable %v, %#v, skip %v, brief %v:%s",
		s.Clock, s.Name, s.Durable, s.Policy, s.Skip, s.Brief, elements.String())
}

// Part is one part of a request to rate_limit_all, with the model's decision.
type Part struct {
	ID       RowID
	Durable  bool
	Policy   model.Rules
	Cost     int64
	Refund   []model.Take // the takes that a negative cost gives back; nil means a grant
	Decision model.Decision
}

// Request takes from all of its parts or from none, Count times.
type Request struct {
	Parts  []Part
	Count  int64
	Ahead  int64  // how many of the Count requests a lease holds to spend later
	Charge bool   // it charges Count × Cost
	Delay  *int64 // it is a reservation that may be ready so much later; otherwise nil
	moved  bool   // the denial writes a row, because the clock has jumped back behind the row
}

// State returns the row of a part, or the zero state if the row belongs to another algorithm.
func (m Rows) State(p Part) model.State {
	if row := m[p.Durable][p.ID]; row.Algorithm == p.Policy.Numbers().Algorithm {
		return row.State
	}
	return model.State{}
}

func (m Rows) has(p Part) bool {
	_, ok := m[p.Durable][p.ID]
	return ok
}

func (m Rows) clone() Rows { return Rows{false: maps.Clone(m[false]), true: maps.Clone(m[true])} }

// Decide sets the Decision of each element of a step. An element is decided as Count requests, one after another.
func (m Rows) Decide(s Step) {
	for i := range s.Elements {
		e := &s.Elements[i]
		id := RowID{s.Name, e.Key}
		var current model.State // zero for a missing row and for a row of another algorithm
		if row := m[s.Durable][id]; row.Algorithm == s.Policy.Numbers().Algorithm {
			current = row.State
		}

		var granted int64
		var last model.Decision
		credit := CreditOf(s.Policy, current, s.Clock)
		requests := e.Count
		if e.Cost < 0 || e.Charge {
			requests = 1 // a refund, a grant or a charge is one request
		}
		for asked := int64(0); asked < requests; asked++ {
			next, d := e.Decide(s.Policy, current, s.Clock)
			granted += d.Granted
			last = d
			if next == current { // all further requests get the same decision
				break
			}
			current = next
			m[s.Durable][id] = Row{s.Policy.Numbers().Algorithm, current}
		}
		if last.Granted = granted; requests == 1 {
			last.Granted *= e.Count
		}
		last.DecidedAt = time.UnixMicro(s.Clock).UTC()
		last.State = Told(last.State)
		last.Taken.Units, last.Taken.Spent = 0, 0
		if e.Cost > 0 {
			last.Taken.Spent = credit - CreditOf(s.Policy, current, s.Clock)
		}
		e.Decision = last
	}
}

// Decide returns the model's decision of one request of the element, or of the element's whole refund, grant or charge.
func (e Element) Decide(p model.Rules, s model.State, clock int64) (model.State, model.Decision) {
	if bucket, ok := p.(model.TokenBucket); ok && e.Delay != nil {
		next, d, readyAfter := model.Key{State: s}.Reserve(bucket, clock, e.Cost, *e.Delay)
		if d.Granted == 1 {
			d.RetryAfter = readyAfter
		}
		return next.State, d
	}
	if e.Cost == 0 || e.Cost > 0 && !e.Charge {
		return p.Decide(s, clock, e.Cost)
	}
	units := int64(math.MaxInt64)
	if e.Cost > 0 && e.Count <= math.MaxInt64/e.Cost {
		units = e.Count * e.Cost
	}
	if e.Cost < 0 && e.Count <= -(math.MaxInt64/e.Cost) {
		units = -e.Count * e.Cost
	}
	if e.Charge {
		next, d, _ := model.Charge(p, s, clock, units)
		_, after := p.Decide(next, clock, 0)
		d.RetryAfter = after.RetryAfter // the functions say when a cost of 1 fits after the charge
		return next, d
	}
	if e.Refund == nil {
		return model.Grant(p, s, clock, min(units, model.MaxCredit))
	}
	k := e.Refund[0]
	k.Units, k.Spent = units, min(max(k.Spent, 0), units)
	return p.Refund(s, clock, k)
}

// DecideAll sets the Decision of each part in a statement. If rows are missing, rate_limit_all first decides without
// them. A request that is denied at that point stays denied, and a refund without any row gives nothing back.
// rate_limit_all creates rows for the other requests, and decides them. A denied request is decided again if it shares
// a row with an earlier request that got its rows.
func (m Rows) DecideAll(requests []Request, clock int64) {
	lacks := slices.ContainsFunc(requests, func(r Request) bool {
		return slices.ContainsFunc(r.Parts, func(p Part) bool {
			return p.Cost != 0 && !m.has(p)
		})
	})
	seen := m.clone()
	changes := map[bool]map[RowID]bool{false: {}, true: {}}
	for i := range requests {
		r := &requests[i]
		if lacks {
			seen.clone().decideRequest(r, clock)
			givesBack := r.Parts[0].Refund != nil
			refused := r.Parts[0].Decision.Granted == 0 && !r.moved ||
				givesBack && !slices.ContainsFunc(r.Parts, seen.has)
			if len(r.Parts) == 1 && !r.Charge &&
				1 <= r.Parts[0].Cost && r.Parts[0].Cost <= r.Parts[0].Policy.Numbers().Limit {
				refused = false // such a request gets a row only if it takes
			}
			if refused && !slices.ContainsFunc(r.Parts, func(p Part) bool { return changes[p.Durable][p.ID] }) {
				continue
			}
			for _, p := range r.Parts {
				changes[p.Durable][p.ID] = true
				if !m.has(p) {
					m[p.Durable][p.ID] = Row{}
				}
			}
		}
		m.decideRequest(r, clock)
	}
}

func (m Rows) decideRequest(r *Request, clock int64) {
	requests := r.Count
	if r.Parts[0].Cost < 0 || r.Charge {
		requests = 1 // a refund, a grant or a charge is one request
	}
	decide := func(p Part, cost int64) (model.State, model.Decision) {
		e := Element{Cost: cost, Count: r.Count, Charge: r.Charge && cost > 0, Refund: p.Refund}
		if cost > 0 {
			e.Delay = r.Delay
		}
		return e.Decide(p.Policy, m.State(p), clock)
	}
	fits := func() bool {
		for _, p := range r.Parts {
			if _, d := decide(p, p.Cost); d.Granted == 0 {
				return false
			}
		}
		return true
	}
	before := make([]model.State, len(r.Parts))
	for i, p := range r.Parts {
		before[i] = m.State(p)
	}
	granted, ready := int64(0), make([]int64, len(r.Parts)) // ready: for a reservation, when each part is ready
	for ; granted < requests && fits(); granted++ {
		for i, p := range r.Parts {
			next, d := decide(p, p.Cost)
			if ready[i] = d.RetryAfter; next != m.State(p) { // equal if there was nothing to give back
				m[p.Durable][p.ID] = Row{p.Policy.Numbers().Algorithm, next}
			}
		}
	}
	if requests < r.Count {
		granted *= r.Count
	}
	for i := range r.Parts {
		p := &r.Parts[i]
		current := m.State(*p)
		credit := CreditOf(p.Policy, before[i], clock)
		_, p.Decision = decide(*p, 0)
		next, asked := current, model.Decision{Granted: 1}
		if granted < r.Count && !r.Charge {
			next, asked = decide(*p, p.Cost)
		}
		if p.Decision.Granted = granted; !r.Charge { // after a charge it is the RetryAfter of a Peek
			p.Decision.RetryAfter = 0
		}
		if granted == 1 && r.Delay != nil {
			p.Decision.RetryAfter = ready[i]
		}
		if p.Cost > 0 {
			p.Decision.Taken.Spent = credit - CreditOf(p.Policy, current, clock)
		}
		log := model.NewEntries(nil) // the entries that determine RetryAfter
		if granted < r.Count && asked.Granted == 0 {
			p.Decision.RetryAfter, log = asked.RetryAfter, asked.State.Log // this part denies
			if next != current {
				m[p.Durable][p.ID] = Row{p.Policy.Numbers().Algorithm, next}
				p.Decision.State = next
				r.moved = true
			}
		}
		if bucket, ok := p.Policy.(model.TokenBucket); ok && r.Ahead > 0 {
			log = before[i].Log
			if ahead := granted - (r.Count - r.Ahead); ahead > 0 {
				m[p.Durable][p.ID] = Row{bucket.Numbers().Algorithm, bucket.Lend(m.State(*p), ahead*p.Cost)}
			}
		}
		p.Decision.State.Log = log
		p.Decision.DecidedAt = time.UnixMicro(clock).UTC()
	}
}
