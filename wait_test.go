package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestWaitFailsAtOnceIfTheDeadlineIsTooSoon(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		w := limitertest.NewWaits(t)
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithDeadline(t.Context(), w.Begin.Add(d))
			t.Cleanup(cancel)
			return ctx
		}
		refused := func(who int, at time.Duration) {
			t.Helper()
			told := w.Told()
			require.NotEmpty(t, told)
			last := told[len(told)-1]
			require.Equal(t, who, last.Who)
			require.Equal(t, at, last.At)
			var tooSoon *ratelimit.WaitError
			require.ErrorAs(t, last.Err, &tooSoon)
			require.ErrorIs(t, last.Err, ratelimit.ErrWouldExceedDeadline)
			require.NotErrorIs(t, last.Err, context.DeadlineExceeded)
			require.NotContains(t, last.Err.Error(), "key")
			require.Zero(t, last.Result)
		}
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)

		w.Begin = time.Now()
		w.Add(within(testkit.Amply/2), limiter, 0, 3) // the first caller must ask the database
		<-time.After(time.Millisecond)
		synctest.Wait()
		refused(0, time.Millisecond)

		w.Add(within(2*testkit.Amply), limiter, 1, 5) // can wait
		<-time.After(time.Second)
		synctest.Wait()
		statements := db.Statements()
		// The wait would be too long, and this process knows that without the database.
		w.Add(within(testkit.Amply/2), limiter, 2, 5)
		refused(2, time.Second+time.Millisecond)
		w.Add(within(testkit.Amply/2), limiter, 3, 1) // would fit, but is in line behind a caller that waits
		refused(3, time.Second+time.Millisecond)
		require.Equal(t, statements, db.Statements())
		w.Add(within(2*testkit.Amply), limiter, 4, 1)
		ended := w.All(limiter)
		require.Equal(t, []int{0, 2, 3, 1, 4}, limitertest.WhoOf(ended))
		require.NoError(t, ended[3].Err)
		require.NoError(t, ended[4].Err)
		require.EqualValues(t, 8+5+1, db.Taken())

		retry, ok := errors.AsType[*ratelimit.WaitError](ended[0].Err)
		require.True(t, ok)
		require.Equal(
			t,
			59999*time.Millisecond,
			retry.RetryAfter,
		) // the window began one statement before the decision
		require.True(t, retry.Deadline.Equal(w.Begin.Add(testkit.Amply/2)))
	})
}

func TestWaitAsksNothingForWhatCannotBe(t *testing.T) {
	t.Parallel()

	limiter := limitertest.New(t, unusedPool(t), policy(ratelimit.FixedWindow{Limit: 10, Window: time.Minute}))
	_, err := limiter.WaitN(t.Context(), "key", 11)
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
	_, err = limiter.WaitN(t.Context(), "key", -1)
	require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
	_, err = limiter.Wait(t.Context(), "")
	require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = limiter.Wait(ctx, "key")
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, limitertest.Lines(limiter).Empty())
}

// All waiting callers get the error. If each caller asked again, the last caller would wait for several timeouts.
func TestErrorEndsTheWaitOfAllInTheLine(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		w := limitertest.NewWaits(t)
		db.Set(func(ctx context.Context) error {
			db.Set(nil)
			limitertest.Elapse(time.Millisecond)
			return limitertest.SQLState("57P01")(ctx)
		})
		for who := range 3 {
			w.Add(t.Context(), limiter, who, 4)
		}
		for _, e := range w.All(limiter) {
			require.ErrorIs(t, e.Err, ratelimit.ErrUnavailable)
		}
		w = limitertest.NewWaits(t)
		w.Add(t.Context(), limiter, 3, 4)
		require.NoError(t, w.All(limiter)[0].Err)
	})
}

// WaitN with n = 0 waits until 1 would fit, and takes nothing.
func TestWaitForRoom(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		w := limitertest.NewWaits(t)
		for who, n := range []int64{0, 2, 0, 0, 2, 0} {
			w.Add(t.Context(), limiter, who, n)
		}
		ended := w.All(limiter)
		require.Equal(t, limitertest.UpTo(6), limitertest.WhoOf(ended))
		for who, window := range []time.Duration{0, 0, 1, 1, 1, 2} {
			require.NoError(t, ended[who].Err)
			require.Equal(t, window, ended[who].At/time.Minute)
		}
		require.EqualValues(t, 4, db.Taken())
	})
}

