package engine_test

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

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// If a transaction holds the row of one key, only calls for this key fail, and not the whole batch.
func TestHeldKeyDoesNotSpoilItsBatch(t *testing.T) {
	t.Parallel()

	for _, durable := range []bool{false, true} {
		t.Run(pgtest.Table(durable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			// A call waits for a locked row for a quarter of the Timeout. The rest must be enough for the other calls.
			config := ratelimit.Config{
				Name:    "test",
				Policy:  ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
				Durable: durable,
			}
			clientConfig := ratelimit.ClientConfig{Timeout: 10 * time.Second}
			pool := db.NewPool(t, nil)
			limiter := limitertest.New(t, pool, config, clientConfig)
			for _, key := range []string{"b", "held", "deleted"} {
				_, err := limiter.Allow(t.Context(), key)
				require.NoError(t, err)
			}
			holder := limitertest.Hold(t, db, config, "held")
			pgtest.Exec(t, holder, "DELETE FROM "+pgtest.Table(durable)+" WHERE key = 'deleted'")

			batch := slices.Concat(
				requestsFor(limiter, "z", 1),
				requestsFor(limiter, "held", 1, 2),
				requestsFor(limiter, "b", 1, 1),
				requestsFor(limiter, "a", 2, 1),
				requestsFor(limiter, "deleted", 1),
				requestsFor(limiter, "held", 1),
			)
			send(limiter, batch)
			results, errs := outcomes(batch)
			require.NoError(t, holder.Rollback(t.Context()))
			for i, c := range batch {
				if key := c.Parts[0].Key; key == "held" || key == "deleted" {
					require.ErrorIs(t, errs[i], ratelimit.ErrTimeout)
					require.ErrorIs(t, errs[i], ratelimit.ErrKeyHeld)
					require.NotErrorIs(t, errs[i], ratelimit.ErrOutcomeUnknown) // the call has taken nothing
					require.Zero(t, results[i])
					continue
				}
				require.NoError(t, errs[i])
				require.True(t, results[i].Allowed)
			}
			for key, want := range map[string]int64{"z": 1, "held": 1, "deleted": 1, "b": 3, "a": 3} {
				require.Equal(t, want, limitertest.Taken(t, db.Pool, config, key), key)
			}
			require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(2)) // one of them is for the lane
		})
	}
}

// A call whose Timeout is nearly over is not sent, because it would leave too little time for its batch.
func TestCallThatHasWaitedTooLongIsNotAsked(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	batch := requestsFor(limiter, "key", 1, 1, 1, 1)
	batch[0].Since = batch[0].Since.Add(-2 * testkit.Amply)
	batch[1].Since = batch[1].Since.Add(-testkit.Amply * 19 / 20)
	batch[2].Since = batch[2].Since.Add(-testkit.Amply / 2)
	send(limiter, batch)
	results, errs := outcomes(batch)
	for i := range 2 {
		require.ErrorIs(t, errs[i], ratelimit.ErrTimeout)
		require.NotErrorIs(t, errs[i], ratelimit.ErrOutcomeUnknown)
		require.Zero(t, results[i])
	}
	for i, want := range map[int]int64{2: 9, 3: 8} {
		require.NoError(t, errs[i])
		require.Equal(t, want, results[i].Remaining)
	}
	require.EqualValues(t, 2, limitertest.Taken(t, db.Pool, limiter.Config(), "key"))
}

// However many calls wait for a held key, the pool's other connections are free for the application.
func TestHeldKeyLeavesThePoolToOthers(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 4 })
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 5000, Window: limitertest.Year}},
		ratelimit.ClientConfig{Timeout: 4 * testkit.Amply},
	)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	holder := limitertest.Hold(t, db, limiter.Config(), "key")

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
	require.LessOrEqual(t, pool.Stat().AcquiredConns(), int32(3)) // two for MaxInFlight, and one for the lane
	require.NoError(t, holder.Commit(t.Context()))
	_, err = done()
	require.NoError(t, err)
	require.EqualValues(t, callers+1, limitertest.Taken(t, db.Pool, limiter.Config(), "key"))
}

