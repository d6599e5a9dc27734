package ratelimit

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// queues are a client's queues: one for each shard. So a shard that is away or slow holds up only its own keys, and
// opens only its own breaker.
//
// There is one queue until a proxy tells how many shards there are, as it does when it refuses a statement for keys of
// several. If that number grows, shards are divided: each queue goes on with a part of its keys, and others are added.
// None is removed. If there are fewer shards again, or another proxy knows of fewer, the keys of each queue are still
// all on one shard.
type queues struct {
	add func(shard int) *queue

	mu  sync.Mutex // held while queues are added
	all atomic.Pointer[[]*queue]
}

// start makes the first queue.
func (qs *queues) start(add func(shard int) *queue) *queue {
	qs.add = add
	qs.all.Store(&[]*queue{add(0)})
	return qs.first()
}

func (qs *queues) first() *queue { return (*qs.all.Load())[0] }

// shards is how many shards are known, or 1.
func (qs *queues) shards() int { return len(*qs.all.Load()) }

// of returns the queue of a key.
func (qs *queues) of(key string) *queue {
	all := *qs.all.Load()
	if len(all) == 1 {
		return all[0]
	}
	return all[shardkey.Of(key, len(all))]
}

// ofAll returns the queue of a request, or nil if the keys of an AllowAll have several.
func (qs *queues) ofAll(r *request) *queue {
	q := qs.of(r.parts[0].key)
	for i := range r.parts[1:] {
		if qs.of(r.parts[i+1].key) != q {
			return nil
		}
	}
	return q
}

// learn makes the queues that are missing. It returns false if there cannot be so many shards.
func (qs *queues) learn(shards int) bool {
	if !shardkey.Valid(shards) {
		return false
	}
	qs.mu.Lock()
	defer qs.mu.Unlock()
	all := slices.Clone(*qs.all.Load())
	if len(all) < shards {
		for len(all) < shards {
			all = append(all, qs.add(len(all)))
		}
		qs.all.Store(&all)
	}
	return true
}

// submit has a request decided; see queue.submit. Its keys have one queue.
func (qs *queues) submit(ctx context.Context, r *request) error {
	return qs.of(r.parts[0].key).submit(ctx, r)
}

// submitAll has requests decided that give back; see queue.submitAll.
func (qs *queues) submitAll(requests []*request) {
	for q, its := range qs.divide(requests, nil) {
		q.submitAll(its)
	}
}

// submitAgain has requests decided that a statement could not decide, because of the keys beside them or because a
// shard is being divided. Those whose own keys have several queues get err.
func (qs *queues) submitAgain(requests []*request, err error) {
	for q, its := range qs.divide(requests, err) {
		q.submitAgain(its)
	}
}

// divide returns the requests of each queue. It ends those whose keys have several queues.
func (qs *queues) divide(requests []*request, err error) map[*queue][]*request {
	each := make(map[*queue][]*request)
	for _, r := range requests {
		if q := qs.ofAll(r); q != nil {
			each[q] = append(each[q], r)
		} else {
			r.finish(err)
		}
	}
	return each
}

// submitAgain puts requests before those that came later, unless the breaker turns them away.
func (q *queue) submitAgain(requests []*request) {
	q.pushBack(slices.DeleteFunc(requests, func(r *request) bool {
		if !r.probe {
			var pass bool
			if pass, r.probe = q.batcher.breaker.admit(r.kind(), r.asksAnyway()); !pass {
				r.finish(errNotTried)
				return true
			}
		}
		return false
	}))
}

// mapPause is how long requests wait that were refused because the proxy's map is not that of the shards. While shards
// are divided, that is so for some 10 ms.
const mapPause = 5 * time.Millisecond

// refusal is the error of such a statement.
type refusal struct {
	at  time.Time
	err error
}

// asksElsewhere tells whether the error of a statement for requests is about shards. If so, they are asked again, each
// by the queue of its key.
func (s *batch) asksElsewhere(requests []*request, err error) bool {
	if err == nil {
		return false
	}
	shards, several := pg.Shards(err)
	several = several && s.queues.learn(shards)
	switch {
	case several && slices.ContainsFunc(requests, s.isElsewhere):
		s.report(requests[0], nil, s.probe)
		s.queues.submitAgain(appendAll(nil, requests), err)
		return true
	case several, // although none has another queue: the proxy's map is just changing
		pg.OtherShard(err):
		s.refused.Store(&refusal{time.Now(), err})
		all := appendAll(nil, requests)
		time.AfterFunc(mapPause, func() { s.queues.submitAgain(all, err) })
		return true
	case s.queues.shards() == 1 && pg.FromProxy(err):
		s.askShards()
	}
	return false
}

// isElsewhere tells whether not all keys of a request have this queue.
func (b *batcher) isElsewhere(r *request) bool {
	q := b.queues.ofAll(r)
	return q == nil || q.batcher != b
}

// askShards asks a proxy how many shards there are, before one that is away opens the breaker for all.
func (s *batch) askShards() {
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	defer cancel()
	var shards int
	statement := pg.Qualify("SELECT rate_limit_shards()", s.database.schema)
	if query(ctx, s.database.db, false, statement, nil, []any{&shards}, func() error { return nil }) == nil {
		s.queues.learn(shards)
	}
}
