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
)

// A request is charged, or its cost given back, by the status of the response, however the handler says it.
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
		{"the first status counts", writes(200, 500), 200, "failures"},
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

// A status of 1xx is not the last.
func TestEarlyHints(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	server := server(t, limiter, false, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusUnauthorized)
	})
	response := get(t, server.Client(), server.URL)
	require.Equal(t, http.StatusUnauthorized, response.status)
	require.Equal(t, "7", response.header.Get("X-RateLimit-Remaining"))
	require.Empty(t, limiter.refunds())
}

// Nothing of a request that was denied is given back.
func TestDeniedRequestIsNotRefunded(t *testing.T) {
	t.Parallel()

	limiter := denying(1)
	require.Equal(t, http.StatusTooManyRequests, serve(t, limited(t, limiter, Config{Charge: ChargeSuccesses}, nil)).status)
	require.Empty(t, limiter.refunds())
}

// A panic passes, and is no outcome; a status that was written before it is.
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
		require.Equal(t, status == 200, len(limiter.refunds()) == 1, status)

		limiter = allowing()
		handler = limited(t, limiter, Config{Charge: ChargeSuccesses}, func(http.ResponseWriter, *http.Request) { panic("oh") })
		require.PanicsWithValue(t, "oh", func() { serve(t, handler) })
		require.Empty(t, limiter.refunds())

		limiter = allowing()
		handler = limited(t, limiter, Config{}, func(http.ResponseWriter, *http.Request) { panic("oh") })
		require.PanicsWithValue(t, "oh", func() { serve(t, handler) })
	}
}

// An outcome that was not seen before the handler has returned is charged, whatever Charge would say to what the client gets: it is not
// asked. The header fields tell that.
func TestOutcomeThatIsNotSeen(t *testing.T) {
	t.Parallel()

	type pair struct {
		w       http.ResponseWriter // of the server
		limited http.ResponseWriter // that the handler was given
	}
	for name, test := range map[string]struct {
		handler func(pair)
		after   func(pair) // once the middleware has returned
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

// A goroutine that the handler leaves behind may still write when it has returned. Whatever comes of that, it is charged or given back
// once, and nobody comes in each other's way.
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

// deaf is a writer that may be written to at any time.
type deaf struct{ header http.Header }

func (d deaf) Header() http.Header          { return d.header }
func (deaf) Write(data []byte) (int, error) { return len(data), nil }
func (deaf) WriteHeader(int)                {}

// http.TimeoutHandler, behind and in front: behind, its 503 is the outcome; in front, the client has got it, whatever the handler writes.
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

// A reverse proxy says what the server behind it has said. One that is cut off has said nothing, unless the response had begun.
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
			server.Close() // when the handler has ended
			require.Equal(t, status, response.StatusCode)
			require.Equal(t, status == 200, len(limiter.refunds()) == 1)
		}
	}
}

// Who leaves before there is a status stays charged, or leaving early would be a way around the limit. Who leaves later is refunded,
// with a context that has not ended.
func TestClientThatLeavesDuringTheHandler(t *testing.T) {
	t.Parallel()

	for _, early := range []bool{true, false} {
		limiter := allowing()
		limiter.refund = func(ctx context.Context) (ratelimit.Result, error) {
			_, bounded := ctx.Deadline()
			require.True(t, bounded)
			return ratelimit.Result{}, ctx.Err()
		}
		var log journal
		ctx, leave := context.WithCancel(t.Context())
		handler := limited(t, limiter, Config{Charge: ChargeFailures, Logger: log.logger()}, func(w http.ResponseWriter, _ *http.Request) {
			if early {
				leave()
			}
			w.WriteHeader(http.StatusOK)
			leave()
		})
		serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
		require.Equal(t, early, len(limiter.refunds()) == 0)
		require.Empty(t, log.lines())
	}

	// A handler that gives up because the client has gone, and says nothing.
	limiter := allowing()
	ctx, leave := context.WithCancel(t.Context())
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(http.ResponseWriter, *http.Request) { leave() })
	serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	require.Empty(t, limiter.refunds())
}

