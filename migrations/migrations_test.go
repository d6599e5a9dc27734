package migrations_test

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/pressly/goose/v3"
	"github.com/pressly/goose/v3/lock"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// upVariable makes the test binary another process that calls Up on the database that it names.
const upVariable = "MIGRATIONS_TEST_UP"

// patience is how long a test waits for what takes milliseconds, before it says that it never happened.
const patience = 3 * time.Minute

// oddSchema has all that a name can have which is not quoted: capitals, spaces, quotes, dollars and a backslash.
const oddSchema = `Odd "na'me" $$\ $function$ `

func TestMain(m *testing.M) {
	// What an application has registered with goose is not for us to apply, or to stumble over: it has the numbers of ours.
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

	// A second call changes nothing: even a table that was made again would have another oid.
	before := objects(t, pool, "public")
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.Equal(t, before, objects(t, pool, "public"))
}

func TestUpNeedsOneConnection(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
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

			pool := pgtest.Empty(t).NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
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
	empty := objects(t, pool, "limits")
	require.Empty(t, empty)

	// There is nothing to roll back, and no version table is made for it.
	require.NoError(t, migrations.Down(t.Context(), pool))
	require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
	require.Empty(t, objects(t, pool, "limits"))

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
		require.Empty(t, objects(t, pool, "limits"))
	}
}

func TestOneByOne(t *testing.T) {
	t.Parallel()

	// Up applies all, so goose itself takes the single steps here, as an application may.
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
		require.Empty(t, pgtest.Differences(states[i], pgtest.Catalog(t, pool, "public")), "Down of %s does not undo its Up", source.Path)

		// Up again, and back.
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
	require.NoError(t, migrations.Up(t.Context(), db.Pool)) // public comes later in the search_path of the others

	for _, schema := range []string{"limits", "Limits", oddSchema} {
		pool := db.InSchema(t, schema)
		status, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		require.False(t, status[0].Applied, "the version table of public is not ours")

		require.NoError(t, migrations.Up(t.Context(), pool), schema)
		require.Empty(t, pgtest.Differences(
			pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "public"), "public"), pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, schema), schema)))
		require.Equal(t, latest(t), appliedVersion(t, pool))
	}

	for _, schema := range []string{"limits", "Limits", oddSchema} {
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

		// Whoever runs with the rights of the owner looks names up in pg_catalog, unless the body says where they are.
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
			require.Empty(t, regexp.MustCompile(`.{0,20}rate_limit_.{0,20}`).FindString(strings.ReplaceAll(body, quoted+".rate_limit_", "")), name)
			return nil
		})
		require.NoError(t, err)
		require.NotZero(t, pinned)
	}
}

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
		require.NoError(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_goose_version WHERE version_id > 0").Scan(&rows))
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

// applicationFS holds an application's own migrations, which have the same numbers as ours.
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

	// Its migrations may run while ours do.
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	locker, err := lock.NewPostgresSessionLocker()
	require.NoError(t, err)
	require.NoError(t, locker.SessionLock(t.Context(), conn))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, migrations.Up(ctx, pool))
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

func TestWithTheGooseCommandsDefaultTable(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	_, err := newProvider(t, pool, migrations.FS, goose.DefaultTablename).Up(t.Context())
	require.NoError(t, err)

	// There is nothing left to do, and to roll it back is for that command.
	require.NoError(t, migrations.Up(t.Context(), pool))
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	for _, migration := range status {
		require.True(t, migration.Applied)
		require.Zero(t, migration.AppliedAt)
	}
	for _, err := range []error{migrations.Down(t.Context(), pool), migrations.DownTo(t.Context(), pool, 0)} {
		require.ErrorContains(t, err, "stay with that one")
	}
	require.NotContains(t, fmt.Sprint(objects(t, pool, "public")), "rate_limit_goose_version")

	// Of a part of them, it says what to do.
	provider := newProvider(t, pool, migrations.FS, goose.DefaultTablename)
	_, err = provider.Down(t.Context())
	require.NoError(t, err)
	require.ErrorContains(t, migrations.Up(t.Context(), pool), "not applied: 3 create_sweep; the others were applied by another tool, or by goose without -table")
}

