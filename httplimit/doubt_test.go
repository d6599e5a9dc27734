package httplimit

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// A request is charged if the client may have got another status than the handler wrote. Some of these handlers do
// something unusual but send exactly one status. Requests to these handlers are not charged.
func TestChargeInDoubt(t *testing.T) {
	t.Parallel()

	failing := func() io.Reader { return iotest.ErrReader(errors.New("upstream")) }
	deny := func(w http.ResponseWriter) { http.Error(w, "no", http.StatusUnauthorized) }
	for _, test := range []struct {
		name     string
		handler  func(t *testing.T, w http.ResponseWriter)
		status   int
		refunded bool
	}{
		{"a copy that fails at once", func(_ *testing.T, w http.ResponseWriter) {
			if _, err := io.Copy(w, failing()); err != nil {
				deny(w)
			}
		}, 401, false},
		{"a copy that fails later", func(_ *testing.T, w http.ResponseWriter) {
			if _, err := io.Copy(w, io.MultiReader(strings.NewReader("text"), failing())); err != nil {
				deny(w)
			}
		}, 200, false},
		{"a copy of nothing", func(_ *testing.T, w http.ResponseWriter) {
			_, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader(""))
			deny(w)
		}, 401, false},
		{"a copy of nothing, and no status", func(_ *testing.T, w http.ResponseWriter) {
			_, _ = w.(io.ReaderFrom).ReadFrom(strings.NewReader(""))
		}, 200, false},
		{"a part of a response, and then an error", func(_ *testing.T, w http.ResponseWriter) {
			_, _ = io.WriteString(w, "text")
			deny(w)
		}, 200, false},
		{"a flush, and then an error", func(_ *testing.T, w http.ResponseWriter) {
			w.(http.Flusher).Flush()
			deny(w)
		}, 200, false},
		{"an error, and then a success", func(_ *testing.T, w http.ResponseWriter) {
			deny(w)
			w.WriteHeader(http.StatusNoContent)
		}, 401, false},
		{"the writer beneath", func(_ *testing.T, w http.ResponseWriter) {
			deny(w.(interface{ Unwrap() http.ResponseWriter }).Unwrap())
			w.WriteHeader(http.StatusOK)
		}, 401, false},
		{"a status that there is not", func(_ *testing.T, w http.ResponseWriter) {
			defer func() { _ = recover() }()
			w.WriteHeader(99)
		}, 200, false},

		{"text as a string", func(t *testing.T, w http.ResponseWriter) {
			n, err := w.(io.StringWriter).WriteString("text")
			if n != 4 || err != nil {
				t.Error(n, err)
			}
		}, 200, true},
		{"deadlines and full duplex", func(t *testing.T, w http.ResponseWriter) {
			controller := http.NewResponseController(w)
			if err := errors.Join(controller.SetReadDeadline(time.Time{}), controller.SetWriteDeadline(time.Time{}),
				controller.EnableFullDuplex()); err != nil {
				t.Error(err)
			}
			w.WriteHeader(http.StatusNoContent)
		}, 204, true},
		{"a trailer", func(_ *testing.T, w http.ResponseWriter) {
			w.Header().Set("Trailer", "Checksum")
			_, _ = io.WriteString(w, "text")
			w.Header().Set("Checksum", "1")
		}, 200, true},
		{"a push that nobody wants", func(t *testing.T, w http.ResponseWriter) {
			if pusher, ok := w.(http.Pusher); ok && pusher.Push("/style", nil) == nil {
				t.Error("the client takes no pushes")
			}
			w.WriteHeader(http.StatusNoContent)
		}, 204, true},
		{"a copy of a file's length", func(_ *testing.T, w http.ResponseWriter) {
			_, _ = io.Copy(w, io.LimitReader(strings.NewReader(strings.Repeat("text", 10_000)), 30_000))
		}, 200, true},
		{"a goroutine of the handler's", func(_ *testing.T, w http.ResponseWriter) {
			var wg sync.WaitGroup
			wg.Go(func() { w.WriteHeader(http.StatusNoContent) })
			wg.Wait()
		}, 204, true},
	} {
		for _, http2 := range []bool{false, true} {
			limiter := allowing()
			server := server(t, limiter, http2, func(w http.ResponseWriter, _ *http.Request) { test.handler(t, w) })
			server.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
			request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
			require.NoError(t, err)
			response, err := server.Client().Do(request)
			require.NoError(t, err)
			_, _ = io.Copy(io.Discard, response.Body) // may end early
			require.NoError(t, response.Body.Close())
			server.Close() // waits for the handler
			require.Equal(t, test.status, response.StatusCode, test.name)
			require.Equal(t, test.refunded, len(limiter.refunds()) == 1, "%s: http2 %v", test.name, http2)
			if test.status >= 400 { // the client saw a failure
				require.Equal(t, "7", response.Header.Get("X-RateLimit-Remaining"), test.name)
			}
		}
	}
}

