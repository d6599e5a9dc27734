package ratelimit

import (
	"context"
	"errors"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Refund gives back all that a request took. Pass a result of Allow, AllowN, Wait, WaitN or [Results].Each. Another
// limiter may have returned it, if it has the same name, table, schema and pool. For another process, use
// [Result.Receipt].
//
// Refund gives back only what still counts, so refunds never admit more than the policy does. A take counts until its
// [FixedWindow] or [CalendarWindow] ends, until the next [SlidingWindow] ends, while it is in a [SlidingLog], and until
// its tokens have flowed into the [TokenBucket] again. Spent credit becomes credit again. If the policy's numbers have
// changed, less may be given back.
//
// A result can be refunded once. After an error it can be refunded again, unless the refund may have counted. Do not
// refund a take that a rollback has given back. Errors: [ErrNothingToRefund]; [ErrNoReceipt]; a [*RefundError]; those
// of Allow.
func (l *Limiter) Refund(ctx context.Context, result Result) (Balance, error) {
	return l.refund(ctx, result, result.taken.Own().Left())
}

// RefundN gives back n of what a request took, such as 600 of 1,000 if the work used 400. Credit is given back first.
// Errors: those of Refund, and a [*CostError] for n below 1 or above what is left.
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
	if !r.Swap(left, left-n) { // another goroutine refunds the same result
		return l.refund(ctx, result, n)
	}
	o, err := l.client.engine.Refund(ctx, nil, l.space, r, left-n, left)
	l.waiting.WakeUp(r.Key) // waiting requests may fit now
	err = publicError(err)
	if store, ok := errors.AsType[*StoreError](err); ok && !errors.Is(store, ErrOutcomeUnknown) {
		// Nothing was given back, so the caller may try again. If a concurrent RefundN has lowered what is left, Swap
		// does nothing, and these n units are lost.
		r.Swap(left-n, left)
	}
	return balanceOf(&o, err)
}

// nothingLeft returns an error if nothing of r can be given back.
func (r *Result) nothingLeft(left int64) error {
	switch {
	case r.fromJSON:
		return ErrNoReceipt
	case left == 0:
		return ErrNothingToRefund
	}
	return nil
}

// checkRefund returns an error if l cannot give back n of the units that are left.
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

// Grant gives key a credit of n above its limit, for example after a purchase. A request takes from the credit when the
// limit has no room. Spent credit does not come back. No request may cost more than the limit. With [All], each policy
// gets a credit of n. A key holds a credit of at most 2^61.
//
// Unspent credit ends when the key has not been used for one Window (two with a [SlidingWindow] or [CalendarWindow];
// the time to fill a [TokenBucket]). It survives new numbers of the policy, but no Reset and no other kind of policy.
// Errors: those of Allow, and a [*CostError] for n below 1 or above 2^61.
func (l *Limiter) Grant(ctx context.Context, key string, n int64) (Balance, error) {
	if err := checkGrant(key, n); err != nil {
		return Balance{}, err
	}
	policy := l.view.Known(l.model, key)
	if err := checkTakes(policy); err != nil {
		return Balance{}, err
	}
	if err := ctx.Err(); err != nil {
		return Balance{}, gaveUp(err)
	}
	o, err := l.client.engine.Direct(ctx, nil, l.question(policy, key, -n))
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

// Reset makes key as good as new. With [All], it resets one policy after another, so a concurrent take may count in
// some. Errors: those of Allow.
func (l *Limiter) Reset(ctx context.Context, key string) error {
	if err := checkKey(key); err != nil {
		return err
	}
	then := func() { l.waiting.WakeUp(key) }
	return publicError(l.client.engine.Reset(ctx, l.space, key, l.rowsOf(key), then))
}

func (l *Limiter) rowsOf(key string) int {
	return max(len(l.model.Rules), len(l.view.Known(l.model, key).Rules))
}
