package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A statement with a key whose row is held by somebody's transaction fails for that key alone.
func TestHeldKeyDoesNotSpoilItsBatch(t *testing.T) {
	t.Parallel()

	for _, durable := range []bool{false, true} {
		t.Run(pgtest.Table(durable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			// The call waits for the row for a quarter of the Timeout. What is left must be enough for the others
			// on any machine.
			config := Config{
				Name:    "test",
				Policy:  FixedWindow{Limit: 10, Window: year},
				Durable: durable,
			}
			clientConfig := ClientConfig{Timeout: 10 * time.Second}
			pool := db.NewPool(t, nil)
			limiter := newLimiter(t, pool, config, clientConfig)
			for _, key := range []string{"b", "held", "deleted"} {
				_, err := limiter.Allow(t.Context(), key)
				require.NoError(t, err)
			}
			holder := hold(t, db, config, "held")
			pgtest.Exec(t, holder, "DELETE FROM "+pgtest.Table(durable)+" WHERE key = 'deleted'")

			batch := slices.Concat(
				limiter.requestsFor("z", 1),
				limiter.requestsFor("held", 1, 2),
				limiter.requestsFor("b", 1, 1),
				limiter.requestsFor("a", 2, 1),
				limiter.requestsFor("deleted", 1),
				limiter.requestsFor("held", 1),
			)
			limiter.send(batch)
			results, errs := outcomes(batch)
			require.NoError(t, holder.Rollback(t.Context()))
			for i, c := range batch {
				if key := c.Parts[0].Key; key == "held" || key == "deleted" {
					require.ErrorIs(t, errs[i], ErrTimeout)
					require.ErrorIs(t, errs[i], ErrKeyHeld)
					require.NotErrorIs(t, errs[i], ErrOutcomeUnknown) // it has not counted
					require.Zero(t, results[i])
					continue
				}
				require.NoError(t, errs[i])
				require.True(t, results[i].Allowed)
			}
			for key, want := range map[string]int64{"z": 1, "held": 1, "deleted": 1, "b": 3, "a": 3} {
				require.Equal(t, want, taken(t, db.Pool, config, key), key)
			}
			require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(2)) // the lane's
		})
	}
}

// A call that has nearly no time left would leave none to the others of its batch.
func TestCallThatHasWaitedTooLongIsNotAsked(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(
		t,
		db.Pool,
		Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}},
	)
	batch := limiter.requestsFor("key", 1, 1, 1, 1)
	batch[0].Since = batch[0].Since.Add(-2 * amply)
	batch[1].Since = batch[1].Since.Add(-amply * 19 / 20)
	batch[2].Since = batch[2].Since.Add(-amply / 2)
	limiter.send(batch)
	results, errs := outcomes(batch)
	for i := range 2 {
		require.ErrorIs(t, errs[i], ErrTimeout)
		require.NotErrorIs(t, errs[i], ErrOutcomeUnknown)
		require.Zero(t, results[i])
	}
	for i, want := range map[int]int64{2: 9, 3: 8} {
		require.NoError(t, errs[i])
		require.Equal(t, want, results[i].Remaining)
	}
	require.EqualValues(t, 2, taken(t, db.Pool, limiter.Config(), "key"))
}

// However many wait for a key that somebody holds, the pool's other connections are free for the application.
func TestHeldKeyLeavesThePoolToOthers(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 4 })
	limiter := newLimiter(
		t,
		pool,
		Config{Name: "test", Policy: FixedWindow{Limit: 5000, Window: year}},
		ClientConfig{Timeout: 4 * amply},
	)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	holder := hold(t, db, limiter.Config(), "key")

	const callers = 2000
	errs := make([]error, callers)
	done := testkit.Later(func() (any, error) {
		testkit.Together(callers, func(i int) { _, errs[i] = limiter.Allow(context.Background(), "key") })
		return nil, errors.Join(errs...)
	})
	waitUntilHeld(t, db.Pool, limiter)
	for range 20 {
		require.Equal(t, 1, pgtest.Scalar[int](t, pool, "SELECT 1"))
	}
	require.LessOrEqual(t, pool.Stat().AcquiredConns(), int32(3)) // MaxInFlight, and the lane
	require.NoError(t, holder.Commit(t.Context()))
	_, err = done()
	require.NoError(t, err)
	require.EqualValues(t, callers+1, taken(t, db.Pool, limiter.Config(), "key"))
}

// At rest, a limiter that has met held rows has no goroutine.
func TestLaneIsServedByNobodyAtRest(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	limiter := newLimiter(
		t,
		db.NewPool(t, nil),
		Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}},
	)
	holder := keep(t, db, limiter.Config(), "key", false)
	var call func() (Result, error)
	goroutines := testkit.Offspring(t, func(context.Context) {
		call = testkit.Later(func() (Result, error) { return limiter.Allow(context.Background(), "key") })
	})
	waitUntilHeld(t, db.Pool, limiter)
	require.Positive(t, goroutines())
	require.NoError(t, holder.Commit(t.Context()))
	_, err := call()
	require.NoError(t, err)
	testkit.WaitUntil(t, func() bool { return goroutines() == 0 })
	lane := limiter.client.engine.Queues.First().Lane
	lane.Mu.Lock()
	defer lane.Mu.Unlock()
	require.False(t, lane.Serving)
}

