package engine_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// holdsDB passes the statements that find holds to a function of the test.
type holdsDB struct {
	ratelimit.DBTX

	find func(ctx context.Context) error
}

func (db *holdsDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if sql == engine.Text("findhold", "") {
		if err := db.find(ctx); err != nil {
			return nil, err
		}
	}
	return db.DBTX.Query(ctx, sql, args...)
}

func dividing() error {
	return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "RLS03", Message: "rate_limit: this database is shard 1 of 8"}
}

// While a shard is being divided, a hold is looked for again.
func TestFindHoldWhileAShardIsDivided(t *testing.T) {
	t.Parallel()
	db, asked := &holdsDB{DBTX: pgtest.New(t).NewPool(t, nil)}, 0
	db.find = func(context.Context) error {
		if asked++; asked <= 3 {
			return dividing()
		}
		return nil
	}
	l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	held, err := l.Hold(t.Context(), "key", 1, time.Minute)
	require.NoError(t, err)
	found, err := l.HoldFromText(t.Context(), held.Hold.String())
	require.NoError(t, err)
	require.Equal(t, held.Hold.String(), found.String())
	require.Equal(t, 4, asked)
}

// If a shard never has the hold's key, a call waits no longer than Timeout.
func TestFindHoldOnAShardThatDoesNotFitTheMap(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		db := &holdsDB{DBTX: limitertest.NewModelDB(), find: func(context.Context) error { asked++; return dividing() }}
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly},
			ratelimit.ClientConfig{Timeout: time.Second})
		began := time.Now()
		_, err := l.HoldFromText(t.Context(), aHold)
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		require.ErrorContains(t, err, "run 'pgratelimit shard list'")
		require.LessOrEqual(t, time.Since(began), time.Second)
		require.InDelta(t, time.Second/engine.MapPause, asked, 2, "each with a pause")
	})
}

const aHold = "00000000-0000-4000-8000-000000000000.e"

// Calls that look for holds count within MaxInFlight. They leave one of several places to requests.
func TestFindHoldWithinMaxInFlight(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a database in memory")
	for places, atOnce := range map[int]int64{1: 1, 2: 1, 5: 4} {
		synctest.Test(t, func(t *testing.T) {
			var now, most, asked atomic.Int64
			unknown := &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "42883"}
			model := limitertest.NewModelDB()
			model.Takes = time.Millisecond
			db := &holdsDB{DBTX: model, find: func(context.Context) error {
				asked.Add(1)
				most.Store(max(most.Load(), now.Add(1)))
				limitertest.Elapse(300 * time.Millisecond)
				now.Add(-1)
				return unknown
			}}
			client := limitertest.NewClient(t, db, ratelimit.ClientConfig{Timeout: 10 * time.Second, MaxInFlight: places})
			l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
			began := time.Now()
			var calls sync.WaitGroup
			for range 8 {
				calls.Go(func() {
					_, err := l.HoldFromText(t.Context(), aHold)
					require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
				})
			}
			synctest.Wait()
			_, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			if places > 1 {
				require.Equal(t, time.Millisecond, time.Since(began), "it has a place")
			} else {
				require.Equal(t, 301*time.Millisecond, time.Since(began), "it is the next")
			}
			calls.Wait()
			require.EqualValues(t, 8, asked.Load())
			require.Equal(t, atOnce, most.Load())
			q := limitertest.EngineOf(client).Queues.First()
			q.Mu.Lock()
			defer q.Mu.Unlock()
			require.Zero(t, q.InFlight)
		})
	}
}

