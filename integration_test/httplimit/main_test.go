package httplimit

import (
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// amply is a time that nothing takes, however slow the machine.
const amply = time.Minute

// clock replaces that of the database.
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

// newLimiter is a limiter on a database of its own.
func newLimiter(t *testing.T, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	config.Name, config.Timeout, config.OnFailure = "api", amply, ratelimit.ReturnError()
	limiter, err := ratelimit.New(pgtest.New(t).Pool, config)
	require.NoError(t, err)
	return limiter
}

// serve starts a web server behind a limiter, and returns its address. A handler of nil says that the request came through.
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

// client is one with an address of its own, out of those of this machine.
type client struct{ http.Client }

func newClient(t *testing.T, address string) *client {
	t.Helper()
	listener, err := net.Listen("tcp", net.JoinHostPort(address, "0"))
	if err != nil {
		t.Skipf("%s is no address of this machine: run this on Linux", address)
	}
	require.NoError(t, listener.Close())
	dialer := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(address)}}
	transport := &http.Transport{DialContext: dialer.DialContext}
	t.Cleanup(transport.CloseIdleConnections)
	return &client{http.Client{Transport: transport}}
}

// get is the status and the header of a response.
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

// program finds a program of one of Debian's packages.
func program(t *testing.T, name string) string {
	t.Helper()
	for _, path := range []string{name, "/usr/sbin/" + name} { // which is not in everybody's PATH
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	t.Skipf("there is no %s: install Debian's package", name)
	return ""
}

// freeAddress is one that nobody listens on right now.
func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer listener.Close()
	return listener.Addr().String()
}

// start runs a server until the test ends, and returns when it accepts connections.
func start(t *testing.T, address, program string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), program, args...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait()
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Log(log.String())
		}
	})
	require.Eventually(t, func() bool {
		select {
		case <-ended:
			t.Errorf("%s has ended", program)
			return true
		default:
		}
		conn, err := net.Dial("tcp", address)
		if err == nil {
			err = conn.Close()
		}
		return err == nil
	}, amply, 10*time.Millisecond)
	require.False(t, t.Failed())
}
