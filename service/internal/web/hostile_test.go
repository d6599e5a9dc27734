package web

import (
	"bufio"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

func TestDatabaseIsAway(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	pool := b.db.NewPool(t, nil)
	l := limiters{}
	for name, mode := range map[string]ratelimit.FailureMode{
		"error": ratelimit.ReturnError(), "allow": ratelimit.FailOpen(), "deny": ratelimit.FailClosed(),
	} {
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{})
		require.NoError(t, err)
		l[name], err = client.Limiter(ratelimit.Config{
			Name: name, Policy: ratelimit.Concurrency{Limit: 1}, OnFailure: mode,
		})
		require.NoError(t, err)
	}
	h := New(Options{Limiters: l, DB: pool})
	pool.Close()
	for name, status := range map[string]int{"error": 503, "allow": 200, "deny": 429} {
		got := post(t, h, "/v1/acquire", fmt.Sprintf(`{"limiter": %q, "key": "ada"}`, name))
		require.Equal(t, status, got.status, name)
		require.Equal(t, status != 200, got.header.Get("Retry-After") != "", name)
	}
	got := post(t, h, "/v1/renew", `{"slot": "00000000-0000-4000-8000-000000000000"}`)
	require.Equal(t, http.StatusServiceUnavailable, got.status)
	require.Equal(t, "unavailable", got.body["kind"])
}

// A body that never ends its arrival ends its connection, and disturbs nobody else.
func TestSlowBody(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{BodyTime: 50 * time.Millisecond})
	server := httptest.NewServer(b.handler)
	t.Cleanup(server.Close)

	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(server.URL, "http://"))
	require.NoError(t, err)
	defer conn.Close()
	_, err = fmt.Fprint(conn, "POST /v1/ask HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"+
		"Content-Length: 100\r\n\r\n{")
	require.NoError(t, err)
	response, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusBadRequest, response.StatusCode)
	require.True(t, response.Close)
}

func FuzzBodies(f *testing.F) {
	b := setup(f, Options{})
	h, _ := b.handler.(*handler)
	for path := range h.routes {
		f.Add(path, `{"limiter": "mail", "key": "ada", "n": 1, "ttl": 1, "timeout": 0}`)
		f.Add(path, `{"limiter": "mail", "hold": "", "used": 1, "ttl": 1e308, "receipt": "x", "limits": [{}]}`)
	}
	f.Fuzz(func(t *testing.T, path, body string) {
		if _, ok := h.routes[path]; !ok {
			return
		}
		body = strings.ReplaceAll(body, `"timeout"`, `"limiter"`) // nobody waits here
		require.NotEqual(t, http.StatusInternalServerError, post(t, b.handler, path, body).status)
		require.Empty(t, b.log.String())
	})
}
