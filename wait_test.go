package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// waits are callers of Wait, in the background.
type waits struct {
	t  *testing.T
	wg sync.WaitGroup

	mu    sync.Mutex
	begin time.Time
	ended []waited // in the order in which they were told
}

// waited is what one of them was told, and when.
type waited struct {
	who    int
	at     time.Duration
	result Result
	err    error
}

func newWaits(t *testing.T) *waits { return &waits{t: t, begin: time.Now()} }

// add has somebody begin to wait, and returns when he stands in the line.
func (w *waits) add(ctx context.Context, limiter *Limiter, who int, n int64) {
	w.t.Helper()
	w.start(ctx, limiter, who, n)
	synctest.Wait()
}

func (w *waits) start(ctx context.Context, limiter *Limiter, who int, n int64) {
	w.wg.Go(func() {
		result, err := limiter.WaitN(ctx, "key", n)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ended = append(w.ended, waited{who, time.Since(w.begin), result, err})
	})
}

// all waits for all of them, and checks that nothing is left in the limiters.
func (w *waits) all(limiters ...*Limiter) []waited {
	w.t.Helper()
	w.wg.Wait()
	synctest.Wait()
	for _, limiter := range limiters {
		require.True(w.t, limiter.waiting.Empty())
	}
	// Those who were told at the same time have written that down in any order.
	slices.SortStableFunc(w.ended, func(a, b waited) int {
		if a.at == b.at && a.result.DecidedAt.Equal(b.result.DecidedAt) {
			return cmp.Compare(b.result.Remaining, a.result.Remaining)
		}
		return 0
	})
	return w.ended
}

// told is who has been told what, up to now.
func (w *waits) told() []waited {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.ended)
}

func whoOf(ended []waited) (who []int) {
	for _, e := range ended {
		who = append(who, e.who)
	}
	return who
}

func upTo(n int) (numbers []int) {
	for i := range n {
		numbers = append(numbers, i)
	}
	return numbers
}

// inBubble runs a test in a bubble of time, which also waits for all goroutines that the test has started, or says
// that they are stuck.
func inBubble(t *testing.T, policy single, test func(t *testing.T, limiter *Limiter, db *modelDB)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		db.takes = time.Millisecond
		test(t, newLimiter(t, db, Config{Name: "test", Policy: policy}), db)
	})
}

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()

	for name, policy := range map[string]single{
		"fixed window":   FixedWindow{Limit: 1, Window: time.Second},
		"sliding window": SlidingWindow{Limit: 1, Window: time.Second},
		"token bucket":   TokenBucket{Capacity: 1, Refill: 1, Every: time.Second},
		"calendar":       CalendarWindow{Limit: 1, Unit: CalendarMinute, Zone: "Asia/Kolkata"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, policy, func(t *testing.T, limiter *Limiter, db *modelDB) {
				w := newWaits(t)
				for who := range 30 {
					w.add(t.Context(), limiter, who, 1)
				}
				ended := w.all(limiter)
				require.Equal(t, upTo(30), whoOf(ended))
				var last time.Time
				for _, e := range ended {
					require.NoError(t, e.err)
					require.True(t, e.result.Allowed)
					require.True(t, e.result.DecidedAt.After(last))
					last = e.result.DecidedAt
				}
				require.EqualValues(t, 30, db.taken())
				require.LessOrEqual(t, db.statements(), 2*30) // one that allows, and one that tells when to come again
				switch name {
				case "sliding window":
				case "calendar":
					require.GreaterOrEqual(t, ended[29].at, 29*time.Minute)
					require.LessOrEqual(t, ended[29].at, 29*time.Minute+time.Second)
				default:
					// Never too early, and by the jitter and the statements too late.
					require.GreaterOrEqual(t, ended[29].at, 29*time.Second)
					require.LessOrEqual(t, ended[29].at, 29*(time.Second+time.Second/50+4*time.Millisecond))
				}
			})
		})
	}
}

