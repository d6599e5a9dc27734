package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// board is a queue without a database. It shows which requests the next statement gets.
type board struct {
	queue  *engine.Queue
	spaces map[string]*engine.Space
}

func newBoard(maxBatch int) *board {
	return &board{&engine.Queue{MaxBatch: maxBatch}, make(map[string]*engine.Space)}
}

// push adds n requests of a limiter to the queue, under a fixed window with the given limit.
func (b *board) push(limiter string, limit int64, n int, cost int64) (requests []*engine.Request) {
	space, ok := b.spaces[limiter]
	if !ok {
		space = &engine.Space{Name: limiter}
		b.spaces[limiter] = space
	}
	for i := range n {
		r := &engine.Request{Space: space, Policy: limitertest.Model(ratelimit.FixedWindow{Limit: limit, Window: limitertest.Year})}
		r.Parts = r.Single[:0]
		r.Add(space, r.Policy, fmt.Sprint("key ", i), cost, nil)
		b.queue.Push(r)
		requests = append(requests, r)
	}
	return requests
}

// next returns how many requests of each limiter are in the next statement, in the order of the requests.
func (b *board) next() (left []string) {
	type line struct {
		name  string
		limit int64
		n     int
	}
	var lines []line
	for _, r := range b.queue.NextBatch(nil) {
		name, limit := r.Space.Name, r.Policy.Limit
		if last := len(lines) - 1; last >= 0 && lines[last].name == name && lines[last].limit == limit {
			lines[last].n++
			continue
		}
		lines = append(lines, line{name: name, limit: limit, n: 1})
	}
	for _, l := range lines {
		left = append(left, fmt.Sprintf("%s %d: %d", l.name, l.limit, l.n))
	}
	return left
}

func TestLimitersTakeTurns(t *testing.T) {
	t.Parallel()

	t.Run("a huge one and a small one", func(t *testing.T) {
		t.Parallel()
		b := newBoard(500)
		b.push("huge", 1, 2000, 1)
		b.push("small", 1, 3, 1)
		for _, want := range []string{"huge 1: 500", "small 1: 3", "huge 1: 500", "huge 1: 500", "huge 1: 500"} {
			require.Equal(t, []string{want}, b.next())
		}
		require.Empty(t, b.next())
		require.Zero(t, b.queue.Waiting)
	})
	t.Run("many policies are no more turns", func(t *testing.T) {
		t.Parallel()
		b := newBoard(500)
		for limit := range int64(10) {
			b.push("tiers", 1+limit, 100, 1)
		}
		b.push("other", 1, 100, 1)
		require.Equal(t, []string{"tiers 1: 100"}, b.next())
		require.Equal(t, []string{"other 1: 100"}, b.next())
		for limit := 2; limit <= 10; limit++ {
			require.Equal(t, []string{fmt.Sprintf("tiers %d: 100", limit)}, b.next())
		}
	})
	t.Run("shares", func(t *testing.T) {
		t.Parallel()
		b := newBoard(500)
		left := map[string]int{}
		for _, name := range []string{"a", "b", "c"} {
			b.push(name, 1, 2000, 1)
			left[name] = 2000
		}
		for b.queue.Waiting > 0 {
			for _, r := range b.queue.NextBatch(nil) {
				left[r.Space.Name]--
			}
			for _, n := range left {
				require.LessOrEqual(t, max(left["a"], left["b"], left["c"])-n, 500)
			}
		}
	})
	t.Run("who comes again goes to the back", func(t *testing.T) {
		t.Parallel()
		b := newBoard(500)
		b.push("a", 1, 20, 1)
		b.push("b", 1, 20, 1)
		require.Equal(t, []string{"a 1: 20"}, b.next())
		b.push("a", 1, 20, 1)
		require.Equal(t, []string{"b 1: 20"}, b.next())
		require.Equal(t, []string{"a 1: 20"}, b.next())
	})
}

