package ratelimit

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
)

// queue is where requests wait for the next statement. Limiters take turns, and so do the lines of one limiter. A
// turn is one statement.
type queue struct {
	batcher     *batcher
	lane        *heldLane
	maxInFlight int
	maxBatch    int

	mu       sync.Mutex
	turns    []*lines             // limiters with lines, in the order of their turns
	lines    map[*keyspace]*lines // the same
	free     []*lines             // memory that limiters without lines have left for others
	waiting  int                  // requests in all lines
	inFlight int
	perKey   int           // how many requests the last large statement had for each of its keys
	lonely   int           // how many calls in a row were alone, from the first to the last moment
	leftAt   time.Duration // when the last statement left, since the batcher's begin
	late     bool          // a timer is set for leaveLate
	fastest  time.Duration // see noteDuration
	flights  [kindCount]flights
}

// flights are what is known about the statements of one kind.
type flights struct {
	began time.Duration // when the first of those in flight left, since the batcher's begin
	n     int16         // how many are in flight
	seen  bool          // there were some
	slow  bool          // the last one took unusually long, or the first in flight does
	// prompt tells that the last one took no longer than tooLong.
	prompt bool
}

// A second statement beside the one under way costs the server nearly as much again as one for both. That matters where
// many processes share the server. So a second one leaves only in three cases. Enough callers wait for it, and for as
// many keys: for a few keys it would wait for the rows that the first one has. Or the database is so far away that most
// of the time is spent in the network. Or the one under way takes so long that something is wrong with it.
const (
	enough  = 24
	far     = time.Millisecond
	tooLong = 10 * time.Millisecond
)

// One statement of rate_limit_all, for lines of several limiters, costs the server about 450 µs plus 28 µs per key. A
// statement for each line costs 150 µs plus 22 µs per key. So only short lines leave together, and only if there are
// enough of them.
const (
	shortLine   = 8 // requests
	worthMixing = 6 // short lines
)

// grace is for how long the statements of one caller go on who has left. Then the one under way is interrupted, which
// costs the connection. By then a held row was found out, and the lane has the request. Callers send their own
// statements only while these take no longer than tooLong, so a database that hangs takes this once.
const grace = 50 * time.Millisecond

// aloneAfter is after how many lone calls in a row callers send their statements themselves.
const aloneAfter = 4

const maxFree = 16 // limiters, whose memory a queue keeps for others

func newQueue(b *batcher, maxInFlight, maxBatch int) *queue {
	q := &queue{batcher: b, maxInFlight: maxInFlight, maxBatch: maxBatch}
	q.lane = &heldLane{batcher: b, maxBatch: maxBatch, lost: q.pushBack}
	return q
}

// submit has a request decided. It returns when that is done, or when ctx ends. After an error of ctx the request
// is no longer the caller's.
func (q *queue) submit(ctx context.Context, r *request) error {
	b := q.batcher
	var pass bool
	if pass, r.probe = b.breaker.admit(r.kind(), r.asksAnyway()); !pass {
		return errNotTried
	}
	r.since = time.Now()
	if !b.database.pooled() {
		return q.takeTurn(ctx, r)
	}
	if b.held.knows(r) {
		q.lane.add([]*request{r})
		return q.wait(ctx, r)
	}

	q.mu.Lock()
	q.push(r)
	if q.isAlone(r) {
		q.goAlone(ctx)
	} else {
		q.leaveSoon(r.kind())
	}
	return q.wait(ctx, r)
}

// isAlone tells whether the caller of a request, which has just come, is to send it himself. He does so because another
// goroutine would take a lone call 15 of its 95 microseconds. If he leaves meanwhile, he has to wait for the statement,
// but not for long: see grace. Where even a few call at once, they better leave together. So do those who take from
// leases, whose statements are few because they are busy: 16 processes of 2 callers made a third as many decisions when
// these sent their own. q.mu is locked.
func (q *queue) isAlone(r *request) bool {
	return q.inFlight == 0 && q.waiting == 1 && q.lonely >= aloneAfter && q.flights[r.kind()].prompt &&
		!r.probe && r.space.lease == nil
}

