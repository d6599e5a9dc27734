package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// poolOfSize returns a pool of n connections.
func poolOfSize(t *testing.T, db *pgtest.DB, n int32) *pgxpool.Pool {
	t.Helper()
	return db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = n })
}

// Allow is called inside a transaction that has the pool's last connection, so Allow never gets a second connection.
// Allow returns ErrPoolExhausted, or OnFailure answers.
func TestAllowInATransactionOfTheLastConnection(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "the connections of one process's pool")
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	all := map[ratelimit.Source]ratelimit.FailureMode{ratelimit.SourceDatabase: ratelimit.ReturnError()}
	maps.Copy(all, limitertest.Modes)
	for source, mode := range all {
		sizes := []int32{1, 4}
		if source != ratelimit.SourceDatabase {
			sizes = sizes[:1]
		}
		for _, size := range sizes {
			t.Run(fmt.Sprint(mode, ", ", size), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				pool := poolOfSize(t, db, size)
				for range size - 1 {
					defer limitertest.Acquire(t, pool).Release()
				}
				var log testkit.Journal
				var decisions []ratelimit.DecisionEvent
				var breakers []ratelimit.BreakerEvent
				l := limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode}, ratelimit.ClientConfig{
					Timeout: time.Second, // enough to connect on a busy machine
					Logger:  log.Logger(),
					Observer: &ratelimit.Observer{
						Decision: func(e ratelimit.DecisionEvent) { decisions = append(decisions, e) },
						Breaker:  func(e ratelimit.BreakerEvent) { breakers = append(breakers, e) },
					},
				})
				tx, err := pool.Begin(t.Context())
				require.NoError(t, err)
				for range engine.BreakerFailures {
					result, err := l.Allow(t.Context(), "personal")
					if source == ratelimit.SourceDatabase {
						limitertest.RequireKinds(t, err, ratelimit.ErrPoolExhausted, ratelimit.ErrTimeout)
						require.Contains(t, err.Error(), "WithTx")
						require.Equal(t, "pool_exhausted", ratelimit.ErrorKind(decisions[len(decisions)-1].Err))
					} else {
						require.NoError(t, err)
						require.Equal(t, source, result.Source)
					}
				}
				limitertest.RequireKinds(t, l.Reset(t.Context(), "personal"), ratelimit.ErrPoolExhausted, ratelimit.ErrTimeout)
				_, err = ratelimit.AllowAll(t.Context(), l.Request("personal", 1))
				require.Error(t, err)
				require.Len(t, breakers, 1)
				require.ErrorIs(t, breakers[0].Err, ratelimit.ErrPoolExhausted)
				lines := log.Lines()
				require.Len(t, lines, 1)
				require.Contains(t, lines[0], `level=WARN msg="ratelimit: the pool has no connection to spare"`)
				require.Contains(t, lines[0], "MaxConns")
				require.NotContains(t, log.String(), "away")
				require.NotContains(t, log.String(), "personal")

				// WithTx needs no second connection.
				patient := limitertest.New(t, pool, ratelimit.Config{
					Name: "test", Policy: limitertest.Hourly,
				})
				result, err := patient.WithTx(tx).Allow(t.Context(), "personal")
				require.NoError(t, err)
				require.EqualValues(t, 99, result.Remaining)
				require.NoError(t, tx.Commit(t.Context()))
				testkit.WaitUntil(t, func() bool {
					result, err := l.Peek(t.Context(), "personal")
					return err == nil && result.Source == ratelimit.SourceDatabase && result.Remaining == 99
				})
				require.Contains(t, log.String(), "trouble=pool_exhausted")
			})
		}
	}
}

// If a statement gets no connection, the calls that wait behind it return ErrPoolExhausted too.
func TestCallsBehindAnExhaustedPool(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "the connections of one process's pool")
	db := pgtest.New(t)
	pool := poolOfSize(t, db, 1)
	defer limitertest.Acquire(t, pool).Release()
	var log testkit.Journal
	l := limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{
		Timeout: 200 * time.Millisecond, MaxInFlight: 1, MaxBatch: 1, Logger: log.Logger(),
	})
	errs := make([]error, 20)
	testkit.Together(len(errs), func(i int) { _, errs[i] = l.Allow(context.Background(), fmt.Sprint("personal ", i)) })
	notAsked := 0
	for _, err := range errs {
		limitertest.RequireKinds(t, err, ratelimit.ErrPoolExhausted, ratelimit.ErrTimeout)
		if errors.Is(err, engine.ErrNoConnection) {
			notAsked++
		}
	}
	require.Positive(t, notAsked)
	require.Len(t, log.Lines(), 1)
}

// A slow hook delays a new connection. The error must not say that the pool is exhausted.
func TestSlowConnectionIsNoExhaustedPool(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).NewPool(t, func(c *pgxpool.Config) {
		c.MaxConns = 1
		c.AfterConnect = func(ctx context.Context, _ *pgx.Conn) error {
			<-ctx.Done()
			return ctx.Err()
		}
	})
	l := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: limitertest.Hourly,
	}, ratelimit.ClientConfig{Timeout: 100 * time.Millisecond})
	_, err := l.Allow(t.Context(), "personal")
	limitertest.RequireKinds(t, err, ratelimit.ErrTimeout)
}

