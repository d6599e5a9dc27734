package migrations_test

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestManyAtOnce(t *testing.T) {
	t.Parallel()

	const count = 8
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	check := func(t *testing.T, db *pgtest.DB) {
		t.Helper()
		require.Equal(t, latest(t), appliedVersion(t, db.Pool))

		// Each migration was applied once.
		var rows int64
		require.NoError(
			t,
			db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_goose_version WHERE version_id > 0").
				Scan(&rows),
		)
		require.EqualValues(t, len(newProvider(t, db.Pool, migrations.FS, "t").ListSources()), rows)

		var locks int
		require.NoError(t, db.Pool.QueryRow(t.Context(), `
			SELECT count(*)
			FROM pg_locks
			WHERE locktype = 'advisory'
				AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&locks))
		require.Zero(t, locks)
	}

	t.Run("pools", func(t *testing.T) {
		t.Parallel()

		db := pgtest.Empty(t)
		start := make(chan struct{})
		errs := make(chan error, count)
		for range count {
			pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
			require.NoError(t, pool.Ping(t.Context()))
			go func() {
				<-start
				errs <- migrations.Up(ctx, pool)
			}()
		}
		close(start)
		for range count {
			require.NoError(t, <-errs)
		}
		check(t, db)
	})

	t.Run("processes", func(t *testing.T) {
		t.Parallel()

		db := pgtest.Empty(t)
		commands := make([]*exec.Cmd, count)
		outputs := make([]bytes.Buffer, count)
		for i := range commands {
			commands[i] = exec.CommandContext(ctx, os.Args[0])
			commands[i].Env = append(os.Environ(), upVariable+"="+db.URL)
			commands[i].Stdout, commands[i].Stderr = &outputs[i], &outputs[i]
			require.NoError(t, commands[i].Start())
		}
		for i, command := range commands {
			require.NoError(t, command.Wait(), outputs[i].String())
			require.Empty(t, outputs[i].String(), "Up prints or logs")
		}
		check(t, db)
	})
}

func TestUpWaitsForTheLock(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	other, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer other.Release()
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_lock($1)", migrations.LockID)
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	waits := make(chan error, 1)
	go func() { waits <- migrations.Up(ctx, db.Pool) }()
	asked := map[time.Time]bool{} // the third time, after preparing the statement and the first answer, it knows that the lock is taken
	require.Eventually(t, func() bool {
		var at time.Time
		err := db.Pool.QueryRow(t.Context(), `SELECT query_start FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE '%pg_try_advisory_lock%' AND pid <> pg_backend_pid()`).Scan(&at)
		asked[at] = err == nil
		return err == nil && len(asked) > 3
	}, patience, 5*time.Millisecond)
	cancel()
	err = <-waits
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "ratelimit/migrations: up: ")
	require.ErrorContains(t, err, "another session migrates")

	// A statement_timeout does not end the wait, and Status does not wait.
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["statement_timeout"] = "2s" })
	up := make(chan error, 1)
	go func() { up <- migrations.Up(t.Context(), pool) }()
	require.Never(t, func() bool { return len(up) > 0 }, 2500*time.Millisecond, 10*time.Millisecond)
	status, err := migrations.Status(t.Context(), db.Pool)
	require.NoError(t, err)
	require.False(t, status[0].Applied)

	_, err = other.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", migrations.LockID)
	require.NoError(t, err)
	require.NoError(t, <-up)

	// With nothing to do, nobody waits.
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_lock($1)", migrations.LockID)
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", migrations.LockID)
	require.NoError(t, err)
}
