package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// slidingLog is the rules of a SlidingLog.
type slidingLog struct {
	Limit  int64
	Window time.Duration
}

var _ rules = slidingLog{}

const (
	// maxLogLimit is the largest limit of a SlidingLog. With a full log, the server's CPU needs 60 µs for a request
	// with a Limit of 10, 80 µs with 100 (0.8 kB) and 110 µs with 1,000 (8 kB, which are kept out of the row), and 50
	// to 70 µs for a denial. A SlidingWindow needs 70 µs.
	maxLogLimit = 1000

	// maxDenialEntries is how many entries a decision has at most. A denial is remembered by them (see denials). A
	// larger request, for which more of them have to leave, costs a query each time, but no memory.
	maxDenialEntries = 64
)

func (p slidingLog) Lasts() int64 { return micros(p.Window) }

func (p slidingLog) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.SlidingLog, Limit: p.Limit, Span: p.Window}
}

// leaseOf leases nothing, because the log has the times at which units were taken, not those at which they are spent.
func (p slidingLog) LeaseOf(state, int64, int64) (spare, lasts int64) { return 0, 0 }

func (p slidingLog) ResetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, p.Lasts())
}

func (p slidingLog) Refund(s state, clock int64, t take) (state, decision) {
	rolled, moved := p.Roll(s, clock)
	now, back := max(clock, rolled.windowStart), int64(0)
	s, credited := withCreditBack(s, rolled, now, p.Lasts(), t)
	if !moved {
		if _, back = rolled.log.without(t.in, t.units-t.spent); back > 0 { // it still counts
			if clock < rolled.windowStart { // the row's time may fall, but what has left does not come back
				s.log, s.count = rolled.log, rolled.count
			}
			s.log, _ = s.log.without(t.in, back)
			s.count -= back
		}
	}
	if newest := len(s.log)/8 - 1; back > 0 && newest >= 0 {
		s.windowStart = now - s.log.age(newest, now)
	}
	return afterRefund(p, s, clock, back > 0 || credited)
}

func (p slidingLog) Roll(s state, clock int64) (rolled state, moved bool) {
	window := micros(p.Window)
	if clock >= s.expiresAt || s.count == 0 && s.credit == 0 {
		s = state{windowStart: clock, expiresAt: s.expiresAt}
	} else if s.windowStart-clock > window { // the clock has jumped back: keep the usage, from now on
		s.log = s.log.shifted(s.windowStart - clock)
		s.windowStart = clock
		s.expiresAt = clock + window
		moved = true
	}
	t := max(clock, s.windowStart)
	for s.log != "" && s.log.age(0, t) >= window {
		s.count -= s.log.units(0)
		s.log = s.log[8:]
	}
	if s.count == 0 {
		s.windowStart = t
		s = s.unlessNew()
	}
	return s, moved
}

func (p slidingLog) Decide(s state, clock, n int64) (state, decision) {
	window := micros(p.Window)
	stored := s
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
		if room > 0 {
			s.log = s.log.with(t, min(n, room))
			s.count += min(n, room)
			s.windowStart = t
		}
		s.credit -= d.taken.spent
		s.expiresAt = t + window
		d.granted = 1
		d.remaining -= n
	}
	needed := entries("") // what retryAfter comes from
	switch ask := max(n, 1); {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case ask > p.Limit:
		d.retryAfter = never
	default:
		// It fits when enough of the oldest entries have left. A denial that is remembered does not know them all;
		// see denials.
		over := s.count - s.credit + ask - p.Limit
		for i := 0; over > 0 && 8*i < len(s.log); i++ {
			if over -= s.log.units(i); over <= 0 {
				d.retryAfter = min(t+window-s.log.age(i, t), s.expiresAt) - clock
				needed = s.log[:8*min(i+1, maxDenialEntries)]
			}
		}
	}
	switch {
	case s.credit > 0:
		d.resetAfter = s.expiresAt - clock
	case s.count > 0:
		d.resetAfter = min(s.windowStart+window, s.expiresAt) - clock
	}
	if changed {
		s.expiresAt = clock + d.resetAfter
		stored = s
	}
	d.state = s
	d.state.log = needed
	d.taken.units, d.taken.since, d.taken.in = d.granted*n, s.since, s.windowStart
	return stored, d
}
