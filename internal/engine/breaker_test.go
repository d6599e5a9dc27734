package engine_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// open makes calls fail until the breaker of a limiter opens.
func open(t *testing.T, l *ratelimit.Limiter, db *limitertest.ModelDB) {
	t.Helper()
	db.Set(limitertest.TurnedAway)
	for i := range engine.BreakerFailures {
		require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		_, err := l.Allow(t.Context(), fmt.Sprint("opens ", i))
		require.NoError(t, err)
	}
	require.True(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
	db.Set(limitertest.TurnedAway)
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for source, mode := range limitertest.Modes {
		t.Run(source.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log strings.Builder
				var events []ratelimit.BreakerEvent
				db := limitertest.NewModelDB()
				l := limitertest.New(t, db, ratelimit.Config{
					Name: "test", Policy: limitertest.Hourly, OnFailure: mode,
				}, ratelimit.ClientConfig{
					Timeout: time.Second, MaxInFlight: 1, Logger: slog.New(slog.NewTextHandler(&log, nil)),
					Observer: &ratelimit.Observer{Breaker: func(e ratelimit.BreakerEvent) { events = append(events, e) }},
				})
				allow := func(want ratelimit.Source) {
					t.Helper()
					result, err := l.Allow(t.Context(), "personal")
					require.NoError(t, err)
					require.Equal(t, want, result.Source)
				}

				// After a success among the failures, the breaker stays closed.
				allow(ratelimit.SourceDatabase)
				for range 3 {
					db.Set(limitertest.TurnedAway)
					for range engine.BreakerFailures - 1 {
						allow(source)
					}
					db.Set(nil)
					allow(ratelimit.SourceDatabase)
				}
				require.Empty(t, events)

				open(t, l, db)
				for range 1000 {
					allow(source)
				}
				asked, _ := db.Counts()
				require.Zero(t, asked)
				limitertest.Elapse(engine.BreakerPause - 1)
				allow(source)
				asked, _ = db.Counts()
				require.Zero(t, asked)

				for probes := 1; probes <= 5; probes++ {
					limitertest.Elapse(1)
					allow(source)
					allow(source)
					limitertest.Elapse(engine.BreakerPause - 1)
					allow(source)
					asked, _ = db.Counts()
					require.Equal(t, probes, asked)
				}

				// There is one probe at a time, and other calls do not wait for the probe.
				db.Set(silent)
				limitertest.Elapse(1)
				began := time.Now()
				var wg sync.WaitGroup
				waited := make([]time.Duration, 100)
				for i := range waited {
					wg.Go(func() {
						limitertest.Elapse(time.Duration(i) * 9 * time.Millisecond)
						asked := time.Now()
						_, err := l.Allow(t.Context(), "key")
						waited[i] = time.Since(asked)
						if err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				asked, _ = db.Counts()
				require.Equal(t, 1, asked)
				require.Equal(t, time.Second, time.Since(began)) // how long the probe takes
				probes := 0
				for _, d := range waited {
					if d > 0 {
						probes++
					}
				}
				require.Equal(t, 1, probes)

				limitertest.Elapse(engine.BreakerPause - 1)
				db.Set(nil)
				allow(source)
				limitertest.Elapse(1)
				allow(ratelimit.SourceDatabase)
				allow(ratelimit.SourceDatabase)

				require.Len(t, events, 2)
				require.True(t, events[0].Open)
				require.ErrorIs(t, events[0].Err, ratelimit.ErrUnavailable)
				require.Equal(t, ratelimit.BreakerEvent{Limits: "ephemeral"}, events[1])
				require.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
				require.Contains(t, log.String(), "level=WARN msg=\"ratelimit: Postgres is away or slow\" error=")
				require.Contains(t, log.String(), "level=INFO msg=\"ratelimit: Postgres decides again\" after=4.")
				require.NotContains(t, log.String(), "personal")

				// After the breaker has closed, BreakerFailures failures open it again.
				open(t, l, db)
			})
		})
	}
}

// A database that answers too late counts as away. After two Timeouts, the breaker is open, and no call waits.
func TestBreakerOpensWhenTheDatabaseIsSlow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Set(silent)
		l := limitertest.New(
			t,
			db,
			ratelimit.Config{
				Name:      "test",
				Policy:    limitertest.Hourly,
				OnFailure: ratelimit.FailOpen(),
			},
			ratelimit.ClientConfig{Timeout: 100 * time.Millisecond},
		)
		began := time.Now()
		var slowest time.Duration
		var mu sync.Mutex
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(func() {
				for time.Since(began) < time.Second {
					asked := time.Now()
					result, err := l.Allow(t.Context(), "key")
					waited := time.Since(asked)
					mu.Lock()
					slowest = max(slowest, waited)
					if time.Since(began) > 200*time.Millisecond && waited > 0 && waited != 100*time.Millisecond {
						t.Errorf("waited %v", waited)
					}
					mu.Unlock()
					if err != nil || result.Source != ratelimit.SourceFailedOpen {
						t.Error(result, err)
					}
					limitertest.Elapse(time.Millisecond) // by the clock of the synctest bubble
				}
			})
		}
		wg.Wait()
		require.Equal(t, 100*time.Millisecond, slowest)
		asked, atOnce := db.Counts()
		require.LessOrEqual(t, asked, engine.BreakerFailures+2+2) // 2 in flight, and a probe every 600 ms
		require.LessOrEqual(t, atOnce, 2)
	})
}

