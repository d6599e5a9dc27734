package ratelimit

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// usage is what a row counts at a time, all of which can be given back, in units of which a cost of 1 has scale.
func usage(p ruled, s state, clock int64) (counted *big.Int, scale int64) {
	_, d := p.Decide(s, clock, 0)
	if bucket, ok := p.(TokenBucket); ok {
		return big.NewInt(bucket.full() - d.state.credit), micros(bucket.Every)
	}
	return new(big.Int).Add(big.NewInt(d.state.count), big.NewInt(d.state.prevCount)), 1
}

// withoutLog is a state without its log, of which a decision tells only a part.
func withoutLog(s state) state {
	s.log = ""
	return s
}

// creditOf is the granted credit that a row has at a time.
func creditOf(p ruled, s state, clock int64) int64 {
	_, d := p.Decide(s, clock, 0)
	if _, ok := p.(TokenBucket); ok {
		return d.state.count
	}
	return d.state.credit
}

// toldState is the part of a state that the database tells.
func toldState(s state) state {
	s.capacity, s.refill, s.returned = 0, 0, 0
	return s
}

// checkedGrant is checkDecision of a Grant of n.
func checkedGrant(p ruled, s state, clock, n int64) (state, decision, error) {
	before, held := peek(p, s, clock), creditOf(p, s, clock)
	counted, _ := usage(p, s, clock)
	next, d := grant(p, s, clock, n)
	rolled := d.state
	d.state, d.taken = state{}, take{}
	fail := func(format string, args ...any) (state, decision, error) {
		return next, d, fmt.Errorf("%T%+v, Grant of %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}
	credit := creditOf(p, next, clock)
	now, _ := usage(p, next, clock)
	switch {
	case credit != min(held+n, maxCredit):
		return fail("it had %d, and has %d", held, credit)
	case counted.Cmp(now) != 0:
		return fail("it counted %v, and counts %v", counted, now)
	case d.granted != 1 || d.retryAfter != 0:
		return fail("it is refused")
	case d.remaining != before.remaining+credit-held:
		return fail("Remaining was %d", before.remaining)
	case next.expiresAt != clock+d.resetAfter || d.resetAfter < longestWait(p):
		return fail("it does not last")
	case !equalsNoRow(p, next, next.expiresAt) || equalsNoRow(p, next, next.expiresAt-1):
		return fail("it does not last until it expires")
	}
	for _, n := range []int64{0, 1, d.remaining, p.Numbers().Limit} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}
	return next, d, nil
}

// checkRefund is checkDecision of a refund of k.
func checkRefund(p ruled, s state, clock int64, k take) (state, decision, error) {
	before := peek(p, s, clock)
	next, d := p.Refund(s, clock, k)
	rolled := d.state
	d.state, d.taken = state{}, take{}
	fail := func(format string, args ...any) (state, decision, error) {
		return next, d, fmt.Errorf("%T%+v, refund of %+v at %d from %+v: decided %+v, and then %+v: %s",
			p, p, k, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// It gives back up to what was asked, ordinary room and credit apart.
	counted, scale := usage(p, s, clock)
	left, _ := usage(p, next, clock)
	ordinary := new(big.Int).Mul(big.NewInt(k.units-k.spent), big.NewInt(scale))
	back, credited := new(big.Int).Sub(counted, left), creditOf(p, next, clock)-creditOf(p, s, clock)
	switch {
	case back.Sign() < 0 || back.Cmp(ordinary) > 0:
		return fail("it counted %v, and counts %v", counted, left)
	case credited < 0 || credited > k.spent:
		return fail("it has given back a credit of %d", credited)
	case d.granted != 1 || d.retryAfter != 0:
		return fail("it is refused")
	case d.remaining < before.remaining || d.remaining > p.Numbers().Limit+creditOf(p, next, clock):
		return fail("Remaining was %d", before.remaining)
	case d.remaining != peek(p, next, clock).remaining:
		return fail("Remaining is %d", peek(p, next, clock).remaining)
	case d.resetAfter > before.resetAfter && credited == 0:
		return fail("ResetAfter was %d", before.resetAfter)
	case (back.Sign() == 0 && credited == 0) != (next == s):
		return fail("it has changed the row, or given back nothing, and not both")
	case withoutLog(rollForward(p, next, clock)) != withoutLog(rolled):
		return fail("its state is %+v", rolled)
	case next.expiresAt < s.expiresAt && (next.count > 0 || next.prevCount > 0 || d.resetAfter > 0):
		return fail("something in it counts, and is forgotten earlier")
	}

	// When all is given back, the key is as good as new.
	if (left.Sign() == 0 && creditOf(p, next, clock) == 0) != (d.resetAfter == 0) {
		return fail("ResetAfter does not go with what it counts")
	}
	unwritten := leftBehind(p, s, clock) && next == s // as in checkDecision
	for _, late := range []int64{0, 1, reach(p), maxSpan} {
		if !unwritten && !equalsNoRow(p, next, max(next.expiresAt, clock+d.resetAfter)+late) {
			return fail("%d µs after ResetAfter it does not equal no row", late)
		}
	}
	if d.resetAfter > 0 && !unwritten && equalsNoRow(p, next, clock+d.resetAfter-1) {
		return fail("a µs before ResetAfter the key is as good as new")
	}

	// It does harm at no time: what would have been allowed without it, is allowed. (A row that is pulled back to
	// the clock is another matter, and one that gets credit lives longer, as after a Grant.) And a clock that
	// steps back shows no more.
	for _, later := range []int64{0, 1, d.resetAfter, before.resetAfter - 1, before.resetAfter, reach(p), 2 * reach(p)} {
		for _, n := range []int64{1, before.remaining, d.remaining, p.Numbers().Limit} {
			if later >= 0 && credited == 0 && !leftBehind(p, s, clock) && fits(p, s, clock+later, n) &&
				!fits(p, next, clock+later, n) {
				return fail("%d would have been allowed %d µs later, and is not", n, later)
			}
		}
	}
	for _, back := range []int64{1, reach(p) / 2, reach(p), reach(p) + 1, 2*reach(p) + 1, clock} {
		if was := peek(p, next, max(clock-back, 0)).remaining - creditOf(p, next, max(clock-back, 0)); was > d.remaining {
			return fail("%d µs back, %d remain", back, was)
		}
	}
	return next, d, nil
}

// refundStep takes n, or gives back n of what the step before it named of has taken; back is what it gives back.
type refundStep struct {
	at   int64
	n    int64 // 0: as much as is left
	of   int   // from 1; 0 is a take
	back int64
}

func TestRefundGivesBackWhatStillCounts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy ruled
		steps  []refundStep
	}{
		{"a fixed window, what the same window counts", FixedWindow{10, time.Minute}, []refundStep{
			{c0, 6, 0, 0}, {c1, 4, 0, 0}, {c2, 0, 1, 6}, {c3, 5, 0, 0}, {c4, 2, 2, 2},
			{c0 + minute, 1, 0, 0}, // the next window
			{c1 + minute, 2, 2, 0}, {c1 + minute, 0, 4, 0}, {c1 + minute, 0, 6, 1},
		}},
		{"a sliding window, also what the one before counted", SlidingWindow{10, time.Minute}, []refundStep{
			{c0, 8, 0, 0}, {c1 + minute, 1, 0, 0}, {c2 + minute, 3, 1, 3}, {c3 + minute, 0, 2, 1},
			{c4 + 2*minute - second, 1, 0, 0}, {c5 + 2*minute, 0, 1, 0},
		}},
		{"a sliding log, what is in it", SlidingLog{10, time.Minute}, []refundStep{
			{c0, 4, 0, 0}, {c1, 3, 0, 0}, {c2, 2, 0, 0},
			{c3, 1, 1, 1}, {c4, 0, 3, 2}, {c0 + minute - 1, 2, 1, 2}, {c0 + minute, 0, 1, 0}, {c0 + minute, 0, 2, 3},
		}},
		{"a bucket, what has not flowed in again", TokenBucket{10, 1, time.Second}, []refundStep{
			{c0, 4, 0, 0}, {c3, 0, 1, 1}, {c3, 1, 0, 0}, {c9, 0, 3, 0},
		}},
		{"a bucket in any order, as long as nothing flows in", TokenBucket{10, 1, time.Hour}, []refundStep{
			{c0, 1, 0, 0}, {c0, 2, 0, 0}, {c0, 3, 0, 0}, {c0, 0, 3, 3}, {c0, 0, 2, 2}, {c0, 4, 0, 0}, {c0, 0, 1, 1}, {c0, 3, 6, 3}, {c0, 0, 6, 1},
		}},
		{"a bucket that others have taken from before", TokenBucket{10, 1, time.Second}, []refundStep{
			{c0, 8, 0, 0}, {c0, 2, 0, 0}, {c8, 7, 0, 0}, {c8 + second/2, 1, 2, 1}, {c9, 0, 2, 0}, // its other one was served at c9
			{c9 + second, 0, 1, 0}, {c9 + second, 2, 3, 2},
		}},
		{"parts of a reservation", TokenBucket{1000, 100, time.Second}, []refundStep{
			{c0, 1000, 0, 0}, {c5, 600, 1, 500}, {c5, 400, 1, 0}, {c5, 0, 0, 0},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var s state
			takes, left := make([]take, len(test.steps)+1), make([]int64, len(test.steps)+1)
			for i, step := range test.steps {
				if step.of == 0 {
					next, d := test.policy.Decide(s, step.at, step.n)
					require.Equal(t, step.n > 0, d.granted == 1, "step %d", i)
					s, takes[i+1], left[i+1] = next, d.taken, step.n
					continue
				}
				n := step.n
				if n == 0 {
					n = left[step.of]
				}
				before := peek(test.policy, s, step.at).remaining
				counted, scale := usage(test.policy, s, step.at)
				next, d, err := checkRefund(
					test.policy,
					s,
					step.at,
					takes[step.of].portion(test.policy, left[step.of]-n, left[step.of]),
				)
				require.NoError(t, err, "step %d", i)
				now, _ := usage(test.policy, next, step.at)
				require.Equal(t, step.back, counted.Sub(counted, now).Int64()/scale, "step %d", i)
				require.GreaterOrEqual(t, d.remaining, before)
				left[step.of] -= n
				s = next
			}
		})
	}
}

// What has left a log does not come back, although the refund lets the row's time fall to a clock that was set back.
func TestRefundBehindTheClockCountsNoMore(t *testing.T) {
	t.Parallel()
	long := SlidingLog{Limit: 3, Window: 2 * time.Microsecond}
	s, _ := long.Decide(state{}, c0, 2)
	s, d := long.Decide(s, c0+1, 1)
	next, _, err := checkRefund(SlidingLog{Limit: 1, Window: time.Microsecond}, s, c0, d.taken)
	require.NoError(t, err)
	require.Zero(t, next.count)
}

// What came out of credit goes back as credit, and before the rest; but not to a row that was made since.
func TestRefundGivesCreditBackAsCredit(t *testing.T) {
	t.Parallel()
	for _, p := range []ruled{
		FixedWindow{10, time.Minute}, SlidingWindow{10, time.Minute}, TokenBucket{10, 1, time.Hour},
		SlidingLog{10, time.Minute}, CalendarWindow{10, Minute, ""},
	} {
		s, _ := grant(p, state{}, c0, 5)
		s, _ = p.Decide(s, c1, 8)
		s, d := p.Decide(s, c2, 6)
		k := d.taken
		require.EqualValues(t, 4, k.spent, "%T", p)
		back := func(at, from, to, credit int64) {
			t.Helper()
			next, _, err := checkRefund(p, s, at, k.portion(p, from, to))
			require.NoError(t, err)
			require.Equal(t, credit, creditOf(p, next, at), "%T", p)
			s = next
		}
		back(c3, 3, 6, 4)
		before, _ := usage(p, s, c3)
		back(c3, 0, 3, 5)
		after, scale := usage(p, s, c3)
		require.Equal(t, 2*scale, before.Sub(before, after).Int64(), "%T", p)

		later := c3 + 100*hour
		s, _ = p.Decide(s, later, 1) // as good as new
		back(later, 0, 6, 0)
	}
}

// A refund keeps what the policy has promised that took: usage does not last longer because another policy gives
// some of it back.
func TestRefundUnderALongerWindowDoesNotProlongUsage(t *testing.T) {
	t.Parallel()
	for long, short := range map[ruled]ruled{
		FixedWindow{10, time.Hour}: FixedWindow{10, time.Minute}, SlidingWindow{10, time.Hour}: SlidingWindow{10, time.Minute},
		SlidingLog{10, time.Hour}: SlidingLog{10, time.Minute},
	} {
		s, d := short.Decide(state{}, c0, 6)
		s, _, err := checkRefund(long, s, c1, d.taken.portion(long, 5, 6))
		require.NoError(t, err)
		playModel(t, long, s, modelStep{c1 + 2*minute, 10, granted(0, longestWait(long))})
	}
}

// A bucket that was taken from under other numbers gives nothing of an earlier take back: it may have been full by
// them.
func TestRefundOfABucketWhoseNumbersHaveChanged(t *testing.T) {
	t.Parallel()
	p := TokenBucket{10, 1, time.Hour}
	for _, other := range []TokenBucket{{8, 1, time.Hour}, {12, 1, time.Hour}, {10, 2, time.Hour}, {10, 1, time.Minute}} {
		s, three := p.Decide(state{}, c0, 3)
		peeked, _ := other.Decide(s, c0, 0)
		_, _, err := checkRefund(p, peeked, c0, three.taken)
		require.NoError(t, err)
		back, _ := p.Refund(peeked, c0, three.taken)
		require.True(t, equalsNoRow(p, back, c0), "nobody has taken")

		s, d := other.Decide(s, c1, 7)
		require.EqualValues(t, 1, d.granted)
		for _, p := range []TokenBucket{p, other} {
			back, _ := p.Refund(s, c1, three.taken)
			require.Equal(t, s, back)
		}
	}
}

// Within the same instant refunds undo takes, to the last bit of what counts, in any order.
func TestRefundUndoesATake(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	undone := 0
	for range 3000 {
		limit, window := d.window()
		p := []ruled{FixedWindow{limit, window}, SlidingWindow{limit, window}, d.bucket(), d.log(), d.calendar()}[d(5)]
		if bucket, ok := p.(TokenBucket); ok && bucket.full() > maxReturned/4 {
			continue // it may forget, see maxReturned
		}
		var s state
		var last decision
		clock := d.magnitude(0, 1<<52)
		for range 10 {
			clock = d.clock(p, s, clock, last)
			s, last = p.Decide(s, clock, d.cost(p.Numbers().Limit, peek(p, s, clock).remaining))
		}
		before := peek(p, s, clock)
		counted, _ := usage(p, s, clock)
		var takes []take
		for range 3 {
			if room := peek(p, s, clock).remaining; room > 0 {
				s, last = p.Decide(s, clock, d.magnitude(1, room))
				takes = append(takes, last.taken)
			}
		}
		for len(takes) > 0 {
			i := int(d(int64(len(takes))))
			s, last = p.Refund(s, clock, takes[i])
			takes = slices.Delete(takes, i, i+1)
			undone++
		}
		now, _ := usage(p, s, clock)
		require.Equal(t, before.remaining, peek(p, s, clock).remaining, "%T%+v at %d", p, p, clock)
		require.Zero(t, counted.Cmp(now))
	}
	require.Greater(t, undone, 3000)
}
