package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The policy in force decides, and the shadow is decided beside it, each as if it were alone: by one statement for any
// number of calls, of many keys and costs, with shadows of every kind.
func TestShadow(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool, counted := tracedPool(t, db)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	client := newClient(t, pool, ClientConfig{Test: frozen(t0)})
	policy := SlidingWindow{20, time.Hour}
	for _, shadow := range []Policy{
		FixedWindow{10, time.Hour}, SlidingWindow{30, time.Minute}, SlidingLog{10, time.Hour}, TokenBucket{10, 1, time.Hour},
		All(FixedWindow{15, time.Hour}, SlidingLog{10, time.Hour}),
	} {
		name := shadow.String()
		pgtest.Exec(t, db.Pool, addPolicy, name, "", "key", "shadow", name)
		p.knows(t, db.Pool)
		config := Config{Name: name, Policy: policy, Policies: p}
		l := client.limiter(t, config)
		config.Policies, config.Name = nil, name+" alone"
		alone := client.limiter(t, config)
		config.Policy, config.Name = shadow, name+" as if in force"
		inForce := client.limiter(t, config)
		for range 60 {
			key, n := fmt.Sprint("key", rand.IntN(3)), rand.Int64N(3)
			if rand.IntN(20) == 0 {
				key, n = "another", 1
			}
			before := counted.count()
			got, err := l.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			require.LessOrEqual(t, counted.count()-before, 1)
			want, err := alone.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			shadowWant, err := inForce.AllowN(t.Context(), key, n)
			require.NoError(t, err)
			if key == "another" {
				require.Nil(t, got.Shadow)
			} else {
				require.NotNil(t, got.Shadow)
				require.Equal(t, plainly(shadowWant), plainly(*got.Shadow))
				require.ErrorIs(t, errorOf(inForce.Refund(t.Context(), *got.Shadow)), ErrNothingToRefund)
			}
			require.Equal(t, plainly(want), plainly(got))
		}
	}
}

// plainly is a result without what tells sources apart and without its shadow.
func plainly(r Result) Result {
	r = utc(r)
	r.Shadow = nil
	if r.Source == SourceCachedDenial {
		r.Source = SourceDatabase
	}
	return r
}

// Under load, exactly as much is admitted as without a shadow, and the shadow admits exactly its own limit.
func TestShadowsAreExact(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "fixed 30/1h")
	p.knows(t, db.Pool)
	var admitted, shadowed, undecided [4]atomic.Int64
	limiters := make([]*Limiter, 4) // the last is none of the crowd's
	for i := range limiters {
		limiters[i] = newLimiter(t, db.Pool, Config{
			Name: "api", Policy: FixedWindow{50, time.Hour}, Policies: p, NoDenialCache: i == 0,
		}, ClientConfig{Test: frozen(t0)})
	}
	testkit.Together(60, func(i int) {
		for range 20 {
			key := rand.IntN(len(admitted))
			result, err := limiters[i%3].Allow(t.Context(), fmt.Sprint(key))
			require.NoError(t, err)
			switch {
			case result.Shadow == nil:
				undecided[key].Add(1)
			case result.Shadow.Allowed:
				shadowed[key].Add(1)
			}
			if result.Allowed {
				admitted[key].Add(1)
			}
		}
	})
	for key := range admitted {
		require.EqualValues(t, 50, admitted[key].Load())
		require.LessOrEqual(t, shadowed[key].Load(), int64(30))
		require.GreaterOrEqual(t, shadowed[key].Load()+undecided[key].Load(), int64(30))

		// Where both deny, that is remembered. The crowd may not have seen both do so: under load, its limiters leave
		// shadows of a key out, and go on to do so for a while.
		var last Result
		for range 30 + 2 {
			var err error
			last, err = limiters[3].Allow(t.Context(), fmt.Sprint(key))
			require.NoError(t, err)
		}
		require.Equal(t, SourceCachedDenial, last.Source)
	}
}

