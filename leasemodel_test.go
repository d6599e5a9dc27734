package ratelimit

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/memory"
)

// leaseWorld is a database, and processes that lease from one key. The processes run the code of this package, and the
// database is the model. All that happens between them happens at times that the test chooses.
type leaseWorld struct {
	policy    model
	rows      map[memory.Row]any
	clock     int64 // the database's, in microseconds
	processes []*leaser
	uses      []leaseUse
	mistake   leaseMistake
	leased    int64 // what was spent of leases
	stepped   bool  // somebody has set the database's clock
	resets    []int64
}

// leaser is a process.
type leaser struct {
	leases  *leases
	limiter *Limiter
	at      instant // by its own clocks
	slow    int64   // how many microseconds its clocks lose in 1,000
	request *request
	asked   instant
	decided bool
	outbox  []rest // on their way back
	mine    []int  // its uses that were not given back
}

// leaseUse is a request that was let through.
type leaseUse struct {
	at      int64 // when, by the database's clock
	told    int64 // the result's DecidedAt
	receipt *receipt
	first   int64 // of the units of the receipt
	n       int64
	back    bool // it was given back
}

// leaseMistake is a fault in the code.
type leaseMistake int

const (
	noMistake         leaseMistake = iota
	survivesItsWindow              // a lease lasts beyond its window
	fullBucket                     // a bucket is leased from while it fills up
	wrongClock                     // a lease ends by the wall clock alone
	sinceTheAnswer                 // a lease lasts from the answer on, not from the question
	returnedTwice                  // what is left goes back twice
	refundedTwice                  // what was spent and given back goes back once more, with what is left
	spentAndReturned               // what has gone back is spent nevertheless
	fillsUp                        // what goes back may fill a bucket although it is leased from
)

// carelessModel makes mistakes in how long a lease lasts.
type carelessModel struct {
	model

	mistake leaseMistake
}

func (m carelessModel) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	spare, lasts = m.model.leaseOf(s, clock, longest)
	switch m.mistake {
	case survivesItsWindow:
		lasts = longest
	case fullBucket:
		spare = never
	}
	return spare, lasts
}

func newLeaseWorld(policy model, processes int, mistake leaseMistake) *leaseWorld {
	w := &leaseWorld{policy: policy, rows: map[memory.Row]any{}, clock: 1 << 50, mistake: mistake}
	for range processes {
		w.processes = append(w.processes, w.newProcess())
	}
	return w
}

func (w *leaseWorld) newProcess() *leaser {
	p := &leaser{at: instant{time.Hour, duration(w.clock)}}
	space := &keyspace{name: "api", lease: &Lease{MaxShare: 1, MaxLength: time.Minute}}
	policy := w.policy
	if w.mistake == survivesItsWindow || w.mistake == fullBucket {
		policy = carelessModel{w.policy, w.mistake}
	}
	p.limiter = &Limiter{space: space, policy: policy, models: []model{policy}}
	p.leases = newLeases(nil, 0, nil)
	w.readClocks(p)
	return p
}

func (w *leaseWorld) readClocks(p *leaser) {
	p.leases.now = func() instant { return w.read(p) }
}

func (w *leaseWorld) read(p *leaser) instant {
	if w.mistake == wrongClock {
		return instant{p.at.wall, p.at.wall}
	}
	return p.at
}

// clone is a world that goes its own way from here.
func (w *leaseWorld) clone() *leaseWorld {
	c := *w
	c.rows, c.uses = maps.Clone(w.rows), slices.Clone(w.uses)
	c.processes = nil
	for _, p := range w.processes {
		q := *p
		q.outbox, q.mine = slices.Clone(p.outbox), slices.Clone(p.mine)
		if p.request != nil {
			r := *p.request
			r.parts = slices.Clone(r.parts)
			q.request = &r
		}
		q.leases = &leases{seed: p.leases.seed}
		if shards := p.leases.shards.Load(); shards != nil {
			of := new([leaseShards]leaseShard)
			for i := range shards {
				for k, e := range shards[i].keys {
					entry := *e
					entry.known.states = slices.Clone(e.known.states)
					if of[i].keys == nil {
						of[i].keys = map[denialKey]*lease{}
					}
					of[i].keys[k] = &entry
				}
			}
			q.leases.shards.Store(of)
		}
		c.readClocks(&q)
		c.processes = append(c.processes, &q)
	}
	return &c
}

