package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// smallPools are several pools of one database, as several processes have.
func smallPools(t *testing.T, db *pgtest.DB, n int) []*pgxpool.Pool {
	t.Helper()
	pools := make([]*pgxpool.Pool, n)
	for i := range pools {
		pools[i] = db.NewPool(t, func(config *pgxpool.Config) {
			config.MaxConns = 4
			config.ConnConfig.RuntimeParams["application_name"] = "limiter"
		})
	}
	return pools
}

// A new key that many ask for at once, over several pools and limiters: exactly Limit are admitted, each with another Remaining.
func TestExactlyLimitAreAdmitted(t *testing.T) {
	t.Parallel()

	const limit, goroutines = 120, 200
	eachSlowPolicyAndTable(t, limit, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		pools := smallPools(t, db, 4)
		for variant, change := range map[string]func(*Config){
			"coalesced":                  func(*Config) {},
			"one call in each statement": func(c *Config) { c.MaxBatch, c.MaxInFlight, c.NoDenialCache = 1, 16, true },
		} {
			config := config
			change(&config)
			limiters := make([]*Limiter, 2*len(pools))
			for i := range limiters {
				limiters[i] = newLimiter(t, pools[i%len(pools)], config)
			}
			for round := range 3 * rounds(t) {
				key := fmt.Sprint(variant, " ", round)
				results, errs := make([]Result, goroutines), make([]error, goroutines)
				together(goroutines, func(i int) { results[i], errs[i] = limiters[i%len(limiters)].Allow(t.Context(), key) })
				require.NoError(t, errors.Join(errs...))

				var remaining []int64
				for _, r := range results {
					require.EqualValues(t, limit, r.Limit)
					if r.Allowed {
						remaining = append(remaining, r.Remaining)
						continue
					}
					require.Zero(t, r.Remaining)
					require.Positive(t, r.RetryAfter)
				}
				slices.Sort(remaining)
				require.Len(t, remaining, limit)
				require.Equal(t, int64(0), remaining[0])
				require.Len(t, slices.Compact(remaining), limit)
				require.EqualValues(t, limit, taken(t, db.Pool, config, key))
			}
		}
	})
}

