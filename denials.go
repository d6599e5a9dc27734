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
// A denial that comes back is remembered only if nothing has happened to its key since its statement left that it may not know of:
// a take, a refund, a credit or a reset. Each of these forgets the key when its answer comes, and counts, under the lock under which
// a denial is remembered. So with two statements under way, a denial that was decided first and comes last is not remembered, and
// neither is one that is decided before a reset and told after it.
//
// What is done in a transaction of the caller's counts when it is done, and takes effect when the transaction commits. No more is
// needed: it has locked the row, and a denial locks it too, so in between none is decided. One that was decided before has left
// before, so it is forgotten if it had come back, else not remembered. One that is decided later is decided after the commit, which
// it knows, or after the rollback, when there is nothing to know.
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
	early  atomic.Uint32                             // changes of all keys, while there are no shards
	shards atomic.Pointer[[denialShards]denialShard] // nil until a key is denied, so that an idle limiter stays small
}

const (
	denialShards = 16
	shardCounts  = 8
	maxDenials   = 8192 // in each generation of all shards: with 512-byte keys, both need less than 16 MiB, and of logs 24
)

type denialShard struct {
	mu         sync.Mutex
	young, old map[string]denial
	born       time.Duration // when young was
	// How often something may have happened to a key, of those with the same hash together, that a denial does not know of. They
	// also keep the shards' mutexes on cache lines of their own.
	changes [shardCounts]atomic.Uint32
}

// changes is how often something had happened to keys when a statement left, and what the statement itself has done since.
type changes struct {
	early uint32
	of    [denialShards * shardCounts]uint32
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

// leave is called before a statement leaves, and returns what has happened to keys until then.
func (d *denials) leave() (since changes) {
	since.early = d.early.Load()
	if shards := d.shards.Load(); shards != nil {
		for i := range since.of {
			since.of[i] = shards[i%denialShards].changes[i/denialShards].Load()
		}
	}
	return since
}

// shard returns a key's shard, and which of the changes are the key's. It is nil if nothing has been denied yet.
func (d *denials) shard(key string) (s *denialShard, i uint64) {
	shards := d.shards.Load()
	if shards == nil {
		return nil, 0
	}
	i = maphash.String(d.seed, key) % uint64(len(changes{}.of))
	return &shards[i%denialShards], i
}

// deny returns the denial of a request that the database would deny too, as far as this process knows.
func (d *denials) deny(policy Policy, key string, n int64) (Result, bool) {
	s, _ := d.shard(key)
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

// remember keeps the denial of a request that left at asked, when since was what had happened to keys, and came back at told.
func (d *denials) remember(policy Policy, key string, denied decision, asked, told time.Duration, since *changes) {
	clock := denied.decidedAt.UnixMicro()
	_, one := policy.decide(denied.state, clock, 1)
	known := denial{
		policy: policy, state: denied.state, clock: clock, asked: asked, told: told,
		retryAt: clock + one.retryAfter, resetAt: clock + one.resetAfter,
	}
	if d.shards.Load() == nil {
		d.shards.CompareAndSwap(nil, new([denialShards]denialShard))
	}
	s, i := d.shard(key)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.changes[i/denialShards].Load() != since.of[i] || d.early.Load() != since.early {
		return // perhaps decided before something that was told before it
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

// changed is called when something has, or may have, happened to a key that no denial knows of yet but those that come behind it in
// the same statement; since is that statement's, nil if none of it is remembered.
func (d *denials) changed(key string, since *changes) {
	if d == nil {
		return
	}
	if d.shards.Load() == nil {
		d.early.Add(1)
		if since != nil {
			since.early++
		}
	}
	s, i := d.shard(key) // asked for again: whoever has made them since may not have seen early change
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changes[i/denialShards].Add(1)
	if since != nil {
		since.of[i]++
	}
	delete(s.young, key)
	delete(s.old, key)
}
