package engine_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
)

func TestGroupMergesOnlyNeighboursOfAKey(t *testing.T) {
	t.Parallel()

	limiter := limitertest.New(t, &pgxpool.Pool{}, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	batch := slices.Concat(
		requestsFor(limiter, "a", 1, 1),
		requestsFor(limiter, "b", 1),
		requestsFor(limiter, "a", 1, 2),
		requestsFor(limiter, "b", 1),
		requestsFor(limiter, "a", 1),
		requestsFor(limiter, "a", 2),
		requestsFor(limiter, "b", -1, -1, 1),
	)
	type merged struct {
		key         string
		cost, count int64
	}
	var got []merged
	for _, e := range engine.MergeAlike(batch) {
		got = append(got, merged{key: e.Parts[0].Key, cost: e.Parts[0].Cost, count: e.Count})
	}
	require.Equal(
		t,
		[]merged{
			{key: "a", cost: 1, count: 3},
			{key: "a", cost: 2, count: 1},
			{key: "a", cost: 1, count: 1},
			{key: "a", cost: 2, count: 1},
			{key: "b", cost: 1, count: 2},
			{key: "b", cost: -1, count: 1},
			{key: "b", cost: -1, count: 1},
			{key: "b", cost: 1, count: 1},
		},
		got,
	)
	require.Len(t, engine.MergeAlike(batch[:1]), 1)
	require.Empty(t, engine.MergeAlike(nil))
}

// The benchmarks in this file run without a database. They measure the Go code of a decision, without the statement.

func BenchmarkModel(b *testing.B) {
	for _, policy := range []model.Rules{
		model.FixedWindow{Limit: 1 << 20, Window: time.Hour},
		model.SlidingWindow{Limit: 1 << 20, Window: time.Hour},
		model.TokenBucket{Capacity: 1 << 20, Refill: 1 << 20, Every: time.Hour},
	} {
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			b.ReportAllocs()
			var s model.State
			for clock := int64(1); b.Loop(); clock += 1000 {
				s, _ = policy.Decide(s, clock, 1)
			}
		})
	}
}

// One iteration measures one call.
func BenchmarkGroupAndFinish(b *testing.B) {
	const calls = 256
	for _, keys := range []int{1, calls} {
		b.Run(fmt.Sprintf("%d calls for %d keys", calls, keys), func(b *testing.B) {
			l, err := ratelimit.New(
				&pgxpool.Pool{},
				ratelimit.Config{Name: "test", Policy: ratelimit.SlidingWindow{Limit: 1 << 20, Window: time.Hour}},
			)
			require.NoError(b, err)
			batch := make([]*engine.Request, calls)
			for i := range batch {
				batch[i] = newRequest(l, fmt.Sprint("user:", i%keys), 1)
			}
			b.ReportAllocs()
			for done := calls; b.Loop(); done++ {
				if done < calls {
					continue
				}
				done = 0
				for _, r := range engine.MergeAlike(batch) {
					r.Parts[0].Decision.Granted = r.Count
					r.Finish(nil)
				}
				for _, r := range batch {
					<-r.Done
					if !r.Outcome().Allowed {
						b.Fatal("denied")
					}
				}
			}
		})
	}
}
