package ratelimit_test

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// This table says how usage counts after a change of the policy. The table was calculated by hand.
func TestOtherNumbersOnLiveKeys(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	type step struct {
		at     time.Duration
		policy ratelimit.Policy
		n      int64
		want   ratelimit.Result // without Limit and DecidedAt
	}
	allowed := func(remaining int64, resetAfter time.Duration) ratelimit.Result {
		return ratelimit.Result{Allowed: true, Remaining: remaining, ResetAfter: resetAfter}
	}
	fixed := func(limit int64, window time.Duration) ratelimit.Policy {
		return ratelimit.FixedWindow{Limit: limit, Window: window}
	}
	sliding := func(limit int64, window time.Duration) ratelimit.Policy {
		return ratelimit.SlidingWindow{Limit: limit, Window: window}
	}
	bucket := func(capacity int64, every time.Duration) ratelimit.Policy {
		return ratelimit.TokenBucket{Capacity: capacity, Refill: 10, Every: every}
	}
	for name, steps := range map[string][]step{
		"a raised limit helps at once": {
			{at: 0, policy: fixed(10, time.Minute), n: 10, want: allowed(0, time.Minute)},
			{at: time.Second, policy: fixed(10, time.Minute), n: 1, want: ratelimit.Result{RetryAfter: 59 * time.Second, ResetAfter: 59 * time.Second}},
			{at: time.Second, policy: fixed(15, time.Minute), n: 5, want: allowed(0, 59*time.Second)},
			{at: time.Second, policy: fixed(15, time.Minute), n: 1, want: ratelimit.Result{RetryAfter: 59 * time.Second, ResetAfter: 59 * time.Second}},
		},
		"a lowered limit denies until enough has drained": {
			{at: 0, policy: sliding(10, time.Minute), n: 10, want: allowed(0, 2*time.Minute)},
			// 10 units of the previous window count as 5 after half of the next window.
			{at: time.Second, policy: sliding(6, time.Minute), n: 1, want: ratelimit.Result{RetryAfter: 89 * time.Second, ResetAfter: 119 * time.Second}},
			{at: 90*time.Second - time.Microsecond, policy: sliding(6, time.Minute), n: 1, want: ratelimit.Result{RetryAfter: time.Microsecond, ResetAfter: 30*time.Second + time.Microsecond}},
			{at: 90 * time.Second, policy: sliding(6, time.Minute), n: 1, want: allowed(0, 90*time.Second)},
		},
		"a longer window counts from where the shorter began": {
			{at: 0, policy: fixed(10, time.Minute), n: 10, want: allowed(0, time.Minute)},
			// The row still expires at the stored time.
			{at: 59 * time.Second, policy: fixed(10, time.Hour), n: 1, want: ratelimit.Result{RetryAfter: time.Second, ResetAfter: time.Second}},
			// This take stores a new time.
			{at: 59 * time.Second, policy: fixed(11, time.Hour), n: 1, want: allowed(0, 3541*time.Second)},
			{at: time.Hour, policy: fixed(11, time.Hour), n: 11, want: allowed(0, time.Hour)},
		},
		"a shorter window may have ended": {
			{at: 0, policy: fixed(10, time.Hour), n: 10, want: allowed(0, time.Hour)},
			{at: 59 * time.Second, policy: fixed(10, time.Minute), n: 1, want: ratelimit.Result{RetryAfter: time.Second, ResetAfter: time.Second}},
			{at: time.Minute, policy: fixed(10, time.Minute), n: 1, want: allowed(9, time.Minute)},
		},
		"tokens are kept, and clamped to the capacity": {
			{at: 0, policy: bucket(20, 10*time.Second), n: 8, want: allowed(12, 8*time.Second)},
			{at: 0, policy: bucket(40, 10*time.Second), n: 13, want: ratelimit.Result{Remaining: 12, RetryAfter: time.Second, ResetAfter: 8 * time.Second}},
			{at: 0, policy: bucket(5, 10*time.Second), n: 5, want: allowed(0, 5*time.Second)},
			{at: time.Second, policy: bucket(40, 10*time.Second), n: 1, want: allowed(0, 40*time.Second)},
		},
		"tokens flow in at the new rate": {
			{at: 0, policy: bucket(10, 10*time.Second), n: 10, want: allowed(0, 10*time.Second)},
			{at: time.Second, policy: bucket(10, 100*time.Second), n: 1, want: ratelimit.Result{RetryAfter: 9 * time.Second, ResetAfter: 9 * time.Second}},
			{at: 9 * time.Second, policy: bucket(10, 5*time.Second), n: 10, want: allowed(0, 5*time.Second)},
		},
		"another algorithm begins anew": {
			{at: 0, policy: fixed(10, time.Minute), n: 10, want: allowed(0, time.Minute)},
			{at: 0, policy: sliding(10, time.Minute), n: 4, want: allowed(6, 2*time.Minute)},
			{at: 0, policy: bucket(10, 10*time.Second), n: 7, want: allowed(3, 7*time.Second)},
			{at: 0, policy: sliding(10, time.Minute), n: 0, want: allowed(10, 0)},
			// A Peek of another policy changes nothing.
			{at: 0, policy: bucket(10, 10*time.Second), n: 4, want: ratelimit.Result{Remaining: 3, RetryAfter: time.Second, ResetAfter: 7 * time.Second}},
			{at: 0, policy: fixed(10, time.Minute), n: 10, want: allowed(0, time.Minute)},
			{at: 0, policy: bucket(10, 10*time.Second), n: 10, want: allowed(0, 10*time.Second)},
		},
	} {
		clock := &limitertest.Clock{At: limitertest.T0}
		limiter := limitertest.New(
			t,
			pool,
			ratelimit.Config{
				Name:   name,
				Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Second},
			},
			ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: clock.Now}},
		)
		for i, step := range steps {
			clock.At = limitertest.T0.Add(step.at)
			step.want.Limit, step.want.DecidedAt = limitertest.Rule(step.policy).Numbers().Limit, clock.At
			got, err := limitertest.Under(limiter, step.policy).AllowN(t.Context(), "key", step.n)
			require.NoError(t, err)
			require.Equal(t, step.want, limitertest.Plain(got), "%s, step %d", name, i)
		}
	}
}

