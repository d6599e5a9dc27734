package engine_test

import (
	"context"
	"errors"
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

func silent(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }

// rowHeld returns the error of a statement that has waited for a locked row in vain.
func rowHeld(ctx context.Context) error {
	<-time.After(50 * time.Millisecond)
	return limitertest.SQLState("55P03")(ctx)
}

func TestWhatIsAnOutage(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		away   func(context.Context) error
		outage bool
	}{
		"refused":           {limitertest.TurnedAway, true},
		"silent":            {silent, true},
		"broken":            {func(context.Context) error { return errors.New("unexpected EOF") }, true},
		"ended":             {limitertest.SQLState("57P01"), true},
		"no connections":    {limitertest.SQLState("53300"), true},
		"read-only":         {limitertest.SQLState("25006"), true},
		"wraparound":        {limitertest.SQLState("54000"), true},
		"statement timeout": {limitertest.SQLState("57014"), true},
		"row held":          {rowHeld, false},
		"not migrated":      {limitertest.SQLState("42883"), false},
		"not permitted":     {limitertest.SQLState("42501"), false},
		"refused log-in":    {limitertest.Fatal("28P01"), false},
		"no database":       {limitertest.Fatal("3D000"), false},
		"not prepared":      {limitertest.SQLState("26000"), false},
		"any other error":   {limitertest.SQLState("XX000"), false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				for source, mode := range limitertest.Modes {
					db := limitertest.NewModelDB()
					db.Set(c.away)
					l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode})
					for range 2 * engine.BreakerFailures {
						result, err := l.Allow(t.Context(), "key")
						now := time.Now()
						peeked, peekErr := l.Peek(t.Context(), "key")
						if !c.outage {
							require.Error(t, err)
							if name == "row held" { // a look never waits for a row, so the table must be locked
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
						require.Equal(t, source != ratelimit.SourceFailedClosed, result.Allowed)
						require.Equal(t, source != ratelimit.SourceFailedClosed, peeked.Allowed)
						require.Equal(t, int64(100), result.Limit)
						require.Equal(t, now, result.DecidedAt)
					}
					require.Equal(t, c.outage, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
				}
				for _, mode := range []ratelimit.FailureMode{{}, ratelimit.ReturnError()} {
					db := limitertest.NewModelDB()
					db.Set(c.away)
					l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode})
					for range 2 * engine.BreakerFailures {
						_, err := l.Allow(t.Context(), "key")
						require.Error(t, err)
					}
					asked, _ := db.Counts()
					require.GreaterOrEqual(t, asked, 2*engine.BreakerFailures, "there is no breaker")
				}
			})
		})
	}
}

// OnFailure does not answer wrong keys or costs, ended contexts, calls in callers' transactions, and resets.
func TestWhatStaysAnErrorInAnOutage(t *testing.T) {
	t.Parallel()
	postgres := pgtest.New(t)
	synctest.Test(t, func(t *testing.T) {
		for _, mode := range limitertest.Modes {
			db := limitertest.NewModelDB()
			l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode})
			open(t, l, db)
			_, err := l.Allow(t.Context(), "")
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
			_, err = l.AllowN(t.Context(), "key", 101)
			require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
			_, err = l.AllowN(t.Context(), "key", -1)
			require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
			gone, leave := context.WithCancel(t.Context())
			leave()
			_, err = l.Allow(gone, "key")
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, l.Reset(t.Context(), "key"), ratelimit.ErrUnavailable)
		}
	})
	for _, mode := range limitertest.Modes {
		l := limitertest.New(t, postgres.Pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode})
		tx := pgtest.Begin(t, postgres)
		require.NoError(t, tx.Conn().Close(t.Context()))
		for range engine.BreakerFailures + 1 {
			_, err := l.WithTx(tx).Allow(t.Context(), "key")
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		}
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source, "a transaction's failures do not count")
	}
}

