package engine_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// A call waits for a row that a transaction has locked. When the context of the call ends, the call returns at once.
// The connection stays open, and the statement goes on and takes from the row later.
func TestCallerLeavesWhileTheRowIsHeld(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
		ratelimit.ClientConfig{Timeout: 4 * testkit.Amply},
	)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	conns := pool.Stat().NewConnsCount()

	holder := limitertest.Hold(t, db, limiter.Config(), "key")
	for name, call := range map[string]func(context.Context) (ratelimit.Result, error){
		"Allow": func(ctx context.Context) (ratelimit.Result, error) { return limiter.Allow(ctx, "key") },
		"Reset": func(ctx context.Context) (ratelimit.Result, error) {
			return ratelimit.Result{}, limiter.Reset(ctx, "key")
		},
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		wait := testkit.Later(func() (ratelimit.Result, error) { return call(ctx) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		cancel(errors.New("the client has gone"))
		result, err := wait()
		require.ErrorIs(t, err, context.Canceled, name)
		require.Zero(t, result)
		testkit.WaitUntil(t, func() bool { return pool.Stat().AcquiredConns() > 0 }) // none between two statements

		_, err = call(ctx) // a call whose context has ended sends nothing
		require.ErrorIs(t, err, context.Canceled, name)

		require.NoError(t, holder.Commit(t.Context()))
		want := map[string]int64{"Allow": 2, "Reset": 0}[name]
		testkit.WaitUntil(t, func() bool { return limitertest.Taken(t, db.Pool, limiter.Config(), "key") == want })
		testkit.WaitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 0 })
		_, err = limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		_, err = limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		holder = limitertest.Hold(t, db, limiter.Config(), "key")
	}
	require.NoError(t, holder.Rollback(t.Context()))
	require.Equal(t, conns, pool.Stat().NewConnsCount())
}

func TestCallerThatLeavesDoesNotDisturbOthers(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	config := ratelimit.Config{
		Name:   "test",
		Policy: ratelimit.FixedWindow{Limit: 100, Window: limitertest.Year},
	}
	clientConfig := ratelimit.ClientConfig{Timeout: 4 * testkit.Amply, MaxInFlight: 1}
	pool := db.NewPool(t, nil)
	limiter := limitertest.New(t, pool, config, clientConfig)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)

	holder := limitertest.Hold(t, db, config, "key")
	first := testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "key") })
	waitUntilHeld(t, db.Pool, limiter)
	// While the table is locked too, the lane waits in one statement, and new requests stay in the lane's queue.
	locked := limitertest.Savepoint(t, holder)
	pgtest.Exec(t, locked, "LOCK TABLE rate_limit_ephemeral")
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	var waits []func() (ratelimit.Result, error)
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 9 {
		call := context.Background()
		if i%3 == 1 {
			call = ctx
		}
		waits = append(waits, testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(call, "key") }))
		testkit.WaitUntil(t, func() bool { return inLane(limitertest.Client(limiter)) == i+1 })
	}
	cancel()
	for i := 1; i < len(waits); i += 3 {
		_, err := waits[i]()
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, locked.Rollback(t.Context()))
	// Later calls may reuse the requests of calls that have left. Calls must work with reused and with new requests.
	waits = append(waits, testkit.Later(func() (ratelimit.Result, error) { return limiter.Allow(context.Background(), "other key") }))
	_, err = waits[9]()
	require.NoError(t, err)
	require.NoError(t, holder.Commit(t.Context()))

	result, err := first()
	require.NoError(t, err)
	require.EqualValues(t, 98, result.Remaining)
	for i, want := range map[int]int64{0: 97, 2: 95, 3: 94, 5: 92, 6: 91, 8: 89, 9: 99} {
		result, err := waits[i]()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Equal(t, want, result.Remaining, i)
	}
	require.EqualValues(t, 11, limitertest.Taken(t, db.Pool, config, "key"))
	require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(2)) // one for MaxInFlight, and one for the lane
}