// goAlone has a caller send the only request that waits. It unlocks q.mu.
func (q *queue) goAlone(ctx context.Context) {
	q.inFlight++
	buf := buffers{caller: ctx}
	q.board(&buf)
	q.mu.Unlock()
	defer func() { // also if code of the application's has panicked, in a tracer or an observer
		q.mu.Lock()
		defer q.mu.Unlock()
		if q.waiting > 0 {
			go q.run()
		} else {
			q.rest()
		}
	}()
	q.reroute(q.fly(&buf))
}

// submitAll has requests decided that give back, as soon as their turn comes. It does not wait for that. While the
// breaker is open, they are turned away.
func (q *queue) submitAll(requests []*request) {
	if len(requests) == 0 {
		return
	}
	now, kind := time.Now(), requests[0].kind() // read now, because a request that has ended is used again
	q.mu.Lock()
	for _, r := range requests {
		var pass bool
		if pass, r.probe = q.batcher.breaker.admit(r.kind(), r.asksAnyway()); !pass {
			r.finish(errNotTried)
			continue
		}
		r.since = now
		q.push(r)
	}
	q.leaveSoon(kind)
}

// wait returns when a request has been decided, or when ctx ends.
func (q *queue) wait(ctx context.Context, r *request) error {
	select {
	case <-r.done: // also if ctx has ended meanwhile
		return r.err
	default:
	}
	select {
	case <-r.done:
		return r.err
	case <-ctx.Done():
		return gaveUp(ctx.Err())
	}
}

// takeTurn asks the database on its one connection, unless the breaker opens while it waits for its turn.
func (q *queue) takeTurn(ctx context.Context, r *request) error {
	b := q.batcher
	if err := b.database.turn.Take(ctx); err != nil {
		return gaveUp(err)
	}
	defer b.database.turn.Pass()
	if !r.probe && !r.asksAnyway() && b.breaker.isOpen(r.kind()) {
		return errNotTried
	}
	err := b.decideAlone(ctx, b.database.db, r)
	b.report(r, err, r.probe)
	return err
}

// push puts a request into its line. q.mu is locked.
func (q *queue) push(r *request) {
	l := q.line(r)
	l.requests = append(l.requests, r)
	q.waiting++
}

// pushBack puts requests that have lost a race before those that came later.
func (q *queue) pushBack(requests []*request) {
	if len(requests) == 0 {
		return
	}
	q.mu.Lock()
	for _, r := range slices.Backward(requests) {
		l := q.line(r)
		l.requests = slices.Insert(l.requests, 0, r)
		q.waiting++
	}
	q.leaveSoon(requests[0].kind())
}

// leaveSoon sends a statement for requests of a kind that have just come, now or after a while. It unlocks q.mu.
func (q *queue) leaveSoon(k kind) {
	leave := q.mayLeave(k)
	if leave {
		q.inFlight++
	} else if !q.late {
		q.late = true
		time.AfterFunc(tooLong, q.leaveLate)
	}
	q.mu.Unlock()
	if leave {
		go q.run()
	}
}

// line returns the line in which a request waits. q.mu is locked.
func (q *queue) line(r *request) *line {
	s, looks, kind := q.linesOf(r.space), r.looks(), r.kind()
	for i := range s.each {
		if l := &s.each[i]; l.policy == r.policy && l.looks == looks && l.kind == kind {
			return l
		}
	}
	s.each = append(s.each, line{r.policy, looks, kind, s.spare})
	s.spare = nil
	return &s.each[len(s.each)-1]
}

// linesOf returns the lines of a limiter, which gets a turn if it has had none. q.mu is locked.
func (q *queue) linesOf(space *keyspace) *lines {
	s := q.lines[space]
	if s != nil {
		return s
	}
	if n := len(q.free); n > 0 {
		s, q.free = q.free[n-1], q.free[:n-1]
	} else {
		s = &lines{}
	}
	s.space = space
	if q.lines == nil {
		q.lines = make(map[*keyspace]*lines)
	}
	q.lines[space] = s
	q.turns = append(q.turns, s)
	return s
}

// emptied forgets a limiter that has no lines any more. q.mu is locked.
func (q *queue) emptied(s *lines) {
	delete(q.lines, s.space)
	s.space = nil
	if len(q.free) < maxFree {
		q.free = append(q.free, s)
	}
}