// If a handler writes a status and panics, the client does not get this status. The client may get the 500 of a
// recoverer.
func TestStatusBeforeAPanic(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	server := server(t, limiter, false, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		panic(http.ErrAbortHandler)
	})
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL, nil)
	require.NoError(t, err)
	response, err := server.Client().Do(request)
	if err == nil {
		_ = response.Body.Close()
	}
	require.ErrorIs(t, err, io.EOF)
	server.Close()
	require.Empty(t, limiter.refunds())

	// The recoverer's 500 has the header fields too.
	limiter = allowing()
	limited := limited(
		t,
		limiter,
		Config{Headers: XRateLimit, Charge: ChargeFailures},
		func(http.ResponseWriter, *http.Request) { panic("oh") },
	)
	answer := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		defer func() {
			_ = recover()
			w.WriteHeader(http.StatusInternalServerError)
		}()
		limited.ServeHTTP(w, r)
	}))
	require.Equal(t, http.StatusInternalServerError, answer.status)
	require.Equal(t, "7", answer.header.Get("X-RateLimit-Remaining"))
	require.Empty(t, limiter.refunds())
}

// A handler that ends its goroutine has not returned.
func TestHandlerThatEndsItsGoroutine(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		runtime.Goexit()
	})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		handler.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	}()
	<-ended
	require.Empty(t, limiter.refunds())
}

// If a handler is late, http.TimeoutHandler discards everything that the handler wrote.
func TestTimeoutAfterTheStatus(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := allowing()
		ended := make(chan struct{})
		limited := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusNoContent)
			<-r.Context().Done()
		})
		status := serve(t, http.TimeoutHandler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			defer close(ended)
			limited.ServeHTTP(w, r)
		}), time.Second, "")).status
		<-ended
		require.Equal(t, http.StatusServiceUnavailable, status)
		require.Empty(t, limiter.refunds())
	})
}

// holding is a writer that sends its status at the end, like writers that compress. Such writers send the first or the
// last status.
type holding struct {
	http.ResponseWriter
	status int
	last   bool
}

func (h *holding) WriteHeader(status int) {
	if h.status == 0 || h.last {
		h.status = status
	}
}
func (h *holding) Write(data []byte) (int, error) { return len(data), nil }
func (h *holding) Flush()                         {}
func (h *holding) close()                         { h.ResponseWriter.WriteHeader(max(h.status, 200)) }

// A writer outside or inside the middleware may send the status later.
func TestStatusThatIsHeldBack(t *testing.T) {
	t.Parallel()

	writes := func(statuses ...int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			for _, status := range statuses {
				w.WriteHeader(status)
			}
		}
	}
	for name, test := range map[string]struct {
		handler  http.HandlerFunc
		refunded bool
	}{
		"success":            {writes(200), true},
		"failure":            {writes(401), false},
		"success, failure":   {writes(200, 401), false},
		"failure, success":   {writes(401, 200), false},
		"flush, and failure": {func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush(); w.WriteHeader(401) }, false},
		"nothing, and failure": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = w.Write(nil)
			w.WriteHeader(401)
		}, false},
	} {
		for _, last := range []bool{false, true} {
			limiter := allowing()
			limited := limited(t, limiter, Config{Charge: ChargeFailures}, test.handler)
			serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				h := &holding{ResponseWriter: w, last: last}
				limited.ServeHTTP(h, r)
				h.close()
			}))
			require.Equal(t, test.refunded, len(limiter.refunds()) == 1, "%s, last %v", name, last)
		}
	}

	// A flush begins the response, as in a server. If code outside the middleware writes a status later, that status is
	// not sent.
	limiter := allowing()
	limited := limited(
		t,
		limiter,
		Config{Charge: ChargeFailures},
		func(w http.ResponseWriter, _ *http.Request) { w.(http.Flusher).Flush() },
	)
	answer := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := &holding{ResponseWriter: w}
		limited.ServeHTTP(h, r)
		h.WriteHeader(http.StatusUnauthorized)
		h.close()
	}))
	require.Equal(t, http.StatusOK, answer.status)
	require.Len(t, limiter.refunds(), 1)
}

// A writer may send its delayed status during a panic. The status of a recoverer is then not sent.
func TestStatusThatIsHeldBackInAPanic(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	answer := serve(
		t,
		limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, r *http.Request) {
			defer func() {
				_ = recover()
				w.WriteHeader(http.StatusInternalServerError)
			}()
			h := &holding{ResponseWriter: w}
			defer h.close()
			panic("oh")
		}),
	)
	require.Equal(t, http.StatusOK, answer.status)
	require.Empty(t, limiter.refunds())
}

type broken struct{ http.ResponseWriter }

func (broken) Write([]byte) (int, error)       { return 0, errors.New("it is broken") }
func (broken) WriteString(string) (int, error) { return 0, errors.New("it is broken") }

