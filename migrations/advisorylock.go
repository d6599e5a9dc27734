package migrations

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/lockholders"
)

const (
	lockID = lockholders.Migrations // the advisory lock of the migrations

	// lockPoll is the pause between two attempts to take the lock. All migrations together take about 20 ms.
	lockPoll = 50 * time.Millisecond

	// lockPatience is how long a process waits for the lock before it says who holds it.
	lockPatience = time.Second
)

// takeLock waits until the transaction holds the advisory lock, or until the context ends. So only one process migrates
// at a time. A lock of the session would not work with a pooler in transaction mode: the pooler may lock in one session
// and unlock in another, and then the first session keeps the lock.
//
// takeLock polls instead of waiting inside Postgres. A wait inside Postgres would end at statement_timeout, and the
// snapshot of the waiting statement would delay CREATE INDEX CONCURRENTLY.
func takeLock(ctx context.Context, tx pgx.Tx) error {
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()

	began, said, holders := time.Now(), "", []lockholders.Holder(nil)
	for tries := 0; ; tries++ {
		var locked bool
		err := tx.QueryRow(ctx, "SELECT pg_catalog.pg_try_advisory_xact_lock($1)", lockID).Scan(&locked)
		if err == nil && !locked && tries%int(lockPatience/lockPoll) == 0 {
			id := lockID
			holders, err = lockholders.Holders(ctx, tx, 0, &id)
		}
		text := lockholders.Text(holders)
		switch {
		case err == nil && locked:
			return nil
		case err == nil && text != "" && text != said && time.Since(began) >= lockPatience:
			said = text
			lockholders.Say(ctx, holders)
		}
		if err == nil {
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
		switch {
		case ctx.Err() != nil && tries > 0:
			return fmt.Errorf("another session migrates, it has had advisory lock %d all the while: %s: %w",
				lockID, text, context.Cause(ctx))
		case err != nil || ctx.Err() != nil:
			return fmt.Errorf("take the advisory lock: %w", cmp.Or(err, context.Cause(ctx)))
		}
	}
}
