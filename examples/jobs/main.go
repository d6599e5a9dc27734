// A job queue in a table. At most five jobs of a tenant run at a time, in all workers together. Start it several times.
//
//	DATABASE_URL=postgres://localhost/app go run ./examples/jobs
package main

import (
	"context"
	"errors"
	"log"
	"os"
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
	if _, err := pool.Exec(ctx, createJobs); err != nil {
		log.Fatal(err)
	}
	limiter, err := newLimiter(pool)
	if err != nil {
		log.Fatal(err)
	}
	for {
		if err := work(ctx, pool, limiter, run); err != nil {
			log.Print(err)
		}
		time.Sleep(time.Second)
	}
}

// createJobs has a column due: when a worker may claim the job. A claim moves it into the future.
const createJobs = `
CREATE TABLE IF NOT EXISTS jobs (
	id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	tenant text NOT NULL,
	due timestamptz NOT NULL DEFAULT now()
)`

func newLimiter(pool *pgxpool.Pool) (*ratelimit.Limiter, error) {
	return ratelimit.New(pool, ratelimit.Config{
		Name:   "jobs",
		Policy: ratelimit.Concurrency{Limit: 5},
	})
}

func run(_ context.Context, j job) error {
	log.Printf("job %d of %s", j.id, j.tenant)
	return nil
}

type job struct {
	id     int64
	tenant string
	until  time.Time // the end of the claim
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
