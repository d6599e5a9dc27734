// Package limitertest has helpers for tests that use a limiter. Tests within package ratelimit cannot import it, so
// most tests in that folder are in package ratelimit_test.
package limitertest

import (
	"cmp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// New returns a limiter with a new client. See NewClient for what an empty ClientConfig means.
func New(
	t testing.TB, db ratelimit.DBTX, config ratelimit.Config, client ...ratelimit.ClientConfig,
) *ratelimit.Limiter {
	t.Helper()
	return Of(t, NewClient(t, db, append(client, ratelimit.ClientConfig{})[0]), config)
}

// NewClient returns a client, and makes the test fail if the config is invalid. If the config has no Timeout, the
// Timeout is so long that no call reaches it, even on a busy machine.
func NewClient(t testing.TB, db ratelimit.DBTX, config ratelimit.ClientConfig) *ratelimit.Client {
	t.Helper()
	config.Timeout = cmp.Or(config.Timeout, testkit.Amply)
	client, err := ratelimit.NewClient(db, config)
	require.NoError(t, err)
	EngineOf(client).Database.ShadowWait = 200
	return client
}

// Of returns a limiter that uses the client.
func Of(t testing.TB, client *ratelimit.Client, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	limiter, err := client.Limiter(config)
	require.NoError(t, err)
	return limiter
}

// Frozen returns a test configuration whose clock stands still.
func Frozen(at time.Time) ratelimit.TestConfig {
	return ratelimit.TestConfig{Now: func() time.Time { return at }}
}

// Plain returns a result without its internal data, so that == compares only the fields that callers see.
func Plain(r ratelimit.Result) ratelimit.Result {
	return ratelimit.Result{
		Allowed: r.Allowed, Source: r.Source, Limit: r.Limit, Remaining: r.Remaining,
		RetryAfter: r.RetryAfter, ResetAfter: r.ResetAfter, DecidedAt: r.DecidedAt.UTC(), Shadow: r.Shadow,
	}
}

// AsResult converts the balance of a refund or a grant to a Result, so that tests can compare it with the model.
func AsResult(b ratelimit.Balance, err error) (ratelimit.Result, error) {
	return ratelimit.Result{
		Allowed: err == nil, Limit: b.Limit, Remaining: b.Remaining, ResetAfter: b.ResetAfter, DecidedAt: b.DecidedAt,
	}, err
}
