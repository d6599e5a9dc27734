package ratelimit

import (
	"fmt"
	"math/big"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// usage is what a row counts at a time, all of which can be given back, in units of which a cost of 1 has scale.
func usage(p ruled, s model.State, clock int64) (counted *big.Int, scale int64) {
	_, d := p.Decide(s, clock, 0)
	if bucket, ok := p.(TokenBucket); ok {
		return big.NewInt(bucket.full() - d.State.Credit), model.Micros(bucket.Every)
	}
	return new(big.Int).Add(big.NewInt(d.State.Count), big.NewInt(d.State.PrevCount)), 1
}

// withoutLog is a state without its log, of which a decision tells only a part.
func withoutLog(s model.State) model.State {
	s.Log = ""
	return s
}

// creditOf is the granted credit that a row has at a time.
func creditOf(p ruled, s model.State, clock int64) int64 {
	_, d := p.Decide(s, clock, 0)
	if _, ok := p.(TokenBucket); ok {
		return d.State.Count
	}
	return d.State.Credit
}

// toldState is the part of a state that the database tells.
func toldState(s model.State) model.State {
	s.Capacity, s.Refill, s.Returned = 0, 0, 0
	return s
}

// checkedGrant is checkDecision of a Grant of n.
func checkedGrant(p ruled, s model.State, clock, n int64) (model.State, model.Decision, error) {
	before, held := peek(p, s, clock), creditOf(p, s, clock)
	counted, _ := usage(p, s, clock)
	next, d := model.Grant(p, s, clock, n)
	rolled := d.State
	d.State, d.Taken = model.State{}, model.Take{}
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, Grant of %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}
	credit := creditOf(p, next, clock)
	now, _ := usage(p, next, clock)
	switch {
	case credit != min(held+n, model.MaxCredit):
		return fail("it had %d, and has %d", held, credit)
	case counted.Cmp(now) != 0:
		return fail("it counted %v, and counts %v", counted, now)
	case d.Granted != 1 || d.RetryAfter != 0:
		return fail("it is refused")
	case d.Remaining != before.Remaining+credit-held:
		return fail("Remaining was %d", before.Remaining)
	case next.ExpiresAt != clock+d.ResetAfter || d.ResetAfter < longestWait(p):
		return fail("it does not last")
	case !equalsNoRow(p, next, next.ExpiresAt) || equalsNoRow(p, next, next.ExpiresAt-1):
		return fail("it does not last until it expires")
	}
	for _, n := range []int64{0, 1, d.Remaining, p.Numbers().Limit} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}
	return next, d, nil
}

