package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestMigrateUpAndDown(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	exe(t, db, `CREATE SCHEMA "of somebody's"`)
	before := objects(t, db)
	all, err := readMigrations()
	require.NoError(t, err)
	applied := func(args ...string) (n int) {
		for _, migration := range decode[[]migrationStatus](t, invoke(t, db.URL, append(args, "--schema", "of somebody's", "--json")...)) {
			require.NotEmpty(t, migration.Name)
			if migration.AppliedAt != nil {
				n++
			}
		}
		return n
	}

	require.Zero(t, applied("migrate", "status"))
	require.Equal(t, before, objects(t, db), "status writes")
	require.Len(t, all, applied("migrate", "up"))
	require.Len(t, all, applied("migrate", "up"))
	require.Len(t, all, applied("migrate", "status"))
	require.Equal(t, "of somebody's", scalar[string](t, db, "SELECT schemaname FROM pg_tables WHERE tablename = 'rate_limit_durable'"))
	require.Contains(t, invoke(t, db.URL, "migrate", "status").done(t), "create_tables     no\n", "in public there are none")

	o := invoke(t, db.URL, "migrate", "down", "--schema", "of somebody's")
	o.complains(t, exitUsage, "no terminal", "--yes")
	require.Len(t, all, applied("migrate", "status"))
	require.Len(t, all, applied("migrate", "down", "--yes")+1)
	require.Zero(t, applied("migrate", "down", "--yes", "--to", "0"))
	exe(t, db, `DROP TABLE "of somebody's".rate_limit_goose_version`)
	require.Equal(t, before, objects(t, db))
}

// What migrate print prints does, in another tool, what migrate up does.
func TestMigratePrint(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	before := objects(t, db)
	apply := func(args ...string) {
		_, err := db.Pool.Exec(t.Context(), invoke(t, "", append([]string{"migrate", "print"}, args...)...).done(t), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
	apply()
	o := invoke(t, db.URL, "doctor")
	require.Contains(t, o.done(t), "up to date, at version 3")
	apply("--down")
	require.Equal(t, before, objects(t, db))

	all, err := readMigrations()
	require.NoError(t, err)
	for _, migration := range all { // one by one
		apply(fmt.Sprint(migration.Version))
	}
	require.Contains(t, invoke(t, db.URL, "doctor").done(t), "up to date, at version 3")
	apply("--down")
	require.Equal(t, before, objects(t, db))

	for i, printed := range decode[[]migration](t, invoke(t, "", "migrate", "print", "--json")) {
		require.Equal(t, all[i].Version, printed.Version)
		require.NotContains(t, printed.SQL, "+goose")
		require.True(t, strings.HasSuffix(printed.SQL, ";\n"), printed.SQL)
	}
}

func TestMigrateStatusOfANewerVersion(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	exe(t, db, "INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)")
	require.Contains(t, invoke(t, db.URL, "migrate", "status").done(t), "99999    (of a newer version of this command)")
	invoke(t, db.URL, "migrate", "down", "--yes").complains(t, exitFailed, "newer version of this module")
}