// Whatever goes wrong with a shadow, its request is decided, once.
func TestShadowThatFails(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "bucket 5 1/1h")
	p.knows(t, db.Pool)
	l := newLimiter(t, db.Pool, Config{Name: "api", Policy: FixedWindow{10, time.Hour}, Policies: p})
	allow := func(remaining int64) Result {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Equal(t, remaining, result.Remaining)
		return result
	}
	require.NotNil(t, allow(9).Shadow)

	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'api/shadow' FOR UPDATE")
	require.Nil(t, allow(8).Shadow)
	require.NoError(t, tx.Rollback(t.Context()))
	require.EqualValues(t, 3, allow(7).Shadow.Remaining)

	pgtest.Exec(t, db.Pool, "REVOKE ALL ON FUNCTION rate_limit_take_token_bucket FROM PUBLIC")
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_take_token_bucket RENAME TO rate_limit_gone")
	require.Nil(t, allow(6).Shadow)
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_gone RENAME TO rate_limit_take_token_bucket")
	require.EqualValues(t, 2, allow(5).Shadow.Remaining)

	// A cost above the shadow's limit.
	result, err := l.AllowN(t.Context(), "other", 6)
	require.NoError(t, err)
	require.True(t, result.Allowed)
	require.False(t, result.Shadow.Allowed)
	require.Equal(t, model.Duration(model.MaxSpan), result.Shadow.RetryAfter)

	// In transactions and sets there are none.
	inTx := pgtest.Begin(t, db)
	result, err = l.WithTx(inTx).Allow(t.Context(), "third")
	require.NoError(t, err)
	require.Nil(t, result.Shadow)
	require.NoError(t, inTx.Rollback(t.Context()))
	results, err := AllowAll(t.Context(), l.Request("third", 1))
	require.NoError(t, err)
	require.Nil(t, results.Each[0].Shadow)
}

// Requests with a shadow that wait for a held row in vain do so once, and not once more without the shadow.
func TestShadowDoesNotWaitTwice(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool, counted := tracedPool(t, db) // which does not count batches, such as a request and its shadow
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "fixed 5/1h")
	p.knows(t, db.Pool)
	l := newLimiter(t, pool, Config{Name: "api", Policy: FixedWindow{10, time.Hour}, Policies: p})
	_, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)

	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ephemeral WHERE prefix = 'api' FOR UPDATE")
	before := counted.count()
	r := l.newRequest("key", 1)
	r.Shadow = l.newShadow(l.view.Shadow("key"), "key", 1)
	b := l.client.engine.Batcher
	err = b.Decide(t.Context(), pool, []*engine.Request{r}, engine.Transaction{LockTimeout: engine.LockTimeout(50 * time.Millisecond)})
	require.True(t, pg.LockTimeout(err), err)
	require.Equal(t, before, counted.count())
	require.True(t, r.PassedOver())
	require.Nil(t, r.Shadow.Outcome())
}

// What would not be looked up is not remembered, for a shadow as for its limiter.
func TestShadowDenialsOfLimitersThatRememberNone(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "fixed 1/1h")
	p.knows(t, db.Pool)
	for _, none := range []bool{false, true} {
		l := newLimiter(t, db.Pool, Config{Name: "api", Policy: FixedWindow{10, time.Hour}, Policies: p, NoDenialCache: none})
		for range 2 {
			result, err := l.Allow(t.Context(), fmt.Sprint(none))
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.NotNil(t, result.Shadow)
		}
		require.Equal(t, none, l.client.engine.Denials.Stripes.Load() == nil)
	}
}

