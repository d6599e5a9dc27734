package migrations_test

import (
	"embed"
	"fmt"
	"io/fs"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// applicationFS has an application's own migrations, with the same numbers as ours.
//
//go:embed testdata/application/*.sql
var applicationFS embed.FS

func TestNextToTheApplicationsOwnGoose(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	files, err := fs.Sub(applicationFS, "testdata/application")
	require.NoError(t, err)
	application := newProvider(t, pool, files, goose.DefaultTablename)
	_, err = application.UpByOne(t.Context())
	require.NoError(t, err)

	// The application's migrations and ours may run at the same time.
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	locker, err := lock.NewPostgresSessionLocker()
	require.NoError(t, err)
	require.NoError(t, locker.SessionLock(t.Context(), conn))
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.NoError(t, locker.SessionUnlock(t.Context(), conn))
	require.NoError(t, conn.Close())
	require.Equal(t, latest(t), appliedVersion(t, pool))

	_, err = application.Up(t.Context())
	require.NoError(t, err)
	require.NoError(t, migrations.DownTo(t.Context(), pool, 0))

	current, target, err := application.GetVersions(t.Context())
	require.NoError(t, err)
	require.Equal(t, target, current)
	require.Contains(t, pgtest.Catalog(t, pool, "public"), "application, relation")
}

// Up adopts the migrations that goose applied with its own table. That table stays unchanged.
func TestWithTheGooseCommandsDefaultTable(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	provider := newProvider(t, pool, migrations.FS, goose.DefaultTablename)
	_, err := provider.Up(t.Context())
	require.NoError(t, err)
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	for _, migration := range status {
		require.True(t, migration.Applied)
		require.Zero(t, migration.AppliedAt)
	}
	require.NotContains(t, fmt.Sprint(pgtest.Objects(t, pool, "public")), "rate_limit_goose_version")

	require.NoError(t, migrations.Up(t.Context(), pool))
	requireApplied(t, pool, latest(t))
	require.NoError(t, migrations.Down(t.Context(), pool))
	requireApplied(t, pool, latest(t)-1)
	current, target, err := provider.GetVersions(t.Context())
	require.NoError(t, err)
	require.Equal(t, target, current)

	// If goose has applied only some of the migrations, Up applies the rest.
	require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
	pgtest.Exec(t, pool, "DROP TABLE goose_db_version, rate_limit_goose_version")
	_, err = newProvider(t, pool, migrations.FS, goose.DefaultTablename).UpTo(t.Context(), 2)
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), pool))
	requireApplied(t, pool, latest(t))
}

// newProvider returns goose as the goose command or an application uses it.
func newProvider(t *testing.T, pool *pgxpool.Pool, files fs.FS, table string) *goose.Provider {
	t.Helper()
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(table), goose.WithDisableGlobalRegistry(true))
	require.NoError(t, err)
	return provider
}

// Logical replication copies the rows of the version table, but does not advance its sequence.
func TestSequenceBehindTheVersions(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	pgtest.Exec(t, pool, "SELECT setval(pg_get_serial_sequence('rate_limit_goose_version', 'id'), 1)")
	require.NoError(t, migrations.DownTo(t.Context(), pool, latest(t)-1))
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.Equal(t, latest(t)+1, pgtest.Scalar[int64](t, pool, "SELECT count(*) FROM rate_limit_goose_version"))
}
