package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// FixedWindow admits Limit per Window. A window starts at a key's first request after the one before has ended,
// not by the wall clock. All of it may come at once, so around the edge of two windows 2 × Limit − 1 can pass
// within a moment, or 2 × Limit if what opened the first one is given back. A [SlidingWindow] prevents that.
//
// With FixedWindow{Limit: 10, Window: time.Minute}, a key that asks for 1 each second gets ten from 0 s to 9 s. At
// 10 s it is told to retry after 50 s, and from 60 s on it has ten again.
type FixedWindow struct {
	Limit  int64         // in units of cost: at least 1, and Limit × Window in microseconds at most 2^62
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

var _ model = FixedWindow{}

func (p FixedWindow) String() string { return p.numbers().String() }

func (p FixedWindow) models() []model { return []model{p} }
func (p FixedWindow) validate() error { return validateWindow(p.Limit, p.Window) }
func (p FixedWindow) lasts() int64    { return micros(p.Window) }

func (p FixedWindow) numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.FixedWindow, Limit: p.Limit, Span: p.Window}
}

func (p FixedWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	window := micros(p.Window)
	return never, min(longest, window/leasesInWindow, min(s.windowStart+window, s.expiresAt)-clock)
}

func (p FixedWindow) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.lasts())
}

func (p FixedWindow) refund(s state, clock int64, t take) (state, decision) {
	rolled, _ := p.roll(s, clock)
	back := int64(0)
	if t.in == s.windowStart && t.in == rolled.windowStart {
		back = min(t.units-t.spent, rolled.count)
	}
	s.count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p FixedWindow) roll(s state, clock int64) (rolled state, moved bool) {
	window := micros(p.Window)
	if clock >= s.expiresAt || s.count == 0 && s.credit == 0 {
		s = state{windowStart: clock, expiresAt: s.expiresAt}
	} else if s.windowStart-clock > window { // the clock has jumped back: keep the usage, from now on
		s.windowStart = clock
		s.expiresAt = clock + window
		moved = true
	}
	t := max(clock, s.windowStart)
	if t-s.windowStart >= window || s.count == 0 {
		s.count, s.windowStart = 0, t
		s = s.unlessNew()
	}
	return s, moved
}

func (p FixedWindow) decide(s state, clock, n int64) (state, decision) {
	window, stored := micros(p.Window), s
	s, moved := p.roll(s, clock)
	t := max(clock, s.windowStart)
	// A denial writes nothing, except to a row that the clock has left behind. Left as it is, it would deny for
	// ever.
	changed := moved && 0 < n && n <= p.Limit

	room := max(p.Limit-s.count, 0)
	d := decision{remaining: room + s.credit}
	if 0 < n && n <= min(d.remaining, p.Limit) {
		changed = true
		d.taken.spent = max(n-room, 0)
		s.count += n - d.taken.spent
		s.credit -= d.taken.spent
		s.expiresAt = t + window
		d.granted = 1
		d.remaining -= n
	}
	end := min(s.windowStart+window, s.expiresAt)
	switch {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case n > p.Limit:
		d.retryAfter = never
	default:
		d.retryAfter = end - clock
	}
	switch {
	case s.credit > 0:
		d.resetAfter = s.expiresAt - clock
	case s.count > 0:
		d.resetAfter = end - clock
	}
	if changed {
		s.expiresAt = clock + d.resetAfter
		stored = s
	}
	d.state = s
	d.taken.units, d.taken.since, d.taken.in = d.granted*n, s.since, s.windowStart
	return stored, d
}
