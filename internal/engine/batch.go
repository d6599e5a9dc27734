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

// Batcher has batches of requests decided, in as many statements as held rows and refused keys make necessary.
//
// A row that somebody's transaction has locked, after WithTx(tx).Allow for example, must not hold up the requests for
// other keys. A statement that decides several rows keeps the ones that it has locked from everybody. So it waits no
// longer than rowWait for each row, and no longer than 25 times that for all together (see _rate_limit_late). If
// that is not enough, nothing was taken.
//
// The same requests then go into a statement that passes over what is locked, and tells which transaction has
// locked it. If that is another one than before, the requests have lost a race, and go back to the queue. If it is
// still the same one, they go to the lane for held keys.
type Batcher struct {
	queues   *queues // of the client
	Shard    int     // whose requests it has decided, from 0
	database *Database
	Breaker  *Breaker
	log      *troubleLog
	Denials  *Denials // nil if none are remembered
	Leases   *Leases
	Held     *heldKeys
	told     func(Statement) // may be nil
	timeout  time.Duration
	Begin    time.Time
	// When a held row or a refused key last cost others time, and when the pool last had no connection for a
	// statement, in nanoseconds since begin.
	heldAt, exhaustedAt atomic.Int64
	refused             atomic.Pointer[refusal] // the last one while the map did not fit
}

// makingWait is how long a statement that passes over locked rows waits for each row that somebody is just making,
// because nobody can see those.
const makingWait = time.Millisecond

