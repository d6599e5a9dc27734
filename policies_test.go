package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/memdb"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The function that staleness returns reports a change only once, so a waiting caller asks again only once.
func TestStalenessIsToldOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	limitertest.WaitUntilKnown(t, p, db.Pool)
	stale := ratelimit.Staleness(l, "key")
	require.False(t, stale())
	for _, change := range []string{
		"INSERT INTO rate_limit_policy (name, policy, comment) VALUES ('api', 'fixed 5/1h', 'test')",
		"UPDATE rate_limit_policy SET policy = 'fixed 6/1h'",
		"UPDATE rate_limit_policy SET policy = NULL, mode = 'deny'",
		"UPDATE rate_limit_policy SET mode = 'off'",
		"DELETE FROM rate_limit_policy",
	} {
		pgtest.Exec(t, db.Pool, change)
		limitertest.WaitUntilKnown(t, p, db.Pool)
		require.True(t, stale(), change)
		require.False(t, stale(), change)
	}
}

// All methods obey the row with the highest precedence.
func TestPoliciesDecide(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	other := limitertest.Of(t, client, ratelimit.Config{Name: "other", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	require.Same(t, p, l.Config().Policies)

	for _, row := range [][]any{
		{"api", "", "", "enforce", "fixed 20/1h"},
		{"api", "", "customer:", "enforce", "fixed 30/1h"},
		{"api", "", "customer:4", "off", ""},
		{"api", "customer:42", "", "enforce", "fixed 40/1h"},
		{"api", "customer:43", "", "deny", ""},
	} {
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, row...)
	}
	limitertest.WaitUntilKnown(t, p, db.Pool)

	for key, limit := range map[string]int64{"user": 20, "customer:1": 30, "customer:42": 40} {
		peeked, err := l.Peek(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, limit, peeked.Limit, key)
		require.Equal(t, limit, peeked.Remaining, key)
		require.Equal(t, ratelimit.SourceDatabase, peeked.Source)

		result, err := l.AllowN(t.Context(), key, limit)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.ErrorIs(t, limitertest.ErrorOf(l.AllowN(t.Context(), key, limit+1)), ratelimit.ErrCostExceedsLimit)
		refunded, err := l.RefundN(t.Context(), result, 3)
		require.NoError(t, err)
		require.EqualValues(t, 3, refunded.Remaining)

		tx := pgtest.Begin(t, db)
		result, err = l.WithTx(tx).AllowN(t.Context(), key, 2)
		require.NoError(t, err)
		require.Equal(t, limit, result.Limit)
		require.EqualValues(t, 1, result.Remaining)
		require.NoError(t, tx.Commit(t.Context()))

		granted, err := l.Grant(t.Context(), key, 5)
		require.NoError(t, err)
		require.Equal(t, limit, granted.Limit)
		require.EqualValues(t, 6, granted.Remaining)
		waited, err := l.WaitN(t.Context(), key, 6)
		require.NoError(t, err)
		require.Equal(t, limit, waited.Limit)

		denied, err := l.Allow(t.Context(), key)
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		testkit.WaitUntil(t, func() bool { // until this process has heard of the grant, and forgotten the denial
			denied, err = l.Allow(t.Context(), key)
			require.NoError(t, err)
			return denied.Source == ratelimit.SourceCachedDenial
		})
		require.Equal(t, limit, denied.Limit)
	}
	peeked, err := other.Peek(t.Context(), "customer:42")
	require.NoError(t, err)
	require.EqualValues(t, 10, peeked.Limit)

	// Rows with mode off or deny are decided in this process.
	before := pgtest.StoredRows(t, db.Pool, false)
	tx := pgtest.Begin(t, db)
	for _, ask := range []func(key string) (ratelimit.Result, error){
		func(key string) (ratelimit.Result, error) { return l.Allow(t.Context(), key) },
		func(key string) (ratelimit.Result, error) { return l.AllowN(t.Context(), key, 1000) },
		func(key string) (ratelimit.Result, error) { return l.Peek(t.Context(), key) },
		func(key string) (ratelimit.Result, error) { return l.WithTx(tx).Allow(t.Context(), key) },
	} {
		result, err := ask("customer:4444")
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Equal(t, ratelimit.SourcePolicy, result.Source)
		require.EqualValues(t, 10, result.Remaining)
		require.WithinDuration(t, time.Now(), result.DecidedAt, time.Minute)
		require.ErrorIs(t, limitertest.ErrorOf(l.Refund(t.Context(), result)), ratelimit.ErrNothingToRefund)

		result, err = ask("customer:43")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.Equal(t, ratelimit.SourcePolicy, result.Source)
		require.Equal(t, model.Duration(model.MaxSpan), result.RetryAfter)
	}
	waited, err := l.WaitN(t.Context(), "customer:4444", 100)
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourcePolicy, waited.Source)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.ErrorIs(t, limitertest.ErrorOf(l.Wait(ctx, "customer:43")), ratelimit.ErrWouldExceedDeadline)
	require.ErrorIs(t, limitertest.ErrorOf(l.AllowN(t.Context(), "customer:43", -1)), ratelimit.ErrInvalidCost)
	require.ErrorIs(t, limitertest.ErrorOf(l.WaitN(t.Context(), "customer:43", -1)), ratelimit.ErrInvalidCost)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Equal(t, before, pgtest.StoredRows(t, db.Pool, false))

	// In AllowAll, a request with mode off takes nothing, and one with mode deny refuses all.
	for _, all := range []func(...ratelimit.Request) (ratelimit.Results, error){
		func(requests ...ratelimit.Request) (ratelimit.Results, error) {
			return ratelimit.AllowAll(t.Context(), requests...)
		},
		func(requests ...ratelimit.Request) (ratelimit.Results, error) {
			tx := pgtest.Begin(t, db)
			results, err := limitertest.AllowAllTx(t.Context(), tx, requests...)
			require.NoError(t, tx.Commit(t.Context()))
			return results, err
		},
	} {
		results, err := all(l.Request("customer:4444", 1), other.Request("user", 2), l.Request("customer:45", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.Equal(t, ratelimit.SourcePolicy, results.Each[0].Source)
		require.EqualValues(t, 10, results.Each[1].Limit)
		require.Equal(t, ratelimit.SourceDatabase, results.Each[1].Source)

		results, err = all(l.Request("customer:44", 1), l.Request("customer:4444", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.True(t, results.Each[1].Allowed)

		before := pgtest.StoredRows(t, db.Pool, false)
		results, err = all(other.Request("user", 2), l.Request("customer:43", 1), l.Request("customer:42", 1))
		require.NoError(t, err)
		require.False(t, results.Allowed)
		require.Equal(t, model.Duration(model.MaxSpan), results.RetryAfter)
		require.Equal(t, results.RetryAfter, results.Each[1].RetryAfter)
		require.Zero(t, results.Each[0].RetryAfter)
		require.EqualValues(t, 40, results.Each[2].Limit)
		require.False(t, results.Each[0].Allowed)
		require.Equal(t, before, pgtest.StoredRows(t, db.Pool, false))
	}
	require.ErrorIs(t, limitertest.ErrorOf(ratelimit.AllowAll(t.Context(), l.Request("customer:43", 0))), ratelimit.ErrInvalidCost)
	require.ErrorIs(t, limitertest.ErrorOf(ratelimit.AllowAll(t.Context(), l.Request("customer:42", 41))), ratelimit.ErrCostExceedsLimit)
}

// A row is in force until its end, and then the previous row is in force again. The same is true for limiters made by
// With.
func TestPoliciesBeginAndEnd(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	limitOf := func(l *ratelimit.Limiter) int64 {
		result, err := l.Peek(t.Context(), "key")
		require.NoError(t, err)
		return result.Limit
	}
	limit := func() int64 { return limitOf(l) }
	require.EqualValues(t, 10, limit())
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "enforce", "fixed 20/1h")
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, policy, valid_from, valid_until, comment) VALUES
		('api', 'key', 'fixed 30/1h', now(), now() + interval '1 second', 'test'),
		('api', 'key', 'fixed 40/1h', now() + interval '1 second', now() + interval '2 seconds', 'test'),
		('api', 'key', 'fixed 50/1h', '-infinity', 'infinity', 'test'),
		('api', 'key', 'fixed 60/1h', now() + interval '1 hour', 'infinity', 'test')`)
	limitertest.WaitUntilKnown(t, p, db.Pool)
	// A process that gets a slow answer computes an earlier time for a moment, so a row that has ended may return.
	with := limitertest.With(t, l, ratelimit.FixedWindow{Limit: 11, Window: time.Hour})
	testkit.WaitUntil(t, func() bool {
		now := limit()
		require.Contains(t, []int64{30, 40, 20}, now)
		return now == 20 && limitOf(with) == 20
	})
	result, err := with.Peek(t.Context(), "another")
	require.NoError(t, err)
	require.EqualValues(t, 11, result.Limit)

	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_policy
		SET mode = 'deny', policy = NULL, valid_until = now() + interval '1 hour' WHERE policy = 'fixed 20/1h'`)
	limitertest.WaitUntilKnown(t, p, db.Pool)
	result, err = l.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.InDelta(t, time.Hour, result.RetryAfter, float64(time.Minute))

	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	require.EqualValues(t, 10, limit())
	require.Zero(t, p.Status().Rows)
}

// Rows with the same text share a policy in memory, but each limiter counts separately.
func TestLimitersThatShareAPolicy(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, name := range []string{"one", "two"} {
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, name, "", "", "enforce", "fixed 2/1h")
	}
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	for _, name := range []string{"one", "two"} {
		l := limitertest.New(t, db.Pool, ratelimit.Config{Name: name, Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: p})
		for _, remaining := range []int64{1, 0} {
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, remaining, result.Remaining)
		}
	}
}

