package engine

import (
	"context"
	"errors"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Batcher sends batches of requests to the database. A batch needs one statement, or several if rows are locked or the
// database refuses keys.
//
// Requests for other keys must not wait while a transaction keeps a row locked, for example after WithTx(tx).Allow. A
// statement for several rows locks the rows one after the other, and holds all its locks until it ends. So a statement
// waits at most rowWait for each row, and at most 25 * rowWait for all rows (see _rate_limit_late). A statement that
// waits longer fails and takes nothing.
//
// The batcher then sends the same requests in a statement that skips locked rows and returns which transaction locks
// each row. If this transaction is a new one, the request for the row has lost a race, and goes back to the queue. If
// the same transaction still locks the row, the request goes to the lane for held keys.
type Batcher struct {
	queues   *queues // all queues of the client
	Shard    int     // from 0
	database *Database
	Breaker  *Breaker
	log      *troubleLog
	Denials  *Denials // nil if this process remembers no denials
	Leases   *Leases
	Held     *heldKeys
	told     func(Statement) // may be nil
	timeout  time.Duration
	Begin    time.Time
	// heldAt is when a locked row or a refused key last delayed a batch. exhaustedAt is when the pool last had no
	// connection for a statement. Both times are nanoseconds since Begin.
	heldAt, exhaustedAt atomic.Int64
	refused             atomic.Pointer[refusal] // the last error of a proxy with an outdated map of shards
}

// makingWait is how long a statement waits for a row that another transaction is inserting. SKIP LOCKED cannot skip
// such a row, because the row is not visible yet.
const makingWait = time.Millisecond

// rowWait is how long a statement waits for the next row while it holds locks on other rows.
func (b *Batcher) rowWait() time.Duration {
	return min(max(b.timeout/100, time.Millisecond), MaxRowWait)
}

// tooLate returns whether the time left is too short for another statement.
func (b *Batcher) tooLate(left time.Duration) bool {
	return left < max(b.timeout/10, min(b.timeout/4, 10*time.Millisecond))
}

// Departure is a group of requests that leave a queue together.
type Departure struct {
	Requests []*Request
	caller   context.Context //nolint:containedctx // set if the caller itself sends its request; otherwise nil
	queued   int             // how many requests stayed in the queue
	leaders  int             // how many requests the departure has after merging
}

// Send sends the requests of a departure to the database, and gives callers their decisions. The result held has the
// requests whose keys another transaction keeps locked. The result lost has the requests that have lost a race for a
// row.
func (b *Batcher) Send(d *Departure) (held, lost []*Request) {
	// End each request that has used 90 % of its timeout. Its short deadline would become that of the whole batch.
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
			err = b.Held.NoTime(r) // held rows are not an outage
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
	// After s.until, undecided requests go to the lane instead of into another statement.
	s.until = now.Add(b.Held.Patience() / 5)
	leaders, wait := MergeAlike(requests), b.rowWait()
	d.leaders = len(leaders)
	if len(leaders) == 1 { // the statement locks only one row, so it may wait longer
		wait = wait * 5 / 2
	}
	s.ask(leaders, false, wait)
	return s.held, s.lost
}

// MergeAlike merges requests of one group that have the same key and cost, and returns the leader of each merged list.
// With 64 callers of one key, merging multiplies the decisions per second by 4.7. MergeAlike does not merge two
// requests if a request with the same key and another cost came between them. So the requests for a key are decided in
// the order of their arrival.
//
// MergeAlike sorts the leaders into the lock order of their rows. With 64 callers of different keys, sorting adds 20 %
// to the decisions per second. MergeAlike merges neither requests of AllowAll nor of holds, nor reservations, refunds
// and grants. A full row takes back no more units, so an answer to merged refunds would not show what each refund did.
func MergeAlike(requests []*Request) (leaders []*Request) {
	var last map[string]*Request // the last leader for each key
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
		sortInLockOrder(leaders)
	}
	return leaders
}

func (r *Request) sameGroup(other *Request) bool {
	return r.Space == other.Space && r.Policy.Is(other.Policy) && r.Looks() == other.Looks()
}

// batch is a group of requests that one statement decides, or several statements if rows are locked.
type batch struct {
	*Batcher
	deadline time.Time
	probe    bool
	caller   context.Context //nolint:containedctx // see Departure.caller
	leftAt   atomic.Int64    // when the caller's context ended, in nanoseconds since Begin; 0 while the caller waits
	queued   int             // how many requests stayed in the queue
	again    bool            // the batch has sent a statement before
	alone    bool            // the batch waits for the row of one key, and the lane tries that key again later
	until    time.Time       // after this time, undecided requests go to the lane; zero means never
	held     []*Request
	lost     []*Request
}

