package service

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// load is what many goroutines ask about a key, and what they were told.
type load struct {
	told    []*told      // for each caller
	expired atomic.Int64 // calls that ended only because their caller waited no longer
	lastErr atomic.Pointer[error]
	stop    func() // ends the load, and waits for the calls under way
}

// told counts what a caller was told.
type told struct{ allowed, failedOpen, denied, failedClosed, failed atomic.Int64 }

// trouble returns how often there was no decision of the database.
func (c *told) trouble() int64 { return c.failedOpen.Load() + c.failedClosed.Load() + c.failed.Load() }

// ask asks for a key on all callers, on each by n goroutines, until the load is stopped. Each call has the timeout
// within.
func ask(t *testing.T, key string, within time.Duration, n int, all []caller) *load {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	l := &load{}
	var work sync.WaitGroup
	for _, c := range all {
		to := &told{}
		l.told = append(l.told, to)
		for range n {
			work.Go(func() {
				for ctx.Err() == nil {
					l.once(c, key, within, to, ctx)
				}
			})
		}
	}
	l.stop = func() {
		cancel()
		work.Wait()
	}
	t.Cleanup(l.stop)
	return l
}

func (l *load) once(c caller, key string, within time.Duration, to *told, until context.Context) { //nolint:revive // until is no context of the call
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	got, err := c.ask(ctx, key)
	if ctx.Err() != nil {
		l.expired.Add(1)
	}
	switch {
	case err != nil:
		to.failed.Add(1)
		l.lastErr.Store(&err)
	case got.allowed && got.counted:
		to.allowed.Add(1)
	case got.allowed:
		to.failedOpen.Add(1)
	case got.counted:
		to.denied.Add(1)
	default:
		to.failedClosed.Add(1)
	}
	if err != nil || !got.counted {
		select { // so that callers who are answered at once leave time to others
		case <-until.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// sum adds up a number of all callers.
func (l *load) sum(of func(*told) int64) (n int64) {
	for _, c := range l.told {
		n += of(c)
	}
	return n
}

func (l *load) allowed() int64 {
	return l.sum(func(c *told) int64 { return c.allowed.Load() })
}

// each waits until a number has grown by n for each of these callers, or for all if none is named.
func (l *load) each(t *testing.T, n int64, of func(*told) int64, callers ...int) {
	t.Helper()
	if callers == nil {
		for i := range l.told {
			callers = append(callers, i)
		}
	}
	before := make([]int64, len(l.told))
	for i, c := range l.told {
		before[i] = of(c)
	}
	for _, i := range callers {
		testkit.WaitUntil(t, func() bool { return of(l.told[i]) >= before[i]+n }, "caller %d", i)
	}
}

// requireNoFailure checks that the database has decided all calls.
func (l *load) requireNoFailure(t *testing.T) {
	t.Helper()
	if err := l.lastErr.Load(); err != nil {
		require.NoError(t, *err, "%d calls have failed", l.sum(func(c *told) int64 { return c.failed.Load() }))
	}
	require.Zero(t, l.sum((*told).trouble))
}
