package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Nothing can be taken under a policy with slots. The calls say so, and a Peek shows the free slots.
func TestNothingIsTakenUnderConcurrency(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	for name, policy := range map[string]ratelimit.Policy{
		"alone":         ratelimit.Concurrency{Limit: 5},
		"beside a rate": ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: 24 * time.Hour}, ratelimit.Concurrency{Limit: 5}),
	} {
		client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
		l := limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: policy})
		ctx := t.Context()
		calls := map[string]func() error{
			"Allow":   func() error { _, err := l.Allow(ctx, "k"); return err },
			"Wait":    func() error { _, err := l.Wait(ctx, "k"); return err },
			"Charge":  func() error { _, err := l.Charge(ctx, "k", 0); return err },
			"Hold":    func() error { _, err := l.Hold(ctx, "k", 1, time.Second); return err },
			"Grant":   func() error { _, err := l.Grant(ctx, "k", 1); return err },
			"All":     func() error { _, err := ratelimit.AllowAll(ctx, l.Request("k", 1)); return err },
			"HoldAll": func() error { _, err := ratelimit.HoldAll(ctx, time.Second, l.Request("k", 1)); return err },
		}
		tx, err := pool.Begin(ctx)
		require.NoError(t, err)
		in := l.WithTx(tx)
		calls["Allow in a transaction"] = func() error { _, err := in.Allow(ctx, "k"); return err }
		calls["Grant in a transaction"] = func() error { _, err := in.Grant(ctx, "k", 1); return err }
		calls["Charge in a transaction"] = func() error { _, err := in.Charge(ctx, "k", 1); return err }
		for call, do := range calls {
			var slots *ratelimit.SlotError
			require.ErrorAs(t, do(), &slots, call)
			require.Equal(t, policy, slots.Policy)
			require.ErrorContains(t, slots, "acquire a slot")
		}
		require.NoError(t, tx.Rollback(ctx))
		require.True(t, pgtest.Scalar[bool](t, db.Pool,
			"SELECT allowed FROM rate_limit_acquire($1, 'k', $2, 3)", name, policy.String()))
		result, err := l.Peek(ctx, "k")
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 2, result.Remaining)
	}
}