// newBatch returns a batch whose deadline is that of the oldest request.
func (b *Batcher) newBatch(requests []*Request, probe bool) *batch {
	oldest := requests[0].Since
	for _, r := range requests[1:] {
		if r.Since.Before(oldest) {
			oldest = r.Since
		}
	}
	return &batch{Batcher: b, deadline: oldest.Add(b.timeout), probe: probe}
}

// ask sends a statement for requests, and gives callers their decisions. Requests for held keys go into s.held, and
// requests that lost a race into s.lost. If skip is true, the statement skips locked rows. wait is how long the
// statement waits for each row.
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
	if looks { // a look waits only for a locked table, not for a row
		wait = patience
	}
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	if s.caller != nil {
		defer context.AfterFunc(s.caller, func() {
			now := time.Since(s.Begin)
			s.leftAt.CompareAndSwap(0, int64(now)) // the batch's first statement sets leftAt, and later ones keep it
			time.AfterFunc(time.Duration(s.leftAt.Load())+Grace-now, cancel)
		})()
	}
	err := s.Decide(ctx, s.database.forStatements(), requests,
		Transaction{LockTimeout: LockTimeout(min(wait, left/2)), SkipHeld: skip})
	canceled := errors.Is(ctx.Err(), context.Canceled)
	cancel()
	s.observe(began, requests, err)
	if canceled && err != nil { // a caller that has left is not an outage
		requests[0].Finish(GaveUp(s.caller.Err()))
		return
	}
	if s.asksElsewhere(requests, err) {
		return
	}

	// A statement_timeout during a wait for a row looks like an outage. The next statement skips locked rows, so it
	// shows whether Postgres is really away.
	waited := pg.LockTimeout(err) && !pg.IsAway(err) || pg.Canceled(err) && !skip && !looks || pg.Undone(err) && !looks
	_, unknownZone := errors.AsType[*ZoneError](err)
	keyRefused := errors.Is(err, pg.ErrKeyRefused)
	refused := keyRefused || unknownZone || errors.Is(err, pg.ErrNameRefused)
	if waited || pg.LockTimeout(err) || refused {
		s.heldAt.Store(int64(time.Since(s.Begin)))
	}
	switch {
	case pg.LockTimeout(err) && pg.TableLocked(err) && wait < patience:
		s.ask(requests, skip, patience) // wait longer, because the table may be unlocked soon
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
		// Every database encoding contains ASCII, so a key with other characters has probably caused the error.
		plain, others := splitASCII(requests)
		if len(plain) == 0 || len(others) == 0 {
			plain, others = requests[:len(requests)/2], requests[len(requests)/2:]
		}
		s.ask(plain, skip, wait)
		s.ask(others, skip, wait)
	case waited: // the statement has waited for something other than a row
		s.lost = appendAll(s.lost, requests)
	default:
		for _, r := range requests {
			r.Finish(err)
		}
	}
}

func severalGroups(requests []*Request) bool {
	return slices.ContainsFunc(requests, func(r *Request) bool { return !r.sameGroup(requests[0]) })
}

// isOnesOwn returns whether the requests of a single group may have caused an error. It returns true if the database
// has answered, nothing was taken, and the error is not an outage.
func (b *Batcher) isOnesOwn(err error) bool {
	_, answered := errors.AsType[*pgconn.PgError](err)
	_, ours := errors.AsType[*pg.Error](err)
	return ours && answered && !pg.IsAway(err) && !pg.LockTimeout(err) && !errors.Is(err, pg.ErrOutcomeUnknown)
}

// askApart sends a statement for each group, so that one limiter's error does not reach other limiters' callers.
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

// deliver gives callers their decisions. It sorts undecided requests into s.held and s.lost, or asks for them again.
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
			rest = append(rest, r) // the statement has not reached this request
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

// report tells the breaker and the log how a statement has ended. r is the first request of the statement.
func (b *Batcher) report(r *Request, err error, probe bool) {
	if errors.Is(err, pg.ErrPoolExhausted) {
		b.exhaustedAt.Store(int64(time.Since(b.Begin)))
	}
	closed := b.Breaker.Record(r.kind(), err, probe)
	b.log.note(r, err, closed)
}

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

