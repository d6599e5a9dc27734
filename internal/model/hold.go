package model

import (
	"cmp"
	"errors"
	"slices"
	"time"
)

// A hold sets units of a key aside until a given time, its end. A hold is not usage. It only leaves less room for
// requests, whatever the algorithm. When n units are admitted, then
//
//	what the policy counts + the units of live holds + n ≤ the limit + granted credit
//
// by the database's clock. Holds belong to the key and not to its algorithm, so they stay when the policy changes. They
// always count in full: in a sliding window, and in the next window if they outlive a window. A bucket refills up to
// its capacity, including the held tokens.
//
// Each hold stops being live exactly once: when it is settled or when it ends.

// The bounds of the time for which a hold can be made or extended.
const (
	MinHold = time.Millisecond
	MaxHold = 24 * time.Hour
)

// A hold that nobody settles is remembered for HoldsKept after its end. A settled hold is remembered for SettledKept
// after its settlement, so that a repetition gets the first answer. Most holds are settled, so SettledKept determines
// how many rows a busy database has.
const (
	HoldsKept   = 24 * time.Hour
	SettledKept = time.Hour
)

// A call that returns one of these errors has changed nothing.
var (
	// ErrHoldUnknown is returned for a hold that was never made, or is forgotten.
	ErrHoldUnknown = errors.New("no such hold")
	// ErrHoldEnded is returned for an Extend of a hold that has ended or is settled.
	ErrHoldEnded = errors.New("the hold has ended")
	// ErrOwesTooMuch is returned for a settlement that is larger than a charge could be. The hold stays as it is.
	ErrOwesTooMuch = errors.New("the key would owe too much")
)

// HoldStatus tells whether a hold is live. A hold never becomes live again.
type HoldStatus int

// The statuses of a hold. Live may be out of date: see Hold.
const (
	Live HoldStatus = iota
	Ended
	Settled
	Waiting // a ticket: see Acquire
)

// Hold is a hold of a key.
type Hold struct {
	ID    int64
	Units int64
	End   int64 // from this time on, the hold is not live
	// Status changes from Live to Ended with the first write to the key at End or later. So a clock that steps back
	// cannot revive a hold when other requests may have got its room.
	Status     HoldStatus
	Settlement // set if the hold is settled
	Ticket     // set if the hold is a slot or a ticket
}

// Forgotten returns whether the hold is not known any more.
func (h Hold) Forgotten(clock int64) bool {
	if h.Status == Settled {
		return h.At+Micros(SettledKept) <= clock
	}
	return h.End+Micros(HoldsKept) <= clock
}

// Settlement is the answer to a settlement, and to each repetition of the settlement.
type Settlement struct {
	Used int64 // the number of units that were counted
	Late bool  // the hold had ended
	At   int64 // when the hold was settled
}

// Key is a row with the holds of its key. Only the methods Hold and Acquire add a hold.
type Key struct {
	State State
	Holds []Hold
	Fence int64 // the last fence
}

// write prepares the key for a write at this time. It records which holds have ended, and forgets holds that ended or
// were settled long ago. The result moved tells whether the clock jumped back, so that the row or the end of a hold was
// moved back with it.
func (k Key) write(m Rules, clock int64) (written Key, moved bool) {
	written.Fence = k.Fence
	if written.State, moved = m.Roll(k.State, clock); moved {
		_, d := m.Decide(written.State, clock, 0)
		written.State.ExpiresAt = clock + d.ResetAfter
	} else {
		written.State = k.State
	}
	for _, h := range k.Holds {
		switch {
		case h.Forgotten(clock):
			continue
		case h.Status == Live && h.End <= clock:
			h.Status = Ended
		case h.Status == Live && h.End-clock > Micros(MaxHold):
			h.End = clock + Micros(MaxHold)
			moved = true
		}
		written.Holds = append(written.Holds, h)
	}
	return written, moved
}

