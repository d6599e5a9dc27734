package httplimit

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// Without a Charge the handler gets the ResponseWriter itself.
func TestWriterIsLeftAloneWithoutCharge(t *testing.T) {
	t.Parallel()

	var got http.ResponseWriter
	handler := limited(
		t,
		allowing(),
		Config{Headers: IETFDraft11},
		func(w http.ResponseWriter, _ *http.Request) { got = w },
	)
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
	require.Same(t, recorder, got)
}

// The handler's ResponseWriter has exactly the optional interfaces of the server's ResponseWriter.
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

	// Writers of other servers are wrapped in a type that has Unwrap.
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

// The first part of a response reaches the client while the handler still runs.
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
		_, err = reader.ReadByte() // the response ends after the refund
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, response.Body.Close())
		require.Len(t, limiter.refunds(), 1)
	}
}

// A request whose handler hijacks the connection, as for WebSockets, is charged: the recorder does not see what the
// handler writes.
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
	handler.ServeHTTP(
		hijackable{ResponseWriter: recorder},
		httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
	)
	require.Equal(t, http.StatusInternalServerError, recorder.Code)
	require.Empty(t, limiter.refunds())
}

// The server's ResponseWriter itself reads from the source, for example from a file. All of the source arrives,
// whatever its length.
func TestReaderFromIsUsed(t *testing.T) {
	t.Parallel()

	for _, length := range []int{0, 1, sniffed - 1, sniffed, sniffed + 1, 100_000} {
		var used io.Reader
		text := strings.Repeat("x", length)
		source := io.LimitReader(strings.NewReader(text+"and more"), int64(length))
		handler := limited(t, allowing(), Config{Charge: ChargeFailures}, func(w http.ResponseWriter, _ *http.Request) {
			if n, err := io.Copy(w, source); n != int64(length) || err != nil {
				t.Error(n, err)
			}
		})
		recorder := httptest.NewRecorder()
		handler.ServeHTTP(
			readFrom{recorder, &used},
			httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil),
		)
		require.Equal(t, length >= sniffed, used == source)
		require.Equal(t, text, recorder.Body.String())
	}
}

// If a client aborts, the handler's context ends, as without a limit. Over HTTP/2 the other requests on the connection
// go on.
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
		require.Len(t, limiter.refunds(), 1) // of the second request
	}
}
