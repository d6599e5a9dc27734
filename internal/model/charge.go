package model

import "github.com/pgratelimit/ratelimit/internal/algorithm"

// A charge counts units that were already used, whether they fit or not. It uses the ordinary room first, and then
// granted credit. The rest is counted above the limit, and the key owes these units. A key that owes units denies
// requests until enough has drained, as after its limit was lowered. A window denies until it ends, a SlidingWindow
// until its next window ends, a log until entries leave, and a bucket until it has a token again.

// owedLimits is how many times its limit a key can owe at most.
const owedLimits = 10

// MaxOwed returns how far above its limit a key can be charged: 10 limits, so a FixedWindow of 100 counts up to 1,100.
// The result is smaller at the edge of the exact range, because a limit of Limit + MaxOwed must be within this range.
func MaxOwed(m Rules) int64 {
	limit, most := m.Numbers().Limit, largest(m)
	if limit <= most/(1+owedLimits) {
		return owedLimits * limit
	}
	return most - limit
}

// largest returns how many units a row may count within the exact range.
func largest(m Rules) int64 {
	n := m.Numbers()
	switch {
	case n.HasSlots(): // nothing is counted, so nothing can be owed
		return n.Limit
	case n.Algorithm == algorithm.CalendarWindow:
		return MaxProduct
	}
	rate := int64(MaxProduct / MaxSpan)
	if n.Refills() {
		rate = min(rate, n.Refill)
	}
	return MaxSpan * rate / Micros(n.Span)
}

// Owed returns how many units above its limit a row counts. The row is rolled forward to the clock.
func Owed(m Rules, s State) int64 {
	n, count := m.Numbers(), s.Count
	if n.Refills() {
		count = CeilDiv(count, s.Scale)
	}
	return max(count-n.Limit, 0)
}

// lasts returns how long a take, a charge or a grant keeps a row alive that has the state s afterwards.
func lasts(m Rules, s State) int64 {
	if bucket, ok := m.(TokenBucket); ok {
		return bucket.lasts(s)
	}
	return m.Lasts()
}

// Charge charges a row n ≥ 0 units. The result fits is the largest charge that the row would have accepted. If n is
// larger, nothing is counted, Granted is 0, and the other fields of the decision are those of a Peek.
//
// For example, a FixedWindow of 100 that counts 90 accepts a charge of at most 1,010. After a charge of 30 it counts
// 120: nothing remains, and RetryAfter is the time until the window ends.
func Charge(m Rules, s State, clock, n int64) (next State, d Decision, fits int64) {
	numbers := m.Numbers()
	rolled, _ := m.Roll(s, clock)
	_, d = m.Decide(s, clock, 0)

	unit := int64(1) // one unit in Count
	if numbers.Refills() {
		unit = rolled.Scale
	}
	fits = max(numbers.Limit+MaxOwed(m)-CeilDiv(rolled.Count, unit), 0) + rolled.Credit
	if n == 0 || n > fits {
		if n == 0 {
			d.Granted, d.RetryAfter = 1, 0
		}
		d.State.Log = ""
		return s, d, fits
	}
	next, d = count(m, rolled, clock, n)
	return next, d, fits
}

// count counts n units of a row that is rolled forward, whether they fit or not.
func count(m Rules, rolled State, clock, n int64) (next State, d Decision) {
	numbers, unit := m.Numbers(), int64(1)
	if numbers.Refills() {
		unit = rolled.Scale
	}
	_, d = m.Decide(rolled, clock, 0)
	room := d.Remaining - rolled.Credit
	t := max(clock, rolled.WindowStart)
	spent := min(max(n-room, 0), rolled.Credit)
	rolled.Credit -= spent
	ordinary := n - spent
	rolled.Count += ordinary * unit
	if numbers.Algorithm == algorithm.SlidingLog && ordinary > 0 {
		rolled.Log, rolled.WindowStart = rolled.Log.With(t, ordinary), t
	}
	rolled.ExpiresAt = t + lasts(m, rolled)
	_, d = m.Decide(rolled, clock, 0)
	rolled.ExpiresAt = clock + d.ResetAfter
	d.Granted, d.RetryAfter = 1, 0
	d.State.Log, d.State.ExpiresAt = "", rolled.ExpiresAt
	d.Taken.Units, d.Taken.Spent = n, spent
	return rolled, d
}
