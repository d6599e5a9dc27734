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

	"github.com/pgratelimit/ratelimit/internal/algorithm"
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

// A control of TestSQLEqualsModel: mistakes by one, in places that few requests reach. There are mistakes for each
// of the three that decide: for one key, for all keys in one statement, and rate_limit_all, which decides the rest. A difference counts if it is in a step of the algorithm that has the mistake.
func TestMistakesInTheFunctionsDifferFromTheModel(t *testing.T) {
	t.Parallel()

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
	rare := map[int]func() []step{sliding: roundingStory, bucket: changedBuckets, log: refundBehindTheClock, calendar: calendarBehindTheClock, all: refundOfTheWindowBefore}
	type mistake struct {
		algorithm    int
		right, wrong string
	}
	check := func(name, function string, c mistake, change func(t *testing.T, db pgtest.Executor)) {
		t.Run(fmt.Sprintf("%s, %d: %s, not %s", name, c.algorithm, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if strings.HasPrefix(name, "for several keys") {
				alwaysArrays(t, db.Pool)
			}
			if change == nil {
				function := function
				if left := pgtest.LeftBy(function); !strings.Contains(definition(t, db.Pool, function), c.right) {
					function = left
				}
				pgtest.Rewrite(t, db.Pool, function, c.right, c.wrong)
			} else {
				change(t, db.Pool)
			}
			if story := rare[c.algorithm]; story != nil {
				err := replay(t.Context(), db.Pool, "rare", story(), 10)
				if _, found := errors.AsType[*difference](err); found {
					return
				}
				require.NoError(t, err)
			}
			seed := testSeed(t)
			concerned := func(s step) bool { return c.algorithm == all || s.policy.numbers().Algorithm == int16(c.algorithm) }
			mostly := func(r *rand.Rand) model { // of that algorithm, or it would take three times as many steps
				p := randomPolicy(r)
				for c.algorithm != all && p.numbers().Algorithm != int16(c.algorithm) && r.IntN(10) > 0 {
					p = randomPolicy(r)
				}
				return p
			}
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(20_000), "the model does not tell the mistake")
				steps, err := newStoryOf(rand.New(rand.NewPCG(seed, story)), 40, mostly)
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

	// Some code stands several times in a function: for each table, for one key and for many. It may be wrong
	// in one place.
	eachOf := func(name string, algorithm int, right, wrong string, places int) {
		for nth := range places {
			check(
				fmt.Sprint(name, ", place ", nth),
				functions[algorithm],
				mistake{algorithm, right, wrong},
				func(t *testing.T, db pgtest.Executor) {
					t.Helper()
					text := definition(t, db, functions[algorithm])
					if !strings.Contains(text, right) {
						text = definition(t, db, pgtest.LeftBy(functions[algorithm]))
					}
					parts := strings.Split(text, right)
					require.Len(t, parts, places+1)
					pgtest.Exec(t, db, strings.Join(parts[:nth+1], right)+wrong+strings.Join(parts[nth+1:], right))
				},
			)
		}
	}

	for _, c := range []mistake{
		{fixed, "clock >= s.expires_at OR (s.count | s.credit) = 0", "clock > s.expires_at OR (s.count | s.credit) = 0"},
		{fixed, "s.window_start - clock > window_us", "s.window_start - clock >= window_us"},
		{fixed, "taken_in[part] = s.window_start AND s.window_start = r.window_start", "taken_in[part] IS NOT NULL"},
		{fixed, "s.since = taken_since[part]", "taken_since[part] IS NOT NULL"},
		{fixed, "s.credit := s.credit - spent", "s.credit := s.credit"},
		{fixed, "IF s.credit = 0 THEN -- as", "IF false THEN -- as"},
		{fixed, "s.count := s.count + units", "s.count := s.count + units + 1"},
		{sliding, "window_us - 1) / window_us", "window_us) / window_us"},
		{sliding, "t - s.window_start >= window_us", "t - s.window_start > window_us"},
		{sliding, "taken_in[part] = s.window_start - window_us", "taken_in[part] IS NOT NULL"},
		{sliding, "IF r.window_start = s.window_start THEN", "IF true THEN"},
		{all, "AND r.count = 0 AND r.prev_count = 0", ""},
		{sliding, "s.expires_at := clock + reset_after_us", "s.expires_at := s.window_start + 2 * window_us"},
		{sliding, "greatest(cost, 1) - s.credit; -- of so many", "greatest(cost, 1);"},
		{bucket, "IF clock >= s.expires_at THEN", "IF clock > s.expires_at + 1 THEN"},
		{bucket, "t - taken_in[part] <= need / refill", "t - taken_in[part] < need / refill"},
		{bucket, "s.returned := s.returned + back", "s.returned := s.returned"},
		{bucket, "OR s.capacity <> capacity", ""},
		{bucket, "s.since := t;", ""},
		{bucket, "s.count + least(units,", "s.count + 1 + least(units,"},
		{log, "& age_bits) >= window_us", "& age_bits) > window_us"},
		{log, "- s.window_start + clock", "- s.window_start + clock - 1"},
		{log, "s.log[needed + 1:]", "s.log[needed:]"},
		{log, "IF units > 0 THEN", "IF true THEN"},
		{log, "IF back = (r.log[needed] & 1023) THEN", "IF false THEN"},
		{log, "(e.entry >> 10) << 10 = taken_in[part] << 10", "e.nth = cardinality(s.log)"},
		{log, "IF clock < t THEN", "IF false THEN"},
		{log, "IF s.credit = 0 THEN -- as", "IF false THEN -- as"},
		{calendar, "s.scale <= 2 * window_us THEN s.count", "s.scale <= 3 * window_us THEN s.count"},
		{calendar, "s.scale := window_us;", "s.scale := window_us + 1;"},
		{calendar, "CASE WHEN s.credit > 0 THEN 2 * window_us ELSE window_us END", "window_us"},
		{calendar, "t - s.window_start >= s.scale", "t - s.window_start > s.scale"},
		{calendar, "_rate_limit_window_end(t, window_us, zone) - t", "window_us"},
		{calendar, "_rate_limit_window_end(t, window_us, zone) - t", "public._rate_limit_window_end(t, window_us, 'UTC') - t"},
		{calendar, "free_at := s.window_start + s.scale", "free_at := s.window_start + window_us"},
		{calendar, "THEN s.window_start + s.scale END", "THEN s.window_start + window_us END"},
		{calendar, "t + 2 * window_us", "t + window_us"},
		{calendar, "s.scale, s.expires_at", "NULL::bigint, s.expires_at"},
		{all, "least(granted, remaining / cost)", "least(granted + 1, remaining / cost)"},
		{all, "asked > -(9223372036854775807 / cost)", "asked > 1 - (9223372036854775807 / cost)"},
		{all, "locked := CASE WHEN gives AND NOT grants THEN", "locked := CASE WHEN false THEN"}, // refunds make rows
	} {
		check("rate_limit_all", "rate_limit_all", c, nil)
	}

	// Mistakes in deciding one key.
	for _, c := range []mistake{
		{fixed, "counts[1] BETWEEN 1 AND max_count / costs[1]", "counts[1] >= 1"},
		{fixed, "least(asked, remaining / cost)", "least(asked, remaining / cost + 1)"},
		{fixed, "IF granted > 0 OR moved THEN", "IF granted > 0 THEN"},
		{fixed, "s.expires_at := clock + reset_after_us", "s.expires_at := clock + reset_after_us + 1"},
		{fixed, "AND d.algorithm = 1\n", "\n"},
		{bucket, "credit, scale = s.scale", "credit"},
		{log, "least(asked, remaining / cost)", "least(asked, remaining / cost + 1)"},
		{log, "log = s.log", "log = d.log"},
		{calendar, "THEN costs[1] * counts[1]", "THEN costs[1]"},
		{calendar, "clock, window_end - clock, window_end", "clock, window_us, window_end"},
		{calendar, "s.scale, s.expires_at,", "NULL::bigint, s.expires_at,"},
		{calendar, "IF granted > 0 OR moved THEN", "IF granted > 0 THEN"},
		{log, "needed := 0;\n            IF granted > 0", "IF granted > 0"},
		// Mistakes in the one statement for one key.
		{fixed, "d.algorithm = 1 AND", ""},
		{fixed, "d.since IS NULL AND", ""},
		{fixed, "d.window_start - clock <= window_us", "d.window_start - clock <= 2 * window_us"},
		{fixed, "AND d.expires_at = d.window_start + window_us", ""},
		{fixed, "excluded.count <= max_count - d.count", "excluded.count <= max_count - d.count + 1"},
		{fixed, "THEN costs[1] * counts[1]", "THEN costs[1]"},
		{sliding, "AND d.since IS NULL", ""},
		{sliding, "abs(d.window_start - clock) < window_us - 10000", "clock - d.window_start < window_us - 10000"},
		{sliding, "abs(d.window_start - clock) < window_us - 10000", "d.window_start - clock < window_us - 10000"},
		{sliding, "d.expires_at - d.window_start = 2 * window_us\n", "true\n"},
		// The window before is forgotten, or rounded in the caller's favour.
		{sliding, "+ d.prev_count * least", "+ 0 * least"},
		{sliding, "(window_us - 1\n", "(0\n"},
		{bucket, "window_start = greatest(clock, d.window_start)", "window_start = clock"},
		{bucket, "+ (full_credit - excluded.credit) - 1) / inflow + 1", "+ (full_credit - excluded.credit)) / inflow + 1"},
		{bucket, "d.count = 0 AND", ""},
		{bucket, "d.scale = every_us AND", ""},
		{bucket, "AND d.capacity = tokens", ""},
		{bucket, "d.refill = inflow AND", ""},
		{bucket, ">= full_credit - excluded.credit", ">= full_credit - excluded.credit - every_us"},
		{calendar, "d.algorithm = 5 AND", ""},
		{calendar, "d.since IS NULL AND", ""},
		{calendar, "d.window_start - clock <= window_us", "d.window_start - clock <= 2 * window_us"},
		{calendar, "AND d.scale <= 2 * window_us", ""},
		{calendar, "AND d.expires_at = d.window_start + d.scale", ""}, // what was given back has left an empty row
		{calendar, "excluded.count <= max_count - d.count", "excluded.count <= max_count - d.count + 1"},
		{calendar, "clock, window_end - clock, window_end", "clock, window_us, clock + window_us"},
	} {
		check("for one key", functions[c.algorithm], c, nil)
	}
	for algorithm := fixed; algorithm <= calendar; algorithm++ {
		eachOf("for one key", algorithm, "WHERE d.ctid = s.tid", "WHERE d.ctid = s.tid AND false", 2)
		if algorithm != log { // which has no such statement
			eachOf("for one key", algorithm, "VALUES (name, this_key, ", "VALUES (name, this_key || '?', ", 2)
			added := map[int]string{bucket: "- (full_credit - excluded.credit),\n"}[algorithm]
			if added == "" {
				added = "count = d.count + excluded.count\n"
			}
			eachOf("for one key", algorithm, added, strings.Replace(added, "excluded", "2 * excluded", 1), 2)
			eachOf("for several keys", algorithm, "SELECT name, e.key, ", "SELECT name, e.key || '?', ", 2)
		}
	}

	// Mistakes in the one statement for several keys, which has to decide all that comes.
	for _, c := range []mistake{
		{fixed, "AND max_count / u.cost", "AND max_count / u.cost + 1"},
		{fixed, "array_position(each, NULL) IS NULL", "true"},
		{fixed, "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
		{fixed, "CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count", "d.count + excluded.count"},
		{fixed, "THEN d.window_start ELSE", "THEN clock ELSE"},
		{fixed, "THEN d.expires_at ELSE", "THEN d.expires_at + 1 ELSE"},
		{fixed, "clock, clock + window_us", "clock, clock + window_us - 1"},
		{fixed, "d.algorithm = 1 AND", ""},
		{fixed, "d.since IS NULL AND", ""},
		{fixed, "d.window_start - clock <= window_us", "d.window_start - clock <= 2 * window_us"},
		{fixed, "clock >= d.expires_at", "clock >= d.expires_at - 1"},
		{fixed, "AND d.expires_at = d.window_start + window_us", ""},
		{fixed, "excluded.count <= max_count - d.count", "excluded.count <= max_count - d.count + 1"},
		{sliding, "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
		{sliding, "THEN d.count ELSE 0 END +", "THEN d.count ELSE d.count END +"},
		{sliding, "WHEN d.expires_at > clock THEN d.count ELSE 0 END,", "ELSE 0 END,"},
		{sliding, "THEN d.window_start + window_us ELSE", "THEN clock ELSE"},
		{sliding, "THEN d.expires_at + window_us ELSE", "THEN d.expires_at + window_us - 1 ELSE"},
		{sliding, "ELSE excluded.expires_at END", "ELSE d.expires_at END"},
		{sliding, "clock, clock + 2 * window_us", "clock, clock + window_us"},
		{sliding, "d.algorithm = 2 AND", ""},
		{sliding, "AND d.since IS NULL", ""},
		{sliding, "abs(d.window_start - clock) < window_us - 10000", "clock - d.window_start < window_us - 10000"},
		{sliding, "WHEN d.expires_at <= clock THEN d.window_start <= ended", "WHEN d.expires_at <= clock THEN true"},
		{sliding, "WHEN d.expires_at - d.window_start <> 2 * window_us THEN false", ""},
		{sliding, "+ d.prev_count * least", "+ 0 * least"},
		{sliding, "(window_us - 1\n", "(0\n"},
		{sliding, "(d.count * (d.expires_at - clock) + window_us - 1) / window_us", "0"},
		{sliding, "(d.expires_at - clock) + window_us - 1) / window_us", "(d.expires_at - clock)) / window_us"},
		{calendar, "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
		{calendar, "CASE WHEN clock < d.expires_at THEN d.count ELSE 0 END + excluded.count", "d.count + excluded.count"},
		{calendar, "THEN d.window_start ELSE", "THEN clock ELSE"},
		{calendar, "THEN d.scale ELSE", "THEN excluded.scale ELSE"},
		{calendar, "ELSE excluded.scale END", "ELSE d.scale END"},
		{calendar, "THEN d.expires_at ELSE", "THEN excluded.expires_at ELSE"},
		{calendar, "clock, window_end - clock, window_end", "clock, window_us, clock + window_us"},
		{calendar, "d.algorithm = 5 AND", ""},
		{calendar, "d.since IS NULL AND", ""},
		{calendar, "d.window_start - clock <= window_us", "d.window_start - clock <= 2 * window_us"},
		{calendar, "clock >= d.expires_at", "clock >= d.expires_at - 1"},
		{calendar, "AND d.scale <= 2 * window_us", ""},
		{calendar, "AND d.expires_at = d.window_start + d.scale", ""},
		{calendar, "excluded.count <= max_count - d.count", "excluded.count <= max_count - d.count + 1"},
		{bucket, "ELSE 0 END + excluded.credit", "ELSE -1 END + excluded.credit"},
		{bucket, "THEN d.credit + greatest(clock - d.window_start, 0) * inflow - full_credit", "THEN d.credit - full_credit"},
		{bucket, "THEN greatest(clock, d.window_start) ELSE", "THEN clock ELSE"},
		{bucket, "THEN d.since ELSE", "THEN clock ELSE"},
		{bucket, "THEN d.returned ELSE 0", "THEN d.returned ELSE d.returned"},
		{bucket, "(full_credit - excluded.credit) - 1) / inflow + 1", "(full_credit - excluded.credit)) / inflow + 1"},
		{bucket, "every_us - 1) / inflow + 1", "every_us - 1) / inflow"},
		{bucket, "d.count = 0 AND", ""},
		{bucket, "d.scale = every_us AND", ""},
		{bucket, "AND d.capacity = tokens", ""},
		{bucket, "d.refill = inflow AND", ""},
		{bucket, "d.window_start - clock <= (full_credit - 1) / inflow + 1", "d.window_start - clock <= (full_credit - 1) / inflow + 2 * every_us"},
		{bucket, ">= full_credit - excluded.credit", ">= full_credit - excluded.credit - every_us"},
		{bucket, "full_credit - d.credit - 1) / inflow END", "full_credit - d.credit - 1) / inflow - 1 END"},
	} {
		check("for several keys", functions[c.algorithm], c, nil)
	}
	for _, algorithm := range []int{fixed, sliding, bucket, calendar} {
		for _, c := range []mistake{
			{algorithm, "< (-octet_length(this_key)", "<= (-octet_length(this_key)"},
			{algorithm, "THEN u.cost * u.asked", "THEN u.cost"},
			{algorithm, "undecided[a.ord]", "a.ord"},
		} {
			check("for several keys", functions[algorithm], c, nil)
		}
		counted := map[int]string{fixed: "excluded.count,", sliding: "excluded.count,", bucket: "excluded.credit,", calendar: "excluded.count,"}[algorithm]
		eachOf("for several keys", algorithm, counted, "1 + "+counted, 2)
	}
}

// The same for rate_limit_take_all. It has the rules of the functions above, so this is about what is its own.
func TestMistakesInTakingFromAllDifferFromTheModels(t *testing.T) {
	t.Parallel()

	var (
		fixed, sliding   = []int16{algorithm.FixedWindow, algorithm.CalendarWindow}, []int16{algorithm.SlidingWindow}
		bucket, calendar = []int16{algorithm.TokenBucket}, []int16{algorithm.CalendarWindow}
	)
	for _, c := range []struct {
		mostly       []int16 // algorithms that have the mistake
		right, wrong string
	}{
		{nil, "AND d.ctid IS NOT NULL", ""},
		{nil, "EXIT WHEN NOT fits;", ""}, // a denial makes rows
		{nil, "algorithm = excluded.algorithm", "algorithm = d.algorithm"},
		{nil, "array_agg(d.told ORDER BY d.place)", "array_agg(d.told ORDER BY -d.place)"},
		{nil, "ON e.place = p.row_of", "ON e.place = p.place"},
		{fixed, "ELSE 0 END + excluded.count", "ELSE 0 END + 2 * excluded.count"},
		{fixed, "excluded.count <= max_count - d.count)\n", "excluded.count <= max_count - d.count + 1)\n"},
		{fixed, "clock >= d.expires_at\n", "clock >= d.expires_at - 1\n"},
		{sliding, "WHEN d.expires_at > clock THEN d.count ELSE 0 END\n", "ELSE 0 END\n"},
		{sliding, "THEN d.expires_at + window_us ELSE", "THEN d.expires_at ELSE"},
		{bucket, ">= full_credit - excluded.credit", ">= full_credit - excluded.credit - every_us"},
		{bucket, "ELSE 0 END + excluded.credit", "ELSE -1 END + excluded.credit"},
		{bucket, "WHEN 3 THEN tokens", "WHEN 3 THEN tokens + 1"},
		{bucket, "WHEN 3 THEN every_us", "WHEN 3 THEN every_us + 1"},
		{bucket, "THEN d.since ELSE clock END", "THEN clock ELSE clock END"},
		{calendar, "WHEN 5 THEN window_end\n", "WHEN 5 THEN window_end + 1\n"},
		// What is done by the first reading of the clock.
		{bucket, "CASE WHEN clock - d.window_start <= (full_credit", "CASE WHEN clock + 10000 - d.window_start <= (full_credit"},
		{nil, "clock := greatest(", "now_us := greatest("},
	} {
		t.Run(fmt.Sprintf("%q, not %q", c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, "rate_limit_take_all", append([]string{c.right, c.wrong}, firstReading...)...)
			seed := testSeed(t)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(5_000), "the models do not tell the mistake")
				if _, _, err := tellTakes(t, db.Pool, rand.New(rand.NewPCG(seed, story)), story, c.mostly); err != nil {
					return
				}
			}
		})
	}
}

// definition is the text of a function.
func definition(t *testing.T, db pgtest.Executor, function string) string {
	t.Helper()
	return pgtest.Scalar[string](t, db, "SELECT pg_get_functiondef($1::regproc)", function)
}

// A control of the tests of concurrency, which compare what was granted with the limit and with what is stored. A
// variant that decides from a row that it has not locked, or from the row as it was before the lock, admits too
// many.
func TestDecidingWithoutTheLockAdmitsTooMany(t *testing.T) {
	t.Parallel()

	for name, variant := range map[string]struct {
		policy   model
		function string
		oldNew   []string
		taken    int64
	}{
		"sliding log": {SlidingLog{Limit: 10, Window: year}, "", nil, 7},
		"sliding log, without locks": {
			// The 6 are lost.
			SlidingLog{Limit: 10, Window: year}, "_rate_limit_left_sliding_log", []string{"FOR UPDATE", ""}, 7,
		},
		"fixed window": {FixedWindow{Limit: 10, Window: year}, "", nil, 7},
		"fixed window, from the row that the statement's snapshot shows": {
			FixedWindow{Limit: 10, Window: year}, "rate_limit_take_fixed_window", []string{
				"excluded.count <= max_count - d.count",
				"excluded.count <= max_count - (SELECT r.count FROM public.rate_limit_ephemeral AS r WHERE r.prefix = d.prefix AND r.key = d.key)",
				"< clock + 10000\n", "IS NOT NULL\n", // however long it waits
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
			config := Config{Name: "test", Policy: variant.policy, Client: ClientConfig{Timeout: amply}}
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			somebody := pgtest.Begin(t, db)
			first, err := limiter.AllowNTx(t.Context(), somebody, "key", 6)
			require.NoError(t, err)
			require.True(t, first.Allowed)
			other := pgtest.Begin(t, db) // which waits for as long as it takes, and asks once
			second := testkit.Later(func() (Result, error) { return limiter.AllowNTx(context.Background(), other, "key", 6) })
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
			Client: ClientConfig{Timeout: amply},
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

	db := pgtest.New(t)
	// Two attempts: to look, and to make the row.
	pgtest.Rewrite(t, db.Pool, "rate_limit_all", "FOR attempt IN 1 .. 5 LOOP", "FOR attempt IN 1 .. 2 LOOP")
	limiter := newLimiter(
		t,
		db.NewPool(t, nil),
		Config{
			Name:   "test",
			Policy: All(FixedWindow{Limit: 10, Window: year}, SlidingLog{Limit: 10, Window: year}),
			Client: ClientConfig{Timeout: amply},
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

	for name, policy := range slowPolicies(10) {
		db := pgtest.New(t)
		pgtest.Rewrite(t, db.Pool, "rate_limit_all", "IF (granted > 0 AND changed) OR", "IF true OR")
		pgtest.Rewrite(t, db.Pool, pgtest.LeftBy(takingOf(policy)), "IF granted > 0 OR moved THEN", "IF true THEN")
		config := Config{Name: "test", Policy: policy, Client: ClientConfig{Timeout: amply}, NoDenialCache: true}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		tx := pgtest.Begin(t, db)
		result, err := limiter.AllowTx(t.Context(), tx, "key")
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

	const updates, keys, page = 1000, 10, 8192
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
			for name, policy := range map[string]model{
				"fixed window":   FixedWindow{Limit: 10, Window: time.Second},
				"sliding window": SlidingWindow{Limit: 10, Window: time.Second},
				"token bucket":   TokenBucket{Capacity: 10, Refill: 10, Every: time.Second},
				"sliding log":    SlidingLog{Limit: 10, Window: 100 * time.Second},
				"calendar":       CalendarWindow{Limit: 10, Unit: Minute},
			} {
				limiter := newLimiter(
					t,
					pool,
					Config{Name: name, Policy: policy, Client: ClientConfig{Timeout: amply, Test: everySecond}},
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
