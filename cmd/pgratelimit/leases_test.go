package main

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// What processes have reported is shown, those that hold the most first, until it ends.
func TestLeases(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const nothing = "no process has reported that it holds something\n"
	require.Equal(t, nothing, invoke(t, db.URL, "leases").done(t))
	require.Equal(t, "[]\n", invoke(t, db.URL, "leases", "--json").done(t))
	pgtest.Exec(t, db.Pool, `SELECT rate_limit_report_leases('web-1/7/00abcd', '{api, api, mail}', ARRAY['a', E'b\n', 'a'], '{f, t, f}',
		'{50, 977, 4}', '{3600000000, 3600000000, 3600000000}')`)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_report_leases('web-2/8/00abce', '{api, api}', '{a, c}', '{f, f}', '{120, 9}', '{3600000000, 1}')")

	text := invoke(t, db.URL, "leases").done(t)
	require.Regexp(t, `^LIMITER  KEY    PROCESS         HELD  ENDS IN
api      "b\\n"  web-1/7/00abcd  977   59m5\d\.\d+s
api      a      web-2/8/00abce  120   59m5\d\.\d+s
api      a      web-1/7/00abcd  50    59m5\d\.\d+s
mail     a      web-1/7/00abcd  4     59m5\d\.\d+s

as the processes reported it within the last 10 s; what a dead process held stays until it ends
$`, text)
	require.Equal(t, 4, strings.Count(invoke(t, db.URL, "leases", "-n", "1").done(t), "\n"))
	require.Equal(t, 6, strings.Count(invoke(t, db.URL, "leases", "api").done(t), "\n"))
	require.Equal(t, 5, strings.Count(invoke(t, db.URL, "leases", "api", "a").done(t), "\n"))
	require.Equal(t, nothing, invoke(t, db.URL, "leases", "other").done(t))

	all := decode[[]heldLease](t, invoke(t, db.URL, "leases", "api", "b\n", "--json"))
	require.Len(t, all, 1)
	require.WithinDuration(t, time.Now().Add(time.Hour), all[0].EndsAt, time.Minute)
	require.InDelta(t, time.Hour.Microseconds(), all[0].EndsInUS, 60e6)
	all[0].EndsInUS, all[0].EndsAt, all[0].ReportedAt = 0, time.Time{}, time.Time{}
	require.Equal(t, heldLease{Limiter: "api", Key: "b\n", Durable: true, Process: "web-1/7/00abcd", Held: 977}, all[0])

	require.Equal(t, exitUsage, invoke(t, db.URL, "leases", "-n", "0").code)
	require.Equal(t, exitUsage, invoke(t, db.URL, "leases", "api", "a", "b").code)
	pgtest.Exec(t, db.Pool, "DROP TABLE rate_limit_lease")
	invoke(t, db.URL, "leases").complains(t, exitFailed, "pgratelimit migrate up")
}
