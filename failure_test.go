package ratelimit

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// turnedAway is how a stopped server answers, at once; silent is one that does not.
func turnedAway(context.Context) error {
	return &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03"}
}
func silent(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// elapse lets time pass, in a bubble of synctest.
func elapse(d time.Duration) { <-time.After(d) }

func fatal(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: code} }
}

func sqlState(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: code} }
}

// rowHeld is what a statement meets that has waited for a row in vain.
func rowHeld(ctx context.Context) error {
	<-time.After(time.Millisecond)
	return sqlState("55P03")(ctx)
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
		"wraparound":        {sqlState("54000"), true},
		"statement timeout": {sqlState("57014"), true},
		"row held":          {rowHeld, false},
		"not migrated":      {sqlState("42883"), false},
		"not permitted":     {sqlState("42501"), false},
		"refused log-in":    {fatal("28P01"), false},
		"no database":       {fatal("3D000"), false},
		"not prepared":      {sqlState("26000"), false},
		"any other error":   {sqlState("XX000"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				for source, mode := range modes {
					db := newModelDB()
					db.set(c.away)
					l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode})
					for range 2 * engine.BreakerFailures {
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
					require.Equal(t, c.outage, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
				}
				for _, mode := range []FailureMode{{}, ReturnError()} {
					db := newModelDB()
					db.set(c.away)
					l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: mode})
					for range 2 * engine.BreakerFailures {
						_, err := l.Allow(t.Context(), "key")
						require.Error(t, err)
					}
					asked, _ := db.counts()
					require.GreaterOrEqual(t, asked, 2*engine.BreakerFailures, "there is no breaker")
				}
			})
		})
	}
}

// Wrong keys and costs, contexts that have ended, transactions of the caller's and resets are no matter of OnFailure.
func TestWhatStaysAnErrorInAnOutage(t *testing.T) {
	t.Parallel()
	postgres := pgtest.New(t)
	synctest.Test(t, func(t *testing.T) {
		for _, mode := range modes {
			db := newModelDB()
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
		l := newLimiter(t, postgres.Pool, Config{Name: "test", Policy: hourly, OnFailure: mode})
		tx := pgtest.Begin(t, postgres)
		require.NoError(t, tx.Conn().Close(t.Context()))
		for range engine.BreakerFailures + 1 {
			_, err := l.WithTx(tx).Allow(t.Context(), "key")
			require.ErrorIs(t, err, ErrUnavailable)
		}
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source, "a transaction's failures do not count")
	}
}

// With a single connection, calls take turns. Those that wait for theirs are answered as soon as the breaker opens.
func TestOnFailureOfASingleConnection(t *testing.T) {
	t.Parallel()
	postgres := pgtest.New(t)
	conn := pgtest.Connect(t, postgres)
	l := newLimiter(
		t,
		conn,
		Config{Name: "test", Policy: hourly, OnFailure: FailClosed()},
	)
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, SourceDatabase, result.Source)
	require.NoError(t, conn.Close(t.Context()))
	testkit.Together(20, func(int) {
		result, err := l.Allow(t.Context(), "key")
		if err != nil || result.Source != SourceFailedClosed {
			t.Error(result, err)
		}
	})
	require.True(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	require.ErrorIs(t, l.client.engine.Queues.First().Submit(t.Context(), l.newRequest("key", 1)), engine.ErrNotTried)
}

func TestFailedClosedIsARetryableDenial(t *testing.T) {
	t.Parallel()
	db := newModelDB()
	db.set(turnedAway)
	l := newLimiter(t, db, Config{Name: "test", Policy: hourly, OnFailure: FailClosed()})
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), result.DecidedAt, amply)
	result.DecidedAt = time.Time{}
	require.Equal(t, Result{Source: SourceFailedClosed, Limit: 100, RetryAfter: engine.BreakerPause}, result)
}

// A key has its share once for a window, over any number of outages, beside what the database grants it.
func TestFallbackGrantsItsShareAndNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, policy := range []single{
			FixedWindow{Limit: 100, Window: time.Hour},
			SlidingWindow{Limit: 100, Window: time.Hour},
			TokenBucket{Capacity: 100, Refill: 1, Every: time.Hour},
		} {
			db := newModelDB()
			l := newLimiter(
				t,
				db,
				Config{Name: "test", Policy: policy, OnFailure: FallbackLocal(0.07), NoDenialCache: true},
			)
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
				elapse(engine.BreakerPause)
				allow(1)
				require.False(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
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
	postgres := pgtest.New(t)
	for name, db := range map[string]DBTX{"pool": postgres.Pool, "connection": pgtest.Connect(t, postgres)} {
		l := newLimiter(
			t,
			db,
			Config{Name: name, Policy: hourly, OnFailure: FailOpen()},
		)
		for range engine.BreakerFailures {
			l.client.engine.Batcher.Breaker.Report(engine.KindEphemeral, pg.Translate(errors.New("broken"), true), false)
		}
		_, err := AllowAll(t.Context(), l.Request("key", 1))
		require.ErrorIs(t, err, engine.ErrNotTried)
		l.client.engine.Batcher.Breaker.Begin = l.client.engine.Batcher.Breaker.Begin.Add(-engine.BreakerPause)
		results, err := AllowAll(t.Context(), l.Request("key", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.False(t, l.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	}
}
