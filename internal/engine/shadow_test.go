package engine_test

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The policy in force and the shadow policy decide each request, each as if it were the only policy. The test has many
// calls in one statement, many keys and costs, and shadow policies of every algorithm.
func TestShadow(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool, counted := limitertest.TracedPool(t, db)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)})
	policy := ratelimit.SlidingWindow{Limit: 20, Window: time.Hour}
	for _, shadow := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, ratelimit.SlidingWindow{Limit: 30, Window: time.Minute}, ratelimit.SlidingLog{Limit: 10, Window: time.Hour}, ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour},
		ratelimit.All(ratelimit.FixedWindow{Limit: 15, Window: time.Hour}, ratelimit.SlidingLog{Limit: 10, Window: time.Hour}),
	} {
		name := shadow.String()
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, name, "", "key", "shadow", name)
		limitertest.WaitUntilKnown(t, p, db.Pool)
		config := ratelimit.Config{Name: name, Policy: policy, Policies: p}
		l := limitertest.Of(t, client, config)
		config.Policies, config.Name = nil, name+" alone"
		alone := limitertest.Of(t, client, config)
		config.Policy, config.Name = shadow, name+" as if in force"
		inForce := limitertest.Of(t, client, config)
		for i := range 40 {
			key, n := fmt.Sprint("key", rand.IntN(2)), rand.Int64N(3)
			if i%20 == 0 {
				key, n = "another", 1
			}
			before := counted.Count()
			got, err := l.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			require.LessOrEqual(t, counted.Count()-before, 1)
			want, err := alone.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			shadowWant, err := inForce.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			if key == "another" {
				require.Nil(t, got.Shadow)
			} else {
				require.NotNil(t, got.Shadow)
				require.Equal(t, plainly(shadowWant), plainly(*got.Shadow))
				require.ErrorIs(t, limitertest.ErrorOf(inForce.Refund(t.Context(), *got.Shadow)), ratelimit.ErrNothingToRefund)
			}
			require.Equal(t, plainly(want), plainly(got))
		}
	}
}

// plainly returns a result without its shadow. It does not distinguish between a remembered denial and the database.
func plainly(r ratelimit.Result) ratelimit.Result {
	r = limitertest.Plain(r)
	r.Shadow = nil
	if r.Source == ratelimit.SourceCachedDenial {
		r.Source = ratelimit.SourceDatabase
	}
	return r
}

// Under load, the policy in force and the shadow policy each admit exactly their limit.
func TestShadowsAreExact(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 30/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	var admitted, shadowed, undecided [4]atomic.Int64
	limiters := make([]*ratelimit.Limiter, 4) // the concurrent calls do not use the last limiter
	for i := range limiters {
		limiters[i] = limitertest.New(t, db.Pool, ratelimit.Config{
			Name: "api", Policy: ratelimit.FixedWindow{Limit: 50, Window: time.Hour}, Policies: p, NoDenialCache: i == 0,
		}, ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)})
	}
	testkit.Together(60, func(i int) {
		for range 20 {
			key := rand.IntN(len(admitted))
			result, err := limiters[i%3].Allow(t.Context(), fmt.Sprint(key))
			require.NoError(t, err)
			switch {
			case result.Shadow == nil:
				undecided[key].Add(1)
			case result.Shadow.Allowed:
				shadowed[key].Add(1)
			}
			if result.Allowed {
				admitted[key].Add(1)
			}
		}
	})
	for key := range admitted {
		require.EqualValues(t, 50, admitted[key].Load())
		require.LessOrEqual(t, shadowed[key].Load(), int64(30))
		require.GreaterOrEqual(t, shadowed[key].Load()+undecided[key].Load(), int64(30))

		// If the policy and its shadow both deny a request, the denial is remembered. The concurrent calls may not have
		// seen such a denial, because their limiters leave out some shadows under load.
		var last ratelimit.Result
		for range 30 + 2 {
			var err error
			last, err = limiters[3].Allow(t.Context(), fmt.Sprint(key))
			require.NoError(t, err)
		}
		require.Equal(t, ratelimit.SourceCachedDenial, last.Source)
	}
}