// call has a process do the next step of a call: spend or ask, have the database decide, or hear the answer.
func (w *leaseWorld) call(p *leaser, n int64) {
	l := p.limiter
	switch {
	case p.request == nil:
		if result, ok := p.leases.spend(l.space, l.policy, "key", n); ok {
			told := result.DecidedAt.UnixMicro()
			w.leased += n
			w.use(p, leaseUse{at: w.clock, told: told, receipt: result.receipt, first: result.first, n: n})
			return
		}
		ahead := p.leases.ahead(l, "key", n)
		p.request = &request{space: l.space, policy: l.policy, count: 1 + ahead, ahead: ahead, place: 1}
		p.request.add(l.space, l.models, "key", n, nil)
		p.asked, p.decided = w.read(p), false
	case !p.decided:
		w.decide(p.request)
		p.decided = true
		if r := p.request.result(); r.Allowed { // it counts from here on, as without leases
			w.use(p, leaseUse{at: w.clock, told: r.DecidedAt.UnixMicro(), receipt: r.receipt, n: r.receipt.leftover()})
		}
	default:
		asked := p.asked
		if w.mistake == sinceTheAnswer {
			asked = w.read(p)
		}
		if back, _, _ := p.leases.learn(p.request, nil, asked, w.read(p)); back != nil {
			p.outbox = append(p.outbox, back.rests...)
		}
		p.request = nil
	}
}

func (w *leaseWorld) use(p *leaser, u leaseUse) {
	p.mine = append(p.mine, len(w.uses))
	w.uses = append(w.uses, u)
}

func (w *leaseWorld) decide(r *request) {
	r.decideIn(w.database(), w.clock)
	if row, ok := w.rows[r.parts[0].row()].(memoryRow); ok && w.mistake == fillsUp { // it forgets what is leased
		row.state.log = ""
		w.rows[r.parts[0].row()] = row
	}
}

func (w *leaseWorld) database() *memory.DB { return &memory.DB{Rows: w.rows} }

// giveBack has a process send what is on its way back, or end its leases, all of them or those that are due.
func (w *leaseWorld) giveBack(p *leaser, all bool) {
	if len(p.outbox) > 0 {
		back := p.outbox[0]
		p.outbox = p.outbox[1:]
		for range map[bool]int{false: 1, true: 2}[w.mistake == returnedTwice] {
			w.refund(back.receipt, back.to-back.from, back.takes())
		}
		return
	}
	kept := w.clone().processes[slices.Index(w.processes, p)].leases
	if all {
		p.outbox = p.leases.all().rests
	} else {
		back, _ := p.leases.outdated(w.read(p))
		p.outbox = back.rests
	}
	if w.mistake == spentAndReturned {
		p.leases.shards.Store(kept.shards.Load())
	}
}

// refund gives back units of a take.
func (w *leaseWorld) refund(of *receipt, n int64, takes []take) {
	r := &request{space: of.space, policy: of.policy, count: 1, place: 1}
	r.add(of.space, of.policy.models(), "key", -n, takes)
	w.decide(r)
}

// refundUse gives back what one of the process's calls has taken.
func (w *leaseWorld) refundUse(p *leaser, i int) {
	u := &w.uses[p.mine[i]]
	p.mine = slices.Delete(p.mine, i, i+1)
	u.back = true
	w.refund(u.receipt, u.n, u.receipt.between(u.first, u.first+u.n))
	if w.mistake == refundedTwice {
		w.refund(u.receipt, u.n, u.receipt.between(u.first, u.first+u.n))
	}
}

// pass lets time pass. The machine of one process may stand still meanwhile.
func (w *leaseWorld) pass(micros int64, suspended *leaser) {
	w.clock += micros
	for _, p := range w.processes {
		passed := duration(micros) - time.Duration(micros*p.slow)
		p.at.wall += passed
		if p != suspended {
			p.at.elapsed += passed
		}
	}
}

// crash ends a process, and begins another one.
func (w *leaseWorld) crash(i int) { w.processes[i] = w.newProcess() }