// A limiter with Policies sends no more statements than a limiter without Policies.
func TestPoliciesCostNoStatement(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool, counted := limitertest.TracedPool(t, db)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 1000, Window: time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "k", "enforce", "fixed 2000/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	for range 20 {
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 2000, result.Limit)
	}
	require.Equal(t, 20, counted.Count())
}

// A row is skipped if this release cannot read it, or if its policy is of another kind. The row with the next
// precedence is then in force.
func TestPoliciesThatCannotBeObeyed(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "enforce", "fixed 20/1h")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "secret", "", "enforce", "sliding 30/1h")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "a", "enforce", "fixed 30/1h")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "b", "enforce", "fixed 30/1h")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	expect := func(limits map[string]int64) {
		for key, limit := range limits {
			for range 2 {
				result, err := l.Peek(t.Context(), key)
				require.NoError(t, err)
				require.Equal(t, limit, result.Limit, key)
			}
		}
	}
	expect(map[string]int64{"secret": 20, "a": 30, "b": 30})
	require.Zero(t, p.Status().Unreadable)

	// A newer release or a superuser can write rows that this release cannot read.
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "ALTER TABLE rate_limit_policy DISABLE TRIGGER rate_limit_policy_check")
	pgtest.Exec(t, tx, "UPDATE rate_limit_policy SET policy = 'leaky 30/1h' WHERE key_prefix = 'a'")
	pgtest.Exec(t, tx, "UPDATE rate_limit_policy SET mode = 'maybe' WHERE key_prefix = 'b'")
	pgtest.Exec(t, tx, `INSERT INTO rate_limit_policy (id, name, key, policy, comment)
		OVERRIDING SYSTEM VALUE SELECT 0, name, 'zero', 'fixed 40/1h', 'why' FROM rate_limit_policy WHERE key_prefix = 'a'`)
	pgtest.Exec(t, tx, "ALTER TABLE rate_limit_policy ENABLE TRIGGER rate_limit_policy_check")
	require.NoError(t, tx.Commit(t.Context()))
	limitertest.WaitUntilKnown(t, p, db.Pool)
	expect(map[string]int64{"secret": 20, "a": 20, "b": 20, "zero": 40})
	require.Equal(t, 2, p.Status().Unreadable)

	pgtest.Exec(t, db.Pool,
		"UPDATE rate_limit_policy SET policy = 'fixed 31/1h', mode = 'enforce' WHERE key_prefix IN ('a', 'b')")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	expect(map[string]int64{"a": 31, "b": 31})
	require.Zero(t, p.Status().Unreadable)

	lines := journal.String()
	require.Contains(t, lines, "a policy cannot be read, and is passed over")
	require.Contains(t, lines, "the row's policy is a SlidingWindow, and Config.Policy is a FixedWindow")
	require.NotContains(t, lines, "secret")
	require.Len(t, journal.Lines(), 3, lines)
}

