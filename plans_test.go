package ratelimit

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A session plans its statements when the tables are next to empty, and keeps the plans while they grow to 24,000 rows
// of which the planner knows nothing. No statement may come to scan a table or a whole index: then a decision that costs
// microseconds costs as much as the table is long.
func TestPlansDependOnNoStatistics(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{false, true} {
		for _, mode := range []string{"auto", "force_generic_plan", "force_custom_plan"} {
			t.Run(table(durable)+", plan_cache_mode "+mode, func(t *testing.T) {
				t.Parallel()
				conn := connect(t, pgtest.New(t))
				scanned, read := scansOfAGrownTable(t, conn, durable, mode, 5)
				require.Zero(t, scanned, "sequential scans")
				// 900 elements, some more for old versions of their rows. A single scan of the index would read all of them.
				require.Less(t, read, int64(24_000), "rows read through the index")
			})
		}
	}
}

// Nor may a plan depend on what the session has turned off; that JIT is off is seen in the catalog.
func TestPlansDependOnNoSettings(t *testing.T) {
	t.Parallel()
	for _, off := range [][]string{
		{"enable_nestloop"}, {"enable_sort"}, {"enable_tidscan"}, {"enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"},
		{"enable_nestloop", "enable_sort", "enable_tidscan", "enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan", "enable_hashjoin", "enable_mergejoin", "enable_material"},
	} {
		t.Run(strings.Join(off, " "), func(t *testing.T) {
			t.Parallel()
			conn := connect(t, pgtest.New(t))
			for _, setting := range append(off, "standard_conforming_strings") {
				exec(t, conn, "SET "+setting+" = off")
			}
			if len(off) > 3 { // once: it compiles every statement of the test, which takes 20 ms
				exec(t, conn, "SET jit_above_cost = 0")
			}
			scanned, read := scansOfAGrownTable(t, conn, false, "auto", 5)
			require.Zero(t, scanned, "sequential scans")
			require.Less(t, read, int64(24_000), "rows read through the index")
		})
	}
}

// The same test sees what happens without the setting that the functions have against it.
func TestPlansWithoutTheirSettingScanTheTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.New(t))
	for _, function := range []string{"rate_limit_fixed_window", "rate_limit_sliding_window", "rate_limit_token_bucket", "rate_limit_sliding_log", "rate_limit_all"} {
		exec(t, conn, "ALTER FUNCTION "+function+" RESET enable_seqscan")
	}
	scanned, _ := scansOfAGrownTable(t, conn, false, "force_generic_plan", 1)
	require.NotZero(t, scanned)
}

// scansOfAGrownTable returns how often the table was scanned, and how many rows were read through its index, by so many
// batches of each algorithm on a session that had planned them before the table grew.
func scansOfAGrownTable(t *testing.T, conn *pgx.Conn, durable bool, mode string, batches int) (scanned, read int64) {
	t.Helper()
	exec(t, conn, "ALTER TABLE "+table(durable)+" SET (autovacuum_enabled = off)")
	exec(t, conn, "SET plan_cache_mode = "+mode)
	limiters := map[int]*Limiter{}
	for algorithm, policy := range []Policy{
		FixedWindow{Limit: 1000, Window: time.Hour}, SlidingWindow{Limit: 1000, Window: time.Hour},
		TokenBucket{Capacity: 1000, Refill: 1, Every: time.Hour}, SlidingLog{Limit: 1000, Window: time.Hour},
	} {
		limiters[algorithm] = newLimiter(t, conn, Config{Name: fmt.Sprint(algorithm), Policy: policy, Durable: durable, Timeout: amply})
	}
	run := func(from int) {
		elements := make([]element, 60)
		for i := range elements {
			elements[i] = element{key: fmt.Sprint("key ", from+i*7), cost: 1, count: 1}
		}
		for _, l := range limiters {
			require.NoError(t, l.decide(t.Context(), conn, elements, settings{}))
			_, err := l.Peek(t.Context(), "key 1")
			require.NoError(t, err)
			_, err = l.Allow(t.Context(), "key 2")
			require.NoError(t, err)
			require.NoError(t, l.Reset(t.Context(), "key 3"))
		}
	}
	exec(t, conn, fmt.Sprintf("INSERT INTO %s (prefix, key) VALUES ('0', 'key 1')", table(durable)))
	exec(t, conn, "ANALYZE "+table(durable))
	for range 10 { // past the five calls after which a session may keep a plan
		run(0)
	}
	exec(t, conn, fmt.Sprintf(`INSERT INTO %s (prefix, key)
		SELECT prefix, 'key ' || n FROM generate_series(0, 2) AS prefix, generate_series(1000, 9000) AS n`, table(durable)))

	// Counted in a transaction, where the session's own counters are there to be read at once.
	exec(t, conn, "BEGIN")
	for i := range batches {
		run(2000 + 500*i)
	}
	row := conn.QueryRow(t.Context(), `SELECT pg_stat_get_xact_numscans($1::regclass),
		(SELECT sum(pg_stat_get_xact_tuples_returned(indexrelid)) FROM pg_index WHERE indrelid = $1::regclass)::bigint`, table(durable))
	require.NoError(t, row.Scan(&scanned, &read))
	exec(t, conn, "COMMIT")
	return scanned, read
}