// judge tells what the policy does not admit of what was let through and not given back. It knows nothing of leases.
func (w *leaseWorld) judge() error {
	window := micros(w.policy.numbers().Span)
	inWindow := map[int64]int64{}
	limit := w.policy.numbers().Limit
	level, last := int64(0), int64(0)
	for _, u := range w.uses {
		if u.told > u.at+w.policy.lasts()/1000 && !w.stepped { // a process's clock may be a little fast
			return fmt.Errorf("a decision of %d says that it is of %d", u.at, u.told)
		}
		if w.stepped { // as far as the callers know
			u.at = u.told
		}
		if u.back {
			continue
		}
		if bucket, ok := w.policy.(TokenBucket); ok {
			if last == 0 {
				level, last = bucket.full(), u.at
			}
			level, last = min(level+(u.at-last)*bucket.Refill, bucket.full())-u.n*window, u.at
			if level < 0 {
				return fmt.Errorf("%d at %d from an empty bucket", u.n, u.at)
			}
			continue
		}
		in := u.receipt.parts[0].in
		if u.at >= in+window {
			return fmt.Errorf("%d at %d, of the window from %d to %d", u.n, u.at, in, in+window)
		}
		inWindow[in] += u.n
		weighed := inWindow[in] * window
		forgotten := slices.ContainsFunc(w.resets, func(at int64) bool { return in-window < at && at <= in })
		if _, ok := w.policy.(SlidingWindow); ok && !w.stepped && !forgotten {
			weighed += inWindow[in-window] * (window - (u.at - in))
		}
		if weighed > limit*window {
			return fmt.Errorf("%d of %d in the window from %d, and %d in the one before", inWindow[in], limit, in,
				inWindow[in-window])
		}
	}
	return nil
}

// Every order of what two processes do, for some steps, with a limit of 3. They have called before, and so take ahead.
func TestLeasesInEveryOrder(t *testing.T) {
	t.Parallel()
	depth := min(5+rounds(t)/4, 7)
	for name, policy := range map[string]model{
		"fixed":   FixedWindow{Limit: 3, Window: 800 * time.Millisecond},
		"sliding": SlidingWindow{Limit: 3, Window: 800 * time.Millisecond},
		"bucket":  TokenBucket{Capacity: 3, Refill: 1, Every: 4096 * time.Millisecond}, // leased from for 96 ms
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			leased := int64(0)
			require.NoError(t, inEveryOrder(newLeasingWorld(policy, noMistake), depth, &leased))
			require.Greater(t, leased, int64(100))
		})
		for _, mistake := range []leaseMistake{survivesItsWindow, returnedTwice, refundedTwice, spentAndReturned} {
			if _, bucket := policy.(TokenBucket); bucket && (mistake == survivesItsWindow || mistake == refundedTwice) {
				continue
			}
			t.Run(fmt.Sprint(name, " with mistake ", mistake), func(t *testing.T) {
				t.Parallel()
				require.Error(t, inEveryOrder(newLeasingWorld(policy, mistake), 7, new(int64)))
			})
		}
	}
}

// newLeasingWorld has two processes that have called before, so that the next call takes 2 ahead.
func newLeasingWorld(policy model, mistake leaseMistake) *leaseWorld {
	w := newLeaseWorld(policy, 2, mistake)
	for _, p := range w.processes {
		for range 3 {
			w.call(p, 1)
		}
		p.wants(2)
		p.mine = nil
	}
	w.pass(policy.lasts(), nil)
	w.uses = nil
	return w
}

// inEveryOrder does all that may happen next, and goes on from there.
func inEveryOrder(w *leaseWorld, depth int, leased *int64) error {
	if err := w.judge(); err != nil || depth == 0 {
		return err
	}
	for action := range 10 {
		next := w.clone()
		p := next.processes[action%2]
		switch action / 2 {
		case 0:
			before, asks := next.leased, p.request == nil
			next.call(p, 1)
			if *leased += next.leased - before; asks && next.leased == before {
				next.call(p, 1) // the database decides at once
			}
		case 1:
			next.giveBack(p, true)
		case 2:
			next.crash(action % 2)
		case 3:
			next.pass([]int64{40_000, 790_000}[action%2], nil)
		default:
			if len(p.mine) == 0 {
				continue
			}
			next.refundUse(p, len(p.mine)-1)
		}
		if err := inEveryOrder(next, depth-1, leased); err != nil {
			return err
		}
	}
	return nil
}