// Postgres freezes while the limiter is getting a connection. All connections of the pool are then in use, but not by
// the application, so the error is not ErrPoolExhausted.
func TestFrozenServerIsNoExhaustedPool(t *testing.T) {
	t.Parallel()
	doortest.Not(t, "the connections of one process's pool")
	server := pgtest.Server(t, pgserver.Config{})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	own, err := ratelimit.OwnPool(pool)
	require.NoError(t, err)
	t.Cleanup(own.Close)
	var open []*pgxpool.Conn
	for range ratelimit.OwnConns {
		open = append(open, limitertest.Acquire(t, own))
	}
	for _, conn := range open {
		conn.Release()
	}
	var log testkit.Journal
	l := limitertest.New(t, own, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{
		Timeout: 100 * time.Millisecond, Logger: log.Logger(),
	})
	one := pool.Config()
	one.MaxConns = 1
	one.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return true }
	pinging, err := pgxpool.NewWithConfig(t.Context(), one)
	require.NoError(t, err)
	t.Cleanup(pinging.Close)
	limitertest.Acquire(t, pinging).Release()
	require.NoError(t, server.Freeze())
	defer func() { require.NoError(t, server.Thaw()) }()
	// Before pgxpool hands out an idle connection, it pings the connection. This pool has only one connection.
	_, err = limitertest.New(t, pinging, ratelimit.Config{
		Name: "test", Policy: limitertest.Hourly,
	}, ratelimit.ClientConfig{Timeout: 100 * time.Millisecond, Logger: log.Logger()}).Allow(t.Context(), "personal")
	limitertest.RequireKinds(t, err, ratelimit.ErrTimeout)
	require.Len(t, log.Lines(), 1)
	for range 10 { // later calls find only connections that pgxpool is closing
		errs := make([]error, 64)
		testkit.Together(len(errs), func(i int) { _, errs[i] = l.Allow(context.Background(), fmt.Sprint("personal ", i)) })
		for _, err := range errs {
			require.ErrorIs(t, err, ratelimit.ErrTimeout)
			require.NotErrorIs(t, err, ratelimit.ErrPoolExhausted)
		}
	}
	lines := log.Lines()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], "Postgres is away or slow")
}

// 200 transactions on a pool of 4 call Allow without WithTx. With an OwnPool, the database decides each call, and
// exactly the limit is admitted.
func TestOwnPoolDecidesWhileThePoolIsExhausted(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := poolOfSize(t, db, 4)
	own, err := ratelimit.OwnPool(pool)
	require.NoError(t, err)
	t.Cleanup(own.Close)
	config := ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 50, Window: limitertest.Year}, OnFailure: ratelimit.FailOpen(),
	}
	l := limitertest.New(t, own, config)
	var allowed atomic.Int64
	errs := make([]error, 200)
	testkit.Together(len(errs), func(i int) {
		errs[i] = pgx.BeginFunc(context.Background(), pool, func(pgx.Tx) error {
			result, err := l.Allow(context.Background(), "key")
			if err == nil && result.Source != ratelimit.SourceDatabase && result.Source != ratelimit.SourceCachedDenial {
				err = errors.New(result.Source.String())
			}
			if result.Allowed {
				allowed.Add(1)
			}
			return err
		})
	})
	require.NoError(t, errors.Join(errs...))
	require.EqualValues(t, 50, allowed.Load())

	// A transaction of the application's pool also works with this limiter.
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	result, err := l.WithTx(tx).Allow(t.Context(), "another key")
	require.NoError(t, err)
	require.EqualValues(t, 49, result.Remaining)
	require.NoError(t, tx.Rollback(t.Context()))
}

func TestOwnPool(t *testing.T) {
	t.Parallel()
	_, err := ratelimit.OwnPool(nil)
	var configErr *ratelimit.ConfigError
	require.ErrorAs(t, err, &configErr)
	require.Equal(t, "pool", configErr.Field)

	db := pgtest.New(t)
	pool := db.NewPool(t, func(c *pgxpool.Config) {
		c.MaxConns, c.MinConns, c.MinIdleConns = 20, 10, 10
		c.ConnConfig.RuntimeParams["application_name"] = "the application"
	})
	own, err := ratelimit.OwnPool(pool)
	require.NoError(t, err)
	require.EqualValues(t, ratelimit.OwnConns, own.Config().MaxConns)
	require.Zero(t, own.Config().MinConns+own.Config().MinIdleConns)
	require.Zero(t, own.Stat().TotalConns())
	require.EqualValues(t, 20, pool.Config().MaxConns, "the application's pool is as it was")
	require.Equal(t, "the application", pgtest.Scalar[string](t, own, "SHOW application_name"))
	own.Close()
	require.Equal(t, "the application", pgtest.Scalar[string](t, pool, "SHOW application_name"))
}
