package ratelimit

import (
	_ "embed"
	"encoding/binary"
	"fmt"
	"time"
)

// SlidingLog admits Limit in any Window, exactly: it keeps a log of what was taken and when, and what was taken a Window ago
// counts no more. A denial is not logged, so a client that keeps asking is not kept out for longer, nor does its log grow.
//
// With SlidingLog{Limit: 3, Window: time.Minute}, and 1 taken at 0 s, at 10 s and at 20 s, a request of cost 1 at 30 s is told to
// retry after 30 s, when that of 0 s leaves, and one of cost 2 after 40 s; the key is as good as new after 50 s.
//
// The log takes 8 bytes for each time at which something was taken, and is written as a whole with each request that is allowed, to the
// WAL too if the limiter is durable. For one request of a key whose log is full, the server's CPU needs 60 µs with a Limit of 10 and
// 80 µs with one of 100 (0.8 kB), beside 70 µs for a [SlidingWindow], and 110 µs with one of 1,000 (8 kB, which are kept out of the
// row); for a denial, 50 to 70 µs. docs/slidinglog.svg shows how far the estimate of a SlidingWindow is off.
type SlidingLog struct {
	// Limit is how much any window admits, in units of cost: from 1 to 1,000, because a key's log may need that many entries.
	Limit int64
	// Window is the length of the window: whole microseconds, from 1 µs to 2^51 µs (71 years).
	Window time.Duration
}

var _ Policy = SlidingLog{}

const (
	maxLogLimit = 1000 // the largest limit of a SlidingLog

	// maxDenialEntries is how many entries a decision has at most. They are what a denial is remembered by (see denials), and
	// a larger request, for which more than these have to leave, costs a query each time, but no memory.
	maxDenialEntries = 64
)

//go:embed sql/call/slidinglog.sql
var slidingLogStatement string

// String is the policy as [ParsePolicy] reads it: log 100/1m.
func (p SlidingLog) String() string { return fmt.Sprintf("log %d/%s", p.Limit, spanText(p.Window)) }

func (p SlidingLog) validate() error {
	if p.Limit > maxLogLimit {
		return &ConfigError{Field: "Policy.Limit", Reason: fmt.Sprintf(
			"is %d, and may be at most %d for a SlidingLog; a SlidingWindow takes more", p.Limit, maxLogLimit)}
	}
	return validateWindow(p.Limit, p.Window)
}

func (p SlidingLog) limit() int64      { return p.Limit }
func (p SlidingLog) statement() string { return slidingLogStatement }
func (p SlidingLog) numbers() []any    { return []any{p.Limit, micros(p.Window)} }

func (p SlidingLog) scaled(share float64) Policy {
	p.Limit = shareOf(p.Limit, share)
	return p
}

func (p SlidingLog) resetAfter(last decision, units int64) int64 {
	return creditResetAfter(last, last.state.credit, units, micros(p.Window))
}

func (p SlidingLog) grant(s state, clock, n int64) (state, decision) {
	s, _ = p.rolledForward(s, clock) // with its log, which the state of a decision has not
	s = withCredit(s, max(clock, s.windowStart), micros(p.Window), n)
	return afterGrant(p, s, clock)
}

func (p SlidingLog) refund(s state, clock int64, t take) (state, decision) {
	row, _ := p.rolledForward(s, clock)
	now := max(clock, row.windowStart)
	row, credited := withCreditBack(row, now, micros(p.Window), t)
	log, back := row.log.without(t.in, t.units-t.spent)
	row.log, row.count = log, row.count-back
	if newest := len(row.log)/8 - 1; back > 0 && newest >= 0 {
		row.windowStart = now - row.log.age(newest, now)
	}
	return afterRefund(p, s, row, clock, back > 0 || credited)
}

// rolledForward is a row, rolled forward to the clock; moved tells whether the clock has jumped back, and the row with it.
func (p SlidingLog) rolledForward(s state, clock int64) (rolled state, moved bool) {
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

func (p SlidingLog) decide(s state, clock, n int64) (state, decision) {
	window := micros(p.Window)
	stored := s
	s, moved := p.rolledForward(s, clock)
	t := max(clock, s.windowStart)
	// A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
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
		// When enough of the oldest entries have left. A denial that is remembered does not know them all; see denials.
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

// entries is a log, oldest first. Each is 8 bytes: the time it was taken at, in microseconds, × 1024 + the units taken. Of the time
// 53 bits are kept, so that it can be told from any other within 285 years. It is a string for states to be comparable.
type entries string

func newEntries(log []int64) entries {
	var packed []byte
	for _, entry := range log {
		packed = binary.BigEndian.AppendUint64(packed, uint64(entry))
	}
	return entries(packed)
}

func (e entries) entry(i int) int64 { return int64(binary.BigEndian.Uint64([]byte(e[8*i : 8*i+8]))) }

func (e entries) units(i int) int64 { return e.entry(i) & 1023 }

// age is how long before t the i-th entry was taken.
func (e entries) age(i int, t int64) int64 { return (t - e.entry(i)>>10) & (1<<53 - 1) }

// with is the log after n was taken at t, now or later than its newest entry.
func (e entries) with(t, n int64) entries {
	if i := len(e)/8 - 1; i >= 0 && e.age(i, t) == 0 {
		e, n = e[:8*i], n+e.units(i)
	}
	return e + newEntries([]int64{t<<10 | n})
}

// without is the log after up to n of what was taken at t were given back, and how much that is.
func (e entries) without(t, n int64) (rest entries, back int64) {
	for i := range len(e) / 8 {
		entry, units := e.entry(i), e.units(i)
		if entry>>10<<10 != t<<10 {
			continue
		}
		back = min(n, units)
		if back == units {
			return e[:8*i] + e[8*(i+1):], back
		}
		return e[:8*i] + newEntries([]int64{entry - back}) + e[8*(i+1):], back
	}
	return e, 0
}

// shifted is the log as if all had been taken earlier.
func (e entries) shifted(by int64) entries {
	var log []int64
	for i := range len(e) / 8 {
		log = append(log, (e.entry(i)>>10-by)<<10|e.units(i))
	}
	return newEntries(log)
}
