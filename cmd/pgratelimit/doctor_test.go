package main

import (
	"context"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/lockholders"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/doctor"
)

// checksOfAll is the number of findings if no object is missing. Some checks have a finding for each table.
const checksOfAll = 15 + 4*7

func TestDoctorOfAHealthyDatabase(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC") // Postgres 14 grants CREATE to PUBLIC
	before := pgtest.Objects(t, db.Pool)
	findings := decode[[]cli.Finding](t, invoke(t, db.URL, "doctor", "--json"))
	require.Len(t, findings, checksOfAll)
	for _, f := range findings {
		if f.Check != "long transactions" { // another test may have a long transaction
			require.Equal(t, cli.Fine, f.Level, f)
			require.Empty(t, f.Do)
		}
		require.NotEmpty(t, f.Found)
	}
	require.Equal(t, before, pgtest.Objects(t, db.Pool))
}

// If JIT compiles cheap statements in a session, JIT also compiles the calls of the functions.
func TestDoctorFindsCallsThatAreCompiled(t *testing.T) {
	t.Parallel()
	testCompiled(t, 2, "jit_above_cost=10", "jit_above_cost=11", "jit_above_cost=11&cpu_tuple_cost=0.02")
}

func TestThoroughDoctorFindsNoCallsThatAreCompiled(t *testing.T) {
	t.Parallel()
	testCompiled(t, 0, "", "jit_above_cost=0&jit=off", "jit_above_cost=-1")
}

func testCompiled(t *testing.T, want int, all ...string) {
	t.Helper()
	db := pgtest.New(t)
	compiled := 0
	for _, settings := range all {
		found := cli.Level("")
		o := invoke(t, urlWith(t, db, settings), "doctor", "--json")
		for _, f := range decode[[]cli.Finding](t, o) {
			if f.Check == "jit" {
				found = f.Level
			}
		}
		conn, err := pgx.Connect(t.Context(), urlWith(t, db, settings))
		require.NoError(t, err)
		rows, err := conn.Query(
			t.Context(),
			"EXPLAIN ANALYZE SELECT * FROM rate_limit_all('{1}', '{test}', '{key}', '{f}', '{1}', '{10}', '{1000000}', '{0}')",
		)
		require.NoError(t, err)
		plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.NoError(t, conn.Close(t.Context()))
		level := cli.Fine
		if slices.Contains(plan, "JIT:") {
			level = cli.Warning
			compiled++
		}
		require.Equal(t, level, found, settings)
	}
	if pgtest.Scalar[bool](t, db.Pool, "SELECT pg_jit_available()") { // JIT is a separate package on some systems
		require.Equal(t, want, compiled)
	}
}

// examined returns doctor's findings about a database, by the check's name.
func examined(t *testing.T, url string, args ...string) map[string]cli.Finding {
	t.Helper()
	o := invoke(t, url, append([]string{"doctor", "--json"}, args...)...)
	sick := o.code == exitFailed
	o.code, o.stderr = 0, ""
	all := map[string]cli.Finding{}
	for _, f := range decode[[]cli.Finding](t, o) {
		require.NotContains(t, all, f.Check)
		all[f.Check] = f
	}
	require.Equal(t, sick, slices.ContainsFunc(slices.Collect(maps.Values(all)),
		func(f cli.Finding) bool { return f.Level == cli.Problem }), o.stdout)
	return all
}

// follow runs what a finding's advice has between backquotes: statements and command lines.
func follow(t *testing.T, db *pgtest.DB, advice string) {
	t.Helper()
	parts := strings.Split(advice, "`")
	require.GreaterOrEqual(t, len(parts), 3, "there is nothing to do in %q", advice)
	for i := 1; i < len(parts); i += 2 {
		if line, ok := strings.CutPrefix(parts[i], "pgratelimit "); ok {
			args := strings.Fields(line)
			if !strings.HasPrefix(line, "doctor --fix") {
				invoke(t, db.URL, args...).done(t)
				continue
			}
			require.Empty(t, invoke(t, db.URL, append(args, "--yes")...).stderr) // the command may find other problems
		} else {
			pgtest.Exec(t, db.Pool, parts[i], pgx.QueryExecModeSimpleProtocol)
		}
	}
}

