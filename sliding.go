package ratelimit

import (
	_ "embed"
	"fmt"
	"time"
)

// SlidingWindow admits Limit in any Window, as estimated from two counters: what was taken in the current window, and what
// was taken in the one before, times the share of that one which a window ending now still covers. It smooths the edge
// that a [FixedWindow] has, for the same two numbers per key; the estimate is exact for traffic that is spread evenly over the
// window before. The comparison itself is exact, in whole microseconds.
//
// A window starts at a key's first request after two windows without any; while requests go on, windows follow each other
// without a gap. Let e be the time since the current one started: a request of cost n is allowed if
//
//	prev × (Window − e) + (count + n) × Window ≤ Limit × Window
//
// With SlidingWindow{Limit: 50, Window: time.Minute}, 40 taken in the window before and 10 in this one, which is 15 s old:
// 40 × 0.75 + 10 = 40, and 10 more are allowed. With a Limit of 10 per minute, and 10 taken at 0 s, a request at 5 s is told
// to retry after 61 s: at 60 s all 10 still count, and at 66 s nine tenths of them do.
type SlidingWindow struct {
	// Limit is how much a window admits, in units of cost: at least 1, and Limit × Window in microseconds at most 2^62.
	Limit int64
	// Window is the length of a window: whole microseconds, from 1 µs to 2^51 µs (71 years).
	Window time.Duration
}

var _ Policy = SlidingWindow{}

//go:embed sql/call/sliding.sql
var slidingStatement string

// String is the policy as [ParsePolicy] reads it: sliding 100/1m.
func (p SlidingWindow) String() string {
	return fmt.Sprintf("sliding %d/%s", p.Limit, spanText(p.Window))
}

func (p SlidingWindow) validate() error   { return validateWindow(p.Limit, p.Window) }
func (p SlidingWindow) limit() int64      { return p.Limit }
func (p SlidingWindow) statement() string { return slidingStatement }
func (p SlidingWindow) numbers() []any    { return []any{p.Limit, micros(p.Window)} }

func (p SlidingWindow) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, 2*micros(p.Window))
}

func (p SlidingWindow) grant(s state, clock, n int64) (state, decision) {
	s = rollForward(p, s, clock)
	s = withCredit(s, max(clock, s.windowStart), 2*micros(p.Window), n)
	return afterGrant(p, s, clock)
}

func (p SlidingWindow) refund(s state, clock int64, t take) (state, decision) {
	row := rollForward(p, s, clock)
	back := int64(0)
	switch t.in {
	case row.windowStart:
		back = min(t.units-t.spent, row.count)
		row.count -= back
	case row.windowStart - micros(p.Window):
		back = min(t.units-t.spent, row.prevCount)
		row.prevCount -= back
	}
	row, credited := withCreditBack(row, max(clock, row.windowStart), 2*micros(p.Window), t)
	return afterRefund(p, s, row, clock, back > 0 || credited)
}

func (p SlidingWindow) scaled(share float64) Policy {
	p.Limit = shareOf(p.Limit, share)
	return p
}

func (p SlidingWindow) decide(s state, clock, n int64) (state, decision) {
	window := micros(p.Window)
	stored, moved := s, false

	// Roll the row forward to the clock.
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

	// A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
	changed := moved && 0 < n && n <= p.Limit

	// rest is how long the current window still lasts, and so how much of the window before is still covered;
	// weight is what that one still weighs, rounded up.
	rest := s.windowStart + window - t
	weight := p.Limit
	// A prevCount that an older, larger limit has left could overflow the product; this asks by division.
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
		// Only into the next window, where count takes the place of prevCount.
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
