package model

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// SlidingWindow has the rules of ratelimit.SlidingWindow.
type SlidingWindow struct {
	Limit  int64
	Window time.Duration
}

var _ Rules = SlidingWindow{}

func (p SlidingWindow) Lasts() int64 { return 2 * Micros(p.Window) }

func (p SlidingWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.SlidingWindow, Limit: p.Limit, Span: p.Window}
}

func (p SlidingWindow) LeaseOf(s State, clock, longest int64) (spare, lasts int64) {
	window := Micros(p.Window)
	return Never, min(longest, window/leasesInWindow, min(s.WindowStart+window, s.ExpiresAt)-clock)
}

func (p SlidingWindow) ResetAfter(last Decision, units int64) int64 {
	return creditResetAfter(last, units, p.Lasts())
}

func (p SlidingWindow) Refund(s State, clock int64, t Take) (State, Decision) {
	window := Micros(p.Window)
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	switch from := rolled.WindowStart - s.WindowStart; {
	case from == 0 && t.In == s.WindowStart:
		back = min(t.Units-t.Spent, rolled.Count)
		s.Count -= back
	case from == 0 && t.In == s.WindowStart-window:
		back = min(t.Units-t.Spent, rolled.PrevCount)
		s.PrevCount -= back
	case from == window && t.In == s.WindowStart: // the refund is one window later than s, and s is not rolled forward
		back = min(t.Units-t.Spent, rolled.PrevCount)
		s.Count -= back
	}
	s, credited := withCreditBack(s, rolled, max(clock, rolled.WindowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p SlidingWindow) Roll(s State, clock int64) (rolled State, moved bool) {
	window := Micros(p.Window)
	if clock >= s.ExpiresAt || s.Count == 0 && s.PrevCount == 0 && s.Credit == 0 {
		s = State{WindowStart: clock, ExpiresAt: s.ExpiresAt}
	} else if s.WindowStart-clock > window { // the clock has jumped back, so the usage counts from now on
		s.WindowStart = clock
		s.ExpiresAt = clock + window
		if s.Count > 0 || s.Credit > 0 {
			s.ExpiresAt += window
		}
		moved = true
	}
	t := max(clock, s.WindowStart)
	switch age := t - s.WindowStart; {
	case age >= 2*window || s.Count == 0 && (s.PrevCount == 0 || age >= window):
		s.PrevCount, s.Count, s.WindowStart = 0, 0, t
		s = s.unlessNew()
	case age >= window:
		s.PrevCount, s.Count = s.Count, 0
		s.WindowStart += window
	}
	return s, moved
}

func (p SlidingWindow) Decide(s State, clock, n int64) (State, Decision) {
	window, stored := Micros(p.Window), s
	s, moved := p.Roll(s, clock)
	t := max(clock, s.WindowStart)

	// A denial writes the row only if the clock has jumped far behind the row. Without this write, the row would deny
	// until the clock catches up.
	changed := moved && 0 < n && n <= p.Limit

	// rest is how much of the current window remains. The same share of the previous window still counts. weight is
	// this share of PrevCount, rounded up.
	rest := s.WindowStart + window - t
	weight := p.Limit
	// Divide instead of multiplying, because PrevCount × rest can overflow after a policy with a larger limit.
	if s.PrevCount == 0 || rest <= p.Limit*window/s.PrevCount {
		weight = CeilDiv(s.PrevCount*rest, window)
	}

	room := max(p.Limit-s.Count-weight, 0)
	d := Decision{Remaining: room + s.Credit}
	if 0 < n && n <= min(d.Remaining, p.Limit) {
		changed = true
		d.Taken.Spent = max(n-room, 0)
		s.Count += n - d.Taken.Spent
		s.Credit -= d.Taken.Spent
		s.ExpiresAt = t + 2*window
		d.Granted = 1
		d.Remaining -= n
	}
	switch ask := max(n, 1) - s.Credit; {
	case d.Granted == 1 || n == 0 && d.Remaining > 0:
	case n > p.Limit:
		d.RetryAfter = Never
	case ask <= p.Limit-s.Count: // ask + Count could overflow
		// The request fits into this window once PrevCount × rest has fallen to the free part of Limit × Window.
		d.RetryAfter = min(t+rest-(p.Limit-s.Count-ask)*window/s.PrevCount, s.ExpiresAt) - clock
	default:
		// The request fits only into the next window, where Count becomes PrevCount.
		d.RetryAfter = min(t+rest+window-(p.Limit-ask)*window/s.Count, s.ExpiresAt) - clock
	}
	switch {
	case s.Credit > 0:
		d.ResetAfter = s.ExpiresAt - clock
	case s.Count > 0:
		d.ResetAfter = min(s.WindowStart+2*window, s.ExpiresAt) - clock
	case s.PrevCount > 0:
		d.ResetAfter = min(s.WindowStart+window, s.ExpiresAt) - clock
	}
	if changed {
		s.ExpiresAt = clock + d.ResetAfter
		stored = s
	}
	d.State = s
	d.Taken.Units, d.Taken.Since, d.Taken.In = d.Granted*n, s.Since, s.WindowStart
	return stored, d
}
