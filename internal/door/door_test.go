package door_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const token = "the token of this test"

// serve serves a new database on a Unix socket until the returned function is called.
func serve(t testing.TB, config ratelimit.ServeConfig) (address string, end func()) {
	t.Helper()
	client, err := ratelimit.NewClient(pgtest.New(t).NewPool(t, nil), ratelimit.ClientConfig{Timeout: time.Minute})
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	config.Logger = slog.New(slog.DiscardHandler)
	if config.Grace == 0 {
		config.Grace = time.Millisecond
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- client.Serve(ctx, listener, config) }()
	var once sync.Once
	end = func() {
		once.Do(func() {
			cancel()
			require.NoError(t, <-ended)
		})
	}
	t.Cleanup(end)
	return "unix:" + path, end
}

// limiter returns a limiter that asks a service.
func limiter(t testing.TB, address string, limit int64) *ratelimit.Limiter {
	t.Helper()
	service, err := ratelimit.NewService(address, ratelimit.ServiceConfig{Token: token})
	require.NoError(t, err)
	t.Cleanup(service.Close)
	client, err := ratelimit.NewClient(service, ratelimit.ClientConfig{
		Timeout: time.Minute, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	l, err := client.Limiter(ratelimit.Config{
		Name: "door", Policy: ratelimit.FixedWindow{Limit: limit, Window: time.Hour}, NoDenialCache: true,
	})
	require.NoError(t, err)
	return l
}

// dial opens a connection without saying anything.
func dial(t testing.TB, address string) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", address[len("unix:"):])
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}

// frame returns a frame: see package door.
func frame(kind byte, id uint64, payload []byte) []byte {
	body := append(binary.AppendUvarint([]byte{kind}, id), payload...)
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...)
}

func text(s string) []byte { return append(binary.AppendUvarint(nil, uint64(len(s))), s...) }

func hello(name string, version int64, token string) []byte {
	return frame('h', 0, bytes.Join([][]byte{text(name), binary.AppendVarint(nil, version), text(token)}, nil))
}

// A service refuses what is not its protocol, closes the connection, and goes on to serve others.
func TestHostileClients(t *testing.T) {
	t.Parallel()
	address, end := serve(t, ratelimit.ServeConfig{Token: token})
	good := limiter(t, address, 1000)
	_, err := good.Allow(t.Context(), "k")
	require.NoError(t, err)
	right := hello("ratelimit door", 1, token)
	for name, sent := range map[string][]byte{
		"nothing of the protocol": []byte("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"),
		"TLS":                     {0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xfc, 0x03, 0x03},
		"a frame of 4 GiB":        {0xff, 0xff, 0xff, 0xff},
		"an empty frame":          {0, 0, 0, 0},
		"another name":            hello("another door", 1, token),
		"another version":         hello("ratelimit door", 2, token),
		"no token":                hello("ratelimit door", 1, ""),
		"a wrong token":           hello("ratelimit door", 1, token+"!"),
		"a hello of 1 MB":         hello("ratelimit door", 1, string(make([]byte, 1<<20))),
		"a request at first":      frame('r', 1, nil),
		"a second hello":          append(bytes.Clone(right), right...),
		"a frame of no kind":      append(bytes.Clone(right), frame('?', 1, nil)...),
		"a large frame":           append(bytes.Clone(right), 0x00, 0x10, 0x00, 0x01),
	} {
		conn := dial(t, address)
		_, _ = conn.Write(sent) // the service may have closed the connection already
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		_, err := io.Copy(io.Discard, conn)
		require.NotErrorIs(t, err, context.DeadlineExceeded, name)
		_, err = good.Allow(t.Context(), "k")
		require.NoError(t, err, name)
	}
	end()
}

