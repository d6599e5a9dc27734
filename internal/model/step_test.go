package model_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// The tests of the models share these helpers:
//
//   - playModel, which plays a table of steps worked out by hand.
//   - checkDecision, which checks everything that the specification promises of one decision.
//   - walkModel, which calls checkDecision at random clocks, costs and policies, for property tests and fuzz targets.
//   - slowDecision, which decides by a search over what would fit, in rationals. The models are compared with it.

// Times are in microseconds, as in package model.
const (
	second int64 = 1_000_000
	minute       = 60 * second
	hour         = 60 * minute
)

// The times c0 to c9 are one second apart.
const (
	c0 = 1_800_000_000*second + iota*second
	c1
	c2
	c3
	c4
	c5
	c6
	c7
	c8
	c9
)

// at returns a time of day in microseconds, such as "12:01:15" or "12:01:15.000001". All times are on one day.
func at(clock string) int64 {
	t, err := time.Parse(time.DateTime, "2026-07-01 "+clock)
	if err != nil {
		panic(err)
	}
	return t.UnixMicro()
}

// modelStep is a request for n units at the time at, with the expected decision.
type modelStep struct {
	at   int64
	n    int64
	want model.Decision
}

// granted returns the expected decision of an allowed request. Times are in microseconds.
func granted(remaining, resetAfter int64) model.Decision {
	return model.Decision{Granted: 1, Remaining: remaining, ResetAfter: resetAfter}
}

// denied returns the expected decision of a denied request, or of a Peek that finds no room.
func denied(remaining, retryAfter, resetAfter int64) model.Decision {
	return model.Decision{Remaining: remaining, RetryAfter: retryAfter, ResetAfter: resetAfter}
}

// free returns the expected decision of a Peek that finds room for 1 unit.
func free(remaining, resetAfter int64) model.Decision { return denied(remaining, 0, resetAfter) }

// playModel plays steps from the state s, and returns the last state. It checks each decision against the step and
// against the specification.
func playModel(t *testing.T, p model.Rules, s model.State, steps ...modelStep) model.State {
	t.Helper()
	require.True(t, modeltest.InRange(p))
	for i, step := range steps {
		next, got, err := checkDecision(p, s, step.at, step.n)
		require.NoError(t, err, "step %d", i)
		require.Equal(t, step.want, got, "step %d: %d at %v, from %+v", i, step.n, time.UnixMicro(step.at).UTC(), s)
		s = next
	}
	return s
}
