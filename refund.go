package ratelimit

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// Refund gives back n of what key has taken, such as what a request took that then came to nothing, and tells what remains.
// It gives back no more than was taken and still counts, so never above full, and does nothing for a key that has not taken
// anything. A window gives back what was taken in it; a [SlidingWindow] then what was taken in the window before, and a
// [SlidingLog] what was taken last, first; [All] gives back to each of its policies. Once all is given back, the key is as good as
// new.
//
// The result says Allowed. Nothing is remembered of who took what, so what is given back twice counts twice. Refunds and
// requests that leave together are decided in the order in which they came; of [All], where a key has no rows yet, those that need
// none come first. A denial that this process remembers of the key is forgotten. See [Limiter.RefundTx] to give back together
// with something else, or [Limiter.AllowTx], whose rollback gives back exactly what it took.
//
// Errors: as Allow, and a [*CostError] for n below 1.
func (l *Limiter) Refund(ctx context.Context, key string, n int64) (Result, error) {
	if err := l.validateRefund(key, n); err != nil {
		return Result{}, err
	}
	return l.give(ctx, key, n, false)
}

// RefundTx is Refund within the caller's transaction: what it gives back is kept if tx commits, and taken again if tx rolls
// back. Until then others who ask for the key wait, as after AllowTx.
func (l *Limiter) RefundTx(ctx context.Context, tx pgx.Tx, key string, n int64) (Result, error) {
	if err := l.validateRefund(key, n); err != nil {
		return Result{}, err
	}
	return l.giveTx(ctx, tx, key, n, false)
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
	return l.give(ctx, key, n, true)
}

// GrantTx is Grant within the caller's transaction: the credit is there if tx commits, and is not if tx rolls back. Until then
// others who ask for the key wait, as after AllowTx.
func (l *Limiter) GrantTx(ctx context.Context, tx pgx.Tx, key string, n int64) (Result, error) {
	if err := l.validateGrant(key, n); err != nil {
		return Result{}, err
	}
	return l.giveTx(ctx, tx, key, n, true)
}

func (l *Limiter) give(ctx context.Context, key string, n int64, above bool) (Result, error) {
	if err := ctx.Err(); err != nil {
		return Result{}, waitError(err)
	}
	defer l.wakeUp(key) // who waits for it may fit now
	if l.breaker == nil {
		return l.askDatabase(ctx, key, -n, above, false)
	}
	pass, probe := l.breaker.pass()
	if !pass {
		return Result{}, errNotTried
	}
	return l.askDatabase(ctx, key, -n, above, probe)
}

func (l *Limiter) giveTx(ctx context.Context, tx pgx.Tx, key string, n int64, above bool) (Result, error) {
	result, err := l.allowOne(ctx, tx, key, -n, above, settings{})
	if l.denials != nil {
		l.denials.reset(key) // also after an error, as reset does
	}
	return result, err
}

func (l *Limiter) validateRefund(key string, n int64) error {
	if err := validateKey(key); err != nil {
		return err
	}
	if n < 1 {
		return &CostError{Cost: n, Limit: l.policy.limit(), Least: 1}
	}
	return nil
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
