package cleanup

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// spared is the margin in the text of rate_limit_sweep. Tests that make a mistake on purpose replace this text.
const spared = "interval '1 minute'"

// The same random traffic goes to two databases. One database is swept at random moments, and the other is never swept.
// Both databases give every caller the same results. The clock also goes back, to at most a minute before the latest
// sweep.
func TestSweepingChangesNoDecision(t *testing.T) {
	t.Parallel()

	swept, plain := pgtest.New(t), pgtest.New(t)
	var deleted int64
	for story := 0; story < 5 || deleted <= 100; story++ {
		require.Less(t, story, 1000)
		seed := rand.Uint64()
		n, err := play(t, swept, plain, fmt.Sprint(story), seed)
		require.NoError(t, err, "seed %d", seed)
		deleted += n
	}
}

// The comparison notices a sweeper that is 1 µs too early, and a sweeper with a margin below one minute.
func TestMistakesInSweepingChangeDecisions(t *testing.T) {
	t.Parallel()

	for _, early := range []string{"interval '-1 microsecond'", "interval '50 seconds'"} {
		t.Run(early, func(t *testing.T) {
			t.Parallel()
			swept, plain := pgtest.New(t), pgtest.New(t)
			pgtest.Rewrite(t, swept.Pool, "rate_limit_sweep", spared, early)
			for story := range 1000 {
				if _, err := play(t, swept, plain, fmt.Sprint(story), rand.Uint64()); err != nil {
					return
				}
			}
			require.Fail(t, "nobody has noticed")
		})
	}
}

// play sends the same random calls of a limiter to both databases, and returns how many rows were swept. It returns an
// error at the first call for which the databases give different results.
func play(t *testing.T, swept, kept *pgtest.DB, name string, seed uint64) (deleted int64, err error) {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 0))
	clock := t0
	now := ratelimit.TestConfig{Now: func() time.Time { return clock }}
	sweepers := []*Sweeper{
		newSweeper(t, swept.Pool, Config{BatchSize: 1 + r.IntN(3), Share: 1, Test: now}),
		newSweeper(t, swept.Pool, Config{BatchSize: 2, MaxDuration: 1, Test: now}),
	}
	spans := []time.Duration{time.Millisecond, 10 * time.Second, time.Minute, time.Hour}
	units := []ratelimit.Unit{ratelimit.CalendarMinute, ratelimit.CalendarHour, ratelimit.CalendarDay}
	durable := r.IntN(2) == 0
	var of [2]*ratelimit.Limiter
	var expiries []time.Time // when rows expire
	latest := clock.Add(-time.Hour)
	taken := map[string][2]ratelimit.Result{}
	for range 150 {
		if of[0] == nil || r.IntN(20) == 0 { // a deploy with another policy
			limit, span := 1+r.Int64N(5), spans[r.IntN(len(spans))]
			policy := []ratelimit.Policy{
				ratelimit.FixedWindow{Limit: limit, Window: span},
				ratelimit.SlidingWindow{Limit: limit, Window: span},
				ratelimit.TokenBucket{Capacity: limit, Refill: 1 + r.Int64N(3), Every: span},
				ratelimit.SlidingLog{Limit: limit, Window: span},
				ratelimit.CalendarWindow{Limit: limit, Unit: units[r.IntN(len(units))], Zone: "Australia/Lord_Howe"},
			}[r.IntN(5)]
			for i, db := range []*pgtest.DB{swept, kept} {
				of[i] = limitertest.New(t, db.Pool, ratelimit.Config{
					Name: name, Policy: policy, Durable: durable, NoDenialCache: true,
				}, ratelimit.ClientConfig{Test: now})
			}
		}

		switch span := spans[r.IntN(len(spans))]; r.IntN(6) {
		case 0:
			clock = clock.Add(time.Duration(r.Int64N(3*int64(span)) / 1000 * 1000))
		case 1:
			clock = clock.Add(-time.Duration(r.Int64N(int64(span)) / 1000 * 1000))
		case 2:
			clock = latest.Add(-margin)
		case 3: // when a row expires or may be swept, or 1 µs before or after
			if len(expiries) > 0 {
				clock = expiries[r.IntN(len(expiries))].Add(time.Duration(r.IntN(3)-1) * time.Microsecond)
				if r.IntN(2) == 0 {
					clock = clock.Add(margin)
				}
			}
		}
		if earliest := latest.Add(-margin); clock.Before(earliest) {
			clock = earliest
		}

		if r.IntN(3) == 0 {
			result := runOnce(t, sweepers[r.IntN(2)])
			deleted += result.Deleted
			if !result.Skipped && clock.After(latest) {
				latest = clock
			}
			continue
		}
		key, cost := fmt.Sprint("key ", r.IntN(4)), int64(r.IntN(3))
		var told [2]ratelimit.Result
		var errs [2]error
		kind := r.IntN(8)
		for i, limiter := range of {
			switch kind {
			case 0:
				told[i], errs[i] = limitertest.AsResult(limiter.Refund(t.Context(), taken[key][i]))
				if errors.Is(errs[i], ratelimit.ErrNothingToRefund) {
					errs[i] = nil
				}
			case 1:
				told[i], errs[i] = limitertest.AsResult(limiter.Grant(t.Context(), key, 1+cost))
			default:
				told[i], errs[i] = limiter.AllowN(t.Context(), key, cost)
			}
		}
		if kind > 1 && cost > 0 && told[0].Allowed && told[1].Allowed {
			taken[key] = told
		}
		if _, refused := errors.AsType[*ratelimit.ConfigError](errs[0]); refused ||
			errors.Is(errs[0], ratelimit.ErrCostExceedsLimit) {
			continue
		}
		require.NoError(t, errors.Join(errs[:]...))
		if limitertest.Plain(told[0]) != limitertest.Plain(told[1]) {
			return deleted, fmt.Errorf(
				"kind %d (%q, %d) at %v: %+v with sweeps, %+v without",
				kind,
				key,
				cost,
				clock,
				told[0],
				told[1],
			)
		}
		expiries = append(expiries, clock.Add(told[0].ResetAfter))
	}
	return deleted, nil
}

