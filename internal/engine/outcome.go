package engine

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// By says who has decided.
type By uint8

// The possible deciders.
const (
	ByDatabase By = iota
	ByDenial      // a remembered denial
	ByLease
	ByFallback
)

// Outcome is a decision. The zero Outcome denies.
type Outcome struct {
	Allowed    bool // and its cost was taken; for a look: a cost of 1 would be
	By         By
	Limit      int64 // of the rules with the least Remaining
	Remaining  int64
	RetryAfter time.Duration
	ResetAfter time.Duration
	DecidedAt  time.Time
	Each       []Outcome // of each rule of an All; else nil
	Beside     *Outcome  // of the shadow, or nil
	Claim      Claim
}

// Outcome returns the outcome of a request of one limiter.
func (r *Request) Outcome() Outcome { return r.outcomeOf(0, len(r.Parts), r.Policy) }

// outcomeOf returns the outcome of the parts from first to before last. They belong to one limiter, with that policy.
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
	if p := &r.Parts[first]; p.Cost > 0 && r.place <= p.Decision.Granted {
		receipt := NewReceipt(p.Space, policy, p.Key, p.Cost)
		for i := range receipt.Parts {
			part := &r.Parts[first+i]
			receipt.Parts[i] = part.Decision.TakenBy(part.Rules, part.Cost, r.place)
		}
		o.Claim.Receipt = receipt
	}
	return o
}

// outcomeOfAll combines the outcomes of several rules, which take together or not at all.
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
	}
	return o
}

// Outcome returns what a part of merged requests tells the request at a place, from 1.
func (p *Part) Outcome(place int64) Outcome {
	d := &p.Decision
	o := Outcome{
		Limit:      p.Rules.Numbers().Limit,
		Remaining:  d.Remaining,
		ResetAfter: model.Duration(d.ResetAfter),
		DecidedAt:  d.DecidedAt,
	}
	switch {
	case place <= d.Granted:
		after := (d.Granted - place) * p.Cost // taken by the requests behind it
		o.Allowed = true
		o.Remaining += after
		o.ResetAfter = model.Duration(p.Rules.ResetAfter(*d, after))
	case d.RetryAfter == 0: // it looked, or only another part denies
		o.Allowed = true
	default:
		o.RetryAfter = model.Duration(d.RetryAfter)
	}
	return o
}

// add adds what this process holds of a key to the answer of the database.
func (o *Outcome) add(held int64) {
	o.Remaining += held
	if held > 0 {
		o.Allowed, o.RetryAfter = true, 0
	}
	for i := range o.Each {
		o.Each[i].add(held)
	}
}
