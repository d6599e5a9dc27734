package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
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

// withSpent is what the database tells of a state after requests that have spent so much credit.
func withSpent(p Policy, s state, spent int64) state {
	if _, ok := p.(TokenBucket); ok {
		s.prevCount = spent
	} else {
		s.scale = spent
	}
	return s
}

// checkGrant is checkDecision of a Grant of n.
func checkGrant(p Policy, s state, clock, n int64) (state, decision, error) {
	before, held := peek(p, s, clock), creditOf(p, s, clock)
	counted, _ := usage(p, s, clock)
	next, d := p.(granter).grant(s, clock, n)
	rolled := d.state
	d.state = state{}
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

// checkRefund is checkDecision of a refund: n is below 0.
func checkRefund(p Policy, s state, clock, n int64) (state, decision, error) {
	before := peek(p, s, clock)
	next, d := p.decide(s, clock, n)
	rolled := d.state
	d.state = state{}
	fail := func(format string, args ...any) (state, decision, error) {
		return next, d, fmt.Errorf("%T%+v, refund of %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// It gives back what was asked, or all that there is.
	want, scale := usage(p, s, clock)
	back := new(big.Int).Mul(big.NewInt(n), big.NewInt(scale))
	nothing := want.Sign() == 0
	if want.Add(want, back).Sign() < 0 {
		want.SetInt64(0)
	}
	left, _ := usage(p, next, clock)
	switch {
	case left.Cmp(want) != 0:
		return fail("it counts %v, not %v", left, want)
	case d.granted != 1 || d.retryAfter != 0:
		return fail("it is refused")
	case d.remaining < before.remaining || d.remaining > p.limit()+creditOf(p, next, clock):
		return fail("Remaining was %d", before.remaining)
	case d.remaining != peek(p, next, clock).remaining:
		return fail("Remaining is %d", peek(p, next, clock).remaining)
	case d.resetAfter > before.resetAfter:
		return fail("ResetAfter was %d", before.resetAfter)
	case nothing && next != s:
		return fail("it had nothing to give back, and has changed the row")
	case !nothing && (withoutLog(next) != withoutLog(rolled) || next.expiresAt != clock+d.resetAfter):
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
	// another matter.) And a clock that steps back shows no more.
	for _, later := range []int64{0, 1, d.resetAfter, before.resetAfter - 1, before.resetAfter, reach(p), 2 * reach(p)} {
		for _, n := range []int64{1, before.remaining, d.remaining, p.limit()} {
			if later >= 0 && !leftBehind(p, s, clock) && fits(p, s, clock+later, n) && !fits(p, next, clock+later, n) {
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

func TestRefundGivesBack(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy Policy
		steps  []modelStep
	}{
		{"fixed window", FixedWindow{10, time.Minute}, []modelStep{
			{c0, -3, granted(10, 0)}, // there is nothing
			{c0, 8, granted(2, minute)},
			{c1, -3, granted(5, 59*second)},
			{c1, 5, granted(0, 59*second)},
			{c1, 1, denied(0, 59*second, 59*second)},
			{c2, -1, granted(1, 58*second)},
			{c2, 1, granted(0, 58*second)},
			{c3, -10, granted(10, 0)}, // as good as new: a window starts with the next request
			{c5, 1, granted(9, minute)},
			{c5, -100, granted(10, 0)},
			{c6, 10, granted(0, minute)},
			{c6 + minute, -1, granted(10, 0)}, // that window has ended
			{c6 + minute, 1, granted(9, minute)},
		}},
		{"a fixed window whose clock has stepped back", FixedWindow{10, time.Minute}, []modelStep{
			{c9, 8, granted(2, minute)},
			{c0, -3, granted(5, 69*second)},
			{c0, -5, granted(10, 0)},
			{c0, 1, granted(9, minute)},
			{c9, 8, granted(1, 51*second)},
			{c0 - hour, -1, granted(2, minute)}, // pulled back, with its usage
			{c1 - hour, 1, granted(1, 59*second)},
		}},
		{"sliding window", SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:00:00"), -3, granted(10, 0)},
			{at("12:00:00"), 8, granted(2, 2*minute)},
			{at("12:00:00"), -3, granted(5, 2*minute)},
			{at("12:01:30"), 4, granted(3, 90*second)},  // 5 × 0.5 + 4 = 6.5
			{at("12:01:30"), -3, granted(6, 90*second)}, // of this window first: 5 × 0.5 + 1
			{at("12:01:30"), -3, granted(8, 30*second)}, // then of the one before: 3 × 0.5
			{at("12:01:30"), 8, granted(0, 90*second)},
			{at("12:01:30"), -11, granted(10, 0)},
			{at("12:01:40"), 10, granted(0, 2*minute)}, // a window starts here
			{at("12:02:40"), 1, denied(0, 6*second, minute)},
			{at("12:02:40"), -9, granted(9, minute)},
			{at("12:03:40"), -9, granted(10, 0)},
		}},
		{"a sliding window whose clock has stepped back", SlidingWindow{10, time.Minute}, []modelStep{
			{at("12:01:00"), 8, granted(2, 2*minute)},
			{at("12:02:30"), 6, granted(0, 90*second)},
			{at("12:01:59"), -6, granted(2, 61*second)}, // the window before still weighs in full
			{at("12:01:59"), -8, granted(10, 0)},
			{at("12:01:59"), 1, granted(9, 2*minute)},
			{at("12:02:59"), 8, granted(1, 2*minute)},
			{at("12:02:59"), -8, granted(9, minute)},
			{at("03:00:00"), 10, denied(9, minute, minute)}, // pulled back: 1 is left, of the window before
			{at("03:00:00"), -1, granted(10, 0)},
		}},
		{"token bucket", TokenBucket{10, 1, time.Second}, []modelStep{
			{c0, -3, granted(10, 0)},
			{c0, 10, granted(0, 10*second)},
			{c0 + second/2, -3, granted(3, 6500*second/1000)},
			{c1, 4, granted(0, 10*second)},
			{c1, -1, granted(1, 9*second)},
			{c1, -9, granted(10, 0)},
			{c1, 1, granted(9, second)},
			{c1 + second/2, -1, granted(10, 0)}, // never above full
			{c1 + second/2, 10, granted(0, 10*second)},
		}},
		{"a token bucket whose clock has stepped back", TokenBucket{10, 1, time.Second}, []modelStep{
			{c9, 10, granted(0, 10*second)},
			{c1, -4, granted(4, 14*second)},
			{c1, -6, granted(10, 0)},
			{c1, 10, granted(0, 10*second)},
			{c1 - hour, -2, granted(2, 8*second)}, // pulled back
			{c2 - hour, 3, granted(0, 10*second)},
		}},
		{"sliding log", SlidingLog{10, time.Minute}, []modelStep{
			{c0, -3, granted(10, 0)}, // there is nothing
			{c0, 4, granted(6, minute)},
			{c1, 3, granted(3, minute)},
			{c2, 2, granted(1, minute)},
			{c3, -4, granted(5, 58*second)}, // the newest first: 2 of c2, 2 of c1
			{c3, 6, denied(5, 57*second, 58*second)},
			{c0 + minute, 9, granted(0, minute)},
			{c0 + minute, -9, granted(9, second)},
			{c0 + minute, -1, granted(10, 0)}, // as good as new
			{c0 + minute, 10, granted(0, minute)},
			{c1 + minute, -100, granted(10, 0)},
			{c1 + minute, 1, granted(9, minute)},
		}},
		{"a sliding log whose clock has stepped back", SlidingLog{10, time.Minute}, []modelStep{
			{c0, 2, granted(8, minute)},
			{c9, 6, granted(2, minute)},
			{c1, -5, granted(7, 68*second)},
			{c1, -2, granted(9, 59*second)}, // the newest is that of c0 again, so the clock is not behind any more
			{c1, 1, granted(8, minute)},
			{c1, -2, granted(10, 0)},
			{c0, 1, granted(9, minute)},
			{c9, 8, granted(1, minute)},
			{c0 - hour, -2, granted(3, minute)}, // pulled back
			{c9 - hour, 1, granted(2, minute)},
		}},
		{"the largest numbers of a sliding log", SlidingLog{1000, maxSpan * time.Microsecond}, []modelStep{
			{c0, 1000, granted(0, maxSpan)},
			{c0, -999, granted(999, maxSpan)},
			{c0 + 5, 999, granted(0, maxSpan)},
			{c0 + 5, math.MinInt64, granted(1000, 0)},
		}},
		{"the largest numbers", FixedWindow{maxProduct, time.Microsecond}, []modelStep{
			{c0, maxProduct, granted(0, 1)},
			{c0, -math.MaxInt64, granted(maxProduct, 0)},
			{c0, maxProduct, granted(0, 1)},
			{c0, math.MinInt64, granted(maxProduct, 0)},
			{c0, maxProduct, granted(0, 1)},
			{c0, 1 - maxProduct, granted(maxProduct-1, 1)},
		}},
		{"the largest numbers of a sliding window", SlidingWindow{maxProduct, time.Microsecond}, []modelStep{
			{c0, maxProduct, granted(0, 2)},
			{c0 + 1, -1, granted(1, 1)},
			{c0 + 1, 1, granted(0, 2)},
			{c0 + 1, math.MinInt64, granted(maxProduct, 0)},
		}},
		{"the largest numbers of a bucket", TokenBucket{2048, math.MaxInt64, maxSpan * time.Microsecond}, []modelStep{
			{c0, 2048, granted(0, 1)},
			{c0, -2047, granted(2047, 1)},
			{c0, math.MinInt64, granted(2048, 0)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, state{}, test.steps...)
		})
	}
}

// A refund keeps what the policy has promised that took: usage does not last longer because another policy gives some of it back.
func TestRefundUnderALongerWindowDoesNotProlongUsage(t *testing.T) {
	t.Parallel()
	s := playModel(t, FixedWindow{10, time.Minute}, state{}, modelStep{c0, 6, granted(4, minute)})
	playModel(t, FixedWindow{10, time.Hour}, s,
		modelStep{c1, -1, granted(5, 59*second)},
		modelStep{c0 + minute, 10, granted(0, hour)})
	s = playModel(t, SlidingWindow{10, time.Minute}, state{}, modelStep{c0, 6, granted(4, 2*minute)})
	playModel(t, SlidingWindow{10, time.Hour}, s,
		modelStep{c1, -1, granted(5, 119*second)},
		modelStep{c0 + 2*minute, 10, granted(0, 2*hour)})
	s = playModel(t, SlidingLog{10, time.Minute}, state{}, modelStep{c0, 6, granted(4, minute)})
	playModel(t, SlidingLog{10, time.Hour}, s,
		modelStep{c1, -1, granted(5, 59*second)},
		modelStep{c0 + minute, 10, granted(0, hour)})
	s = playModel(t, TokenBucket{10, 1, time.Second}, state{}, modelStep{c0, 6, granted(4, 6*second)})
	playModel(t, TokenBucket{10, 1, time.Hour}, s,
		modelStep{c1, -1, granted(5, 5*second)},
		modelStep{c6, 10, granted(0, 10*hour)})
}

// Within the same instant a refund undoes a take, to the last bit of what counts.
func TestRefundUndoesATake(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	undone := 0
	for range 3000 {
		limit, window := d.window()
		p := []Policy{FixedWindow{limit, window}, SlidingWindow{limit, window}, d.bucket(), d.log()}[d(4)]
		var s state
		var last decision
		clock := d.magnitude(0, 1<<52)
		for range 10 {
			clock = d.clock(p, s, clock, last)
			n := d.request(p.limit(), peek(p, s, clock).remaining)
			s, last = p.decide(s, clock, n)
		}
		before := peek(p, s, clock)
		counted, _ := usage(p, s, clock)
		if before.remaining == 0 {
			continue
		}
		n := d.magnitude(1, before.remaining)
		taken, took := p.decide(s, clock, n)
		require.EqualValues(t, 1, took.granted)
		back, gave := p.decide(taken, clock, -n)
		now, _ := usage(p, back, clock)
		require.Equal(t, before.remaining, gave.remaining, "%T%+v: %d at %d, from %+v", p, p, n, clock, s)
		require.Zero(t, counted.Cmp(now))
		undone++
	}
	require.Greater(t, undone, 1000)
}

// What is in the table after each call, in both of them.
func TestRefundWritesOnlyWhatItGivesBack(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		config.Test = frozen(t0)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		refund := func(n, remaining int64) Result {
			result, err := limiter.Refund(t.Context(), "key", n)
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

		refund(3, 10)
		require.Empty(t, storedRows(t, db.Pool, config.Durable)) // it makes no row

		_, err := limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		require.Positive(t, refund(3, 6).ResetAfter)
		require.EqualValues(t, 4, taken(t, db.Pool, config, "key"))

		require.Zero(t, refund(100, 10).ResetAfter)
		row := storedRows(t, db.Pool, config.Durable)[rowID{"test", "key"}]
		require.Equal(t, t0.UnixMicro(), row.expiresAt)
		before := version()
		refund(1, 10)
		require.Equal(t, before, version(), "it had nothing to give back")

		// A row that is locked is not waited for by those who ask for others, and is by a refund.
		_, err = limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		tx := hold(t, db, config, "key")
		waiting := later(func() (Result, error) { return limiter.Refund(context.Background(), "key", 7) })
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
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		refund := func(tx pgx.Tx, n, remaining int64) {
			result, err := limiter.RefundTx(t.Context(), tx, "key", n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, remaining, result.Remaining)
		}

		tx := begin(t, db)
		refund(tx, 3, 5)
		inner := savepoint(t, tx)
		refund(inner, 100, 10)
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
		exhaust := func() {
			for _, want := range []bool{true, false, false} {
				result, err := limiter.AllowN(t.Context(), "key", 10)
				require.NoError(t, err)
				require.Equal(t, want, result.Allowed)
			}
			_, remembered := limiter.denials.deny(limiter.policy, "key", 1)
			require.True(t, remembered)
		}
		exhaust()
		_, err := limiter.Refund(t.Context(), "key", 10)
		require.NoError(t, err)
		exhaust()
		tx := begin(t, db)
		_, err = limiter.RefundTx(t.Context(), tx, "key", 10)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		exhaust()

		// The caller leaves before the refund, which goes on.
		tx = hold(t, db, config, "key")
		ctx, leave := context.WithCancel(t.Context())
		waiting := later(func() (Result, error) { return limiter.Refund(ctx, "key", 10) })
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
			result, err := limiter.AllowN(t.Context(), "key", 10)
			return err == nil && result.Allowed
		})
		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)

		// After an error too.
		exec(t, db.Pool, "ALTER TABLE "+table(config.Durable)+" RENAME TO elsewhere")
		_, err = limiter.Refund(t.Context(), "key", 10)
		require.ErrorIs(t, err, ErrNotMigrated)
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
		db := pgtest.New(t)
		limiters := []*Limiter{newLimiter(t, db.NewPool(t, nil), config), newLimiter(t, db.NewPool(t, nil), config)}
		var out, refunded atomic.Int64 // what is taken for certain, and not yet on its way back
		errs := make([]error, callers)
		together(callers, func(i int) {
			limiter := limiters[i%2]
			var mine int64
			for call := range calls {
				n := 1 + int64((i+call)%5)
				var result Result
				if mine >= n && call%3 > 0 {
					out.Add(-n)
					if _, errs[i] = limiter.Refund(t.Context(), "key", n); errs[i] != nil {
						return
					}
					mine -= n
					refunded.Add(n)
					continue
				}
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); errs[i] != nil {
					return
				}
				if result.Allowed {
					mine += n
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
	rewrite(t, db.Pool, "rate_limit_lock", "max_cost AND coalesce(e.cost, 1) <> 0", "max_cost AND coalesce(e.cost, 1) > 0")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, cross(db, 100_000), &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
}
