package engine

import (
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Database has what all statements of a client share.
type Database struct {
	DB     pg.DB
	memory *memdb.DB  // DB if that is in memory; else nil
	Turn   *turn.Turn // held while DB is in use, and shared by all who use it; nil for a pool
	schema string
	// hungAt is when a statement last failed because Postgres is away or slow. It is nil if Postgres has answered
	// since.
	hungAt atomic.Pointer[time.Time]
	// sharded tells that the database is a proxy for shards. A decision of a shard stays, even if the proxy's own
	// transaction is rolled back.
	sharded atomic.Bool
	clock   func() time.Time // replaces the database's clock; may be nil
	// ManyParts is how many parts requests have together for rate_limit_take_all to be worth it. For 3 parts of one
	// request it takes as long as rate_limit_all.
	ManyParts int
	// ShadowWait is how long a shadow waits for a locked row, in milliseconds. After that it stays undecided.
	ShadowWait int32
	attempts   attempts         // of rate_limit_take_all
	statements map[int16]string // by the code of the algorithm, ofAll or takesOfAll
}

// NewDatabase returns a database. It sends nothing.
func NewDatabase(db pg.DB, schema string, clock func() time.Time) *Database {
	d := &Database{DB: db, Turn: turn.Of(db), schema: schema, clock: clock, ManyParts: 6, ShadowWait: 5}
	d.memory, _ = db.(*memdb.DB)
	d.statements = map[int16]string{ofAll: Text("all", schema), takesOfAll: Text("takeall", schema)}
	for _, a := range algorithm.All() {
		d.statements[a.Code] = Text(a.File, schema)
	}
	return d
}

// Codes of rate_limit_all and rate_limit_take_all, beside those of the algorithms.
const (
	ofAll      int16 = 0
	takesOfAll int16 = -1
)

// pooled tells whether several goroutines can use the database at once.
func (d *Database) pooled() bool { return d.Turn == nil }

// now returns the time that replaces the database's clock, or nil.
func (d *Database) now() *time.Time {
	if d.clock == nil {
		return nil
	}
	t := d.clock()
	return &t
}

// Transaction says how the transaction of a statement is set up. The zero value is for a single connection, which keeps
// its settings.
type Transaction struct {
	LockTimeout *int32 // in milliseconds if the transaction is ours; -1 in a caller's transaction
	SkipHeld    bool   // pass over locked rows
}

// own tells whether the transaction is ours.
func (tx Transaction) own() bool { return tx.LockTimeout != nil && *tx.LockTimeout > 0 }

// callersTransaction returns the set-up for a single connection or a caller's transaction.
func callersTransaction(db pg.DB) Transaction {
	if pg.InTransaction(db) {
		return Transaction{LockTimeout: new(int32(-1))}
	}
	return Transaction{}
}

// LockTimeout returns a lock_timeout in milliseconds. It is at least 1, because 0 would turn it off.
func LockTimeout(d time.Duration) *int32 {
	ms := int32(min(max(d.Milliseconds(), 1), 1<<30))
	return &ms
}