// When the breaker opens, requests in the queue are answered at once, and are not sent.
func TestBreakerTurnsAwayTheQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Set(func(ctx context.Context) error {
			limitertest.Elapse(time.Millisecond)
			return limitertest.TurnedAway(ctx)
		})
		l := limitertest.New(
			t,
			db,
			ratelimit.Config{
				Name:      "test",
				Policy:    limitertest.Hourly,
				OnFailure: ratelimit.FailClosed(),
			},
			ratelimit.ClientConfig{MaxBatch: 1, MaxInFlight: 1},
		)
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				result, err := l.Allow(t.Context(), fmt.Sprint("key ", i))
				if err != nil || result.Source != ratelimit.SourceFailedClosed {
					t.Error(result, err)
				}
			})
		}
		began := time.Now()
		wg.Wait()
		require.Equal(t, engine.BreakerFailures*time.Millisecond, time.Since(began))
		asked, _ := db.Counts()
		require.Equal(t, engine.BreakerFailures, asked)
	})
}

// A call whose caller leaves is not a failure. If the caller of a probe leaves, the result of the probe still counts.
func TestBreakerDoesNotCountCallersWhoLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		slow := func(context.Context) error {
			limitertest.Elapse(2 * engine.TooLong)
			return nil
		}
		db.Set(slow)
		l := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen(),
		}, ratelimit.ClientConfig{Timeout: time.Second})
		leave := func() {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, err := l.Allow(ctx, "key")
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		for range 10 * engine.BreakerFailures {
			leave()
		}
		require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		limitertest.Elapse(time.Second) // until no statement in flight can succeed
		synctest.Wait()

		open(t, l, db)
		db.Set(slow)
		limitertest.Elapse(engine.BreakerPause)
		leave()
		require.True(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		limitertest.Elapse(2 * engine.TooLong)
		synctest.Wait()
		require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
	})
}

// If statements hang, a probe may wait for too long in the queue, and another call becomes the next probe.
func TestBreakerSurvivesTheLossOfAProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		l := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen(),
		}, ratelimit.ClientConfig{Timeout: time.Second})
		open(t, l, db)
		limitertest.Elapse(engine.BreakerPause)
		_, probe := limitertest.Engine(l).Batcher.Breaker.Admit(engine.KindEphemeral, false) // is never recorded
		require.True(t, probe)
		db.Set(nil)
		limitertest.Elapse(time.Second + engine.BreakerPause - 1)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
		limitertest.Elapse(1)
		result, err = l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	})
}

// If a statement was sent before the breaker opened, its result does not close the breaker.
func TestBreakerIgnoresWhatWasSentBeforeItOpened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &engine.Breaker{Timeout: time.Second, Begin: time.Now()}
		away := pg.Translate(errors.New("broken"), true)
		for range engine.BreakerFailures {
			b.Record(engine.KindDurable, away, false)
		}
		b.Record(engine.KindDurable, nil, false)
		require.True(t, b.IsOpen(engine.KindDurable))
		limitertest.Elapse(engine.BreakerPause)
		_, probe := b.Admit(engine.KindDurable, false)
		require.True(t, probe)
		b.Record(engine.KindDurable, away, false)
		limitertest.Elapse(engine.BreakerPause)
		_, probe = b.Admit(engine.KindDurable, false)
		require.False(t, probe, "the first probe is still out")
		b.Record(engine.KindDurable, engine.GaveUp(context.Canceled), true)
		require.True(t, b.IsOpen(engine.KindDurable), "the probe never came to a statement")
		b.Record(engine.KindDurable, nil, true)
		require.False(t, b.IsOpen(engine.KindDurable))
	})
}