// Decide sends a statement for requests. It also updates leases and remembers new denials. It forgets the older denials
// of each key whose row has changed.
func (b *Batcher) Decide(ctx context.Context, db pg.DB, requests []*Request, tx Transaction) error {
	if b.Denials == nil {
		return b.database.Execute(ctx, db, requests, tx)
	}
	leasing := slices.ContainsFunc(requests, func(r *Request) bool { return r.Parts[0].Space.Lease != nil })
	var before departed
	before.note(b, leasing)
	err := b.database.Execute(ctx, db, requests, tx)
	before.settle(b, requests, err)
	return err
}

// departed is what this process knows when a statement or a trip begins.
type departed struct {
	leasing bool          // whether a request may lease units
	left    instant       // the time, if leasing
	asked   time.Duration // the time
	since   Changes
}

func (d *departed) note(b *Batcher, leasing bool) {
	d.leasing, d.asked, d.since = leasing, b.Denials.Elapsed(), b.Denials.Snapshot()
	if leasing {
		d.left = b.Leases.now()
	}
}

// settle updates leases and denials after the answer to requests.
func (d *departed) settle(b *Batcher, requests []*Request, err error) {
	told := b.Denials.Elapsed()
	if d.leasing {
		came := b.Leases.now()
		for _, r := range requests {
			b.Leases.settle(r, err, d.left, came)
		}
	}
	for _, r := range requests {
		b.settleDenials(r, err, d.asked, told, &d.since)
		if r.Shadow != nil {
			b.settleDenials(&r.Shadow.request, err, d.asked, told, &d.since)
		}
		if r.gives() && !r.ofLease || r.endsHold() {
			for i := range r.Parts {
				r.Parts[i].Space.tell(r.Parts[i].Key)
			}
		}
	}
}

// settleDenials remembers the denial of a request, or forgets the key's denials if the request was not denied: after a
// charge, for example, their RetryAfter would be too early. A refused charge and a denied reservation are not
// remembered.
func (b *Batcher) settleDenials(r *Request, err error, asked, told time.Duration, since *Changes) {
	b.forget(r, err, since)
	if p := &r.Parts[0]; err == nil && len(r.Parts) == 1 && p.Space.Remember && p.Cost > 0 && !p.Charge &&
		!r.reserves() && !r.PassedOver() && p.Decision.Granted < r.Count {
		b.Denials.Remember(p, asked, told, since)
	}
}

// forget forgets the denials of a request's keys if the request may have changed their rows. The argument since is the
// snapshot of the request's statement, or nil if no denials of this statement are remembered.
func (b *Batcher) forget(r *Request, err error, since *Changes) {
	if b.Denials == nil || r.Looks() {
		return
	}
	for i := range r.Parts {
		// A settlement may find the hold of some parts only.
		if err != nil || r.Parts[i].Decision.Granted > 0 {
			b.Denials.Forget(r.Parts[i].Space, r.Parts[i].Key, since)
		}
	}
}

// decideInTx decides one request in the caller's transaction, after waiting for a turn on the connection.
func (b *Batcher) decideInTx(ctx context.Context, tx pgx.Tx, r *Request) error {
	mine := turn.Of(tx)
	if err := mine.Take(ctx); err != nil {
		return GaveUp(err)
	}
	defer mine.Pass()
	return pg.RolledBack(tx, b.decideAlone(ctx, tx, r))
}

// decideAlone decides one request on a single connection, within b.timeout. It returns only when the connection is free
// again, even if ctx ends earlier.
func (b *Batcher) decideAlone(ctx context.Context, db pg.DB, r *Request) error {
	if err := ctx.Err(); err != nil {
		return GaveUp(err)
	}
	if conn := pg.Conn(db); conn != nil && conn.IsClosed() { // pgx would say that the statement may have been sent
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
// connection. The statement may have waited for the row, for a locked table, or for a slow server. So heldOrAway sends
// the request again, in a statement that skips locked rows. In a caller's transaction it sends nothing, because the
// error has ended the transaction.
func (b *Batcher) heldOrAway(ctx context.Context, db pg.DB, requests []*Request, err error) error {
	conn := pg.Conn(db)
	if !pg.LockTimeout(err) && !pg.Canceled(err) && !pg.Undone(err) || conn == nil || conn.PgConn().TxStatus() != 'I' {
		return err
	}
	again := b.database.Execute(ctx, db, requests, Transaction{LockTimeout: LockTimeout(makingWait), SkipHeld: true})
	switch {
	case ctx.Err() != nil: // no time was left for a second statement
		return err
	case again == nil && requests[0].PassedOver():
		return keyHeld()
	}
	return again
}

// appendAll appends requests to the slice all. It appends the members of a merged list as separate requests.
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
