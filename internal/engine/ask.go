package engine

import (
	"context"
	"errors"
	"math"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Ask is a question about a key.
type Ask struct {
	Space  *Space
	Policy *model.Policy
	Key    string
	Cost   int64   // at most the policy's limit; 0 only looks; a negative cost grants
	Beside *Beside // the shadow policy to decide as well; may be nil
}

// Allow decides an ask by a lease, by a remembered denial, or by the database. It stores the decision in o. If it
// returns an error, o is not set.
func (e *Engine) Allow(ctx context.Context, a *Ask, o *Outcome) error {
	leased := a.Space.Lease != nil && a.Beside == nil && a.Cost > 0
	if leased {
		if e.Leases.spend(a.Space, a.Policy, a.Key, a.Cost, o) {
			return nil
		}
		if back := e.Leases.endLease(a.Space, a.Key); back != nil {
			go e.sendBack(back)()
		}
	}
	if e.remembered(a, o) {
		return nil
	}
	r := e.Request(a)
	r.Shadow = NewShadow(a)
	if leased {
		r.Ahead = e.Leases.ahead(a.Space, a.Policy, a.Key, a.Cost)
	}
	var err error
	if *o, err = e.decide(ctx, nil, r); err != nil {
		return err
	}
	if a.Cost == 0 && a.Space.Lease != nil {
		o.add(e.Leases.Held(a.Space, a.Policy, a.Key))
	}
	return nil
}

// remembered looks for a remembered denial, copies it into o, and returns whether it found one. If the ask has a shadow
// policy, both policies must have a remembered denial.
func (e *Engine) remembered(a *Ask, o *Outcome) bool {
	if a.Cost <= 0 || !a.Space.Remember || len(a.Policy.Rules) > 1 || e.Denials == nil {
		return false
	}
	if !e.Denials.Lookup(a.Space, a.Policy.Rules[0], a.Key, a.Cost, o) {
		return false
	}
	if a.Beside == nil {
		return true
	}
	beside := a.Beside.Policy
	if len(beside.Rules) > 1 || a.Cost > beside.Limit {
		return false
	}
	o.Beside = &Outcome{}
	return e.Denials.Lookup(a.Beside.Space, beside.Rules[0], a.Key, a.Cost, o.Beside)
}

// Direct lets the database decide an ask, and uses no lease and no remembered denial. A negative Cost grants units. tx
// is the caller's transaction, or nil.
func (e *Engine) Direct(ctx context.Context, tx pgx.Tx, a Ask) (Outcome, error) {
	return e.decide(ctx, tx, e.Request(&a))
}

// Refund gives back the receipt's units in the range [from, to). The argument space must have the same rows as the
// receipt's Space. tx is the caller's transaction, or nil.
func (e *Engine) Refund(
	ctx context.Context, tx pgx.Tx, space *Space, receipt *Receipt, from, to int64,
) (Outcome, error) {
	r := e.Requests.Get(space, receipt.Policy)
	r.Add(space, receipt.Policy, receipt.Key, from-to, receipt.Between(from, to))
	return e.decide(ctx, tx, r)
}

// Charged is the outcome of a charge. It is Allowed if the charge was counted.
type Charged struct {
	Outcome // RetryAfter is the time until a cost of 1 fits

	Owed     int64 // how many units above its limit the key counts
	Accepted int64 // the largest charge that would be accepted
}

// Charge counts the cost of an ask whether it fits or not, unless the key would then owe too much. tx is the caller's
// transaction, or nil.
func (e *Engine) Charge(ctx context.Context, tx pgx.Tx, a Ask) (Charged, error) {
	r := e.Request(&a)
	for i := range r.Parts {
		r.Parts[i].Charge = true
	}
	if err := e.submit(ctx, tx, r); err != nil {
		return Charged{}, err
	}
	c := Charged{Outcome: r.Outcome(), Accepted: math.MaxInt64}
	c.Allowed, c.RetryAfter = a.Cost == 0 || r.Parts[0].Decision.Granted > 0, 0
	for i := range r.Parts {
		p := &r.Parts[i]
		d := &p.Decision
		_, _, fits := model.Charge(p.Rules, d.State, d.DecidedAt.UnixMicro(), 0)
		c.RetryAfter = max(c.RetryAfter, model.Duration(d.RetryAfter))
		c.Owed, c.Accepted = max(c.Owed, model.Owed(p.Rules, d.State)), min(c.Accepted, fits)
	}
	e.Requests.Put(r)
	return c, nil
}

// Request makes a request from an ask.
func (e *Engine) Request(a *Ask) *Request {
	r := e.Requests.Get(a.Space, a.Policy)
	r.Add(a.Space, a.Policy, a.Key, a.Cost, nil)
	return r
}

// decide sends a request, waits for the decision, and returns it. tx is the caller's transaction, or nil.
func (e *Engine) decide(ctx context.Context, tx pgx.Tx, r *Request) (Outcome, error) {
	if err := e.submit(ctx, tx, r); err != nil {
		return Outcome{}, err
	}
	o := r.Outcome()
	o.Beside = r.Shadow.Outcome()
	e.Requests.Put(r)
	return o, nil
}

// submit sends a request, and waits until the request is decided. tx is the caller's transaction, or nil.
func (e *Engine) submit(ctx context.Context, tx pgx.Tx, r *Request) error {
	if tx != nil {
		if err := e.Database.refusesTx(); err != nil {
			return err
		}
		return e.Batcher.decideInTx(ctx, tx, r)
	}
	return e.Queues.submit(ctx, r)
}

// FallBack decides an ask in this process, without the database, as if only a share of the limit were allowed.
func (e *Engine) FallBack(a Ask, share float64) Outcome {
	r := e.Request(&a)
	e.Fallback.Take(r, sharesOf(a.Policy.Rules, share))
	for i := range r.Parts {
		if d := &r.Parts[i].Decision; d.RetryAfter == model.Never { // the cost is larger than the reduced limit
			d.RetryAfter = model.Micros(BreakerPause)
		}
	}
	o := r.Outcome()
	o.By, o.Claim = ByFallback, Claim{}
	for i := range o.Each {
		o.Each[i].By = ByFallback
	}
	e.Requests.Put(r)
	return o
}

// Set is a group of asks. Either all asks of a set are allowed, or none.
type Set struct {
	engine  *Engine
	Request *Request
	asks    []Ask
}

// NewSet returns an empty set.
func (e *Engine) NewSet() *Set { return &Set{engine: e, Request: e.Requests.Get(&e.sets, nil)} }

// Add adds an ask to the set. It returns false if another ask of the set uses one of the same rows.
func (s *Set) Add(a Ask) bool {
	r, first := s.Request, len(s.Request.Parts)
	r.Add(a.Space, a.Policy, a.Key, a.Cost, nil)
	s.asks = append(s.asks, a)
	for _, p := range r.Parts[first:] {
		for _, other := range r.Parts[:first] {
			if p.Key == other.Key && p.Name == other.Name && p.Space.Durable == other.Space.Durable {
				return false
			}
		}
	}
	return true
}

// Decide sends the set, and returns an outcome for each ask. Either all outcomes are Allowed, or none. If the set is
// denied, RetryAfter is 0 for each ask whose row had room. tx is the caller's transaction, or nil.
func (s *Set) Decide(ctx context.Context, tx pgx.Tx) ([]Outcome, error) {
	if len(s.asks) == 0 {
		return nil, nil
	}
	r := s.Request
	if err := s.engine.submit(ctx, tx, r); err != nil {
		return nil, err
	}
	allowed, first := r.place <= r.Parts[0].Decision.Granted, 0
	outcomes := make([]Outcome, len(s.asks))
	for i, a := range s.asks {
		last := first + len(a.Policy.Rules)
		outcomes[i] = r.outcomeOf(first, last, a.Policy)
		outcomes[i].Allowed = allowed
		first = last
	}
	s.engine.Requests.Put(r)
	return outcomes, nil
}

// Reset deletes the rows of a key. The argument rows is the largest number of rules that a policy of the limiter has.
// Reset calls the function then() after the deletion, even if the deletion has failed or ctx has ended.
func (e *Engine) Reset(ctx context.Context, space *Space, key string, rows int, then func()) error {
	d := e.Database
	if !d.pooled() {
		if err := d.Turn.Take(ctx); err != nil {
			return GaveUp(err)
		}
		defer d.Turn.Pass()
		defer then()
		return e.reset(ctx, d.asked, space, key, rows, callersTransaction(d.DB))
	}
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	done := make(chan error, 1)
	go func() {
		wait := e.Batcher.Held.Patience() / time.Duration(rows)
		err := e.reset(ctx, d.asked, space, key, rows, Transaction{LockTimeout: LockTimeout(wait)})
		then()
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return GaveUp(ctx.Err())
	}
}

// ResetIn deletes the rows of a key in the caller's transaction. The argument rows is that of Reset.
func (e *Engine) ResetIn(ctx context.Context, tx pgx.Tx, space *Space, key string, rows int) error {
	if err := e.Database.refusesTx(); err != nil {
		return err
	}
	mine := turn.Of(tx)
	if err := mine.Take(ctx); err != nil {
		return GaveUp(err)
	}
	defer mine.Pass()
	return pg.RolledBack(tx, e.reset(ctx, tx, space, key, rows, callersTransaction(tx)))
}

func (e *Engine) reset(ctx context.Context, db pg.DB, space *Space, key string, rows int, tx Transaction) error {
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.Settings.Timeout)
	defer cancel()
	names := make([]string, rows)
	for i := range names {
		names[i] = algorithm.RowName(space.Name, i)
	}
	err := whileSplit(ctx, tx.own(), func() error { return e.Database.deleteRows(ctx, db, space, names, key, tx) })
	if e.Denials != nil {
		e.Denials.Forget(space, key, nil) // even after an error, because the database may have reset the key
	}
	e.Leases.forget(space, key)
	if tx.own() {
		space.tell(key)
	}
	return err
}

// ReturnLeases gives all leased units back to the database, and waits for the end of all returns.
func (e *Engine) ReturnLeases(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	mine := e.Leases.all()
	all := e.Leases.onTheirWay() // read before giveBack starts, because giveBack removes each giving that fails at once
	go e.giveBack(mine)
	var errs []error
	for _, back := range all {
		select {
		case <-back.done:
			errs = append(errs, back.err)
		case <-ctx.Done():
			return GaveUp(ctx.Err())
		}
	}
	return errors.Join(errs...)
}
