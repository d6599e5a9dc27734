package engine

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Queue holds the requests that wait for the next statement. Limiters take turns, and so do the groups of one limiter.
// Each turn is one statement. With 64 callers of different keys, sharing statements makes 5.6 times as many decisions
// as a statement for each call.
type Queue struct {
	Batcher     *Batcher
	Lane        *heldLane
	MaxInFlight int
	MaxBatch    int

	Mu        sync.Mutex
	Turns     []*limiterGroups          // limiters with groups, in the order of their turns
	ByLimiter map[*Space]*limiterGroups // the limiters of Turns
	Waiting   int                       // requests in all groups
	InFlight  int
	perKey    int           // requests for each key in the last large statement
	lonely    int           // how many calls in a row met no others
	leftAt    time.Duration // when the last statement left, since Batcher.Begin
	late      bool          // a timer is set for leaveLate
	fastest   time.Duration // see noteDuration
	flights   [kindCount]flights
}

// flights describes the statements of one kind.
type flights struct {
	began time.Duration // when the first statement in flight left, since Batcher.Begin
	n     int16         // how many statements are in flight
	seen  bool          // whether there ever were any
	slow  bool          // the last one took unusually long, or the first in flight does so now
	// prompt tells that the last one took no longer than TooLong.
	prompt bool
}

// These decide when a second statement leaves beside the one under way. Two cost the server nearly twice as much as one
// for all, which matters where many processes share it. So a second one leaves only in two cases: at least Enough
// callers wait for as many keys; or the first one takes longer than TooLong, so that something seems wrong with it. For
// few keys, a second one would wait for the rows of the first one. Holding it back gains 30 % with 64 callers of one
// key.
const (
	Enough  = 24
	TooLong = 10 * time.Millisecond
)

// Small groups of several limiters leave together, in a statement of rate_limit_all, if there are enough of them. It
// costs the server about 450 µs plus 28 µs per key. A statement for each group costs 150 µs plus 22 µs per key. With 20
// limiters of 1 or 3 callers each, mixing makes 4 or 2.3 times as many decisions.
const (
	SmallGroup  = 8 // requests
	WorthMixing = 6 // small groups
)

// Grace is how long the statements of a lone caller go on after it has left. Then the one under way is interrupted,
// which costs the connection. A held row was found out by then, and the request is in the lane. Callers send their own
// statements only while these take at most TooLong, so a database that hangs costs only one connection.
const Grace = 50 * time.Millisecond

// AloneAfter is how many lone calls in a row it takes until callers send their statements themselves.
const AloneAfter = 4

func newQueue(b *Batcher, maxInFlight, maxBatch int) *Queue {
	q := &Queue{Batcher: b, MaxInFlight: maxInFlight, MaxBatch: maxBatch}
	q.Lane = &heldLane{batcher: b, maxBatch: maxBatch, lost: q.PushBack}
	return q
}

// Submit sends a request. It returns when the request is decided, or when ctx ends. After an error of ctx, the caller
// must not touch the request again.
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

// IsAlone tells whether the caller of a request that has just come should send it. A hand-over to another goroutine
// would cost a lone call 8 to 11 % of its time, and 20 % of the CPU time in this process. A caller that leaves must
// then wait for its statement, up to Grace. Where even a few call at once, they better leave together. Callers who take
// from leases send few statements because they are busy, so they leave together too: when they sent their own, 16
// processes of 2 callers made a third as many decisions. The caller holds q.Mu.
func (q *Queue) IsAlone(r *Request) bool {
	return q.InFlight == 0 && q.Waiting == 1 && q.lonely >= AloneAfter && q.flights[r.kind()].prompt &&
		!r.Probe && r.Space.Lease == nil
}