// mayLeave tells whether a statement may leave for a request of that kind, which has just come. q.mu is locked.
func (q *queue) mayLeave(k kind) bool {
	many := min(enough*max(q.perKey, 1), q.maxBatch)
	return q.inFlight == 0 || q.inFlight < q.maxInFlight && q.hasPlace(k) &&
		(q.waiting >= many || q.fastest >= far || q.flights[k].n == 0 && q.allSlow())
}

// hasPlace tells whether a further statement of a kind may leave, if there is a place at all. A kind that is slow
// leaves a place to the others, or they would have to wait until it is told, for a Timeout perhaps.
func (q *queue) hasPlace(k kind) bool {
	f := q.flights[k]
	if f.n == 0 || !f.slow || int(f.n) < q.maxInFlight-1 {
		return true
	}
	for other := range kind(kindCount) {
		if other != k && q.flights[other].seen {
			return false
		}
	}
	return true // there are no others
}

// allSlow tells whether what is in flight is all of slow kinds. What is about to leave, or has just come back, is not:
// it takes those who wait with it.
func (q *queue) allSlow() bool {
	slow := 0
	for _, f := range q.flights {
		if f.slow {
			slow += int(f.n)
		}
	}
	return slow == q.inFlight
}

// departs records that a statement was sent. q.mu is locked.
func (q *queue) departs(k kind) {
	f := &q.flights[k]
	q.leftAt = time.Since(q.batcher.begin)
	if f.n == 0 {
		f.began = q.leftAt
	}
	f.n++
	f.seen = true
}

// lands records that a statement has come back, and how long it took. q.mu is locked.
func (q *queue) lands(k kind, took time.Duration) {
	f := &q.flights[k]
	f.n--
	f.slow, f.prompt = q.isSlow(took), took <= tooLong
	if q.lonely++; q.waiting > 0 {
		q.lonely = 0
	}
	q.noteDuration(took)
}

// isSlow tells whether a statement has taken unusually long, in a database that may be far away.
func (q *queue) isSlow(took time.Duration) bool { return took > tooLong && took > 4*q.fastest }

// noteDuration remembers how long the fastest statements take, those that meet no others. q.mu is locked.
func (q *queue) noteDuration(d time.Duration) {
	if q.fastest == 0 || d < q.fastest {
		q.fastest = d
	} else {
		q.fastest += (d - q.fastest) / 4096 // it forgets slowly
	}
}

// leaveLate sends those who wait, although the statement before theirs is still under way. There is one timer for all,
// because Go wakes a thread for each that is set.
func (q *queue) leaveLate() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.late = false
	if q.waiting == 0 {
		return
	}
	now := time.Since(q.batcher.begin)
	if wait := q.leftAt + tooLong - now; wait > 0 {
		q.late = true
		time.AfterFunc(wait, q.leaveLate)
		return
	}
	for k := range q.flights {
		if f := &q.flights[k]; f.n > 0 && q.isSlow(now-f.began) {
			f.slow = true
		}
	}
	if q.inFlight < q.maxInFlight {
		q.inFlight++
		go q.run()
	}
}

// run sends one statement after the other until nobody waits. One goroutine runs it for each statement in flight,
// and none at rest.
func (q *queue) run() {
	var buf buffers
	for {
		q.mu.Lock()
		if !q.board(&buf) {
			q.rest()
			q.mu.Unlock()
			return
		}
		q.mu.Unlock()
		q.reroute(q.fly(&buf))
		clear(buf.batch)
		clear(buf.leaders)
		// Callers who were just told often ask again at once. This lets them come aboard. Without it, 64 callers
		// leave in batches of 16 on average; with it in batches of 22, and a sixth more are decided.
		runtime.Gosched()
	}
}

// board takes those who leave next from their lines. It tells whether there are any. q.mu is locked.
func (q *queue) board(buf *buffers) bool {
	buf.batch = q.nextBatch(buf.batch[:0])
	if len(buf.batch) == 0 {
		return false
	}
	if buf.queued = q.waiting; len(buf.batch) > 1 {
		q.lonely = -1 // until it is back
	}
	q.departs(buf.batch[0].kind())
	return true
}

