package ratelimit

// Granted credit is what a key may take above its policy's limit: Grant gives it, and what there is no ordinary room for is taken
// from it. It stands in its own column of the row: of a window credit, of a bucket count. While a key holds any, each take and each
// Grant keeps its row for another window (of a SlidingWindow two, of a bucket the time to fill it), and ResetAfter tells how long.

// maxCredit is the most credit that a key can hold: with the largest limit, it stays within 64 bits.
const maxCredit = 1 << 61

// rollForward is a row, rolled forward to the clock.
func rollForward(p Policy, s state, clock int64) state {
	_, d := p.decide(s, clock, 0)
	return d.state
}

// unlessNew is a window's or log's row that counts nothing: without credit, it is as good as new.
func (s state) unlessNew() state {
	if s.credit == 0 {
		s.since = 0
	}
	return s
}

// withCredit is a window's or log's row after a grant at t of n, which lives as long.
func withCredit(s state, t, life, n int64) state {
	if s.since == 0 {
		s.since = t
	}
	s.credit = min(s.credit+n, maxCredit)
	s.expiresAt = t + life
	return s
}

// withCreditBack is a window's or log's row after what of k was spent of granted credit went back, and whether that changes it. It
// goes back to the row that it came from, and not to one that has been made since.
func withCreditBack(s state, t, life int64, k take) (state, bool) {
	back := min(k.spent, maxCredit-s.credit)
	if back == 0 || s.since == 0 || s.since != k.since {
		return s, false
	}
	s.credit += back
	s.expiresAt = max(s.expiresAt, t+life)
	return s, true
}

// afterGrant is the decision of a grant that has made a row this.
func afterGrant(p Policy, s state, clock int64) (state, decision) {
	_, d := p.decide(s, clock, 0)
	d.granted, d.retryAfter = 1, 0
	return s, d
}

// creditResetAfter is Policy.resetAfter while there is granted credit, or was until this statement has spent some of it.
func creditResetAfter(last decision, credit, units, life int64) int64 {
	if credit > 0 || last.taken.spent == 0 || units == 0 {
		return last.resetAfter
	}
	// What was spent last came out of credit, so before units more were taken, there was some.
	clock := last.decidedAt.UnixMicro()
	return max(last.state.windowStart, clock) + life - clock
}
