package limitertest

import (
	"context"
	"log/slog"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// RunningPolicies returns Policies that run until the end of the test. They do not take a busy machine for a database
// that is away.
func RunningPolicies(t *testing.T, db ratelimit.DBTX, config ratelimit.PoliciesConfig) *ratelimit.Policies {
	t.Helper()
	if config.Logger == nil {
		config.Logger = slog.New(slog.DiscardHandler)
	}
	p, err := ratelimit.NewPolicies(db, config)
	require.NoError(t, err)
	Table(p).Patience = testkit.Amply
	Run(t, p)
	return p
}

// Run runs p in the background until the end of the test.
func Run(t *testing.T, p *ratelimit.Policies) {
	t.Helper()
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { p.Run(ctx) })
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
}

// WaitUntilKnown waits until p has read the newest version of the table of policies.
func WaitUntilKnown(t *testing.T, p *ratelimit.Policies, db pgtest.Querier) {
	t.Helper()
	version := pgtest.Scalar[int64](t, db, "SELECT coalesce(max(version), 0) FROM rate_limit_policy_history")
	testkit.WaitUntil(t, func() bool {
		Table(p).Mu.Lock()
		defer Table(p).Mu.Unlock()
		return Table(p).Version != nil && *Table(p).Version >= version
	})
}

// AddPolicy inserts a row into rate_limit_policy. Its parameters are name, key, prefix, mode and policy.
const AddPolicy = `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, comment)
	VALUES ($1, nullif($2, ''), nullif($3, ''), $4, nullif($5, ''), 'test')`
