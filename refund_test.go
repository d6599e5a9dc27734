package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/big"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// usage is what a row counts at a time, all of which can be given back, in units of which a cost of 1 has scale.
func usage(p Policy, s state, clock int64) (counted *big.Int, scale int64) {
	_, d := p.decide(s, clock, 0)
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
func creditOf(p Policy, s state, clock int64) int64 {
	_, d := p.decide(s, clock, 0)
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

// checkGrant is checkDecision of a Grant of n.
func checkGrant(p Policy, s state, clock, n int64) (state, decision, error) {
	before, held := peek(p, s, clock), creditOf(p, s, clock)
	counted, _ := usage(p, s, clock)
	next, d := p.grant(s, clock, n)
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
	for _, n := range []int64{0, 1, d.remaining, p.limit()} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}
	return next, d, nil
}

// checkRefund is checkDecision of a refund of k.
func checkRefund(p Policy, s state, clock int64, k take) (state, decision, error) {
	before := peek(p, s, clock)
	next, d := p.refund(s, clock, k)
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
	case d.remaining < before.remaining || d.remaining > p.limit()+creditOf(p, next, clock):
		return fail("Remaining was %d", before.remaining)
	case d.remaining != peek(p, next, clock).remaining:
		return fail("Remaining is %d", peek(p, next, clock).remaining)
	case d.resetAfter > before.resetAfter && credited == 0:
		return fail("ResetAfter was %d", before.resetAfter)
	case (back.Sign() == 0 && credited == 0) != (next == s):
		return fail("it has changed the row, or given back nothing, and not both")
	case next != s && (withoutLog(next) != withoutLog(rolled) || next.expiresAt != clock+d.resetAfter):
		return fail("its state is %+v", rolled)
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

	// It does harm at no time: what would have been allowed without it, is allowed. (A row that is pulled back to the clock is
	// another matter, and one that gets credit lives longer, as after a Grant.) And a clock that steps back shows no more.
	for _, later := range []int64{0, 1, d.resetAfter, before.resetAfter - 1, before.resetAfter, reach(p), 2 * reach(p)} {
		for _, n := range []int64{1, before.remaining, d.remaining, p.limit()} {
			if later >= 0 && credited == 0 && !leftBehind(p, s, clock) && fits(p, s, clock+later, n) && !fits(p, next, clock+later, n) {
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
		policy Policy
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
					next, d := test.policy.decide(s, step.at, step.n)
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
				next, d, err := checkRefund(test.policy, s, step.at, takes[step.of].part(test.policy, left[step.of]-n, left[step.of]))
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

// What came out of credit goes back as credit, and before the rest; but not to a row that was made since.
func TestRefundGivesCreditBackAsCredit(t *testing.T) {
	t.Parallel()
	for _, p := range []Policy{FixedWindow{10, time.Minute}, SlidingWindow{10, time.Minute}, TokenBucket{10, 1, time.Hour}, SlidingLog{10, time.Minute}} {
		s, _ := p.grant(state{}, c0, 5)
		s, _ = p.decide(s, c1, 8)
		s, d := p.decide(s, c2, 6)
		k := d.taken
		require.EqualValues(t, 4, k.spent, "%T", p)
		back := func(at, from, to, credit int64) {
			t.Helper()
			next, _, err := checkRefund(p, s, at, k.part(p, from, to))
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
		s, _ = p.decide(s, later, 1) // as good as new
		back(later, 0, 6, 0)
	}
}

// A refund keeps what the policy has promised that took: usage does not last longer because another policy gives some of it back.
func TestRefundUnderALongerWindowDoesNotProlongUsage(t *testing.T) {
	t.Parallel()
	for long, short := range map[Policy]Policy{
		FixedWindow{10, time.Hour}: FixedWindow{10, time.Minute}, SlidingWindow{10, time.Hour}: SlidingWindow{10, time.Minute},
		SlidingLog{10, time.Hour}: SlidingLog{10, time.Minute},
	} {
		s, d := short.decide(state{}, c0, 6)
		s, _, err := checkRefund(long, s, c1, d.taken.part(long, 5, 6))
		require.NoError(t, err)
		playModel(t, long, s, modelStep{c1 + 2*minute, 10, granted(0, longestWait(long))})
	}
}

// A bucket that was taken from under other numbers gives nothing of an earlier take back: it may have been full by them.
func TestRefundOfABucketWhoseNumbersHaveChanged(t *testing.T) {
	t.Parallel()
	p := TokenBucket{10, 1, time.Hour}
	for _, other := range []TokenBucket{{8, 1, time.Hour}, {12, 1, time.Hour}, {10, 2, time.Hour}, {10, 1, time.Minute}} {
		s, three := p.decide(state{}, c0, 3)
		peeked, _ := other.decide(s, c0, 0)
		_, _, err := checkRefund(p, peeked, c0, three.taken)
		require.NoError(t, err)
		back, _ := p.refund(peeked, c0, three.taken)
		require.True(t, equalsNoRow(p, back, c0), "nobody has taken")

		s, d := other.decide(s, c1, 7)
		require.EqualValues(t, 1, d.granted)
		for _, p := range []TokenBucket{p, other} {
			back, _ := p.refund(s, c1, three.taken)
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
		p := []Policy{FixedWindow{limit, window}, SlidingWindow{limit, window}, d.bucket(), d.log()}[d(4)]
		if bucket, ok := p.(TokenBucket); ok && bucket.full() > maxReturned/4 {
			continue // it may forget, see maxReturned
		}
		var s state
		var last decision
		clock := d.magnitude(0, 1<<52)
		for range 10 {
			clock = d.clock(p, s, clock, last)
			s, last = p.decide(s, clock, d.cost(p.limit(), peek(p, s, clock).remaining))
		}
		before := peek(p, s, clock)
		counted, _ := usage(p, s, clock)
		var takes []take
		for range 3 {
			if room := peek(p, s, clock).remaining; room > 0 {
				s, last = p.decide(s, clock, d.magnitude(1, room))
				takes = append(takes, last.taken)
			}
		}
		for len(takes) > 0 {
			i := int(d(int64(len(takes))))
			s, last = p.refund(s, clock, takes[i])
			takes = slices.Delete(takes, i, i+1)
			undone++
		}
		now, _ := usage(p, s, clock)
		require.Equal(t, before.remaining, peek(p, s, clock).remaining, "%T%+v at %d", p, p, clock)
		require.Zero(t, counted.Cmp(now))
	}
	require.Greater(t, undone, 3000)
}

// aTake is one that was allowed in a random history: what is kept was never given back.
type aTake struct {
	policy      Policy
	clock, in   int64
	units, kept int64
	giveBack    func(clock, n int64) error
}

// takesOf plays a random history for one key: takes, now and then under another limit, and refunds of what was taken, each unit at most
// once. take returns nil if it is denied.
func takesOf(d dice, draw func() Policy, steps int, back bool, ask func(p Policy, clock, n int64) (*aTake, error)) (takes []*aTake, forwards *big.Int, err error) {
	p, clock, forwards := draw(), d.magnitude(1<<50, 1<<51), new(big.Int)
	for range steps {
		step := d.magnitude(1, 2*reach(p))
		if d(4) == 0 {
			step = 1
		}
		if back && d(8) == 0 {
			clock -= step
		} else {
			clock += step
			forwards.Add(forwards, big.NewInt(step))
		}
		if d(10) == 0 {
			p = draw()
		}
		for range 1 + d(4) {
			if len(takes) == 0 || d(2) == 0 {
				took, err := ask(p, clock, min(d.magnitude(1, p.limit()), 1+d(max(p.limit()/2, 1))))
				if err != nil {
					return nil, nil, err
				}
				if took != nil {
					took.policy, took.clock, took.kept = p, clock, took.units
					takes = append(takes, took)
				}
			} else if took := takes[len(takes)-1-int(d(int64(min(len(takes), 12))))]; took.kept > 0 {
				n := took.kept
				if d(3) == 0 {
					n = 1 + d(n)
				}
				if err := took.giveBack(clock, n); err != nil {
					return nil, nil, err
				}
				took.kept -= n
			}
		}
	}
	return takes, forwards, nil
}

// mints tells what is wrong with what a history has kept.
func mints(takes []*aTake) error {
	var without state // of a bucket without all that was given back
	largest := int64(0)
	for i, took := range takes {
		if took.kept == 0 {
			continue
		}
		limit, window := took.policy.limit(), reach(took.policy)
		var within, same, before int64 // kept in the window that ends here, in the same of the row's and in the one before
		for _, other := range takes[:i+1] {
			if other.clock > took.clock-window {
				within += other.kept
			}
			switch other.in {
			case took.in:
				same += other.kept
			case took.in - window:
				before += other.kept
			}
		}
		largest = max(largest, limit)
		ok := true
		switch p := took.policy.(type) {
		case FixedWindow: // the take that has opened a window may have been given back
			ok = same <= limit && within <= 2*largest
		case SlidingWindow:
			sum := new(big.Int).Mul(big.NewInt(before), big.NewInt(window-(took.clock-took.in)))
			sum.Add(sum, new(big.Int).Mul(big.NewInt(same), big.NewInt(window)))
			ok = sum.Cmp(new(big.Int).Mul(big.NewInt(limit), big.NewInt(window))) <= 0 && within <= 2*largest-1
		case SlidingLog:
			ok = within <= limit
		case TokenBucket:
			var d decision
			without, d = p.decide(without, took.clock, took.kept)
			ok = d.granted == 1
		}
		if !ok {
			return fmt.Errorf("%T%+v: %d at %d are too many: %d in the row's window, %d in the one before, %d within the window that ends here",
				took.policy, took.policy, took.kept, took.clock, same, before, within)
		}
	}
	return nil
}

// drawFor returns policies of one kind, which differ in nothing but their limit, and buckets in nothing: of a bucket it matters whose
// numbers it was last rolled forward by, so that a take can let others through that would not have been without it.
func (d dice) drawFor(kind int64) func() Policy {
	window := 1_000_000 + d.magnitude(0, 1<<40)
	capacity := 1 + d(20)
	refill := ceilDiv(capacity*window, maxSpan) + d(20)
	return func() Policy {
		limit := 1 + d(20)
		return []Policy{
			FixedWindow{limit, duration(window)}, SlidingWindow{limit, duration(window)}, SlidingLog{limit, duration(window)},
			TokenBucket{capacity, refill, duration(window)},
		}[kind]
	}
}

// askModel asks the model, and gives back as refund does.
func askModel(refund func(p Policy, s state, clock int64, k take) state) func(p Policy, clock, n int64) (*aTake, error) {
	var s state
	return func(p Policy, clock, n int64) (*aTake, error) {
		next, d := p.decide(s, clock, n)
		s = next
		if d.granted == 0 {
			return nil, nil
		}
		left := n
		return &aTake{units: n, in: d.taken.in, giveBack: func(clock, n int64) error {
			k := d.taken.part(p, left-n, left)
			left -= n
			s = refund(p, s, clock, k)
			return nil
		}}, nil
	}
}

func rightRefund(p Policy, s state, clock int64, k take) state {
	next, _ := p.refund(s, clock, k)
	return next
}

// What is admitted and never given back stays within what the policy admits without refunds, whatever is given back and when.
func TestRefundsMintNothing(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	for range 2000 {
		for kind := range int64(4) {
			takes, _, err := takesOf(d, d.drawFor(kind), 60, false, askModel(rightRefund))
			require.NoError(t, err)
			require.NoError(t, mints(takes))
		}
	}
}

// With a clock that steps back, at most what the clock gives forwards.
func TestRefundsMintNothingWhenTheClockStepsBack(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	for range 1000 {
		for kind := range int64(4) {
			p := d.drawFor(kind)()
			takes, forwards, err := takesOf(d, func() Policy { return p }, 60, true, askModel(rightRefund))
			require.NoError(t, err)
			kept := int64(0)
			for _, took := range takes {
				kept += took.kept
			}
			gives := new(big.Int).Quo(forwards, big.NewInt(reach(p)))
			gives.Mul(gives, big.NewInt(p.limit()))
			if bucket, ok := p.(TokenBucket); ok {
				gives.Mul(forwards, big.NewInt(bucket.Refill))
				gives.Quo(gives, big.NewInt(micros(bucket.Every)))
			}
			require.LessOrEqual(t, big.NewInt(kept).Cmp(gives.Add(gives, big.NewInt(p.limit()))), 0, "%T%+v: %d kept", p, p, kept)
		}
	}
}

// Negative controls: refunds that are broken in one way mint, and the check sees it.
func TestBrokenRefundsMint(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kinds  []int64
		refund func(p Policy, s state, clock int64, k take) state
	}{
		"of whatever the row counts now": {[]int64{0, 1, 2, 3}, func(p Policy, s state, clock int64, k take) state {
			row := rollForward(p, s, clock)
			k.since, k.in = row.since, row.windowStart
			return rightRefund(p, s, clock, k)
		}},
		"twice": {[]int64{0, 1, 2, 3}, func(p Policy, s state, clock int64, k take) state {
			return rightRefund(p, rightRefund(p, s, clock, k), clock, k)
		}},
		"that do not move up those behind them": {[]int64{3}, func(p Policy, s state, clock int64, k take) state {
			next := rightRefund(p, s, clock, k)
			next.returned = 0
			return next
		}},
		"of tokens that have flowed in since": {[]int64{3}, func(p Policy, s state, clock int64, k take) state {
			k.in = max(rollForward(p, s, clock).windowStart, k.in)
			return rightRefund(p, s, clock, k)
		}},
	} {
		for _, kind := range c.kinds {
			d := randomDice(t)
			caught := false
			for range 3000 {
				takes, _, err := takesOf(d, d.drawFor(kind), 60, false, askModel(c.refund))
				require.NoError(t, err)
				if caught = mints(takes) != nil; caught {
					break
				}
			}
			require.True(t, caught, "refunds %s, of kind %d", name, kind)
		}
	}
}

// askLimiter asks a limiter, whose clock is clock.
func askLimiter(t *testing.T, l *Limiter, clock *time.Time) func(p Policy, at, n int64) (*aTake, error) {
	return func(p Policy, at, n int64) (*aTake, error) {
		*clock = time.UnixMicro(at)
		result, err := l.with(t, p).AllowN(t.Context(), "key", n)
		if err != nil || !result.Allowed {
			return nil, err
		}
		return &aTake{units: n, in: result.receipt.parts[0].in, giveBack: func(at, n int64) error {
			*clock = time.UnixMicro(at)
			_, err := l.RefundN(t.Context(), result, n)
			return err
		}}, nil
	}
}

func TestRefundsMintNothingOnAServer(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	play := func(pool *pgxpool.Pool, kind int64, name string) error {
		var clock time.Time
		draw := d.drawFor(kind)
		l := newLimiter(t, pool, Config{Name: name, Policy: draw(), Timeout: amply, NoDenialCache: true, Test: TestConfig{Now: func() time.Time { return clock }}})
		takes, _, err := takesOf(d, draw, 40, false, askLimiter(t, l, &clock))
		require.NoError(t, err)
		return mints(takes)
	}
	pool := pgtest.New(t).Pool
	for round := range 8 * rounds(t) {
		for kind := range int64(4) {
			require.NoError(t, play(pool, kind, fmt.Sprint(round, kind)))
		}
	}
	const ofTheSameWindow, ofAny = "s.window_start = taken_in[part]", "taken_in[part] IS NOT NULL"
	for _, mutant := range []struct {
		kind         int64
		function     string
		right, wrong string
	}{
		{0, "rate_limit_all", ofTheSameWindow, ofAny},
		{1, "rate_limit_all", ofTheSameWindow, ofAny},
		{2, "rate_limit_all", "= taken_in[part] << 10", "<> 0 LIMIT 1"},
		{3, "rate_limit_all", "s.returned := s.returned + back;", ""},
		// What a take that was decided in one statement says of itself: its place in the queue.
		{3, "rate_limit_token_bucket", "returned + full_credit -", "returned + 2 * full_credit -"},
	} {
		db := pgtest.New(t)
		rewrite(t, db.Pool, mutant.function, mutant.right, mutant.wrong)
		caught := false
		for round := 0; round < 400 && !caught; round++ {
			caught = play(db.Pool, mutant.kind, fmt.Sprint(round)) != nil
		}
		require.True(t, caught, "%+v", mutant)
	}
}

// The attack that refunds by key alone allowed: takes all along, which are given back together.
func TestHoardedTakesGiveNothingBack(t *testing.T) {
	t.Parallel()
	const limit = 5
	eachSlowPolicyAllAndTable(t, limit, func(t *testing.T, config Config) {
		now := t0
		config.Test.Now, config.NoDenialCache = func() time.Time { return now }, true
		config.Policy = map[string]Policy{
			"ratelimit.FixedWindow": FixedWindow{limit, time.Minute}, "ratelimit.SlidingWindow": SlidingWindow{limit, time.Minute},
			"ratelimit.SlidingLog": SlidingLog{limit, time.Minute}, "ratelimit.TokenBucket": TokenBucket{limit, limit, time.Minute},
			"ratelimit.all": All(FixedWindow{limit, time.Minute}, SlidingLog{limit, time.Minute}),
		}[fmt.Sprintf("%T", config.Policy)]
		limiter := newLimiter(t, pgtest.New(t).Pool, config)
		var takes []Result
		for range 10 {
			result, err := limiter.AllowN(t.Context(), "key", limit)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			takes = append(takes, result)
			now = now.Add(2 * time.Minute)
		}
		admitted := 0
		for _, result := range takes {
			_, err := limiter.Refund(t.Context(), result)
			require.NoError(t, err)
			for {
				result, err := limiter.Allow(t.Context(), "key")
				require.NoError(t, err)
				if !result.Allowed {
					break
				}
				admitted++
			}
			now = now.Add(50 * time.Millisecond)
		}
		require.Equal(t, limit, admitted)
	})
}

// What is in the table after each call, in both of them.
func TestRefundWritesOnlyWhatItGivesBack(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		config.Test = frozen(t0)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		refund := func(taken Result, n, remaining int64) Result {
			result, err := limiter.RefundN(t.Context(), taken, n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Zero(t, result.RetryAfter)
			require.EqualValues(t, 10, result.Limit)
			require.Equal(t, remaining, result.Remaining)
			return result
		}
		version := func() string {
			return scalar[string](t, db.Pool, "SELECT string_agg(format('%s %s', ctid, xmin), ' ' ORDER BY prefix) FROM "+table(config.Durable))
		}

		refund(forged(limiter, "key", 3), 3, 10)
		require.Empty(t, storedRows(t, db.Pool, config.Durable)) // it makes no row

		seven, err := limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		require.Positive(t, refund(seven, 3, 6).ResetAfter)
		require.EqualValues(t, 4, taken(t, db.Pool, config, "key"))

		require.Zero(t, refund(seven, 4, 10).ResetAfter)
		row := storedRows(t, db.Pool, config.Durable)[rowID{"test", "key"}]
		require.Equal(t, t0.UnixMicro(), row.expiresAt)
		before := version()
		refund(forged(limiter, "key", 3), 1, 10)
		require.Equal(t, before, version(), "it had nothing to give back")

		// A row that is locked is not waited for by those who ask for others, and is by a refund.
		seven, err = limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		tx := hold(t, db, config, "key")
		waiting := later(func() (Result, error) { return limiter.Refund(context.Background(), seven) })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := waiting()
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
	})
}

func TestRefundIsKeptOrTakenAgainWithTheTransaction(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		eight, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		refund := func(tx pgx.Tx, n, remaining int64) {
			result, err := limiter.RefundNTx(t.Context(), tx, eight, n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, remaining, result.Remaining)
		}

		tx := begin(t, db)
		refund(tx, 3, 5)
		inner := savepoint(t, tx)
		refund(inner, 5, 10)
		require.NoError(t, inner.Rollback(t.Context()))
		refund(tx, 1, 6)
		peek, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 2, peek.Remaining) // nobody else sees it yet
		require.NoError(t, tx.Rollback(t.Context()))
		require.EqualValues(t, 8, taken(t, db.Pool, config, "key"))

		tx = begin(t, db)
		refund(tx, 3, 5)
		other := later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 5) })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 10, taken(t, db.Pool, config, "key"))
	})
}

