package engine

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// leaseWorld is a database and several processes that lease units of one key. The processes run the code of this
// package, and the database is package model. The test chooses when each step of a process happens.
type leaseWorld struct {
	policy    model.Rules
	rows      map[memdb.Row]any
	clock     int64 // the database's clock, in microseconds
	processes []*leaser
	uses      []leaseUse
	mistake   leaseMistake
	leased    int64 // how many units were spent from leases
	stepped   bool  // whether the database's clock was set
	resets    []int64
}

// leaser is a process with leases.
type leaser struct {
	leases  *Leases
	space   *Space
	rules   *model.Policy
	at      instant // the time by the process's clocks
	slow    int64   // how many microseconds its clocks lose in 1,000 µs
	request *Request
	asked   instant
	decided bool
	outbox  []rest // units that are on their way back
	mine    []int  // indexes in uses: the process's uses that were not given back
}

// leaseUse is a request that was allowed.
type leaseUse struct {
	at      int64 // when the request was allowed, by the database's clock
	told    int64 // the result's DecidedAt
	receipt *Receipt
	first   int64 // the first of its units in the receipt
	n       int64
	back    bool // whether its units were given back
}

// leaseMistake is a mistake that the test makes on purpose.
type leaseMistake int

const (
	noMistake         leaseMistake = iota
	survivesItsWindow              // a lease lasts longer than its window
	fullBucket                     // a lease ignores how full the bucket is
	wrongClock                     // the end of a lease depends on the wall clock alone
	sinceTheAnswer                 // the time of a lease starts at the answer
	returnedTwice                  // unused units go back twice
	refundedTwice                  // refunded units go back again with the unused units
	spentAndReturned               // units are spent although they went back
	fillsUp                        // returned units may fill a bucket during a lease
)

// carelessModel wraps rules, and makes a mistake in the size or duration of leases.
type carelessModel struct {
	model.Rules

	mistake leaseMistake
}

func (m carelessModel) LeaseOf(s model.State, clock, longest int64) (spare, lasts int64) {
	spare, lasts = m.Rules.LeaseOf(s, clock, longest)
	switch m.mistake {
	case survivesItsWindow:
		lasts = longest
	case fullBucket:
		spare = model.Never
	}
	return spare, lasts
}

func newLeaseWorld(policy model.Rules, processes int, mistake leaseMistake) *leaseWorld {
	w := &leaseWorld{policy: policy, rows: map[memdb.Row]any{}, clock: 1 << 50, mistake: mistake}
	for range processes {
		w.processes = append(w.processes, w.newProcess())
	}
	return w
}

func (w *leaseWorld) newProcess() *leaser {
	p := &leaser{
		at:    instant{elapsed: time.Hour, wall: model.Duration(w.clock)},
		space: &Space{Name: "api", Lease: &LeaseTerms{MaxShare: 1, MaxLength: time.Minute}},
	}
	rules := w.policy
	if w.mistake == survivesItsWindow || w.mistake == fullBucket {
		rules = carelessModel{w.policy, w.mistake}
	}
	p.rules = model.NewPolicy(rules)
	p.leases = newLeases(nil, 0, nil)
	w.readClocks(p)
	return p
}

func (w *leaseWorld) readClocks(p *leaser) {
	p.leases.now = func() instant { return w.read(p) }
}

func (w *leaseWorld) read(p *leaser) instant {
	if w.mistake == wrongClock {
		return instant{elapsed: p.at.wall, wall: p.at.wall}
	}
	return p.at
}

func (w *leaseWorld) clone() *leaseWorld {
	c := *w
	c.rows, c.uses = maps.Clone(w.rows), slices.Clone(w.uses)
	c.processes = nil
	for _, p := range w.processes {
		q := *p
		q.outbox, q.mine = slices.Clone(p.outbox), slices.Clone(p.mine)
		if p.request != nil {
			r := p.request
			q.request = &Request{
				Space: r.Space, Policy: r.Policy, Parts: slices.Clone(r.Parts), Done: r.Done, Count: r.Count,
				Ahead: r.Ahead, ofLease: r.ofLease,
			}
		}
		q.leases = &Leases{seed: p.leases.seed}
		if stripes := p.leases.Stripes.Load(); stripes != nil {
			of := new([leaseStripes]LeaseStripe)
			for i := range stripes {
				for k, e := range stripes[i].Keys {
					entry := *e
					entry.known.States = slices.Clone(e.known.States)
					if of[i].Keys == nil {
						of[i].Keys = map[leaseKey]*Lease{}
					}
					of[i].Keys[k] = &entry
				}
			}
			q.leases.Stripes.Store(of)
		}
		c.readClocks(&q)
		c.processes = append(c.processes, &q)
	}
	return &c
}

