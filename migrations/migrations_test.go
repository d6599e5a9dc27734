package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// upVariable makes the test binary a process that calls Up on the database in the variable.
const upVariable = "MIGRATIONS_TEST_UP"

// patience is how long a test waits for something that usually takes milliseconds.
const patience = 3 * time.Minute

// oddSchema has all characters that need quotes in a name: capitals, spaces, quotes, dollars and a backslash.
const oddSchema = `Odd "na'me" $$\ $function$ `

func TestMain(m *testing.M) {
	// Up must not apply an application's registered goose migrations, and must not fail because of them. They have the
	// same numbers as ours.
	goose.AddNamedMigrationContext("00002_application.go", nil, nil)

	if url := os.Getenv(upVariable); url != "" {
		if err := upInChild(url); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}

	pgtest.Main(m)
}

func upInChild(url string) error {
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		return err
	}
	defer pool.Close()
	return migrations.Up(context.Background(), pool)
}

func TestUp(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.Equal(t, latest(t), appliedVersion(t, pool))
	require.Contains(t, pgtest.Catalog(t, pool, "public"), "rate_limit_ephemeral, relation")

	// A second call changes nothing. A recreated table would have another oid.
	before := pgtest.Objects(t, pool, "public")
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.Equal(t, before, pgtest.Objects(t, pool, "public"))
}

func TestUpNeedsOneConnection(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	require.NoError(t, migrations.Up(t.Context(), pool))
	_, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	require.NoError(t, migrations.Down(t.Context(), pool))
	require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
	require.Zero(t, appliedVersion(t, pool))
}

func TestUpInEveryExecMode(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement,
		pgx.QueryExecModeCacheDescribe,
		pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()

			pool := pgtest.Empty(t).
				NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			require.NoError(t, migrations.Up(t.Context(), pool))
			require.Equal(t, latest(t), appliedVersion(t, pool))
			require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
			require.Zero(t, appliedVersion(t, pool))
		})
	}
}

func TestDownToZeroLeavesNothing(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pool := db.InSchema(t, "limits")
	empty := pgtest.Objects(t, pool, "limits")
	require.Empty(t, empty)

	// There is nothing to roll back, and Down makes no version table.
	require.NoError(t, migrations.Down(t.Context(), pool))
	require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
	require.Empty(t, pgtest.Objects(t, pool, "limits"))

	for range 2 {
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.NotEmpty(t, pgtest.Catalog(t, pool, "limits"))

		for range 2 {
			require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
			require.Zero(t, appliedVersion(t, pool))
			require.Empty(t, pgtest.Catalog(t, pool, "limits"))
		}
		_, err := pool.Exec(t.Context(), "DROP TABLE rate_limit_goose_version")
		require.NoError(t, err)
		require.Empty(t, pgtest.Objects(t, pool, "limits"))
	}
}

func TestOneByOne(t *testing.T) {
	t.Parallel()

	// Up applies all migrations, so the single steps here are run by goose itself, as an application may do.
	pool := pgtest.Empty(t).Pool
	provider := newProvider(t, pool, migrations.FS, "rate_limit_goose_version")
	sources := provider.ListSources()
	states := []map[string]string{pgtest.Catalog(t, pool, "public")}

	for _, source := range sources {
		result, err := provider.UpByOne(t.Context())
		require.NoError(t, err)
		require.Equal(t, source.Version, result.Source.Version)
		require.Equal(t, source.Version, appliedVersion(t, pool))
		require.NotEmpty(t, pgtest.Differences(states[len(states)-1], pgtest.Catalog(t, pool, "public")))
		states = append(states, pgtest.Catalog(t, pool, "public"))
	}

	for i, source := range slices.Backward(sources) {
		require.Empty(t, pgtest.Differences(states[i+1], pgtest.Catalog(t, pool, "public")))
		require.NoError(t, migrations.Down(t.Context(), pool))
		require.Empty(
			t,
			pgtest.Differences(states[i], pgtest.Catalog(t, pool, "public")),
			"Down of %s does not undo its Up",
			source.Path,
		)

		// Each migration can be applied again after it was rolled back.
		_, err := provider.UpByOne(t.Context())
		require.NoError(t, err)
		require.Empty(t, pgtest.Differences(states[i+1], pgtest.Catalog(t, pool, "public")))
		require.NoError(t, migrations.DownTo(t.Context(), pool, source.Version-1))
	}
	require.Zero(t, appliedVersion(t, pool))
	require.NoError(t, migrations.Down(t.Context(), pool))
}