// Calls that wait for their turn on a single connection are not sent if the breaker opens during the wait.
func TestBreakerOpensDuringTheWaitForATurn(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.New(t))
	l := limitertest.New(
		t,
		conn,
		ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailClosed()},
	)
	calls := map[string]func() error{
		"AllowAll": func() error { _, err := ratelimit.AllowAll(context.Background(), l.Request("key", 1)); return err },
		"Refund":   func() error { _, err := l.Refund(context.Background(), limitertest.Forged(l, "key", 1)); return err },
		"Grant":    func() error { _, err := l.Grant(context.Background(), "key", 1); return err },
		"Allow": func() error {
			result, err := l.Allow(context.Background(), "key")
			if err == nil && result.Source == ratelimit.SourceFailedClosed {
				err = engine.ErrNotTried
			}
			return err
		},
	}
	var wg sync.WaitGroup
	require.NoError(t, limitertest.Engine(l).Database.Turn.Take(t.Context()))
	for name, call := range calls {
		wg.Go(func() {
			if err := call(); !errors.Is(err, engine.ErrNotTried) {
				t.Error(name, err)
			}
		})
	}
	testkit.WaitUntil(t, func() bool {
		stacks := make([]byte, 1<<20)
		waiting := 0
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, t.Name()) && strings.Contains(stack, "(*Turn).Take") {
				waiting++
			}
		}
		return waiting == len(calls)
	})
	for range engine.BreakerFailures {
		limitertest.Engine(l).Batcher.Breaker.Record(engine.KindEphemeral, turnedAwayError(), false)
	}
	require.True(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
	limitertest.Engine(l).Database.Turn.Pass()
	wg.Wait()
}

func turnedAwayError() error { return pg.Translate(limitertest.TurnedAway(context.Background()), true) }

// All limiters of a client share a breaker, so an outage opens one breaker, and its end closes one breaker.
func TestOneOutageOpensOneBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		var events []ratelimit.BreakerEvent
		db := limitertest.NewModelDB()
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{
			Logger:   slog.New(slog.NewTextHandler(&log, nil)),
			Observer: &ratelimit.Observer{Breaker: func(e ratelimit.BreakerEvent) { events = append(events, e) }},
		})
		var answers, returns []*ratelimit.Limiter
		for i := range 20 {
			config := ratelimit.Config{Name: fmt.Sprint("limiter ", i), Policy: limitertest.Hourly}
			if i%4 == 3 {
				returns = append(returns, limitertest.Of(t, client, config))
				continue
			}
			config.OnFailure = []ratelimit.FailureMode{ratelimit.FailOpen(), ratelimit.FailClosed(), ratelimit.FallbackLocal(0.5)}[i%4]
			answers = append(answers, limitertest.Of(t, client, config))
		}
		answered := func(fromDatabase bool) {
			t.Helper()
			for _, l := range answers {
				result, err := l.Allow(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, fromDatabase, result.Source == ratelimit.SourceDatabase)
			}
		}
		db.Set(limitertest.TurnedAway)
		answered(false)
		require.Equal(t, engine.BreakerFailures, db.Statements())
		require.Len(t, events, 1)
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		for _, l := range returns {
			_, err := l.Allow(t.Context(), "key")
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		}
		require.Equal(t, engine.BreakerFailures+len(returns), db.Statements(), "they ask")

		db.Set(nil)
		answered(false)
		require.Zero(t, db.Statements())
		_, err := returns[0].Allow(t.Context(), "key")
		require.NoError(t, err)
		answered(true)
		require.Len(t, events, 2)
		require.True(t, events[0].Open)
		require.False(t, events[1].Open)
		require.Equal(t, 2, strings.Count(log.String(), "\n"))
	})
}