// Stories of what may happen to five processes, their clocks and the database. In some, somebody sets the database's
// clock. Then the windows are those that the callers are told.
func TestLeasesInStories(t *testing.T) {
	t.Parallel()
	policies := map[string]model{
		"fixed":    FixedWindow{Limit: 1000, Window: 800 * time.Millisecond},
		"sliding":  SlidingWindow{Limit: 1000, Window: 800 * time.Millisecond},
		"bucket":   TokenBucket{Capacity: 1000, Refill: 1000, Every: 13 * time.Second}, // leased from for 101 ms
		"calendar": CalendarWindow{Limit: 1000, Unit: Minute},
	}
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			leased, seed := int64(0), testSeed(t)
			for story := range uint64(300 * rounds(t)) {
				w := newLeaseWorld(policy, 5, noMistake)
				w.tell(rand.New(rand.NewPCG(seed, story)))
				leased += w.leased
				require.NoError(t, w.judge(), "story %d", story)
			}
			require.Greater(t, leased, int64(100_000*rounds(t)))
		})
		for _, mistake := range []leaseMistake{
			survivesItsWindow, fullBucket, wrongClock, sinceTheAnswer, returnedTwice, spentAndReturned, fillsUp,
		} {
			_, bucket := policy.(TokenBucket)
			_, calendar := policy.(CalendarWindow)
			if bucket && mistake == survivesItsWindow || !bucket && (mistake == fullBucket || mistake == fillsUp) ||
				calendar && mistake != survivesItsWindow { // as of a fixed window
				continue
			}
			t.Run(fmt.Sprint(name, " with mistake ", mistake), func(t *testing.T) {
				t.Parallel()
				seed := testSeed(t)
				for story := uint64(0); ; story++ {
					require.Less(t, story, uint64(10_000), "nothing was noticed")
					w := newLeaseWorld(policy, 5, mistake)
					w.tell(rand.New(rand.NewPCG(seed, story)))
					if w.judge() != nil {
						return
					}
				}
			})
		}
	}
}

// wants has the process take so much ahead, whatever its demand is.
func (p *leaser) wants(size int64) {
	if s := p.leases.shard("key"); s != nil {
		for _, e := range s.keys {
			if e.receipt == nil {
				e.size = size
			}
		}
	}
}

// tell tells a story.
func (w *leaseWorld) tell(r *rand.Rand) {
	_, longest := w.policy.leaseOf(state{windowStart: w.clock, scale: micros(time.Minute), expiresAt: never}, w.clock, 6e7)
	_, bucket := w.policy.(TokenBucket)
	steps := !bucket && r.IntN(3) == 0
	busy := r.IntN(2) == 0 // there is never room for long
	for _, p := range w.processes {
		p.slow = r.Int64N(6) - 3
		for range 3 { // so that the next call takes ahead
			w.call(p, 1)
		}
		p.wants(r.Int64N(500))
	}
	w.pass(w.policy.lasts(), nil)
	for range 200 {
		i := r.IntN(len(w.processes))
		p := w.processes[i]
		switch r.IntN(30) {
		case 0:
			w.crash(i)
		case 1:
			w.giveBack(p, true)
		case 2, 3:
			w.giveBack(p, false)
		case 4:
			if len(p.mine) > 0 {
				w.refundUse(p, r.IntN(len(p.mine)))
			}
		case 5:
			w.pass(r.Int64N(longest), p)
		case 6, 7, 8:
			w.pass(r.Int64N(longest), nil)
		case 9:
			if !busy || r.IntN(4) == 0 {
				w.pass(r.Int64N(2*w.policy.lasts()), nil)
			}
		case 10:
			p.at.wall += duration(r.Int64N(4*longest) - 3*longest)
		case 11:
			if steps {
				w.stepped = true
				w.clock += r.Int64N(3*w.policy.lasts()) - w.policy.lasts()
			}
		case 12:
			if !bucket && r.IntN(10) == 0 {
				w.pass(1, nil) // so that the next window does not begin when this one did
				clear(w.rows)
				w.resets = append(w.resets, w.clock)
			}
		case 13: // whatever it takes ahead
			p.wants(r.Int64N(500))
		case 16: // a bucket is leased from as soon as it is full, and some give back
			if !bucket {
				continue
			}
			w.pass(w.policy.lasts(), nil)
			for range 2 + r.IntN(10) {
				p := w.processes[r.IntN(len(w.processes))]
				if p.request == nil {
					p.wants(r.Int64N(300))
				}
				for range 3 {
					w.call(p, 1+r.Int64N(10)*r.Int64N(10))
				}
				w.pass(r.Int64N(longest), nil)
			}
			for _, p := range w.processes {
				for r.IntN(4) > 0 && len(p.mine) > 0 {
					w.refundUse(p, len(p.mine)-1)
				}
				for range r.IntN(3) {
					w.giveBack(p, true)
				}
			}
			w.pass(r.Int64N(longest), nil)
			w.takeAll(r)
		case 15: // the answer is lost
			if p.request != nil && p.decided {
				p.leases.learn(p.request, errNotTried, p.asked, w.read(p))
				p.request = nil
			}
		case 14: // all take what they can
			w.takeAll(r)
		default:
			n := 1 + r.Int64N(10)
			if r.IntN(10) == 0 {
				n = 1 + r.Int64N(300)
			}
			w.call(p, n)
		}
		w.pass(r.Int64N(max(longest/50, 2)), nil)
	}
}

