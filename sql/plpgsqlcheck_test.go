package sql_test

import (
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// plpgsql_check finds no mistake in the functions, even on paths that no call takes. If the extension is missing, the
// test is skipped, or fails if RATELIMIT_TEST_PLPGSQL_CHECK is set.
func TestFunctionsPassPlpgsqlCheck(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	available := pgtest.Scalar[bool](
		t,
		db.Pool,
		"SELECT EXISTS (SELECT FROM pg_available_extensions WHERE name = 'plpgsql_check')",
	)
	if !available && os.Getenv("RATELIMIT_TEST_PLPGSQL_CHECK") == "" {
		t.Skip("plpgsql_check: install this extension of the server (Debian: postgresql-15-plpgsql-check)")
	}
	pgtest.Exec(t, db.Pool, "CREATE EXTENSION plpgsql_check")
	findings := func() []string {
		rows, err := db.Pool.Query(t.Context(), `
			SELECT concat_ws(', ', p.proname, 'line ' || f.lineno, f.level, f.sqlstate, f.message, f.detail, f.hint)
			FROM pg_proc AS p, LATERAL plpgsql_check_function_tb(p.oid,
				CASE WHEN p.prorettype = 'trigger'::regtype THEN 'rate_limit_policy'::regclass ELSE 0 END,
				extra_warnings => true, security_warnings => true) AS f
			WHERE p.pronamespace = 'public'::regnamespace AND p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'plpgsql')
				AND p.proname ~ '^_?rate_limit_' AND f.message <> 'never read variable "ignored"'`)
		require.NoError(t, err)
		findings, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return findings
	}
	require.Empty(t, findings())

	// plpgsql_check notices a missing column on a path that no call takes.
	pgtest.Exec(t, db.Pool, `
		CREATE FUNCTION rate_limit_broken() RETURNS bigint LANGUAGE plpgsql AS $$
		BEGIN
			IF false THEN
				RETURN (SELECT nothing FROM rate_limit_durable);
			END IF;
			RETURN 1;
		END $$`)
	require.EqualValues(t, 1, pgtest.Scalar[int64](t, db.Pool, "SELECT rate_limit_broken()"))
	require.Len(t, findings(), 1)
}