// A key is surely held if the same transaction is found to have locked it for longer than a statement of ours would.
func TestWhatIsSurelyHeld(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := newLimiter(t, newModelDB(), Config{Name: "test", Policy: hourly})
		held, r := limiter.client.engine.Batcher.Held, limiter.requestsFor("key", 1)[0]
		known := func() bool { return held.Knows(r) }
		find := func(by int64) bool {
			sure := held.Found(r, []int64{by})
			require.Equal(t, sure, known())
			return sure
		}
		for by := int64(1); by < 20; by++ { // one after the other
			require.False(t, find(by))
			<-time.After(engine.MaxRowWait - 1)
			require.False(t, find(by))
		}
		<-time.After(1)
		require.True(t, find(19))
		require.True(t, find(20), "the next one is likely to stay as long")
		held.Decided([]*engine.Request{r})
		require.True(t, known())
		<-time.After(held.Memory())
		require.False(t, known())

		require.True(t, find(0), "being made")
		held.Decided([]*engine.Request{r})
		require.False(t, known(), "whoever has made it has committed")
	})
}

// A row that is being made each time that it is asked for may be made by one statement of another process after the
// other, none of which can make it, because each holds a key too long that somebody holds for good. It is not held by a
// transaction unless a statement that waits for it alone has seen so.
func TestRowsThatAreMadeByTurnsAreNotHeldForLong(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		client := newLimiter(t, newModelDB(), Config{Name: "test", Policy: hourly}).client
		lane, held := client.engine.Queues.First().Lane, client.engine.Batcher.Held
		for name, c := range map[string]struct {
			holders  func(i int) int64
			waits    bool // in vain, for the row alone
			longHeld bool
		}{
			"made by turns": {holders: func(int) int64 { return 0 }},
			"made by one":   {holders: func(int) int64 { return 0 }, waits: true, longHeld: true},
			"held by turns": {holders: func(i int) int64 { return int64(i) + 1 }, waits: true},
			"held by one":   {holders: func(int) int64 { return 1 }, longHeld: true},
		} {
			r := newLimiter(t, newModelDB(), Config{Name: name, Policy: hourly}).requestsFor("key", 1)[0]
			r.Since = time.Now()
			for i := 0; time.Since(r.Since) < held.Patience(); i++ {
				held.Found(r, []int64{c.holders(i)})
				<-time.After(engine.MaxRowWait)
				if c.waits {
					held.Still(r.HeldKeys()[0], true)
				}
			}
			held.Found(r, []int64{c.holders(1000)})
			require.Equal(t, c.longHeld, len(lane.GiveUp([]*engine.Request{r})) == 0, name)
		}
	})
}

// What was found a while ago does not tell that a row is still held.
func TestRowsThatWereHeldAreNotHeldForLong(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := newLimiter(t, newModelDB(), Config{Name: "test", Policy: hourly})
		held, r := limiter.client.engine.Batcher.Held, limiter.requestsFor("key", 1)[0]
		held.Found(r, []int64{1})
		<-time.After(engine.MaxRowWait)
		held.Found(r, []int64{1})
		<-time.After(held.Patience() - engine.MaxRowWait)
		require.True(t, held.Knows(r))
		require.NotErrorIs(t, held.NoTime(r), ErrKeyHeld)
		held.Found(r, []int64{1})
		require.ErrorIs(t, held.NoTime(r), ErrKeyHeld)
		for _, cause := range []string{"transaction that goes on", "overloaded server"} { // nobody can tell which of them it is
			require.ErrorContains(t, held.NoTime(r), cause)
		}
	})
}

// A key that one transaction after the other holds, none of them for long, is waited for until Timeout.
func TestKeyHeldByTurns(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		db.takes = time.Millisecond / 2
		limiter := newLimiter(
			t,
			db,
			Config{Name: "test", Policy: hourly, OnFailure: FailOpen()},
			ClientConfig{Timeout: time.Second},
		)
		hold := func(by int64) {
			db.mu.Lock()
			defer db.mu.Unlock()
			db.held = map[string]int64{"key": by}
		}
		hold(1)
		call := testkit.Later(func() (Result, error) { return limiter.Allow(context.Background(), "key") })
		for by := int64(2); by < 30; by++ {
			<-time.After(20 * time.Millisecond)
			hold(by)
		}
		db.mu.Lock()
		db.held = nil
		db.mu.Unlock()
		result, err := call()
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source)
	})
}

