package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// waitDB is a database for tests in a bubble of time (testing/synctest), where a connection to a real one would stand still: it
// decides by the models, one statement after the other, and each takes a millisecond.
type waitDB struct {
	policy Policy

	mu    sync.Mutex
	rows  rows
	asked int
	units int64
	fail  error // of the next statement
}

func newWaitDB(policy Policy) *waitDB { return &waitDB{policy: policy, rows: rows{false: {}}} }

// statements is how many there were.
func (db *waitDB) statements() int {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.asked
}

// taken is what they took.
func (db *waitDB) taken() int64 {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.units
}

func (db *waitDB) failNext(err error) {
	db.mu.Lock()
	defer db.mu.Unlock()
	db.fail = err
}

func (db *waitDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errors.ErrUnsupported
}
func (db *waitDB) QueryRow(context.Context, string, ...any) pgx.Row { return nil }

func (db *waitDB) Query(_ context.Context, _ string, args ...any) (pgx.Rows, error) {
	<-time.After(time.Millisecond / 2)
	defer func() { <-time.After(time.Millisecond / 2) }() // with mu free: who waits for a mutex holds the bubble's time up
	db.mu.Lock()
	defer db.mu.Unlock()
	db.asked++
	if err := db.fail; err != nil {
		db.fail = nil
		return nil, err
	}
	s := step{policy: db.policy, name: args[0].(string), clock: time.Now().UnixMicro()}
	for i, key := range args[1].([]string) {
		e := element{key: key, cost: 1, count: 1}
		if counts := args[3].([]int64); counts != nil {
			e.count = counts[i]
		}
		if costs := args[2].([]int64); costs != nil {
			e.cost = costs[i]
		}
		s.elements = append(s.elements, e)
	}
	db.rows.decide(s)
	for _, e := range s.elements {
		db.units += e.cost * e.decision.granted
	}
	return &waitRows{elements: s.elements}, nil
}

// waitRows are what a statement returns.
type waitRows struct {
	pgx.Rows
	elements []element
	row      int
}

func (r *waitRows) Next() bool { r.row++; return r.row <= len(r.elements) }
func (r *waitRows) Err() error { return nil }
func (r *waitRows) FieldDescriptions() []pgconn.FieldDescription {
	return make([]pgconn.FieldDescription, 12)
}
func (r *waitRows) Close()                        {}
func (r *waitRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }
func (r *waitRows) Scan(targets ...any) error {
	d := r.elements[r.row-1].decision
	*targets[0].(*int64), *targets[1].(*int64), *targets[2].(*int64) = int64(r.row), d.granted, d.remaining
	*targets[3].(**int64), *targets[4].(*int64), *targets[5].(*time.Time) = &d.retryAfter, d.resetAfter, d.decidedAt
	for i, number := range []int64{d.state.count, d.state.prevCount, d.state.windowStart, d.state.credit, d.state.scale, d.state.expiresAt} {
		*targets[6+i].(*int64) = number
	}
	return nil
}

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
		require.Nil(w.t, limiter.lines)
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

// inBubble runs a test in a bubble of time, which also waits for all goroutines that the test has started, or says that they are stuck.
func inBubble(t *testing.T, policy Policy, test func(t *testing.T, limiter *Limiter, db *waitDB)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := newWaitDB(policy)
		test(t, newLimiter(t, db, Config{Name: "test", Policy: policy, Timeout: amply}), db)
	})
}

func TestWaitersAreServedInOrder(t *testing.T) {
	t.Parallel()

	for name, policy := range map[string]Policy{
		"fixed window":   FixedWindow{Limit: 1, Window: time.Second},
		"sliding window": SlidingWindow{Limit: 1, Window: time.Second},
		"token bucket":   TokenBucket{Capacity: 1, Refill: 1, Every: time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inBubble(t, policy, func(t *testing.T, limiter *Limiter, db *waitDB) {
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
				if name != "sliding window" {
					// Never too early, and by the jitter and the statements too late.
					require.GreaterOrEqual(t, ended[29].at, 29*time.Second)
					require.LessOrEqual(t, ended[29].at, 29*(time.Second+time.Second/50+4*time.Millisecond))
				}
			})
		})
	}
}

