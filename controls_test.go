package ratelimit

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Negative controls: what the other tests look for does happen on functions that are broken in just that way, so the tests could
// see it. Those for one test alone stand beside it: see TestClockIsReadAfterTheLockWait, TestLockingInTheOrderGivenDeadlocks,
// TestRowsAreMadeAndLockedInOneOrder, TestPlansWithoutTheirSettingScanTheTable, TestFunctionsWithoutTheirSearchPathTakeDecoys,
// TestPgBouncerHandsNoSettingsOn and TestFunctionsPassPlpgsqlCheck.

// Of TestSQLEqualsModel: mistakes by one, in places that few requests come to.
func TestMistakesInTheFunctionsDifferFromTheModel(t *testing.T) {
	t.Parallel()

	for _, c := range []struct{ function, right, wrong string }{
		{"rate_limit_fixed_window", "clock >= s.expires_at", "clock > s.expires_at"},
		{"rate_limit_fixed_window", "s.window_start - clock > window_us", "s.window_start - clock >= window_us"},
		{"rate_limit_sliding_window", "window_us - 1) / window_us", "window_us) / window_us"},
		{"rate_limit_sliding_window", "t - s.window_start >= window_us", "t - s.window_start > window_us"},
		{"rate_limit_token_bucket", "clock >= s.expires_at", "clock > s.expires_at + 1"},
		{"rate_limit_token_bucket", "least(r.asked, ", "least(r.asked + 1, "},
		{"rate_limit_sliding_log", "& age_bits) >= window_us", "& age_bits) > window_us"},
		{"rate_limit_sliding_log", "- s.window_start + clock", "- s.window_start + clock - 1"},
		{"rate_limit_sliding_log", "s.log[needed + 1:]", "s.log[needed:]"},
		{"rate_limit_sliding_log", "IF units > 0 THEN", "IF true THEN"},
		{"rate_limit_sliding_log", "IF back = (s.log[needed] & 1023) THEN", "IF false THEN"},
		{"rate_limit_sliding_log", "(e.entry >> 10) << 10 = taken_in[r.ord] << 10", "e.nth = cardinality(s.log)"},
		{"rate_limit_sliding_log", "IF s.credit = 0 THEN -- as", "IF false THEN -- as"},
		{"rate_limit_fixed_window", "r.asked > -(9223372036854775807 / r.cost)", "r.asked > 1 - (9223372036854775807 / r.cost)"},
		{"rate_limit_fixed_window", "s.credit := s.credit - spent", "s.credit := s.credit"},
		{"rate_limit_fixed_window", "IF s.credit = 0 THEN -- as", "IF false THEN -- as"},
		{"rate_limit_fixed_window", "s.window_start = taken_in[r.ord]", "taken_in[r.ord] IS NOT NULL"},
		{"rate_limit_fixed_window", "s.since = taken_since[r.ord]", "taken_since[r.ord] IS NOT NULL"},
		{"rate_limit_sliding_window", "s.window_start - window_us = taken_in[r.ord]", "taken_in[r.ord] IS NOT NULL"},
		{"rate_limit_sliding_window", "s.expires_at := clock + reset_after_us", "s.expires_at := s.window_start + 2 * window_us"},
		{"rate_limit_sliding_window", "greatest(r.cost, 1) - s.credit", "greatest(r.cost, 1)"},
		{"rate_limit_token_bucket", "t - taken_in[r.ord] <= need / refill", "t - taken_in[r.ord] < need / refill"},
		{"rate_limit_token_bucket", "s.returned := s.returned + back", "s.returned := s.returned"},
		{"rate_limit_token_bucket", "OR s.capacity <> capacity", ""},
		{"rate_limit_token_bucket", "s.since := t;", ""},
		{"rate_limit_token_bucket", "s.count + least(units,", "s.count + 1 + least(units,"},
		{"rate_limit_lock", "r.cost < 0 AND taken_in[r.ord] IS NULL", "r.cost < 0"},
	} {
		t.Run(c.function+", "+c.wrong, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			rewrite(t, db.Pool, c.function, c.right, c.wrong)
			seed := testSeed(t)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(500), "the model does not tell the mistake")
				steps, err := newStory(rand.New(rand.NewPCG(seed, story)), 40)
				require.NoError(t, err)
				if err := replay(t.Context(), db.Pool, fmt.Sprint(story), steps, 10); err != nil {
					var found *difference
					require.ErrorAs(t, err, &found)
					return
				}
			}
		})
	}
}

