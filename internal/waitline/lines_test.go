package waitline_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()

	for name, policy := range map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 1, Window: time.Second},
		"sliding window": ratelimit.SlidingWindow{Limit: 1, Window: time.Second},
		"token bucket":   ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: time.Second},
		"calendar":       ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarMinute, Zone: "Asia/Kolkata"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			limitertest.InBubble(t, policy, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
				w := limitertest.NewWaits(t)
				for who := range 30 {
					w.Add(t.Context(), limiter, who, 1)
				}
				ended := w.All(limiter)
				require.Equal(t, limitertest.UpTo(30), limitertest.WhoOf(ended))
				var last time.Time
				for _, e := range ended {
					require.NoError(t, e.Err)
					require.True(t, e.Result.Allowed)
					require.True(t, e.Result.DecidedAt.After(last))
					last = e.Result.DecidedAt
				}
				require.EqualValues(t, 30, db.Taken())
				require.LessOrEqual(t, db.Statements(), 2*30) // for each caller, one statement that denies and one that allows
				switch name {
				case "sliding window":
				case "calendar":
					require.GreaterOrEqual(t, ended[29].At, 29*time.Minute)
					require.LessOrEqual(t, ended[29].At, 29*time.Minute+time.Second)
				default:
					// The last caller never comes too early. Only the jitter and the statements make it late.
					require.GreaterOrEqual(t, ended[29].At, 29*time.Second)
					require.LessOrEqual(t, ended[29].At, 29*(time.Second+time.Second/50+4*time.Millisecond))
				}
			})
		})
	}
}

// A caller who is refused does not hold up the callers behind it.
func TestWaiterThatIsRefusedMakesWay(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, _ *limitertest.ModelDB) {
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()

		// A small cost waits behind a large cost whose caller can wait.
		w := limitertest.NewWaits(t)
		patient, leave := context.WithCancel(t.Context())
		w.Add(patient, limiter, 0, 9)
		w.Add(ctx, limiter, 1, 1)
		<-time.After(10 * time.Millisecond)
		require.Equal(t, []int{1}, limitertest.WhoOf(w.Told()))
		require.ErrorIs(t, w.Told()[0].Err, ratelimit.ErrWouldExceedDeadline)
		leave()
		w.All(limiter)

		w = limitertest.NewWaits(t)
		for who, n := range []int64{9, 9, 1, 1, 1} {
			w.Start(ctx, limiter, who, n)
			synctest.Wait()
		}
		ended := w.All(limiter)
		require.Equal(t, []int{0, 1, 2, 3, 4}, limitertest.WhoOf(ended))
		for who, want := range []error{ratelimit.ErrWouldExceedDeadline, ratelimit.ErrWouldExceedDeadline, nil, nil, ratelimit.ErrWouldExceedDeadline} {
			require.ErrorIs(t, ended[who].Err, want)
		}
		require.Less(t, time.Since(w.Begin), 10*time.Millisecond)
	})
}

// Callers who give up leave the line. If the head leaves, a smaller cost behind it may fit at once.
func TestWaitersThatGiveUp(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		w := limitertest.NewWaits(t)
		cancels := map[int]context.CancelFunc{}
		for who, n := range []int64{5, 5, 2, 1, 1, 1} {
			ctx, cancel := context.WithCancel(t.Context())
			cancels[who] = cancel
			w.Add(ctx, limiter, who, n)
			<-time.After(time.Second)
		}
		require.Empty(t, w.Told())
		before := time.Since(w.Begin)
		for _, who := range []int{1, 4, 0} {
			cancels[who]()
			synctest.Wait()
		}
		<-time.After(10 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, []int{1, 4, 0, 2}, limitertest.WhoOf(w.Told())) // caller 2 fits when those ahead have left
		for who, e := range w.Told() {
			require.Equal(
				t,
				[]error{context.Canceled, context.Canceled, context.Canceled, nil}[who],
				errors.Unwrap(e.Err),
			)
			require.Less(t, e.At, before+10*time.Millisecond)
		}
		cancels[3]()
		cancels[5]()
		w.All(limiter) // ends at once, because the line does not sleep for callers who have left
		require.Less(t, time.Since(w.Begin), before+20*time.Millisecond)
		require.EqualValues(t, 10, db.Taken())
	})
}

// A caller can leave while the line asks for it. Its units may stay taken, but no other caller gets them.
func TestWaiterThatLeavesWhileBeingAskedFor(t *testing.T) {
	t.Parallel()

	limitertest.InBubble(t, ratelimit.FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *ratelimit.Limiter, db *limitertest.ModelDB) {
		w := limitertest.NewWaits(t)
		ctx, cancel := context.WithCancel(t.Context())
		w.Add(ctx, limiter, 0, 1)
		w.Add(t.Context(), limiter, 1, 1)
		w.Add(t.Context(), limiter, 2, 1)
		cancel()
		synctest.Wait()
		require.Equal(t, []int{0}, limitertest.WhoOf(w.Told()))
		<-time.After(time.Second)
		require.Equal(t, []int{0, 1}, limitertest.WhoOf(w.Told()))
		require.EqualValues(t, 2, db.Taken())
		ended := w.All(limiter)
		require.NoError(t, ended[2].Err)
		require.GreaterOrEqual(t, ended[2].At, time.Minute)
	})
}

// The line does not ask again before the retry time of a remembered denial.
func TestRememberedDenialLetsTheLineSleep(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		policy := ratelimit.FixedWindow{Limit: 1, Window: time.Minute}
		db := limitertest.NewModelDB()
		db.Takes = time.Millisecond
		var mu sync.Mutex
		looks := 0
		limiter := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: policy}, ratelimit.ClientConfig{
			DenialMaxAge: 2 * time.Minute,
			Test: ratelimit.TestConfig{Now: func() time.Time {
				mu.Lock()
				defer mu.Unlock()
				looks++
				return time.Now()
			}},
		})
		for range 2 {
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
		}
		require.Equal(t, 2, db.Statements())
		looks = 0
		w := limitertest.NewWaits(t)
		w.Add(t.Context(), limiter, 0, 1)
		w.Add(t.Context(), limiter, 1, 1)
		w.All(limiter)
		require.Equal(t, 2+3, db.Statements()) // allowed, denied, allowed
		require.Less(t, looks, 20)
		require.Less(t, time.Since(w.Begin), 2*time.Minute+300*time.Millisecond)
	})
}