// Many are served at once where there is room, and however many wait, it takes a handful of statements for each window.
func TestThousandWaitersNeedFewStatements(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 100, Window: time.Second}, func(t *testing.T, limiter *Limiter, db *waitDB) {
		w := newWaits(t)
		for who := range 1000 {
			w.start(t.Context(), limiter, who, 1)
		}
		remaining := map[int64]int{}
		for _, e := range w.all(limiter) {
			require.NoError(t, e.err)
			remaining[e.result.Remaining]++
		}
		require.Len(t, remaining, 100) // each was told his own
		require.EqualValues(t, 1000, db.taken())
		require.LessOrEqual(t, db.statements(), 3*10)
		require.Less(t, time.Since(w.begin), 9*(time.Second+time.Second/50+10*time.Millisecond)) // the rate is used
	})

	inBubble(t, TokenBucket{Capacity: 5, Refill: 10, Every: time.Second}, func(t *testing.T, limiter *Limiter, db *waitDB) {
		w := newWaits(t)
		for who := range 1000 {
			w.start(t.Context(), limiter, who, 1)
		}
		require.Len(t, w.all(limiter), 1000)
		require.LessOrEqual(t, db.statements(), 2*1000)
		require.Less(t, time.Since(w.begin), 99600*time.Millisecond) // tokens that flow in during a pause are not lost
	})
}

func TestWaitFailsAtOnceIfTheDeadlineIsTooSoon(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *waitDB) {
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
		require.Equal(t, 59999*time.Millisecond, retry.RetryAfter) // counted from the decision, of a window that began a statement earlier
		require.True(t, retry.Deadline.Equal(w.begin.Add(amply/2)))
	})
}

// Whoever cannot wait does not keep those behind him from what they can have.
func TestWaiterThatIsRefusedMakesWay(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, _ *waitDB) {
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
	require.Nil(t, limiter.lines)
}

// Those who give up leave the line, and their places pass on: a small cost behind a large one gets what there is.
func TestWaitersThatGiveUp(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *waitDB) {
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
			require.Equal(t, []error{context.Canceled, context.Canceled, context.Canceled, nil}[who], errors.Unwrap(e.err))
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

	inBubble(t, FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *waitDB) {
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

// Processes that share a key admit together what one does, and each gets its part.
func TestWaitersOfSeveralProcesses(t *testing.T) {
	t.Parallel()

	const limit, processes, each = 10, 4, 100
	inBubble(t, FixedWindow{Limit: limit, Window: time.Second}, func(t *testing.T, _ *Limiter, db *waitDB) {
		var limiters []*Limiter
		w := newWaits(t)
		for process := range processes {
			limiters = append(limiters, newLimiter(t, db, Config{Name: "test", Policy: db.policy, Timeout: amply}))
			for who := range each {
				w.start(t.Context(), limiters[process], process, 1)
				_ = who
			}
		}
		ended := w.all(limiters...)
		require.EqualValues(t, processes*each, db.taken())

		// In the database's time: no more than the limit in any window, and hardly a moment is lost.
		var at []time.Time
		for _, e := range ended {
			require.NoError(t, e.err)
			at = append(at, e.result.DecidedAt)
		}
		slices.SortFunc(at, time.Time.Compare)
		for i := limit; i < len(at); i += limit {
			require.GreaterOrEqual(t, at[i].Sub(at[i-limit]), time.Second)
		}
		require.Less(t, time.Since(w.begin), (processes*each/limit-1)*(time.Second+time.Second/50+20*time.Millisecond))

		// Nobody has to wait until another process has none left.
		first := map[int]bool{}
		for _, e := range ended[:len(ended)/2] {
			first[e.who] = true
		}
		require.Len(t, first, processes)
		require.LessOrEqual(t, db.statements(), processes*3*processes*each/limit)
	})
}

// A denial that is remembered is not asked for again before its time, and does not keep the line busy.
func TestRememberedDenialLetsTheLineSleep(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		policy := FixedWindow{Limit: 1, Window: time.Minute}
		db := newWaitDB(policy)
		var mu sync.Mutex
		looks := 0
		limiter := newLimiter(t, db, Config{Name: "test", Policy: policy, Timeout: amply, DenialMaxAge: 2 * time.Minute, Test: TestConfig{Now: func() time.Time {
			mu.Lock()
			defer mu.Unlock()
			looks++
			return time.Now()
		}}})
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

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, paid *Limiter, _ *waitDB) {
		free := paid.with(t, FixedWindow{Limit: 1, Window: time.Hour})
		w := newWaits(t)
		since := free.denials.leave()
		free.denials.remember(free.policy, "key", decision{state: state{count: 1, windowStart: time.Now().UnixMicro(), expiresAt: time.Now().Add(time.Hour).UnixMicro()},
			decidedAt: time.Now()}, free.denials.local(), free.denials.local(), &since)
		ctx, cancel := context.WithCancel(t.Context())
		w.add(ctx, free, 0, 1)
		w.add(t.Context(), paid.with(t, FixedWindow{Limit: 10, Window: time.Minute}), 1, 1)
		w.add(t.Context(), paid, 2, 1)
		<-time.After(10 * time.Millisecond)
		require.Equal(t, []int{1, 2}, whoOf(w.told()))
		synctest.Wait()
		paid.linesMu.Lock()
		require.Len(t, paid.lines["key"], 1)
		paid.linesMu.Unlock()
		cancel()
		w.all(free, paid)
	})
}

