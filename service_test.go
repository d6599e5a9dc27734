package ratelimit_test

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// serve serves what client decides on a Unix socket, until the test or the returned function ends it.
func serve(t *testing.T, client *ratelimit.Client) (address string, end func()) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = client.Serve(ctx, listener, ratelimit.ServeConfig{
			Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	end = func() {
		cancel()
		<-ended
	}
	t.Cleanup(end)
	return "unix:" + path, end
}

func newService(t *testing.T, address string, config ratelimit.ServiceConfig) *ratelimit.Service {
	t.Helper()
	service, err := ratelimit.NewService(address, config)
	require.NoError(t, err)
	t.Cleanup(service.Close)
	return service
}

// A limiter that asks a service does what a limiter with a pool does, and both count together.
func TestService(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "a service of this test's own")
	pool := pgtest.New(t).NewPool(t, nil)
	direct := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
	address, _ := serve(t, direct)
	client := limitertest.NewClient(t, newService(t, address, ratelimit.ServiceConfig{}), ratelimit.ClientConfig{})
	config := ratelimit.Config{
		Name: "a", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, NoDenialCache: true,
	}
	remote, near := limitertest.Of(t, client, config), limitertest.Of(t, direct, config)
	ctx := t.Context()
	left := func(n int64) {
		t.Helper()
		for _, l := range []*ratelimit.Limiter{remote, near} {
			result, err := l.Peek(ctx, "k")
			require.NoError(t, err)
			require.Equal(t, n, result.Remaining)
		}
	}
	taken, err := remote.AllowN(ctx, "k", 3)
	require.NoError(t, err)
	require.True(t, taken.Allowed)
	left(7)
	_, err = near.AllowN(ctx, "k", 2)
	require.NoError(t, err)
	left(5)
	denied, err := remote.AllowN(ctx, "k", 6)
	require.NoError(t, err)
	require.False(t, denied.Allowed)
	require.Positive(t, denied.RetryAfter)
	receipt, err := taken.Receipt()
	require.NoError(t, err)
	back, err := near.ParseReceipt(receipt)
	require.NoError(t, err)
	_, err = near.Refund(ctx, back)
	require.NoError(t, err)
	left(8)
	held, err := remote.Hold(ctx, "k", 4, time.Minute)
	require.NoError(t, err)
	left(4)
	found, err := ratelimit.HoldFromText(ctx, held.Hold.String(), remote)
	require.NoError(t, err)
	_, err = found.Settle(ctx, 1)
	require.NoError(t, err)
	left(7)
	_, err = remote.Grant(ctx, "k", 5)
	require.NoError(t, err)
	left(12)
	results, err := ratelimit.AllowAll(ctx, remote.Request("k", 1), remote.Request("other", 1))
	require.NoError(t, err)
	require.True(t, results.Allowed)
	left(11)
	require.NoError(t, remote.Reset(ctx, "k"))
	left(10)

	slots := ratelimit.Config{Name: "slots", Policy: ratelimit.Concurrency{Limit: 1}}
	of, nearSlots := limitertest.Of(t, client, slots), limitertest.Of(t, direct, slots)
	slot, err := nearSlots.Acquire(ctx, "k", ratelimit.SlotOptions{})
	require.NoError(t, err)
	waiting := make(chan error, 1)
	go func() {
		slot, err := of.Acquire(ctx, "k", ratelimit.SlotOptions{})
		if err == nil {
			err = slot.Release(ctx)
		}
		waiting <- err
	}()
	require.NoError(t, slot.Release(ctx))
	require.NoError(t, <-waiting)

	_, err = client.Limiter(config)
	require.NoError(t, err)
	tx, err := pool.Begin(ctx)
	require.NoError(t, err)
	_, err = remote.WithTx(tx).Allow(ctx, "k")
	var refused *ratelimit.ConfigError
	require.ErrorAs(t, err, &refused)
	require.NoError(t, tx.Rollback(ctx))
}

// While the service is away, OnFailure answers, or the process asks Postgres itself.
// Each process remembers the denials that it has got through the service, so a hot denied key costs Postgres at most a
// statement for each process, and not one for each call.
func TestServiceAndRememberedDenials(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "a service of this test's own")
	var statements atomic.Int64
	address, _ := serve(t, limitertest.NewClient(t, pgtest.New(t).NewPool(t, nil), ratelimit.ClientConfig{
		Observer: &ratelimit.Observer{Statement: func(ratelimit.StatementEvent) { statements.Add(1) }},
	}))
	var limiters [16]*ratelimit.Limiter // of as many processes
	for i := range limiters {
		service := newService(t, address, ratelimit.ServiceConfig{})
		limiters[i] = limitertest.Of(t, limitertest.NewClient(t, service, ratelimit.ClientConfig{DenialMaxAge: time.Hour}),
			ratelimit.Config{Name: "hot", Policy: ratelimit.FixedWindow{Limit: 1, Window: 24 * time.Hour}})
	}
	var failed [16]error
	testkit.Together(len(limiters), func(i int) {
		for range 100 {
			_, err := limiters[i].Allow(t.Context(), "user:123")
			failed[i] = errors.Join(failed[i], err)
		}
	})
	require.NoError(t, errors.Join(failed[:]...))
	require.LessOrEqual(t, statements.Load(), int64(len(limiters)+1)) // one was allowed, and asks again
}