// A denial that is remembered does not outlive a refund by the same limiter, whether the refund came through or may have.
func TestRefundForgetsTheDenial(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		config.DenialMaxAge = time.Hour
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		exhaust := func() (all Result) {
			for _, want := range []bool{true, false, false} {
				result, err := limiter.AllowN(t.Context(), "key", 10)
				require.NoError(t, err)
				require.Equal(t, want, result.Allowed)
				if want {
					all = result
				}
			}
			_, remembered := limiter.denials.deny(limiter.policy, "key", 1)
			require.True(t, remembered)
			return all
		}
		_, err := limiter.Refund(t.Context(), exhaust())
		require.NoError(t, err)
		all := exhaust()
		tx := begin(t, db)
		_, err = limiter.RefundTx(t.Context(), tx, all)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		all = exhaust()

		// The caller leaves before the refund, which goes on.
		tx = hold(t, db, config, "key")
		ctx, leave := context.WithCancel(t.Context())
		waiting := later(func() (Result, error) { return limiter.Refund(ctx, all) })
		waitUntilBlocked(t, db.Pool, 1)
		leave()
		_, err = waiting()
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, tx.Commit(t.Context()))
		waitUntil(t, func() bool {
			result, err := limiter.Peek(t.Context(), "key")
			return err == nil && result.Remaining == 10
		})
		waitUntil(t, func() bool {
			all, err = limiter.AllowN(t.Context(), "key", 10)
			return err == nil && all.Allowed
		})
		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)

		// After an error too.
		exec(t, db.Pool, "ALTER TABLE "+table(config.Durable)+" RENAME TO elsewhere")
		_, err = limiter.Refund(t.Context(), all)
		require.ErrorIs(t, err, ErrNotMigrated)
		require.EqualValues(t, 10, all.receipt.leftover(), "it was surely not given back")
		_, remembered := limiter.denials.deny(limiter.policy, "key", 1)
		require.False(t, remembered)
	})
}

