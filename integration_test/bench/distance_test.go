package bench

import (
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// distance measures how long a cache line takes from one CPU to another and back. A virtual machine's host may move its
// CPUs between cores that share a cache and cores that do not. Data that many goroutines share is slower then: 512
// callers of one hot key made 1,050,000 decisions a second at 90 ns, and 640,000 at 340 ns.
func distance() time.Duration {
	const times = 100_000
	var ball atomic.Int64
	var players sync.WaitGroup
	begun := time.Now()
	for player := range int64(2) {
		players.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for i := player; i < 2*times; i += 2 {
				for ball.Load() != i {
				}
				ball.Store(i + 1)
			}
		})
	}
	players.Wait()
	return time.Since(begun) / times
}

// noteDistance measures the distance before a workload.
func (a *arena) noteDistance() {
	if runtime.NumCPU() > 1 {
		a.distances = append(a.distances, distance())
	}
}

// distanceFact returns the report's note on the distance, if there is any.
func (a *arena) distanceFact() []fact {
	if len(a.distances) == 0 {
		return nil
	}
	slices.Sort(a.distances)
	n := len(a.distances)
	return []fact{{"From one CPU to another and back", fmt.Sprintf(
		"%v (median), from %v to %v in nine of ten rounds; it changes when a host moves the CPUs of its virtual machine, "+
			"and with it the figures for hot keys, by up to half", a.distances[n/2], a.distances[n/20], a.distances[n-1-n/20],
	)}}
}