func TestWithRefusesWhatNewRefuses(t *testing.T) {
	t.Parallel()

	limiter := limitertest.New(t, unusedPool(t), policy(ratelimit.FixedWindow{Limit: 1, Window: time.Second}))
	for _, bad := range []ratelimit.Policy{
		nil, &ratelimit.FixedWindow{Limit: 1, Window: time.Second}, (*ratelimit.TokenBucket)(nil), ratelimit.FixedWindow{}, ratelimit.FixedWindow{Limit: -1, Window: time.Second},
		ratelimit.SlidingWindow{Limit: math.MaxInt64, Window: time.Second}, ratelimit.TokenBucket{Capacity: 1, Every: time.Second},
	} {
		_, want := ratelimit.New(unusedPool(t), policy(bad))
		require.Error(t, want)
		with, err := limiter.With(bad)
		require.Nil(t, with)
		require.Equal(t, want, err)
	}
}

// With refuses a policy of another kind, also within All, because such a policy would ignore the rows of the first
// policy.
func TestWithKeepsTheAlgorithm(t *testing.T) {
	t.Parallel()

	kinds, raised := limitertest.SlowPolicies(10), limitertest.SlowPolicies(20)
	for from, one := range kinds {
		for to := range kinds {
			var policies [][2]ratelimit.Policy // the limiter's policy, and the argument of With
			for other := range kinds {
				policies = append(policies, [2]ratelimit.Policy{one, raised[to]},
					[2]ratelimit.Policy{one, ratelimit.All(raised[to], raised[other])}, [2]ratelimit.Policy{ratelimit.All(one, kinds[other]), raised[to]},
					[2]ratelimit.Policy{ratelimit.All(one, kinds[other]), ratelimit.All(raised[to], kinds[other])},
					[2]ratelimit.Policy{ratelimit.All(kinds[other], one), ratelimit.All(kinds[other], raised[to])})
			}
			for _, p := range policies {
				with, err := limitertest.New(t, unusedPool(t), policy(p[0])).With(p[1])
				if from == to {
					require.NoError(t, err)
					require.Equal(t, p[1], with.Config().Policy)
					continue
				}
				require.Nil(t, with)
				var refused *ratelimit.ConfigError
				require.ErrorAs(t, err, &refused, "%v to %v", p[0], p[1])
				kind := func(p ratelimit.Policy) string { return strings.TrimPrefix(fmt.Sprintf("%T", p), "ratelimit.") }
				require.Equal(t, "Config.Policy", refused.Field)
				require.Equal(t, fmt.Sprintf("is a %s, and the keys' rows are of a %s, which would start anew; "+
					"make a limiter of another name", kind(raised[to]), kind(one)), refused.Reason)
			}
		}
	}
}

// If two kinds of policy alternate on one key, each change admits another whole limit.
func TestTwoAlgorithmsOnOneKeyAdmitBoth(t *testing.T) {
	t.Parallel()

	const limit, calls = 10, 40
	client := limitertest.NewClient(t, pgtest.New(t).Pool, ratelimit.ClientConfig{})
	for oneName, one := range limitertest.SlowPolicies(limit) {
		for otherName, other := range limitertest.SlowPolicies(limit) {
			name := oneName + " and " + otherName
			limiters := []*ratelimit.Limiter{
				limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: one}),
				limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: other}),
			}
			allowed := 0
			for call := range calls {
				result, err := limiters[call%2].Allow(t.Context(), "key")
				require.NoError(t, err)
				if result.Allowed {
					allowed++
				}
			}
			if oneName == otherName {
				require.Equal(t, limit, allowed)
			} else {
				require.Equal(t, calls, allowed)
			}
		}
	}
}

