package ratelimit

import (
	"context"
	"errors"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

// Refund gives back all that a request took that then came to nothing, and tells what remains. result is what Allow, AllowN,
// Wait or one of their twins has returned for it, or [AllowAll] in Results.Each: on this limiter, one that With has returned, or
// another one of the same name, table, schema and database.
//
// It gives back what of that take still counts, under the policy that took: of a [FixedWindow] while its window lasts, of a
// [SlidingWindow] during the next one too, of a [SlidingLog] while it is in the log. A [TokenBucket] gives back what has not
// flowed in again, and nothing once it was taken from under other numbers. What came out of credit, see [Limiter.Grant], goes
// back as credit, if the row has not expired since. [All] gives back to each of its policies. So, whatever is given back and
// when, what was admitted and never given back stays within the policy.
//
// Nothing is given back twice: what is left of result is lowered before the database is asked, and restored only if the refund
// surely did not count. The result of a refund says Allowed. A denial that this process remembers of the key is forgotten.
//
// A take whose transaction has rolled back is given back already, and must not be refunded.
//
// Errors: [ErrNothingToRefund]; a [*RefundError] for a result of another limiter; else as Allow.
func (l *Limiter) Refund(ctx context.Context, result Result) (Result, error) {
	return l.refund(ctx, result, result.receipt.leftover())
}

// RefundN is Refund of n of what the request took: of 1,000 that were reserved and 400 that were used, 600. What came out of credit
// goes back first.
//
// Errors: as Refund, and a [*CostError] for n below 1, or above what is left.
func (l *Limiter) RefundN(ctx context.Context, result Result, n int64) (Result, error) {
	return l.refund(ctx, result, n)
}

// RefundTx is Refund within the caller's transaction: what it gives back is kept if tx commits, and taken again if tx rolls
// back. Until then others who ask for the key wait, as after AllowTx.
//
// It does not lower what is left of result, because tx may roll back and be run again. So give back only once what commits.
func (l *Limiter) RefundTx(ctx context.Context, tx pgx.Tx, result Result) (Result, error) {
	return l.refundTx(ctx, tx, result, result.receipt.leftover())
}

// RefundNTx is RefundN within the caller's transaction; see RefundTx.
func (l *Limiter) RefundNTx(ctx context.Context, tx pgx.Tx, result Result, n int64) (Result, error) {
	return l.refundTx(ctx, tx, result, n)
}

// Grant gives key a credit of n above its limit, for support or for a purchase, say, and tells what remains, the credit
// included. It is taken from once there is no ordinary room, each unit of it once, and does not refill. It does not let a single
// request cost more than the limit. With [All], each of the policies has a credit of n.
//
// Credit lasts until it is spent, or until nothing was taken from the key or granted to it for a Window (of a [SlidingWindow]
// two, of a [TokenBucket] the time that it takes to fill): ResetAfter tells how long. It stays when the policy's numbers change,
// and is gone when another kind of policy is used for the key, or with Reset. A key holds up to 2^61; what is above that is lost.
// The result says Allowed.
//
// Errors: as Allow, and a [*CostError] for n below 1 or above 2^61.
func (l *Limiter) Grant(ctx context.Context, key string, n int64) (Result, error) {
	if err := l.validateGrant(key, n); err != nil {
		return Result{}, err
	}
	return l.give(ctx, key, n, nil)
}

// GrantTx is Grant within the caller's transaction: the credit is there if tx commits, and is not if tx rolls back. Until then
// others who ask for the key wait, as after AllowTx.
func (l *Limiter) GrantTx(ctx context.Context, tx pgx.Tx, key string, n int64) (Result, error) {
	if err := l.validateGrant(key, n); err != nil {
		return Result{}, err
	}
	return l.giveTx(ctx, tx, key, n, nil)
}

// take is what a request has taken from a row, and what tells the row that.
type take struct {
	units int64
	spent int64 // of these, what came out of granted credit: the last ones
	since int64 // the row's since
	in    int64 // the row's windowStart: the start of the window, the time of the log's entry, or the time in the bucket's life
	at    int64 // bucket: where in the queue it ends, see TokenBucket.refund, and what was returned before it, in units of 1/scale token
}

// part is what the units from the from-th to the to-th have taken.
func (k take) part(p Policy, from, to int64) take {
	ordinary := k.units - k.spent
	if bucket, ok := p.(TokenBucket); ok {
		k.at -= (ordinary - min(to, ordinary)) * micros(bucket.Every)
	}
	k.units, k.spent = to-from, max(to-max(from, ordinary), 0)
	return k
}

// afterRefund is the decision of a refund that has found the row stored and has made it this, if it has changed it.
func afterRefund(p Policy, stored, row state, clock int64, changed bool) (state, decision) {
	if !changed {
		row = stored
	}
	_, d := p.decide(row, clock, 0)
	d.granted, d.retryAfter, d.state.log = 1, 0, ""
	if !changed {
		return stored, d
	}
	d.state.expiresAt = clock + d.resetAfter
	next := d.state
	next.log = row.log
	return next, d
}

// receipt is what a Result remembers of a take.
type receipt struct {
	by    *Limiter
	key   string
	left  atomic.Int64 // the first so many units were not given back
	parts []take       // one for each policy
	one   [1]take      // parts, of one
}

// newReceipt is the receipt of units by a limiter whose parts are still to be set.
func newReceipt(by *Limiter, key string, units int64, parts int) *receipt {
	r := &receipt{by: by, key: key}
	r.left.Store(units)
	if r.parts = r.one[:]; parts != 1 {
		r.parts = make([]take, parts)
	}
	return r
}

// policies are those of the limiter.
func (l *Limiter) policies() []Policy {
	if several, ok := l.policy.(all); ok {
		return several.policies()
	}
	return []Policy{l.policy}
}

// leftover is how much is left to give back.
func (r *receipt) leftover() int64 {
	if r == nil {
		return 0
	}
	return r.left.Load()
}

// between are the parts of the units from the from-th to the to-th.
func (r *receipt) between(from, to int64) []take {
	parts := make([]take, len(r.parts))
	for i, p := range r.by.policies() {
		parts[i] = r.parts[i].part(p, from, to)
	}
	return parts
}

// share is the receipt of somebody for whom the units from the from-th to the to-th were taken.
func (r *receipt) share(from, to int64) *receipt {
	if r == nil || from == to {
		return nil
	}
	s := newReceipt(r.by, r.key, to-from, len(r.parts))
	copy(s.parts, r.between(from, to))
	return s
}

// refundable returns the limiter, of the policy that took, that gives back n of what is left.
func (l *Limiter) refundable(r *receipt, n, left int64) (*Limiter, error) {
	switch {
	case left == 0:
		return nil, ErrNothingToRefund
	case n < 1 || n > left:
		return nil, &CostError{Cost: n, Limit: left, Least: 1, refund: true}
	case l.core == r.by.core:
		return r.by, nil
	}
	mine, other := l.config, r.by.config
	if mine.Name != other.Name || mine.Durable != other.Durable || mine.Schema != other.Schema || l.db != r.by.db {
		return nil, &RefundError{Limiter: mine.Name, TakenBy: other.Name}
	}
	return l.With(r.by.policy)
}

func (l *Limiter) refund(ctx context.Context, result Result, n int64) (Result, error) {
	r := result.receipt
	left := r.leftover()
	by, err := l.refundable(r, n, left)
	if err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, waitError(err)
	}
	for !r.left.CompareAndSwap(left, left-n) { // somebody else gives back of it too
		if left = r.leftover(); left < n {
			return l.refund(ctx, result, n)
		}
	}
	result, err = by.give(ctx, r.key, n, r.between(left-n, left))
	if store, ok := errors.AsType[*StoreError](err); ok && !errors.Is(store, ErrOutcomeUnknown) {
		// It was surely not given back. What was before it may have been in the meantime: then this is lost, because which
		// units they are matters.
		r.left.CompareAndSwap(left-n, left)
	}
	return result, err
}

