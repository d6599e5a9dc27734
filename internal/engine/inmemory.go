package engine

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// ErrMemoryTx is the error for a call in a transaction. Rows in memory cannot be part of a transaction.
var ErrMemoryTx = errors.New("ratelimit: a row in memory is part of no transaction")

type memoryRow struct {
	algorithm int16
	State     model.State
}

// decideInMemory decides requests by package model, one after the other. The answers are the same as those of Postgres.
func (d *Database) decideInMemory(db pg.DB, requests []*Request) error {
	if db != d.DB {
		return ErrMemoryTx
	}
	now := time.Now()
	if d.clock != nil {
		now = d.clock()
	}
	for _, r := range requests {
		for i := range r.Parts {
			if zone := r.Parts[i].Rules.Numbers().Zone; zone != "" {
				if _, err := model.Location(zone); err != nil {
					return &ZoneError{zone, "which this process has no time zone data for; import _ \"time/tzdata\""}
				}
			}
		}
	}
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for _, r := range requests {
		r.decideIn(d.memory, now.UnixMicro())
	}
	return nil
}

// decideIn decides a request and the requests merged with it. Each request takes from all of its rows, or from none.
func (r *Request) decideIn(db *memdb.DB, clock int64) {
	before := make([]model.State, len(r.Parts))
	for i := range r.Parts {
		before[i] = r.Parts[i].load(db)
	}
	granted := int64(0)
	for granted < r.Count && r.fitsIn(db, clock) {
		granted++
		for i := range r.Parts {
			p := &r.Parts[i]
			next, _ := p.decide(p.load(db), clock, p.Cost)
			p.store(db, next)
		}
	}
	for i := range r.Parts {
		p := &r.Parts[i]
		now := p.load(db)
		_, p.Decision = p.decide(now, clock, 0)
		p.Decision.State.Log = ""
		if !p.Charge { // a charge keeps the RetryAfter of a look
			p.Decision.RetryAfter = 0
		}
		if granted < r.Count && !p.Charge {
			if next, d := p.decide(now, clock, p.Cost); d.Granted == 0 { // this part denies the request
				p.store(db, next) // the denial may have changed the row, if the clock was set back
				p.Decision = d
			}
		}
		if bucket, ok := p.Rules.(model.TokenBucket); ok && r.Ahead > 0 {
			p.Decision.State.Log = before[i].Log
			if ahead := granted - (r.Count - r.Ahead); ahead > 0 {
				p.store(db, bucket.Lend(now, ahead*p.Cost))
			}
		}
		if p.Cost > 0 {
			p.Decision.Taken.Spent = p.credit(before[i], clock) - p.credit(now, clock)
		}
		p.Decision.Granted, p.Decision.DecidedAt = granted, time.UnixMicro(clock)
	}
}

// fitsIn returns whether all rows of a request have room for its cost.
func (r *Request) fitsIn(db *memdb.DB, clock int64) bool {
	for i := range r.Parts {
		p := &r.Parts[i]
		if _, d := p.decide(p.load(db), clock, p.Cost); d.Granted == 0 {
			return false
		}
	}
	return true
}

// decide applies a request to a row's state s. A positive n takes or charges units, and an n of 0 looks. A negative n
// gives units back, or grants units if p.Refund is nil.
func (p *Part) decide(s model.State, clock, n int64) (model.State, model.Decision) {
	switch {
	case n > 0 && p.Charge:
		next, d, _ := model.Charge(p.Rules, s, clock, n)
		return next, d
	case n >= 0:
		return p.Rules.Decide(s, clock, n)
	case p.Refund == nil:
		return model.Grant(p.Rules, s, clock, -n)
	}
	k := *p.Refund
	k.Units = -n
	return p.Rules.Refund(s, clock, k)
}

func (p *Part) credit(s model.State, clock int64) int64 {
	_, d := p.decide(s, clock, 0)
	return d.State.Credit
}

func (p *Part) row() memdb.Row {
	return memdb.Row{Durable: p.Space.Durable, Name: p.Name, Key: p.Key}
}

// load returns the state of the part's row. It returns an empty state if the row is missing or has another algorithm.
func (p *Part) load(db *memdb.DB) model.State {
	row, _ := db.Rows[p.row()].(memoryRow)
	if row.algorithm != p.Rules.Numbers().Algorithm {
		return model.State{}
	}
	return row.State
}

func (p *Part) store(db *memdb.DB, s model.State) {
	if s == p.load(db) { // a refund for a missing row must not make a row
		return
	}
	if db.Rows == nil {
		db.Rows = map[memdb.Row]any{}
	}
	db.Rows[p.row()] = memoryRow{algorithm: p.Rules.Numbers().Algorithm, State: s}
}

func (d *Database) resetInMemory(db pg.DB, space *Space, names []string, key string) error {
	if db != d.DB {
		return ErrMemoryTx
	}
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for _, name := range names {
		delete(d.memory.Rows, memdb.Row{Durable: space.Durable, Name: name, Key: key})
	}
	return nil
}
