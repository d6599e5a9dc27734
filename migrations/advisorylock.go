package migrations

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// lockID is the advisory lock under which migrations run: "ratelimt" in ASCII. goose's own default, 4097083626,
	// fits in 32 bits, and so do the ids of tools that hash with CRC-32. So an application's migrations never wait for
	// ours.
	lockID int64 = 0x726174656c696d74

	// lockPoll is how often a process asks for the lock while another one has it. All migrations together take some
	// 20 ms.
	lockPoll = 50 * time.Millisecond
)

// locked calls do while the connection has the advisory lock, so only one process migrates at a time.
//
// It asks for the lock again and again rather than wait inside Postgres. There a statement_timeout would end the wait,
// and the snapshot of the waiting statement would hold up CREATE INDEX CONCURRENTLY.
func locked(ctx context.Context, conn *pgx.Conn, do func() error) error {
	if err := takeLock(ctx, conn); err != nil {
		return err
	}
	err := do()
	if conn.IsClosed() { // so Postgres has released it
		return err
	}
	return errors.Join(err, releaseLock(context.WithoutCancel(ctx), conn))
}

// takeLock waits until the connection has the lock or the context ends.
func takeLock(ctx context.Context, conn *pgx.Conn) error {
	ticker := time.NewTicker(lockPoll)
	defer ticker.Stop()

	for taken := false; ; taken = true {
		if taken {
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
		var locked bool
		err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_try_advisory_lock($1)", lockID).Scan(&locked)
		switch {
		case err != nil && taken && ctx.Err() != nil:
			return fmt.Errorf("another session migrates, it has had advisory lock %d all the while: %w",
				lockID, context.Cause(ctx))
		case err != nil:
			return fmt.Errorf("take the advisory lock: %w", err)
		case locked:
			return nil
		}
	}
}

func releaseLock(ctx context.Context, conn *pgx.Conn) error {
	var unlocked bool
	if err := conn.QueryRow(ctx, "SELECT pg_catalog.pg_advisory_unlock($1)", lockID).Scan(&unlocked); err != nil {
		return fmt.Errorf("release the advisory lock: %w", err)
	}
	if !unlocked {
		return errors.New("the session that took the advisory lock is another now: " +
			"connect to Postgres itself, not through a pooler in transaction mode")
	}
	return nil
}
