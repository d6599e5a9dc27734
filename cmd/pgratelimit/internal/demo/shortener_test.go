package demo

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func newTestShortener(t *testing.T, pool *pgxpool.Pool, limit int64) http.Handler {
	t.Helper()
	now := time.Now()
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name:      "shorten",
		Policy:    ratelimit.SlidingWindow{Limit: limit, Window: time.Minute},
		OnFailure: ratelimit.ReturnError(),
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})
	handler, err := newShortener("http://short.test", limiter)
	require.NoError(t, err)
	return handler
}

// send posts a body. The argument address is the client's address.
func send(handler http.Handler, address, contentType, body string) *httptest.ResponseRecorder {
	request := httptest.NewRequest(http.MethodPost, "/shorten", strings.NewReader(body))
	request.RemoteAddr = address
	request.Header.Set("Content-Type", contentType)
	response := httptest.NewRecorder()
	handler.ServeHTTP(response, request)
	return response
}

const (
	form     = "application/x-www-form-urlencoded"
	jsonBody = "application/json; charset=utf-8"
)

func TestShortenAndFollow(t *testing.T) {
	t.Parallel()

	handler := newTestShortener(t, pgtest.New(t).Pool, 100)
	for _, test := range []struct{ contentType, body string }{
		{form, "url=https://go.dev/doc?a=1%26b=2"},
		{jsonBody, `{"url": "https://go.dev/doc?a=1&b=2"}`},
	} {
		response := send(handler, "192.0.2.1:1000", test.contentType, test.body)
		require.Equal(t, http.StatusCreated, response.Code, response.Body)
		short := response.Header().Get("Location")
		require.Regexp(t, `^http://short\.test/\w{8}$`, short)
		require.JSONEq(t, `{"short": "`+short+`", "url": "https://go.dev/doc?a=1&b=2"}`, response.Body.String())

		followed := httptest.NewRecorder()
		handler.ServeHTTP(followed, httptest.NewRequest(http.MethodGet, short, nil))
		require.Equal(t, http.StatusFound, followed.Code)
		require.Equal(t, "https://go.dev/doc?a=1&b=2", followed.Header().Get("Location"))
	}

	for _, test := range []struct{ contentType, body string }{
		{form, ""},
		{form, "url=javascript:alert(1)"},
		{form, "url=https:///nowhere"},
		{form, "url=https://go.dev/" + strings.Repeat("x", 1<<16)},
		{jsonBody, `url=https://go.dev/`},
		{jsonBody, `{"url": 1}`},
	} {
		response := send(handler, "192.0.2.1:1000", test.contentType, test.body)
		require.Equal(t, http.StatusBadRequest, response.Code, test.body)
		require.Contains(t, response.Body.String(), `"error"`)
	}

	unknown := httptest.NewRecorder()
	handler.ServeHTTP(unknown, httptest.NewRequest(http.MethodGet, "/unknown", nil))
	require.Equal(t, http.StatusNotFound, unknown.Code)
}

func TestLimitedByAddress(t *testing.T) {
	t.Parallel()

	handler := newTestShortener(t, pgtest.New(t).Pool, 2)
	const body = "url=https://go.dev/"
	for _, port := range []string{"1", "2"} {
		require.Equal(t, http.StatusCreated, send(handler, "192.0.2.1:"+port, form, body).Code)
	}

	denied := send(handler, "192.0.2.1:3", form, body)
	require.Equal(t, http.StatusTooManyRequests, denied.Code)
	require.Equal(t, "90", denied.Header().Get("Retry-After"))
	require.Equal(t, "2", denied.Header().Get("X-RateLimit-Limit"))
	require.Equal(t, "0", denied.Header().Get("X-RateLimit-Remaining"))
	require.Equal(t, "application/problem+json", denied.Header().Get("Content-Type"))
	require.Contains(t, denied.Body.String(), `"violated-policies":["shorten"]`)

	require.Equal(t, http.StatusCreated, send(handler, "[2001:db8::1]:1", form, body).Code, "another address")
	require.Equal(t, http.StatusBadRequest, send(handler, "somewhere", form, body).Code, "no address at all")
}

func TestStoreFailureIsNotTheClients(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool // a database without migrations
	response := send(newTestShortener(t, pool, 2), "192.0.2.1:1", form, "url=https://go.dev/")
	require.Equal(t, http.StatusServiceUnavailable, response.Code)
	require.Contains(t, response.Body.String(), "#temporary-reduced-capacity")
}
