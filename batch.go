package ratelimit

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// element is one element of a statement's arrays: count requests of the same cost for the same key.
type element struct {
	key         string
	cost, count int64  // a cost below 0 is a grant, or a refund
	refund      []take // and then of this: one for each policy
	decision    decision
	held        bool  // somebody's transaction has locked the row, or one of them, so there is no decision
	first, last *call // who asked, if it was coalesced

	set       *set // of several parts, and their decisions instead of one; key is "" then, unless the policy is All
	decisions []decision
}

// settings are those of a transaction of the limiter's own; nil leaves what the session has. One of the caller's keeps its own.
type settings struct {
	lockTimeout       *int32 // milliseconds
	synchronousCommit *bool
	skipHeld          bool // rows that somebody has locked are passed over, and their elements are held
}

func (s settings) own() bool { return s.lockTimeout != nil }

// millis is a lock_timeout, which 0 would turn off.
func millis(d time.Duration) *int32 {
	ms := int32(min(max(d.Milliseconds(), 1), 1<<30))
	return &ms
}

// decide has the database decide all elements in one statement, and fills in their decisions. Elements of the same key
// are decided in their order. On an error nothing was taken, unless it is ErrOutcomeUnknown.
func (l *Limiter) decide(ctx context.Context, db DBTX, elements []element, settings settings) error {
	err := l.decideRows(ctx, db, elements, settings)
	if elements[0].cost == 0 && lockTimeout(err) { // who looks waits for no row
		return lockedTable(err)
	}
	return l.explain(ctx, db, err)
}

func (l *Limiter) decideRows(ctx context.Context, db DBTX, elements []element, settings settings) error {
	if _, several := l.policy.(all); several || elements[0].set != nil {
		return l.decideSets(ctx, db, elements, settings)
	}
	keys := make([]string, len(elements))
	numbers := make([]int64, 2*len(elements))
	costs, counts := numbers[:len(elements)], numbers[len(elements):]
	costsAre1, countsAre1 := true, true
	for i := range elements {
		keys[i], costs[i], counts[i] = elements[i].key, elements[i].cost, elements[i].count
		costsAre1, countsAre1 = costsAre1 && costs[i] == 1, countsAre1 && counts[i] == 1
	}
	// None means the same, and is the shortest way.
	if costsAre1 {
		costs = nil
	}
	if countsAre1 {
		counts = nil
	}
	var refunds refunds
	for i := range elements {
		if e := &elements[i]; e.refund != nil {
			refunds.add(i, len(elements), e.refund[0])
		}
	}
	args := []any{l.config.Name, keys, costs, counts, l.config.Durable, settings.lockTimeout, settings.synchronousCommit, l.now(),
		refunds.since, refunds.in, refunds.at, refunds.spent, settings.skipHeld}
	for i := range elements {
		elements[i].held = settings.skipHeld // unless a row comes back
	}
	return queryDecisions(ctx, db, settings.own(), l.decideQL, append(args, l.numbers...), func(ord int64, d decision) {
		elements[ord-1].decision, elements[ord-1].held = d, false
	})
}

// refunds are what tells the database which takes are given back: NULL for all other elements, and nil if there are no refunds.
type refunds struct{ since, in, at, spent []*int64 }

// add says that the i-th of n elements gives back k.
func (r *refunds) add(i, n int, k take) {
	if r.in == nil {
		*r = refunds{make([]*int64, n), make([]*int64, n), make([]*int64, n), make([]*int64, n)}
	}
	r.since[i], r.in[i], r.at[i], r.spent[i] = &k.since, &k.in, &k.at, &k.spent
}

// now is what replaces the database's clock, or nil.
func (c *core) now() *time.Time {
	if c.config.Test.Now == nil {
		return nil
	}
	t := c.config.Test.Now()
	return &t
}

// queryDecisions runs a statement and passes on each row with its place.
func queryDecisions(ctx context.Context, db DBTX, own bool, sql string, args []any, each func(ord int64, d decision)) error {
	var ord int64
	var retryAfter *int64
	var d decision
	var log []int64
	targets := []any{
		&ord, &d.granted, &d.remaining, &retryAfter, &d.resetAfter, &d.decidedAt,
		&d.state.count, &d.state.prevCount, &d.state.windowStart, &d.state.credit, &d.state.scale, &d.state.expiresAt,
		&d.taken.spent, &d.taken.since, &d.taken.at, &log,
	}
	return query(ctx, db, own, sql, args, targets, func() error {
		d.retryAfter = never
		if retryAfter != nil {
			d.retryAfter = *retryAfter
		}
		d.state.log = newEntries(log)
		d.state.since, d.taken.in = d.taken.since, d.state.windowStart
		each(ord, d)
		return nil
	})
}

// result is what the i-th request of an element, from 1, is told: the first granted ones were allowed, one after the other.
func (l *Limiter) result(e *element, i int64) Result {
	if e.set != nil {
		r := e.combined(0, len(e.set.parts), i)
		r.receipt = e.receipt(l, 0, len(e.set.parts), i)
		return r
	}
	r := told(l.policy, &e.decision, e.cost, i)
	if e.cost > 0 && i <= e.decision.granted {
		r.receipt = newReceipt(l, e.key, e.cost, 1)
		r.receipt.one[0] = e.decision.takenBy(l.policy, e.cost, i)
	}
	return r
}

// takenBy is what the i-th request of a cost has taken, one of those that were granted.
func (d *decision) takenBy(p Policy, cost, i int64) take {
	k := d.taken
	k.units = d.granted * cost
	return k.part(p, (i-1)*cost, i*cost)
}

// told is what the i-th of several requests of a cost is told of their decision.
func told(policy Policy, d *decision, cost, i int64) Result {
	r := Result{
		Limit:      policy.limit(),
		Remaining:  d.remaining,
		ResetAfter: duration(d.resetAfter),
		DecidedAt:  d.decidedAt,
	}
	switch {
	case i <= d.granted:
		after := (d.granted - i) * cost // taken by the requests behind it
		r.Allowed = true
		r.Remaining += after
		r.ResetAfter = duration(policy.resetAfter(*d, after))
	case d.retryAfter == 0: // a Peek, or another part has refused
		r.Allowed = true
	default:
		r.RetryAfter = duration(d.retryAfter)
	}
	return r
}

// query runs a statement, scans each row into targets, and translates the error. It runs it again if it could not be sent
// the first time, and, in a transaction of its own, for as long as the database has undone it and asks for that; and once more if
// it met a migration, or was canceled.
func query(ctx context.Context, db DBTX, own bool, sql string, args, targets []any, each func() error) error {
	for first := true; ; first = false {
		err := queryOnce(ctx, db, sql, args, targets, each)
		again := first && neverSent(err) || own && (undone(err) || first && (remade(err) || canceled(err)))
		if err == nil || !again || ctx.Err() != nil {
			return err
		}
	}
}

func queryOnce(ctx context.Context, db DBTX, sql string, args, targets []any, each func() error) error {
	if pool, ok := db.(*pgxpool.Pool); ok {
		// Apart from the query, to know what was not sent.
		conn, err := pool.Acquire(ctx)
		if err != nil {
			return storeError(err, false)
		}
		defer conn.Release()
		db = conn
	}
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		return statementError(err)
	}
	// The last column, the log, is there only where there are logs: it costs a batch a hundredth.
	targets = targets[:min(len(targets), len(rows.FieldDescriptions()))]
	// It closes rows and returns their error, also one that comes after the last row: in the extended protocol, the commit's.
	if _, err := pgx.ForEachRow(rows, targets, each); err != nil {
		return statementError(err)
	}
	return nil
}
