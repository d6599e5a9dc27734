package ratelimit

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

	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// batcher has batches of requests decided, in as many statements as held rows and refused keys make necessary.
//
// A row that somebody's transaction has locked, after WithTx(tx).Allow for example, must not hold up the requests for
// other keys. A statement that decides several rows keeps the ones that it has locked from everybody. So it waits no
// longer than rowWait for each row, and no longer than 25 times that for all together (see _rate_limit_late). If
// that is not enough, nothing was taken.
//
// The same requests then go into a statement that passes over what is locked, and tells which transaction has
// locked it. If that is another one than before, the requests have lost a race, and go back to the queue. If it is
// still the same one, they go to the lane for held keys.
type batcher struct {
	queues   *queues // of the client
	shard    int     // whose requests it has decided, from 0
	database *database
	breaker  *breaker
	log      *troubleLog
	denials  *denials // nil if none are remembered
	leases   *leases
	held     *heldKeys
	observer *Observer
	timeout  time.Duration
	begin    time.Time
	// When a held row or a refused key last cost others time, and when the pool last had no connection for a
	// statement, in nanoseconds since begin.
	heldAt, exhaustedAt atomic.Int64
	refused             atomic.Pointer[refusal] // the last one while the map did not fit
	deadlines           deadline.Group          // of statements
}

// makingWait is how long a statement that passes over locked rows waits for each row that somebody is just making,
// because nobody can see those.
const makingWait = time.Millisecond

// rowWait is how long a statement that holds rows waits for another one.
func (b *batcher) rowWait() time.Duration {
	return min(max(b.timeout/100, time.Millisecond), maxRowWait)
}

// tooLate tells whether the time that is left is too short for another statement.
func (b *batcher) tooLate(left time.Duration) bool {
	return left < max(b.timeout/10, min(b.timeout/4, 10*time.Millisecond))
}

// buffers are what the statements of one goroutine need, used again from one to the next.
type buffers struct {
	batch   []*request
	caller  context.Context //nolint:containedctx // of the only request if its caller sends it, else nil
	queued  int             // how many requests stayed behind
	leaders []*request
	last    map[string]*request // the last leader of a key
}

// send has the requests in buf.batch decided, and tells the callers. It returns the requests whose keys are held, and
// those that have lost a race.
func (b *batcher) send(buf *buffers) (held, lost []*request) {
	// A request with hardly any time left would shorten the time of the others.
	now := time.Now()
	requests := slices.DeleteFunc(buf.batch, func(r *request) bool {
		if now.Sub(r.since) <= b.timeout/10*9 {
			return false
		}
		err, refused := errNotAsked, b.refused.Load()
		switch {
		case refused != nil && refused.at.After(r.since):
			b.report(r, refused.err, r.probe)
			r.finish(refused.err)
			return true
		case b.begin.Add(time.Duration(b.heldAt.Load())).After(r.since):
			err = b.held.noTime(r) // which is no outage
		case b.begin.Add(time.Duration(b.exhaustedAt.Load())).After(r.since):
			err = errNoConnection
		}
		b.log.note(r, err, false)
		r.finish(err)
		return true
	})
	requests, probe := b.breaker.turnAway(requests)
	if len(requests) == 0 {
		return nil, nil
	}
	s := b.newBatch(requests, probe)
	s.queued, s.caller = buf.queued, buf.caller
	// If held rows leave requests undecided for this long, the lane takes over.
	s.until = now.Add(b.held.patience() / 5)
	leaders, wait := buf.mergeAlike(requests), b.rowWait()
	if len(leaders) == 1 { // it keeps no other row from anybody
		wait = wait * 5 / 2
	}
	s.ask(leaders, false, wait)
	return s.held, s.lost
}

