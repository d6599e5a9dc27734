package bench

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
)

// costs are the costs of a load for its server and for this process.
type costs struct {
	serverCPU, clientCPU time.Duration // 0 if the operating system does not report it
	postgres             postgresCosts
}

// postgresCosts are the costs that Postgres counts.
type postgresCosts struct {
	wal     int64 // bytes
	xids    int64 // transaction ids
	updates int64 // row updates of one table
	hot     int64 // how many of the updates were HOT
}

// costsOf runs a load from its first call to its last, including the warm-up, and returns its costs. No other load runs
// meanwhile, so nothing has to be subtracted.
func (a *arena) costsOf(c *contender, run func()) costs {
	a.b.Helper()
	postgres := a.postgresCosts(c)
	server, client := cpuTime(c.pids()...), cpuTime(os.Getpid())
	run()
	spent := costs{serverCPU: cpuTime(c.pids()...) - server, clientCPU: cpuTime(os.Getpid()) - client}
	after := a.postgresCosts(c)
	spent.postgres = postgresCosts{
		wal:     after.wal - postgres.wal,
		xids:    after.xids - postgres.xids,
		updates: after.updates - postgres.updates,
		hot:     after.hot - postgres.hot,
	}
	return spent
}

// postgresCosts reads the costs, and uses no transaction id itself. It reads the insertion position of the WAL. Up to
// that position, the WAL also has commits that do not wait, although they may not be on disk yet.
func (a *arena) postgresCosts(c *contender) (now postgresCosts) {
	a.b.Helper()
	if c.pool == nil {
		return now
	}
	a.flushStatistics(c.pool)
	require.NoError(a.b, a.admin.QueryRow(a.ctx(), `
		SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint,
			pg_snapshot_xmax(pg_current_snapshot())::text::bigint,
			coalesce(pg_stat_get_tuples_updated(to_regclass(nullif($1, ''))), 0),
			coalesce(pg_stat_get_tuples_hot_updated(to_regclass(nullif($1, ''))), 0)`,
		c.store.table).Scan(&now.wal, &now.xids, &now.updates, &now.hot))
	return now
}

// flushStatistics makes a pool's sessions report their statistics now. Without it, the sessions report a second later.
func (a *arena) flushStatistics(pool *pgxpool.Pool) {
	a.b.Helper()
	conns := pool.AcquireAllIdle(a.ctx())
	errs := make([]error, len(conns))
	var sessions sync.WaitGroup
	for i, conn := range conns {
		sessions.Go(func() {
			defer conn.Release()
			_, errs[i] = conn.Exec(a.ctx(), "SELECT pg_stat_force_next_flush()")
		})
	}
	sessions.Wait()
	for _, err := range errs {
		require.NoError(a.b, err)
	}
}

// cpuTime returns the CPU time of processes, including ended children. The time of threads is exact, from the
// scheduler's accounting. The time of ended children is in hundredths of a second.
func cpuTime(pids ...int) (total time.Duration) {
	for _, pid := range pids {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
		for _, thread := range threads {
			// The file has the CPU time in nanoseconds, and two other numbers.
			if fields := procFields(thread); len(fields) > 0 {
				total += time.Duration(number(fields[0]))
			}
		}
		// The file has "pid (name) state …". Fields 16 and 17 are the children's times, in clock ticks.
		if fields := procFields(fmt.Sprintf("/proc/%d/stat", pid)); len(fields) > 14 {
			total += time.Duration(number(fields[13])+number(fields[14])) * time.Second / 100
		}
	}
	return total
}

// procFields returns the fields of a file in /proc, without pid and name. It returns nil if the process has ended.
func procFields(path string) []string {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	return strings.Fields(string(content[bytes.LastIndexByte(content, ')')+1:]))
}

func number(field string) int64 {
	n, _ := strconv.ParseInt(field, 10, 64)
	return n
}
