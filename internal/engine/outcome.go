package engine

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// By says who has decided.
type By uint8

// Who can have decided.
const (
	ByDatabase By = iota
	ByDenial      // that is remembered
	ByLease
	ByFallback
)

// Outcome is a decision. The zero Outcome denies.
type Outcome struct {
	Allowed    bool // and its cost taken; of a look: whether a cost of 1 would be
	By         By
	Limit      int64 // of the rules with the least left
	Remaining  int64
	RetryAfter time.Duration
	ResetAfter time.Duration
	DecidedAt  time.Time
	Each       []Outcome // what each of several rules says; else nil
	Beside     *Outcome  // of the policy that was decided beside it, or nil
	Claim      Claim
}

// Outcome is what the caller of a request of one limiter is told.
func (r *Request) Outcome() Outcome { return r.outcomeOf(0, len(r.Parts), r.Policy) }

// outcomeOf is what is told about the parts from first to before last. They belong to one limiter, with that policy.
func (r *Request) outcomeOf(first, last int, policy *model.Policy) Outcome {
	var o Outcome
	if last-first == 1 {
		o = r.Parts[first].Outcome(r.Place)
	} else {
		each := make([]Outcome, last-first)
		for i := range each {
			each[i] = r.Parts[first+i].Outcome(r.Place)
		}
		o = outcomeOfAll(each)
	}
	if p := &r.Parts[first]; p.Cost > 0 && r.Place <= p.Decision.Granted {
		receipt := NewReceipt(p.Space, policy, p.Key, p.Cost)
		for i := range receipt.Parts {
			part := &r.Parts[first+i]
			receipt.Parts[i] = part.Decision.TakenBy(part.Rules, part.Cost, r.Place)
		}
		o.Claim.Receipt = receipt
	}
	return o
}

// outcomeOfAll is the decision of rules that say that, none of which is allowed alone.
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

// Outcome is what the request at that place, from 1, is told about a part that several requests asked for as one.
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
		after := (d.Granted - place) * p.Cost // what the requests behind it have taken
		o.Allowed = true
		o.Remaining += after
		o.ResetAfter = model.Duration(p.Rules.ResetAfter(*d, after))
	case d.RetryAfter == 0: // it looked, or another part has refused
		o.Allowed = true
	default:
		o.RetryAfter = model.Duration(d.RetryAfter)
	}
	return o
}

// Add adds what this process holds of a key to what the database has told about it.
func (o *Outcome) Add(held int64) {
	o.Remaining += held
	if held > 0 {
		o.Allowed, o.RetryAfter = true, 0
	}
	for i := range o.Each {
		o.Each[i].Add(held)
	}
}
