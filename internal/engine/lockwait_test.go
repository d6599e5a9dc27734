package engine_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// aroundALockWait returns a function that takes n units of a key, and then asks for 1 more unit while another
// transaction holds the row. The function returns the second result, and the database's time when the row was released.
// All its connections exist before the first call.
func aroundALockWait(
	t *testing.T,
	db *pgtest.DB,
	wait time.Duration,
) func(config ratelimit.Config, key string, n int64) (released time.Time, result ratelimit.Result) {
	t.Helper()
	pool := db.NewPool(t, nil)
	his, ours := pgtest.Connect(t, db), pgtest.Connect(t, db)
	return func(config ratelimit.Config, key string, n int64) (released time.Time, result ratelimit.Result) {
		t.Helper()
		limiter := limitertest.New(t, pool, config)
		first, err := limiter.AllowN(t.Context(), key, n)
		require.NoError(t, err)
		require.True(t, first.Allowed)

		holder := limitertest.HoldOn(t, his, config, key)
		tx, err := ours.Begin(t.Context())
		require.NoError(t, err)
		// In a caller's transaction, one statement waits for the row. Outside of a transaction, several statements
		// would wait one after the other.
		decision := testkit.Later(func() (ratelimit.Result, error) { return limiter.WithTx(tx).Allow(context.Background(), key) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		begun := pgtest.Scalar[time.Time](t, holder, "SELECT clock_timestamp()")
		testkit.WaitUntil(t, func() bool {
			released = pgtest.Scalar[time.Time](t, holder, "SELECT clock_timestamp()")
			return released.Sub(begun) >= wait
		})
		require.NoError(t, holder.Commit(t.Context()))

		result, err = decision()
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		return released, result
	}
}

// The clock is read after the row is locked, so the time of a lock wait counts. The test notices variants that use the
// transaction's time. The test also notices variants that decide by an old reading from before the lock.
func TestClockIsReadAfterTheLockWait(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const wait = 50 * time.Millisecond
	functions := []string{ // a sliding log has no statement for many keys
		"rate_limit_take_fixed_window", "rate_limit_take_sliding_window", "rate_limit_take_token_bucket",
		"rate_limit_take_calendar_window",
	}
	var configs []ratelimit.Config
	for name, policy := range map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 5, Window: wait},
		"sliding window": ratelimit.SlidingWindow{Limit: 5, Window: wait / 2},
		"token bucket":   ratelimit.TokenBucket{Capacity: 5, Refill: 5, Every: 5 * wait},
		"sliding log":    ratelimit.SlidingLog{Limit: 5, Window: wait},
		"calendar":       ratelimit.CalendarWindow{Limit: 5, Unit: ratelimit.CalendarMinute},
	} {
		for _, durable := range limitertest.TablesFor(t, name) {
			configs = append(configs, ratelimit.Config{Name: name, Policy: policy, Durable: durable})
		}
	}
	t.Run("as it is", func(t *testing.T) {
		t.Parallel()
		db := pgtest.New(t)
		shortCalendar(t, db.Pool, wait)
		askAroundAWait := aroundALockWait(t, db, wait)
		for _, config := range configs {
			for _, n := range []int64{1, 5} {
				released, result := askAroundAWait(config, fmt.Sprint(n), n)
				require.False(t, result.DecidedAt.Before(released), config.Name)
				require.True(t, result.Allowed, config.Name) // because of the tokens or windows that came during the wait
				if n == 1 {
					require.EqualValues(t, 5-1, result.Remaining, config.Name)
				}
			}
		}

		// A negative control: now() is when the transaction began, so it does not change during a lock wait.
		pgtest.Rewrite(t, db.Pool, "_rate_limit_now", "clock_timestamp()", "pg_catalog.now()")
		for _, config := range configs {
			released, result := askAroundAWait(config, "by now()", 5)
			require.True(t, result.DecidedAt.Before(released), config.Name)
		}
	})
	for _, one := range []bool{false, true} {
		t.Run(fmt.Sprint("by an old reading, one key: ", one), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			shortCalendar(t, db.Pool, wait)
			if !one {
				limitertest.AlwaysArrays(t, db.Pool)
			}
			for _, function := range functions {
				pgtest.RewriteTwins(t, db.Pool, function, "now_us) < clock + 10000", "now_us) IS NOT NULL")
			}
			askAroundAWait := aroundALockWait(t, db, wait)
			for _, config := range configs {
				if _, log := config.Policy.(ratelimit.SlidingLog); log {
					continue
				}
				for i := 0; ; i++ { // until the second call comes before the first window ends
					require.Less(t, i, 100)
					if released, result := askAroundAWait(config, fmt.Sprint(i), 1); result.DecidedAt.Before(released) {
						break
					}
				}
			}
		})
	}
}

