package main

import (
	"context"
	_ "embed"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/lockwait"
)

// longLock is for how long somebody may have a lock on our tables before the doctor says so.
const longLock = 5 * time.Second

//go:embed sql/doctor/locks.sql
var locksSQL string

// lockHolder is a row of locksSQL.
type lockHolder struct {
	lockwait.Holder
	what    string
	closed  bool // nobody else can even read the table
	stopped bool // nobody else can write to it
}

// readLocks looks who has had locks on our tables for a time. It waits for none of them.
func (e *examination) readLocks(ctx context.Context, since time.Duration) (held []lockHolder, err error) {
	options := pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, e.pool, options, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, "SET LOCAL jit = off"); err != nil { // as for all statements of the command
			return err
		}
		var schema string
		if err := tx.QueryRow(ctx, sessionSQL, strconv.FormatInt(e.app.timeout.Milliseconds(), 10), e.app.schema).Scan(
			&schema, nil, nil, nil, nil, nil); err != nil {
			return err
		}
		rows, err := tx.Query(ctx, locksSQL, schema, since.Seconds(), lockwait.Migrations)
		if err != nil {
			return err
		}
		held, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (h lockHolder, err error) {
			return h, row.Scan(
				&h.PID, &h.Prepared, &h.Application, &h.State, &h.Since, &h.what, &h.closed, &h.stopped)
		})
		return err
	})
	return held, err
}

// checkLocks comes first, because it also tells whether somebody keeps all others from a table. Then all other checks
// would wait.
func (e *examination) checkLocks(ctx context.Context) (f finding, closed bool, err error) {
	held, err := e.readLocks(ctx, longLock)
	f = judgeLocks(held)
	err = could(err, &f)
	f.Check = "locks"
	if closed = slices.ContainsFunc(held, func(h lockHolder) bool { return h.closed }); closed {
		f.Do += "; then run this again, because nothing else could be looked at"
	}
	return f, closed, err
}

func judgeLocks(held []lockHolder) finding {
	var found, ends []string
	worst := warning
	for _, h := range held {
		found = append(found, h.String()+" has "+h.what)
		ends = append(ends, "`"+h.End()+"`")
		if h.closed || h.stopped {
			worst = problem
		}
	}
	if len(held) == 0 {
		return ok("nobody has had one on the tables for longer than %v", longLock)
	}
	effect := "migrations wait for that, and calls for rows that it has written"
	if worst == problem {
		effect = "calls fail meanwhile"
	}
	f := worst.finding("let it end, or end it as its role or a superuser, which rolls back what it has not committed: "+
		strings.Join(ends, ", "), "%s: %s", effect, strings.Join(found, "; "))
	f.any = true
	return f
}
