// Package engine has the requests of a process decided by one database.
//
// A request waits in a queue until a statement leaves, with those that came meanwhile. A batch is requests on their
// way, in one statement or several. Denials are remembered in this process, and leases are spent in it. Keys whose rows
// somebody else has locked go into a lane of their own, and a breaker tells when to ask no more. Behind a proxy, each
// shard has a queue. A database in memory and a fallback decide by package model instead.
package engine

import (
	"log/slog"
	"time"
	"weak"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Engine has the requests of a process decided by one database. Several goroutines may use it at once.
type Engine struct {
	Settings Settings
	Database *Database
	Queues   queues
	Batcher  *Batcher // the first queue's, which also decides in transactions of callers
	Denials  *Denials // nil if none are remembered
	Leases   *Leases
	Fallback *Fallback
	Requests requestPool
	sets     Space // whose turn it is for sets
}

// Settings say how an Engine uses its database.
type Settings struct {
	Schema       string        // where the functions are; "": search_path finds them
	Timeout      time.Duration // of a call, above 0
	MaxInFlight  int           // statements under way, at least 1
	MaxBatch     int           // requests in a statement, at least 1
	DenialMaxAge time.Duration
	Clock        func() time.Time // replaces the clocks of the database and of this process, unless it is nil
	Logger       *slog.Logger     // nil: slog.Default
	Hooks        Hooks
}

// Hooks are told what happens. Each may be nil.
type Hooks struct {
	Statement func(Statement)
	Lease     func(LeaseUse)
	Breaker   func(BreakerChange)
}

// Statement is a statement that has ended.
type Statement struct {
	Limiter string // "" if it was for several
	Shard   int    // from 0
	Size    int    // how many requests it decided
	Queued  int    // how many requests stayed behind when it left
	Err     error  // nil if it decided
	Latency time.Duration
}

// LeaseUse counts units that were taken ahead, went back, or could not go back.
type LeaseUse struct {
	Limiter                   string
	Taken, Returned, Stranded int64
}

// BreakerChange tells that a breaker has opened or closed.
type BreakerChange struct {
	Kind  string
	Shard int // from 0
	Open  bool
	Err   error // why it has opened
}

// NewEngine returns an engine for a database. It starts nothing, and asks nothing.
func NewEngine(db pg.DB, s Settings) *Engine {
	e := &Engine{Settings: s, Database: NewDatabase(db, s.Schema, s.Clock), Fallback: NewFallback(s.Clock)}
	if e.Pooled() {
		e.Denials = NewDenials(s.DenialMaxAge, s.Clock)
	}
	e.Leases = NewLeases(s.Clock, s.Timeout, s.Hooks.Lease)
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

// Pooled tells whether several goroutines can use the database at once.
func (e *Engine) Pooled() bool { return e.Database.pooled() }

// Shards is how many shards are known, or 1.
func (e *Engine) Shards() int { return e.Queues.Shards() }

// SameRows tells whether another engine asks for the same rows, as far as this can be seen.
func (e *Engine) SameRows(other *Engine) bool {
	return e == other || e.Settings.Schema == other.Settings.Schema && e.Database.DB == other.Database.DB
}

// SameSchema tells whether another engine calls the functions of the same schema.
func (e *Engine) SameSchema(other *Engine) bool { return e.Settings.Schema == other.Settings.Schema }

// Cache is the denials that an engine remembers. It does not keep the engine in memory.
type Cache struct{ denials weak.Pointer[Denials] }

// Cache returns the engine's.
func (e *Engine) Cache() Cache { return Cache{weak.Make(e.Denials)} }

// ForgetIf forgets the denials of some keys. It tells whether the engine is still in use.
func (c Cache) ForgetIf(is func(limiter, key string) bool) (inUse bool) {
	d := c.denials.Value()
	if d != nil {
		d.ForgetIf(func(k DenialKey) bool { return is(k.Space.Name, k.Key) })
	}
	return d != nil
}
