package main

import (
	"fmt"
	"net/url"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/doctor"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/upkeep"
)

func TestMigrateUpAndDown(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `CREATE SCHEMA "of somebody's"`)
	before := pgtest.Objects(t, db.Pool)
	all := cli.ReadMigrations()
	applied := func(args ...string) (n int) {
		for _, migration := range decode[[]upkeep.MigrationStatus](t, invoke(t, db.URL, append(args, "--schema", "of somebody's", "--json")...)) {
			require.NotEmpty(t, migration.Name)
			if migration.AppliedAt != nil {
				n++
			}
		}
		return n
	}

	require.Zero(t, applied("migrate", "status"))
	require.Equal(t, before, pgtest.Objects(t, db.Pool), "status writes")
	require.Len(t, all, applied("migrate", "up"))
	require.Len(t, all, applied("migrate", "up"))
	require.Equal(
		t,
		"of somebody's",
		pgtest.Scalar[string](t, db.Pool, "SELECT schemaname FROM pg_tables WHERE tablename = 'rate_limit_durable'"),
	)
	require.Contains(
		t,
		invoke(t, db.URL, "migrate", "status").done(t),
		"create_tables     no\n",
		"in public there are none",
	)

	o := invoke(t, db.URL, "migrate", "down", "--schema", "of somebody's")
	o.complains(t, exitUsage, "no terminal", "--yes")
	require.Len(t, all, applied("migrate", "status"))
	require.Len(t, all, applied("migrate", "down", "--yes")+1)
	require.Zero(t, applied("migrate", "down", "--yes", "--to", "0"))
	pgtest.Exec(t, db.Pool, `DROP TABLE "of somebody's".rate_limit_goose_version`)
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
}

// If another tool runs the output of 'migrate print', the effect is the same as that of 'migrate up'.
func TestMigratePrint(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // Postgres 14 grants CREATE to PUBLIC
	before := pgtest.Objects(t, db.Pool)
	apply := func(args ...string) {
		_, err := db.Pool.Exec(
			t.Context(),
			invoke(t, "", append([]string{"migrate", "print"}, args...)...).done(t),
			pgx.QueryExecModeSimpleProtocol,
		)
		require.NoError(t, err)
	}
	apply()
	require.Contains(t, invoke(t, db.URL, "doctor").done(t), "up to date, at version 3")
	opened := open(t, db.URL)
	requireUpToDate(t, opened)
	require.Regexp(t, `(?m)^3 +create_triggers +yes$`, invoke(t, db.URL, "migrate", "status").done(t))
	apply("--down")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))

	all := cli.ReadMigrations()
	for _, migration := range all { // one migration at a time
		apply(fmt.Sprint(migration.Version))
	}
	requireUpToDate(t, opened)
	apply("--down")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))

	// At every version, 'migrate up' adopts printed migrations, and 'down' rolls back. status, doctor and tables agree.
	for _, migration := range all {
		apply(fmt.Sprint(migration.Version))
		listed := decode[[]upkeep.MigrationStatus](t, invoke(t, db.URL, "migrate", "up", "--json"))
		require.Len(t, listed, len(all))
		for _, one := range listed {
			require.NotZero(t, *one.AppliedAt)
		}
		requireUpToDate(t, opened)
		invoke(t, db.URL, "migrate", "down", "--to", fmt.Sprint(migration.Version), "--yes").done(t)
		pgtest.Exec(t, db.Pool, "DROP TABLE rate_limit_goose_version")
	}
	invoke(t, db.URL, "migrate", "down", "--to", "0", "--yes").done(t)
	pgtest.Exec(t, db.Pool, "DROP TABLE rate_limit_goose_version")
	require.Equal(t, before, pgtest.Objects(t, db.Pool))

	// Up does not adopt changed objects.
	apply()
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_durable DROP COLUMN scale")
	invoke(t, db.URL, "migrate", "up").complains(t, exitFailed, "table rate_limit_durable lacks column scale")

	for i, printed := range decode[[]cli.Migration](t, invoke(t, "", "migrate", "print", "--json")) {
		require.Equal(t, all[i].Version, printed.Version)
		require.NotContains(t, printed.SQL, "+goose")
		require.True(t, strings.HasSuffix(printed.SQL, ";\n"), printed.SQL)
	}
}

// requireUpToDate requires what doctor requires of the migrations and of the objects that they make.
func requireUpToDate(t *testing.T, db cli.DB) {
	t.Helper()
	e := &doctor.Examination{DB: db}
	require.NoError(t, e.ReadServer(t.Context()))
	f, err := e.CheckMigrations(t.Context())
	require.NoError(t, err)
	require.Equal(t, cli.Fine, f.Level)
	require.Contains(t, f.Found, "up to date, at version 3")
	made, ok := catalog.Made(e.Applied)
	require.True(t, ok)
	require.Empty(t, e.Found.Differences(made, e.Server.Owner))
}

func TestMigrateStatusOfANewerVersion(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)")
	require.Contains(t, invoke(t, db.URL, "migrate", "status").done(t), "99999    (of a newer version of this command)")
	invoke(t, db.URL, "migrate", "down", "--yes").complains(t, exitFailed, "newer version of this module")
}

// The server would misread this schema name. The command gives advice, and changes nothing.
func TestSchemaThatTheEncodingGarbles(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `CREATE SCHEMA "été"`)
	latin1, err := url.Parse(db.URL)
	require.NoError(t, err)
	values := latin1.Query()
	values.Set("client_encoding", "LATIN1")
	latin1.RawQuery = values.Encode()
	for _, args := range [][]string{
		{"migrate", "up"}, {"migrate", "status"}, {"doctor"}, {"limits"}, {"peek", "login", "a", "--policy=fixed 1/1m"},
	} {
		o := invoke(t, latin1.String(), append(args, "--schema", "été")...)
		o.complains(t, exitFailed, "client_encoding is LATIN1", "set it to UTF8, or give the schema a name of ASCII letters")
	}
	invoke(t, db.URL, "migrate", "up", "--schema", "été").done(t)
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET search_path = "été"', current_database()); END $$`)
	invoke(t, latin1.String(), "limits").complains(t, exitFailed, "client_encoding is LATIN1")
	invoke(t, db.URL, "limits").done(t)
}
