package limitertest

import (
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Rounds returns the factor by which random tests run longer. RATELIMIT_TEST_ROUNDS sets it; the default is 1.
func Rounds(t *testing.T) int {
	t.Helper()
	return testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1)
}

// Times of tests are in microseconds, as in package model. C0 is the time at which tests begin.
const (
	Second int64 = 1_000_000
	Minute       = 60 * Second
	Hour         = 60 * Minute

	C0 = 1_800_000_000 * Second
)

// T0 is the time at which a test's clock starts.
var T0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// Clock is a clock that a test moves by setting At.
type Clock struct{ At time.Time }

// Now returns the time.
func (c *Clock) Now() time.Time { return c.At }

// Elapse lets the time d pass, in a bubble of testing/synctest.
func Elapse(d time.Duration) { <-time.After(d) }

// Seed returns the seed of a random test, and logs it.
func Seed(t *testing.T) uint64 {
	t.Helper()
	return testkit.Seed(t, modeltest.SeedVariable)
}
