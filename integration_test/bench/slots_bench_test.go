package bench

import (
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// slotProcesses are limiters of slots, each with a pool of its own as in a process.
func slotProcesses(b *testing.B, db *pgtest.DB, n int, limit int64, statements *atomic.Int64) []*ratelimit.Limiter {
	b.Helper()
	all := make([]*ratelimit.Limiter, n)
	for i := range all {
		client, err := ratelimit.NewClient(slotPool(b, db), ratelimit.ClientConfig{
			Timeout: 10 * time.Second,
			Observer: &ratelimit.Observer{
				Statement: func(ratelimit.StatementEvent) { statements.Add(1) },
				Renewal:   func(ratelimit.RenewalEvent) { statements.Add(1) },
			},
		})
		require.NoError(b, err)
		all[i], err = client.Limiter(ratelimit.Config{Name: "slots", Policy: ratelimit.Concurrency{Limit: limit}})
		require.NoError(b, err)
	}
	return all
}

func slotPool(b *testing.B, db *pgtest.DB) *pgxpool.Pool {
	b.Helper()
	return db.OwnerPool(b, func(config *pgxpool.Config) { config.MaxConns = 8 })
}

// during runs workers until a time has passed, and returns how often a second all of them together did the work.
func during(b *testing.B, length time.Duration, workers int, work func(ctx context.Context, worker int) error) float64 {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), length)
	defer cancel()
	var done atomic.Int64
	var all sync.WaitGroup
	for worker := range workers {
		all.Go(func() {
			for ctx.Err() == nil {
				if work(ctx, worker) == nil {
					done.Add(1)
				}
			}
		})
	}
	all.Wait()
	return float64(done.Load()) / length.Seconds()
}

// job acquires a slot, works, and releases it.
func slotJob(ctx context.Context, l *ratelimit.Limiter, options ratelimit.SlotOptions, work time.Duration) error {
	slot, err := l.Acquire(ctx, "key", options)
	if err != nil {
		return err
	}
	if work > 0 {
		<-time.After(work)
	}
	return slot.Release(context.WithoutCancel(ctx))
}

// BenchmarkSlots measures 8 slots of one key for 64 workers in 8 processes. The unit of comparison is a pair of bare
// updates of one row by its key, by as many workers.
func BenchmarkSlots(b *testing.B) {
	const rounds, length, workers, limit = 3, 3 * time.Second, 64, 8
	db := pgtest.New(b)
	pgtest.Exec(b, db.Pool, "INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('bare', 'key')")
	pools := make([]*pgxpool.Pool, 8)
	for i := range pools {
		pools[i] = slotPool(b, db)
	}
	var statements atomic.Int64
	processes := slotProcesses(b, db, 8, limit, &statements)
	for range rounds {
		bare := during(b, length, workers, func(ctx context.Context, worker int) error {
			for range 2 {
				_, err := pools[worker%8].Exec(ctx,
					"UPDATE rate_limit_ephemeral SET count = count + 1 WHERE prefix = 'bare' AND key = 'key'")
				if err != nil {
					return err
				}
			}
			return nil
		})
		pairs := during(b, length, workers, func(ctx context.Context, worker int) error {
			return slotJob(ctx, processes[worker%8], ratelimit.SlotOptions{}, 0)
		})
		const work = 10 * time.Millisecond
		jobs := during(b, length, workers, func(ctx context.Context, worker int) error {
			return slotJob(ctx, processes[worker%8], ratelimit.SlotOptions{}, work)
		})
		b.Logf("pairs of bare updates %5.0f/s   acquire and release %5.0f/s (%.2f)   jobs of 10 ms: %.1f %% of the slots' time",
			bare, pairs, pairs/bare, 100*jobs*work.Seconds()/limit)
	}
}

