package web

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// While the database is away, on_failure of the limiter answers.
func TestDatabaseIsAway(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	pool := b.db.NewPool(t, nil)
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	policies, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{})
	require.NoError(t, err)
	l := limiters{}
	for name, mode := range map[string]ratelimit.FailureMode{
		"error": ratelimit.ReturnError(), "allow": ratelimit.FailOpen(), "deny": ratelimit.FailClosed(),
		"local": ratelimit.FallbackLocal(0.5),
	} {
		for kind, policy := range map[string]ratelimit.Policy{
			"": ratelimit.FixedWindow{Limit: 4, Window: time.Hour}, " slots": ratelimit.Concurrency{Limit: 4},
		} {
			l[name+kind], err = client.Limiter(ratelimit.Config{
				Name: name + kind, Policy: policy, OnFailure: mode, Policies: policies,
			})
			require.NoError(t, err)
		}
	}
	h := New(Options{Limiters: l, DB: pool, Logger: slog.New(slog.NewTextHandler(b.log, nil))})
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		policies.Run(ctx)
	}()
	testkit.WaitUntil(t, func() bool { return policies.Status().Age > 0 })
	end()
	<-ended

	// It goes away between the two statements of an acquire.
	gone := b.db.NewPool(t, nil)
	gone.Close()
	late := New(Options{Limiters: l, DB: gone, Logger: slog.New(slog.DiscardHandler)})
	for name, status := range map[string]int{"error": 503, "allow": 200, "deny": 429, "local": 503} {
		got := post(t, late, "/v1/acquire", fmt.Sprintf(`{"limiter": "%s slots", "key": "ada"}`, name))
		require.Equal(t, status, got.status, name)
		require.Equal(t, status == 200, got.body["slot"] == emptySlot, name)
	}

	pool.Close()
	for _, test := range []struct {
		path, more                string
		error, allow, deny, local int
	}{
		{"/v1/ask", `, "cost": 2`, 503, 200, 429, 200},
		{"/v1/look", ``, 503, 200, 429, 429}, // half of the limit is gone
		{"/v1/ask", ``, 503, 200, 429, 429},
		{"/v1/wait", `, "timeout": 0`, 503, 200, 429, 429},
		{"/v1/hold", `, "cost": 1, "ttl": 60`, 503, 200, 429, 429},
		{"/v1/charge", `, "cost": 1`, 503, 503, 503, 503},
		{"/v1/acquire", ``, 503, 200, 429, 503},
		{"/v1/acquire", `, "timeout": 60`, 503, 200, 429, 503},
	} {
		for name, status := range map[string]int{
			"error": test.error, "allow": test.allow, "deny": test.deny, "local": test.local,
		} {
			if test.path == "/v1/acquire" {
				name += " slots"
			}
			got := post(t, h, test.path, fmt.Sprintf(`{"limiter": %q, "key": "ada"%s}`, name, test.more))
			what := test.path + " " + name
			require.Equal(t, status, got.status, what)
			require.Equal(t, status != 200, got.header.Get("Retry-After") != "", what)
			require.Equal(t, status != 503, got.header.Get("RateLimit") != "", what)
			if status == 503 {
				require.Equal(t, "unavailable", got.body["kind"], what)
			}
			switch test.path {
			case "/v1/hold":
				require.Equal(t, status == 200, got.body["hold"] == "", what)
			case "/v1/acquire":
				require.Equal(t, status == 200, got.body["slot"] == emptySlot, what)
			}
		}
	}
	got := post(t, h, "/v1/renew", `{"slot": "00000000-0000-4000-8000-000000000000"}`)
	require.Equal(t, http.StatusServiceUnavailable, got.status)
	require.Equal(t, "unavailable", got.body["kind"])
	require.Equal(t, 1, strings.Count(b.log.String(), "\n"), b.log.String())
}

// What an operator must mend is logged once, with its cause.
func TestErrorsAreLoggedOnce(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the database is not migrated")
	journal := &log{}
	pool := pgtest.Empty(t).Pool
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
	require.NoError(t, err)
	l := limiters{}
	for name, policy := range map[string]ratelimit.Policy{
		"login": ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, "jobs": ratelimit.Concurrency{Limit: 1},
	} {
		l[name], err = client.Limiter(ratelimit.Config{Name: name, Policy: policy, OnFailure: ratelimit.FailOpen()})
		require.NoError(t, err)
	}
	h := New(Options{Limiters: l, DB: pool, Logger: slog.New(slog.NewTextHandler(journal, nil))})
	for range 3 {
		got := post(t, h, "/v1/ask", `{"limiter": "login", "key": "secret"}`)
		require.Equal(t, http.StatusServiceUnavailable, got.status)
		require.Equal(t, "not_migrated", got.body["kind"])
		require.Equal(t, http.StatusServiceUnavailable,
			post(t, h, "/v1/acquire", `{"limiter": "jobs", "key": "secret"}`).status)
	}
	require.Equal(t, 1, strings.Count(journal.String(), "\n"), journal.String())
	require.Contains(t, journal.String(), "kind=not_migrated")
	require.Contains(t, journal.String(), "pgratelimit migrate up")
	require.NotContains(t, journal.String(), "secret")

	var f faults
	now := time.Now()
	require.True(t, f.begin("setup", now))
	require.True(t, f.begin("other", now))
	require.False(t, f.begin("setup", now.Add(time.Minute-1)))
	require.False(t, f.begin("setup", now.Add(2*time.Minute-2)), "it goes on")
	require.True(t, f.begin("setup", now.Add(3*time.Minute-2)))
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
		f.Add(path, `{"limiter": "mail", "key": "ada", "cost": 1, "ttl": 1, "timeout": 0}`)
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
