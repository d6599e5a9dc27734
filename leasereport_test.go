package ratelimit

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/memory"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// leasing is a limiter on Postgres of which leases hold something of the keys.
func leasing(t *testing.T, db *pgtest.DB, config Config, keys ...string) *Limiter {
	t.Helper()
	config.Policy, config.Lease = FixedWindow{Limit: 1_000_000, Window: time.Hour}, &Lease{MaxShare: 0.01}
	config.Client.Timeout = amply
	l := newLimiter(t, db.Pool, config)
	for _, key := range keys {
		testkit.WaitUntil(t, func() bool {
			result, err := l.Allow(t.Context(), key)
			require.NoError(t, err)
			return result.Source == SourceLease && l.client.batcher.leases.held(l.space, l.policy, key) > 0
		})
	}
	return l
}

// report has a limiter's process report what it holds.
func (l *Limiter) report() { l.client.batcher.leases.tell() }

// reportedLeases is what the table says, but for the processes' names.
func reportedLeases(t *testing.T, db pgtest.Querier) []string {
	t.Helper()
	return pgtest.Scalar[[]string](t, db, `SELECT coalesce(array_agg(concat_ws(' ', name, key, durable, held) ORDER BY name, key), '{}')
		FROM rate_limit_lease WHERE ends_at > clock_timestamp() AND ends_at <= clock_timestamp() + interval '30 s'
			AND reported_at BETWEEN clock_timestamp() - interval '1 hour' AND clock_timestamp()`)
}

// What a process holds is reported, until it has given everything back. Clients of one process keep apart.
func TestLeasesAreReported(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	api, quota := leasing(t, db, Config{Name: "api"}, "a", "b"), leasing(t, db, Config{Name: "quota", Durable: true}, "a")
	row := func(l *Limiter, key string) string {
		return fmt.Sprint(l.space.name, " ", key, " ", l.space.durable, " ", l.client.batcher.leases.held(l.space, l.policy, key))
	}
	for range 2 {
		api.report()
		quota.report()
		require.Equal(t, []string{
			strings.Replace(row(api, "a"), "false", "f", 1), strings.Replace(row(api, "b"), "false", "f", 1),
			strings.Replace(row(quota, "a"), "true", "t", 1),
		}, reportedLeases(t, db.Pool))
	}
	host, err := os.Hostname()
	require.NoError(t, err)
	processes := pgtest.Scalar[[]string](t, db.Pool, "SELECT array_agg(DISTINCT process) FROM rate_limit_lease")
	require.Len(t, processes, 2)
	for _, process := range processes {
		require.Contains(t, process, fmt.Sprintf("%s/%d/", host[:min(len(host), 64)], os.Getpid()))
	}

	require.NoError(t, api.ReturnLeases(t.Context()))
	require.Len(t, reportedLeases(t, db.Pool), 1)
	require.NoError(t, api.ReturnLeases(t.Context())) // and says nothing more
	require.NoError(t, quota.ReturnLeases(t.Context()))
	require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_lease"))
}