// shortCalendar sets the length of all calendar windows to window, because a test cannot wait for the end of a minute.
func shortCalendar(t *testing.T, db pgtest.Executor, window time.Duration) {
	t.Helper()
	pgtest.Rewrite(t, db, "_rate_limit_window_end",
		"RETURN extract(epoch FROM ends)::bigint * 1000000", fmt.Sprintf("RETURN clock + %d", window.Microseconds()))
}

// A call waits for another transaction that is making the row and then rolls back. The new row begins after this wait.
// The test notices variants in which the new row begins before the wait.
func TestRowMadeAfterAWaitBeginsThen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, broken := range []bool{false, true} {
		t.Run(fmt.Sprint("broken: ", broken), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			if broken {
				pgtest.Rewrite(t, db.Pool, pgtest.Left, "> began + 10000 THEN", "> began + 60000000 THEN")
			}
			pool := db.NewPool(t, nil)
			for name, policy := range fastPolicies() {
				if _, log := policy.(ratelimit.SlidingLog); log && broken {
					continue // a sliding log has no such statement
				}
				limiter := limitertest.New(t, pool, ratelimit.Config{Name: name, Policy: policy})
				for _, keys := range [][]string{{"key"}, {"another", "a"}} {
					somebody, tx := limitertest.Begin(t, db.Pool), limitertest.Begin(t, db.Pool)
					_, err := limiter.WithTx(somebody).Allow(t.Context(), keys[0])
					require.NoError(t, err)
					var requests []*engine.Request
					for _, key := range keys {
						requests = append(requests, newRequest(limiter, key, 1))
					}
					decided := testkit.Later(func() (any, error) {
						own := engine.Transaction{LockTimeout: new(int32(-1))}
						return nil, limitertest.Engine(limiter).Database.Execute(context.Background(), tx, requests, own)
					})
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					begun, released := pgtest.Scalar[time.Time](t, somebody, "SELECT clock_timestamp()"), time.Time{}
					testkit.WaitUntil(t, func() bool {
						released = pgtest.Scalar[time.Time](t, somebody, "SELECT clock_timestamp()")
						return released.Sub(begun) > 20*time.Millisecond
					})
					require.NoError(t, somebody.Rollback(t.Context()))
					_, err = decided()
					require.NoError(t, err)
					require.NoError(t, tx.Commit(t.Context()))
					d := requests[0].Parts[0].Decision
					require.EqualValues(t, 1, d.Granted, "%s %v", name, keys)
					require.EqualValues(t, 99, d.Remaining, "%s %v", name, keys)
					require.Equal(t, broken, d.DecidedAt.Before(released), "%s %v", name, keys)
					require.Equal(t, broken, time.UnixMicro(d.State.WindowStart).Before(released), "%s %v", name, keys)
				}
			}
		})
	}
}

// The DecidedAt of a take is after the lock and before the end of the window, even if the window ends, or the bucket
// becomes full, between the first reading of the clock and the lock. The test notices variants that check the window's
// end only at the first reading.
func TestTakesAreToldOfTheTimeTheyAreLocked(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const pause, window = 4 * time.Millisecond, 15 * time.Millisecond
	for name, c := range map[string]struct {
		policy   ratelimit.Policy
		function string
		oldNew   []string
		over     time.Duration // DecidedAt is too late if ResetAfter is at most this
	}{
		"fixed window": {ratelimit.FixedWindow{Limit: 5, Window: window}, "_rate_limit_fixed_fits", []string{"clock + 10000 <", "clock <"}, 0},
		"sliding window": {
			ratelimit.SlidingWindow{Limit: 5, Window: window}, "_rate_limit_sliding_fits", []string{"window_us - 10000", "window_us"}, window,
		},
		"token bucket": {
			ratelimit.TokenBucket{Capacity: 5, Refill: 1, Every: pause}, "_rate_limit_bucket_fits",
			[]string{"clock + 10000 - window_start", "clock - window_start"}, pause - 1, // the time for the one token
		},
		"calendar": {ratelimit.CalendarWindow{Limit: 5, Unit: ratelimit.CalendarMinute}, "_rate_limit_calendar_fits", []string{"clock + 10000 <", "clock <"}, 0},
	} {
		for _, broken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, broken: %v", name, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				shortCalendar(t, db.Pool, window)
				const take = "IF cardinality(keys) = 1 THEN"
				pgtest.Rewrite(t, db.Pool, limitertest.TakingOf(c.policy), take, fmt.Sprintf("PERFORM pg_sleep(%f); %s", pause.Seconds(), take))
				if broken {
					pgtest.Rewrite(t, db.Pool, c.function, c.oldNew...)
				}
				limiter := limitertest.New(
					t,
					db.NewPool(t, nil),
					ratelimit.Config{Name: "test", Policy: c.policy, NoDenialCache: true},
				)
				_, err := limiter.Allow(t.Context(), "key") // makes the row
				require.NoError(t, err)
				wrong := false
				for i := 0; i < 1000 && !wrong && (broken || i < 50); i++ {
					if _, ok := c.policy.(ratelimit.TokenBucket); ok { // the bucket becomes full during the pause
						pgtest.Exec(
							t,
							db.Pool,
							`UPDATE rate_limit_ephemeral SET count = 3000, window_start = clock, expires_at = clock + 3000
							FROM (SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint AS clock) AS c`,
						)
					}
					before := pgtest.Scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
					result, err := limiter.Allow(t.Context(), "key")
					require.NoError(t, err)
					// If a take begins a window or takes from a full bucket, DecidedAt is the first reading, because no
					// other call can have decided after that reading.
					wrong = result.Allowed &&
						(result.ResetAfter <= c.over || result.Remaining < 4 && result.DecidedAt.Before(before.Add(pause)))
				}
				require.Equal(t, broken, wrong)
			})
		}
	}
}

