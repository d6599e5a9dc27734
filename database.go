package ratelimit

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// DBTX is a database for a [Client], usually a *pgxpool.Pool, on which concurrent calls share statements. On one
// connection or transaction (*pgxpool.Conn, *pgx.Conn, pgx.Tx) calls take turns, also with other clients and
// sweepers. Each is a statement of its own in that session, which commits as it says. Denials are not remembered,
// and MaxInFlight, MaxBatch, DenialMaxAge and Observer.Statement mean nothing.
//
// Package sqldb makes a DBTX of a *sql.DB. Any other type counts as a pool: several goroutines use it at once. So to
// trace, wrap a pool, or a transaction in a type that is a pgx.Tx. A wrapped single connection would answer "conn
// busy".
type DBTX interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

var (
	_ DBTX = (*pgxpool.Pool)(nil)
	_ DBTX = (*pgxpool.Conn)(nil)
	_ DBTX = (*pgx.Conn)(nil)
	_ DBTX = (pgx.Tx)(nil)
)

// database is what the statements of a client have in common.
type database struct {
	db     DBTX
	memory *memory.DB // db if it is in memory; else nil
	turn   *turn.Turn // held while db is in use, and shared by all who use it; nil for a pool
	schema string
	// hungAt is when a statement last failed because Postgres is away or slow, nil if Postgres has answered since.
	hungAt atomic.Pointer[time.Time]
	// sharded tells that it is a proxy for shards. What a shard has decided stays, whatever becomes of the proxy's own
	// transaction.
	sharded atomic.Bool
	clock   func() time.Time // replaces the database's clock, unless it is nil
	// manyParts is of how many parts together requests are that rate_limit_take_all is asked for. For 3 parts of one
	// request it takes as long as rate_limit_all (220 us), for 6 it takes 7 % less, for 10 it takes 25 % less.
	manyParts int
	// shadowWait is how long a shadow waits for a row that somebody holds, in milliseconds. If that is not enough, it
	// is left undecided.
	shadowWait int32
	attempts   attempts // to have rate_limit_take_all decide
	// qualified are the statements by code, as statement takes it, if the schema stands in them.
	qualified map[int16]string
}

func newDatabase(db DBTX, schema string, clock func() time.Time) *database {
	d := &database{db: db, turn: turn.Of(db), schema: schema, clock: clock, manyParts: 6, shadowWait: 5}
	d.memory, _ = db.(*memory.DB)
	if schema != "" {
		d.qualified = map[int16]string{
			ofAll: pg.Qualify(allStatement, schema), takesOfAll: pg.Qualify(takeAllStatement, schema),
		}
		for _, a := range algorithm.All() {
			d.qualified[a.Code] = pg.Qualify(implementationOf(a.Code).statement, schema)
		}
	}
	return d
}

// These stand for rate_limit_all and rate_limit_take_all, where the codes stand for the functions of the algorithms.
const (
	ofAll      int16 = 0
	takesOfAll int16 = -1
)

// statement is the text of a statement that decides.
func (d *database) statement(code int16) string {
	switch {
	case d.qualified != nil:
		return d.qualified[code]
	case code == ofAll:
		return allStatement
	case code == takesOfAll:
		return takeAllStatement
	}
	return implementationOf(code).statement
}

// pooled tells whether several goroutines can use the database at once.
func (d *database) pooled() bool { return d.turn == nil }

// now is what replaces the database's clock, or nil.
func (d *database) now() *time.Time {
	if d.clock == nil {
		return nil
	}
	t := d.clock()
	return &t
}

// transaction says how a statement's transaction is set up. The zero value is that of a single connection, which keeps
// its settings.
type transaction struct {
	lockTimeout *int32 // milliseconds if the transaction is ours; -1 if it goes on after the statement
	skipHeld    bool   // pass over rows that somebody has locked
}

// own tells whether the transaction is ours rather than the caller's.
func (tx transaction) own() bool { return tx.lockTimeout != nil && *tx.lockTimeout > 0 }

// callersTransaction is for a statement on a single connection, or in a transaction.
func callersTransaction(db DBTX) transaction {
	if pg.InTransaction(db) {
		return transaction{lockTimeout: new(int32(-1))}
	}
	return transaction{}
}

// lockTimeout is a lock_timeout in milliseconds. It is at least 1, because 0 would turn it off.
func lockTimeout(d time.Duration) *int32 {
	ms := int32(min(max(d.Milliseconds(), 1), 1<<30))
	return &ms
}
