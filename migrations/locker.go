package migrations

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/pressly/goose/v3/lock"
)

const (
	// lockID is the advisory lock under which migrations run: "ratelimt" in ASCII. goose's own default, 4097083626, fits in
	// 32 bits, as do the ids of tools that hash with CRC-32, so an application's migrations never wait for ours.
	lockID int64 = 0x726174656c696d74

	// lockPoll is how often a process asks for the lock that another one has. All migrations together take some 20 ms.
	lockPoll = 50 * time.Millisecond
)

// locker keeps processes that migrate at once apart.
//
// It differs from goose's session locker in what is fixed there: that one asks once a second at best, so the last of eight
// processes would be done after several seconds, and it keeps trying to release a lock that its session does not have for
// at least as long. Like that one it asks again and again rather than wait inside Postgres, where a statement_timeout
// would end the wait, and where its snapshot would hold up CREATE INDEX CONCURRENTLY.
type locker struct{}

var _ lock.SessionLocker = locker{}

// SessionLock waits until the connection has the lock or the context ends.
func (locker) SessionLock(ctx context.Context, conn *sql.Conn) error {
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
		err := conn.QueryRowContext(ctx, "SELECT pg_catalog.pg_try_advisory_lock($1)", lockID).Scan(&locked)
		switch {
		case err != nil && taken && ctx.Err() != nil:
			return fmt.Errorf("another session migrates, it has had advisory lock %d all the while: %w", lockID, context.Cause(ctx))
		case err != nil:
			return fmt.Errorf("take the advisory lock: %w", err)
		case locked:
			return nil
		}
	}
}

// SessionUnlock releases the lock. If the connection has broken, then Postgres has released it already.
func (locker) SessionUnlock(ctx context.Context, conn *sql.Conn) error {
	var unlocked bool
	if err := conn.QueryRowContext(ctx, "SELECT pg_catalog.pg_advisory_unlock($1)", lockID).Scan(&unlocked); err != nil {
		return fmt.Errorf("release the advisory lock: %w", err)
	}
	if !unlocked {
		return errors.New("the session that took the advisory lock is another now: " +
			"connect to Postgres itself, not through a pooler in transaction mode")
	}
	return nil
}