func TestWaitFailsAtOnceIfTheDeadlineIsTooSoon(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		w := newWaits(t)
		within := func(d time.Duration) context.Context {
			ctx, cancel := context.WithDeadline(t.Context(), w.begin.Add(d))
			t.Cleanup(cancel)
			return ctx
		}
		refused := func(who int, at time.Duration) {
			t.Helper()
			told := w.told()
			require.NotEmpty(t, told)
			last := told[len(told)-1]
			require.Equal(t, who, last.who)
			require.Equal(t, at, last.at)
			var tooSoon *WaitError
			require.ErrorAs(t, last.err, &tooSoon)
			require.ErrorIs(t, last.err, ErrWouldExceedDeadline)
			require.NotErrorIs(t, last.err, context.DeadlineExceeded)
			require.NotContains(t, last.err.Error(), "key")
			require.Zero(t, last.result)
		}
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)

		w.begin = time.Now()
		w.add(within(amply/2), limiter, 0, 3) // nobody waits: the database has to be asked
		<-time.After(time.Millisecond)
		synctest.Wait()
		refused(0, time.Millisecond)

		w.add(within(2*amply), limiter, 1, 5) // can wait
		<-time.After(time.Second)
		synctest.Wait()
		statements := db.statements()
		w.add(within(amply/2), limiter, 2, 5) // cannot, and it is known
		refused(2, time.Second+time.Millisecond)
		w.add(within(amply/2), limiter, 3, 1) // would fit, but stands behind one who can wait
		refused(3, time.Second+time.Millisecond)
		require.Equal(t, statements, db.statements())
		w.add(within(2*amply), limiter, 4, 1)
		ended := w.all(limiter)
		require.Equal(t, []int{0, 2, 3, 1, 4}, whoOf(ended))
		require.NoError(t, ended[3].err)
		require.NoError(t, ended[4].err)
		require.EqualValues(t, 8+5+1, db.taken())

		retry, ok := errors.AsType[*WaitError](ended[0].err)
		require.True(t, ok)
		require.Equal(
			t,
			59999*time.Millisecond,
			retry.RetryAfter,
		) // counted from the decision, of a window that began a statement earlier
		require.True(t, retry.Deadline.Equal(w.begin.Add(amply/2)))
	})
}

// Whoever cannot wait does not keep those behind him from what they can have.
func TestWaiterThatIsRefusedMakesWay(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, _ *modelDB) {
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()

		// But a small cost has to wait behind a large one that can wait.
		w := newWaits(t)
		patient, leave := context.WithCancel(t.Context())
		w.add(patient, limiter, 0, 9)
		w.add(ctx, limiter, 1, 1)
		<-time.After(10 * time.Millisecond)
		require.Equal(t, []int{1}, whoOf(w.told()))
		require.ErrorIs(t, w.told()[0].err, ErrWouldExceedDeadline)
		leave()
		w.all(limiter)

		w = newWaits(t)
		for who, n := range []int64{9, 9, 1, 1, 1} {
			w.start(ctx, limiter, who, n)
			synctest.Wait()
		}
		ended := w.all(limiter)
		require.Equal(t, []int{0, 1, 2, 3, 4}, whoOf(ended))
		for who, want := range []error{ErrWouldExceedDeadline, ErrWouldExceedDeadline, nil, nil, ErrWouldExceedDeadline} {
			require.ErrorIs(t, ended[who].err, want)
		}
		require.Less(t, time.Since(w.begin), 10*time.Millisecond)
	})
}

func TestWaitAsksNothingForWhatCannotBe(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, unusedPool(t), policy(FixedWindow{Limit: 10, Window: time.Minute}))
	_, err := limiter.WaitN(t.Context(), "key", 11)
	require.ErrorIs(t, err, ErrCostExceedsLimit)
	_, err = limiter.WaitN(t.Context(), "key", -1)
	require.ErrorIs(t, err, ErrInvalidCost)
	_, err = limiter.Wait(t.Context(), "")
	require.ErrorIs(t, err, ErrInvalidKey)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = limiter.Wait(ctx, "key")
	require.ErrorIs(t, err, context.Canceled)
	require.True(t, limiter.waiting.Empty())
}

// Those who give up leave the line, and their places pass on: a small cost behind a large one gets what there is.
func TestWaitersThatGiveUp(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		_, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		w := newWaits(t)
		cancels := map[int]context.CancelFunc{}
		for who, n := range []int64{5, 5, 2, 1, 1, 1} {
			ctx, cancel := context.WithCancel(t.Context())
			cancels[who] = cancel
			w.add(ctx, limiter, who, n)
			<-time.After(time.Second)
		}
		require.Empty(t, w.told())
		before := time.Since(w.begin)
		for _, who := range []int{1, 4, 0} {
			cancels[who]()
			synctest.Wait()
		}
		<-time.After(10 * time.Millisecond)
		synctest.Wait()
		require.Equal(t, []int{1, 4, 0, 2}, whoOf(w.told())) // as soon as those before it had left
		for who, e := range w.told() {
			require.Equal(
				t,
				[]error{context.Canceled, context.Canceled, context.Canceled, nil}[who],
				errors.Unwrap(e.err),
			)
			require.Less(t, e.at, before+10*time.Millisecond)
		}
		cancels[3]()
		cancels[5]()
		w.all(limiter) // at once: nobody sleeps for nobody
		require.Less(t, time.Since(w.begin), before+20*time.Millisecond)
		require.EqualValues(t, 10, db.taken())
	})
}

