package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// What one process gives to a key, others hear of: they forget that it was denied, however long they would remember.
func TestDenialsAreForgottenElsewhere(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiters := make([]*Limiter, 2)
	for i := range limiters {
		limiters[i] = newLimiter(t, db.Pool, Config{
			Name: "api", Policy: FixedWindow{1, time.Hour}, Policies: runningPolicies(t, db.Pool, PoliciesConfig{}),
		}, ClientConfig{DenialMaxAge: time.Hour})
		testkit.WaitUntil(t, func() bool { return limiters[i].Config().Policies.Status().Listening })
	}
	for name, give := range map[string]func(key string, taken Result) error{
		"reset":  func(key string, _ Result) error { return limiters[1].Reset(t.Context(), key) },
		"refund": func(_ string, taken Result) error { return errorOf(limiters[1].Refund(t.Context(), taken)) },
		"grant":  func(key string, _ Result) error { return errorOf(limiters[1].Grant(t.Context(), key, 1)) },
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
		require.Equal(t, SourceCachedDenial, still.Source)
	}
}

// A denial that is on its way while others say what was given is not remembered, also if it is the first one.
func TestDenialsOnTheirWayAreForgotten(t *testing.T) {
	t.Parallel()

	for _, isFirst := range []bool{true, false} {
		for _, told := range []bool{true, false} {
			d, clock := newTestDenials(FixedWindow{1, time.Hour}, time.Hour)
			if !isFirst {
				rememberDenied(d, "other", clock)
			}
			since := d.Snapshot()
			if told {
				d.ForgetIf(func(k engine.DenialKey) bool { return k.Key == "key" })
			}
			taken, _ := d.policy.Decide(model.State{}, clock.at.UnixMicro(), 1)
			_, denied := d.policy.Decide(taken, clock.at.UnixMicro(), 1)
			denied.DecidedAt = clock.at
			d.remember("key", denied, d.Elapsed(), d.Elapsed(), &since)
			_, remembered := d.deny("key", 1)
			require.Equal(t, told, !remembered)
			_, remembered = d.deny("other", 1)
			require.Equal(t, !isFirst, remembered)
		}
	}
}

// While a process does not listen, it hears of nothing. So it forgets all denials when it listens again.
func TestDenialsAreForgottenWhenListeningBegins(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	l := newLimiter(t, db.Pool, Config{
		Name: "api", Policy: FixedWindow{1, time.Hour}, Policies: p,
	}, ClientConfig{DenialMaxAge: time.Hour})
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	for range 2 {
		_, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral") // which nobody is told
	result, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, SourceCachedDenial, result.Source)
	require.Positive(t, pgtest.Scalar[int64](t, db.Pool, endListeners))
	testkit.WaitUntil(t, func() bool {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Allowed
	})
}
