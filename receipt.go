package ratelimit

import (
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
)

// Receipt returns what the request took as a text of letters, digits, - and _, about 200 bytes. A worker that gets the
// work and its receipt can refund it in another process, with [Limiter.ParseReceipt]. From then on only the receipt
// gives back, and this Result does not.
//
// Use a receipt once: the database does not know which ones were used, so a copy gives back what others took. It
// contains the key, and is not signed. So give it to nobody who may not refund. Errors: as [Limiter.Refund].
func (r Result) Receipt() (string, error) {
	taken := r.taken.Own()
	for {
		left := taken.Left()
		if err := r.nothingLeft(left); err != nil {
			return "", err
		}
		text := receiptTextOf(taken, left)
		if taken.Swap(left, 0) {
			return text, nil
		}
	}
}

// ParseReceipt makes a Result of a [Result.Receipt], for Refund and RefundN. The limiter must have the Name and Durable
// of the one that took. Of the decision, the Result says Allowed only. Nothing is asked. Errors: a [*ReceiptError] for
// a text that is no receipt or was changed; a [*RefundError] for a receipt of another limiter.
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
	if t.Limiter != l.space.Name || t.Durable != l.space.Durable {
		return Result{}, &RefundError{Limiter: l.space.Name, TakenBy: t.Limiter}
	}
	return Result{Allowed: true, taken: engine.ClaimOf(l.space, policyModel(policy), t.Key, t.Units, t.Parts)}, nil
}

// makesSense says whether a take can have taken that. Anybody can write a receipt.
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

// receiptTextOf returns the text of a receipt for the units that are left.
func receiptTextOf(r *engine.Receipt, left int64) string {
	return receipttext.Receipt{
		Limiter: r.Space.Name, Durable: r.Space.Durable, Policy: policyFrom(r.Policy).String(), Key: r.Key, Units: left,
		Parts: r.Between(0, left),
	}.String()
}
