package ratelimit_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Explain names the row that decides.
func TestExplain(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	policy := ratelimit.FixedWindow{Limit: 10, Window: time.Hour}
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: policy, Policies: p})
	explain := func(key string) ratelimit.Explanation {
		e, err := l.Explain(t.Context(), key)
		require.NoError(t, err)
		require.Positive(t, e.Age)
		require.NotZero(t, e.State)
		require.Equal(t, e.Row == 0, e.Learnt.IsZero())
		if e.Row != 0 {
			require.WithinDuration(t, e.State.DecidedAt, e.Learnt, time.Minute)
		}
		e.Age, e.State, e.Learnt = 0, ratelimit.Result{}, time.Time{}
		return e
	}
	require.Equal(t, ratelimit.Explanation{Origin: ratelimit.OriginCode, Mode: "enforce", Policy: policy}, explain("key"))
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "enforce", "fixed 20/1h")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "ke", "off", "")
	until := pgtest.Scalar[time.Time](t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment)
		VALUES ('api', 'key', 'deny', now() + interval '1 hour', 'test') RETURNING valid_until`)
	limitertest.WaitUntilKnown(t, p, db.Pool)
	require.Equal(t, ratelimit.Explanation{Origin: ratelimit.OriginEverybody, Row: 1, Mode: "enforce", Policy: ratelimit.FixedWindow{Limit: 20, Window: time.Hour}},
		explain("other"))
	require.Equal(t, ratelimit.Explanation{Origin: ratelimit.OriginPrefix, Row: 2, Prefix: "ke", Mode: "off"}, explain("kept"))
	e := explain("key")
	require.True(t, until.Equal(e.Until))
	e.Until = time.Time{}
	require.Equal(t, ratelimit.Explanation{Origin: ratelimit.OriginKey, Row: 3, Mode: "deny"}, e)

	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "oth", "shadow", "log 5/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	beside := explain("other")
	require.Equal(t, ratelimit.Policy(ratelimit.SlidingLog{Limit: 5, Window: time.Hour}), beside.Shadow)
	require.EqualValues(t, 4, beside.ShadowRow)
	require.EqualValues(t, 1, beside.Row)

	// The field Learnt stays the same when all rows are read again, and changes with the policy.
	first, err := l.Explain(t.Context(), "other")
	require.NoError(t, err)
	limitertest.Table(p).Mu.Lock()
	limitertest.Table(p).Version = nil
	limitertest.Table(p).Mu.Unlock()
	limitertest.WaitUntilKnown(t, p, db.Pool)
	again, err := l.Explain(t.Context(), "other")
	require.NoError(t, err)
	require.Equal(t, first.Learnt, again.Learnt)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 21/1h' WHERE id = 1")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	again, err = l.Explain(t.Context(), "other")
	require.NoError(t, err)
	require.True(t, again.Learnt.After(first.Learnt))

	without, err := limitertest.New(t, db.Pool, ratelimit.Config{Name: "without", Policy: policy}).Explain(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, policy, without.Policy)
	require.Equal(t, ratelimit.OriginCode, without.Origin)
	require.Zero(t, without.Age)
}
