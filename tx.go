package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// TxLimiter is a limiter that asks within a transaction: see [Limiter.WithTx].
type TxLimiter struct {
	limiter *Limiter
	tx      pgx.Tx
}

// WithTx returns a limiter that asks within tx. A commit of tx keeps what the limiter takes, and a rollback gives it
// back.
//
// After tx has taken from a key, all other calls for the key wait until tx ends, or return [ErrKeyHeld] after a quarter
// of their Timeout. So ask late in tx, and never for a key that many share. Another way is to call Allow before the
// transaction, and [Limiter.Refund] if the work fails. Then no call waits, but a process that dies gives nothing back.
//
// A denial does not change tx, and an error of the database aborts tx. If no answer comes within
// [ClientConfig].Timeout, a call closes the connection, so tx is rolled back, and returns an [ErrTimeout]. To wait for
// less time, set lock_timeout in tx. The context does not interrupt a statement. At REPEATABLE READ and above, repeat
// the transaction after SQLSTATE 40001. Ask for several keys with one [AllowAll], or transactions may deadlock.
//
// A proxy for shards refuses WithTx ([ErrSharded]), because a rollback of tx would not undo the commit on the shard.
// Call Allow before the transaction, or connect to the shard directly.
func (l *Limiter) WithTx(tx pgx.Tx) TxLimiter { return TxLimiter{limiter: l, tx: tx} }

// Allow is [Limiter.Allow].
func (t TxLimiter) Allow(ctx context.Context, key string) (Result, error) {
	return t.AllowN(ctx, key, 1)
}

// AllowN is [Limiter.AllowN].
func (t TxLimiter) AllowN(ctx context.Context, key string, n int64) (result Result, err error) {
	l := t.limiter
	if l.client.observer != nil {
		defer l.observe(time.Now(), key, n, &result, &err)
	}
	if err := checkTx(t.tx); err != nil {
		return Result{}, err
	}
	if err := checkKey(key); err != nil {
		return Result{}, err
	}
	policy, row, err := l.inForce(ctx, key)
	switch {
	case err != nil:
		return Result{}, err
	case row != nil:
		return l.byRow(row, n)
	}
	if err := checkCost(n, policy); err != nil {
		return Result{}, err
	}
	o, err := l.client.engine.Direct(ctx, t.tx, l.question(policy, key, n))
	if err != nil {
		return Result{}, publicError(err)
	}
	result = resultOf(&o)
	l.countDenial(key, n, &result, nil)
	return result, nil
}

// Request is [Limiter.Request]. An [AllowAll] takes requests of one tx only.
func (t TxLimiter) Request(key string, n int64) Request {
	return Request{limiter: t.limiter, key: key, cost: n, inTx: true, tx: t.tx}
}

// Refund is [Limiter.Refund], but does not mark the result as refunded. So after a rollback of tx, it can be called
// again.
func (t TxLimiter) Refund(ctx context.Context, result Result) (Balance, error) {
	return t.RefundN(ctx, result, result.taken.Own().Left())
}

// RefundN is [Limiter.RefundN], but does not mark the result as refunded. So after a rollback of tx, it can be called
// again.
func (t TxLimiter) RefundN(ctx context.Context, result Result, n int64) (Balance, error) {
	if err := checkTx(t.tx); err != nil {
		return Balance{}, err
	}
	l, r := t.limiter, result.taken.Own()
	left := r.Left()
	if err := l.checkRefund(&result, r, n, left); err != nil {
		return Balance{}, err
	}
	o, err := l.client.engine.Refund(ctx, t.tx, l.space, r, left-n, left)
	return balanceOf(&o, publicError(err))
}

// Charge is [Limiter.Charge].
func (t TxLimiter) Charge(ctx context.Context, key string, n int64) (Charged, error) {
	if err := checkTx(t.tx); err != nil {
		return Charged{}, err
	}
	return t.limiter.charge(ctx, t.tx, key, n)
}

// Grant is [Limiter.Grant].
func (t TxLimiter) Grant(ctx context.Context, key string, n int64) (Balance, error) {
	if err := checkTx(t.tx); err != nil {
		return Balance{}, err
	}
	if err := checkGrant(key, n); err != nil {
		return Balance{}, err
	}
	l := t.limiter
	policy := l.view.Known(l.model, key)
	if err := checkTakes(policy); err != nil {
		return Balance{}, err
	}
	o, err := l.client.engine.Direct(ctx, t.tx, l.question(policy, key, -n))
	return balanceOf(&o, publicError(err))
}

// Reset is [Limiter.Reset].
func (t TxLimiter) Reset(ctx context.Context, key string) error {
	if err := checkTx(t.tx); err != nil {
		return err
	}
	if err := checkKey(key); err != nil {
		return err
	}
	l := t.limiter
	return publicError(l.client.engine.ResetIn(ctx, t.tx, l.space, key, l.rowsOf(key)))
}

func checkTx(tx pgx.Tx) error {
	if pg.IsNil(tx) {
		return &ConfigError{Field: "tx", Reason: "is nil, and must be a transaction that has begun"}
	}
	return nil
}
