package ratelimit

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

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Negative controls: these functions are broken in just the way that the other tests look for, and it shows, so
// those tests could see it. Controls for one test alone are beside that test: TestClockIsReadAfterTheLockWait,
// TestLockingInTheOrderGivenDeadlocks, TestRowsAreMadeAndLockedInOneOrder,
// TestPlansWithoutTheirSettingScanTheTable, TestFunctionsWithoutTheirSearchPathTakeDecoys,
// TestPgBouncerHandsNoSettingsOn and TestFunctionsPassPlpgsqlCheck.

// A control of TestSQLEqualsModel: mistakes by one, in places that few requests reach. A difference counts if it is in a
// step of the algorithm that has the mistake.
func TestMistakesInTheFunctionsDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const (
		fixed = 1 + iota
		sliding
		bucket
		log
		calendar
		all // of any algorithm
	)
	functions := map[int]string{
		fixed: "rate_limit_take_fixed_window", sliding: "rate_limit_take_sliding_window", bucket: "rate_limit_take_token_bucket",
		log: "rate_limit_take_sliding_log", calendar: "rate_limit_take_calendar_window",
	}
	// What random stories come by too rarely.
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
			seed := testSeed(t)
			concerned := func(s modeltest.Step) bool {
				return c.algorithm == all || s.Policy.Numbers().Algorithm == int16(c.algorithm)
			}
			mostly := func(r *rand.Rand) model.Rules { // of that algorithm, or it would take three times as many steps
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

	// Mistakes in the rules of a row, and in giving back.
	for _, c := range []mistake{
		{fixed, "_rate_limit_fixed", "clock >= s.expires_at OR", "clock > s.expires_at OR"},
		{fixed, "_rate_limit_fixed", "s.window_start - clock > window_us", "s.window_start - clock >= window_us"},
		{fixed, "_rate_limit_fixed", "s.credit := s.credit - s.spent", "s.credit := s.credit"},
		{fixed, "_rate_limit_fixed", "s.count := s.count + s.granted * cost - s.spent", "s.count := s.count + s.granted * cost - s.spent + 1"},
		{fixed, "_rate_limit_fixed", "(room + s.credit) / cost", "(room + s.credit) / cost + 1"},
		{fixed, "_rate_limit_fixed", "OR (moved AND", "OR (false AND"},
		{fixed, "_rate_limit_fixed", "s.expires_at := clock + s.reset_after_us", "s.expires_at := clock + s.reset_after_us + 1"},
		{fixed, "_rate_limit_fixed_refund", "taken_in = s.window_start AND taken_in = rolled.window_start", "taken_in IS NOT NULL"},
		{fixed, "_rate_limit_give", "since = taken_since", "taken_since IS NOT NULL"},
		{fixed, "_rate_limit_give", "IF rolled.reset_after_us = 0 THEN", "IF false THEN"},
		{all, "_rate_limit_give", "s.changed AND s.count = 0 AND s.prev_count = 0", "s.changed"},
		{all, "_rate_limit_give", "s.count := least(s.count + least(units,", "s.count := least(s.count + 1 + least(units,"},
		{sliding, "_rate_limit_sliding", "public._rate_limit_ceil_div(s.prev_count * rest, window_us)", "s.prev_count * rest / window_us"},
		{sliding, "_rate_limit_sliding", "ELSIF t - s.window_start >= window_us", "ELSIF t - s.window_start > window_us"},
		{sliding, "_rate_limit_sliding", "s.expires_at := clock + s.reset_after_us", "s.expires_at := s.window_start + 2 * window_us"},
		{sliding, "_rate_limit_sliding", "free := greatest(cost, 1) - s.credit;", "free := greatest(cost, 1);"},
		{sliding, "_rate_limit_sliding", "OR (moved AND", "OR (false AND"},
		{sliding, "_rate_limit_sliding_refund", "later = 0 AND taken_in = s.window_start - window_us", "later = 0 AND taken_in IS NOT NULL"},
		{sliding, "_rate_limit_sliding_refund", "later = window_us AND taken_in = s.window_start", "false"},
		{bucket, "_rate_limit_bucket", "IF clock >= s.expires_at THEN", "IF clock > s.expires_at + 1 THEN"},
		{bucket, "_rate_limit_bucket", "OR s.capacity <> capacity", ""},
		{bucket, "_rate_limit_bucket", "s.since := t;", ""},
		{bucket, "_rate_limit_bucket_refund", "t - taken_in <= need / rolled.refill", "t - taken_in < need / rolled.refill"},
		{bucket, "_rate_limit_bucket_refund", "s.returned := s.returned + back", "s.returned := s.returned"},
		{bucket, "_rate_limit_bucket_refund", "OR rolled.since IS DISTINCT FROM taken_since", ""},
		{log, "_rate_limit_log", ">= window_us LOOP", "> window_us LOOP"},
		{log, "_rate_limit_log", "- s.window_start + clock", "- s.window_start + clock - 1"},
		{log, "_rate_limit_log", "log := log[n + 1:]", "log := log[n:]"},
		{log, "_rate_limit_log", "IF units > 0 THEN", "IF true THEN"},
		{log, "_rate_limit_log", "(room + s.credit) / cost", "(room + s.credit) / cost + 1"},
		{log, "_rate_limit_log", "log[1:least(n, 64)]", "log[1:least(n, 64) - 1]"},
		{log, "_rate_limit_log_refund", "IF back = s.log[place] & 1023 THEN", "IF false THEN"},
		{log, "_rate_limit_log_refund", "(e.entry >> 10) << 10 = taken_in << 10", "e.place = cardinality(rolled.log)"},
		{log, "_rate_limit_log_refund", "IF clock < t THEN", "IF false THEN"},
		{log, "_rate_limit_give", "IF rolled.reset_after_us = 0 THEN", "IF false THEN"},
		{calendar, "_rate_limit_calendar", "s.scale > 2 * window_us", "s.scale > 3 * window_us"},
		{calendar, "_rate_limit_calendar", "s.scale := window_us;", "s.scale := window_us + 1;"},
		{calendar, "_rate_limit_calendar", "CASE WHEN s.credit > 0 THEN 2 ELSE 1 END * window_us", "window_us"},
		{calendar, "_rate_limit_calendar", "t - s.window_start >= s.scale", "t - s.window_start > s.scale"},
		{calendar, "_rate_limit_calendar", "public._rate_limit_window_end(t, window_us, zone) - t", "window_us"},
		{calendar, "_rate_limit_calendar", "_rate_limit_window_end(t, window_us, zone) - t", "_rate_limit_window_end(t, window_us, 'UTC') - t"},
		{calendar, "_rate_limit_calendar", "ends := least(s.window_start + s.scale,", "ends := least(s.window_start + window_us,"},
		{calendar, "_rate_limit_calendar", "t + 2 * window_us", "t + window_us"},
		{calendar, "_rate_limit_calendar", "OR (moved AND", "OR (false AND"},
		{calendar, "rate_limit_all", "s.scale, s.expires_at, s.told_log", "NULL::bigint, s.expires_at, s.told_log"},
		{all, "rate_limit_all", "granted := least(granted, s.granted)", "granted := least(granted + 1, s.granted + 1)"},
		{all, "rate_limit_all", "asked > -(9223372036854775807 / cost)", "asked > 1 - (9223372036854775807 / cost)"},
		{all, "rate_limit_all", "IS NULL OR s.tid IS NOT NULL;", "IS NULL OR true;"}, // refunds make rows
		{all, "rate_limit_all", "s.algorithm IS DISTINCT FROM algorithms[i]", "s.algorithm IS NULL"},
		{all, "rate_limit_all", "scale = n.scale, ", ""},
		{all, "rate_limit_all", "log = n.log", "log = d.log"},
	} {
		check("the rules", c)
	}

	// Mistakes in deciding one key.
	for _, c := range []mistake{
		{all, pgtest.Left, "AND d.algorithm = algorithm\n", "\n"},
		{bucket, pgtest.Left, "scale = s.scale, ", ""},
		{log, pgtest.Left, "log = s.log", "log = d.log"},
		{log, pgtest.Left, " || s.told_log", ""},
		{calendar, pgtest.Left, "s.scale, s.expires_at, s.spent", "NULL::bigint, s.expires_at, s.spent"},
		{fixed, "_rate_limit_units_of_one", "ELSE max_count + 1 END", "ELSE max_count END"},
		{all, "_rate_limit_units_of_one", "THEN costs[1] * counts[1]", "THEN 1 * counts[1]"},
	} {
		check("for one key", c)
	}
	// Mistakes in what the statements for one key and for several share. They have to decide all that comes.
	window := func(algorithm int, fits string) []mistake {
		take := functions[algorithm]
		return []mistake{
			{algorithm, take, "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
			{algorithm, take, "CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count", "d.count + excluded.count"},
			{algorithm, take, "THEN d.window_start ELSE", "THEN clock ELSE"},
			{algorithm, take, "THEN d.expires_at ELSE", "THEN d.expires_at + 1 ELSE"},
			{algorithm, fits, fmt.Sprintf("algorithm = %d AND", algorithm), ""},
			{algorithm, fits, "since IS NULL AND", ""},
			{algorithm, fits, "window_start - clock <= window_us", "window_start - clock <= 2 * window_us"},
			{algorithm, fits, "clock >= expires_at", "clock >= expires_at - 1"},
			{algorithm, fits, "units <= max_count - count", "units <= max_count - count + 1"},
		}
	}
	const slidingFits, bucketFits, level = "_rate_limit_sliding_fits", "_rate_limit_bucket_fits", "_rate_limit_bucket_level"
	for _, c := range slices.Concat(window(fixed, "_rate_limit_fixed_fits"), window(calendar, "_rate_limit_calendar_fits"), []mistake{
		{fixed, functions[fixed], "clock, clock + window_us", "clock, clock + window_us - 1"},
		{fixed, "_rate_limit_fixed_fits", "AND expires_at = window_start + window_us", ""},
		{calendar, functions[calendar], "THEN d.scale ELSE", "THEN excluded.scale ELSE"},
		{calendar, functions[calendar], "ELSE excluded.scale END", "ELSE d.scale END"},
		{calendar, functions[calendar], "clock, window_end - clock, window_end", "clock, window_us, clock + window_us"},
		{calendar, "_rate_limit_calendar_fits", "AND scale <= 2 * window_us", ""},
		{calendar, "_rate_limit_calendar_fits", "AND expires_at = window_start + scale", ""},
		{sliding, functions[sliding], "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
		{sliding, functions[sliding], "THEN d.count ELSE 0 END +", "THEN d.count ELSE d.count END +"},
		{sliding, functions[sliding], "WHEN d.expires_at > clock THEN d.count ELSE 0 END,", "ELSE 0 END,"},
		{sliding, functions[sliding], "THEN d.window_start + window_us ELSE", "THEN clock ELSE"},
		{sliding, functions[sliding], "THEN d.expires_at + window_us ELSE", "THEN d.expires_at + window_us - 1 ELSE"},
		{sliding, functions[sliding], "ELSE excluded.expires_at END", "ELSE d.expires_at END"},
		{sliding, functions[sliding], "clock, clock + 2 * window_us", "clock, clock + window_us"},
		{sliding, slidingFits, "algorithm = 2 AND", ""},
		{sliding, slidingFits, "since IS NULL AND", ""},
		{sliding, slidingFits, "abs(window_start - clock) < window_us - 10000", "clock - window_start < window_us - 10000"},
		{sliding, slidingFits, "WHEN expires_at <= clock THEN window_start <= ended", "WHEN expires_at <= clock THEN true"},
		{sliding, slidingFits, "WHEN expires_at - window_start <> 2 * window_us THEN false", ""},
		{sliding, slidingFits, "(prev_count * least", "(0 * least"},
		{sliding, slidingFits, "window_us) + window_us - 1)", "window_us))"}, // rounded in the caller's favour
		{sliding, slidingFits, "(count * (expires_at - clock) + window_us - 1) / window_us", "0"},
		{sliding, slidingFits, "(expires_at - clock) + window_us - 1) / window_us", "(expires_at - clock)) / window_us"},
		{bucket, functions[bucket], "- (full_credit - excluded.credit),\n", "- 2 * (full_credit - excluded.credit),\n"},
		{bucket, functions[bucket], "window_start = greatest(clock, d.window_start)", "window_start = clock"},
		{bucket, functions[bucket], "THEN d.since ELSE", "THEN clock ELSE"},
		{bucket, functions[bucket], "THEN d.returned ELSE 0", "THEN d.returned ELSE d.returned"},
		{bucket, functions[bucket], "excluded.credit - 1 + full_credit", "excluded.credit + full_credit"},
		{bucket, functions[bucket], "every_us - 1) / refill + 1", "every_us - 1) / refill"},
		{bucket, level, "ELSE full_credit END", "ELSE full_credit - 1 END"},
		{bucket, level, "greatest(clock - window_start, 0)", "0"},
		{bucket, bucketFits, "count = 0 AND", ""},
		{bucket, bucketFits, "scale = every_us AND", ""},
		{bucket, bucketFits, "capacity = tokens AND", ""},
		{bucket, bucketFits, "refill = inflow\n", "true\n"},
		{bucket, bucketFits, "window_start - clock <= (full_credit - 1) / inflow + 1", "window_start - clock <= (full_credit - 1) / inflow + 2 * every_us"},
		{bucket, bucketFits, "inflow >= need", "inflow >= need - every_us"},
		{bucket, bucketFits, "full_credit - credit - 1) / inflow END", "full_credit - credit - 1) / inflow - 1 END"},
	}) {
		check("for one key", c)
		check("for several keys", c, alwaysArrays)
	}
	for _, c := range []mistake{
		{all, "_rate_limit_units", "THEN cost * asked", "THEN cost"},
		{fixed, "_rate_limit_units", "max_count / cost THEN", "max_count / cost + 1 THEN"},
		{all, "_rate_limit_units_of_each", "array_position(units, NULL) IS NULL", "true"},
		{all, "_rate_limit_in_order", `DISTINCT ON (octet_length(e.key), e.key COLLATE "C") `, ""}, // a key twice
		{fixed, pgtest.Left, "places[a.ord]", "a.ord"},
	} {
		check("for several keys", c, alwaysArrays)
	}

	// A function may be wrong for one of the tables.
	for algorithm := fixed; algorithm <= calendar; algorithm++ {
		for _, left := range []string{pgtest.Left, "_rate_limit_left_durable"} {
			check("in a table", mistake{algorithm, left, "WHERE d.ctid = s.tid", "WHERE d.ctid = s.tid AND false"})
		}
		if algorithm != log { // which has no statement
			for _, take := range []string{functions[algorithm], "_" + functions[algorithm] + "_durable"} {
				check("in a table", mistake{algorithm, take, "SELECT name, keys[1], ", "SELECT name, keys[1] || '?', "})
				check("in a table", mistake{algorithm, take, "SELECT name, e.key, ", "SELECT name, e.key || '?', "}, alwaysArrays)
			}
		}
	}
}

// The same for rate_limit_take_all. It has the rules of the functions above, so this is about what is its own.
func TestMistakesInTakingFromAllDifferFromTheModels(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const rows = "_rate_limit_take_all_ephemeral"
	for _, c := range []struct {
		function     string
		right, wrong string
	}{
		{rows, "EXIT WHEN attempt = 2 OR NOT missing OR rows IS NULL", "EXIT WHEN attempt = 2 OR NOT missing"}, // a denial makes rows
		{rows, "algorithm = n.algorithm", "algorithm = d.algorithm"},
		{rows, "bool_or(d.ctid IS NULL)", "false"},
		{rows, "d.algorithm = e.algorithm", "d.algorithm > 0"},
		{"rate_limit_take_all", "ON e.place = p.row_of", "ON e.place = p.place"},
		{"_rate_limit_steps", "s.granted = 0 OR", ""},
		{"_rate_limit_steps", "s.spent > 0 OR s.credit > 0 AND algorithms[i] <> 3 OR s.count > 0 AND algorithms[i] = 3", "false"},
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
			seed := testSeed(t)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(5_000), "the models do not tell the mistake")
				if _, _, err := tellTakes(t, db.Pool, rand.New(rand.NewPCG(seed, story)), story, nil); err != nil {
					return
				}
			}
		})
	}
}

