package migrations_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/lockholders"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestManyAtOnce(t *testing.T) {
	t.Parallel()

	const count = 4
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
			pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
			require.NoError(t, pool.Ping(t.Context()))
			go func() {
				<-start
				errs <- migrations.Up(t.Context(), pool)
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
			commands[i] = exec.CommandContext(t.Context(), os.Args[0])
			commands[i].Env = append(os.Environ(), upVariable+"="+db.URL)
			commands[i].Stdout, commands[i].Stderr = &outputs[i], &outputs[i]
			require.NoError(t, commands[i].Start())
		}
		for i, command := range commands {
			require.NoError(t, command.Wait(), outputs[i].String())
			for line := range strings.Lines(outputs[i].String()) { // processes on a slow machine may log that they wait
				require.Contains(t, line, "waiting for a lock", "Up prints or logs")
			}
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
	// The first two attempts prepare the statement and read its first answer. After the third attempt, Up knows that
	// the lock is taken.
	asked := map[time.Time]bool{}
	require.Eventually(t, func() bool {
		var at time.Time
		err := db.Pool.QueryRow(t.Context(), `SELECT query_start FROM pg_stat_activity
			WHERE datname = current_database() AND query LIKE '%pg_try_advisory_xact_lock%' AND pid <> pg_backend_pid()`).Scan(&at)
		asked[at] = err == nil
		return err == nil && len(asked) > 3
	}, patience, 10*time.Millisecond)
	cancel()
	err = <-waits
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "ratelimit/migrations: up: ")
	require.ErrorContains(t, err, "another session migrates")
	require.ErrorContains(t, err, fmt.Sprintf("process %d (", other.Conn().PgConn().PID()))

	// statement_timeout does not end the wait. Status does not wait.
	pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["statement_timeout"] = "2s" })
	up := make(chan error, 1)
	go func() { up <- migrations.Up(t.Context(), pool) }()
	require.Never(t, func() bool { return len(up) > 0 }, 2500*time.Millisecond, 10*time.Millisecond)
	status, err := migrations.Status(t.Context(), db.Pool)
	require.NoError(t, err)
	require.False(t, status[0].Applied)

	_, err = other.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", migrations.LockID)
	require.NoError(t, err)
	require.NoError(t, <-up)

	// If no migration is missing, Up does not wait for the lock.
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_lock($1)", migrations.LockID)
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	_, err = other.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", migrations.LockID)
	require.NoError(t, err)
}

// After a second, a waiting migration says who holds its lock.
func TestNobodyWaitsInSilence(t *testing.T) {
	t.Parallel()

	const prepare = "PREPARE TRANSACTION 'it''s'"
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"max_prepared_transactions": "2"}})
	for name, test := range map[string]struct {
		hold, end string
		state     string
		run       func(context.Context, migrations.DB) error
	}{
		"a lock that a pooler has left behind": {
			fmt.Sprintf("SELECT pg_advisory_lock(%d)", migrations.LockID), "SELECT pg_advisory_unlock_all()", "idle",
			func(ctx context.Context, pool migrations.DB) error { return migrations.DownTo(ctx, pool, 0) },
		},
		"another migration": {
			fmt.Sprintf("BEGIN; SELECT pg_advisory_xact_lock(%d)", migrations.LockID), "ROLLBACK", "idle in transaction",
			migrations.Down,
		},
		"a reader": {"BEGIN; TABLE rate_limit_durable", "COMMIT", "idle in transaction",
			func(ctx context.Context, pool migrations.DB) error { return migrations.DownTo(ctx, pool, 0) }},
		"somebody at the version table": {"BEGIN; LOCK TABLE rate_limit_goose_version", "COMMIT", "idle in transaction",
			func(ctx context.Context, pool migrations.DB) error { return migrations.Up(ctx, pool) }},
		"a prepared transaction": {"BEGIN; LOCK TABLE rate_limit_durable; " + prepare, "ROLLBACK PREPARED 'it''s'", "",
			func(ctx context.Context, pool migrations.DB) error { return migrations.DownTo(ctx, pool, 0) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			db := &pgtest.DB{URL: server.URL()}
			if strings.Contains(test.hold, prepare) {
				pool, err := pgxpool.New(t.Context(), db.URL)
				require.NoError(t, err)
				t.Cleanup(pool.Close)
				db.Pool = pool
				require.NoError(t, migrations.Up(t.Context(), db.Pool))
			} else {
				db = pgtest.New(t)
			}
			config, err := pgx.ParseConfig(db.URL)
			require.NoError(t, err)
			config.RuntimeParams["application_name"] = "night shift"
			config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
			holder, err := pgx.ConnectConfig(t.Context(), config)
			require.NoError(t, err)
			defer holder.Close(context.WithoutCancel(t.Context()))
			pgtest.Exec(t, holder, test.hold)

			said, done := make(chan string, 100), make(chan error, 1)
			ctx := lockholders.To(t.Context(), func(sentence string) { said <- sentence })
			go func() { done <- test.run(ctx, db.Pool) }()
			const since = ` since \d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ\)`
			want := fmt.Sprintf(`^waiting for a lock of process %d \(application "night shift", %s,`+since,
				holder.PgConn().PID(), test.state)
			ends := fmt.Sprintf("SELECT pg_terminate_backend(%d)", holder.PgConn().PID())
			if test.state == "" {
				want, ends = `^waiting for a lock of prepared transaction "it's" \(`+since[1:], test.end
			}
			sentence := <-said
			require.Regexp(t, want, sentence)
			require.True(t, strings.HasSuffix(sentence, ": "+ends), sentence)
			require.NotContains(t, sentence, "LOCK TABLE") // a statement may contain keys
			pgtest.Exec(t, holder, test.end)
			require.NoError(t, <-done)
			require.Empty(t, said, "it was said twice")
		})
	}
}

// By default, the message about the lock goes to slog.Default.
//
//nolint:paralleltest // it replaces slog.Default
func TestTheLogSaysWhoHasTheLock(t *testing.T) {
	db := pgtest.New(t)
	holder := pgtest.Connect(t, db)
	pgtest.Exec(t, holder, "SELECT pg_advisory_lock($1)", migrations.LockID)
	journal, before := new(testkit.Journal), slog.Default()
	slog.SetDefault(journal.Logger())
	defer slog.SetDefault(before)
	done := make(chan error, 1)
	go func() { done <- migrations.Down(t.Context(), db.Pool) }()
	testkit.WaitUntil(t, func() bool { return strings.Contains(journal.String(), "waiting for a lock of process") })
	pgtest.Exec(t, holder, "SELECT pg_advisory_unlock($1)", migrations.LockID)
	require.NoError(t, <-done)
}

// Behind a pooler that changes the session with each transaction, migrations keep no lock.
func TestMigrationsThroughPgBouncer(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	config, err := pgxpool.ParseConfig(pgtest.PgBouncer(t, db, "transaction", 20))
	require.NoError(t, err)
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	for range 2 { // each in another session
		start := make(chan struct{})
		errs := make(chan error, 4)
		for range cap(errs) {
			pool, err := pgxpool.NewWithConfig(t.Context(), config.Copy())
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			require.NoError(t, pool.Ping(t.Context()))
			go func() {
				<-start
				errs <- migrations.Up(t.Context(), pool)
			}()
		}
		close(start)
		for range cap(errs) {
			require.NoError(t, <-errs)
		}
		require.Zero(t, pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
			AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
		require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 0))
	}
}
