package ratelimit

import (
	"context"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Databases that are not in UTF-8, and sessions in which a backslash in a literal means something, are migrated and decide.
func TestEncodingsAndLiterals(t *testing.T) {
	t.Parallel()

	for _, encoding := range []string{"UTF8", "EUC_JP", "LATIN1", "SQL_ASCII"} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			name := scalar[string](t, db.Pool, "SELECT current_database()") + "_" + strings.ToLower(encoding)
			exec(t, db.Pool, "CREATE DATABASE "+name+" ENCODING '"+encoding+"' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
			t.Cleanup(func() {
				admin := &pgtest.DB{URL: db.URL}
				_, err := admin.NewPool(t, nil).Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)")
				require.NoError(t, err)
			})
			const schema = `Odd "na$$me\`
			pool := db.NewPool(t, func(config *pgxpool.Config) {
				delete(config.ConnConfig.RuntimeParams, "role")
				config.ConnConfig.Database = name
				config.ConnConfig.RuntimeParams["standard_conforming_strings"] = "off"
				config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
			})
			exec(t, pool, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
			require.NoError(t, migrations.Up(t.Context(), pool))
			for name, policy := range slowPolicies(10) {
				for _, durable := range []bool{false, true} {
					for _, schema := range []string{"", schema} {
						limiter := newLimiter(t, pool, Config{Name: name + schema, Policy: policy, Durable: durable, Schema: schema, Timeout: amply})
						for name, call := range everyCall(limiter, "key") {
							require.NoError(t, call(), name)
						}
						_, err := AllowAll(t.Context(), limiter.Request("one", 1), limiter.Request("two", 1))
						require.NoError(t, err)
					}
				}
			}
			exec(t, pool, "SELECT rate_limit_sweep()")
			require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
		})
	}
}

// All SQL is plain ASCII, which every encoding has, and has no backslash in an ordinary literal, where it depends on a setting.
func TestSQLIsPlain(t *testing.T) {
	t.Parallel()

	odd := regexp.MustCompile(`[^\n -~]|\\`)
	for _, pattern := range []string{"sql/*.sql", "sql/call/*.sql", "migrations/*.sql", "cleanup/*.sql", "deploy/*.sql", "cmd/pgratelimit/sql/*.sql", "cmd/pgratelimit/sql/doctor/*.sql"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		require.NotEmpty(t, files, pattern)
		for _, file := range files {
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			require.Empty(t, odd.FindString(string(content)), file)
		}
	}
}
