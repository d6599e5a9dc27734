package ratelimit

import (
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"
)

// slowModel is an algorithm as the design says it, in rationals.
type slowModel interface {
	// fits tells whether n would be allowed at the time t, which is never before that of the last take.
	fits(t, n int64) bool
	take(t, n int64)
	// state is the row at t as the model rolls it forward, except for when it expires.
	state(t int64) state
}

// slowDecision decides by what fits, and finds Remaining, RetryAfter and ResetAfter by search.
func slowDecision(m slowModel, limit, horizon, t, n int64) decision {
	var d decision
	if 0 < n && m.fits(t, n) {
		m.take(t, n)
		d.granted = 1
	}
	d.remaining = search(0, limit, func(n int64) bool { return !m.fits(t, n+1) })
	least := max(n, 1)
	switch {
	case d.granted == 1, n == 0 && d.remaining > 0:
	case n > limit:
		d.retryAfter = never
	default:
		d.retryAfter = search(1, horizon, func(wait int64) bool { return m.fits(t+wait, least) })
	}
	d.resetAfter = search(0, horizon, func(wait int64) bool { return m.fits(t+wait, limit) })
	d.state = m.state(t)
	return d
}

// search is the smallest number from lo to hi for which the condition holds, or hi if there is none. Once it
// holds, it must hold for all larger numbers.
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

// whole is a rational that must be a whole number. It is -1 if it is not.
func whole(r *big.Rat) int64 {
	if !r.IsInt() || !r.Num().IsInt64() {
		return -1
	}
	return r.Num().Int64()
}

// testAgainstSlowModel compares every field of every decision, for one policy and a clock that never steps back.
func testAgainstSlowModel(t *testing.T, draw func(dice) (ruled, slowModel)) {
	t.Helper()
	d := randomDice(t)
	for range 100 {
		var s state
		var got decision
		p, slow := draw(d)
		clock := d.magnitude(0, 1<<52)
		for range 25 {
			clock = d.forwards(p, s, clock, got)
			n := d.cost(p.Numbers().Limit, peek(p, s, clock).remaining)
			from := s
			s, got = p.Decide(s, clock, n)
			got.state, got.taken = toldState(got.state), take{}
			got.state.expiresAt, got.state.log, got.state.since = 0, "", 0
			want := slowDecision(slow, p.Numbers().Limit, 2*longestWait(p), clock, n)
			require.Equal(t, want, got, "%T%+v: %d at %d from %+v", p, p, n, clock, from)
		}
	}
}

// testNeverMoreThanTheClockGives lets a clock step forwards and back. It compares all that is granted with how far
// the clock has gone forwards: at most first at the beginning, and then rate more in every span. Steps back give
// nothing.
func testNeverMoreThanTheClockGives(t *testing.T, draw func(dice) (p ruled, first, rate, span int64, whole bool)) {
	t.Helper()
	d := randomDice(t)
	for range 300 {
		var s state
		var last decision
		p, first, rate, span, whole := draw(d)
		clock := d.magnitude(0, 1<<52)
		forwards, total := new(big.Int), new(big.Int)
		for range 40 {
			was := clock
			clock = d.clock(p, s, clock, last)
			forwards.Add(forwards, big.NewInt(max(clock-was, 0)))
			n := d.cost(p.Numbers().Limit, peek(p, s, clock).remaining)
			s, last = p.Decide(s, clock, n)
			total.Add(total, big.NewInt(last.granted*n))

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
