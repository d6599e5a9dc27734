package ratelimit

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// These benchmarks leave the network out. They show what a decision costs in Go beside the statement that it
// shares with others.

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

// One iteration is one call.
func BenchmarkGroupAndFinish(b *testing.B) {
	const calls = 256
	for _, keys := range []int{1, calls} {
		b.Run(fmt.Sprintf("%d calls for %d keys", calls, keys), func(b *testing.B) {
			l, err := New(
				&pgxpool.Pool{},
				Config{Name: "test", Policy: SlidingWindow{Limit: 1 << 20, Window: time.Hour}},
			)
			require.NoError(b, err)
			batch := make([]*engine.Request, calls)
			for i := range batch {
				batch[i] = l.newRequest(fmt.Sprint("user:", i%keys), 1)
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
