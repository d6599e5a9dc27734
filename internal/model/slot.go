package model

import (
	"cmp"
	"slices"
)

// A slot is a hold of a Concurrency that is never settled, but released. A request that does not fit can wait: then it
// is a ticket, which stands in the line of its key until it becomes a slot. By the database's clock,
//
//   - never are more than Limit units live;
//   - a slot or a ticket that has ended is never live again;
//   - the fences of a key ascend;
//   - tickets of the same group become slots in the order in which they were made;
//   - a ticket that has ended, or that can never fit, holds nobody up.

// Ticket says who stands in line. Slots have it too. A plain hold has a zero Ticket.
type Ticket struct {
	Fence  int64 // the fence of a slot; the place in the line of a ticket
	Group  string
	Weight int64 // of Group; at least 1
	Limit  int64 // for a ticket, the Limit of its last renewal, or of the last request that waited in its line
}

// Want is a request for a slot.
type Want struct {
	ID, Units, TTL int64 // the ID is new
	Group          string
	Weight         int64
	Wait           bool // stand in line if the slot is not free
}

// Acquired is the answer to a request for a slot.
type Acquired struct {
	Decision Decision
	Hold     *Hold // the slot or the ticket; nil if the request is denied
}

// Acquire makes a slot if its units fit and nobody stands in line. Otherwise it makes a ticket, if the request waits.
// RetryAfter says when the units may fit: when they fit beside the live holds, and if there is a line, not before the
// next hold ends.
//
// For example, of a Limit of 3, one slot holds 2, and the next request wants 2. It waits, and gets the first place in
// the line. A request for 1 would fit, but it gets the second place, so that small requests do not keep out a big one.
func (k Key) Acquire(m Concurrency, clock int64, w Want) (Key, Acquired) {
	_, held := k.live(clock)
	free := k.lineEnd(m, clock) == 0 && w.Units <= m.Limit-held
	switch {
	case w.Units > m.Limit:
		_, d := k.Decide(m, clock, w.Units)
		return k, Acquired{d, nil}
	case !free && !w.Wait:
		return k, k.acquired(m, clock, w.Units, nil)
	}
	next, _ := k.write(m, clock)
	if w.Wait {
		for i := range next.Holds {
			if next.Holds[i].Status == Waiting {
				next.Holds[i].Limit = m.Limit
			}
		}
	}
	next.Fence++
	h := Hold{
		ID: w.ID, Units: w.Units, End: clock + w.TTL, Status: Waiting,
		Ticket: Ticket{Fence: next.Fence, Group: w.Group, Weight: w.Weight, Limit: m.Limit},
	}
	if free {
		h.Status = Live
	}
	next.Holds = append(next.Holds, h)
	next = next.handOver(clock)
	h = next.Holds[next.findSlot(w.ID)]
	return next, next.acquired(m, clock, w.Units, &h)
}

// findSlot returns the index of a slot or a ticket, or -1.
func (k Key) findSlot(id int64) int {
	return slices.IndexFunc(k.Holds, func(h Hold) bool { return h.ID == id && h.Fence > 0 })
}

// lives returns whether the hold is a live slot or a ticket in line.
func (h Hold) lives(clock int64) bool {
	return (h.Status == Live || h.Status == Waiting) && clock < h.End
}

// waits returns whether the hold is a ticket in line that can ever fit into the limit.
func (h Hold) waits(clock, limit int64) bool {
	return h.Status == Waiting && h.lives(clock) && h.Units <= limit
}

// lineEnd returns the first end of a ticket in line, or 0 if there is no line.
func (k Key) lineEnd(m Concurrency, clock int64) (first int64) {
	for _, h := range k.Holds {
		if h.waits(clock, m.Limit) && (first == 0 || h.End < first) {
			first = h.End
		}
	}
	return first
}

