package engine

import (
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Taken is what a decision has taken. The zero Taken is nothing. Copies share what was given back of it.
type Claim struct {
	Receipt *Receipt
	// Of the receipt of a lease, the units of this decision. units is 0 if the whole receipt is its own.
	First, units int64
}

// Receipt is what was taken, to be given back.
type Receipt struct {
	Space  *Space
	Policy *model.Policy
	Key    string
	left   atomic.Int64  // how many units are left to give back; these are the first ones
	Parts  []model.Take  // one for each row
	one    [1]model.Take // the memory of parts if there is one part
	Back   *GivenBack    // of a lease, and of what was spent from it: what of the lease was given back; else nil
	first  int64         // of what was spent from a lease: its first unit there. left stays as it was
}

// Own is the receipt of this decision alone, or nil if nothing was taken.
func (t Claim) Own() *Receipt {
	if t.units == 0 {
		return t.Receipt
	}
	spent := t.Receipt.portion(t.First, t.First+t.units)
	spent.Back, spent.first = t.Receipt.Back, t.First
	return spent
}

// Share is what one of several callers has taken, for whom the units from the from-th to the to-th were taken together.
func (t Claim) Portion(from, to int64) Claim { return Claim{Receipt: t.Own().portion(from, to)} }

// TakenOf is what a receipt tells that comes from elsewhere.
func ClaimOf(space *Space, policy *model.Policy, key string, units int64, parts []model.Take) Claim {
	r := NewReceipt(space, policy, key, units)
	copy(r.Parts, parts)
	return Claim{Receipt: r}
}

// NewReceipt returns a receipt of units whose parts are still to be set.
func NewReceipt(space *Space, policy *model.Policy, key string, units int64) *Receipt {
	r := &Receipt{Space: space, Policy: policy, Key: key}
	r.left.Store(units)
	if r.Parts = r.one[:]; len(policy.Rules) != 1 {
		r.Parts = make([]model.Take, len(policy.Rules))
	}
	return r
}

// Left is how much is left to give back.
func (r *Receipt) Left() int64 {
	if r == nil {
		return 0
	}
	if r.Back != nil {
		return r.Back.Leftover(r.first, r.left.Load())
	}
	return r.left.Load()
}

// Swap changes how much is left to give back, if it is still what it was. It tells whether it was.
func (r *Receipt) Swap(was, left int64) bool {
	if r.Back != nil {
		return r.Back.Swap(r.first, r.left.Load(), was, left)
	}
	return r.left.CompareAndSwap(was, left)
}

// Between are the parts of the units from the from-th to the to-th.
func (r *Receipt) Between(from, to int64) []model.Take {
	parts := make([]model.Take, len(r.Parts))
	for i, m := range r.Policy.Rules {
		parts[i] = r.Parts[i].Portion(m, from, to)
	}
	return parts
}

// share is the receipt of the units from the from-th to the to-th, as if they had been taken by themselves.
func (r *Receipt) portion(from, to int64) *Receipt {
	if r == nil || from == to {
		return nil
	}
	s := NewReceipt(r.Space, r.Policy, r.Key, to-from)
	copy(s.Parts, r.Between(from, to))
	return s
}
