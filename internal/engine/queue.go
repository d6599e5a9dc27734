package engine

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Queue holds the requests that wait for the next statement. Limiters take turns, and the groups of a limiter take
// turns too. Each turn is one statement. With 64 callers of different keys, shared statements make 5.6 times as many
// decisions as a statement for each call.
type Queue struct {
	Batcher     *Batcher
	Lane        *heldLane
	MaxInFlight int
	MaxBatch    int

	Mu        sync.Mutex
	Turns     []*limiterGroups          // the limiters with waiting requests, in the order of their turns
	ByLimiter map[*Space]*limiterGroups // the same limiters as in Turns
	Waiting   int                       // the number of waiting requests in all groups
	InFlight  int
	perKey    int           // requests per key in the last large statement
	lonely    int           // how many calls in a row found no other call in the queue
	leftAt    time.Duration // when the last statement was sent, since Batcher.Begin
	late      bool          // a timer for leaveLate is set
	fastest   time.Duration // see noteDuration
	flights   [kindCount]flights
}

// flights describes the statements of one kind that are under way.
type flights struct {
	began time.Duration // when the first statement in flight was sent, since Batcher.Begin
	n     int16         // how many statements are in flight
	seen  bool          // whether there has ever been a statement of this kind
	slow  bool          // the last statement, or the first one in flight, is unusually slow
	// prompt is true if the last statement took at most TooLong.
	prompt bool
}

// Enough and TooLong decide when a second statement is sent while the first one is under way. Two statements cost the
// server nearly twice as much as one statement for all requests. So a second statement is sent only if Enough requests
// for different keys are waiting, or if the first statement takes longer than TooLong. With few keys, the second
// statement would wait for rows that the first one has locked. With 64 callers of one key, one statement at a time
// makes 30 % more decisions than two.
const (
	Enough  = 24
	TooLong = 10 * time.Millisecond
)

// If there are WorthMixing small groups, one statement of rate_limit_all decides all of them. Such a mixed statement
// costs the server about 450 µs plus 28 µs per key. A statement for a single group costs 150 µs plus 22 µs per key.
// With 20 limiters of 1 caller each, mixed statements multiply the decisions per second by 4.
const (
	SmallGroup  = 8 // the largest number of requests in a small group
	WorthMixing = 6 // how many small groups are enough for a mixed statement
)

// Grace is how long a lone caller's statement may go on after its context has ended. After Grace, the statement is
// interrupted, and pgx closes the connection. A caller sends its own statement only if the last statement took at most
// TooLong. So if the database hangs, only one connection is lost.
const Grace = 50 * time.Millisecond

// AloneAfter is the number of lone calls in a row after which callers send their statements themselves.
const AloneAfter = 4

func newQueue(b *Batcher, maxInFlight, maxBatch int) *Queue {
	q := &Queue{Batcher: b, MaxInFlight: maxInFlight, MaxBatch: maxBatch}
	q.Lane = &heldLane{batcher: b, maxBatch: maxBatch, lost: q.PushBack}
	return q
}

// Submit sends a request, and waits until the request is decided or ctx ends. If ctx has ended, the caller must not
// touch the request again.
func (q *Queue) Submit(ctx context.Context, r *Request) error {
	b := q.Batcher
	var pass bool
	if pass, r.Probe = b.Breaker.Admit(r.kind(), r.asksAnyway()); !pass {
		return ErrNotTried
	}
	r.Since = time.Now()
	if !b.database.pooled() {
		return q.takeTurn(ctx, r)
	}
	if b.database.door != nil {
		q.travel(r)
		return q.wait(ctx, r)
	}
	if b.Held.Knows(r) {
		q.Lane.Add([]*Request{r})
		return q.wait(ctx, r)
	}

	q.Mu.Lock()
	q.Push(r)
	if q.IsAlone(r) {
		q.goAlone(ctx)
	} else {
		q.leaveSoon(r.kind())
	}
	return q.wait(ctx, r)
}

// IsAlone returns whether the caller of a new request should send the request itself. Passing a request to another
// goroutine costs a lone call 8 to 11 % of its time. But a caller that sends its own statement must wait up to Grace
// after its context ends, and a shared statement is faster if several calls come at once. Callers with leases share
// statements, because 16 processes of 2 callers made only a third of the decisions without sharing. The caller of
// IsAlone holds q.Mu.
func (q *Queue) IsAlone(r *Request) bool {
	return q.InFlight == 0 && q.Waiting == 1 && q.lonely >= AloneAfter && q.flights[r.kind()].prompt &&
		!r.Probe && r.Space.Lease == nil
}

