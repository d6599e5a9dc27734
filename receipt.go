package ratelimit

import (
	"sync/atomic"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
)

// Receipt is what the request took, as text of letters, digits, - and _, for a refund in another process: by a worker,
// say, that is given the work and its receipt, and finds that it comes to nothing. There, [Limiter.ParseReceipt] makes
// a Result of it. For 3 units of "user:1" it has about 200 bytes.
//
// From then on only the receipt gives back, and this Result does not, as nobody would know which of them has. Use a
// receipt once: the database does not know which ones were used, so a copy gives back what others have taken since. The
// key stands in it, and it is not signed. So give it to nobody who may not refund. Errors: as [Limiter.Refund].
func (r Result) Receipt() (string, error) {
	taken := r.taken()
	for {
		left := taken.leftover()
		if err := taken.spent(left); err != nil {
			return "", err
		}
		text := taken.text(left)
		if taken.swap(left, 0) {
			return text, nil
		}
	}
}

// ParseReceipt makes a Result of a [Result.Receipt], for Refund and RefundN. A limiter with the same Name and Durable
// must have taken it. The Result says Allowed, and nothing else of the decision. Errors: a [*ReceiptError] for a text
// that is no receipt, or was changed; a [*RefundError] for one of another limiter. The database is not asked.
func (l *Limiter) ParseReceipt(text string) (Result, error) {
	t, ok := receipttext.Parse(text)
	if !ok {
		return Result{}, &ReceiptError{Reason: "it is cut off, changed, or something else"}
	}
	policy, err := ParsePolicy(t.Policy)
	if err != nil {
		return Result{}, &ReceiptError{Reason: "a newer release wrote it"}
	}
	if !makesSense(t, policy) {
		return Result{}, &ReceiptError{Reason: "it does not say what a take has taken"}
	}
	if t.Limiter != l.space.name || t.Durable != l.space.durable {
		return Result{}, &RefundError{Limiter: l.space.name, TakenBy: t.Limiter}
	}
	r := newReceipt(l.space, policy, t.Key, t.Units, len(t.Parts))
	copy(r.parts, t.Parts)
	return Result{Allowed: true, receipt: r}, nil
}

// makesSense tells whether a take can have taken that. Anybody can write a receipt.
func makesSense(t receipttext.Receipt, policy Policy) bool {
	rules := policy.rules()
	if checkKey(t.Key) != nil || len(t.Parts) != len(rules) {
		return false
	}
	for i, part := range t.Parts {
		if t.Units < 1 || t.Units > rules[i].Numbers().Limit ||
			part.Units != t.Units || part.Spent < 0 || part.Spent > t.Units || part.Ended != 0 {
			return false
		}
	}
	return true
}

// text is the receipt of the units that are left.
func (r *receipt) text(left int64) string {
	return receipttext.Receipt{
		Limiter: r.space.name, Durable: r.space.durable, Policy: r.policy.String(), Key: r.key, Units: left,
		Parts: r.between(0, left),
	}.String()
}

// receipt is what a Result remembers of a take.
type receipt struct {
	space  *keyspace
	policy Policy
	key    string
	left   atomic.Int64  // how many units are left to give back; these are the first ones
	parts  []model.Take  // one for each row
	one    [1]model.Take // the memory of parts if there is one part
	back   *givenBack    // of a lease, and of what was spent from it: what of the lease was given back; else nil
	first  int64         // of what was spent from a lease: its first unit there. left stays as it was
}

// fromJSON is the receipt of a Result that was read from JSON.
//
//nolint:gochecknoglobals // it never changes
var fromJSON = &receipt{}

// spent tells why nothing can be given back, if nothing is left.
func (r *receipt) spent(left int64) error {
	switch {
	case r == fromJSON:
		return ErrNoReceipt
	case left == 0:
		return ErrNothingToRefund
	}
	return nil
}

// taken is the receipt of this result alone, or nil if nothing was taken.
func (r *Result) taken() *receipt {
	if r.units == 0 {
		return r.receipt
	}
	spent := r.receipt.share(r.first, r.first+r.units)
	spent.back, spent.first = r.receipt.back, r.first
	return spent
}

// newReceipt returns a receipt of units whose parts are still to be set.
func newReceipt(space *keyspace, policy Policy, key string, units int64, parts int) *receipt {
	r := &receipt{space: space, policy: policy, key: key}
	r.left.Store(units)
	if r.parts = r.one[:]; parts != 1 {
		r.parts = make([]model.Take, parts)
	}
	return r
}

// leftover is how much is left to give back.
func (r *receipt) leftover() int64 {
	if r == nil {
		return 0
	}
	if r.back != nil {
		return r.back.leftover(r.first, r.left.Load())
	}
	return r.left.Load()
}

// swap changes how much is left to give back, if it is still what it was. It tells whether it was.
func (r *receipt) swap(was, left int64) bool {
	if r.back != nil {
		return r.back.swap(r.first, r.left.Load(), was, left)
	}
	return r.left.CompareAndSwap(was, left)
}

// between are the parts of the units from the from-th to the to-th.
func (r *receipt) between(from, to int64) []model.Take {
	parts := make([]model.Take, len(r.parts))
	for i, m := range r.policy.rules() {
		parts[i] = r.parts[i].Portion(m, from, to)
	}
	return parts
}

// share is the receipt of one caller, for whom the units from the from-th to the to-th were taken.
func (r *receipt) share(from, to int64) *receipt {
	if r == nil || from == to {
		return nil
	}
	s := newReceipt(r.space, r.policy, r.key, to-from, len(r.parts))
	copy(s.parts, r.between(from, to))
	return s
}