// Callers take and give back what they have taken. At no time is more than the limit taken, and in the end the books agree with
// the row.
func TestRefundsAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 20, func(t *testing.T, config Config) {
		const callers, calls = 16, 60
		config.Test = frozen(t0) // what flows into a bucket meanwhile is not given back
		db := pgtest.New(t)
		limiters := []*Limiter{newLimiter(t, db.NewPool(t, nil), config), newLimiter(t, db.NewPool(t, nil), config)}
		var out, refunded atomic.Int64 // what is taken for certain, and not yet on its way back
		errs := make([]error, callers)
		together(callers, func(i int) {
			limiter := limiters[i%2]
			var mine []Result
			for call := range calls {
				n := 1 + int64((i+call)%5)
				var result Result
				if len(mine) > 0 && call%3 > 0 {
					at := call % len(mine)
					result = mine[at]
					mine = slices.Delete(mine, at, at+1)
					n = result.receipt.leftover()
					out.Add(-n)
					if _, errs[i] = limiter.Refund(t.Context(), result); errs[i] != nil {
						return
					}
					refunded.Add(n)
					continue
				}
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); errs[i] != nil {
					return
				}
				if result.Allowed {
					mine = append(mine, result)
					if now := out.Add(n); now > 20 {
						errs[i] = fmt.Errorf("%d of 20 are taken", now)
						return
					}
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, out.Load(), taken(t, db.Pool, config, "key"))
		require.Greater(t, refunded.Load(), int64(100))
	})
}