// goAlone sends the only waiting request, in the goroutine of the request's caller. The caller holds q.Mu, and goAlone
// releases q.Mu.
func (q *Queue) goAlone(ctx context.Context) {
	q.InFlight++
	d := q.Board()
	d.caller = ctx
	q.Mu.Unlock()
	defer func() { // deferred, because a tracer or an observer of the application may panic
		q.Mu.Lock()
		defer q.Mu.Unlock()
		if q.Waiting > 0 {
			go q.run()
		} else {
			q.rest()
		}
	}()
	q.reroute(q.fly(d))
}

// submitAll queues requests, and does not wait for their decisions. If the breaker is open, the
// requests end with ErrNotTried.
func (q *Queue) submitAll(requests []*Request) {
	if len(requests) == 0 {
		return
	}
	now, b := time.Now(), q.Batcher
	var kinds [kindCount]bool
	var travelling, held []*Request
	q.Mu.Lock()
	for _, r := range requests {
		k := r.kind() // read now, because a finished request is reused
		var pass bool
		if pass, r.Probe = b.Breaker.Admit(k, r.asksAnyway()); !pass {
			r.Finish(ErrNotTried)
			continue
		}
		r.Since = now
		switch {
		case b.database.door != nil:
			travelling = append(travelling, r)
		case b.Held.Knows(r):
			held = append(held, r)
		default:
			kinds[k] = true
			q.Push(r)
		}
	}
	for k, there := range kinds {
		if there {
			q.leaveSoon(kind(k))
			q.Mu.Lock()
		}
	}
	q.Mu.Unlock()
	q.Lane.Add(held)
	for _, r := range travelling {
		q.travel(r)
	}
}

// wait waits until a request is decided or ctx ends.
func (q *Queue) wait(ctx context.Context, r *Request) error {
	select {
	case <-r.Done: // the decision counts, even if ctx has ended too
		return r.Err
	default:
	}
	select {
	case <-r.Done:
		return r.Err
	case <-ctx.Done():
		return GaveUp(ctx.Err())
	}
}

// takeTurn waits for the caller's turn on a single connection, and then sends the request. It returns ErrNotTried if
// the breaker has opened during the wait.
func (q *Queue) takeTurn(ctx context.Context, r *Request) error {
	b := q.Batcher
	if err := b.database.Turn.Take(ctx); err != nil {
		return GaveUp(err)
	}
	defer b.database.Turn.Pass()
	if !r.Probe && !r.asksAnyway() && b.Breaker.IsOpen(r.kind()) {
		return ErrNotTried
	}
	err := b.decideAlone(ctx, b.database.DB, r)
	b.report(r, err, r.Probe)
	return err
}

// Push adds a request to its group. The caller holds q.Mu.
func (q *Queue) Push(r *Request) {
	l := q.groupOf(r)
	l.requests = append(l.requests, r)
	q.Waiting++
}

// PushBack moves requests that have lost a race to the front of their groups.
func (q *Queue) PushBack(requests []*Request) {
	if len(requests) == 0 {
		return
	}
	q.Mu.Lock()
	for _, r := range slices.Backward(requests) {
		l := q.groupOf(r)
		l.requests = slices.Insert(l.requests, 0, r)
		q.Waiting++
	}
	q.leaveSoon(requests[0].kind())
}

// leaveSoon sends new requests of a kind, now or after TooLong. The caller holds q.Mu, and leaveSoon releases q.Mu.
func (q *Queue) leaveSoon(k kind) {
	leave := q.MayLeave(k)
	if leave {
		q.InFlight++
	} else if !q.late {
		q.late = true
		time.AfterFunc(TooLong, q.leaveLate)
	}
	q.Mu.Unlock()
	if leave {
		go q.run()
	}
}

// groupOf returns the group of a request, and makes a new group if there is none. The caller holds q.Mu.
func (q *Queue) groupOf(r *Request) *group {
	s, looks, kind := q.groupsOf(r.Space), r.Looks(), r.kind()
	for i := range s.groups {
		if l := &s.groups[i]; l.policy.Is(r.Policy) && l.looks == looks && l.kind == kind {
			return l
		}
	}
	s.groups = append(s.groups, group{policy: r.Policy, looks: looks, kind: kind})
	return &s.groups[len(s.groups)-1]
}

// groupsOf returns the groups of a limiter. A limiter without groups is added to q.Turns. The caller holds q.Mu.
func (q *Queue) groupsOf(space *Space) *limiterGroups {
	s := q.ByLimiter[space]
	if s != nil {
		return s
	}
	s = &limiterGroups{space: space}
	if q.ByLimiter == nil {
		q.ByLimiter = make(map[*Space]*limiterGroups)
	}
	q.ByLimiter[space] = s
	q.Turns = append(q.Turns, s)
	return s
}

