package ratelimit

import (
	"hash/maphash"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// denials remembers, in this process, keys that the database has just denied, so that a client that keeps asking costs the
// database nothing. It holds the state of the key's row and asks the policy's model about it: others can only have taken more
// since, so what the model denies, the database would deny too, unless the key was reset, given back to or granted credit in the meantime. For that, nothing is
// remembered for longer than maxAge. Only denials are remembered: to forget one costs a query, never a grant. The numbers are
// exact as well until a cost of 1 fits again, because until then nobody can take anything; of a denial of a larger cost they may
// lack what others have taken since.
//
// It is a cache of our own by measurement (BenchmarkDenialCache in integration_test, two cores, against otter v2.4.0): a hit takes
// 81 ns, decision included, where the look-up alone takes 98 ns there (on two cores at once, 81 against 48); to remember
// a denial takes 0.2 to 1.2 µs, against 2 to 4 µs; a key takes 280 bytes, against 185, and until the first denial nothing is held.
//
// A denial lives in the young generation, then for as long in the old one, and is gone. Each generation holds at most
// maxDenials keys of at most 512 bytes, and of a log at most maxDenialEntries.
type denials struct {
	now    func() time.Time // replaces the clock; nil: none does
	maxAge time.Duration
	seed   maphash.Seed
	begin  time.Time                                 // the local clock counts from here
	resets atomic.Int64                              // how often a key was reset
	shards atomic.Pointer[[denialShards]denialShard] // nil until a key is denied, so that an idle limiter stays small
}

const (
	denialShards = 16
	maxDenials   = 8192 // in each generation of all shards: with 512-byte keys, both need less than 16 MiB, and of logs 24
)

type denialShard struct {
	mu         sync.Mutex
	young, old map[string]denial
	born       time.Duration // when young was
	_          [64]byte      // keeps the shards' mutexes on cache lines of their own
}

// denial is a key's state when it was denied. The database decided between asked and told, by the local clock.
type denial struct {
	policy      Policy // which it was denied under; another may have room
	state       state
	clock       int64 // the database's, in microseconds, at the decision
	asked, told time.Duration
	// When a cost of 1 may fit again, and when the key is as good as new, by the database's clock: what the model says of
	// the commonest request, for which nothing remains until then.
	retryAt, resetAt int64
}

func newDenials(maxAge time.Duration, now func() time.Time) *denials {
	d := &denials{now: now, maxAge: maxAge, seed: maphash.MakeSeed(), begin: time.Now()}
	if now != nil {
		d.begin = now()
	}
	return d
}

// local is the local clock, monotonic, or the one that replaces all clocks.
func (d *denials) local() time.Duration {
	if d.now != nil {
		return d.now().Sub(d.begin)
	}
	return time.Since(d.begin)
}

// shard is nil if nothing has been denied yet.
func (d *denials) shard(key string) *denialShard {
	shards := d.shards.Load()
	if shards == nil {
		return nil
	}
	return &shards[maphash.String(d.seed, key)%denialShards]
}

// deny returns the denial of a request that the database would deny too, as far as this process knows.
func (d *denials) deny(policy Policy, key string, n int64) (Result, bool) {
	s := d.shard(key)
	if s == nil {
		return Result{}, false
	}
	s.mu.Lock()
	known, ok := s.young[key]
	if !ok {
		known, ok = s.old[key]
	}
	s.mu.Unlock()
	if !ok || known.policy != policy {
		return Result{}, false
	}
	now := d.local()
	age := now - known.asked
	if age < 0 || age >= d.maxAge {
		return Result{}, false
	}
	// The database's clock is at most this, because it decided after it was asked. A denial that holds then, holds now.
	latest := known.clock + microsUp(age)
	decided := decision{retryAfter: known.retryAt - latest, resetAfter: known.resetAt - latest}
	if n > 1 {
		_, decided = policy.decide(known.state, latest, n)
	}
	if decided.retryAfter <= 0 {
		return Result{}, false
	}
	// And at least this much earlier. Counting from there, nobody is told to retry too early.
	uncertain := microsUp(known.told - known.asked)
	return Result{
		Source:     SourceCachedDenial,
		Limit:      policy.limit(),
		Remaining:  decided.remaining,
		RetryAfter: duration(decided.retryAfter + uncertain),
		ResetAfter: duration(decided.resetAfter + uncertain),
		DecidedAt:  time.UnixMicro(latest - uncertain),
	}, true
}

// remember keeps the denial of a request that left at asked, when resets had the value since, and came back at told.
func (d *denials) remember(policy Policy, key string, denied decision, asked, told time.Duration, since int64) {
	clock := denied.decidedAt.UnixMicro()
	_, one := policy.decide(denied.state, clock, 1)
	known := denial{
		policy: policy, state: denied.state, clock: clock, asked: asked, told: told,
		retryAt: clock + one.retryAfter, resetAt: clock + one.resetAfter,
	}
	if d.shards.Load() == nil {
		d.shards.CompareAndSwap(nil, new([denialShards]denialShard))
	}
	s := d.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if d.resets.Load() != since {
		return // perhaps decided before a reset, and told after it
	}
	if told-s.born >= d.maxAge || told < s.born {
		s.old, s.young, s.born = s.young, nil, told
	}
	if s.young == nil {
		s.young = make(map[string]denial)
	}
	if len(s.young) < maxDenials/denialShards {
		s.young[strings.Clone(key)] = known
	}
}

// reset is called after a key was reset, given back to, or granted credit.
func (d *denials) reset(key string) {
	d.resets.Add(1)
	d.forget(key)
}

// forget is also called when something was granted to a key, of which a denial of a larger cost knows nothing.
func (d *denials) forget(key string) {
	s := d.shard(key)
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.young, key)
	delete(s.old, key)
}