// An error is for all who are in the line then: if each of them asked, the last would wait for as many timeouts.
func TestErrorEndsTheWaitOfAllInTheLine(t *testing.T) {
	t.Parallel()

	inBubble(t, FixedWindow{Limit: 10, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *waitDB) {
		w := newWaits(t)
		db.failNext(&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "ERROR"})
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

	inBubble(t, FixedWindow{Limit: 2, Window: time.Minute}, func(t *testing.T, limiter *Limiter, db *waitDB) {
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

// Random crowds: costs, arrivals, deadlines and cancellations; several processes. Whoever is served is served in order, what was told is
// what was taken but for those who left, and nothing is left behind.
func TestRandomCrowds(t *testing.T) {
	t.Parallel()

	seed := testSeed(t)
	for round := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, round))
		policy := []Policy{
			FixedWindow{Limit: 10, Window: time.Second}, SlidingWindow{Limit: 10, Window: time.Second},
			TokenBucket{Capacity: 10, Refill: 7, Every: time.Second},
		}[r.IntN(3)]
		inBubble(t, policy, func(t *testing.T, one *Limiter, db *waitDB) {
			two := newLimiter(t, db, Config{Name: "test", Policy: policy, Timeout: amply, NoDenialCache: r.IntN(2) == 0})
			limiters := []*Limiter{one, two}
			crowds := []*waits{newWaits(t), newWaits(t)}
			costs := map[int]int64{}
			var cancelled int64
			for who := range 120 {
				cost := []int64{1, 1, 1, 2, 3, 10}[r.IntN(6)]
				costs[who] = cost
				ctx, cancel := context.WithCancel(t.Context())
				switch r.IntN(4) {
				case 0:
					ctx, cancel = context.WithTimeout(t.Context(), time.Duration(r.Int64N(int64(10*time.Second))))
				case 1:
					until := time.Duration(r.Int64N(int64(5 * time.Second)))
					go func() {
						select {
						case <-time.After(until):
							cancel()
						case <-t.Context().Done():
						}
					}()
				}
				defer cancel()
				process := r.IntN(2)
				crowds[process].add(ctx, limiters[process], who, cost)
				if r.IntN(3) == 0 {
					<-time.After(time.Duration(r.Int64N(int64(200 * time.Millisecond))))
				}
			}
			var told int64
			for process, crowd := range crowds {
				last := -1
				for _, e := range crowd.all(limiters[process]) {
					if e.err != nil {
						cancelled += costs[e.who]
						continue
					}
					told += costs[e.who]
					require.True(t, e.result.Allowed)
					require.Greater(t, e.who, last, "%s=%d, round %d", seedVariable, seed, round)
					last = e.who
				}
			}
			require.GreaterOrEqual(t, db.taken(), told)
			require.LessOrEqual(t, db.taken(), told+cancelled)
		})
	}
}

// The same with a real database, in real time: two processes, and as many admitted in any time as the policy says.
func TestThousandWaitersOnADatabase(t *testing.T) {
	t.Parallel()

	const limit, window = 100, 20 * time.Millisecond
	db := pgtest.New(t)
	for name, policy := range map[string]Policy{
		"fixed window": FixedWindow{Limit: limit, Window: window},
		"token bucket": TokenBucket{Capacity: limit, Refill: limit, Every: window},
	} {
		var limiters []*Limiter
		var asked []*statements
		for range 2 {
			pool, counted := tracedPool(t, db)
			limiters, asked = append(limiters, newLimiter(t, pool, Config{Name: name, Policy: policy, Timeout: amply})), append(asked, counted)
		}
		results, errs := make([]Result, 1000), make([]error, 1000)
		left := offspring(t, func(context.Context) {
			together(1000, func(i int) { results[i], errs[i] = limiters[i%2].Wait(t.Context(), "key") })
		})
		require.NoError(t, errors.Join(errs...))
		var at []time.Time
		for _, result := range results {
			require.True(t, result.Allowed)
			at = append(at, result.DecidedAt)
		}
		slices.SortFunc(at, time.Time.Compare)
		if name == "fixed window" {
			for i := 2 * limit; i < len(at); i++ {
				require.Greater(t, at[i].Sub(at[i-2*limit]), window)
			}
			require.GreaterOrEqual(t, at[999].Sub(at[0]), 9*window)
			require.Less(t, asked[0].count()+asked[1].count(), 500) // about 60: three for each window and process
		} else {
			for i := range at {
				for j := i + limit; j < len(at); j++ {
					require.GreaterOrEqual(t, at[j].Sub(at[i]), time.Duration(j-i+1-limit)*window/limit-time.Microsecond)
				}
			}
		}
		waitUntil(t, func() bool { return left() == 0 })
		for _, limiter := range limiters {
			limiter.linesMu.Lock()
			require.Nil(t, limiter.lines)
			limiter.linesMu.Unlock()
		}
	}
}

func TestResetEndsTheWait(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, conn := range map[string]DBTX{"pool": db.Pool, "connection": connect(t, db)} {
		limiter := newLimiter(t, conn, Config{Name: name, Policy: FixedWindow{Limit: 1, Window: year}, Timeout: amply, DenialMaxAge: amply})
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		waiter := later(func() (Result, error) { return limiter.Wait(t.Context(), "key") })
		waitUntil(t, func() bool {
			limiter.linesMu.Lock()
			defer limiter.linesMu.Unlock()
			return len(limiter.lines["key"]) == 1 && !limiter.lines["key"][0].retryAt.IsZero()
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

	conn := connect(t, pgtest.New(t))
	limiter := newLimiter(t, conn, Config{Name: "test", Policy: TokenBucket{Capacity: 1, Refill: 1, Every: time.Millisecond}, Timeout: amply})
	for i := range 300 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*10*time.Microsecond)
		_, err := limiter.Wait(ctx, fmt.Sprint("key ", i%2))
		cancel()
		if err != nil && !errors.Is(err, ErrWouldExceedDeadline) {
			require.ErrorIs(t, err, context.DeadlineExceeded)
		}
		require.Equal(t, 1, scalar[int](t, conn, "SELECT 1"))
	}
}

// Lines that were told the same retry time do not sleep for the same time: never less, by at most a 50th or 100 ms more, and no
// longer than the first one can wait.
func TestSleepIsJittered(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) { // in which time stands still meanwhile
		limiter := newLimiter(t, newWaitDB(nil), policy(FixedWindow{Limit: 10, Window: time.Minute}))
		for _, c := range []struct{ retryAfter, patience, most time.Duration }{
			{time.Second, 0, 20 * time.Millisecond},
			{time.Hour, 0, 100 * time.Millisecond},
			{time.Hour, time.Hour + time.Minute, 100 * time.Millisecond},
			{time.Hour, time.Hour + 10*time.Millisecond, 5 * time.Millisecond},
		} {
			var least, most time.Duration
			for range 1000 {
				in := &line{l: limiter, key: "key", asking: make(chan struct{})}
				w := &waiter{cost: 1, told: make(chan struct{})}
				if c.patience > 0 {
					w.deadline = time.Now().Add(c.patience)
				}
				w.place = in.waiters.PushBack(w)
				extra := in.settle([]*waiter{w}, 1, Result{RetryAfter: c.retryAfter}, nil) - c.retryAfter
				require.GreaterOrEqual(t, extra, time.Duration(0))
				require.LessOrEqual(t, extra, c.most)
				least, most = min(least, extra-c.most), max(most, extra)
			}
			require.Greater(t, most, c.most*3/4)
			require.Less(t, least+c.most, c.most/4)
		}
	})
}

