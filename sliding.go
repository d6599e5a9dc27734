package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// SlidingWindow admits Limit in any Window, estimated from two counters. They are what was taken in the current
// window, and what was taken in the one before, times the share of it that a window ending now still covers. This
// smooths the edge of a [FixedWindow], with the same two numbers per key. The estimate is exact for traffic that
// was spread evenly over the window before. The comparison is always exact, in whole microseconds.
//
// A window starts at a key's first request after two windows without any. While requests go on, windows follow
// each other without a gap. A request of cost n, at time e of the current window, is allowed if
//
//	prev × (Window − e) + (count + n) × Window ≤ Limit × Window
//
// With SlidingWindow{Limit: 50, Window: time.Minute}, 40 taken in the window before and 10 in this one, which is
// 15 s old: 40 × 0.75 + 10 = 40, and 10 more are allowed. With 10 a minute, all taken at 0 s, a request at 5 s is
// told to retry after 61 s: at 60 s all 10 still count, and at 66 s nine tenths of them do.
type SlidingWindow struct {
	Limit  int64         // in units of cost: at least 1, and Limit × Window in microseconds at most 2^62
	Window time.Duration // whole microseconds, from 1 µs to 2^51 µs (71 years)
}

var _ model = SlidingWindow{}

func (p SlidingWindow) String() string { return p.numbers().String() }

func (p SlidingWindow) models() []model { return []model{p} }
func (p SlidingWindow) validate() error { return validateWindow(p.Limit, p.Window) }
func (p SlidingWindow) lasts() int64    { return 2 * micros(p.Window) }

func (p SlidingWindow) numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.SlidingWindow, Limit: p.Limit, Span: p.Window}
}

func (p SlidingWindow) leaseOf(s state, clock, longest int64) (spare, lasts int64) {
	window := micros(p.Window)
	return never, min(longest, window/leasesInWindow, min(s.windowStart+window, s.expiresAt)-clock)
}

func (p SlidingWindow) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.lasts())
}

func (p SlidingWindow) refund(s state, clock int64, t take) (state, decision) {
	window := micros(p.Window)
	rolled, _ := p.roll(s, clock)
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
	s, credited := withCreditBack(s, rolled, max(clock, rolled.windowStart), p.lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p SlidingWindow) roll(s state, clock int64) (rolled state, moved bool) {
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

func (p SlidingWindow) decide(s state, clock, n int64) (state, decision) {
	window, stored := micros(p.Window), s
	s, moved := p.roll(s, clock)
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
