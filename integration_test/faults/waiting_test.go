package faults

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A call waits two seconds for a row. When it gets the row, the refill of these two seconds is there, for this call and
// for all calls behind it.
func TestLockWaitOfSeconds(t *testing.T) {
	t.Parallel()

	const wait = 2 * time.Second
	db := pgtest.New(t)
	policy := ratelimit.TokenBucket{Capacity: 100, Refill: 10, Every: time.Second}
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: policy, NoDenialCache: true,
	}, ratelimit.ClientConfig{Timeout: 4 * amply})
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	emptied, err := limiter.WithTx(tx).AllowN(t.Context(), "key", 100)
	require.NoError(t, err)
	require.True(t, emptied.Allowed)

	const callers = 30
	results, errs := make([]ratelimit.Result, callers), make([]error, callers)
	var wg sync.WaitGroup
	for i := range callers {
		wg.Go(func() { results[i], errs[i] = limiter.Allow(t.Context(), "key") })
	}
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`) > 0
	})
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[time.Time](t, tx, "SELECT clock_timestamp()").Sub(emptied.DecidedAt) >= wait
	})
	released := pgtest.Scalar[time.Time](t, tx, "SELECT clock_timestamp()")
	require.NoError(t, tx.Commit(t.Context()))
	wg.Wait()
	require.NoError(t, errors.Join(errs...))

	allowed := int64(0)
	last := released
	for _, result := range results {
		require.False(t, result.DecidedAt.Before(released))
		if result.DecidedAt.After(last) {
			last = result.DecidedAt
		}
		if result.Allowed {
			allowed++
		}
	}
	require.GreaterOrEqual(t, allowed, min(callers, int64(wait/time.Second)*policy.Refill))
	require.LessOrEqual(t, allowed, int64(last.Sub(emptied.DecidedAt)*10/time.Second))
}

// storm makes 2,000 calls in about a second. Each context ends within 2 ms, while an answer takes at least 5 ms. It
// returns how many connections were opened.
func storm(t *testing.T, pool *pgxpool.Pool, call func(ctx context.Context) error) int64 {
	t.Helper()
	const calls = 1000
	before := pool.Stat().NewConnsCount()
	ticker := time.NewTicker(time.Second / calls)
	defer ticker.Stop()
	var wg sync.WaitGroup
	errs := make([]error, calls)
	for i := range calls {
		<-ticker.C
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i%3)*time.Millisecond)
			defer cancel()
			errs[i] = call(ctx)
		})
	}
	wg.Wait()
	left := 0
	for _, err := range errs {
		if err != nil { // the caller left before the answer arrived
			require.True(t, errors.Is(err, context.DeadlineExceeded) || pgxTimeout(err), err)
			left++
		}
	}
	require.Greater(t, left, calls/3+1) // more callers left than those whose context had ended before the call
	return pool.Stat().NewConnsCount() - before
}

// pgxTimeout tells whether the driver gave up because of a context.
func pgxTimeout(err error) bool {
	timeout, ok := errors.AsType[interface {
		error
		Timeout() bool
	}](err)
	return ok && timeout.Timeout()
}

// 2,000 callers leave within a second, as when a load balancer gives up. The connections stay open. The negative
// control is a driver that gets the contexts: it closes connections.
func TestCancelledContextsOpenNoConnections(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Rewrite(t, db.Pool,
		"_rate_limit_now", "clock_timestamp()", "(SELECT clock_timestamp() FROM pg_sleep(0.005))")
	pool := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["application_name"] = "limiter" },
	)
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour},
	})
	// This opens the two connections that the client uses, besides the one for held keys.
	var wg sync.WaitGroup
	errs := make([]error, 100)
	for i := range errs {
		wg.Go(func() { _, errs[i] = limiter.Allow(t.Context(), keyNumber(i)) })
	}
	wg.Wait()
	require.NoError(t, errors.Join(errs...))

	opened := storm(t, pool, func(ctx context.Context) error {
		_, err := limiter.Allow(ctx, "key")
		return err
	})
	require.LessOrEqual(t, opened, int64(1)) // the connection for held keys, if a statement took long on a busy machine
	result, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.True(t, result.Allowed)
	require.LessOrEqual(t, counted(t, db.Pool, false)["key"], int64(2001))

	opened = storm(t, pool, func(ctx context.Context) error {
		_, err := pool.Exec(ctx, "SELECT rate_limit_take_fixed_window('test', ARRAY['key'], 1048576, 3600000000)")
		return err
	})
	t.Logf("%d connections opened by raw contexts", opened)
	require.Greater(t, opened, int64(1)) // the number depends on the machine's speed
}

// While a long transaction is open, no rows that died since can be removed. The table grows, and decisions stay right.
// After the end of the transaction, the table stops growing.
func TestLongForeignTransaction(t *testing.T) {
	t.Parallel()

	const calls = 1000
	// The server has no autovacuum, because an ANALYZE of autovacuum would be another long transaction.
	_, pool := newServer(t, pgserver.Config{Settings: map[string]string{"autovacuum": "off"}})
	for _, durable := range []bool{false, true} {
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 3 * calls, Window: year}, Durable: durable,
		})
		taken := int64(0)
		// take makes sequential calls, and returns by how many pages the table grew.
		take := func() int64 {
			const pages = "SELECT pg_relation_size($1::text::regclass) / current_setting('block_size')::int"
			table := pgtest.Table(durable)
			before := pgtest.Scalar[int64](t, pool, pages, table)
			for range calls {
				result, err := limiter.Allow(t.Context(), "key")
				require.NoError(t, err)
				taken++
				require.True(t, result.Allowed)
				require.Equal(t, 3*calls-taken, result.Remaining)
			}
			return pgtest.Scalar[int64](t, pool, pages, table) - before
		}
		require.LessOrEqual(t, take(), int64(2))

		foreign, err := pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		require.NoError(t, err)
		pgtest.Exec(t, foreign, "SELECT FROM pg_class")
		grown := take()
		require.Greater(t, grown, int64(10)) // if nothing grew, the transaction held nothing back
		require.NoError(t, foreign.Rollback(t.Context()))

		require.LessOrEqual(t, take(), int64(2))
		result, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, result.Allowed)
		require.EqualValues(t, 3*calls, counted(t, pool, durable)["key"])
	}
}