// live returns the live holds in the order of their ends, and the sum of their units.
func (k Key) live(clock int64) (live []Hold, held int64) {
	for _, h := range k.Holds {
		if h.Status == Live && clock < h.End {
			live = append(live, h)
			held += h.Units
		}
	}
	slices.SortFunc(live, func(a, b Hold) int { return cmp.Compare(a.End, b.End) })
	return live, held
}

// Held returns how many units are held.
func (k Key) Held(clock int64) int64 {
	_, held := k.live(clock)
	return held
}

// told adapts the decision d of the row alone to the key's holds. The key is as good as new when the row is as good as
// new and the last hold has ended.
func (k Key) told(d Decision, clock int64) Decision {
	live, held := k.live(clock)
	d.Remaining, d.Held = max(d.Remaining-held, 0), held
	if held > 0 {
		d.ResetAfter = max(d.ResetAfter, live[len(live)-1].End-clock)
	}
	return d
}

// changed applies a change to the row, and ignores the holds.
func (k Key) changed(m Rules, clock int64, change func(State) (State, Decision)) (Key, Decision) {
	next := k
	s, d := change(k.State)
	if s != k.State {
		next, _ = k.write(m, clock)
		next.State = s
	}
	return next, next.told(d, clock)
}

// Decide takes n as Rules.Decide does, if n fits beside the holds. RetryAfter says when n fits if no hold is settled,
// cancelled or extended. For example, a window of 10 counts 3 and ends in 30 s. A hold of 4 ends in 10 s, and a hold of
// 2 in 20 s. Now 1 unit remains. A request for 5 fits after 10 s, for 6 after 20 s, and for 8 after 30 s.
func (k Key) Decide(m Rules, clock, n int64) (Key, Decision) {
	limit := m.Numbers().Limit
	_, held := k.live(clock)
	_, d := k.changed(m, clock, func(s State) (State, Decision) { return m.Decide(s, clock, 0) })
	if held == 0 || 0 < n && n <= min(d.Remaining, limit) {
		return k.changed(m, clock, func(s State) (State, Decision) { return m.Decide(s, clock, n) })
	}
	return k.denied(m, clock, n, limit, func(s State, held, after int64) int64 {
		return fitsAfter(m, s, clock, max(n, 1), held, after)
	})
}

// denied returns a denial of n, or the answer to a Peek. See earliest.
func (k Key) denied(
	m Rules, clock, n, limit int64, fits func(s State, held, after int64) int64,
) (Key, Decision) {
	if written, moved := k.write(m, clock); moved && 0 < n && n <= limit { // see FixedWindow.Decide
		k = written
	}
	_, d := m.Decide(k.State, clock, 0)
	d = k.told(d, clock)
	d.State.Log = "" // a client cannot decide by the log, because it does not know the holds
	switch {
	case n > limit:
		d.RetryAfter = Never
	case n == 0 && d.Remaining > 0:
	default:
		rolled, _ := m.Roll(k.State, clock)
		d.RetryAfter = k.earliest(clock, func(held, after int64) int64 { return fits(rolled, held, after) })
	}
	return k, d
}

// earliest returns how long it takes until a request fits, if nothing happens except that holds end. The function
// fits() returns the same time if a number of units stays held. Its result is at least the argument after, or Never.
func (k Key) earliest(clock int64, fits func(held, after int64) int64) int64 {
	live, held := k.live(clock)
	best := fits(held, 0)
	for _, h := range live {
		held -= h.Units
		best = min(best, fits(held, h.End-clock))
	}
	return best
}

// fitsAfter returns how long it takes until n units fit into a row beside the held units. The result is at least the
// argument after, or Never. The row is rolled forward.
func fitsAfter(m Rules, s State, clock, n, held, after int64) int64 {
	numbers := m.Numbers()
	// Held units and granted credit cancel out, but the held units stay when the credit expires with the row.
	byCredit := min(held, s.Credit)
	onlyByCredit := held > numbers.Limit-n
	if held-byCredit > numbers.Limit-n {
		return Never
	}
	s.Credit -= byCredit
	_, d := m.Decide(s, clock, n+held-byCredit)
	wait := max(d.RetryAfter, after)
	if onlyByCredit && clock+wait >= s.ExpiresAt {
		return Never
	}
	return wait
}

