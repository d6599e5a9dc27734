package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// The tests in this file make mistakes in functions, and check that other tests would notice them. Mistakes for a
// single test are beside the test: TestClockIsReadAfterTheLockWait, TestLockingInTheOrderGivenDeadlocks,
// TestRowsAreMadeAndLockedInOneOrder, TestMistakesInPlansScanTheTable,
// TestFunctionsWithoutTheirSearchPathTakeDecoys, TestPgBouncerHandsNoSettingsOn and TestFunctionsPassPlpgsqlCheck.

// The comparison with the model notices small mistakes in code that few requests reach. Only differences in steps of
// the mistake's algorithm count.
func TestMistakesInTheFunctionsDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const (
		fixed = 1 + iota
		sliding
		bucket
		log
		calendar
		all // any algorithm
	)
	functions := map[int]string{
		fixed: "rate_limit_take_fixed_window", sliding: "rate_limit_take_sliding_window", bucket: "rate_limit_take_token_bucket",
		log: "rate_limit_take_sliding_log", calendar: "rate_limit_take_calendar_window",
	}
	// These steps find mistakes that random stories find too rarely.
	rare := map[int]func() []modeltest.Step{sliding: roundingStory, bucket: changedBuckets, log: refundBehindTheClock, calendar: calendarBehindTheClock, all: refundOfTheWindowBefore}
	type mistake struct {
		algorithm    int
		function     string
		right, wrong string
	}
	check := func(name string, c mistake, prepare ...func(t *testing.T, db pgtest.Executor)) {
		t.Run(fmt.Sprintf("%s, %s, %d: %s, not %s", name, c.function, c.algorithm, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			for _, prepare := range prepare {
				prepare(t, db.Pool)
			}
			switch {
			case name == "in a table":
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			case strings.HasSuffix(c.function, "_ephemeral") || c.algorithm != log && c.function == functions[c.algorithm]:
				pgtest.RewriteTwins(t, db.Pool, c.function, c.right, c.wrong)
			default:
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			}
			if story := rare[c.algorithm]; story != nil {
				err := replay(t.Context(), db.Pool, "rare", story(), 10)
				if _, found := errors.AsType[*difference](err); found {
					return
				}
				require.NoError(t, err)
			}
			seed := limitertest.Seed(t)
			concerned := func(s modeltest.Step) bool {
				return c.algorithm == all || s.Policy.Numbers().Algorithm == int16(c.algorithm)
			}
			// Most policies have the mistake's algorithm, because otherwise three times as many steps are needed.
			mostly := func(r *rand.Rand) model.Rules {
				p := modeltest.RandomPolicy(r)
				for c.algorithm != all && p.Numbers().Algorithm != int16(c.algorithm) && r.IntN(10) > 0 {
					p = modeltest.RandomPolicy(r)
				}
				return p
			}
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(20_000), "the model does not tell the mistake")
				steps, err := modeltest.NewStoryOf(rand.New(rand.NewPCG(seed, story)), 40, mostly)
				require.NoError(t, err)
				if !slices.ContainsFunc(steps, concerned) {
					continue
				}
				if err := replay(t.Context(), db.Pool, fmt.Sprint(story), steps, 10); err != nil {
					var found *difference
					require.ErrorAs(t, err, &found)
					if concerned(steps[found.step]) {
						return
					}
				}
			}
		})
	}

	// These mistakes are in the rules of a row, or in refunds.
	for _, c := range []mistake{
		{algorithm: fixed, function: "_rate_limit_fixed", right: "clock >= s.expires_at OR", wrong: "clock > s.expires_at OR"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "s.window_start - clock > window_us", wrong: "s.window_start - clock >= window_us"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "s.credit := s.credit - s.spent", wrong: "s.credit := s.credit"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "s.count := s.count + s.granted * cost - s.spent", wrong: "s.count := s.count + s.granted * cost - s.spent + 1"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "(room + s.credit) / cost", wrong: "(room + s.credit) / cost + 1"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "OR (moved AND", wrong: "OR (false AND"},
		{algorithm: fixed, function: "_rate_limit_fixed", right: "s.expires_at := clock + s.reset_after_us", wrong: "s.expires_at := clock + s.reset_after_us + 1"},
		{algorithm: fixed, function: "_rate_limit_fixed_refund", right: "taken_in = s.window_start AND taken_in = rolled.window_start", wrong: "taken_in IS NOT NULL"},
		{algorithm: fixed, function: "_rate_limit_give", right: "since = taken_since", wrong: "taken_since IS NOT NULL"},
		{algorithm: fixed, function: "_rate_limit_give", right: "IF rolled.reset_after_us = 0 THEN", wrong: "IF false THEN"},
		{algorithm: all, function: "_rate_limit_give", right: "s.changed AND s.count = 0 AND s.prev_count = 0", wrong: "s.changed"},
		{algorithm: all, function: "_rate_limit_give", right: "s.credit := least(s.credit + least(units,", wrong: "s.credit := least(s.credit + 1 + least(units,"},
		{algorithm: sliding, function: "_rate_limit_sliding", right: "public._rate_limit_ceil_div(s.prev_count * rest, window_us)", wrong: "s.prev_count * rest / window_us"},
		{algorithm: sliding, function: "_rate_limit_sliding", right: "ELSIF t - s.window_start >= window_us", wrong: "ELSIF t - s.window_start > window_us"},
		{algorithm: sliding, function: "_rate_limit_sliding", right: "s.expires_at := clock + s.reset_after_us", wrong: "s.expires_at := s.window_start + 2 * window_us"},
		{algorithm: sliding, function: "_rate_limit_sliding", right: "free := greatest(cost, 1) - s.credit;", wrong: "free := greatest(cost, 1);"},
		{algorithm: sliding, function: "_rate_limit_sliding", right: "OR (moved AND", wrong: "OR (false AND"},
		{algorithm: sliding, function: "_rate_limit_sliding_refund", right: "later = 0 AND taken_in = s.window_start - window_us", wrong: "later = 0 AND taken_in IS NOT NULL"},
		{algorithm: sliding, function: "_rate_limit_sliding_refund", right: "later = window_us AND taken_in = s.window_start", wrong: "false"},
		{algorithm: bucket, function: "_rate_limit_bucket", right: "IF clock >= s.expires_at THEN", wrong: "IF clock > s.expires_at + 1 THEN"},
		{algorithm: bucket, function: "_rate_limit_bucket", right: "OR s.capacity <> capacity", wrong: ""},
		{algorithm: bucket, function: "_rate_limit_bucket", right: "s.since := t;", wrong: ""},
		{algorithm: bucket, function: "_rate_limit_bucket_refund", right: "t - taken_in <= need / rolled.refill", wrong: "t - taken_in < need / rolled.refill"},
		{algorithm: bucket, function: "_rate_limit_bucket_refund", right: "s.returned := s.returned + back", wrong: "s.returned := s.returned"},
		{algorithm: bucket, function: "_rate_limit_bucket_refund", right: "back = rolled.count AND s.credit = 0", wrong: "back = rolled.count"},
		{algorithm: bucket, function: "_rate_limit_bucket_refund", right: "back = rolled.count AND s.credit = 0", wrong: "false"},
		{algorithm: bucket, function: "_rate_limit_bucket", right: "s.count := full_count - least(greatest(left_over, -most_owed), full_count);", wrong: ""},
		{algorithm: bucket, function: "_rate_limit_bucket_refund", right: "OR rolled.since IS DISTINCT FROM taken_since", wrong: ""},
		{algorithm: log, function: "_rate_limit_log", right: ">= window_us LOOP", wrong: "> window_us LOOP"},
		{algorithm: log, function: "_rate_limit_log", right: "- s.window_start + clock", wrong: "- s.window_start + clock - 1"},
		{algorithm: log, function: "_rate_limit_log", right: "log := log[n + 1:]", wrong: "log := log[n:]"},
		{algorithm: log, function: "_rate_limit_log", right: "IF units > 0 THEN", wrong: "IF true THEN"},
		{algorithm: log, function: "_rate_limit_log", right: "(room + s.credit) / cost", wrong: "(room + s.credit) / cost + 1"},
		{algorithm: log, function: "_rate_limit_log", right: "log[1:least(n, 64)]", wrong: "log[1:least(n, 64) - 1]"},
		{algorithm: log, function: "_rate_limit_log_refund", right: "back >= s.log[place]", wrong: "back > s.log[place]"},
		{algorithm: log, function: "_rate_limit_log_refund", right: "(e.entry >> 10) << 10 = taken_in << 10", wrong: "e.place = cardinality(rolled.log)"},
		{algorithm: log, function: "_rate_limit_log_refund", right: "IF clock < t THEN", wrong: "IF false THEN"},
		{algorithm: log, function: "_rate_limit_give", right: "IF rolled.reset_after_us = 0 THEN", wrong: "IF false THEN"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "s.scale > 2 * window_us", wrong: "s.scale > 3 * window_us"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "s.scale := window_us;", wrong: "s.scale := window_us + 1;"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "CASE WHEN s.credit > 0 THEN 2 ELSE 1 END * window_us", wrong: "window_us"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "t - s.window_start >= s.scale", wrong: "t - s.window_start > s.scale"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "public._rate_limit_window_end(t, window_us, zone) - t", wrong: "window_us"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "_rate_limit_window_end(t, window_us, zone) - t", wrong: "_rate_limit_window_end(t, window_us, 'UTC') - t"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "ends := least(s.window_start + s.scale,", wrong: "ends := least(s.window_start + window_us,"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "t + 2 * window_us", wrong: "t + window_us"},
		{algorithm: calendar, function: "_rate_limit_window_end", right: "clock - clock % window_us + window_us", wrong: "clock + window_us"},
		{algorithm: calendar, function: "_rate_limit_valid_calendar", right: "zone = 'epoch'", wrong: "false"},
		{algorithm: calendar, function: "_rate_limit_calendar", right: "OR (moved AND", wrong: "OR (false AND"},
		{algorithm: calendar, function: "rate_limit_all", right: "s.scale, s.expires_at, s.told_log", wrong: "NULL::bigint, s.expires_at, s.told_log"},
		{algorithm: all, function: "rate_limit_all", right: "granted := least(granted, s.granted)", wrong: "granted := least(granted + 1, s.granted + 1)"},
		{algorithm: all, function: "rate_limit_all", right: "asked > -(9223372036854775807 / cost)", wrong: "asked > 1 - (9223372036854775807 / cost)"},
		{algorithm: all, function: "rate_limit_all", right: "IS NULL OR s.tid IS NOT NULL;", wrong: "IS NULL OR true;"}, // refunds make rows
		{algorithm: all, function: "rate_limit_all", right: "s.algorithm IS DISTINCT FROM algorithms[i]", wrong: "s.algorithm IS NULL"},
		{algorithm: all, function: "rate_limit_all", right: "scale = n.scale, ", wrong: ""},
		{algorithm: all, function: "rate_limit_all", right: "log = n.log", wrong: "log = d.log"},
	} {
		check("the rules", c)
	}

	// These mistakes are in deciding a single key.
	for _, c := range []mistake{
		{algorithm: all, function: pgtest.Left, right: "AND d.algorithm = algorithm\n", wrong: "\n"},
		{algorithm: bucket, function: pgtest.Left, right: "scale = s.scale, ", wrong: ""},
		{algorithm: log, function: pgtest.Left, right: "log = s.log", wrong: "log = d.log"},
		{algorithm: log, function: pgtest.Left, right: " || s.told_log", wrong: ""},
		{algorithm: calendar, function: pgtest.Left, right: "s.scale, s.expires_at, s.spent", wrong: "NULL::bigint, s.expires_at, s.spent"},
		{algorithm: fixed, function: "_rate_limit_units_of_one", right: "ELSE max_count + 1 END", wrong: "ELSE max_count END"},
		{algorithm: all, function: "_rate_limit_units_of_one", right: "THEN costs[1] * counts[1]", wrong: "THEN 1 * counts[1]"},
	} {
		check("for one key", c)
	}
	// These mistakes are in code that the statements for one key and for several keys share. Here, these statements decide
	// all requests.
	window := func(algorithm int, fits string) []mistake {
		take := functions[algorithm]
		return []mistake{
			{algorithm: algorithm, function: take, right: "ELSE 0 END + excluded.count", wrong: "ELSE 0 END + 2 * excluded.count"},
			{algorithm: algorithm, function: take, right: "CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count", wrong: "d.count + excluded.count"},
			{algorithm: algorithm, function: take, right: "THEN d.window_start ELSE", wrong: "THEN clock ELSE"},
			{algorithm: algorithm, function: take, right: "THEN d.expires_at ELSE", wrong: "THEN d.expires_at + 1 ELSE"},
			{algorithm: algorithm, function: fits, right: fmt.Sprintf("algorithm = %d AND", algorithm), wrong: ""},
			{algorithm: algorithm, function: fits, right: "since IS NULL AND", wrong: ""},
			{algorithm: algorithm, function: fits, right: "window_start - clock <= window_us", wrong: "window_start - clock <= 2 * window_us"},
			{algorithm: algorithm, function: fits, right: "clock >= expires_at", wrong: "clock >= expires_at - 1"},
			{algorithm: algorithm, function: fits, right: "units <= max_count - count", wrong: "units <= max_count - count + 1"},
		}
	}
	const slidingFits, bucketFits, bucketCount = "_rate_limit_sliding_fits", "_rate_limit_bucket_fits", "_rate_limit_bucket_count"
	for _, c := range slices.Concat(window(fixed, "_rate_limit_fixed_fits"), window(calendar, "_rate_limit_calendar_fits"), []mistake{
		{algorithm: fixed, function: functions[fixed], right: "clock, clock + window_us", wrong: "clock, clock + window_us - 1"},
		{algorithm: fixed, function: "_rate_limit_fixed_fits", right: "AND expires_at = window_start + window_us", wrong: ""},
		{algorithm: calendar, function: functions[calendar], right: "THEN d.scale ELSE", wrong: "THEN excluded.scale ELSE"},
		{algorithm: calendar, function: functions[calendar], right: "ELSE excluded.scale END", wrong: "ELSE d.scale END"},
		{algorithm: calendar, function: functions[calendar], right: "clock, window_end - clock, window_end", wrong: "clock, window_us, clock + window_us"},
		{algorithm: calendar, function: "_rate_limit_calendar_fits", right: "AND scale <= 2 * window_us", wrong: ""},
		{algorithm: calendar, function: "_rate_limit_calendar_fits", right: "AND expires_at = window_start + scale", wrong: ""},
		{algorithm: sliding, function: functions[sliding], right: "ELSE 0 END + excluded.count", wrong: "ELSE 0 END + 2 * excluded.count"},
		{algorithm: sliding, function: functions[sliding], right: "THEN d.count ELSE 0 END +", wrong: "THEN d.count ELSE d.count END +"},
		{algorithm: sliding, function: functions[sliding], right: "WHEN d.expires_at > clock THEN d.count ELSE 0 END,", wrong: "ELSE 0 END,"},
		{algorithm: sliding, function: functions[sliding], right: "THEN d.window_start + window_us ELSE", wrong: "THEN clock ELSE"},
		{algorithm: sliding, function: functions[sliding], right: "THEN d.expires_at + window_us ELSE", wrong: "THEN d.expires_at + window_us - 1 ELSE"},
		{algorithm: sliding, function: functions[sliding], right: "ELSE excluded.expires_at END", wrong: "ELSE d.expires_at END"},
		{algorithm: sliding, function: functions[sliding], right: "clock, clock + 2 * window_us", wrong: "clock, clock + window_us"},
		{algorithm: sliding, function: slidingFits, right: "algorithm = 2 AND", wrong: ""},
		{algorithm: sliding, function: slidingFits, right: "since IS NULL AND", wrong: ""},
		{algorithm: sliding, function: slidingFits, right: "abs(window_start - clock) < window_us - 10000", wrong: "clock - window_start < window_us - 10000"},
		{algorithm: sliding, function: slidingFits, right: "WHEN expires_at <= clock THEN window_start <= ended", wrong: "WHEN expires_at <= clock THEN true"},
		{algorithm: sliding, function: slidingFits, right: "WHEN expires_at - window_start <> 2 * window_us THEN false", wrong: ""},
		{algorithm: sliding, function: slidingFits, right: "(prev_count * least", wrong: "(0 * least"},
		{algorithm: sliding, function: slidingFits, right: "window_us) + window_us - 1)", wrong: "window_us))"}, // rounded in the caller's favour
		{algorithm: sliding, function: slidingFits, right: "(count * (expires_at - clock) + window_us - 1) / window_us", wrong: "0"},
		{algorithm: sliding, function: slidingFits, right: "(expires_at - clock) + window_us - 1) / window_us", wrong: "(expires_at - clock)) / window_us"},
		{algorithm: bucket, function: functions[bucket], right: "+ excluded.count,\n", wrong: "+ 2 * excluded.count,\n"},
		{algorithm: bucket, function: functions[bucket], right: "window_start = greatest(clock, d.window_start)", wrong: "window_start = clock"},
		{algorithm: bucket, function: functions[bucket], right: "THEN d.since ELSE", wrong: "THEN clock ELSE"},
		{algorithm: bucket, function: functions[bucket], right: "THEN d.returned ELSE 0", wrong: "THEN d.returned ELSE d.returned"},
		{algorithm: bucket, function: functions[bucket], right: "(excluded.count - 1\n", wrong: "(excluded.count\n"},
		{algorithm: bucket, function: functions[bucket], right: "every_us - 1) / refill + 1", wrong: "every_us - 1) / refill"},
		{algorithm: bucket, function: bucketCount, right: "ELSE 0 END", wrong: "ELSE 1 END"},
		{algorithm: bucket, function: bucketCount, right: "greatest(clock - window_start, 0)", wrong: "0"},
		{algorithm: bucket, function: bucketFits, right: "credit = 0 AND", wrong: ""},
		{algorithm: bucket, function: bucketFits, right: "scale = every_us AND", wrong: ""},
		{algorithm: bucket, function: bucketFits, right: "capacity = tokens AND", wrong: ""},
		{algorithm: bucket, function: bucketFits, right: "refill = inflow\n", wrong: "true\n"},
		{algorithm: bucket, function: bucketFits, right: "window_start - clock <= (full_count - 1) / inflow + 1", wrong: "window_start - clock <= (full_count - 1) / inflow + 2 * every_us"},
		{algorithm: bucket, function: bucketFits, right: "inflow >= units", wrong: "inflow >= units - every_us"},
		{algorithm: bucket, function: bucketFits, right: "(count - 1) / inflow END", wrong: "(count - 1) / inflow - 1 END"},
	}) {
		check("for one key", c)
		check("for several keys", c, limitertest.AlwaysArrays)
	}
	for _, c := range []mistake{
		{algorithm: all, function: "_rate_limit_units", right: "THEN cost * asked", wrong: "THEN cost"},
		{algorithm: fixed, function: "_rate_limit_units", right: "max_count / cost THEN", wrong: "max_count / cost + 1 THEN"},
		{algorithm: all, function: "_rate_limit_units_of_each", right: "array_position(units, NULL) IS NULL", wrong: "true"},
		{algorithm: all, function: "_rate_limit_keys_in_lock_order", right: `DISTINCT ON (octet_length(e.key), e.key COLLATE "C") `, wrong: ""}, // a key twice
		{algorithm: fixed, function: pgtest.Left, right: "places[a.ord]", wrong: "a.ord"},
	} {
		check("for several keys", c, limitertest.AlwaysArrays)
	}

	// A function for only one of the two tables may have a mistake.
	for algorithm := fixed; algorithm <= calendar; algorithm++ {
		for _, left := range []string{pgtest.Left, "_rate_limit_left_durable"} {
			check("in a table", mistake{algorithm: algorithm, function: left, right: "WHERE d.ctid = s.tid", wrong: "WHERE d.ctid = s.tid AND false"})
		}
		if algorithm != log { // the function for logs has no such statement
			for _, take := range []string{functions[algorithm], "_" + functions[algorithm] + "_durable"} {
				check("in a table", mistake{algorithm: algorithm, function: take, right: "SELECT name, keys[1], ", wrong: "SELECT name, keys[1] || '?', "})
				check("in a table", mistake{algorithm: algorithm, function: take, right: "SELECT name, e.key, ", wrong: "SELECT name, e.key || '?', "}, limitertest.AlwaysArrays)
			}
		}
	}
}