func TestServiceThatIsAway(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "a service of this test's own")
	pool := pgtest.New(t).NewPool(t, nil)
	server := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
	address, end := serve(t, server)
	of := func(config ratelimit.ServiceConfig, onFailure ratelimit.FailureMode) *ratelimit.Limiter {
		client := limitertest.NewClient(t, newService(t, address, config), ratelimit.ClientConfig{
			Logger: slog.New(slog.DiscardHandler),
		})
		return limitertest.Of(t, client, ratelimit.Config{
			Name: "a", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, OnFailure: onFailure,
		})
	}
	open := of(ratelimit.ServiceConfig{}, ratelimit.FailOpen())
	returns := of(ratelimit.ServiceConfig{}, ratelimit.ReturnError())
	itself := of(ratelimit.ServiceConfig{Direct: pool}, ratelimit.ReturnError())
	for _, l := range []*ratelimit.Limiter{open, returns, itself} {
		result, err := l.Allow(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	}
	end()
	for range 5 {
		result, err := open.Allow(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
		_, err = returns.Allow(t.Context(), "k")
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		require.NotContains(t, err.Error(), "the database is")
		result, err = itself.Allow(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	}
	result, err := itself.Peek(t.Context(), "k")
	require.NoError(t, err)
	require.EqualValues(t, 2, result.Remaining)
}

// An error of the connection to a service speaks of the service, and not of the database.
func TestErrorsOfAServiceSaySo(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "a service of this test's own")
	call := func(address, token string) error {
		service := newService(t, address, ratelimit.ServiceConfig{Token: token})
		client := limitertest.NewClient(t, service, ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)})
		_, err := limitertest.Of(t, client, ratelimit.Config{Name: "a", Policy: limitertest.Hourly}).Allow(t.Context(), "k")
		return err
	}
	path := filepath.Join(t.TempDir(), "s")
	err := call("unix:"+path, "")
	require.ErrorIs(t, err, ratelimit.ErrUnavailable)
	require.Equal(t, "unavailable", ratelimit.ErrorKind(err))
	require.EqualError(t, err, "ratelimit: the service cannot be reached: dial unix "+path+
		": connect: no such file or directory")

	listener, err := net.Listen("unix", path)
	require.NoError(t, err)
	client := limitertest.NewClient(t, pgtest.New(t).NewPool(t, nil), ratelimit.ClientConfig{})
	ctx, end := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- client.Serve(ctx, listener, ratelimit.ServeConfig{
			Token: "open sesame", Grace: time.Millisecond, Logger: slog.New(slog.DiscardHandler),
		})
	}()
	err = call("unix:"+path, "sesame")
	require.ErrorIs(t, err, ratelimit.ErrSetup)
	require.EqualError(t, err, "ratelimit: the service refuses the token")
	end()
	require.NoError(t, <-ended)
}

func TestServiceRefusesBadConfigurations(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).NewPool(t, nil)
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	service := newService(t, "unix:/nowhere", ratelimit.ServiceConfig{})
	for field, call := range map[string]func() error{
		"address": func() error { _, err := ratelimit.NewService("nowhere", ratelimit.ServiceConfig{}); return err },
		"ServiceConfig.Direct": func() error {
			_, err := ratelimit.NewService("unix:/s", ratelimit.ServiceConfig{Direct: conn})
			return err
		},
		"ClientConfig.Schema": func() error {
			_, err := ratelimit.NewClient(service, ratelimit.ClientConfig{Schema: "s"})
			return err
		},
		"PoliciesConfig.Schema": func() error {
			_, err := ratelimit.NewPolicies(service, ratelimit.PoliciesConfig{Schema: "s"})
			return err
		},
		"db": func() error {
			client, err := ratelimit.NewClient(service, ratelimit.ClientConfig{})
			require.NoError(t, err)
			return client.Serve(t.Context(), nil, ratelimit.ServeConfig{})
		},
	} {
		var refused *ratelimit.ConfigError
		require.ErrorAs(t, call(), &refused, field)
		require.Equal(t, field, refused.Field)
	}
}