// fly sends a statement for those who have boarded, and returns those who are not decided, as send does.
func (q *queue) fly(buf *buffers) (held, lost []*request) {
	k, left := buf.batch[0].kind(), time.Now() // now, because requests that have ended are used again
	defer func() {
		q.mu.Lock()
		if n := len(buf.batch); n >= enough { // fewer tell little
			q.perKey = n / max(len(buf.leaders), 1)
		}
		q.lands(k, time.Since(left))
		q.mu.Unlock()
	}()
	return q.batcher.send(buf)
}

// reroute has those decided whom a statement has not decided.
func (q *queue) reroute(held, lost []*request) {
	q.lane.add(q.lane.giveUp(held))
	q.pushBack(lost)
}

// rest records that a goroutine which sends statements ends. q.mu is locked.
func (q *queue) rest() {
	q.inFlight--
	if len(q.turns) == 0 && cap(q.turns) > 64 { // free what a burst needed
		q.turns, q.lines = nil, nil
	}
}

// nextBatch moves the requests that leave next from their lines to batch. They are those of the line whose turn it is,
// or of many short lines. q.mu is locked.
func (q *queue) nextBatch(batch []*request) []*request {
	turn, i, found := q.nextLine()
	if !found {
		return batch
	}
	s := q.turns[turn]
	lead := s.each[i]
	if len(lead.requests) > min(shortLine, q.maxBatch) || q.shortLines(&lead) < worthMixing {
		batch = q.take(batch, s, i)
		q.turns = slices.Delete(q.turns, turn, turn+1)
		if len(s.each) > 0 {
			q.turns = append(q.turns, s)
		} else {
			q.emptied(s)
		}
		return batch
	}
	served := make(map[*lines]bool, len(q.turns))
	for before := -1; len(batch) > before; { // each round takes a line of each limiter
		before = len(batch)
		for _, s := range q.turns {
			if i := s.shortLine(&lead); i >= 0 && len(batch)+len(s.each[i].requests) <= q.maxBatch {
				batch = q.take(batch, s, i)
				served[s] = true
			}
		}
	}
	q.rotate(served)
	return batch
}

// nextLine is the line whose turn it is, the i-th of a limiter in q.turns. Kinds without a place miss their turn.
func (q *queue) nextLine() (turn, i int, found bool) {
	for turn, s := range q.turns {
		for i := range s.each {
			if q.hasPlace(s.each[i].kind) {
				return turn, i, true
			}
		}
	}
	return 0, 0, false
}

// shortLines counts the short lines that may leave with lead.
func (q *queue) shortLines(lead *line) (n int) {
	for _, s := range q.turns {
		for i := range s.each {
			if s.each[i].leavesWith(lead) {
				n++
			}
		}
	}
	return n
}

// shortLine returns the index of a limiter's first short line that may leave with lead, or -1.
func (s *lines) shortLine(lead *line) int {
	return slices.IndexFunc(s.each, func(l line) bool { return l.leavesWith(lead) })
}

// leavesWith tells whether one statement can decide a line together with lead. Lines that look take no locks.
func (l *line) leavesWith(lead *line) bool {
	return len(l.requests) <= shortLine && l.looks == lead.looks && l.kind == lead.kind
}

// take moves up to maxBatch requests of a limiter's i-th line to batch. If any are left, the line goes behind the
// limiter's others.
func (q *queue) take(batch []*request, s *lines, i int) []*request {
	l := s.each[i]
	n := min(len(l.requests), q.maxBatch)
	batch = append(batch, l.requests[:n]...)
	q.waiting -= n
	rest := copy(l.requests, l.requests[n:])
	clear(l.requests[rest:])
	l.requests = l.requests[:rest]
	s.each = slices.Delete(s.each, i, i+1)
	if rest > 0 {
		s.each = append(s.each, l)
	} else if cap(l.requests) <= 64 { // free what a burst needed
		s.spare = l.requests
	}
	if len(s.each) == 0 && cap(s.each) > 8 {
		s.each = nil
	}
	return batch
}

// rotate puts the limiters that were served behind the others, and removes those without lines. All others keep
// their places.
func (q *queue) rotate(served map[*lines]bool) {
	var again []*lines
	stay := 0
	for _, s := range q.turns {
		switch {
		case len(s.each) == 0:
			q.emptied(s)
		case served[s]:
			again = append(again, s)
		default:
			q.turns[stay] = s
			stay++
		}
	}
	end := stay + copy(q.turns[stay:], again)
	clear(q.turns[end:])
	q.turns = q.turns[:end]
}
