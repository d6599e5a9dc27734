package httplimit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The status of the response decides whether a request is charged, however the handler writes it.
func TestChargeByOutcome(t *testing.T) {
	t.Parallel()

	writes := func(statuses ...int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for _, status := range statuses {
				w.WriteHeader(status)
			}
			_, _ = io.WriteString(w, "text")
		}
	}
	charges := map[string]func(int) bool{
		"failures": ChargeFailures, "successes": ChargeSuccesses, "all but server errors": ChargeAllButServerErrors,
	}
	for _, test := range []struct {
		name     string
		handler  http.HandlerFunc
		status   int
		refunded string
	}{
		{"says nothing", func(http.ResponseWriter, *http.Request) {}, 200, ""},
		{"writes", writes(), 200, "failures"},
		{"copies", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.Copy(w, strings.NewReader("text")) }, 200, "failures"},
		{"flushes", func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() }, 200, "failures"},
		{"flushes by a controller", func(w http.ResponseWriter, _ *http.Request) { _ = http.NewResponseController(w).Flush() }, 200, "failures"},
		{"no content", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(204) }, 204, "failures"},
		{"redirects", writes(302), 302, "failures"},
		{"unauthorized", writes(401), 401, "successes"},
		{"fails", writes(500), 500, "successes, all but server errors"},
		{"unavailable", writes(503), 503, "successes, all but server errors"},
	} {
		for name, charge := range charges {
			limiter := allowing()
			limiter.result.Remaining = 8
			config := Config{Headers: XRateLimit, Charge: charge, Cost: func(*http.Request) int64 { return 2 }}
			response := serve(t, limited(t, limiter, config, test.handler))
			require.Equal(t, test.status, response.status, test.name)
			refunded := strings.Contains(test.refunded, name)
			remaining := "8"
			if refunded {
				remaining = "10"
				require.Equal(t, []ratelimit.Result{limiter.result}, limiter.refunds(), "%s: %s", name, test.name)
			} else {
				require.Empty(t, limiter.refunds(), "%s: %s", name, test.name)
			}
			require.Equal(t, []string{remaining}, response.header["X-Ratelimit-Remaining"], "%s: %s", name, test.name)
		}
	}
}

// A 1xx status is not final. Over HTTP/2, status 101 is not final either.
func TestEarlyStatus(t *testing.T) {
	t.Parallel()

	for early, http2 := range map[int]bool{http.StatusEarlyHints: false, http.StatusSwitchingProtocols: true} {
		limiter := allowing()
		server := server(t, limiter, http2, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(early)
			w.WriteHeader(http.StatusUnauthorized)
		})
		response := get(t, server.Client(), server.URL)
		require.Equal(t, http.StatusUnauthorized, response.status)
		require.Equal(t, "7", response.header.Get("X-RateLimit-Remaining"))
		require.Empty(t, limiter.refunds())
	}
}

// A denied request has taken nothing, so nothing is given back.
func TestDeniedRequestIsNotRefunded(t *testing.T) {
	t.Parallel()

	limiter := denying(1)
	require.Equal(
		t,
		http.StatusTooManyRequests,
		serve(t, limited(t, limiter, Config{Charge: ChargeSuccesses}, nil)).status,
	)
	require.Empty(t, limiter.refunds())
}

// A panic passes through the middleware. A request whose handler panics is charged, whatever status it wrote before.
func TestPanickingHandler(t *testing.T) {
	t.Parallel()

	for _, status := range []int{0, 200, 401} {
		limiter := allowing()
		handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
			if status > 0 {
				w.WriteHeader(status)
			}
			panic(http.ErrAbortHandler)
		})
		require.PanicsWithValue(t, http.ErrAbortHandler, func() { serve(t, handler) })
		require.Empty(t, limiter.refunds(), status)

		limiter = allowing()
		handler = limited(
			t,
			limiter,
			Config{Charge: ChargeSuccesses},
			func(http.ResponseWriter, *http.Request) { panic("oh") },
		)
		require.PanicsWithValue(t, "oh", func() { serve(t, handler) })
		require.Empty(t, limiter.refunds())

		limiter = allowing()
		handler = limited(t, limiter, Config{}, func(http.ResponseWriter, *http.Request) { panic("oh") })
		require.PanicsWithValue(t, "oh", func() { serve(t, handler) })
	}
}

