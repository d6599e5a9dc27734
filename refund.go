package ratelimit

import (
	"context"
	"errors"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Refund gives back all that a request took, because it came to nothing. Pass a result of Allow, AllowN, Wait, WaitN or
// [Results].Each. Another limiter may have taken, if it has the same name, table, schema and pool or connection. In
// another process, use [Result.Receipt].
//
// It gives back what still counts under the policy that took: of a [FixedWindow] or [CalendarWindow] until the window
// ends, of a [SlidingWindow] until the next one does, of a [SlidingLog] while it is in the log, and of a [TokenBucket]
// what has not flowed in again. Spent credit becomes credit again. After takes under other numbers, less may be left to
// give back. So whatever is given back, what was admitted and kept stays within the policy.
//
// Nothing is given back twice: a result is used up, unless the refund surely did not count. Do not refund a take that a
// rollback has given back. Errors: [ErrNothingToRefund]; [ErrNoReceipt]; a [*RefundError]; else as Allow.
func (l *Limiter) Refund(ctx context.Context, result Result) (Balance, error) {
	return l.refund(ctx, result, result.taken.Own().Left())
}

// RefundN gives back n of what the request took: 600 if it reserved 1,000 and used 400. Credit goes back first. Errors:
// as Refund, and a [*CostError] for n below 1 or above what is left.
func (l *Limiter) RefundN(ctx context.Context, result Result, n int64) (Balance, error) {
	return l.refund(ctx, result, n)
}

func (l *Limiter) refund(ctx context.Context, result Result, n int64) (Balance, error) {
	r := result.taken.Own()
	left := r.Left()
	if err := l.checkRefund(&result, r, n, left); err != nil {
		return Balance{}, err
	}
	if err := ctx.Err(); err != nil {
		return Balance{}, gaveUp(err)
	}
	if !r.Swap(left, left-n) { // somebody else gives back of it at the same time
		return l.refund(ctx, result, n)
	}
	o, err := l.client.engine.Refund(ctx, nil, l.space, r, left-n, left)
	l.waiting.WakeUp(r.Key) // waiting requests may fit now
	err = publicError(err)
	if store, ok := errors.AsType[*StoreError](err); ok && !errors.Is(store, ErrOutcomeUnknown) {
		// Nothing was given back, so it can be tried again. But if other units of the result went back meanwhile,
		// these are lost, because a receipt is used up in order.
		r.Swap(left-n, left)
	}
	return balanceOf(&o, err)
}

// nothingLeft says why nothing can be given back, if nothing is left.
func (r *Result) nothingLeft(left int64) error {
	switch {
	case r.fromJSON:
		return ErrNoReceipt
	case left == 0:
		return ErrNothingToRefund
	}
	return nil
}

// checkRefund says why this limiter cannot give back n of what is left.
func (l *Limiter) checkRefund(result *Result, r *engine.Receipt, n, left int64) error {
	if err := result.nothingLeft(left); err != nil {
		return err
	}
	switch {
	case n < 1 || n > left:
		return &CostError{Cost: n, Limit: left, Least: 1, refund: true}
	case l.space == r.Space:
		return nil
	}
	mine, other := l.space, r.Space
	if mine.Name != other.Name || mine.Durable != other.Durable || !mine.Engine.SameRows(other.Engine) {
		return &RefundError{Limiter: mine.Name, TakenBy: other.Name}
	}
	return nil
}

// Grant gives key a credit of n above its limit, for support or a purchase, say. Requests take from it when there is no
// ordinary room, each unit once. It does not refill, and no request may cost more than the limit. With [All], each
// policy gets a credit of n. A key holds at most 2^61.
//
// Credit lasts until it is spent, or until the key was not used for a Window (for a [SlidingWindow] or [CalendarWindow]
// two, for a [TokenBucket] the time to fill it). It outlives other numbers of the policy, but no Reset and no policy of
// another kind. Errors: as Allow, and a [*CostError] for n below 1 or above 2^61.
func (l *Limiter) Grant(ctx context.Context, key string, n int64) (Balance, error) {
	if err := checkGrant(key, n); err != nil {
		return Balance{}, err
	}
	if err := ctx.Err(); err != nil {
		return Balance{}, gaveUp(err)
	}
	o, err := l.client.engine.Direct(ctx, nil, l.question(l.view.Known(l.model, key), key, -n))
	l.waiting.WakeUp(key) // waiting requests may fit now
	return balanceOf(&o, publicError(err))
}

func checkGrant(key string, n int64) error {
	if err := checkKey(key); err != nil {
		return err
	}
	if n < 1 || n > model.MaxCredit {
		return &CostError{Cost: n, Limit: model.MaxCredit, Least: 1, grant: true}
	}
	return nil
}

// Reset makes key as good as new. With [All], it resets one policy after the other, so a take meanwhile may count for
// some only. Errors: as Allow.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	then := func() { l.waiting.WakeUp(key) }
	return publicError(l.client.engine.Reset(ctx, l.space, key, l.rowsOf(key), then))
}

// rowsOf is how many rows a key may have.
func (l *Limiter) rowsOf(key string) int {
	return max(len(l.model.Rules), len(l.view.Known(l.model, key).Rules))
}
