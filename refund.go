package ratelimit

import (
	"context"
	"errors"
)

// Refund gives back all that a request took, because it came to nothing, and tells what remains. Its result says
// Allowed. Pass what Allow, AllowN, Wait or a twin of theirs has returned, or one of [Results].Each, from this
// limiter, from one that With has returned, or from one of the same name, table and schema on the same pool or
// connection.
//
// It gives back what still counts under the policy that took: of a [FixedWindow] or [CalendarWindow] while its
// window lasts, of a [SlidingWindow] during the next one too, of a [SlidingLog] while it is in the log, of a
// [TokenBucket] what has not flowed in again, of [All] in each of its policies. Credit ([Limiter.Grant]) goes back
// as credit, unless the row has expired. After takes under other numbers of a TokenBucket, or other windows of a
// SlidingWindow, nothing may be left to give back. Nothing else of the key changes. So what was admitted and never
// given back stays within the policy.
//
// Nothing is given back twice: the result is used up before the database is asked, and restored only if the refund
// surely did not count. Do not refund a take whose transaction has rolled back, which is given back already.
// For a refund in another process, see [Result.Receipt]. Errors: [ErrNothingToRefund]; [ErrNoReceipt]; a [*RefundError]
// for a result of another limiter; else as Allow.
func (l *Limiter) Refund(ctx context.Context, result Result) (Result, error) {
	return l.refund(ctx, result, result.taken().leftover())
}

// RefundN is Refund of n of what the request took: 600 if 1,000 were reserved and 400 used. What came out of
// credit goes back first. Errors: as Refund, and a [*CostError] for n below 1 or above what is left.
func (l *Limiter) RefundN(ctx context.Context, result Result, n int64) (Result, error) {
	return l.refund(ctx, result, n)
}

func (l *Limiter) refund(ctx context.Context, result Result, n int64) (Result, error) {
	r := result.taken()
	left := r.leftover()
	if err := l.checkRefund(r, n, left); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, gaveUp(err)
	}
	for !r.swap(left, left-n) { // somebody else gives back of it at the same time
		if left = r.leftover(); left < n {
			return l.refund(ctx, result, n)
		}
	}
	result, err := l.give(ctx, l.refundRequest(r, left-n, left))
	if store, ok := errors.AsType[*StoreError](err); ok && !errors.Is(store, ErrOutcomeUnknown) {
		// It was surely not given back, so it can be again. If units before these were given back in the
		// meantime, these are lost, because it matters which units they are.
		r.swap(left-n, left)
	}
	return result, err
}

// checkRefund tells why this limiter cannot give back n of what is left.
func (l *Limiter) checkRefund(r *receipt, n, left int64) error {
	if err := r.spent(left); err != nil {
		return err
	}
	switch {
	case n < 1 || n > left:
		return &CostError{Cost: n, Limit: left, Least: 1, refund: true}
	case l.space == r.space:
		return nil
	}
	mine, other := l.space, r.space
	if mine.name != other.name || mine.durable != other.durable || mine.database.schema != other.database.schema ||
		mine.database.db != other.database.db {
		return &RefundError{Limiter: mine.name, TakenBy: other.name}
	}
	return nil
}

// refundRequest gives back the units from the from-th to the to-th, under the policy that took.
func (l *Limiter) refundRequest(r *receipt, from, to int64) *request {
	request := l.client.requests.get(l.space, r.policy)
	request.add(l.space, r.policy.rules(), r.key, from-to, r.between(from, to))
	return request
}

// give has the database decide a request that gives back or grants.
func (l *Limiter) give(ctx context.Context, r *request) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, gaveUp(err)
	}
	defer l.waiting.wakeUp(r.parts[0].key) // those who wait for the key may fit now
	if err := l.client.queues.submit(ctx, r); err != nil {
		return Result{}, err
	}
	result := r.result()
	l.client.requests.put(r)
	return result, nil
}
