package engine

import (
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Database is what the statements of a client have in common.
type Database struct {
	DB     pg.DB
	memory *memory.DB // db if it is in memory; else nil
	Turn   *turn.Turn // held while db is in use, and shared by all who use it; nil for a pool
	schema string
	// hungAt is when a statement last failed because Postgres is away or slow, nil if Postgres has answered since.
	hungAt atomic.Pointer[time.Time]
	// sharded tells that it is a proxy for shards. What a shard has decided stays, whatever becomes of the proxy's own
	// transaction.
	sharded atomic.Bool
	clock   func() time.Time // replaces the database's clock, unless it is nil
	// manyParts is of how many parts together requests are that rate_limit_take_all is asked for. For 3 parts of one
	// request it takes as long as rate_limit_all (220 us), for 6 it takes 7 % less, for 10 it takes 25 % less.
	ManyParts int
	// shadowWait is how long a shadow waits for a row that somebody holds, in milliseconds. If that is not enough, it
	// is left undecided.
	ShadowWait int32
	attempts   attempts         // to have rate_limit_take_all decide
	statements map[int16]string // by code, as callOne, callAll and takeAll take them
}

// NewDatabase returns a database that has not been asked yet.
func NewDatabase(db pg.DB, schema string, clock func() time.Time) *Database {
	d := &Database{DB: db, Turn: turn.Of(db), schema: schema, clock: clock, ManyParts: 6, ShadowWait: 5}
	d.memory, _ = db.(*memory.DB)
	d.statements = map[int16]string{ofAll: Text("all", schema), takesOfAll: Text("takeall", schema)}
	for _, a := range algorithm.All() {
		d.statements[a.Code] = Text(a.File, schema)
	}
	return d
}

// These stand for rate_limit_all and rate_limit_take_all, where the codes stand for the functions of the algorithms.
const (
	ofAll      int16 = 0
	takesOfAll int16 = -1
)

// pooled tells whether several goroutines can use the database at once.
func (d *Database) pooled() bool { return d.Turn == nil }

// now is what replaces the database's clock, or nil.
func (d *Database) now() *time.Time {
	if d.clock == nil {
		return nil
	}
	t := d.clock()
	return &t
}

// Transaction says how a statement's transaction is set up. The zero value is that of a single connection, which keeps
// its settings.
type Transaction struct {
	LockTimeout *int32 // milliseconds if the transaction is ours; -1 if it goes on after the statement
	SkipHeld    bool   // pass over rows that somebody has locked
}

// own tells whether the transaction is ours rather than the caller's.
func (tx Transaction) own() bool { return tx.LockTimeout != nil && *tx.LockTimeout > 0 }

// callersTransaction is for a statement on a single connection, or in a transaction.
func callersTransaction(db pg.DB) Transaction {
	if pg.InTransaction(db) {
		return Transaction{LockTimeout: new(int32(-1))}
	}
	return Transaction{}
}

// LockTimeout is a lock_timeout in milliseconds. It is at least 1, because 0 would turn it off.
func LockTimeout(d time.Duration) *int32 {
	ms := int32(min(max(d.Milliseconds(), 1), 1<<30))
	return &ms
}
