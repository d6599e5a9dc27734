package limitertest

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Rounds is how many times as long as usual tests of random events go on.
func Rounds(t *testing.T) int {
	t.Helper()
	return testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)
}

// Of the tests' clocks, in microseconds as the models count. C0 is a time.
const (
	Second int64 = 1_000_000
	Minute       = 60 * Second
	Hour         = 60 * Minute

	C0 = 1_800_000_000 * Second
)

// T0 is a time of the tests' clocks.
var T0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Clock is a clock that tests move.
type Clock struct{ At time.Time }

// Now returns the time.
func (c *Clock) Now() time.Time { return c.At }

// Elapse lets time pass, in a bubble of synctest.
func Elapse(d time.Duration) { <-time.After(d) }

// Seed returns the seed of a random test, which it logs.
func Seed(t *testing.T) uint64 {
	t.Helper()
	return testkit.Seed(t, modeltest.SeedVariable)
}
