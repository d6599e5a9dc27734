package model

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// Granted credit lets a key take more than its policy's limit. Grant adds it, and a request uses it when the ordinary
// room is not enough. It is stored in its own column of the row: credit for a window or a log, count for a bucket.
// While a key has credit, each take and each Grant keeps its row for another window. For a SlidingWindow or a
// CalendarWindow it is two windows, and for a bucket the time to fill it. ResetAfter tells how long that is.

// MaxCredit is the most credit that a key can hold. The sum of it and the largest limit fits into 64 bits.
const MaxCredit = 1 << 61

// CreditColumn is the column of a row that holds granted credit.
func (s *State) CreditColumn(code int16) *int64 {
	if code == algorithm.TokenBucket {
		return &s.Count
	}
	return &s.Credit
}

// Grant is the model of a grant of n ≥ 1.
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

// unlessNew is called for the row of a window or a log with no usage. If it has no credit either, it is as good as new,
// so Since is cleared.
func (s State) unlessNew() State {
	if s.Credit == 0 {
		s.Since = 0
	}
	return s
}

// withCreditBack gives back the units of k that were spent from granted credit, to the row of a window or a log. It
// also tells whether the row changed. Credit goes back only to the row that it came from, not to a later one. rolled is
// the row rolled forward to t.
func withCreditBack(s, rolled State, t, life int64, k Take) (State, bool) {
	back := min(k.Spent, MaxCredit-rolled.Credit)
	if back == 0 || rolled.Since == 0 || rolled.Since != k.Since {
		return s, false
	}
	s.Credit += back
	s.ExpiresAt = max(s.ExpiresAt, t+life)
	return s, true
}

// creditResetAfter is Rules.ResetAfter for a row that has granted credit, or had some until this statement spent it.
func creditResetAfter(last Decision, credit, units, life int64) int64 {
	if credit > 0 || last.Taken.Spent == 0 || units == 0 {
		return last.ResetAfter
	}
	// The last request spent credit, so there was credit before the last units were taken.
	clock := last.DecidedAt.UnixMicro()
	return max(last.State.WindowStart, clock) + life - clock
}

// afterRefund returns the decision of a refund that led to this row. It does not roll the row forward, because requests
// under other policies may still count usage that this policy no longer counts. It does not shorten the row's life
// either, unless nothing in the row counts.
func afterRefund(m Rules, row State, clock int64, changed bool) (State, Decision) {
	_, d := m.Decide(row, clock, 0)
	d.Granted, d.RetryAfter, d.State.Log = 1, 0, ""
	if changed && d.ResetAfter == 0 && row.Count == 0 && row.PrevCount == 0 { // the row is as good as new
		d.State.ExpiresAt = clock
		row = d.State
	}
	return row, d
}
