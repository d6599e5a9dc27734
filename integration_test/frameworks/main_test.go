// Package frameworks tests charging by outcome behind web frameworks. Each test uses middleware of net/http in the
// usual way of its framework. If the middleware cannot see the outcome, the test adds a few lines for the framework.
package frameworks

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"testing/iotest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// giveBack refunds a request, even if its client has left.
func giveBack(ctx context.Context, limiter *ratelimit.Limiter, result ratelimit.Result) {
	if _, err := limiter.Refund(context.WithoutCancel(ctx), result); err != nil {
		slog.Warn("a request stays charged", "error", err)
	}
}

// patient makes a response wait for its refund without a time limit.
type patient struct{ *ratelimit.Limiter }

func (p patient) Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error) {
	return p.Limiter.Refund(context.WithoutCancel(ctx), result)
}

// retryAfter returns the value of Retry-After: whole seconds, rounded up.
func retryAfter(result ratelimit.Result) string {
	return strconv.Itoa(int(math.Ceil(result.RetryAfter.Seconds())))
}

// These are the handlers by path. Each handler has its own limit, and the handlers fail in all ways that the framework
// supports.
const (
	good    = "/good"    // writes a response
	nothing = "/nothing" // writes no response
	wrong   = "/wrong"   // writes status 401
	refused = "/refused" // returns the framework's 401 error, or stops with it
	panics  = "/panics"  // panics, and the framework answers

	failedCopy = "/failed-copy" // copies from a reader that fails, and writes status 401
	overruled  = "/overruled"   // succeeds, but an outer middleware writes 401 if it still can
	hijacked   = "/hijacked"    // takes over the connection, and writes 401 to it
)

// upstream is a reader that fails at once.
var upstream = iotest.ErrReader(errors.New("upstream"))

// raw is what a handler writes to a connection that it has taken over.
const raw = "HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

// writeRaw writes raw to the connection that Hijack returned.
func writeRaw(conn net.Conn, _ *bufio.ReadWriter, err error) {
	if err != nil {
		panic(err)
	}
	_, _ = io.WriteString(conn, raw)
	_ = conn.Close()
}

// newLimiter returns a limiter that allows two failures for each path.
func newLimiter(t *testing.T) *ratelimit.Limiter {
	t.Helper()
	return limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "failures", Policy: ratelimit.FixedWindow{Limit: 2, Window: 365 * 24 * time.Hour},
		OnFailure: ratelimit.ReturnError(),
	})
}

// newLimit returns the middleware of net/http.
func newLimit(t *testing.T) func(http.Handler) http.Handler {
	t.Helper()
	limit, err := httplimit.New(patient{newLimiter(t)}, httplimit.Config{
		Key:    httplimit.ByFunc(func(r *http.Request) (string, error) { return r.URL.Path, nil }),
		Charge: httplimit.ChargeFailures,
	})
	require.NoError(t, err)
	return limit
}

// requireCharges requests each path four times. Failures are charged with every framework. Successes are not charged if
// the middleware sees the outcome. A handler that writes nothing is charged, unless the framework takes this as 200.
func requireCharges(t *testing.T, ask func(path string) int, goodIsSeen, nothingIsSeen bool) {
	t.Helper()
	charged := func(status int) []int { return []int{status, status, 429, 429} }
	free := func(status int) []int { return []int{status, status, status, status} }
	wants := map[string][]int{
		good: charged(200), nothing: charged(200), wrong: charged(401), refused: charged(401), panics: charged(500),
		failedCopy: charged(401), overruled: charged(401), hijacked: charged(401),
	}
	if goodIsSeen {
		wants[good] = free(200)
	}
	if nothingIsSeen {
		wants[nothing] = free(200)
	}
	for path, want := range wants {
		var got []int
		for range want {
			got = append(got, ask(path))
		}
		require.Equal(t, want, got, path)
	}
}

// served returns a function that makes requests to a handler on a server.
func served(t *testing.T, handler http.Handler) (ask func(path string) int) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return func(path string) int {
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
		require.NoError(t, err)
		return status(t, request, server.Client().Do)
	}
}

func status(t *testing.T, request *http.Request, do func(*http.Request) (*http.Response, error)) int {
	t.Helper()
	response, err := do(request)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, response.Body)
	require.NoError(t, err)
	require.NoError(t, response.Body.Close())
	if response.StatusCode == http.StatusTooManyRequests {
		require.NotEmpty(t, response.Header.Get("Retry-After"))
	}
	return response.StatusCode
}

// This test has a case for each way in which a framework can mount the limit.
func TestFailuresAreCharged(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]func(t *testing.T){
		"chi":                             testChi,
		"echo":                            testEcho,
		"echo, with its recoverer behind": testEchoWithItsRecovererBehind,
		"gin, with a writer of its own":   testGin,
		"gin, told by the status":         testGinByStatus,
		"gin, whose writer is passed by":  testGinPassedBy,
		"gin, in its own terms":           testGinNative,
		"gin, around a http.Handler":      testGinAround,
		"fiber, through its adaptor":      testFiberAdaptor,
		"fiber, in its own terms":         testFiberNative,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
}