// The rows of a process that has died stay until they end. Another one that reports deletes them a minute later, some at
// a time, but for those that somebody has locked.
func TestLeasesOfADeadProcessEnd(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	l := leasing(t, db, Config{Name: "api"}, "a")
	l.report()
	dead := leasing(t, db, Config{Name: "api"}, "b")
	dead.report()
	require.Len(t, reportedLeases(t, db.Pool), 2)
	ended := func(ago string) {
		pgtest.Exec(t, db.Pool, "UPDATE rate_limit_lease SET ends_at = clock_timestamp() - $1::interval WHERE key = 'b'", ago)
	}
	ended("59 s")
	l.report()
	require.Len(t, reportedLeases(t, db.Pool), 1)
	require.EqualValues(t, 2, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_lease"))

	ended("61 s")
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_lease WHERE key = 'b' FOR UPDATE")
	l.report()
	require.EqualValues(t, 2, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_lease"))
	require.NoError(t, tx.Rollback(t.Context()))
	l.report()
	require.EqualValues(t, 1, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_lease"))

	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_lease SELECT 'p', 'n', i, false, 1, '2000-01-01', '2000-01-01'
		FROM generate_series(1, 150) AS i`)
	for _, left := range []int64{51, 1} {
		l.report()
		require.Equal(t, left, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_lease"))
	}
}

// A process reports the hundred keys of which it holds the most.
func TestLargestLeasesAreReported(t *testing.T) {
	t.Parallel()
	var keys []string
	for i := range 2 * maxReportedLeases {
		keys = append(keys, fmt.Sprint(i))
	}
	db := pgtest.New(t)
	l := leasing(t, db, Config{Name: "api"}, keys...)
	for _, key := range keys[maxReportedLeases:] {
		testkit.WaitUntil(t, func() bool {
			_, err := l.Allow(t.Context(), key)
			require.NoError(t, err)
			return l.client.batcher.leases.held(l.space, l.policy, key) > firstLease
		})
	}
	l.report()
	require.Len(t, reportedLeases(t, db.Pool), maxReportedLeases)
	require.ElementsMatch(t, keys[maxReportedLeases:],
		pgtest.Scalar[[]string](t, db.Pool, "SELECT array_agg(key) FROM rate_limit_lease"))
}

// What the function takes from whoever may call it.
func TestReportLeasesArguments(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	report := func(arguments string) []string {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_report_leases('p', "+arguments+")")
		return reportedLeases(t, db.Pool)
	}
	// Two limiters of one name, and what is not a lease.
	require.Equal(t, []string{"n k f 7", "n k t 1"}, report(`ARRAY['n', 'n', 'n', 'n', NULL, 'n', 'n', '', repeat('n', 129), 'n'],
		ARRAY['k', 'k', 'k', NULL, 'k', 'k', 'k', 'k', 'k', repeat('k', 513)], '{f, f, t, f, f, NULL, f, f, f, f}',
		'{3, 4, 1, 1, 1, 1, 0, 1, 1, 1}', '{1000000, 20000000, 20000000, 1000000, 1000000, 1000000, 1000000, 1000000, 1000000, 1000000}'`))
	require.Equal(t, []string{"n k f 9223372036854775807"}, report(`'{n, n, n, n}', '{k, k, l, m}', '{f, f, f, f}',
		'{9223372036854775807, 1, -1, 1}', '{20000000, 1, 1, NULL}'`))
	require.Empty(t, report("'{n}', '{k}', '{f}', '{1}', '{9223372036854775807}'"))
	require.Empty(t, report("'{n}', '{k}', '{f}', '{1}', '{9223372036854775}'"), "too late to be seen above")
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::int FROM rate_limit_lease"))
	require.Empty(t, report("NULL, NULL, NULL, NULL, NULL"))
	require.Len(t, report(`array_fill('n'::text, ARRAY[200]), ARRAY(SELECT i::text FROM generate_series(1, 200) AS i),
		array_fill(false, ARRAY[200]), ARRAY(SELECT generate_series(1, 200)), array_fill(20000000, ARRAY[200])`), 100)
	require.EqualValues(t, 101, pgtest.Scalar[int64](t, db.Pool, "SELECT min(held) FROM rate_limit_lease"))
	for _, process := range []string{"NULL", "''", "repeat('p', 129)"} {
		refused(t, db.Pool, process, "SELECT rate_limit_report_leases("+process+", '{}', '{}', '{}', '{}', '{}')", "22023")
	}
}

// Reports leave every ten seconds while something is held, and one more when nothing is. Then no timer is left.
func TestWhenLeasesAreReported(t *testing.T) {
	t.Parallel()
	withLeases(t, nil, func(t *testing.T, l *leaseTest) {
		after := func(d time.Duration, want ...int) {
			elapse(d)
			synctest.Wait()
			require.Equal(t, want, l.db.reported())
		}
		l.allow("key", 2)
		l.allow("other", 2)
		after(9 * time.Second)
		after(2*time.Second, 2)
		require.Equal(t, 1, l.allow("third", 1), "a report is no statement of the callers'")
		require.Equal(t, 1, l.allow("third", 1))
		after(10*time.Second, 2, 3)
		after(11*time.Second, 2, 3, 1)
		after(10*time.Second, 2, 3, 1, 0)
		after(time.Hour, 2, 3, 1, 0)
		require.Zero(t, l.client.batcher.leases.due, "no timer at rest")

		// What comes and goes within the period is not reported.
		l.allow("key", 2)
		require.NoError(t, l.ReturnLeases(t.Context()))
		after(time.Hour, 2, 3, 1, 0)
		require.Zero(t, l.client.batcher.leases.due)

		// Nor is there more to say after all was given back.
		l.allow("key", 2)
		after(11*time.Second, 2, 3, 1, 0, 1)
		require.NoError(t, l.ReturnLeases(t.Context()))
		after(time.Hour, 2, 3, 1, 0, 1, 0)
		require.Zero(t, l.client.batcher.leases.due)
	})
}

// A report that fails is no outage. It is logged once, and the next one leaves a minute later.
func TestLeaseReportsThatFail(t *testing.T) {
	t.Parallel()
	var log testkit.Journal
	withLeases(t, func(c *Config) { c.Client.Logger = log.Logger() }, func(t *testing.T, l *leaseTest) {
		busy := func(d time.Duration) (reports int) {
			before := len(l.db.reported())
			for range d / time.Second {
				l.allow("key", 1)
				elapse(time.Second)
			}
			return len(l.db.reported()) - before
		}
		for range 2 {
			l.db.failReports(sqlState("42883")(t.Context()))
			require.InDelta(t, 10, busy(10*time.Minute), 2)
			lines := log.Lines()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "level=WARN")
			require.Contains(t, lines[0], "what leases hold cannot be reported")
			require.Contains(t, lines[0], "the database is not migrated")
			require.NotContains(t, lines[0], "key=")
			l.db.failReports(nil)
			require.InDelta(t, 54, busy(10*time.Minute), 7)
			require.Empty(t, log.Lines())
		}
		// At rest it is given up.
		l.db.failReports(sqlState("42501")(t.Context()))
		elapse(time.Hour)
		before := len(l.db.reported())
		elapse(time.Hour)
		synctest.Wait()
		require.Len(t, l.db.reported(), before)
		require.Zero(t, l.client.batcher.leases.due)
	})
}

// With a schema that has no such function, with one that this role may not call, and with a table that somebody has
// locked, calls go on as before.
func TestLeasesWithoutReports(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	for sql, says := range map[string]string{
		"DROP FUNCTION rate_limit_report_leases; DROP TABLE rate_limit_lease; " +
			"CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT 2::bigint'": "the database is at version 2 of the migrations, and what is missing came later",
		"DROP TABLE rate_limit_lease": "the database is not migrated",
		"LOCK TABLE rate_limit_lease": "lock timeout",
	} {
		t.Run(sql, func(t *testing.T) {
			t.Parallel()
			var log testkit.Journal
			db := pgtest.New(t)
			l := leasing(t, db, Config{Name: "api", Client: ClientConfig{Logger: log.Logger()}}, "a")
			if strings.HasPrefix(sql, "LOCK") {
				pgtest.Exec(t, pgtest.Begin(t, db), sql)
			} else {
				pgtest.Exec(t, db.Pool, sql)
			}
			for range 5 {
				l.report()
				for _, key := range []string{"a", "another"} {
					_, err := l.Allow(t.Context(), key)
					require.NoError(t, err)
				}
			}
			require.NoError(t, l.ReturnLeases(t.Context()))
			lines := log.Lines()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], says)
			require.False(t, l.client.batcher.breaker.isOpen(l.space.kind()))
		})
	}
}

// A report does not wait for a connection while the callers have them all.
func TestLeaseReportsLeaveConnectionsToCallers(t *testing.T) {
	t.Parallel()
	var log testkit.Journal
	db := pgtest.New(t)
	l := leasing(t, db, Config{Name: "api", Client: ClientConfig{Logger: log.Logger()}}, "a")
	var conns []*pgxpool.Conn
	for range db.Pool.Stat().MaxConns() {
		conn, err := db.Pool.Acquire(t.Context())
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	l.report()
	require.Empty(t, reportedLeases(t, conns[0]))
	for _, conn := range conns {
		conn.Release()
	}
	l.report()
	require.Len(t, reportedLeases(t, db.Pool), 1)
	require.Empty(t, log.Lines(), "it did not try")
}

// Nothing is reported to a database in memory, and by a clock of a test.
func TestNoLeaseReportsInTests(t *testing.T) {
	t.Parallel()
	withLeases(t, func(c *Config) { c.Client.Test = TestConfig{Now: time.Now} }, func(t *testing.T, l *leaseTest) {
		l.allow("key", 2)
		require.Positive(t, l.held("key"))
		elapse(time.Minute)
		synctest.Wait()
		require.Empty(t, l.db.reported())
	})
	require.Nil(t, newLeaseReport(&database{memory: new(memory.DB)}, &ClientConfig{}))
}