// Hold holds n units for the time ttl, if a take of n would be allowed now. It takes nothing. The id must be new.
func (k Key) Hold(m Rules, clock, id, n, ttl int64) (Key, Decision) {
	if denied, d := k.Decide(m, clock, n); d.Granted == 0 {
		return denied, d
	}
	next, _ := k.write(m, clock)
	next.Holds = append(next.Holds, Hold{ID: id, Units: n, End: clock + ttl})
	_, d := next.Decide(m, clock, 0)
	d.Granted, d.RetryAfter = 1, 0
	return next, d
}

// Settle ends a hold and charges what was used, if the hold is not settled yet. If the hold is settled already, it
// changes nothing and repeats the answer. A hold that has ended can still be settled. Its units have been free since
// its end, so the used units count as in a Charge. A settlement of 0 cancels the hold.
//
// For example, a window of 1,000 counts 500, and a hold of 300 is settled with 250 used units. Then 500 + 250 are
// counted, nothing is held, and 250 remain.
func (k Key) Settle(m Rules, clock, id, used int64) (Key, Settlement, error) {
	next, _ := k.write(m, clock)
	i := next.find(id)
	if i < 0 {
		return k, Settlement{}, ErrHoldUnknown
	}
	h := &next.Holds[i]
	if h.Status == Settled {
		return k, h.Settlement, nil
	}
	s, charged, _ := Charge(m, next.State, clock, used)
	if charged.Granted == 0 {
		return k, Settlement{}, ErrOwesTooMuch
	}
	next.State = s
	h.Settlement = Settlement{Used: used, Late: h.Status == Ended, At: clock}
	h.Status = Settled
	return next, h.Settlement, nil
}

// Extend makes a live hold last for at least ttl from now.
func (k Key) Extend(m Rules, clock, id, ttl int64) (Key, error) {
	next, _ := k.write(m, clock)
	i := next.find(id)
	switch {
	case i < 0:
		return k, ErrHoldUnknown
	case next.Holds[i].Status != Live:
		return k, ErrHoldEnded
	}
	next.Holds[i].End = max(next.Holds[i].End, clock+ttl)
	return next, nil
}

// find returns the index of a hold, or -1. A slot or a ticket cannot be settled or extended.
func (k Key) find(id int64) int {
	return slices.IndexFunc(k.Holds, func(h Hold) bool { return h.ID == id && h.Fence == 0 })
}

// Charge charges n beside the holds. The result fits is the largest charge: see the function Charge.
func (k Key) Charge(m Rules, clock, n int64) (next Key, d Decision, fits int64) {
	next, d = k.changed(m, clock, func(s State) (State, Decision) {
		s, d, fits = Charge(m, s, clock, n)
		return s, d
	})
	if d.Granted == 0 {
		_, d = k.Decide(m, clock, 0)
	}
	return next, d, fits
}

// Refund gives back a take beside the holds.
func (k Key) Refund(m Rules, clock int64, t Take) (Key, Decision) {
	return k.changed(m, clock, func(s State) (State, Decision) { return m.Refund(s, clock, t) })
}

// Grant grants n beside the holds.
func (k Key) Grant(m Rules, clock, n int64) (Key, Decision) {
	return k.changed(m, clock, func(s State) (State, Decision) { return Grant(m, s, clock, n) })
}

// Reset makes the key as good as new. Its holds end, and nobody waits any more.
func (k Key) Reset() Key {
	next := Key{Fence: k.Fence, Holds: slices.DeleteFunc(slices.Clone(k.Holds), func(h Hold) bool {
		return h.Status == Waiting
	})}
	for i := range next.Holds {
		next.Holds[i].Status = max(next.Holds[i].Status, Ended)
	}
	return next
}
