package catalog_test

import (
	"encoding/json"
	"flag"
	"io/fs"
	"os"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

var update = flag.Bool("update", false, "write made.json, as make sql does")

func TestMain(m *testing.M) { pgtest.Main(m) }

// TestMade checks that made.json describes what the migrations make. TestMade uses schemas with odd names.
func TestMade(t *testing.T) {
	t.Parallel()

	files, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	db := pgtest.Empty(t)
	for _, schema := range []string{"limits", `Odd "na'me" $$\ $function$ `, "rate_limit_", "a"} {
		pool := db.InSchema(t, schema)
		require.NoError(t, migrations.Up(t.Context(), pool))
		made := map[int64]catalog.Catalog{}
		for _, file := range slices.Backward(files) {
			version, err := goose.NumericComponent(file)
			require.NoError(t, err)
			made[version] = readWithoutOwner(t, pool, schema)
			require.NoError(t, migrations.Down(t.Context(), pool))
		}
		require.Empty(t, readWithoutOwner(t, pool, schema))
		if *update {
			content, err := json.MarshalIndent(made, "", "\t")
			require.NoError(t, err)
			require.NoError(t, os.WriteFile("made.json", append(content, '\n'), 0o666))
			continue
		}
		require.Equal(t, made, catalog.All(), "run make sql")
	}
}

// made.json has all objects that the migrations make.
func TestNamesAreAllThatTheMigrationsMake(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	made := pgtest.Scalar[[]string](t, db.Pool, `
		SELECT array_agg(DISTINCT name ORDER BY name) FROM (
			SELECT relname::text FROM pg_class
			WHERE relkind IN ('r', 'c') AND relnamespace = 'public'::regnamespace AND relname <> 'rate_limit_goose_version'
			UNION ALL SELECT proname::text FROM pg_proc WHERE pronamespace = 'public'::regnamespace
		) AS made (name)`)
	require.Equal(t, made, catalog.Names())
	require.Equal(t, "_rate_limit_late", catalog.Name("function _rate_limit_late()"))
	require.Equal(t, "rate_limit_row", catalog.Name("type rate_limit_row"))
}

// readWithoutOwner reads all objects in the schema, including those that are not the limiter's.
func readWithoutOwner(t *testing.T, pool *pgxpool.Pool, schema string) (found catalog.Catalog) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) (err error) {
		names := pgtest.Scalar[[]string](t, tx, `
			SELECT array_agg(name) FROM (
				SELECT relname::text, relnamespace FROM pg_class WHERE relkind NOT IN ('i', 'S')
				UNION ALL SELECT proname, pronamespace FROM pg_proc
			) AS there (name, namespace)
			WHERE namespace = (SELECT oid FROM pg_namespace WHERE nspname = $1) AND name <> 'rate_limit_goose_version'`,
			schema)
		found, err = catalog.ReadNames(t.Context(), tx, schema, names)
		return err
	}))
	for name, object := range found {
		object.Owner = ""
		found[name] = object
	}
	return found
}

