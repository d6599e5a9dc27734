package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// modelDB is a database in memory that decides on the model, by the clock of the test's bubble, and that can be away.
type modelDB struct {
	DBTX
	policy Policy

	mu     sync.Mutex
	away   func(ctx context.Context) error // nil: it is there
	asked  int                             // statements
	atOnce int                             // statements at the same time, at most
	now    int
	states map[string]state
}

func newModelDB(policy Policy) *modelDB { return &modelDB{policy: policy, states: map[string]state{}} }

// set says what becomes of statements from now on, and begins to count anew.
func (db *modelDB) set(away func(ctx context.Context) error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.away, db.asked, db.atOnce = away, 0, db.now
}

// counts is how many statements there were since set, and how many at the same time at most.
func (db *modelDB) counts() (asked, atOnce int) {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.asked, db.atOnce
}

func (db *modelDB) Query(ctx context.Context, _ string, args ...any) (pgx.Rows, error) {
	db.mu.Lock()
	db.asked++
	db.now++
	db.atOnce = max(db.atOnce, db.now)
	away := db.away
	db.mu.Unlock()
	var err error
	if away != nil {
		err = away(ctx)
	}
	db.mu.Lock()
	defer db.mu.Unlock()
	db.now--
	if err != nil {
		return nil, err
	}
	keys, _ := args[1].([]string)
	costs, _ := args[2].([]int64)
	counts, _ := args[3].([]int64)
	if costs == nil {
		costs = slices.Repeat([]int64{1}, len(keys))
	}
	if counts == nil {
		counts = slices.Repeat([]int64{1}, len(keys))
	}
	at := time.Now()
	rows := &modelRows{}
	for i, key := range keys {
		var last decision
		granted := int64(0)
		for range counts[i] {
			db.states[key], last = db.policy.decide(db.states[key], at.UnixMicro(), costs[i])
			granted += last.granted
		}
		rows.values = append(rows.values, []any{
			int64(i + 1), granted, last.remaining, &last.retryAfter, last.resetAfter, at,
			last.state.count, last.state.prevCount, last.state.windowStart, last.state.credit, last.state.scale, last.state.expiresAt,
		})
	}
	return rows, nil
}

type modelRows struct {
	pgx.Rows
	values [][]any
}

func (r *modelRows) Next() bool { return len(r.values) > 0 }
func (*modelRows) Err() error   { return nil }
func (r *modelRows) FieldDescriptions() []pgconn.FieldDescription {
	return make([]pgconn.FieldDescription, len(r.values[0]))
}
func (*modelRows) Close() {}
func (r *modelRows) Scan(targets ...any) error {
	for i, value := range r.values[0] {
		switch target := targets[i].(type) {
		case *int64:
			*target, _ = value.(int64)
		case **int64:
			*target, _ = value.(*int64)
		case *time.Time:
			*target, _ = value.(time.Time)
		}
	}
	r.values = r.values[1:]
	return nil
}
func (*modelRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// turnedAway is how a stopped server answers, at once; silent is one that does not.
func turnedAway(context.Context) error {
	return &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03"}
}
func silent(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// elapse lets time pass, in a bubble of synctest.
func elapse(d time.Duration) { <-time.After(d) }

func sqlState(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: code} }
}

var (
	hourly = FixedWindow{Limit: 100, Window: time.Hour}

	// modes are those that answer in an outage.
	modes = map[Source]FailureMode{
		SourceFailedOpen:   FailOpen(),
		SourceFailedClosed: FailClosed(),
		SourceFallback:     FallbackLocal(0.1),
	}
)

// open lets the breaker of a limiter open.
func open(t *testing.T, l *Limiter, db *modelDB) {
	t.Helper()
	db.set(turnedAway)
	for i := range breakerFailures {
		require.False(t, l.breaker.open())
		_, err := l.Allow(t.Context(), fmt.Sprint("opens ", i))
		require.NoError(t, err)
	}
	require.True(t, l.breaker.open())
	db.set(turnedAway)
}