// The comparison with the models notices mistakes in the code of rate_limit_take_all.
func TestMistakesInTakingFromAllDifferFromTheModels(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const rows = "_rate_limit_take_all_ephemeral"
	for _, c := range []struct {
		function     string
		right, wrong string
	}{
		{rows, "EXIT WHEN attempt = 2 OR NOT missing OR rows IS NULL", "EXIT WHEN attempt = 2 OR NOT missing"}, // denials make rows
		{rows, "algorithm = n.algorithm", "algorithm = d.algorithm"},
		{rows, "bool_or(d.ctid IS NULL)", "false"},
		{rows, "d.algorithm = e.algorithm", "d.algorithm > 0"},
		{"rate_limit_take_all", "ON e.place = p.row_of", "ON e.place = p.place"},
		{"_rate_limit_steps", "s.granted = 0 OR", ""},
		{"_rate_limit_steps", "s.spent > 0 OR s.credit > 0", "false"},
		{"_rate_limit_steps", "units[i], 1::bigint", "1::bigint, 1::bigint"},
	} {
		t.Run(fmt.Sprintf("%q, not %q", c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if c.function == rows {
				pgtest.RewriteTwins(t, db.Pool, c.function, c.right, c.wrong)
			} else {
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			}
			seed := limitertest.Seed(t)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(5_000), "the models do not tell the mistake")
				if _, _, err := tellTakes(t, db.Pool, rand.New(rand.NewPCG(seed, story)), story, nil); err != nil {
					return
				}
			}
		})
	}
}

