package main

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	published "github.com/pgratelimit/ratelimit/migrations" // the migrations that this command writes
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// loaded returns the files of sql/ in the order of sql/install.sql.
func loaded(t *testing.T) []string {
	t.Helper()
	install, err := os.ReadFile("../../sql/install.sql")
	require.NoError(t, err)
	var files []string
	for _, match := range regexp.MustCompile(`(?m)^\\ir (\w+\.sql)$`).FindAllStringSubmatch(string(install), -1) {
		files = append(files, match[1])
	}
	return files
}

func TestMigrationsYieldWhatSQLSays(t *testing.T) {
	t.Parallel()

	// Each file is part of install.sql and of a migration.
	sources := loaded(t)
	files, err := filepath.Glob("../../sql/*.sql")
	require.NoError(t, err)
	for _, file := range files {
		require.Equal(t, filepath.Base(file) != "install.sql", slices.Contains(sources, filepath.Base(file)), file)
	}
	migrated := []string{"version.sql"}
	for _, m := range migrations() {
		for _, source := range m.sources {
			if !slices.Contains(migrated, source+".sql") {
				migrated = append(migrated, source+".sql")
			}
		}
	}
	require.ElementsMatch(t, sources, migrated)

	db := pgtest.Empty(t)
	byMigrations, direct := db.InSchema(t, "by_migrations"), db.InSchema(t, "by_sources")
	require.NoError(t, published.Up(t.Context(), byMigrations))
	for _, file := range sources {
		text, err := os.ReadFile(filepath.Join("../../sql", file))
		require.NoError(t, err)
		_, err = direct.Exec(t.Context(), string(text))
		require.NoError(t, err, file)
	}

	want := pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "by_migrations"), "by_migrations")
	require.NotEmpty(t, want)
	require.Empty(t, pgtest.Differences(
		want, pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "by_sources"), "by_sources")))

	// Check that the comparison notices each of these changes.
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
		"comment on a column":  `COMMENT ON COLUMN rate_limit_ephemeral.key IS NULL`,
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