func TestWhatIsAnOutage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		away   func(context.Context) error
		outage bool
	}{
		"refused":           {turnedAway, true},
		"silent":            {silent, true},
		"broken":            {func(context.Context) error { return errors.New("unexpected EOF") }, true},
		"ended":             {sqlState("57P01"), true},
		"no connections":    {sqlState("53300"), true},
		"read-only":         {sqlState("25006"), true},
		"statement timeout": {sqlState("57014"), true},
		"row held":          {sqlState("55P03"), false},
		"not migrated":      {sqlState("42883"), false},
		"not permitted":     {sqlState("42501"), false},
		"not prepared":      {sqlState("26000"), false},
		"any other error":   {sqlState("XX000"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				for source, mode := range modes {
					db := newModelDB(hourly)
					db.set(c.away)
					l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode})
					for range 2 * breakerFailures {
						result, err := l.Allow(t.Context(), "key")
						now := time.Now()
						peeked, peekErr := l.Peek(t.Context(), "key")
						if !c.outage {
							require.Error(t, err)
							if name == "row held" { // who looks waits for no row: so it is the table that is locked
								require.Equal(t, source, peeked.Source)
							} else {
								require.Error(t, peekErr)
							}
							continue
						}
						require.NoError(t, err)
						require.NoError(t, peekErr)
						require.Equal(t, source, result.Source)
						require.Equal(t, source, peeked.Source)
						require.Equal(t, source != SourceFailedClosed, result.Allowed)
						require.Equal(t, source != SourceFailedClosed, peeked.Allowed)
						require.Equal(t, int64(100), result.Limit)
						require.Equal(t, now, result.DecidedAt)
					}
					require.Equal(t, c.outage, l.breaker.open())
				}
				for _, mode := range []FailureMode{{}, ReturnError()} {
					db := newModelDB(hourly)
					db.set(c.away)
					l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode})
					for range 2 * breakerFailures {
						_, err := l.Allow(t.Context(), "key")
						require.Error(t, err)
					}
					asked, _ := db.counts()
					require.GreaterOrEqual(t, asked, 2*breakerFailures, "there is no breaker")
				}
			})
		})
	}
}

// Wrong keys and costs, contexts that have ended, transactions of the caller's and resets are no matter of OnFailure.
func TestWhatStaysAnErrorInAnOutage(t *testing.T) {
	t.Parallel()
	pg := pgtest.New(t)
	synctest.Test(t, func(t *testing.T) {
		for _, mode := range modes {
			db := newModelDB(hourly)
			l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode})
			open(t, l, db)
			_, err := l.Allow(t.Context(), "")
			require.ErrorIs(t, err, ErrInvalidKey)
			_, err = l.AllowN(t.Context(), "key", 101)
			require.ErrorIs(t, err, ErrCostExceedsLimit)
			_, err = l.AllowN(t.Context(), "key", -1)
			require.ErrorIs(t, err, ErrInvalidCost)
			gone, leave := context.WithCancel(t.Context())
			leave()
			_, err = l.Allow(gone, "key")
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, l.Reset(t.Context(), "key"), ErrUnavailable)
		}
	})
	for _, mode := range modes {
		l := newLimiter(t, pg.Pool, Config{Name: "test", Policy: hourly, OnFailure: mode})
		tx := begin(t, pg)
		require.NoError(t, tx.Conn().Close(t.Context()))
		for range breakerFailures + 1 {
			_, err := l.AllowTx(t.Context(), tx, "key")
			require.ErrorIs(t, err, ErrUnavailable)
		}
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source, "a transaction's failures do not count")
	}
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	for source, mode := range modes {
		t.Run(source.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log strings.Builder
				var events []BreakerEvent
				db := newModelDB(hourly)
				l := newLimiter(t, db, Config{
					Name: "test", Policy: hourly, OnFailure: mode, MaxInFlight: 1,
					Logger:   slog.New(slog.NewTextHandler(&log, nil)),
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
					for range breakerFailures - 1 {
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
				elapse(breakerPause - 1)
				allow(source)
				asked, _ = db.counts()
				require.Zero(t, asked)

				// Each probe that fails begins another pause.
				for probes := 1; probes <= 5; probes++ {
					elapse(1)
					allow(source)
					allow(source)
					elapse(breakerPause - 1)
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
				elapse(breakerPause - 1)
				db.set(nil)
				allow(source)
				elapse(1)
				allow(SourceDatabase)
				allow(SourceDatabase)

				require.Len(t, events, 2)
				require.True(t, events[0].Open)
				require.ErrorIs(t, events[0].Err, ErrUnavailable)
				require.Equal(t, BreakerEvent{Limiter: "test"}, events[1])
				require.Equal(t, 2, strings.Count(log.String(), "\n"), log.String())
				require.Contains(t, log.String(), "level=WARN msg=\"ratelimit: Postgres is away or slow\" limiter=test \"until it is back\"=\""+mode.String())
				require.Contains(t, log.String(), "level=INFO msg=\"ratelimit: Postgres decides again\" limiter=test after=4.")
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
		db := newModelDB(hourly)
		db.set(silent)
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailOpen(), Timeout: 100 * time.Millisecond})
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
		require.LessOrEqual(t, asked, breakerFailures+2+2) // two in flight, and a probe each 600 ms
		require.LessOrEqual(t, atOnce, 2)
	})
}

// What waits in the queue when the breaker opens is answered then, and not sent.
func TestBreakerTurnsAwayTheQueue(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB(hourly)
		db.set(func(ctx context.Context) error {
			elapse(time.Millisecond)
			return turnedAway(ctx)
		})
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailClosed(), MaxBatch: 1, MaxInFlight: 1})
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
		require.Equal(t, breakerFailures*time.Millisecond, time.Since(began))
		asked, _ := db.counts()
		require.Equal(t, breakerFailures, asked)
	})
}

