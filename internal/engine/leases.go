package engine

import (
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Leases is what this process has taken ahead.
//
// A lease is spent only while it surely has not ended by the database's clock. The database decided after the statement
// left. So since the decision, no more time has passed there than here since the statement left. That holds whatever
// the clocks show, as long as they run. Here the monotonic clock counts, so setting the wall clock makes no lease
// longer. On some machines the monotonic clock stands still during suspension, but the wall clock is set right
// afterwards. So whichever clock has advanced further counts.
//
// Each key that was asked for has an entry, even if nothing is leased of it, so that keys that are asked for again are
// known. It is forgotten when nobody has asked for MaxLength. A timer runs only while there are entries.
type Leases struct {
	now      func() instant
	timeout  time.Duration
	seed     maphash.Seed
	giveBack func(*giving)                             // see Engine.giveBack
	told     func(LeaseUse)                            // may be nil
	Stripes  atomic.Pointer[[leaseStripes]LeaseStripe] // nil until a limiter with a Lease has asked

	mu        sync.Mutex
	timer     *time.Timer
	Due       time.Duration    // when the timer fires; 0 if it is not set
	returning map[*giving]bool // what is on its way back
}

// Bounds of leases.
const (
	leaseStripes = 16
	MaxLeased    = 16384 // how many keys may have an entry
	firstLease   = 4     // how many calls the first lease is for, at most
	// ShortestLease is the shortest time that a lease is worth it. It also keeps the timer from firing all the time.
	ShortestLease = 10 * time.Millisecond
	// If the last answer about a key is older than freshFor, at most staleUnits are taken ahead, because others may
	// have taken nearly all by now.
	freshFor, staleUnits = 100 * time.Millisecond, 64
)

// LeaseTerms say how much is taken ahead of a key.
type LeaseTerms struct {
	MaxShare  float64       // of what remains, above 0
	MaxLength time.Duration // of a lease
}

// LeaseStripe is a part of the keys with a mutex of its own.
type LeaseStripe struct {
	mu   sync.Mutex
	Keys map[DenialKey]*Lease
	_    [48]byte // keeps the mutexes on cache lines of their own
}

// Lease is what a process holds of a key, and what it knows about the key.
type Lease struct {
	policy    *model.Policy
	receipt   *Receipt // for what was taken ahead; nil if nothing is held
	next, end int64    // the units that are left: from next to before end
	size      int64    // how many units to take ahead, by demand
	decidedAt int64    // when they were taken, by the database's clock
	asked     instant  // when the statement left that took them
	told      instant  // when that statement came back
	lasts     time.Duration

	// What the latest decision about the key has told.
	known struct {
		Remaining int64         // the least of all rows
		rows      []knownRow    // all rows of the key
		States    []model.State // the states of these rows
		decidedAt int64
		asked     instant
		lasts     time.Duration // how long a lease taken then could last
	}
	asking time.Duration // until then another call is taking ahead
	reset  time.Duration // when the key was last reset; leases asked for earlier are not spent
	memory time.Duration // how long the entry is kept after the last answer
}

// knownRow is what an answer has told about a row.
type knownRow struct {
	limit, remaining int64
	resetAt          int64 // when it is as good as new, by the database's clock
}

// instant is a time by the clocks of this process.
type instant struct {
	elapsed time.Duration // by the monotonic clock
	wall    time.Duration // since 1970
}

// since returns how long ago an earlier instant was.
func (t instant) since(earlier instant) time.Duration {
	return max(t.elapsed-earlier.elapsed, t.wall-earlier.wall)
}

// newLeases returns empty leases. told may be nil.
func newLeases(clock func() time.Time, timeout time.Duration, told func(LeaseUse)) *Leases {
	return &Leases{now: clocksOf(clock), timeout: timeout, seed: maphash.MakeSeed(), told: told}
}

// clocksOf returns a function that reads the clocks of this process, or the clock that replaces them.
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

// stripe returns a key's stripe, or nil if nobody has asked yet.
func (ls *Leases) stripe(key string) *LeaseStripe {
	stripes := ls.Stripes.Load()
	if stripes == nil {
		return nil
	}
	return &stripes[maphash.String(ls.seed, key)%leaseStripes]
}

// left returns how many units may be spent at an instant.
func (e *Lease) left(now instant) int64 {
	if e.receipt == nil || now.since(e.asked) >= e.lasts {
		return 0
	}
	return e.end - e.next
}

// spend takes n from the lease of a key, and sets o. It returns false if the lease does not have as much. With leases,
// 16 clients of 2 callers with 100 busy keys make 13 times as many decisions.
func (ls *Leases) spend(space *Space, policy *model.Policy, key string, n int64, o *Outcome) bool {
	s := ls.stripe(key)
	if s == nil {
		return false
	}
	now := ls.now()
	s.mu.Lock()
	e := s.Keys[DenialKey{space, key}]
	if e == nil || e.left(now) < n || !e.policy.Is(policy) {
		s.mu.Unlock()
		return false
	}
	first := e.next
	e.next += n
	// The database's clock shows this time, or a later one by at most the time that its answer took.
	clock := e.decidedAt + int64(max(now.elapsed-e.told.elapsed, 0)/time.Microsecond)
	e.outcome(clock, o)
	o.Claim = Claim{e.receipt, first, n}
	s.mu.Unlock()
	return true
}

// outcome sets o to the outcome of a call that spends from the lease. clock is the time by the database's clock.
func (e *Lease) outcome(clock int64, o *Outcome) {
	if len(e.known.rows) == 1 {
		e.outcomeOf(&e.known.rows[0], clock, o)
		return
	}
	each := make([]Outcome, len(e.known.rows))
	for i := range each {
		e.outcomeOf(&e.known.rows[i], clock, &each[i])
	}
	*o = outcomeOfAll(each)
}

// outcomeOf is Outcome for one row.
func (e *Lease) outcomeOf(row *knownRow, clock int64, o *Outcome) {
	*o = Outcome{
		Allowed:    true,
		By:         ByLease,
		Limit:      row.limit,
		Remaining:  row.remaining + e.end - e.next,
		ResetAfter: model.Duration(max(row.resetAt-clock, 0)),
		DecidedAt:  time.UnixMicro(clock),
	}
}

// Held returns how many units of a key this process may spend.
func (ls *Leases) Held(space *Space, policy *model.Policy, key string) int64 {
	s := ls.stripe(key)
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.Keys[DenialKey{space, key}]
	if e == nil || !e.policy.Is(policy) {
		return 0
	}
	return e.left(ls.now())
}

// ahead returns how many more requests for n a call asks for, when it has to ask anyway.
func (ls *Leases) ahead(space *Space, policy *model.Policy, key string, n int64) int64 {
	s := ls.stripe(key)
	if s == nil {
		return 0
	}
	now, terms := ls.now(), space.Lease
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.Keys[DenialKey{space, key}]
	if e == nil || !e.policy.Is(policy) || now.elapsed < e.asking {
		return 0
	}
	size := min(e.wants(now, n), int64(float64(e.known.Remaining)*terms.MaxShare))
	if size < n || e.known.lasts < ShortestLease {
		return 0
	}
	clock, excess := e.known.decidedAt+model.MicrosUp(now.since(e.known.asked)), int64(0)
	for i, m := range policy.Rules {
		rolled, _ := m.Roll(e.known.States[i], clock)
		spare, _ := m.LeaseOf(rolled, clock, model.Micros(terms.MaxLength))
		excess = max(excess, -spare)
	}
	switch {
	case excess > 0 && len(policy.Rules) > 1: // room made in a bucket would cost the other policies units
		return 0
	case size+excess > staleUnits && now.since(e.known.asked) > freshFor:
		return 0 // this call's answer tells what is left, and the next call takes ahead
	}
	e.asking = now.elapsed + ls.timeout
	return (size + excess) / n
}

// wants returns how many units to take ahead by demand. After an exhausted lease, outlived decides. Otherwise it is
// what was used of the last lease. If nothing was used, it is half of what calls will use if they keep coming at the
// present interval, but at most firstLease calls.
func (e *Lease) wants(now instant, n int64) int64 {
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

// outlived returns the size of the next lease after one that was not enough. It doubles if less than half of the
// lease's time has passed.
func (e *Lease) outlived(now instant) int64 {
	if now.since(e.asked) < e.lasts/2 {
		return 2 * e.end
	}
	return e.end
}

// tell calls the hook, if something was taken ahead or went back.
func (ls *Leases) tell(use LeaseUse) {
	if ls.told != nil && use != (LeaseUse{}) {
		ls.told(use)
	}
}

// settle stores what a statement has taken ahead for a request, and what its answer says about the key. asked and told
// are when the statement left and came back.
func (ls *Leases) settle(r *Request, err error, asked, told instant) {
	back, due, event := ls.learn(r, err, asked, told)
	ls.tell(event)
	if back != nil {
		go ls.giveBack(back)
	}
	if due != 0 {
		ls.wakeAt(due, told.elapsed)
	}
}

// learn updates the entry. It returns what settle has to give back, if anything, when the timer is due, or 0, and what
// the hook is told.
func (ls *Leases) learn(
	r *Request, err error, asked, told instant,
) (back *giving, due time.Duration, event LeaseUse) {
	p := &r.Parts[0]
	if p.Space.Lease == nil || r.Policy == nil || p.Cost <= 0 || r.Shadow != nil || err == nil && r.PassedOver() {
		return nil, 0, event
	}
	s := ls.Make(p.Key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e, kept := s.Entry(p.Space, p.Key, told.elapsed, err == nil)
	if err != nil {
		e.asking = 0
		return nil, 0, event
	}
	rests, event := e.learn(r, asked, told)
	if !kept {
		rests = append(rests, e.lapse(p.Space)...)
	} else {
		due = e.due()
	}
	if len(rests) > 0 {
		back = ls.begin()
		back.rests = rests
	}
	return back, due, event
}

// Make returns a key's stripe, and makes the stripes if they are missing.
func (ls *Leases) Make(key string) *LeaseStripe {
	if ls.Stripes.Load() == nil {
		ls.Stripes.CompareAndSwap(nil, new([leaseStripes]LeaseStripe))
	}
	return ls.stripe(key)
}

// Entry returns the entry of a key, and whether it is stored. If add is true, it stores a new one if there is room. The
// caller holds s.mu.
func (s *LeaseStripe) Entry(space *Space, key string, now time.Duration, add bool) (e *Lease, kept bool) {
	if e := s.Keys[DenialKey{space, key}]; e != nil {
		return e, true
	}
	e = &Lease{}
	if !add || len(s.Keys) >= MaxLeased/leaseStripes && !s.evict(now) {
		return e, false
	}
	if s.Keys == nil {
		s.Keys = make(map[DenialKey]*Lease)
	}
	s.Keys[DenialKey{space, strings.Clone(key)}] = e
	return e, true
}

// evict forgets a key of which nothing is held, so that a flood of keys keeps no busy key out for long. It looks at a
// few keys only, and tells whether it has found one. It keeps a key that was just reset, because an older lease may be
// on its way. The caller holds s.mu.
func (s *LeaseStripe) evict(now time.Duration) bool {
	tries := 8
	for k, e := range s.Keys { // in random order
		if e.next == e.end && (e.reset == 0 || now > e.reset+e.memory) {
			delete(s.Keys, k)
			return true
		}
		if tries--; tries == 0 {
			return false
		}
	}
	return false
}

// learn is Leases.Learn for the entry. It returns what is to be given back. The caller holds the mutex of the stripe.
func (e *Lease) learn(r *Request, asked, told instant) (rests []rest, event LeaseUse) {
	first := &r.Parts[0]
	space, d := first.Space, &first.Decision
	decidedAt := d.DecidedAt.UnixMicro()
	// A lease ends under another policy, and when the database's clock has been set forward beyond its end.
	if !e.policy.Is(r.Policy) || decidedAt >= e.decidedAt+int64(e.lasts/time.Microsecond) {
		rests = e.lapse(space)
	}
	if !e.policy.Is(r.Policy) {
		*e = Lease{policy: r.Policy, reset: e.reset}
	}
	e.memory = space.Lease.MaxLength
	spare, lasts := e.know(r, asked)
	if r.Ahead == 0 {
		return rests, event
	}

	rests = append(rests, e.lapse(space)...)
	e.asking = 0
	used := (r.Count - r.Ahead) * first.Cost // by the callers who asked
	surplus := d.Granted*first.Cost - used
	if surplus <= 0 {
		return rests, event
	}
	e.receipt = NewReceipt(space, r.Policy, strings.Clone(first.Key), surplus)
	e.receipt.Back = &GivenBack{}
	for i := range r.Parts {
		p := &r.Parts[i]
		taken := p.Decision.Taken
		taken.Units = d.Granted * p.Cost
		e.receipt.Parts[i] = taken.Portion(p.Rules, used, used+surplus)
	}
	room := float64(e.known.Remaining+surplus) * space.Lease.MaxShare
	e.next, e.end = 0, min(surplus, spare, int64(room))
	e.decidedAt, e.asked, e.told, e.lasts = decidedAt, asked, told, lasts
	if lasts < ShortestLease || told.since(asked) >= lasts || asked.elapsed < e.reset ||
		len(r.Parts) > 1 && spare < surplus { // room made in a bucket would cost the other policies units
		e.end = 0
	}
	// The rest goes back. But if that would fill a bucket while something is held, some of it is lost.
	returns := surplus
	if e.end > 0 {
		returns = min(surplus, spare)
	}
	if e.end < returns {
		noted := min(surplus, spare) // see TokenBucket.Lend
		rests = append(rests, rest{space, e.receipt, e.end, returns, noted - e.end})
	}
	return rests, LeaseUse{Limiter: space.Name, Taken: surplus, Stranded: surplus - returns}
}

// know stores what an answer says about the key, unless a later decision has come before it. It returns how much may be
// held of the key, and for how long. The caller holds the mutex of the stripe.
func (e *Lease) know(r *Request, asked instant) (spare int64, lasts time.Duration) {
	space, decidedAt := r.Parts[0].Space, r.Parts[0].Decision.DecidedAt.UnixMicro()
	spare, longest := int64(model.Never), model.Micros(space.Lease.MaxLength)
	for i := range r.Parts {
		p := &r.Parts[i]
		room, micros := p.Rules.LeaseOf(p.Decision.State, decidedAt, longest)
		spare, longest = min(spare, max(room, 0)), min(longest, micros)
	}
	lasts = model.Duration(max(longest, 0)) / 256 * 255 // allows for clocks whose rates differ by 0.4 %
	known := &e.known
	if decidedAt < known.decidedAt {
		return spare, lasts
	}
	known.asked, known.decidedAt, known.lasts = asked, decidedAt, lasts
	before := known.States
	known.Remaining, known.rows, known.States = model.Never, known.rows[:0], known.States[:0]
	for i := range r.Parts {
		p := &r.Parts[i]
		known.Remaining = min(known.Remaining, p.Decision.Remaining)
		known.rows = append(known.rows, knownRow{
			limit: p.Rules.Numbers().Limit, remaining: p.Decision.Remaining, resetAt: decidedAt + p.Decision.ResetAfter,
		})
		state := p.Decision.State
		if r.Ahead == 0 && len(before) > 0 { // only an answer to a take ahead says what is leased
			state.Log = before[i].Log
		}
		known.States = append(known.States, state)
	}
	return spare, lasts
}

// lapse ends a lease, and returns what is left of it, to be given back. The caller holds the mutex of the stripe.
func (e *Lease) lapse(space *Space) (rests []rest) {
	if e.receipt == nil {
		return nil
	}
	if e.next < e.end {
		rests = append(rests, rest{space, e.receipt, e.next, e.end, e.end})
	}
	e.size, e.receipt, e.next, e.end = e.next, nil, 0, 0
	return rests
}

// due returns when the entry needs the timer, by the monotonic clock. Then a lease has to go back, early enough to
// arrive before it ends, or the key is forgotten. The caller holds the mutex of the stripe.
func (e *Lease) due() time.Duration {
	if e.next < e.end {
		return e.asked.elapsed + e.lasts/8*7
	}
	return e.known.asked.elapsed + e.memory
}