func (w *leaseWorld) takeAll(r *rand.Rand) {
	for round := range 60 {
		for _, p := range w.processes {
			held := p.leases.held(p.limiter.space, p.limiter.policy, "key")
			w.call(p, max(held, 1+r.Int64N(100)>>(round/8)))
		}
	}
}

// What is given back leaves room for what is still leased. Otherwise the bucket would be full before the lease ends.
func TestLeasesOfABucketThatOthersGiveBackTo(t *testing.T) {
	t.Parallel()
	for _, refund := range []bool{false, true} {
		for _, mistake := range []leaseMistake{noMistake, fillsUp} {
			w := newLeaseWorld(TokenBucket{Capacity: 1000, Refill: 1000, Every: 13 * time.Second}, 2, mistake)
			ask := func(p *leaser, n int64) {
				for range 3 {
					w.call(p, n)
				}
			}
			first, second := w.processes[0], w.processes[1]
			for _, p := range w.processes {
				ask(p, 1)
				p.mine = nil
			}
			w.pass(w.policy.lasts(), nil)
			w.uses = nil

			ask(first, 9) // as much flows in while a lease of it lasts
			if refund {
				ask(first, 100)
			} else {
				first.wants(100)
				ask(first, 1)
			}
			w.pass(85_000, nil)
			ask(second, 1)
			second.wants(100)
			ask(second, 1)
			if refund {
				w.refundUse(first, 1)
			}
			for w.giveBack(first, true); len(first.outbox) > 0; {
				w.giveBack(first, true)
			}
			w.pass(95_000, nil)
			held := second.leases.held(second.limiter.space, second.limiter.policy, "key")
			require.Positive(t, held)
			w.call(second, held)
			for n := int64(512); n > 0; n /= 2 {
				ask(first, n)
				ask(first, n)
			}
			require.Equal(t, mistake == fillsUp, w.judge() != nil, "refund %v, mistake %v", refund, mistake)
		}
	}
}

// A reset comes while a question is on its way. What was taken before it is not spent, and what was taken after it goes
// back.
func TestResetWhileALeaseIsOnItsWay(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{false, true} {
		w := newLeasingWorld(FixedWindow{Limit: 3, Window: 800 * time.Millisecond}, noMistake)
		p := w.processes[0]
		w.call(p, 1)
		if before {
			w.call(p, 1)
		}
		clear(w.rows)
		w.pass(1, nil)
		if !before {
			w.call(p, 1)
		}
		w.pass(1, nil)
		p.leases.drop(p.limiter.space, "key", p.at)
		w.call(p, 1) // it hears of it
		require.Zero(t, p.leases.held(p.limiter.space, p.limiter.policy, "key"))
		require.Len(t, p.outbox, 1)
		w.giveBack(p, false)
		left := &request{space: p.limiter.space, policy: p.limiter.policy, count: 1, place: 1}
		left.add(p.limiter.space, p.limiter.models, "key", 0, nil)
		left.decideIn(w.database(), w.clock)
		require.Equal(t, map[bool]int64{false: 2, true: 3}[before], left.parts[0].decision.remaining)
	}
}

// Answers come in any order. What is known of a key is what the latest tells.
func TestLeasesKnowTheLatest(t *testing.T) {
	t.Parallel()
	w := newLeaseWorld(FixedWindow{Limit: 1000, Window: time.Hour}, 1, noMistake)
	p := w.processes[0]
	hear := func(later time.Duration, remaining int64) int64 {
		r := &request{space: p.limiter.space, policy: p.limiter.policy, count: 1, place: 1}
		r.add(p.limiter.space, p.limiter.models, "key", 1, nil)
		r.parts[0].decision = decision{
			granted: 1, remaining: remaining, decidedAt: time.UnixMicro(w.clock).Add(later),
			state: state{windowStart: w.clock, expiresAt: never},
		}
		p.leases.learn(r, nil, p.at, p.at)
		return p.leases.shard("key").keys[denialKey{p.limiter.space, "key"}].known.remaining
	}
	require.EqualValues(t, 900, hear(time.Second, 900))
	require.EqualValues(t, 900, hear(0, 950))
	require.EqualValues(t, 800, hear(2*time.Second, 800))
}
