package door_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// relay stands between clients and a service. It can keep back what the service sends, or cut all connections.
type relay struct {
	mu     sync.Mutex
	moved  *sync.Cond
	frozen bool
	conns  []net.Conn
	passed int // how often something of the service was passed on
}

// newRelay starts a relay, and returns the address for clients.
func newRelay(t testing.TB, service string) (r *relay, address string) {
	t.Helper()
	r = &relay{}
	r.moved = sync.NewCond(&r.mu)
	path := filepath.Join(t.TempDir(), "r")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", service[len("unix:"):])
			if err != nil {
				near.Close()
				continue
			}
			r.mu.Lock()
			r.conns = append(r.conns, near, far)
			r.mu.Unlock()
			all.Go(func() { r.pass(near, far, false) })
			all.Go(func() { r.pass(far, near, true) })
		}
	})
	t.Cleanup(func() {
		listener.Close()
		r.freeze(false)
		r.cut()
		all.Wait()
	})
	return r, "unix:" + path
}

// pass passes on what one side sends. What the service sends is answers.
func (r *relay) pass(from, to net.Conn, answers bool) {
	defer to.Close()
	chunk := make([]byte, 64<<10)
	for {
		n, err := from.Read(chunk)
		r.mu.Lock()
		for answers && r.frozen {
			r.moved.Wait()
		}
		if answers && err == nil {
			r.passed++
		}
		r.mu.Unlock()
		if _, err2 := to.Write(chunk[:n]); err != nil || err2 != nil {
			return
		}
	}
}

func (r *relay) freeze(is bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.frozen = is
	r.moved.Broadcast()
}

func (r *relay) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, conn := range r.conns {
		conn.Close()
	}
	r.conns = nil
}

func (r *relay) count() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.passed
}

// serveFrom serves the database of a pool until the test ends.
func serveFrom(t testing.TB, pool *pgxpool.Pool) (address string) {
	t.Helper()
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Timeout: time.Minute})
	require.NoError(t, err)
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- client.Serve(ctx, listener, ratelimit.ServeConfig{
			Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	return "unix:" + path
}

// of returns a limiter of 100 an hour that asks db.
func of(t testing.TB, db ratelimit.DBTX, timeout time.Duration, onFailure ratelimit.FailureMode) *ratelimit.Limiter {
	t.Helper()
	client, err := ratelimit.NewClient(db, ratelimit.ClientConfig{
		Timeout: timeout, Logger: slog.New(slog.DiscardHandler),
	})
	require.NoError(t, err)
	l, err := client.Limiter(ratelimit.Config{
		Name: "door", Policy: ratelimit.FixedWindow{Limit: 100, Window: time.Hour}, OnFailure: onFailure,
	})
	require.NoError(t, err)
	return l
}

// taken returns how many units of the key the database has counted.
func taken(t testing.TB, l *ratelimit.Limiter) int64 {
	t.Helper()
	result, err := l.Peek(t.Context(), "k")
	require.NoError(t, err)
	return 100 - result.Remaining
}

// If the connection breaks after the service has read a request, the outcome is unknown, and nothing is sent again.
func TestConnectionThatIsCut(t *testing.T) {
	t.Parallel()
	const calls = 8
	pool := pgtest.New(t).NewPool(t, nil)
	r, address := newRelay(t, serveFrom(t, pool))
	service, err := ratelimit.NewService(address, ratelimit.ServiceConfig{Direct: pool})
	require.NoError(t, err)
	t.Cleanup(service.Close)
	l, direct := of(t, service, time.Minute, ratelimit.FailOpen()), of(t, pool, time.Minute, ratelimit.ReturnError())
	_, err = l.Allow(t.Context(), "k")
	require.NoError(t, err)

	r.freeze(true)
	errs := make(chan error, calls)
	for range calls {
		go func() {
			_, err := l.Charge(t.Context(), "k", 1) // OnFailure does not answer it
			errs <- err
		}()
	}
	require.Eventually(t, func() bool { return taken(t, direct) == 1+calls }, time.Minute, time.Millisecond)
	r.cut()
	r.freeze(false)
	for range calls {
		err := <-errs
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		require.ErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
	}
	result, err := l.Allow(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceDatabase, result.Source)
	require.EqualValues(t, 2+calls, taken(t, direct))
}

// While the service is frozen, each call ends by its Timeout, OnFailure answers, and a process that may ask Postgres
// itself does so. When the service goes on, it is asked again.
func TestServiceThatIsFrozen(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).NewPool(t, nil)
	r, address := newRelay(t, serveFrom(t, pool))
	limiter := func(config ratelimit.ServiceConfig, onFailure ratelimit.FailureMode) *ratelimit.Limiter {
		service, err := ratelimit.NewService(address, config)
		require.NoError(t, err)
		t.Cleanup(service.Close)
		return of(t, service, 2*time.Second, onFailure)
	}
	open := limiter(ratelimit.ServiceConfig{}, ratelimit.FailOpen())
	returns := limiter(ratelimit.ServiceConfig{}, ratelimit.ReturnError())
	itself := limiter(ratelimit.ServiceConfig{Direct: pool}, ratelimit.ReturnError())
	all := []*ratelimit.Limiter{open, returns, itself}
	granted, unknown := int64(0), int64(0)
	ask := func(l *ratelimit.Limiter) (ratelimit.Result, error) {
		result, err := l.Allow(t.Context(), "k")
		switch {
		case err == nil && result.Source == ratelimit.SourceDatabase:
			granted++
		case err == nil || errors.Is(err, ratelimit.ErrOutcomeUnknown):
			unknown++ // an answer of OnFailure hides the error
		}
		return result, err
	}
	for _, l := range all {
		_, err := ask(l)
		require.NoError(t, err)
	}
	r.freeze(true)
	result, err := ask(open)
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
	_, err = ask(returns)
	require.ErrorIs(t, err, ratelimit.ErrTimeout)
	require.ErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
	require.Eventually(t, func() bool { _, err := ask(itself); return err == nil }, time.Minute, time.Millisecond)

	r.freeze(false)
	before := r.count()
	for _, l := range all {
		require.Eventually(t, func() bool {
			result, err := ask(l)
			return err == nil && result.Source == ratelimit.SourceDatabase
		}, time.Minute, time.Millisecond)
	}
	require.Eventually(t, func() bool { _, err := ask(itself); return err == nil && r.count() > before+2 },
		time.Minute, time.Millisecond)
	counted := taken(t, of(t, pool, time.Minute, ratelimit.ReturnError()))
	require.GreaterOrEqual(t, counted, min(granted, 100))
	require.LessOrEqual(t, counted, granted+unknown)
}
