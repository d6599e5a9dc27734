package policytable_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Processes report what shadow rows would have decided, with the keys that they would have denied most, until the row
// changes.
func TestShadowsAreReported(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 2/1h")
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{}) // it does not run, so nothing else reports
	require.NoError(t, err)
	table := limitertest.Table(p)
	table.Running = true
	read := func() { require.NoError(t, table.ReadChanges(t.Context(), db.Pool, testkit.Amply)) }
	report := func() { require.NoError(t, table.ReportOnce(t.Context())) }
	read()
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 4, Window: time.Hour}, Policies: p})
	for i, key := range []string{"a", "b", "b", "b", "c", "c", "c", "c", "c", "c"} {
		_, err := l.Allow(t.Context(), key)
		require.NoError(t, err)
		_, err = l.Peek(t.Context(), key) // a Peek is not counted
		require.NoError(t, err)
		if i == 5 {
			report()
		}
	}
	report()
	report()
	reported := func() []string {
		return pgtest.Scalar[[]string](t, db.Pool, `SELECT array_agg(concat_ws(' ', key, decided, denied, would_deny) ORDER BY key)
			FROM rate_limit_shadow AS s WHERE policy_id = 1 AND first_at <= last_at`)
	}
	require.Equal(t, []string{" 10 2 5", "b 0 0 1", "c 0 2 4"}, reported())

	// Whatever numbers a report has, other reports can still be added. A report that makes no sense is ignored.
	for _, n := range []string{"9223372036854775807", "-9223372036854775808", "-1", "NULL"} {
		for _, numbers := range []string{n + ", 0, 0", "0, " + n + ", 0", "0, 0, " + n} {
			pgtest.Exec(t, db.Pool, `SELECT rate_limit_report(ARRAY[1, 1]::bigint[], ARRAY[row_changed_us, row_changed_us], ARRAY['', 'b'],
				array_fill(a, ARRAY[2]), array_fill(b, ARRAY[2]), array_fill(c, ARRAY[2]))
				FROM (VALUES (`+numbers+`)) AS v (x, y, z), LATERAL (SELECT x::bigint, y::bigint, z::bigint) AS w (a, b, c),
				rate_limit_policies()`)
		}
	}
	require.Equal(t, []string{" 1000000000010 1000000000002 1000000000005", "b 1000000000000 1000000000000 1000000000001",
		"c 0 2 4"}, reported())
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_shadow SET decided = 9223372036854775806 WHERE key = ''")
	_, err = l.Allow(t.Context(), "d")
	require.NoError(t, err)
	for range 2 {
		pgtest.Exec(t, db.Pool, `SELECT rate_limit_report(ARRAY[1], ARRAY[row_changed_us], ARRAY[''], ARRAY[5], ARRAY[0], ARRAY[0])
			FROM rate_limit_policies()`)
		report()
	}
	require.Equal(t, " 9223372036854775807 1000000000002 1000000000005", reported()[0])

	pgtest.Exec(t, db.Pool, `SELECT rate_limit_report(array_fill(1, ARRAY[2000])::bigint[], array_fill(row_changed_us, ARRAY[2000]),
		ARRAY(SELECT 'k' || i FROM generate_series(1, 2000) AS i), array_fill(0, ARRAY[2000])::bigint[],
		array_fill(0, ARRAY[2000])::bigint[], ARRAY(SELECT generate_series(1, 2000))::bigint[]) FROM rate_limit_policies()`)
	require.EqualValues(t, 1001, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow"))
	require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow WHERE would_deny <= 1000 AND key <> ''"))

	// When a row changes in any way, its counts are dropped. Processes that do not know the change yet still count for the
	// old row. The database ignores what they report.
	rows := func() int64 { return pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow") }
	for _, change := range []string{"UPDATE rate_limit_policy SET policy = 'fixed 1/1h'", "UPDATE rate_limit_policy SET comment = 'other'"} {
		allow := func() {
			_, err := l.Allow(t.Context(), "c")
			require.NoError(t, err)
		}
		allow()
		pgtest.Exec(t, db.Pool, change)
		require.Zero(t, rows())
		report()
		allow()
		report()
		require.Zero(t, rows())

		allow()
		read()
		allow()
		report()
		require.Equal(t, []string{" 1 1 1", "c 0 1 1"}, reported())
	}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	_, err = l.Allow(t.Context(), "c")
	require.NoError(t, err)
	report()
	require.Zero(t, rows())
}

// At most MaxReported keys are counted for a shadow. Denials of other keys count in the sums.
func TestShadowsCountSoManyKeys(t *testing.T) {
	t.Parallel()

	p := policytable.NewTable(nil, policytable.TableConfig{})
	p.Running = true
	for i := range policytable.MaxReported + 10 {
		p.Count(&policytable.Row{ID: 7}, fmt.Sprint(i), true, true)
	}
	require.Len(t, p.Shadows[policytable.RowVersion{ID: 7}].Keys, policytable.MaxReported)
	require.EqualValues(t, policytable.MaxReported+10, p.Shadows[policytable.RowVersion{ID: 7}].WouldDeny)
}
