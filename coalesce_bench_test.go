package ratelimit

import (
	"fmt"
	"testing"
	"time"
)

// The paths without the network: what a decision costs in Go beside the statement that it shares with others.

func BenchmarkModel(b *testing.B) {
	for _, policy := range []Policy{
		FixedWindow{Limit: 1 << 20, Window: time.Hour},
		SlidingWindow{Limit: 1 << 20, Window: time.Hour},
		TokenBucket{Capacity: 1 << 20, Refill: 1 << 20, Every: time.Hour},
	} {
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			b.ReportAllocs()
			var s state
			for clock := int64(1); b.Loop(); clock += 1000 {
				s, _ = policy.decide(s, clock, 1)
			}
		})
	}
}

// One iteration is one call.
func BenchmarkGroupAndTell(b *testing.B) {
	const calls = 256
	for _, keys := range []int{1, calls} {
		b.Run(fmt.Sprintf("%d calls for %d keys", calls, keys), func(b *testing.B) {
			l := &Limiter{policy: SlidingWindow{Limit: 1 << 20, Window: time.Hour}}
			batch := make([]*call, calls)
			for i := range batch {
				batch[i] = &call{key: fmt.Sprint("user:", i%keys), cost: 1, done: make(chan struct{}, 1)}
			}
			var f flight
			b.ReportAllocs()
			for done := calls; b.Loop(); done++ {
				if done < calls {
					continue
				}
				done = 0
				elements := f.group(batch)
				for i := range elements {
					elements[i].decision.granted = elements[i].count
					l.tell(&elements[i], nil)
				}
				for _, c := range batch {
					<-c.done
				}
			}
		})
	}
}
