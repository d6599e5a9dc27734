package testkit

import (
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Rounds returns how many rounds a test of random events takes: what the environment variable says, else usual.
func Rounds(t testing.TB, variable string, usual int) int {
	t.Helper()
	text := os.Getenv(variable)
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, variable)
	require.Positive(t, n, variable)
	return n
}

// Seed returns the seed of a test's random numbers. With the environment variable, the test draws the same ones
// again.
func Seed(t testing.TB, variable string) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(variable); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, variable)
	}
	t.Logf("%s=%d repeats it", variable, seed)
	return seed
}

// Quantile returns the duration that this share of all durations does not exceed. It returns 0 if there are none.
func Quantile(durations []time.Duration, share float64) time.Duration {
	if len(durations) == 0 {
		return 0
	}
	sorted := durations
	if !slices.IsSorted(durations) {
		sorted = slices.Sorted(slices.Values(durations))
	}
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}
