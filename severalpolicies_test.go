package ratelimit_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestSeveralPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	pool := pgtest.New(t).Pool
	now := limitertest.T0
	config := ratelimit.Config{
		Name:   "api",
		Policy: ratelimit.All(ratelimit.SlidingWindow{Limit: 3, Window: time.Second}, ratelimit.FixedWindow{Limit: 5, Window: time.Hour}),
	}
	clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}}
	l := limitertest.New(t, pool, config, clientConfig)
	for i, want := range []ratelimit.Result{
		{Allowed: true, Limit: 3, Remaining: 2, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 1, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 0, ResetAfter: time.Hour},
		{Limit: 3, Remaining: 0, RetryAfter: 1333334 * time.Microsecond, ResetAfter: time.Hour},
	} {
		got, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		want.DecidedAt = now
		require.Equal(t, want, limitertest.Plain(got), "call %d", i)
	}
	now = limitertest.T0.Add(2 * time.Second)
	got, err := l.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	require.Equal(
		t,
		ratelimit.Result{Allowed: true, Limit: 5, Remaining: 0, ResetAfter: time.Hour - 2*time.Second, DecidedAt: now},
		limitertest.Plain(got),
	)
	for _, call := range []func() (ratelimit.Result, error){
		func() (ratelimit.Result, error) { return l.Allow(t.Context(), "key") },
		func() (ratelimit.Result, error) { return l.Peek(t.Context(), "key") },
	} {
		got, err := call()
		require.NoError(t, err)
		require.Equal(
			t,
			ratelimit.Result{
				Limit:      5,
				RetryAfter: time.Hour - 2*time.Second,
				ResetAfter: time.Hour - 2*time.Second,
				DecidedAt:  now,
			},
			limitertest.Plain(got),
		)
	}
	_, err = l.AllowN(t.Context(), "key", 4)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit) // the smaller limit decides

	names := map[string]bool{}
	for id := range pgtest.StoredRows(t, pool, false) {
		names[id.Name] = true
	}
	require.Equal(t, map[string]bool{"api": true, "api/2": true}, names)
	require.NoError(t, l.Reset(t.Context(), "key"))
	require.Empty(t, pgtest.StoredRows(t, pool, false))

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	got, err = l.WithTx(tx).AllowN(t.Context(), "key", 3)
	require.NoError(t, err)
	require.True(t, got.Allowed)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, pgtest.StoredRows(t, pool, false))

	// A limiter with a single policy and the same name shares the first policy's rows.
	first, err := l.With(ratelimit.SlidingWindow{Limit: 3, Window: time.Second})
	require.NoError(t, err)
	_, err = first.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	got, err = l.Peek(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 1, got.Remaining)
}

// Concurrent calls for the same key are merged, and get the same answers as calls one after the other. Result.Each has
// a result for each policy, and agrees with the whole result, whether the database, a lease or FallbackLocal decides.
func TestEachOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	now := limitertest.T0
	client := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}}
	window, bucket := ratelimit.FixedWindow{Limit: 3, Window: time.Second}, ratelimit.TokenBucket{Capacity: 5, Refill: 1, Every: time.Hour}
	one := func(limit, remaining int64, retryAfter, resetAfter time.Duration) ratelimit.Result {
		return ratelimit.Result{
			Allowed: retryAfter == 0, Limit: limit, Remaining: remaining, RetryAfter: retryAfter, ResetAfter: resetAfter,
			DecidedAt: now,
		}
	}
	requireEach := func(got ratelimit.Result, want ...ratelimit.Result) {
		t.Helper()
		each := got.Each()
		require.Len(t, each, len(want))
		for i := range each {
			require.Equal(t, got.Source, each[i].Source)
			each[i].Source = ratelimit.SourceDatabase
			require.Equal(t, want[i], limitertest.Plain(each[i]))
		}
		each[0].Limit = 0 // changes only a copy
		require.Equal(t, want[0].Limit, got.Each()[0].Limit)
	}
	pool := pgtest.New(t).Pool
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.All(window, bucket)}, client)
	ask := func(n int64) ratelimit.Result {
		t.Helper()
		got, err := l.AllowN(t.Context(), "key", n)
		require.NoError(t, err)
		return got
	}
	requireEach(ask(2), one(3, 1, 0, time.Second), one(5, 3, 0, 2*time.Hour))
	requireEach(ask(2), one(3, 1, time.Second, time.Second), one(5, 3, 0, 2*time.Hour))
	requireEach(ask(0), one(3, 1, 0, time.Second), one(5, 3, 0, 2*time.Hour))
	now = limitertest.T0.Add(time.Second)
	requireEach(ask(3), one(3, 0, 0, time.Second), one(5, 0, 0, 5*time.Hour-time.Second))
	requireEach(ask(1), one(3, 0, time.Second, time.Second), one(5, 0, time.Hour-time.Second, 5*time.Hour-time.Second))

	alone := limitertest.New(t, pool, ratelimit.Config{Name: "alone", Policy: window}, client)
	got, err := alone.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Nil(t, got.Each())

	closed := pgtest.New(t).Pool
	closed.Close()
	away := limitertest.New(t, closed, ratelimit.Config{Name: "api", Policy: ratelimit.All(window, bucket), OnFailure: ratelimit.FallbackLocal(1)}, client)
	got, err = away.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceFallback, got.Source)
	requireEach(got, one(3, 2, 0, time.Second), one(5, 4, 0, time.Hour))

	leased := limitertest.New(t, pool, ratelimit.Config{
		Name: "leased", Lease: &ratelimit.Lease{},
		Policy: ratelimit.All(ratelimit.FixedWindow{Limit: 2_000_000, Window: 2 * time.Hour}, ratelimit.FixedWindow{Limit: 1_000_000, Window: time.Hour}),
	})
	for got.Source != ratelimit.SourceLease {
		got, err = leased.Allow(t.Context(), "key")
		require.NoError(t, err)
		each := got.Each()
		require.Len(t, each, 2)
		require.EqualValues(t, 2_000_000, each[0].Limit)
		require.Equal(t, each[1].Remaining+1_000_000, each[0].Remaining)
		require.Equal(t, each[1].Remaining, got.Remaining)
		require.Equal(t, got.ResetAfter, each[0].ResetAfter)
		require.Greater(t, got.ResetAfter, each[1].ResetAfter)
		require.Equal(t, got.Source, each[0].Source)
	}
}

