package model_test

import (
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// slowModel computes an algorithm by its definition, with rational numbers.
type slowModel interface {
	// fits tells whether a request for n would be allowed at the time t. t is never before the last take.
	fits(t, n int64) bool
	take(t, n int64)
	// state returns the row rolled forward to t. ExpiresAt is not set.
	state(t int64) model.State
}

// slowDecision decides by calling m.fits. It finds Remaining, RetryAfter and ResetAfter by search.
func slowDecision(m slowModel, limit, horizon, t, n int64) model.Decision {
	var d model.Decision
	if 0 < n && m.fits(t, n) {
		m.take(t, n)
		d.Granted = 1
	}
	d.Remaining = search(0, limit, func(n int64) bool { return !m.fits(t, n+1) })
	least := max(n, 1)
	switch {
	case d.Granted == 1, n == 0 && d.Remaining > 0:
	case n > limit:
		d.RetryAfter = model.Never
	default:
		d.RetryAfter = search(1, horizon, func(wait int64) bool { return m.fits(t+wait, least) })
	}
	d.ResetAfter = search(0, horizon, func(wait int64) bool { return m.fits(t+wait, limit) })
	d.State = m.state(t)
	return d
}

// search returns the smallest number from lo to hi for which is() returns true, or hi if there is none. If is() returns
// true for a number, it must return true for all larger numbers.
func search(lo, hi int64, is func(int64) bool) int64 {
	for lo < hi {
		if middle := lo + (hi-lo)/2; is(middle) {
			hi = middle
		} else {
			lo = middle + 1
		}
	}
	return lo
}

func rat(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

// whole converts a rational number to an integer. It returns -1 if the number is not whole.
func whole(r *big.Rat) int64 {
	if !r.IsInt() || !r.Num().IsInt64() {
		return -1
	}
	return r.Num().Int64()
}

// testAgainstSlowModel compares every field of every decision with slowDecision. The policy stays the same, and the
// clock never steps back.
func testAgainstSlowModel(t *testing.T, draw func(modeltest.Dice) (model.Rules, slowModel)) {
	t.Helper()
	d := modeltest.RandomDice(t)
	for range 100 {
		var s model.State
		var got model.Decision
		p, slow := draw(d)
		clock := d.Magnitude(0, 1<<52)
		for range 25 {
			clock = d.Forwards(p, s, clock, got)
			n := d.Cost(p.Numbers().Limit, peek(p, s, clock).Remaining)
			from := s
			s, got = p.Decide(s, clock, n)
			got.State, got.Taken = modeltest.Told(got.State), model.Take{}
			got.State.ExpiresAt, got.State.Log, got.State.Since = 0, "", 0
			want := slowDecision(slow, p.Numbers().Limit, 2*longestWait(p), clock, n)
			require.Equal(t, want, got, "%T%+v: %d at %d from %+v", p, p, n, clock, from)
		}
	}
}

// testNeverMoreThanTheClockGives lets a clock step forward and back. It checks that all grants together are at most
// first units, plus rate units for each span by which the clock went forward. If whole is true, a part of a span gives
// nothing. So a clock that steps back gives no additional units.
func testNeverMoreThanTheClockGives(t *testing.T, draw func(modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool)) {
	t.Helper()
	d := modeltest.RandomDice(t)
	for range 300 {
		var s model.State
		var last model.Decision
		p, first, rate, span, whole := draw(d)
		clock := d.Magnitude(0, 1<<52)
		forwards, total := new(big.Int), new(big.Int)
		for range 40 {
			was := clock
			clock = d.Clock(p, s, clock, last)
			forwards.Add(forwards, big.NewInt(max(clock-was, 0)))
			n := d.Cost(p.Numbers().Limit, peek(p, s, clock).Remaining)
			s, last = p.Decide(s, clock, n)
			total.Add(total, big.NewInt(last.Granted*n))

			gives := new(big.Rat).SetFrac(forwards, big.NewInt(span))
			if whole { // windows
				gives.SetInt(new(big.Int).Quo(forwards, big.NewInt(span)))
			}
			gives.Mul(gives, rat(rate)).Add(gives, rat(first))
			require.LessOrEqual(t, new(big.Rat).SetInt(total).Cmp(gives), 0,
				"%T%+v: %v granted while the clock went forwards by %v µs", p, p, total, forwards)
		}
	}
}
