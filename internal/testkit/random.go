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

// Rounds returns the number of rounds of a random test: the environment variable's value, else usual.
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

// Seed returns the seed of a test's random numbers. With the environment variable set, the test repeats the same
// numbers.
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

// Quantile returns the smallest duration that is not exceeded by this share of all durations. It returns 0 if there are
// none.
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
