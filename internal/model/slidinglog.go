package model

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// SlidingLog has the rules of ratelimit.SlidingLog.
type SlidingLog struct {
	Limit  int64
	Window time.Duration
}

var _ Rules = SlidingLog{}

const (
	// MaxLogLimit is the largest limit of a SlidingLog. With a full log, a request takes 60 µs of the server's CPU at a
	// Limit of 10, 80 µs at 100 (0.8 kB), and 110 µs at 1,000 (8 kB, stored outside of the row). A denial takes 50 to
	// 70 µs. A request to a SlidingWindow takes 70 µs.
	MaxLogLimit = 1000

	// MaxDenialEntries is the largest number of log entries in a Decision. A process denies later requests with these
	// entries: see Denials in internal/engine. Other requests cost a query each.
	MaxDenialEntries = 64
)

func (p SlidingLog) Lasts() int64 { return Micros(p.Window) }

func (p SlidingLog) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.SlidingLog, Limit: p.Limit, Span: p.Window}
}

// LeaseOf leases nothing, because the log stores when units were taken, not when a lease spends them.
func (p SlidingLog) LeaseOf(State, int64, int64) (spare, lasts int64) { return 0, 0 }

func (p SlidingLog) ResetAfter(last Decision, units int64) int64 {
	return creditResetAfter(last, units, p.Lasts())
}

func (p SlidingLog) Refund(s State, clock int64, t Take) (State, Decision) {
	rolled, moved := p.Roll(s, clock)
	now, back := max(clock, rolled.WindowStart), int64(0)
	s, credited := withCreditBack(s, rolled, now, p.Lasts(), t)
	if !moved {
		if _, back = rolled.Log.without(t.In, t.Units-t.Spent); back > 0 { // the log still counts the take
			if clock < rolled.WindowStart { // WindowStart may move back, so drop the entries that have left the window
				s.Log, s.Count = rolled.Log, rolled.Count
			}
			s.Log, _ = s.Log.without(t.In, back)
			s.Count -= back
		}
	}
	if newest := len(s.Log)/8 - 1; back > 0 && newest >= 0 {
		s.WindowStart = now - s.Log.Age(newest, now)
	}
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p SlidingLog) Roll(s State, clock int64) (rolled State, moved bool) {
	window := Micros(p.Window)
	if clock >= s.ExpiresAt || s.Count == 0 && s.Credit == 0 {
		s = State{WindowStart: clock, ExpiresAt: s.ExpiresAt}
	} else if s.WindowStart-clock > window { // the clock has jumped back, so the usage counts from now on
		s.Log = s.Log.Shifted(s.WindowStart - clock)
		s.WindowStart = clock
		s.ExpiresAt = clock + window
		moved = true
	}
	t := max(clock, s.WindowStart)
	for s.Log != "" && s.Log.Age(0, t) >= window {
		s.Count -= s.Log.Units(0)
		s.Log = s.Log[8:]
	}
	if s.Count == 0 {
		s.WindowStart = t
		s = s.unlessNew()
	}
	return s, moved
}

func (p SlidingLog) Decide(s State, clock, n int64) (State, Decision) {
	window := Micros(p.Window)
	stored := s
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
		if room > 0 {
			s.Log = s.Log.With(t, min(n, room))
			s.Count += min(n, room)
			s.WindowStart = t
		}
		s.Credit -= d.Taken.Spent
		s.ExpiresAt = t + window
		d.Granted = 1
		d.Remaining -= n
	}
	needed := Entries("") // the entries that determine RetryAfter
	switch ask := max(n, 1); {
	case d.Granted == 1 || n == 0 && d.Remaining > 0:
	case ask > p.Limit:
		d.RetryAfter = Never
	default:
		// The request fits once enough of the oldest entries have left. needed has at most MaxDenialEntries entries.
		over := s.Count - s.Credit + ask - p.Limit
		for i := 0; over > 0 && 8*i < len(s.Log); i++ {
			if over -= s.Log.Units(i); over <= 0 {
				d.RetryAfter = min(t+window-s.Log.Age(i, t), s.ExpiresAt) - clock
				needed = s.Log[:8*min(i+1, MaxDenialEntries)]
			}
		}
	}
	switch {
	case s.Credit > 0:
		d.ResetAfter = s.ExpiresAt - clock
	case s.Count > 0:
		d.ResetAfter = min(s.WindowStart+window, s.ExpiresAt) - clock
	}
	if changed {
		s.ExpiresAt = clock + d.ResetAfter
		stored = s
	}
	d.State = s
	d.State.Log = needed
	d.Taken.Units, d.Taken.Since, d.Taken.In = d.Granted*n, s.Since, s.WindowStart
	return stored, d
}