// The clock steps back by more than a minute after a sweep. A key whose row was swept is as good as new, but only once.
// Later takes count as usual.
func TestClockStepsFarBackAfterASweep(t *testing.T) {
	t.Parallel()

	for name, policy := range policies() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			clock := t0
			now := ratelimit.TestConfig{Now: func() time.Time { return clock }}
			limiter := limitertest.New(t, db.Pool, ratelimit.Config{
				Name: "a", Policy: policy, NoDenialCache: true,
			}, ratelimit.ClientConfig{Test: now})
			sweeper := newSweeper(t, db.Pool, Config{Test: now})
			take := func() bool {
				result, err := limiter.AllowN(t.Context(), "key", 10)
				require.NoError(t, err)
				return result.Allowed
			}
			require.True(t, take())
			require.False(t, take())
			clock = t0.Add(2*time.Hour + margin)
			require.EqualValues(t, 1, runOnce(t, sweeper).Deleted)

			clock = t0.Add(time.Minute)
			require.True(t, take(), "without the sweep it would not be")
			for range 3 {
				require.Zero(t, runOnce(t, sweeper).Deleted)
				require.False(t, take())
				clock = clock.Add(time.Second)
			}
		})
	}
}

// A sweeper has deleted a row but has not committed. A request for the row's key waits, and then finds either no row or
// the expired row. No row and an expired row mean the same.
func TestRowVanishesWhileADecisionWaits(t *testing.T) {
	t.Parallel()

	for name, policy := range policies() {
		for _, durable := range limitertest.TablesFor(t, name) {
			t.Run(name+" in "+pgtest.Table(durable), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				sweeper := pgtest.Connect(t, db)
				for i := range 60 { // so the page becomes full, and the room of old rows is used again
					clock := t0.Add(time.Duration(i) * 10 * time.Hour)
					now := ratelimit.TestConfig{Now: func() time.Time { return clock }}
					config := ratelimit.Config{
						Name: "a", Policy: policy, Durable: durable,
					}
					clientConfig := ratelimit.ClientConfig{Test: now}
					limiter := limitertest.New(t, db.Pool, config, clientConfig)
					_, err := limiter.AllowN(t.Context(), "key", 4)
					require.NoError(t, err)

					clock = clock.Add(3 * time.Hour)
					tx, err := sweeper.Begin(t.Context())
					require.NoError(t, err)
					require.EqualValues(
						t,
						1,
						pgtest.Scalar[int64](t, tx, "SELECT deleted FROM rate_limit_sweep(now => $1)", clock),
					)
					wait := testkit.Later(
						func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 3) },
					)
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					if i%2 == 0 {
						require.NoError(t, tx.Commit(t.Context()))
					} else {
						require.NoError(t, tx.Rollback(t.Context()))
					}
					result, err := wait()
					require.NoError(t, err)
					require.True(t, result.Allowed)
					require.EqualValues(t, 7, result.Remaining)
					result, err = limiter.Peek(t.Context(), "key")
					require.NoError(t, err)
					require.EqualValues(t, 7, result.Remaining)
				}
			})
		}
	}
}

