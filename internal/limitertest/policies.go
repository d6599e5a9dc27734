package limitertest

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Year is longer than any test runs.
const Year = 365 * 24 * time.Hour

// SlowPolicies returns policies with this limit, by algorithm. The policies give a key nothing back while a test runs.
func SlowPolicies(limit int64) map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: limit, Window: Year},
		"sliding window": ratelimit.SlidingWindow{Limit: limit, Window: Year},
		"token bucket":   ratelimit.TokenBucket{Capacity: limit, Refill: 1, Every: 24 * time.Hour},
		"sliding log":    ratelimit.SlidingLog{Limit: limit, Window: Year},
		"calendar":       SlowCalendar(limit),
	}
}

// SlowCalendar returns a policy for a calendar month that does not end while a test runs.
func SlowCalendar(limit int64) ratelimit.CalendarWindow {
	p := ratelimit.CalendarWindow{Limit: limit, Unit: ratelimit.CalendarMonth}
	if now := time.Now().UnixMicro(); Rule(p).(model.CalendarWindow).End(now)-now < 2*Hour {
		p.Zone = "Asia/Tokyo"
	}
	return p
}

// EachSlowPolicyAndTable runs a subtest for each policy of SlowPolicies, on the tables of TablesFor, one after the other.
// So the subtests can share a database, which pgtest.Clear empties. A database and sessions for each subtest would cost
// more than most subtests.
func EachSlowPolicyAndTable(t *testing.T, limit int64, test func(t *testing.T, config ratelimit.Config)) {
	t.Helper()
	eachPolicyAndTable(t, SlowPolicies(limit), test)
}

// EachSlowPolicyAllAndTable is EachSlowPolicyAndTable plus an All. The last policy of All has the smallest limit.
func EachSlowPolicyAllAndTable(t *testing.T, limit int64, test func(t *testing.T, config ratelimit.Config)) {
	t.Helper()
	policies, larger := SlowPolicies(limit), SlowPolicies(2*limit)
	policies["all"] = ratelimit.All(
		larger["fixed window"],
		larger["token bucket"],
		larger["sliding window"],
		policies["sliding log"],
	)
	eachPolicyAndTable(t, policies, test)
}

func eachPolicyAndTable(
	t *testing.T, policies map[string]ratelimit.Policy, test func(t *testing.T, config ratelimit.Config),
) {
	t.Helper()
	for name, policy := range policies {
		for _, durable := range TablesFor(t, name) {
			config := ratelimit.Config{Name: "test", Policy: policy, Durable: durable}
			t.Run(fmt.Sprintf("%s in %s", name, pgtest.Table(durable)), func(t *testing.T) { test(t, config) })
		}
	}
}

// RandomPolicy draws a policy with modeltest.RandomPolicy.
func RandomPolicy(r *rand.Rand) ratelimit.Policy { return Policy(modeltest.RandomPolicy(r).Numbers()) }

// TablesFor returns the tables on which a test tries a variant, such as a policy: both if RATELIMIT_TEST_ROUNDS is
// above 1, else one. The SQL for both tables is generated from one text, and all tests together try each policy on each
// table.
func TablesFor(t *testing.T, variant string) (durable []bool) {
	t.Helper()
	if Rounds(t) > 1 {
		return []bool{false, true}
	}
	return []bool{crc32.ChecksumIEEE([]byte(t.Name()+variant))%2 == 0}
}

// ThreeLimits returns limiters for an address, a user and everybody, with different algorithms and tables.
func ThreeLimits(t *testing.T, db ratelimit.DBTX, address, user, everybody int64) (a, b, c *ratelimit.Limiter) {
	t.Helper()
	client := NewClient(t, db, ratelimit.ClientConfig{Test: Frozen(T0)})
	a = Of(t, client, ratelimit.Config{Name: "address", Policy: ratelimit.SlidingWindow{Limit: address, Window: Year}})
	b = Of(t, client, ratelimit.Config{
		Name: "user", Policy: ratelimit.TokenBucket{Capacity: user, Refill: 1, Every: 24 * time.Hour}, Durable: true,
	})
	c = Of(t, client, ratelimit.Config{Name: "all", Policy: ratelimit.FixedWindow{Limit: everybody, Window: Year}})
	return a, b, c
}

// EachSlowPolicyAndTableAt runs EachSlowPolicyAndTable in a subtest that is named after an isolation level.
func EachSlowPolicyAndTableAt(
	t *testing.T, level pgx.TxIsoLevel, limit int64, test func(t *testing.T, config ratelimit.Config),
) {
	t.Helper()
	t.Run(string(level), func(t *testing.T) {
		t.Parallel()
		EachSlowPolicyAndTable(t, limit, test)
	})
}

// With returns l.With(policy), and makes the test fail if the policy is invalid.
func With(t testing.TB, l *ratelimit.Limiter, policy ratelimit.Policy) *ratelimit.Limiter {
	t.Helper()
	other, err := l.With(policy)
	require.NoError(t, err)
	return other
}

// NumbersOf returns policies of p's type, with more and with fewer units, and with more and with less time.
func NumbersOf(p ratelimit.Policy) map[string]ratelimit.Policy {
	numbers := map[string]ratelimit.Policy{}
	for name, change := range map[string]struct {
		limit int64
		time  time.Duration
	}{
		"as it is": {10, time.Minute}, "raised": {20, time.Minute}, "lowered": {4, time.Minute},
		"longer": {10, 5 * time.Minute}, "shorter": {10, 7 * time.Second},
		"raised and longer": {25, 5 * time.Minute}, "lowered and shorter": {3, 7 * time.Second},
	} {
		switch p.(type) {
		case ratelimit.FixedWindow:
			numbers[name] = ratelimit.FixedWindow{Limit: change.limit, Window: change.time}
		case ratelimit.SlidingWindow:
			numbers[name] = ratelimit.SlidingWindow{Limit: change.limit, Window: change.time}
		case ratelimit.SlidingLog:
			numbers[name] = ratelimit.SlidingLog{Limit: change.limit, Window: change.time}
		case ratelimit.CalendarWindow:
			unit := map[time.Duration]ratelimit.Unit{
				time.Minute: ratelimit.CalendarHour, 5 * time.Minute: ratelimit.CalendarDay,
				7 * time.Second: ratelimit.CalendarMinute,
			}[change.time]
			numbers[name] = ratelimit.CalendarWindow{Limit: change.limit, Unit: unit, Zone: "Asia/Kolkata"}
		case ratelimit.TokenBucket:
			numbers[name] = ratelimit.TokenBucket{Capacity: change.limit, Refill: 7, Every: change.time}
		}
	}
	return numbers
}
