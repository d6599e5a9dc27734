package bench

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestTargetsAreJudged(t *testing.T) {
	t.Parallel()

	r := &report{}
	for _, test := range []struct {
		goal     goal
		measured float64
		met      string
	}{
		{atLeast(1.5, 0, "%.2f"), 0.36, "no"},
		{atLeast(1.5, 0, "%.2f"), 1.5, "yes"},
		{atLeast(1.5, 3, "%.2f"), 3, "yes, the aim too"},
		{atMost(2, 1.4, "%.2f"), 2.01, "no"},
		{atMost(2, 1.4, "%.2f"), 2, "yes"},
		{atMost(2, 1.4, "%.2f"), 1.4, "yes, the aim too"},
		{atMost(0, 0, "%.0f"), 1, "no"},
		{atMost(0, 0, "%.0f"), 0, "yes"},
	} {
		r.target("", test.goal, []float64{test.measured})
		require.Equal(t, test.met, r.Targets[len(r.Targets)-1].Met, "%+v", test)
	}
	r.target("", atLeast(1, 2, "%.2f"), nil)
	require.Equal(t, "not measured", r.Targets[len(r.Targets)-1].Met)
}
