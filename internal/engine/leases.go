package engine

import (
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// Leases contains the units that this process has taken ahead.
//
// A lease may be spent only if it has surely not ended by the database's clock. The statement was sent before the
// database decided. So the time since the statement was sent is at least the time since the decision. The process
// measures this time by its monotonic clock, so nobody can make a lease longer by setting the wall clock. On some
// machines the monotonic clock stops while the machine is suspended. So the process uses the clock that has advanced
// further.
//
// Each key that a call has asked for has an entry, even without a lease. An entry is deleted if nobody asks for its key
// during MaxLength. A timer runs only while there are entries.
//
// Why a lease admits no more than the policy:
//
// Every unit is taken in the database before it is spent. No unit is spent twice, or returned after it was spent. So
// the only question is time: units are taken at one time and spent later, and the policy must hold at the later time.
// The process measures the time since it sent the statement, which was before the database's decision. So the measured
// time is never less than the time since the decision. A lease is shortened by 1/256 in case the process's clock is
// slow. So by the database's clock, a unit is spent at most the lease's length after it was taken.
//
//   - FixedWindow, CalendarWindow. A lease ends with the window in which its units were taken. So units that are spent
//     in a window were taken in the same window, and the database takes at most the limit in a window.
//
//   - SlidingWindow. A lease ends with its window here too. When the last unit was taken, prev × (Window − e) + count
//     × Window ≤ Limit × Window held, counting all taken units. Until the window ends, e only grows, so the inequality
//     still holds when the unit is spent. In either of the two windows, no more is spent than was taken.
//
//   - TokenBucket. Let B be the tokens in the database, and out the tokens that are leased and not spent. Let T be an
//     imaginary bucket from which tokens are taken when units are spent. The policy holds if T never falls below 0.
//     All spent units come from B + out, so the policy holds while T ≥ B + out. Spending lowers T and B + out equally,
//     and both fill at the same rate. But T stops at Capacity, so B + out must not rise above Capacity.
//
//     The row records the leased units for each period. A period is 1/128 of the time in which the bucket fills, and
//     no lease lasts longer than a period. So noted, the units leased in this period and the one before, is never less
//     than out. After each lease, and after each return that changes something, B + noted + Refill × period ≤
//     Capacity. From then on only refill raises B + out, by at most Refill × period until the last lease has ended. If
//     a bucket is too full for a lease, the process also takes the surplus, which is lost. Returned units that do not
//     fit are lost too. So a leased bucket keeps 1/128 of Capacity empty, plus the units leased in two periods.
//
//     A Refund leaves the bucket as if there had been no take. It raises T by the refund, unless T would have been
//     full at some time since the take. So B + out must have left room for the refund at every moment since the take.
//     There was room, because the missing tokens form a queue, as TokenBucket.refund says. Refill serves the front of
//     the queue, and a refund returns only tokens that are still in the queue. Units leased after the take are behind
//     the take in the queue, so they are missing too. Units leased before the take are in front of the take, with
//     another Refill × period, so they are missing until their leases have ended.
//
//   - All. A lease is as short and as small as the strictest of the policies requires.
//
//   - SlidingLog. There are no leases of a SlidingLog, because its entries would have the times at which units were
//     taken, not spent.
//
// The argument assumes that Postgres works, that the clocks of the process run, and that nobody sets the database's
// clock forward. A process notices such a step in the next answer for the key, and ends its lease.
type Leases struct {
	now      func() instant
	timeout  time.Duration
	seed     maphash.Seed
	giveBack func(*giving)                             // see Engine.giveBack
	told     func(LeaseUse)                            // may be nil
	Stripes  atomic.Pointer[[leaseStripes]LeaseStripe] // nil until the first call of a limiter with a Lease

	mu        sync.Mutex
	timer     *time.Timer
	Due       time.Duration    // when the timer fires; 0 if it is not set
	returning map[*giving]bool // the givings that have not ended
}

// Bounds of the number and size of leases.
const (
	leaseStripes = 16
	MaxLeased    = 16384 // how many keys can have an entry
	firstLease   = 4     // the most calls for which the first lease of a key is enough
	// ShortestLease is the shortest useful duration of a lease. It also bounds how often the timer fires.
	ShortestLease = 10 * time.Millisecond
	// If the last answer about a key is older than freshFor, a call takes at most staleUnits ahead, because other
	// processes may have taken most units since.
	freshFor, staleUnits = 100 * time.Millisecond, 64
)

// LeaseTerms say how many units a lease may have, and for how long.
type LeaseTerms struct {
	MaxShare  float64       // the largest part of Remaining to take ahead, above 0
	MaxLength time.Duration // the longest duration of a lease
}

// LeaseStripe has a part of the keys, and a mutex for this part.
type LeaseStripe struct {
	mu   sync.Mutex
	Keys map[leaseKey]*Lease
	_    [48]byte // keeps the mutexes of two stripes out of the same cache line
}

// leaseKey is a key of a limiter. A limiter and the limiters of its With have the same leases.
type leaseKey struct {
	space *Space
	key   string
}

// Lease has the units of a key that this process has taken ahead, and what this process knows about the key.
type Lease struct {
	policy    *model.Policy
	receipt   *Receipt // the receipt for the units taken ahead; nil without a lease
	next, end int64    // the unused units are the range [next, end)
	size      int64    // how many units to take ahead, according to demand
	decidedAt int64    // when the units were taken, by the database's clock
	asked     instant  // when the statement that took the units was sent
	told      instant  // when the answer to this statement came
	lasts     time.Duration

	// known is what the latest answer has said about the key.
	known struct {
		Remaining int64         // the smallest Remaining of all rows
		rows      []knownRow    // the rows of the key
		States    []model.State // the states of these rows
		decidedAt int64
		asked     instant
		lasts     time.Duration // how long a lease taken at decidedAt could last
	}
	asking time.Duration // until this time, another call is taking units ahead
	reset  time.Duration // when the key was last reset; a lease requested before the reset is not spent
	memory time.Duration // how long to keep the entry after the last answer
}

// knownRow is what an answer has said about one row.
type knownRow struct {
	limit, remaining int64
	resetAt          int64 // when the row is as good as new, by the database's clock
}

// instant is a time by the clocks of this process.
type instant struct {
	elapsed time.Duration // the monotonic clock
	wall    time.Duration // the wall clock, since 1970
}

// since returns how much time has passed since an earlier instant, by the clock that has advanced further.
func (t instant) since(earlier instant) time.Duration {
	return max(t.elapsed-earlier.elapsed, t.wall-earlier.wall)
}

func newLeases(clock func() time.Time, timeout time.Duration, told func(LeaseUse)) *Leases {
	return &Leases{now: clocksOf(clock), timeout: timeout, seed: maphash.MakeSeed(), told: told}
}

// clocksOf returns a function that reads the clocks of this process. If clock is not nil, it replaces both clocks.
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

// stripe returns the stripe of a key. It returns nil until the first call of a limiter with a Lease.
func (ls *Leases) stripe(key string) *LeaseStripe {
	stripes := ls.Stripes.Load()
	if stripes == nil {
		return nil
	}
	return &stripes[maphash.String(ls.seed, key)%leaseStripes]
}

// left returns how many units of the lease can be spent at the time now.
func (e *Lease) left(now instant) int64 {
	if e.receipt == nil || now.since(e.asked) >= e.lasts {
		return 0
	}
	return e.end - e.next
}

// spend takes n units from the lease of a key, and writes the decision to o. It returns false if the lease has fewer
// than n units. With 16 clients of 2 callers and 100 busy keys, leases multiply the decisions per second by 13.
func (ls *Leases) spend(space *Space, policy *model.Policy, key string, n int64, o *Outcome) bool {
	s := ls.stripe(key)
	if s == nil {
		return false
	}
	now := ls.now()
	s.mu.Lock()
	e := s.Keys[leaseKey{space, key}]
	if e == nil || e.left(now) < n || !e.policy.Is(policy) {
		s.mu.Unlock()
		return false
	}
	first := e.next
	e.next += n
	// The database's clock shows this time or a later time. The difference is at most the time that the answer took.
	clock := e.decidedAt + int64(max(now.elapsed-e.told.elapsed, 0)/time.Microsecond)
	e.outcome(clock, o)
	o.Claim = Claim{e.receipt, first, n}
	s.mu.Unlock()
	return true
}

// outcome writes to o the decision of a call that spends units of the lease. The argument clock is the database's time.
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

// outcomeOf writes to o the decision for one row of the key.
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

// Held returns how many units this process can spend from the lease of a key.
func (ls *Leases) Held(space *Space, policy *model.Policy, key string) int64 {
	s := ls.stripe(key)
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.Keys[leaseKey{space, key}]
	if e == nil || !e.policy.Is(policy) {
		return 0
	}
	return e.left(ls.now())
}

// ahead returns how many further requests for n units a call takes ahead, besides its own request.
func (ls *Leases) ahead(space *Space, policy *model.Policy, key string, n int64) int64 {
	s := ls.stripe(key)
	if s == nil {
		return 0
	}
	now, terms := ls.now(), space.Lease
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.Keys[leaseKey{space, key}]
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
	case excess > 0 && len(policy.Rules) > 1: // making room in one bucket would cost the other policies units
		return 0
	case size+excess > staleUnits && now.since(e.known.asked) > freshFor:
		return 0 // wait for the answer to this call, and let the next call take units ahead
	}
	e.asking = now.elapsed + ls.timeout
	return (size + excess) / n
}