// goAlone sends the only request that waits, in its caller's goroutine. The caller holds q.Mu, and goAlone releases it.
func (q *Queue) goAlone(ctx context.Context) {
	q.InFlight++
	d := q.Board()
	d.caller = ctx
	q.Mu.Unlock()
	defer func() { // even if a tracer or an observer of the application has panicked
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

// submitAll puts requests that give back into the queue, and does not wait for them. While the breaker is open, it
// turns them away.
func (q *Queue) submitAll(requests []*Request) {
	if len(requests) == 0 {
		return
	}
	now, kind := time.Now(), requests[0].kind() // read now, because requests that have ended are used again
	q.Mu.Lock()
	for _, r := range requests {
		var pass bool
		if pass, r.Probe = q.Batcher.Breaker.Admit(r.kind(), r.asksAnyway()); !pass {
			r.Finish(ErrNotTried)
			continue
		}
		r.Since = now
		q.Push(r)
	}
	q.leaveSoon(kind)
}

// wait returns when a request is decided, or when ctx ends.
func (q *Queue) wait(ctx context.Context, r *Request) error {
	select {
	case <-r.Done: // even if ctx has ended meanwhile
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

// takeTurn sends a request on the only connection, once its turn has come. It gives up if the breaker has opened
// meanwhile.
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

// Push puts a request into its group. The caller holds q.Mu.
func (q *Queue) Push(r *Request) {
	l := q.groupOf(r)
	l.requests = append(l.requests, r)
	q.Waiting++
}

// PushBack puts requests that have lost a race before those that came later.
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

// leaveSoon sends a statement for requests of a kind that have just come, now or after a while. The caller holds q.Mu,
// and leaveSoon releases it.
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

// groupOf returns the group of a request, and makes it if it is missing. The caller holds q.Mu.
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

// groupsOf returns the groups of a limiter. A limiter without groups gets a turn. The caller holds q.Mu.
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

// MayLeave tells whether a statement may leave for a request of a kind that has just come. The caller holds q.Mu.
func (q *Queue) MayLeave(k kind) bool {
	many := min(Enough*max(q.perKey, 1), q.MaxBatch)
	return q.InFlight == 0 || q.InFlight < q.MaxInFlight && q.hasPlace(k) &&
		(q.Waiting >= many || q.flights[k].n == 0 && q.allSlow())
}

// hasPlace tells whether another statement of a kind may leave if any may. A slow kind leaves a place to the others,
// which would otherwise wait for its statements, up to a Timeout each. While somebody had locked the durable table,
// ephemeral limits decided 1,000 times a second, and not at all without this. The caller holds q.Mu.
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
	return true // no other kinds are in use
}

// allSlow tells whether all statements in flight are of slow kinds. One that is about to leave, or has just come back,
// is not slow: it will take the waiting requests along. The caller holds q.Mu.
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

// Lands records that a statement has come back, and how long it took. The caller holds q.Mu.
func (q *Queue) Lands(k kind, took time.Duration) {
	f := &q.flights[k]
	f.n--
	f.slow, f.prompt = q.isSlow(took), took <= TooLong
	if q.lonely++; q.Waiting > 0 {
		q.lonely = 0
	}
	q.noteDuration(took)
}

// isSlow tells whether a statement has taken unusually long, compared with the fastest ones of this database. The
// caller holds q.Mu.
func (q *Queue) isSlow(took time.Duration) bool { return took > TooLong && took > 4*q.fastest }

// noteDuration keeps track of how long the fastest statements take. The caller holds q.Mu.
func (q *Queue) noteDuration(d time.Duration) {
	if q.fastest == 0 || d < q.fastest {
		q.fastest = d
	} else {
		q.fastest += (d - q.fastest) / 4096 // it forgets slowly
	}
}

// leaveLate sends the waiting requests although a statement is still under way. All share one timer, because Go wakes a
// thread for each timer that is set.
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

// run sends one statement after the other until nobody waits. It runs in one goroutine for each statement in flight,
// and in none at rest.
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
		// Callers who were just told often ask again at once. This lets them join the next statement, which makes 14 %
		// more decisions with 64 callers.
		runtime.Gosched()
	}
}

// Board takes the requests that leave next from their groups. It returns nil if there are none. The caller holds q.Mu.
func (q *Queue) Board() *Departure {
	requests := q.NextBatch(nil)
	if len(requests) == 0 {
		return nil
	}
	if len(requests) > 1 {
		q.lonely = -1 // which Lands makes 0
	}
	q.Departs(requests[0].kind())
	return &Departure{Requests: requests, queued: q.Waiting}
}

// fly sends a departure, and returns the undecided requests, as Batcher.Send does.
func (q *Queue) fly(d *Departure) (held, lost []*Request) {
	k, n, left := d.Requests[0].kind(), len(d.Requests), time.Now() // read now, see submitAll
	defer func() {
		q.Mu.Lock()
		if n >= Enough && d.leaders > 0 { // smaller batches tell little
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

// NextBatch moves the requests that leave next from their groups to batch. They are the group whose turn it is, or many
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
	for before := -1; len(batch) > before; { // each round takes one group of each limiter
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

// nextGroup finds the group whose turn it is, the i-th group of q.Turns[turn]. Kinds without a place miss their turn.
// The caller holds q.Mu.
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

// smallGroups counts the small groups that may leave with lead. The caller holds q.Mu.
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

// smallGroup returns the index of a limiter's first small group that may leave with lead, or -1.
func (s *limiterGroups) smallGroup(lead *group) int {
	return slices.IndexFunc(s.groups, func(l group) bool { return l.leavesWith(lead) })
}

// leavesWith tells whether one statement can decide a group together with lead. Requests that look take no locks, so
// they leave apart.
func (l *group) leavesWith(lead *group) bool {
	return len(l.requests) <= SmallGroup && l.looks == lead.looks && l.kind == lead.kind
}

// depart moves up to MaxBatch requests of a limiter's i-th group to batch. If any are left, the group goes behind the
// limiter's others. The caller holds q.Mu.
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

// rotate puts the limiters that were served behind the others, and removes those without groups. The others keep their
// order. The caller holds q.Mu.
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