// The response does not wait for a refund that takes long, and refunds that get lost are logged once.
func TestLostRefunds(t *testing.T) {
	t.Parallel()

	synctest.Test(t, testLostRefunds)
}

func testLostRefunds(t *testing.T) {
	var log journal
	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures, Logger: log.logger()}, nil)
	for _, refund := range []func(context.Context) (ratelimit.Result, error){
		func(ctx context.Context) (ratelimit.Result, error) {
			<-ctx.Done()
			return ratelimit.Result{}, ctx.Err()
		},
		func(context.Context) (ratelimit.Result, error) { return ratelimit.Result{}, errors.New("it is gone") },
		func(context.Context) (ratelimit.Result, error) {
			return ratelimit.Result{Allowed: true, Source: ratelimit.SourceFailedOpen}, nil
		},
	} {
		limiter.refund = refund
		for range 5 {
			require.Equal(t, http.StatusOK, serve(t, handler).status)
		}
		require.Len(t, log.lines(), 1)
		limiter.refund = nil
		<-time.After(calm)
		for range 5 {
			require.Equal(t, http.StatusOK, serve(t, handler).status)
		}
		require.Len(t, log.lines(), 1)
	}
	require.Len(t, limiter.refunds(), 30)
}

// Without a Charge the handler gets the ResponseWriter itself.
func TestWriterIsLeftAloneWithoutCharge(t *testing.T) {
	t.Parallel()

	var got http.ResponseWriter
	handler := limited(t, allowing(), Config{Headers: IETFDraft11}, func(w http.ResponseWriter, _ *http.Request) { got = w })
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	require.Same(t, recorder, got)
}

// server is a real one, over HTTP/1 or HTTP/2, whose handler is behind a limit that charges by the outcome.
func server(t *testing.T, limiter Limiter, http2 bool, handler http.HandlerFunc) *httptest.Server {
	t.Helper()
	server := httptest.NewUnstartedServer(limited(t, limiter, Config{Headers: XRateLimit, Charge: ChargeFailures}, handler))
	server.EnableHTTP2 = http2
	if http2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	t.Cleanup(server.Close)
	return server
}

// What a server's ResponseWriter can do, it can behind the limit, no more and no less.
func TestInterfacesOfTheWriter(t *testing.T) {
	t.Parallel()

	for _, http2 := range []bool{false, true} {
		found := make(chan [4]bool, 1)
		can := func(w http.ResponseWriter, _ *http.Request) {
			_, flushes := w.(http.Flusher)
			_, hijacks := w.(http.Hijacker)
			_, pushes := w.(http.Pusher)
			found <- [4]bool{flushes, hijacks, pushes, http.NewResponseController(w).EnableFullDuplex() == nil}
		}
		for _, limit := range []bool{false, true} {
			server := server(t, allowing(), http2, can)
			if !limit {
				server.Config.Handler = http.HandlerFunc(can)
			}
			require.Equal(t, http.StatusOK, get(t, server.Client(), server.URL).status)
			require.Equal(t, [4]bool{true, !http2, http2, true}, <-found)
		}
	}

	// A writer of another kind, in a wrapper that knows Unwrap.
	type bare struct{ http.ResponseWriter }
	for _, test := range []struct {
		beneath                  http.ResponseWriter
		flushes, hijacks, pushes bool
	}{
		{bare{httptest.NewRecorder()}, false, false, false},
		{wrapper{httptest.NewRecorder()}, true, false, false},
		{wrapper{hijackable{ResponseWriter: bare{httptest.NewRecorder()}}}, false, true, false},
	} {
		w := (&recorder{ResponseWriter: test.beneath}).wrap()
		_, flushes := w.(http.Flusher)
		_, hijacks := w.(http.Hijacker)
		_, pushes := w.(http.Pusher)
		require.Equal(t, [3]bool{test.flushes, test.hijacks, test.pushes}, [3]bool{flushes, hijacks, pushes})
	}
}

type wrapper struct{ http.ResponseWriter }

func (w wrapper) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// hijackable is a writer with a connection.
type hijackable struct{ http.ResponseWriter }

func (hijackable) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	return nil, nil, errors.New("there is no connection")
}

