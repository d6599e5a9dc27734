package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestDoctorOfAHealthyDatabase(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	exe(t, db, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // which Postgres 14 grants
	before := objects(t, db)
	findings := decode[[]finding](t, invoke(t, db.URL, "doctor", "--json"))
	require.Len(t, findings, 9+2*7)
	for _, f := range findings {
		if f.Check != "long transactions" { // somebody else's test may be slow
			require.Equal(t, fine, f.Level, f)
			require.Empty(t, f.Do)
		}
		require.NotEmpty(t, f.Found)
	}
	require.Equal(t, before, objects(t, db))
}

// The functions that the doctor expects are read from the migrations; Postgres knows what these have made.
func TestExpectedFunctionsAreThoseThatTheMigrationsMake(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	all, err := readMigrations()
	require.NoError(t, err)
	rows, err := db.Pool.Query(t.Context(), "SELECT proname, prosrc, prosecdef FROM pg_proc WHERE pronamespace = 'public'::regnamespace")
	require.NoError(t, err)
	made := map[string]function{}
	var name string
	var f function
	_, err = pgx.ForEachRow(rows, []any{&name, &f.body, &f.definer}, func() error {
		made[name] = f
		return nil
	})
	require.NoError(t, err)
	fromMigrations := expectedFunctions(all, all[len(all)-1].Version)
	for name, function := range fromMigrations {
		function.body = (&examination{server: server{schema: "public"}}).inSchema(function.body)
		fromMigrations[name] = function
	}
	require.Equal(t, made, fromMigrations)
	require.Subset(t, callable(fromMigrations), []string{"rate_limit_fixed_window", "rate_limit_reset"})
	require.NotContains(t, callable(fromMigrations), "rate_limit_late")

	// A later migration replaces one, makes another, and drops a third.
	all = append(all, migration{Version: 1000, up: `CREATE OR REPLACE FUNCTION rate_limit_reset(name text)
RETURNS boolean
LANGUAGE sql
AS $fn$ SELECT '$$' $fn$;

CREATE FUNCTION rate_limit_new()
RETURNS integer
LANGUAGE sql
SECURITY DEFINER
AS $$ SELECT 1 $$;

DROP FUNCTION rate_limit_late();
`})
	later := expectedFunctions(all, 1000)
	require.Equal(t, function{body: " SELECT '$$' "}, later["rate_limit_reset"])
	require.Equal(t, function{body: " SELECT 1 ", definer: true}, later["rate_limit_new"])
	require.Contains(t, fromMigrations, "rate_limit_late")
	require.NotContains(t, later, "rate_limit_late")
	require.Len(t, later, len(fromMigrations))
}

// Each of these is something that happens to databases; the doctor finds it, and what it says to do mends it.
func TestDoctorFindsWhatIsWrong(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		sql, check string
		level      level
		found, do  string
		mend       string // what the advice comes to, if it is SQL
	}{
		"changed function": {
			sql:   `DO $$ BEGIN EXECUTE replace(pg_get_functiondef('rate_limit_reset'::regproc), 'RETURN found', 'RETURN true'); END $$`,
			check: "functions", level: problem, found: "rate_limit_reset was changed", do: "pgratelimit migrate print",
		},
		"missing function": {
			sql:   `DROP FUNCTION rate_limit_reset, rate_limit_late`,
			check: "functions", level: problem, found: "rate_limit_late is missing, rate_limit_reset is missing", do: "pgratelimit migrate print",
		},
		"search_path left open": {
			sql:   `ALTER FUNCTION rate_limit_reset RESET search_path`,
			check: "functions", level: problem, found: "rate_limit_reset was changed",
		},
		"rights of the caller": {
			sql:   `ALTER FUNCTION rate_limit_reset SECURITY INVOKER`,
			check: "functions", level: problem, found: "rate_limit_reset was changed",
		},
		"open to everybody": {
			sql:   `GRANT EXECUTE ON FUNCTION rate_limit_token_bucket TO PUBLIC`,
			check: "rights", level: warning, found: "every role may execute rate_limit_token_bucket", do: "REVOKE ALL ON FUNCTION",
			mend: `REVOKE ALL ON FUNCTION rate_limit_token_bucket FROM PUBLIC`,
		},
		"everybody may create": {
			sql:   `GRANT CREATE ON SCHEMA public TO PUBLIC`,
			check: "schema", level: problem, found: "everybody may create in schema public", do: "REVOKE CREATE ON SCHEMA public FROM PUBLIC",
			mend: `REVOKE CREATE ON SCHEMA public FROM PUBLIC`,
		},
		"another role may create": {
			sql:   `GRANT CREATE ON SCHEMA public TO pg_monitor`,
			check: "schema", level: problem, found: "pg_monitor may create in schema public", do: "REVOKE CREATE ON SCHEMA public FROM pg_monitor",
			mend: `REVOKE CREATE ON SCHEMA public FROM pg_monitor`,
		},
		"table of another role": {
			sql:   `ALTER TABLE rate_limit_goose_version OWNER TO pg_monitor`,
			check: "schema", level: problem, found: "table public.rate_limit_goose_version belongs to pg_monitor",
			do:   "ALTER TABLE public.rate_limit_goose_version OWNER TO postgres",
			mend: `ALTER TABLE rate_limit_goose_version OWNER TO CURRENT_USER`,
		},
		"overload of another role": {
			sql: `GRANT CREATE ON SCHEMA public TO pg_monitor; SET ROLE pg_monitor; CREATE FUNCTION rate_limit_sweep() RETURNS integer LANGUAGE sql AS 'SELECT 1';
				RESET ROLE; REVOKE CREATE ON SCHEMA public FROM pg_monitor`,
			check: "schema", level: problem, found: "function public.rate_limit_sweep() belongs to pg_monitor", do: "DROP FUNCTION public.rate_limit_sweep()",
			mend: `DROP FUNCTION rate_limit_sweep()`,
		},
		"owner without rights": {
			sql:   `GRANT CREATE ON SCHEMA public TO pg_monitor; ALTER FUNCTION rate_limit_reset OWNER TO pg_monitor`,
			check: "rights", level: problem, found: "may not use the tables: rate_limit_reset", do: "GRANT SELECT, INSERT, UPDATE, DELETE on both tables",
			mend: `GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_ephemeral, rate_limit_durable TO pg_monitor`,
		},
		"further index": {
			sql:   `CREATE INDEX sweep_me ON rate_limit_ephemeral (expires_at)`,
			check: "rate_limit_ephemeral: kind", level: problem, found: "an index besides its primary key", do: "DROP INDEX public.sweep_me",
			mend: `DROP INDEX sweep_me`,
		},
		"logged": {
			sql:   `ALTER TABLE rate_limit_ephemeral SET LOGGED`,
			check: "rate_limit_ephemeral: kind", level: warning, found: "it is logged", do: "ALTER TABLE rate_limit_ephemeral SET UNLOGGED",
			mend: `ALTER TABLE rate_limit_ephemeral SET UNLOGGED`,
		},
		"unlogged": {
			sql:   `ALTER TABLE rate_limit_durable SET UNLOGGED`,
			check: "rate_limit_durable: kind", level: warning, found: "it is unlogged", do: "ALTER TABLE rate_limit_durable SET LOGGED",
			mend: `ALTER TABLE rate_limit_durable SET LOGGED`,
		},
		"autovacuum off for a table": {
			sql:   `ALTER TABLE rate_limit_durable SET (autovacuum_enabled = off)`,
			check: "rate_limit_durable: autovacuum", level: problem, found: "turned off", do: "ALTER TABLE rate_limit_durable RESET (autovacuum_enabled)",
			mend: `ALTER TABLE rate_limit_durable RESET (autovacuum_enabled)`,
		},
		"no statistics": {
			sql:   `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_counts = off', current_database()); END $$`,
			check: "statistics", level: problem, found: "track_counts is off", do: "set track_counts = on",
			mend: `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_counts = on', current_database()); END $$`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			look := func() finding {
				o := invoke(t, db.URL, "doctor", "--json")
				text := invoke(t, db.URL, "doctor")
				require.Equal(t, o.code, text.code)
				require.Equal(t, o.code == exitFailed, strings.Contains("\n"+text.stdout, "\nproblem"))
				var found finding
				o.code, o.stderr = 0, ""
				for _, f := range decode[[]finding](t, o) {
					if f.Check == test.check {
						found = f
					}
				}
				return found
			}
			exe(t, db, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // as Postgres 14 comes without it
			require.Equal(t, fine, look().Level)
			exe(t, db, test.sql)
			found := look()
			require.Equal(t, test.level, found.Level, found)
			require.Contains(t, found.Found, test.found)
			require.Contains(t, found.Do, test.do)
			if test.mend != "" {
				exe(t, db, test.mend)
				require.Equal(t, fine, look().Level)
			}
		})
	}
}

