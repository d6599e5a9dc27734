package policytable_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// endListeners ends the connections on which Policies listen, and returns how many there were. It may also end
// connections of the pool by which they read the table, so a test needs another pool for its own statements. It spares
// a connection whose last statement was this one, because another caller may have it by now.
const endListeners = `SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
	WHERE datname = current_database() AND pid <> pg_backend_pid() AND query NOT LIKE '%pg_terminate_backend%'
		AND (query = 'LISTEN rate_limit' OR query LIKE '%rate_limit_policies%')`

// Many processes see many changes at once. Some changes are in long transactions, some are rolled back, and listeners
// are killed all the time. In the end every process knows what is in the table.
func TestPoliciesMissNothing(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	pools := make([]*pgxpool.Pool, 2)
	for i := range pools {
		pools[i] = db.NewPool(t, func(*pgxpool.Config) {})
	}
	all := make([]*ratelimit.Policies, 4)
	limiters := make([]*ratelimit.Limiter, len(all))
	for i := range all {
		all[i] = limitertest.RunningPolicies(t, pools[i%2], ratelimit.PoliciesConfig{})
		limiters[i] = limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour}, Policies: all[i]})
	}
	for _, p := range all {
		testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	}
	var killed atomic.Int64
	const keys = 10
	testkit.Together(3, func(int) {
		for range 20 {
			tx, err := db.Pool.Begin(context.Background())
			require.NoError(t, err)
			for range 1 + rand.IntN(3) {
				key := fmt.Sprint(rand.IntN(keys))
				pgtest.Exec(t, tx, "DELETE FROM rate_limit_policy WHERE key = $1", key)
				if rand.IntN(4) > 0 {
					pgtest.Exec(t, tx, limitertest.AddPolicy, "api", key, "", "enforce", fmt.Sprintf("fixed %d/1h", 2+rand.IntN(1000)))
				}
			}
			if rand.IntN(4) == 0 {
				require.NoError(t, tx.Rollback(context.Background()))
			} else {
				require.NoError(t, tx.Commit(context.Background()))
			}
			if rand.IntN(3) == 0 {
				killed.Add(pgtest.Scalar[int64](t, db.Pool, endListeners))
			}
		}
	})
	require.Positive(t, killed.Load())
	for i, p := range all {
		limitertest.WaitUntilKnown(t, p, db.Pool)
		for key := range keys {
			key := fmt.Sprint(key)
			want := pgtest.Scalar[string](t, db.Pool, `SELECT coalesce((SELECT policy FROM rate_limit_policy
				WHERE key = $1 ORDER BY valid_from DESC, id DESC LIMIT 1), 'fixed 1/1h')`, key)
			e, err := limiters[i].Explain(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, want, shorten(e.Policy), key)
		}
	}
	for _, p := range all {
		testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	}
}

// shorten returns the text of a policy of hours as the test writes it.
func shorten(p ratelimit.Policy) string {
	return fmt.Sprintf("fixed %d/%dh", p.(ratelimit.FixedWindow).Limit, p.(ratelimit.FixedWindow).Window/time.Hour)
}

// While the database is away, the last known policies stay in force. When it is back, processes learn of changes again.
func TestPoliciesWhileTheDatabaseIsAway(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var away atomic.Bool
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		dial := config.ConnConfig.DialFunc
		config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
			if away.Load() {
				return nil, errors.New("away")
			}
			return dial(ctx, network, address)
		}
	})
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p, OnFailure: ratelimit.FailOpen()})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "banned", "", "deny", "")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	require.Empty(t, journal.String())

	away.Store(true)
	pool.Reset()
	pgtest.Scalar[int64](t, db.Pool, endListeners)
	testkit.WaitUntil(t, func() bool { return p.Status().Err != nil && !p.Status().Listening })
	result, err := l.Allow(t.Context(), "banned")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.Equal(t, ratelimit.SourcePolicy, result.Source)
	result, err = l.Allow(t.Context(), "other")
	require.NoError(t, err)
	require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
	require.Positive(t, p.Status().Age)

	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy")
	away.Store(false)
	testkit.WaitUntil(t, func() bool { return p.Status().Err == nil && p.Status().Listening })
	require.Regexp(t, `(?s)policies cannot be read, and what was known last stays in force.*policies can be read again`,
		journal.String())
	require.Len(t, journal.Lines(), 2, journal.String())
}

