package main

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

const inOtherTable = "limiter api has its rows in rate_limit_%s, not in rate_limit_%s: %s"

// A command warns if the limiter has rows only in the other table.
func TestThoroughForgettingDurableIsTold(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		durable        bool
		here, there    string
		do, right, key string
	}{
		{true, "ephemeral", "durable", "give --durable", "--durable", "a"},
		{true, "ephemeral", "durable", "give --durable", "--durable", "new"},
		{false, "durable", "ephemeral", "leave out --durable", "", "a"},
	} {
		t.Run(test.here+test.key, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a', 'fixed 1000/365d', 700, $1)", test.durable)
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('other', 'a', 'fixed 1000/365d', 700, $1)", !test.durable)
			told := fmt.Sprintf(inOtherTable, test.there, test.here, test.do)
			run := func(durable bool, args ...string) outcome {
				if durable {
					args = append(args, "--durable")
				}
				return invoke(t, db.URL, args...)
			}
			const policy = "--policy=fixed 1000/365d"
			for _, args := range [][]string{
				{"peek", "api", test.key, policy}, {"explain", "api", test.key, policy}, {"top", "api", policy},
			} {
				require.Contains(t, run(!test.durable, args...).done(t), "warning: "+told+"\n")
				require.NotContains(t, run(test.durable, args...).done(t), "warning")
				args = append(args, "--json")
				require.Contains(t, run(!test.durable, args...).done(t), `"warning": "`+told)
				require.NotContains(t, run(test.durable, args...).done(t), "warning")
			}
			rows := func() []int {
				return []int{
					pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"),
					pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_durable"),
				}
			}
			before := rows()
			for _, args := range [][]string{
				{"take", "api", test.key, policy}, {"take", "api", test.key, policy, "--receipt", t.TempDir() + "/receipt"},
				{"grant", "api", test.key, policy, "--cost=5"}, {"charge", "api", test.key, policy, "--cost=5"},
				{"hold", "api", test.key, policy, "--cost=5", "--for=1m"},
			} {
				run(!test.durable, args...).complains(t, exitFailed, "nothing was done, because "+told, "--force")
			}
			for _, args := range [][]string{{"reset", "api", test.key}, {"reset", "api", "--all", "--yes"}} {
				run(!test.durable, args...).complains(t, exitFailed, "nothing was reset, because "+told)
			}
			require.Equal(t, before, rows())

			require.Contains(t, run(!test.durable, "take", "api", test.key, policy, "--force").done(t), "warning: "+told+"\n")
			out := run(false, "limits").done(t)
			require.Contains(t, out, "\napi has rows in both tables: perhaps somebody left out --durable, or durable => true\n")
			require.NotContains(t, out, "\nother has")
			// If both tables have rows, there is no warning.
			run(!test.durable, "peek", "api", test.key, policy).done(t)
			run(!test.durable, "reset", "api", "--all", "--yes").done(t)
			require.Equal(t, before, rows())
			run(test.durable, "take", "api", test.key, policy).done(t)
			run(test.durable, "grant", "api", test.key, policy, "--cost=5").done(t)
			run(test.durable, "reset", "api", "a").done(t)
		})
	}
}

// If there are only expired rows, these rows show which table the limiter uses.
func TestForgettingDurableOfExpiredRows(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const policy = "--policy=fixed 10/365d"
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a', 'fixed 10/1us', durable => true)")
	invoke(t, db.URL, "grant", "api", "b", policy, "--cost=1").complains(t, exitFailed, "give --durable")
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'b', 'fixed 10/1us')")
	invoke(t, db.URL, "peek", "api", "c", policy).done(t) // both tables now have rows
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'c', 'fixed 10/365d', durable => true)")
	require.Contains(t, invoke(t, db.URL, "peek", "api", "a", policy).done(t), "give --durable")
}

// A command warns if the policy is of another kind than the rows, because the policy would ignore their counts.
func TestThoroughPolicyOfAnotherKindIsTold(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ written, asked, key, told string }{
		{"sliding 10/365d", "fixed 10/365d", "a", "fixed, and the rows of api are of the kind sliding"},
		{"sliding 10/365d", "fixed 10/365d", "new", "fixed, and the rows of api are of the kind sliding"},
		{"bucket 10 1/1d", "log 10/1d", "a", "log, and the rows of api are of the kind bucket"},
		{"fixed 10/365d", "every 10/month", "a", "every, and the rows of api are of the kind fixed"},
		{"fixed 10/365d, log 9/365d", "fixed 10/365d, sliding 9/365d", "a",
			"sliding, and the rows of api/2 are of the kind log"},
		{"fixed 10/365d, log 9/365d", "log 9/365d, fixed 10/365d", "a", "log, and the rows of api are of the kind fixed"},
		{"fixed 10/365d, log 9/365d", "fixed 20/1d", "a", ""},
		{"fixed 10/365d", "fixed 20/1d, log 9/365d", "a", ""},
	} {
		t.Run(test.written+" "+test.asked+test.key, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a', $1, 7)", test.written)
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('expired', 'a', 'sliding 1/1us')")
			invoke(t, db.URL, "take", "expired", "a", "--policy", test.asked).done(t)
			if out := invoke(t, db.URL, "limits", "--policy", "api="+test.asked, "--policy", "expired="+test.asked); out.code == 0 {
				require.Equal(t, strings.Contains(test.told, "api are"), strings.Contains(out.stdout, "\nwarning: this policy is of the kind"))
			}
			asking := [][]string{{"peek", "api", test.key}, {"explain", "api", test.key}}
			if test.written != "fixed 10/365d, log 9/365d" && test.asked != "fixed 20/1d, log 9/365d" {
				asking = append(asking, []string{"top", "api"}) // top takes one policy
			}
			for _, args := range asking {
				out := invoke(t, db.URL, append(args, "--policy", test.asked)...).done(t)
				if test.told == "" {
					require.NotContains(t, out, "warning")
				} else {
					require.Contains(t, out, "warning: this policy is of the kind "+test.told+
						", so it does not count them: give the application's policy\n")
				}
			}
			for _, args := range [][]string{{"take", "api", test.key}, {"grant", "api", test.key, "--cost=1"}} {
				args = append(args, "--policy", test.asked)
				if test.told == "" {
					invoke(t, db.URL, args...).done(t)
					continue
				}
				invoke(t, db.URL, args...).complains(t, exitFailed, "nothing was done, because", test.told, "--force")
				require.EqualValues(t, 7, pgtest.Scalar[int64](t, db.Pool, `SELECT CASE algorithm WHEN 3 THEN (count - 1) / scale + 1
					ELSE count END FROM rate_limit_ephemeral WHERE prefix = 'api'`))
			}
			out := invoke(t, db.URL, "take", "api", test.key, "--policy", test.asked, "--force").done(t)
			require.Equal(t, test.told != "", strings.Contains(out, "\nwarning: "))
		})
	}
}

// A role that may not read the tables gets no warning, and the command does what the role may do.
func TestNobodyIsToldWithoutRights(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('api', 'a', 'fixed 10/1d', durable => true)")
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO pg_monitor")
	as := urlWith(t, db, "role=pg_monitor")
	invoke(t, as, "take", "api", "a", "--policy=sliding 10/1d").done(t)
	invoke(t, as, "reset", "api", "a").done(t)
}
