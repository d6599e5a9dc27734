package livepage

import (
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/limitertest"
)

// The end of a bucket is above all of its durations, by at most a quarter.
func TestHistogram(t *testing.T) {
	t.Parallel()

	for _, d := range []time.Duration{4, 5, 7, 8, 9, 15, 16, 999, time.Microsecond, 95 * time.Microsecond, time.Second, 24 * time.Hour, 1 << 60} {
		end := endOf(bucketOf(d))
		require.Greater(t, end, d)
		require.LessOrEqual(t, float64(end), 1.25*float64(d)+1)
	}
	require.Equal(t, bucketOf(4), bucketOf(-1))
	var h histogram
	require.Zero(t, h.quantile(0.5))
	for range 98 {
		h.add(time.Millisecond)
	}
	h.add(time.Second)
	h.add(time.Second)
	require.InEpsilon(t, time.Millisecond, h.quantile(0.5), 0.25)
	require.InEpsilon(t, time.Second, h.quantile(0.99), 0.25)
}

// The sketch keeps the keys that are denied most, and no count is below the truth or above it by more than its error.
func TestSketch(t *testing.T) {
	t.Parallel()

	var s sketch
	denials := map[string]int64{}
	deny := func(key string) {
		s.add("login", key)
		denials[key]++
	}
	for i := range 10_000 {
		deny("rare " + strconv.Itoa(i))
		if i%10 == 0 {
			deny("frequent")
		}
		if i%20 == 0 {
			deny("less frequent")
		}
	}
	top := s.top(func(key string) string { return key })
	require.Len(t, top, shownKeys)
	require.Equal(t, "frequent", top[0].Key)
	require.Equal(t, "less frequent", top[1].Key)
	for _, k := range top {
		require.GreaterOrEqual(t, k.Count, denials[k.Key])
		require.LessOrEqual(t, k.AtLeast(), denials[k.Key])
	}
	s.reset()
	require.Empty(t, s.top(nil))
}

func TestMask(t *testing.T) {
	t.Parallel()

	require.Regexp(t, `^use… #[0-9a-f]{6}$`, mask("user:alice"))
	require.Regexp(t, `^… #`, mask("ab"))
	require.Regexp(t, `^é… #`, mask("éab"))
	require.NotEqual(t, mask("user:alice"), mask("user:bob"))
}

// A minute after the last look, the page counts no more, and has forgotten all keys.
func TestCountingEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p := New(Config{})
		p.look()
		p.deniedKey("login", "a")
		limitertest.Elapse(keepCounting / 2)
		p.look()
		limitertest.Elapse(keepCounting - time.Second)
		p.deniedKey("login", "a")
		require.EqualValues(t, 2, p.denied.top(mask)[0].Count)
		limitertest.Elapse(2 * time.Second)
		synctest.Wait()
		p.deniedKey("login", "a")
		require.Empty(t, p.denied.top(mask))
		for i := range p.denied.parts {
			require.Nil(t, p.denied.parts[i].kept)
		}
		require.False(t, p.looking.Load())
	})
}

// A process with ever new names of limiters uses a bounded amount of memory.
func TestManyLimiters(t *testing.T) {
	t.Parallel()

	p := New(Config{})
	p.look()
	for i := range 2 * maxLimiters {
		p.countOf(strconv.Itoa(i)).allowed.Add(1)
	}
	require.Len(t, *p.counts.Load(), maxLimiters+1)
	require.EqualValues(t, maxLimiters, (*p.counts.Load())[others].allowed.Load())
}
