package ratelimit

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
	limiter := newLimiter(
		t,
		pool,
		Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}},
	)
	for _, call := range everyCall(limiter, "personal") {
		err := call()
		requireKinds(t, err, ErrUnavailable)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestServerThatHangsUp(t *testing.T) {
	t.Parallel()

	pool := poolOf(t, func(net.Conn) {})
	limiter := newLimiter(
		t,
		pool,
		Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}},
	)
	for _, call := range everyCall(limiter, "personal") {
		requireKinds(t, call(), ErrUnavailable)
	}
}

func TestServerThatNeverAnswers(t *testing.T) {
	t.Parallel()

	pool := poolOf(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	limiter := newLimiter(
		t,
		pool,
		Config{
			Name:   "test",
			Policy: FixedWindow{Limit: 10, Window: year},
		},
		ClientConfig{Timeout: 50 * time.Millisecond},
	)
	for _, call := range everyCall(limiter, "personal") {
		requireKinds(t, call(), ErrTimeout)
	}
}

// poolOf returns a pool whose server does that with each connection.
func poolOf(t *testing.T, serve func(net.Conn)) *pgxpool.Pool {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
	t.Cleanup(func() { listener.Close() })
	pool, err := pgxpool.New(t.Context(), fmt.Sprintf("postgres://someone@%v/nothing?sslmode=disable", listener.Addr()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestReadOnlySession(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	db := pgtest.New(t)
	readOnly := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	})
	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		limiter := newLimiter(t, readOnly, config)
		for name, call := range everyCall(limiter, "personal") {
			err := call()
			if name == "Peek" { // which only reads
				require.NoError(t, err)
				continue
			}
			requireKinds(t, err, ErrUnavailable, ErrReadOnly)
			require.Contains(t, err.Error(), "target_session_attrs")
		}
		require.Empty(t, storedRows(t, db.Pool, config.Durable))
	})
}

// standby turns a server into one that waits for the WAL of a primary that does not come.
func standby(t *testing.T, server *pgserver.Server) {
	t.Helper()
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	require.NoError(t, os.WriteFile(filepath.Join(server.DataDir(), "standby.signal"), nil, 0o666))
	require.NoError(t, server.Restart(t.Context()))
}

// A primary that has become a standby, under a pool that still is connected to it.
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
		for _, policy := range slowPolicies(10) {
			limiter := newLimiter(
				t,
				pool,
				Config{Name: "test", Policy: policy, Durable: durable},
			)
			for method, call := range everyCall(limiter, "personal") {
				err := call()
				if method == "Peek" && durable { // which only reads
					require.NoError(t, err)
					continue
				}
				requireKinds(t, err, ErrUnavailable, ErrReadOnly)
			}
		}
	}
}

// The session of a statement is ended by an administrator.
func TestConnectionIsEndedMeanwhile(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}}
	pool := db.NewPool(t, nil)
	limiter := newLimiter(t, pool, config)
	_, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	holder := hold(t, db, config, "personal")
	tx, err := pool.Begin(t.Context()) // in which one statement waits; outside of it, one after the other would
	require.NoError(t, err)
	wait := testkit.Later(func() (Result, error) { return limiter.WithTx(tx).Allow(context.Background(), "personal") })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	pgtest.Exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
	_, err = wait()
	_ = tx.Rollback(t.Context()) // its connection is gone
	requireKinds(t, err, ErrUnavailable)
	require.ErrorContains(t, err, "the transaction is rolled back")
	require.NoError(t, holder.Rollback(t.Context()))
	result, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
}
