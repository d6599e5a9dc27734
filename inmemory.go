package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// errMemoryTx is for a transaction of the caller's, which no row in memory can be part of.
var errMemoryTx error = &ConfigError{
	Field: "tx",
	Reason: "cannot be used with a limiter in memory (package ratelimittest); " +
		"test what asks in a transaction on Postgres",
}

// memoryRow is a row in memory.
type memoryRow struct {
	algorithm int16
	state     model.State
}

// decideInMemory decides requests by the models, one after the other, as the database would.
func (d *database) decideInMemory(db DBTX, requests []*request) error {
	if db != d.db {
		return errMemoryTx
	}
	now := time.Now()
	if d.clock != nil {
		now = d.clock()
	}
	for _, r := range requests {
		for i := range r.parts {
			if zone := r.parts[i].rules.Numbers().Zone; zone != "" {
				if _, err := model.Location(zone); err != nil {
					return errZone(zone, "which this process has no time zone data for; import _ \"time/tzdata\"")
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

// decideIn decides a request and those that are decided as one with it. Each takes from all of its rows, or from
// none.
func (r *request) decideIn(db *memory.DB, clock int64) {
	before := make([]model.State, len(r.parts))
	for i := range r.parts {
		before[i] = r.parts[i].load(db)
	}
	granted := int64(0)
	for granted < r.count && r.fitsIn(db, clock) {
		granted++
		for i := range r.parts {
			p := &r.parts[i]
			next, _ := p.decide(p.load(db), clock, p.cost)
			p.store(db, next)
		}
	}
	for i := range r.parts {
		p := &r.parts[i]
		now := p.load(db)
		_, p.decision = p.decide(now, clock, 0)
		p.decision.RetryAfter, p.decision.State.Log = 0, ""
		if granted < r.count {
			if next, d := p.decide(now, clock, p.cost); d.Granted == 0 { // this part refuses
				p.store(db, next) // which the clock may have left behind
				p.decision = d
			}
		}
		if bucket, ok := p.rules.(model.TokenBucket); ok && r.ahead > 0 {
			p.decision.State.Log = before[i].Log
			if ahead := granted - (r.count - r.ahead); ahead > 0 {
				p.store(db, bucket.Lend(now, ahead*p.cost))
			}
		}
		if p.cost > 0 {
			p.decision.Taken.Spent = p.credit(before[i], clock) - p.credit(now, clock)
		}
		p.decision.Granted, p.decision.DecidedAt = granted, time.UnixMicro(clock)
	}
}

// fitsIn tells whether all parts of a request have room for it.
func (r *request) fitsIn(db *memory.DB, clock int64) bool {
	for i := range r.parts {
		p := &r.parts[i]
		if _, d := p.decide(p.load(db), clock, p.cost); d.Granted == 0 {
			return false
		}
	}
	return true
}

// decide decides about a row in the state s: a take of n, a look (0), or what is given back or granted (below 0).
func (p *part) decide(s model.State, clock, n int64) (model.State, model.Decision) {
	switch {
	case n >= 0:
		return p.rules.Decide(s, clock, n)
	case p.refund == nil:
		return model.Grant(p.rules, s, clock, -n)
	}
	k := *p.refund
	k.Units = -n
	return p.rules.Refund(s, clock, k)
}

// credit is the granted credit of a row in the state s.
func (p *part) credit(s model.State, clock int64) int64 {
	_, d := p.decide(s, clock, 0)
	return *d.State.CreditColumn(p.rules.Numbers().Algorithm)
}

func (p *part) row() memory.Row {
	return memory.Row{Durable: p.space.durable, Name: p.name, Key: p.key}
}

// load returns the state of the part's row. A row of another algorithm counts as none.
func (p *part) load(db *memory.DB) model.State {
	row, _ := db.Rows[p.row()].(memoryRow)
	if row.algorithm != p.rules.Numbers().Algorithm {
		return model.State{}
	}
	return row.state
}

func (p *part) store(db *memory.DB, s model.State) {
	if s == p.load(db) { // there may be no row, and nothing to give back to it
		return
	}
	if db.Rows == nil {
		db.Rows = map[memory.Row]any{}
	}
	db.Rows[p.row()] = memoryRow{algorithm: p.rules.Numbers().Algorithm, state: s}
}

// resetInMemory deletes rows of a key.
func (d *database) resetInMemory(db DBTX, space *keyspace, names []string, key string) error {
	if db != d.db {
		return errMemoryTx
	}
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for _, name := range names {
		delete(d.memory.Rows, memory.Row{Durable: space.durable, Name: name, Key: key})
	}
	return nil
}