// A caller who leaves while he is being asked for may be counted, and nobody else gets what was his.
func TestWaiterThatLeavesWhileBeingAskedFor(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		w := newWaits(t)
		ctx, cancel := context.WithCancel(t.Context())
		w.add(ctx, limiter, 0, 1)
		w.add(t.Context(), limiter, 1, 1)
		w.add(t.Context(), limiter, 2, 1)
		cancel()
		synctest.Wait()
		require.Equal(t, []int{0}, whoOf(w.told()))
		<-time.After(time.Second)
		require.Equal(t, []int{0, 1}, whoOf(w.told()))
		require.EqualValues(t, 2, db.taken())
		ended := w.all(limiter)
		require.NoError(t, ended[2].err)
		require.GreaterOrEqual(t, ended[2].at, time.Minute)
	})
}

// A denial that is remembered is not asked for again before its time, and does not keep the line busy.
func TestRememberedDenialLetsTheLineSleep(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		policy := FixedWindow{Limit: 1, Window: time.Minute}
		db := newModelDB()
		db.takes = time.Millisecond
		var mu sync.Mutex
		looks := 0
		limiter := newLimiter(t, db, Config{Name: "test", Policy: policy}, ClientConfig{
			DenialMaxAge: 2 * time.Minute,
			Test: TestConfig{Now: func() time.Time {
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
		require.Equal(t, 2, db.statements())
		looks = 0
		w := newWaits(t)
		w.add(t.Context(), limiter, 0, 1)
		w.add(t.Context(), limiter, 1, 1)
		w.all(limiter)
		require.Equal(t, 2+3, db.statements()) // allowed, denied, allowed
		require.Less(t, looks, 20)
		require.Less(t, time.Since(w.begin), 2*time.Minute+300*time.Millisecond)
	})
}

func TestWaitersUnderAnotherPolicyStandInTheirOwnLine(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, paid *Limiter, _ *modelDB) {
		free := paid.with(t, FixedWindow{Limit: 1, Window: time.Hour})
		w := newWaits(t)
		known := testDenials{free.client.engine.Denials, free.model.Rules[0], free.space}
		since := known.Snapshot()
		known.remember(
			"key",
			model.Decision{
				State: model.State{
					Count:       1,
					WindowStart: time.Now().UnixMicro(),
					ExpiresAt:   time.Now().Add(time.Hour).UnixMicro(),
				},
				DecidedAt: time.Now(),
			},
			known.Elapsed(),
			known.Elapsed(),
			&since,
		)
		ctx, cancel := context.WithCancel(t.Context())
		w.add(ctx, free, 0, 1)
		w.add(t.Context(), paid.with(t, FixedWindow{Limit: 10, Window: time.Minute}), 1, 1)
		w.add(t.Context(), paid, 2, 1)
		<-time.After(10 * time.Millisecond)
		require.Equal(t, []int{1, 2}, whoOf(w.told()))
		synctest.Wait()
		lines, _, _ := paid.waiting.Waiting("key")
		require.Equal(t, 1, lines)
		cancel()
		w.all(free, paid)
	})
}

// An error is for all who are in the line then: if each of them asked, the last would wait for as many timeouts.
func TestErrorEndsTheWaitOfAllInTheLine(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		w := newWaits(t)
		db.set(func(ctx context.Context) error {
			db.set(nil)
			elapse(time.Millisecond)
			return sqlState("57P01")(ctx)
		})
		for who := range 3 {
			w.add(t.Context(), limiter, who, 4)
		}
		for _, e := range w.all(limiter) {
			require.ErrorIs(t, e.err, ErrUnavailable)
		}
		w = newWaits(t)
		w.add(t.Context(), limiter, 3, 4)
		require.NoError(t, w.all(limiter)[0].err)
	})
}

