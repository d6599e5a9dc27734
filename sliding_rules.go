package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// slidingWindow is the rules of a SlidingWindow.
type slidingWindow struct {
	Limit  int64
	Window time.Duration
}

var _ rules = slidingWindow{}

func (p slidingWindow) Lasts() int64 { return 2 * micros(p.Window) }

func (p slidingWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.SlidingWindow, Limit: p.Limit, Span: p.Window}
}

func (p slidingWindow) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	window := micros(p.Window)
	return never, min(longest, window/leasesInWindow, min(s.windowStart+window, s.expiresAt)-clock)
}

func (p slidingWindow) ResetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.Lasts())
}

func (p slidingWindow) Refund(s state, clock int64, t take) (state, decision) {
	window := micros(p.Window)
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	switch from := rolled.windowStart - s.windowStart; {
	case from == 0 && t.in == s.windowStart:
		back = min(t.units-t.spent, rolled.count)
		s.count -= back
	case from == 0 && t.in == s.windowStart-window:
		back = min(t.units-t.spent, rolled.prevCount)
		s.prevCount -= back
	case from == window && t.in == s.windowStart: // a window later than the row, which stays as it is
		back = min(t.units-t.spent, rolled.prevCount)
		s.count -= back
	}
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p slidingWindow) Roll(s state, clock int64) (rolled state, moved bool) {
	window := micros(p.Window)
	if clock >= s.expiresAt || s.count == 0 && s.prevCount == 0 && s.credit == 0 {
		s = state{windowStart: clock, expiresAt: s.expiresAt}
	} else if s.windowStart-clock > window { // the clock has jumped back: keep the usage, from now on
		s.windowStart = clock
		s.expiresAt = clock + window
		if s.count > 0 || s.credit > 0 {
			s.expiresAt += window
		}
		moved = true
	}
	t := max(clock, s.windowStart)
	switch age := t - s.windowStart; {
	case age >= 2*window || s.count == 0 && (s.prevCount == 0 || age >= window):
		s.prevCount, s.count, s.windowStart = 0, 0, t
		s = s.unlessNew()
	case age >= window:
		s.prevCount, s.count = s.count, 0
		s.windowStart += window
	}
	return s, moved
}

func (p slidingWindow) Decide(s state, clock, n int64) (state, decision) {
	window, stored := micros(p.Window), s
	s, moved := p.Roll(s, clock)
	t := max(clock, s.windowStart)

	// A denial writes nothing, except to a row that the clock has left behind. Left as it is, it would deny for ever.
	changed := moved && 0 < n && n <= p.Limit

	// rest is how long the current window still lasts, and so how much of the window before is still covered.
	// weight is what that one still weighs, rounded up.
	rest := s.windowStart + window - t
	weight := p.Limit
	// A prevCount that an older, larger limit has left could overflow the product, so this divides.
	if s.prevCount == 0 || rest <= p.Limit*window/s.prevCount {
		weight = ceilDiv(s.prevCount*rest, window)
	}

	room := max(p.Limit-s.count-weight, 0)
	d := decision{remaining: room + s.credit}
	if 0 < n && n <= min(d.remaining, p.Limit) {
		changed = true
		d.taken.spent = max(n-room, 0)
		s.count += n - d.taken.spent
		s.credit -= d.taken.spent
		s.expiresAt = t + 2*window
		d.granted = 1
		d.remaining -= n
	}
	switch ask := max(n, 1) - s.credit; {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case n > p.Limit:
		d.retryAfter = never
	case ask <= p.Limit-s.count: // the sum could overflow
		// It fits into this window, once prevCount × rest has fallen to what is left of Limit × Window.
		d.retryAfter = min(t+rest-(p.Limit-s.count-ask)*window/s.prevCount, s.expiresAt) - clock
	default:
		// It fits only into the next window, where count takes the place of prevCount.
		d.retryAfter = min(t+rest+window-(p.Limit-ask)*window/s.count, s.expiresAt) - clock
	}
	switch {
	case s.credit > 0:
		d.resetAfter = s.expiresAt - clock
	case s.count > 0:
		d.resetAfter = min(s.windowStart+2*window, s.expiresAt) - clock
	case s.prevCount > 0:
		d.resetAfter = min(s.windowStart+window, s.expiresAt) - clock
	}
	if changed {
		s.expiresAt = clock + d.resetAfter
		stored = s
	}
	d.state = s
	d.taken.units, d.taken.since, d.taken.in = d.granted*n, s.since, s.windowStart
	return stored, d
}
