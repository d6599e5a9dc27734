package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The example does what its comments say, on a real Postgres.
func TestAPI(t *testing.T) {
	t.Parallel()

	api, err := newAPI(pgtest.New(t).Pool)
	require.NoError(t, err)
	ask := func(client, method, path, form string) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), method, path, strings.NewReader(form))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		r.Header.Set("Cookie", "user=alice")
		r.RemoteAddr = "10.0.0.1:1234"
		r.Header.Set("X-Forwarded-For", "198.51.100.1, "+client)
		w := httptest.NewRecorder()
		api.ServeHTTP(w, r)
		return w
	}
	const right, wrong = "user=alice&password=correct+horse", "user=alice&password=guess"

	for range 10 {
		require.Equal(t, http.StatusNoContent, ask("192.0.2.1", http.MethodPost, "/login", right).Code)
	}
	for range 5 {
		require.Equal(t, http.StatusUnauthorized, ask("192.0.2.1", http.MethodPost, "/login", wrong).Code)
	}
	denied := ask("192.0.2.1", http.MethodPost, "/login", right)
	require.Equal(t, http.StatusTooManyRequests, denied.Code)
	require.NotEmpty(t, denied.Header().Get("Retry-After"))
	require.Contains(t, denied.Body.String(), `"violated-policies":["login"]`)
	require.Equal(t, []string{`"address";q=100;w=60`, `"login";q=5;w=900`}, denied.Header().Values("RateLimit-Policy"))
	require.Equal(t, http.StatusNoContent, ask("192.0.2.2", http.MethodPost, "/login", right).Code)

	// The buckets refill during the test, so a few more requests may be allowed.
	untilDenied := func(client string) (admitted int, policy string) {
		for ; ; admitted++ {
			answer := ask(client, http.MethodGet, "/hello", "")
			if answer.Code == http.StatusOK {
				require.Equal(t, "hello, alice\n", answer.Body.String())
				continue
			}
			require.Equal(t, http.StatusTooManyRequests, answer.Code)
			return admitted, answer.Body.String()
		}
	}
	admitted, policy := untilDenied("192.0.2.3")
	require.GreaterOrEqual(t, admitted, 20)
	require.Contains(t, policy, `["user"]`)
	for {
		answer := ask("192.0.2.3", http.MethodGet, "/elsewhere", "")
		if answer.Code == http.StatusTooManyRequests {
			require.Contains(t, answer.Body.String(), `["address"]`)
			break
		}
		require.Equal(t, http.StatusNotFound, answer.Code)
	}
}