// Looking for room takes nothing.
func TestWaitForRoom(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *modelDB) {
		w := newWaits(t)
		for who, n := range []int64{0, 2, 0, 0, 2, 0} {
			w.add(t.Context(), limiter, who, n)
		}
		ended := w.all(limiter)
		require.Equal(t, upTo(6), whoOf(ended))
		for who, window := range []time.Duration{0, 0, 1, 1, 1, 2} {
			require.NoError(t, ended[who].err)
			require.Equal(t, window, ended[who].at/time.Minute)
		}
		require.EqualValues(t, 4, db.taken())
	})
}

func TestResetEndsTheWait(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, conn := range map[string]DBTX{"pool": db.Pool, "connection": pgtest.Connect(t, db)} {
		limiter := newLimiter(
			t,
			conn,
			Config{
				Name:   name,
				Policy: FixedWindow{Limit: 1, Window: year},
			},
			ClientConfig{DenialMaxAge: amply},
		)
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		waiter := testkit.Later(func() (Result, error) { return limiter.Wait(t.Context(), "key") })
		testkit.WaitUntil(t, func() bool {
			_, _, known := limiter.waiting.Waiting("key")
			return known
		})
		require.NoError(t, limiter.Reset(t.Context(), "another key"))
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		result, err := waiter()
		require.NoError(t, err)
		require.True(t, result.Allowed)
	}
}

// Whoever has a single connection can use it as soon as Wait has returned, also when he has given up.
func TestWaitOnOneConnection(t *testing.T) {
	t.Parallel()

	conn := pgtest.Connect(t, pgtest.New(t))
	limiter := newLimiter(
		t,
		conn,
		Config{
			Name:   "test",
			Policy: TokenBucket{Capacity: 1, Refill: 1, Every: time.Millisecond},
		},
	)
	for i := range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*10*time.Microsecond)
		_, err := limiter.Wait(ctx, fmt.Sprint("key ", i%2))
		cancel()
		if err != nil && !errors.Is(err, ErrWouldExceedDeadline) {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, 1, pgtest.Scalar[int](t, conn, "SELECT 1"))
	}
}

// While Postgres is away, Wait does as OnFailure says: it admits, sleeps until the next try, or admits a share.
func TestWaitFollowsOnFailure(t *testing.T) {
	t.Parallel()

	for mode, meanwhile := range map[FailureMode]int{FailOpen(): 20, FailClosed(): 0, FallbackLocal(0.5): 2 * 3} {
		synctest.Test(t, func(t *testing.T) {
			policy := FixedWindow{Limit: 4, Window: time.Second}
			db := newModelDB()
			db.set(turnedAway)
			limiter := newLimiter(t, db, Config{Name: "test", Policy: policy, OnFailure: mode})
			w := newWaits(t)
			for who := range 20 {
				w.add(t.Context(), limiter, who, 1)
			}
			<-time.After(2500 * time.Millisecond)
			require.Len(t, w.told(), meanwhile, mode)
			tried, _ := db.counts()
			require.Less(t, tried, 10)
			db.set(nil)
			ended := w.all(limiter)
			require.Len(t, ended, 20)
			for i, e := range ended {
				require.NoError(t, e.err)
				require.Equal(t, i >= meanwhile, e.result.Source == SourceDatabase)
			}
		})
	}
}

// Of several policies for one key, the one that has the least left says when.
func TestWaitForSeveralPolicies(t *testing.T) {
	t.Parallel()

	const limit, window = 50, 20 * time.Millisecond
	limiter := newLimiter(t, pgtest.New(t).Pool, Config{Name: "test", Policy: All(
		FixedWindow{Limit: limit, Window: window}, TokenBucket{Capacity: 3 * limit, Refill: 1, Every: window},
	)})
	results, errs := make([]Result, 3*limit+10), make([]error, 3*limit+10)
	testkit.Together(len(errs), func(i int) { results[i], errs[i] = limiter.Wait(t.Context(), "key") })
	require.NoError(t, errors.Join(errs...))
	slices.SortFunc(results, func(a, b Result) int { return a.DecidedAt.Compare(b.DecidedAt) })
	require.GreaterOrEqual(t, results[3*limit-1].DecidedAt.Sub(results[0].DecidedAt), 2*window) // by the windows
	require.GreaterOrEqual(t, results[3*limit+9].DecidedAt.Sub(results[0].DecidedAt), 9*window) // by the bucket
}
