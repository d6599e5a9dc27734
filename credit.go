package ratelimit

// Granted credit is what a key may take above its policy's limit: Grant gives it, and what there is no ordinary room for is taken
// from it. It stands in its own column of the row: of a window credit, of a bucket count. While a key holds any, each take and each
// Grant keeps its row for another window (of a SlidingWindow two, of a bucket the time to fill it), and ResetAfter tells how long.

// maxCredit is the most credit that a key can hold: with the largest limit, it stays within 64 bits.
const maxCredit = 1 << 61

// granter is a policy whose keys can hold granted credit.
type granter interface {
	Policy
	// grantStatement is statement, with costs below 0 as grants.
	grantStatement() string
	// grant is the model of a grant: n is at least 1.
	grant(s state, clock, n int64) (state, decision)
}

var (
	_ granter = FixedWindow{}
	_ granter = SlidingWindow{}
	_ granter = TokenBucket{}
	_ granter = SlidingLog{}
)

// rollForward is a row, rolled forward to the clock.
func rollForward(p Policy, s state, clock int64) state {
	_, d := p.decide(s, clock, 0)
	return d.state
}

// afterGrant is the decision of a grant that has made a row this.
func afterGrant(p Policy, s state, clock int64) (state, decision) {
	_, d := p.decide(s, clock, 0)
	d.granted, d.retryAfter = 1, 0
	return s, d
}

// creditResetAfter is Policy.resetAfter while there is granted credit, or was until this statement has spent some of it.
func creditResetAfter(last decision, credit, spent, units, life int64) int64 {
	if credit > 0 || spent == 0 || units == 0 {
		return last.resetAfter
	}
	// What was spent last came out of credit, so before units more were taken, there was some.
	clock := last.decidedAt.UnixMicro()
	return max(last.state.windowStart, clock) + life - clock
}