// rowWait is how long a statement that holds rows waits for another one.
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
	// A request with hardly any time left would shorten the time of the others.
	now := time.Now()
	requests := slices.DeleteFunc(d.Requests, func(r *Request) bool {
		if now.Sub(r.Since) <= b.timeout/10*9 {
			return false
		}
		err, refused := errNotAsked, b.refused.Load()
		switch {
		case refused != nil && refused.at.After(r.Since):
			b.Report(r, refused.err, r.Probe)
			r.Finish(refused.err)
			return true
		case b.Begin.Add(time.Duration(b.heldAt.Load())).After(r.Since):
			err = b.Held.NoTime(r) // which is no outage
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
	// If held rows leave requests undecided for this long, the lane takes over.
	s.until = now.Add(b.Held.Patience() / 5)
	leaders, wait := MergeAlike(requests), b.rowWait()
	d.leaders = len(leaders)
	if len(leaders) == 1 { // it keeps no other row from anybody
		wait = wait * 5 / 2
	}
	s.ask(leaders, false, wait)
	return s.held, s.lost
}

// MergeAlike has requests that are alike decided as one. They are of one line, for the same key and of the same cost,
// without one of another cost for that key between them. So requests of a line for one key are decided in the
// order in which they came.
//
// It puts the keys into the order in which rows are locked, because the functions decide them faster then. Refunds and
// grants stay apart, because they stop at full: what remains after all of them does not tell what remained after each.
// Requests of AllowAll stay apart, too.
func MergeAlike(requests []*Request) (leaders []*Request) {
	var last map[string]*Request // the last leader of a key
	if len(requests) > 1 {
		last = make(map[string]*Request, len(requests))
	}
	oneGroup := true
	for i, r := range requests {
		r.next, r.last, r.Count, r.Place = nil, r, 1, 1
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

// sameLine tells whether the function of one algorithm can decide both.
func (r *Request) sameGroup(other *Request) bool {
	return r.Space == other.Space && r.Policy.Is(other.Policy) && r.Looks() == other.Looks()
}

// batch is requests on their way to the database, in one statement or several.
type batch struct {
	*Batcher
	deadline time.Time
	probe    bool
	caller   context.Context //nolint:containedctx // as in Departure
	leftAt   atomic.Int64    // when the caller was seen to have left, in nanoseconds since begin; 0: he has not
	queued   int             // how many requests stayed behind
	again    bool            // this is not the first statement
	alone    bool            // it waits for one key, which gets another turn
	until    time.Time       // when the rest goes to the lane; zero: never
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

// ask asks for requests and tells their callers, except for those whose keys are held. If skip is true, the
// statement passes over held keys.
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
	if looks { // there is no row to wait for
		wait = patience
	}
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	if s.caller != nil {
		defer context.AfterFunc(s.caller, func() {
			now := time.Since(s.Begin)
			s.leftAt.CompareAndSwap(0, int64(now)) // while this statement was under way, or one before it
			time.AfterFunc(time.Duration(s.leftAt.Load())+Grace-now, cancel)
		})()
	}
	err := s.Decide(ctx, s.database.DB, requests,
		Transaction{LockTimeout: LockTimeout(min(wait, left/2)), SkipHeld: skip})
	canceled := errors.Is(ctx.Err(), context.Canceled)
	cancel()
	s.observe(began, requests, err)
	if canceled && err != nil { // the caller has left, which is no outage
		requests[0].Finish(GaveUp(s.caller.Err()))
		return
	}
	if s.asksElsewhere(requests, err) {
		return
	}

	// A statement_timeout that is shorter than the wait looks like an outage. The next statement, which does not
	// wait, shows whether it is one.
	waited := pg.LockTimeout(err) && !pg.IsAway(err) || pg.Canceled(err) && !skip && !looks || pg.Undone(err) && !looks
	_, unknownZone := errors.AsType[*ZoneError](err)
	keyRefused := errors.Is(err, pg.ErrKeyRefused)
	refused := keyRefused || unknownZone || errors.Is(err, pg.ErrNameRefused)
	if waited || pg.LockTimeout(err) || refused {
		s.heldAt.Store(int64(time.Since(s.Begin)))
	}
	switch {
	case pg.LockTimeout(err) && pg.TableLocked(err) && wait < patience:
		s.ask(requests, skip, patience) // it may be free soon
		return
	case waited && s.alone:
		s.held = appendAll(s.held, requests)
		return
	case waited && !skip:
		s.ask(requests, true, makingWait)
		return
	case refused:
		s.Report(requests[0], nil, s.probe)
	default:
		s.Report(requests[0], err, s.probe)
	}
	switch {
	case err == nil:
		s.deliver(requests)
	case severalGroups(requests) && s.isOnesOwn(err):
		s.askApart(requests, skip, wait)
	case refused && len(requests) > 1 && (keyRefused || !ofOneLimiter(requests)):
		// Every encoding of a database has the characters of ASCII.
		plain, others := splitASCII(requests)
		if len(plain) == 0 || len(others) == 0 {
			plain, others = requests[:len(requests)/2], requests[len(requests)/2:]
		}
		s.ask(plain, skip, wait)
		s.ask(others, skip, wait)
	case waited: // for something else than a row
		s.lost = appendAll(s.lost, requests)
	default:
		for _, r := range requests {
			r.Finish(err)
		}
	}
}

// severalLines tells whether requests that leave together are of several lines.
func severalGroups(requests []*Request) bool {
	return slices.ContainsFunc(requests, func(r *Request) bool { return !r.sameGroup(requests[0]) })
}

// isOnesOwn tells whether an error of a statement for several lines may be due to one of them: the database has
// answered, nothing was taken, and it is no outage.
func (b *Batcher) isOnesOwn(err error) bool {
	_, answered := errors.AsType[*pgconn.PgError](err)
	_, ours := errors.AsType[*pg.Error](err)
	return ours && answered && !pg.IsAway(err) && !pg.LockTimeout(err) && !errors.Is(err, pg.ErrOutcomeUnknown)
}

// askApart asks for the requests of each line by themselves. So the fault of one limiter is no other's.
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

// deliver tells the callers of requests what was decided, and sorts those that were passed over.
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
			rest = append(rest, r) // the statement did not come to it
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

// Report tells the breaker and the log how a statement has ended whose first request is r.
func (b *Batcher) Report(r *Request, err error, probe bool) {
	if errors.Is(err, pg.ErrPoolExhausted) {
		b.exhaustedAt.Store(int64(time.Since(b.Begin)))
	}
	closed := b.Breaker.Report(r.kind(), err, probe)
	b.log.note(r, err, closed)
}

// observe tells of a statement.
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

// Decide decides requests. It remembers denials, and forgets those of keys to which something has happened.
func (b *Batcher) Decide(ctx context.Context, db pg.DB, requests []*Request, tx Transaction) error {
	if b.Denials == nil {
		return b.database.Execute(ctx, db, requests, tx)
	}
	leasing := slices.ContainsFunc(requests, func(r *Request) bool { return r.Parts[0].Space.Lease != nil })
	asked, since := b.Denials.Elapsed(), b.Denials.Snapshot()
	var left Instant
	if leasing {
		left = b.Leases.Now()
	}
	err := b.database.Execute(ctx, db, requests, tx)
	told := b.Denials.Elapsed()
	if leasing {
		came := b.Leases.Now()
		for _, r := range requests {
			b.Leases.settle(r, err, left, came)
		}
	}
	for _, r := range requests {
		b.settleDenials(r, err, asked, told, &since)
		if r.Shadow != nil {
			b.settleDenials(&r.Shadow.request, err, asked, told, &since)
		}
		if r.gives() && !r.OfLease {
			for i := range r.Parts {
				r.Parts[i].Space.tell(r.Parts[i].Key)
			}
		}
	}
	return err
}

// settleDenials forgets or remembers a request's denial.
func (b *Batcher) settleDenials(r *Request, err error, asked, told time.Duration, since *Changes) {
	b.Forget(r, err, since)
	if p := &r.Parts[0]; err == nil && len(r.Parts) == 1 && p.Space.Remember && p.Cost > 0 &&
		!r.PassedOver() && p.Decision.Granted < r.Count {
		b.Denials.Remember(p, asked, told, since)
	}
}

// Forget forgets the denials of a request's keys if the request has taken or given something, or may have. since
// is what its statement knows, or nil if the statement remembers nothing.
func (b *Batcher) Forget(r *Request, err error, since *Changes) {
	if b.Denials == nil || r.Looks() || err == nil && r.Parts[0].Decision.Granted <= 0 {
		return
	}
	for i := range r.Parts {
		b.Denials.Forget(r.Parts[i].Space, r.Parts[i].Key, since)
	}
}

// decideInTx is decideAlone in a caller's transaction, on whose connection others may be at work.
func (b *Batcher) decideInTx(ctx context.Context, tx pgx.Tx, r *Request) error {
	mine := turn.Of(tx)
	if err := mine.Take(ctx); err != nil {
		return GaveUp(err)
	}
	defer mine.Pass()
	return pg.RolledBack(tx, b.decideAlone(ctx, tx, r))
}

// decideAlone decides one request on one connection, within the time that a call has. It does not return before
// the connection is free again.
func (b *Batcher) decideAlone(ctx context.Context, db pg.DB, r *Request) error {
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	if conn := pg.Conn(db); conn != nil && conn.IsClosed() { // pgx would say so of a statement that it may have sent
		return pg.NewError(errors.New("the connection is closed"), pg.ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	requests := []*Request{r}
	err := b.database.Execute(ctx, db, requests, callersTransaction(db))
	if err != nil && !r.Looks() {
		err = b.heldOrAway(ctx, db, requests, err)
	}
	b.Forget(r, err, nil)
	return err
}

// heldOrAway finds out why the session's own lock_timeout or statement_timeout has ended a statement on a single
// connection. It may have waited for the row, for a locked table, or for a slow server. So it asks once more,
// without waiting. In the caller's transaction this cannot be told apart, because the error has ended it.
func (b *Batcher) heldOrAway(ctx context.Context, db pg.DB, requests []*Request, err error) error {
	conn := pg.Conn(db)
	if !pg.LockTimeout(err) && !pg.Canceled(err) && !pg.Undone(err) || conn == nil || conn.PgConn().TxStatus() != 'I' {
		return err
	}
	again := b.database.Execute(ctx, db, requests, Transaction{LockTimeout: LockTimeout(makingWait), SkipHeld: true})
	switch {
	case ctx.Err() != nil: // there was no time left to find out
		return err
	case again == nil && requests[0].PassedOver():
		return keyHeld()
	}
	return again
}

// appendAll appends requests and those that were to be decided as one with them, each by itself again.
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