// Batches that cross, of takes of new keys and refunds of old ones, lock in one order; without the rows of refunds among those that
// are made, they do not.
func TestCrossingRefundsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	cross := func(db *pgtest.DB, rounds int) error {
		const workers = 4
		exec(t, db.Pool, "SELECT rate_limit_fixed_window('n', array_agg('old ' || k), 1000000, 1000000000) FROM generate_series(0, 9) AS k")
		errs := make([]error, workers)
		var over atomic.Bool
		together(workers, func(i int) {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for round := 0; round < rounds && !over.Load(); round++ {
				var keys []string
				var costs []int64
				for range 6 {
					keys = append(keys, fmt.Sprint("old ", random.IntN(10)))
					costs = append(costs, 2*random.Int64N(2)-1)
				}
				keys, costs = append(keys, fmt.Sprintf("old %d, new %d", random.IntN(10), round)), append(costs, 1)
				_, errs[i] = db.Pool.Exec(t.Context(), "SELECT rate_limit_fixed_window('n', $1, 1000000, 1000000000, $2)", keys, costs)
				if errs[i] != nil {
					over.Store(true)
				}
			}
		})
		return errors.Join(errs...)
	}
	require.NoError(t, cross(pgtest.New(t), 150))

	db := pgtest.New(t)
	rewrite(t, db.Pool, "rate_limit_all",
		"(SELECT durables), (SELECT refused)) AS e (name, key, durable, refused)", "(SELECT durables), (SELECT refused), (SELECT costs)) AS e (name, key, durable, refused, cost)",
		"WHERE NOT e.refused AND", "WHERE e.cost > 0 AND NOT e.refused AND",
	)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, cross(db, 100_000), &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
}

