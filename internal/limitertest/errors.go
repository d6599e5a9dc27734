package limitertest

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// kinds lists all errors that errors.Is can find in a StoreError.
var kinds = []error{
	ratelimit.ErrNotMigrated,
	ratelimit.ErrNewerSchema,
	ratelimit.ErrNotPermitted,
	ratelimit.ErrPreparedStatements,
	ratelimit.ErrSetup,
	ratelimit.ErrUnavailable,
	ratelimit.ErrReadOnly,
	ratelimit.ErrTimeout,
	ratelimit.ErrPoolExhausted,
	ratelimit.ErrOutcomeUnknown,
}

// RequireKinds requires a StoreError of exactly these kinds. The error must not contain the key "personal".
func RequireKinds(t testing.TB, err error, want ...error) {
	const key = "personal"
	t.Helper()
	var store *ratelimit.StoreError
	require.ErrorAs(t, err, &store)
	for _, kind := range kinds {
		require.Equal(t, slices.Contains(want, kind), errors.Is(err, kind), "%v: %v", kind, err)
	}
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: "), err)
	require.Equal(t, 1, strings.Count(err.Error(), "ratelimit: "), err)
	require.NotContains(t, err.Error(), key)
	require.NotContains(t, fmt.Sprintf("%+v", err), key)
	for _, kind := range want {
		require.Contains(t, err.Error(), strings.TrimPrefix(kind.Error(), "ratelimit: "))
	}
}