// A control of the tests of concurrency, which compare what was granted with the limit and with what is stored. A
// variant that decides from a row that it has not locked, or from the row as it was before the lock, admits too
// many.
func TestDecidingWithoutTheLockAdmitsTooMany(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for name, variant := range map[string]struct {
		policy   single
		function string
		oldNew   []string
		taken    int64
	}{
		"sliding log": {SlidingLog{Limit: 10, Window: year}, "", nil, 7},
		"sliding log, without locks": {
			// The 6 are lost.
			SlidingLog{Limit: 10, Window: year}, pgtest.Left, []string{"FOR UPDATE", ""}, 7,
		},
		"fixed window": {FixedWindow{Limit: 10, Window: year}, "", nil, 7},
		"fixed window, from the row that the statement's snapshot shows": {
			FixedWindow{Limit: 10, Window: year}, "rate_limit_take_fixed_window", []string{
				"_rate_limit_fixed_fits(d.algorithm, d.count,",
				"_rate_limit_fixed_fits(d.algorithm, (SELECT r.count FROM public.rate_limit_ephemeral AS r WHERE r.prefix = d.prefix AND r.key = d.key),",
				"now_us) < clock + 10000\n", "now_us) IS NOT NULL\n", // however long it waits
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
			config := Config{Name: "test", Policy: variant.policy}
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			somebody := pgtest.Begin(t, db)
			first, err := limiter.WithTx(somebody).AllowN(t.Context(), "key", 6)
			require.NoError(t, err)
			require.True(t, first.Allowed)
			other := pgtest.Begin(t, db) // which waits for as long as it takes, and asks once
			second := testkit.Later(func() (Result, error) { return limiter.WithTx(other).AllowN(context.Background(), "key", 6) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			require.NoError(t, somebody.Commit(t.Context()))
			result, err := second()
			require.NoError(t, err)
			require.NoError(t, other.Commit(t.Context()))
			require.Equal(t, broken, result.Allowed) // 13 of 10
			require.Equal(t, variant.taken, taken(t, db.Pool, config, "key"))
		})
	}
}

// A control of the same tests. A variant that locks a row and updates it by its ctid in one statement loses what
// it takes after a wait for the lock, because that statement's snapshot does not show the new row.
func TestUpdatingByTidInTheStatementOfTheLockIsLost(t *testing.T) {
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
		config := Config{
			Name:   "test",
			Policy: FixedWindow{Limit: 10, Window: year},
		}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		somebody := pgtest.Begin(t, db)
		pgtest.Exec(t, somebody, "UPDATE rate_limit_ephemeral SET count = count + 2")
		wait := testkit.Later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 4) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))
		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 3, result.Remaining)
		want := int64(7)
		if broken {
			want = 3 // the 4 are lost
		}
		require.Equal(t, want, taken(t, db.Pool, config, "key"))
	}
}

