package engine

import (
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Database is the database to which a client sends its statements.
type Database struct {
	DB     pg.DB
	asked  pg.DB      // gets the statements that decide no requests: DB, but for tests with Through
	door   Door       // the same as asked, if that is a door to a service; otherwise nil
	direct pg.DB      // the database to ask while the service is away, or nil
	memory *memdb.DB  // the same as DB, if DB is in memory; otherwise nil
	Turn   *turn.Turn // taken by each user of a single connection; nil for a pool
	schema string
	// hungAt is when a statement last failed because Postgres was away or slow, or nil if Postgres has answered since.
	hungAt atomic.Pointer[time.Time]
	// sharded is true if the database is a proxy for shards. If the proxy rolls its transaction back, the shards still
	// keep their decisions.
	sharded atomic.Bool
	clock   func() time.Time // replaces the database's clock; may be nil
	// ManyParts is the smallest number of parts for which rate_limit_take_all is faster than rate_limit_all. For one
	// request with 3 parts, both functions take equally long.
	ManyParts int
	// ShadowWait is how many milliseconds a shadow waits for a locked row. After that, the shadow stays undecided.
	ShadowWait int32
	attempts   attempts         // how the calls of rate_limit_take_all have ended
	statements map[int16]string // the key is an algorithm's code, ofAll, takesOfAll or ofSlots
}

// NewDatabase returns a Database, and sends no statement.
func NewDatabase(db pg.DB, schema string, clock func() time.Time) *Database {
	d := &Database{DB: db, asked: db, Turn: turn.Of(db), schema: schema, clock: clock, ManyParts: 6, ShadowWait: 5}
	d.memory, _ = db.(*memdb.DB)
	if door, ok := db.(Door); ok {
		d.goThrough(door)
	}
	d.statements = map[int16]string{
		ofAll: Text("all", schema), takesOfAll: Text("takeall", schema), ofSlots: Text("slots", schema),
	}
	for _, a := range algorithm.All() {
		d.statements[a.Code] = Text(a.File, schema)
	}
	return d
}

// These numbers stand for other functions in place of an algorithm's code.
const (
	ofAll      int16 = 0
	takesOfAll int16 = -1
	ofSlots    int16 = -2
)

// goThrough makes the requests go through a door.
func (d *Database) goThrough(door Door) { d.asked, d.door, d.direct = door, door, door.Direct() }

// refusesTx returns an error if a caller's transaction cannot be used, because it is not of the service's database.
func (d *Database) refusesTx() error {
	if _, ok := d.DB.(Door); ok {
		return ErrDoorTx
	}
	return nil
}

// forStatements returns the database for statements that decide requests.
func (d *Database) forStatements() pg.DB {
	if d.direct != nil {
		return d.direct
	}
	return d.DB
}

// pooled returns whether several goroutines can use the database at once, as with a pool.
func (d *Database) pooled() bool { return d.Turn == nil }

// now returns the time to use in place of the database's clock. It returns nil if the database shall use its clock.
func (d *Database) now() *time.Time {
	if d.clock == nil {
		return nil
	}
	t := d.clock()
	return &t
}

// Transaction has the settings for the transaction of a statement. The zero value changes no settings, as a single
// connection needs it.
type Transaction struct {
	LockTimeout *int32 // in milliseconds; -1 in a caller's transaction
	SkipHeld    bool   // skip locked rows
}

// own returns whether the engine, and not the caller, begins and ends the transaction.
func (tx Transaction) own() bool { return tx.LockTimeout != nil && *tx.LockTimeout > 0 }

// callersTransaction returns the settings for a statement on a single connection or in a caller's transaction.
func callersTransaction(db pg.DB) Transaction {
	if pg.InTransaction(db) {
		return Transaction{LockTimeout: new(int32(-1))}
	}
	return Transaction{}
}

// LockTimeout converts d to a lock_timeout in milliseconds. The result is at least 1, because 0 would mean no timeout.
func LockTimeout(d time.Duration) *int32 {
	ms := int32(min(max(d.Milliseconds(), 1), 1<<30))
	return &ms
}