// After held rows were released, an idle limiter has no goroutine.
func TestLaneIsServedByNobodyAtRest(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.NewPool(t, nil),
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	holder := keep(t, db, limiter.Config(), "key", false)
	var call func() (ratelimit.Result, error)
	goroutines := testkit.Offspring(t, func(context.Context) {
		call = testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "key") })
	})
	waitUntilHeld(t, db.Pool, limiter)
	require.Positive(t, goroutines())
	require.NoError(t, holder.Commit(t.Context()))
	_, err := call()
	require.NoError(t, err)
	testkit.WaitUntil(t, func() bool { return goroutines() == 0 })
	lane := limitertest.Engine(limiter).Queues.First().Lane
	lane.Mu.Lock()
	defer lane.Mu.Unlock()
	require.False(t, lane.Serving)
}

// A key is surely held if the same transaction has locked its row for longer than a statement of the engine would.
func TestWhatIsSurelyHeld(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
		held, r := limitertest.Engine(limiter).Batcher.Held, requestsFor(limiter, "key", 1)[0]
		known := func() bool { return held.Knows(r) }
		find := func(by int64) bool {
			sure := held.Found(r, []int64{by})
			require.Equal(t, sure, known())
			return sure
		}
		for by := int64(1); by < 20; by++ { // one transaction after the other
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

// Each time that a statement looks, another transaction may be making the row. Perhaps statements of other processes
// make the row again and again, and each is undone because it also waits for a held key. So the row counts as held by a
// transaction only if a statement for this key alone has waited in vain.
func TestRowsThatAreMadeByTurnsAreNotHeldForLong(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		client := limitertest.Client(limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "test", Policy: limitertest.Hourly}))
		lane, held := limitertest.EngineOf(client).Queues.First().Lane, limitertest.EngineOf(client).Batcher.Held
		for name, c := range map[string]struct {
			holders  func(i int) int64
			waits    bool // a statement for this row alone has waited in vain
			longHeld bool
		}{
			"made by turns": {holders: func(int) int64 { return 0 }},
			"made by one":   {holders: func(int) int64 { return 0 }, waits: true, longHeld: true},
			"held by turns": {holders: func(i int) int64 { return int64(i) + 1 }, waits: true},
			"held by one":   {holders: func(int) int64 { return 1 }, longHeld: true},
		} {
			r := requestsFor(limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: name, Policy: limitertest.Hourly}), "key", 1)[0]
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

// If a row was found locked a while ago, it does not count as held any more.
func TestRowsThatWereHeldAreNotHeldForLong(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
		held, r := limitertest.Engine(limiter).Batcher.Held, requestsFor(limiter, "key", 1)[0]
		held.Found(r, []int64{1})
		<-time.After(engine.MaxRowWait)
		held.Found(r, []int64{1})
		<-time.After(held.Patience() - engine.MaxRowWait)
		require.True(t, held.Knows(r))
		require.NotErrorIs(t, held.NoTime(r), ratelimit.ErrKeyHeld)
		held.Found(r, []int64{1})
		require.ErrorIs(t, held.NoTime(r), ratelimit.ErrKeyHeld)
		for _, cause := range []string{"transaction that stays open", "overloaded server"} { // to a client they are alike
			require.ErrorContains(t, held.NoTime(r), cause)
		}
	})
}

// If one transaction after the other holds a key for a short time, calls for the key wait until Timeout.
func TestKeyHeldByTurns(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Takes = time.Millisecond / 2
		limiter := limitertest.New(
			t,
			db,
			ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()},
			ratelimit.ClientConfig{Timeout: time.Second},
		)
		hold := func(by int64) {
			db.Mu.Lock()
			defer db.Mu.Unlock()
			db.Held = map[string]int64{"key": by}
		}
		hold(1)
		call := testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "key") })
		for by := int64(2); by < 30; by++ {
			<-time.After(20 * time.Millisecond)
			hold(by)
		}
		db.Mu.Lock()
		db.Held = nil
		db.Mu.Unlock()
		result, err := call()
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	})
}

