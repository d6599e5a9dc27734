package ratelimit

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestSeveralPolicies(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	pool := pgtest.New(t).Pool
	now := t0
	config := Config{
		Name:   "api",
		Policy: All(SlidingWindow{Limit: 3, Window: time.Second}, FixedWindow{Limit: 5, Window: time.Hour}),
	}
	clientConfig := ClientConfig{Test: TestConfig{Now: func() time.Time { return now }}}
	l := newLimiter(t, pool, config, clientConfig)
	for i, want := range []Result{
		{Allowed: true, Limit: 3, Remaining: 2, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 1, ResetAfter: time.Hour},
		{Allowed: true, Limit: 3, Remaining: 0, ResetAfter: time.Hour},
		{Limit: 3, Remaining: 0, RetryAfter: 1333334 * time.Microsecond, ResetAfter: time.Hour},
	} {
		got, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		want.DecidedAt = now
		require.Equal(t, want, utc(got), "call %d", i)
	}
	now = t0.Add(2 * time.Second)
	got, err := l.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	require.Equal(
		t,
		Result{Allowed: true, Limit: 5, Remaining: 0, ResetAfter: time.Hour - 2*time.Second, DecidedAt: now},
		utc(got),
	)
	for _, call := range []func() (Result, error){
		func() (Result, error) { return l.Allow(t.Context(), "key") },
		func() (Result, error) { return l.Peek(t.Context(), "key") },
	} {
		got, err := call()
		require.NoError(t, err)
		require.Equal(
			t,
			Result{
				Limit:      5,
				RetryAfter: time.Hour - 2*time.Second,
				ResetAfter: time.Hour - 2*time.Second,
				DecidedAt:  now,
			},
			utc(got),
		)
	}
	_, err = l.AllowN(t.Context(), "key", 4)
	require.ErrorIs(t, err, ErrCostExceedsLimit) // of the smaller limit

	names := map[string]bool{}
	for id := range storedRows(t, pool, false) {
		names[id.Name] = true
	}
	require.Equal(t, map[string]bool{"api": true, "api/2": true}, names)
	require.NoError(t, l.Reset(t.Context(), "key"))
	require.Empty(t, storedRows(t, pool, false))

	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	got, err = l.WithTx(tx).AllowN(t.Context(), "key", 3)
	require.NoError(t, err)
	require.True(t, got.Allowed)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, storedRows(t, pool, false))

	// A plain limiter of that name shares the first policy's rows.
	first, err := l.With(SlidingWindow{Limit: 3, Window: time.Second})
	require.NoError(t, err)
	_, err = first.AllowN(t.Context(), "key", 2)
	require.NoError(t, err)
	got, err = l.Peek(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 1, got.Remaining)
}

// Calls for the same key at the same time become one element, and are told what calls in a row are.
// Each result has what each policy says, and agrees with the whole, whoever decides: the database, a lease, or this
// process in an outage.
func TestEachOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	now := t0
	client := ClientConfig{Test: TestConfig{Now: func() time.Time { return now }}}
	window, bucket := FixedWindow{Limit: 3, Window: time.Second}, TokenBucket{Capacity: 5, Refill: 1, Every: time.Hour}
	one := func(limit, remaining int64, retryAfter, resetAfter time.Duration) Result {
		return Result{
			Allowed: retryAfter == 0, Limit: limit, Remaining: remaining, RetryAfter: retryAfter, ResetAfter: resetAfter,
			DecidedAt: now,
		}
	}
	requireEach := func(got Result, want ...Result) {
		t.Helper()
		each := got.Each()
		require.Len(t, each, len(want))
		for i := range each {
			require.Equal(t, got.Source, each[i].Source)
			each[i].Source = SourceDatabase
			require.Equal(t, want[i], utc(each[i]))
		}
		each[0].Limit = 0 // a copy
		require.Equal(t, want[0].Limit, got.Each()[0].Limit)
	}
	pool := pgtest.New(t).Pool
	l := newLimiter(t, pool, Config{Name: "api", Policy: All(window, bucket)}, client)
	ask := func(n int64) Result {
		t.Helper()
		got, err := l.AllowN(t.Context(), "key", n)
		require.NoError(t, err)
		return got
	}
	requireEach(ask(2), one(3, 1, 0, time.Second), one(5, 3, 0, 2*time.Hour))
	requireEach(ask(2), one(3, 1, time.Second, time.Second), one(5, 3, 0, 2*time.Hour))
	requireEach(ask(0), one(3, 1, 0, time.Second), one(5, 3, 0, 2*time.Hour))
	now = t0.Add(time.Second)
	requireEach(ask(3), one(3, 0, 0, time.Second), one(5, 0, 0, 5*time.Hour-time.Second))
	requireEach(ask(1), one(3, 0, time.Second, time.Second), one(5, 0, time.Hour-time.Second, 5*time.Hour-time.Second))

	alone := newLimiter(t, pool, Config{Name: "alone", Policy: window}, client)
	got, err := alone.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Nil(t, got.Each())

	closed := pgtest.New(t).Pool
	closed.Close()
	away := newLimiter(t, closed, Config{Name: "api", Policy: All(window, bucket), OnFailure: FallbackLocal(1)}, client)
	got, err = away.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, SourceFallback, got.Source)
	requireEach(got, one(3, 2, 0, time.Second), one(5, 4, 0, time.Hour))

	leased := newLimiter(t, pool, Config{
		Name: "leased", Lease: &Lease{},
		Policy: All(FixedWindow{Limit: 2_000_000, Window: 2 * time.Hour}, FixedWindow{Limit: 1_000_000, Window: time.Hour}),
	})
	for got.Source != SourceLease {
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

	policy := All(
		SlidingWindow{Limit: 30, Window: 7 * time.Second},
		TokenBucket{Capacity: 50, Refill: 3, Every: 7 * time.Second},
	)
	config := Config{Name: "test", Policy: policy}
	clientConfig := ClientConfig{Test: frozen(t0)}
	pool := pgtest.New(t).Pool
	limiter, serial := newLimiter(t, pool, config, clientConfig), newLimiter(t, pool, config, clientConfig)
	const calls = 60
	want := make([]Result, calls)
	for i := range want {
		var err error
		want[i], err = serial.Allow(t.Context(), "in a row")
		require.NoError(t, err)
	}
	got, errs := make([]Result, calls), make([]error, calls)
	testkit.Together(calls, func(i int) { got[i], errs[i] = limiter.Allow(t.Context(), "at once") })
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, tally(want), tally(got))
}