// mergeAlike has requests that are alike decided as one. They are of one line, for the same key and of the same cost,
// without one of another cost for that key between them. So requests of a line for one key are decided in the
// order in which they came.
//
// It puts the keys into the order in which rows are locked, because the functions decide them faster then. Refunds and
// grants stay apart, because they stop at full: what remains after all of them does not tell what remained after each.
// Requests of AllowAll stay apart, too.
func (buf *buffers) mergeAlike(requests []*request) (leaders []*request) {
	buf.leaders = buf.leaders[:0]
	clear(buf.last)
	if buf.last == nil && len(requests) > 1 {
		buf.last = make(map[string]*request, len(requests))
	}
	oneLine := true
	for i, r := range requests {
		r.next, r.last, r.count, r.place = nil, r, 1, 1
		if i > 0 && !r.sameLine(requests[i-1]) {
			oneLine = false
			clear(buf.last)
		}
		key := r.parts[0].key
		if leader := buf.last[key]; leader != nil && r.joins(leader) {
			leader.last.next = r
			leader.last = r
			leader.count++
			leader.ahead = max(leader.ahead, r.ahead)
			continue
		}
		if len(requests) > 1 {
			buf.last[key] = r
		}
		buf.leaders = append(buf.leaders, r)
	}
	for _, leader := range buf.leaders {
		leader.count += leader.ahead
	}
	if oneLine && len(buf.leaders) > 1 && requests[0].policy != nil {
		slices.SortStableFunc(buf.leaders, func(a, b *request) int {
			return cmp.Or(len(b.parts[0].key)-len(a.parts[0].key), strings.Compare(a.parts[0].key, b.parts[0].key))
		})
	}
	return buf.leaders
}

// sameLine tells whether the function of one algorithm can decide both.
func (r *request) sameLine(other *request) bool {
	return r.space == other.space && r.policy == other.policy && r.looks() == other.looks()
}

// batch is requests on their way to the database, in one statement or several.
type batch struct {
	*batcher
	deadline time.Time
	probe    bool
	caller   context.Context //nolint:containedctx // as in buffers
	leftAt   atomic.Int64    // when the caller was seen to have left, in nanoseconds since begin; 0: he has not
	queued   int             // how many requests stayed behind
	again    bool            // this is not the first statement
	alone    bool            // it waits for one key, which gets another turn
	until    time.Time       // when the rest goes to the lane; zero: never
	held     []*request
	lost     []*request
}

// newBatch returns a batch with the deadline of its oldest request.
func (b *batcher) newBatch(requests []*request, probe bool) *batch {
	oldest := requests[0].since
	for _, r := range requests[1:] {
		if r.since.Before(oldest) {
			oldest = r.since
		}
	}
	return &batch{batcher: b, deadline: oldest.Add(b.timeout), probe: probe}
}

// ask asks for requests and tells their callers, except for those whose keys are held. If skip is true, the
// statement passes over held keys.
func (s *batch) ask(requests []*request, skip bool, wait time.Duration) {
	began := time.Now()
	left := s.deadline.Sub(began)
	if s.again && s.tooLate(left) {
		for _, r := range requests {
			r.finish(s.batcher.held.noTime(r))
		}
		return
	}
	s.again = true
	patience := s.batcher.held.patience()
	looks := requests[0].looks()
	if looks { // there is no row to wait for
		wait = patience
	}
	ctx, cancel := s.deadlines.Context(s.deadline)
	if s.caller != nil {
		defer context.AfterFunc(s.caller, func() {
			now := time.Since(s.begin)
			s.leftAt.CompareAndSwap(0, int64(now)) // while this statement was under way, or one before it
			time.AfterFunc(time.Duration(s.leftAt.Load())+grace-now, cancel)
		})()
	}
	err := s.decide(ctx, s.database.db, requests,
		transaction{lockTimeout: lockTimeout(min(wait, left/2)), skipHeld: skip})
	canceled := errors.Is(ctx.Err(), context.Canceled)
	cancel()
	s.observe(began, requests, err)
	if canceled && err != nil { // the caller has left, which is no outage
		requests[0].finish(gaveUp(s.caller.Err()))
		return
	}
	if s.asksElsewhere(requests, err) {
		return
	}

	// A statement_timeout that is shorter than the wait looks like an outage. The next statement, which does not
	// wait, shows whether it is one.
	waited := pg.LockTimeout(err) && !isAway(err) || pg.Canceled(err) && !skip && !looks || pg.Undone(err) && !looks
	_, misconfigured := errors.AsType[*ConfigError](err) // a name or a time zone that the database refuses
	refused := errors.Is(err, errRefused) || misconfigured
	if waited || pg.LockTimeout(err) || refused {
		s.heldAt.Store(int64(time.Since(s.begin)))
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
		s.report(requests[0], nil, s.probe)
	default:
		s.report(requests[0], err, s.probe)
	}
	switch {
	case err == nil:
		s.deliver(requests)
	case severalLines(requests) && s.isOnesOwn(err):
		s.askApart(requests, skip, wait)
	case refused && len(requests) > 1 && (errors.Is(err, errRefused) || !ofOneLimiter(requests)):
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
			r.finish(err)
		}
	}
}

