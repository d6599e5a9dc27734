package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Explain names the row that decides.
func TestExplain(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	policy := FixedWindow{10, time.Hour}
	l := newLimiter(t, db.Pool, Config{Name: "api", Policy: policy, Policies: p})
	explain := func(key string) Explanation {
		e, err := l.Explain(t.Context(), key)
		require.NoError(t, err)
		require.Positive(t, e.Age)
		require.NotZero(t, e.State)
		require.Equal(t, e.Row == 0, e.Learnt.IsZero())
		if e.Row != 0 {
			require.WithinDuration(t, e.State.DecidedAt, e.Learnt, time.Minute)
		}
		e.Age, e.State, e.Learnt = 0, Result{}, time.Time{}
		return e
	}
	require.Equal(t, Explanation{Mode: "enforce", Policy: policy}, explain("key"))
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "enforce", "fixed 20/1h")
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "ke", "off", "")
	until := pgtest.Scalar[time.Time](t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment)
		VALUES ('api', 'key', 'deny', now() + interval '1 hour', 'test') RETURNING valid_until`)
	p.knows(t, db.Pool)
	require.Equal(t, Explanation{Origin: OriginEverybody, Row: 1, Mode: "enforce", Policy: FixedWindow{20, time.Hour}},
		explain("other"))
	require.Equal(t, Explanation{Origin: OriginPrefix, Row: 2, Prefix: "ke", Mode: "off"}, explain("kept"))
	e := explain("key")
	require.True(t, until.Equal(e.Until))
	e.Until = time.Time{}
	require.Equal(t, Explanation{Origin: OriginKey, Row: 3, Mode: "deny"}, e)

	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "oth", "shadow", "log 5/1h")
	p.knows(t, db.Pool)
	beside := explain("other")
	require.Equal(t, Policy(SlidingLog{5, time.Hour}), beside.Shadow)
	require.EqualValues(t, 4, beside.ShadowRow)
	require.EqualValues(t, 1, beside.Row)

	// To read all again is no news, and another policy is.
	first, err := l.Explain(t.Context(), "other")
	require.NoError(t, err)
	p.table.Mu.Lock()
	p.table.Version = nil
	p.table.Mu.Unlock()
	p.knows(t, db.Pool)
	again, err := l.Explain(t.Context(), "other")
	require.NoError(t, err)
	require.Equal(t, first.Learnt, again.Learnt)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 21/1h' WHERE id = 1")
	p.knows(t, db.Pool)
	again, err = l.Explain(t.Context(), "other")
	require.NoError(t, err)
	require.True(t, again.Learnt.After(first.Learnt))

	without, err := newLimiter(t, db.Pool, Config{Name: "without", Policy: policy}).Explain(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, policy, without.Policy)
	require.Zero(t, without.Age)

	for origin, text := range map[Origin]string{
		OriginCode: "code", OriginEverybody: "everybody", OriginPrefix: "prefix", OriginKey: "key", 9: "Origin(9)",
	} {
		written, err := origin.MarshalText()
		require.NoError(t, err)
		require.Equal(t, text, string(written))
	}
}
