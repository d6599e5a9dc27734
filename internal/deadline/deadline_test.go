package deadline_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/deadline"
)

func TestDefault(t *testing.T) {
	t.Parallel()
	require.Equal(t, time.Second, deadline.Default)
}
