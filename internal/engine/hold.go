package engine

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Decision.Granted has one of these values if a hold cannot be settled or extended. A settlement can have UnknownHold
// for only some of its parts.
const (
	UnknownHold = -3
	EndedHold   = -4
)

// ErrHoldUnknown is the error for a hold that the database does not know.
var ErrHoldUnknown = errors.New("ratelimit: no such hold")

// Hold sets the cost of an ask aside for ttl microseconds, if it fits. The id must be new. A remembered denial may
// decide, but no lease. tx is the caller's transaction, or nil.
func (e *Engine) Hold(ctx context.Context, tx pgx.Tx, a *Ask, id string, ttl int64) (o Outcome, err error) {
	if tx == nil && e.remembered(a, &o) {
		return o, nil
	}
	r := e.Request(a)
	r.setHold(id, ttl)
	return e.decide(ctx, tx, r)
}

// Hold makes the set a hold of its costs for ttl microseconds. The id must be new.
func (s *Set) Hold(id string, ttl int64) { s.Request.setHold(id, ttl) }

func (r *Request) setHold(id string, ttl int64) {
	for i := range r.Parts {
		r.Parts[i].Hold, r.Parts[i].TTL = id, ttl
	}
}

// requestOfHold returns a request for all asks of a hold.
func (e *Engine) requestOfHold(id string, ttl int64, asks []Ask) *Request {
	var r *Request
	if len(asks) == 1 {
		r = e.Request(&asks[0])
	} else {
		s := e.NewSet()
		for _, a := range asks {
			s.Add(a)
		}
		r = s.Request
	}
	r.setHold(id, ttl)
	return r
}

// Settled says what a settlement has counted for one ask. After a settlement of a settled hold, it says what the first
// one has counted.
type Settled struct {
	Known    bool  // whether the database knew the hold
	Refused  bool  // nothing was settled, because a key would owe too much by this ask
	Accepted int64 // the largest Cost that would be accepted
	Used     int64
	Late     bool // the hold had ended
	At       time.Time
}

// Settle ends a hold and charges the Cost of each ask, whether it fits or not. Either all asks are settled, or none. tx
// is the caller's transaction, or nil.
func (e *Engine) Settle(ctx context.Context, tx pgx.Tx, id string, asks []Ask) ([]Settled, error) {
	r := e.requestOfHold(id, 0, asks)
	for i := range r.Parts {
		r.Parts[i].Charge = true
	}
	if err := e.submit(ctx, tx, r); err != nil {
		return nil, err
	}
	settled, first := make([]Settled, len(asks)), 0
	for i, a := range asks {
		settled[i] = settledOf(r.Parts[first:first+len(a.Policy.Rules)], a.Cost)
		first += len(a.Policy.Rules)
	}
	e.Requests.Put(r)
	return settled, nil
}

// settledOf returns the answer for the parts of one ask.
func settledOf(parts []Part, used int64) Settled {
	s := Settled{Accepted: math.MaxInt64}
	for i := range parts {
		p := &parts[i]
		d := &p.Decision
		if d.Granted == 0 {
			_, _, fits := model.Charge(p.Rules, d.State, d.DecidedAt.UnixMicro(), 0)
			s.Accepted = min(s.Accepted, fits)
			s.Refused = used > s.Accepted
			continue
		}
		if answer := d.State.Log; d.Granted > 0 && len(answer) == 8*3 {
			s.Known, s.Used = true, max(s.Used, answer.Entry(0))
			s.Late = s.Late || answer.Entry(1) == 1
			if at := time.UnixMicro(answer.Entry(2)); at.After(s.At) {
				s.At = at
			}
		}
	}
	return s
}

// Extend makes a hold last for at least ttl microseconds from at, the time of the decision. The result granted is 1,
// UnknownHold or EndedHold. tx is the caller's transaction, or nil.
func (e *Engine) Extend(
	ctx context.Context, tx pgx.Tx, id string, ttl int64, asks []Ask,
) (granted int64, at time.Time, err error) {
	r := e.requestOfHold(id, ttl, asks)
	if err := e.submit(ctx, tx, r); err != nil {
		return 0, at, err
	}
	d := &r.Parts[0].Decision // all parts have the same
	granted, at = d.Granted, d.DecidedAt
	e.Requests.Put(r)
	return granted, at, nil
}

// HoldPart is a row of a hold.
type HoldPart struct {
	Name, Key string
	Durable   bool
	EndsAt    time.Time
}

// FindHold returns the parts of a hold, in lock order. The error is ErrHoldUnknown if there are none.
func (e *Engine) FindHold(ctx context.Context, id string) ([]HoldPart, error) {
	d := e.Database
	if !d.pooled() {
		if err := d.Turn.Take(ctx); err != nil {
			return nil, GaveUp(err)
		}
		defer d.Turn.Pass()
	}
	if err := ctx.Err(); err != nil {
		return nil, GaveUp(err)
	}
	if !d.pooled() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Settings.Timeout)
		defer cancel()
		return d.findHold(ctx, id)
	}
	type answer struct {
		parts []HoldPart
		err   error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		within, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Settings.Timeout)
		defer cancel()
		a.err = whileSplit(within, true, func() (err error) {
			a.parts, err = d.findHold(within, id)
			return err
		})
		done <- a
	}()
	select {
	case a := <-done:
		return a.parts, a.err
	case <-ctx.Done():
		return nil, GaveUp(ctx.Err())
	}
}

func (d *Database) findHold(ctx context.Context, id string) (parts []HoldPart, err error) {
	if d.memory != nil {
		return d.findHoldInMemory(id)
	}
	var p HoldPart
	var endsAt int64
	err = pg.Query(ctx, d.asked, d.pooled(), Text("findhold", d.schema), []any{id + ".ed", d.now()},
		[]any{&p.Name, &p.Key, &p.Durable, &endsAt}, func() error {
			p.EndsAt = time.UnixMicro(endsAt)
			parts = append(parts, p)
			return nil
		})
	if err == nil && len(parts) == 0 {
		return nil, ErrHoldUnknown
	}
	return parts, d.explain(ctx, d.asked, nil, err)
}