// If the history was cut off, or the database was restored from an older one, processes read all rows again.
func TestPoliciesAreReadAnew(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.NewPool(t, nil), ratelimit.PoliciesConfig{})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "a", "", "deny", "")
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "b", "", "deny", "")
	limitertest.WaitUntilKnown(t, p, db.Pool)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "DELETE FROM rate_limit_policy WHERE key = 'a'")
	pgtest.Exec(t, tx, limitertest.AddPolicy, "api", "c", "", "deny", "")
	pgtest.Exec(t, tx, "DELETE FROM rate_limit_policy_history WHERE version < (SELECT max(version) FROM rate_limit_policy_history)")
	require.NoError(t, tx.Commit(t.Context()))
	limitertest.WaitUntilKnown(t, p, db.Pool)
	require.Equal(t, 2, p.Status().Rows)

	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy DISABLE TRIGGER ALL")
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'c'")
	pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_policy_history")
	testkit.WaitUntil(t, func() bool { return p.Status().Rows == 1 })

	// After a failover, the new server can have another past than the old server. Processes read all rows again.
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "d", "", "deny", "")
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	pgtest.Scalar[int64](t, db.Pool, endListeners)
	testkit.WaitUntil(t, func() bool { return p.Status().Rows == 2 })
}

// Run hears notifications even if the application listens itself, uses all connections of the pool, and has a short
// statement_timeout.
func TestPoliciesOfApplicationsThatListen(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 1
		config.ConnConfig.RuntimeParams["statement_timeout"] = "1s"
		config.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {}
	})
	held, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	p := limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	for range 3 {
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "deny", "")
		limitertest.WaitUntilKnown(t, p, db.Pool)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourcePolicy, result.Source)
	}
	held.Release()
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
}

// Behind PgBouncer in transaction mode no notification arrives. Run finds that out, logs it, and polls instead.
func TestPoliciesBehindPgBouncer(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := limitertest.StartBouncer(t, db, 2).Pool(t, pgx.QueryExecModeExec)
	var journal testkit.Journal
	p, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	require.NoError(t, err)
	limitertest.Run(t, p)
	l := limitertest.New(t, pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	// These processes listen, because they connect past the pooler.
	direct := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	const message = "no notifications arrive, so changes of policies are asked for twice a second"
	testkit.WaitUntil(t, func() bool { return strings.Contains(journal.String(), message) && direct.Status().Listening })
	for limit := range int64(3) {
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "enforce", fmt.Sprintf("fixed %d/1h", 20+limit))
		limitertest.WaitUntilKnown(t, p, db.Pool)
		result, err := l.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, 20+limit, result.Limit)
	}
	require.False(t, p.Status().Listening)
	require.Equal(t, 1, strings.Count(journal.String(), message), journal.String())
}

// A row of another kind than the limiter's policy is logged once for each policy that the row has.
func TestPolicyOfAnotherKindIsLoggedAnew(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p})
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "enforce", "sliding 20/1h")
	for _, policy := range []string{"sliding 20/1h", "log 20/1h", "sliding 20/1h"} {
		pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = $1", policy)
		limitertest.WaitUntilKnown(t, p, db.Pool)
		for range 2 {
			result, err := l.Peek(t.Context(), "key")
			require.NoError(t, err)
			require.EqualValues(t, 10, result.Limit)
		}
		require.Len(t, journal.Lines(), 1, policy)
	}
}