// The application's own role may call Up at every start.
func TestUpByARoleWithoutRights(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	db.InSchema(t, "limits")
	application := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		config.ConnConfig.RuntimeParams["search_path"] = "limits"
	})
	owner := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "limits" })
	_, err := owner.Exec(t.Context(), "GRANT USAGE ON SCHEMA limits TO pg_monitor")
	require.NoError(t, err)

	require.ErrorContains(t, migrations.Up(t.Context(), application),
		"not applied: 1 create_tables, 2 create_functions, 3 create_sweep; this role may not apply it")
	require.NoError(t, migrations.Up(t.Context(), owner))
	require.NoError(t, migrations.Up(t.Context(), application))
	status, err := migrations.Status(t.Context(), application)
	require.NoError(t, err)
	for _, migration := range status {
		require.True(t, migration.Applied)
	}
	for down := latest(t); down > 0; down-- {
		require.NoError(t, migrations.Down(t.Context(), owner))
		require.ErrorContains(t, migrations.Up(t.Context(), application), fmt.Sprintf("not applied: %d ", down))
	}
}

// Whoever may create in the schema could have put a version table there, whose triggers would run with the rights of a superuser.
func TestVersionTableOfAStranger(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	_, err := pool.Exec(t.Context(), `GRANT CREATE ON SCHEMA public TO pg_monitor; SET ROLE pg_monitor;
		CREATE TABLE rate_limit_goose_version (id integer PRIMARY KEY GENERATED BY DEFAULT AS IDENTITY, version_id bigint NOT NULL,
			is_applied boolean NOT NULL, tstamp timestamp NOT NULL DEFAULT now());
		CREATE FUNCTION attack() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN ALTER ROLE pg_monitor SUPERUSER; RETURN NEW; END';
		CREATE TRIGGER attack BEFORE INSERT ON rate_limit_goose_version FOR EACH ROW EXECUTE FUNCTION attack();
		RESET ROLE; REVOKE CREATE ON SCHEMA public FROM pg_monitor`)
	require.NoError(t, err)
	require.ErrorContains(t, migrations.Up(t.Context(), pool), "rate_limit_goose_version belongs to pg_monitor")
	var super bool
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT rolsuper FROM pg_roles WHERE rolname = 'pg_monitor'").Scan(&super))
	require.False(t, super)
}

// Nor does a right to put triggers on a table come from ALTER DEFAULT PRIVILEGES, or the right to call a function.
func TestDefaultPrivilegesGiveNothing(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	_, err := pool.Exec(t.Context(), `ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO pg_monitor, PUBLIC;
		ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO pg_monitor`)
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), pool))
	rows, err := pool.Query(t.Context(), `
		SELECT relname::text FROM pg_class WHERE relname LIKE 'rate_limit_%' AND relkind = 'r'
			AND has_table_privilege('pg_monitor', oid, 'INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
		UNION ALL
		SELECT proname::text FROM pg_proc WHERE proname LIKE 'rate_limit_%' AND proname <> 'rate_limit_version'
			AND has_function_privilege('pg_monitor', oid, 'EXECUTE')`)
	require.NoError(t, err)
	given, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Empty(t, given)
	_, err = pool.Exec(t.Context(), `CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
		CREATE TRIGGER t BEFORE DELETE ON rate_limit_goose_version FOR EACH ROW EXECUTE FUNCTION f()`)
	require.NoError(t, err)
	require.ErrorContains(t, migrations.Down(t.Context(), pool), "has triggers or rules")
}

// A search_path in which others' functions come before those of Postgres is refused.
func TestCatalogBehindAnotherSchema(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "public, pg_catalog" })
	require.ErrorContains(t, migrations.Up(t.Context(), pool), "leave pg_catalog out")
}

// To migrate a database from nothing runs nothing that others have put there.
func TestMigratingAmongDecoys(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	statements := recorder{}
	recorded := pgtest.Empty(t).NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = &statements })
	run := func(pool *pgxpool.Pool) {
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.NoError(t, migrations.Down(t.Context(), pool))
		require.NoError(t, migrations.Up(t.Context(), pool))
		_, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
	}
	run(recorded)
	require.Greater(t, len(statements.all), 50)

	db.InSchema(t, "limits")
	db.Decoys(t, "limits", statements.all...)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "limits, public" })
	_, err := pool.Exec(t.Context(), "SELECT format('%s', 'rate_limit'::text)")
	require.ErrorContains(t, err, "decoy limits.format(") // so they are in place
	run(pool)
}

