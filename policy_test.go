package ratelimit

import (
	"errors"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// This file holds what the tests of the models share, which are in fixed_test.go, sliding_test.go, tokenbucket_test.go
// and slidinglog_test.go:
//
//   - playModel plays a table of steps worked out by hand.
//   - checkDecision checks everything that the specification promises of one decision.
//   - walkModel does so at random clocks, costs and policies, for the property tests and the fuzz targets alike.
//   - slowDecision decides by a search over what would fit, in rationals. The models are compared with it.

// In microseconds, as the models count.
const (
	second int64 = 1_000_000
	minute       = 60 * second
	hour         = 60 * minute
)

// The times of short tables are a second apart.
const (
	c0 = 1_800_000_000*second + iota*second
	c1
	c2
	c3
	c4
	c5
	c6
	c7
	c8
	c9
)

// at is a time of day in microseconds, such as "12:01:15" or "12:01:15.000001". Each day is as good as another.
func at(clock string) int64 {
	t, err := time.Parse(time.DateTime, "2026-07-01 "+clock)
	if err != nil {
		panic(err)
	}
	return t.UnixMicro()
}

func TestCoalescedRequestsAreToldWhatSingleOnesWouldBe(t *testing.T) {
	t.Parallel()
	for _, p := range []ruled{
		FixedWindow{10, 10 * time.Second}, SlidingWindow{10, 10 * time.Second}, TokenBucket{10, 3, 7 * time.Second}, SlidingLog{10, 10 * time.Second},
		CalendarWindow{10, CalendarMinute, ""},
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
	// Three times 2 from a bucket whose time lies 2 s ahead, with one token gone. The first is told 2 + 3 s, the
	// last 2 + 7 s.
	p := TokenBucket{10, 1, time.Second}
	s := playModel(t, p, model.State{}, modelStep{c2, 1, granted(9, second)})
	var last model.Decision
	for range 3 {
		s, last = p.Decide(s, c0, 2)
	}
	require.Equal(t, 9*second, last.ResetAfter)
	require.Equal(t, 7*second, p.ResetAfter(last, 2))
	require.Equal(t, 5*second, p.ResetAfter(last, 4))
	require.Equal(t, 9*second, FixedWindow{10, time.Minute}.ResetAfter(last, 4))
	require.Equal(t, 9*second, SlidingWindow{10, time.Minute}.ResetAfter(last, 4))
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
	d := randomDice(t)
	for range 10_000 {
		a, b := d.magnitude(0, math.MaxInt64), d.magnitude(1, math.MaxInt64)
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
	d := randomDice(t)
	for range 10_000 {
		c := d.magnitude(1, math.MaxInt64)
		a, b := d.magnitude(0, c-1), d.magnitude(0, math.MaxInt64)
		want := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
		want.Quo(want, big.NewInt(c))
		require.Equal(t, want.Int64(), model.MulDiv(a, b, c), "%d × %d / %d", a, b, c)
	}
}

func TestPolicyOutsideTheExactRangeIsRefused(t *testing.T) {
	t.Parallel()
	const longest = model.MaxSpan * time.Microsecond
	windows := []struct {
		name    string
		limit   int64
		window  time.Duration
		field   string
		allowed string // what the error says may be given
	}{
		{"no limit", 0, time.Minute, "Policy.Limit", "is 0, and must be at least 1"},
		{"a negative limit", -5, time.Minute, "Policy.Limit", "is -5, and must be at least 1"},
		{"the smallest limit", math.MinInt64, time.Minute, "Policy.Limit", "must be at least 1"},
		{"no window", 10, 0, "Policy.Window", "is 0s, and must be at least 1µs"},
		{"a negative window", 10, -time.Minute, "Policy.Window", "is -1m0s, and must be at least 1µs"},
		{"the smallest window", 10, math.MinInt64, "Policy.Window", "must be at least 1µs"},
		{"less than a microsecond", 10, time.Microsecond - 1, "Policy.Window", "is 999ns, and must be at least 1µs"},
		{
			"parts of a microsecond",
			10,
			1500 * time.Nanosecond,
			"Policy.Window",
			"is 1.5µs, and must be whole microseconds",
		},
		{
			"a window beyond 71 years",
			1,
			longest + time.Microsecond,
			"Policy.Window",
			"may be at most " + longest.String() + " (71 years)",
		},
		{
			"the largest window",
			1,
			math.MaxInt64 / 1000 * 1000,
			"Policy.Window",
			"may be at most " + longest.String() + " (71 years)",
		},
		{"a product beyond 2^62", 2049, longest, "Policy.Limit", "is 2049 with a Window of " + longest.String() +
			", outside the exact range: for this Window it may be at most 2048"},
		{"the largest limit", math.MaxInt64, time.Microsecond, "Policy.Limit", "it may be at most 4611686018427387904"},
		{
			"a product of 2^64",
			model.MaxProduct,
			4 * time.Microsecond,
			"Policy.Limit",
			"it may be at most 1152921504606846976",
		},
		{
			"a product that rounds down",
			1537228672809129302,
			3 * time.Microsecond,
			"Policy.Limit",
			"it may be at most 1537228672809129301",
		},
	}
	for _, test := range windows {
		for _, p := range []ruled{FixedWindow{test.limit, test.window}, SlidingWindow{test.limit, test.window}} {
			requireRefused(t, p, test.name, test.field, test.allowed)
		}
	}
	requireRefused(
		t,
		SlidingLog{1001, time.Microsecond},
		"a long log",
		"Policy.Limit",
		"is 1001, and may be at most 1000",
	)
	for _, test := range windows[:10] {
		requireRefused(t, SlidingLog{test.limit, test.window}, test.name, test.field, test.allowed)
	}
	for _, test := range []struct {
		name    string
		policy  TokenBucket
		field   string
		allowed string
	}{
		{"no capacity", TokenBucket{0, 1, time.Second}, "Policy.Capacity", "is 0, and must be at least 1"},
		{"a negative capacity", TokenBucket{math.MinInt64, 1, time.Second}, "Policy.Capacity", "must be at least 1"},
		{"no refill", TokenBucket{10, 0, time.Second}, "Policy.Refill", "is 0, and must be at least 1"},
		{"a negative refill", TokenBucket{10, -1, time.Second}, "Policy.Refill", "is -1, and must be at least 1"},
		{"no time", TokenBucket{10, 1, 0}, "Policy.Every", "is 0s, and must be at least 1µs"},
		{"a negative time", TokenBucket{10, 1, math.MinInt64}, "Policy.Every", "must be at least 1µs"},
		{"parts of a microsecond", TokenBucket{10, 1, time.Second + 1}, "Policy.Every", "is 1.000000001s, and must be whole microseconds"},
		{"a time beyond 71 years", TokenBucket{1, 1, longest + time.Microsecond}, "Policy.Every", "may be at most " + longest.String() + " (71 years)"},
		{"a product beyond 2^62", TokenBucket{2049, math.MaxInt64, longest}, "Policy.Capacity", "is 2049 with Every " + longest.String() +
			", outside the exact range: for this Every it may be at most 2048"},
		{"the largest capacity", TokenBucket{math.MaxInt64, math.MaxInt64, time.Microsecond}, "Policy.Capacity", "it may be at most 4611686018427387904"},
		{"a product of 2^64", TokenBucket{model.MaxProduct, math.MaxInt64, 4 * time.Microsecond}, "Policy.Capacity", "it may be at most 1152921504606846976"},
		{"a microsecond too long to fill", TokenBucket{model.MaxSpan + 1, 1, time.Microsecond}, "Policy.Refill",
			"is 1 every 1µs, which takes more than 71 years to fill a Capacity of 2251799813685249"},
		{"a rounded microsecond too long to fill", TokenBucket{2*model.MaxSpan + 1, 2, time.Microsecond}, "Policy.Refill", "more than 71 years"},
	} {
		requireRefused(t, test.policy, test.name, test.field, test.allowed)
	}
}

func requireRefused(t *testing.T, p ruled, name, field, reason string) {
	t.Helper()
	var err *ConfigError
	require.ErrorAs(t, p.validate(), &err, "%T, %s", p, name)
	require.Equal(t, "Config."+field, err.Field, "%T, %s", p, name)
	require.Contains(t, err.Reason, reason, "%T, %s", p, name)
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: Config."+field+" is "), err.Error())
}

func TestPolicyAtTheEdgeOfTheExactRangeIsAccepted(t *testing.T) {
	t.Parallel()
	const longest = model.MaxSpan * time.Microsecond
	for _, p := range []ruled{
		FixedWindow{1, time.Microsecond}, FixedWindow{model.MaxProduct, time.Microsecond}, FixedWindow{2048, longest},
		SlidingWindow{1, time.Microsecond}, SlidingWindow{model.MaxProduct, time.Microsecond}, SlidingWindow{2048, longest},
		CalendarWindow{1, CalendarMinute, ""}, CalendarWindow{model.MaxProduct, CalendarMonth, "Pacific/Chatham"},
		SlidingLog{1, time.Microsecond}, SlidingLog{1000, time.Microsecond}, SlidingLog{1000, longest},
		TokenBucket{1, 1, time.Microsecond}, TokenBucket{2048, 2048, longest}, TokenBucket{model.MaxSpan, 1, time.Microsecond},
		TokenBucket{2 * model.MaxSpan, 2, time.Microsecond}, TokenBucket{1, 1, longest}, TokenBucket{2048, math.MaxInt64, longest},
		TokenBucket{model.MaxProduct, 2048, time.Microsecond}, TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond},
	} {
		require.NoError(t, p.validate(), "%T%+v", p, p)
	}
}

// FuzzPolicyValidate: whatever the numbers are, validate tells rightly whether they are in the exact range, and
// what it accepts never overflows.
func FuzzPolicyValidate(f *testing.F) {
	f.Add(int64(10), int64(5), int64(time.Minute))
	f.Add(int64(2048), int64(2048), int64(model.MaxSpan*time.Microsecond))
	f.Add(int64(2049), int64(1), int64(model.MaxSpan*time.Microsecond))
	f.Add(int64(model.MaxProduct), int64(math.MaxInt64), int64(time.Microsecond))
	f.Add(int64(model.MaxProduct), int64(2048), int64(time.Microsecond))
	f.Add(int64(model.MaxProduct), int64(2047), int64(time.Microsecond))
	f.Add(int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64))
	f.Add(int64(math.MinInt64), int64(math.MinInt64), int64(math.MinInt64))
	f.Add(int64(1), int64(1), int64(1500))
	f.Fuzz(func(t *testing.T, limit, refill, nanoseconds int64) {
		span := time.Duration(nanoseconds)
		us := nanoseconds / 1000
		product := new(big.Int).Mul(big.NewInt(limit), big.NewInt(us))
		exact := limit >= 1 && us >= 1 && us <= model.MaxSpan && nanoseconds%1000 == 0 &&
			product.Cmp(big.NewInt(model.MaxProduct)) <= 0
		for _, p := range []ruled{FixedWindow{limit, span}, SlidingWindow{limit, span}} {
			requireValidated(t, p, exact)
		}
		requireValidated(t, SlidingLog{limit, span}, exact && limit <= model.MaxLogLimit)
		fillable := refill >= 1 && product.Cmp(new(big.Int).Mul(big.NewInt(model.MaxSpan), big.NewInt(refill))) <= 0
		requireValidated(t, TokenBucket{limit, refill, span}, exact && fillable)
	})
}

func requireValidated(t *testing.T, p ruled, exact bool) {
	t.Helper()
	err := p.validate()
	if !exact {
		var refused *ConfigError
		require.True(
			t,
			errors.As(err, &refused) && strings.HasPrefix(refused.Field, "Config.Policy.") && refused.Reason != "",
			"%T%+v: %v",
			p,
			p,
			err,
		)
		return
	}
	require.NoError(t, err, "%T%+v", p, p)
	// Everything is taken, and asked for again when the clock has stepped back by as much as it may.
	var s model.State
	for _, clock := range []int64{4 * model.MaxSpan, 4*model.MaxSpan - reach(p), 4*model.MaxSpan - reach(p)/2, 4 * model.MaxSpan, 4*model.MaxSpan + reach(p), 4*model.MaxSpan + reach(p)/2} {
		for _, n := range []int64{1, p.Numbers().Limit / 2, p.Numbers().Limit, p.Numbers().Limit + 1} {
			next, d, err := checkDecision(p, s, clock, n)
			require.NoError(t, err)
			require.LessOrEqual(t, model.Duration(d.ResetAfter), 4*model.MaxSpan*time.Microsecond)
			require.True(
				t,
				d.RetryAfter == model.Never || 0 <= d.RetryAfter && d.RetryAfter <= 4*model.MaxSpan,
				"%T%+v: %+v",
				p,
				p,
				d,
			)
			s = next
		}
	}
}