// These problems happen in real databases. doctor finds each problem, and doctor's advice cures the problem.
func TestThoroughDoctorFindsWhatIsWrong(t *testing.T) {
	t.Parallel()

	const database = `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I OWNER TO pg_monitor', current_database()); END $$; `
	// pg_signal_backend gets the rights, because pg_monitor cannot log in.
	const granted = `GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO pg_signal_backend; `
	for name, test := range map[string]struct {
		sql, check string
		level      cli.Level
		found, do  string
	}{
		"changed function": {
			sql:   `DO $$ BEGIN EXECUTE replace(pg_get_functiondef('rate_limit_reset'::regproc), 'RETURN existed', 'RETURN true'); END $$`,
			check: "objects", level: cli.Problem, found: "function rate_limit_reset(text, text, boolean, integer, boolean) has another body",
			do: "`pgratelimit doctor --fix`, which makes it anew in place, and loses nothing",
		},
		"missing functions": {
			sql:   `DROP FUNCTION rate_limit_reset, _rate_limit_late`,
			check: "objects", level: cli.Problem, found: "function _rate_limit_late() is missing; function rate_limit_reset(text, text, boolean, integer, boolean) is missing",
		},
		"missing type": {
			sql:   `DROP TYPE rate_limit_decision CASCADE`,
			check: "objects", level: cli.Problem, found: "type rate_limit_decision is missing",
		},
		"search_path left open": {
			sql:   `ALTER FUNCTION rate_limit_reset RESET search_path`,
			check: "objects", level: cli.Problem, found: "has settings",
		},
		"rights of the caller": {
			sql:   `ALTER FUNCTION rate_limit_reset SECURITY INVOKER`,
			check: "objects", level: cli.Problem, found: "security invoker",
		},
		"an overload": {
			sql:   `CREATE FUNCTION rate_limit_reset(a text) RETURNS integer LANGUAGE sql AS 'SELECT 1'`,
			check: "objects", level: cli.Problem, found: "function rate_limit_reset(text) should not be there", do: "`DROP FUNCTION public.rate_limit_reset(text)`",
		},
		"missing version": {
			sql:   `DROP FUNCTION rate_limit_version()`,
			check: "objects", level: cli.Problem, found: "function rate_limit_version() is missing",
		},
		"missing version without records": {
			sql:   `DROP FUNCTION rate_limit_version(); DROP TABLE rate_limit_goose_version`,
			check: "migrations", level: cli.Problem, found: "most like those of version 3",
		},
		"wrong version": {
			sql:   `CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS ' SELECT 3::bigint + 0'`,
			check: "objects", level: cli.Problem, found: "function rate_limit_version() has another body",
		},
		"behind": {
			sql: `DROP TRIGGER rate_limit_policy_check ON rate_limit_policy; DROP TRIGGER rate_limit_policy_keep ON rate_limit_policy;
				DROP TRIGGER rate_limit_policy_turn ON rate_limit_policy; DROP TRIGGER rate_limit_policy_note ON rate_limit_policy;
				CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS ' SELECT 2::bigint '`,
			check: "migrations", level: cli.Problem, found: "not applied: 3 create_triggers", do: "run `pgratelimit migrate up`",
		},
		"dropped table": {
			sql:   `DROP TABLE rate_limit_durable`,
			check: "objects", level: cli.Problem, found: "table rate_limit_durable is missing", do: "loses nothing; then grant the rights on what was missing again",
		},
		"the other table dropped": {
			sql:   `DROP TABLE rate_limit_ephemeral`,
			check: "objects", level: cli.Problem, found: "table rate_limit_ephemeral is missing", do: "loses nothing",
		},
		"both tables dropped": {
			sql:   `DROP TABLE rate_limit_ephemeral, rate_limit_durable`,
			check: "migrations", level: cli.Problem, found: "somebody has dropped the tables: migrations up to 3", do: "`pgratelimit doctor --fix`, which makes them anew, without the counts, which are lost",
		},
		"the sweeper's table dropped": {
			sql:   `DROP TABLE rate_limit_sweeper`,
			check: "objects", level: cli.Problem, found: "table rate_limit_sweeper is missing", do: "loses nothing",
		},
		"a column dropped": {
			sql:   `ALTER TABLE rate_limit_durable DROP COLUMN credit`,
			check: "objects", level: cli.Problem, found: "table rate_limit_durable lacks column credit", do: "loses nothing",
		},
		"both tables changed": {
			sql: `ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey;
				ALTER TABLE rate_limit_ephemeral ALTER count DROP NOT NULL`,
			check: "objects", level: cli.Problem, found: "lacks constraint rate_limit_durable_pkey", do: "loses nothing",
		},
		"a primary key dropped, and a key inserted twice": {
			sql: `ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey;
				INSERT INTO rate_limit_durable (prefix, key) VALUES ('a', 'b')`,
			check: "objects", level: cli.Problem, found: "lacks constraint rate_limit_durable_pkey", do: "loses nothing",
		},
		"another primary key": {
			sql: `ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey;
				ALTER TABLE rate_limit_durable ADD CONSTRAINT rate_limit_durable_pkey PRIMARY KEY (prefix, key, algorithm)`,
			check: "objects", level: cli.Problem, found: "has constraint rate_limit_durable_pkey", do: "loses nothing",
		},
		"the key of the policies dropped": {
			sql:   `ALTER TABLE rate_limit_policy DROP CONSTRAINT rate_limit_policy_pkey`,
			check: "objects", level: cli.Problem, found: "lacks constraint rate_limit_policy_pkey", do: "loses nothing",
		},
		"an index of the policies dropped": {
			sql:   `DROP INDEX rate_limit_policy_target`,
			check: "objects", level: cli.Problem, found: "lacks index rate_limit_policy_target", do: "loses nothing",
		},
		"a default of the policies changed": {
			sql:   `ALTER TABLE rate_limit_policy ALTER mode SET DEFAULT 'off', ALTER name TYPE varchar(200)`,
			check: "objects", level: cli.Problem, found: "has column mode", do: "loses nothing",
		},
		"another type": {
			sql:   `ALTER TYPE rate_limit_decision ADD ATTRIBUTE more text`,
			check: "objects", level: cli.Problem, found: "type rate_limit_decision has column more", do: "loses nothing",
		},
		"another result": {
			sql: `DROP FUNCTION rate_limit_reset;
				CREATE FUNCTION rate_limit_reset(text, text, boolean, integer, boolean) RETURNS text LANGUAGE sql AS $$ SELECT 'a' $$`,
			check: "objects", level: cli.Problem, found: "has result", do: "loses nothing",
		},
		"a trigger function dropped": {
			sql:   `DROP FUNCTION _rate_limit_note_policy CASCADE`,
			check: "objects", level: cli.Problem, found: "function _rate_limit_note_policy() is missing", do: "loses nothing",
		},
		"a column and a constraint more": {
			sql: `ALTER TABLE rate_limit_durable ADD COLUMN note text, ADD CONSTRAINT positive CHECK (count >= 0);
				ALTER TABLE rate_limit_policy ADD COLUMN team text`,
			check: "objects", level: cli.Problem, found: "has column note, which should not be there",
			do: "`ALTER TABLE public.rate_limit_durable DROP COLUMN \"note\"`, which loses what is in it",
		},
		"columns and an index more that refuse nothing": {
			sql: `ALTER TABLE rate_limit_durable ADD COLUMN note text;
				ALTER TABLE rate_limit_policy ADD COLUMN team text NOT NULL DEFAULT 'ours', ADD COLUMN row_number int GENERATED ALWAYS AS IDENTITY,
					ADD COLUMN next bigint NOT NULL GENERATED ALWAYS AS (id + 1) STORED;
				CREATE INDEX team ON rate_limit_policy (team); CREATE INDEX late ON rate_limit_policy (valid_until)`,
			check: "objects", level: cli.Warning,
			found: "somebody has added what does no harm: table rate_limit_durable has column note; table rate_limit_policy has column next; ",
			do:    "if nobody needs it, `ALTER TABLE public.rate_limit_durable DROP COLUMN \"note\"`, which loses what is in it",
		},
		"a column that has to be given": {
			sql:   `ALTER TABLE rate_limit_shadow ADD COLUMN note text NOT NULL, ADD COLUMN more text`,
			check: "objects", level: cli.Problem, found: "table rate_limit_shadow has column note, which should not be there",
		},
		"a column whose type has to be given": {
			sql:   `CREATE DOMAIN named AS text NOT NULL; ALTER TABLE rate_limit_shadow ADD COLUMN note named`,
			check: "objects", level: cli.Problem, found: "table rate_limit_shadow has column note, which should not be there",
		},
		"an index that refuses rows": {
			sql:   `CREATE UNIQUE INDEX one ON rate_limit_ephemeral (prefix); CREATE UNIQUE INDEX one_policy ON rate_limit_policy (name)`,
			check: "objects", level: cli.Problem, found: "table rate_limit_ephemeral has index one, which should not be there",
		},
		"constraints that refuse rows": {
			sql: `ALTER TABLE rate_limit_ephemeral ADD UNIQUE (prefix);
				ALTER TABLE rate_limit_policy ADD CONSTRAINT one EXCLUDE USING btree (name WITH =)`,
			check: "objects", level: cli.Problem, found: "table rate_limit_policy has constraint one, which should not be there",
		},
		"all functions dropped": {
			sql: `DO $$ DECLARE f text; BEGIN FOR f IN SELECT p.oid::regprocedure FROM pg_proc AS p
				WHERE p.pronamespace = 'public'::regnamespace LOOP EXECUTE 'DROP FUNCTION IF EXISTS ' || f || ' CASCADE'; END LOOP; END $$`,
			check: "objects", level: cli.Problem, found: "function rate_limit_all(", do: "loses nothing",
		},
		"open to everybody": {
			sql:   `GRANT EXECUTE ON FUNCTION rate_limit_take_token_bucket TO PUBLIC`,
			check: "rights", level: cli.Warning, found: "every role may execute public.rate_limit_take_token_bucket",
			do: "`REVOKE EXECUTE ON FUNCTION public.rate_limit_take_token_bucket FROM PUBLIC`",
		},
		"a trigger of the policies dropped": {
			sql:   `DROP TRIGGER rate_limit_policy_note ON rate_limit_policy`,
			check: "objects", level: cli.Problem, found: "table rate_limit_policy lacks trigger rate_limit_policy_note", do: "loses nothing",
		},
		"a column of the policies dropped": {
			sql:   `ALTER TABLE rate_limit_policy DROP COLUMN comment`,
			check: "objects", level: cli.Problem, found: "table rate_limit_policy lacks column comment", do: "loses all rows of rate_limit_policy",
		},
		"the policies dropped": {
			sql:   `DROP TABLE rate_limit_policy`,
			check: "objects", level: cli.Problem, found: "table rate_limit_policy is missing", do: "loses nothing",
		},
		"the history of policies dropped": {
			sql:   `DROP TABLE rate_limit_policy_history`,
			check: "objects", level: cli.Problem, found: "table rate_limit_policy_history is missing", do: "loses nothing",
		},
		"a policy of a newer release": {
			sql: `SET session_replication_role = replica;
				UPDATE rate_limit_policy SET policy = 'leap 1/1m' WHERE key = 'customer:42'; RESET session_replication_role;
				INSERT INTO rate_limit_policy (name, mode, comment) VALUES ('api', 'off', 'why')`,
			check: "policies", level: cli.Problem, found: "rows with a policy that this release cannot read (id 1)", do: "`DELETE FROM public.rate_limit_policy WHERE id IN (1)`",
		},
		"policies that make no sense": {
			sql: `SET session_replication_role = replica;
				INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, comment) VALUES
					('api', NULL, NULL, 'throttle', 'fixed 1/1m', 'mode'), ('api', 'secret', NULL, 'deny', 'fixed 1/1m', 'policy'),
					('api', NULL, NULL, 'enforce', NULL, 'none'), (repeat('n', 129), NULL, NULL, 'off', NULL, 'name'), ('api', '', NULL, 'off', NULL, 'key'),
					('api', 'a', 'b', 'off', NULL, 'two'), ('api', NULL, repeat('n', 513), 'off', NULL, 'prefix');
				RESET session_replication_role`,
			check: "policies", level: cli.Problem, found: "rows with a name, key or prefix that no limiter can have (id 5, 6, 7, 8)", do: "IN (3, 4, 5, 6, 7, 8, 2)",
		},
		"a shadow with slots": {
			sql: `SET session_replication_role = replica;
				INSERT INTO rate_limit_policy (name, mode, policy, comment) VALUES ('api', 'shadow', 'concurrent 5', 'why');
				RESET session_replication_role`,
			check: "policies", level: cli.Problem, found: "rows with a shadow with slots, which nobody would release (id ", do: "DELETE FROM",
		},
		"triggers of the policies disabled": {
			sql: `ALTER TABLE rate_limit_policy DISABLE TRIGGER USER;
				INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES ('api', 'secret', 'enforce', 'none', 'why');
				ALTER TABLE rate_limit_policy ENABLE REPLICA TRIGGER rate_limit_policy_note`,
			check: "policies", level: cli.Problem, found: "trigger rate_limit_policy_note is turned off, so no process learns of changes", do: "ENABLE TRIGGER rate_limit_policy_turn`",
		},
		"the check of the policies disabled": {
			sql:   `ALTER TABLE rate_limit_policy DISABLE TRIGGER rate_limit_policy_check`,
			check: "policies", level: cli.Problem, found: "trigger rate_limit_policy_check is turned off, so nothing checks what is written", do: "ENABLE TRIGGER rate_limit_policy_check`",
		},
		"triggers of the policies for what is replicated": {
			sql:   `ALTER TABLE rate_limit_policy ENABLE ALWAYS TRIGGER rate_limit_policy_note`,
			check: "policies", level: cli.Problem, found: "trigger rate_limit_policy_note also runs when logical replication writes", do: "ENABLE TRIGGER rate_limit_policy_note`",
		},
		"a policy of another kind than the rows": {
			sql: `SELECT rate_limit_allow('mail', 'key', 'bucket 20 1/1d');
				INSERT INTO rate_limit_policy (name, policy, comment) VALUES ('mail', 'sliding 10/1m', 'why'), ('mail', 'bucket 10 5/10s', 'why')`,
			check: "policies", level: cli.Warning, do: "another name in the code",
			found: "policies of the kind sliding for limiter mail, whose rows are of the kind bucket (id 2)",
		},
		"another role may put triggers on the policies": {
			sql:   `GRANT TRIGGER ON rate_limit_policy_history TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "pg_monitor may put triggers on public.rate_limit_policy_history",
		},
		"policies of another role": {
			sql:   `ALTER TABLE rate_limit_policy_history OWNER TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "table public.rate_limit_policy_history belongs to pg_monitor",
		},
		"row-level security forced upon the owner": {
			sql:   `ALTER TABLE rate_limit_durable ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY`,
			check: "additions", level: cli.Problem, found: "row-level security is forced upon the owner of public.rate_limit_durable",
			do: "`ALTER TABLE public.rate_limit_durable NO FORCE ROW LEVEL SECURITY`",
		},
		"a policy of row-level security": {
			sql: `ALTER TABLE rate_limit_durable ENABLE ROW LEVEL SECURITY;
				CREATE POLICY theirs ON rate_limit_durable USING (true)`,
			check: "additions", level: cli.Problem, found: "public.rate_limit_durable has the policy theirs of row-level security",
			do: "`DROP POLICY theirs ON public.rate_limit_durable`",
		},
		"rights of a role that nobody knows": {
			sql: `GRANT SELECT ON rate_limit_durable, rate_limit_sweeper TO pg_monitor;
				GRANT UPDATE ON SEQUENCE rate_limit_policy_id_seq TO pg_monitor; GRANT SELECT (key) ON rate_limit_shadow TO pg_monitor`,
			check: "additions", level: cli.Warning, found: "pg_monitor has rights on public.rate_limit_durable, public.rate_limit_policy_id_seq, public.rate_limit_shadow",
			do: "`REVOKE ALL ON public.rate_limit_durable, public.rate_limit_policy_id_seq, public.rate_limit_shadow FROM pg_monitor`",
		},
		"rights of everybody": {
			sql:   `GRANT SELECT ON ALL TABLES IN SCHEMA public TO PUBLIC`,
			check: "additions", level: cli.Warning, found: "everybody has rights on public.rate_limit_durable, public.rate_limit_durable_hold, public.rate_limit_ephemeral, public.rate_limit_ephemeral_hold",
			do: "FROM PUBLIC`",
		},
		"row-level security hides rows": {
			sql: `ALTER TABLE rate_limit_durable ENABLE ROW LEVEL SECURITY; ALTER TABLE rate_limit_sweeper ENABLE ROW LEVEL SECURITY;
				GRANT SELECT ON rate_limit_sweeper TO pg_monitor`,
			check: "additions", level: cli.Warning, found: "hides the rows of public.rate_limit_sweeper from pg_monitor",
			do: "`ALTER TABLE public.rate_limit_sweeper DISABLE ROW LEVEL SECURITY`",
		},
		"an audit of each take": {
			sql: `CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
				CREATE TRIGGER audit AFTER UPDATE ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION audit()`,
			check: "additions", level: cli.Warning, found: "each take that changes public.rate_limit_durable also runs the trigger audit",
			do: "`DROP TRIGGER audit ON public.rate_limit_durable`",
		},
		"everybody may create": {
			sql:   `GRANT CREATE ON SCHEMA public TO PUBLIC`,
			check: "schema", level: cli.Problem, found: "everybody may create in schema public", do: "`REVOKE CREATE ON SCHEMA public FROM PUBLIC`",
		},
		"another role may create": {
			sql:   `GRANT CREATE ON SCHEMA public TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "pg_monitor may create in schema public", do: "`REVOKE CREATE ON SCHEMA public FROM pg_monitor`",
		},
		"another role may put triggers": {
			sql:   `GRANT TRIGGER ON rate_limit_durable TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "pg_monitor may put triggers on public.rate_limit_durable",
		},
		"table of another role": {
			sql:   `ALTER TABLE rate_limit_goose_version OWNER TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "table public.rate_limit_goose_version belongs to pg_monitor",
			do: "`ALTER TABLE public.rate_limit_goose_version OWNER TO postgres`",
		},
		"overload of another role": {
			sql: `GRANT CREATE ON SCHEMA public TO pg_monitor; SET ROLE pg_monitor; CREATE FUNCTION rate_limit_sweep() RETURNS integer LANGUAGE sql AS 'SELECT 1';
				RESET ROLE; REVOKE CREATE ON SCHEMA public FROM pg_monitor`,
			check: "schema", level: cli.Problem, found: "function public.rate_limit_sweep() belongs to pg_monitor", do: "`DROP FUNCTION public.rate_limit_sweep()`",
		},
		"function of another role": {
			sql: `GRANT CREATE ON SCHEMA public TO pg_monitor; ALTER FUNCTION rate_limit_reset OWNER TO pg_monitor;
				REVOKE CREATE ON SCHEMA public FROM pg_monitor`,
			check: "objects", level: cli.Problem, found: "belongs to pg_monitor, and not to postgres",
		},
		"schema of another role": {
			sql:   granted + `ALTER SCHEMA public OWNER TO pg_monitor`,
			check: "schema", level: cli.Problem, found: "schema public belongs to pg_monitor", do: "`DO $$ DECLARE ours text; BEGIN",
		},
		"database of another role": {
			sql:   granted + `ALTER SCHEMA public OWNER TO pg_database_owner; ` + database,
			check: "schema", level: cli.Problem, found: "schema public belongs to pg_monitor", do: "`DO $$ DECLARE ours text; BEGIN",
		},
		"further indexes": {
			sql: `CREATE INDEX sweep_me ON rate_limit_ephemeral (expires_at);
				CREATE INDEX sweep_me_too ON rate_limit_ephemeral (count)`,
			check: "rate_limit_ephemeral: kind", level: cli.Warning, found: "an index besides its primary key", do: "`DROP INDEX CONCURRENTLY public.sweep_me`",
		},
		"logged": {
			sql:   `ALTER TABLE rate_limit_ephemeral SET LOGGED`,
			check: "rate_limit_ephemeral: kind", level: cli.Warning, found: "it is logged", do: "`ALTER TABLE public.rate_limit_ephemeral SET UNLOGGED`",
		},
		"unlogged": {
			sql:   `ALTER TABLE rate_limit_durable SET UNLOGGED`,
			check: "rate_limit_durable: kind", level: cli.Warning, found: "it is unlogged", do: "`ALTER TABLE public.rate_limit_durable SET LOGGED`",
		},
		"another fillfactor": {
			sql:   `ALTER TABLE rate_limit_durable RESET (fillfactor)`,
			check: "rate_limit_durable: kind", level: cli.Warning, found: "its fillfactor is 100", do: "(fillfactor = 50)",
		},
		"autovacuum off for a table": {
			sql:   `ALTER TABLE rate_limit_durable SET (autovacuum_enabled = off)`,
			check: "rate_limit_durable: autovacuum", level: cli.Problem, found: "turned off", do: "`ALTER TABLE public.rate_limit_durable RESET (autovacuum_enabled)`",
		},
		"no statistics": {
			sql:   `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET track_counts = off', current_database()); END $$`,
			check: "statistics", level: cli.Problem, found: "track_counts is off",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			// Postgres 14 grants CREATE to PUBLIC.
			pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
			pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_durable (prefix, key) VALUES ('a', 'b')")
			pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('api', 'customer:42', 'fixed 1/1m', 'why')")
			pgtest.Exec(t, db.Pool, test.sql)
			found := examined(t, db.URL)[test.check]
			require.Equal(t, test.level, found.Level, found)
			require.Contains(t, found.Found, test.found)
			require.Contains(t, found.Do, test.do)
			follow(t, db, found.Do)
			cured := examined(t, db.URL)
			for check, f := range cured {
				if check != "long transactions" {
					require.Equal(t, cli.Fine, f.Level, f)
				}
			}
			require.Len(t, cured, checksOfAll)
			// Unless the advice says that rows are lost, the row must still be there.
			if !strings.Contains(test.sql, "DROP TABLE rate_limit_durable") && !strings.Contains(test.sql, ", rate_limit_durable") &&
				!strings.Contains(found.Do, "loses all rows of rate_limit_durable") && !strings.Contains(found.Do, "sweep") {
				require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT count(*) = 1 FROM rate_limit_durable WHERE key = 'b'"))
			}
			if strings.Contains(found.Do, "doctor --fix") && !strings.Contains(test.sql, "DROP TABLE rate_limit_policy") &&
				!strings.Contains(found.Do, "loses all rows of rate_limit_policy") {
				require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT count(*) = 1 FROM rate_limit_policy WHERE key = 'customer:42' AND comment = 'why'"))
			}
			// After the repair, the functions work.
			for _, durable := range []bool{true, false} {
				require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_allow('login', 'a', 'fixed 1/1m', durable => $1)", durable))
			}
			pgtest.Exec(t, db.Pool, "SELECT FROM rate_limit_sweep()")
			require.NoError(t, migrations.Up(t.Context(), db.Pool))
			pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('api', 'a', 'fixed 1/1m', 'why')")
			require.Equal(t, "a", pgtest.Scalar[string](t, db.Pool,
				"SELECT after->>'key' FROM rate_limit_policy_history ORDER BY version DESC LIMIT 1"))
		})
	}
}

