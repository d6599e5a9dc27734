package engine

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// By says what has decided a request: the database, or one of its substitutes in this process.
type By uint8

// The possible values of By.
const (
	ByDatabase By = iota
	ByDenial      // a denial that this process remembers
	ByLease
	ByFallback
)

// Outcome is a decision. The zero Outcome denies.
type Outcome struct {
	Allowed    bool // for a look: a cost of 1 would be allowed
	By         By
	Limit      int64 // the limit of the rules with the smallest Remaining
	Remaining  int64
	RetryAfter time.Duration
	ResetAfter time.Duration
	Held       int64 // the units of live holds; only for a look and for a request that makes a hold
	DecidedAt  time.Time
	Each       []Outcome // an outcome for each rule of an All; otherwise nil
	Beside     *Outcome  // the outcome of the shadow policy, or nil
	Claim      Claim
}

// Outcome returns the decision of a request. The request must not be a set of AllowAll.
func (r *Request) Outcome() Outcome { return r.outcomeOf(0, len(r.Parts), r.Policy) }

// outcomeOf returns the decision of the parts in the range [first, last). All parts in the range must belong to one
// limiter with the given policy.
func (r *Request) outcomeOf(first, last int, policy *model.Policy) Outcome {
	var o Outcome
	if last-first == 1 {
		o = r.Parts[first].Outcome(r.place)
	} else {
		each := make([]Outcome, last-first)
		for i := range each {
			each[i] = r.Parts[first+i].Outcome(r.place)
		}
		o = outcomeOfAll(each)
	}
	if p := &r.Parts[first]; p.Cost > 0 && p.Hold == "" && p.Slot == "" && r.place <= p.Decision.Granted {
		receipt := NewReceipt(p.Space, policy, p.Key, p.Cost)
		for i := range receipt.Parts {
			part := &r.Parts[first+i]
			receipt.Parts[i] = part.Decision.TakenBy(part.Rules, part.Cost, r.place)
		}
		o.Claim.Receipt = receipt
	}
	return o
}

// outcomeOfAll combines the outcomes of several rules. The result is allowed if all rules allow it.
func outcomeOfAll(each []Outcome) Outcome {
	o := each[0]
	o.Each = each
	for _, one := range each[1:] {
		if one.Remaining < o.Remaining {
			o.Limit, o.Remaining = one.Limit, one.Remaining
		}
		o.Allowed = o.Allowed && one.Allowed
		o.RetryAfter = max(o.RetryAfter, one.RetryAfter)
		o.ResetAfter = max(o.ResetAfter, one.ResetAfter)
		o.Held = max(o.Held, one.Held)
	}
	return o
}

// Outcome returns the decision of a part for one of several merged requests. The argument place is the request's
// position among the merged requests, from 1.
func (p *Part) Outcome(place int64) Outcome {
	d := &p.Decision
	o := Outcome{
		Limit:      p.Rules.Numbers().Limit,
		Remaining:  d.Remaining,
		ResetAfter: model.Duration(d.ResetAfter),
		DecidedAt:  d.DecidedAt,
	}
	if p.Cost == 0 || p.Hold != "" || p.Slot != "" {
		o.Held = d.Held
	}
	switch {
	case place <= d.Granted:
		after := (d.Granted - place) * p.Cost // units that the merged requests behind place have taken
		o.Allowed = true
		o.Remaining += after
		o.ResetAfter = model.Duration(p.Rules.ResetAfter(*d, after))
	case d.RetryAfter == 0: // the request looks, or another part denies it
		o.Allowed = true
	default:
		o.RetryAfter = model.Duration(d.RetryAfter)
	}
	return o
}

// add adds the units that this process can spend from a lease to the answer of the database.
func (o *Outcome) add(held int64) {
	o.Remaining += held
	if held > 0 {
		o.Allowed, o.RetryAfter = true, 0
	}
	for i := range o.Each {
		o.Each[i].add(held)
	}
}