// Of the tests of concurrency, which compare what was granted with the limit and with what is stored: a variant that decides from
// a row that it has not locked admits too many.
func TestDecidingWithoutTheLockAdmitsTooMany(t *testing.T) {
	t.Parallel()

	for _, broken := range []bool{false, true} {
		db := pgtest.New(t)
		if broken {
			rewrite(t, db.Pool, "rate_limit_lock", "FOR UPDATE SKIP LOCKED", "", "FOR UPDATE", "")
		}
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		somebody := begin(t, db)
		first, err := limiter.AllowNTx(t.Context(), somebody, "key", 6)
		require.NoError(t, err)
		require.True(t, first.Allowed)
		other := begin(t, db) // which waits for as long as it takes, and asks once
		second := later(func() (Result, error) { return limiter.AllowNTx(context.Background(), other, "key", 6) })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))
		result, err := second()
		require.NoError(t, err)
		require.NoError(t, other.Commit(t.Context()))
		require.Equal(t, broken, result.Allowed) // 13 of 10
		require.EqualValues(t, 7, taken(t, db.Pool, config, "key"))
	}
}

// Of the same tests: a variant that locks a row and updates it by its ctid in one statement loses what it takes after a wait for
// the lock, because that statement's snapshot does not show the new row.
func TestUpdatingByTidInTheStatementOfTheLockIsLost(t *testing.T) {
	t.Parallel()

	for _, broken := range []bool{false, true} {
		db := pgtest.New(t)
		if broken {
			exec(t, db.Pool, `
				CREATE OR REPLACE FUNCTION rate_limit_fixed_window(
					name text, keys text[], max_count bigint, window_us bigint, costs bigint[] DEFAULT NULL, counts bigint[] DEFAULT NULL,
					durable boolean DEFAULT false, lock_timeout_ms integer DEFAULT NULL, synchronous_commit boolean DEFAULT NULL, now timestamptz DEFAULT NULL,
					taken_since bigint[] DEFAULT NULL, taken_in bigint[] DEFAULT NULL, taken_at bigint[] DEFAULT NULL, taken_spent bigint[] DEFAULT NULL,
					skip_held boolean DEFAULT false)
				RETURNS SETOF rate_limit_decision LANGUAGE sql SECURITY DEFINER AS $$
					WITH locked AS (
						SELECT r.ctid AS tid, r.* FROM rate_limit_ephemeral AS r WHERE r.prefix = name AND r.key = keys[1] AND NOT skip_held FOR UPDATE
					), updated AS (
						UPDATE rate_limit_ephemeral AS r SET count = l.count + costs[1] FROM locked AS l WHERE r.ctid = l.tid
					)
					SELECT 1::bigint, 1::bigint, max_count - l.count - costs[1], 0::bigint, 0::bigint, clock_timestamp(),
						l.count + costs[1], l.prev_count, l.window_start, l.credit, 0::bigint, l.expires_at, l.log,
						l.since, l.window_start, NULL::bigint, 0::bigint
					FROM locked AS l
				$$`)
		}
		exec(t, db.Pool, `INSERT INTO rate_limit_ephemeral (prefix, key, algorithm, count, window_start, expires_at)
			SELECT 'test', 'key', 1, 1, now_us, now_us + 31536000000000 FROM (SELECT (extract(epoch FROM now()) * 1000000)::bigint) AS _ (now_us)`)
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		somebody := begin(t, db)
		exec(t, somebody, "UPDATE rate_limit_ephemeral SET count = count + 2")
		wait := later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 4) })
		waitUntilBlocked(t, db.Pool, 1)
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

