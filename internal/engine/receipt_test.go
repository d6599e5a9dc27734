package engine_test

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Callers whose requests were merged, callers of Wait and callers of AllowAll can each give back their own units.
func TestEachGivesBackItsOwn(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	pool := db.Pool
	limitertest.EachSlowPolicyAllAndTable(t, 12, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)}
		limiter := limitertest.New(t, pool, config, clientConfig)
		batch := requestsFor(limiter, "key", 3, 3, 3)
		send(limiter, batch)
		results, errs := outcomes(batch)
		require.NoError(t, errors.Join(errs...))
		for i, left := range []int64{6, 3, 0} {
			_, err := limiter.Refund(t.Context(), results[[]int{1, 0, 2}[i]])
			require.NoError(t, err)
			require.Equal(t, left, limitertest.Taken(t, pool, config, "key"))
		}

		waited, errs := make([]ratelimit.Result, 3), make([]error, 3)
		testkit.Together(3, func(i int) { waited[i], errs[i] = limiter.WaitN(t.Context(), "key", int64(1+i)) })
		require.NoError(t, errors.Join(errs...))
		require.EqualValues(t, 6, limitertest.Taken(t, pool, config, "key"))
		for i, left := range []int64{5, 3, 0} {
			_, err := limiter.Refund(t.Context(), waited[i])
			require.NoError(t, err)
			require.Equal(t, left, limitertest.Taken(t, pool, config, "key"))
		}

		config.Name = "other"
		other := limitertest.Of(t, limitertest.Client(limiter), config)
		both, err := ratelimit.AllowAll(t.Context(), limiter.Request("key", 2), other.Request("key", 5))
		require.NoError(t, err)
		_, err = limiter.Refund(t.Context(), both.Each[1])
		require.ErrorContains(t, err, "refund it there")
		_, err = other.RefundN(t.Context(), both.Each[1], 4)
		require.NoError(t, err)
		require.EqualValues(t, 1, limitertest.Taken(t, pool, config, "key"))
		config.Name = limiter.Config().Name
		require.EqualValues(t, 2, limitertest.Taken(t, pool, config, "key"))
	})
}