// The limiter for a row's policy is made once, although another limiter has a row with the same policy.
func TestLimitersOfRowsAreMadeOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
	var limiters []*ratelimit.Limiter
	var inForce []*model.Policy
	for _, name := range []string{"api", "login"} {
		limiters = append(limiters, limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p}))
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, name, "", "", "enforce", "fixed 20/1h")
	}
	limitertest.Table(p).Mu.Lock()
	limitertest.Table(p).Version = nil // makes one answer contain both rows
	limitertest.Table(p).Mu.Unlock()
	limitertest.WaitUntilKnown(t, p, db.Pool)
	for i := range 4 {
		l := limiters[i%2]
		in, _, err := limitertest.View(l).InForce(t.Context(), testkit.Amply, limitertest.Model(l.Config().Policy), "key")
		require.NoError(t, err)
		require.EqualValues(t, 20, in.Limit)
		inForce = append(inForce, in)
	}
	require.Same(t, inForce[0], inForce[2])
	require.Same(t, inForce[1], inForce[3])
}

// A process that listens again asks for changes, not for all rows.
func TestListeningAnewReadsWhatHasChanged(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "first", "", "deny", "")
	p, err := ratelimit.NewPolicies(db.NewPool(t, nil), ratelimit.PoliciesConfig{})
	require.NoError(t, err)
	limitertest.Table(p).PerRow, limitertest.Table(p).Patience = time.Hour, testkit.Amply
	limitertest.Run(t, p)
	completeAt := func() time.Time {
		limitertest.Table(p).Mu.Lock()
		defer limitertest.Table(p).Mu.Unlock()
		return limitertest.Table(p).CompleteAt
	}
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	first := completeAt()
	require.False(t, first.IsZero())
	for i := range 5 {
		require.Positive(t, pgtest.Scalar[int64](t, db.Pool, endListeners))
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", fmt.Sprint(i), "", "deny", "")
		testkit.WaitUntil(t, func() bool { return p.Status().Rows == i+2 && p.Status().Listening })
	}
	require.Equal(t, first, completeAt())
}

// Any role that may log in can notify. A flood of notifications costs no more than a lost connection: Run logs it once,
// stops listening, and polls. Polling works even if the application uses all connections of its pool.
func TestFloodOfNotifications(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	var journal testkit.Journal
	p := limitertest.RunningPolicies(t, pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	testkit.WaitUntil(t, func() bool { return p.Status().Listening })
	held, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer held.Release()
	flood := func() {
		pgtest.Exec(t, db.Pool, `SELECT pg_notify('rate_limit', 'forget ' || string_agg(md5(i || ' ' || j), ' '))
			FROM generate_series(1, 1000) AS i, generate_series(1, 50) AS j GROUP BY i`)
	}
	flood()
	testkit.WaitUntil(t, func() bool { return !p.Status().Listening && journal.String() != "" })
	for i := range 3 {
		flood()
		pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", fmt.Sprint(i), "", "deny", "")
		testkit.WaitUntil(t, func() bool { return p.Status().Rows == i+1 })
	}
	require.Contains(t, journal.String(), "more notifications arrive than processes send each other")
	require.Len(t, journal.Lines(), 1, journal.String())
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND query = 'LISTEN rate_limit'`))
}

// Notifications between two queries take little memory, whatever is sent.
func TestMailbox(t *testing.T) {
	t.Parallel()

	floods := 0
	box := policytable.Mailbox{Flood: func() { floods++ }}
	for range 10 * policytable.MostHeard {
		box.Put(nil, &pgconn.Notification{Channel: "the application's", Payload: "x"})
	}
	require.Empty(t, box.Payloads)
	for range policytable.MostHeard / 128 {
		box.Put(nil, &pgconn.Notification{Channel: "rate_limit", Payload: fmt.Sprintf("%064d", 1)})
	}
	require.Len(t, box.Payloads, policytable.MostHeard/128)
	require.Zero(t, floods)
	box.Put(nil, &pgconn.Notification{Channel: "rate_limit"})
	require.Empty(t, box.Payloads)
	require.Equal(t, 1, floods)
}
