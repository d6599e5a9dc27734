package engine_test

import (
	"context"
	"math/rand/v2"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// hangs returns a statement that ends after the time d, or when its context ends.
func hangs(d time.Duration) func(context.Context) error {
	return func(ctx context.Context) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// A lone caller sends its statement itself, and gets the decision even if its context ends during the statement. If the
// database hangs, the caller leaves after Grace, and later callers leave at once.
func TestLoneCallerWaitsForItsStatement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		l := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 1000, Window: time.Hour}, OnFailure: ratelimit.FailOpen(),
		})
		interrupted := 0
		hangs := func(d time.Duration) func(context.Context) error {
			return func(ctx context.Context) error {
				err := hangs(d)(ctx)
				if err != nil {
					interrupted++
				}
				return err
			}
		}
		leave := func() (ratelimit.Result, time.Duration, error) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			began := time.Now()
			result, err := l.Allow(ctx, "key")
			return result, time.Since(began), err
		}
		prompt := func() {
			limitertest.Elapse(time.Second) // until no statement hangs
			synctest.Wait()
			db.Set(nil)
			for range engine.AloneAfter {
				result, err := l.Allow(t.Context(), "key")
				require.NoError(t, err)
				require.True(t, result.Allowed)
				synctest.Wait()
			}
		}

		db.Set(hangs(500 * time.Millisecond))
		_, took, err := leave()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Millisecond, took, "nothing is known of the database yet")
		for range 2 * engine.BreakerFailures {
			prompt()
			db.Set(hangs(engine.Grace))
			result, took, err := leave()
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, engine.Grace, took)

			prompt()
			require.Zero(t, interrupted)
			db.Set(hangs(500 * time.Millisecond))
			result, took, err = leave()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Zero(t, result)
			require.Equal(t, time.Millisecond+engine.Grace, took)
			require.Equal(t, 1, interrupted)
			for range 5 {
				_, took, err = leave()
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, time.Millisecond, took)
			}
			prompt()
			require.Equal(t, 1, interrupted, "one caller's connection, and no other")
			require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
			interrupted = 0
		}
	})
}

// After a lone caller's context has ended, all its further statements together may take Grace.
func TestLoneCallerWhoLeavesBeforeTheLastStatement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
		for range engine.AloneAfter {
			_, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			synctest.Wait()
		}
		statements := 0
		db.Set(func(ctx context.Context) error {
			if statements++; statements > 1 {
				return hangs(time.Minute)(ctx)
			}
			limitertest.Elapse(engine.Grace / 2)
			return limitertest.SQLState("55P03")(ctx)
		})
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err := l.Allow(ctx, "key")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, time.Millisecond+engine.Grace, time.Since(began))
		require.Equal(t, 2, statements)
	})
}

// If an application's observer panics in a caller's goroutine, later calls still work.
func TestLoneCallerWhoPanics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		panics := false
		l := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{
			Name: "test", Policy: limitertest.Hourly,
		}, ratelimit.ClientConfig{Observer: &ratelimit.Observer{Statement: func(ratelimit.StatementEvent) {
			if panics {
				panic("the observer does")
			}
		}}})
		for range 3 {
			for range engine.AloneAfter {
				_, err := l.Allow(t.Context(), "key")
				require.NoError(t, err)
				synctest.Wait()
			}
			panics = true
			require.PanicsWithValue(t, "the observer does", func() { _, _ = l.Allow(t.Context(), "key") })
			panics = false
		}
		began := time.Now()
		_, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Zero(t, time.Since(began))
	})
}

// If a statement takes unusually long, the waiting requests are sent after TooLong in a second statement. If statements
// are short, the waiting requests are sent in the next statement.
func TestSecondStatementLeavesBesideASlowOne(t *testing.T) {
	t.Parallel()
	for took, atOnce := range map[time.Duration]int{engine.TooLong - 2*time.Millisecond: 1, 10 * engine.TooLong: 2} {
		synctest.Test(t, func(t *testing.T) {
			db := limitertest.NewModelDB()
			l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{MaxInFlight: 2})
			takes := 100 * time.Microsecond // the duration of the first statement
			db.Set(func(context.Context) error {
				limitertest.Elapse(takes)
				return nil
			})
			_, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			synctest.Wait()
			takes = took
			db.Set(db.Away)
			done := make(chan error)
			begin := func() {
				go func() {
					_, err := l.Allow(t.Context(), "key")
					done <- err
				}()
				synctest.Wait()
			}
			begin()
			limitertest.Elapse(time.Millisecond)
			for range 50 { // a request waits all the time
				begin()
				if took > engine.TooLong && db.Statements() == 1 {
					limitertest.Elapse(engine.TooLong)
					synctest.Wait()
					require.Equal(t, 2, db.Statements(), "it has waited for long enough")
				}
				require.NoError(t, <-done)
			}
			require.NoError(t, <-done)
			_, most := db.Counts()
			require.Equal(t, atOnce, most)
		})
	}
}

