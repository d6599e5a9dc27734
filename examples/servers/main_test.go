package main

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// Two processes decide the keys of two databases. Each key gets exactly its limit. If one database stops, the limiter
// of the other database still works.
func TestServers(t *testing.T) {
	t.Parallel()
	databases := []*pgtest.DB{pgtest.New(t), pgtest.New(t)}
	var processes [2][]*ratelimit.Limiter
	var pools [2][]*pgxpool.Pool
	for i := range processes {
		for _, db := range databases {
			pools[i] = append(pools[i], db.NewPool(t, nil))
		}
		limiters, err := newLimiters(pools[i])
		require.NoError(t, err)
		processes[i] = limiters
	}
	const keys = 10
	var admitted [keys]atomic.Int64
	var calls sync.WaitGroup
	for key := range keys {
		for i := range 4 {
			calls.Go(func() {
				for range 40 {
					name := fmt.Sprint("user:", key)
					result, err := limiterOf(processes[i%2], name).Allow(context.Background(), name)
					if err != nil {
						t.Error(err)
						return
					}
					if result.Allowed {
						admitted[key].Add(1)
					}
				}
			})
		}
	}
	calls.Wait()
	served := map[int]int{}
	for key := range keys {
		require.EqualValues(t, 100, admitted[key].Load())
		served[serverOf(processes[0], fmt.Sprint("user:", key))]++
	}
	require.Len(t, served, 2, "both serve some of the keys")

	pools[0][1].Close()
	for key := range keys {
		name := fmt.Sprint("user:", key)
		limiter := limiterOf(processes[0], name)
		_, err := limiter.Peek(t.Context(), name)
		require.Equal(t, limiter == processes[0][1], err != nil, name)
	}
}

// Keys are spread evenly. If the number of servers doubles, each key stays or moves to a new server.
func TestKeysSpread(t *testing.T) {
	t.Parallel()
	const keys = 100_000
	four, eight := make([]*ratelimit.Limiter, 4), make([]*ratelimit.Limiter, 8)
	for i := range eight {
		eight[i] = new(ratelimit.Limiter)
		four[i%4] = eight[i%4]
	}
	served, moved := map[int]int{}, 0
	for key := range keys {
		name := fmt.Sprint("user:", key)
		of4, of8 := serverOf(four, name), serverOf(eight, name)
		served[of4]++
		if of8 != of4 {
			require.Equal(t, of4+4, of8)
			moved++
		}
	}
	for server := range 4 {
		require.InDelta(t, keys/4, served[server], keys/4*0.02)
	}
	require.InDelta(t, keys/2, moved, keys/2*0.02)
}

func serverOf(limiters []*ratelimit.Limiter, key string) int {
	for i, limiter := range limiters {
		if limiterOf(limiters, key) == limiter {
			return i
		}
	}
	return -1
}

func TestNoServer(t *testing.T) {
	t.Parallel()
	_, err := newLimiters(nil)
	require.ErrorContains(t, err, "DATABASE_URLS")
}
