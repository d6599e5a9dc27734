// Package limitertest has helpers for tests of packages that use a limiter. The tests of package ratelimit itself
// cannot import it.
package limitertest

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// New returns a limiter with its own client. The client has the default configuration, unless a config is given.
func New(
	t testing.TB, db ratelimit.DBTX, config ratelimit.Config, client ...ratelimit.ClientConfig,
) *ratelimit.Limiter {
	t.Helper()
	return Of(t, NewClient(t, db, append(client, ratelimit.ClientConfig{})[0]), config)
}

// NewClient returns a client.
func NewClient(t testing.TB, db ratelimit.DBTX, config ratelimit.ClientConfig) *ratelimit.Client {
	t.Helper()
	client, err := ratelimit.NewClient(db, config)
	require.NoError(t, err)
	return client
}

// Of returns a limiter that uses the client.
func Of(t testing.TB, client *ratelimit.Client, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	limiter, err := client.Limiter(config)
	require.NoError(t, err)
	return limiter
}

// Frozen returns a clock that stands still.
func Frozen(at time.Time) ratelimit.TestConfig {
	return ratelimit.TestConfig{Now: func() time.Time { return at }}
}

// Plain returns a result without its internal data, so that == compares only the fields that callers see.
func Plain(r ratelimit.Result) ratelimit.Result {
	return ratelimit.Result{
		Allowed: r.Allowed, Source: r.Source, Limit: r.Limit, Remaining: r.Remaining,
		RetryAfter: r.RetryAfter, ResetAfter: r.ResetAfter, DecidedAt: r.DecidedAt,
	}
}

// AsResult is what a refund or a grant has returned, as the model says it: as a decision.
func AsResult(b ratelimit.Balance, err error) (ratelimit.Result, error) {
	return ratelimit.Result{
		Allowed: err == nil, Limit: b.Limit, Remaining: b.Remaining, ResetAfter: b.ResetAfter, DecidedAt: b.DecidedAt,
	}, err
}

// RequireKinds requires a StoreError of exactly these kinds.
func RequireKinds(t testing.TB, err error, want ...error) {
	t.Helper()
	var store *ratelimit.StoreError
	require.ErrorAs(t, err, &store)
	for _, kind := range []error{
		ratelimit.ErrNotMigrated, ratelimit.ErrNotPermitted, ratelimit.ErrPreparedStatements, ratelimit.ErrSetup,
		ratelimit.ErrUnavailable, ratelimit.ErrReadOnly, ratelimit.ErrTimeout, ratelimit.ErrOutcomeUnknown,
	} {
		require.Equal(t, slices.Contains(want, kind), errors.Is(err, kind), "%v: %v", kind, err)
	}
}
