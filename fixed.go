package ratelimit

import (
	_ "embed"
	"fmt"
	"time"
)

// FixedWindow admits Limit per Window. A window starts at a key's first request after the window before has ended; it
// is not aligned to the wall clock. All that it admits may come at once, so around the edge of two windows 2 × Limit − 1 can
// pass within a moment (2 × Limit, if what opened the first one is given back); a [SlidingWindow] does not let that through.
//
// With FixedWindow{Limit: 10, Window: time.Minute}, a key that asks for 1 each second from 0 s on gets ten from 0 s to
// 9 s, is told at 10 s to retry after 50 s, and has ten again from 60 s on.
type FixedWindow struct {
	// Limit is how much a window admits, in units of cost: at least 1, and Limit × Window in microseconds at most 2^62.
	Limit int64
	// Window is the length of a window: whole microseconds, from 1 µs to 2^51 µs (71 years).
	Window time.Duration
}

var _ Policy = FixedWindow{}

//go:embed sql/call/fixed.sql
var fixedStatement string

// String is the policy as [ParsePolicy] reads it: fixed 100/1m.
func (p FixedWindow) String() string { return fmt.Sprintf("fixed %d/%s", p.Limit, spanText(p.Window)) }

func (p FixedWindow) validate() error   { return validateWindow(p.Limit, p.Window) }
func (p FixedWindow) limit() int64      { return p.Limit }
func (p FixedWindow) statement() string { return fixedStatement }
func (p FixedWindow) numbers() []any    { return []any{p.Limit, micros(p.Window)} }

func (p FixedWindow) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, micros(p.Window))
}

func (p FixedWindow) grant(s state, clock, n int64) (state, decision) {
	s = rollForward(p, s, clock)
	s = withCredit(s, max(clock, s.windowStart), micros(p.Window), n)
	return afterGrant(p, s, clock)
}

func (p FixedWindow) refund(s state, clock int64, t take) (state, decision) {
	row := rollForward(p, s, clock)
	back := int64(0)
	if row.windowStart == t.in {
		back = min(t.units-t.spent, row.count)
	}
	row.count -= back
	row, credited := withCreditBack(row, max(clock, row.windowStart), micros(p.Window), t)
	return afterRefund(p, s, row, clock, back > 0 || credited)
}

func (p FixedWindow) scaled(share float64) Policy {
	p.Limit = shareOf(p.Limit, share)
	return p
}

func (p FixedWindow) decide(s state, clock, n int64) (state, decision) {
	window := micros(p.Window)
	stored, moved := s, false

	// Roll the row forward to the clock.
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
	// A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
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