// If a shadow fails, its request is still decided, exactly once.
func TestShadowThatFails(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "bucket 5 1/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	allow := func(remaining int64) ratelimit.Result {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Equal(t, remaining, result.Remaining)
		return result
	}
	require.NotNil(t, allow(9).Shadow)

	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'api/shadow' FOR UPDATE")
	require.Nil(t, allow(8).Shadow)
	require.NoError(t, tx.Rollback(t.Context()))
	require.EqualValues(t, 3, allow(7).Shadow.Remaining)

	pgtest.Exec(t, db.Pool, "REVOKE ALL ON FUNCTION rate_limit_take_token_bucket FROM PUBLIC")
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_take_token_bucket RENAME TO rate_limit_gone")
	require.Nil(t, allow(6).Shadow)
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_gone RENAME TO rate_limit_take_token_bucket")
	require.EqualValues(t, 2, allow(5).Shadow.Remaining)

	result, err := l.AllowN(t.Context(), "other", 6)
	require.NoError(t, err)
	require.True(t, result.Allowed)
	require.False(t, result.Shadow.Allowed)
	require.Equal(t, model.Duration(model.MaxSpan), result.Shadow.RetryAfter)

	inTx := pgtest.Begin(t, db)
	result, err = l.WithTx(inTx).Allow(t.Context(), "third")
	require.NoError(t, err)
	require.Nil(t, result.Shadow)
	require.NoError(t, inTx.Rollback(t.Context()))
	results, err := ratelimit.AllowAll(t.Context(), l.Request("third", 1))
	require.NoError(t, err)
	require.Nil(t, results.Each[0].Shadow)
}

// If requests with a shadow wait for a held row in vain, they do not wait again without the shadow.
func TestShadowDoesNotWaitTwice(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool, counted := limitertest.TracedPool(t, db) // does not count a request with its shadow: they are a batch
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 5/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	_, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)

	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'api' FOR UPDATE")
	before := counted.Count()
	r := newRequest(l, "key", 1)
	r.Shadow = newShadow(l, limitertest.View(l).Shadow(limitertest.Model(l.Config().Policy), "key"), "key", 1)
	b := limitertest.Engine(l).Batcher
	err = b.Decide(t.Context(), pool, []*engine.Request{r}, engine.Transaction{LockTimeout: engine.LockTimeout(50 * time.Millisecond)})
	require.True(t, pg.LockTimeout(err), err)
	require.Equal(t, before, counted.Count())
	require.True(t, r.PassedOver())
	require.Nil(t, r.Shadow.Outcome())
}

// If a limiter remembers no denials, the denials of its shadow policy are not remembered either.
func TestShadowDenialsOfLimitersThatRememberNone(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 1/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	for _, none := range []bool{false, true} {
		l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p, NoDenialCache: none})
		for range 2 {
			result, err := l.Allow(t.Context(), fmt.Sprint(none))
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.NotNil(t, result.Shadow)
		}
		require.Equal(t, none, limitertest.Engine(l).Denials.Stripes.Load() == nil)
	}
}

// If a row in force allows or denies everything, the shadow policy is not decided, and Explain does not mention it.
func TestNoShadowBesideOffAndDeny(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 1/1h")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "off", "", "off", "")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "deny", "", "deny", "")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "enforce", "", "enforce", "fixed 20/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	for key, shadow := range map[string]bool{"off": false, "deny": false, "enforce": true, "of the code": true} {
		result, err := l.Allow(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, shadow, result.Shadow != nil, key)
		e, err := l.Explain(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, shadow, e.Shadow != nil, key)
		require.Equal(t, shadow, e.ShadowRow != 0, key)
	}
}

// BenchmarkShadow shows what a shadow costs a decision, for one caller and for 64.
func BenchmarkShadow(b *testing.B) {
	db := pgtest.New(b)
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{})
	require.NoError(b, err)
	pgtest.Exec(b, db.Pool, limitertest.AddPolicy, "shadowed", "", "", "shadow", "sliding 2000000/1h")
	require.NoError(b, limitertest.Table(p).ReadChanges(b.Context(), db.Pool, testkit.Amply))
	client, err := ratelimit.NewClient(db.Pool, ratelimit.ClientConfig{})
	require.NoError(b, err)
	for _, callers := range []int{1, 64} {
		for range 3 {
			for _, name := range []string{"alone", "shadowed"} {
				l, err := client.Limiter(ratelimit.Config{Name: name, Policy: ratelimit.SlidingWindow{Limit: 1_000_000, Window: time.Hour}, Policies: p})
				require.NoError(b, err)
				b.Run(fmt.Sprintf("%d callers, %s", callers, name), func(b *testing.B) {
					var left atomic.Int64
					left.Store(int64(b.N))
					testkit.Together(callers, func(int) {
						for left.Add(-1) >= 0 {
							_, _ = l.Allow(b.Context(), fmt.Sprint(rand.IntN(1000)))
						}
					})
				})
			}
		}
	}
}
