package engine_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

func TestOneConnection(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	policies := limitertest.SlowPolicies(10)
	for name, c := range map[string]struct {
		kind string
		open func() pgtest.Executor
	}{
		"connection":               {"fixed window", func() pgtest.Executor { return pgtest.Connect(t, db) }},
		"transaction":              {"sliding window", func() pgtest.Executor { return pgtest.Begin(t, db) }},
		"connection of a pool":     {"token bucket", func() pgtest.Executor { return limitertest.Acquire(t, db.Pool) }},
		"transaction of a pool":    {"sliding log", func() pgtest.Executor { return limitertest.Begin(t, db.Pool) }},
		"transaction in one again": {"calendar", func() pgtest.Executor { return limitertest.Savepoint(t, pgtest.Begin(t, db)) }},
	} {
		kinds := []string{c.kind}
		if limitertest.Rounds(t) > 1 {
			kinds = slices.Collect(maps.Keys(policies))
		}
		for _, kind := range kinds {
			conn := c.open()
			limiter := limitertest.New(t, conn, ratelimit.Config{Name: name, Policy: policies[kind]})
			results, errs := make([]ratelimit.Result, 30), make([]error, 30)
			testkit.Together(len(results), func(i int) { results[i], errs[i] = limiter.Allow(t.Context(), kind) })
			require.NoError(t, errors.Join(errs...), name)
			allowed := 0
			for _, r := range results {
				if r.Allowed {
					allowed++
				}
			}
			require.Equal(t, 10, allowed, name)
			peek, err := limiter.Peek(t.Context(), kind)
			require.NoError(t, err)
			require.False(t, peek.Allowed)
			require.NoError(t, limiter.Reset(t.Context(), kind))
			peek, err = limiter.Peek(t.Context(), kind)
			require.NoError(t, err)
			require.EqualValues(t, 10, peek.Remaining)

			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			_, err = limiter.Allow(cancelled, kind)
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, limiter.Reset(cancelled, kind), context.Canceled)
			require.Equal(t, 1, pgtest.Scalar[int](t, conn, "SELECT 1")) // the connection still works
			if tx, ok := conn.(pgx.Tx); ok {
				require.NoError(t, tx.Rollback(t.Context()))
			}
		}
	}
}

// All limiters on a connection take turns, whether made with the connection, a pool's connection or a transaction.
func TestLimitersOnOneConnectionTakeTurns(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pooled := limitertest.Acquire(t, db.NewPool(t, nil))
	inPooled, err := pooled.Begin(t.Context())
	require.NoError(t, err)
	conn := pgtest.Connect(t, db)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	policy := ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour}
	for name, dbs := range map[string][]ratelimit.DBTX{
		"connection":        {conn, conn, tx, limitertest.Savepoint(t, tx)},
		"pooled connection": {pooled, inPooled, pooled.Conn()},
	} {
		var own pgx.Tx
		for _, db := range dbs {
			if tx, ok := db.(pgx.Tx); ok {
				own = tx
			}
		}
		limiters := make([]*ratelimit.Limiter, 2*len(dbs))
		testkit.Together(len(limiters), func(i int) {
			limiters[i] = limitertest.New(
				t,
				dbs[i%len(dbs)],
				ratelimit.Config{Name: fmt.Sprint(name, i), Policy: policy},
			)
		})
		errs := make([]error, 6*len(limiters))
		testkit.Together(len(errs), func(i int) {
			ctx, l := context.Background(), limiters[i%len(limiters)]
			_, err1 := l.Allow(ctx, "key")
			_, err2 := ratelimit.AllowAll(ctx, l.Request("key", 1), l.Request("other key", 1))
			_, err3 := l.Refund(ctx, limitertest.Forged(l, "key", 1))
			_, err4 := l.Grant(ctx, "key", 1)
			_, err5 := l.Wait(ctx, "key")
			_, err6 := l.Peek(ctx, "key")
			errs[i] = errors.Join(errs[i], err1, err2, err3, err4, err5, err6, l.Reset(ctx, "key"))
			_, err1 = l.WithTx(own).Allow(ctx, "key")
			_, err2 = limitertest.AllowAllTx(ctx, own, l.Request("key", 1), l.Request("other key", 1))
			_, err3 = l.WithTx(own).Refund(ctx, limitertest.Forged(l, "key", 1))
			_, err4 = l.WithTx(own).Grant(ctx, "key", 1)
			errs[i] = errors.Join(errs[i], err1, err2, err3, err4, l.WithTx(own).Reset(ctx, "key"))
		})
		require.NoError(t, errors.Join(errs...), name)
	}
}

