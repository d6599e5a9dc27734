package ratelimit

import (
	"hash/maphash"
	"math"
	"sync"
	"time"
)

// fallback decides in this process while the database is away, on the models. It knows keys by a hash of 64 bits with a seed of its own:
// so a key needs the same memory however long it is, and that two of them share a state is as good as impossible.
type fallback struct {
	now   func() time.Time
	begin time.Time
	seed  maphash.Seed

	mu     sync.Mutex
	states map[uint64]localState
	used   int   // of localMemory
	swept  int64 // when states was last
}

// localState is a key's state, under policies of one algorithm.
type localState struct {
	statement string // of the algorithm
	size      int    // what it was given of localMemory
	state     state
}

// localMemory is what a fallback may use, in bytes: enough for 65,536 keys. Nobody is pushed out, so a flood of keys gains nothing for
// those that are known. Those for which there is no room until others have expired share one state, and so what is otherwise one key's.
// The shared states, one for each policy of an All, come on top.
const localMemory = 18 << 20

// localSize is more than what a key needs under a policy.
func localSize(policy Policy) int {
	if log, ok := policy.(SlidingLog); ok {
		return 288 + 8*int(log.Limit)
	}
	return 288
}

func newFallback(config Config) *fallback {
	if config.OnFailure.answer != fallbackLocal {
		return nil
	}
	f := &fallback{now: config.Test.Now, seed: maphash.MakeSeed()}
	if f.now == nil {
		f.now = time.Now
	}
	f.begin = f.now()
	return f
}

// decide decides under all of the policies, or takes nothing: shares of the limiter's own.
func (f *fallback) decide(policies []Policy, key string, n int64) ([]decision, time.Time) {
	now := f.now()
	// Monotonic, whatever is done to the machine's clock.
	clock := f.begin.UnixMicro() + now.Sub(f.begin).Microseconds()
	hash := maphash.String(f.seed, key)
	f.mu.Lock()
	defer f.mu.Unlock()
	decisions := make([]decision, len(policies))
	several, fits := len(policies) > 1, true
	for i, policy := range policies {
		decisions[i] = f.ask(policy, hash, uint64(i), n, clock, !several)
		fits = fits && decisions[i].granted == 1
	}
	for i, policy := range policies {
		switch {
		case !several || n == 0:
		case fits:
			decisions[i] = f.ask(policy, hash, uint64(i), n, clock, true)
		case decisions[i].granted == 1: // it had room, but nothing is taken
			decisions[i] = f.ask(policy, hash, uint64(i), 0, clock, false)
		}
	}
	return decisions, now
}

// ask decides under one policy, the i-th of its limiter; keep says whether what it takes is taken.
func (f *fallback) ask(policy Policy, hash, i uint64, n, clock int64, keep bool) decision {
	size := localSize(policy)
	hash = f.room(hash+i, i, size, clock)
	known := f.states[hash]
	if known.statement != policy.statement() {
		known = localState{statement: policy.statement(), size: known.size}
	}
	next, d := policy.decide(known.state, clock, n)
	if keep && next != known.state {
		if f.states == nil {
			f.states = make(map[uint64]localState)
		}
		if known.size < size { // it is new, or With has asked under a policy that needs more
			f.used += size - known.size
			known.size = size
		}
		known.state = next
		f.states[hash] = known
	}
	return d
}

// room returns the hash under which a key is known: its own, or the shared one if there is no room for one of that size.
func (f *fallback) room(hash, shared uint64, size int, clock int64) uint64 {
	fits := func() bool {
		known := f.states[hash].size
		return size <= known || f.used-known+size <= localMemory
	}
	if fits() {
		return hash
	}
	// To look through all takes a millisecond or two, so not at every call.
	if clock-f.swept >= time.Second.Microseconds() {
		f.swept = clock
		for other, known := range f.states {
			if clock >= known.state.expiresAt {
				f.used -= known.size
				delete(f.states, other)
			}
		}
	}
	if fits() {
		return hash
	}
	return shared
}

// shareOf is a share of a limit, at least 1, and rounded down, but not for what a float64 lacks: 0.29 of 100 is 29.
func shareOf(limit int64, share float64) int64 {
	scaled := math.Floor(float64(limit) * share * (1 + 1e-12))
	return min(max(int64(min(scaled, 1<<62)), 1), limit)
}
