package integration_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// BenchmarkHeldKey is what calls for 200 shared keys cost in six limiters of eight callers, each with a pool of its own, while one request
// in 50 is for another key: that nobody holds, that is held for good, and that is held for 20 ms again and again. Rounds take turns.
func BenchmarkHeldKey(b *testing.B) {
	const rounds, seconds = 3, 2
	db := pgtest.New(b)
	for range rounds {
		for _, held := range []string{"by nobody", "for good", "by turns"} {
			rate, p50, p99, failed := heldKeyRound(b, db, held, seconds*time.Second)
			b.Logf("held %-9s  %7.0f/s  p50 %8v  p99 %8v  errors %d", held, rate, p50, p99, failed)
		}
	}
}

func heldKeyRound(b *testing.B, db *pgtest.DB, held string, length time.Duration) (rate float64, p50, p99 time.Duration, failed int) {
	b.Helper()
	const processes, callers = 6, 8
	policy := ratelimit.FixedWindow{Limit: 1 << 30, Window: time.Hour}
	ctx, cancel := context.WithTimeout(b.Context(), length)
	defer cancel()
	owner, err := ratelimit.New(db.Pool, ratelimit.Config{Name: "held", Policy: policy})
	require.NoError(b, err)
	_, err = owner.Allow(b.Context(), "held")
	require.NoError(b, err)
	var holder sync.WaitGroup
	if held != "by nobody" {
		pause := time.Hour
		if held == "by turns" {
			pause = 20 * time.Millisecond
		}
		holder.Go(func() {
			for ctx.Err() == nil {
				tx, err := db.Pool.Begin(context.WithoutCancel(ctx))
				if err != nil {
					return
				}
				_, _ = tx.Exec(ctx, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'held' AND key = 'held' FOR UPDATE")
				select {
				case <-ctx.Done():
				case <-time.After(pause):
				}
				_ = tx.Rollback(context.WithoutCancel(ctx))
			}
		})
	}
	var mu sync.Mutex
	var took []time.Duration
	var all, asking sync.WaitGroup
	for process := range processes {
		pool := db.NewPool(b, func(config *pgxpool.Config) { config.MaxConns = 4 })
		defer pool.Close() //nolint:revive // they are all to stay until the end
		limiter, err := ratelimit.New(pool, ratelimit.Config{Name: "held", Policy: policy})
		require.NoError(b, err)
		for caller := range callers {
			all.Go(func() {
				random := rand.New(rand.NewPCG(uint64(process), uint64(caller)))
				var own []time.Duration
				errs := 0
				for ctx.Err() == nil {
					if random.IntN(50) == 0 {
						asking.Go(func() { _, _ = limiter.Allow(context.WithoutCancel(ctx), "held") }) // whoever waits for it asks for nothing else
						continue
					}
					began := time.Now()
					if _, err := limiter.Allow(context.WithoutCancel(ctx), fmt.Sprint(random.IntN(200))); err != nil {
						errs++
					}
					own = append(own, time.Since(began))
				}
				mu.Lock()
				defer mu.Unlock()
				took, failed = append(took, own...), failed+errs
			})
		}
	}
	all.Wait()
	asking.Wait()
	holder.Wait()
	slices.Sort(took)
	return float64(len(took)) / length.Seconds(), took[len(took)/2], took[len(took)*99/100], failed
}