// wants returns how many units to take ahead, according to demand. If the last lease is used up, the function outlived
// decides. If calls have used only a part of the lease, the result is that part. If calls have used nothing, the result
// is enough for half of the calls that come during a lease at the present rate, but for at most firstLease calls.
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

// outlived returns the size of the next lease after a lease that was used up. If less than half of the lease's time has
// passed, the size doubles.
func (e *Lease) outlived(now instant) int64 {
	if now.since(e.asked) < e.lasts/2 {
		return 2 * e.end
	}
	return e.end
}

func (ls *Leases) tell(use LeaseUse) {
	if ls.told != nil && use != (LeaseUse{}) {
		ls.told(use)
	}
}

// settle updates the lease of a request's key after a statement. The arguments asked and told are when the statement
// was sent and when its answer came.
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

// learn updates the entry, and returns units that must go back (or nil), the time for wakeAt, and the hook's event.
func (ls *Leases) learn(
	r *Request, err error, asked, told instant,
) (back *giving, due time.Duration, event LeaseUse) {
	p := &r.Parts[0]
	if p.Space.Lease == nil || r.Policy == nil || p.Cost <= 0 || p.Charge || r.ofHold() || r.reserves() ||
		r.Shadow != nil ||
		err == nil && r.PassedOver() {
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

// Make returns the stripe of a key. The first call makes all stripes.
func (ls *Leases) Make(key string) *LeaseStripe {
	if ls.Stripes.Load() == nil {
		ls.Stripes.CompareAndSwap(nil, new([leaseStripes]LeaseStripe))
	}
	return ls.stripe(key)
}

// Entry returns the entry of a key, and whether the entry is in s.Keys. If the entry is missing and add is true, Entry
// adds a new entry if there is room. The caller holds s.mu.
func (s *LeaseStripe) Entry(space *Space, key string, now time.Duration, add bool) (e *Lease, kept bool) {
	if e := s.Keys[leaseKey{space, key}]; e != nil {
		return e, true
	}
	e = &Lease{}
	if !add || len(s.Keys) >= MaxLeased/leaseStripes && !s.evict(now) {
		return e, false
	}
	if s.Keys == nil {
		s.Keys = make(map[leaseKey]*Lease)
	}
	s.Keys[leaseKey{space, strings.Clone(key)}] = e
	return e, true
}

// evict deletes the entry of a key without unused units, so that busy keys find room during a flood of other keys. It
// looks at no more than 8 entries, and returns whether it has deleted one. It keeps the entry of a key that was just
// reset, because a lease that was requested before the reset may still arrive. The caller holds s.mu.
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

// learn updates the entry after an answer of the database. It returns the units that must go back. The caller holds the
// mutex of the stripe.
func (e *Lease) learn(r *Request, asked, told instant) (rests []rest, event LeaseUse) {
	first := &r.Parts[0]
	space, d := first.Space, &first.Decision
	decidedAt := d.DecidedAt.UnixMicro()
	// A lease ends if the policy has changed, or if the database's clock was set forward beyond the lease's end.
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
	used := (r.Count - r.Ahead) * first.Cost // for the callers, not for the lease
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
		len(r.Parts) > 1 && spare < surplus { // making room in one bucket would cost the other policies units
		e.end = 0
	}
	// The surplus beyond e.end goes back. But units that would fill the bucket too far during a lease are lost.
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

// know stores what an answer says about the key. If the answer to a later decision has already come, know stores
// nothing. It returns how many units of the key a lease may have, and for how long. The caller holds the mutex of the
// stripe.
func (e *Lease) know(r *Request, asked instant) (spare int64, lasts time.Duration) {
	space, decidedAt := r.Parts[0].Space, r.Parts[0].Decision.DecidedAt.UnixMicro()
	spare, longest := int64(model.Never), model.Micros(space.Lease.MaxLength)
	for i := range r.Parts {
		p := &r.Parts[i]
		room, micros := p.Rules.LeaseOf(p.Decision.State, decidedAt, longest)
		spare, longest = min(spare, max(room, 0)), min(longest, micros)
	}
	lasts = model.Duration(max(longest, 0)) / 256 * 255 // 255/256 allows for clocks whose rates differ by 0.4 %
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
		if r.Ahead == 0 && len(before) > 0 { // only the answer to a take ahead shows which units are leased
			state.Log = before[i].Log
		}
		known.States = append(known.States, state)
	}
	return spare, lasts
}

// lapse ends a lease, and returns its unused units. The caller holds the mutex of the stripe.
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

// due returns when tidy must look at the entry, by the monotonic clock. tidy gives the unused units back so early that
// they are in the database before the lease ends, or deletes an entry without units. The caller holds the mutex of the
// stripe.
func (e *Lease) due() time.Duration {
	if e.next < e.end {
		return e.asked.elapsed + e.lasts/8*7
	}
	return e.known.asked.elapsed + e.memory
}
