package ratelimit

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Where nearly all keys are new, the database is told so. It is told otherwise as soon as they come again.
func TestNewKeysAreExpectedAfterNewKeys(t *testing.T) {
	t.Parallel()

	for name, policy := range fastPolicies() {
		if name == "sliding log" { // whose function does not care
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLimiter(t, pgtest.New(t).Pool, Config{
				Name: "test", Policy: policy, Client: ClientConfig{Timeout: amply, Test: frozen(t0)},
			})
			next := 0
			ask := func(known bool) (expected bool) {
				t.Helper()
				if !known {
					next++
				}
				result, err := l.Allow(t.Context(), fmt.Sprint(next))
				require.NoError(t, err)
				require.True(t, result.Allowed)
				require.Equal(t, known, result.Remaining < 99)
				return l.space.fresh.expected()
			}
			for range 7 {
				require.False(t, ask(false))
			}
			require.True(t, ask(false))
			require.True(t, ask(false))
			require.False(t, ask(true))
			for range 50 {
				ask(false)
			}
			for range 8 { // one in nine has been there
				require.True(t, l.space.fresh.expected())
				for range 8 {
					ask(false)
				}
				ask(true)
				ask(false)
			}
			_, err := l.AllowN(t.Context(), fmt.Sprint(next), 99) // a denial has a row, too
			require.NoError(t, err)
			require.False(t, l.space.fresh.expected())
		})
	}
}
