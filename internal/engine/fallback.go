package engine

import (
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Fallback decides in this process, by package model, while the database is away. It identifies keys by a 64-bit hash
// with a random seed. So long keys need no more memory than short ones, and two keys practically never share a state.
type Fallback struct {
	clock func() time.Time // replaces the clock, unless it is nil
	begin time.Time
	seed  maphash.Seed

	mu     sync.Mutex
	States map[uint64]localState
	Used   int   // bytes of LocalMemory in use
	swept  int64 // when expired states were last deleted
}

// localState is a key's state.
type localState struct {
	algorithm int16
	Size      int // bytes of LocalMemory that it uses
	State     model.State
}

// LocalMemory is how many bytes a fallback may use. It is enough for 65,536 keys. No key is pushed out, so a flood of
// new keys does not help anybody to a fresh start. Keys without room share one state, and so one key's limit, until
// others have expired. There is one shared state for each policy of an All, on top of LocalMemory.
const LocalMemory = 18 << 20

// LocalSize is an upper bound of the bytes that a key needs under a policy.
func LocalSize(m model.Rules) int {
	if n := m.Numbers(); n.Algorithm == algorithm.SlidingLog {
		return 288 + 8*int(n.Limit)
	}
	return 288
}

// NewFallback returns a fallback that knows no key yet.
func NewFallback(clock func() time.Time) *Fallback {
	return &Fallback{clock: clock, begin: time.Now(), seed: maphash.MakeSeed()}
}

// now returns this process's clock, and the same in microseconds. The microseconds are monotonic even if the machine's
// clock is set.
func (f *Fallback) now() (time.Time, int64) {
	if f.clock != nil {
		now := f.clock()
		return now, now.UnixMicro()
	}
	now := time.Now()
	return now, f.begin.UnixMicro() + now.Sub(f.begin).Microseconds()
}

// Take decides a request. shares are the rules of its parts with reduced limits.
func (f *Fallback) Take(r *Request, shares []model.Rules) {
	now, clock := f.now()
	f.mu.Lock()
	defer f.mu.Unlock()
	several, fits, n := len(shares) > 1, true, r.Parts[0].Cost
	decide := func(i int, n int64, keep bool) {
		p := &r.Parts[i]
		p.Decision = f.One(shares[i], f.Hash(p), uint64(i), n, clock, keep)
		p.Decision.DecidedAt = now
	}
	for i := range shares {
		decide(i, n, !several)
		fits = fits && r.Parts[i].Decision.Granted == 1
	}
	for i := range shares {
		switch {
		case !several || n == 0:
		case fits:
			decide(i, n, true)
		case r.Parts[i].Decision.Granted == 1: // it had room, but another part had not
			decide(i, 0, false)
		}
	}
}

// Hash returns the hash of a part's row. Limiters of one name share their keys here too.
func (f *Fallback) Hash(p *Part) uint64 {
	var h maphash.Hash
	h.SetSeed(f.seed)
	_, _ = h.WriteString(p.Name)
	if p.Space.Durable {
		_ = h.WriteByte(1)
	}
	_ = h.WriteByte(0) // which no name has
	_, _ = h.WriteString(p.Key)
	return h.Sum64()
}

// One decides under the i-th rules of a policy. keep tells whether to store the new state.
func (f *Fallback) One(m model.Rules, hash, i uint64, n, clock int64, keep bool) model.Decision {
	size := LocalSize(m)
	hash = f.room(hash, i, size, clock)
	known := f.States[hash]
	if code := m.Numbers().Algorithm; known.algorithm != code {
		known = localState{algorithm: code, Size: known.Size}
	}
	next, d := m.Decide(known.State, clock, n)
	if keep && next != known.State {
		if f.States == nil {
			f.States = make(map[uint64]localState)
		}
		if known.Size < size { // it is new, or asked for by With under a policy that needs more
			f.Used += size - known.Size
			known.Size = size
		}
		known.State = next
		f.States[hash] = known
	}
	return d
}

// room returns the hash under which a key's state is stored: its own, or the shared one if there is no room.
func (f *Fallback) room(hash, shared uint64, size int, clock int64) uint64 {
	fits := func() bool {
		known := f.States[hash].Size
		return size <= known || f.Used-known+size <= LocalMemory
	}
	if fits() {
		return hash
	}
	// Looking through all states takes a millisecond or two, so it is done once a second.
	if clock-f.swept >= time.Second.Microseconds() {
		f.swept = clock
		for other, known := range f.States {
			if clock >= known.State.ExpiresAt {
				f.Used -= known.Size
				delete(f.States, other)
			}
		}
	}
	if fits() {
		return hash
	}
	return shared
}

// sharesOf returns rules with a share of their limits. The share is above 0 and at most 1.
func sharesOf(models []model.Rules, share float64) []model.Rules {
	shares := make([]model.Rules, len(models))
	for i, m := range models {
		shares[i] = model.Of(Scaled(m.Numbers(), share))
	}
	return shares
}

// Scaled returns a policy with a share of its limit.
func Scaled(n algorithm.Numbers, share float64) algorithm.Numbers {
	n.Limit = ShareOf(n.Limit, share)
	if n.Algorithm == algorithm.TokenBucket {
		// It raises Every, because a share of Refill might be less than 1, but not beyond the exact range.
		every := int64(min(math.Ceil(float64(model.Micros(n.Span))/share), model.MaxSpan))
		every = min(every, model.MaxProduct/n.Limit)
		if n.Refill < n.Limit {
			every = min(every, model.MulDiv(n.Refill, model.MaxSpan, n.Limit))
		}
		n.Span = model.Duration(every)
	}
	return n
}

// ShareOf returns a share of a limit, rounded down, but at least 1. The factor makes up for the inexact float64, so
// that 0.29 of 100 is 29.
func ShareOf(limit int64, share float64) int64 {
	scaled := math.Floor(float64(limit) * share * (1 + 1e-12))
	return min(max(int64(min(scaled, 1<<62)), 1), limit)
}
