package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestReset(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		config.Name = "another"
		another := limitertest.New(t, db.Pool, config)
		config.Name, config.Durable = "test", !config.Durable
		elsewhere := limitertest.New(t, db.Pool, config)
		all := []*ratelimit.Limiter{limiter, another, elsewhere}
		for _, l := range all {
			for _, key := range []string{"key", "other key"} {
				_, err := l.AllowN(t.Context(), key, 10)
				require.NoError(t, err)
				denied, err := l.Allow(t.Context(), key) // this denial is remembered
				require.NoError(t, err)
				require.False(t, denied.Allowed)
			}
		}

		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.NoError(t, limiter.Reset(t.Context(), "unknown"))
		for i, l := range all {
			for _, key := range []string{"key", "other key"} {
				result, err := l.Allow(t.Context(), key)
				require.NoError(t, err)
				require.Equal(t, i == 0 && key == "key", result.Allowed)
			}
		}
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.Len(t, pgtest.StoredRows(t, db.Pool, !config.Durable), 3)
		require.Len(t, pgtest.StoredRows(t, db.Pool, config.Durable), 2)
	})
}

func TestResetOfAHeldKeyGivesUp(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		},
		ratelimit.ClientConfig{Timeout: 4 * time.Second},
	)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	holder := limitertest.Hold(t, db, limiter.Config(), "key")
	require.ErrorIs(t, limiter.Reset(t.Context(), "key"), ratelimit.ErrTimeout)
	require.NoError(t, holder.Rollback(t.Context()))
	require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, limiter.Config(), "key"))
}
