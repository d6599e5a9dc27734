package deadline_test

import (
	"context"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/deadline"
)

// The documents of ClientConfig.Timeout promise a second.
func TestDefault(t *testing.T) {
	t.Parallel()
	require.Equal(t, time.Second, deadline.Default)
}

// Contexts of a group end as those of package context do, whatever the order of their times.
func TestContextsEndInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		type twin struct {
			at              time.Time
			ctx, child      context.Context //nolint:containedctx // they are what is tested
			want, wantChild context.Context //nolint:containedctx // as above
			cancel          func()
			stop, wantStop  func() bool
			calls, wanted   [2]atomic.Int64 // of functions that stay, and of those that may be stopped
		}
		var group deadline.Group
		var twins []*twin
		ended := map[error]int{}
		for range 60 {
			for range rand.IntN(5) {
				w := &twin{at: time.Now().Add(time.Duration(rand.IntN(30)-3) * time.Second)}
				ctx, cancel := group.Context(w.at)
				want, cancelWant := context.WithDeadline(context.Background(), w.at)
				w.ctx, w.want = ctx, want //nolint:fatcontext // they are siblings
				var cancelChild, cancelWantChild context.CancelFunc
				w.child, cancelChild = context.WithTimeout(ctx, time.Hour)
				w.wantChild, cancelWantChild = context.WithTimeout(want, time.Hour)
				defer cancelChild()
				defer cancelWantChild()
				w.cancel = func() {
					cancel()
					cancelWant()
				}
				defer w.cancel()
				context.AfterFunc(ctx, func() { w.calls[0].Add(1) })
				context.AfterFunc(want, func() { w.wanted[0].Add(1) })
				w.stop = context.AfterFunc(ctx, func() { w.calls[1].Add(1) })
				w.wantStop = context.AfterFunc(want, func() { w.wanted[1].Add(1) })
				twins = append(twins, w)
			}
			<-time.After(500 * time.Millisecond)
			synctest.Wait()
			for i, w := range twins {
				at, ok := w.ctx.Deadline()
				require.True(t, ok)
				require.Equal(t, w.at, at)
				require.Equal(t, w.want.Err(), w.ctx.Err())
				require.Equal(t, w.wantChild.Err(), w.child.Err())
				for f := range w.calls {
					require.Equal(t, w.wanted[f].Load(), w.calls[f].Load())
				}
				require.Nil(t, w.ctx.Value(i))
				select {
				case <-w.ctx.Done():
					require.Error(t, w.ctx.Err())
				default:
					require.NoError(t, w.ctx.Err())
				}
				switch rand.IntN(20) {
				case 0:
					w.cancel()
				case 1:
					require.Equal(t, w.wantStop(), w.stop())
				}
				ended[w.ctx.Err()]++
			}
			<-time.After(500 * time.Millisecond)
		}
		require.Len(t, ended, 3)
	})
}

// What is to happen after a context happens at once if it has ended.
func TestAfterTheEnd(t *testing.T) {
	t.Parallel()

	var group deadline.Group
	ctx, cancel := group.Context(time.Now().Add(time.Hour))
	cancel()
	cancel()
	require.ErrorIs(t, ctx.Err(), context.Canceled)
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { close(done) })
	<-done
	require.False(t, stop())
}

// Many goroutines use a group at once.
func TestGroupOfMany(t *testing.T) {
	t.Parallel()

	var group deadline.Group
	var all sync.WaitGroup
	for i := range 50 {
		all.Go(func() {
			for range 200 {
				ctx, cancel := group.Context(time.Now().Add(time.Duration(i) * 10 * time.Microsecond))
				stop := context.AfterFunc(ctx, func() {})
				switch i % 3 {
				case 0:
					<-ctx.Done()
					if err := ctx.Err(); err != context.DeadlineExceeded {
						t.Error(err)
					}
				case 1:
					stop()
				}
				cancel()
			}
		})
	}
	all.Wait()
}