// A call for a held key returns ErrKeyHeld within the Timeout, even if the Timeout or the session's statement_timeout
// is short. Calls for a held key do not count as an outage, and neither do other calls.
func TestHeldKeysAndShortTimeouts(t *testing.T) {
	t.Parallel()

	for _, timeout := range []int{20, 40, 60, 100, 1000} {
		for _, cutOff := range []int{0, 5, 15, 50, 90, 150} {
			for by, title := range []string{"being made", "locked"} {
				t.Run(fmt.Sprintf("Timeout %d, statement_timeout %d, %s", timeout, cutOff, title), func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						db := limitertest.NewModelDB()
						db.Takes, db.CutOff = time.Millisecond/2, time.Duration(cutOff)*time.Millisecond
						db.Held = map[string]int64{"held": int64(by)}
						config := ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()}
						clientConfig := ratelimit.ClientConfig{Timeout: time.Duration(timeout) * time.Millisecond}
						limiter := limitertest.New(t, db, config, clientConfig)
						for range 10 {
							calls := []func() (ratelimit.Result, error){}
							began := time.Now()
							for i := range 3 {
								calls = append(
									calls,
									testkit.Later(
										func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "held") },
									),
									testkit.Later(
										func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), fmt.Sprint("free ", i)) },
									),
								)
							}
							for i, call := range calls {
								result, err := call()
								require.LessOrEqual(t, time.Since(began), clientConfig.Timeout)
								if i%2 == 0 {
									require.ErrorIs(t, err, ratelimit.ErrKeyHeld, "%+v", result)
									continue
								}
								require.NoError(t, err)
								require.Equal(t, ratelimit.SourceDatabase, result.Source)
							}
						}
						require.False(t, limitertest.Engine(limiter).Batcher.Breaker.IsOpen(engine.KindEphemeral))
						synctest.Wait()
					})
				})
			}
		}
	}
}

// On a single connection, the session's lock_timeout or statement_timeout ends the wait for a held row or a locked
// table. A held row is not an outage, and a locked table is an outage. Without these settings, a call waits until its
// Timeout ends, and cannot tell what blocked it.
func TestSingleConnectionTellsRowsFromTables(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, session := range []string{"lock_timeout", "statement_timeout", ""} {
		for _, durable := range limitertest.TablesFor(t, session) {
			for _, what := range []string{"row", "new row", "table"} {
				t.Run(fmt.Sprintf("%s, %s, durable: %t", session, what, durable), func(t *testing.T) {
					t.Parallel()
					db := pgtest.New(t)
					config := ratelimit.Config{
						Name:      "test",
						Policy:    limitertest.Hourly,
						Durable:   durable,
						OnFailure: ratelimit.FailOpen(),
					}
					var clientConfig ratelimit.ClientConfig
					if session == "" {
						clientConfig.Timeout = 300 * time.Millisecond
					}
					conn, err := db.NewPool(t, func(config *pgxpool.Config) {
						// statement_timeout must not end the statement that skips locked rows, even on a busy machine.
						if session != "" {
							config.ConnConfig.RuntimeParams[session] = map[string]string{
								"lock_timeout": "500ms", "statement_timeout": "3s",
							}[session]
						}
					}).Acquire(t.Context())
					require.NoError(t, err)
					defer conn.Release()
					limiter := limitertest.New(t, conn, config, clientConfig)
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
						require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
					} else {
						require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
						_, err = ratelimit.AllowAll(t.Context(), limiter.Request("key", 1), limiter.Request("other", 1))
						require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
						require.NoError(t, holder.Commit(t.Context()))
						result, err = limiter.Allow(t.Context(), "key")
						require.NoError(t, err)
						require.Equal(t, ratelimit.SourceDatabase, result.Source)
					}
				})
			}
		}
	}
}