func TestDoctorOfADatabaseThatIsBehind(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 1))
	o := invoke(t, db.URL, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Regexp(t, `(?m)^problem +migrations +not applied: 2 create_functions`, o.stdout)
	require.Contains(t, o.stdout, "→ run 'pgratelimit migrate up'\n")
	require.Regexp(t, `(?m)^ok +functions +the 1 that`, o.stdout)

	invoke(t, db.URL, "migrate", "up").done(t)
	invoke(t, db.URL, "doctor").done(t)
	exe(t, db, "INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)")
	require.Contains(t, invoke(t, db.URL, "doctor").done(t), "at version 99999, of a newer release than this command")

	o = invoke(t, db.URL, "doctor", "--schema", "nowhere")
	require.Equal(t, exitFailed, o.code)
	require.Regexp(t, `(?m)^problem +migrations +ratelimit/migrations: status: no schema`, o.stdout)
}

// Dead tuples, free space, expired rows and updates that are not HOT, as Postgres counts them.
func TestDoctorOfATableThatNobodyTendsTo(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	for _, sql := range []string{
		"ALTER TABLE rate_limit_ephemeral SET (autovacuum_enabled = off, fillfactor = 100)",
		"INSERT INTO rate_limit_ephemeral (prefix, key) SELECT 'login', i || repeat('k', 500) FROM generate_series(1, 40000) AS i",
		"DELETE FROM rate_limit_ephemeral WHERE count = 0 AND ctid > '(700,0)'",
		"UPDATE rate_limit_ephemeral SET count = 1",
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close(t.Context())) // and so it reports its statistics

	var out string
	require.Eventually(t, func() bool {
		out = invoke(t, db.URL, "doctor").stdout
		return !strings.Contains(out, "too few to tell\nok       rate_limit_ephemeral: dead")
	}, patience, 50*time.Millisecond)
	for _, line := range []string{
		`warning  rate_limit_ephemeral: HOT updates +\d+\.\d % of \d+ updates were HOT`,
		`warning  rate_limit_ephemeral: dead tuples +\d{5} dead and \d+ live`,
		`warning  rate_limit_ephemeral: bloat +\d\d\.\d MB, of which rows fill [1-4]\d %`,
		`warning  rate_limit_ephemeral: sweeping +100 % of the rows have expired`,
		`problem  rate_limit_ephemeral: autovacuum`,
	} {
		require.Regexp(t, `(?m)^`+line, out)
	}

	exe(t, db, "ALTER TABLE rate_limit_ephemeral RESET (autovacuum_enabled)")
	exe(t, db, "UPDATE rate_limit_ephemeral SET expires_at = 9e15")
	bloat := regexp.MustCompile(`(?m)^ok +rate_limit_ephemeral: bloat`)
	for deadline := time.Now().Add(patience); ; { // an ANALYZE by autovacuum makes VACUUM FULL keep the dead rows
		exe(t, db, "VACUUM FULL rate_limit_ephemeral")
		out = invoke(t, db.URL, "doctor").done(t)
		if bloat.MatchString(out) {
			break
		}
		require.True(t, time.Now().Before(deadline), out)
	}
	require.Regexp(t, `(?m)^ok +rate_limit_ephemeral: sweeping +0 % of the rows`, out)
}

