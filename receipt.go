package ratelimit

import (
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/receipttext"
)

// Receipt returns a text of about 200 letters, digits, - and _ that says what the request took. Another process, such
// as a worker, can refund it with [Limiter.ParseReceipt]. After Receipt, this Result cannot be refunded.
//
// Use a receipt once. The database does not know used receipts: a second use gives back what others took. A receipt
// contains the key and is not signed, so give it only to those who may refund. Errors: those of [Limiter.Refund].
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

// ParseReceipt returns a Result for Refund and RefundN from a [Result.Receipt] of a limiter with the same Name and
// Durable. Only its field Allowed is set. Errors: a [*ReceiptError] for a text that is no receipt or was changed; a
// [*RefundError] for a receipt of another limiter.
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

// makesSense tells whether a request or a charge under policy can have taken what the receipt t says. Receipts may be
// forged.
func makesSense(t receipttext.Receipt, policy Policy) bool {
	rules := policy.rules()
	if checkKey(t.Key) != nil || len(t.Parts) != len(rules) || policyModel(policy).HasSlots {
		return false
	}
	for i, part := range t.Parts {
		most := rules[i].Numbers().Limit + model.MaxOwed(rules[i]) // of a charge
		if t.Units < 1 || t.Units-part.Spent > most ||
			part.Units != t.Units || part.Spent < 0 || part.Spent > min(t.Units, model.MaxCredit) || part.Ended != 0 {
			return false
		}
	}
	return true
}

// receiptTextOf returns the text of a receipt for the units of r that are left.
func receiptTextOf(r *engine.Receipt, left int64) string {
	return receipttext.Receipt{
		Limiter: r.Space.Name, Durable: r.Space.Durable, Policy: policyFrom(r.Policy).String(), Key: r.Key, Units: left,
		Parts: r.Between(0, left),
	}.String()
}