// If another role owns the database, doctor finds that the functions' owner lacks a right.
func TestDoctorFindsAnOwnerWithoutRights(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I OWNER TO pg_monitor', current_database()); END $$;
		GRANT CREATE ON SCHEMA public TO pg_monitor; ALTER TABLE rate_limit_ephemeral OWNER TO pg_monitor;
		ALTER TABLE rate_limit_durable OWNER TO pg_monitor; ALTER TABLE rate_limit_ephemeral_hold OWNER TO pg_monitor;
		ALTER TABLE rate_limit_durable_hold OWNER TO pg_monitor; ALTER FUNCTION rate_limit_reset OWNER TO pg_monitor;
		REVOKE DELETE ON rate_limit_ephemeral_hold FROM pg_monitor; REVOKE INSERT ON rate_limit_durable FROM pg_monitor`)
	found := examined(t, db.URL)["rights"]
	require.Equal(t, cli.Problem, found.Level)
	require.Contains(t, found.Found, "may not use the tables: rate_limit_reset")
	require.True(t, strings.HasPrefix(found.Do, "as pg_monitor: `GRANT USAGE ON SCHEMA public TO pg_monitor`"), found.Do)
	follow(t, db, found.Do)
	require.Equal(t, cli.Fine, examined(t, db.URL)["rights"].Level)
}

// doctor reports a problem if a role lacks rights. doctor does not report the rights that a role should have.
// TestRoleWithoutRights has a role without any rights.
func TestDoctorOfRoles(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	url := urlWith(t, db, "role=pg_monitor")
	for name, test := range map[string]struct {
		sql   string
		level cli.Level
		found string
	}{
		"some": {"GRANT EXECUTE ON FUNCTION rate_limit_all, rate_limit_reset TO pg_monitor", cli.Warning,
			"may not execute public.rate_limit_take_all, public.rate_limit_take_calendar_window, public.rate_limit_take_fixed_window, public.rate_limit_take_sliding_log, public.rate_limit_take_sliding_window, public.rate_limit_take_token_bucket"},
		"application":   {"GRANT EXECUTE ON FUNCTION " + strings.Join(algorithm.Functions(), ", ") + " TO pg_monitor", cli.Fine, "may execute the functions"},
		"sweeper":       {"GRANT EXECUTE ON FUNCTION rate_limit_sweep TO pg_monitor", cli.Fine, "may sweep"},
		"policy admin":  {"GRANT SELECT, INSERT, UPDATE, DELETE ON rate_limit_policy TO pg_monitor", cli.Fine, "may change policies"},
		"reader":        {"GRANT SELECT ON rate_limit_ephemeral, rate_limit_durable TO pg_monitor", cli.Fine, "may read the tables"},
		"half a reader": {"GRANT SELECT ON rate_limit_ephemeral TO pg_monitor", cli.Problem, "neither execute"},
	} {
		pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC;
			REVOKE ALL ON ALL TABLES IN SCHEMA public FROM pg_monitor;
			REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM pg_monitor; `+test.sql)
		found := examined(t, url)["rights"]
		require.Equal(t, test.level, found.Level, "%s: %v", name, found)
		require.Contains(t, found.Found, test.found)
		if found.Level == cli.Fine {
			continue
		}
		require.Contains(t, found.Do, "as postgres: if it is the application's role, `GRANT EXECUTE ON FUNCTION ")
		if name == "some" {
			follow(t, db, found.Do)
			require.Equal(t, cli.Fine, examined(t, url)["rights"].Level)
			invoke(t, url, "take", "login", "a", "--policy=fixed 1/1m").done(t)
		}
	}
}

