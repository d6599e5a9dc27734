package engine

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// ErrMemoryTx is the error for a call in a transaction. Rows in memory cannot be part of a transaction.
var ErrMemoryTx = errors.New("ratelimit: a row in memory is part of no transaction")

type memoryRow struct {
	algorithm int16 // of the State
	model.Key
}

// decideInMemory decides requests by package model, one after the other. The answers are the same as those of Postgres.
func (d *Database) decideInMemory(db pg.DB, requests []*Request) error {
	if db != d.DB {
		return ErrMemoryTx
	}
	now := d.memoryNow()
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

// memoryNow returns the clock of a database in memory.
func (d *Database) memoryNow() time.Time {
	if d.clock != nil {
		return d.clock()
	}
	return time.Now()
}

// decideIn decides a request and the requests merged with it. Each request takes from all of its rows, or from none.
func (r *Request) decideIn(db *memdb.DB, clock int64) {
	switch {
	case r.ofSlot():
		r.Parts[0].slotIn(db, clock)
		return
	case r.endsHold():
		r.endHoldIn(db, clock)
		return
	}
	before := make([]model.Key, len(r.Parts))
	for i := range r.Parts {
		before[i] = r.Parts[i].load(db)
	}
	granted, ready := int64(0), make([]int64, len(r.Parts)) // ready: for a reservation, when its tokens have flowed in
	for granted < r.Count && r.fitsIn(db, clock) {
		granted++
		for i := range r.Parts {
			p := &r.Parts[i]
			next, d := p.decide(p.load(db), clock, p.Cost)
			p.store(db, next)
			ready[i] = d.RetryAfter
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
		if granted == 1 && r.reserves() {
			p.Decision.RetryAfter = ready[i]
		}
		if granted < r.Count && !p.Charge {
			if next, d := p.decide(now, clock, p.Cost); d.Granted == 0 { // this part denies the request
				p.store(db, next) // the denial may have changed the row, if the clock was set back
				p.Decision = d
			}
		}
		if bucket, ok := p.Rules.(model.TokenBucket); ok && r.Ahead > 0 {
			p.Decision.State.Log = before[i].State.Log
			if ahead := granted - (r.Count - r.Ahead); ahead > 0 {
				now.State = bucket.Lend(now.State, ahead*p.Cost)
				p.store(db, now)
			}
		}
		if p.Cost > 0 {
			p.Decision.Taken.Spent = p.credit(before[i], clock) - p.credit(now, clock)
		}
		p.Decision.Granted, p.Decision.DecidedAt = granted, time.UnixMicro(clock)
	}
}

// endHoldIn settles or extends a hold in all of its rows, or in none.
func (r *Request) endHoldIn(db *memdb.DB, clock int64) {
	granted, changed, answers := int64(1), make([]model.Key, len(r.Parts)), make([]model.Entries, len(r.Parts))
	each := make([]int64, len(r.Parts))
	for i := range r.Parts {
		p := &r.Parts[i]
		var answer model.Settlement
		var err error
		if each[i] = 1; p.Charge {
			changed[i], answer, err = p.load(db).Settle(p.Rules, clock, holdNumber(p.Hold), p.Cost)
			late := int64(0)
			if answer.Late {
				late = 1
			}
			answers[i] = model.NewEntries([]int64{answer.Used, late, answer.At})
		} else {
			changed[i], err = p.load(db).Extend(p.Rules, clock, holdNumber(p.Hold), p.TTL)
		}
		switch {
		case errors.Is(err, model.ErrOwesTooMuch):
			granted = 0
		case errors.Is(err, model.ErrHoldUnknown):
			each[i], answers[i] = UnknownHold, ""
		case errors.Is(err, model.ErrHoldEnded):
			each[i] = EndedHold
		}
	}
	if !r.charges() {
		granted = slices.Min(each)
	}
	for i := range r.Parts {
		p := &r.Parts[i]
		if granted == 1 {
			p.store(db, changed[i])
		}
		_, p.Decision = p.load(db).Decide(p.Rules, clock, 0)
		p.Decision.State.Log, p.Decision.DecidedAt = answers[i], time.UnixMicro(clock)
		if p.Decision.Granted = granted; granted == 1 {
			p.Decision.Granted = each[i]
		}
	}
}

// slotIn acquires the slot of the part, or releases it.
func (p *Part) slotIn(db *memdb.DB, clock int64) {
	k := p.load(db)
	if p.TTL == 0 {
		next, _, err := k.Release(clock, holdNumber(p.Slot))
		p.store(db, next)
		p.Decision = model.Decision{Granted: 1, DecidedAt: time.UnixMicro(clock)}
		if err != nil {
			p.Decision.Granted = UnknownHold
		}
		return
	}
	rules, _ := p.Rules.(model.Concurrency) // no other rules have slots
	var wish SlotWish
	_ = json.Unmarshal([]byte(p.Wish), &wish) // Acquire has made it
	next, a := k.Acquire(rules, clock, model.Want{
		ID: holdNumber(p.Slot), Units: p.Cost, TTL: p.TTL,
		Group: wish.Group, Weight: int64(max(wish.Weight, 1)), Wait: wish.Wait,
	})
	p.store(db, next)
	p.Decision, p.Decision.DecidedAt = a.Decision, time.UnixMicro(clock)
	if h := a.Hold; h != nil {
		live := int64(0)
		if h.Status == model.Live {
			live = 1
		}
		p.Decision.State.Log = model.NewEntries([]int64{live, h.Fence, h.End})
	}
}

// renewInMemory does what rate_limit_renew_all does.
func (d *Database) renewInMemory(places []keeper.Place, ttl time.Duration) (told []keeper.Told) {
	clock := d.memoryNow().UnixMicro()
	limits, names := map[int64]int64{}, map[int64]string{}
	for _, p := range places {
		number := holdNumber(p.ID)
		limits[number], names[number] = p.Limit, p.ID
	}
	numbers := slices.Collect(maps.Keys(limits))
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for at, value := range d.memory.Rows {
		row := value.(memoryRow) //nolint:forcetypeassert // all rows are of this type
		if !slices.ContainsFunc(numbers, row.Has) {
			continue
		}
		next, live := row.Renew(clock, limits, model.Micros(ttl))
		row.Key = next
		d.memory.Rows[at] = row
		for _, h := range live {
			told = append(told, keeper.Told{ID: names[h.ID], Waiting: h.Status == model.Waiting, Fence: h.Fence})
		}
	}
	return told
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

// decide applies a request to a key. A positive n takes, charges or holds units, and an n of 0 looks. A negative n
// gives units back, or grants units if p.Refund is nil.
func (p *Part) decide(k model.Key, clock, n int64) (model.Key, model.Decision) {
	switch {
	case n > 0 && p.Charge:
		next, d, _ := k.Charge(p.Rules, clock, n)
		return next, d
	case n > 0 && p.Hold != "":
		return k.Hold(p.Rules, clock, holdNumber(p.Hold), n, p.TTL)
	case n > 0 && p.Delay != nil:
		bucket, _ := p.Rules.(model.TokenBucket) // Reserve allows no other rules
		next, d, readyAfter := k.Reserve(bucket, clock, n, *p.Delay)
		if d.Granted == 1 {
			d.RetryAfter = readyAfter
		}
		return next, d
	case n >= 0:
		return k.Decide(p.Rules, clock, n)
	case p.Refund == nil:
		return k.Grant(p.Rules, clock, -n)
	}
	take := *p.Refund
	take.Units = -n
	return k.Refund(p.Rules, clock, take)
}

// holdNumber returns the number of a hold in package model. It has the first 60 bits of the id that are random.
func holdNumber(id string) int64 {
	n, _ := strconv.ParseUint(strings.ReplaceAll(id, "-", "")[:16], 16, 64)
	return int64(n >> 1)
}

func (p *Part) credit(k model.Key, clock int64) int64 {
	_, d := p.decide(k, clock, 0)
	return d.State.Credit
}

func (p *Part) row() memdb.Row {
	return memdb.Row{Durable: p.Space.Durable, Name: p.Name, Key: p.Key}
}

// load returns the part's row with its holds. The state is empty if the row is missing or has another algorithm.
func (p *Part) load(db *memdb.DB) model.Key {
	row, _ := db.Rows[p.row()].(memoryRow)
	if row.algorithm != p.Rules.Numbers().Algorithm {
		row.State = model.State{}
	}
	return row.Key
}

func (p *Part) store(db *memdb.DB, next model.Key) {
	row, _ := db.Rows[p.row()].(memoryRow)
	if next.State != p.load(db).State { // otherwise only the holds may have changed, or nothing
		row.algorithm, row.State = p.Rules.Numbers().Algorithm, next.State
	}
	row.Holds, row.Fence = next.Holds, next.Fence
	if db.Rows == nil {
		db.Rows = map[memdb.Row]any{}
	}
	db.Rows[p.row()] = row
}

func (d *Database) resetInMemory(db pg.DB, space *Space, names []string, key string) error {
	if db != d.DB {
		return ErrMemoryTx
	}
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for _, name := range names {
		id := memdb.Row{Durable: space.Durable, Name: name, Key: key}
		if row, ok := d.memory.Rows[id].(memoryRow); ok {
			d.memory.Rows[id] = memoryRow{Key: row.Reset()}
		}
	}
	return nil
}

// findHoldInMemory does what rate_limit_find_hold does.
func (d *Database) findHoldInMemory(id string) (parts []HoldPart, err error) {
	clock := d.memoryNow().UnixMicro()
	d.memory.Mu.Lock()
	defer d.memory.Mu.Unlock()
	for at, value := range d.memory.Rows {
		for _, h := range value.(memoryRow).Holds { //nolint:forcetypeassert // all rows are of this type
			if h.ID == holdNumber(id) && !h.Forgotten(clock) {
				parts = append(parts, HoldPart{at.Name, at.Key, at.Durable, time.UnixMicro(h.End)})
			}
		}
	}
	if parts == nil {
		return nil, ErrHoldUnknown
	}
	return parts, nil
}
