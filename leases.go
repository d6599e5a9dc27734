package ratelimit

import (
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"
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
	giveBack func([]rest) error // see Client.giveBack
	observer *Observer
	shards   atomic.Pointer[[leaseShards]leaseShard] // nil until a limiter with a Lease has asked

	mu    sync.Mutex
	timer *time.Timer
	due   time.Duration // when the timer fires; 0 if it is not set
}

const (
	leaseShards = 16
	maxLeased   = 16384 // keys that have an entry, at most
	firstLease  = 4     // calls, at most
	// minLeaseTick keeps a timer for many short leases from firing for each of them.
	minLeaseTick = 5 * time.Millisecond
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
		limit, remaining int64
		resetAt          int64   // when the key is as good as new, by the database's clock
		states           []state // of the rows
		decidedAt        int64
		asked            instant
		lasts            time.Duration // how long a lease of then could last
	}
	asking time.Duration // until then another call is taking ahead
	memory time.Duration // how long the entry is kept
}

// rest is what is left of a lease, to be given back: units from one to before another.
type rest struct {
	space    *keyspace
	receipt  *receipt
	from, to int64
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
	result := Result{
		Allowed:    true,
		Source:     SourceLease,
		Limit:      e.known.limit,
		Remaining:  e.known.remaining + e.end - e.next,
		ResetAfter: duration(max(e.known.resetAt-clock, 0)),
		DecidedAt:  time.UnixMicro(clock),
		receipt:    e.receipt,
		first:      first,
		units:      n,
	}
	s.mu.Unlock()
	return result, true
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
	if size < n {
		return 0
	}
	e.asking = now.elapsed + ls.timeout
	clock, excess := e.known.decidedAt+microsUp(now.since(e.known.asked)), int64(0)
	for i, m := range l.models {
		rolled, _ := m.roll(e.known.states[i], clock)
		spare, _ := m.leaseOf(rolled, clock, micros(config.MaxLength))
		excess = max(excess, -spare)
	}
	return (size + excess) / n
}

// wants is how many units to take ahead, going by the demand: what was used of the last lease, or twice as much if that
// was used up within half of its time. If there was none, it is what will be used if calls come as this one has come
// after the last one, but little.
func (e *lease) wants(now instant, n int64) int64 {
	if e.receipt != nil {
		e.size = e.next
		if e.next == e.end && now.since(e.asked) < e.lasts/2 {
			e.size = 2 * e.end
		}
	}
	if gap := now.since(e.known.asked); e.size < n && gap < e.known.lasts {
		e.size = n * min(firstLease, int64(e.known.lasts/max(gap, 1)))
	}
	return e.size
}

// settle keeps what a statement has taken ahead for a request, and what it tells about the key. asked and told are when
// it left and came back.
func (ls *leases) settle(r *request, err error, asked, told instant) {
	rests, due, event := ls.learn(r, err, asked, told)
	if event.Taken > 0 {
		ls.observer.lease(event)
	}
	if len(rests) > 0 {
		go ls.giveBack(rests) //nolint:errcheck // the observer is told
	}
	if due != 0 {
		ls.wakeAt(due, told.elapsed)
	}
}

