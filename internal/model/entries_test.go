package model_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

func TestEntriesAreThoseOfTheTable(t *testing.T) {
	t.Parallel()
	require.Empty(t, model.NewEntries(nil))
	log := model.NewEntries([]int64{c0<<10 | 3, c2<<10 | 1000})
	require.Equal(t, log, model.Entries("").With(c0, 1).With(c0, 2).With(c2, 1000))
	require.Equal(
		t,
		[]int64{3, 1000, c5 - c0, c5 - c2},
		[]int64{log.Units(0), log.Units(1), log.Age(0, c5), log.Age(1, c5)},
	)
	require.Equal(t, model.Entries("").With(c1, 3).With(c3, 1000), log.Shifted(c0-c1))

	// Age must be right for any time.
	for _, now := range []int64{0, 1, 1 << 53, 1<<53 - 1, 1 << 54, 1<<60 - 1, 1 << 60} {
		for _, ago := range []int64{0, 1, second, model.MaxSpan, 2*model.MaxSpan - 1} {
			if ago <= now {
				require.Equal(t, ago, model.Entries("").With(now-ago, 7).Age(0, now), "%d µs before %d", ago, now)
				require.Equal(t, ago, model.Entries("").With(now, 7).Shifted(ago).Age(0, now), "%d µs before %d", ago, now)
			}
		}
	}
}