func TestDoctorOfASchemaThatARoleCannotUse(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA limits; REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	invoke(t, db.URL, "migrate", "up", "--schema", "limits").done(t)

	// If a role cannot see the schema, doctor says so, with and without --schema.
	url := urlWith(t, db, "role=pg_monitor&search_path=limits")
	for _, args := range [][]string{{"--schema", "limits"}, nil} {
		pgtest.Exec(t, db.Pool, "REVOKE USAGE ON SCHEMA limits FROM pg_monitor")
		found := examined(t, url, args...)["migrations"]
		require.Equal(t, cli.Problem, found.Level)
		require.Contains(t, found.Found, "schema limits")
		follow(t, db, found.Do)
		require.Equal(t, cli.Fine, examined(t, url, args...)["migrations"].Level)
	}

	// If a user looks in another schema, doctor names the schema that has the tables.
	found := examined(t, db.URL)["migrations"]
	require.Equal(t, cli.Problem, found.Level)
	require.Contains(t, found.Found, "tables of these names are in schema limits")
}

// The advice names the schema that --schema gave.
func TestDoctorsAdviceNamesTheSchema(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `CREATE SCHEMA "Limits"`)
	invoke(t, db.URL, "migrate", "up", "--schema", "Limits").done(t)
	pgtest.Exec(t, db.Pool, `DROP TABLE "Limits".rate_limit_shadow; DROP FUNCTION "Limits"._rate_limit_late();
		ALTER TABLE "Limits".rate_limit_ephemeral RESET (fillfactor)`)
	all := examined(t, db.URL, "--schema", "Limits")
	require.Contains(t, all["objects"].Do, "`pgratelimit doctor --fix --schema 'Limits'`")
	follow(t, db, strings.ReplaceAll(all["objects"].Do, "'", "")) // a shell removes the quotation marks
	follow(t, db, all["rate_limit_ephemeral: kind"].Do)
	for check, f := range examined(t, db.URL, "--schema", "Limits") {
		if check != "long transactions" {
			require.Equal(t, cli.Fine, f.Level, f)
		}
	}
}