// The concurrency tests compare the granted units with the limit and with the rows. A function that decides from an
// unlocked row, or from a row as it was before the lock, admits too many requests.
func TestMistakesThatDecideWithoutTheLock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for name, variant := range map[string]struct {
		policy   ratelimit.Policy
		function string
		oldNew   []string
		taken    int64
	}{
		"sliding log": {ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}, "", nil, 7},
		"sliding log, without locks": {
			// The take of 6 units is lost.
			ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}, pgtest.Left, []string{"FOR UPDATE", ""}, 7,
		},
		"fixed window": {ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, "", nil, 7},
		"fixed window, from the row that the statement's snapshot shows": {
			ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, "rate_limit_take_fixed_window", []string{
				"_rate_limit_fixed_fits(d.algorithm, d.count,",
				"_rate_limit_fixed_fits(d.algorithm, (SELECT r.count FROM public.rate_limit_ephemeral AS r WHERE r.prefix = d.prefix AND r.key = d.key),",
				"now_us) < clock + 10000\n", "now_us) IS NOT NULL\n", // for any duration of the wait
			}, 13,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			broken := variant.function != ""
			if broken {
				pgtest.Rewrite(t, db.Pool, variant.function, variant.oldNew...)
			}
			config := ratelimit.Config{Name: "test", Policy: variant.policy}
			limiter := limitertest.New(t, db.NewPool(t, nil), config)
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			somebody := pgtest.Begin(t, db)
			first, err := limiter.WithTx(somebody).AllowN(t.Context(), "key", 6)
			require.NoError(t, err)
			require.True(t, first.Allowed)
			other := pgtest.Begin(t, db) // this transaction waits without a lock_timeout, and makes one call
			second := testkit.Later(func() (ratelimit.Result, error) { return limiter.WithTx(other).AllowN(context.Background(), "key", 6) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			require.NoError(t, somebody.Commit(t.Context()))
			result, err := second()
			require.NoError(t, err)
			require.NoError(t, other.Commit(t.Context()))
			require.Equal(t, broken, result.Allowed) // 13 of 10 units are taken
			require.Equal(t, variant.taken, limitertest.Taken(t, db.Pool, config, "key"))
		})
	}
}

