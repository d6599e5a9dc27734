package ratelimit

import (
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestPolicyOutsideTheExactRangeIsRefused(t *testing.T) {
	t.Parallel()
	const longest = model.MaxSpan * time.Microsecond
	windows := []struct {
		name    string
		limit   int64
		window  time.Duration
		field   string
		allowed string // the policies that the error says are allowed
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
		for _, p := range []single{
			FixedWindow{test.limit, test.window, false}, SlidingWindow{test.limit, test.window},
		} {
			requireRefused(t, p, test.name, test.field, test.allowed)
		}
	}
	for _, test := range windows[:8] { // the last three are products, which do not matter with Align
		requireRefused(t, FixedWindow{test.limit, test.window, true}, test.name, test.field, test.allowed)
	}
	requireRefused(t, FixedWindow{model.MaxProduct + 1, time.Second, true}, "a limit beyond 2^62", "Policy.Limit", "at most 2^62")
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

func requireRefused(t *testing.T, p single, name, field, reason string) {
	t.Helper()
	var err *ConfigError
	require.ErrorAs(t, validatePolicy(p), &err, "%T, %s", p, name)
	require.Equal(t, "Config."+field, err.Field, "%T, %s", p, name)
	require.Contains(t, err.Reason, reason, "%T, %s", p, name)
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: Config."+field+" is "), err.Error())
}

func TestPolicyAtTheEdgeOfTheExactRangeIsAccepted(t *testing.T) {
	t.Parallel()
	const longest = model.MaxSpan * time.Microsecond
	for _, p := range []single{
		FixedWindow{1, time.Microsecond, false}, FixedWindow{model.MaxProduct, time.Microsecond, false},
		FixedWindow{2048, longest, false}, FixedWindow{1, time.Microsecond, true}, FixedWindow{model.MaxProduct, longest, true},
		SlidingWindow{1, time.Microsecond}, SlidingWindow{model.MaxProduct, time.Microsecond}, SlidingWindow{2048, longest},
		CalendarWindow{1, CalendarMinute, ""}, CalendarWindow{model.MaxProduct, CalendarMonth, "Pacific/Chatham"},
		SlidingLog{1, time.Microsecond}, SlidingLog{1000, time.Microsecond}, SlidingLog{1000, longest},
		TokenBucket{1, 1, time.Microsecond}, TokenBucket{2048, 2048, longest}, TokenBucket{model.MaxSpan, 1, time.Microsecond},
		TokenBucket{2 * model.MaxSpan, 2, time.Microsecond}, TokenBucket{1, 1, longest}, TokenBucket{2048, math.MaxInt64, longest},
		TokenBucket{model.MaxProduct, 2048, time.Microsecond}, TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond},
	} {
		require.NoError(t, validatePolicy(p), "%T%+v", p, p)
	}
}

// FuzzPolicyValidate tests that the method validate accepts exactly the numbers in the exact range.
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
		for _, p := range []single{
			FixedWindow{limit, span, false}, FixedWindow{limit, span, true}, SlidingWindow{limit, span}, SlidingLog{limit, span}, TokenBucket{limit, refill, span},
			CalendarWindow{limit, Unit(algorithm.UnitName(span)), ""},
		} {
			err := validatePolicy(p)
			if modeltest.InRange(p.one()) {
				require.NoError(t, err, "%T%+v", p, p)
				continue
			}
			var refused *ConfigError
			require.ErrorAs(t, err, &refused, "%T%+v", p, p)
			require.True(t, strings.HasPrefix(refused.Field, "Config.Policy."), refused.Field)
			require.NotEmpty(t, refused.Reason)
		}
	})
}