// Calls of limiters that return errors ask the database even while the breaker is open. If such a call fails, another
// pause begins. If the call succeeds, the breaker closes for all limiters.
func TestLimiterThatReturnsErrorsAsksWhileTheBreakerIsOpen(t *testing.T) {
	t.Parallel()
	setUp := func(t *testing.T, config ratelimit.ClientConfig) (db *limitertest.ModelDB, closed, one, two *ratelimit.Limiter) {
		t.Helper()
		db = limitertest.NewModelDB()
		client := limitertest.NewClient(t, db, config)
		closed = limitertest.Of(t, client, ratelimit.Config{Name: "closed", Policy: limitertest.Hourly, OnFailure: ratelimit.FailClosed()})
		one = limitertest.Of(t, client, ratelimit.Config{Name: "one", Policy: limitertest.Hourly})
		two = limitertest.Of(t, client, ratelimit.Config{Name: "two", Policy: limitertest.Hourly, OnFailure: ratelimit.ReturnError()})
		return db, closed, one, two
	}
	source := func(t *testing.T, l *ratelimit.Limiter) ratelimit.Source {
		t.Helper()
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Source
	}
	t.Run("one after the other", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			db, closed, one, two := setUp(t, ratelimit.ClientConfig{})
			open(t, closed, db)
			calls := []func() error{
				func() error { _, err := one.Allow(t.Context(), "key"); return err },
				func() error { _, err := one.Peek(t.Context(), "key"); return err },
				func() error { _, err := two.Grant(t.Context(), "key", 1); return err },
				func() error { _, err := two.Refund(t.Context(), limitertest.Forged(two, "key", 1)); return err },
				func() error {
					_, err := ratelimit.AllowAll(t.Context(), one.Request("key", 1), two.Request("key", 1))
					return err
				},
			}
			for i, call := range calls {
				require.ErrorIs(t, call(), ratelimit.ErrUnavailable)
				require.Equal(t, 1+i, db.Statements())
			}
			_, err := ratelimit.AllowAll(t.Context(), one.Request("key", 1), closed.Request("key", 1))
			require.ErrorIs(t, err, engine.ErrNotTried)
			_, err = closed.Grant(t.Context(), "key", 1)
			require.ErrorIs(t, err, engine.ErrNotTried)

			limitertest.Elapse(engine.BreakerPause - 1)
			require.ErrorIs(t, calls[0](), ratelimit.ErrUnavailable)
			limitertest.Elapse(engine.BreakerPause - 1)
			require.Equal(t, ratelimit.SourceFailedClosed, source(t, closed))
			require.Equal(t, 1+len(calls), db.Statements())

			for _, call := range calls {
				db.Set(nil)
				require.NoError(t, call())
				require.False(t, limitertest.Engine(one).Batcher.Breaker.IsOpen(engine.KindEphemeral))
				require.Equal(t, ratelimit.SourceDatabase, source(t, closed))
				open(t, closed, db)
			}
		})
	})
	t.Run("on one connection", func(t *testing.T) {
		t.Parallel()
		client := limitertest.NewClient(t, pgtest.Connect(t, pgtest.New(t)), ratelimit.ClientConfig{})
		l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
		for range engine.BreakerFailures {
			limitertest.EngineOf(client).Batcher.Breaker.Record(engine.KindEphemeral, turnedAwayError(), false)
		}
		require.True(t, limitertest.EngineOf(client).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.Equal(t, ratelimit.SourceDatabase, source(t, l))
		require.False(t, limitertest.EngineOf(client).Batcher.Breaker.IsOpen(engine.KindEphemeral))
	})
	t.Run("those in the queue", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			const each = 10
			db, closed, one, _ := setUp(t, ratelimit.ClientConfig{MaxBatch: 1, MaxInFlight: 1})
			db.Set(func(ctx context.Context) error {
				limitertest.Elapse(time.Millisecond)
				return limitertest.TurnedAway(ctx)
			})
			var wg sync.WaitGroup
			ask := func(l *ratelimit.Limiter) {
				for i := range each {
					wg.Go(func() {
						result, err := l.Allow(t.Context(), fmt.Sprint("key ", i))
						if l == one && !errors.Is(err, ratelimit.ErrUnavailable) || l == closed && err != nil {
							t.Error(err)
						}
						if l == closed && result.Source != ratelimit.SourceFailedClosed {
							t.Error(result)
						}
					})
				}
			}
			ask(closed)
			synctest.Wait()
			ask(one)
			wg.Wait()
			// After the breaker has opened, only the limiter that returns errors sends statements.
			require.Equal(t, engine.BreakerFailures-1+each, db.Statements())
		})
	})
}
