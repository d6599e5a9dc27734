package policytable_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// When a process gives units to a key, other processes forget their denials of the key, however long they would
// remember the denials.
func TestDenialsAreForgottenElsewhere(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiters := make([]*ratelimit.Limiter, 2)
	for i := range limiters {
		limiters[i] = limitertest.New(t, db.Pool, ratelimit.Config{
			Name: "api", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{}),
		}, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
		testkit.WaitUntil(t, func() bool { return limiters[i].Config().Policies.Status().Listening })
	}
	for name, give := range map[string]func(key string, taken ratelimit.Result) error{
		"reset": func(key string, _ ratelimit.Result) error { return limiters[1].Reset(t.Context(), key) },
		"refund": func(_ string, taken ratelimit.Result) error {
			return limitertest.ErrorOf(limiters[1].Refund(t.Context(), taken))
		},
		"grant": func(key string, _ ratelimit.Result) error {
			return limitertest.ErrorOf(limiters[1].Grant(t.Context(), key, 1))
		},
	} {
		taken, err := limiters[1].Allow(t.Context(), name)
		require.NoError(t, err)
		other, err := limiters[0].Allow(t.Context(), "other "+name)
		require.NoError(t, err)
		require.True(t, other.Allowed)
		for _, key := range []string{name, "other " + name} {
			for range 2 {
				denied, err := limiters[0].Allow(t.Context(), key)
				require.NoError(t, err)
				require.False(t, denied.Allowed)
			}
		}
		require.NoError(t, give(name, taken))
		testkit.WaitUntil(t, func() bool {
			result, err := limiters[0].Allow(t.Context(), name)
			require.NoError(t, err)
			return result.Allowed
		})
		still, err := limiters[0].Allow(t.Context(), "other "+name)
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceCachedDenial, still.Source)
	}
}

// A process that does not listen hears of nothing. So it forgets all denials when it listens again.
func TestDenialsAreForgottenWhenListeningBegins(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.NewPool(t, nil), ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p,
	}, ratelimit.ClientConfig{DenialMaxAge: time.Hour})
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	for range 2 {
		_, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral") // no process hears of this
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceCachedDenial, result.Source)
	require.Positive(t, pgtest.Scalar[int64](t, db.Pool, endListeners))
	testkit.WaitUntil(t, func() bool {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Allowed
	})
}

// The notifications contain each hash once, and Postgres accepts them.
func TestForgetPayloads(t *testing.T) {
	t.Parallel()

	require.NotEqual(t, policytable.KeyHash("a", "bc"), policytable.KeyHash("ab", "c"))
	hashes := map[string]bool{}
	for i := range 5000 {
		hashes[policytable.KeyHash("api", fmt.Sprint(i))] = true
	}
	told, n := map[string]bool{}, 0
	for payload := range policytable.ForgetPayloads(hashes) {
		n++
		require.Less(t, len(payload), 8000)
		read, ok := policytable.ReadForget(payload)
		require.True(t, ok)
		for hash := range read {
			require.False(t, told[hash])
			told[hash] = true
		}
	}
	require.Equal(t, hashes, told)
	require.Greater(t, n, 1)
	_, ok := policytable.ReadForget("policies")
	require.False(t, ok)
	for range policytable.ForgetPayloads(nil) {
		require.Fail(t, "nothing is told of nothing")
	}
}
