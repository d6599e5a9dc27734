package engine

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Batcher decides batches of requests, in one statement or in several if rows are held or keys refused.
//
// A row that a transaction has locked, for example after WithTx(tx).Allow, must not hold up requests for other keys. A
// statement for several rows locks them one after the other, and keeps all of them locked while it waits for the next
// one. So it waits no longer than rowWait for each row, and no longer than 25 times that in all (see _rate_limit_late).
// After that, it has taken nothing.
//
// The same requests then go into a statement that passes over locked rows, and tells which transaction has locked each.
// If that is another transaction than before, the request has lost a race, and goes back to the queue. If it is still
// the same one, the request goes to the lane for held keys.
type Batcher struct {
	queues   *queues // of the client
	Shard    int     // from 0
	database *Database
	Breaker  *Breaker
	log      *troubleLog
	Denials  *Denials // nil if none are remembered
	Leases   *Leases
	Held     *heldKeys
	told     func(Statement) // may be nil
	timeout  time.Duration
	Begin    time.Time
	// heldAt is when a held row or a refused key last delayed a batch. exhaustedAt is when the pool last had no
	// connection for a statement. Both are nanoseconds since Begin.
	heldAt, exhaustedAt atomic.Int64
	refused             atomic.Pointer[refusal] // the last refusal of a proxy whose map did not fit
}

// makingWait is how long a statement that passes over locked rows waits for a row that is just being inserted. Nobody
// can see such a row, so it cannot be passed over.
const makingWait = time.Millisecond

// rowWait is how long a statement that holds locked rows waits for another row.
func (b *Batcher) rowWait() time.Duration {
	return min(max(b.timeout/100, time.Millisecond), MaxRowWait)
}

// tooLate tells whether the time that is left is too short for another statement.
func (b *Batcher) tooLate(left time.Duration) bool {
	return left < max(b.timeout/10, min(b.timeout/4, 10*time.Millisecond))
}

// Departure is the requests that leave a queue together.
type Departure struct {
	Requests []*Request
	caller   context.Context //nolint:containedctx // of the only request if its caller sends it; else nil
	queued   int             // how many requests stayed behind
	leaders  int             // how many requests are left after merging
}

// Send decides the requests of a departure, and tells their callers. It returns the requests whose keys are held, and
// those that have lost a race.
func (b *Batcher) Send(d *Departure) (held, lost []*Request) {
	// A request with hardly any time left would shorten the time of the others, so it ends here.
	now := time.Now()
	requests := slices.DeleteFunc(d.Requests, func(r *Request) bool {
		if now.Sub(r.Since) <= b.timeout/10*9 {
			return false
		}
		err, refused := errNotAsked, b.refused.Load()
		switch {
		case refused != nil && refused.at.After(r.Since):
			b.report(r, refused.err, r.Probe)
			r.Finish(refused.err)
			return true
		case b.Begin.Add(time.Duration(b.heldAt.Load())).After(r.Since):
			err = b.Held.NoTime(r) // held rows are no outage
		case b.Begin.Add(time.Duration(b.exhaustedAt.Load())).After(r.Since):
			err = ErrNoConnection
		}
		b.log.note(r, err, false)
		r.Finish(err)
		return true
	})
	requests, probe := b.Breaker.turnAway(requests)
	if len(requests) == 0 {
		return nil, nil
	}
	s := b.newBatch(requests, probe)
	s.queued, s.caller = d.queued, d.caller
	// After that time, requests that held rows leave undecided go to the lane.
	s.until = now.Add(b.Held.Patience() / 5)
	leaders, wait := MergeAlike(requests), b.rowWait()
	d.leaders = len(leaders)
	if len(leaders) == 1 { // it keeps no other row locked meanwhile
		wait = wait * 5 / 2
	}
	s.ask(leaders, false, wait)
	return s.held, s.lost
}