// MayLeave returns whether a statement may be sent now for a new request of a kind. The caller holds q.Mu.
func (q *Queue) MayLeave(k kind) bool {
	many := min(Enough*max(q.perKey, 1), q.MaxBatch)
	return q.InFlight == 0 || q.InFlight < q.MaxInFlight && q.hasPlace(k) &&
		(q.Waiting >= many || q.flights[k].n == 0 && q.allSlow())
}

// hasPlace returns whether another statement of a kind may be sent, as far as other kinds are concerned. If a kind is
// slow, it may not use the last place of MaxInFlight, so that requests of other kinds need not wait for slow
// statements. While the durable table was locked, ephemeral limits made 1,000 decisions per second with this rule, and
// none without it. The caller holds q.Mu.
func (q *Queue) hasPlace(k kind) bool {
	f := q.flights[k]
	if f.n == 0 || !f.slow || int(f.n) < q.MaxInFlight-1 {
		return true
	}
	for other := range kind(kindCount) {
		if other != k && q.flights[other].seen {
			return false
		}
	}
	return true // no requests of other kinds have ever come
}

// allSlow returns whether all statements in flight are of slow kinds. A statement that is just being prepared does not
// count as slow, because it will take the waiting requests along. The caller holds q.Mu.
func (q *Queue) allSlow() bool {
	slow := 0
	for _, f := range q.flights {
		if f.slow {
			slow += int(f.n)
		}
	}
	return slow == q.InFlight
}

// Departs records that a statement was sent. The caller holds q.Mu.
func (q *Queue) Departs(k kind) {
	f := &q.flights[k]
	q.leftAt = time.Since(q.Batcher.Begin)
	if f.n == 0 {
		f.began = q.leftAt
	}
	f.n++
	f.seen = true
}

// Lands records that a statement has ended, and how long it took. The caller holds q.Mu.
func (q *Queue) Lands(k kind, took time.Duration) {
	f := &q.flights[k]
	f.n--
	f.slow, f.prompt = q.isSlow(took), took <= TooLong
	if q.lonely++; q.Waiting > 0 {
		q.lonely = 0
	}
	q.noteDuration(took)
}

// isSlow returns whether the duration took is above TooLong and above four times q.fastest. The caller holds q.Mu.
func (q *Queue) isSlow(took time.Duration) bool { return took > TooLong && took > 4*q.fastest }

// noteDuration updates q.fastest. The caller holds q.Mu.
func (q *Queue) noteDuration(d time.Duration) {
	if q.fastest == 0 || d < q.fastest {
		q.fastest = d
	} else {
		q.fastest += (d - q.fastest) / 4096 // adapts slowly if all statements become slower
	}
}

// leaveLate sends the waiting requests although another statement is still under way. All waiting requests share one
// timer, because Go wakes a thread for each new timer.
func (q *Queue) leaveLate() {
	q.Mu.Lock()
	defer q.Mu.Unlock()
	q.late = false
	if q.Waiting == 0 {
		return
	}
	now := time.Since(q.Batcher.Begin)
	if wait := q.leftAt + TooLong - now; wait > 0 {
		q.late = true
		time.AfterFunc(wait, q.leaveLate)
		return
	}
	for k := range q.flights {
		if f := &q.flights[k]; f.n > 0 && q.isSlow(now-f.began) {
			f.slow = true
		}
	}
	if q.InFlight < q.MaxInFlight {
		q.InFlight++
		go q.run()
	}
}

// run sends one statement after the other until no request waits. Each statement in flight has a goroutine in run.
func (q *Queue) run() {
	for {
		q.Mu.Lock()
		d := q.Board()
		if d == nil {
			q.rest()
			q.Mu.Unlock()
			return
		}
		q.Mu.Unlock()
		q.reroute(q.fly(d))
		// Callers often ask again as soon as they have an answer. Gosched lets these callers join the next statement.
		// With 64 callers, Gosched adds 14 % to the decisions per second.
		runtime.Gosched()
	}
}

// Board takes the requests for the next statement from their groups. It returns nil if no request waits. The caller
// holds q.Mu.
func (q *Queue) Board() *Departure {
	requests := q.NextBatch(nil)
	if len(requests) == 0 {
		return nil
	}
	if len(requests) > 1 {
		q.lonely = -1 // Lands increments lonely to 0
	}
	q.Departs(requests[0].kind())
	return &Departure{Requests: requests, queued: q.Waiting}
}

