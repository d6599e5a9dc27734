package model

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// FixedWindow has the rules of ratelimit.FixedWindow.
type FixedWindow struct {
	Limit  int64
	Window time.Duration
}

var _ Rules = FixedWindow{}

func (p FixedWindow) Lasts() int64 { return Micros(p.Window) }

func (p FixedWindow) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.FixedWindow, Limit: p.Limit, Span: p.Window}
}

func (p FixedWindow) LeaseOf(s State, clock, longest int64) (spare, lasts int64) {
	window := Micros(p.Window)
	return Never, min(longest, window/leasesInWindow, min(s.WindowStart+window, s.ExpiresAt)-clock)
}

func (p FixedWindow) ResetAfter(last Decision, units int64) int64 {
	return creditResetAfter(last, units, p.Lasts())
}

func (p FixedWindow) Refund(s State, clock int64, t Take) (State, Decision) {
	rolled, _ := p.Roll(s, clock)
	back := int64(0)
	if t.In == s.WindowStart && t.In == rolled.WindowStart {
		back = min(t.Units-t.Spent, rolled.Count)
	}
	s.Count -= back
	s, credited := withCreditBack(s, rolled, max(clock, rolled.WindowStart), p.Lasts(), t)
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p FixedWindow) Roll(s State, clock int64) (rolled State, moved bool) {
	window := Micros(p.Window)
	if clock >= s.ExpiresAt || s.Count == 0 && s.Credit == 0 {
		s = State{WindowStart: clock, ExpiresAt: s.ExpiresAt}
	} else if s.WindowStart-clock > window { // the clock has jumped back, so the usage counts from now on
		s.WindowStart = clock
		s.ExpiresAt = clock + window
		moved = true
	}
	t := max(clock, s.WindowStart)
	if t-s.WindowStart >= window || s.Count == 0 {
		s.Count, s.WindowStart = 0, t
		s = s.unlessNew()
	}
	return s, moved
}

func (p FixedWindow) Decide(s State, clock, n int64) (State, Decision) {
	window, stored := Micros(p.Window), s
	s, moved := p.Roll(s, clock)
	t := max(clock, s.WindowStart)
	// A denial writes the row only if the clock has jumped far behind the row. Without this write, the row would deny
	// until the clock catches up.
	changed := moved && 0 < n && n <= p.Limit

	room := max(p.Limit-s.Count, 0)
	d := Decision{Remaining: room + s.Credit}
	if 0 < n && n <= min(d.Remaining, p.Limit) {
		changed = true
		d.Taken.Spent = max(n-room, 0)
		s.Count += n - d.Taken.Spent
		s.Credit -= d.Taken.Spent
		s.ExpiresAt = t + window
		d.Granted = 1
		d.Remaining -= n
	}
	end := min(s.WindowStart+window, s.ExpiresAt)
	switch {
	case d.Granted == 1 || n == 0 && d.Remaining > 0:
	case n > p.Limit:
		d.RetryAfter = Never
	default:
		d.RetryAfter = end - clock
	}
	switch {
	case s.Credit > 0:
		d.ResetAfter = s.ExpiresAt - clock
	case s.Count > 0:
		d.ResetAfter = end - clock
	}
	if changed {
		s.ExpiresAt = clock + d.ResetAfter
		stored = s
	}
	d.State = s
	d.Taken.Units, d.Taken.Since, d.Taken.In = d.Granted*n, s.Since, s.WindowStart
	return stored, d
}
