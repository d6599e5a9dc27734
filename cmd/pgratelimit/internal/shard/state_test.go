package shard

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// JudgeClock warns only if the clocks certainly differ.
func TestJudgeClock(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		shard, proxy ClockTime
		wrong        bool
	}{
		{ClockTime{0, 0}, ClockTime{FarClocks, 0}, false},
		{ClockTime{0, 0}, ClockTime{FarClocks + 1, 0}, true},
		{ClockTime{FarClocks + 1, 0}, ClockTime{0, 0}, true},
		{ClockTime{FarClocks + 1, 1}, ClockTime{0, 0}, false},
		{ClockTime{0, 0}, ClockTime{FarClocks + 1, 1}, false},
	} {
		s := State{Reached: true}
		s.JudgeClock(test.proxy)
		s = State{Reached: true, Clock: test.shard}
		s.JudgeClock(test.proxy)
		require.Equal(t, test.wrong, len(s.Wrong) > 0, test)
	}
}