// The policies of one limiter are given back to and granted to together, each within its own bounds.
func TestRefundAndGrantOfSeveralPolicies(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	now := t0
	l := newLimiter(
		t,
		pool,
		Config{
			Name:   "api",
			Policy: All(FixedWindow{Limit: 10, Window: time.Second}, SlidingLog{Limit: 15, Window: time.Hour}),
		},
		ClientConfig{Test: TestConfig{Now: func() time.Time { return now }}},
	)
	told := func(result Result, err error) func(want Result) Result {
		t.Helper()
		require.NoError(t, err)
		return func(want Result) Result {
			t.Helper()
			want.Allowed, want.DecidedAt = true, now
			require.Equal(t, want, utc(result))
			return result
		}
	}
	eight := told(l.AllowN(t.Context(), "key", 8))(Result{Limit: 10, Remaining: 2, ResetAfter: time.Hour})
	now = now.Add(time.Second)
	four := told(l.AllowN(t.Context(), "key", 4))(Result{Limit: 15, Remaining: 3, ResetAfter: time.Hour})
	// The window that counted them is over.
	told(asResult(l.RefundN(t.Context(), eight, 6)))(Result{Limit: 10, Remaining: 6, ResetAfter: time.Hour})
	told(asResult(l.Grant(t.Context(), "key", 5)))(Result{Limit: 10, Remaining: 11, ResetAfter: time.Hour})
	// It spends 4 of the window's credit and 1 of the log's.
	ten := told(l.AllowN(t.Context(), "key", 10))(Result{Limit: 10, Remaining: 1, ResetAfter: time.Hour})
	denied, err := l.AllowN(t.Context(), "key", 6)
	require.NoError(t, err)
	require.Equal(
		t,
		Result{Limit: 10, Remaining: 1, RetryAfter: time.Hour - time.Second, ResetAfter: time.Hour, DecidedAt: now},
		utc(denied),
	)
	told(asResult(l.Refund(t.Context(), four)))(Result{Limit: 10, Remaining: 5, ResetAfter: time.Hour})
	// In each of them its credit goes back first.
	told(asResult(l.RefundN(t.Context(), ten, 4)))(Result{Limit: 10, Remaining: 9, ResetAfter: time.Hour})
	told(asResult(l.Refund(t.Context(), ten)))(Result{Limit: 10, Remaining: 15, ResetAfter: time.Hour})
}

func TestAllIsValidated(t *testing.T) {
	t.Parallel()

	good := FixedWindow{Limit: 1, Window: time.Hour}
	nine := []Policy{good, good, good, good, good, good, good, good, good}
	for says, policy := range map[string]Policy{
		"is All of 0 policies, and needs 2 to 8": All(),
		"is All of 1 policies, and needs 2 to 8": All(good),
		"is All of 9 policies, and needs 2 to 8": All(nine...),
		"is All within All":                      All(good, All(good, good)),
		"is required":                            All(good, nil),
		"is 0, and must be at least 1":           All(good, FixedWindow{Window: time.Hour}),
	} {
		_, err := New(&pgxpool.Pool{}, Config{Name: "test", Policy: policy})
		var refused *ConfigError
		require.ErrorAs(t, err, &refused, says)
		require.ErrorContains(t, err, says)
	}
	_, err := New(&pgxpool.Pool{}, Config{Name: strings.Repeat("n", 127), Policy: All(good, good)})
	require.ErrorContains(t, err, "Config.Name has 129 bytes")
	_, err = New(&pgxpool.Pool{}, Config{Name: strings.Repeat("n", 126), Policy: All(nine[:8]...)})
	require.NoError(t, err)
}
