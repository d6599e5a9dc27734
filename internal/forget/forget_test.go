package forget_test

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/forget"
)

// The notifications contain each hash once, and Postgres accepts them.
func TestPayloads(t *testing.T) {
	t.Parallel()

	require.NotEqual(t, forget.Hash("a", "bc"), forget.Hash("ab", "c"))
	hashes := map[string]bool{}
	for i := range 5000 {
		hashes[forget.Hash("api", fmt.Sprint(i))] = true
	}
	told, n := map[string]bool{}, 0
	for payload := range forget.Payloads(hashes) {
		n++
		require.Less(t, len(payload), 8000)
		read, ok := forget.Read(payload)
		require.True(t, ok)
		for hash := range read {
			require.False(t, told[hash])
			told[hash] = true
		}
	}
	require.Equal(t, hashes, told)
	require.Greater(t, n, 1)
	_, ok := forget.Read("policies")
	require.False(t, ok)
	for range forget.Payloads(nil) {
		require.Fail(t, "nothing is told of nothing")
	}
}
