package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// Only denials of a cost above 0 tell their key, whichever call was denied.
func TestDeniedKey(t *testing.T) {
	t.Parallel()

	var keys []string
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{Observer: &ratelimit.Observer{
		DeniedKey: func(limiter, key string) { keys = append(keys, limiter+" "+key) },
	}})
	require.NoError(t, err)
	limiter, err := client.Limiter(ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, OnFailure: ratelimit.ReturnError(),
	})
	require.NoError(t, err)
	for range 3 {
		_, err := limiter.Allow(t.Context(), "a")
		require.NoError(t, err)
	}
	_, err = limiter.Peek(t.Context(), "a")
	require.NoError(t, err)
	_, err = limiter.Allow(t.Context(), "")
	require.Error(t, err)
	require.Equal(t, []string{"login a", "login a"}, keys)
	_, err = ratelimit.AllowAll(t.Context(), limiter.Request("b", 1), limiter.Request("a", 1))
	require.NoError(t, err)
	require.Equal(t, []string{"login a", "login a", "login a"}, keys)
}

func TestObservers(t *testing.T) {
	t.Parallel()

	var told []string
	tell := func(name string) *ratelimit.Observer {
		return &ratelimit.Observer{
			Decision:  func(ratelimit.DecisionEvent) { told = append(told, name+" decision") },
			Statement: func(ratelimit.StatementEvent) { told = append(told, name+" statement") },
			Lease:     func(ratelimit.LeaseEvent) { told = append(told, name+" lease") },
			Breaker:   func(ratelimit.BreakerEvent) { told = append(told, name+" breaker") },
			Renewal:   func(ratelimit.RenewalEvent) { told = append(told, name+" renewal") },
			DeniedKey: func(_, key string) { told = append(told, name+" "+key) },
		}
	}
	all := ratelimit.Observers(nil, tell("a"), &ratelimit.Observer{}, tell("b"))
	all.Decision(ratelimit.DecisionEvent{})
	all.Statement(ratelimit.StatementEvent{})
	all.Lease(ratelimit.LeaseEvent{})
	all.Breaker(ratelimit.BreakerEvent{})
	all.Renewal(ratelimit.RenewalEvent{})
	all.DeniedKey("login", "key")
	require.Equal(t, []string{
		"a decision", "b decision", "a statement", "b statement", "a lease", "b lease", "a breaker", "b breaker",
		"a renewal", "b renewal", "a key", "b key",
	}, told)
	require.Equal(t, &ratelimit.Observer{}, ratelimit.Observers())
}