func TestInAnySchema(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	require.NoError(t, migrations.Up(t.Context(), db.Pool)) // in public, which comes later in the search_path of the pools below

	schemas := []string{oddSchema, "my_ephemeral"} // the last one contains a part of a table's name
	for _, schema := range schemas {
		pool := db.InSchema(t, schema)
		status, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		require.False(t, status[0].Applied, "the version table of public is not ours")

		require.NoError(t, migrations.Up(t.Context(), pool), schema)
		require.Empty(t, pgtest.Differences(
			pgtest.WithoutSchema(
				pgtest.Catalog(t, db.Pool, "public"),
				"public",
			),
			pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, schema), schema),
		))
		require.Equal(t, latest(t), appliedVersion(t, pool))
	}

	for _, schema := range schemas {
		require.NoError(t, migrations.DownTo(t.Context(), db.InSchema(t, schema), 0))
		require.Empty(t, pgtest.Catalog(t, db.Pool, schema))
	}
	require.Equal(t, latest(t), appliedVersion(t, db.Pool))
	require.Contains(t, pgtest.Catalog(t, db.Pool, "public"), "rate_limit_ephemeral, relation")
}

func TestFunctionsSeeTheirSchemaOnly(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	for _, schema := range []string{"public", oddSchema} {
		pool := db.InSchema(t, schema)
		require.NoError(t, migrations.Up(t.Context(), pool))

		// Code with the owner's rights looks names up in pg_catalog, unless they have a schema.
		rows, err := pool.Query(t.Context(), `
			SELECT p.proname, p.prosrc, p.prosecdef, coalesce(p.proconfig, '{}'), has_function_privilege('pg_monitor', p.oid, 'EXECUTE')
			FROM pg_proc AS p
			WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = $1)`, schema)
		require.NoError(t, err)
		pinned := 0
		quoted := schema
		if schema != "public" {
			quoted = pgx.Identifier{schema}.Sanitize()
		}
		var name, body string
		var definer, public bool
		var settings []string
		_, err = pgx.ForEachRow(rows, []any{&name, &body, &definer, &settings, &public}, func() error {
			require.Equal(t, name == "rate_limit_version", public, "whether PUBLIC can execute %s", name)
			if definer {
				pinned++
				require.Contains(t, settings, "search_path=pg_catalog, pg_temp", name)
				require.Contains(t, settings, "jit=off", name)
			}
			require.Empty(
				t,
				regexp.MustCompile(`.{0,20}rate_limit_.{0,20}`).
					FindString(strings.NewReplacer(quoted+".rate_limit_", "", quoted+"._rate_limit_", "").Replace(body)),
				name,
			)
			return nil
		})
		require.NoError(t, err)
		require.NotZero(t, pinned)
	}
}

func latest(t *testing.T) int64 {
	t.Helper()
	files, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	version, err := goose.NumericComponent(files[len(files)-1])
	require.NoError(t, err)
	return version
}

// appliedVersion returns the last version that the version table records.
func appliedVersion(t *testing.T, pool *pgxpool.Pool) int64 {
	t.Helper()
	var version int64
	require.NoError(
		t,
		pool.QueryRow(t.Context(), "SELECT max(version_id) FROM rate_limit_goose_version").Scan(&version),
	)
	return version
}

// A nil pool is an error, not a panic.
func TestNilPool(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	for operation, call := range map[string]func() error{
		"up":        func() error { return migrations.Up(ctx, nil) },
		"down":      func() error { return migrations.Down(ctx, nil) },
		"down to 0": func() error { return migrations.DownTo(ctx, nil, 0) },
		"status":    func() error { _, err := migrations.Status(ctx, nil); return err },
	} {
		require.EqualError(t, call(), "ratelimit/migrations: "+operation+": the pool is nil")
	}
}

// If Postgres cannot be reached, the error begins with what to do.
func TestUpWithoutPostgres(t *testing.T) {
	t.Parallel()
	pool, err := pgxpool.New(t.Context(), "host="+t.TempDir())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	err = migrations.Up(t.Context(), pool)
	require.ErrorContains(t, err, "ratelimit/migrations: up: cannot connect to Postgres; check the pool's connection string")
	_, ok := errors.AsType[*pgconn.ConnectError](err)
	require.True(t, ok)
}