// A request for several keys waits for another transaction that inserts the row of key "a". Meanwhile the rows of the
// other keys are swept, and one of these rows is inserted again.
func TestRowsVanishBetweenLookAndInsert(t *testing.T) {
	t.Parallel()

	const more = ", now => $3"
	functions := map[string]string{
		"fixed window":   pgtest.Each("'a'", "$1::text[]", "$2", "1, 10, 3600000000, 0", more),
		"sliding window": pgtest.Each("'a'", "$1::text[]", "$2", "2, 10, 3600000000, 0", more),
		"token bucket":   pgtest.Each("'a'", "$1::text[]", "$2", "3, 10, 3600000000, 10", more),
		"sliding log":    pgtest.Each("'a'", "$1::text[]", "$2", "4, 10, 3600000000, 0", more),
		"calendar":       pgtest.Each("'a'", "$1::text[]", "$2", "5, 10, 3600000000, 0", more),
	}
	for name, function := range functions {
		for _, durable := range limitertest.TablesFor(t, name) {
			t.Run(name+" in "+pgtest.Table(durable), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				take := func(db pgtest.Querier, at time.Time, keys ...string) (remaining []int64, err error) {
					err = db.QueryRow(context.Background(), "SELECT array_agg(remaining ORDER BY ord) FROM "+function, keys, durable, at).
						Scan(&remaining)
					return remaining, err
				}
				for i := range 3 {
					at := t0.Add(time.Duration(i) * 10 * time.Hour)
					pgtest.Exec(t, db.Pool, "DELETE FROM "+pgtest.Table(durable))
					_, err := take(db.Pool, at, "m", "n", "z")
					require.NoError(t, err)

					at = at.Add(3 * time.Hour)
					somebody := pgtest.Begin(t, db)
					_, err = take(somebody, at, "a")
					require.NoError(t, err)
					wait := testkit.Later(func() ([]int64, error) { return take(db.Pool, at, "z", "n", "m", "a") })
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					require.EqualValues(
						t,
						3,
						runOnce(
							t,
							newSweeper(t, db.Pool, Config{BatchSize: 1 + i%3, Share: 1, Test: limitertest.Frozen(at)}),
						).Deleted,
					)
					_, err = take(db.Pool, at, "n")
					require.NoError(t, err)
					require.NoError(t, somebody.Commit(t.Context()))

					remaining, err := wait()
					require.NoError(t, err)
					require.Equal(t, []int64{9, 8, 9, 8}, remaining)
					require.NoError(t, somebody.Conn().Close(t.Context()))
				}
			})
		}
	}
}

// A transaction takes from a key whose row has expired, and a sweep runs before this transaction commits. The sweep
// keeps the row. A naive sweeper, which waits for the transaction and does not check the row again, deletes the row.
func TestWhatIsTakenBesideASweepIsKept(t *testing.T) {
	t.Parallel()

	for name, policy := range policies() {
		for _, durable := range limitertest.TablesFor(t, name) {
			t.Run(name+" in "+pgtest.Table(durable), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				clock := t0
				config := ratelimit.Config{
					Name: "a", Policy: policy, Durable: durable,
				}
				clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return clock }}}
				limiter := limitertest.New(t, db.Pool, config, clientConfig)
				for _, sweep := range []struct {
					run   func() error
					waits bool
					left  int64
				}{
					{func() error { return sweepOnce(db, clock) }, false, 3},
					{func() error { return naive(context.Background(), db.Pool, clock) }, true, 10},
				} {
					_, err := limiter.AllowN(t.Context(), "key", 4)
					require.NoError(t, err)
					clock = clock.Add(3 * time.Hour)
					somebody := pgtest.Begin(t, db)
					_, err = limiter.WithTx(somebody).AllowN(t.Context(), "key", 7)
					require.NoError(t, err)
					wait := testkit.Later(func() (any, error) { return nil, sweep.run() })
					if sweep.waits {
						pgtest.WaitUntilBlocked(t, db.Pool, 1)
					} else {
						_, err = wait()
						require.NoError(t, err)
					}
					require.NoError(t, somebody.Commit(t.Context()))
					_, err = wait()
					require.NoError(t, err)
					result, err := limiter.Peek(t.Context(), "key")
					require.NoError(t, err)
					require.Equal(t, sweep.left, result.Remaining)
					clock = clock.Add(3 * time.Hour)
				}
			})
		}
	}
}

func sweepOnce(db *pgtest.DB, at time.Time) error {
	sweeper, err := New(db.Pool, Config{Test: limitertest.Frozen(at)})
	if err == nil {
		_, err = sweeper.RunOnce(context.Background())
	}
	return err
}