// learn is settle but for what others have to do: what is to be given back, and when the timer is due, or 0.
func (ls *leases) learn(
	r *request, err error, asked, told instant,
) (rests []rest, due time.Duration, event LeaseEvent) {
	p := &r.parts[0]
	if p.space.lease == nil || r.policy == nil || p.cost <= 0 || r.shadow != nil || err == nil && r.passedOver() {
		return nil, 0, event
	}
	if ls.shards.Load() == nil {
		ls.shards.CompareAndSwap(nil, new([leaseShards]leaseShard))
	}
	s := ls.shard(p.key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e, kept := s.entry(p.space, p.key, err == nil)
	if err != nil {
		e.asking = 0
		return nil, 0, event
	}
	rests, event = e.learn(r, asked, told)
	if !kept {
		return append(rests, e.lapse(p.space)...), 0, event
	}
	return rests, e.due(), event
}

// entry returns the entry of a key, and whether it is kept. One is added if it may be.
func (s *leaseShard) entry(space *keyspace, key string, add bool) (e *lease, kept bool) {
	if e := s.keys[denialKey{space, key}]; e != nil {
		return e, true
	}
	e = &lease{}
	if !add || len(s.keys) >= maxLeased/leaseShards && !s.evict() {
		return e, false
	}
	if s.keys == nil {
		s.keys = make(map[denialKey]*lease)
	}
	s.keys[denialKey{space, strings.Clone(key)}] = e
	return e, true
}

// evict forgets a key of which nothing is held, so that a flood of keys keeps no busy one out for long. It tells
// whether it has found one among a few.
func (s *leaseShard) evict() bool {
	tries := 8
	for k, e := range s.keys { // in random order
		if e.next == e.end {
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
	decidedAt := d.decidedAt.UnixMicro()
	// A lease ends under another policy, or if the database's clock has been set forward, beyond its end.
	if e.policy != r.policy || decidedAt >= e.decidedAt+int64(e.lasts/time.Microsecond) {
		rests = e.lapse(space)
	}
	if e.policy != r.policy {
		*e = lease{policy: r.policy}
	}
	e.memory = space.lease.MaxLength

	known := &e.known
	known.asked, known.decidedAt, known.remaining, known.states = asked, decidedAt, never, known.states[:0]
	spare, longest := int64(never), micros(space.lease.MaxLength)
	for i := range r.parts {
		p := &r.parts[i]
		if p.decision.remaining < known.remaining {
			known.limit, known.remaining = p.model.numbers().Limit, p.decision.remaining
		}
		known.resetAt = decidedAt + p.decision.resetAfter
		known.states = append(known.states, p.decision.state)
		room, lasts := p.model.leaseOf(p.decision.state, decidedAt, longest)
		spare, longest = min(spare, max(room, 0)), min(longest, lasts)
	}
	known.lasts = duration(max(longest, 0)) / 256 * 255 // as if the clocks' rates differed by 0.4 percent
	if r.ahead == 0 {
		return rests, event
	}

	rests = append(rests, e.lapse(space)...)
	e.asking = 0
	used := (r.count - r.ahead) * first.cost // by those who asked
	surplus := d.granted*first.cost - used
	if surplus <= 0 {
		return rests, event
	}
	e.receipt = newReceipt(space, r.policy, strings.Clone(first.key), surplus, len(r.parts))
	e.receipt.shares = &sync.Map{}
	for i := range r.parts {
		p := &r.parts[i]
		taken := p.decision.taken
		taken.units = d.granted * p.cost
		e.receipt.parts[i] = taken.portion(p.model, used, used+surplus)
	}
	// What a bucket must not hold, so as not to fill up, is lost.
	may := min(surplus, spare)
	holds := min(may, max(int64(float64(known.remaining+surplus)*space.lease.MaxShare), 0))
	e.next, e.end, e.decidedAt, e.asked, e.told, e.lasts = 0, holds, decidedAt, asked, told, known.lasts
	if told.since(asked) >= e.lasts {
		e.end = 0
	}
	if e.end < may {
		rests = append(rests, rest{space, e.receipt, e.end, may})
	}
	return rests, LeaseEvent{Limiter: space.name, Taken: surplus, Stranded: surplus - may}
}

// lapse ends a lease, and returns what is left of it, to be given back.
func (e *lease) lapse(space *keyspace) (rests []rest) {
	if e.receipt == nil {
		return nil
	}
	if e.next < e.end {
		rests = append(rests, rest{space, e.receipt, e.next, e.end})
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

// wakeAt has the timer fire at a time at the latest.
func (ls *leases) wakeAt(at, now time.Duration) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.due != 0 && ls.due <= at {
		return
	}
	ls.due = at
	wait := max(at-now, minLeaseTick)
	if ls.timer == nil {
		ls.timer = time.AfterFunc(wait, ls.tidy)
	} else {
		ls.timer.Reset(wait)
	}
}

// tidy gives back the leases that end soon, and forgets the keys that nobody asks for.
func (ls *leases) tidy() {
	ls.mu.Lock()
	ls.due = 0
	ls.mu.Unlock()
	now := ls.now()
	rests, next := ls.outdated(now)
	if next != never {
		ls.wakeAt(next, now.elapsed)
	}
	_ = ls.giveBack(rests) // the observer is told
}

// outdated ends the leases that end soon, and forgets the keys that nobody asks for. It returns what is to be given
// back, and when it has to be called next.
func (ls *leases) outdated(now instant) (rests []rest, next time.Duration) {
	next = never
	rests = ls.collect(func(e *lease) (lapse, forget bool) {
		// Those that are due a little later go back now, in the same statement.
		if e.next < e.end && (now.elapsed >= e.due()-e.lasts/16 || now.since(e.asked) >= e.lasts) {
			next = min(next, e.known.asked.elapsed+e.memory)
			return true, false
		}
		if now.elapsed >= e.due() {
			return false, true
		}
		next = min(next, e.due())
		return false, false
	})
	return rests, next
}

// collect ends some leases, and returns what is left of them. Others it forgets.
func (ls *leases) collect(which func(*lease) (lapse, forget bool)) (rests []rest) {
	shards := ls.shards.Load()
	if shards == nil {
		return nil
	}
	for i := range shards {
		s := &shards[i]
		s.mu.Lock()
		for k, e := range s.keys {
			switch lapse, forget := which(e); {
			case lapse:
				rests = append(rests, e.lapse(k.space)...)
			case forget:
				delete(s.keys, k)
			}
		}
		s.mu.Unlock()
	}
	return rests
}

// drop forgets the lease of a key that was reset.
func (ls *leases) drop(space *keyspace, key string) {
	if s := ls.shard(key); s != nil {
		s.mu.Lock()
		delete(s.keys, denialKey{space, key})
		s.mu.Unlock()
	}
}