// BenchmarkSlotWaiters measures how long after its release a slot is taken, while 200 callers in 8 processes wait.
func BenchmarkSlotWaiters(b *testing.B) {
	const waiters, served = 200, 1000
	db := pgtest.New(b)
	var statements atomic.Int64
	processes := slotProcesses(b, db, 8, 1, &statements)
	var mu sync.Mutex
	var released time.Time
	var took []time.Duration
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var all sync.WaitGroup
	for waiter := range waiters {
		all.Go(func() {
			for ctx.Err() == nil {
				slot, err := processes[waiter%8].Acquire(ctx, "key", ratelimit.SlotOptions{})
				if err != nil {
					return
				}
				mu.Lock()
				if !released.IsZero() {
					took = append(took, time.Since(released))
				}
				switch len(took) {
				case 200: // by now all of them wait
					statements.Store(0)
				case 200 + served:
					cancel()
				}
				mu.Unlock()
				<-time.After(5 * time.Millisecond)
				mu.Lock()
				released = time.Now()
				mu.Unlock()
				_ = slot.Release(context.WithoutCancel(ctx))
			}
		})
	}
	<-ctx.Done()
	sent := statements.Load()
	all.Wait()
	took = took[200:]
	slices.Sort(took)
	b.Logf("a released slot was taken after %v (median), %v (p99); %.2f statements for each caller served",
		took[len(took)/2], took[len(took)*99/100], float64(sent)/served)
}

// BenchmarkSlotsAtRest measures what a process costs that holds 1,000 slots: the statements and the CPU of the server.
func BenchmarkSlotsAtRest(b *testing.B) {
	const slots, length = 1000, 60 * time.Second
	db := pgtest.New(b)
	var statements atomic.Int64
	l := slotProcesses(b, db, 1, 1, &statements)[0]
	for i := range slots {
		_, err := l.Acquire(b.Context(), fmt.Sprint("key ", i), ratelimit.SlotOptions{})
		require.NoError(b, err)
	}
	statements.Store(0)
	before, own := backendCPU(b, db), cpuTime(os.Getpid())
	<-time.After(length)
	b.Logf("%.2f statements a second; %.2f %% of a core in the server, %.2f %% in the process",
		float64(statements.Load())/length.Seconds(),
		100*(backendCPU(b, db)-before).Seconds()/length.Seconds(),
		100*(cpuTime(os.Getpid())-own).Seconds()/length.Seconds())
}

// backendCPU returns the CPU time of the sessions of the test's database.
func backendCPU(b *testing.B, db *pgtest.DB) time.Duration {
	b.Helper()
	return cpuTime(pgtest.Scalar[[]int](b, db.Pool,
		"SELECT array_agg(pid) FROM pg_stat_activity WHERE datname = current_database()")...)
}

// BenchmarkSlotGroups measures the shares of three groups with the weights 1, 1 and 2. The first group has 100 times as
// many waiting callers as the others.
func BenchmarkSlotGroups(b *testing.B) {
	db := pgtest.New(b)
	var statements atomic.Int64
	processes := slotProcesses(b, db, 8, 8, &statements)
	groups := []struct {
		workers, weight int
		served          atomic.Int64
	}{{workers: 400, weight: 1}, {workers: 4, weight: 1}, {workers: 8, weight: 2}}
	of := []int{}
	for i := range groups {
		of = append(of, slices.Repeat([]int{i}, groups[i].workers)...)
	}
	during(b, 10*time.Second, len(of), func(ctx context.Context, worker int) error {
		g := &groups[of[worker]]
		err := slotJob(ctx, processes[worker%8], ratelimit.SlotOptions{
			Group: fmt.Sprint("group ", of[worker]), Weight: g.weight,
		}, 10*time.Millisecond)
		if err == nil {
			g.served.Add(1)
		}
		return err
	})
	all := groups[0].served.Load() + groups[1].served.Load() + groups[2].served.Load()
	for i := range groups {
		b.Logf("group %d: weight %d, %3d workers: %.1f %%", i, groups[i].weight, groups[i].workers,
			100*float64(groups[i].served.Load())/float64(all))
	}
}
