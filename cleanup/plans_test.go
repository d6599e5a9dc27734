package cleanup

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A session plans the function when the tables are next to empty, and keeps the plans while they grow to 1,000 pages of which
// the planner knows nothing. A batch of a page must still read a page.
func TestPlansDependOnNoStatistics(t *testing.T) {
	t.Parallel()
	for _, durable := range []bool{false, true} {
		for _, mode := range []string{"auto", "force_generic_plan", "force_custom_plan"} {
			t.Run(table(durable)+", plan_cache_mode "+mode, func(t *testing.T) {
				t.Parallel()
				conn := connect(t, pgtest.New(t))
				scans, rows := scansOfAGrownTable(t, conn, durable, mode)
				require.Zero(t, scans, "sequential scans")
				require.Less(t, rows, int64(5*200), "rows read by 5 batches")
			})
		}
	}
}

// The same test sees what happens without the setting that the function has against it.
func TestPlansWithoutTheirSettingScanTheTable(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.New(t))
	exec(t, conn, "ALTER FUNCTION rate_limit_sweep RESET enable_seqscan")
	scans, rows := scansOfAGrownTable(t, conn, false, "force_generic_plan")
	require.NotZero(t, scans)
	require.Greater(t, rows, int64(30_000))
}

// scansOfAGrownTable returns how often the table was scanned, and how many rows were read, by five batches of one page on a
// session that had planned them before the table grew.
func scansOfAGrownTable(t *testing.T, conn *pgx.Conn, durable bool, mode string) (scans, rows int64) {
	t.Helper()
	exec(t, conn, "ALTER TABLE "+table(durable)+" SET (autovacuum_enabled = off)")
	exec(t, conn, "SET plan_cache_mode = "+mode)
	fill(t, conn, table(durable), "first", 1, time.Now())
	exec(t, conn, "ANALYZE "+table(durable))
	for range 10 { // past the five calls after which a session may keep a plan
		exec(t, conn, "SELECT rate_limit_sweep()")
	}
	fill(t, conn, table(durable), "a", 50_000, t0)
	exec(t, conn, "UPDATE rate_limit_sweeper SET durable = $1, next_page = 10", durable)

	// Counted in a transaction, where the session's own counters are there to be read at once.
	exec(t, conn, "BEGIN")
	for range 5 {
		require.Positive(t, scalar[int64](t, conn, "SELECT deleted FROM rate_limit_sweep(max_pages => 1)"))
	}
	row := conn.QueryRow(t.Context(), "SELECT pg_stat_get_xact_numscans($1::regclass), pg_stat_get_xact_tuples_returned($1::regclass)", table(durable))
	require.NoError(t, row.Scan(&scans, &rows))
	exec(t, conn, "COMMIT")
	return scans, rows
}
