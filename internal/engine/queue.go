package engine

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"
)

// Queue is where requests wait for the next statement. Limiters take turns, and so do the groups of one limiter. A
// turn is one statement.
type Queue struct {
	Batcher     *Batcher
	Lane        *heldLane
	MaxInFlight int
	MaxBatch    int

	Mu        sync.Mutex
	Turns     []*limiterGroups          // limiters with groups, in the order of their turns
	ByLimiter map[*Space]*limiterGroups // the same
	Waiting   int                       // requests in all groups
	InFlight  int
	perKey    int           // how many requests the last large statement had for each of its keys
	lonely    int           // how many calls in a row were alone, from the first to the last moment
	leftAt    time.Duration // when the last statement left, since the batcher's begin
	late      bool          // a timer is set for leaveLate
	fastest   time.Duration // see noteDuration
	flights   [kindCount]flights
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
	Enough  = 24
	Far     = time.Millisecond
	TooLong = 10 * time.Millisecond
)

// One statement of rate_limit_all, for groups of several limiters, costs the server about 450 µs plus 28 µs per key. A
// statement for each group costs 150 µs plus 22 µs per key. So only small groups leave together, and only if there are
// enough of them.
const (
	SmallGroup  = 8 // requests
	WorthMixing = 6 // small groups
)

// Grace is for how long the statements of one caller go on who has left. Then the one under way is interrupted, which
// costs the connection. By then a held row was found out, and the lane has the request. Callers send their own
// statements only while these take no longer than tooLong, so a database that hangs takes this once.
const Grace = 50 * time.Millisecond

// AloneAfter is after how many lone calls in a row callers send their statements themselves.
const AloneAfter = 4

func newQueue(b *Batcher, maxInFlight, maxBatch int) *Queue {
	q := &Queue{Batcher: b, MaxInFlight: maxInFlight, MaxBatch: maxBatch}
	q.Lane = &heldLane{batcher: b, maxBatch: maxBatch, lost: q.PushBack}
	return q
}

// Submit has a request decided. It returns when that is done, or when ctx ends. After an error of ctx the request
// is no longer the caller's.
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

// IsAlone tells whether the caller of a request, which has just come, is to send it himself. He does so because another
// goroutine would take a lone call 15 of its 95 microseconds. If he leaves meanwhile, he has to wait for the statement,
// but not for long: see grace. Where even a few call at once, they better leave together. So do those who take from
// leases, whose statements are few because they are busy: 16 processes of 2 callers made a third as many decisions when
// these sent their own. q.mu is locked.
func (q *Queue) IsAlone(r *Request) bool {
	return q.InFlight == 0 && q.Waiting == 1 && q.lonely >= AloneAfter && q.flights[r.kind()].prompt &&
		!r.Probe && r.Space.Lease == nil
}