// MergeAlike merges requests of one group for the same key and cost, and returns the leaders. With 64 callers of one
// key, this makes 4.7 times as many decisions. It does not merge two requests if one of another cost for that key came
// between them. So requests of a group for one key are decided in the order in which they came.
//
// It sorts the leaders into the order in which rows are locked, which makes 20 % more decisions with 64 callers of
// different keys. It does not merge refunds and grants, because a row stops taking them back when it is full, and what
// remains after all does not tell what remained after each. It does not merge requests of AllowAll either.
func MergeAlike(requests []*Request) (leaders []*Request) {
	var last map[string]*Request // the last leader of a key
	if len(requests) > 1 {
		last = make(map[string]*Request, len(requests))
	}
	oneGroup := true
	for i, r := range requests {
		r.next, r.last, r.Count, r.place = nil, r, 1, 1
		if i > 0 && !r.sameGroup(requests[i-1]) {
			oneGroup = false
			clear(last)
		}
		key := r.Parts[0].Key
		if leader := last[key]; leader != nil && r.joins(leader) {
			leader.last.next = r
			leader.last = r
			leader.Count++
			leader.Ahead = max(leader.Ahead, r.Ahead)
			continue
		}
		if len(requests) > 1 {
			last[key] = r
		}
		leaders = append(leaders, r)
	}
	for _, leader := range leaders {
		leader.Count += leader.Ahead
	}
	if oneGroup && len(leaders) > 1 && requests[0].Policy != nil {
		slices.SortStableFunc(leaders, func(a, b *Request) int {
			return cmp.Or(len(b.Parts[0].Key)-len(a.Parts[0].Key), strings.Compare(a.Parts[0].Key, b.Parts[0].Key))
		})
	}
	return leaders
}

// sameGroup tells whether two requests belong to one group.
func (r *Request) sameGroup(other *Request) bool {
	return r.Space == other.Space && r.Policy.Is(other.Policy) && r.Looks() == other.Looks()
}

// batch is requests on their way to the database, in one statement or several.
type batch struct {
	*Batcher
	deadline time.Time
	probe    bool
	caller   context.Context //nolint:containedctx // as in Departure
	leftAt   atomic.Int64    // when the caller was found to have left, in nanoseconds since Begin; 0 while it waits
	queued   int             // how many requests stayed behind
	again    bool            // a statement was sent already
	alone    bool            // it waits for the row of one key, which gets another turn in the lane
	until    time.Time       // when undecided requests go to the lane; zero: never
	held     []*Request
	lost     []*Request
}

// newBatch returns a batch with the deadline of its oldest request.
func (b *Batcher) newBatch(requests []*Request, probe bool) *batch {
	oldest := requests[0].Since
	for _, r := range requests[1:] {
		if r.Since.Before(oldest) {
			oldest = r.Since
		}
	}
	return &batch{Batcher: b, deadline: oldest.Add(b.timeout), probe: probe}
}

// ask sends a statement for requests, and tells their callers, except for those whose keys are held. If skip is true,
// the statement passes over held keys. wait is how long it waits for each row.
func (s *batch) ask(requests []*Request, skip bool, wait time.Duration) {
	began := time.Now()
	left := s.deadline.Sub(began)
	if s.again && s.tooLate(left) {
		for _, r := range requests {
			r.Finish(s.Held.NoTime(r))
		}
		return
	}
	s.again = true
	patience := s.Held.Patience()
	looks := requests[0].Looks()
	if looks { // they wait for the table only
		wait = patience
	}
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	if s.caller != nil {
		defer context.AfterFunc(s.caller, func() {
			now := time.Since(s.Begin)
			s.leftAt.CompareAndSwap(0, int64(now)) // set once, by the first statement that sees it
			time.AfterFunc(time.Duration(s.leftAt.Load())+Grace-now, cancel)
		})()
	}
	err := s.Decide(ctx, s.database.DB, requests,
		Transaction{LockTimeout: LockTimeout(min(wait, left/2)), SkipHeld: skip})
	canceled := errors.Is(ctx.Err(), context.Canceled)
	cancel()
	s.observe(began, requests, err)
	if canceled && err != nil { // a caller who leaves is no outage
		requests[0].Finish(GaveUp(s.caller.Err()))
		return
	}
	if s.asksElsewhere(requests, err) {
		return
	}

	// A statement_timeout that ends the wait early looks like an outage. The next statement does not wait, and shows
	// whether it is one.
	waited := pg.LockTimeout(err) && !pg.IsAway(err) || pg.Canceled(err) && !skip && !looks || pg.Undone(err) && !looks
	_, unknownZone := errors.AsType[*ZoneError](err)
	keyRefused := errors.Is(err, pg.ErrKeyRefused)
	refused := keyRefused || unknownZone || errors.Is(err, pg.ErrNameRefused)
	if waited || pg.LockTimeout(err) || refused {
		s.heldAt.Store(int64(time.Since(s.Begin)))
	}
	switch {
	case pg.LockTimeout(err) && pg.TableLocked(err) && wait < patience:
		s.ask(requests, skip, patience) // the table may be free soon
		return
	case waited && s.alone:
		s.held = appendAll(s.held, requests)
		return
	case waited && !skip:
		s.ask(requests, true, makingWait)
		return
	case refused:
		s.report(requests[0], nil, s.probe)
	default:
		s.report(requests[0], err, s.probe)
	}
	switch {
	case err == nil:
		s.deliver(requests)
	case severalGroups(requests) && s.isOnesOwn(err):
		s.askApart(requests, skip, wait)
	case refused && len(requests) > 1 && (keyRefused || !ofOneLimiter(requests)):
		// All encodings of databases contain ASCII, so the other keys are the suspects.
		plain, others := splitASCII(requests)
		if len(plain) == 0 || len(others) == 0 {
			plain, others = requests[:len(requests)/2], requests[len(requests)/2:]
		}
		s.ask(plain, skip, wait)
		s.ask(others, skip, wait)
	case waited: // it has waited for something other than a row
		s.lost = appendAll(s.lost, requests)
	default:
		for _, r := range requests {
			r.Finish(err)
		}
	}
}

