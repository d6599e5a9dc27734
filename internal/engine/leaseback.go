package engine

import (
	"maps"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// rest describes the unused units of a lease. These units have to go back to the database.
type rest struct {
	space    *Space
	receipt  *Receipt
	from, to int64
	ended    int64 // how many units the lease no longer holds: the unused ones and the spent ones
}

// takes returns the takes that a request needs in order to give the units back.
func (r *rest) takes() []model.Take {
	takes := r.receipt.Between(r.from, r.to)
	for i := range takes {
		takes[i].Ended = r.ended
	}
	return takes
}

// giving is a number of unused units that this process is giving back to the database.
type giving struct {
	rests []rest
	err   error         // why some units did not go back
	done  chan struct{} // closed when the giving has ended
}

// begin starts a giving. It must be called before the leases end, so that ReturnLeases waits for their units.
func (ls *Leases) begin() *giving {
	g := &giving{done: make(chan struct{})}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.returning == nil {
		ls.returning = make(map[*giving]bool)
	}
	ls.returning[g] = true
	return g
}

// end ends a giving, even if its units could not go back.
func (ls *Leases) end(g *giving) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	delete(ls.returning, g)
	close(g.done)
}

// onTheirWay returns all givings that have not ended yet.
func (ls *Leases) onTheirWay() []*giving {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return slices.Collect(maps.Keys(ls.returning))
}

// endLease ends a lease that has too few units for a call. Its unused units go back before the call asks the database.
// endLease returns nil if there are no unused units.
func (ls *Leases) endLease(space *Space, key string) *giving {
	s := ls.stripe(key)
	if s == nil {
		return nil
	}
	now := ls.now()
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.Keys[leaseKey{space, key}]
	if e == nil || e.next == e.end {
		return nil
	}
	back, size := ls.begin(), e.outlived(now)
	back.rests = e.lapse(space)
	e.size = size
	return back
}

// forget ends the lease of a key after a reset.
func (ls *Leases) forget(space *Space, key string) {
	if space.Lease == nil {
		return
	}
	now := ls.now()
	back, due := ls.drop(space, key, now)
	ls.wakeAt(due, now.elapsed)
	go ls.giveBack(back)
}

// drop ends the lease of a key after a reset. It returns the unused units, and the time for wakeAt. The units go back,
// because they may have been taken after the reset. If a statement is still taking another lease of the key, that lease
// will not be spent.
func (ls *Leases) drop(space *Space, key string, now instant) (back *giving, due time.Duration) {
	s := ls.Make(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	e, _ := s.Entry(space, key, now.elapsed, true)
	back = ls.begin()
	back.rests = e.lapse(space)
	*e = Lease{reset: now.elapsed, memory: space.Lease.MaxLength}
	e.known.asked = now
	return back, e.due()
}

// wakeAt makes the timer fire no later than the time in the argument at.
func (ls *Leases) wakeAt(at, now time.Duration) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if ls.Due != 0 && ls.Due <= at {
		return
	}
	ls.Due = at
	wait := max(at-now, ShortestLease/2)
	if ls.timer == nil {
		ls.timer = time.AfterFunc(wait, ls.tidy)
	} else {
		ls.timer.Reset(wait)
	}
}

// tidy gives back the unused units of leases that end soon. It also deletes the entries of keys that nobody asks for.
func (ls *Leases) tidy() {
	ls.mu.Lock()
	ls.Due = 0
	ls.mu.Unlock()
	now := ls.now()
	back, next := ls.outdated(now)
	if next != model.Never {
		ls.wakeAt(next, now.elapsed)
	}
	ls.giveBack(back)
}

// outdated ends the leases that end soon, and deletes the entries of keys that nobody asks for. It returns the unused
// units, and the time of the next call of outdated.
func (ls *Leases) outdated(now instant) (back *giving, next time.Duration) {
	next = model.Never
	back = ls.collect(func(e *Lease) (lapse, forget bool) {
		// Leases that are due a little later end now too, so that one statement is enough for all of them.
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

func (ls *Leases) all() *giving {
	return ls.collect(func(*Lease) (lapse, forget bool) { return true, false })
}

// collect calls the function which() for each entry. It ends the lease if the result lapse is true, and deletes the
// entry if the result forget is true. It returns the unused units of the ended leases.
func (ls *Leases) collect(which func(*Lease) (lapse, forget bool)) *giving {
	back := ls.begin()
	stripes := ls.Stripes.Load()
	if stripes == nil {
		return back
	}
	for i := range stripes {
		s := &stripes[i]
		s.mu.Lock()
		for k, e := range s.Keys {
			switch lapse, forget := which(e); {
			case lapse:
				back.rests = append(back.rests, e.lapse(k.space)...)
			case forget:
				delete(s.Keys, k)
			}
		}
		s.mu.Unlock()
	}
	return back
}

func (e *Engine) giveBack(back *giving) { e.sendBack(back)() }

// sendBack queues the requests that return unused units. The function wait() waits until these requests are decided.
func (e *Engine) sendBack(back *giving) (wait func()) {
	requests := make([]*Request, len(back.rests))
	for i, left := range back.rests {
		r := e.Requests.Get(left.space, left.receipt.Policy)
		r.Add(left.space, left.receipt.Policy, left.receipt.Key, left.from-left.to,
			left.takes())
		r.ofLease = true
		requests[i] = r
	}
	e.Queues.submitAll(requests)
	return func() {
		for i, r := range requests {
			<-r.Done
			use := LeaseUse{Limiter: back.rests[i].space.Name}
			if units := back.rests[i].to - back.rests[i].from; r.Err == nil {
				use.Returned = units
			} else {
				use.Stranded, back.err = units, r.Err
			}
			e.Leases.tell(use)
			e.Requests.Put(r)
		}
		e.Leases.end(back)
	}
}