// Until the first rows have been read, no call is admitted, because its key may be banned.
func TestPoliciesBeforeTheyAreRead(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{})
	require.NoError(t, err)
	config := ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p,
	}
	clientConfig := ratelimit.ClientConfig{Timeout: 50 * time.Millisecond}
	l := limitertest.New(t, db.Pool, config, clientConfig)
	for _, ask := range asks(t, db, l) {
		err := ask()
		require.ErrorIs(t, err, ratelimit.ErrTimeout)
		require.ErrorContains(t, err, "has Policies.Run been started?")
	}
	require.ErrorIs(t, limitertest.ErrorOf(l.Allow(t.Context(), "")), ratelimit.ErrInvalidKey)
	require.ErrorIs(t, limitertest.ErrorOf(l.AllowN(t.Context(), "key", 11)), ratelimit.ErrCostExceedsLimit)
	ended, end := context.WithCancel(t.Context())
	end()
	require.ErrorIs(t, limitertest.ErrorOf(l.Allow(ended, "key")), context.Canceled)
	config.OnFailure = ratelimit.FailClosed()
	closed := limitertest.New(t, db.Pool, config, clientConfig)
	result, err := closed.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceFailedClosed, result.Source)
	explanation, err := closed.Explain(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceFailedClosed, explanation.State.Source)

	// Errors contain the cause as soon as it is known.
	empty := pgtest.Empty(t)
	p = limitertest.RunningPolicies(t, empty.Pool, ratelimit.PoliciesConfig{})
	testkit.WaitUntil(t, func() bool { return errors.Is(p.Status().Err, ratelimit.ErrNotMigrated) })
	l = limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p, OnFailure: ratelimit.FailOpen()})
	for _, ask := range asks(t, db, l) {
		require.ErrorIs(t, ask(), ratelimit.ErrNotMigrated)
	}
	require.ErrorIs(t, p.Status().Err, ratelimit.ErrNotMigrated)
}

