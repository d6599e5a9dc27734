package ratelimit

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

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// open lets the breaker of a limiter open.
func open(t *testing.T, l *Limiter, db *modelDB) {
	t.Helper()
	db.set(turnedAway)
	for i := range engine.BreakerFailures {
		require.False(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		_, err := l.Allow(t.Context(), fmt.Sprint("opens ", i))
		require.NoError(t, err)
	}
	require.True(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	db.set(turnedAway)
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for source, mode := range modes {
		t.Run(source.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log strings.Builder
				var events []BreakerEvent
				db := newModelDB()
				l := newLimiter(t, db, Config{
					Name: "test", Policy: hourly, OnFailure: mode,
				}, ClientConfig{
					Timeout: time.Second, MaxInFlight: 1, Logger: slog.New(slog.NewTextHandler(&log, nil)),
					Observer: &Observer{Breaker: func(e BreakerEvent) { events = append(events, e) }},
				})
				allow := func(want Source) {
					t.Helper()
					result, err := l.Allow(t.Context(), "personal")
					require.NoError(t, err)
					require.Equal(t, want, result.Source)
				}

				// One success among failures, and it stays closed.
				allow(SourceDatabase)
				for range 3 {
					db.set(turnedAway)
					for range engine.BreakerFailures - 1 {
						allow(source)
					}
					db.set(nil)
					allow(SourceDatabase)
				}
				require.Empty(t, events)

				open(t, l, db)
				for range 1000 {
					allow(source)
				}
				asked, _ := db.counts()
				require.Zero(t, asked)
				elapse(engine.BreakerPause - 1)
				allow(source)
				asked, _ = db.counts()
				require.Zero(t, asked)

				// Each probe that fails begins another pause.
				for probes := 1; probes <= 5; probes++ {
					elapse(1)
					allow(source)
					allow(source)
					elapse(engine.BreakerPause - 1)
					allow(source)
					asked, _ = db.counts()
					require.Equal(t, probes, asked)
				}

				// One at a time, and nobody waits for it.
				db.set(silent)
				elapse(1)
				began := time.Now()
				var wg sync.WaitGroup
				waited := make([]time.Duration, 100)
				for i := range waited {
					wg.Go(func() {
						elapse(time.Duration(i) * 9 * time.Millisecond)
						asked := time.Now()
						_, err := l.Allow(t.Context(), "key")
						waited[i] = time.Since(asked)
						if err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				asked, _ = db.counts()
				require.Equal(t, 1, asked)
				require.Equal(t, time.Second, time.Since(began)) // the probe's
				probes := 0
				for _, d := range waited {
					if d > 0 {
						probes++
					}
				}
				require.Equal(t, 1, probes)

				// The first probe that does not fail closes it.
				elapse(engine.BreakerPause - 1)
				db.set(nil)
				allow(source)
				elapse(1)
				allow(SourceDatabase)
				allow(SourceDatabase)

				require.Len(t, events, 2)
				require.True(t, events[0].Open)
				require.ErrorIs(t, events[0].Err, ErrUnavailable)
				require.Equal(t, BreakerEvent{Limits: "ephemeral"}, events[1])
				require.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
				require.Contains(t, log.String(), "level=WARN msg=\"ratelimit: Postgres is away or slow\" error=")
				require.Contains(t, log.String(), "level=INFO msg=\"ratelimit: Postgres decides again\" after=4.")
				require.NotContains(t, log.String(), "personal")

				// And from then on it takes as many failures as ever.
				open(t, l, db)
			})
		})
	}
}

// A database that is there but answers too late is away, for those who wait: after two Timeouts nobody waits any more.
func TestBreakerOpensWhenTheDatabaseIsSlow(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		db.set(silent)
		l := newLimiter(
			t,
			db,
			Config{
				Name:      "test",
				Policy:    hourly,
				OnFailure: FailOpen(),
			},
			ClientConfig{Timeout: 100 * time.Millisecond},
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
					if err != nil || result.Source != SourceFailedOpen {
						t.Error(result, err)
					}
					elapse(time.Millisecond) // of the bubble's clock
				}
			})
		}
		wg.Wait()
		require.Equal(t, 100*time.Millisecond, slowest)
		asked, atOnce := db.counts()
		require.LessOrEqual(t, asked, engine.BreakerFailures+2+2) // two in flight, and a probe each 600 ms
		require.LessOrEqual(t, atOnce, 2)
	})
}