// severalLines tells whether requests that leave together are of several lines.
func severalLines(requests []*request) bool {
	return slices.ContainsFunc(requests, func(r *request) bool { return !r.sameLine(requests[0]) })
}

// isOnesOwn tells whether an error of a statement for several lines may be due to one of them: the database has
// answered, nothing was taken, and it is no outage.
func (b *batcher) isOnesOwn(err error) bool {
	_, answered := errors.AsType[*pgconn.PgError](err)
	_, ours := errors.AsType[*StoreError](err)
	return ours && answered && !isAway(err) && !pg.LockTimeout(err) && !errors.Is(err, ErrOutcomeUnknown)
}

// askApart asks for the requests of each line by themselves. So the fault of one limiter is no other's.
func (s *batch) askApart(requests []*request, skip bool, wait time.Duration) {
	for len(requests) > 0 {
		var line, others []*request
		for _, r := range requests {
			if r.sameLine(requests[0]) {
				line = append(line, r)
			} else {
				others = append(others, r)
			}
		}
		s.ask(line, skip, wait)
		requests = others
	}
}

// deliver tells the callers of requests what was decided, and sorts those that were passed over.
func (s *batch) deliver(requests []*request) {
	s.batcher.held.decided(requests)
	var rest []*request
	for _, r := range requests {
		if !r.passedOver() {
			r.finish(nil)
			continue
		}
		switch holders := r.lockedBy(); {
		case slices.Max(holders) == notLocked:
			rest = append(rest, r) // the statement did not come to it
		case s.batcher.held.found(r, holders):
			s.held = appendAll(s.held, []*request{r})
		default:
			s.lost = appendAll(s.lost, []*request{r})
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

// report tells the breaker and the log how a statement has ended whose first request is r.
func (b *batcher) report(r *request, err error, probe bool) {
	if errors.Is(err, ErrPoolExhausted) {
		b.exhaustedAt.Store(int64(time.Since(b.begin)))
	}
	closed := b.breaker.report(r.kind(), err, probe)
	b.log.note(r, err, closed)
}

// observe tells the observer about a statement.
func (s *batch) observe(began time.Time, requests []*request, err error) {
	if s.observer == nil || s.observer.Statement == nil {
		return
	}
	e := StatementEvent{
		Limiter: requests[0].space.name, Shard: s.shard, Queued: s.queued, Err: err, Latency: time.Since(began),
	}
	for _, r := range requests {
		e.Size += int(r.count - r.ahead)
		if r.space != requests[0].space {
			e.Limiter = ""
		}
	}
	s.observer.Statement(e)
}

// decide decides requests. It remembers denials, and forgets those of keys to which something has happened.
func (b *batcher) decide(ctx context.Context, db DBTX, requests []*request, tx transaction) error {
	if b.denials == nil {
		return b.database.execute(ctx, db, requests, tx)
	}
	leasing := slices.ContainsFunc(requests, func(r *request) bool { return r.parts[0].space.lease != nil })
	asked, since := b.denials.elapsed(), b.denials.snapshot()
	var left instant
	if leasing {
		left = b.leases.now()
	}
	err := b.database.execute(ctx, db, requests, tx)
	told := b.denials.elapsed()
	if leasing {
		came := b.leases.now()
		for _, r := range requests {
			b.leases.settle(r, err, left, came)
		}
	}
	for _, r := range requests {
		b.settleDenials(r, err, asked, told, &since)
		if r.shadow != nil {
			b.settleDenials(&r.shadow.request, err, asked, told, &since)
		}
		if r.gives() && !r.ofLease {
			for i := range r.parts {
				r.parts[i].space.announce(r.parts[i].key)
			}
		}
	}
	return err
}

// settleDenials forgets or remembers a request's denial.
func (b *batcher) settleDenials(r *request, err error, asked, told time.Duration, since *changes) {
	b.forget(r, err, since)
	if p := &r.parts[0]; err == nil && len(r.parts) == 1 && p.space.remember && p.cost > 0 &&
		!r.passedOver() && p.decision.Granted < r.count {
		b.denials.remember(p, asked, told, since)
	}
}

// forget forgets the denials of a request's keys if the request has taken or given something, or may have. since
// is what its statement knows, or nil if the statement remembers nothing.
func (b *batcher) forget(r *request, err error, since *changes) {
	if b.denials == nil || r.looks() || err == nil && r.parts[0].decision.Granted <= 0 {
		return
	}
	for i := range r.parts {
		b.denials.forget(r.parts[i].space, r.parts[i].key, since)
	}
}

// decideInTx is decideAlone in a caller's transaction, on whose connection others may be at work.
func (b *batcher) decideInTx(ctx context.Context, tx pgx.Tx, r *request) error {
	mine := turn.Of(tx)
	if err := mine.Take(ctx); err != nil {
		return gaveUp(err)
	}
	defer mine.Pass()
	return pg.RolledBack(tx, b.decideAlone(ctx, tx, r))
}

// decideAlone decides one request on one connection, within the time that a call has. It does not return before
// the connection is free again.
func (b *batcher) decideAlone(ctx context.Context, db DBTX, r *request) error {
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	if conn := pg.Conn(db); conn != nil && conn.IsClosed() { // pgx would say so of a statement that it may have sent
		return pg.NewError(errors.New("the connection is closed"), ErrUnavailable)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), b.timeout)
	defer cancel()
	requests := []*request{r}
	err := b.database.execute(ctx, db, requests, callersTransaction(db))
	if err != nil && !r.looks() {
		err = b.heldOrAway(ctx, db, requests, err)
	}
	b.forget(r, err, nil)
	return err
}

// heldOrAway finds out why the session's own lock_timeout or statement_timeout has ended a statement on a single
// connection. It may have waited for the row, for a locked table, or for a slow server. So it asks once more,
// without waiting. In the caller's transaction this cannot be told apart, because the error has ended it.
func (b *batcher) heldOrAway(ctx context.Context, db DBTX, requests []*request, err error) error {
	conn := pg.Conn(db)
	if !pg.LockTimeout(err) && !pg.Canceled(err) && !pg.Undone(err) || conn == nil || conn.PgConn().TxStatus() != 'I' {
		return err
	}
	again := b.database.execute(ctx, db, requests, transaction{lockTimeout: lockTimeout(makingWait), skipHeld: true})
	switch {
	case ctx.Err() != nil: // there was no time left to find out
		return err
	case again == nil && requests[0].passedOver():
		return keyHeld()
	}
	return again
}

// appendAll appends requests and those that were to be decided as one with them, each by itself again.
func appendAll(all, requests []*request) []*request {
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

func splitASCII(requests []*request) (plain, others []*request) {
	for _, r := range requests {
		if r.isASCII() {
			plain = append(plain, r)
		} else {
			others = append(others, r)
		}
	}
	return plain, others
}

func (r *request) isASCII() bool {
	return !slices.ContainsFunc(r.parts, func(p part) bool { return !isASCII(p.key + p.name) })
}
