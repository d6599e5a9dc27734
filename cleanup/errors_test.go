package cleanup

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// requireKind requires that RunOnce returns an error of the given kind. If waiting does not help, Run must return this
// error too.
func requireKind(t *testing.T, db ratelimit.DBTX, config Config, kind error, says string) {
	t.Helper()
	sweeper := newSweeper(t, db, config)
	result, err := sweeper.RunOnce(t.Context())
	var storeErr *ratelimit.StoreError
	require.ErrorAs(t, err, &storeErr)
	require.ErrorIs(t, err, kind)
	require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
	require.ErrorContains(t, err, says)
	require.Zero(t, result.Deleted)
	require.False(t, result.Complete)
	if errors.Is(err, ratelimit.ErrNotMigrated) || errors.Is(err, ratelimit.ErrNotPermitted) {
		require.ErrorIs(t, sweeper.Run(t.Context()), kind)
	}
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	requireKind(t, db.Pool, Config{}, ratelimit.ErrNotMigrated, "migrations.Up(ctx, pool)")
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	requireKind(t, db.Pool, Config{Schema: "nowhere"}, ratelimit.ErrNotMigrated, "Config.Schema")
	require.True(t, runOnce(t, newSweeper(t, db.Pool, Config{})).Complete)

	// An older release has migrated this database.
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 1))
	requireKind(t, db.Pool, Config{}, ratelimit.ErrNotMigrated, "call migrations.Up")
}

func TestNotPermitted(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM CURRENT_USER")
	superuser := pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		if superuser { // has all rights
			config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		}
	})
	requireKind(t, pool, Config{}, ratelimit.ErrNotPermitted, "GRANT")
	requireKind(t, pool, Config{Schema: "pg_toast"}, ratelimit.ErrNotPermitted, "USAGE")

	// A sweeper's role needs only EXECUTE on the function, and no right on the tables.
	if !superuser {
		return
	}
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION rate_limit_sweep TO pg_monitor")
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 3, t0)
	require.EqualValues(t, 3, runOnce(t, newSweeper(t, pool, Config{})).Deleted)
	for _, sql := range []string{"DELETE FROM rate_limit_ephemeral", "SELECT FROM rate_limit_durable", "SELECT FROM rate_limit_sweeper"} {
		_, err := pool.Exec(t.Context(), sql)
		require.ErrorContains(t, err, "SQLSTATE 42501", sql)
	}
}

func TestReadOnly(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 3, t0)
	pool := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" },
	)
	requireKind(t, pool, Config{}, ratelimit.ErrReadOnly, "target_session_attrs")
	requireKind(t, pool, Config{}, ratelimit.ErrUnavailable, "")
	require.EqualValues(t, 3, rowCount(t, db.Pool, pgtest.Table(false)))
}

func TestUnreachable(t *testing.T) {
	t.Parallel()

	address := testkit.FreeAddress(t)
	pool, err := pgxpool.New(t.Context(), "postgres://someone:secret@"+address+"/nothing?sslmode=disable")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	requireKind(t, pool, Config{}, ratelimit.ErrUnavailable, "")
	_, err = newSweeper(t, pool, Config{}).RunOnce(t.Context())
	require.NotContains(t, err.Error(), "secret")
}

// If a table is locked, a sweep ends when its lock_timeout is over. The earlier batches of the sweep stay committed.
func TestTableThatIsLocked(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 3, t0)
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 3, t0)
	somebody := pgtest.Begin(t, db)
	lock := func(int64, int64) { pgtest.Exec(t, somebody, "LOCK TABLE rate_limit_durable") }
	result, err := newSweeper(t, db.Pool, Config{BatchSize: 3, Share: 1, Progress: lock}).RunOnce(t.Context())
	require.ErrorIs(t, err, ratelimit.ErrTimeout)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55P03", pgErr.Code) // lock_timeout of the server
	require.EqualValues(t, 3, result.Deleted)
	require.Equal(t, 1, result.Batches)
	require.NoError(t, somebody.Rollback(t.Context()))
	require.Zero(t, rowCount(t, db.Pool, pgtest.Table(false)))
	require.EqualValues(t, 3, rowCount(t, db.Pool, pgtest.Table(true)))
}

func TestContextEndsThePass(t *testing.T) {
	t.Parallel()

	for _, when := range []string{"before", "in a pause", "in a batch"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 30, t0)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			want, config := int64(0), Config{BatchSize: 10}
			switch when {
			case "before":
				cancel()
			case "in a pause":
				want = 10
				config.Share = 1e-9
				config.Progress = func(int64, int64) { cancel() }
			case "in a batch":
				pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_sweep SET lock_timeout = 0")
				somebody := pgtest.Begin(t, db)
				pgtest.Exec(t, somebody, "LOCK TABLE rate_limit_ephemeral")
				defer somebody.Rollback(t.Context())
			}
			began := time.Now()
			sweeper := newSweeper(t, db.Pool, config)
			wait := testkit.Later(func() (Result, error) { return sweeper.RunOnce(ctx) })
			if when == "in a batch" {
				pgtest.WaitUntilBlocked(t, db.Pool, 1)
				cancel()
			}
			result, err := wait()
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorContains(t, err, "ratelimit: ")
			require.Less(t, time.Since(began), patience)
			require.Equal(t, want, result.Deleted)
			require.False(t, result.Complete)
			require.NoError(t, newSweeper(t, db.Pool, config).Run(ctx))
		})
	}
}