// Where a row allows or denies everything, no shadow is decided, and Explain tells of none.
func TestNoShadowBesideOffAndDeny(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	l := newLimiter(t, db.Pool, Config{Name: "api", Policy: FixedWindow{10, time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "fixed 1/1h")
	pgtest.Exec(t, db.Pool, addPolicy, "api", "off", "", "off", "")
	pgtest.Exec(t, db.Pool, addPolicy, "api", "deny", "", "deny", "")
	pgtest.Exec(t, db.Pool, addPolicy, "api", "enforce", "", "enforce", "fixed 20/1h")
	p.knows(t, db.Pool)
	for key, shadow := range map[string]bool{"off": false, "deny": false, "enforce": true, "of the code": true} {
		result, err := l.Allow(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, shadow, result.Shadow != nil, key)
		e, err := l.Explain(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, shadow, e.Shadow != nil, key)
		require.Equal(t, shadow, e.ShadowRow != 0, key)
	}
}

// BenchmarkShadow shows what a shadow costs a decision, for one caller and for 64.
func BenchmarkShadow(b *testing.B) {
	db := pgtest.New(b)
	p, err := NewPolicies(db.Pool, PoliciesConfig{})
	require.NoError(b, err)
	pgtest.Exec(b, db.Pool, addPolicy, "shadowed", "", "", "shadow", "sliding 2000000/1h")
	require.NoError(b, p.table.Load(b.Context(), db.Pool, amply))
	client, err := NewClient(db.Pool, ClientConfig{})
	require.NoError(b, err)
	for _, callers := range []int{1, 64} {
		for range 3 {
			for _, name := range []string{"alone", "shadowed"} {
				l, err := client.Limiter(Config{Name: name, Policy: SlidingWindow{1_000_000, time.Hour}, Policies: p})
				require.NoError(b, err)
				b.Run(fmt.Sprintf("%d callers, %s", callers, name), func(b *testing.B) {
					var left atomic.Int64
					left.Store(int64(b.N))
					testkit.Together(callers, func(int) {
						for left.Add(-1) >= 0 {
							_, _ = l.Allow(b.Context(), fmt.Sprint(rand.IntN(1000)))
						}
					})
				})
			}
		}
	}
}

// What shadows would have decided is reported, with the keys that they would have denied most, until the row changes.
func TestShadowsAreReported(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, addPolicy, "api", "", "", "shadow", "fixed 2/1h")
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	l := newLimiter(t, db.Pool, Config{Name: "api", Policy: FixedWindow{4, time.Hour}, Policies: p})
	for i, key := range []string{"a", "b", "b", "b", "c", "c", "c", "c", "c", "c"} {
		_, err := l.Allow(t.Context(), key)
		require.NoError(t, err)
		_, err = l.Peek(t.Context(), key) // which is not counted
		require.NoError(t, err)
		if i == 5 {
			require.NoError(t, p.table.ReportOnce(t.Context()))
		}
	}
	require.NoError(t, p.table.ReportOnce(t.Context()))
	require.NoError(t, p.table.ReportOnce(t.Context()))
	reported := func() []string {
		return pgtest.Scalar[[]string](t, db.Pool, `SELECT array_agg(concat_ws(' ', key, decided, denied, would_deny) ORDER BY key)
			FROM rate_limit_shadow AS s WHERE policy_id = 1 AND first_at <= last_at`)
	}
	require.Equal(t, []string{" 10 2 5", "b 0 0 1", "c 0 2 4"}, reported())

	// No report keeps others from being added, whatever it tells. One that makes no sense is passed over.
	for _, n := range []string{"9223372036854775807", "-9223372036854775808", "-1", "NULL"} {
		for _, numbers := range []string{n + ", 0, 0", "0, " + n + ", 0", "0, 0, " + n} {
			pgtest.Exec(t, db.Pool, `SELECT rate_limit_report(ARRAY[1, 1]::bigint[], ARRAY['', 'b'], array_fill(a, ARRAY[2]),
				array_fill(b, ARRAY[2]), array_fill(c, ARRAY[2])) FROM (VALUES (`+numbers+`)) AS v (x, y, z),
				LATERAL (SELECT x::bigint, y::bigint, z::bigint) AS w (a, b, c)`)
		}
	}
	require.Equal(t, []string{" 1000000000010 1000000000002 1000000000005", "b 1000000000000 1000000000000 1000000000001",
		"c 0 2 4"}, reported())
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_shadow SET decided = 9223372036854775806 WHERE key = ''")
	_, err := l.Allow(t.Context(), "d")
	require.NoError(t, err)
	for range 2 {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_report(ARRAY[1], ARRAY[''], ARRAY[5], ARRAY[0], ARRAY[0])")
		require.NoError(t, p.table.ReportOnce(t.Context()))
	}
	require.Equal(t, " 9223372036854775807 1000000000002 1000000000005", reported()[0])

	report := `SELECT rate_limit_report(array_fill(1, ARRAY[2000])::bigint[], ARRAY(SELECT 'k' || i FROM generate_series(1, 2000) AS i),
		array_fill(0, ARRAY[2000])::bigint[], array_fill(0, ARRAY[2000])::bigint[], ARRAY(SELECT generate_series(1, 2000))::bigint[])`
	pgtest.Exec(t, db.Pool, report)
	require.EqualValues(t, 1001, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow"))
	require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow WHERE would_deny <= 1000 AND key <> ''"))

	// Of a policy that is gone, or has become another one, nothing is kept or taken.
	_, err = l.Allow(t.Context(), "c")
	require.NoError(t, err)
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = 'fixed 3/1h'")
	p.knows(t, db.Pool)
	require.NoError(t, p.table.ReportOnce(t.Context()))
	require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow"))
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	pgtest.Exec(t, db.Pool, report)
	require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_shadow"))
}

// Of the keys that a shadow would have denied, as many are counted as are reported. The others count in the sums.
func TestShadowsCountSoManyKeys(t *testing.T) {
	t.Parallel()

	p := policytable.NewTable(nil, policytable.TableConfig{})
	p.Running = true
	for i := range policytable.MaxReported + 10 {
		p.Count(&policytable.Row{ID: 7}, fmt.Sprint(i), true, true)
	}
	require.Len(t, p.Shadows[7].Keys, policytable.MaxReported)
	require.EqualValues(t, policytable.MaxReported+10, p.Shadows[7].WouldDeny)
}
