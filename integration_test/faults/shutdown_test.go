package faults

import (
	"context"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The server shuts down under load, and is started again. A fast shutdown keeps both tables. An immediate shutdown acts
// like a crash, which empties the unlogged table.
func TestShutdownUnderLoad(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		mode           pgserver.Mode
		keepsEphemeral bool
	}{
		"fast":      {pgserver.Fast, true},
		"immediate": {pgserver.Immediate, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			random := random(t)
			server, pool := newServer(t, pgserver.Config{Fsync: true})
			const limit = 200
			policy := ratelimit.FixedWindow{Limit: limit, Window: year}
			limiters := map[bool]*ratelimit.Limiter{
				true: limitertest.New(t, newPool(t, server.URL(), nil), ratelimit.Config{
					Name: "test", Policy: policy, Durable: true, SynchronousCommit: true,
				}),
				false: limitertest.New(t, newPool(t, server.URL(), nil), ratelimit.Config{
					Name: "test", Policy: policy,
				}),
			}
			ledgers := map[bool]*ledger{true: {}, false: {}}
			var waits []func()
			for durable, limiter := range limiters {
				waits = append(
					waits,
					ledgers[durable].load(t, limiter, random.Uint64(), func(random *rand.Rand) string {
						return keyNumber(random.IntN(200))
					}),
				)
			}
			pause(t.Context(), time.Duration(random.Int64N(int64(300*time.Millisecond))))
			require.NoError(t, server.Stop(t.Context(), c.mode))
			for _, wait := range waits {
				wait()
			}

			require.NoError(t, server.Restart(t.Context()))
			pool.Reset()
			ledgers[true].requireTable(t, counted(t, pool, true), limit, time.Now())
			if c.keepsEphemeral {
				ledgers[false].requireTable(t, counted(t, pool, false), limit, time.Now())
			} else {
				require.Empty(t, counted(t, pool, false))
			}
			for _, limiter := range limiters {
				requireHealed(t, limiter)
			}
		})
	}
}

// A smart shutdown keeps open connections, and limiters with a connection work on. A limiter that needs a new
// connection gets ErrUnavailable.
func TestSmartShutdown(t *testing.T) {
	t.Parallel()

	server, pool := newServer(t, pgserver.Config{})
	config := ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
	}
	inside := limitertest.New(t, pool, config)
	outside := limitertest.New(t, newPool(t, server.URL(), nil), config)
	_, err := inside.Allow(t.Context(), "key")
	require.NoError(t, err)

	stopped := make(chan error, 1)
	go func() { stopped <- server.Stop(context.Background(), pgserver.Smart) }()
	testkit.WaitUntil(t, func() bool {
		conn, err := pgx.Connect(t.Context(), server.URL())
		if err == nil {
			_ = conn.Close(t.Context())
		}
		return err != nil
	})
	_, err = outside.Allow(t.Context(), "key")
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
	result, err := inside.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)

	pool.Reset()
	require.NoError(t, <-stopped)
	require.NoError(t, server.Restart(t.Context()))
	for want := range int64(2) {
		result, err = []*ratelimit.Limiter{inside, outside}[want].Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, 7-want, result.Remaining)
	}
}

// A setting makes a primary read-only while limiters are connected, and later writable again. The limiters keep their
// connections.
func TestDemotedServer(t *testing.T) {
	t.Parallel()

	server, _ := newServer(t, pgserver.Config{})
	pool := newPool(t, server.URL(), func(config *pgxpool.Config) { config.MaxConns = 1 })
	admin := newPool(t, server.URL(), func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "off"
	})
	for _, durable := range []bool{false, true} {
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}, Durable: durable,
		})
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		conns := pool.Stat().NewConnsCount()

		setReadOnly := func(value string) {
			pgtest.Exec(t, admin, "ALTER SYSTEM SET default_transaction_read_only = "+value)
			pgtest.Exec(t, admin, "SELECT pg_reload_conf()")
			testkit.WaitUntil(
				t,
				func() bool { return pgtest.Scalar[string](t, pool, "SHOW default_transaction_read_only") == value },
			)
		}
		setReadOnly("on")
		require.NoError(t, pool.Ping(t.Context()))
		_, err = limiter.Allow(t.Context(), "key")
		limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrReadOnly)
		limitertest.RequireKinds(t, limiter.Reset(t.Context(), "key"), ratelimit.ErrUnavailable, ratelimit.ErrReadOnly)
		result, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 9, result.Remaining)

		setReadOnly("off")
		result, err = limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 8, result.Remaining)
		require.Equal(t, conns, pool.Stat().NewConnsCount())
	}
}
