package limitertest

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
)

// Calls returns all methods that ask the database, by name. Each call is for the given key.
func Calls(l *ratelimit.Limiter, key string) map[string]func() error {
	allowed := func(r ratelimit.Result, err error) error {
		if err == nil && !r.Allowed {
			return errors.New("denied")
		}
		return err
	}
	return map[string]func() error{
		"Allow":  func() error { return allowed(l.Allow(context.Background(), key)) },
		"AllowN": func() error { return allowed(l.AllowN(context.Background(), key, 2)) },
		"Peek":   func() error { return allowed(l.Peek(context.Background(), key)) },
		"Reset":  func() error { return l.Reset(context.Background(), key) },
		"Refund": func() error { return allowed(AsResult(l.Refund(context.Background(), Forged(l, key, 2)))) },
		"Grant":  func() error { return allowed(AsResult(l.Grant(context.Background(), key, 2))) },
		"Charge": func() error { _, err := l.Charge(context.Background(), key, 2); return err },
		"Hold": func() error {
			result, err := l.Hold(context.Background(), key, 2, time.Minute)
			return allowed(result.Result, err)
		},
	}
}

// TxCalls returns all methods that can run in a transaction, by name. Each call is for the given key.
func TxCalls(l *ratelimit.Limiter, tx pgx.Tx, key string) map[string]func() error {
	ctx := context.Background()
	return map[string]func() error{
		"AllowTx":    func() error { _, err := l.WithTx(tx).Allow(ctx, key); return err },
		"AllowNTx":   func() error { _, err := l.WithTx(tx).AllowN(ctx, key, 2); return err },
		"AllowAllTx": func() error { _, err := AllowAllTx(ctx, tx, l.Request(key, 1)); return err },
		"RefundTx":   func() error { _, err := l.WithTx(tx).Refund(ctx, Forged(l, key, 2)); return err },
		"RefundNTx":  func() error { _, err := l.WithTx(tx).RefundN(ctx, Forged(l, key, 2), 1); return err },
		"GrantTx":    func() error { _, err := l.WithTx(tx).Grant(ctx, key, 2); return err },
		"ChargeTx":   func() error { _, err := l.WithTx(tx).Charge(ctx, key, 2); return err },
		"HoldTx":     func() error { _, err := l.WithTx(tx).Hold(ctx, key, 2, time.Minute); return err },
		"ResetTx":    func() error { return l.WithTx(tx).Reset(ctx, key) },
	}
}
