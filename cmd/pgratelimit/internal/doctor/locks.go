package doctor

import (
	"context"
	_ "embed"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/lockholders"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
)

// LongLock is how long a session may lock the limiter's tables before doctor reports the session.
const LongLock = 5 * time.Second

//go:embed sql/locks.sql
var locksSQL string

// LockHolder is a row of locksSQL.
type LockHolder struct {
	lockholders.Holder

	What    string
	Closed  bool // whether no other session can read the table
	Stopped bool // whether no other session can write to the table
}

// ReadLocks returns the sessions that have locked the limiter's tables for at least since. ReadLocks does not wait for
// these sessions.
func (e *Examination) ReadLocks(ctx context.Context, since time.Duration) (held []LockHolder, err error) {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, e.Pool, options, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL jit = off"); err != nil { // all statements of the command run without JIT
			return err
		}
		var schema string
		if err := tx.QueryRow(ctx, cli.SessionSQL, strconv.FormatInt(e.App.Timeout.Milliseconds(), 10),
			e.App.Schema).Scan(
			&schema, nil, nil, nil, nil, nil, nil); err != nil {
			return err
		}
		held, err = cli.Rows[LockHolder](ctx, tx, locksSQL, schema, since.Seconds(), lockholders.Migrations)
		return err
	})
	return held, err
}

// checkLocks looks for locks on the limiter's tables. checkLocks comes first, because other checks would wait for a
// lock.
func (e *Examination) checkLocks(ctx context.Context) (f cli.Finding, closed bool, err error) {
	held, err := e.ReadLocks(ctx, LongLock)
	f = JudgeLocks(held)
	err = could(err, &f)
	f.Check = "locks"
	if closed = slices.ContainsFunc(held, func(h LockHolder) bool { return h.Closed }); closed {
		f.Do += "; then run this again, because nothing else could be looked at"
	}
	return f, closed, err
}

func JudgeLocks(held []LockHolder) cli.Finding {
	var found, ends []string
	worst := cli.Warning
	for _, h := range held {
		found = append(found, h.String()+" has "+h.What)
		ends = append(ends, "`"+h.End()+"`")
		if h.Closed || h.Stopped {
			worst = cli.Problem
		}
	}
	if len(held) == 0 {
		return cli.OK("nobody has had one on the tables for longer than %v", LongLock)
	}
	effect := "migrations wait for that, and calls for rows that it has written"
	if worst == cli.Problem {
		effect = "calls fail meanwhile"
	}
	f := worst.Finding("let it end, or end it as its role or a superuser, which rolls back what it has not committed: "+
		strings.Join(ends, ", "), "%s: %s", effect, strings.Join(found, "; "))
	f.Anybody = true
	return f
}