// A cancelled context ends the wait for a turn on a single connection.
func TestCancelledWaitForATurn(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	limiter := limitertest.New(t, conn, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()})
	require.NoError(t, turn.Of(conn).Take(t.Context()))
	for name, call := range map[string]func(ctx context.Context) error{
		"Allow":   func(ctx context.Context) error { _, err := limiter.Allow(ctx, "key"); return err },
		"Wait":    func(ctx context.Context) error { _, err := limiter.Wait(ctx, "key"); return err },
		"Reset":   func(ctx context.Context) error { return limiter.Reset(ctx, "key") },
		"AllowTx": func(ctx context.Context) error { _, err := limiter.WithTx(tx).Allow(ctx, "key"); return err },
		"ResetTx": func(ctx context.Context) error { return limiter.WithTx(tx).Reset(ctx, "key") },
	} {
		ctx, cancel := context.WithCancel(t.Context())
		wait := testkit.Later(func() (struct{}, error) { return struct{}{}, call(ctx) })
		cancel()
		_, err := wait()
		require.ErrorIs(t, err, context.Canceled, name)
		require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown, name)
	}
	turn.Of(conn).Pass()

	require.NoError(t, conn.Close(t.Context()))
	limiter = limitertest.New(t, conn, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	_, err = limiter.Allow(t.Context(), "key")
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
}

// Each connection has a separate turn, and so has each database value whose connection is unknown.
func TestTurnsAreOfOneConnection(t *testing.T) {
	t.Parallel()

	type strangeTx struct{ pgx.Tx }
	db := pgtest.New(t)
	one, other := pgtest.Connect(t, db), pgtest.Connect(t, db)
	require.NotSame(t, turn.Of(one), turn.Of(other))
	unknown := turn.Of(limitertest.Connless{})
	require.NotSame(t, unknown, turn.Of(limitertest.Connless{}))
	tx, err := one.Begin(t.Context())
	require.NoError(t, err)
	config := ratelimit.Config{Name: "test", Policy: limitertest.Hourly}
	require.Same(t, turn.Of(one), limitertest.Engine(limitertest.New(t, strangeTx{Tx: tx}, config)).Database.Turn)
	require.Nil(t, limitertest.Engine(limitertest.New(t, db.Pool, config)).Database.Turn)
}

// A call of a limiter needs only one connection of the pool. So small pools are enough, even if callers use connections
// of the same pool for transactions.
func TestSmallPools(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, maxConns := range []int32{1, 2} {
		db := pgtest.New(t)
		pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = maxConns })
		limiter := limitertest.New(
			t,
			pool,
			ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}},
		)
		errs := make([]error, 60)
		testkit.Together(len(errs), func(i int) {
			key := fmt.Sprint(i % 5)
			_, err := limiter.Allow(t.Context(), key)
			err = errors.Join(err, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := limiter.WithTx(tx).Allow(t.Context(), key)
				return err
			}))
			_, peekErr := limiter.Peek(t.Context(), key)
			errs[i] = errors.Join(err, peekErr, limiter.Reset(t.Context(), "another key"))
		})
		require.NoError(t, errors.Join(errs...))
		for key := range 5 {
			require.EqualValues(t, 24, limitertest.Taken(t, db.Pool, limiter.Config(), fmt.Sprint(key)))
		}
	}
}

// The server may close idle connections of the pool. The next call then uses another connection.
func TestSessionsThatAreEndedAtRest(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 4
		config.ConnConfig.RuntimeParams["idle_session_timeout"] = "20"
		config.ConnConfig.RuntimeParams["application_name"] = "at rest"
	})
	l := limitertest.New(t, pool, ratelimit.Config{
		Name: "x", Policy: ratelimit.SlidingWindow{Limit: 100, Window: limitertest.Year}, OnFailure: ratelimit.FailOpen(),
	})
	for range 2 {
		conns := make([]*pgxpool.Conn, 4)
		for i := range conns {
			conns[i] = limitertest.Acquire(t, pool)
		}
		for _, conn := range conns {
			conn.Release()
		}
		require.Eventually(t, func() bool {
			return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'at rest'") == 0
		}, testkit.Amply, time.Millisecond)
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	}
}