// What cannot be given back is refused before the database is asked.
func TestWhatCannotBeRefunded(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	config := Config{Name: "a", Policy: FixedWindow{Limit: 10, Window: year}}
	limiter := newLimiter(t, pool, config)
	take := func(n int64) Result {
		result, err := limiter.AllowN(t.Context(), "personal", n)
		require.NoError(t, err)
		return result
	}
	six := take(6)
	denied := take(5)
	require.False(t, denied.Allowed)
	cached := take(5)
	require.Equal(t, SourceCachedDenial, cached.Source)
	for name, result := range map[string]Result{"the zero Result": {}, "a denial": denied, "one that was remembered": cached, "a Peek": take(0)} {
		_, err := limiter.Refund(t.Context(), result)
		require.ErrorIs(t, err, ErrNothingToRefund, name)
		_, err = limiter.RefundN(t.Context(), result, 1)
		require.ErrorIs(t, err, ErrNothingToRefund, name)
	}

	// Another limiter is one of another name, table, schema or database; a policy does not make one.
	other := func(pool *pgxpool.Pool, change func(*Config)) {
		config := config
		change(&config)
		l := newLimiter(t, pool, config)
		_, err := l.Refund(t.Context(), six)
		var refused *RefundError
		require.ErrorAs(t, err, &refused)
		require.NotContains(t, err.Error(), "personal")
	}
	other(pool, func(c *Config) { c.Name = "b" })
	other(pool, func(c *Config) { c.Durable = true })
	other(pool, func(c *Config) { c.Schema = "public" })
	other(db.NewPool(t, nil), func(*Config) {})

	back, err := newLimiter(t, pool, config).with(t, FixedWindow{Limit: 3, Window: year}).RefundN(t.Context(), six, 2)
	require.NoError(t, err)
	require.EqualValues(t, 6, back.Remaining) // under the policy that took
	_, err = limiter.Refund(t.Context(), back)
	require.ErrorIs(t, err, ErrNothingToRefund)

	// Each unit once, whoever is first.
	var given atomic.Int64
	together(8, func(int) {
		if _, err := limiter.RefundN(context.Background(), six, 1); err == nil {
			given.Add(1)
		}
	})
	require.EqualValues(t, 4, given.Load())
	_, err = limiter.Refund(t.Context(), six)
	require.ErrorIs(t, err, ErrNothingToRefund)
	require.Zero(t, taken(t, db.Pool, config, "personal"))

	// In a transaction, which may be run again, it stays.
	four := take(4)
	for range 2 {
		tx := begin(t, db)
		result, err := limiter.RefundTx(t.Context(), tx, four)
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.EqualValues(t, 4, four.receipt.leftover())
}

// Those who are decided together, wait together or ask several limits can each give back what is theirs.
func TestEachGivesBackItsOwn(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 12, func(t *testing.T, config Config) {
		pool := pgtest.New(t).Pool
		config.Test = frozen(t0)
		limiter := newLimiter(t, pool, config)
		batch := newCalls("key", 3, 3, 3)
		for _, c := range batch {
			c.by = limiter
		}
		limiter.send(&flight{batch: batch})
		results, errs := outcomes(batch)
		require.NoError(t, errors.Join(errs...))
		for i, left := range []int64{6, 3, 0} {
			_, err := limiter.Refund(t.Context(), results[[]int{1, 0, 2}[i]])
			require.NoError(t, err)
			require.Equal(t, left, taken(t, pool, config, "key"))
		}

		waited, errs := make([]Result, 3), make([]error, 3)
		together(3, func(i int) { waited[i], errs[i] = limiter.WaitN(t.Context(), "key", int64(1+i)) })
		require.NoError(t, errors.Join(errs...))
		require.EqualValues(t, 6, taken(t, pool, config, "key"))
		for i, left := range []int64{5, 3, 0} {
			_, err := limiter.Refund(t.Context(), waited[i])
			require.NoError(t, err)
			require.Equal(t, left, taken(t, pool, config, "key"))
		}

		config.Name = "other"
		other := newLimiter(t, pool, config)
		both, err := AllowAll(t.Context(), limiter.Request("key", 2), other.Request("key", 5))
		require.NoError(t, err)
		_, err = limiter.Refund(t.Context(), both.Each[1])
		require.ErrorContains(t, err, "refund it there")
		_, err = other.RefundN(t.Context(), both.Each[1], 4)
		require.NoError(t, err)
		require.EqualValues(t, 1, taken(t, pool, config, "key"))
		config.Name = limiter.Name()
		require.EqualValues(t, 2, taken(t, pool, config, "key"))
	})
}