// 16 callers use keys that expire all the time, while a sweeper without pauses deletes rows as soon as they expire.
func TestFullSpeed(t *testing.T) {
	t.Parallel()

	for _, durable := range limitertest.TablesFor(t, "") {
		t.Run(pgtest.Table(durable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			swept, told := atFullSpeed(t, db, durable)
			require.NoError(t, checkWindows(told))
			require.Positive(t, swept)
			require.Zero(
				t,
				pgtest.Scalar[int64](
					t,
					db.Pool,
					"SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()",
				),
			)
		})
	}
}

// checkWindows notices a sweeper that deletes rows before they expire.
func TestMistakesLoseWindowsAtFullSpeed(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Rewrite(t, db.Pool, "rate_limit_sweep", spared, "interval '30 seconds'")
	_, told := atFullSpeed(t, db, false)
	require.Error(t, checkWindows(told))
}

const (
	fastLimit  = 3
	fastWindow = 20 * time.Millisecond
)

// atFullSpeed returns how many rows were swept, and the results of the callers by key.
func atFullSpeed(t *testing.T, db *pgtest.DB, durable bool) (swept int64, told map[string][]ratelimit.Result) {
	t.Helper()
	const writers, calls, keys = 16, 100, 5
	var deleted atomic.Int64
	pools := make([]*pgxpool.Pool, 3)
	for i := range pools {
		pools[i] = db.OwnerPool(t, func(config *pgxpool.Config) {
			config.MaxConns = 4
			config.ConnConfig.RuntimeParams["application_name"] = "limiter"
		})
	}
	clock := pgtest.Connect(t, db)
	sweeper := newSweeper(t, pools[0], Config{BatchSize: 2, Share: 1, Test: ratelimit.TestConfig{
		// The sweeper's clock is ahead of the database's clock by the margin minus 20 ms. A decision may read the clock
		// 10 ms before it gets its locks.
		Now: func() (now time.Time) {
			_ = clock.QueryRow(context.Background(), "SELECT clock_timestamp()").Scan(&now)
			return now.Add(margin - 20*time.Millisecond)
		},
	}})
	ctx, stop := context.WithCancel(t.Context())
	sweeps := testkit.Later(func() (_ any, err error) {
		for ctx.Err() == nil && err == nil {
			var result Result
			result, err = sweeper.RunOnce(context.Background())
			deleted.Add(result.Deleted)
		}
		return nil, err
	})

	told = map[string][]ratelimit.Result{}
	var mu sync.Mutex
	errs := make([]error, writers)
	testkit.Together(writers, func(i int) {
		limiter, err := ratelimit.New(pools[i%len(pools)], ratelimit.Config{
			Name: "a", Policy: ratelimit.FixedWindow{Limit: fastLimit, Window: fastWindow}, Durable: durable,
			NoDenialCache: true,
		})
		// Most calls are for 5 keys, whose windows become full. One call in four is for one of 200 other keys, whose
		// rows expire and are swept. The calls go on until 10 rows have been swept.
		for call := 0; (call < calls || deleted.Load() < 10) && call < 100*calls && err == nil; call++ {
			key := fmt.Sprint("key ", (i+call)%keys)
			if call%4 == 0 {
				key = fmt.Sprint("rare ", (calls*i+call)%200)
			}
			var result ratelimit.Result
			if result, err = limiter.Allow(context.Background(), key); err == nil {
				mu.Lock()
				told[key] = append(told[key], result)
				mu.Unlock()
			}
		}
		errs[i] = err
	})
	stop()
	_, err := sweeps()
	require.NoError(t, errors.Join(append(errs, err)...))

	// A session's statistics are complete once the session has ended.
	for _, pool := range pools {
		pool.Close()
	}
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'limiter'`) == 0
	})
	return deleted.Load(), told
}

// checkWindows checks the results of fixed windows. A window admits at most the limit, and exactly the limit if it
// denies a request. No window begins before the previous window of its key has ended.
func checkWindows(told map[string][]ratelimit.Result) error {
	for key, results := range told {
		type window struct{ granted, denied int }
		windows := map[time.Time]window{}
		for _, r := range results {
			start := r.DecidedAt.Add(r.ResetAfter - fastWindow).UTC()
			w := windows[start]
			if r.Allowed {
				w.granted++
			} else {
				w.denied++
			}
			windows[start] = w
		}
		var starts []time.Time
		for start, w := range windows {
			if w.granted > fastLimit || w.denied > 0 && w.granted != fastLimit {
				return fmt.Errorf("%s, in the window of %v: %d granted, %d denied", key, start, w.granted, w.denied)
			}
			starts = append(starts, start)
		}
		slices.SortFunc(starts, time.Time.Compare)
		for i := 1; i < len(starts); i++ {
			if starts[i].Sub(starts[i-1]) < fastWindow {
				return fmt.Errorf("%s: a window begins %v after another", key, starts[i].Sub(starts[i-1]))
			}
		}
	}
	return nil
}
