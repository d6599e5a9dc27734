package faults

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

// BenchmarkShardThatFails measures calls to four shards, before and while one shard fails. Each shard has 12 callers,
// which pause for 5 ms after each call. The benchmark prints tables.
func BenchmarkShardThatFails(b *testing.B) {
	const callers, phase = 12, 5 * time.Second
	const head = "\n| shard 2 is | shard | before, calls/s | p99 | meanwhile, calls/s | p99 | errors | share |\n|---|---|---|---|---|---|---|---|\n"
	for _, how := range []string{"killed", "frozen", "full"} {
		b.Run(how, func(b *testing.B) {
			fleet, begin, end := fleetThatFails(b, how, 32)
			limiter := limitertest.New(b, fleet.OwnerPool(b, func(config *pgxpool.Config) { config.MaxConns = 12 }), ratelimit.Config{
				Name: "test", Policy: ratelimit.SlidingWindow{Limit: 1 << 30, Window: time.Hour}, Durable: true,
			}, ratelimit.ClientConfig{Timeout: 4 * time.Second})
			var mu sync.Mutex
			var took [shardCount][]time.Duration
			var failures [shardCount]int
			ctx, stop := context.WithCancel(b.Context())
			var working sync.WaitGroup
			for i := range callers * shardCount {
				working.Go(func() {
					shard := i % shardCount
					for n := i; ctx.Err() == nil; n += callers {
						began := time.Now()
						_, err := limiter.Allow(context.Background(), keyOn(shard, n))
						mu.Lock()
						if err == nil {
							took[shard] = append(took[shard], time.Since(began))
						} else {
							failures[shard]++
						}
						mu.Unlock()
						pause(ctx, 5*time.Millisecond)
					}
				})
			}
			measure := func() (rates [shardCount]float64, p99 [shardCount]time.Duration, failed [shardCount]int) {
				mu.Lock()
				clear(took[:])
				clear(failures[:])
				mu.Unlock()
				pause(ctx, phase)
				mu.Lock()
				defer mu.Unlock()
				for shard := range took {
					slices.Sort(took[shard])
					if n := len(took[shard]); n > 0 {
						rates[shard], p99[shard] = float64(n)/phase.Seconds(), took[shard][n*99/100].Round(100*time.Microsecond)
					}
				}
				return rates, p99, failures
			}
			pause(ctx, 2*time.Second) // until all connections are warm
			before, p99Before, _ := measure()
			begin()
			during, p99During, failed := measure()
			end()
			stop()
			working.Wait()
			table := head
			for shard := range shardCount {
				table += fmt.Sprintf("| %s | %d | %.0f | %v | %.0f | %v | %d | %.2f |\n", how, shard,
					before[shard], p99Before[shard], during[shard], p99During[shard], failed[shard], during[shard]/before[shard])
			}
			b.Log(table)
			require.Positive(b, during[0])
		})
	}
}
