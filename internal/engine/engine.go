// Package engine sends the requests of a process to one database, and returns the decisions. These words have a special
// meaning in this package:
//
//   - An ask is a question about a key. A request is an ask with decisions. A part is one row of a request.
//   - Requests take, look, give back or grant. A take describes the units that a request takes from one row.
//   - A receipt has the takes of a decision or lease. A claim is the part of a receipt for one decision.
//   - A queue holds waiting requests, in groups. One call of a function decides a group. Limiters take turns.
//   - A batch is a group of requests that leave the queue together, in one statement or several.
//   - Requests for the same key and cost are merged. The first of them, the leader, is sent for all.
//   - A held key is a key whose row another transaction keeps locked. Requests for held keys wait in the lane.
//   - A lease is a stock of units that this process has taken ahead. A giving is a return of unused units.
//   - A kind says which table requests need, and whether commits wait for the WAL. Each kind has a breaker.
//   - A shard is a database behind a proxy, with a separate queue. A stripe is a part of a map with a mutex.
//
// Package model decides requests if the database is in memory, and for the fallback while Postgres is away.
package engine

import (
	"log/slog"
	"time"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/keeper"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Engine sends the requests of a process to one database. Several goroutines may use an Engine at once.
type Engine struct {
	Settings Settings
	Database *Database
	Queues   queues
	Batcher  *Batcher // the batcher of the first queue; it also decides in callers' transactions
	Denials  *Denials // nil if the engine remembers no denials
	Leases   *Leases
	Fallback *Fallback
	Keeper   *keeper.Keeper
	Requests requestPool
	sets     Space // stands for all sets of AllowAll in the queue, where each limiter has a Space
}

// Settings say how an Engine uses its database.
type Settings struct {
	Schema       string        // the schema of the functions; "" means that search_path finds them
	Timeout      time.Duration // the timeout of a call, above 0
	MaxInFlight  int           // how many statements may be under way at once, at least 1
	MaxBatch     int           // how many requests a statement may have, at least 1
	DenialMaxAge time.Duration
	Clock        func() time.Time // replaces the clocks of the database and of this process; may be nil
	Logger       *slog.Logger     // nil means slog.Default
	Hooks        Hooks
}

// Hooks are functions to call after statements, uses of leases and changes of breakers. Each hook may be nil.
type Hooks struct {
	Statement func(Statement)
	Lease     func(LeaseUse)
	Breaker   func(BreakerChange)
	Renewal   func(keeper.Renewal)
}

// Statement describes a statement that has ended.
type Statement struct {
	Limiter string // "" if the statement was for several limiters
	Shard   int    // from 0
	Size    int    // how many requests the statement decided
	Queued  int    // how many requests stayed in the queue
	Err     error
	Latency time.Duration
}

// LeaseUse counts leased units: Taken ones, Returned ones, and Stranded ones that could not go back.
type LeaseUse struct {
	Limiter                   string
	Taken, Returned, Stranded int64
}

// BreakerChange describes that a breaker has opened or closed.
type BreakerChange struct {
	Kind  string
	Shard int // from 0
	Open  bool
	Err   error // why the breaker has opened
}

// NewEngine returns an engine for a database. It starts no goroutine and sends no statement.
func NewEngine(db pg.DB, s Settings) *Engine {
	e := NewServing(db, s)
	if d := e.Database; Through != nil && d.pooled() && d.memory == nil && d.door == nil {
		if door := Through(db, s); door != nil {
			d.goThrough(door)
		}
	}
	return e
}

// NewServing returns an engine whose requests go through no door of Through.
func NewServing(db pg.DB, s Settings) *Engine {
	e := &Engine{Settings: s, Database: NewDatabase(db, s.Schema, s.Clock), Fallback: NewFallback(s.Clock)}
	if e.Pooled() {
		e.Denials = NewDenials(s.DenialMaxAge, s.Clock)
	}
	e.Leases = newLeases(s.Clock, s.Timeout, s.Hooks.Lease)
	e.Leases.giveBack = e.giveBack
	e.Keeper = e.newKeeper()
	e.Batcher = e.Queues.start(e.newQueue).Batcher
	return e
}

func (e *Engine) newQueue(shard int) *Queue {
	e.Database.sharded.Store(shard > 0)
	s, begin := &e.Settings, time.Now()
	return newQueue(&Batcher{
		queues: &e.Queues, Shard: shard, database: e.Database, Denials: e.Denials, Leases: e.Leases,
		Breaker: &Breaker{shard: shard, Timeout: s.Timeout, told: s.Hooks.Breaker, Begin: begin},
		log:     &troubleLog{queues: &e.Queues, shard: shard, logger: s.Logger, begin: begin},
		Held:    &heldKeys{timeout: s.Timeout},
		told:    s.Hooks.Statement, timeout: s.Timeout, Begin: begin,
	}, s.MaxInFlight, s.MaxBatch)
}

// Pooled returns whether several goroutines can use the database at once, as with a pool.
func (e *Engine) Pooled() bool { return e.Database.pooled() }

// Asks returns whether the engine asks a service, and not a database.
func (e *Engine) Asks() bool { return e.Database.door != nil }

// Shards returns the number of known shards, or 1 if there is no proxy.
func (e *Engine) Shards() int { return e.Queues.Shards() }

// SameRows returns whether another engine uses the same rows. If the engines have different pools, it returns false,
// even if both pools connect to the same database.
func (e *Engine) SameRows(other *Engine) bool {
	return e == other || e.Settings.Schema == other.Settings.Schema && e.Database.DB == other.Database.DB
}

// SameSchema returns whether another engine calls functions in a schema of the same name.
func (e *Engine) SameSchema(other *Engine) bool { return e.Settings.Schema == other.Settings.Schema }

// Cache is a weak reference to the remembered denials of an engine. A Cache does not keep the engine in memory.
type Cache struct{ denials weak.Pointer[Denials] }

// Cache returns a weak reference to the remembered denials of the engine.
func (e *Engine) Cache() Cache { return Cache{weak.Make(e.Denials)} }

// ForgetIf forgets the denials of all keys for which is() returns true. It returns whether the engine is still in use.
func (c Cache) ForgetIf(is func(limiter, key string) bool) (inUse bool) {
	d := c.denials.Value()
	if d != nil {
		d.ForgetIf(func(k DenialKey) bool { return is(k.Name, k.Key) })
	}
	return d != nil
}
