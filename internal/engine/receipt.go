package engine

import (
	"cmp"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Claim is the units of a receipt that one decision may give back. The zero Claim has none. Copies share the receipt,
// and so what was given back of it.
type Claim struct {
	Receipt *Receipt
	// The units within the receipt of a lease. If units is 0, the claim is to the whole receipt.
	first, units int64
}

// Receipt says what was taken, so that it can be given back.
type Receipt struct {
	Space  *Space
	Policy *model.Policy
	Key    string
	left   atomic.Int64  // how many units are left to give back; these are the first ones
	Parts  []model.Take  // a take for each row
	one    [1]model.Take // memory for Parts, if there is one
	Back   *GivenBack    // of a lease, and of receipts for units spent from it; else nil
	first  int64         // of units spent from a lease: the first of them there; left does not change then
}

// Own returns a receipt of this decision alone, or nil if nothing was taken.
func (t Claim) Own() *Receipt {
	if t.units == 0 {
		return t.Receipt
	}
	spent := t.Receipt.portion(t.first, t.first+t.units)
	spent.Back, spent.first = t.Receipt.Back, t.first
	return spent
}

// Portion returns one caller's claim, if units were taken for several callers together: the units from from to before
// to.
func (t Claim) Portion(from, to int64) Claim { return Claim{Receipt: t.Own().portion(from, to)} }

// ClaimOf returns the claim of a receipt that comes from another process.
func ClaimOf(space *Space, policy *model.Policy, key string, units int64, parts []model.Take) Claim {
	r := NewReceipt(space, policy, key, units)
	copy(r.Parts, parts)
	return Claim{Receipt: r}
}

// NewReceipt returns a receipt of units. Its Parts are still to be set.
func NewReceipt(space *Space, policy *model.Policy, key string, units int64) *Receipt {
	r := &Receipt{Space: space, Policy: policy, Key: key}
	r.left.Store(units)
	if r.Parts = r.one[:]; len(policy.Rules) != 1 {
		r.Parts = make([]model.Take, len(policy.Rules))
	}
	return r
}

// Left returns how many units are left to give back.
func (r *Receipt) Left() int64 {
	if r == nil {
		return 0
	}
	if r.Back != nil {
		return r.Back.Leftover(r.first, r.left.Load())
	}
	return r.left.Load()
}

// Swap changes how many units are left to give back, if there are still as many as was. It tells whether it did.
func (r *Receipt) Swap(was, left int64) bool {
	if r.Back != nil {
		return r.Back.Swap(r.first, r.left.Load(), was, left)
	}
	return r.left.CompareAndSwap(was, left)
}

// Between returns the takes of the units from from to before to.
func (r *Receipt) Between(from, to int64) []model.Take {
	parts := make([]model.Take, len(r.Parts))
	for i, m := range r.Policy.Rules {
		parts[i] = r.Parts[i].Portion(m, from, to)
	}
	return parts
}

// portion returns a receipt of the units from from to before to, as if they had been taken alone.
func (r *Receipt) portion(from, to int64) *Receipt {
	if r == nil || from == to {
		return nil
	}
	s := NewReceipt(r.Space, r.Policy, r.Key, to-from)
	copy(s.Parts, r.Between(from, to))
	return s
}

// GivenBack is the units of a lease that were given back after they had been spent, so that nobody gives one back
// twice. Adjacent units are one range. So it takes 16 bytes for each gap, and little if all is given back.
type GivenBack struct {
	mu     sync.Mutex
	Ranges []unitRange // ascending, with gaps between them
}

// unitRange is the units from From to before To.
type unitRange struct{ From, To int64 }

// Leftover returns how many of so many units, from first on, are left to give back. The last of them are given back
// first.
func (g *GivenBack) Leftover(first, units int64) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.left(first, units)
}

// left is Leftover. The caller holds g.mu.
func (g *GivenBack) left(first, units int64) int64 {
	if i := g.find(first + units); i < len(g.Ranges) && g.Ranges[i].From < first+units {
		return max(g.Ranges[i].From-first, 0)
	}
	return units
}

// find returns the index of the first range that ends at a unit or later. The caller holds g.mu.
func (g *GivenBack) find(unit int64) int {
	i, _ := slices.BinarySearchFunc(g.Ranges, unit, func(r unitRange, unit int64) int {
		return cmp.Compare(r.To, unit)
	})
	return i
}

// Swap changes how many of the units from first on are left, if there are still as many as was. It tells whether it
// did.
func (g *GivenBack) Swap(first, units, was, left int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left(first, units) != was {
		return false
	}
	from, to := first+min(was, left), first+max(was, left)
	i := g.find(from)
	if left > was { // the refund has failed, so these units leave their range
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