func TestNothingIsLeftAtRest(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	pgtest.Exec(t, pool, "SELECT 1")
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 100, Window: limitertest.Year},
		},
		ratelimit.ClientConfig{MaxInFlight: 4, MaxBatch: 7},
	)
	left := testkit.Offspring(t, func(context.Context) {
		errs := make([]error, 500)
		testkit.Together(len(errs), func(i int) {
			_, err := limiter.Allow(t.Context(), fmt.Sprint(i%30))
			_, peekErr := limiter.Peek(t.Context(), "key")
			errs[i] = errors.Join(err, peekErr, limiter.Reset(t.Context(), "key"))
		})
		require.NoError(t, errors.Join(errs...))
	})
	testkit.WaitUntil(t, func() bool { return left() == 0 })
	q := limitertest.Engine(limiter).Queues.First()
	q.Mu.Lock()
	defer q.Mu.Unlock()
	require.Zero(t, q.InFlight)
	require.Zero(t, q.Waiting)
	require.Empty(t, q.Turns)
	require.Empty(t, q.ByLimiter)
	require.Zero(t, pool.Stat().AcquiredConns())
}

func TestNewAsksNothing(t *testing.T) {
	t.Parallel()

	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	defer pool.Close()
	left := testkit.Offspring(t, func(context.Context) {
		for range 100 {
			limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Second}})
		}
	})
	require.Zero(t, left())
	require.Zero(t, pool.Stat().NewConnsCount())
}

// A server stops answering. All callers get an error within their Timeout. The limiter uses two connections, not the
// whole pool. When all calls have ended, no memory of the calls is left.
//
//nolint:paralleltest // measures the memory of the process
func TestFrozenServer(t *testing.T) {
	server := pgtest.Server(t, pgserver.Config{})
	config, err := pgxpool.ParseConfig(server.URL())
	require.NoError(t, err)
	config.MaxConns = 6
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	all := pool.AcquireAllIdle(t.Context())
	for len(all) < int(config.MaxConns) {
		all = append(all, limitertest.Acquire(t, pool))
	}
	for _, conn := range all {
		conn.Release()
	}

	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 10_000, Window: limitertest.Year},
		},
		ratelimit.ClientConfig{Timeout: 3 * time.Second, MaxBatch: 100},
	)
	require.NoError(t, server.Freeze())
	const callers = 10_000
	errs := make([]error, callers)
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // the second collection empties a sync.Pool
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	testkit.Together(callers, func(int) {}) // so that the runtime has memory for this many goroutines
	before := heap()
	var free []*pgxpool.Conn
	left := testkit.Offspring(t, func(context.Context) {
		done := testkit.Later(func() (any, error) {
			testkit.Together(
				callers,
				func(i int) { _, errs[i] = limiter.Allow(context.Background(), fmt.Sprint("key ", i%50)) },
			)
			return nil, nil
		})
		// All other connections of the pool are free.
		testkit.WaitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 2 })
		free = pool.AcquireAllIdle(t.Context())
		_, _ = done()
	})
	require.Len(t, free, 4)
	for _, conn := range free {
		conn.Release()
	}

	unknown := 0
	for _, err := range errs {
		var store *ratelimit.StoreError
		require.ErrorAs(t, err, &store)
		require.ErrorIs(t, err, ratelimit.ErrTimeout)
		require.NotContains(t, err.Error(), "key ")
		if errors.Is(err, ratelimit.ErrOutcomeUnknown) {
			unknown++
		}
	}
	clear(errs)
	testkit.WaitUntil(t, func() bool { return heap() < before+1<<20 }) // 200 bytes for each call would be 2 MB
	require.Positive(t, unknown)
	require.LessOrEqual(t, unknown, 2*limitertest.Engine(limiter).Settings.MaxBatch) // only requests in flight
	require.Zero(t, inQueue(limitertest.Client(limiter)))
	testkit.WaitUntil(t, func() bool { return left() < 20 }) // the goroutines that close the two connections

	require.NoError(t, server.Thaw())
	testkit.WaitUntil(t, func() bool { return left() == 0 })
	testkit.WaitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 0 })
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](
			t,
			pool,
			"SELECT count(*) FROM pg_stat_activity WHERE state <> 'idle' AND backend_type = 'client backend'",
		) == 1
	})
	var counted int64
	for _, row := range pgtest.StoredRows(t, pool, false) {
		counted += row.Count
	}
	require.LessOrEqual(t, counted, int64(unknown)) // only takes whose caller got ErrOutcomeUnknown
	result, err := limitertest.New(
		t,
		pool,
		ratelimit.Config{Name: "test", Policy: limiter.Config().Policy},
	).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}
