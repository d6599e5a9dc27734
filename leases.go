package ratelimit

import (
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// leases are what this process has taken ahead; see [Lease].
//
// A lease is spent only while it surely has not ended by the database's clock. The database decided after the
// statement left, so no more time has passed there since the decision than here since the statement left. That holds
// as long as both clocks run, whatever they show. Here it is the monotonic clock, so setting the other one makes no
// lease longer. Where a machine's monotonic clock stands still while it is suspended, its wall clock tells, once it has
// been set right. So the one that has advanced further counts.
//
// Each key that was asked for has an entry, also if nothing is leased of it, to tell the keys that are asked for again.
// It is forgotten when nobody has asked for MaxLength. A timer runs only while there are entries.
type leases struct {
	now      func() instant
	timeout  time.Duration
	seed     maphash.Seed
	giveBack func(*giving) // see Client.giveBack
	observer *Observer
	shards   atomic.Pointer[[leaseShards]leaseShard] // nil until a limiter with a Lease has asked

	mu    sync.Mutex
	timer *time.Timer
	due   time.Duration    // when the timer fires; 0 if it is not set
	under map[*giving]bool // what is on its way back
}

const (
	leaseShards = 16
	maxLeased   = 16384 // keys that have an entry, at most
	firstLease  = 4     // calls, at most
	// shortestLease is what is worth it. It keeps the timer from firing all the time.
	shortestLease = 10 * time.Millisecond
	// Of what is known of a key for longer than this, no more units are taken ahead than that. Others may have taken
	// nearly all that was left then.
	freshFor, staleUnits = 100 * time.Millisecond, 64
)

type leaseShard struct {
	mu   sync.Mutex
	keys map[denialKey]*lease
	_    [48]byte // keeps the mutexes on cache lines of their own
}

// lease is what a process holds of a key, and what it knows about it.
type lease struct {
	policy    Policy
	receipt   *receipt // of what was taken ahead; nil if nothing is held
	next, end int64    // its units that are left: from next to before end
	size      int64    // how many units to take ahead, going by the demand alone
	decidedAt int64    // when they were taken, by the database's clock
	asked     instant  // when the statement left that took them
	told      instant  // when it came back
	lasts     time.Duration

	// What the last answer about the key told, which may be a later one.
	known struct {
		remaining int64         // of the row with the least
		rows      []knownRow    // all of them
		states    []model.State // of the rows
		decidedAt int64
		asked     instant
		lasts     time.Duration // how long a lease of then could last
	}
	asking time.Duration // until then another call is taking ahead
	reset  time.Duration // when the key was last reset; nothing that was asked for before is spent
	memory time.Duration // how long the entry is kept
}

// knownRow is what an answer told about a row.
type knownRow struct {
	limit, remaining int64
	resetAt          int64 // when it is as good as new, by the database's clock
}

// instant is a time by the clocks of this process.
type instant struct {
	elapsed time.Duration // by the monotonic clock
	wall    time.Duration // since 1970
}

// since is how long ago an earlier instant was.
func (t instant) since(earlier instant) time.Duration {
	return max(t.elapsed-earlier.elapsed, t.wall-earlier.wall)
}

func newLeases(clock func() time.Time, timeout time.Duration, observer *Observer) *leases {
	return &leases{now: clocksOf(clock), timeout: timeout, seed: maphash.MakeSeed(), observer: observer}
}

// clocksOf returns what reads the clocks of this process, or the clock that replaces them.
func clocksOf(clock func() time.Time) func() instant {
	begin := time.Now()
	return func() instant {
		if clock != nil {
			now := clock().Sub(time.Unix(0, 0))
			return instant{now, now}
		}
		now := time.Now()
		return instant{now.Sub(begin), time.Duration(now.UnixNano())}
	}
}

// shard returns a key's shard, or nil if nobody has asked yet.
func (ls *leases) shard(key string) *leaseShard {
	shards := ls.shards.Load()
	if shards == nil {
		return nil
	}
	return &shards[maphash.String(ls.seed, key)%leaseShards]
}

// left is how many units may be spent at an instant.
func (e *lease) left(now instant) int64 {
	if e.receipt == nil || now.since(e.asked) >= e.lasts {
		return 0
	}
	return e.end - e.next
}

// spend takes n from the lease of a key, if it has as much.
func (ls *leases) spend(space *keyspace, policy Policy, key string, n int64) (Result, bool) {
	s := ls.shard(key)
	if s == nil {
		return Result{}, false
	}
	now := ls.now()
	s.mu.Lock()
	e := s.keys[denialKey{space, key}]
	if e == nil || e.left(now) < n || e.policy != policy {
		s.mu.Unlock()
		return Result{}, false
	}
	first := e.next
	e.next += n
	// The database's clock shows this, or later by at most the time that its answer took.
	clock := e.decidedAt + int64(max(now.elapsed-e.told.elapsed, 0)/time.Microsecond)
	result := e.result(clock)
	result.receipt, result.first, result.units = e.receipt, first, n
	s.mu.Unlock()
	return result, true
}

// result is what a call is told that spends from the lease at a time of the database's clock.
func (e *lease) result(clock int64) Result {
	of := func(row knownRow) Result {
		return Result{
			Allowed:    true,
			Source:     SourceLease,
			Limit:      row.limit,
			Remaining:  row.remaining + e.end - e.next,
			ResetAfter: model.Duration(max(row.resetAt-clock, 0)),
			DecidedAt:  time.UnixMicro(clock),
		}
	}
	if len(e.known.rows) == 1 {
		return of(e.known.rows[0])
	}
	each := make([]Result, len(e.known.rows))
	for i, row := range e.known.rows {
		each[i] = of(row)
	}
	return resultOfAll(each)
}

// held is how much of a key this process may spend.
func (ls *leases) held(space *keyspace, policy Policy, key string) int64 {
	s := ls.shard(key)
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.keys[denialKey{space, key}]
	if e == nil || e.policy != policy {
		return 0
	}
	return e.left(ls.now())
}

// ahead is how many more requests for n the call asks for that has to ask anyway.
func (ls *leases) ahead(l *Limiter, key string, n int64) int64 {
	s := ls.shard(key)
	if s == nil {
		return 0
	}
	now, config := ls.now(), l.space.lease
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.keys[denialKey{l.space, key}]
	if e == nil || e.policy != l.policy || now.elapsed < e.asking {
		return 0
	}
	size := min(e.wants(now, n), int64(float64(e.known.remaining)*config.MaxShare))
	if size < n || e.known.lasts < shortestLease {
		return 0
	}
	clock, excess := e.known.decidedAt+model.MicrosUp(now.since(e.known.asked)), int64(0)
	for i, m := range l.models {
		rolled, _ := m.Roll(e.known.states[i], clock)
		spare, _ := m.LeaseOf(rolled, clock, model.Micros(config.MaxLength))
		excess = max(excess, -spare)
	}
	switch {
	case excess > 0 && len(l.models) > 1: // what makes room in a bucket would be lost to the other policies
		return 0
	case size+excess > staleUnits && now.since(e.known.asked) > freshFor:
		return 0 // this call's answer tells what is left, and the next one takes ahead
	}
	e.asking = now.elapsed + ls.timeout
	return (size + excess) / n
}

// wants is how many units to take ahead, going by the demand. If a lease was used up, outlived tells. If it was not, it
// is what was used of it. If that is nothing, it is half of what will be used if calls come as this one has come after
// the last one, but little.
func (e *lease) wants(now instant, n int64) int64 {
	if e.receipt != nil {
		e.size = e.next
		if e.next == e.end {
			e.size = e.outlived(now)
		}
	}
	if e.size < n {
		gap := max(now.since(e.known.asked), 1)
		e.size = n * min(firstLease, int64(e.known.lasts/gap/2))
	}
	return e.size
}

// outlived is the size of the lease after one that was not enough. It is twice that one's if less than half of its time
// has passed.
func (e *lease) outlived(now instant) int64 {
	if now.since(e.asked) < e.lasts/2 {
		return 2 * e.end
	}
	return e.end
}

// settle keeps what a statement has taken ahead for a request, and what it tells about the key. asked and told are when
// it left and came back.
func (ls *leases) settle(r *request, err error, asked, told instant) {
	back, due, event := ls.learn(r, err, asked, told)
	if event.Taken > 0 {
		ls.observer.lease(event)
	}
	if back != nil {
		go ls.giveBack(back)
	}
	if due != 0 {
		ls.wakeAt(due, told.elapsed)
	}
}

// learn is settle but for what others have to do: what is to be given back, if anything, and when the timer is due,
// or 0.
func (ls *leases) learn(
	r *request, err error, asked, told instant,
) (back *giving, due time.Duration, event LeaseEvent) {
	p := &r.parts[0]
	if p.space.lease == nil || r.policy == nil || p.cost <= 0 || r.shadow != nil || err == nil && r.passedOver() {
		return nil, 0, event
	}
	s := ls.make(p.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e, kept := s.entry(p.space, p.key, told.elapsed, err == nil)
	if err != nil {
		e.asking = 0
		return nil, 0, event
	}
	rests, event := e.learn(r, asked, told)
	if !kept {
		rests = append(rests, e.lapse(p.space)...)
	} else {
		due = e.due()
	}
	if len(rests) > 0 {
		back = ls.begin()
		back.rests = rests
	}
	return back, due, event
}

// make returns a key's shard.
func (ls *leases) make(key string) *leaseShard {
	if ls.shards.Load() == nil {
		ls.shards.CompareAndSwap(nil, new([leaseShards]leaseShard))
	}
	return ls.shard(key)
}

// entry returns the entry of a key, and whether it is kept. One is added if it may be.
func (s *leaseShard) entry(space *keyspace, key string, now time.Duration, add bool) (e *lease, kept bool) {
	if e := s.keys[denialKey{space, key}]; e != nil {
		return e, true
	}
	e = &lease{}
	if !add || len(s.keys) >= maxLeased/leaseShards && !s.evict(now) {
		return e, false
	}
	if s.keys == nil {
		s.keys = make(map[denialKey]*lease)
	}
	s.keys[denialKey{space, strings.Clone(key)}] = e
	return e, true
}

// evict forgets a key of which nothing is held, so that a flood of keys keeps no busy one out for long. It tells
// whether it has found one among a few. It does not forget a reset while a lease of before may be on its way.
func (s *leaseShard) evict(now time.Duration) bool {
	tries := 8
	for k, e := range s.keys { // in random order
		if e.next == e.end && (e.reset == 0 || now > e.reset+e.memory) {
			delete(s.keys, k)
			return true
		}
		if tries--; tries == 0 {
			return false
		}
	}
	return false
}

// learn is leases.learn for the entry. It returns what is to be given back.
func (e *lease) learn(r *request, asked, told instant) (rests []rest, event LeaseEvent) {
	first := &r.parts[0]
	space, d := first.space, &first.decision
	decidedAt := d.DecidedAt.UnixMicro()
	// A lease ends under another policy, or if the database's clock has been set forward, beyond its end.
	if e.policy != r.policy || decidedAt >= e.decidedAt+int64(e.lasts/time.Microsecond) {
		rests = e.lapse(space)
	}
	if e.policy != r.policy {
		*e = lease{policy: r.policy, reset: e.reset}
	}
	e.memory = space.lease.MaxLength
	spare, lasts := e.know(r, asked)
	if r.ahead == 0 {
		return rests, event
	}

	rests = append(rests, e.lapse(space)...)
	e.asking = 0
	used := (r.count - r.ahead) * first.cost // by those who asked
	surplus := d.Granted*first.cost - used
	if surplus <= 0 {
		return rests, event
	}
	e.receipt = newReceipt(space, r.policy, strings.Clone(first.key), surplus, len(r.parts))
	e.receipt.back = &givenBack{}
	for i := range r.parts {
		p := &r.parts[i]
		taken := p.decision.Taken
		taken.Units = d.Granted * p.cost
		e.receipt.parts[i] = taken.Portion(p.rules, used, used+surplus)
	}
	room := float64(e.known.remaining+surplus) * space.lease.MaxShare
	e.next, e.end = 0, min(surplus, spare, int64(room))
	e.decidedAt, e.asked, e.told, e.lasts = decidedAt, asked, told, lasts
	if lasts < shortestLease || told.since(asked) >= lasts || asked.elapsed < e.reset ||
		len(r.parts) > 1 && spare < surplus { // what makes room in a bucket would be lost to the other policies
		e.end = 0
	}
	// The rest goes back. But if a bucket would fill up while something is held, so much of it is lost.
	returns := surplus
	if e.end > 0 {
		returns = min(surplus, spare)
	}
	if e.end < returns {
		noted := min(surplus, spare) // see TokenBucket.lend
		rests = append(rests, rest{space, e.receipt, e.end, returns, noted - e.end})
	}
	return rests, LeaseEvent{Limiter: space.name, Taken: surplus, Stranded: surplus - returns}
}

// know keeps what an answer tells about the key, unless a later one has come before it. It returns how much may be held
// of the key, and for how long.
func (e *lease) know(r *request, asked instant) (spare int64, lasts time.Duration) {
	space, decidedAt := r.parts[0].space, r.parts[0].decision.DecidedAt.UnixMicro()
	spare, longest := int64(model.Never), model.Micros(space.lease.MaxLength)
	for i := range r.parts {
		p := &r.parts[i]
		room, micros := p.rules.LeaseOf(p.decision.State, decidedAt, longest)
		spare, longest = min(spare, max(room, 0)), min(longest, micros)
	}
	lasts = model.Duration(max(longest, 0)) / 256 * 255 // as if the clocks' rates differed by 0.4 percent
	known := &e.known
	if decidedAt < known.decidedAt {
		return spare, lasts
	}
	known.asked, known.decidedAt, known.lasts = asked, decidedAt, lasts
	before := known.states
	known.remaining, known.rows, known.states = model.Never, known.rows[:0], known.states[:0]
	for i := range r.parts {
		p := &r.parts[i]
		known.remaining = min(known.remaining, p.decision.Remaining)
		known.rows = append(known.rows, knownRow{
			limit: p.rules.Numbers().Limit, remaining: p.decision.Remaining, resetAt: decidedAt + p.decision.ResetAfter,
		})
		state := p.decision.State
		if r.ahead == 0 && len(before) > 0 { // only an answer to what asks ahead tells what is leased of a bucket
			state.Log = before[i].Log
		}
		known.states = append(known.states, state)
	}
	return spare, lasts
}

// lapse ends a lease, and returns what is left of it, to be given back.
func (e *lease) lapse(space *keyspace) (rests []rest) {
	if e.receipt == nil {
		return nil
	}
	if e.next < e.end {
		rests = append(rests, rest{space, e.receipt, e.next, e.end, e.end})
	}
	e.size, e.receipt, e.next, e.end = e.next, nil, 0, 0
	return rests
}

// due is when the entry needs the timer, by the monotonic clock. Either a lease is to go back, early enough that this
// is done before it ends, or the key is to be forgotten.
func (e *lease) due() time.Duration {
	if e.next < e.end {
		return e.asked.elapsed + e.lasts/8*7
	}
	return e.known.asked.elapsed + e.memory
}
