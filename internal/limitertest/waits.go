package limitertest

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// Waits is a group of callers of Wait, each in its goroutine.
type Waits struct {
	t  *testing.T
	wg sync.WaitGroup

	mu    sync.Mutex
	Begin time.Time
	ended []Waited // in the order in which the waits ended
}

// Waited is what Wait returned to a caller, and when. The field Who is the caller's number.
type Waited struct {
	Who    int
	At     time.Duration
	Result ratelimit.Result
	Err    error
}

// NewWaits returns a group without callers.
func NewWaits(t *testing.T) *Waits { return &Waits{t: t, Begin: time.Now()} }

// Add starts a caller of Wait, and returns when the caller stands in the line.
func (w *Waits) Add(ctx context.Context, limiter *ratelimit.Limiter, who int, n int64) {
	w.t.Helper()
	w.Start(ctx, limiter, who, n)
	synctest.Wait()
}

// Start starts a caller of Wait.
func (w *Waits) Start(ctx context.Context, limiter *ratelimit.Limiter, who int, n int64) {
	w.wg.Go(func() {
		result, err := limiter.WaitN(ctx, "key", n)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.ended = append(w.ended, Waited{who, time.Since(w.Begin), result, err})
	})
}

// All waits until all callers have ended, and checks that nothing is left in the limiters.
func (w *Waits) All(limiters ...*ratelimit.Limiter) []Waited {
	w.t.Helper()
	w.wg.Wait()
	synctest.Wait()
	for _, limiter := range limiters {
		require.True(w.t, Lines(limiter).Empty())
	}
	// Callers that ended at the same time appended to w.ended in any order.
	slices.SortStableFunc(w.ended, func(a, b Waited) int {
		if a.At == b.At && a.Result.DecidedAt.Equal(b.Result.DecidedAt) {
			return cmp.Compare(b.Result.Remaining, a.Result.Remaining)
		}
		return 0
	})
	return w.ended
}

// Told returns the callers that have ended so far.
func (w *Waits) Told() []Waited {
	synctest.Wait()
	w.mu.Lock()
	defer w.mu.Unlock()
	return slices.Clone(w.ended)
}

// WhoOf returns the numbers of the callers, in the order in which their waits ended.
func WhoOf(ended []Waited) (who []int) {
	for _, e := range ended {
		who = append(who, e.Who)
	}
	return who
}

// UpTo returns the numbers from 0 to n-1.
func UpTo(n int) (numbers []int) {
	for i := range n {
		numbers = append(numbers, i)
	}
	return numbers
}

// InBubble runs a test in a bubble of testing/synctest. At the end, it waits for all goroutines that the test started,
// and fails if they are stuck.
func InBubble(t *testing.T, policy ratelimit.Policy, test func(t *testing.T, limiter *ratelimit.Limiter, db *ModelDB)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		db := NewModelDB()
		db.Takes = time.Millisecond
		test(t, New(t, db, ratelimit.Config{Name: "test", Policy: policy}), db)
	})
}