func (l *Limiter) refundTx(ctx context.Context, tx pgx.Tx, result Result, n int64) (Result, error) {
	r := result.receipt
	left := r.leftover()
	by, err := l.refundable(r, n, left)
	if err != nil {
		return Result{}, err
	}
	return by.giveTx(ctx, tx, r.key, n, r.between(left-n, left))
}

// give gives back n of what parts say, or grants n if there are none.
func (l *Limiter) give(ctx context.Context, key string, n int64, parts []take) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, waitError(err)
	}
	defer l.wakeUp(key) // who waits for it may fit now
	if l.breaker == nil {
		return l.askDatabase(ctx, key, -n, parts, false)
	}
	pass, probe := l.breaker.pass()
	if !pass {
		return Result{}, errNotTried
	}
	return l.askDatabase(ctx, key, -n, parts, probe)
}

func (l *Limiter) giveTx(ctx context.Context, tx pgx.Tx, key string, n int64, parts []take) (Result, error) {
	return l.allowOne(ctx, tx, key, -n, parts, settings{})
}

func (l *Limiter) validateGrant(key string, n int64) error {
	if err := validateKey(key); err != nil {
		return err
	}
	if n < 1 || n > maxCredit {
		return &CostError{Cost: n, Limit: maxCredit, Least: 1}
	}
	return nil
}