// A control of TestRowDeletedWhileWeWaitForIt and TestSweeperAtFullSpeed: without the loop, a call whose row
// vanishes fails.
func TestRowThatVanishesIsMissedWithoutTheLoop(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	// One attempt to make the row and to lock it. It is as if the row had been seen, and had vanished then.
	pgtest.Rewrite(t, db.Pool, "rate_limit_all",
		"FOR attempt IN 1 .. 5 LOOP", "FOR attempt IN 1 .. 1 LOOP", "missing := making AND (rows[i]).tid IS NULL;", "missing := false;")
	limiter := newLimiter(
		t,
		db.NewPool(t, nil),
		Config{
			Name:   "test",
			Policy: All(FixedWindow{Limit: 10, Window: year}, SlidingLog{Limit: 10, Window: year}),
		},
	)
	_, err := limiter.Allow(t.Context(), "key")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55000", pgErr.Code)
}

// A control of TestDenialsWriteNothing.
func TestDenialThatWritesIsSeen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for name, policy := range slowPolicies(10) {
		db := pgtest.New(t)
		pgtest.Rewrite(t, db.Pool, stepOf(policy), "s.changed := s.granted > 0 OR", "s.changed := true OR")
		config := Config{Name: "test", Policy: policy, NoDenialCache: true}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		tx := pgtest.Begin(t, db)
		result, err := limiter.WithTx(tx).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Positive(t, written(t, tx, config), name)
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// Updates of the same keys are HOT, so the index does not grow and the table stays as small as it is. An index on
// expires_at, which nearly every update changes, would end that.
func TestUpdatesAreHOT(t *testing.T) {
	t.Parallel()

	const updates, keys, page = 500, 10, 8192
	for _, indexed := range []bool{false, true} {
		t.Run(fmt.Sprintf("index on expires_at: %v", indexed), func(t *testing.T) {
			t.Parallel()
			// The server is the test's own. Transactions of other tests, even in other databases, would keep old
			// rows alive.
			server := pgtest.Server(t, pgserver.Config{})
			pool, err := pgxpool.New(t.Context(), server.URL())
			require.NoError(t, err)
			defer pool.Close()
			require.NoError(t, migrations.Up(t.Context(), pool))
			if indexed {
				pgtest.Exec(t, pool, "CREATE INDEX ON rate_limit_ephemeral (expires_at)")
			}

			clock := t0
			everySecond := TestConfig{Now: func() time.Time {
				clock = clock.Add(time.Second)
				return clock
			}}
			for name, policy := range map[string]single{
				"fixed window":   FixedWindow{Limit: 10, Window: time.Second},
				"sliding window": SlidingWindow{Limit: 10, Window: time.Second},
				"token bucket":   TokenBucket{Capacity: 10, Refill: 10, Every: time.Second},
				"sliding log":    SlidingLog{Limit: 10, Window: 100 * time.Second},
				"calendar":       CalendarWindow{Limit: 10, Unit: CalendarMinute},
			} {
				limiter := newLimiter(
					t,
					pool,
					Config{Name: name, Policy: policy},
					ClientConfig{Test: everySecond},
				)
				for i := range updates {
					result, err := limiter.Allow(t.Context(), fmt.Sprint(i%keys))
					require.NoError(t, err)
					require.True(t, result.Allowed)
				}
			}

			pool.Reset() // or what its sessions have counted might not have been told
			var updated, hot int64
			testkit.WaitUntil(t, func() bool {
				row := pool.QueryRow(
					t.Context(),
					"SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'rate_limit_ephemeral'",
				)
				require.NoError(t, row.Scan(&updated, &hot))
				return updated >= 5*(updates-keys) // the first take of a key makes its row
			})
			if indexed {
				require.Less(t, hot, updated/2)
				return
			}
			require.GreaterOrEqual(t, hot, updated*95/100)
			require.LessOrEqual(
				t,
				pgtest.Scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral')"),
				int64(4*page),
			)
			require.LessOrEqual(
				t,
				pgtest.Scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral_pkey')"),
				int64(4*page),
			)
		})
	}
}
