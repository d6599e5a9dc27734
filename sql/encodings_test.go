package sql_test

import (
	"context"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Migrations and decisions work in databases that do not use UTF-8, and in sessions where a backslash in a literal is
// an escape.
func TestThoroughEncodingsAndLiterals(t *testing.T) {
	t.Parallel()

	for _, encoding := range []string{"UTF8", "EUC_JP", "LATIN1", "SQL_ASCII"} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			name := pgtest.Scalar[string](t, db.Pool, "SELECT current_database()") + "_" + strings.ToLower(encoding)
			pgtest.Exec(
				t,
				db.Pool,
				"CREATE DATABASE "+name+" ENCODING '"+encoding+"' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'",
			)
			t.Cleanup(func() {
				admin := &pgtest.DB{URL: db.URL}
				_, err := admin.NewPool(t, nil).
					Exec(context.WithoutCancel(t.Context()), "DROP DATABASE "+name+" WITH (FORCE)")
				require.NoError(t, err)
			})
			const schema = `Odd "na$$me\`
			configure := func(config *pgxpool.Config) {
				config.ConnConfig.Database = name
				config.ConnConfig.RuntimeParams["standard_conforming_strings"] = "off"
				config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{schema}.Sanitize()
			}
			pool := db.NewPool(t, configure)
			pgtest.Exec(t, pool, "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
			require.NoError(t, migrations.Up(t.Context(), pool))
			for name, policy := range limitertest.SlowPolicies(10) {
				for _, durable := range []bool{false, true} {
					for _, schema := range []string{"", schema} {
						limiter := limitertest.New(
							t,
							pool,
							ratelimit.Config{
								Name:    name + schema,
								Policy:  policy,
								Durable: durable,
							},
							ratelimit.ClientConfig{Schema: schema},
						)
						for name, call := range limitertest.Calls(limiter, "key") {
							require.NoError(t, call(), name)
						}
						_, err := ratelimit.AllowAll(t.Context(), limiter.Request("one", 1), limiter.Request("two", 1))
						require.NoError(t, err)
					}
				}
			}
			utf8 := db.NewPool(t, func(config *pgxpool.Config) {
				configure(config)
				config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
			})
			withReadPolicy(t, utf8)
			_, difference := readAlike(t, utf8, textsIn(encoding))
			require.Empty(t, difference)
			require.True(t, pgtest.Scalar[bool](t, pool, "SELECT allowed FROM rate_limit_allow('n', 'k', 'log 1/1m')"))
			pgtest.Exec(t, pool, "SELECT rate_limit_sweep()")
			require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
		})
	}
}
