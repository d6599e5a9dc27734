package engine_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A session plans its statements while the tables are almost empty. It keeps the plans while the tables grow to 24,000
// rows, without new statistics. No statement may scan a table or a whole index, because each decision would then take
// longer in a larger table.
func TestPlansDependOnNoStatistics(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	for _, mode := range []string{"auto", "force_generic_plan", "force_custom_plan"} {
		for _, durable := range limitertest.TablesFor(t, mode) {
			t.Run(pgtest.Table(durable)+", plan_cache_mode "+mode, func(t *testing.T) {
				t.Parallel()
				conn := pgtest.Connect(t, pgtest.New(t))
				scanned, read := scansOfAGrownTable(t, conn, durable, mode, 5)
				require.Zero(t, scanned, "sequential scans")
				// The statements read 900 rows, and some old versions of these rows. A single scan of the whole index
				// would read 24,000 rows.
				require.Less(t, read, int64(24_000), "rows read through the index")
			})
		}
	}
}

// A plan must not depend on the planner settings that a session has turned off. The functions themselves turn JIT off.
func TestThoroughPlansDependOnNoSettings(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	for _, off := range [][]string{
		{"enable_nestloop"}, {"enable_sort"}, {"enable_tidscan"}, {"enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan"},
		{"enable_nestloop", "enable_sort", "enable_tidscan", "enable_indexscan", "enable_bitmapscan", "enable_indexonlyscan", "enable_hashjoin", "enable_mergejoin", "enable_material"},
	} {
		t.Run(strings.Join(off, " "), func(t *testing.T) {
			t.Parallel()
			conn := pgtest.Connect(t, pgtest.New(t))
			for _, setting := range append(off, "standard_conforming_strings") {
				pgtest.Exec(t, conn, "SET "+setting+" = off")
			}
			if len(off) > 3 { // only once, because JIT takes 20 ms for each statement of the test
				pgtest.Exec(t, conn, "SET jit_above_cost = 0")
			}
			scanned, read := scansOfAGrownTable(t, conn, false, "auto", 5)
			require.Zero(t, scanned, "sequential scans")
			require.Less(t, read, int64(24_000), "rows read through the index")
		})
	}
}

// Without the functions' own setting, the same check finds scans of the table.
func TestPlansWithoutTheirSettingScanTheTable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	require.NotZero(t, pgtest.FirstScan(func() int64 {
		conn := pgtest.Connect(t, pgtest.New(t))
		for _, function := range algorithm.Functions() {
			if function != "rate_limit_reset" {
				pgtest.Exec(t, conn, "ALTER FUNCTION "+function+" RESET enable_seqscan")
			}
		}
		pgtest.Exec(t, conn, "ALTER FUNCTION "+pgtest.Left+" RESET enable_seqscan")
		scanned, _ := scansOfAGrownTable(t, conn, false, "force_generic_plan", 1)
		return scanned
	}))
}

// scansOfAGrownTable runs batches of each algorithm in a session that has planned its statements before the table grew.
// It returns how often the table was scanned, and how many rows were read through its index.
func scansOfAGrownTable(t *testing.T, conn *pgx.Conn, durable bool, mode string, batches int) (scanned, read int64) {
	t.Helper()
	limiters := map[int]*ratelimit.Limiter{}
	for algorithm, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 1000, Window: time.Hour}, ratelimit.SlidingWindow{Limit: 1000, Window: time.Hour},
		ratelimit.TokenBucket{Capacity: 1000, Refill: 1, Every: time.Hour}, ratelimit.SlidingLog{Limit: 1000, Window: time.Hour},
		limitertest.SlowCalendar(1000),
	} {
		limiters[algorithm] = limitertest.New(
			t,
			conn,
			ratelimit.Config{Name: fmt.Sprint(algorithm), Policy: policy, Durable: durable},
		)
	}
	run := func(from int) {
		elements := make([]modeltest.Element, 60)
		for i := range elements {
			elements[i] = modeltest.Element{Key: fmt.Sprint("key ", from+i*7), Cost: 1, Count: 1}
		}
		for _, l := range limiters {
			require.NoError(t, decide(t.Context(), l, conn, elements, engine.Transaction{}))
			_, err := l.Peek(t.Context(), "key 1")
			require.NoError(t, err)
			_, err = l.Allow(t.Context(), "key 2")
			require.NoError(t, err)
			require.NoError(t, l.Reset(t.Context(), "key 3"))
		}
	}
	table := pgtest.Table(durable)
	pgtest.Exec(t, conn, "INSERT INTO "+table+" (prefix, key) VALUES ('0', 'key 1')")
	scans := pgtest.ScansOfAGrownTable(t, conn, table, mode, func() { run(0) }, func() {
		pgtest.Exec(t, conn, "INSERT INTO "+table+` (prefix, key)
			SELECT prefix, 'key ' || n FROM generate_series(0, 2) AS prefix, generate_series(1000, 9000) AS n`)
	}, func() {
		for i := range batches {
			run(2000 + 500*i)
		}
	})
	return scans.Sequential, scans.IndexRows
}
