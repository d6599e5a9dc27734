package sql_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A row of the year 294247, the last year that a bigint of microseconds can have, is ahead of the clock. All functions
// set the row's times back.
func TestRowsOfTheLastYear(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const clock int64 = 1_800_000_000_000_000
	db := pgtest.New(t)
	for _, call := range []string{
		"rate_limit_take_sliding_window('n', '{k}', 5, 60000000, now_us => $1)",
		"rate_limit_take_sliding_window('n', '{k,l}', 5, 60000000, now_us => $1)",
		"rate_limit_take_all('{n}', '{k}', false, '{2}', '{5}', '{60000000}', '{0}', '{UTC}', '{1}', '{1}', '{1}', '{1}', '{1}', now_us => $1)",
	} {
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral")
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count, window_start, expires_at)
			VALUES ('n', 'k', 2, 1, 9223372036854775800, 9223372036854775807)`)
		pgtest.Exec(t, db.Pool, "SELECT "+call, clock)
		require.Equal(t, []int64{clock, 2}, pgtest.Scalar[[]int64](t, db.Pool,
			"SELECT ARRAY[window_start, count] FROM rate_limit_ephemeral WHERE key = 'k'"), call)
	}
}