// A failed write does not count as sent.
func TestWriteThatFails(t *testing.T) {
	t.Parallel()

	for _, write := range []func(http.ResponseWriter){
		func(w http.ResponseWriter) { _, _ = w.Write([]byte("text")) },
		func(w http.ResponseWriter) { _, _ = io.WriteString(w, "text") },
		func(w http.ResponseWriter) { _, _ = io.Copy(w, io.LimitReader(strings.NewReader("text"), 4)) },
	} {
		limiter := allowing()
		handler := limited(
			t,
			limiter,
			Config{Charge: ChargeFailures},
			func(w http.ResponseWriter, _ *http.Request) { write(w) },
		)
		handler.ServeHTTP(
			broken{httptest.NewRecorder()},
			httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
		)
		require.Empty(t, limiter.refunds())
	}
}

// invalid is a writer that panics at each status, as net/http does at an invalid status.
type invalid struct{ http.ResponseWriter }

func (invalid) WriteHeader(int) { panic("invalid WriteHeader code") }

func TestStatusThatIsRefused(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeSuccesses}, func(w http.ResponseWriter, _ *http.Request) {
		defer func() { _ = recover() }()
		w.WriteHeader(1000)
	})
	handler.ServeHTTP(
		invalid{httptest.NewRecorder()},
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
	)
	require.Empty(t, limiter.refunds())
}

// stuck is a writer that is slow to accept a status.
type stuck struct {
	http.ResponseWriter
	begun, goOn chan struct{}
}

func (s stuck) WriteHeader(int) {
	close(s.begun)
	<-s.goOn
}

// A status counts only after it has been written. Here a goroutine is still writing it when the handler returns, so
// code outside the middleware may write a status first.
func TestStatusThatIsBeingWritten(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	w := stuck{httptest.NewRecorder(), make(chan struct{}), make(chan struct{})}
	var wg sync.WaitGroup
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(limited http.ResponseWriter, _ *http.Request) {
		wg.Go(func() { limited.WriteHeader(http.StatusNoContent) })
		<-w.begun
	})
	handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	close(w.goOn)
	wg.Wait()
	require.Empty(t, limiter.refunds())
}

// knowing is a writer that reports what it sends, as frameworks' writers do.
type knowing struct {
	http.ResponseWriter
	status  int
	written bool
}

func (k knowing) Status() int   { return k.status }
func (k knowing) Written() bool { return k.written }

// A request is charged if the outer writer reports no status, or a status that is charged.
func TestWriterThatKnowsBetter(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		status   int
		written  bool
		refunded bool
	}{
		{200, true, true}, {0, true, true}, {404, true, false}, {200, false, false}, {404, false, false},
	} {
		for _, twice := range []bool{false, true} { // with two limits, both must notice
			outer, inner := allowing(), allowing()
			handler := limited(t, inner, Config{Charge: ChargeFailures}, nil)
			if twice {
				handler = limited(t, outer, Config{Charge: ChargeFailures}, handler.ServeHTTP)
			}
			handler.ServeHTTP(wrapper{knowing{httptest.NewRecorder(), test.status, test.written}},
				httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			require.Equal(t, test.refunded, len(inner.refunds()) == 1, test)
			require.Equal(t, test.refunded && twice, len(outer.refunds()) == 1, test)
		}
	}

	// A writer that does not know the status reports 0.
	limiter := allowing()
	handler := limited(
		t,
		limiter,
		Config{Charge: ChargeSuccesses},
		func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(401) },
	)
	handler.ServeHTTP(
		knowing{httptest.NewRecorder(), 0, true},
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
	)
	require.Len(t, limiter.refunds(), 1)
}

type connected struct{ http.ResponseWriter }

func (connected) Hijack() (net.Conn, *bufio.ReadWriter, error) { return nil, nil, nil }

// A status that is written before the connection is hijacked may never be sent.
func TestStatusBeforeHijacking(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusOK)
		_, _, _ = http.NewResponseController(w).Hijack()
	})
	handler.ServeHTTP(
		connected{httptest.NewRecorder()},
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
	)
	require.Empty(t, limiter.refunds())
}

// With credit, more than the limit may remain. The refund adds to what remains.
func TestRemainingAboveTheLimit(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	limiter.result.Remaining = 29
	config := Config{Headers: XRateLimit, Charge: ChargeFailures}
	require.Equal(t, []string{"30"}, serve(t, limited(t, limiter, config, nil)).header["X-Ratelimit-Remaining"])
}

// Only the deadline of the request's context counts. The deadline of a context that the handler made does not.
func TestDeadlineOfTheHandlersOwn(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	handler := limited(t, limiter, Config{Charge: ChargeFailures}, func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithDeadline(r.Context(), time.Unix(0, 0))
		defer cancel()
		<-ctx.Done()
		w.WriteHeader(http.StatusNoContent)
	})
	require.Equal(t, http.StatusNoContent, serve(t, handler).status)
	require.Equal(t, []ratelimit.Result{limiter.result}, limiter.refunds())
}
