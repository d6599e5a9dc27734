// Package engine brings the requests of a process to one database, and its decisions back. Its words:
//
//   - An ask is a question about a key. A request is an ask on its way, and a part is one row of it.
//   - Requests take, look, give back or grant. A take is what a request takes from one row.
//   - A receipt has the takes of one decision, or of one lease. A claim is one decision's share of a receipt.
//   - A queue holds waiting requests, in groups that one call of a function can decide. Limiters take turns.
//   - A batch is the requests that leave the queue together, in one statement or several.
//   - Requests that ask for the same are merged. The first of them, the leader, is asked for all.
//   - A held key is one whose row somebody else has locked. Requests for held keys wait in the lane.
//   - A lease is units taken ahead, to be spent in this process. A giving is what goes back of leases.
//   - A kind is what requests need of the database. Each kind has a breaker, which stops asking during an outage.
//   - A shard is a database behind a proxy, and has a queue of its own. A stripe is a part of a map with its own mutex.
//
// A database in memory, and a fallback while Postgres is away, decide by package model instead.
package engine

import (
	"log/slog"
	"time"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Engine sends the requests of a process to one database. Several goroutines may use it at once.
type Engine struct {
	Settings Settings
	Database *Database
	Queues   queues
	Batcher  *Batcher // of the first queue; it also decides in callers' transactions
	Denials  *Denials // nil if none are remembered
	Leases   *Leases
	Fallback *Fallback
	Requests requestPool
	sets     Space // stands for all sets where limiters take turns
}

// Settings say how an Engine uses its database.
type Settings struct {
	Schema       string        // of the functions; "": search_path finds them
	Timeout      time.Duration // of a call, above 0
	MaxInFlight  int           // how many statements may be under way, at least 1
	MaxBatch     int           // how many requests a statement may have, at least 1
	DenialMaxAge time.Duration
	Clock        func() time.Time // replaces the clocks of the database and of this process; may be nil
	Logger       *slog.Logger     // nil: slog.Default
	Hooks        Hooks
}

// Hooks are called when something happens. Each may be nil.
type Hooks struct {
	Statement func(Statement)
	Lease     func(LeaseUse)
	Breaker   func(BreakerChange)
}

// Statement describes a statement that has ended.
type Statement struct {
	Limiter string // "" for several limiters
	Shard   int    // from 0
	Size    int    // how many requests it was for
	Queued  int    // how many requests stayed behind when it left
	Err     error
	Latency time.Duration
}

// LeaseUse counts the units of leases that were taken ahead, went back, or could not go back.
type LeaseUse struct {
	Limiter                   string
	Taken, Returned, Stranded int64
}

// BreakerChange says that a breaker has opened or closed.
type BreakerChange struct {
	Kind  string
	Shard int // from 0
	Open  bool
	Err   error // why it has opened
}

// NewEngine returns an engine for a database. It starts nothing and sends nothing.
func NewEngine(db pg.DB, s Settings) *Engine {
	e := &Engine{Settings: s, Database: NewDatabase(db, s.Schema, s.Clock), Fallback: NewFallback(s.Clock)}
	if e.Pooled() {
		e.Denials = NewDenials(s.DenialMaxAge, s.Clock)
	}
	e.Leases = newLeases(s.Clock, s.Timeout, s.Hooks.Lease)
	e.Leases.giveBack = e.giveBack
	e.Batcher = e.Queues.start(e.newQueue).Batcher
	return e
}

// newQueue returns the queue of a shard.
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

// Pooled tells whether several goroutines can use the database at once, as with a pool.
func (e *Engine) Pooled() bool { return e.Database.pooled() }

// Shards is how many shards are known, or 1.
func (e *Engine) Shards() int { return e.Queues.Shards() }

// SameRows tells whether another engine uses the same rows. It may return false for the same database in two pools.
func (e *Engine) SameRows(other *Engine) bool {
	return e == other || e.Settings.Schema == other.Settings.Schema && e.Database.DB == other.Database.DB
}

// SameSchema tells whether another engine calls the functions of the same schema.
func (e *Engine) SameSchema(other *Engine) bool { return e.Settings.Schema == other.Settings.Schema }

// Cache refers to the remembered denials of an engine. It does not keep the engine in memory.
type Cache struct{ denials weak.Pointer[Denials] }

// Cache returns the engine's cache.
func (e *Engine) Cache() Cache { return Cache{weak.Make(e.Denials)} }

// ForgetIf forgets the denials of the keys for which is returns true. It tells whether the engine is still in use.
func (c Cache) ForgetIf(is func(limiter, key string) bool) (inUse bool) {
	d := c.denials.Value()
	if d != nil {
		d.ForgetIf(func(k DenialKey) bool { return is(k.Space.Name, k.Key) })
	}
	return d != nil
}
