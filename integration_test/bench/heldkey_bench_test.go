package bench

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

// BenchmarkHeldKey measures calls for 200 shared keys. There are six limiters with eight callers and a pool each. One
// request in 50 is for one more key. The cases alternate: nobody holds that key, a transaction holds it all the time, a
// transaction holds it for 20 ms again and again, or its row is new and not committed. If nobody holds it, another
// transaction stays open. Like a holder, it keeps dead rows from being pruned.
func BenchmarkHeldKey(b *testing.B) {
	kinds := []string{"by nobody", "for good", "by turns", "a new row"}
	heldKeyRounds(b, 6, 50, kinds, func(ctx context.Context, l *ratelimit.Limiter, key string) error {
		_, err := l.Allow(ctx, key)
		return err
	})
}

// BenchmarkHeldPart is like BenchmarkHeldKey, but for AllowAll with a user's key and a shared key, in four limiters.
// One request in 20 is for the user whose key is held.
func BenchmarkHeldPart(b *testing.B) {
	kinds := []string{"by nobody", "for good", "a new row"}
	heldKeyRounds(b, 4, 20, kinds, func(ctx context.Context, l *ratelimit.Limiter, key string) error {
		_, err := ratelimit.AllowAll(ctx, l.Request("user "+key, 1), l.Request("all", 1))
		return err
	})
}

type ask func(ctx context.Context, l *ratelimit.Limiter, key string) error

func heldKeyRounds(b *testing.B, processes, oneIn int, kinds []string, ask ask) {
	b.Helper()
	const rounds, length = 3, 2 * time.Second
	db := pgtest.New(b)
	for range rounds {
		var base float64
		var baseP99 time.Duration
		for _, held := range kinds {
			rate, p50, p99, failed := heldKeyRound(b, db, held, processes, oneIn, length, ask)
			if base == 0 {
				base, baseP99 = rate, p99
			}
			b.Logf("held %-9s  %7.0f/s (%.2f)  p50 %8v  p99 %8v (%.1f)  errors %d", held,
				rate, rate/base, p50, p99, float64(p99)/float64(baseP99), failed)
		}
	}
}

func heldKeyRound(
	b *testing.B, db *pgtest.DB, held string, processes, oneIn int, length time.Duration, ask ask,
) (rate float64, p50, p99 time.Duration, failed int) {
	b.Helper()
	const callers = 8
	policy := ratelimit.FixedWindow{Limit: 1 << 30, Window: time.Hour}
	ctx, cancel := context.WithTimeout(b.Context(), length)
	defer cancel()
	owner, err := ratelimit.New(db.Pool, ratelimit.Config{Name: "held", Policy: policy})
	require.NoError(b, err)
	require.NoError(b, ask(b.Context(), owner, "held"))
	hold, pause := "SELECT FROM rate_limit_ephemeral WHERE key LIKE '%held' FOR UPDATE", time.Hour
	switch held {
	case "by nobody":
		hold = "SELECT pg_current_xact_id()"
	case "by turns":
		pause = 20 * time.Millisecond
	case "a new row":
		_, err := db.Pool.Exec(b.Context(), "DELETE FROM rate_limit_ephemeral WHERE key LIKE '%held'")
		require.NoError(b, err)
		hold = "INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('held', 'held'), ('held', 'user held')"
	}
	holds := make(chan struct{})
	var holder sync.WaitGroup
	holder.Go(func() {
		for first := true; ctx.Err() == nil; first = false {
			tx, err := db.Pool.Begin(context.WithoutCancel(ctx))
			if err != nil {
				return
			}
			_, _ = tx.Exec(ctx, hold)
			if first {
				close(holds)
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			_ = tx.Rollback(context.WithoutCancel(ctx))
		}
	})
	<-holds
	var mu sync.Mutex
	var took []time.Duration
	var all, asking sync.WaitGroup
	for process := range processes {
		pool := db.OwnerPool(b, func(config *pgxpool.Config) { config.MaxConns = 4 })
		defer pool.Close() //nolint:revive // all pools stay open until the end
		limiter, err := ratelimit.New(pool, ratelimit.Config{Name: "held", Policy: policy})
		require.NoError(b, err)
		for caller := range callers {
			all.Go(func() {
				random := rand.New(rand.NewPCG(uint64(process), uint64(caller)))
				var own []time.Duration
				errs := 0
				for ctx.Err() == nil {
					if random.IntN(oneIn) == 0 {
						// Callers that wait for the held key make no other request.
						asking.Go(func() { _ = ask(context.WithoutCancel(ctx), limiter, "held") })
						continue
					}
					began := time.Now()
					if err := ask(context.WithoutCancel(ctx), limiter, fmt.Sprint(random.IntN(200))); err != nil {
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
