package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// fixedWindow is the rules of a FixedWindow.
type fixedWindow struct {
	Limit  int64
	Window time.Duration
}

var _ rules = fixedWindow{}

func (p fixedWindow) Lasts() int64 { return micros(p.Window) }

func (p fixedWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.FixedWindow, Limit: p.Limit, Span: p.Window}
}

func (p fixedWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	window := micros(p.Window)
	return never, min(longest, window/leasesInWindow, min(s.windowStart+window, s.expiresAt)-clock)
}

func (p fixedWindow) ResetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.Lasts())
}

func (p fixedWindow) Refund(s state, clock int64, t take) (state, decision) {
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	if t.in == s.windowStart && t.in == rolled.windowStart {
		back = min(t.units-t.spent, rolled.count)
	}
	s.count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p fixedWindow) Roll(s state, clock int64) (rolled state, moved bool) {
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

func (p fixedWindow) Decide(s state, clock, n int64) (state, decision) {
	window, stored := micros(p.Window), s
	s, moved := p.Roll(s, clock)
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