func TestDoctorSeesForeignTransactions(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	other := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["application_name"] = "nightly report" })
	tx, err := other.Begin(t.Context())
	require.NoError(t, err)
	require.Regexp(t, `(?m)^ok +long transactions +the longest, of session \d+ \(nightly report, idle in transaction\), has been open for \d+s$`,
		invoke(t, db.URL, "doctor").done(t))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Regexp(t, `(?m)^ok +long transactions +none$`, invoke(t, db.URL, "doctor").done(t))
}

// What a test cannot wait for.
func TestDoctorsThresholds(t *testing.T) {
	t.Parallel()

	session, mend := "session 7 (report, idle in transaction)", "end it: SELECT pg_terminate_backend(7)"
	require.Equal(t, fine, judgeHorizon(longTime-1, &session, &mend, true).Level)
	long := judgeHorizon(longTime, &session, &mend, false)
	require.Equal(t, warning, long.Level)
	require.Equal(t, mend, long.Do)
	require.Contains(t, long.Found, "open for 5m0s")
	require.Contains(t, long.Found, "pg_read_all_stats")

	for age, want := range map[int64]level{200_000_000: fine, 220_000_001: warning, 1_600_000_000: warning, 1_600_000_001: problem} {
		require.Equal(t, want, tableHealth{xidAge: age}.judgeAge(200_000_000).Level, age)
	}
	for hot, want := range map[int64]level{950: fine, 949: warning} {
		require.Equal(t, want, tableHealth{updated: 1000, hot: hot}.judgeHOT().Level)
		require.Equal(t, fine, tableHealth{updated: 999, hot: 0}.judgeHOT().Level)
	}
	for dead, want := range map[int64]level{fewDead: fine, fewDead + 1: warning} {
		require.Equal(t, want, tableHealth{dead: dead, live: 100}.judgeDead().Level)
		require.Equal(t, fine, tableHealth{dead: dead, live: dead}.judgeDead().Level)
	}
	now := time.Now()
	for age, want := range map[time.Duration]level{lateVacuum: fine, lateVacuum + 1: warning} {
		vacuumed := now.Add(-age)
		require.Equal(t, want, tableHealth{dead: fewDead + 1, autovacuum: true, now: now, vacuumed: &vacuumed}.judgeVacuum().Level)
		require.Equal(t, fine, tableHealth{dead: fewDead, autovacuum: true, now: now, vacuumed: &vacuumed}.judgeVacuum().Level)
	}
	require.Equal(t, warning, tableHealth{dead: fewDead + 1, autovacuum: true}.judgeVacuum().Level)
	require.Equal(t, fine, tableHealth{autovacuum: true}.judgeVacuum().Level)

	for num, want := range map[int]level{oldestVersion: fine, oldestVersion - 1: warning} {
		f, err := (&examination{server: server{versionNum: num}}).checkServer(t.Context())
		require.NoError(t, err)
		require.Equal(t, want, f.Level)
	}
}

