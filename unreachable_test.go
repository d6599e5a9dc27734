package ratelimit_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestUnreachable(t *testing.T) {
	t.Parallel()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	pool, err := pgxpool.New(
		t.Context(),
		fmt.Sprintf("postgres://someone:secret@%v/nothing?sslmode=disable", listener.Addr()),
	)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	for _, call := range limitertest.Calls(limiter, "personal") {
		err := call()
		limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestServerThatHangsUp(t *testing.T) {
	t.Parallel()

	pool := limitertest.PoolOf(t, func(net.Conn) {})
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	for _, call := range limitertest.Calls(limiter, "personal") {
		limitertest.RequireKinds(t, call(), ratelimit.ErrUnavailable)
	}
}

func TestServerThatNeverAnswers(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "the connections of one process's pool")

	pool := limitertest.PoolOf(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		},
		ratelimit.ClientConfig{Timeout: 50 * time.Millisecond},
	)
	for _, call := range limitertest.Calls(limiter, "personal") {
		limitertest.RequireKinds(t, call(), ratelimit.ErrTimeout)
	}
}

func TestReadOnlySession(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	db := pgtest.New(t)
	readOnly := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	})
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		limiter := limitertest.New(t, readOnly, config)
		for name, call := range limitertest.Calls(limiter, "personal") {
			err := call()
			if name == "Peek" { // it only reads
				require.NoError(t, err)
				continue
			}
			limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrReadOnly)
			require.Contains(t, err.Error(), "target_session_attrs")
		}
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))
	})
}

// standby turns a server into a standby whose primary never sends WAL.
func standby(t *testing.T, server *pgserver.Server) {
	t.Helper()
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	require.NoError(t, os.WriteFile(filepath.Join(server.DataDir(), "standby.signal"), nil, 0o666))
	require.NoError(t, server.Restart(t.Context()))
}

// A primary becomes a standby while a pool is connected to it.
func TestStandby(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{})
	if server.DataDir() == "" {
		t.Skip("a standby, which is made in the data directory: that of a server in Docker is out of reach, so install Postgres")
	}
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	pool.Reset()
	standby(t, server)
	require.True(t, pgtest.Scalar[bool](t, pool, "SELECT pg_is_in_recovery()"))

	for _, durable := range []bool{true, false} {
		for _, policy := range limitertest.SlowPolicies(10) {
			limiter := limitertest.New(
				t,
				pool,
				ratelimit.Config{Name: "test", Policy: policy, Durable: durable},
			)
			for method, call := range limitertest.Calls(limiter, "personal") {
				err := call()
				if method == "Peek" && durable { // it only reads
					require.NoError(t, err)
					continue
				}
				limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrReadOnly)
			}
		}
	}
}

// An administrator ends the session of a statement.
func TestConnectionIsEndedMeanwhile(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}}
	pool := db.NewPool(t, nil)
	limiter := limitertest.New(t, pool, config)
	_, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	holder := limitertest.Hold(t, db, config, "personal")
	// In a transaction the call waits in one statement. Outside a transaction it would send several statements.
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	wait := testkit.Later(func() (ratelimit.Result, error) { return limiter.WithTx(tx).Allow(context.Background(), "personal") })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	pgtest.Exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
	_, err = wait()
	_ = tx.Rollback(t.Context()) // its connection is gone
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
	require.ErrorContains(t, err, "the transaction is rolled back")
	require.NoError(t, holder.Rollback(t.Context()))
	result, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
}
