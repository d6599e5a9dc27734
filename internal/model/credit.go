package model

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// Granted credit is what a key may take above its policy's limit. Grant gives it, and a request takes from it what
// there is no ordinary room for. It has its own column of the row: credit for a window or a log, count for a bucket.
// While a key holds any, each take and each Grant keeps its row for another window (of a SlidingWindow and of a
// CalendarWindow two, of a bucket the time to fill it). ResetAfter tells how long.

// MaxCredit is the most credit that a key can hold. With the largest limit, it stays within 64 bits.
const MaxCredit = 1 << 61

// CreditColumn is the column of a row that holds granted credit.
func (s *State) CreditColumn(code int16) *int64 {
	if code == algorithm.TokenBucket {
		return &s.Count
	}
	return &s.Credit
}

// Grant is the model of a grant of n, at least 1.
func Grant(m Rules, s State, clock, n int64) (State, Decision) {
	s, _ = m.Roll(s, clock)
	t := max(clock, s.WindowStart)
	if s.Since == 0 {
		s.Since = t
	}
	credit := s.CreditColumn(m.Numbers().Algorithm)
	*credit = min(*credit+n, MaxCredit)
	s.ExpiresAt = t + m.Lasts()
	_, d := m.Decide(s, clock, 0)
	d.Granted, d.RetryAfter = 1, 0
	return s, d
}

// unlessNew is for the row of a window or a log that counts nothing. Without credit, it is as good as new.
func (s State) unlessNew() State {
	if s.Credit == 0 {
		s.Since = 0
	}
	return s
}

// withCreditBack returns a window's or log's row after the part of k that was spent of granted credit went back,
// and whether that changes it. Credit goes back only to the row that it came from, not to one that was made since.
// rolled is the row rolled forward to t.
func withCreditBack(s, rolled State, t, life int64, k Take) (State, bool) {
	back := min(k.Spent, MaxCredit-rolled.Credit)
	if back == 0 || rolled.Since == 0 || rolled.Since != k.Since {
		return s, false
	}
	s.Credit += back
	s.ExpiresAt = max(s.ExpiresAt, t+life)
	return s, true
}

// creditResetAfter is rules.resetAfter while there is granted credit, or was until this statement spent some.
func creditResetAfter(last Decision, credit, units, life int64) int64 {
	if credit > 0 || last.Taken.Spent == 0 || units == 0 {
		return last.ResetAfter
	}
	// What was spent last came out of credit. So there was some before units more were taken.
	clock := last.DecidedAt.UnixMicro()
	return max(last.State.WindowStart, clock) + life - clock
}

// afterRefund is the decision of a refund that has turned the row into this one. It does not roll the row forward,
// because others, who ask under other numbers, may still count what these numbers do not. Nor does it end the row
// earlier, unless nothing in the row counts.
func afterRefund(m Rules, row State, clock int64, changed bool) (State, Decision) {
	_, d := m.Decide(row, clock, 0)
	d.Granted, d.RetryAfter, d.State.Log = 1, 0, ""
	if changed && d.ResetAfter == 0 && row.Count == 0 && row.PrevCount == 0 { // as good as new
		d.State.ExpiresAt = clock
		row = d.State
	}
	return row, d
}
