package ratelimit

import (
	"context"
	"errors"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Refund gives back all that a request took, because it came to nothing. Pass what Allow, AllowN, Wait or WaitN has
// returned, or one of [Results].Each. It may be of this limiter, of one that With has returned, or of one of the same
// name, table and schema on the same pool or connection.
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
func (l *Limiter) Refund(ctx context.Context, result Result) (Balance, error) {
	return l.refund(ctx, result, result.taken.Own().Left())
}

// RefundN is Refund of n of what the request took: 600 if 1,000 were reserved and 400 used. What came out of
// credit goes back first. Errors: as Refund, and a [*CostError] for n below 1 or above what is left.
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
	l.waiting.WakeUp(r.Key) // those who wait for the key may fit now
	err = publicError(err)
	if store, ok := errors.AsType[*StoreError](err); ok && !errors.Is(store, ErrOutcomeUnknown) {
		// It was surely not given back, so it can be again. If units before these were given back in the
		// meantime, these are lost, because it matters which units they are.
		r.Swap(left-n, left)
	}
	return balanceOf(&o, err)
}

// nothingLeft tells why nothing can be given back, if nothing is left.
func (r *Result) nothingLeft(left int64) error {
	switch {
	case r.fromJSON:
		return ErrNoReceipt
	case left == 0:
		return ErrNothingToRefund
	}
	return nil
}

// checkRefund tells why this limiter cannot give back n of what is left.
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

// Grant gives key a credit of n above its limit, for support or a purchase, say.
// Requests take from it once there is no ordinary room, each unit once. It does not refill, and lets no single
// request cost more than the limit. With [All], each policy has a credit of n.
//
// Credit lasts until it is spent, or until nothing was taken from the key, given back or granted to it for a Window
// (of a [SlidingWindow] or [CalendarWindow] two, of a [TokenBucket] the time to fill it), as ResetAfter tells. It
// stays when the policy's numbers change, and is gone after a Reset or under another kind of policy. A key holds up
// to 2^61, and the rest is lost. Errors: as Allow, and a [*CostError] for n below 1 or
// above 2^61.
func (l *Limiter) Grant(ctx context.Context, key string, n int64) (Balance, error) {
	if err := checkGrant(key, n); err != nil {
		return Balance{}, err
	}
	if err := ctx.Err(); err != nil {
		return Balance{}, gaveUp(err)
	}
	o, err := l.client.engine.Direct(ctx, nil, l.question(l.view.Known(l.model, key), key, -n))
	l.waiting.WakeUp(key) // those who wait for the key may fit now
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

// Reset makes key as good as new. Under [All] it does so for one policy after the other. If somebody takes
// meanwhile, as the first for a long time, some policies may count that and others not. Errors: as Allow.
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