// Messages of welcome clients that the library would not send are answered with an error, and nothing else is touched.
func TestMessagesOfAnotherClient(t *testing.T) {
	t.Parallel()
	address, _ := serve(t, ratelimit.ServeConfig{Token: token})
	for name, sent := range map[string][]byte{
		"an empty request":  frame('r', 1, nil),
		"a request of 0xff": frame('r', 1, bytes.Repeat([]byte{0xff}, 100)),
		"a statement of its own": frame('s', 1,
			bytes.Join([][]byte{binary.AppendVarint(nil, int64(time.Second)), text("DROP TABLE rate_limit_ephemeral"), {0}}, nil)),
		"a statement without an end": frame('s', 1, []byte{1}),
	} {
		conn := dial(t, address)
		_, err := conn.Write(append(hello("ratelimit door", 1, token), sent...))
		require.NoError(t, err)
		require.NoError(t, conn.SetReadDeadline(time.Now().Add(time.Minute)))
		answer := make([]byte, 4)
		for _, kind := range []byte{'W', 'E'} {
			_, err = io.ReadFull(conn, answer)
			require.NoError(t, err, name)
			body := make([]byte, binary.BigEndian.Uint32(answer))
			_, err = io.ReadFull(conn, body)
			require.NoError(t, err, name)
			require.Equal(t, string(kind), string(body[0]), name)
		}
	}
	_, err := limiter(t, address, 5).Allow(t.Context(), "k")
	require.NoError(t, err)
}

// Connections that say nothing cost a goroutine each, and nothing remains of them.
//
//nolint:paralleltest // it counts goroutines
func TestIdleConnections(t *testing.T) {
	address, end := serve(t, ratelimit.ServeConfig{Token: token})
	before := runtime.NumGoroutine()
	conns := make([]net.Conn, 1000)
	for i := range conns {
		conns[i] = dial(t, address)
		_, err := conns[i].Write(hello("ratelimit door", 1, token))
		require.NoError(t, err)
		_, err = io.ReadFull(conns[i], make([]byte, 7))
		require.NoError(t, err)
	}
	l := limiter(t, address, 5)
	_, err := l.Allow(t.Context(), "k")
	require.NoError(t, err)
	for _, conn := range conns {
		require.NoError(t, conn.Close())
	}
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < before+20 }, time.Minute, 10*time.Millisecond)
	end()
}

// A service with too many connections refuses further ones, until some are closed.
func TestTooManyConnections(t *testing.T) {
	t.Parallel()
	address, _ := serve(t, ratelimit.ServeConfig{Token: token, MaxConns: 1})
	only := dial(t, address)
	_, err := only.Write(hello("ratelimit door", 1, token))
	require.NoError(t, err)
	_, err = io.ReadFull(only, make([]byte, 7))
	require.NoError(t, err)
	l := limiter(t, address, 5)
	_, err = l.Allow(t.Context(), "k")
	require.ErrorIs(t, err, ratelimit.ErrUnavailable)
	require.ErrorContains(t, err, "too many connections")
	require.NoError(t, only.Close())
	require.Eventually(t, func() bool {
		_, err := l.Allow(t.Context(), "k")
		return err == nil
	}, time.Minute, 10*time.Millisecond)
}

// However often the service is ended and started again, each call is answered, and no key gets more than its limit.
func TestServiceThatEndsAgainAndAgain(t *testing.T) {
	t.Parallel()
	const limit, callers, rounds = 500, 16, 5
	pool := pgtest.New(t).NewPool(t, nil)
	path := filepath.Join(t.TempDir(), "s")
	start := func() (end func()) {
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Timeout: time.Minute})
		require.NoError(t, err)
		listener, err := net.Listen("unix", path)
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan error, 1)
		go func() {
			ended <- client.Serve(ctx, listener, ratelimit.ServeConfig{
				Token: token, Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
			})
		}()
		return func() {
			cancel()
			require.NoError(t, <-ended)
		}
	}
	end := start()
	l := limiter(t, "unix:"+path, limit)
	var mu sync.Mutex
	allowed, unknown := 0, 0
	done := make(chan struct{})
	var all sync.WaitGroup
	for range callers {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				result, err := l.Allow(t.Context(), "k")
				mu.Lock()
				switch {
				case err == nil && result.Allowed:
					allowed++
				case err != nil && ratelimit.ErrorKind(err) != "unavailable":
					unknown++
				}
				mu.Unlock()
			}
		})
	}
	for range rounds {
		mu.Lock()
		before := allowed
		mu.Unlock()
		require.Eventually(t, func() bool {
			mu.Lock()
			defer mu.Unlock()
			return allowed >= min(before+20, limit)
		}, time.Minute, time.Millisecond)
		end()
		end = start()
	}
	close(done)
	all.Wait()
	end()
	require.LessOrEqual(t, allowed, limit)
	t.Logf("%d allowed, %d other errors", allowed, unknown)
}