// checkRefund is checkDecision of a refund of k.
func checkRefund(p ruled, s model.State, clock int64, k model.Take) (model.State, model.Decision, error) {
	before := peek(p, s, clock)
	next, d := p.Refund(s, clock, k)
	rolled := d.State
	d.State, d.Taken = model.State{}, model.Take{}
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, refund of %+v at %d from %+v: decided %+v, and then %+v: %s",
			p, p, k, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// It gives back up to what was asked, ordinary room and credit apart.
	counted, scale := usage(p, s, clock)
	left, _ := usage(p, next, clock)
	ordinary := new(big.Int).Mul(big.NewInt(k.Units-k.Spent), big.NewInt(scale))
	back, credited := new(big.Int).Sub(counted, left), creditOf(p, next, clock)-creditOf(p, s, clock)
	switch {
	case back.Sign() < 0 || back.Cmp(ordinary) > 0:
		return fail("it counted %v, and counts %v", counted, left)
	case credited < 0 || credited > k.Spent:
		return fail("it has given back a credit of %d", credited)
	case d.Granted != 1 || d.RetryAfter != 0:
		return fail("it is refused")
	case d.Remaining < before.Remaining || d.Remaining > p.Numbers().Limit+creditOf(p, next, clock):
		return fail("Remaining was %d", before.Remaining)
	case d.Remaining != peek(p, next, clock).Remaining:
		return fail("Remaining is %d", peek(p, next, clock).Remaining)
	case d.ResetAfter > before.ResetAfter && credited == 0:
		return fail("ResetAfter was %d", before.ResetAfter)
	case (back.Sign() == 0 && credited == 0) != (next == s):
		return fail("it has changed the row, or given back nothing, and not both")
	case withoutLog(rollForward(p, next, clock)) != withoutLog(rolled):
		return fail("its state is %+v", rolled)
	case next.ExpiresAt < s.ExpiresAt && (next.Count > 0 || next.PrevCount > 0 || d.ResetAfter > 0):
		return fail("something in it counts, and is forgotten earlier")
	}

	// When all is given back, the key is as good as new.
	if (left.Sign() == 0 && creditOf(p, next, clock) == 0) != (d.ResetAfter == 0) {
		return fail("ResetAfter does not go with what it counts")
	}
	unwritten := leftBehind(p, s, clock) && next == s // as in checkDecision
	for _, late := range []int64{0, 1, reach(p), model.MaxSpan} {
		if !unwritten && !equalsNoRow(p, next, max(next.ExpiresAt, clock+d.ResetAfter)+late) {
			return fail("%d µs after ResetAfter it does not equal no row", late)
		}
	}
	if d.ResetAfter > 0 && !unwritten && equalsNoRow(p, next, clock+d.ResetAfter-1) {
		return fail("a µs before ResetAfter the key is as good as new")
	}

	// It does harm at no time: what would have been allowed without it, is allowed. (A row that is pulled back to
	// the clock is another matter, and one that gets credit lives longer, as after a Grant.) And a clock that
	// steps back shows no more.
	for _, later := range []int64{0, 1, d.ResetAfter, before.ResetAfter - 1, before.ResetAfter, reach(p), 2 * reach(p)} {
		for _, n := range []int64{1, before.Remaining, d.Remaining, p.Numbers().Limit} {
			if later >= 0 && credited == 0 && !leftBehind(p, s, clock) && fits(p, s, clock+later, n) &&
				!fits(p, next, clock+later, n) {
				return fail("%d would have been allowed %d µs later, and is not", n, later)
			}
		}
	}
	for _, back := range []int64{1, reach(p) / 2, reach(p), reach(p) + 1, 2*reach(p) + 1, clock} {
		if was := peek(p, next, max(clock-back, 0)).Remaining - creditOf(p, next, max(clock-back, 0)); was > d.Remaining {
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
			var s model.State
			takes, left := make([]model.Take, len(test.steps)+1), make([]int64, len(test.steps)+1)
			for i, step := range test.steps {
				if step.of == 0 {
					next, d := test.policy.Decide(s, step.at, step.n)
					require.Equal(t, step.n > 0, d.Granted == 1, "step %d", i)
					s, takes[i+1], left[i+1] = next, d.Taken, step.n
					continue
				}
				n := step.n
				if n == 0 {
					n = left[step.of]
				}
				before := peek(test.policy, s, step.at).Remaining
				counted, scale := usage(test.policy, s, step.at)
				next, d, err := checkRefund(
					test.policy,
					s,
					step.at,
					takes[step.of].Portion(test.policy, left[step.of]-n, left[step.of]),
				)
				require.NoError(t, err, "step %d", i)
				now, _ := usage(test.policy, next, step.at)
				require.Equal(t, step.back, counted.Sub(counted, now).Int64()/scale, "step %d", i)
				require.GreaterOrEqual(t, d.Remaining, before)
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
	s, _ := long.Decide(model.State{}, c0, 2)
	s, d := long.Decide(s, c0+1, 1)
	next, _, err := checkRefund(SlidingLog{Limit: 1, Window: time.Microsecond}, s, c0, d.Taken)
	require.NoError(t, err)
	require.Zero(t, next.Count)
}

// What came out of credit goes back as credit, and before the rest; but not to a row that was made since.
func TestRefundGivesCreditBackAsCredit(t *testing.T) {
	t.Parallel()
	for _, p := range []ruled{
		FixedWindow{10, time.Minute}, SlidingWindow{10, time.Minute}, TokenBucket{10, 1, time.Hour},
		SlidingLog{10, time.Minute}, CalendarWindow{10, CalendarMinute, ""},
	} {
		s, _ := model.Grant(p, model.State{}, c0, 5)
		s, _ = p.Decide(s, c1, 8)
		s, d := p.Decide(s, c2, 6)
		k := d.Taken
		require.EqualValues(t, 4, k.Spent, "%T", p)
		back := func(at, from, to, credit int64) {
			t.Helper()
			next, _, err := checkRefund(p, s, at, k.Portion(p, from, to))
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
		s, d := short.Decide(model.State{}, c0, 6)
		s, _, err := checkRefund(long, s, c1, d.Taken.Portion(long, 5, 6))
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
		s, three := p.Decide(model.State{}, c0, 3)
		peeked, _ := other.Decide(s, c0, 0)
		_, _, err := checkRefund(p, peeked, c0, three.Taken)
		require.NoError(t, err)
		back, _ := p.Refund(peeked, c0, three.Taken)
		require.True(t, equalsNoRow(p, back, c0), "nobody has taken")

		s, d := other.Decide(s, c1, 7)
		require.EqualValues(t, 1, d.Granted)
		for _, p := range []TokenBucket{p, other} {
			back, _ := p.Refund(s, c1, three.Taken)
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
		if bucket, ok := p.(TokenBucket); ok && bucket.full() > model.MaxReturned/4 {
			continue // it may forget, see maxReturned
		}
		var s model.State
		var last model.Decision
		clock := d.magnitude(0, 1<<52)
		for range 10 {
			clock = d.clock(p, s, clock, last)
			s, last = p.Decide(s, clock, d.cost(p.Numbers().Limit, peek(p, s, clock).Remaining))
		}
		before := peek(p, s, clock)
		counted, _ := usage(p, s, clock)
		var takes []model.Take
		for range 3 {
			if room := peek(p, s, clock).Remaining; room > 0 {
				s, last = p.Decide(s, clock, d.magnitude(1, room))
				takes = append(takes, last.Taken)
			}
		}
		for len(takes) > 0 {
			i := int(d(int64(len(takes))))
			s, last = p.Refund(s, clock, takes[i])
			takes = slices.Delete(takes, i, i+1)
			undone++
		}
		now, _ := usage(p, s, clock)
		require.Equal(t, before.Remaining, peek(p, s, clock).Remaining, "%T%+v at %d", p, p, clock)
		require.Zero(t, counted.Cmp(now))
	}
	require.Greater(t, undone, 3000)
}