// acquired returns the answer to a request for n units. h is its slot or ticket, or nil.
func (k Key) acquired(m Concurrency, clock, n int64, h *Hold) Acquired {
	_, d := k.Decide(m, clock, 0)
	d.RetryAfter = 0
	if h != nil && h.Status == Live {
		d.Granted = 1
		return Acquired{d, h}
	}
	d.RetryAfter = k.earliest(clock, func(held, after int64) int64 {
		return fitsAfter(m, State{}, clock, n, held, after)
	})
	if first := k.lineEnd(Concurrency{MaxSlots}, clock); first > 0 {
		if live, _ := k.live(clock); len(live) > 0 {
			first = live[0].End
		}
		d.RetryAfter = max(d.RetryAfter, first-clock)
	}
	return Acquired{d, h}
}

// Release frees a slot, or takes a ticket out of the line. The error is ErrHoldUnknown if it is not live.
func (k Key) Release(clock, id int64) (Key, Hold, error) {
	i := k.findSlot(id)
	if i < 0 || !k.Holds[i].lives(clock) {
		return k, Hold{}, ErrHoldUnknown
	}
	was := k.Holds[i]
	next, _ := k.write(Concurrency{}, clock)
	next.Holds = slices.DeleteFunc(next.Holds, func(h Hold) bool { return h.ID == id })
	return next.handOver(clock), was, nil
}

// Renew makes the slots and tickets that are live last for at least ttl, and returns them. The others are lost. limits
// has the ids of them, each with the Limit that a ticket is served by from now on, or with 0 if its Limit stays.
//
// For example, two tickets of 1 unit wait for a Limit of 1, which a slot holds. The policy's Limit is raised to 2. The
// next renewal of the first ticket makes it a slot.
func (k Key) Renew(clock int64, limits map[int64]int64, ttl int64) (next Key, live []Hold) {
	named := func(h Hold) bool {
		_, ok := limits[h.ID]
		return ok && h.Fence > 0 && h.lives(clock)
	}
	next, _ = k.write(Concurrency{}, clock)
	for i := range next.Holds {
		if h := &next.Holds[i]; named(*h) {
			h.End = max(h.End, clock+ttl)
			h.Limit = cmp.Or(limits[h.ID], h.Limit)
		}
	}
	next = next.handOver(clock)
	for _, h := range next.Holds {
		if named(h) {
			live = append(live, h)
		}
	}
	return next, live
}

// handOver removes tickets that have ended, and makes slots of the next tickets as long as they fit. Next is the group
// that holds least for its weight, and of this group the first ticket. If several groups hold as much, the first of
// their tickets is next. A next ticket that does not fit stops the line. The slot keeps its ticket's end: so its holder
// knows by its own clock until when it has the slot, even if it hears of it late. k is prepared by write.
func (k Key) handOver(clock int64) Key {
	k.Holds = slices.DeleteFunc(k.Holds, func(h Hold) bool { return h.Status == Waiting && h.End <= clock })
	for i := range k.Holds {
		if h := &k.Holds[i]; h.Status == Waiting {
			h.End = min(h.End, clock+Micros(MaxHold)) // the clock was set back
		}
	}
	for {
		next := k.next(clock)
		if next < 0 || k.Holds[next].Units > k.Holds[next].Limit-k.Held(clock) {
			return k
		}
		k.Fence++
		k.Holds[next].Status, k.Holds[next].Fence = Live, k.Fence
	}
}

// next returns the index of the next ticket, or -1.
func (k Key) next(clock int64) int {
	held := map[string]int64{}
	first := map[string]int{} // the first ticket of each group
	for i, h := range k.Holds {
		switch {
		case h.Status == Live && h.Fence > 0:
			held[h.Group] += h.Units
		case h.waits(clock, h.Limit):
			if j, ok := first[h.Group]; !ok || h.Fence < k.Holds[j].Fence {
				first[h.Group] = i
			}
		}
	}
	next := -1
	for _, i := range first {
		if next < 0 || k.before(i, next, held) {
			next = i
		}
	}
	return next
}

// before returns whether ticket i is served before ticket j of another group.
func (k Key) before(i, j int, held map[string]int64) bool {
	a, b := k.Holds[i], k.Holds[j]
	return cmp.Or(cmp.Compare(held[a.Group]*b.Weight, held[b.Group]*a.Weight), cmp.Compare(a.Fence, b.Fence)) < 0
}

// Has returns whether a slot or a ticket was made with the id, and is remembered.
func (k Key) Has(id int64) bool { return k.findSlot(id) >= 0 }
