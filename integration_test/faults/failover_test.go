package faults

import (
	"errors"
	"math/rand/v2"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// newStandby starts a standby of a primary, and returns once the standby has caught up.
func newStandby(t *testing.T, primary *pgserver.Server, pool *pgxpool.Pool) (*pgserver.Server, *pgxpool.Pool) {
	t.Helper()
	if primary.DataDir() == "" {
		t.Skip("a standby, which is made in the data directory: that of a server in Docker is out of reach, so install Postgres")
	}
	binDir := pgtest.Scalar[string](t, pool, "SELECT setting FROM pg_config WHERE name = 'BINDIR'")
	program, err := exec.LookPath(filepath.Join(binDir, "pg_basebackup"))
	if err != nil {
		t.Skip("failover to a standby: npm delivers no pg_basebackup, so install Postgres (Debian: postgresql)")
	}
	standby := pgtest.Server(
		t,
		pgserver.Config{Fsync: true, Settings: map[string]string{"primary_conninfo": primary.URL()}},
	)
	require.NoError(t, standby.Stop(t.Context(), pgserver.Fast))
	dir := standby.DataDir()
	conf, err := os.ReadFile(filepath.Join(dir, "postgresql.conf")) // this file sets the folder of the socket, for example
	require.NoError(t, err)
	owner, err := os.Stat(dir)
	require.NoError(t, err)
	files, err := os.ReadDir(dir)
	require.NoError(t, err)
	for _, file := range files {
		require.NoError(t, os.RemoveAll(filepath.Join(dir, file.Name())))
	}

	backup := exec.CommandContext(
		t.Context(),
		program,
		"-d",
		primary.URL(),
		"-D",
		dir,
		"-c",
		"fast",
		"--no-sync",
	)
	output, err := backup.CombinedOutput()
	require.NoError(t, err, string(output))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "postgresql.conf"), conf, 0o600))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "standby.signal"), nil, 0o600))
	if os.Geteuid() == 0 {
		// The standby's user must be able to read its folder, so give it the owner that pgserver has chosen.
		output, err = exec.CommandContext(t.Context(), "chown", "-R", "--reference="+filepath.Dir(dir), dir).
			CombinedOutput()
		require.NoError(t, err, string(output))
	}
	require.NoError(t, os.Chmod(dir, owner.Mode().Perm()))
	require.NoError(t, standby.Restart(t.Context()))
	standbyPool := newPool(t, standby.URL(), nil)
	requireReplayed(t, pool, standbyPool)
	return standby, standbyPool
}

// requireReplayed waits until a standby has everything that the primary has now.
func requireReplayed(t *testing.T, primary, standby *pgxpool.Pool) {
	t.Helper()
	pgtest.Exec(t, primary, "CREATE TABLE IF NOT EXISTS flushed ()") // a synchronous commit flushes the WAL of earlier asynchronous commits
	now := pgtest.Scalar[string](t, primary, "SELECT pg_current_wal_lsn()::text")
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[bool](t, standby, "SELECT pg_last_wal_replay_lsn() >= $1::pg_lsn", now)
	})
}

// bothHosts returns a connection string for two servers. It leads to the server that accepts writes.
func bothHosts(t *testing.T, a, b *pgserver.Server) string {
	t.Helper()
	first, err := url.Parse(a.URL())
	require.NoError(t, err)
	second, err := url.Parse(b.URL())
	require.NoError(t, err)
	first.Host += "," + second.Host
	query := first.Query()
	query.Set("target_session_attrs", "read-write")
	first.RawQuery = query.Encode()
	return first.String()
}

// The primary is killed under load, and a synchronous standby is promoted. The limiter finds the new primary, which has
// all acknowledged requests.
func TestFailoverToASynchronousStandby(t *testing.T) {
	t.Parallel()

	random := random(t)
	primary, pool := newServer(t, pgserver.Config{Fsync: true})
	standby, standbyPool := newStandby(t, primary, pool)
	pgtest.Exec(t, pool, "ALTER SYSTEM SET synchronous_standby_names = '*'")
	pgtest.Exec(t, pool, "SELECT pg_reload_conf()")
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[bool](t, pool, "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE sync_state = 'sync')")
	})

	const limit = 200
	limiter := limitertest.New(t, newPool(t, bothHosts(t, primary, standby), nil), ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: limit, Window: year}, Durable: true, SynchronousCommit: true,
	})
	var known ledger
	wait := known.load(
		t,
		limiter,
		random.Uint64(),
		func(random *rand.Rand) string { return keyNumber(random.IntN(100)) },
	)
	pause(t.Context(), 100*time.Millisecond+time.Duration(random.Int64N(int64(300*time.Millisecond))))
	require.NoError(t, primary.Kill())
	wait()
	var err error
	testkit.WaitUntil(t, func() bool { // until the idle connections have failed
		_, err = limiter.Allow(t.Context(), keyNumber(0))
		return !errors.Is(err, ratelimit.ErrOutcomeUnknown)
	})
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable) // no server accepts writes

	require.True(t, pgtest.Scalar[bool](t, standbyPool, "SELECT pg_promote()"))
	require.NotEmpty(t, known.entries)
	known.requireTable(t, counted(t, standbyPool, true), limit, time.Now())
	requireHealed(t, limiter)
}

// A standby that is behind the primary is promoted. The standby has the data that it received, and no rows of the
// unlogged table.
func TestFailoverToAnAsynchronousStandby(t *testing.T) {
	t.Parallel()

	primary, pool := newServer(t, pgserver.Config{Fsync: true})
	standby, standbyPool := newStandby(t, primary, pool)
	url := bothHosts(t, primary, standby)
	limiters := map[bool]*ratelimit.Limiter{}
	for _, durable := range []bool{true, false} {
		limiters[durable] = limitertest.New(t, newPool(t, url, nil), ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
			Durable: durable, SynchronousCommit: durable,
		})
	}
	for _, limiter := range limiters {
		_, err := limiter.AllowN(t.Context(), "key", 3)
		require.NoError(t, err)
	}
	requireReplayed(t, pool, standbyPool)
	require.NoError(t, standby.Stop(t.Context(), pgserver.Fast))
	for _, limiter := range limiters {
		_, err := limiter.AllowN(t.Context(), "key", 2) // this take never reaches the standby
		require.NoError(t, err)
	}
	require.NoError(t, primary.Kill())
	require.NoError(t, standby.Restart(t.Context()))
	standbyPool.Reset()
	require.True(t, pgtest.Scalar[bool](t, standbyPool, "SELECT pg_promote()"))

	require.Equal(t, map[string]int64{"key": 3}, counted(t, standbyPool, true))
	require.Empty(t, counted(t, standbyPool, false))
	for durable, want := range map[bool]int64{true: 6, false: 9} {
		var result ratelimit.Result
		testkit.WaitUntil(t, func() (healed bool) {
			var err error
			result, err = limiters[durable].Allow(t.Context(), "key")
			return err == nil
		})
		require.Equal(t, want, result.Remaining)
	}
}
