package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// When the server accepts no more connections, a limiter that has a connection works on. A limiter without a connection
// returns an error, and nothing is counted.
func TestConnectionsExhausted(t *testing.T) {
	t.Parallel()

	server, pool := newServer(t, pgserver.Config{Settings: map[string]string{
		"max_connections": "8", "superuser_reserved_connections": "0", "max_wal_senders": "0", "wal_level": "minimal",
	}})
	config := ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
	}
	inside := limitertest.New(t, pool, config)
	outside := limitertest.New(t, newPool(t, server.URL(), nil), config)
	_, err := inside.Allow(t.Context(), "key")
	require.NoError(t, err)

	var conns []*pgx.Conn
	for err == nil {
		var conn *pgx.Conn
		if conn, err = pgx.Connect(t.Context(), server.URL()); err == nil {
			conns = append(conns, conn)
		}
	}
	require.ErrorContains(t, err, "53300")
	_, err = outside.Allow(t.Context(), "key")
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
	require.ErrorContains(t, err, "53300")
	result, err := inside.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)

	for _, conn := range conns {
		require.NoError(t, conn.Close(t.Context()))
	}
	testkit.WaitUntil(t, func() bool { // until the server knows that the connections are closed
		result, err = outside.Allow(t.Context(), "key")
		return err == nil
	})
	require.EqualValues(t, 7, result.Remaining)
}

// smallDisk mounts a file system in memory with this many MiB. Call it before you start the server that uses it, so
// that the server ends before the file system.
func smallDisk(t testing.TB, mebibytes int) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("a full disk: only root may mount a small one")
	}
	dir := t.TempDir()
	require.NoError(t, os.Chmod(filepath.Dir(dir), 0o755)) // the server runs as another user
	mount(t, dir, fmt.Sprintf("size=%dm", mebibytes))
	t.Cleanup(func() {
		output, err := exec.Command("umount", dir).CombinedOutput()
		require.NoError(t, err, string(output))
	})
	return dir
}

func mount(t testing.TB, dir, options string) {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "mount", "-t", "tmpfs", "-o", options, "tmpfs", dir).
		CombinedOutput()
	require.NoError(t, err, string(output))
}

// give hands a folder over to the user that runs a server.
func give(t testing.TB, server *pgserver.Server, dir string) {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "chown", "--reference="+server.DataDir(), dir).CombinedOutput()
	require.NoError(t, err, string(output))
}

// askUntilError takes 1 unit from one new key after another. It returns how many requests were granted before the first
// error.
func askUntilError(limiter *ratelimit.Limiter) (granted int, err error) {
	for {
		if _, err := limiter.Allow(context.Background(), keyNumber(granted)); err != nil {
			return granted, err
		}
		granted++
	}
}

// When the tables' disk is full, new keys cannot be counted, and their callers get an error. Every granted request is
// counted, known keys are still denied, and everything works again once there is room.
func TestFullDisk(t *testing.T) {
	t.Parallel()

	dir := smallDisk(t, 1)
	server, pool := newServer(t, pgserver.Config{})
	give(t, server, dir)
	pgtest.Exec(t, pool, fmt.Sprintf("CREATE TABLESPACE small LOCATION '%s'", dir))
	pgtest.Exec(t, pool, "ALTER TABLE rate_limit_durable SET TABLESPACE small")
	pgtest.Exec(t, pool, "ALTER INDEX rate_limit_durable_pkey SET TABLESPACE small")
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: year}, Durable: true, SynchronousCommit: true,
		NoDenialCache: true,
	})
	granted, err := askUntilError(limiter)
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
	require.ErrorContains(t, err, "53100")
	require.Positive(t, granted)
	require.Len(t, counted(t, pool, true), granted)
	result, err := limiter.Allow(t.Context(), keyNumber(0))
	require.NoError(t, err)
	require.False(t, result.Allowed)

	mount(t, dir, "remount,size=8m")
	result, err = limiter.Allow(t.Context(), keyNumber(granted))
	require.NoError(t, err)
	require.True(t, result.Allowed)
	require.Len(t, counted(t, pool, true), granted+1)
}

// When the disk of the write-ahead log is full, the server crashes during a commit. Once there is room again, all
// acknowledged requests are there.
func TestFullDiskOfTheLog(t *testing.T) {
	t.Parallel()

	dir := smallDisk(t, 44)
	server, pool := newServer(t, pgserver.Config{Fsync: true, Settings: map[string]string{
		"min_wal_size": "32MB", "max_wal_size": "512MB", "wal_level": "minimal", "max_wal_senders": "0", "checkpoint_timeout": "1h",
	}})
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	give(t, server, dir)
	log := filepath.Join(server.DataDir(), "pg_wal")
	output, err := exec.CommandContext(t.Context(), "sh", "-c", `cp -a "$1"/. "$2" && rm -r "$1" && ln -s "$2" "$1"`, "sh", log, dir).
		CombinedOutput()
	require.NoError(t, err, string(output))
	require.NoError(t, server.Restart(t.Context()))

	limiter := limitertest.New(t, newPool(t, server.URL(), nil), ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: year}, Durable: true, SynchronousCommit: true,
	})
	noise := newPool(t, server.URL(), func(config *pgxpool.Config) { config.MaxConns = 1 })
	noisy := make(chan error, 1)
	go func() {
		var err error
		for err == nil {
			_, err = noise.Exec(
				context.Background(),
				"SELECT pg_logical_emit_message(false, 'noise', repeat('x', 200000))",
			)
		}
		noisy <- err
	}()
	granted, err := askUntilError(limiter)
	require.Error(t, <-noisy)
	require.ErrorIs(t, err, ratelimit.ErrUnavailable)
	require.Positive(t, granted)

	mount(t, dir, "remount,size=512m")
	require.NoError(t, server.Kill()) // without this, the server would try to recover for ever
	require.NoError(t, server.Restart(t.Context()))
	pool.Reset()
	table := len(counted(t, pool, true))
	require.GreaterOrEqual(t, table, granted)
	if errors.Is(err, ratelimit.ErrOutcomeUnknown) {
		granted++
	}
	require.LessOrEqual(t, table, granted)
	requireHealed(t, limiter)
}
