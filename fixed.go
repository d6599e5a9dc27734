package ratelimit

import (
	_ "embed"
	"fmt"
	"time"
)

// FixedWindow admits Limit per Window. A window starts at a key's first request after the window before has ended; it
// is not aligned to the wall clock. All that it admits may come at once, so around the edge of two windows 2 × Limit − 1 can
// pass within a moment; a [SlidingWindow] does not let that through.
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

func (p FixedWindow) resetAfter(last decision, _ int64) int64 { return last.resetAfter }

func (p FixedWindow) scaled(share float64) Policy {
	p.Limit = shareOf(p.Limit, share)
	return p
}

func (p FixedWindow) decide(s state, clock, n int64) (state, decision) {
	window := micros(p.Window)
	stored, moved := s, false

	// Roll the row forward to the clock.
	if clock >= s.expiresAt {
		s = state{windowStart: clock, expiresAt: s.expiresAt}
	} else if s.windowStart-clock > window { // the clock has jumped back: keep the usage, from now on
		s.windowStart = clock
		s.expiresAt = clock + window
		moved = true
	}
	t := max(clock, s.windowStart)
	if t-s.windowStart >= window {
		s = state{windowStart: t, expiresAt: s.expiresAt}
	}
	end := s.windowStart + window
	if s.count > 0 {
		end = min(end, s.expiresAt)
	}

	d := decision{remaining: max(p.Limit-s.count, 0)}
	if 0 < n && n <= d.remaining {
		s.count += n
		d.granted = 1
		d.remaining -= n
		s.expiresAt = s.windowStart + window
		end = s.expiresAt
	}
	switch {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case n > p.Limit:
		d.retryAfter = never
	default:
		d.retryAfter = end - clock
	}
	if s.count > 0 {
		d.resetAfter = end - clock
	}
	// A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
	if d.granted == 0 && (!moved || n == 0 || n > p.Limit) {
		d.state = s
		return stored, d
	}
	s.expiresAt = s.windowStart + window
	d.state = s
	return s, d
}
