package ratelimit

import (
	"cmp"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// rest is what is left of a lease, to be given back: units from one to before another.
type rest struct {
	space    *keyspace
	receipt  *receipt
	from, to int64
	ended    int64 // how many units are not held by the lease any more, these and those that were spent
}

// takes are what the database has to know to take it back.
func (r *rest) takes() []model.Take {
	takes := r.receipt.between(r.from, r.to)
	for i := range takes {
		takes[i].Ended = r.ended
	}
	return takes
}

// givenBack are the units of a lease that were given back after they had been spent, so that nobody gives one back
// twice. Neighbours are one range. So it takes 16 bytes for each gap, and no more if all is given back.
type givenBack struct {
	mu     sync.Mutex
	ranges []unitRange // they ascend, and do not touch
}

// unitRange are the units from one to before another.
type unitRange struct{ from, to int64 }

// leftover is how many of the units from the first one are left to give back. The last of them are given back first.
func (g *givenBack) leftover(first, units int64) int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.left(first, units)
}

// left is leftover with g.mu held.
func (g *givenBack) left(first, units int64) int64 {
	if i := g.find(first + units); i < len(g.ranges) && g.ranges[i].from < first+units {
		return max(g.ranges[i].from-first, 0)
	}
	return units
}

// find is the place of the first range that ends at a unit or later. g.mu is held.
func (g *givenBack) find(unit int64) int {
	i, _ := slices.BinarySearchFunc(g.ranges, unit, func(r unitRange, unit int64) int {
		return cmp.Compare(r.to, unit)
	})
	return i
}

// swap changes how much is left of the units from the first one, if it is still what it was.
func (g *givenBack) swap(first, units, was, left int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.left(first, units) != was {
		return false
	}
	from, to := first+min(was, left), first+max(was, left)
	i := g.find(from)
	if left > was { // it has not come back after all: these units leave their range
		r := g.ranges[i]
		rests := []unitRange{{r.from, from}, {to, r.to}}
		rests = slices.DeleteFunc(rests, func(r unitRange) bool { return r.from == r.to })
		g.ranges = slices.Replace(g.ranges, i, i+1, rests...)
		return true
	}
	merged, end := unitRange{from, to}, i
	for ; end < len(g.ranges) && g.ranges[end].from <= to; end++ {
		merged = unitRange{min(merged.from, g.ranges[end].from), max(merged.to, g.ranges[end].to)}
	}
	g.ranges = slices.Replace(g.ranges, i, end, merged)
	return true
}

// giving is what is on its way back.
type giving struct {
	rests []rest
	err   error         // why something did not arrive
	done  chan struct{} // closed when it has ended
}

// begin is called before leases end of which something is to be given back, so that nobody takes it to be back.
func (ls *leases) begin() *giving {
	g := &giving{done: make(chan struct{})}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.under == nil {
		ls.under = make(map[*giving]bool)
	}
	ls.under[g] = true
	return g
}

// end tells that all has gone back, or did not arrive.
func (ls *leases) end(g *giving) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.under, g)
	close(g.done)
}

// onTheirWay is all that is on its way back.
func (ls *leases) onTheirWay() []*giving {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.Collect(maps.Keys(ls.under))
}

// release ends the lease of a key of which not enough is left, so that this goes back before the call asks. It returns
// nil if nothing is left.
func (ls *leases) release(space *keyspace, key string) *giving {
	s := ls.shard(key)
	if s == nil {
		return nil
	}
	now := ls.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.keys[denialKey{space, key}]
	if e == nil || e.next == e.end {
		return nil
	}
	back, size := ls.begin(), e.outlived(now)
	back.rests = e.lapse(space)
	e.size = size
	return back
}

// forget ends the lease of a key that was just reset.
func (ls *leases) forget(space *keyspace, key string) {
	if space.lease == nil {
		return
	}
	now := ls.now()
	back, due := ls.drop(space, key, now)
	ls.wakeAt(due, now.elapsed)
	go ls.giveBack(back)
}

// drop is forget but for what others have to do. The lease goes back, because it may have been taken after the reset.
// What is on its way, and was asked for before, is not spent either.
func (ls *leases) drop(space *keyspace, key string, now instant) (back *giving, due time.Duration) {
	s := ls.make(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e, _ := s.entry(space, key, now.elapsed, true)
	back = ls.begin()
	back.rests = e.lapse(space)
	*e = lease{reset: now.elapsed, memory: space.lease.MaxLength}
	e.known.asked = now
	return back, e.due()
}

// wakeAt has the timer fire at a time at the latest.
func (ls *leases) wakeAt(at, now time.Duration) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.due != 0 && ls.due <= at {
		return
	}
	ls.due = at
	wait := max(at-now, shortestLease/2)
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
	back, next := ls.outdated(now)
	if next != model.Never {
		ls.wakeAt(next, now.elapsed)
	}
	ls.giveBack(back)
}

// outdated ends the leases that end soon, and forgets the keys that nobody asks for. It returns what is to be given
// back, and when it has to be called next.
func (ls *leases) outdated(now instant) (back *giving, next time.Duration) {
	next = model.Never
	back = ls.collect(func(e *lease) (lapse, forget bool) {
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
	return back, next
}

// all ends all leases, and returns what is to be given back.
func (ls *leases) all() *giving {
	return ls.collect(func(*lease) (lapse, forget bool) { return true, false })
}

// collect ends some leases, and returns what is left of them. Others it forgets.
func (ls *leases) collect(which func(*lease) (lapse, forget bool)) *giving {
	back := ls.begin()
	shards := ls.shards.Load()
	if shards == nil {
		return back
	}
	for i := range shards {
		s := &shards[i]
		s.mu.Lock()
		for k, e := range s.keys {
			switch lapse, forget := which(e); {
			case lapse:
				back.rests = append(back.rests, e.lapse(k.space)...)
			case forget:
				delete(s.keys, k)
			}
		}
		s.mu.Unlock()
	}
	return back
}
