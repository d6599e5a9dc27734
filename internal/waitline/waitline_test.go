package waitline

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// Lines that were told the same retry time do not sleep for the same time: never less, by at most a 50th or 100 ms
// more, and no longer than the first one can wait.
func TestSleepIsJittered(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) { // in which time stands still meanwhile
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
