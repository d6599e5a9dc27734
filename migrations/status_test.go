package migrations_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// recorder keeps the statements that a pool sent.
type recorder struct{ all []string }

func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	r.all = append(r.all, data.SQL)
	return ctx
}

func (*recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestStatus(t *testing.T) {
	t.Parallel()

	// The session's time zone is far from UTC. In such a session goose reads local times as UTC.
	db := pgtest.Empty(t)
	pool := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["timezone"] = "Pacific/Kiritimati" },
	)

	var before, after time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&before))

	want := []migrations.Migration{
		{Version: 1, Name: "create_tables"},
		{Version: 2, Name: "create_functions"},
		{Version: 3, Name: "create_triggers"},
	}
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, want, status)
	require.Empty(t, pgtest.Objects(t, pool, "public"), "Status writes")

	require.NoError(t, migrations.Up(t.Context(), pool))
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&after))
	status, err = migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	for i := range want {
		require.WithinRange(t, status[i].AppliedAt, before, after)
		want[i].Applied, want[i].AppliedAt = true, status[i].AppliedAt
	}
	require.Equal(t, want, status)

	require.NoError(t, migrations.Down(t.Context(), pool))
	want[len(want)-1] = migrations.Migration{Version: 3, Name: "create_triggers"}
	status, err = migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, want, status)
}

func TestDatabaseOfANewerVersion(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	require.NoError(t, migrations.Up(t.Context(), pool))
	_, err := pool.Exec(
		t.Context(),
		"INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)",
	)
	require.NoError(t, err)

	require.NoError(t, migrations.Up(t.Context(), pool))
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	newest := status[len(status)-1]
	require.EqualValues(t, 99999, newest.Version)
	require.True(t, newest.Applied)
	require.Empty(t, newest.Name)

	for _, err := range []error{migrations.Down(t.Context(), pool), migrations.DownTo(t.Context(), pool, 0)} {
		require.ErrorIs(t, err, goose.ErrVersionNotFound)
		require.ErrorContains(t, err, "newer version of this module")
	}
	require.EqualValues(t, 99999, appliedVersion(t, pool))
}

func TestErrorsSayWhatToDo(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	nowhere := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "nowhere" },
	)
	_, err := migrations.Status(t.Context(), nowhere)
	require.ErrorContains(t, err, "ratelimit/migrations: status: no schema that search_path names exists, or this role lacks USAGE on it")
	require.ErrorContains(t, migrations.Up(t.Context(), nowhere), "ratelimit/migrations: up: no schema")
	require.ErrorContains(t, migrations.Down(t.Context(), nowhere), "ratelimit/migrations: down: no schema")
	require.ErrorContains(t, migrations.DownTo(t.Context(), nowhere, 0), "ratelimit/migrations: down to 0: no schema")

	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	require.ErrorContains(t, migrations.DownTo(t.Context(), db.Pool, -1), "invalid version")
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 0))

	_, err = db.Pool.Exec(t.Context(), "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	require.NoError(t, err)
	unprivileged := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = "pg_monitor" },
	)
	require.ErrorContains(t, migrations.Up(t.Context(), unprivileged), "the user needs CREATE on the schema")
}

// A proxy for shards decides nothing itself. A database with tables is no proxy, even if a stranger makes such
// functions.
func TestProxyIsNotMigrated(t *testing.T) {
	t.Parallel()

	const function = "CREATE FUNCTION rate_limit_shards() RETURNS integer LANGUAGE sql AS 'SELECT 4'"
	pool := pgtest.Empty(t).Pool
	pgtest.Exec(t, pool, function)
	before := pgtest.Objects(t, pool)
	_, err := migrations.Status(t.Context(), pool)
	for _, err := range []error{err, migrations.Up(t.Context(), pool), migrations.Down(t.Context(), pool),
		migrations.DownTo(t.Context(), pool, 0)} {
		require.ErrorContains(t, err, "a proxy of shards, and has no tables: migrate each of the shards")
	}
	require.Equal(t, before, pgtest.Objects(t, pool))

	// An application that migrates at each start may do so on a proxy of the same release.
	version := func(n int) string {
		return fmt.Sprintf("CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql "+
			"AS 'SELECT %d::bigint'", n)
	}
	pgtest.Exec(t, pool, version(3))
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.ErrorContains(t, migrations.Down(t.Context(), pool), "a proxy of shards")
	for _, other := range []int{2, 4} {
		pgtest.Exec(t, pool, version(other))
		require.ErrorContains(t, migrations.Up(t.Context(), pool), "a proxy of shards")
	}

	pool = pgtest.New(t).Pool
	pgtest.Exec(t, pool, function)
	require.NoError(t, migrations.Up(t.Context(), pool))
}

// Catalog queries are not compiled. With planner settings that make them look expensive, compiling would take seconds.
func TestNothingIsCompiled(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	sent := &recorder{}
	pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = sent })
	require.NoError(t, migrations.Up(t.Context(), pool))
	_, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	transactions := 0
	for i, sql := range sent.all {
		if strings.HasPrefix(sql, "begin") {
			require.Equal(t, "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config('jit', 'off', true)", sent.all[i+1])
			transactions++
		}
	}
	require.Greater(t, transactions, 3)
}
