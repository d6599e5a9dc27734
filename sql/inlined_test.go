package sql_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Postgres must inline the short SQL functions, because otherwise a decision takes a third longer. Postgres does not
// inline a function that uses a costly argument twice.
func TestExpressionsAreInlined(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	rows, err := db.Pool.Query(t.Context(), `
		SELECT p.proname::text, ARRAY(SELECT a::regtype::text FROM unnest(p.proargtypes) AS a)
		FROM pg_proc AS p
		WHERE p.pronamespace = 'public'::regnamespace AND p.proname ~ '^_rate_limit_' AND NOT p.proretset
			AND p.prolang = (SELECT oid FROM pg_language WHERE lanname = 'sql')`)
	require.NoError(t, err)
	type expression struct {
		Name string
		Args []string
	}
	expressions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[expression])
	require.NoError(t, err)
	require.Greater(t, len(expressions), 15)
	called := func(name string, columns, args []string) bool {
		plan, err := db.Pool.Query(t.Context(), fmt.Sprintf("EXPLAIN (VERBOSE, COSTS off) SELECT public.%s(%s) FROM (SELECT %s OFFSET 0) AS s",
			name, strings.Join(args, ", "), strings.Join(columns, ", ")))
		require.NoError(t, err, name)
		lines, err := pgx.CollectRows(plan, pgx.RowTo[string])
		require.NoError(t, err, name)
		return strings.Contains(strings.Join(lines, "\n"), name+"(")
	}
	for _, e := range expressions {
		columns, args := []string{"1 AS one"}, []string{}
		for i, kind := range e.Args {
			columns, args = append(columns, fmt.Sprintf("NULL::%s AS a%d", kind, i)), append(args, fmt.Sprint("a", i))
		}
		require.False(t, called(e.Name, columns, args), e.Name)
	}
	// Check that the test notices a function that is not inlined. Postgres must not evaluate a volatile argument twice.
	require.True(t, called("_rate_limit_ceil_div", []string{"1::bigint AS a"}, []string{"(random() * a)::bigint", "a"}))
}