// The first part of a response arrives while the handler still runs.
func TestStreaming(t *testing.T) {
	t.Parallel()

	for _, http2 := range []bool{false, true} {
		goOn := make(chan struct{})
		limiter := allowing()
		server := server(t, limiter, http2, func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "first\n")
			w.(http.Flusher).Flush()
			<-goOn
			_, _ = io.WriteString(w, "second\n")
		})
		request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
		require.NoError(t, err)
		response, err := server.Client().Do(request)
		require.NoError(t, err)
		require.Equal(t, "8", response.Header.Get("X-RateLimit-Remaining"))
		reader := bufio.NewReader(response.Body)
		line, err := reader.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "first\n", line)
		close(goOn)
		line, err = reader.ReadString('\n')
		require.NoError(t, err)
		require.Equal(t, "second\n", line)
		_, err = reader.ReadByte() // the end of the response comes after the refund
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, response.Body.Close())
		require.Len(t, limiter.refunds(), 1)
	}
}

// A handler takes the connection over, as for WebSockets. That is a success; a connection that cannot be had is none.
func TestHijacking(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	config := Config{Charge: func(int) bool {
		t.Error("asked, although what is written to the connection is not seen")
		return false
	}}
	server := httptest.NewServer(limited(t, limiter, config, func(w http.ResponseWriter, _ *http.Request) {
		conn, buffer, err := w.(http.Hijacker).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = buffer.WriteString("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
		_ = buffer.Flush()
		_, _ = io.CopyN(conn, buffer, 5)
		_ = conn.Close()
	}))
	defer server.Close()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", server.Listener.Addr().String())
	require.NoError(t, err)
	defer conn.Close()
	_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
	require.NoError(t, err)
	reader := bufio.NewReader(conn)
	response, err := http.ReadResponse(reader, nil)
	require.NoError(t, err)
	defer response.Body.Close()
	require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)
	_, err = io.WriteString(conn, "hello")
	require.NoError(t, err)
	echo, err := io.ReadAll(reader)
	require.NoError(t, err)
	require.Equal(t, "hello", string(echo))
	server.Close() // waits for the handler
	require.Empty(t, limiter.refunds())

	limiter = allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
		if _, _, err := w.(http.Hijacker).Hijack(); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(hijackable{ResponseWriter: recorder}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	require.Equal(t, http.StatusInternalServerError, recorder.Code)
	require.Empty(t, limiter.refunds())
}

// readFrom is a writer that knows a quicker way than Write.
type readFrom struct {
	http.ResponseWriter
	used *bool
}

func (r readFrom) ReadFrom(source io.Reader) (int64, error) {
	*r.used = true
	return io.Copy(r.ResponseWriter, source)
}

func TestReaderFromIsUsed(t *testing.T) {
	t.Parallel()

	var used bool
	handler := limited(t, allowing(), Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.Copy(w, io.LimitReader(strings.NewReader("text and more"), 4))
	})
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(readFrom{recorder, &used}, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	require.True(t, used)
	require.Equal(t, "text", recorder.Body.String())
}

// A client that breaks off ends the handler's context, as without a limit, and HTTP/2 goes on with the other requests of its
// connection.
func TestAbortedClient(t *testing.T) {
	t.Parallel()

	for _, http2 := range []bool{false, true} {
		limiter := allowing()
		begun, ended := make(chan struct{}, 1), make(chan error, 1)
		server := server(t, limiter, http2, func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path == "/quick" {
				w.WriteHeader(http.StatusNoContent)
				return
			}
			begun <- struct{}{}
			<-r.Context().Done()
			ended <- r.Context().Err()
		})
		ctx, leave := context.WithCancel(t.Context())
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, server.URL, nil)
		require.NoError(t, err)
		go func() {
			<-begun
			leave()
		}()
		response, err := server.Client().Do(request)
		if err == nil {
			_ = response.Body.Close()
		}
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, <-ended, context.Canceled)

		require.Equal(t, http.StatusNoContent, get(t, server.Client(), server.URL+"/quick").status)
		server.Close()
		require.Len(t, limiter.refunds(), 1) // of the second one
	}
}