// goAlone has a caller send the only request that waits. It unlocks q.mu.
func (q *Queue) goAlone(ctx context.Context) {
	q.InFlight++
	d := q.Board()
	d.caller = ctx
	q.Mu.Unlock()
	defer func() { // also if code of the application's has panicked, in a tracer or an observer
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

// submitAll has requests decided that give back, as soon as their turn comes. It does not wait for that. While the
// breaker is open, they are turned away.
func (q *Queue) submitAll(requests []*Request) {
	if len(requests) == 0 {
		return
	}
	now, kind := time.Now(), requests[0].kind() // read now, because a request that has ended is used again
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

// wait returns when a request has been decided, or when ctx ends.
func (q *Queue) wait(ctx context.Context, r *Request) error {
	select {
	case <-r.Done: // also if ctx has ended meanwhile
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

// takeTurn asks the database on its one connection, unless the breaker opens while it waits for its turn.
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
	b.Report(r, err, r.Probe)
	return err
}

// Push puts a request into its group. q.mu is locked.
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

// leaveSoon sends a statement for requests of a kind that have just come, now or after a while. It unlocks q.mu.
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

// group returns the group in which a request waits. q.mu is locked.
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

// groupsOf returns the groups of a limiter, which gets a turn if it has had none. q.mu is locked.
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

// MayLeave tells whether a statement may leave for a request of that kind, which has just come. q.mu is locked.
func (q *Queue) MayLeave(k kind) bool {
	many := min(Enough*max(q.perKey, 1), q.MaxBatch)
	return q.InFlight == 0 || q.InFlight < q.MaxInFlight && q.hasPlace(k) &&
		(q.Waiting >= many || q.fastest >= Far || q.flights[k].n == 0 && q.allSlow())
}

// hasPlace tells whether a further statement of a kind may leave, if there is a place at all. A kind that is slow
// leaves a place to the others, or they would have to wait until it is told, for a Timeout perhaps.
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
	return true // there are no others
}

// allSlow tells whether what is in flight is all of slow kinds. What is about to leave, or has just come back, is not:
// it takes those who wait with it.
func (q *Queue) allSlow() bool {
	slow := 0
	for _, f := range q.flights {
		if f.slow {
			slow += int(f.n)
		}
	}
	return slow == q.InFlight
}

// Departs records that a statement was sent. q.mu is locked.
func (q *Queue) Departs(k kind) {
	f := &q.flights[k]
	q.leftAt = time.Since(q.Batcher.Begin)
	if f.n == 0 {
		f.began = q.leftAt
	}
	f.n++
	f.seen = true
}

// Lands records that a statement has come back, and how long it took. q.mu is locked.
func (q *Queue) Lands(k kind, took time.Duration) {
	f := &q.flights[k]
	f.n--
	f.slow, f.prompt = q.isSlow(took), took <= TooLong
	if q.lonely++; q.Waiting > 0 {
		q.lonely = 0
	}
	q.noteDuration(took)
}

// isSlow tells whether a statement has taken unusually long, in a database that may be far away.
func (q *Queue) isSlow(took time.Duration) bool { return took > TooLong && took > 4*q.fastest }

// noteDuration remembers how long the fastest statements take, those that meet no others. q.mu is locked.
func (q *Queue) noteDuration(d time.Duration) {
	if q.fastest == 0 || d < q.fastest {
		q.fastest = d
	} else {
		q.fastest += (d - q.fastest) / 4096 // it forgets slowly
	}
}

// leaveLate sends those who wait, although the statement before theirs is still under way. There is one timer for all,
// because Go wakes a thread for each that is set.
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

// run sends one statement after the other until nobody waits. One goroutine runs it for each statement in flight,
// and none at rest.
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
		// Callers who were just told often ask again at once. This lets them come aboard. Without it, 64 callers
		// leave in batches of 16 on average; with it in batches of 22, and a sixth more are decided.
		runtime.Gosched()
	}
}

// Board takes those who leave next from their groups. It tells whether there are any. q.mu is locked.
func (q *Queue) Board() *Departure {
	requests := q.NextBatch(nil)
	if len(requests) == 0 {
		return nil
	}
	if len(requests) > 1 {
		q.lonely = -1 // until it is back
	}
	q.Departs(requests[0].kind())
	return &Departure{Requests: requests, queued: q.Waiting}
}

// fly sends a statement for those who have boarded, and returns those who are not decided, as send does.
func (q *Queue) fly(d *Departure) (held, lost []*Request) {
	k, n, left := d.Requests[0].kind(), len(d.Requests), time.Now() // now, because requests that have ended are used again
	defer func() {
		q.Mu.Lock()
		if n >= Enough && d.leaders > 0 { // fewer tell little
			q.perKey = n / d.leaders
		}
		q.Lands(k, time.Since(left))
		q.Mu.Unlock()
	}()
	return q.Batcher.Send(d)
}

// reroute has those decided whom a statement has not decided.
func (q *Queue) reroute(held, lost []*Request) {
	q.Lane.Add(q.Lane.GiveUp(held))
	q.PushBack(lost)
}

// rest records that a goroutine which sends statements ends. q.mu is locked.
func (q *Queue) rest() {
	q.InFlight--
	if len(q.Turns) == 0 && cap(q.Turns) > 64 { // free what a burst needed
		q.Turns, q.ByLimiter = nil, nil
	}
}

// NextBatch moves the requests that leave next from their groups to batch. They are those of the group whose turn it
// is, or of many small groups. q.mu is locked.
func (q *Queue) NextBatch(batch []*Request) []*Request {
	turn, i, found := q.nextGroup()
	if !found {
		return batch
	}
	s := q.Turns[turn]
	lead := s.groups[i]
	if len(lead.requests) > min(SmallGroup, q.MaxBatch) || q.smallGroups(&lead) < WorthMixing {
		batch = q.Depart(batch, s, i)
		q.Turns = slices.Delete(q.Turns, turn, turn+1)
		if len(s.groups) > 0 {
			q.Turns = append(q.Turns, s)
		} else {
			delete(q.ByLimiter, s.space)
		}
		return batch
	}
	served := make(map[*limiterGroups]bool, len(q.Turns))
	for before := -1; len(batch) > before; { // each round takes a group of each limiter
		before = len(batch)
		for _, s := range q.Turns {
			if i := s.smallGroup(&lead); i >= 0 && len(batch)+len(s.groups[i].requests) <= q.MaxBatch {
				batch = q.Depart(batch, s, i)
				served[s] = true
			}
		}
	}
	q.rotate(served)
	return batch
}

// nextGroup is the group whose turn it is, the i-th of a limiter in q.turns. Kinds without a place miss their turn.
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

// smallGroups counts the small groups that may leave with lead.
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

// leavesWith tells whether one statement can decide a group together with lead. Lines that look take no locks.
func (l *group) leavesWith(lead *group) bool {
	return len(l.requests) <= SmallGroup && l.looks == lead.looks && l.kind == lead.kind
}

// Take moves up to maxBatch requests of a limiter's i-th group to batch. If any are left, the group goes behind the
// limiter's others.
func (q *Queue) Depart(batch []*Request, s *limiterGroups, i int) []*Request {
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

// rotate puts the limiters that were served behind the others, and removes those without groups. All others keep
// their places.
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
