package faults

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// newServer starts a server for one test, migrates it, and returns it with a pool.
func newServer(t *testing.T, config pgserver.Config) (*pgserver.Server, *pgxpool.Pool) {
	t.Helper()
	server := pgtest.Server(t, config)
	pool := newPool(t, server.URL(), nil)
	require.NoError(t, migrations.Up(t.Context(), pool))
	return server, pool
}

// ledger records what a limiter's callers know.
type ledger struct {
	mu sync.Mutex
	entries
}

type entries []entry

// entry is a request that was granted, or may have been granted.
type entry struct {
	key     string
	cost    int64
	unknown bool
	told    time.Time
}

func (l *ledger) add(e entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries = append(l.entries, e)
}

func (l *ledger) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.entries)
}

// sums adds up the costs of each key: those acknowledged before the time until, and all that may have been taken.
func (e entries) sums(until time.Time) (acknowledged, atMost map[string]int64) {
	acknowledged, atMost = map[string]int64{}, map[string]int64{}
	for _, entry := range e {
		atMost[entry.key] += entry.cost
		if !entry.unknown && !entry.told.After(until) {
			acknowledged[entry.key] += entry.cost
		}
	}
	return acknowledged, atMost
}

// forgotten returns a key with less in the table than was acknowledged. It returns "" if there is no such key.
func forgotten(acknowledged, table map[string]int64) string {
	for key, sum := range acknowledged {
		if table[key] < sum {
			return key
		}
	}
	return ""
}

// requireTable checks that the table has everything that was acknowledged before the time until, and nothing that was
// not requested. It also checks that no key got more than the limit.
func (e entries) requireTable(t *testing.T, table map[string]int64, limit int64, until time.Time) {
	t.Helper()
	acknowledged, atMost := e.sums(until)
	require.Empty(t, forgotten(acknowledged, table))
	for key, count := range table {
		require.LessOrEqual(t, count, atMost[key])
		require.LessOrEqual(t, count, limit)
	}
	for _, sum := range acknowledged {
		require.LessOrEqual(t, sum, limit)
	}
}

// load makes calls until the server is gone, and records them in the ledger. Then each error must say that the server
// is gone, and whether the request may have counted.
func (l *ledger) load(
	t *testing.T,
	limiter *ratelimit.Limiter,
	seed uint64,
	key func(*rand.Rand) string,
) (wait func()) {
	t.Helper()
	const callers = 12
	var wg sync.WaitGroup
	errs := make([]error, callers)
	for i := range callers {
		wg.Go(func() {
			random := rand.New(rand.NewPCG(seed, uint64(i)))
			for errs[i] == nil {
				e := entry{key: key(random), cost: 1 + random.Int64N(3)}
				result, err := limiter.AllowN(context.Background(), e.key, e.cost)
				e.told = time.Now()
				if errs[i], e.unknown = err, errors.Is(err, ratelimit.ErrOutcomeUnknown); result.Allowed || e.unknown {
					l.add(e)
				}
			}
		})
	}
	return func() {
		t.Helper()
		wg.Wait()
		for _, err := range errs {
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		}
	}
}

// requireHealed checks that a limiter works again. Its pool may still have old connections, and each old connection
// fails once.
func requireHealed(t *testing.T, limiter *ratelimit.Limiter) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		result, err := limiter.Allow(t.Context(), "healed")
		return err == nil && result.Allowed
	})
}