// If another role created a function, doctor's advice gives that role no rights, and keeps the function's owner.
func TestDoctorHelpsNoStranger(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "GRANT CREATE ON SCHEMA public TO pg_monitor")
	functions := []string{"rate_limit_sweep(a text)", "rate_limit_reset(a text)", "rate_limit_more()"}
	for _, function := range functions {
		pgtest.Exec(t, db.Pool, "SET ROLE pg_monitor; CREATE FUNCTION "+function+
			" RETURNS integer LANGUAGE sql AS 'SELECT 1'; RESET ROLE")
	}
	all := examined(t, db.URL)
	require.Equal(t, cli.Problem, all["schema"].Level)
	for _, f := range all {
		require.NotContains(t, f.Do, "OWNER TO")
		require.NotContains(t, f.Do, "GRANT")
		for _, function := range functions {
			name, _, _ := strings.Cut(function, "(")
			require.Equal(t, f.Check == "schema", strings.Contains(f.Found, name), f)
		}
	}
}

// If another role has created rate_limit_version, doctor reports the function, and still runs the other checks.
func TestDoctorAmongStrangers(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 2))
	pgtest.Exec(t, db.Pool,
		`GRANT CREATE ON SCHEMA public TO pg_monitor; ALTER FUNCTION rate_limit_version() OWNER TO pg_monitor`)
	o := invoke(t, db.URL, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Regexp(t, `(?m)^problem +migrations +.*rate_limit_version belongs to pg_monitor`, o.stdout)
	require.Regexp(t, `(?m)^problem +objects +.*function rate_limit_version\(\) belongs to pg_monitor`, o.stdout)
	require.Regexp(t, `(?m)^problem +schema +.*function public.rate_limit_version\(\) belongs to pg_monitor`, o.stdout)
}