// While Postgres is away, Wait does as OnFailure says: it admits, sleeps until the next try, or admits a share.
func TestWaitFollowsOnFailure(t *testing.T) {
	t.Parallel()

	for mode, meanwhile := range map[FailureMode]int{FailOpen(): 20, FailClosed(): 0, FallbackLocal(0.5): 2 * 3} {
		synctest.Test(t, func(t *testing.T) {
			policy := FixedWindow{Limit: 4, Window: time.Second}
			db := newModelDB(policy)
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
	limiter := newLimiter(t, pgtest.New(t).Pool, Config{Name: "test", Timeout: amply, Policy: All(
		FixedWindow{Limit: limit, Window: window}, TokenBucket{Capacity: 3 * limit, Refill: 1, Every: window},
	)})
	results, errs := make([]Result, 3*limit+10), make([]error, 3*limit+10)
	together(len(errs), func(i int) { results[i], errs[i] = limiter.Wait(t.Context(), "key") })
	require.NoError(t, errors.Join(errs...))
	slices.SortFunc(results, func(a, b Result) int { return a.DecidedAt.Compare(b.DecidedAt) })
	require.GreaterOrEqual(t, results[3*limit-1].DecidedAt.Sub(results[0].DecidedAt), 2*window) // by the windows
	require.GreaterOrEqual(t, results[3*limit+9].DecidedAt.Sub(results[0].DecidedAt), 9*window) // by the bucket
}