// A request is charged if no status was seen before the handler returned. Charge is not called then, and the header
// fields include the cost.
func TestOutcomeThatIsNotSeen(t *testing.T) {
	t.Parallel()

	type pair struct {
		w       http.ResponseWriter // the server's writer
		limited http.ResponseWriter // the handler's writer
	}
	for name, test := range map[string]struct {
		handler func(pair)
		after   func(pair) // runs once the middleware has returned
		status  int
	}{
		"nothing":                 {func(pair) {}, nil, 200},
		"early hints only":        {func(p pair) { p.limited.WriteHeader(103) }, nil, 200},
		"header fields only":      {func(p pair) { p.limited.Header().Set("X-Some", "field") }, nil, 200},
		"a writer that is passed": {func(p pair) { p.limited.Header(); p.w.WriteHeader(204) }, nil, 204},
		"a status in front":       {func(pair) {}, func(p pair) { p.w.WriteHeader(401) }, 401},
		"a status afterwards":     {func(pair) {}, func(p pair) { p.limited.WriteHeader(204) }, 204},
		"text afterwards":         {func(pair) {}, func(p pair) { _, _ = io.WriteString(p.limited, "text") }, 200},
		"a flush afterwards":      {func(pair) {}, func(p pair) { _ = http.NewResponseController(p.limited).Flush() }, 200},
	} {
		for _, http2 := range []bool{false, true} {
			limiter := allowing()
			config := Config{Headers: XRateLimit, Charge: func(int) bool {
				t.Error("asked: ", name)
				return false
			}}
			var p pair
			limited := limited(t, limiter, config, func(w http.ResponseWriter, _ *http.Request) {
				p.limited = w
				test.handler(p)
			})
			server := server(t, limiter, http2, nil)
			server.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				p.w = w
				limited.ServeHTTP(w, r)
				if test.after != nil {
					test.after(p)
				}
			})
			response := get(t, server.Client(), server.URL)
			require.Equal(t, test.status, response.status, name)
			if name != "a writer that is passed" {
				require.Equal(t, "7", response.header.Get("X-RateLimit-Remaining"), name)
			}
			require.Empty(t, limiter.refunds(), name)
		}
	}
}

// A goroutine may still write after the handler has returned. The request is then charged or refunded exactly once,
// without a data race.
func TestGoroutineThatWritesAfterwards(t *testing.T) {
	t.Parallel()

	for range 100 {
		limiter := allowing()
		var wg sync.WaitGroup
		handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
			wg.Go(func() { w.WriteHeader(http.StatusNoContent) })
		})
		handler.ServeHTTP(deaf{http.Header{}}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		before := len(limiter.refunds())
		wg.Wait()
		require.Len(t, limiter.refunds(), before)
	}
}

// deaf is a writer that accepts concurrent and late writes.
type deaf struct{ header http.Header }

func (d deaf) Header() http.Header          { return d.header }
func (deaf) Write(data []byte) (int, error) { return len(data), nil }
func (deaf) WriteHeader(int)                {}

// If http.TimeoutHandler is inside the middleware, its 503 is the status that counts. If it is outside, the client gets
// the 503 whatever the handler writes.
func TestTimeoutHandler(t *testing.T) {
	t.Parallel()

	for _, behind := range []bool{true, false} {
		for _, slow := range []bool{true, false} {
			synctest.Test(t, func(t *testing.T) {
				limiter := allowing()
				ended := make(chan struct{})
				var handler http.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if slow {
						<-r.Context().Done()
					}
					w.WriteHeader(http.StatusNoContent)
				})
				if behind {
					handler = http.TimeoutHandler(handler, time.Second, "")
				}
				limited := limited(t, limiter, Config{Charge: ChargeFailures}, handler.ServeHTTP)
				handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					defer close(ended)
					limited.ServeHTTP(w, r)
				})
				if !behind {
					handler = http.TimeoutHandler(handler, time.Second, "")
				}
				status := serve(t, handler).status
				<-ended
				require.Equal(t, map[bool]int{true: 503, false: 204}[slow], status)
				require.Equal(t, !slow, len(limiter.refunds()) == 1, "behind: %v", behind)
			})
		}
	}
}