// With quote_all_identifiers, the server quotes all names in definitions.
func TestDoctorWhereAllNamesAreQuoted(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN
		EXECUTE format('ALTER DATABASE %I SET quote_all_identifiers = on', current_database()); END $$`)
	pgtest.Exec(t, db.Pool, "DROP FUNCTION rate_limit_sweep; ALTER TABLE rate_limit_durable ALTER count DROP NOT NULL")
	// doctor finds and repairs these two objects, and then finds no problem.
	require.Regexp(t, `(?m)^ok +fixed +repaired: function rate_limit_sweep[^;]* is missing; `+
		`table rate_limit_durable has column count[^;]*$`,
		invoke(t, db.URL, "doctor", "--fix").done(t))
}

func TestDoctorOfADatabaseThatIsBehind(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 1))
	o := invoke(t, db.URL, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Regexp(t, `(?m)^problem +migrations +not applied: 2 create_functions`, o.stdout)
	require.Contains(t, o.stdout, "→ run `pgratelimit migrate up`\n")
	require.Regexp(t, `(?m)^ok +objects +the 9 that`, o.stdout)

	invoke(t, db.URL, "migrate", "up").done(t)
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_goose_version (version_id, is_applied) VALUES (99999, true)")
	require.Contains(t, invoke(t, db.URL, "doctor").done(t), "at version 99999, of a newer release than this command")

	o = invoke(t, db.URL, "doctor", "--schema", "nowhere")
	require.Equal(t, exitFailed, o.code)
	require.Regexp(t, `(?m)^problem +migrations +ratelimit/migrations: status: no schema`, o.stdout)
}

// Roles have the same rights on a recreated object as before.
func TestDoctorFixKeepsRights(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	role := pgtest.Scalar[string](t, db.Pool, "SELECT quote_ident('fix ' || current_database())")
	pgtest.Exec(t, db.Pool, `CREATE ROLE `+role+`; REVOKE CREATE ON SCHEMA public FROM PUBLIC;
		GRANT EXECUTE ON FUNCTION rate_limit_allow, rate_limit_reset, rate_limit_all TO `+role+`;
		GRANT SELECT, INSERT, UPDATE ON rate_limit_policy TO `+role+` WITH GRANT OPTION;
		GRANT SELECT ON rate_limit_durable, rate_limit_policy_history TO `+role, pgx.QueryExecModeSimpleProtocol)
	t.Cleanup(func() {
		_, _ = db.Pool.Exec(context.WithoutCancel(t.Context()), "DROP OWNED BY "+role+"; DROP ROLE "+role)
	})
	rights := func() []string {
		return pgtest.Scalar[[]string](t, db.Pool, `SELECT array_agg(right_ ORDER BY right_) FROM (
			SELECT format('%s %s', relname, a) FROM pg_class, aclexplode(relacl) AS a
			WHERE relnamespace = 'public'::regnamespace AND a.grantee <> relowner
			UNION ALL SELECT format('%s %s', proname, a) FROM pg_proc, aclexplode(proacl) AS a
			WHERE pronamespace = 'public'::regnamespace AND a.grantee <> proowner) AS _ (right_)`)
	}
	before := rights()
	pgtest.Exec(t, db.Pool, `ALTER FUNCTION rate_limit_reset SECURITY INVOKER; DROP FUNCTION _rate_limit_note_policy CASCADE;
		ALTER TABLE rate_limit_durable ALTER count SET DEFAULT 5; ALTER TABLE rate_limit_policy ALTER comment DROP NOT NULL;
		ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO PUBLIC; ALTER DEFAULT PRIVILEGES GRANT ALL ON FUNCTIONS TO PUBLIC`,
		pgx.QueryExecModeSimpleProtocol)
	o := invoke(t, db.URL, "doctor", "--fix")
	require.Zero(t, o.code, o)
	require.Regexp(t, `(?m)^ok +fixed +repaired: .*function _rate_limit_note_policy\(\) is missing`, o.stdout)
	require.Equal(t, before, rights())
	pgtest.Exec(t, db.Pool, "ALTER DEFAULT PRIVILEGES REVOKE ALL ON TABLES FROM PUBLIC")

	// doctor --fix asks before it deletes rows, and does not drop objects of others.
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_durable DROP COLUMN key")
	invoke(t, db.URL, "doctor", "--fix").complains(t, exitUsage, "nobody can answer")
	pgtest.Exec(t, db.Pool, "CREATE VIEW mine AS SELECT prefix FROM rate_limit_durable")
	invoke(t, db.URL, "doctor", "--fix", "--yes").complains(t, exitFailed, "other objects depend on it")
	require.Equal(t, before, rights())
}

// 'migrate up' finds a missing object even if no migration is pending.
func TestMigrateUpFindsWhatIsMissing(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	invoke(t, db.URL, "migrate", "up").done(t)
	for _, missing := range []map[string]string{
		{
			"DROP FUNCTION rate_limit_reset":                                         "function rate_limit_reset(text, text, boolean, integer, boolean) is missing",
			"ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey": "table rate_limit_durable lacks constraint rate_limit_durable_pkey",
			"DROP TRIGGER rate_limit_policy_note ON rate_limit_policy":               "lacks trigger rate_limit_policy_note",
			"DROP TABLE rate_limit_shadow":                                           "table rate_limit_shadow is missing",
		},
		{"DROP TABLE rate_limit_ephemeral, rate_limit_durable": "somebody has dropped the tables"},
	} {
		want := []string{"nothing is pending, but ", "`pgratelimit doctor --fix`"}
		for sql, found := range missing {
			pgtest.Exec(t, db.Pool, sql)
			want = append(want, found)
		}
		invoke(t, db.URL, "migrate", "up").complains(t, exitFailed, want...)
		invoke(t, db.URL, "doctor", "--fix").done(t)
		invoke(t, db.URL, "migrate", "up").done(t)
	}
}

// If a session has locked the limiter's tables for too long, doctor names the session and says how to end it, even if
// the lock would block doctor.
func TestDoctorSaysWhoHasLocks(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	e := &doctor.Examination{DB: open(t, db.URL)}
	for _, test := range []struct {
		hold, what string
		level      cli.Level
	}{
		{"BEGIN; LOCK TABLE rate_limit_durable", "AccessExclusiveLock on rate_limit_durable", cli.Problem},
		{"BEGIN; LOCK TABLE rate_limit_policy IN SHARE MODE", "ShareLock on rate_limit_policy", cli.Problem},
		{"BEGIN; SELECT rate_limit_allow('a', 'secret', 'fixed 1/1h')", "RowExclusiveLock on rate_limit_ephemeral", cli.Warning},
		{"BEGIN; SELECT count(*) FROM rate_limit_shadow", "AccessShareLock on rate_limit_shadow", cli.Warning},
		{fmt.Sprintf("SELECT pg_advisory_lock(%d)", lockholders.Migrations), "the lock of migrations", cli.Warning},
	} {
		config, err := pgx.ParseConfig(db.URL)
		require.NoError(t, err)
		config.RuntimeParams["application_name"] = "night shift"
		config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
		holder, err := pgx.ConnectConfig(t.Context(), config)
		require.NoError(t, err)
		pgtest.Exec(t, holder, test.hold)

		held, err := e.ReadLocks(t.Context(), 0) // do not wait until the locks are 5 s old
		require.NoError(t, err)
		f := doctor.JudgeLocks(held)
		require.Equal(t, test.level, f.Level, f)
		require.Contains(t, f.Found, fmt.Sprintf(`process %d (application "night shift", idle`, holder.PgConn().PID()))
		require.Contains(t, f.Found, test.what)
		require.NotContains(t, f.Found, "secret")
		held, err = e.ReadLocks(t.Context(), time.Hour)
		require.NoError(t, err)
		require.Empty(t, held)
		follow(t, db, f.Do)
		testkit.WaitUntil(t, func() bool {
			held, err := e.ReadLocks(t.Context(), 0)
			return err == nil && len(held) == 0
		})
		_ = holder.Close(t.Context())
	}

	// If a lock prevents doctor from reading the tables, doctor reports only the lock.
	holder := pgtest.Begin(t, db)
	pgtest.Exec(t, holder, "LOCK TABLE rate_limit_durable")
	testkit.WaitUntil(t, func() bool {
		held, err := e.ReadLocks(t.Context(), doctor.LongLock)
		return err == nil && len(held) == 1
	})
	all := examined(t, db.URL)
	require.Len(t, all, 1)
	require.Contains(t, all["locks"].Found, "calls fail meanwhile: process ")
}

// The most important findings come last. The most important findings are red on a terminal that allows colors.
func TestDoctorsOutput(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_durable RESET (fillfactor); "+
		"CREATE UNIQUE INDEX more ON rate_limit_ephemeral (count)", pgx.QueryExecModeSimpleProtocol)
	o := invoke(t, db.URL, "doctor")
	require.Equal(t, exitFailed, o.code)
	require.Empty(t, o.stderr)
	require.NotContains(t, o.stdout, "\x1b")
	require.Regexp(t, `(?s)\nok .*\nwarning  rate_limit_durable: kind .*\nproblem  objects .*\n`+
		` +→ .*\n1 problem, 1 warning\n$`, o.stdout)
	require.NotRegexp(t, `(?s)warning .*\nok `, o.stdout)

	for _, none := range []bool{false, true} {
		cmd := command(t, db.URL, "doctor")
		cmd.Env = append(cmd.Env, "NO_COLOR=", "TERM=xterm")
		if none {
			cmd.Env = append(cmd.Env, "NO_COLOR=1")
		}
		code, shown := onTerminal(t, cmd).wait()
		require.Equal(t, exitFailed, code)
		require.Equal(t, !none, regexp.MustCompile(`(?m)^\x1b\[31mproblem +objects`).MatchString(shown), shown)
		require.Equal(t, none, !strings.Contains(shown, "\x1b["))
		require.True(t, strings.HasSuffix(shown, "\n1 problem, 1 warning\n"), shown)
	}
}

func TestDoctorSeesForeignTransactions(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	other := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["application_name"] = "nightly report" },
	)
	tx, err := other.Begin(t.Context())
	require.NoError(t, err)
	out := invoke(t, db.URL, "doctor").done(t)
	require.Regexp(t, `(?m)^ok +long transactions +session \d+ \(nightly report, idle in transaction\) `+
		`has the longest one, open for \d+s$`, out)
	require.True(t, strings.HasSuffix(out, "\n0 problems, 0 warnings\n"), out)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Regexp(t, `(?m)^ok +long transactions +none$`, invoke(t, db.URL, "doctor").done(t))
}
