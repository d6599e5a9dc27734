package engine

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Random stories of five processes, their clocks and the database. In some stories, somebody sets the database's clock,
// and the windows are judged by the times in the results.
func TestLeasesInStories(t *testing.T) {
	t.Parallel()
	for name, policy := range storyPolicies {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			leased, seed := int64(0), testkit.Seed(t, modeltest.SeedVariable)
			for story := range uint64(60 * testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)) {
				w := newLeaseWorld(policy, 5, noMistake)
				w.tell(rand.New(rand.NewPCG(seed, story)))
				leased += w.leased
				require.NoError(t, w.judge(), "story %d", story)
			}
			require.Greater(t, leased, int64(20_000*testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)))
		})
	}
}

var storyPolicies = map[string]model.Rules{
	"fixed":    model.FixedWindow{Limit: 1000, Window: 800 * time.Millisecond},
	"sliding":  model.SlidingWindow{Limit: 1000, Window: 800 * time.Millisecond},
	"bucket":   model.TokenBucket{Capacity: 1000, Refill: 1000, Every: 13 * time.Second}, // a lease lasts 101 ms
	"calendar": model.CalendarWindow{Limit: 1000, Span: time.Minute, Zone: "UTC"},
}

func TestMistakesInLeasesShowInStories(t *testing.T) {
	t.Parallel()
	for name, policy := range storyPolicies {
		for _, mistake := range []leaseMistake{
			survivesItsWindow, fullBucket, wrongClock, sinceTheAnswer, returnedTwice, spentAndReturned, fillsUp,
		} {
			_, bucket := policy.(model.TokenBucket)
			_, calendar := policy.(model.CalendarWindow)
			// A bucket keeps some room empty, so the wrong clock did no harm in 10,000 stories of a bucket.
			if bucket && (mistake == survivesItsWindow || mistake == wrongClock) ||
				!bucket && (mistake == fullBucket || mistake == fillsUp) ||
				calendar && mistake != survivesItsWindow { // the fixed window shows the other mistakes
				continue
			}
			t.Run(fmt.Sprint(name, " with mistake ", mistake), func(t *testing.T) {
				t.Parallel()
				seed := testkit.Seed(t, modeltest.SeedVariable)
				for story := uint64(0); ; story++ {
					require.Less(t, story, uint64(100_000), "nothing was noticed")
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

// wants makes the process take size units ahead at the next call, whatever its demand is.
func (p *leaser) wants(size int64) {
	if s := p.leases.stripe("key"); s != nil {
		for _, e := range s.Keys {
			if e.receipt == nil {
				e.size = size
			}
		}
	}
}

func (w *leaseWorld) tell(r *rand.Rand) {
	_, longest := w.policy.LeaseOf(model.State{WindowStart: w.clock, Scale: model.Micros(time.Minute), ExpiresAt: model.Never}, w.clock, 6e7)
	_, bucket := w.policy.(model.TokenBucket)
	steps := !bucket && r.IntN(3) == 0
	busy := r.IntN(2) == 0 // demand always exceeds the limit
	for _, p := range w.processes {
		p.slow = r.Int64N(6) - 3
		for range 3 { // after three calls, a process takes units ahead
			w.call(p, 1)
		}
		p.wants(r.Int64N(500))
	}
	w.pass(w.policy.Lasts(), nil)
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
		case 5: // suspend a machine whose wall clock nobody sets
			if i%2 == 0 {
				w.pass(r.Int64N(longest), p)
			}
		case 6, 7, 8:
			w.pass(r.Int64N(longest), nil)
		case 9:
			if !busy || r.IntN(4) == 0 {
				w.pass(r.Int64N(2*w.policy.Lasts()), nil)
			}
		case 10:
			if i%2 == 1 {
				p.at.wall += model.Duration(r.Int64N(4*longest) - 3*longest)
			}
		case 11:
			if steps {
				w.stepped = true
				w.clock += r.Int64N(3*w.policy.Lasts()) - w.policy.Lasts()
			}
		case 12:
			if !bucket && r.IntN(10) == 0 {
				w.pass(1, nil) // so that the next window begins at another time
				clear(w.rows)
				w.resets = append(w.resets, w.clock)
			}
		case 13: // the process takes another number of units ahead
			p.wants(r.Int64N(500))
		case 16: // lease from a full bucket, with refunds and returns
			if !bucket {
				continue
			}
			w.pass(w.policy.Lasts(), nil)
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
				p.leases.learn(p.request, ErrNotTried, p.asked, w.read(p))
				p.request = nil
			}
		case 14: // all processes take all that they can get
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
			held := p.leases.Held(p.space, p.rules, "key")
			w.call(p, max(held, 1+r.Int64N(100)>>(round/8)))
		}
	}
}

// A refund leaves room in the bucket for units that are still leased.
func TestLeasesOfABucketThatOthersGiveBackTo(t *testing.T) {
	t.Parallel()
	for _, refund := range []bool{false, true} {
		for _, mistake := range []leaseMistake{noMistake, fillsUp} {
			w := newLeaseWorld(model.TokenBucket{Capacity: 1000, Refill: 1000, Every: 13 * time.Second}, 2, mistake)
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
			w.pass(w.policy.Lasts(), nil)
			w.uses = nil

			ask(first, 9) // during a lease, 9 tokens flow in
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
			held := second.leases.Held(second.space, second.rules, "key")
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

// If a reset comes during a statement, units taken before the reset are not spent, and units taken after it go back.
func TestResetWhileALeaseIsOnItsWay(t *testing.T) {
	t.Parallel()
	for _, before := range []bool{false, true} {
		w := newLeasingWorld(model.FixedWindow{Limit: 3, Window: 800 * time.Millisecond}, noMistake)
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
		p.leases.drop(p.space, "key", p.at)
		w.call(p, 1) // the process reads the answer
		require.Zero(t, p.leases.Held(p.space, p.rules, "key"))
		require.Len(t, p.outbox, 1)
		w.giveBack(p, false)
		left := &Request{Space: p.space, Policy: p.rules, Count: 1, place: 1}
		left.Add(p.space, p.rules, "key", 0, nil)
		left.decideIn(w.database(), w.clock)
		require.Equal(t, map[bool]int64{false: 2, true: 3}[before], left.Parts[0].Decision.Remaining)
	}
}

// Answers arrive in any order. A process knows a key's state from the answer to the latest decision.
func TestLeasesKnowTheLatest(t *testing.T) {
	t.Parallel()
	w := newLeaseWorld(model.FixedWindow{Limit: 1000, Window: time.Hour}, 1, noMistake)
	p := w.processes[0]
	hear := func(later time.Duration, remaining int64) int64 {
		r := &Request{Space: p.space, Policy: p.rules, Count: 1, place: 1}
		r.Add(p.space, p.rules, "key", 1, nil)
		r.Parts[0].Decision = model.Decision{
			Granted: 1, Remaining: remaining, DecidedAt: time.UnixMicro(w.clock).Add(later),
			State: model.State{WindowStart: w.clock, ExpiresAt: model.Never},
		}
		p.leases.learn(r, nil, p.at, p.at)
		return p.leases.stripe("key").Keys[leaseKey{p.space, "key"}].known.Remaining
	}
	require.EqualValues(t, 900, hear(time.Second, 900))
	require.EqualValues(t, 900, hear(0, 950))
	require.EqualValues(t, 800, hear(2*time.Second, 800))
}

// Only the answer to a take of a lease shows which units of a bucket are leased. Later answers do not overwrite these
// units.
func TestLeasesRememberWhatIsLeased(t *testing.T) {
	t.Parallel()
	w := newLeaseWorld(model.TokenBucket{Capacity: 1000, Refill: 1, Every: time.Second}, 1, noMistake)
	p := w.processes[0]
	hear := func(ahead int64, log model.Entries) model.Entries {
		r := &Request{Space: p.space, Policy: p.rules, Count: 1 + ahead, Ahead: ahead, place: 1}
		r.Add(p.space, p.rules, "key", 1, nil)
		r.Parts[0].Decision = model.Decision{
			Granted: 1 + ahead, Remaining: 900, DecidedAt: time.UnixMicro(w.clock), State: model.State{Log: log, ExpiresAt: model.Never},
		}
		p.leases.learn(r, nil, p.at, p.at)
		return p.leases.stripe("key").Keys[leaseKey{p.space, "key"}].known.States[0].Log
	}
	leased := model.NewEntries([]int64{w.clock, 7, 0})
	require.Empty(t, hear(0, ""))
	require.Equal(t, leased, hear(3, leased))
	require.Equal(t, leased, hear(0, ""))
	require.Empty(t, hear(3, ""))
}

// holdsTwo returns a world with a process that leases 2 of 3 units, for at most 100 ms.
func holdsTwo(t *testing.T) (*leaseWorld, *leaser) {
	t.Helper()
	w := newLeasingWorld(model.FixedWindow{Limit: 3, Window: 800 * time.Millisecond}, noMistake)
	p := w.processes[0]
	for range 3 {
		w.call(p, 1)
	}
	require.EqualValues(t, 2, p.held())
	return w, p
}

func (p *leaser) held() int64 { return p.leases.Held(p.space, p.rules, "key") }

// By the database's clock, no lease lasts longer than its length, whatever the process's clocks show.
func TestLeasesEndByTheDatabasesClock(t *testing.T) {
	t.Parallel()
	for name, pass := range map[string]func(w *leaseWorld, p *leaser){
		"slow":      func(w *leaseWorld, p *leaser) { p.slow = 3; w.pass(100_000, nil) },
		"suspended": func(w *leaseWorld, p *leaser) { w.pass(100_000, p) },
		"set back":  func(w *leaseWorld, p *leaser) { w.pass(100_000, nil); p.at.wall -= time.Hour },
	} {
		w, p := holdsTwo(t)
		pass(w, p)
		require.Zero(t, p.held(), name)
	}
}

// A lease ends when an answer for the key shows that the database's clock was set forward beyond the lease's end.
func TestLeaseEndsWhenTheClockIsSetForward(t *testing.T) {
	t.Parallel()
	w, p := holdsTwo(t)
	hear := func() { // reads the answer to a call from before the lease
		p.request = &Request{Space: p.space, Policy: p.rules, Count: 1, place: 1}
		p.request.Add(p.space, p.rules, "key", 1, nil)
		p.decided = false
		w.call(p, 1)
		w.call(p, 1)
	}
	w.clock += 99_608
	hear()
	require.EqualValues(t, 2, p.held())
	w.clock++
	hear()
	require.Zero(t, p.held())
	require.Len(t, p.outbox, 1)
}

// During a flood of keys, a reset is remembered until the answers to earlier statements have come.
func TestResetWhileALeaseIsOnItsWayInAFlood(t *testing.T) {
	t.Parallel()
	w := newLeasingWorld(model.FixedWindow{Limit: 3, Window: 800 * time.Millisecond}, noMistake)
	p := w.processes[0]
	w.call(p, 1)
	w.call(p, 1)
	clear(w.rows)
	w.pass(1, nil)
	p.leases.drop(p.space, "key", p.at)
	for i := range 2 * MaxLeased {
		r := &Request{Space: p.space, Policy: p.rules, Count: 1, place: 1}
		r.Add(p.space, p.rules, fmt.Sprint("flood ", i), 1, nil)
		w.decide(r)
		p.leases.learn(r, nil, p.at, p.at)
	}
	w.call(p, 1)
	require.Zero(t, p.leases.Held(p.space, p.rules, "key"))
}