// fly sends a departure. It returns the undecided requests (see Batcher.Send).
func (q *Queue) fly(d *Departure) (held, lost []*Request) {
	k, n, left := d.Requests[0].kind(), len(d.Requests), time.Now() // read now, because a finished request is reused
	defer func() {
		q.Mu.Lock()
		if n >= Enough && d.leaders > 0 { // smaller batches say little about perKey
			q.perKey = n / d.leaders
		}
		q.Lands(k, time.Since(left))
		q.Mu.Unlock()
	}()
	return q.Batcher.Send(d)
}

// reroute sends the requests that a statement has left undecided to the lane or back into the queue.
func (q *Queue) reroute(held, lost []*Request) {
	q.Lane.Add(q.Lane.GiveUp(held))
	q.PushBack(lost)
}

// rest records that a goroutine that sends statements ends. The caller holds q.Mu.
func (q *Queue) rest() {
	q.InFlight--
	if len(q.Turns) == 0 && cap(q.Turns) > 64 { // frees the memory that a burst needed
		q.Turns, q.ByLimiter = nil, nil
	}
}

// NextBatch moves the requests for the next statement from their groups to batch. It takes one large group, or many
// small groups. The caller holds q.Mu.
func (q *Queue) NextBatch(batch []*Request) []*Request {
	turn, i, found := q.nextGroup()
	if !found {
		return batch
	}
	s := q.Turns[turn]
	lead := s.groups[i]
	if len(lead.requests) > min(SmallGroup, q.MaxBatch) || q.smallGroups(&lead) < WorthMixing {
		batch = q.depart(batch, s, i)
		q.Turns = slices.Delete(q.Turns, turn, turn+1)
		if len(s.groups) > 0 {
			q.Turns = append(q.Turns, s)
		} else {
			delete(q.ByLimiter, s.space)
		}
		return batch
	}
	served := make(map[*limiterGroups]bool, len(q.Turns))
	for before := -1; len(batch) > before; { // each round takes one small group of each limiter
		before = len(batch)
		for _, s := range q.Turns {
			if i := s.smallGroup(&lead); i >= 0 && len(batch)+len(s.groups[i].requests) <= q.MaxBatch {
				batch = q.depart(batch, s, i)
				served[s] = true
			}
		}
	}
	q.rotate(served)
	return batch
}

// nextGroup returns the group whose turn it is, as its index i in the groups of q.Turns[turn]. It skips groups of a
// kind for which hasPlace is false. The caller holds q.Mu.
func (q *Queue) nextGroup() (turn, i int, found bool) {
	for turn, s := range q.Turns {
		for i := range s.groups {
			if q.hasPlace(s.groups[i].kind) {
				return turn, i, true
			}
		}
	}
	return 0, 0, false
}

// smallGroups counts the small groups that fit into one statement with lead. The caller holds q.Mu.
func (q *Queue) smallGroups(lead *group) (n int) {
	for _, s := range q.Turns {
		for i := range s.groups {
			if s.groups[i].leavesWith(lead) {
				n++
			}
		}
	}
	return n
}

// smallGroup returns the index of a limiter's first small group that fits into one statement with lead. It returns -1
// if there is none.
func (s *limiterGroups) smallGroup(lead *group) int {
	return slices.IndexFunc(s.groups, func(l group) bool { return l.leavesWith(lead) })
}

// leavesWith returns whether one statement can decide a group together with lead. Requests that only look need no
// locks, so they are sent in separate statements.
func (l *group) leavesWith(lead *group) bool {
	return len(l.requests) <= SmallGroup && l.looks == lead.looks && l.kind == lead.kind
}

// depart moves up to MaxBatch requests from a limiter's i-th group to batch. A group that still has requests becomes
// the limiter's last group. The caller holds q.Mu.
func (q *Queue) depart(batch []*Request, s *limiterGroups, i int) []*Request {
	g := s.groups[i]
	n := min(len(g.requests), q.MaxBatch)
	batch = append(batch, g.requests[:n]...)
	q.Waiting -= n
	g.requests = slices.Delete(g.requests, 0, n)
	s.groups = slices.Delete(s.groups, i, i+1)
	if len(g.requests) > 0 {
		s.groups = append(s.groups, g)
	}
	return batch
}

// rotate moves the limiters in served to the end of q.Turns, and removes limiters without groups. The order of all
// other limiters stays the same. The caller holds q.Mu.
func (q *Queue) rotate(served map[*limiterGroups]bool) {
	var again []*limiterGroups
	stay := 0
	for _, s := range q.Turns {
		switch {
		case len(s.groups) == 0:
			delete(q.ByLimiter, s.space)
		case served[s]:
			again = append(again, s)
		default:
			q.Turns[stay] = s
			stay++
		}
	}
	end := stay + copy(q.Turns[stay:], again)
	clear(q.Turns[end:])
	q.Turns = q.Turns[:end]
}
