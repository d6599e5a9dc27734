package model_test

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// refundStep takes n units, or refunds n units of an earlier step's take. back is how many units the refund gives back.
type refundStep struct {
	at   int64
	n    int64 // 0 means all units that are left
	of   int   // the number of the step that took, counted from 1; 0 means that this step takes
	back int64
}

func TestRefundGivesBackWhatStillCounts(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.Rules
		steps  []refundStep
	}{
		{"a fixed window, what the same window counts", model.FixedWindow{10, time.Minute}, []refundStep{
			{c0, 6, 0, 0}, {c1, 4, 0, 0}, {c2, 0, 1, 6}, {c3, 5, 0, 0}, {c4, 2, 2, 2},
			{c0 + minute, 1, 0, 0}, // the next window begins
			{c1 + minute, 2, 2, 0}, {c1 + minute, 0, 4, 0}, {c1 + minute, 0, 6, 1},
		}},
		{"a sliding window, also what the one before counted", model.SlidingWindow{10, time.Minute}, []refundStep{
			{c0, 8, 0, 0}, {c1 + minute, 1, 0, 0}, {c2 + minute, 3, 1, 3}, {c3 + minute, 0, 2, 1},
			{c4 + 2*minute - second, 1, 0, 0}, {c5 + 2*minute, 0, 1, 0},
		}},
		{"a sliding log, what is in it", model.SlidingLog{10, time.Minute}, []refundStep{
			{c0, 4, 0, 0}, {c1, 3, 0, 0}, {c2, 2, 0, 0},
			{c3, 1, 1, 1}, {c4, 0, 3, 2}, {c0 + minute - 1, 2, 1, 2}, {c0 + minute, 0, 1, 0}, {c0 + minute, 0, 2, 3},
		}},
		{"a bucket, what has not flowed in again", model.TokenBucket{10, 1, time.Second}, []refundStep{
			{c0, 4, 0, 0}, {c3, 0, 1, 1}, {c3, 1, 0, 0}, {c9, 0, 3, 0},
		}},
		{"a bucket in any order, as long as nothing flows in", model.TokenBucket{10, 1, time.Hour}, []refundStep{
			{c0, 1, 0, 0}, {c0, 2, 0, 0}, {c0, 3, 0, 0}, {c0, 0, 3, 3}, {c0, 0, 2, 2}, {c0, 4, 0, 0}, {c0, 0, 1, 1}, {c0, 3, 6, 3}, {c0, 0, 6, 1},
		}},
		{"a bucket that others have taken from before", model.TokenBucket{10, 1, time.Second}, []refundStep{
			// at c9, the refill has replaced the other unit of the second take
			{c0, 8, 0, 0}, {c0, 2, 0, 0}, {c8, 7, 0, 0}, {c8 + second/2, 1, 2, 1}, {c9, 0, 2, 0},
			{c9 + second, 0, 1, 0}, {c9 + second, 2, 3, 2},
		}},
		{"parts of a reservation", model.TokenBucket{1000, 100, time.Second}, []refundStep{
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

// Units that have left a log do not come back, even if the refund moves the row's WindowStart to an earlier time.
func TestRefundBehindTheClockCountsNoMore(t *testing.T) {
	t.Parallel()
	long := model.SlidingLog{Limit: 3, Window: 2 * time.Microsecond}
	s, _ := long.Decide(model.State{}, c0, 2)
	s, d := long.Decide(s, c0+1, 1)
	next, _, err := checkRefund(model.SlidingLog{Limit: 1, Window: time.Microsecond}, s, c0, d.Taken)
	require.NoError(t, err)
	require.Zero(t, next.Count)
}

// A refund first gives back the units that came from credit, as credit. It gives nothing to a newer row of the key.
func TestRefundGivesCreditBackAsCredit(t *testing.T) {
	t.Parallel()
	for _, p := range []model.Rules{
		model.FixedWindow{10, time.Minute}, model.SlidingWindow{10, time.Minute}, model.TokenBucket{10, 1, time.Hour},
		model.SlidingLog{10, time.Minute}, model.CalendarWindow{10, minutely, "UTC"},
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
			require.Equal(t, credit, modeltest.CreditOf(p, next, at), "%T", p)
			s = next
		}
		back(c3, 3, 6, 4)
		before, _ := usage(p, s, c3)
		back(c3, 0, 3, 5)
		after, scale := usage(p, s, c3)
		require.Equal(t, 2*scale, before.Sub(before, after).Int64(), "%T", p)

		later := c3 + 100*hour
		s, _ = p.Decide(s, later, 1) // the row was as good as new before this take
		back(later, 0, 6, 0)
	}
}

// A refund does not make usage last longer than the policy of the take promised, even if the refund's policy has a
// longer window.
func TestRefundUnderALongerWindowDoesNotProlongUsage(t *testing.T) {
	t.Parallel()
	for long, short := range map[model.Rules]model.Rules{
		model.FixedWindow{10, time.Hour}: model.FixedWindow{10, time.Minute}, model.SlidingWindow{10, time.Hour}: model.SlidingWindow{10, time.Minute},
		model.SlidingLog{10, time.Hour}: model.SlidingLog{10, time.Minute},
	} {
		s, d := short.Decide(model.State{}, c0, 6)
		s, _, err := checkRefund(long, s, c1, d.Taken.Portion(long, 5, 6))
		require.NoError(t, err)
		playModel(t, long, s, modelStep{c1 + 2*minute, 10, granted(0, longestWait(long))})
	}
}

// A take under other numbers may have found the bucket full. So the bucket then gives back nothing of earlier takes.
func TestRefundOfABucketWhoseNumbersHaveChanged(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{10, 1, time.Hour}
	for _, other := range []model.TokenBucket{{8, 1, time.Hour}, {12, 1, time.Hour}, {10, 2, time.Hour}, {10, 1, time.Minute}} {
		s, three := p.Decide(model.State{}, c0, 3)
		peeked, _ := other.Decide(s, c0, 0)
		_, _, err := checkRefund(p, peeked, c0, three.Taken)
		require.NoError(t, err)
		back, _ := p.Refund(peeked, c0, three.Taken)
		require.True(t, equalsNoRow(p, back, c0), "nobody has taken")

		s, d := other.Decide(s, c1, 7)
		require.EqualValues(t, 1, d.Granted)
		for _, p := range []model.TokenBucket{p, other} {
			back, _ := p.Refund(s, c1, three.Taken)
			require.Equal(t, s, back)
		}
	}
}

// Refunds at the time of the takes undo the takes exactly, in any order.
func TestRefundUndoesATake(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	undone := 0
	for range 3000 {
		limit, window := d.Window()
		p := []model.Rules{model.FixedWindow{limit, window}, model.SlidingWindow{limit, window}, d.Bucket(), d.Log(), d.Calendar()}[d(5)]
		if bucket, ok := p.(model.TokenBucket); ok && bucket.Full() > model.MaxReturned/4 {
			continue // above MaxReturned, the bucket has forgotten the take
		}
		var s model.State
		var last model.Decision
		clock := d.Magnitude(0, 1<<52)
		for range 10 {
			clock = d.Clock(p, s, clock, last)
			s, last = p.Decide(s, clock, d.Cost(p.Numbers().Limit, peek(p, s, clock).Remaining))
		}
		before := peek(p, s, clock)
		counted, _ := usage(p, s, clock)
		var takes []model.Take
		for range 3 {
			if room := peek(p, s, clock).Remaining; room > 0 {
				s, last = p.Decide(s, clock, d.Magnitude(1, room))
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

// A crash or a rollback can lose a take. A refund of the lost take does not change a row that is ahead of the clock.
// The row can still give back earlier takes when the clock is set forward again.
func TestRefundToABucketThatTheClockHasLeftBehind(t *testing.T) {
	t.Parallel()
	const later = c0 + minute
	p := model.TokenBucket{10, 1, time.Second}
	for granted, took := range map[int64]int64{0: 4, 5: 10} {
		var s model.State
		if granted > 0 {
			s, _ = model.Grant(p, s, later, granted)
		}
		s, kept := p.Decide(s, later, took)
		_, lost := p.Decide(s, c0, 2)
		require.EqualValues(t, 1, lost.Granted)
		require.Equal(t, granted > 0, lost.Taken.Spent > 0)
		next, _, err := checkRefund(p, s, c0, lost.Taken)
		require.NoError(t, err)
		require.Equal(t, s, next)
		next, _, err = checkRefund(p, next, later, kept.Taken)
		require.NoError(t, err)
		require.EqualValues(t, 10, peek(p, next, later).Remaining-granted)
	}
}

// Requests may take from a key under several policies. A refund adds at most its units to the room of each policy, at
// any later time. It never reduces the room.
func TestRefundAmongOtherPolicies(t *testing.T) {
	t.Parallel()
	d, rounds := modeltest.RandomDice(t), testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)
	back, credited := 0, 0
	for range 1000 * rounds {
		kind, policies := d(5), make([]model.Rules, 3)
		for i := range policies {
			limit, span := 1+d(20), model.Duration(1+d(100))
			policies[i] = []model.Rules{
				model.FixedWindow{limit, span}, model.SlidingWindow{limit, span}, model.SlidingLog{limit, span}, model.TokenBucket{limit, 1 + d(20), span},
				model.CalendarWindow{limit, modeltest.Units()[d(5)], modeltest.SteadyZones()[d(3)]},
			}[kind]
		}
		var s model.State
		var by []model.Rules
		var takes []model.Take
		clock := int64(1) << 50
		for range 20 {
			clock += d(20)
			p := policies[d(3)]
			var decided model.Decision
			switch d(8) {
			case 0:
				s, _ = model.Grant(p, s, clock, 1+d(5))
			case 1, 2, 3:
				if s, decided = p.Decide(s, clock, 1+d(p.Numbers().Limit)); decided.Granted == 1 {
					by, takes = append(by, p), append(takes, decided.Taken)
				}
			default:
				if len(takes) == 0 {
					continue
				}
				i := int(d(int64(len(takes))))
				p, k := by[i], takes[i]
				next, _, err := checkRefund(p, s, clock, k)
				require.NoError(t, err)
				gained := modeltest.CreditOf(p, next, clock) - modeltest.CreditOf(p, s, clock)
				for _, q := range policies {
					for range 8 {
						at := clock
						if gained == 0 { // a row that gets credit lives longer
							at += d(d.Magnitude(1, 4*modeltest.Reach(q)))
						}
						before, after := peek(q, s, at).Remaining, peek(q, next, at).Remaining
						if before > after ||
							// A row that is as good as new may show more room.
							!equalsNoRow(p, next, clock) && after > before+k.Units {
							require.Fail(t, "room", "%v took %+v from %+v at %d, then %+v, seen by %v at %d: %d, and then %d",
								p, k, s, clock, next, q, at, before, after)
						}
					}
				}
				if next != s {
					back++
				}
				if gained > 0 {
					credited++
				}
				s, by, takes = next, slices.Delete(by, i, i+1), slices.Delete(takes, i, i+1)
			}
		}
	}
	require.Greater(t, back, 250*rounds)
	require.Greater(t, credited, 25*rounds)
}