// If the database does not answer, all calls of Wait return within one Timeout.
func TestWaitersOnAFrozenDatabase(t *testing.T) {
	t.Parallel()

	for name, mode := range map[string]ratelimit.FailureMode{"error": {}, "fail open": ratelimit.FailOpen(), "fallback": ratelimit.FallbackLocal(0.1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := limitertest.NewModelDB()
				db.Set(silent)
				var observed int64
				limiter := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode}, ratelimit.ClientConfig{
					Timeout: 300 * time.Millisecond,
					Observer: &ratelimit.Observer{
						Decision: func(e ratelimit.DecisionEvent) {
							if e.Err == nil && e.Result.Allowed {
								observed += e.Cost
							}
						},
					},
				})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				w := limitertest.NewWaits(t)
				for who := range 20 {
					w.Add(ctx, limiter, who, 1)
				}
				<-time.After(301 * time.Millisecond)
				told := w.Told()
				switch name {
				case "error":
					require.Len(t, told, 20)
					for _, one := range told {
						require.ErrorIs(t, one.Err, ratelimit.ErrTimeout)
					}
				case "fail open":
					require.Len(t, told, 20)
					require.EqualValues(t, 20, observed)
					for _, one := range told {
						require.Equal(t, ratelimit.SourceFailedOpen, one.Result.Source)
					}
				case "fallback":
					require.Len(t, told, 10) // 10 is a tenth of 100
					require.EqualValues(t, 10, observed)
				}
				cancel()
				<-time.After(time.Second)
				w.All(limiter)
			})
		})
	}
}

// However many limiters of a client have held keys, the client uses one connection to wait for them. Calls for other
// keys are decided meanwhile.
func TestHeldKeysOfFourLimitersLeaveConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const callers = 100
	db := pgtest.New(t)
	asked := &limitertest.Statements{}
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns, config.ConnConfig.Tracer = 4, asked })
	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{Timeout: 4 * testkit.Amply})
	var limiters []*ratelimit.Limiter
	holder := pgtest.Begin(t, db)
	for i := range 4 {
		l := limitertest.Of(t, client, ratelimit.Config{
			Name: fmt.Sprint("limiter ", i), Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}, Durable: i%2 == 0,
		})
		_, err := l.WithTx(holder).Allow(t.Context(), "held")
		require.NoError(t, err)
		limiters = append(limiters, l)
	}
	errs := make([]error, len(limiters)*callers)
	done := testkit.Later(func() (any, error) {
		testkit.Together(len(errs), func(i int) { _, errs[i] = limiters[i%len(limiters)].Allow(context.Background(), "held") })
		return nil, errors.Join(errs...)
	})
	testkit.WaitUntil(t, func() bool {
		known, sure := limitertest.EngineOf(client).Batcher.Held, 0
		known.Mu.Lock()
		defer known.Mu.Unlock()
		for _, row := range known.Rows {
			if row.Sure {
				sure++
			}
		}
		return sure == len(limiters)
	})
	for round := range 10 {
		free := make([]error, 10*len(limiters))
		testkit.Together(len(free), func(i int) {
			_, free[i] = limiters[i%len(limiters)].Allow(context.Background(), fmt.Sprintf("free %d, %d", round, i))
		})
		require.NoError(t, errors.Join(free...))
	}
	require.NoError(t, holder.Commit(t.Context()))
	_, err := done()
	require.NoError(t, err)
	require.LessOrEqual(t, asked.AtOnce, limitertest.EngineOf(client).Settings.MaxInFlight+1)
	for _, l := range limiters {
		require.EqualValues(t, 1+callers, limitertest.Taken(t, db.Pool, l.Config(), "held"))
	}
}
