package engine

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Claim describes the units of a receipt that belong to one decision. The zero Claim has no units. Copies of a Claim
// share the receipt, so a unit can be given back only once.
type Claim struct {
	Receipt *Receipt
	// first and units select units of a lease's receipt. If the field units is 0, the claim has the whole receipt.
	first, units int64
}

// Receipt describes taken units, so that a refund can give them back.
type Receipt struct {
	Space  *Space
	Policy *model.Policy
	Key    string
	left   atomic.Int64  // how many units are not given back; the first units remain longest
	Parts  []model.Take  // a take for each row
	one    [1]model.Take // memory for a single element of Parts
	Back   *GivenBack    // for receipts of leases and of units spent from leases; otherwise nil
	first  int64         // the position of the first unit within the lease; if Back is set, left never changes
}

// Own returns a receipt for the units of this claim alone. It returns nil if nothing was taken.
func (t Claim) Own() *Receipt {
	if t.units == 0 {
		return t.Receipt
	}
	spent := t.Receipt.portion(t.first, t.first+t.units)
	spent.Back, spent.first = t.Receipt.Back, t.first
	return spent
}

// Portion returns a claim to the units in the range [from, to), if units were taken for several callers together.
func (t Claim) Portion(from, to int64) Claim { return Claim{Receipt: t.Own().portion(from, to)} }

// ClaimOf returns the claim to a receipt that comes from another process.
func ClaimOf(space *Space, policy *model.Policy, key string, units int64, parts []model.Take) Claim {
	r := NewReceipt(space, policy, key, units)
	copy(r.Parts, parts)
	return Claim{Receipt: r}
}

// NewReceipt returns a receipt for a number of units. The caller still has to set Parts.
func NewReceipt(space *Space, policy *model.Policy, key string, units int64) *Receipt {
	r := &Receipt{Space: space, Policy: policy, Key: key}
	r.left.Store(units)
	if r.Parts = r.one[:]; len(policy.Rules) != 1 {
		r.Parts = make([]model.Take, len(policy.Rules))
	}
	return r
}

// Left returns how many units are not given back yet.
func (r *Receipt) Left() int64 {
	if r == nil {
		return 0
	}
	if r.Back != nil {
		return r.Back.Leftover(r.first, r.left.Load())
	}
	return r.left.Load()
}

// Swap sets the number of units that are not given back to the argument left. It does nothing and returns false if the
// number is not the argument was.
func (r *Receipt) Swap(was, left int64) bool {
	if r.Back != nil {
		return r.Back.Swap(r.first, r.left.Load(), was, left)
	}
	return r.left.CompareAndSwap(was, left)
}

// Between returns the takes of the units in the range [from, to), one for each row.
func (r *Receipt) Between(from, to int64) []model.Take {
	parts := make([]model.Take, len(r.Parts))
	for i, m := range r.Policy.Rules {
		parts[i] = r.Parts[i].Portion(m, from, to)
	}
	return parts
}

// portion returns a receipt for the units in the range [from, to). The result is as if only these units had been taken.
func (r *Receipt) portion(from, to int64) *Receipt {
	if r == nil || from == to {
		return nil
	}
	s := NewReceipt(r.Space, r.Policy, r.Key, to-from)
	copy(s.Parts, r.Between(from, to))
	return s
}

// GivenBack records which spent units of a lease were given back, so that no unit is given back twice. Adjacent units
// are one range. A range takes 16 bytes, so GivenBack is small if all units are given back.
type GivenBack struct {
	mu     sync.Mutex
	Ranges []unitRange // ascending, with gaps between them
}

// unitRange stands for the units in the range [From, To).
type unitRange struct{ From, To int64 }

// Leftover returns how many of the units in the range [first, first+units) are not given back. A refund always gives
// back the last units first.
func (g *GivenBack) Leftover(first, units int64) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.left(first, units)
}

// left returns the result of Leftover. The caller holds g.mu.
func (g *GivenBack) left(first, units int64) int64 {
	if i := g.find(first + units); i < len(g.Ranges) && g.Ranges[i].From < first+units {
		return max(g.Ranges[i].From-first, 0)
	}
	return units
}

// find returns the index of the first range that ends at the position unit or later. The caller holds g.mu.
func (g *GivenBack) find(unit int64) int {
	i, _ := slices.BinarySearchFunc(g.Ranges, unit, func(r unitRange, unit int64) int {
		return cmp.Compare(r.To, unit)
	})
	return i
}

// Swap sets Leftover(first, units) to the argument left. It does nothing and returns false if Leftover is not the
// argument was.
func (g *GivenBack) Swap(first, units, was, left int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left(first, units) != was {
		return false
	}
	from, to := first+min(was, left), first+max(was, left)
	i := g.find(from)
	if left > was { // a refund has failed, so its units are not given back
		r := g.Ranges[i]
		rests := []unitRange{{r.From, from}, {to, r.To}}
		rests = slices.DeleteFunc(rests, func(r unitRange) bool { return r.From == r.To })
		g.Ranges = slices.Replace(g.Ranges, i, i+1, rests...)
		return true
	}
	merged, end := unitRange{from, to}, i
	for ; end < len(g.Ranges) && g.Ranges[end].From <= to; end++ {
		merged = unitRange{min(merged.From, g.Ranges[end].From), max(merged.To, g.Ranges[end].To)}
	}
	g.Ranges = slices.Replace(g.Ranges, i, end, merged)
	return true
}
