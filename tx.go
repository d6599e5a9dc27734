package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// TxLimiter asks within a transaction of the caller's: see [Limiter.WithTx].
type TxLimiter struct {
	limiter *Limiter
	tx      pgx.Tx
}

// WithTx returns what can be asked within tx, a transaction of the caller's. What it takes commits with tx, and a
// rollback gives it back. It asks nothing, so it may be called for each request.
//
// Once tx has taken from a key, everybody else who asks for the key waits until tx ends, or gets [ErrKeyHeld] after a
// quarter of their Timeout. So ask late, and never for a key that many share. If the work need not decide over the
// quota, call Allow before the transaction instead, and [Limiter.Refund] if the work comes to nothing. Then nobody
// waits, but a process that dies in between has taken for nothing. Do not call Allow of the Limiter itself within the
// transaction: that takes a second connection.
//
// A denial leaves tx as it was, and so does an error before the database is asked. An error of the database aborts tx.
// The context counts only until the statement is sent, because interrupting it would break tx. Without an answer
// within [ClientConfig].Timeout, because another transaction holds the row, say, it is an [ErrTimeout], and tx's
// connection is closed, which rolls tx back. To wait for a shorter time, set lock_timeout in tx. At REPEATABLE READ
// and SERIALIZABLE the database may refuse with SQLSTATE 40001: try the whole transaction again. Two transactions that
// ask for several keys, one call after the other and in different orders, may wait for each other, and Postgres ends
// one of them with SQLSTATE 40P01: ask for all keys at once with [AllowAll].
//
// A proxy for shards refuses it ([ErrSharded]), because what a shard has committed does not roll back with tx. Call
// Allow before the transaction instead, or use a pool of the shard's own database.
func (l *Limiter) WithTx(tx pgx.Tx) TxLimiter { return TxLimiter{limiter: l, tx: tx} }

// Allow is [Limiter.Allow] within the transaction.
func (t TxLimiter) Allow(ctx context.Context, key string) (Result, error) {
	return t.AllowN(ctx, key, 1)
}

// AllowN is [Limiter.AllowN] within the transaction.
func (t TxLimiter) AllowN(ctx context.Context, key string, n int64) (result Result, err error) {
	l := t.limiter
	if l.client.observer != nil {
		defer l.observe(time.Now(), n, &result, &err)
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

// Request is [Limiter.Request] within the transaction. The requests of one [AllowAll] are all of one transaction, or
// none of them is of any.
func (t TxLimiter) Request(key string, n int64) Request {
	return Request{limiter: t.limiter, key: key, cost: n, inTx: true, tx: t.tx}
}

// Refund is [Limiter.Refund] within the transaction. A rollback takes again. It does not use result up, because the
// transaction may be run again. So give back only once what commits.
func (t TxLimiter) Refund(ctx context.Context, result Result) (Balance, error) {
	return t.RefundN(ctx, result, result.taken.Own().Left())
}

// RefundN is [Limiter.RefundN] within the transaction. It does not use result up: see Refund.
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

// Grant is [Limiter.Grant] within the transaction. A rollback takes it away.
func (t TxLimiter) Grant(ctx context.Context, key string, n int64) (Balance, error) {
	if err := checkTx(t.tx); err != nil {
		return Balance{}, err
	}
	if err := checkGrant(key, n); err != nil {
		return Balance{}, err
	}
	l := t.limiter
	o, err := l.client.engine.Direct(ctx, t.tx, l.question(l.view.Known(l.model, key), key, -n))
	return balanceOf(&o, publicError(err))
}

// Reset is [Limiter.Reset] within the transaction.
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

// checkTx refuses a nil transaction.
func checkTx(tx pgx.Tx) error {
	if pg.IsNil(tx) {
		return &ConfigError{Field: "tx", Reason: "is nil, and must be a transaction that has begun"}
	}
	return nil
}
