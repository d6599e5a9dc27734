package model

// Granted credit lets a key take more than its policy's limit. Grant adds credit, and a request uses it when the limit
// leaves too little room. Each take and each Grant keeps a row with credit alive for Rules.Lasts.

// MaxCredit is the most credit that a key can hold. MaxCredit plus the largest limit fits into 64 bits.
const MaxCredit = 1 << 61

// Grant adds n ≥ 1 to the row's granted credit.
func Grant(m Rules, s State, clock, n int64) (State, Decision) {
	s, _ = m.Roll(s, clock)
	t := max(clock, s.WindowStart)
	if s.Since == 0 {
		s.Since = t
	}
	s.Credit = min(s.Credit+n, MaxCredit)
	s.ExpiresAt = t + lasts(m, s)
	_, d := m.Decide(s, clock, 0)
	d.Granted, d.RetryAfter = 1, 0
	return s, d
}

// unlessNew clears Since if the row has no credit. Callers use it for a window or a log without usage. If such a row
// has no credit either, it is as good as new.
func (s State) unlessNew() State {
	if s.Credit == 0 {
		s.Since = 0
	}
	return s
}

// withCreditBack gives back the units of k that came from granted credit, and returns whether the row changed. The
// argument s is the row of a window or a log, and the argument rolled is this row brought forward to the time t. Credit
// goes back only to the row that it came from, not to a newer row of the key.
func withCreditBack(s, rolled State, t, life int64, k Take) (State, bool) {
	back := min(k.Spent, MaxCredit-rolled.Credit)
	if back == 0 || rolled.Since == 0 || rolled.Since != k.Since {
		return s, false
	}
	s.Credit += back
	s.ExpiresAt = max(s.ExpiresAt, t+life)
	return s, true
}

// creditResetAfter computes Rules.ResetAfter for a row that has granted credit, or had credit before this statement.
func creditResetAfter(last Decision, units, life int64) int64 {
	if last.State.Credit > 0 || last.Taken.Spent == 0 || units == 0 {
		return last.ResetAfter
	}
	// The last request spent credit, so the row had credit before the last units were taken. The row has no holds: held
	// units would have kept credit.
	clock := last.DecidedAt.UnixMicro()
	return max(last.State.WindowStart, clock) + life - clock
}

// afterRefund returns the row and the decision of a refund. It does not roll the row forward, because requests under
// another policy may still count usage that this policy no longer counts. It shortens the row's life only if the row
// counts nothing any more.
func afterRefund(m Rules, row State, clock int64, changed bool) (State, Decision) {
	_, d := m.Decide(row, clock, 0)
	d.Granted, d.RetryAfter, d.State.Log = 1, 0, ""
	if changed && d.ResetAfter == 0 && row.Count == 0 && row.PrevCount == 0 { // the row is as good as new
		d.State.ExpiresAt = clock
		row = d.State
	}
	return row, d
}
