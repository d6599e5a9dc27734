package cleanup

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A session plans the function's statements while the tables are almost empty, and keeps the plans. Then a table grows
// to 1,000 pages, but the statistics do not show that. A batch of one page must still read only one page.
func TestPlansDependOnNoStatistics(t *testing.T) {
	t.Parallel()
	for mode, durable := range map[string]bool{"auto": false, "force_generic_plan": true, "force_custom_plan": false} {
		t.Run(pgtest.Table(durable)+", plan_cache_mode "+mode, func(t *testing.T) {
			t.Parallel()
			conn := pgtest.Connect(t, pgtest.New(t))
			scans := scansOfAGrownTable(t, conn, durable, mode)
			require.Zero(t, scans.Sequential)
			require.Less(t, scans.Rows, int64(5*200), "rows read by 5 batches")
		})
	}
}

// Without the planner setting of the function, a batch reads the whole table.
func TestMistakesInPlansScanTheTable(t *testing.T) {
	t.Parallel()
	require.NotZero(t, pgtest.FirstScan(func() int64 {
		conn := pgtest.Connect(t, pgtest.New(t))
		pgtest.Exec(t, conn, "ALTER FUNCTION rate_limit_sweep RESET enable_seqscan")
		scans := scansOfAGrownTable(t, conn, false, "force_generic_plan")
		require.True(t, scans.Sequential == 0 || scans.Rows > 30_000, "%+v", scans)
		return scans.Sequential
	}))
}

// scansOfAGrownTable returns what five batches of one page read, in a session that planned these batches before the
// table grew.
func scansOfAGrownTable(t *testing.T, conn *pgx.Conn, durable bool, mode string) pgtest.Scans {
	t.Helper()
	table := pgtest.Table(durable)
	pgtest.Fill(t, conn, table, "first", 1, time.Now())
	plan := func() { pgtest.Exec(t, conn, "SELECT rate_limit_sweep()") }
	grow := func() {
		pgtest.Fill(t, conn, table, "a", 50_000, t0)
		pgtest.Exec(t, conn, "UPDATE rate_limit_sweeper SET durable = $1, next_page = 10", durable)
	}
	return pgtest.ScansOfAGrownTable(t, conn, table, mode, plan, grow, func() {
		for range 5 {
			require.Positive(t, pgtest.Scalar[int64](t, conn, "SELECT deleted FROM rate_limit_sweep(max_pages => 1)"))
		}
	})
}
