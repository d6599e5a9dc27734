package migrations_test

import (
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// script returns the Up or Down half of a migration, as SQL that another tool runs.
func script(t *testing.T, version int64, down bool) string {
	t.Helper()
	files, err := fs.Glob(migrations.FS, fmt.Sprintf("%05d_*.sql", version))
	require.NoError(t, err)
	require.Len(t, files, 1)
	content, err := fs.ReadFile(migrations.FS, files[0])
	require.NoError(t, err)
	up, back, ok := strings.Cut(string(content), "-- +goose Down\n")
	require.True(t, ok)
	if down {
		return back
	}
	return up
}

// scripted applies the migrations up to a version, and keeps no record of them.
func scripted(t *testing.T, pool *pgxpool.Pool, version int64) {
	t.Helper()
	for v := int64(1); v <= version; v++ {
		_, err := pool.Exec(t.Context(), script(t, v, false), pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
	}
}

func requireApplied(t *testing.T, pool *pgxpool.Pool, version int64) {
	t.Helper()
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	for _, migration := range status {
		require.Equal(t, migration.Version <= version, migration.Applied, migration)
		require.Equal(t, migration.Applied, !migration.AppliedAt.IsZero(), migration)
	}
	require.Equal(t, version, appliedVersion(t, pool))
}

// ours returns the catalog of a schema, without the version table of the plain goose command.
func ours(t *testing.T, pool *pgxpool.Pool, schema string) map[string]string {
	t.Helper()
	all := pgtest.Catalog(t, pool, schema)
	maps.DeleteFunc(all, func(object, _ string) bool { return strings.Contains(object, "goose_db_version") })
	return all
}

// Up continues after whatever tool has made the tables and functions. Down and goose can roll back afterwards. Each tool
// and each version occurs.
func TestUpAdoptsWhatAnotherToolHasMade(t *testing.T) {
	t.Parallel()

	of := map[string]int64{
		"printed": 1, "goose with its own table": 2, "a part by Up, the rest printed": 3, "by Up, a part rolled back as printed": 0,
	}
	upAdopts(t, func(tool string, version int64) bool { return version == of[tool] })
}

// Up adopts each version that each tool has made.
func TestThoroughAdoption(t *testing.T) {
	t.Parallel()

	upAdopts(t, func(string, int64) bool { return true })
}

// upAdopts adopts those versions by other tools that the function tries says.
func upAdopts(t *testing.T, tries func(tool string, version int64) bool) {
	t.Helper()
	fresh := pgtest.New(t)
	for name, apply := range map[string]func(t *testing.T, pool *pgxpool.Pool, version int64){
		"printed": scripted,
		"goose with its own table": func(t *testing.T, pool *pgxpool.Pool, version int64) {
			t.Helper()
			_, err := newProvider(t, pool, migrations.FS, goose.DefaultTablename).UpTo(t.Context(), version)
			require.NoError(t, err)
		},
		"a part by Up, the rest printed": func(t *testing.T, pool *pgxpool.Pool, version int64) {
			t.Helper()
			require.NoError(t, migrations.Up(t.Context(), pool))
			require.NoError(t, migrations.DownTo(t.Context(), pool, min(version, 1)))
			for v := int64(2); v <= version; v++ {
				pgtest.Exec(t, pool, script(t, v, false), pgx.QueryExecModeSimpleProtocol)
			}
		},
		"by Up, a part rolled back as printed": func(t *testing.T, pool *pgxpool.Pool, version int64) {
			t.Helper()
			require.NoError(t, migrations.Up(t.Context(), pool))
			for v := latest(t); v > version; v-- {
				pgtest.Exec(t, pool, script(t, v, true), pgx.QueryExecModeSimpleProtocol)
			}
		},
	} {
		for version := latest(t); version >= 0; version-- {
			if !tries(name, version) {
				continue
			}
			t.Run(fmt.Sprintf("%s, version %d", name, version), func(t *testing.T) {
				t.Parallel()

				for _, up := range []bool{true, false} {
					pool := pgtest.Empty(t).InSchema(t, oddSchema)
					if version > 0 || name != "goose with its own table" { // for this tool, version 0 means all migrations
						apply(t, pool, version)
					}
					want := version
					if up {
						require.NoError(t, migrations.Up(t.Context(), pool))
						want = latest(t)
						requireApplied(t, pool, want)
						require.Empty(t, pgtest.Differences(
							pgtest.WithoutSchema(ours(t, fresh.Pool, "public"), "public"),
							pgtest.WithoutSchema(ours(t, pool, oddSchema), oddSchema)))
						require.NoError(t, migrations.Up(t.Context(), pool))
					}
					if want > 0 { // Down adopts too
						require.NoError(t, migrations.Down(t.Context(), pool))
						requireApplied(t, pool, want-1)
					}
					require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
					require.Empty(t, ours(t, pool, oddSchema))
				}
			})
		}
	}
}

// A role that may only call the functions can call Up too, before and after the adoption.
func TestUpByARoleThatAdoptsNothing(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA limits AUTHORIZATION pg_monitor; GRANT USAGE ON SCHEMA limits TO PUBLIC")
	as := func(role string) *pgxpool.Pool {
		return db.OwnerPool(t, func(config *pgxpool.Config) {
			config.ConnConfig.RuntimeParams["role"] = role
			config.ConnConfig.RuntimeParams["search_path"] = "limits"
		})
	}
	owner, application, superuser := as("pg_monitor"), as("pg_signal_backend"), as("none")
	scripted(t, owner, latest(t))
	for _, pool := range []*pgxpool.Pool{application, superuser} {
		require.NoError(t, migrations.Up(t.Context(), pool))
		status, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		for _, migration := range status {
			require.True(t, migration.Applied)
			require.Zero(t, migration.AppliedAt)
		}
	}
	require.NotContains(t, fmt.Sprint(pgtest.Objects(t, db.Pool, "limits")), "rate_limit_goose_version")
	// A superuser has the rights to migrate, but then the objects would have two owners.
	require.ErrorContains(t, migrations.Down(t.Context(), superuser),
		"rate_limit_version belongs to another role: run this as pg_monitor")
	require.NotContains(t, fmt.Sprint(pgtest.Objects(t, db.Pool, "limits")), "rate_limit_goose_version")

	_, err := owner.Exec(t.Context(), script(t, latest(t), true), pgx.QueryExecModeSimpleProtocol)
	require.NoError(t, err)
	for _, pool := range []*pgxpool.Pool{application, superuser} {
		err := migrations.Up(t.Context(), pool)
		require.ErrorContains(t, err, "not applied: 3 create_triggers; this role may not apply it")
		require.ErrorContains(t, err, "run this as pg_monitor")
	}
	require.NoError(t, migrations.Up(t.Context(), owner))
	requireApplied(t, owner, latest(t))
	require.NoError(t, migrations.Up(t.Context(), application))
	require.NoError(t, migrations.Up(t.Context(), superuser))
	require.NoError(t, migrations.DownTo(t.Context(), owner, 0))
	require.Empty(t, pgtest.Catalog(t, db.Pool, "limits"))
}

// Up adopts only exactly what the migrations make. Otherwise the error says what differs, and nothing changes.
func TestWhatDiffersIsNotAdopted(t *testing.T) {
	t.Parallel()

	for sql, want := range map[string][]string{
		"DROP TABLE rate_limit_durable":      {"version 3 make: table rate_limit_durable is missing. Nothing was changed"},
		"DROP FUNCTION rate_limit_sweep":     {"function rate_limit_sweep(integer, integer, text[], text, interval, timestamp with time zone) is missing"},
		"DROP FUNCTION rate_limit_version()": {"version 3 make: function rate_limit_version() is missing."},
		"DROP TABLE rate_limit_sweeper":      {"table rate_limit_sweeper is missing"},
		"ALTER TABLE rate_limit_durable DROP count, ADD more int; ALTER FUNCTION _rate_limit_late() SECURITY DEFINER": {
			"function _rate_limit_late() has kind", "table rate_limit_durable lacks column count; table rate_limit_durable has column more, which"},
		"ALTER FUNCTION rate_limit_reset RESET search_path":                                                          {`has settings "enable_indexscan=on, enable_seqscan=off, enable_tidscan=on, jit=off" instead of`},
		"CREATE OR REPLACE FUNCTION _rate_limit_late() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN true; END'": {"function _rate_limit_late() has another body"},
		"CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS ' SELECT 2::bigint '": {
			"version 2 make: table rate_limit_policy has trigger rate_limit_policy_check, which should not be there; "},
		"CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT NULL::bigint'": {
			"function rate_limit_version() has another body"},
		"ALTER TABLE rate_limit_durable OWNER TO pg_monitor":  {"table rate_limit_durable belongs to pg_monitor, and not to "},
		"ALTER FUNCTION _rate_limit_late OWNER TO pg_monitor": {"function _rate_limit_late() belongs to pg_monitor, and not to "},
		`CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
			CREATE TRIGGER t BEFORE INSERT ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION f()`: {"has trigger t, which should not be there"},
	} {
		t.Run(sql, func(t *testing.T) {
			t.Parallel()

			pool := pgtest.New(t).Pool
			pgtest.Exec(t, pool, "DROP TABLE rate_limit_goose_version; "+sql)
			objects, catalog := pgtest.Objects(t, pool), pgtest.Catalog(t, pool, "public")
			err := migrations.Up(t.Context(), pool)
			for _, text := range want {
				require.ErrorContains(t, err, text)
			}
			require.Equal(t, objects, pgtest.Objects(t, pool))
			require.Empty(t, pgtest.Differences(catalog, pgtest.Catalog(t, pool, "public")))
		})
	}
}

// psql commits each statement separately by default, so a script may stop anywhere. Up then says what is missing, or
// continues after the last complete migration.
func TestHalfAppliedMigrations(t *testing.T) {
	t.Parallel()

	upAfterEach(t, 6)
}

func TestThoroughHalfAppliedMigrations(t *testing.T) {
	t.Parallel()

	upAfterEach(t, 1)
}

// upAfterEach calls Up after one in so many statements of the migrations, and after each statement about the version.
func upAfterEach(t *testing.T, oneIn int) {
	t.Helper()
	var statements []string
	for version := int64(1); version <= latest(t); version++ {
		statement, inBody := "", false
		for line := range strings.Lines(script(t, version, false)) {
			statement += line
			inBody = inBody != (strings.Count(line, "$$") == 1)
			if !inBody && strings.HasSuffix(line, ";\n") {
				statements = append(statements, statement)
				statement = ""
			}
		}
	}
	require.Greater(t, len(statements), 70)
	statements = slices.DeleteFunc(statements, func(sql string) bool { return strings.Contains(sql, "set_config('search_path', pg_catalog.format") })

	db := pgtest.Empty(t)
	var schema string
	var pool *pgxpool.Pool
	begin := func(done ...string) { // runs statements of a migration in a new schema
		schema = fmt.Sprintf("after_%d", len(done))
		pool = db.InSchema(t, schema)
		for _, sql := range done {
			pgtest.Exec(t, pool, sql)
		}
	}
	begin()
	adopted, refused := 0, 0
	for done, sql := range statements {
		pgtest.Exec(t, pool, sql)
		if strings.HasPrefix(strings.TrimSpace(sql), "COMMENT ON ") { // Up does not compare comments
			continue
		}
		if done%oneIn > 0 && !strings.Contains(sql, "rate_limit_version") {
			continue
		}
		before := pgtest.Objects(t, db.Pool, schema)
		if err := migrations.Up(t.Context(), pool); err == nil {
			requireApplied(t, pool, latest(t))
			adopted++
			begin(statements[:done+1]...)
		} else {
			require.ErrorContains(t, err, "Nothing was changed")
			require.Regexp(t, ` is missing| should not be there| has another body| has settings | lacks `, err.Error())
			require.Equal(t, before, pgtest.Objects(t, db.Pool, schema))
			refused++
		}
	}
	require.EqualValues(t, 2*latest(t), adopted) // after the statement that sets the version, and after its GRANT
	require.Greater(t, refused, 70/oneIn)
}

// Up makes the version table when it adopts. ALTER DEFAULT PRIVILEGES gives nobody a right on that table.
func TestAdoptingGivesNothing(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).InSchema(t, oddSchema)
	pgtest.Exec(t, pool, "ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO pg_monitor, PUBLIC; "+
		"ALTER DEFAULT PRIVILEGES GRANT ALL ON SEQUENCES TO pg_monitor, PUBLIC")
	scripted(t, pool, latest(t))
	require.NoError(t, migrations.Up(t.Context(), pool))
	requireApplied(t, pool, latest(t))
	require.Zero(t, pgtest.Scalar[int](t, pool, `SELECT count(*) FROM pg_class, aclexplode(relacl)
		WHERE relname LIKE 'rate_limit_goose_version%' AND relkind IN ('r', 'S') AND grantee <> relowner`))
}

// Many processes start at once, and only one adopts.
func TestManyAdoptAtOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	scripted(t, db.Pool, 2)
	done := make(chan error)
	for range 8 {
		go func() { done <- migrations.Up(t.Context(), db.Pool) }()
	}
	for range 8 {
		require.NoError(t, <-done)
	}
	requireApplied(t, db.Pool, latest(t))
	require.Equal(t, latest(t)+1, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_goose_version"))
}

// Another tool may have applied a newer release. Up changes nothing then.
func TestNewerVersionByAnotherTool(t *testing.T) {
	t.Parallel()

	for _, recorded := range []bool{false, true} {
		pool := pgtest.Empty(t).Pool
		if recorded {
			require.NoError(t, migrations.Up(t.Context(), pool))
		} else {
			scripted(t, pool, latest(t))
		}
		pgtest.Exec(t, pool, "CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT 99999::bigint'")
		before := pgtest.Objects(t, pool)
		require.NoError(t, migrations.Up(t.Context(), pool))
		for _, err := range []error{migrations.Down(t.Context(), pool), migrations.DownTo(t.Context(), pool, 0)} {
			require.ErrorIs(t, err, goose.ErrVersionNotFound)
		}
		require.Equal(t, before, pgtest.Objects(t, pool))
	}
}

// Down drops functions by their names. If someone else made another function with such a name, it says so.
func TestDownBesideAnOverload(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	require.NoError(t, migrations.Up(t.Context(), pool))
	pgtest.Exec(t, pool, "CREATE FUNCTION rate_limit_sweep(text) RETURNS integer LANGUAGE sql AS 'SELECT 1'")
	err := migrations.DownTo(t.Context(), pool, 1)
	require.ErrorContains(t, err, `"rate_limit_sweep" is not unique`)
	require.ErrorContains(t, err, "drop it")
	pgtest.Exec(t, pool, "DROP FUNCTION rate_limit_sweep(text)")
	require.NoError(t, migrations.DownTo(t.Context(), pool, 1))
}

// Down rolls back a damaged schema, so that Up can make it again. The tables that are intact keep their counts. Some
// schemas have a version table, and the others are adopted.
func TestDownAndUpMendADamagedSchema(t *testing.T) {
	t.Parallel()

	downAndUpMend(t, false)
}

// Each damaged schema is tried with and without a version table.
func TestThoroughDownAndUp(t *testing.T) {
	t.Parallel()

	downAndUpMend(t, true)
}

func downAndUpMend(t *testing.T, all bool) {
	t.Helper()
	fresh := pgtest.Catalog(t, pgtest.New(t).Pool, "public")
	for sql, test := range map[string]struct {
		to       int64
		recorded bool // whether there is a version table
	}{
		"DROP FUNCTION rate_limit_version()": {1, true},
		"DROP FUNCTION _rate_limit_late(), rate_limit_sweep; ALTER FUNCTION rate_limit_reset RESET ALL": {1, false},
		"DROP TYPE rate_limit_row CASCADE":                    {1, true},
		"DROP TYPE rate_limit_decision CASCADE":               {1, false},
		"DROP TABLE rate_limit_sweeper":                       {0, true},
		"DROP TABLE rate_limit_ephemeral, rate_limit_durable": {0, false},
	} {
		for _, recorded := range []bool{true, false} {
			if !recorded && strings.Contains(sql, "rate_limit_version") {
				continue // rate_limit_version is missing, so nothing says which migrations are applied
			}
			if !all && recorded != test.recorded {
				continue
			}
			db := pgtest.New(t)
			pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_durable (prefix, key) VALUES ('a', 'b')")
			if !recorded {
				pgtest.Exec(t, db.Pool, "DROP TABLE rate_limit_goose_version")
			}
			pgtest.Exec(t, db.Pool, sql)
			require.NoError(t, migrations.DownTo(t.Context(), db.Pool, test.to), sql)
			require.NoError(t, migrations.Up(t.Context(), db.Pool), sql)
			require.Empty(t, pgtest.Differences(fresh, pgtest.Catalog(t, db.Pool, "public")), sql)
			requireApplied(t, db.Pool, latest(t))
			if test.to > 0 {
				require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT count(*) = 1 FROM rate_limit_durable"))
			}
		}
	}
}