// Callers who leave are no failures, and a probe whose caller leaves is a probe all the same.
func TestBreakerDoesNotCountCallersWhoLeave(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB(hourly)
		slow := func(context.Context) error {
			elapse(10 * time.Millisecond)
			return nil
		}
		db.set(slow)
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailOpen()})
		leave := func() {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			_, err := l.Allow(ctx, "key")
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		for range 10 * breakerFailures {
			leave()
		}
		require.False(t, l.breaker.open())
		synctest.Wait()

		open(t, l, db)
		db.set(slow)
		elapse(breakerPause)
		leave()
		require.True(t, l.breaker.open())
		elapse(10 * time.Millisecond)
		synctest.Wait()
		require.False(t, l.breaker.open())
	})
}

// Behind statements that hang, a probe may wait for too long to be sent. The next one comes all the same.
func TestBreakerSurvivesTheLossOfAProbe(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB(hourly)
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailOpen()})
		open(t, l, db)
		elapse(breakerPause)
		_, probe := l.breaker.pass() // and nobody reports
		require.True(t, probe)
		db.set(nil)
		elapse(time.Second + breakerPause - 1)
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
		b := newBreaker(Config{OnFailure: FailOpen(), Timeout: time.Second})
		away := storeError(errors.New("broken"), true)
		for range breakerFailures {
			b.report(away, false)
		}
		b.report(nil, false)
		require.True(t, b.open())
		elapse(breakerPause)
		_, probe := b.pass()
		require.True(t, probe)
		b.report(away, false)
		elapse(breakerPause)
		_, probe = b.pass()
		require.False(t, probe, "the first probe is still out")
		b.report(waitError(context.Canceled), true)
		require.True(t, b.open(), "the probe never came to a statement")
		b.report(nil, true)
		require.False(t, b.open())
	})
}

// With a single connection, calls take turns. Those that wait for theirs are answered as soon as the breaker opens.
func TestOnFailureOfASingleConnection(t *testing.T) {
	t.Parallel()
	pg := pgtest.New(t)
	conn := connect(t, pg)
	l := newLimiter(t, conn, Config{Name: "test", Policy: hourly, OnFailure: FailClosed(), Timeout: amply})
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, SourceDatabase, result.Source)
	require.NoError(t, conn.Close(t.Context()))
	together(20, func(int) {
		result, err := l.Allow(t.Context(), "key")
		if err != nil || result.Source != SourceFailedClosed {
			t.Error(result, err)
		}
	})
	require.True(t, l.breaker.open())
	result, err = l.askDatabase(t.Context(), "key", 1, nil, false)
	require.Zero(t, result)
	require.ErrorIs(t, err, errNotTried)
}

