package waitline

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Lines with the same retry time sleep for different times. A line never wakes early. It oversleeps by at most a 50th
// of the retry time and at most 100 ms, and never beyond the head's deadline.
func TestSleepIsJittered(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) { // time stands still in this bubble
		for _, c := range []struct{ retryAfter, patience, most time.Duration }{
			{time.Second, 0, 20 * time.Millisecond},
			{time.Hour, 0, 100 * time.Millisecond},
			{time.Hour, time.Hour + time.Minute, 100 * time.Millisecond},
			{time.Hour, time.Hour + 10*time.Millisecond, 5 * time.Millisecond},
		} {
			var least, most time.Duration
			for range 1000 {
				in := &line[Reading]{lines: &Lines[Reading]{}, key: "key", asking: make(chan struct{})}
				w := &waiter[Reading]{cost: 1, told: make(chan struct{})}
				if c.patience > 0 {
					w.deadline = time.Now().Add(c.patience)
				}
				w.place = in.waiters.PushBack(w)
				extra := in.settle([]*waiter[Reading]{w}, 1, nil, Reading{RetryAfter: c.retryAfter}, nil) - c.retryAfter
				require.GreaterOrEqual(t, extra, time.Duration(0))
				require.LessOrEqual(t, extra, c.most)
				least, most = min(least, extra-c.most), max(most, extra)
			}
			require.Greater(t, most, c.most*3/4)
			require.Less(t, least+c.most, c.most/4)
		}
	})
}