// However short the Timeout is, or the session's statement_timeout, a held key is an ErrKeyHeld within the Timeout, and
// no outage, nor does it make one of the keys beside it.
func TestHeldKeysAndShortTimeouts(t *testing.T) {
	t.Parallel()

	for _, timeout := range []int{20, 40, 60, 100, 1000} {
		for _, cutOff := range []int{0, 5, 15, 50, 90, 150} {
			for by, title := range []string{"being made", "locked"} {
				t.Run(fmt.Sprintf("Timeout %d, statement_timeout %d, %s", timeout, cutOff, title), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						db := newModelDB()
						db.takes, db.cutOff = time.Millisecond/2, time.Duration(cutOff)*time.Millisecond
						db.held = map[string]int64{"held": int64(by)}
						config := Config{Name: "test", Policy: hourly, OnFailure: FailOpen()}
						clientConfig := ClientConfig{Timeout: time.Duration(timeout) * time.Millisecond}
						limiter := newLimiter(t, db, config, clientConfig)
						for range 10 {
							calls := []func() (Result, error){}
							began := time.Now()
							for i := range 3 {
								calls = append(
									calls,
									testkit.Later(
										func() (Result, error) { return limiter.Allow(context.Background(), "held") },
									),
									testkit.Later(
										func() (Result, error) { return limiter.Allow(context.Background(), fmt.Sprint("free ", i)) },
									),
								)
							}
							for i, call := range calls {
								result, err := call()
								require.LessOrEqual(t, time.Since(began), clientConfig.Timeout)
								if i%2 == 0 {
									require.ErrorIs(t, err, ErrKeyHeld, "%+v", result)
									continue
								}
								require.NoError(t, err)
								require.Equal(t, SourceDatabase, result.Source)
							}
						}
						require.False(t, limiter.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
						synctest.Wait()
					})
				})
			}
		}
	}
}

// On a single connection, the session's lock_timeout or statement_timeout ends the wait for a held row, which is no
// outage, and for a locked table, which is one. A session that has neither waits for Timeout, and what it has waited
// for cannot be told.
func TestSingleConnectionTellsRowsFromTables(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, session := range []string{"lock_timeout", "statement_timeout", ""} {
		for _, durable := range tablesFor(t, session) {
			for _, what := range []string{"row", "new row", "table"} {
				t.Run(fmt.Sprintf("%s, %s, durable: %t", session, what, durable), func(t *testing.T) {
					t.Parallel()
					db := pgtest.New(t)
					config := Config{
						Name:      "test",
						Policy:    hourly,
						Durable:   durable,
						OnFailure: FailOpen(),
					}
					var clientConfig ClientConfig
					if session == "" {
						clientConfig.Timeout = 300 * time.Millisecond
					}
					conn, err := db.NewPool(t, func(config *pgxpool.Config) {
						// A statement_timeout must not end the statement that waits for nobody, however busy the machine is.
						if session != "" {
							config.ConnConfig.RuntimeParams[session] = map[string]string{
								"lock_timeout": "500ms", "statement_timeout": "3s",
							}[session]
						}
					}).Acquire(t.Context())
					require.NoError(t, err)
					defer conn.Release()
					limiter := newLimiter(t, conn, config, clientConfig)
					var holder pgx.Tx
					if what == "table" {
						holder = pgtest.Begin(t, db)
						pgtest.Exec(t, holder, "LOCK TABLE "+pgtest.Table(durable)+" IN ACCESS EXCLUSIVE MODE")
					} else {
						holder = keep(t, db, config, "key", what == "new row")
					}
					result, err := limiter.Allow(t.Context(), "key")
					if what == "table" || session == "" {
						require.NoError(t, err)
						require.Equal(t, SourceFailedOpen, result.Source)
					} else {
						require.ErrorIs(t, err, ErrKeyHeld)
						_, err = AllowAll(t.Context(), limiter.Request("key", 1), limiter.Request("other", 1))
						require.ErrorIs(t, err, ErrKeyHeld)
						require.NoError(t, holder.Commit(t.Context()))
						result, err = limiter.Allow(t.Context(), "key")
						require.NoError(t, err)
						require.Equal(t, SourceDatabase, result.Source)
					}
				})
			}
		}
	}
}

// All who wait for a database that does not answer are told within one budget.
func TestWaitersOnAFrozenDatabase(t *testing.T) {
	t.Parallel()

	for name, mode := range map[string]FailureMode{"error": {}, "fail open": FailOpen(), "fallback": FallbackLocal(0.1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newModelDB()
				db.set(silent)
				var observed int64
				limiter := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode}, ClientConfig{
					Timeout: 300 * time.Millisecond,
					Observer: &Observer{
						Decision: func(e DecisionEvent) {
							if e.Err == nil && e.Result.Allowed {
								observed += e.Cost
							}
						},
					},
				})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				w := newWaits(t)
				for who := range 20 {
					w.add(ctx, limiter, who, 1)
				}
				<-time.After(301 * time.Millisecond)
				told := w.told()
				switch name {
				case "error":
					require.Len(t, told, 20)
					for _, one := range told {
						require.ErrorIs(t, one.err, ErrTimeout)
					}
				case "fail open":
					require.Len(t, told, 20)
					require.EqualValues(t, 20, observed)
					for _, one := range told {
						require.Equal(t, SourceFailedOpen, one.result.Source)
					}
				case "fallback":
					require.Len(t, told, 10) // a tenth of 100
					require.EqualValues(t, 10, observed)
				}
				cancel()
				<-time.After(time.Second)
				w.all(limiter)
			})
		})
	}
}
