package model

import (
	"cmp"
	"errors"
	"slices"
	"time"
)

// A hold sets units of a key aside until an end. It is no usage: it only leaves less room for others, whatever the
// algorithm. At each admission of n,
//
//	what the policy counts + the units of live holds + n ≤ the limit + granted credit
//
// by the database's clock. Holds belong to the key and not to its algorithm, so they stay when the policy changes, and
// they weigh in full: in a sliding window, in the next window if they outlive one, and in a bucket, which refills up to
// its capacity, held tokens included.
//
// Each hold stops being live once: it is settled, or it ends.

// The bounds of the time for which a hold can be made or extended.
const (
	MinHold = time.Millisecond
	MaxHold = 24 * time.Hour
)

// HoldsKept is how long a hold is remembered after its end and its settlement.
const HoldsKept = 24 * time.Hour

// These errors change nothing.
var (
	// ErrHoldUnknown is returned for a hold that was never made, or is forgotten.
	ErrHoldUnknown = errors.New("no such hold")
	// ErrHoldEnded is returned for an Extend of a hold that has ended or is settled.
	ErrHoldEnded = errors.New("the hold has ended")
	// ErrOwesTooMuch is returned for a settlement that is larger than a charge could be. The hold stays as it is.
	ErrOwesTooMuch = errors.New("the key would owe too much")
)

// HoldStatus tells whether a hold is live. It never becomes live again.
type HoldStatus int

// The statuses of a hold. Live may be out of date: see Hold.
const (
	Live HoldStatus = iota
	Ended
	Settled
)

// Hold is a hold of a key.
type Hold struct {
	ID    int64
	Units int64
	End   int64 // from then on, it is not live
	// Status changes from Live to Ended with the first write to the key from End on, so that a clock that steps back
	// cannot revive a hold whose room others may have got.
	Status     HoldStatus
	Settlement // if it is settled
}

// Settlement is the answer to a settlement, and to each repetition of it.
type Settlement struct {
	Used int64 // counted
	Late bool  // the hold had ended
	At   int64 // when it was settled
}

// Key is a row with the holds of its key. Only Hold adds one.
type Key struct {
	State State
	Holds []Hold
}

// write returns the key as a write at this time leaves it, but for what it writes. It records which holds have ended,
// and forgets those that ended or were settled long ago. moved tells whether the clock jumped back, so that the row or
// the end of a hold was moved back with it.
func (k Key) write(m Rules, clock int64) (written Key, moved bool) {
	if written.State, moved = m.Roll(k.State, clock); moved {
		_, d := m.Decide(written.State, clock, 0)
		written.State.ExpiresAt = clock + d.ResetAfter
	} else {
		written.State = k.State
	}
	for _, h := range k.Holds {
		switch {
		case max(h.End, h.At)+Micros(HoldsKept) <= clock:
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

// told returns what the decision d of the row alone is with the key's holds. The key is as good as new when the row is
// and the last hold has ended.
func (k Key) told(d Decision, clock int64) Decision {
	live, held := k.live(clock)
	d.Remaining = max(d.Remaining-held, 0)
	if held > 0 {
		d.ResetAfter = max(d.ResetAfter, live[len(live)-1].End-clock)
	}
	return d
}

// changed is a change of the row that ignores the holds.
func (k Key) changed(m Rules, clock int64, change func(State) (State, Decision)) (Key, Decision) {
	next := k
	s, d := change(k.State)
	if s != k.State {
		next, _ = k.write(m, clock)
		next.State = s
	}
	return next, next.told(d, clock)
}

// Decide takes n as Rules.Decide does, if it fits beside the holds. RetryAfter then is when it fits if no hold is
// settled, cancelled or extended. For example, 10 are the limit of a window with 30 s left, 3 are taken, a hold of 4
// ends in 10 s and one of 2 in 20 s: 1 remains, a request of 5 fits after 10 s, one of 6 after 20 s, and one of 8 after
// 30 s.
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

// denied is a denial of n, or a Peek. See earliest.
func (k Key) denied(
	m Rules, clock, n, limit int64, fits func(s State, held, after int64) int64,
) (Key, Decision) {
	if written, moved := k.write(m, clock); moved && 0 < n && n <= limit { // see FixedWindow.Decide
		k = written
	}
	_, d := m.Decide(k.State, clock, 0)
	d = k.told(d, clock)
	d.State.Log = "" // a client cannot decide by it, because it does not know the holds
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

// earliest returns how long it takes until a request fits, if nothing happens but that holds end. fits returns how long
// it takes, but at least after, if this many units stay held, or Never.
func (k Key) earliest(clock int64, fits func(held, after int64) int64) int64 {
	live, held := k.live(clock)
	best := fits(held, 0)
	for _, h := range live {
		held -= h.Units
		best = min(best, fits(held, h.End-clock))
	}
	return best
}

// fitsAfter returns how long it takes until n fits into a row beside held units: at least after, or Never. The row is
// rolled forward.
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

// Hold holds n for ttl if a take of n would be allowed now. It takes nothing. The id must be new.
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

// Settle ends a hold and charges what was used, if the hold is not settled yet. Otherwise it changes nothing and gives
// the first answer. A hold that has ended can still be settled. Its units were free since its end, so used counts as a
// Charge would. A settlement of 0 cancels the hold.
//
// For example, a hold of 300 that is settled at 250 in a window of 1,000 which counts 500 leaves 250: 500 + 250 are
// counted, and nothing is held.
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

// Extend lets a live hold end at least ttl from now.
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

func (k Key) find(id int64) int {
	return slices.IndexFunc(k.Holds, func(h Hold) bool { return h.ID == id })
}

// Charge charges n beside the holds. fits is the largest charge: see the function Charge.
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

// Reset makes the key as good as new. Its holds end.
func (k Key) Reset() Key {
	next := Key{Holds: slices.Clone(k.Holds)}
	for i := range next.Holds {
		next.Holds[i].Status = max(next.Holds[i].Status, Ended)
	}
	return next
}