// A call that looks for a hold has its turn although requests always wait.
func TestFindHoldTakesTurns(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a database in memory")
	synctest.Test(t, func(t *testing.T) {
		model := limitertest.NewModelDB()
		model.Takes = time.Millisecond
		db := &holdsDB{DBTX: model, find: func(context.Context) error { return &pgconn.PgError{Code: "42883"} }}
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly},
			ratelimit.ClientConfig{MaxInFlight: 1, MaxBatch: 1})
		var calls sync.WaitGroup
		defer calls.Wait()
		var done atomic.Bool
		for i := range 3 {
			calls.Go(func() {
				for n := 0; n < 500 && !done.Load(); n++ {
					_, err := l.Allow(t.Context(), fmt.Sprint("key ", i))
					require.NoError(t, err)
				}
			})
		}
		limitertest.Elapse(10 * time.Millisecond)
		began := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := l.HoldFromText(ctx, aHold)
		done.Store(true)
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
		require.LessOrEqual(t, time.Since(began), time.Millisecond)
	})
}

// A caller that leaves while it waits for a place takes no place. A call that waits too long asks nothing.
func TestFindHoldThatGivesUp(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a database in memory")
	synctest.Test(t, func(t *testing.T) {
		var asked atomic.Int64
		db := &holdsDB{DBTX: limitertest.NewModelDB(), find: func(ctx context.Context) error {
			if ctx.Err() == nil {
				asked.Add(1)
			}
			<-ctx.Done()
			return ctx.Err()
		}}
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{Timeout: time.Second, MaxInFlight: 1})
		l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		var calls sync.WaitGroup
		for range 3 {
			calls.Go(func() {
				_, err := l.HoldFromText(t.Context(), aHold)
				require.ErrorIs(t, err, ratelimit.ErrTimeout)
			})
		}
		synctest.Wait()
		_, err := l.HoldFromText(ctx, aHold)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		calls.Wait()
		synctest.Wait()
		require.EqualValues(t, 1, asked.Load())
		_, err = l.Allow(t.Context(), "key")
		require.NoError(t, err)
	})
}

// A hold is looked for in the queue of its shard.
func TestFindHoldAsksTheQueueOfItsShard(t *testing.T) {
	t.Parallel()
	p := newProxy(t, 4)
	client := p.client(t, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	queues := &limitertest.EngineOf(client).Queues
	require.True(t, queues.Learn(4))
	for i := range 20 {
		key := keysOf(i%4, 4, 1+i)[i]
		held, err := l.Hold(t.Context(), key, 1, time.Minute)
		require.NoError(t, err)
		id := held.Hold.String()[:36]
		require.Same(t, (*queues.All.Load())[shardkey.Of(key, 4)], queues.OfHold(id))
	}
}

// A ModelDB decides no holds, and a test that sends it one fails.
func TestModelDBHasNoHolds(t *testing.T) {
	t.Parallel()
	db := limitertest.NewModelDB()
	l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	r := newRequest(l, "key", 1)
	r.Parts[0].Hold, r.Parts[0].TTL = aHold, 1
	c := limitertest.Engine(l).Database.Call([]*engine.Request{r}, engine.Transaction{})
	find := engine.Call{SQL: engine.Text("findhold", ""), Args: []any{aHold, nil}}
	for _, c := range []engine.Call{c, find} {
		require.Panics(t, func() { _ = c.Query(t.Context(), db, false) })
	}
}

// If the keys of a hold have got to different shards, a settlement settles none of them.
func TestSettleOfKeysThatHaveParted(t *testing.T) {
	t.Parallel()
	p := newProxy(t, 2)
	l := limitertest.Of(t, p.client(t, ratelimit.ClientConfig{}), ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	keys := []string{keysOf(0, 4, 1)[0], keysOf(2, 4, 1)[0]} // both on shard 0 of 2
	held, err := ratelimit.HoldAll(t.Context(), time.Minute, l.Request(keys[0], 1), l.Request(keys[1], 1))
	require.NoError(t, err)
	p.grow(t, 4)
	_, err = held.Hold.Settle(t.Context(), 1)
	require.ErrorIs(t, err, ratelimit.ErrSharded)
	require.ErrorContains(t, err, "on several shards")
	for _, key := range keys {
		result, err := l.Peek(t.Context(), key)
		require.NoError(t, err)
		require.EqualValues(t, 1, result.Held)
	}
}