// severalGroups tells whether requests of different groups leave together.
func severalGroups(requests []*Request) bool {
	return slices.ContainsFunc(requests, func(r *Request) bool { return !r.sameGroup(requests[0]) })
}

// isOnesOwn tells whether one of several groups may have caused an error: the database has answered, nothing was taken,
// and it is no outage.
func (b *Batcher) isOnesOwn(err error) bool {
	_, answered := errors.AsType[*pgconn.PgError](err)
	_, ours := errors.AsType[*pg.Error](err)
	return ours && answered && !pg.IsAway(err) && !pg.LockTimeout(err) && !errors.Is(err, pg.ErrOutcomeUnknown)
}

// askApart sends a statement for each group, so that the fault of one limiter does not concern others.
func (s *batch) askApart(requests []*Request, skip bool, wait time.Duration) {
	for len(requests) > 0 {
		var group, others []*Request
		for _, r := range requests {
			if r.sameGroup(requests[0]) {
				group = append(group, r)
			} else {
				others = append(others, r)
			}
		}
		s.ask(group, skip, wait)
		requests = others
	}
}

// deliver tells callers the decisions, and sorts the requests that were passed over.
func (s *batch) deliver(requests []*Request) {
	s.Held.Decided(requests)
	var rest []*Request
	for _, r := range requests {
		if !r.PassedOver() {
			r.Finish(nil)
			continue
		}
		switch holders := r.lockedBy(); {
		case slices.Max(holders) == NotLocked:
			rest = append(rest, r) // the statement did not get to it
		case s.Held.Found(r, holders):
			s.held = appendAll(s.held, []*Request{r})
		default:
			s.lost = appendAll(s.lost, []*Request{r})
		}
	}
	switch {
	case len(rest) == 0:
	case !s.until.IsZero() && time.Now().After(s.until):
		s.held = appendAll(s.held, rest)
	default:
		s.ask(rest, true, makingWait)
	}
}

// report tells the breaker and the log how a statement has ended. r is its first request.
func (b *Batcher) report(r *Request, err error, probe bool) {
	if errors.Is(err, pg.ErrPoolExhausted) {
		b.exhaustedAt.Store(int64(time.Since(b.Begin)))
	}
	closed := b.Breaker.Record(r.kind(), err, probe)
	b.log.note(r, err, closed)
}

// observe calls the hook for a statement.
func (s *batch) observe(began time.Time, requests []*Request, err error) {
	if s.told == nil {
		return
	}
	e := Statement{
		Limiter: requests[0].Space.Name, Shard: s.Shard, Queued: s.queued, Err: err, Latency: time.Since(began),
	}
	for _, r := range requests {
		e.Size += int(r.Count - r.Ahead)
		if r.Space != requests[0].Space {
			e.Limiter = ""
		}
	}
	s.told(e)
}