func TestStandby(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	require.NoError(t, migrations.Up(t.Context(), pool))
	pool.Close()
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	signal := filepath.Join(server.DataDir(), "standby.signal")
	require.NoError(t, os.WriteFile(signal, nil, 0o666))
	require.NoError(t, os.Chmod(signal, 0o666))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	require.NoError(t, server.Restart(ctx))

	o := invoke(t, server.URL(), "doctor")
	require.Equal(t, exitFailed, o.code, o.stderr)
	require.Regexp(t, `(?m)^problem +standby +this is a standby`, o.stdout)
	require.Regexp(t, `(?m)^warning +rate_limit_ephemeral: bloat +could not be looked at`, o.stdout)
	const policy = "--policy=fixed 1/1m"
	for _, args := range [][]string{{"limits"}, {"take", "login", "a", policy}, {"take", "login", "a", policy, "--durable"}, {"reset", "login", "a", "--durable"}} {
		invoke(t, server.URL(), args...).complains(t, exitFailed, "connect to the primary")
	}
	require.True(t, decode[decision](t, invoke(t, server.URL(), "peek", "login", "a", policy, "--durable", "--json")).Allowed)
	require.Empty(t, decode[topResult](t, invoke(t, server.URL(), "top", "login", policy, "--durable", "--json")).Keys)
}