// Many waiting requests are sent while another statement is under way. Requests for few keys wait, because both
// statements would need the same rows.
func TestSecondStatementLeavesForManyKeys(t *testing.T) {
	t.Parallel()
	for keys, atOnce := range map[int]int{1: 1, 2: 1, 3 * engine.Enough: 2} {
		synctest.Test(t, func(t *testing.T) {
			db := limitertest.NewModelDB()
			l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour}}, ratelimit.ClientConfig{MaxInFlight: 2})
			ask := func(i int) {
				_, err := l.Allow(t.Context(), strconv.Itoa(i%keys))
				require.NoError(t, err)
			}
			for range 3 { // the first statement shows how many keys there are
				db.Set(func(context.Context) error {
					limitertest.Elapse(100 * time.Microsecond)
					return nil
				})
				var first sync.WaitGroup
				first.Go(func() { ask(0) })
				synctest.Wait() // until the first statement is under way
				testkit.Together(3*engine.Enough, ask)
				first.Wait()
				synctest.Wait()
			}
			_, most := db.Counts()
			require.Equal(t, atOnce, most, keys)
		})
	}
}

// Callers send their own statements, wait for statements of other callers, and leave at any moment. Every caller gets
// an answer in time, and no goroutine is left at the end.
func TestFewCallersWhoLeave(t *testing.T) {
	t.Parallel()

	seed := limitertest.Seed(t)
	for story := range uint64(100 * limitertest.Rounds(t)) {
		synctest.Test(t, func(t *testing.T) {
			db := limitertest.NewModelDB()
			l := limitertest.New(t, db, ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 1 << 16, Window: limitertest.Year}, OnFailure: ratelimit.FailOpen(),
			}, ratelimit.ClientConfig{MaxInFlight: 1 + int(story%2)})
			db.Set(func(ctx context.Context) error {
				ms := [...]int{0, 1, 1, 2, 2, 3, 30, 400}[rand.IntN(8)]
				return hangs(time.Duration(ms) * time.Millisecond)(ctx)
			})
			var allowed atomic.Int64
			var callers sync.WaitGroup
			for i := range 1 + story%4 {
				r := rand.New(rand.NewPCG(seed, 10*story+i))
				callers.Go(func() {
					for range 50 {
						patience := time.Duration(1+r.IntN(4)) * time.Millisecond
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						began := time.Now()
						result, err := l.Allow(ctx, "key")
						cancel()
						if err != nil {
							require.ErrorIs(t, err, context.DeadlineExceeded)
						} else if result.Source == ratelimit.SourceDatabase {
							allowed.Add(1)
						}
						require.LessOrEqual(t, time.Since(began), patience+engine.Grace)
						limitertest.Elapse(time.Duration(r.IntN(3)) * time.Millisecond)
					}
				})
			}
			callers.Wait()
			limitertest.Elapse(time.Second)
			synctest.Wait()
			q := limitertest.Engine(l).Queues.First()
			require.Zero(t, q.InFlight)
			require.Zero(t, q.Waiting)
			require.Empty(t, q.Turns)
			require.GreaterOrEqual(t, db.Taken(), allowed.Load()) // some callers had left before the answer
			db.Set(nil)
			began := time.Now()
			_, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Zero(t, time.Since(began))
		})
	}
}

// Callers send their own statements only if no other calls come, and if the database answers promptly.
func TestWhoIsAlone(t *testing.T) {
	t.Parallel()

	b := newBoard(500)
	q := b.queue
	q.MaxInFlight, q.Batcher = 2, &engine.Batcher{Begin: time.Now()}
	k := engine.KindEphemeral
	ask := func(n int, took time.Duration, waitMeanwhile int) (alone bool) {
		t.Helper()
		requests := b.push("login", 5, n, 1)
		alone = q.IsAlone(requests[0])
		require.NotNil(t, q.Board())
		b.push("login", 5, waitMeanwhile, 1)
		q.Lands(k, took)
		if waitMeanwhile > 0 {
			b.next()
		}
		return alone
	}
	lonely := func() {
		t.Helper()
		for range engine.AloneAfter {
			require.False(t, ask(1, time.Millisecond, 0))
		}
		require.True(t, ask(1, time.Millisecond, 0))
	}
	lonely()
	require.True(t, ask(1, time.Millisecond, 1), "somebody comes meanwhile")
	lonely()
	require.False(t, ask(2, time.Millisecond, 0), "two leave together")
	lonely()
	require.True(t, ask(1, 2*engine.TooLong, 0), "it takes long")
	require.False(t, ask(1, time.Millisecond, 0))
	require.True(t, ask(1, time.Millisecond, 0), "it is prompt again")

	probe := b.push("login", 5, 1, 1)[0]
	require.True(t, q.IsAlone(probe))
	probe.Probe = true
	require.False(t, q.IsAlone(probe))
	probe.Probe = false
	probe.Space.Lease = &engine.LeaseTerms{}
	require.False(t, q.IsAlone(probe), "the keys are leased")
	probe.Space.Lease = nil
	q.InFlight++
	require.False(t, q.IsAlone(probe), "another statement is under way")
	q.InFlight--
	b.push("login", 5, 1, 1)
	require.False(t, q.IsAlone(probe), "another one waits")
}