// The concurrency tests notice a function that locks a row and updates it by ctid in one statement. After a wait for
// the lock, the statement's snapshot does not have the new row, so the take is lost.
func TestMistakesThatUpdateByTidInTheStatementOfTheLock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, broken := range []bool{false, true} {
		db := pgtest.New(t)
		if broken {
			pgtest.Exec(t, db.Pool, `
				CREATE OR REPLACE FUNCTION rate_limit_take_fixed_window(
					name text, keys text[], max_count bigint, window_us bigint, costs bigint[] DEFAULT NULL, counts bigint[] DEFAULT NULL,
					durable boolean DEFAULT false, lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL, now_us bigint DEFAULT NULL)
				RETURNS bigint[] LANGUAGE sql SECURITY DEFINER AS $$
					WITH locked AS (
						SELECT r.ctid AS tid, r.* FROM rate_limit_ephemeral AS r WHERE r.prefix = name AND r.key = keys[1] FOR UPDATE
					), updated AS (
						UPDATE rate_limit_ephemeral AS r SET count = l.count + costs[1] FROM locked AS l WHERE r.ctid = l.tid
					)
					SELECT ARRAY[(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
						l.count + costs[1], l.prev_count, l.window_start, l.credit, NULL, l.expires_at, NULL, NULL]
					FROM locked AS l
				$$`)
		}
		pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count, window_start, expires_at)
			SELECT 'test', 'key', 1, 1, now_us, now_us + 31536000000000 FROM (SELECT (extract(epoch FROM now()) * 1000000)::bigint) AS _ (now_us)`)
		config := ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		}
		limiter := limitertest.New(t, db.NewPool(t, nil), config)
		somebody := pgtest.Begin(t, db)
		pgtest.Exec(t, somebody, "UPDATE rate_limit_ephemeral SET count = count + 2")
		wait := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 4) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))
		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 3, result.Remaining)
		want := int64(7)
		if broken {
			want = 3 // the take of 4 units is lost
		}
		require.Equal(t, want, limitertest.Taken(t, db.Pool, config, "key"))
	}
}

// Without the loop in rate_limit_all, a call fails if its row is deleted meanwhile. TestRowDeletedWhileWeWaitForIt and
// TestSweeperAtFullSpeed notice such a failure.
func TestMistakesWithoutTheLoopMissARowThatVanishes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	// The changed function tries only once to make and lock the row, so it fails as if the row had been deleted.
	pgtest.Rewrite(t, db.Pool, "rate_limit_all",
		"FOR attempt IN 1 .. 5 LOOP", "FOR attempt IN 1 .. 1 LOOP", "missing := making AND (rows[i]).tid IS NULL;", "missing := false;")
	limiter := limitertest.New(
		t,
		db.NewPool(t, nil),
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}),
		},
	)
	_, err := limiter.Allow(t.Context(), "key")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55000", pgErr.Code)
}

// TestDenialsWriteNothing notices a denial that writes.
func TestMistakesThatLetDenialsWrite(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for name, policy := range limitertest.SlowPolicies(10) {
		db := pgtest.New(t)
		pgtest.Rewrite(t, db.Pool, limitertest.StepOf(policy), "s.changed := s.granted > 0 OR", "s.changed := true OR")
		config := ratelimit.Config{Name: "test", Policy: policy, NoDenialCache: true}
		limiter := limitertest.New(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		tx := pgtest.Begin(t, db)
		result, err := limiter.WithTx(tx).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Positive(t, limitertest.Written(t, tx, config), name)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// Updates of the same keys are HOT, so the index does not grow and the table stays small. With an index on expires_at,
// updates would not be HOT, because nearly every update changes expires_at.
func TestUpdatesAreHOT(t *testing.T) {
	t.Parallel()

	const updates, keys, page = 200, 10, 8192
	// Start another server, because transactions of other tests, even in other databases, would keep old rows. So would
	// autovacuum.
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"autovacuum": "off"}})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	defer pool.Close()
	require.NoError(t, migrations.Up(t.Context(), pool))
	var before, hotBefore int64
	for _, indexed := range []bool{false, true} {
		if indexed {
			pgtest.Exec(t, pool, "CREATE INDEX ON rate_limit_ephemeral (expires_at)")
		}

		clock := limitertest.T0
		everySecond := ratelimit.TestConfig{Now: func() time.Time {
			clock = clock.Add(time.Second)
			return clock
		}}
		for name, policy := range map[string]ratelimit.Policy{
			"fixed window":   ratelimit.FixedWindow{Limit: 10, Window: time.Second},
			"sliding window": ratelimit.SlidingWindow{Limit: 10, Window: time.Second},
			"token bucket":   ratelimit.TokenBucket{Capacity: 10, Refill: 10, Every: time.Second},
			"sliding log":    ratelimit.SlidingLog{Limit: 10, Window: 100 * time.Second},
			"calendar":       ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarMinute},
		} {
			limiter := limitertest.New(
				t,
				pool,
				ratelimit.Config{Name: fmt.Sprint(name, indexed), Policy: policy},
				ratelimit.ClientConfig{Test: everySecond},
			)
			for i := range updates {
				result, err := limiter.Allow(t.Context(), fmt.Sprint(i%keys))
				require.NoError(t, err)
				require.True(t, result.Allowed)
			}
		}

		pool.Reset() // otherwise the sessions might not have reported their statistics
		var updated, hot int64
		testkit.WaitUntil(t, func() bool {
			row := pool.QueryRow(
				t.Context(),
				"SELECT n_tup_upd - $1, n_tup_hot_upd - $2 FROM pg_stat_user_tables WHERE relname = 'rate_limit_ephemeral'",
				before, hotBefore,
			)
			require.NoError(t, row.Scan(&updated, &hot))
			return updated >= 5*(updates-keys) // the first take of a key inserts its row
		})
		if indexed {
			require.Less(t, hot, updated/2)
			return
		}
		before, hotBefore = updated, hot
		require.GreaterOrEqual(t, hot, updated*95/100)
		require.LessOrEqual(
			t,
			pgtest.Scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral')"),
			int64(8*page),
		)
		require.LessOrEqual(
			t,
			pgtest.Scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral_pkey')"),
			int64(8*page),
		)
	}
}