// If a row is made or changed while a call waits, the row is newer than the snapshot of the call's statement. The call
// must decide by the new row, even if it waits for several rows, one after the other.
func TestWaitingForSeveralRowsInTurn(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		keys := []string{"a", "b", "c"}
		holders := make([]pgx.Tx, len(keys))
		for i, key := range keys {
			_, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
			holders[i] = limitertest.Begin(t, db.Pool)
			_, err = limiter.WithTx(holders[i]).AllowN(t.Context(), key, 2)
			require.NoError(t, err)
		}
		elements := []modeltest.Element{
			{Key: "c", Cost: 1, Count: 9},
			{Key: "b", Cost: 1, Count: 9},
			{Key: "a", Cost: 1, Count: 9},
		}
		done := testkit.Later(func() (any, error) {
			return nil, decide(context.Background(), limiter, limitertest.Engine(limiter).Database.DB, elements, engine.Transaction{})
		})
		for _, holder := range holders {
			pid := holder.Conn().PgConn().PID()
			testkit.WaitUntil(t, func() bool {
				return pgtest.Scalar[bool](
					t,
					db.Pool,
					"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE $1::int = ANY (pg_blocking_pids(pid)))",
					int32(pid),
				)
			})
			require.NoError(t, holder.Commit(t.Context()))
		}
		_, err := done()
		require.NoError(t, err)
		for _, e := range elements {
			require.EqualValues(t, 7, e.Decision.Granted, e.Key)
			require.EqualValues(t, 10, limitertest.Taken(t, db.Pool, config, e.Key), e.Key)
		}
	})
}

// A lock_timeout_ms of -1 keeps the session's lock_timeout, as NULL does, for any number of keys.
func TestLockTimeoutOfTheCallersTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	for name, policy := range limitertest.SlowPolicies(100) {
		tx := pgtest.Begin(t, db)
		pgtest.Exec(t, tx, "SET LOCAL lock_timeout = '54321ms'")
		l := limitertest.New(t, db.Pool, ratelimit.Config{Name: name, Policy: policy})
		for _, keys := range [][]string{{"a"}, {"bb", "a"}, {"a", "bb"}, {"a", "c", "dd", "e", "f", "g", "h", "i", "j", "k"}} {
			for _, skipHeld := range []bool{false, true} {
				var requests []*engine.Request
				for _, key := range keys {
					requests = append(requests, newRequest(l, key, 1))
				}
				own := engine.Transaction{LockTimeout: new(int32(-1)), SkipHeld: skipHeld}
				require.NoError(t, limitertest.Engine(l).Database.Execute(t.Context(), tx, requests, own), name)
				for _, r := range requests {
					require.EqualValues(t, 1, r.Parts[0].Decision.Granted)
				}
				requests[0].Policy = nil
				requests[0].Add(limitertest.Space(l), limitertest.Model(l.Config().Policy), "another", 1, nil)
				require.NoError(t, limitertest.Engine(l).Database.Execute(t.Context(), tx, requests, own), name)
			}
		}
		require.NoError(t, l.WithTx(tx).Reset(t.Context(), "a"))
		require.Equal(t, "54321ms", pgtest.Scalar[string](t, tx, "SELECT current_setting('lock_timeout')"))
		require.NoError(t, tx.Rollback(t.Context()))
	}
}