// recorder keeps the statements that a pool has sent.
type recorder struct{ all []string }

func (r *recorder) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	r.all = append(r.all, data.SQL)
	return ctx
}

func (*recorder) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestStatus(t *testing.T) {
	t.Parallel()

	// Far from UTC, where goose takes a local time for one of UTC.
	db := pgtest.Empty(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["timezone"] = "Pacific/Kiritimati" })

	var before, after time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&before))

	want := []migrations.Migration{{Version: 1, Name: "create_tables"}, {Version: 2, Name: "create_functions"}, {Version: 3, Name: "create_sweep"}}
	status, err := migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, want, status)
	require.Empty(t, objects(t, pool, "public"), "Status writes")

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
	want[len(want)-1] = migrations.Migration{Version: 3, Name: "create_sweep"}
	status, err = migrations.Status(t.Context(), pool)
	require.NoError(t, err)
	require.Equal(t, want, status)
}

func TestDatabaseOfANewerVersion(t *testing.T) {
	t.Parallel()

	pool := pgtest.Empty(t).Pool
	require.NoError(t, migrations.Up(t.Context(), pool))
	_, err := pool.Exec(t.Context(), "INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)")
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
	nowhere := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "nowhere" })
	_, err := migrations.Status(t.Context(), nowhere)
	require.ErrorContains(t, err, "ratelimit/migrations: status: no schema that search_path names exists")
	require.ErrorContains(t, migrations.Up(t.Context(), nowhere), "ratelimit/migrations: up: no schema")
	require.ErrorContains(t, migrations.Down(t.Context(), nowhere), "ratelimit/migrations: down: no schema")
	require.ErrorContains(t, migrations.DownTo(t.Context(), nowhere, 0), "ratelimit/migrations: down to 0: no schema")

	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	require.ErrorContains(t, migrations.DownTo(t.Context(), db.Pool, -1), "invalid version")
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 0))

	_, err = db.Pool.Exec(t.Context(), "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	require.NoError(t, err)
	unprivileged := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = "pg_monitor" })
	require.ErrorContains(t, migrations.Up(t.Context(), unprivileged), "the user needs CREATE on the schema")
}

// objects lists the relations, functions and types of a schema with their oids.
func objects(t *testing.T, db pgtest.Querier, schema string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), `
		SELECT format('%s %s %s', o.kind, o.name, o.oid)
		FROM (
			SELECT 'relation', relname, oid, relnamespace FROM pg_class
			UNION ALL
			SELECT 'function', proname, oid, pronamespace FROM pg_proc
			UNION ALL
			SELECT 'type', typname, oid, typnamespace FROM pg_type
		) AS o (kind, name, oid, namespace)
		JOIN pg_namespace AS n ON n.oid = o.namespace
		WHERE n.nspname = $1
		ORDER BY 1`, schema)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// newProvider is goose as its own command or an application would use it.
func newProvider(t *testing.T, pool *pgxpool.Pool, files fs.FS, table string) *goose.Provider {
	t.Helper()
	db := stdlib.OpenDBFromPool(pool)
	t.Cleanup(func() { require.NoError(t, db.Close()) })
	provider, err := goose.NewProvider(goose.DialectPostgres, db, files,
		goose.WithTableName(table), goose.WithDisableGlobalRegistry(true))
	require.NoError(t, err)
	return provider
}

// latest is the version of the last migration.
func latest(t *testing.T) int64 {
	t.Helper()
	files, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	version, err := goose.NumericComponent(files[len(files)-1])
	require.NoError(t, err)
	return version
}

// appliedVersion is the last version that is recorded in the database.
func appliedVersion(t *testing.T, pool *pgxpool.Pool) int64 {
	t.Helper()
	var version int64
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT max(version_id) FROM rate_limit_goose_version").Scan(&version))
	return version
}