func TestShortLinesLeaveTogether(t *testing.T) {
	t.Parallel()

	b := newBoard(500)
	for i := range engine.WorthMixing - 1 {
		b.push(fmt.Sprint("limiter ", i), 1, 1+i, 1)
	}
	require.Equal(t, []string{"limiter 0 1: 1"}, b.next(), "too few of them")
	b.push("limiter 0", 1, engine.SmallGroup, 1)
	b.push("limiter 5", 1, engine.SmallGroup+1, 1) // not a small group
	b.push("limiter 6", 1, 2, 0)                   // these requests look
	require.Equal(t, []string{"limiter 1 1: 2"}, b.next())
	b.push("limiter 1", 1, 2, 1)
	b.push("limiter 7", 1, 1, 1)
	require.Equal(
		t,
		[]string{
			"limiter 2 1: 3",
			"limiter 3 1: 4",
			"limiter 4 1: 5",
			"limiter 0 1: 8",
			"limiter 1 1: 2",
			"limiter 7 1: 1",
		},
		b.next(),
	)
	require.Equal(t, []string{"limiter 5 1: 9"}, b.next(), "was passed over, and keeps its place")
	require.Equal(t, []string{"limiter 6 1: 2"}, b.next())
	require.Empty(t, b.next())

	// No statement has more than MaxBatch requests, and each request is sent.
	b = newBoard(2 * engine.SmallGroup)
	for i := range engine.WorthMixing {
		b.push(fmt.Sprint("limiter ", i), 1, engine.SmallGroup, 1)
	}
	require.Equal(t, []string{"limiter 0 1: 8", "limiter 1 1: 8"}, b.next())
	require.Equal(t, []string{"limiter 2 1: 8"}, b.next(), "too few are left")
}

// However small MaxBatch is, each statement has at least one waiting request, and each request is sent once.
func TestSmallBatchesOfManyLimiters(t *testing.T) {
	t.Parallel()

	for maxBatch := 1; maxBatch <= 2*engine.SmallGroup; maxBatch++ {
		b := newBoard(maxBatch)
		waiting := 0
		for i := range 2 * engine.WorthMixing {
			b.push(fmt.Sprint("limiter ", i), 1, 1+i, 1)
			waiting += 1 + i
		}
		for waiting > 0 {
			batch := b.queue.NextBatch(nil)
			require.NotEmpty(t, batch)
			require.LessOrEqual(t, len(batch), maxBatch)
			waiting -= len(batch)
		}
		require.Zero(t, b.queue.Waiting)
		require.Empty(t, b.next())
	}
}

// Twenty limiters of one client, each with eight callers, use two connections, and each limiter admits exactly its
// limit. Twenty clients use more connections.
func TestTwentyLimitersShareTwoConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const limiters, callers, limit, calls = 20, 8, 3, 5
	load := func(t *testing.T, share bool) *limitertest.Statements {
		t.Helper()
		pool, asked := limitertest.TracedPool(t, pgtest.New(t))
		client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
		var all []*ratelimit.Limiter
		for i := range limiters {
			kind := [...]string{"fixed window", "sliding window", "token bucket", "sliding log", "calendar"}[i%5]
			name, policy := fmt.Sprint("limiter ", i), limitertest.SlowPolicies(limit)[kind]
			config := ratelimit.Config{Name: name, Policy: policy, Durable: i%3 == 0, NoDenialCache: true}
			if share {
				all = append(all, limitertest.Of(t, client, config))
			} else {
				all = append(all, limitertest.New(t, pool, config))
			}
		}
		errs := make([]error, limiters*callers)
		testkit.Together(len(errs), func(i int) { // each caller has its own key, so that no statement waits for a row
			allowed := 0
			for range calls {
				result, err := all[i%limiters].Allow(context.Background(), fmt.Sprint("caller ", i))
				errs[i] = errors.Join(errs[i], err)
				if result.Allowed {
					allowed++
				}
			}
			if allowed != limit {
				errs[i] = errors.Join(errs[i], fmt.Errorf("%d of %d were allowed", allowed, limit))
			}
		})
		require.NoError(t, errors.Join(errs...))
		return asked
	}
	one := load(t, true)
	require.LessOrEqual(t, one.AtOnce, 2)
	require.Less(t, one.Count(), limiters*callers*calls/10)
	require.Greater(t, load(t, false).AtOnce, 2)
}

// However many calls a limiter has, and however slow its statements are, a call of another limiter waits for at most
// two of these statements.
func TestSlowLimiterDelaysOthersByOneStatement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slow = 100 * time.Millisecond
		db := limitertest.NewModelDB()
		db.Takes = slow
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{MaxInFlight: 1, MaxBatch: 100})
		huge := limitertest.Of(t, client, ratelimit.Config{Name: "huge", Policy: ratelimit.FixedWindow{Limit: 10_000, Window: time.Hour}})
		small := limitertest.Of(t, client, ratelimit.Config{Name: "small", Policy: limitertest.Hourly})
		began := time.Now()
		var wg sync.WaitGroup
		defer wg.Wait()
		for range 2000 {
			wg.Go(func() {
				if _, err := huge.Allow(context.Background(), "key"); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		for told := 3 * slow; told <= 15*slow; told += 3 * slow {
			limitertest.Elapse(slow / 2) // until a statement is under way
			result, err := small.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, told, time.Since(began))
			require.Less(t, db.Taken(), int64(2000))
		}
	})
}
