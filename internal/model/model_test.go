package model_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestCoalescedRequestsAreToldWhatSingleOnesWouldBe(t *testing.T) {
	t.Parallel()
	for _, p := range []model.Rules{
		model.FixedWindow{10, 10 * time.Second}, model.SlidingWindow{10, 10 * time.Second}, model.TokenBucket{10, 3, 7 * time.Second}, model.SlidingLog{10, 10 * time.Second},
		model.CalendarWindow{10, minutely, "UTC"},
	} {
		s, _ := p.Decide(model.State{}, c2, 1)
		for _, clock := range []int64{c0, c2, c5, c5 + 1, c2 + 9*second, c2 + 10*second, c2 + 15*second} {
			for count := range int64(12) {
				for n := range int64(6) {
					require.NoError(t, checkElement(p, s, clock, n, count))
				}
			}
		}
	}
	// Three requests of 2 ask a bucket that lacks one token, and whose time is 2 s ahead of the clock. The first
	// request gets a RetryAfter of 2 + 3 s, the last one of 2 + 7 s.
	p := model.TokenBucket{10, 1, time.Second}
	s := playModel(t, p, model.State{}, modelStep{c2, 1, granted(9, second)})
	var last model.Decision
	for range 3 {
		s, last = p.Decide(s, c0, 2)
	}
	require.Equal(t, 9*second, last.ResetAfter)
	require.Equal(t, 7*second, p.ResetAfter(last, 2))
	require.Equal(t, 5*second, p.ResetAfter(last, 4))
	require.Equal(t, 9*second, model.FixedWindow{10, time.Minute}.ResetAfter(last, 4))
	require.Equal(t, 9*second, model.SlidingWindow{10, time.Minute}.ResetAfter(last, 4))
}

func TestMicrosAndDurationAreInverse(t *testing.T) {
	t.Parallel()
	for _, us := range []int64{0, 1, 999, 1000, second, hour, model.MaxSpan - 1, model.MaxSpan, 3 * model.MaxSpan, 4*model.MaxSpan - 1, 4 * model.MaxSpan} {
		require.Equal(t, us, model.Micros(model.Duration(us)))
		require.Equal(t, us, model.Duration(us).Microseconds())
		require.GreaterOrEqual(t, model.Duration(us), time.Duration(0), "overflow at %d µs", us)
	}
	require.Equal(t, time.Minute, model.Duration(minute))
	require.Equal(t, minute, model.Micros(time.Minute))
}

func TestMicrosUpRoundsUp(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		d    time.Duration
		want int64
	}{
		{0, 0}, {1, 1}, {999, 1}, {1000, 1}, {1001, 2}, {time.Minute, minute}, {time.Minute + 1, minute + 1},
		{math.MaxInt64, math.MaxInt64/1000 + 1},
	} {
		require.Equal(t, test.want, model.MicrosUp(test.d), "%d ns", test.d)
	}
}

func TestCeilDivRoundsUpAndNeverOverflows(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ a, b, want int64 }{
		{0, 1, 0}, {0, math.MaxInt64, 0},
		{1, 1, 1}, {1, 2, 1}, {1, math.MaxInt64, 1},
		{6, 3, 2}, {7, 3, 3}, {8, 3, 3}, {9, 3, 3},
		{model.MaxProduct, model.MaxSpan, model.MaxProduct / model.MaxSpan}, {model.MaxProduct - 1, model.MaxSpan, model.MaxProduct / model.MaxSpan}, {model.MaxProduct, 3, model.MaxProduct/3 + 1},
		{math.MaxInt64, 1, math.MaxInt64}, {math.MaxInt64, 2, 1 << 62}, {math.MaxInt64, math.MaxInt64, 1},
		{math.MaxInt64, math.MaxInt64 - 1, 2}, {math.MaxInt64 - 1, math.MaxInt64, 1},
	} {
		require.Equal(t, test.want, model.CeilDiv(test.a, test.b), "%d / %d", test.a, test.b)
	}
	d := modeltest.RandomDice(t)
	for range 10_000 {
		a, b := d.Magnitude(0, math.MaxInt64), d.Magnitude(1, math.MaxInt64)
		quotient, rest := new(big.Int).QuoRem(big.NewInt(a), big.NewInt(b), new(big.Int))
		require.Equal(t, quotient.Int64()+int64(rest.Sign()), model.CeilDiv(a, b), "%d / %d", a, b)
	}
}

func TestMulDivIsExactOver128Bits(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ a, b, c, want int64 }{
		{0, 0, 1, 0}, {0, math.MaxInt64, 1, 0}, {1, 0, 2, 0},
		{1, 1, 2, 0}, {1, 3, 2, 1}, {2, 2, 3, 1}, {2, 3, 3, 2},
		{math.MaxInt64 - 1, math.MaxInt64, math.MaxInt64, math.MaxInt64 - 1},
		{math.MaxInt64 - 1, math.MaxInt64 - 1, math.MaxInt64, math.MaxInt64 - 2},
		{model.MaxSpan - 1, model.MaxSpan, model.MaxSpan, model.MaxSpan - 1},
		{1 << 61, model.MaxProduct, model.MaxProduct, 1 << 61},
	} {
		require.Equal(t, test.want, model.MulDiv(test.a, test.b, test.c), "%d × %d / %d", test.a, test.b, test.c)
	}
	d := modeltest.RandomDice(t)
	for range 10_000 {
		c := d.Magnitude(1, math.MaxInt64)
		a, b := d.Magnitude(0, c-1), d.Magnitude(0, math.MaxInt64)
		want := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
		want.Quo(want, big.NewInt(c))
		require.Equal(t, want.Int64(), model.MulDiv(a, b, c), "%d × %d / %d", a, b, c)
	}
}

// FuzzExactRange checks that nothing overflows under a policy within the exact range.
func FuzzExactRange(f *testing.F) {
	f.Add(int64(10), int64(5), minute)
	f.Add(int64(2048), int64(2048), int64(model.MaxSpan))
	f.Add(int64(model.MaxProduct), int64(math.MaxInt64), int64(1))
	f.Add(int64(model.MaxProduct), int64(2048), int64(1))
	f.Fuzz(func(t *testing.T, limit, refill, micros int64) {
		span := time.Duration(micros) * time.Microsecond
		for _, p := range []model.Rules{
			model.FixedWindow{limit, span}, model.SlidingWindow{limit, span}, model.SlidingLog{limit, span},
			model.TokenBucket{limit, refill, span}, model.CalendarWindow{limit, span, "Europe/Berlin"},
		} {
			if !modeltest.InRange(p) {
				continue
			}
			// The first requests take everything. Later requests come after the clock stepped back by a whole Reach.
			const begin = 4 * model.MaxSpan
			var s model.State
			reach := modeltest.Reach(p)
			for _, clock := range []int64{begin, begin - reach, begin - reach/2, begin, begin + reach, begin + reach/2} {
				for _, n := range []int64{1, limit / 2, limit, limit + 1} {
					next, d, err := checkDecision(p, s, clock, n)
					require.NoError(t, err)
					require.LessOrEqual(t, d.ResetAfter, int64(4*model.MaxSpan))
					require.True(t, d.RetryAfter == model.Never || 0 <= d.RetryAfter && d.RetryAfter <= 4*model.MaxSpan,
						"%T%+v: %+v", p, p, d)
					s = next
				}
			}
		}
	})
}
