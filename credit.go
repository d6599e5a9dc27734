package ratelimit

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// Granted credit is what a key may take above its policy's limit. Grant gives it, and a request takes from it what
// there is no ordinary room for. It has its own column of the row: credit for a window or a log, count for a bucket.
// While a key holds any, each take and each Grant keeps its row for another window (of a SlidingWindow and of a
// CalendarWindow two, of a bucket the time to fill it). ResetAfter tells how long.

// maxCredit is the most credit that a key can hold. With the largest limit, it stays within 64 bits.
const maxCredit = 1 << 61

// creditColumn is the column of a row that holds granted credit.
func (s *state) creditColumn(code int16) *int64 {
	if code == algorithm.TokenBucket {
		return &s.count
	}
	return &s.credit
}

// grant is the model of a grant of n, at least 1.
func grant(m rules, s state, clock, n int64) (state, decision) {
	s, _ = m.Roll(s, clock)
	t := max(clock, s.windowStart)
	if s.since == 0 {
		s.since = t
	}
	credit := s.creditColumn(m.Numbers().Algorithm)
	*credit = min(*credit+n, maxCredit)
	s.expiresAt = t + m.Lasts()
	_, d := m.Decide(s, clock, 0)
	d.granted, d.retryAfter = 1, 0
	return s, d
}

// unlessNew is for the row of a window or a log that counts nothing. Without credit, it is as good as new.
func (s state) unlessNew() state {
	if s.credit == 0 {
		s.since = 0
	}
	return s
}

// withCreditBack returns a window's or log's row after the part of k that was spent of granted credit went back,
// and whether that changes it. Credit goes back only to the row that it came from, not to one that was made since.
// rolled is the row rolled forward to t.
func withCreditBack(s, rolled state, t, life int64, k take) (state, bool) {
	back := min(k.spent, maxCredit-rolled.credit)
	if back == 0 || rolled.since == 0 || rolled.since != k.since {
		return s, false
	}
	s.credit += back
	s.expiresAt = max(s.expiresAt, t+life)
	return s, true
}

// creditResetAfter is rules.resetAfter while there is granted credit, or was until this statement spent some.
func creditResetAfter(last decision, credit, units, life int64) int64 {
	if credit > 0 || last.taken.spent == 0 || units == 0 {
		return last.resetAfter
	}
	// What was spent last came out of credit. So there was some before units more were taken.
	clock := last.decidedAt.UnixMicro()
	return max(last.state.windowStart, clock) + life - clock
}

// afterRefund is the decision of a refund that has turned the row into this one. It does not roll the row forward,
// because others, who ask under other numbers, may still count what these numbers do not. Nor does it end the row
// earlier, unless nothing in the row counts.
func afterRefund(m rules, row state, clock int64, changed bool) (state, decision) {
	_, d := m.Decide(row, clock, 0)
	d.granted, d.retryAfter, d.state.log = 1, 0, ""
	if changed && d.resetAfter == 0 && row.count == 0 && row.prevCount == 0 { // as good as new
		d.state.expiresAt = clock
		row = d.state
	}
	return row, d
}