func TestDifferences(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	owner := pgtest.Scalar[string](t, db.Pool, "SELECT current_user")
	differences := func(sql string) (all []string) {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback(t.Context())) }()
		pgtest.Exec(t, tx, sql)
		found, err := catalog.Read(t.Context(), tx, "public")
		require.NoError(t, err)
		made, ok := catalog.Made(3)
		require.True(t, ok)
		for _, difference := range found.Differences(made, owner) {
			all = append(all, difference.Text)
		}
		return all
	}

	for sql, want := range map[string][]string{
		"SELECT 1": nil,
		// The operator may make these changes.
		"ALTER TABLE rate_limit_durable SET (autovacuum_vacuum_scale_factor = 0.01)": nil,
		"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO pg_monitor":              nil,
		"COMMENT ON TABLE rate_limit_durable IS 'ours'":                              nil,
		"CREATE FUNCTION rate_limit_mine() RETURNS int LANGUAGE sql AS 'SELECT 1'":   nil,
		`GRANT CREATE ON SCHEMA public TO pg_monitor; SET ROLE pg_monitor; CREATE FUNCTION _rate_limit_late(text)
			RETURNS int LANGUAGE sql AS 'SELECT 1'; RESET ROLE`: nil, // doctor reports the other owner of the function

		"DROP TABLE rate_limit_durable":                       {"table rate_limit_durable is missing"},
		"ALTER TABLE rate_limit_durable DROP COLUMN since":    {"table rate_limit_durable lacks column since"},
		"ALTER TABLE rate_limit_durable ADD COLUMN note text": {"table rate_limit_durable has column note, which should not be there"},
		"ALTER TABLE rate_limit_durable SET UNLOGGED":         {`table rate_limit_durable has persistence "unlogged" instead of "logged"`},
		"ALTER TABLE rate_limit_durable RESET (fillfactor)":   {`table rate_limit_durable has fillfactor "unset" instead of "50"`},
		"ALTER TABLE rate_limit_durable ALTER count TYPE int": {`table rate_limit_durable has column count "integer not null default 0 storage p" instead of "bigint not null default 0 storage p"`},
		"ALTER TABLE rate_limit_durable ALTER count SET DEFAULT 1": {
			`table rate_limit_durable has column count "bigint not null default 1 storage p" instead of "bigint not null default 0 storage p"`},
		"ALTER TABLE rate_limit_durable ENABLE ROW LEVEL SECURITY": nil, // some platforms enable row security for every table
		`CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
			CREATE TRIGGER more AFTER INSERT ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION f()`: nil,
		`CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END'; ALTER FUNCTION f OWNER TO pg_monitor;
			CREATE TRIGGER more AFTER INSERT ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION f()`: {
			"table rate_limit_durable has trigger more, which should not be there"},
		"ALTER TABLE rate_limit_durable FORCE ROW LEVEL SECURITY": {`table rate_limit_durable has row security "forced" instead of "none"`},
		"CREATE POLICY p ON rate_limit_durable USING (true)": {
			`table rate_limit_durable has row security "policy p" instead of "none"`},
		"ALTER TABLE rate_limit_durable DROP CONSTRAINT rate_limit_durable_pkey": {
			"table rate_limit_durable lacks constraint rate_limit_durable_pkey", "table rate_limit_durable lacks index rate_limit_durable_pkey"},
		"CREATE INDEX more ON rate_limit_durable (expires_at)": {"table rate_limit_durable has index more, which should not be there"},
		`CREATE FUNCTION f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NEW; END';
			CREATE TRIGGER more BEFORE INSERT ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION f()`: {
			"table rate_limit_durable has trigger more, which should not be there"},
		"CREATE RULE more AS ON DELETE TO rate_limit_durable DO INSTEAD NOTHING": {
			"table rate_limit_durable has rule more, which should not be there"},
		"ALTER TABLE rate_limit_durable OWNER TO pg_monitor": {
			"table rate_limit_durable belongs to pg_monitor, and not to " + owner},
		"ALTER TABLE rate_limit_durable DROP COLUMN since, ADD COLUMN since bigint": nil,
		`ALTER TABLE rate_limit_durable RENAME TO moved; CREATE VIEW rate_limit_durable AS SELECT * FROM moved`: {
			"table rate_limit_durable is missing", "view rate_limit_durable should not be there"},
		"ALTER TYPE rate_limit_row ALTER ATTRIBUTE granted TYPE int": {
			`type rate_limit_row has column granted "integer storage p" instead of "bigint storage p"`},
		"DROP FUNCTION _rate_limit_late": {"function _rate_limit_late() is missing"},
		"ALTER FUNCTION _rate_limit_late SECURITY DEFINER": {`function _rate_limit_late() has kind ` +
			`"plpgsql volatile security definer parallel u cost 100 rows 0 kind f" instead of ` +
			`"plpgsql volatile security invoker parallel u cost 100 rows 0 kind f"`},
		"CREATE OR REPLACE FUNCTION _rate_limit_late() RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RETURN true; END'": {
			"function _rate_limit_late() has another body"},
		"ALTER FUNCTION _rate_limit_late OWNER TO pg_monitor": {
			"function _rate_limit_late() belongs to pg_monitor, and not to " + owner},
		"CREATE FUNCTION _rate_limit_late(text) RETURNS int LANGUAGE sql AS 'SELECT 1'": {
			"function _rate_limit_late(text) should not be there"},
		"ALTER FUNCTION rate_limit_version() SET search_path = public": {
			`function rate_limit_version() has settings "search_path=public" instead of "none"`},
		`DO $$ BEGIN EXECUTE replace(pg_get_functiondef('rate_limit_reset'::regproc), 'public.rate_limit_', 'rate_limit_'); END $$`: {
			// Postgres first looks for an unqualified name among the caller's temporary tables.
			"function rate_limit_reset(text, text, boolean, integer, boolean) has another body"},
	} {
		require.Equal(t, want, differences(sql), sql)
	}
}
