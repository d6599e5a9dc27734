package ratelimittest_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

func tenAMinute() ratelimit.Config {
	return ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Minute}}
}

// Limiters on the same database share their keys. Limiters on different databases do not.
func TestKeysAreThoseOfTheDatabase(t *testing.T) {
	t.Parallel()

	db := ratelimittest.NewDB()
	for _, test := range []struct {
		db   ratelimit.DBTX
		want int64
	}{{db, 9}, {db, 8}, {ratelimittest.NewDB(), 9}} {
		result, err := limitertest.New(t, test.db, tenAMinute()).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, test.want, result.Remaining)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	}
}

// In a bubble of synctest, callers of Wait are served in order at the exact time. A denial is not remembered after its
// retry time.
func TestTimeOfABubble(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := limitertest.New(t, ratelimittest.NewDB(), tenAMinute())
		began := time.Now()
		for range 10 {
			result, err := limiter.Wait(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
		}
		require.Zero(t, time.Since(began))
		denied, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, time.Minute, denied.RetryAfter)

		soon, cancel := context.WithTimeout(t.Context(), 59*time.Second)
		defer cancel()
		_, err = limiter.Wait(soon, "key")
		require.ErrorIs(t, err, ratelimit.ErrWouldExceedDeadline)
		require.Zero(t, time.Since(began))

		_, err = limiter.Wait(t.Context(), "key")
		require.NoError(t, err)
		waited := time.Since(began)
		require.True(t, time.Minute <= waited && waited <= time.Minute+100*time.Millisecond, waited)
	})
}

func TestMiddleware(t *testing.T) {
	t.Parallel()

	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	config := tenAMinute()
	config.OnFailure = ratelimit.ReturnError()
	clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}}
	limit, err := httplimit.New(limitertest.New(t, ratelimittest.NewDB(), config, clientConfig), httplimit.Config{Key: httplimit.ByIP()})
	require.NoError(t, err)
	handler := limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	ask := func() *httptest.ResponseRecorder {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		return w
	}
	for range 10 {
		require.Equal(t, http.StatusOK, ask().Code)
	}
	denied := ask()
	require.Equal(t, http.StatusTooManyRequests, denied.Code)
	require.Equal(t, "60", denied.Header().Get("Retry-After"))
	now = now.Add(time.Minute)
	require.Equal(t, http.StatusOK, ask().Code)
}

// All other queries return an error that says that the database has no SQL.
func TestOthersAreRefused(t *testing.T) {
	t.Parallel()

	sweeper, err := cleanup.New(ratelimittest.NewDB(), cleanup.Config{})
	require.NoError(t, err)
	_, err = sweeper.RunOnce(t.Context())
	require.ErrorContains(t, err, "test this on Postgres")

	limiter := limitertest.New(t, ratelimittest.NewDB(), tenAMinute())
	_, err = limiter.AllowN(t.Context(), "key", 11)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
	var key *ratelimit.KeyError
	_, err = limiter.Allow(t.Context(), "")
	require.ErrorAs(t, err, &key)
}
