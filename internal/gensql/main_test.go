package main

import (
	"context"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	published "github.com/pgratelimit/ratelimit/migrations" // migrations are what this command writes
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// sources are the files that define the schema, in the order in which they can be applied. The other files hold blocks
// that these include.
var sources = []string{
	"tables.sql", "types.sql", "calendar.sql", "all.sql", "limit.sql", "takeall.sql", "reset.sql", "policy.sql", "allow.sql",
	"sweep.sql", "policies.sql", "leases.sql", "access.sql", "version.sql",
}

func TestMigrationsYieldWhatSQLSays(t *testing.T) {
	t.Parallel()

	templates, err := parse("../../sql")
	require.NoError(t, err)
	text := func(file string) string {
		var text strings.Builder
		require.NoError(t, templates.ExecuteTemplate(&text, file, schema()))
		return text.String()
	}
	files, err := filepath.Glob("../../sql/*.sql")
	require.NoError(t, err)
	defines := regexp.MustCompile(`(?m)^(CREATE|ALTER|COMMENT|GRANT|REVOKE|DO)\b`)
	for _, file := range files {
		require.Equal(t,
			defines.MatchString(text(filepath.Base(file))), slices.Contains(sources, filepath.Base(file)), file)
	}

	db := pgtest.Empty(t)
	migrated, direct := db.InSchema(t, "by_migrations"), db.InSchema(t, "by_sources")
	require.NoError(t, published.Up(t.Context(), migrated))
	status, err := published.Status(t.Context(), migrated)
	require.NoError(t, err)
	latest := strconv.FormatInt(status[len(status)-1].Version, 10)
	for _, file := range sources {
		_, err = direct.Exec(t.Context(), strings.ReplaceAll(text(file), versionMark, latest))
		require.NoError(t, err, file)
	}

	want := pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "by_migrations"), "by_migrations")
	require.NotEmpty(t, want)
	require.Empty(t, pgtest.Differences(
		want, pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "by_sources"), "by_sources")))

	// The comparison can fail. It sees each of these changes.
	for name, change := range map[string]string{
		"relation option":      `ALTER TABLE rate_limit_durable SET (fillfactor = 42)`,
		"persistence":          `ALTER TABLE rate_limit_ephemeral SET LOGGED`,
		"column":               `ALTER TABLE rate_limit_durable ADD COLUMN more bigint`,
		"column type":          `ALTER TABLE rate_limit_durable ALTER COLUMN prefix TYPE varchar(128) COLLATE "C"`,
		"column default":       `ALTER TABLE rate_limit_durable ALTER COLUMN count SET DEFAULT 1`,
		"column not null":      `ALTER TABLE rate_limit_durable ALTER COLUMN count DROP NOT NULL`,
		"column collation":     `ALTER TABLE rate_limit_durable ALTER COLUMN prefix TYPE text COLLATE "POSIX"`,
		"column storage":       `ALTER TABLE rate_limit_durable ALTER COLUMN key SET STORAGE PLAIN`,
		"constraint":           `ALTER TABLE rate_limit_durable ADD CONSTRAINT more CHECK (count >= 0)`,
		"name of a constraint": `ALTER TABLE rate_limit_durable RENAME CONSTRAINT rate_limit_durable_pkey TO other`,
		"index":                `CREATE INDEX ON rate_limit_durable (expires_at)`,
		"privilege on a table": `GRANT SELECT ON rate_limit_durable TO pg_monitor`,
		"comment on a table":   `COMMENT ON TABLE rate_limit_durable IS 'Other.'`,
		"comment on a column":  `COMMENT ON COLUMN rate_limit_durable.key IS NULL`,
		"function":             `CREATE FUNCTION rate_limit_more() RETURNS integer LANGUAGE sql AS 'SELECT 1'`,
		"body": `CREATE OR REPLACE FUNCTION _rate_limit_late() RETURNS boolean
			LANGUAGE plpgsql AS 'BEGIN RETURN true; END'`,
		"setting of a function": `ALTER FUNCTION rate_limit_reset SET work_mem = '1MB'`,
		"search_path":           `ALTER FUNCTION rate_limit_reset SET search_path = pg_temp, by_sources`,
		"rights of a function":  `ALTER FUNCTION rate_limit_reset SECURITY INVOKER`,
		"cost of a function":    `ALTER FUNCTION rate_limit_reset COST 7`,
		"privilege to execute":  `GRANT EXECUTE ON FUNCTION rate_limit_reset TO PUBLIC`,
		"comment on a function": `COMMENT ON FUNCTION rate_limit_reset IS NULL`,
		"type":                  `CREATE TYPE rate_limit_more AS ENUM ('a')`,
		"composite type":        `CREATE TYPE rate_limit_more AS (a integer)`,
		"trigger": `CREATE TRIGGER more BEFORE UPDATE ON rate_limit_durable
			FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()`,
		"policy": `CREATE POLICY more ON rate_limit_durable`,
	} {
		t.Run(name, func(t *testing.T) {
			tx, err := direct.Begin(t.Context())
			require.NoError(t, err)
			defer tx.Rollback(context.Background())

			_, err = tx.Exec(t.Context(), change)
			require.NoError(t, err)
			require.NotEmpty(t, pgtest.Differences(
				want, pgtest.WithoutSchema(pgtest.Catalog(t, tx, "by_sources"), "by_sources")))
		})
	}
}
