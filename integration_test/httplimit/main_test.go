// Package httplimit tests the middleware behind real proxies, and during a database outage.
package httplimit

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// clock replaces the database's clock.
type clock struct {
	mu  sync.Mutex
	now time.Time
}

func newClock() *clock { return &clock{now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)} }

func (c *clock) read() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

func (c *clock) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d)
}

// newLimiter returns a limiter with a database of its own.
func newLimiter(t *testing.T, config ratelimit.Config, client ...ratelimit.ClientConfig) *ratelimit.Limiter {
	t.Helper()
	config.Name, config.OnFailure = "api", ratelimit.ReturnError()
	return limitertest.New(t, pgtest.New(t).Pool, config, client...)
}

// serve starts a web server behind a limiter, and returns its address. If handler is nil, the server answers that the
// request was allowed.
func serve(t *testing.T, limiter *ratelimit.Limiter, config httplimit.Config, handler http.HandlerFunc) string {
	t.Helper()
	limit, err := httplimit.New(limiter, config)
	require.NoError(t, err)
	if handler == nil {
		handler = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "through\n") }
	}
	server := httptest.NewServer(limit(handler))
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

// client is an HTTP client that connects from an address of its own.
type client struct{ http.Client }

func newClient(t *testing.T, address string) *client {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Skipf("clients of several addresses: %s is none of this machine, so use Linux", address)
	}
	require.NoError(t, listener.Close())
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &client{http.Client{Transport: transport}}
}

// get returns the status and the header of a response.
func (c *client) get(t *testing.T, address string, header http.Header) (int, http.Header) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address, nil)
	require.NoError(t, err)
	if header != nil {
		request.Header = header
	}
	response, err := c.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(t, err)
	return response.StatusCode, response.Header
}

// program finds a program from a Debian package.
func program(t *testing.T, name string) string {
	t.Helper()
	path := testkit.Program(name)
	if path == "" {
		t.Skipf("%s: install it (Debian: %s)", name, name)
	}
	return path
}