// Whatever waits for its turn on a connection is not asked if the breaker has opened in the meantime.
func TestBreakerOpensDuringTheWaitForATurn(t *testing.T) {
	t.Parallel()
	conn := connect(t, pgtest.New(t))
	l := newLimiter(t, conn, Config{Name: "test", Policy: hourly, OnFailure: FailClosed(), Timeout: amply})
	calls := map[string]func() error{
		"AllowAll": func() error { _, err := AllowAll(context.Background(), l.Request("key", 1)); return err },
		"Refund":   func() error { _, err := l.give(context.Background(), "key", 1, []take{{units: 1}}); return err },
		"Grant":    func() error { _, err := l.Grant(context.Background(), "key", 1); return err },
		"Allow": func() error {
			result, err := l.Allow(context.Background(), "key")
			if err == nil && result.Source == SourceFailedClosed {
				err = errNotTried
			}
			return err
		},
	}
	var wg sync.WaitGroup
	l.single.Lock()
	for name, call := range calls {
		wg.Go(func() {
			if err := call(); !errors.Is(err, errNotTried) {
				t.Error(name, err)
			}
		})
	}
	waitUntil(t, func() bool {
		stacks := make([]byte, 1<<20)
		waiting := 0
		for stack := range strings.SplitSeq(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, t.Name()) && strings.Contains(stack, "lockSlow") {
				waiting++
			}
		}
		return waiting == len(calls)
	})
	for range breakerFailures {
		l.breaker.report(turnedAwayError(), false)
	}
	require.True(t, l.breaker.open())
	l.single.Unlock()
	wg.Wait()
}

func turnedAwayError() error { return storeError(turnedAway(context.Background()), true) }

func TestFailedClosedIsARetryableDenial(t *testing.T) {
	t.Parallel()
	db := newModelDB(hourly)
	db.set(turnedAway)
	l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailClosed()})
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), result.DecidedAt, amply)
	result.DecidedAt = time.Time{}
	require.Equal(t, Result{Source: SourceFailedClosed, Limit: 100, RetryAfter: breakerPause}, result)
}

// A key has its share once for a window, over any number of outages, beside what the database grants it.
func TestFallbackGrantsItsShareAndNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, policy := range []Policy{
			FixedWindow{Limit: 100, Window: time.Hour},
			SlidingWindow{Limit: 100, Window: time.Hour},
			TokenBucket{Capacity: 100, Refill: 1, Every: time.Hour},
		} {
			db := newModelDB(policy)
			l := newLimiter(t, db, Config{Name: "test", Policy: policy, OnFailure: FallbackLocal(0.07), NoDenialCache: true})
			admitted := map[Source]int{}
			allow := func(n int) {
				for range n {
					result, err := l.Allow(t.Context(), "key")
					require.NoError(t, err)
					if result.Allowed {
						admitted[result.Source]++
					}
				}
			}
			allow(30)
			for range 3 {
				open(t, l, db)
				allow(5)
				db.set(nil)
				elapse(breakerPause)
				allow(1)
				require.False(t, l.breaker.open())
			}
			allow(100)
			require.Equal(t, map[Source]int{SourceDatabase: 100, SourceFallback: 7}, admitted)

			open(t, l, db)
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			require.Equal(t, SourceFallback, result.Source)
			require.Equal(t, int64(100), result.Limit)
			elapse(result.RetryAfter - time.Microsecond)
			allow(1)
			require.Equal(t, 7, admitted[SourceFallback])
			elapse(time.Microsecond)
			allow(1)
			require.Equal(t, 8, admitted[SourceFallback])
		}
	})
}

// AllowAll is not answered by OnFailure; but it fails at once while the breaker is open, and is a probe as good as any.
func TestAllowAllInAnOutage(t *testing.T) {
	t.Parallel()
	pg := pgtest.New(t)
	for name, db := range map[string]DBTX{"pool": pg.Pool, "connection": connect(t, pg)} {
		l := newLimiter(t, db, Config{Name: name, Policy: hourly, OnFailure: FailOpen(), Timeout: amply})
		for range breakerFailures {
			l.breaker.report(storeError(errors.New("broken"), true), false)
		}
		_, err := AllowAll(t.Context(), l.Request("key", 1))
		require.ErrorIs(t, err, errNotTried)
		l.breaker.begin = l.breaker.begin.Add(-breakerPause)
		results, err := AllowAll(t.Context(), l.Request("key", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.False(t, l.breaker.open())
	}
}
