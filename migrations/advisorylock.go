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

// takeLock waits until the transaction holds the lock, or until the context ends. So only one process migrates at a
// time. A session lock would not work. A pooler in transaction mode may take it in one session of Postgres and release
// it in another. Then the first session keeps it.
//
// takeLock polls instead of waiting inside Postgres. There, statement_timeout would end the wait, and the snapshot of
// the waiting statement would delay CREATE INDEX CONCURRENTLY.
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
