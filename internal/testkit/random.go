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

// Rounds returns the number of rounds of a random test: the value of the environment variable, or the argument usual if
// the variable is not set.
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

// Seed returns the seed for a test's random numbers: the value of the environment variable, or a random seed if the
// variable is not set.
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

// Quantile returns the duration below which this share of the durations lies. Quantile returns 0 if there are no
// durations.
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
