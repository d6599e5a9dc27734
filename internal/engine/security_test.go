package engine_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Whatever objects the application's role creates, the functions decide as the model does.
func TestApplicationsDecoysChangeNoDecision(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const stories, stepsOf = 8, 40
	db := pgtest.New(t)
	pool := pgtest.Application(t, db, "../..")
	seed := limitertest.Seed(t)
	for story := range uint64(stories) {
		steps, err := modeltest.NewStory(rand.New(rand.NewPCG(seed, story)), stepsOf)
		require.NoError(t, err)
		for _, step := range steps {
			limiter := limitertest.New(t, pool, ratelimit.Config{
				Name: fmt.Sprint(
					story,
					step.Name,
				), Policy: limitertest.Policy(step.Policy.Numbers()), Durable: step.Durable,
			}, ratelimit.ClientConfig{Schema: "public", Test: limitertest.Frozen(time.UnixMicro(step.Clock))})
			got := slices.Clone(step.Elements)
			require.NoError(t, decide(t.Context(), limiter, pool, got, engine.Transaction{}), "%s=%d", modeltest.SeedVariable, seed)
			for i, want := range step.Elements {
				got, want := got[i].Decision, want.Decision
				got.DecidedAt = want.DecidedAt // TestTimesAreReadExactly compares these times
				require.Equal(t, want, got, "%s=%d: %v", modeltest.SeedVariable, seed, step)
			}
		}
	}
	for _, decoy := range []string{"decoy.rate_limit_ephemeral", "decoy.rate_limit_durable"} {
		require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM "+decoy))
	}
}

// The application's role gets exactly Limit units, by the database's clock, and can call every method.
func TestApplicationNeedsNothingButExecute(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const limit = 50
	db := pgtest.New(t)
	pool := pgtest.Application(t, db, "../..")
	for name, policy := range limitertest.SlowPolicies(limit) {
		for _, durable := range []bool{false, true} {
			config := ratelimit.Config{
				Name:              name,
				Policy:            policy,
				Durable:           durable,
				SynchronousCommit: durable,
			}
			clientConfig := ratelimit.ClientConfig{Schema: "public"}
			limiters := []*ratelimit.Limiter{limitertest.New(t, pool, config, clientConfig), limitertest.New(t, pool, config, clientConfig)}
			results, errs := make([]ratelimit.Result, 2*limit), make([]error, 2*limit)
			testkit.Together(len(errs), func(i int) { results[i], errs[i] = limiters[i%2].Allow(t.Context(), "key") })
			require.NoError(t, errors.Join(errs...))
			admitted := 0
			for _, result := range results {
				require.Greater(t, result.DecidedAt.Year(), 2001)
				if result.Allowed {
					admitted++
				}
			}
			require.Equal(t, limit, admitted)
			require.EqualValues(t, limit, limitertest.Taken(t, db.Pool, config, "key"))

			for name, call := range limitertest.Calls(limiters[0], "another") {
				require.NoError(t, call(), name)
			}
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				result, err := limiters[0].WithTx(tx).AllowN(t.Context(), "third", limit)
				require.True(t, result.Allowed)
				return errors.Join(err, limiters[0].WithTx(tx).Reset(t.Context(), "key"))
			}))
			require.Zero(t, limitertest.Taken(t, db.Pool, config, "key"))
		}
	}
}

// A negative control: if the functions use the search_path of their caller, they run the decoys.
func TestFunctionsWithoutTheirSearchPathTakeDecoys(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pool := pgtest.Application(t, db, "../..")
	config := ratelimit.Config{
		Name:   "test",
		Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
	}
	clientConfig := ratelimit.ClientConfig{Schema: "public"}
	_, err := limitertest.New(t, pool, config, clientConfig).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, config, "key"))

	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_take_fixed_window RESET search_path")
	pool.Reset()
	_, err = limitertest.New(t, pool, config, clientConfig).Allow(t.Context(), "key")
	stored := limitertest.Taken(t, db.Pool, config, "key")
	require.True(t, err != nil || stored != 2, "no decoy was taken")
}
