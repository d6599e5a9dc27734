package door_test

import (
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// listen returns a listener on a new socket.
func listen(t testing.TB) (listener net.Listener, address string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	return listener, "unix:" + path
}

// record returns what a client sends for some calls, as a seed.
func record(t testing.TB) (requests [][]byte) {
	t.Helper()
	listener, address := listen(t)
	defer listener.Close()
	l := limiter(t, address, 5)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	for _, call := range []func(){
		func() { _, _ = l.Allow(ctx, "user:123") },
		func() { _, _ = l.Peek(ctx, "user:123") },
		func() { _, _ = l.Hold(ctx, "user:123", 2, time.Minute) },
		func() { _, _ = l.Charge(ctx, "user:123", 1) },
		func() { _, _ = ratelimit.AllowAll(ctx, l.Request("a", 1), l.Request("b", 2)) },
	} {
		go call()
	}
	conn, err := listener.Accept()
	require.NoError(t, err)
	defer conn.Close()
	for range 6 { // the hello and the calls
		size := make([]byte, 4)
		_, err := io.ReadFull(conn, size)
		require.NoError(t, err)
		body := make([]byte, binary.BigEndian.Uint32(size))
		_, err = io.ReadFull(conn, body)
		require.NoError(t, err)
		if body[0] == 'h' {
			_, err = conn.Write(frame('W', 0, binary.AppendVarint(nil, 1)))
			require.NoError(t, err)
			continue
		}
		requests = append(requests, append(size, body...))
	}
	require.Len(t, requests, 5)
	return requests
}

// Whatever a client sends after its hello, the service answers or closes the connection, and goes on to serve others.
func FuzzService(f *testing.F) {
	for _, request := range record(f) {
		f.Add(request)
	}
	f.Add(frame('s', 7, append(binary.AppendVarint(nil, int64(time.Second)), text("SELECT 1")...)))
	f.Add(frame('p', 1, nil))
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{Timeout: time.Minute})
	require.NoError(f, err)
	listener, address := listen(f)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- client.Serve(ctx, listener, ratelimit.ServeConfig{
			Token: token, Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	f.Cleanup(func() {
		cancel()
		require.NoError(f, <-ended)
	})
	good := limiter(f, address, 1<<30)
	f.Fuzz(func(t *testing.T, sent []byte) {
		conn := dial(t, address)
		_, _ = conn.Write(append(hello("ratelimit door", 1, token), sent...))
		require.NoError(t, conn.(*net.UnixConn).CloseWrite())
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		_, _ = io.Copy(io.Discard, conn)
		_, err := good.Allow(t.Context(), "k")
		require.NoError(t, err)
	})
}

// Whatever a service answers, a call ends.
func FuzzAnswers(f *testing.F) {
	f.Add([]byte{'A', 1, 2})
	f.Add([]byte{'E', 1, 't', 3, 'a', 'b', 'c', 0})
	f.Add([]byte{'E', 1, 'k', 4})
	f.Add([]byte{'X', 0})
	f.Add([]byte{'L', 0, 'X', 1})
	f.Fuzz(func(t *testing.T, answer []byte) {
		listener, address := listen(t)
		defer listener.Close()
		go func() {
			for {
				conn, err := listener.Accept()
				if err != nil {
					return
				}
				_, _ = conn.Write(frame('W', 0, binary.AppendVarint(nil, 1)))
				_, _ = conn.Read(make([]byte, 64)) // the hello, and perhaps the request
				size := binary.BigEndian.AppendUint32(nil, uint32(len(answer)))
				_, _ = conn.Write(append(size, answer...))
				conn.Close()
			}
		}()
		// Some answers make a client try until its time is over.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/5)
		defer cancel()
		result, err := limiter(t, address, 5).Allow(ctx, "k")
		if err == nil {
			require.LessOrEqual(t, result.Limit, int64(5))
		}
	})
}