// Decide sends a statement for requests. It also updates leases, remembers denials, and forgets denials of keys that
// something was taken from or given to.
func (b *Batcher) Decide(ctx context.Context, db pg.DB, requests []*Request, tx Transaction) error {
	if b.Denials == nil {
		return b.database.Execute(ctx, db, requests, tx)
	}
	leasing := slices.ContainsFunc(requests, func(r *Request) bool { return r.Parts[0].Space.Lease != nil })
	asked, since := b.Denials.Elapsed(), b.Denials.Snapshot()
	var left instant
	if leasing {
		left = b.Leases.now()
	}
	err := b.database.Execute(ctx, db, requests, tx)
	told := b.Denials.Elapsed()
	if leasing {
		came := b.Leases.now()
		for _, r := range requests {
			b.Leases.settle(r, err, left, came)
		}
	}
	for _, r := range requests {
		b.settleDenials(r, err, asked, told, &since)
		if r.Shadow != nil {
			b.settleDenials(&r.Shadow.request, err, asked, told, &since)
		}
		if r.gives() && !r.ofLease {
			for i := range r.Parts {
				r.Parts[i].Space.tell(r.Parts[i].Key)
			}
		}
	}
	return err
}

// settleDenials remembers a denial, or forgets the denials of its key.
func (b *Batcher) settleDenials(r *Request, err error, asked, told time.Duration, since *Changes) {
	b.forget(r, err, since)
	if p := &r.Parts[0]; err == nil && len(r.Parts) == 1 && p.Space.Remember && p.Cost > 0 &&
		!r.PassedOver() && p.Decision.Granted < r.Count {
		b.Denials.Remember(p, asked, told, since)
	}
}

// forget forgets the denials of a request's keys if the request has taken or given something, or may have. since is
// what its statement knows, or nil if none of its denials are remembered.
func (b *Batcher) forget(r *Request, err error, since *Changes) {
	if b.Denials == nil || r.Looks() || err == nil && r.Parts[0].Decision.Granted <= 0 {
		return
	}
	for i := range r.Parts {
		b.Denials.Forget(r.Parts[i].Space, r.Parts[i].Key, since)
	}
}

// decideInTx is decideAlone in the caller's transaction. Others may use its connection, so they take turns.
func (b *Batcher) decideInTx(ctx context.Context, tx pgx.Tx, r *Request) error {
	mine := turn.Of(tx)
	if err := mine.Take(ctx); err != nil {
		return GaveUp(err)
	}
	defer mine.Pass()
	return pg.RolledBack(tx, b.decideAlone(ctx, tx, r))
}

// decideAlone decides one request on a single connection, within the time of a call. It does not return before the
// connection is free again.
func (b *Batcher) decideAlone(ctx context.Context, db pg.DB, r *Request) error {
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	if conn := pg.Conn(db); conn != nil && conn.IsClosed() { // pgx would report this as if the statement might be sent
		return pg.NewError(errors.New("the connection is closed"), pg.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	requests := []*Request{r}
	err := b.database.Execute(ctx, db, requests, callersTransaction(db))
	if err != nil && !r.Looks() {
		err = b.heldOrAway(ctx, db, requests, err)
	}
	b.forget(r, err, nil)
	return err
}

// heldOrAway finds out why the session's own lock_timeout or statement_timeout has ended a statement on a single
// connection. It may have waited for the row, for a locked table, or for a slow server. So heldOrAway asks once more
// without waiting. In the caller's transaction it cannot ask, because the error has ended the transaction.
func (b *Batcher) heldOrAway(ctx context.Context, db pg.DB, requests []*Request, err error) error {
	conn := pg.Conn(db)
	if !pg.LockTimeout(err) && !pg.Canceled(err) && !pg.Undone(err) || conn == nil || conn.PgConn().TxStatus() != 'I' {
		return err
	}
	again := b.database.Execute(ctx, db, requests, Transaction{LockTimeout: LockTimeout(makingWait), SkipHeld: true})
	switch {
	case ctx.Err() != nil: // no time was left to find out
		return err
	case again == nil && requests[0].PassedOver():
		return keyHeld()
	}
	return again
}

// appendAll appends requests, and splits merged ones.
func appendAll(all, requests []*Request) []*Request {
	for _, r := range requests {
		for r != nil {
			next := r.next
			r.next = nil
			all = append(all, r)
			r = next
		}
	}
	return all
}

func splitASCII(requests []*Request) (plain, others []*Request) {
	for _, r := range requests {
		if r.isASCII() {
			plain = append(plain, r)
		} else {
			others = append(others, r)
		}
	}
	return plain, others
}

func (r *Request) isASCII() bool {
	return !slices.ContainsFunc(r.Parts, func(p Part) bool { return !IsASCII(p.Key + p.Name) })
}