// Of TestRowDeletedWhileWeWaitForIt and TestSweeperAtFullSpeed: without the loop, a call whose row vanishes fails.
func TestRowThatVanishesIsMissedWithoutTheLoop(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	rewrite(t, db.Pool, "rate_limit_lock", "FOR attempt IN 1 .. 3 LOOP", "FOR attempt IN 1 .. 1 LOOP")
	config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
	limiter := newLimiter(t, db.NewPool(t, nil), config)
	_, err := limiter.Allow(t.Context(), "key")
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "55000", pgErr.Code)
}

// Of TestDenialsWriteNothing.
func TestDenialThatWritesIsSeen(t *testing.T) {
	t.Parallel()

	functions := map[string]string{
		"fixed window": "rate_limit_fixed_window", "sliding window": "rate_limit_sliding_window", "token bucket": "rate_limit_token_bucket",
		"sliding log": "rate_limit_sliding_log",
	}
	for name, policy := range slowPolicies(10) {
		db := pgtest.New(t)
		rewrite(t, db.Pool, functions[name], "IF (granted > 0 AND (r.cost > 0 OR changed)) OR", "IF true OR")
		config := Config{Name: "test", Policy: policy, Timeout: amply, NoDenialCache: true}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		tx := begin(t, db)
		result, err := limiter.AllowTx(t.Context(), tx, "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Positive(t, written(t, tx, config))
		require.NoError(t, tx.Rollback(t.Context()))
	}
}

// Updates of the same keys are HOT, so that the index does not grow and the table stays as small as it is. An index on expires_at,
// which nearly every update changes, would end that.
func TestUpdatesAreHOT(t *testing.T) {
	t.Parallel()

	const updates, keys, page = 4000, 10, 8192
	for _, indexed := range []bool{false, true} {
		t.Run(fmt.Sprintf("index on expires_at: %v", indexed), func(t *testing.T) {
			t.Parallel()
			// A server of its own: transactions of other tests, also in other databases, would keep old rows alive.
			server := pgtest.Server(t, pgserver.Config{})
			pool, err := pgxpool.New(t.Context(), server.URL())
			require.NoError(t, err)
			defer pool.Close()
			require.NoError(t, migrations.Up(t.Context(), pool))
			if indexed {
				exec(t, pool, "CREATE INDEX ON rate_limit_ephemeral (expires_at)")
			}

			clock := t0
			everySecond := TestConfig{Now: func() time.Time {
				clock = clock.Add(time.Second)
				return clock
			}}
			for name, policy := range map[string]Policy{
				"fixed window":   FixedWindow{Limit: 10, Window: time.Second},
				"sliding window": SlidingWindow{Limit: 10, Window: time.Second},
				"token bucket":   TokenBucket{Capacity: 10, Refill: 10, Every: time.Second},
				"sliding log":    SlidingLog{Limit: 10, Window: 100 * time.Second},
			} {
				limiter := newLimiter(t, pool, Config{Name: name, Policy: policy, Timeout: amply, Test: everySecond})
				for i := range updates {
					result, err := limiter.Allow(t.Context(), fmt.Sprint(i%keys))
					require.NoError(t, err)
					require.True(t, result.Allowed)
				}
			}

			pool.Reset() // or what its sessions have counted might not have been told
			var updated, hot int64
			waitUntil(t, func() bool {
				row := pool.QueryRow(t.Context(), "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'rate_limit_ephemeral'")
				require.NoError(t, row.Scan(&updated, &hot))
				return updated >= 4*updates
			})
			if indexed {
				require.Less(t, hot, updated/2)
				return
			}
			require.GreaterOrEqual(t, hot, updated*95/100)
			require.LessOrEqual(t, scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral')"), int64(4*page))
			require.LessOrEqual(t, scalar[int64](t, pool, "SELECT pg_relation_size('rate_limit_ephemeral_pkey')"), int64(4*page))
		})
	}
}