// A reverse proxy forwards the status of the server behind it. If the connection to this server breaks before the
// response has begun, the request is charged.
func TestReverseProxy(t *testing.T) {
	t.Parallel()

	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/good":
			w.WriteHeader(http.StatusEarlyHints)
		case "/bad":
			w.WriteHeader(http.StatusEarlyHints)
			w.WriteHeader(http.StatusUnauthorized)
		case "/cut":
			panic(http.ErrAbortHandler)
		}
	}))
	t.Cleanup(backend.Close)
	address, err := url.Parse(backend.URL)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(address)
	proxy.ErrorHandler = func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }
	for _, http2 := range []bool{false, true} {
		for path, status := range map[string]int{"/good": 200, "/bad": 401, "/cut": 0} {
			limiter := allowing()
			server := server(t, limiter, http2, proxy.ServeHTTP)
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+path, nil)
			require.NoError(t, err)
			response, err := server.Client().Do(request)
			if status == 0 {
				require.Error(t, err)
				server.Close()
				require.Empty(t, limiter.refunds())
				continue
			}
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			server.Close() // waits for the handler
			require.Equal(t, status, response.StatusCode)
			require.Equal(t, status == 200, len(limiter.refunds()) == 1)
		}
	}
}

// A client that leaves before the handler writes a status stays charged: otherwise leaving early would get around the
// limit. A client that leaves later is refunded, with a context that has not ended.
func TestClientThatLeavesDuringTheHandler(t *testing.T) {
	t.Parallel()

	for _, early := range []bool{true, false} {
		limiter := allowing()
		limiter.refund = func(ctx context.Context) (ratelimit.Balance, error) {
			_, bounded := ctx.Deadline()
			require.True(t, bounded)
			return ratelimit.Balance{}, ctx.Err()
		}
		var log testkit.Journal
		ctx, leave := context.WithCancel(t.Context())
		handler := limited(
			t,
			limiter,
			Config{Charge: ChargeFailures, Logger: log.Logger()},
			func(w http.ResponseWriter, _ *http.Request) {
				if early {
					leave()
				}
				w.WriteHeader(http.StatusOK)
				leave()
			},
		)
		serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		require.Equal(t, early, len(limiter.refunds()) == 0)
		require.Empty(t, log.Lines())
	}

	// This handler returns without a status, because the client has left.
	limiter := allowing()
	ctx, leave := context.WithCancel(t.Context())
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(http.ResponseWriter, *http.Request) { leave() })
	serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	require.Empty(t, limiter.refunds())
}

// A cost taken from a lease is given back too.
func TestChargeOfALease(t *testing.T) {
	t.Parallel()
	limiter := allowing()
	limiter.result.Source = ratelimit.SourceLease
	require.Equal(t, http.StatusOK, serve(t, limited(t, limiter, Config{Charge: ChargeFailures}, nil)).status)
	require.Len(t, limiter.refunds(), 1)
}

// The response does not wait longer than refundWait for a refund. Lost refunds are logged once.
func TestLostRefunds(t *testing.T) {
	t.Parallel()

	synctest.Test(t, testLostRefunds)
}

func testLostRefunds(t *testing.T) {
	var log testkit.Journal
	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures, Logger: log.Logger()}, nil)
	for _, refund := range []func(context.Context) (ratelimit.Balance, error){
		func(ctx context.Context) (ratelimit.Balance, error) {
			<-ctx.Done()
			return ratelimit.Balance{}, ctx.Err()
		},
		func(context.Context) (ratelimit.Balance, error) { return ratelimit.Balance{}, errors.New("it is gone") },
	} {
		limiter.refund = refund
		for range 5 {
			require.Equal(t, http.StatusOK, serve(t, handler).status)
		}
		require.Len(t, log.Lines(), 1)
		limiter.refund = nil
		<-time.After(calm)
		for range 5 {
			require.Equal(t, http.StatusOK, serve(t, handler).status)
		}
		require.Len(t, log.Lines(), 1)
	}
	require.Len(t, limiter.refunds(), 20)
}

// server returns a real server, over HTTP/1 or HTTP/2, with a limit that has a Charge.
func server(t *testing.T, limiter Limiter, http2 bool, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(
		limited(t, limiter, Config{Headers: XRateLimit, Charge: ChargeFailures}, handler),
	)
	server.EnableHTTP2 = http2
	if http2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	return server
}

type wrapper struct{ http.ResponseWriter }

func (w wrapper) Unwrap() http.ResponseWriter { return w.ResponseWriter }

type hijackable struct{ http.ResponseWriter }

func (hijackable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, errors.New("there is no connection")
}

type readFrom struct {
	http.ResponseWriter
	source *io.Reader
}

func (r readFrom) ReadFrom(source io.Reader) (int64, error) {
	*r.source = source
	return io.Copy(r.ResponseWriter, source)
}