func TestSeveralPoliciesAreCoalesced(t *testing.T) {
	t.Parallel()

	policy := ratelimit.All(
		ratelimit.SlidingWindow{Limit: 30, Window: 7 * time.Second},
		ratelimit.TokenBucket{Capacity: 50, Refill: 3, Every: 7 * time.Second},
	)
	config := ratelimit.Config{Name: "test", Policy: policy}
	clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
	pool := pgtest.New(t).Pool
	limiter, serial := limitertest.New(t, pool, config, clientConfig), limitertest.New(t, pool, config, clientConfig)
	const calls = 60
	want := make([]ratelimit.Result, calls)
	for i := range want {
		var err error
		want[i], err = serial.Allow(t.Context(), "in a row")
		require.NoError(t, err)
	}
	got, errs := make([]ratelimit.Result, calls), make([]error, calls)
	testkit.Together(calls, func(i int) { got[i], errs[i] = limiter.Allow(t.Context(), "at once") })
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, limitertest.Tally(want), limitertest.Tally(got))
}

// A refund or grant goes to all policies of a limiter, each within its own limits.
func TestRefundAndGrantOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	now := limitertest.T0
	l := limitertest.New(
		t,
		pool,
		ratelimit.Config{
			Name:   "api",
			Policy: ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: time.Second}, ratelimit.SlidingLog{Limit: 15, Window: time.Hour}),
		},
		ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}},
	)
	told := func(result ratelimit.Result, err error) func(want ratelimit.Result) ratelimit.Result {
		t.Helper()
		require.NoError(t, err)
		return func(want ratelimit.Result) ratelimit.Result {
			t.Helper()
			want.Allowed, want.DecidedAt = true, now
			require.Equal(t, want, limitertest.Plain(result))
			return result
		}
	}
	eight := told(l.AllowN(t.Context(), "key", 8))(ratelimit.Result{Limit: 10, Remaining: 2, ResetAfter: time.Hour})
	now = now.Add(time.Second)
	four := told(l.AllowN(t.Context(), "key", 4))(ratelimit.Result{Limit: 15, Remaining: 3, ResetAfter: time.Hour})
	// The fixed window in which these 8 units were taken has ended.
	told(limitertest.AsResult(l.RefundN(t.Context(), eight, 6)))(ratelimit.Result{Limit: 10, Remaining: 6, ResetAfter: time.Hour})
	told(limitertest.AsResult(l.Grant(t.Context(), "key", 5)))(ratelimit.Result{Limit: 10, Remaining: 11, ResetAfter: time.Hour})
	// This call spends 4 units of the window's credit and 1 of the log's.
	ten := told(l.AllowN(t.Context(), "key", 10))(ratelimit.Result{Limit: 10, Remaining: 1, ResetAfter: time.Hour})
	denied, err := l.AllowN(t.Context(), "key", 6)
	require.NoError(t, err)
	require.Equal(
		t,
		ratelimit.Result{Limit: 10, Remaining: 1, RetryAfter: time.Hour - time.Second, ResetAfter: time.Hour, DecidedAt: now},
		limitertest.Plain(denied),
	)
	told(limitertest.AsResult(l.Refund(t.Context(), four)))(ratelimit.Result{Limit: 10, Remaining: 5, ResetAfter: time.Hour})
	// Each policy gets its credit back first.
	told(limitertest.AsResult(l.RefundN(t.Context(), ten, 4)))(ratelimit.Result{Limit: 10, Remaining: 9, ResetAfter: time.Hour})
	told(limitertest.AsResult(l.Refund(t.Context(), ten)))(ratelimit.Result{Limit: 10, Remaining: 15, ResetAfter: time.Hour})
}

func TestAllIsValidated(t *testing.T) {
	t.Parallel()

	good := ratelimit.FixedWindow{Limit: 1, Window: time.Hour}
	nine := []ratelimit.Policy{good, good, good, good, good, good, good, good, good}
	for says, policy := range map[string]ratelimit.Policy{
		"is All of 0 policies, and needs 2 to 8": ratelimit.All(),
		"is All of 1 policies, and needs 2 to 8": ratelimit.All(good),
		"is All of 9 policies, and needs 2 to 8": ratelimit.All(nine...),
		"is All within All":                      ratelimit.All(good, ratelimit.All(good, good)),
		"is required":                            ratelimit.All(good, nil),
		"is 0, and must be at least 1":           ratelimit.All(good, ratelimit.FixedWindow{Window: time.Hour}),
	} {
		_, err := ratelimit.New(&pgxpool.Pool{}, ratelimit.Config{Name: "test", Policy: policy})
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, err, &refused, says)
		require.ErrorContains(t, err, says)
	}
	_, err := ratelimit.New(&pgxpool.Pool{}, ratelimit.Config{Name: strings.Repeat("n", 127), Policy: ratelimit.All(good, good)})
	require.ErrorContains(t, err, "Config.Name has 129 bytes")
	_, err = ratelimit.New(&pgxpool.Pool{}, ratelimit.Config{Name: strings.Repeat("n", 126), Policy: ratelimit.All(nine[:8]...)})
	require.NoError(t, err)
}