// Costs of all sizes for one key: never more than Limit, and nothing is left that would have fitted.
func TestCostsAddUpToTheLimit(t *testing.T) {
	t.Parallel()

	const limit = 1000
	eachSlowPolicyAndTable(t, limit, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		pools := smallPools(t, db, 2)
		limiters := []*Limiter{newLimiter(t, pools[0], config), newLimiter(t, pools[1], config)}
		var mu sync.Mutex
		var granted int64
		errs := make([]error, 100)
		together(100, func(i int) {
			for call := range 10 {
				cost := int64(1 + (i*7+call*3)%9)
				result, err := limiters[i%2].AllowN(t.Context(), "key", cost)
				if errs[i] = errors.Join(errs[i], err); result.Allowed {
					mu.Lock()
					granted += cost
					mu.Unlock()
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, granted, taken(t, db.Pool, config, "key"))
		require.Greater(t, granted, int64(limit-9)) // or the largest cost would have fitted

		// What is left can still be had, and nothing more.
		result, err := limiters[0].AllowN(t.Context(), "key", limit-granted)
		require.NoError(t, err)
		require.Zero(t, result.Remaining)
		result, err = limiters[1].Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
	})
}

// deadlocks is how many the database has ever had. What the connections of these pools know of counts, because they are closed.
func deadlocks(t *testing.T, db *pgtest.DB, pools ...*pgxpool.Pool) int64 {
	t.Helper()
	for _, pool := range pools {
		pool.Close()
	}
	waitUntil(t, func() bool {
		return scalar[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'limiter'`) == 0
	})
	return scalar[int64](t, db.Pool, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
}

// Batches of many keys that cross each other, most of them new: each key gets exactly its limit, and nobody waits in a circle.
func TestCrossingBatchesDoNotDeadlock(t *testing.T) {
	t.Parallel()

	const limit, keys, batches, perBatch, workers = 10, 150, 12, 60, 8
	eachSlowPolicyAndTable(t, limit, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		pools := smallPools(t, db, 4)
		seed := testSeed(t)
		var mu sync.Mutex
		granted, asked := map[string]int64{}, map[string]int64{}
		errs := make([]error, workers)
		together(workers, func(worker int) {
			limiter, err := New(pools[worker%len(pools)], config)
			if err != nil {
				errs[worker] = err
				return
			}
			r := rand.New(rand.NewPCG(seed, uint64(worker)))
			for batch := range batches {
				var elements []element
				for _, key := range r.Perm(keys)[:perBatch] {
					// New keys all the time, in the midst of known ones.
					e := element{key: fmt.Sprint(key, " ", key%3*batch/4), cost: 1, count: 1 + r.Int64N(4)}
					elements = append(elements, e)
					if r.IntN(8) == 0 {
						elements = append(elements, e) // and one that stands twice
					}
				}
				if err := limiter.decide(context.Background(), limiter.db, elements, limiter.settings); err != nil {
					errs[worker] = err
					return
				}
				mu.Lock()
				for _, e := range elements {
					granted[e.key] += e.decision.granted
					asked[e.key] += e.count
				}
				mu.Unlock()
			}
		})
		require.NoError(t, errors.Join(errs...), "%s=%d", seedVariable, seed)

		stored := storedRows(t, db.Pool, config.Durable)
		require.Len(t, stored, len(asked))
		full := 0
		for key := range asked {
			require.Equal(t, min(asked[key], limit), granted[key], key)
			require.Equal(t, granted[key], takenOf(config, stored, key), key)
			if asked[key] > limit {
				full++
			}
		}
		require.Greater(t, full, keys/2)
		require.Zero(t, deadlocks(t, db, pools...))
	})
}

// What the test above would see if the rows were not locked in one order, on functions that lock in the order given: the statement
// that decides ordinary takes, and, by the log that leaves all to it, rate_limit_all.
func TestLockingInTheOrderGivenDeadlocks(t *testing.T) {
	t.Parallel()

	fixed, log := FixedWindow{Limit: 10, Window: year}, SlidingLog{Limit: 10, Window: year}
	takes := []string{`FROM e ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.ord`, "FROM e ORDER BY e.ord"}
	known := []string{`ORDER BY e.durable, octet_length(e.key) DESC, e.key COLLATE "C", e.name COLLATE "C", e.ord`, "ORDER BY e.ord"}
	made := []string{
		`GROUP BY e.name COLLATE "C", e.key COLLATE "C"`, "",
		`ORDER BY octet_length(e.key COLLATE "C") DESC, e.key COLLATE "C", e.name COLLATE "C"`, "",
	}
	for name, change := range map[string]struct {
		policy   Policy
		function string
		oldNew   []string
		exist    []string // keys that have a row at the beginning
	}{
		"of known keys":       {fixed, "rate_limit_fixed_window", takes, []string{"a", "b", "m"}},
		"of new keys":         {fixed, "rate_limit_fixed_window", takes, []string{"m"}},
		"of a few keys":       {fixed, "rate_limit_fixed_window", []string{"few := few AND (-octet_length", "few := few OR (-octet_length"}, []string{"a", "b", "m"}},
		"of known keys' logs": {log, "rate_limit_all", known, []string{"a", "b", "m"}},
		"of new keys' logs":   {log, "rate_limit_all", slices.Concat(known, made), []string{"m"}},
	} {
		for _, broken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, broken: %v", name, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				if broken {
					rewrite(t, db.Pool, change.function, change.oldNew...)
				}
				config := Config{Name: "test", Policy: change.policy, Timeout: amply}
				pool := smallPools(t, db, 1)[0]
				limiter := newLimiter(t, pool, config)
				for _, key := range change.exist {
					_, err := limiter.Allow(t.Context(), key)
					require.NoError(t, err)
				}

				// One has locked a (and b, if in order) and waits for m; another wants a and b.
				holder := hold(t, db, config, "m")
				one := limiter.takeLater("a", "m", "b")
				waitUntilBlocked(t, db.Pool, 1)
				other := limiter.takeLater("b", "a")
				waitUntilBlocked(t, db.Pool, 2)
				require.NoError(t, holder.Commit(t.Context()))

				_, err1 := one()
				_, err2 := other()
				if !broken {
					require.NoError(t, errors.Join(err1, err2))
					require.Zero(t, deadlocks(t, db, pool))
					return
				}
				requireDeadlock(t, errors.Join(err1, err2))
				waitUntil(t, func() bool { return deadlocks(t, db, pool) == 1 })
			})
		}
	}
}

// A key that is left to rate_limit_all, because another algorithm has written its row, is locked before those behind it.
func TestKeysBehindOneThatIsLeftAreNotLocked(t *testing.T) {
	t.Parallel()
	for _, broken := range []bool{false, true} {
		db := pgtest.New(t)
		if broken {
			rewrite(t, db.Pool, "rate_limit_fixed_window", "EXIT each_key", "EXIT")
		}
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
		limiter := newLimiter(t, smallPools(t, db, 1)[0], config)
		_, err := limiter.Allow(t.Context(), "b")
		require.NoError(t, err)
		other := config
		other.Policy = SlidingWindow{Limit: 10, Window: year}
		_, err = newLimiter(t, db.Pool, other).Allow(t.Context(), "a")
		require.NoError(t, err)

		holder := hold(t, db, config, "a")
		take := limiter.takeLater("a", "b")
		waitUntilBlocked(t, db.Pool, 1)
		looker := begin(t, db)
		_, err = looker.Exec(t.Context(), "SELECT FROM rate_limit_ephemeral WHERE key = 'b' FOR UPDATE NOWAIT")
		require.Equal(t, broken, lockTimeout(err), err)
		require.NoError(t, looker.Rollback(t.Context()))
		require.NoError(t, holder.Commit(t.Context()))
		_, err = take()
		require.NoError(t, err)
	}
}

// takeLater takes 1 from each key, in one statement, in the background.
func (l *Limiter) takeLater(keys ...string) func() ([]element, error) {
	elements := make([]element, len(keys))
	for i, key := range keys {
		elements[i] = element{key: key, cost: 1, count: 1}
	}
	return later(func() ([]element, error) {
		return elements, l.decide(context.Background(), l.db, elements, settings{})
	})
}

func requireDeadlock(t *testing.T, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
}

// Making rows takes its turn, too: of "a" and "z", which are new, and "m", which somebody holds, "z" is not made before "m" is
// locked. A variant of rate_limit_all that passes over "m" is caught; elsewhere one statement makes rows and locks them.
func TestRowsAreMadeAndLockedInOneOrder(t *testing.T) {
	t.Parallel()

	for name, variant := range map[string]struct {
		policy Policy
		broken bool
	}{
		"fixed window":        {FixedWindow{Limit: 10, Window: year}, false},
		"sliding log":         {SlidingLog{Limit: 10, Window: year}, false},
		"sliding log, broken": {SlidingLog{Limit: 10, Window: year}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			broken := variant.broken
			if broken {
				rewrite(t, db.Pool, "rate_limit_all", "DO UPDATE SET count = d.count WHERE clock_timestamp() > give_up AND", "DO NOTHING; PERFORM 1 WHERE false AND")
			}
			config := Config{Name: "test", Policy: variant.policy, Timeout: amply}
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			_, err := limiter.Allow(t.Context(), "m")
			require.NoError(t, err)

			holder := hold(t, db, config, "m")
			batch := limiter.takeLater("z", "m", "a")
			waitUntilBlocked(t, db.Pool, 1)
			_, err = limiter.AllowTx(t.Context(), holder, "z")
			err = errors.Join(err, holder.Commit(t.Context()))
			_, batchErr := batch()
			if broken {
				requireDeadlock(t, errors.Join(err, batchErr))
				return
			}
			require.NoError(t, errors.Join(err, batchErr))
			for key, want := range map[string]int64{"a": 1, "m": 2, "z": 2} {
				require.Equal(t, want, taken(t, db.Pool, config, key), key)
			}
		})
	}
}

func TestRowDeletedWhileWeWaitForIt(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 4)
		require.NoError(t, err)

		sweeper := begin(t, db)
		exec(t, sweeper, "DELETE FROM "+table(config.Durable))
		wait := later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, sweeper.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 7, result.Remaining)
		require.EqualValues(t, 3, taken(t, db.Pool, config, "key"))
	})
}

func TestRowDeletedAndMadeAgainWhileWeWaitForIt(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		_, err := limiter.AllowN(t.Context(), "key", 9)
		require.NoError(t, err)

		// Reset, and one more taken, in one transaction of somebody's.
		somebody := begin(t, db)
		require.NoError(t, limiter.ResetTx(t.Context(), somebody, "key"))
		_, err = limiter.AllowNTx(t.Context(), somebody, "key", 2)
		require.NoError(t, err)
		wait := later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, somebody.Commit(t.Context()))

		result, err := wait()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 5, result.Remaining)
		require.EqualValues(t, 5, taken(t, db.Pool, config, "key"))
	})
}

// The look finds "a" missing and stops there. While the INSERT waits for somebody else's "a", the row of "m", which the look
// has not come to, is deleted; and that of "n", too, and made again.
func TestRowDeletedBetweenLookAndInsert(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		for _, commit := range []bool{true, false} {
			db := pgtest.New(t)
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			for _, key := range []string{"m", "n", "z"} {
				_, err := limiter.AllowN(t.Context(), key, 4)
				require.NoError(t, err)
			}

			somebody := begin(t, db)
			_, err := limiter.AllowNTx(t.Context(), somebody, "a", 5)
			require.NoError(t, err)
			wait := limiter.takeLater("z", "n", "m", "a")
			waitUntilBlocked(t, db.Pool, 1)
			exec(t, db.Pool, "DELETE FROM "+table(config.Durable)+" WHERE key IN ('m', 'n')")
			_, err = limiter.AllowN(t.Context(), "n", 2)
			require.NoError(t, err)
			if commit {
				require.NoError(t, somebody.Commit(t.Context()))
			} else {
				require.NoError(t, somebody.Rollback(t.Context()))
			}

			elements, err := wait()
			require.NoError(t, err)
			want := map[string]int64{"a": 1, "m": 1, "n": 3, "z": 5}
			if commit {
				want["a"] += 5
			}
			for _, e := range elements {
				require.EqualValues(t, 1, e.decision.granted, e.key)
				require.Equal(t, 10-want[e.key], e.decision.remaining, e.key)
				require.Equal(t, want[e.key], taken(t, db.Pool, config, e.key), e.key)
			}
		}
	})
}

// Whoever deletes rows at full speed takes nothing away but what they hold: between two sweeps at most Limit are admitted, and no
// call fails.
func TestSweeperAtFullSpeed(t *testing.T) {
	t.Parallel()

	const limit, calls, keys = 3, 150, 3
	db := pgtest.New(t)
	pools := smallPools(t, db, 3)
	config := Config{Name: "test", Policy: FixedWindow{Limit: limit, Window: year}, Timeout: amply, MaxBatch: 4, NoDenialCache: true}

	ctx, stop := context.WithCancel(t.Context())
	sweeps := later(func() (sweeps int64, err error) {
		for i := 0; ctx.Err() == nil; i++ {
			// One row at a time: a sweeper that held one row and waited for another would deadlock with a batch.
			tag, err := db.Pool.Exec(context.Background(), "DELETE FROM rate_limit_ephemeral WHERE key = $1", fmt.Sprint(i%keys))
			if err != nil {
				return 0, err
			}
			sweeps += tag.RowsAffected()
		}
		return sweeps, nil
	})
	var mu sync.Mutex
	var granted int64
	errs := make([]error, 12)
	together(12, func(i int) {
		limiter, err := New(pools[i%len(pools)], config)
		for call := 0; call < calls && err == nil; call++ {
			var result Result
			if result, err = limiter.Allow(context.Background(), fmt.Sprint((i+call)%keys)); result.Allowed {
				mu.Lock()
				granted++
				mu.Unlock()
			}
		}
		errs[i] = err
	})
	stop()
	swept, err := sweeps()
	require.NoError(t, errors.Join(append(errs, err)...))
	require.LessOrEqual(t, granted, (swept+keys)*limit)
	require.GreaterOrEqual(t, granted, int64(keys*limit))
}

func TestTwoTransactionsMakeTheSameNewKey(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		for _, commit := range []bool{true, false} {
			db := pgtest.New(t)
			limiter := newLimiter(t, db.NewPool(t, nil), config)
			first, second := begin(t, db), begin(t, db)
			_, err := limiter.AllowNTx(t.Context(), first, "key", 8)
			require.NoError(t, err)
			inTx := later(func() (Result, error) { return limiter.AllowNTx(context.Background(), second, "key", 3) })
			waitUntilBlocked(t, db.Pool, 1)

			var want Result
			if commit {
				require.NoError(t, first.Commit(t.Context()))
				want = Result{Allowed: false, Limit: 10, Remaining: 2}
			} else {
				require.NoError(t, first.Rollback(t.Context()))
				want = Result{Allowed: true, Limit: 10, Remaining: 7}
			}
			got, err := inTx()
			require.NoError(t, err)
			require.Equal(t, want, Result{Allowed: got.Allowed, Limit: got.Limit, Remaining: got.Remaining})
			require.NoError(t, second.Commit(t.Context()))
			require.Equal(t, 10-want.Remaining, taken(t, db.Pool, config, "key"))
		}
	})
}

// aroundALockWait takes n, then asks for 1 of the same key while somebody holds its row. It returns when he let go, by the database's
// clock, and the decision that was made then.
func aroundALockWait(t *testing.T, db *pgtest.DB, config Config, key string, n int64, wait time.Duration) (released time.Time, result Result) {
	t.Helper()
	limiter := newLimiter(t, db.NewPool(t, nil), config)
	first, err := limiter.AllowN(t.Context(), key, n)
	require.NoError(t, err)
	require.True(t, first.Allowed)

	holder, tx := hold(t, db, config, key), begin(t, db)
	// In a transaction one statement waits until the end; outside of it, one after the other would.
	decision := later(func() (Result, error) { return limiter.AllowTx(context.Background(), tx, key) })
	waitUntilBlocked(t, db.Pool, 1)
	begun := scalar[time.Time](t, holder, "SELECT clock_timestamp()")
	waitUntil(t, func() bool {
		released = scalar[time.Time](t, holder, "SELECT clock_timestamp()")
		return released.Sub(begun) >= wait
	})
	require.NoError(t, holder.Commit(t.Context()))

	result, err = decision()
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	return released, result
}

// The time that a call waits for a row counts: the clock is read when the row is locked, whether the take would have fitted before or
// not. Variants are caught that take the transaction's time, and that decide by the reading before the lock however old it is.
func TestClockIsReadAfterTheLockWait(t *testing.T) {
	t.Parallel()

	const wait = 50 * time.Millisecond
	for name, policy := range map[string]struct {
		Policy
		function string
	}{
		"fixed window":   {FixedWindow{Limit: 5, Window: wait}, "rate_limit_fixed_window"},
		"sliding window": {SlidingWindow{Limit: 5, Window: wait / 2}, "rate_limit_sliding_window"},
		"token bucket":   {TokenBucket{Capacity: 5, Refill: 5, Every: 5 * wait}, "rate_limit_token_bucket"},
		"sliding log":    {SlidingLog{Limit: 5, Window: wait}, "rate_limit_sliding_log"},
	} {
		for _, durable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s in %s", name, table(durable)), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				config := Config{Name: "test", Policy: policy, Durable: durable, Timeout: amply}
				for _, n := range []int64{1, 5} {
					released, result := aroundALockWait(t, db, config, fmt.Sprint(n), n, wait)
					require.False(t, result.DecidedAt.Before(released))
					require.True(t, result.Allowed) // what flowed in, or ran out, while it waited
					if n == 1 {
						require.EqualValues(t, 5-1, result.Remaining)
					}
				}

				// Negative controls. now() is the time of a transaction's begin, which no lock wait moves.
				db = pgtest.New(t)
				rewrite(t, db.Pool, policy.function, "clock_timestamp()", "pg_catalog.now()")
				released, result := aroundALockWait(t, db, config, "key", 5, wait)
				require.True(t, result.DecidedAt.Before(released))
				if policy.function == "rate_limit_sliding_log" {
					return // which has no statement for many keys
				}
				db = pgtest.New(t)
				neverFew(t, db.Pool)
				rewrite(t, db.Pool, policy.function, "clock_timestamp() < decided_at + interval '10 ms'", "true")
				for i := 0; ; i++ { // until the call comes before the window of the first one ends
					require.Less(t, i, 100)
					if released, result := aroundALockWait(t, db, config, fmt.Sprint(i), 1, wait); result.DecidedAt.Before(released) {
						break
					}
				}
			})
		}
	}
}

// What is told of a take comes after the lock and before the end of the window, also where that ends, or the bucket is full, between the
// first reading of the clock and the lock. Variants are caught that ask whether the window goes on at the first reading alone.
func TestTakesAreToldOfTheTimeTheyAreLocked(t *testing.T) {
	t.Parallel()

	const pause, window = 4 * time.Millisecond, 15 * time.Millisecond
	for name, c := range map[string]struct {
		policy   Policy
		function string
		oldNew   []string
		over     time.Duration // with no more than that until the key is as good as new, the time of the take is over
	}{
		"fixed window": {FixedWindow{Limit: 5, Window: window}, "rate_limit_fixed_window", []string{"clock + 10000 <", "clock <"}, 0},
		"sliding window": {
			SlidingWindow{Limit: 5, Window: window}, "rate_limit_sliding_window", []string{"clock + 10000 <", "clock <"}, window,
		},
		"token bucket": {
			TokenBucket{Capacity: 5, Refill: 1, Every: pause}, "rate_limit_token_bucket",
			[]string{"clock + 10000 - d.window_start", "clock - d.window_start"}, pause - 1, // that of the token itself
		},
	} {
		for _, broken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, broken: %v", name, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				const take = "IF durable IS NOT TRUE THEN\n                UPDATE"
				rewrite(t, db.Pool, c.function, take, fmt.Sprintf("PERFORM pg_sleep(%f); %s", pause.Seconds(), take))
				if broken {
					rewrite(t, db.Pool, c.function, append(c.oldNew, "IF t BETWEEN clock AND r_window_start", "IF true OR t BETWEEN clock AND r_window_start")...)
				}
				limiter := newLimiter(t, db.NewPool(t, nil), Config{Name: "test", Policy: c.policy, Timeout: amply, NoDenialCache: true})
				_, err := limiter.Allow(t.Context(), "key") // makes the row
				require.NoError(t, err)
				wrong := false
				for i := 0; i < 1000 && !wrong && (broken || i < 50); i++ {
					if _, ok := c.policy.(TokenBucket); ok { // it becomes full during the pause, unless the machine is slow
						exec(t, db.Pool, `UPDATE rate_limit_ephemeral SET credit = 17000, window_start = clock, expires_at = clock + 3000
							FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock) AS c`)
					}
					before := scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
					result, err := limiter.Allow(t.Context(), "key")
					require.NoError(t, err)
					// What begins a window, or takes from a full bucket, is told of the first reading: nobody else can have decided by it since.
					wrong = result.Allowed && (result.ResetAfter <= c.over || result.Remaining < 4 && result.DecidedAt.Before(before.Add(pause)))
				}
				require.Equal(t, broken, wrong)
			})
		}
	}
}

// A window that begins in a row that was there before, and a bucket that is as good as new, do so at one reading of the clock, whichever
// of their columns is asked.
func TestNewWindowsBeginAtOneReadingOfTheClock(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for range 100 {
		exec(t, db.Pool, `SELECT rate_limit_fixed_window('fixed', '{key}', 5, 10), rate_limit_sliding_window('sliding', '{key}', 5, 10),
			rate_limit_token_bucket('bucket', '{key}', 5, 100, 10)`)
		require.Empty(t, scalar[[]string](t, db.Pool, `SELECT array_agg(prefix) FROM rate_limit_ephemeral WHERE expires_at - window_start
			<> CASE prefix WHEN 'fixed' THEN 10 WHEN 'sliding' THEN 20 ELSE 1 END OR since <> window_start`))
	}
}

// A row that was made or changed while a call waited is newer than that call's statement. What it then decides from must be the
// row as it is, also when it waits for several rows in turn.
func TestWaitingForSeveralRowsInTurn(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		keys := []string{"a", "b", "c"}
		holders := make([]pgx.Tx, len(keys))
		for i, key := range keys {
			_, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
			holders[i] = begin(t, db)
			_, err = limiter.AllowNTx(t.Context(), holders[i], key, 2)
			require.NoError(t, err)
		}
		elements := []element{{key: "c", cost: 1, count: 9}, {key: "b", cost: 1, count: 9}, {key: "a", cost: 1, count: 9}}
		done := later(func() (any, error) {
			return nil, limiter.decide(context.Background(), limiter.db, elements, settings{})
		})
		for _, holder := range holders {
			pid := holder.Conn().PgConn().PID()
			waitUntil(t, func() bool {
				return scalar[bool](t, db.Pool,
					"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))", int32(pid))
			})
			require.NoError(t, holder.Commit(t.Context()))
		}
		_, err := done()
		require.NoError(t, err)
		for _, e := range elements {
			require.EqualValues(t, 7, e.decision.granted, e.key)
			require.EqualValues(t, 10, taken(t, db.Pool, config, e.key), e.key)
		}
	})
}
