package ratelimittest_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// newHandler is part of the application. In production its db is a *pgxpool.Pool.
func newHandler(db ratelimit.DBTX) (http.Handler, error) {
	limiter, err := ratelimit.New(db, ratelimit.Config{
		Name:      "address",
		Policy:    ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
		OnFailure: ratelimit.FailClosed(),
	})
	if err != nil {
		return nil, err
	}
	limit, err := httplimit.New(limiter, httplimit.Config{Key: httplimit.ByIP()})
	if err != nil {
		return nil, err
	}
	return limit(http.NotFoundHandler()), nil
}

func TestHandler(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) { // the clock of synctest does not wait
		handler, err := newHandler(ratelimittest.NewDB())
		require.NoError(t, err)
		ask := func() int {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
			return w.Code
		}
		for range 10 {
			require.Equal(t, http.StatusNotFound, ask())
		}
		require.Equal(t, http.StatusTooManyRequests, ask())
		<-time.After(66 * time.Second) // the time in Retry-After
		require.Equal(t, http.StatusNotFound, ask())
	})
}

type away struct{}

func (away) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("connection refused")
}

func TestOutage(t *testing.T) {
	t.Parallel()
	handler, err := newHandler(away{})
	require.NoError(t, err)
	w := httptest.NewRecorder()
	handler.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	require.Equal(t, http.StatusServiceUnavailable, w.Code)
}