// call does a process's next step: it spends from a lease, sends a statement, decides the statement, or reads the
// answer.
func (w *leaseWorld) call(p *leaser, n int64) {
	switch {
	case p.request == nil:
		var result Outcome
		if p.leases.spend(p.space, p.rules, "key", n, &result) {
			told := result.DecidedAt.UnixMicro()
			w.leased += n
			w.use(p, leaseUse{at: w.clock, told: told, receipt: result.Claim.Receipt, first: result.Claim.first, n: n})
			return
		}
		ahead := p.leases.ahead(p.space, p.rules, "key", n)
		p.request = &Request{Space: p.space, Policy: p.rules, Count: 1 + ahead, Ahead: ahead, place: 1}
		p.request.Add(p.space, p.rules, "key", n, nil)
		p.asked, p.decided = w.read(p), false
	case !p.decided:
		w.decide(p.request)
		p.decided = true
		if r := p.request.Outcome(); r.Allowed { // without a lease, a use counts from the decision
			w.use(p, leaseUse{at: w.clock, told: r.DecidedAt.UnixMicro(), receipt: r.Claim.Receipt, n: r.Claim.Receipt.Left()})
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

func (w *leaseWorld) decide(r *Request) {
	r.decideIn(w.database(), w.clock)
	if row, ok := w.rows[r.Parts[0].row()].(memoryRow); ok && w.mistake == fillsUp { // forgets leased units
		row.State.Log = ""
		w.rows[r.Parts[0].row()] = row
	}
}

func (w *leaseWorld) database() *memdb.DB { return &memdb.DB{Rows: w.rows} }

// giveBack sends the units in a process's outbox. If the outbox is empty, it ends the leases that are due, or all
// leases if the argument all is true.
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
		p.leases.Stripes.Store(kept.Stripes.Load())
	}
}

func (w *leaseWorld) refund(of *Receipt, n int64, takes []model.Take) {
	r := &Request{Space: of.Space, Policy: of.Policy, Count: 1, place: 1}
	r.Add(of.Space, of.Policy, "key", -n, takes)
	w.decide(r)
}

func (w *leaseWorld) refundUse(p *leaser, i int) {
	u := &w.uses[p.mine[i]]
	p.mine = slices.Delete(p.mine, i, i+1)
	u.back = true
	w.refund(u.receipt, u.n, u.receipt.Between(u.first, u.first+u.n))
	if w.mistake == refundedTwice {
		w.refund(u.receipt, u.n, u.receipt.Between(u.first, u.first+u.n))
	}
}

// pass lets micros microseconds pass. The machine of one process may be suspended during this time.
func (w *leaseWorld) pass(micros int64, suspended *leaser) {
	w.clock += micros
	for _, p := range w.processes {
		passed := model.Duration(micros) - time.Duration(micros*p.slow)
		p.at.wall += passed
		if p != suspended {
			p.at.elapsed += passed
		}
	}
}

func (w *leaseWorld) crash(i int) { w.processes[i] = w.newProcess() }

// judge returns an error if the policy does not admit all uses that were not given back. It ignores leases.
func (w *leaseWorld) judge() error {
	window := model.Micros(w.policy.Numbers().Span)
	inWindow := map[int64]int64{}
	limit := w.policy.Numbers().Limit
	level, last := int64(0), int64(0)
	for _, u := range w.uses {
		if u.told > u.at+w.policy.Lasts()/1000 && !w.stepped { // because a process's clock may be a little fast
			return fmt.Errorf("a decision of %d says that it is of %d", u.at, u.told)
		}
		if w.stepped { // then judge by the times in the results
			u.at = u.told
		}
		if u.back {
			continue
		}
		if bucket, ok := w.policy.(model.TokenBucket); ok {
			if last == 0 {
				level, last = bucket.Full(), u.at
			}
			level, last = min(level+(u.at-last)*bucket.Refill, bucket.Full())-u.n*window, u.at
			if level < 0 {
				return fmt.Errorf("%d at %d from an empty bucket", u.n, u.at)
			}
			continue
		}
		in := u.receipt.Parts[0].In
		if u.at >= in+window {
			return fmt.Errorf("%d at %d, of the window from %d to %d", u.n, u.at, in, in+window)
		}
		inWindow[in] += u.n
		weighed := inWindow[in] * window
		forgotten := slices.ContainsFunc(w.resets, func(at int64) bool { return in-window < at && at <= in })
		if _, ok := w.policy.(model.SlidingWindow); ok && !w.stepped && !forgotten {
			weighed += inWindow[in-window] * (window - (u.at - in))
		}
		if weighed > limit*window {
			return fmt.Errorf("%d of %d in the window from %d, and %d in the one before", inWindow[in], limit, in,
				inWindow[in-window])
		}
	}
	return nil
}

// Two processes do their steps in every possible order, with a limit of 3. Both processes have called before, so their
// next call takes units ahead.
func TestLeasesInEveryOrder(t *testing.T) {
	t.Parallel()
	depth := min(5+testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)/4, 7)
	for name, policy := range map[string]model.Rules{
		"fixed":   model.FixedWindow{Limit: 3, Window: 800 * time.Millisecond},
		"sliding": model.SlidingWindow{Limit: 3, Window: 800 * time.Millisecond},
		"bucket":  model.TokenBucket{Capacity: 3, Refill: 1, Every: 4096 * time.Millisecond}, // a lease lasts 96 ms
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			leased := int64(0)
			require.NoError(t, inEveryOrder(newLeasingWorld(policy, noMistake), depth, &leased))
			require.Greater(t, leased, int64(100))
		})
		for _, mistake := range []leaseMistake{survivesItsWindow, returnedTwice, refundedTwice, spentAndReturned} {
			if _, bucket := policy.(model.TokenBucket); bucket && (mistake == survivesItsWindow || mistake == refundedTwice) {
				continue
			}
			t.Run(fmt.Sprint(name, " with mistake ", mistake), func(t *testing.T) {
				t.Parallel()
				require.Error(t, inEveryOrder(newLeasingWorld(policy, mistake), 7, new(int64)))
			})
		}
	}
}

// newLeasingWorld returns a world with two processes that take 2 units ahead at their next call.
func newLeasingWorld(policy model.Rules, mistake leaseMistake) *leaseWorld {
	w := newLeaseWorld(policy, 2, mistake)
	for _, p := range w.processes {
		for range 3 {
			w.call(p, 1)
		}
		p.wants(2)
		p.mine = nil
	}
	w.pass(policy.Lasts(), nil)
	w.uses = nil
	return w
}

// inEveryOrder tries each possible next step, and calls itself after each, until depth is 0.
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
				next.call(p, 1) // the database decides in the same step
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
