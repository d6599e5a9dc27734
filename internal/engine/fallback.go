package engine

import (
	"hash/maphash"
	"math"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Fallback decides requests in this process, by package model, while the database is away. It identifies a key by a
// 64-bit hash with a random seed, to save memory. Two keys practically never have the same hash.
type Fallback struct {
	clock func() time.Time // replaces the clock in tests; may be nil
	begin time.Time
	seed  maphash.Seed

	mu     sync.Mutex
	States map[uint64]localState
	Used   int   // bytes of LocalMemory in use
	swept  int64 // when expired states were last deleted, in microseconds
}

// localState is the state of a key in the fallback.
type localState struct {
	algorithm int16
	Size      int // how many bytes of LocalMemory the key uses
	State     model.State
}

// LocalMemory is how many bytes a fallback may use, enough for 65,536 keys. New keys never replace known keys. So a
// client cannot reset its key by a flood of new keys. If the memory is full, all new keys share one state, and so the
// limit of a single key, until other keys have expired. Each policy of an All has such a shared state, in addition to
// LocalMemory.
const LocalMemory = 18 << 20

// LocalSize returns the largest number of bytes that a key can need under a policy.
func LocalSize(m model.Rules) int {
	if n := m.Numbers(); n.Algorithm == algorithm.SlidingLog {
		return 288 + 8*int(n.Limit)
	}
	return 288
}

// NewFallback returns a fallback without keys.
func NewFallback(clock func() time.Time) *Fallback {
	return &Fallback{clock: clock, begin: time.Now(), seed: maphash.MakeSeed()}
}

// now returns the time, also in microseconds. This time never goes back, even if the machine's clock is set back.
func (f *Fallback) now() (time.Time, int64) {
	if f.clock != nil {
		now := f.clock()
		return now, now.UnixMicro()
	}
	now := time.Now()
	return now, f.begin.UnixMicro() + now.Sub(f.begin).Microseconds()
}

// Take decides a request. The argument shares has the rules of the request's parts, with reduced limits.
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
		case r.Parts[i].Decision.Granted == 1: // this part had room, but another part denies the request
			decide(i, 0, false)
		}
	}
}

// Hash returns the hash of a part's row. Two limiters with the same name get the same hash for a key.
func (f *Fallback) Hash(p *Part) uint64 {
	var h maphash.Hash
	h.SetSeed(f.seed)
	_, _ = h.WriteString(p.Name)
	if p.Space.Durable {
		_ = h.WriteByte(1)
	}
	_ = h.WriteByte(0) // no name contains a zero byte
	_, _ = h.WriteString(p.Key)
	return h.Sum64()
}

// One decides a request for one key, by the i-th rules of a policy. If keep is true, it stores the new state.
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
		if known.Size < size { // the key is new, or its new policy needs more memory
			f.Used += size - known.Size
			known.Size = size
		}
		known.State = next
		f.States[hash] = known
	}
	return d
}

// room returns the hash under which to store a key's state. If the memory is full, the result is the argument shared.
func (f *Fallback) room(hash, shared uint64, size int, clock int64) uint64 {
	fits := func() bool {
		known := f.States[hash].Size
		return size <= known || f.Used-known+size <= LocalMemory
	}
	if fits() {
		return hash
	}
	// A search through all states takes a millisecond or two, so there is at most one search each second.
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

// sharesOf returns the same rules with limits reduced to a share. The argument share is above 0 and at most 1.
func sharesOf(models []model.Rules, share float64) []model.Rules {
	shares := make([]model.Rules, len(models))
	for i, m := range models {
		shares[i] = model.Of(Scaled(m.Numbers(), share))
	}
	return shares
}

// Scaled returns the same policy with its limit reduced to a share.
func Scaled(n algorithm.Numbers, share float64) algorithm.Numbers {
	n.Limit = ShareOf(n.Limit, share)
	if n.Algorithm == algorithm.TokenBucket {
		// Increase Every instead of reducing Refill, because the share of Refill may be less than 1. Every must stay so
		// small that the arithmetic is exact.
		every := int64(min(math.Ceil(float64(model.Micros(n.Span))/share), model.MaxSpan))
		every = min(every, model.MaxProduct/n.Limit)
		if n.Refill < n.Limit {
			every = min(every, model.MulDiv(n.Refill, model.MaxSpan, n.Limit))
		}
		n.Span = model.Duration(every)
	}
	return n
}

// ShareOf returns a share of a limit. The result is rounded down, and at least 1. The factor 1 + 1e-12 corrects the
// rounding of float64, so that 0.29 of 100 is 29.
func ShareOf(limit int64, share float64) int64 {
	scaled := math.Floor(float64(limit) * share * (1 + 1e-12))
	return min(max(int64(min(scaled, 1<<62)), 1), limit)
}
