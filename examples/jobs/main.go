// A job queue in a table. At most five jobs of a tenant run at a time, in all workers together. The program makes the
// table jobs, adds twelve jobs of the tenant acme and two of bolt, and ends when eight workers have run them all. Start
// it several times at once: acme still has five jobs running.
//
//	DATABASE_URL=postgres://localhost/app go run ./examples/jobs
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool); err != nil {
		log.Fatal(err)
	}
	if _, err := pool.Exec(ctx, createJobs+addJobs); err != nil {
		log.Fatal(err)
	}
	limiter, err := newLimiter(pool)
	if err != nil {
		log.Fatal(err)
	}
	var s sample
	if err := workUntilDone(ctx, pool, limiter, 8, s.run); err != nil {
		log.Fatal(err)
	}
}

// createJobs has a column due: when a worker may claim the job. A claim moves it into the future.
const createJobs = `
CREATE TABLE IF NOT EXISTS jobs (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	tenant text NOT NULL,
	due timestamptz NOT NULL DEFAULT now()
);`

const addJobs = `
INSERT INTO jobs (tenant) SELECT CASE WHEN i <= 12 THEN 'acme' ELSE 'bolt' END FROM generate_series(1, 14) AS i;`

func newLimiter(pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
	return ratelimit.New(pool, ratelimit.Config{
		Name:   "jobs",
		Policy: ratelimit.Concurrency{Limit: 5},
	})
}

// sample runs jobs of a second each, and prints how many run in this process.
type sample struct {
	mu      sync.Mutex
	running map[string]int // by tenant
}

func (s *sample) run(ctx context.Context, j job) error {
	s.count(j, "begins", 1)
	defer s.count(j, "ends", -1)
	select {
	case <-time.After(time.Second):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (s *sample) count(j job, what string, change int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running == nil {
		s.running = map[string]int{}
	}
	s.running[j.tenant] += change
	log.Printf("%s: job %d %s; running: %d", j.tenant, j.id, what, s.running[j.tenant])
}

type job struct {
	id     int64
	tenant string
	until  time.Time // the end of the claim
}

// workUntilDone lets n workers run due jobs, until none is due. A worker of an application would go on for ever.
func workUntilDone(
	ctx context.Context, pool *pgxpool.Pool, limiter *ratelimit.Limiter, n int, run func(context.Context, job) error,
) error {
	errs := make([]error, n)
	var workers sync.WaitGroup
	for i := range n {
		workers.Go(func() {
			for due := true; due && errs[i] == nil; {
				if errs[i] = work(ctx, pool, limiter, run); errs[i] != nil {
					return
				}
				time.Sleep(100 * time.Millisecond) // all tenants with due jobs were full
				errs[i] = pool.QueryRow(ctx, "SELECT EXISTS (SELECT FROM jobs WHERE due <= now())").Scan(&due)
			}
		})
	}
	workers.Wait()
	return errors.Join(errs...)
}

// work runs due jobs, until no tenant has both a due job and a free slot.
func work(
	ctx context.Context, pool *pgxpool.Pool, limiter *ratelimit.Limiter, run func(context.Context, job) error,
) error {
	full := []string{} // tenants that had no free slot
	for {
		var j job
		err := pool.QueryRow(ctx, `
			UPDATE jobs SET due = now() + interval '11 minutes'
			WHERE id = (
				SELECT id FROM jobs WHERE due <= now() AND tenant <> ALL ($1)
				ORDER BY id LIMIT 1 FOR UPDATE SKIP LOCKED
			)
			RETURNING id, tenant, due`, full).Scan(&j.id, &j.tenant, &j.until)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		if err != nil {
			return err
		}
		result, err := limiter.TryAcquire(ctx, j.tenant, ratelimit.SlotOptions{})
		if err != nil {
			return err
		}
		if !result.Allowed { // another worker may try again
			full = append(full, j.tenant)
			_, err := pool.Exec(ctx, "UPDATE jobs SET due = now() WHERE id = $1 AND due = $2", j.id, j.until)
			if err != nil {
				return err
			}
			continue
		}
		if err := runInSlot(ctx, pool, result.Slot, j, run); err != nil {
			log.Printf("job %d is due again when its claim ends: %v", j.id, err)
		}
	}
}

func runInSlot(
	ctx context.Context, pool *pgxpool.Pool, slot *ratelimit.Slot, j job, run func(context.Context, job) error,
) (err error) {
	defer func() { err = errors.Join(err, slot.Release(ctx)) }()
	during, end := context.WithTimeout(slot.Context(ctx), 10*time.Minute) // the claim lasts a minute longer
	defer end()
	if err := run(during, j); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "DELETE FROM jobs WHERE id = $1 AND due = $2", j.id, j.until)
	return err
}
