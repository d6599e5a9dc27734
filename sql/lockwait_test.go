package sql_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A calendar window may end while a call waits for a row. The call's units must count in the window that contains the
// time of the lock. Check that the test notices functions that always use the window of the clock's first reading.
func TestWindowsOfTheCalendarThatEndDuringAWaitAreOver(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, keys := range []string{"{a}", "{a,b,c,d}"} {
		for _, there := range []bool{false, true} {
			for _, broken := range []bool{false, true} {
				db := pgtest.New(t)
				if broken {
					pgtest.Rewrite(t, db.Pool, "rate_limit_take_calendar_window", "clock + 10000 < window_end", "clock < window_end")
				}
				// The minute ends 4 ms after the first reading of the clock, and 2 ms before the second reading.
				const ends = int64(1_800_000_000_000_000)
				pgtest.Rewrite(t, db.Pool, "rate_limit_take_calendar_window", "IF cardinality(keys) = 1 THEN",
					"now_us := now_us + 6000; IF cardinality(keys) = 1 THEN")
				if there { // rows of the previous window
					pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count, window_start, scale, expires_at)
						SELECT 'n', k, 5, 10, $2::bigint - 180000000, 60000000, $2::bigint - 120000000 FROM unnest($1::text[]) AS k`, keys, ends)
				}
				pgtest.Exec(t, db.Pool, "SELECT rate_limit_take_calendar_window('n', $1, 10, 60000000, 'UTC', now_us => $2)", keys, ends-4000)
				first := pgtest.Scalar[int64](t, db.Pool, "SELECT min(expires_at) FROM rate_limit_ephemeral")
				require.Equal(t, broken, first == ends, "%s, there: %v", keys, there)
			}
		}
	}
}

// If a row gets a new window or a full bucket, all its columns show the same reading of the clock.
func TestNewWindowsBeginAtOneReadingOfTheClock(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for range 100 {
		pgtest.Exec(t, db.Pool, `SELECT rate_limit_all('{1,2,3}', '{fixed,sliding,bucket}', '{key,key,key}', '{f,f,f}',
			'{1,2,3}', '{5,5,5}', '{10,10,10}', '{0,0,100}')`)
		require.Empty(
			t,
			pgtest.Scalar[[]string](
				t,
				db.Pool,
				`SELECT array_agg(prefix) FROM rate_limit_ephemeral WHERE expires_at - window_start
			<> CASE prefix WHEN 'fixed' THEN 10 WHEN 'sliding' THEN 20 ELSE 1 END OR since <> window_start`,
			),
		)
	}
}

// A call without lock_timeout waits as long as necessary, and then decides. A call with a lock_timeout gives up after
// 25 times lock_timeout. In a changed function, the call without lock_timeout gives up after a second.
func TestThoroughCallsWithoutALockTimeoutWait(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const sets = "rate_limit_take_all('{n,n,n,n}', '{held,a,b,c}', false, '{1,1,1,1}', '{9,9,9,9}', " +
		"'{1000000000000,1000000000000,1000000000000,1000000000000}', '{0,0,0,0}', NULL, '{1,1,1,1}', '{1,1,1,1}', '{1,2,3,4}', " +
		"'{1,1,1,1}', '{1,1,1,1}', lock_timeout_ms => %s)"
	const slots = "rate_limit_slots('{n,n,n,n}', '{held,a,b,c}', '{f,f,f,f}', '{9,9,9,9}', '{1,1,1,1}', array_fill(60000000::bigint, '{4}'), " +
		"ARRAY(SELECT gen_random_uuid() FROM generate_series(1, 4)), array_fill('{}'::jsonb, '{4}'), lock_timeout_ms => %s)"
	for _, call := range []string{
		"rate_limit_take_fixed_window('n', '{held}', 9, 1000000000000, lock_timeout_ms => %s)",
		"rate_limit_take_fixed_window('n', '{held,a,b,c}', 9, 1000000000000, lock_timeout_ms => %s)", sets, slots,
	} {
		for _, lockTimeout := range []string{"NULL", "-1", "0", "60000", "59999"} {
			db := pgtest.New(t)
			call, late := fmt.Sprintf(call, lockTimeout), lockTimeout == "59999" && strings.Contains(call, ",c}")
			pgtest.Exec(t, db.Pool, "SELECT "+call)
			held := 30 * time.Millisecond
			if late {
				pgtest.Rewrite(t, db.Pool, "_rate_limit_give_up", "lock_timeout_ms * 25000::bigint", "1000000")
				held = 1100 * time.Millisecond
			}
			holder, waiter := pgtest.Begin(t, db), pgtest.Connect(t, db)
			pgtest.Exec(t, holder, "SELECT FROM rate_limit_ephemeral WHERE key = 'held' FOR UPDATE")
			taken := testkit.Later(func() (any, error) { return waiter.Exec(context.Background(), "SELECT "+call) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			begun := time.Now()
			testkit.WaitUntil(t, func() bool { return time.Since(begun) > held })
			require.NoError(t, holder.Commit(t.Context()))
			_, err := taken()
			if late {
				require.ErrorContains(t, err, "too many rows are held")
				continue
			}
			require.NoError(t, err, call)
			require.Equal(t, []int64{2}, pgtest.Scalar[[]int64](t, db.Pool, "SELECT array_agg(DISTINCT coalesce(held, count)) FROM rate_limit_ephemeral"), call)
		}
	}
}