func asks(t *testing.T, db *pgtest.DB, l *ratelimit.Limiter) []func() error {
	t.Helper()
	tx := pgtest.Begin(t, db)
	return []func() error{
		func() error { return limitertest.ErrorOf(l.Allow(t.Context(), "key")) },
		func() error { return limitertest.ErrorOf(l.Peek(t.Context(), "key")) },
		func() error { return limitertest.ErrorOf(l.Wait(t.Context(), "key")) },
		func() error { return limitertest.ErrorOf(l.Explain(t.Context(), "key")) },
		func() error { return limitertest.ErrorOf(l.WithTx(tx).Allow(t.Context(), "key")) },
		func() error { return limitertest.ErrorOf(ratelimit.AllowAll(t.Context(), l.Request("key", 1))) },
		func() error { return limitertest.ErrorOf(limitertest.AllowAllTx(t.Context(), tx, l.Request("key", 1))) },
	}
}

func TestNewPoliciesRefuses(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, test := range map[string]struct {
		db     ratelimit.DBTX
		config ratelimit.PoliciesConfig
		field  string
	}{
		"no db":       {(*pgxpool.Pool)(nil), ratelimit.PoliciesConfig{}, "db"},
		"memory":      {&memdb.DB{}, ratelimit.PoliciesConfig{}, "db"},
		"connection":  {pgtest.Connect(t, db), ratelimit.PoliciesConfig{}, "db"},
		"transaction": {pgtest.Begin(t, db), ratelimit.PoliciesConfig{}, "db"},
		"schema":      {db.Pool, ratelimit.PoliciesConfig{Schema: "a\nb"}, "PoliciesConfig.Schema"},
		"rows":        {db.Pool, ratelimit.PoliciesConfig{MaxRows: -1}, "PoliciesConfig.MaxRows"},
	} {
		_, err := ratelimit.NewPolicies(test.db, test.config)
		config, ok := errors.AsType[*ratelimit.ConfigError](err)
		require.True(t, ok, name)
		require.Equal(t, test.field, config.Field, name)
	}

	// A second Run waits for the end of the first Run, or for the end of its own context.
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	limitertest.WaitUntilKnown(t, p, db.Pool)
	ctx, end := context.WithCancel(t.Context())
	end()
	p.Run(ctx)
}

// Rows beyond MaxRows are left out: first bans made by limiters, then rows written by people.
func TestMaxRows(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment, automatic)
		SELECT 'api', 'ban' || i, 'deny', now() + interval '1 hour', 'test', true FROM generate_series(1, 5) AS i`)
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "person", "", "deny", "")
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{MaxRows: 4, Logger: journal.Logger()})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	result, err := l.Allow(t.Context(), "person")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.Equal(t, 4, p.Status().Rows)
	require.Equal(t, 2, p.Status().NoRoom)
	require.Contains(t, journal.String(), "more policies than this process may hold")

	// When there is room again, all rows are obeyed.
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key IN ('ban1', 'ban2')")
	testkit.WaitUntil(t, func() bool { return p.Status().NoRoom == 0 })
	require.Equal(t, 4, p.Status().Rows)
}

// If MaxRows rows are kept, a ban by a person replaces a ban by a limiter, and a row that has ended makes room.
func TestFullBooks(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	add := `INSERT INTO rate_limit_policy (name, key, mode, valid_until, comment, automatic)
		VALUES ('api', $1, 'deny', now() + $2::interval, 'test', $3)`
	for i := range 4 {
		pgtest.Exec(t, db.Pool, add, fmt.Sprint("bot", i), time.Hour, true)
	}
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{MaxRows: 4})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	banned := func(key string) bool {
		limitertest.WaitUntilKnown(t, p, db.Pool)
		result, err := l.Peek(t.Context(), key)
		require.NoError(t, err)
		return result.Source == ratelimit.SourcePolicy
	}
	pgtest.Exec(t, db.Pool, add, "person", time.Hour, false)
	require.True(t, banned("person"))
	pgtest.Exec(t, db.Pool, add, "another bot", time.Hour, true)
	require.False(t, banned("another bot"))
	require.True(t, banned("person"))
	pgtest.Exec(t, db.Pool, `UPDATE rate_limit_policy SET valid_from = now() - interval '2 hours', valid_until = now()
		WHERE key LIKE 'bot%'`)
	testkit.WaitUntil(t, func() bool { return banned("another bot") && p.Status().NoRoom == 0 })
}