// When the breaker opens, calls that wait for their turn on a single connection are answered at once.
func TestOnFailureOfASingleConnection(t *testing.T) {
	t.Parallel()
	postgres := pgtest.New(t)
	conn := pgtest.Connect(t, postgres)
	l := limitertest.New(
		t,
		conn,
		ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailClosed()},
	)
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceDatabase, result.Source)
	require.NoError(t, conn.Close(t.Context()))
	testkit.Together(20, func(int) {
		result, err := l.Allow(t.Context(), "key")
		if err != nil || result.Source != ratelimit.SourceFailedClosed {
			t.Error(result, err)
		}
	})
	breaker := limitertest.Engine(l).Batcher.Breaker
	require.True(t, breaker.IsOpen(engine.KindEphemeral))
	breaker.Begin = breaker.Begin.Add(testkit.Amply) // so it is not yet the time for a probe
	require.ErrorIs(t, limitertest.Engine(l).Queues.First().Submit(t.Context(), newRequest(l, "key", 1)), engine.ErrNotTried)
}

func TestFailedClosedIsARetryableDenial(t *testing.T) {
	t.Parallel()
	db := limitertest.NewModelDB()
	db.Set(limitertest.TurnedAway)
	l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailClosed()})
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.WithinDuration(t, time.Now(), result.DecidedAt, testkit.Amply)
	result.DecidedAt = time.Time{}
	require.Equal(t, ratelimit.Result{Source: ratelimit.SourceFailedClosed, Limit: 100, RetryAfter: engine.BreakerPause}, result)
}

// The fallback grants a key its share once in each window, for any number of outages, on top of the database's grants.
func TestFallbackGrantsItsShareAndNoMore(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, policy := range []ratelimit.Policy{
			ratelimit.FixedWindow{Limit: 100, Window: time.Hour},
			ratelimit.SlidingWindow{Limit: 100, Window: time.Hour},
			ratelimit.TokenBucket{Capacity: 100, Refill: 1, Every: time.Hour},
		} {
			db := limitertest.NewModelDB()
			l := limitertest.New(
				t,
				db,
				ratelimit.Config{Name: "test", Policy: policy, OnFailure: ratelimit.FallbackLocal(0.07), NoDenialCache: true},
			)
			admitted := map[ratelimit.Source]int{}
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
				db.Set(nil)
				limitertest.Elapse(engine.BreakerPause)
				allow(1)
				require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
			}
			allow(100)
			require.Equal(t, map[ratelimit.Source]int{ratelimit.SourceDatabase: 100, ratelimit.SourceFallback: 7}, admitted)

			open(t, l, db)
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			require.Equal(t, ratelimit.SourceFallback, result.Source)
			require.Equal(t, int64(100), result.Limit)
			limitertest.Elapse(result.RetryAfter - time.Microsecond)
			allow(1)
			require.Equal(t, 7, admitted[ratelimit.SourceFallback])
			limitertest.Elapse(time.Microsecond)
			allow(1)
			require.Equal(t, 8, admitted[ratelimit.SourceFallback])
		}
	})
}

// While the breaker is open, AllowAll fails at once, unless the call is a probe. OnFailure does not answer AllowAll.
func TestAllowAllInAnOutage(t *testing.T) {
	t.Parallel()
	postgres := pgtest.New(t)
	for name, db := range map[string]ratelimit.DBTX{"pool": postgres.Pool, "connection": pgtest.Connect(t, postgres)} {
		l := limitertest.New(
			t,
			db,
			ratelimit.Config{Name: name, Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()},
		)
		breaker := limitertest.Engine(l).Batcher.Breaker
		for range engine.BreakerFailures {
			breaker.Record(engine.KindEphemeral, pg.Translate(errors.New("broken"), true), false)
		}
		breaker.Begin = breaker.Begin.Add(testkit.Amply) // so it is not yet the time for a probe
		_, err := ratelimit.AllowAll(t.Context(), l.Request("key", 1))
		require.ErrorIs(t, err, engine.ErrNotTried)
		breaker.Begin = breaker.Begin.Add(-testkit.Amply - engine.BreakerPause)
		results, err := ratelimit.AllowAll(t.Context(), l.Request("key", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.False(t, breaker.IsOpen(engine.KindEphemeral))
	}
}