func TestResetEndsTheWait(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, conn := range map[string]ratelimit.DBTX{"pool": db.Pool, "connection": pgtest.Connect(t, db)} {
		limiter := limitertest.New(
			t,
			conn,
			ratelimit.Config{
				Name:   name,
				Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year},
			},
			ratelimit.ClientConfig{DenialMaxAge: testkit.Amply},
		)
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		waiter := testkit.Later(func() (ratelimit.Result, error) { return limiter.Wait(t.Context(), "key") })
		testkit.WaitUntil(t, func() bool {
			_, _, known := limitertest.Lines(limiter).Waiting("key")
			return known
		})
		require.NoError(t, limiter.Reset(t.Context(), "another key"))
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		result, err := waiter()
		require.NoError(t, err)
		require.True(t, result.Allowed)
	}
}

// After Wait has returned, even with an error, the caller can use its single connection.
func TestWaitOnOneConnection(t *testing.T) {
	t.Parallel()

	conn := pgtest.Connect(t, pgtest.New(t))
	limiter := limitertest.New(
		t,
		conn,
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: time.Millisecond},
		},
	)
	for i := range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*10*time.Microsecond)
		_, err := limiter.Wait(ctx, fmt.Sprint("key ", i%2))
		cancel()
		if err != nil && !errors.Is(err, ratelimit.ErrWouldExceedDeadline) {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, 1, pgtest.Scalar[int](t, conn, "SELECT 1"))
	}
}

// While Postgres is unreachable, Wait follows OnFailure: it admits, waits for Postgres, or admits a share of the limit.
func TestWaitFollowsOnFailure(t *testing.T) {
	t.Parallel()

	for mode, meanwhile := range map[ratelimit.FailureMode]int{ratelimit.FailOpen(): 20, ratelimit.FailClosed(): 0, ratelimit.FallbackLocal(0.5): 2 * 3} {
		synctest.Test(t, func(t *testing.T) {
			policy := ratelimit.FixedWindow{Limit: 4, Window: time.Second}
			db := limitertest.NewModelDB()
			db.Set(limitertest.TurnedAway)
			limiter := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: policy, OnFailure: mode})
			w := limitertest.NewWaits(t)
			for who := range 20 {
				w.Add(t.Context(), limiter, who, 1)
			}
			<-time.After(2500 * time.Millisecond)
			require.Len(t, w.Told(), meanwhile, mode)
			tried, _ := db.Counts()
			require.Less(t, tried, 10)
			db.Set(nil)
			ended := w.All(limiter)
			require.Len(t, ended, 20)
			for i, e := range ended {
				require.NoError(t, e.Err)
				require.Equal(t, i >= meanwhile, e.Result.Source == ratelimit.SourceDatabase)
			}
		})
	}
}

// With several policies for one key, the strictest policy decides how long Wait takes.
func TestWaitForSeveralPolicies(t *testing.T) {
	t.Parallel()

	const limit, window = 50, 20 * time.Millisecond
	limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{Name: "test", Policy: ratelimit.All(
		ratelimit.FixedWindow{Limit: limit, Window: window}, ratelimit.TokenBucket{Capacity: 3 * limit, Refill: 1, Every: window},
	)})
	results, errs := make([]ratelimit.Result, 3*limit+10), make([]error, 3*limit+10)
	testkit.Together(len(errs), func(i int) { results[i], errs[i] = limiter.Wait(t.Context(), "key") })
	require.NoError(t, errors.Join(errs...))
	slices.SortFunc(results, func(a, b ratelimit.Result) int { return a.DecidedAt.Compare(b.DecidedAt) })
	require.GreaterOrEqual(t, results[3*limit-1].DecidedAt.Sub(results[0].DecidedAt), 2*window) // because of the window
	require.GreaterOrEqual(t, results[3*limit+9].DecidedAt.Sub(results[0].DecidedAt), 9*window) // because of the bucket
}