// What waits in the queue when the breaker opens is answered then, and not sent.
func TestBreakerTurnsAwayTheQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		db.set(func(ctx context.Context) error {
			elapse(time.Millisecond)
			return turnedAway(ctx)
		})
		l := newLimiter(
			t,
			db,
			Config{
				Name:      "test",
				Policy:    hourly,
				OnFailure: FailClosed(),
			},
			ClientConfig{MaxBatch: 1, MaxInFlight: 1},
		)
		var wg sync.WaitGroup
		for i := range 1000 {
			wg.Go(func() {
				result, err := l.Allow(t.Context(), fmt.Sprint("key ", i))
				if err != nil || result.Source != SourceFailedClosed {
					t.Error(result, err)
				}
			})
		}
		began := time.Now()
		wg.Wait()
		require.Equal(t, engine.BreakerFailures*time.Millisecond, time.Since(began))
		asked, _ := db.counts()
		require.Equal(t, engine.BreakerFailures, asked)
	})
}

// Callers who leave are no failures, and a probe whose caller leaves is a probe all the same.
func TestBreakerDoesNotCountCallersWhoLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		slow := func(context.Context) error {
			elapse(2 * engine.TooLong)
			return nil
		}
		db.set(slow)
		l := newLimiter(t, db, Config{
			Name: "test", Policy: hourly, OnFailure: FailOpen(),
		}, ClientConfig{Timeout: time.Second})
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
		require.False(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		elapse(time.Second) // nothing is in flight any more that could succeed
		synctest.Wait()

		open(t, l, db)
		db.set(slow)
		elapse(engine.BreakerPause)
		leave()
		require.True(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		elapse(2 * engine.TooLong)
		synctest.Wait()
		require.False(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	})
}

// Behind statements that hang, a probe may wait for too long to be sent. The next one comes all the same.
func TestBreakerSurvivesTheLossOfAProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		l := newLimiter(t, db, Config{
			Name: "test", Policy: hourly, OnFailure: FailOpen(),
		}, ClientConfig{Timeout: time.Second})
		open(t, l, db)
		elapse(engine.BreakerPause)
		_, probe := l.client.engine.Batcher.Breaker.Admit(engine.KindEphemeral, false) // and nobody reports
		require.True(t, probe)
		db.set(nil)
		elapse(time.Second + engine.BreakerPause - 1)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, SourceFailedOpen, result.Source)
		elapse(1)
		result, err = l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source)
	})
}

// A statement that left before the breaker opened, and came back after it, says nothing about now.
func TestBreakerIgnoresWhatWasSentBeforeItOpened(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		b := &engine.Breaker{Timeout: time.Second, Begin: time.Now()}
		away := pg.Translate(errors.New("broken"), true)
		for range engine.BreakerFailures {
			b.Report(engine.KindDurable, away, false)
		}
		b.Report(engine.KindDurable, nil, false)
		require.True(t, b.IsOpen(engine.KindDurable))
		elapse(engine.BreakerPause)
		_, probe := b.Admit(engine.KindDurable, false)
		require.True(t, probe)
		b.Report(engine.KindDurable, away, false)
		elapse(engine.BreakerPause)
		_, probe = b.Admit(engine.KindDurable, false)
		require.False(t, probe, "the first probe is still out")
		b.Report(engine.KindDurable, gaveUp(context.Canceled), true)
		require.True(t, b.IsOpen(engine.KindDurable), "the probe never came to a statement")
		b.Report(engine.KindDurable, nil, true)
		require.False(t, b.IsOpen(engine.KindDurable))
	})
}

// Whatever waits for its turn on a connection is not asked if the breaker has opened in the meantime.
func TestBreakerOpensDuringTheWaitForATurn(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.New(t))
	l := newLimiter(
		t,
		conn,
		Config{Name: "test", Policy: hourly, OnFailure: FailClosed()},
	)
	calls := map[string]func() error{
		"AllowAll": func() error { _, err := AllowAll(context.Background(), l.Request("key", 1)); return err },
		"Refund":   func() error { _, err := l.Refund(context.Background(), forged(l, "key", 1)); return err },
		"Grant":    func() error { _, err := l.Grant(context.Background(), "key", 1); return err },
		"Allow": func() error {
			result, err := l.Allow(context.Background(), "key")
			if err == nil && result.Source == SourceFailedClosed {
				err = engine.ErrNotTried
			}
			return err
		},
	}
	var wg sync.WaitGroup
	require.NoError(t, l.client.engine.Database.Turn.Take(t.Context()))
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
		l.client.engine.Batcher.Breaker.Report(engine.KindEphemeral, turnedAwayError(), false)
	}
	require.True(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	l.client.engine.Database.Turn.Pass()
	wg.Wait()
}

func turnedAwayError() error { return pg.Translate(turnedAway(context.Background()), true) }