func TestWithSharesEverythingElse(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	const schema = `a "schema"`
	migrateInto(t, db, schema)
	for name, policy := range limitertest.SlowPolicies(10) {
		limiter := limitertest.New(
			t,
			db.Pool,
			ratelimit.Config{
				Name:    "test",
				Policy:  ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year},
				Durable: true,
			},
			ratelimit.ClientConfig{Schema: schema},
		)
		view := limitertest.Under(limiter, policy)
		result, err := view.AllowN(t.Context(), name, 10)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 10, result.Limit)
		_, err = limiter.AllowN(t.Context(), name, 10)
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit) // the limit of l has not changed
		result, err = limiter.Allow(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, name != "fixed window", result.Allowed)

		tx := pgtest.Begin(t, db)
		_, err = view.WithTx(tx).Allow(t.Context(), "in a transaction")
		require.NoError(t, err)
		require.NoError(t, view.WithTx(tx).Reset(t.Context(), name))
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(
			t,
			"in a transaction",
			pgtest.Scalar[string](
				t,
				db.Pool,
				"DELETE FROM "+pgx.Identifier{schema, "rate_limit_durable"}.Sanitize()+" RETURNING key",
			),
		)
	}
}

// After an upgrade, a customer is not denied by a remembered denial of the old policy. A denied customer without an
// upgrade does not cause a statement.
func TestDenialIsRememberedForItsPolicy(t *testing.T) {
	t.Parallel()

	pool, asked := limitertest.TracedPool(t, pgtest.New(t))
	for name, base := range limitertest.SlowPolicies(10) {
		free := limitertest.New(
			t,
			pool,
			ratelimit.Config{Name: name, Policy: base},
			ratelimit.ClientConfig{DenialMaxAge: testkit.Amply},
		)
		paid := limitertest.With(t, free, limitertest.SlowPolicies(100)[name])
		ask := func(limiter *ratelimit.Limiter, n int64, allowed bool, statements int) {
			t.Helper()
			before := asked.Count()
			result, err := limiter.AllowN(t.Context(), "key", n)
			require.NoError(t, err)
			require.Equal(t, allowed, result.Allowed)
			require.Equal(t, statements, asked.Count()-before)
		}
		ask(free, 10, true, 1)
		ask(free, 1, false, 1)
		ask(free, 1, false, 0)
		ask(limitertest.With(t, free, base), 1, false, 0) // equal to free
		if _, isBucket := base.(ratelimit.TokenBucket); isBucket {
			ask(paid, 1, false, 1) // the tokens are kept, and none are left
			ask(paid, 1, false, 0)
		} else {
			ask(paid, 90, true, 1)
			ask(paid, 1, false, 1)
			ask(paid, 1, false, 0)
		}
		require.NoError(t, free.Reset(t.Context(), "key")) // Reset ends the denials of all policies
		ask(paid, 1, true, 1)
	}
}

// Limiters with any number of policies share MaxInFlight connections, and each call is decided by its own policy.
func TestPoliciesShareTheConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	const policies, callers = 12, 40
	pool, asked := limitertest.TracedPool(t, pgtest.New(t))
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}},
	)
	var mu sync.Mutex
	allowed := map[string]int{}
	errs := make([]error, policies*callers)
	testkit.Together(len(errs), func(i int) {
		number := i % policies
		view, err := limiter.With(ratelimit.FixedWindow{Limit: int64(1 + number), Window: limitertest.Year})
		if number%2 == 1 {
			view = limitertest.Under(limiter, ratelimit.SlidingWindow{Limit: int64(1 + number), Window: limitertest.Year})
		}
		if err == nil {
			var result ratelimit.Result
			result, err = view.Allow(t.Context(), fmt.Sprint(number))
			if result.Allowed {
				mu.Lock()
				defer mu.Unlock()
				allowed[fmt.Sprint(number)]++
			}
		}
		errs[i] = err
	})
	require.NoError(t, errors.Join(errs...))
	for number := range policies {
		require.Equal(t, 1+number, allowed[fmt.Sprint(number)])
	}
	require.LessOrEqual(
		t,
		asked.AtOnce,
		3,
	) // one more for keys whose row is locked
	require.Less(t, asked.Count(), policies*callers/2) // calls share statements
}

func BenchmarkWith(b *testing.B) {
	for _, policy := range []ratelimit.Policy{ratelimit.FixedWindow{Limit: 20, Window: time.Minute}, ratelimit.SlidingWindow{Limit: 20, Window: time.Minute}} {
		config := ratelimit.Config{Name: "test", Policy: policy}
		client, err := ratelimit.NewClient(&pgxpool.Pool{}, ratelimit.ClientConfig{Schema: "limits"})
		require.NoError(b, err)
		limiter, err := client.Limiter(config)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := limiter.With(policy); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
