package engine

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

// queues has a queue for each shard. So a shard that is away or slow holds up only its own keys, and opens only its own
// breaker.
//
// There is one queue until a proxy tells how many shards there are, which it does when it refuses a statement for keys
// of several shards. If that number grows, shards are split: each queue goes on with a part of its keys, and others are
// added. None is removed. If another proxy knows of fewer shards, the keys of each queue are still all on one shard.
type queues struct {
	add func(shard int) *Queue

	mu  sync.Mutex // held while queues are added
	All atomic.Pointer[[]*Queue]
}

// start makes the first queue.
func (qs *queues) start(add func(shard int) *Queue) *Queue {
	qs.add = add
	qs.All.Store(&[]*Queue{add(0)})
	return qs.First()
}

func (qs *queues) First() *Queue { return (*qs.All.Load())[0] }

// Shards is how many shards are known, or 1.
func (qs *queues) Shards() int { return len(*qs.All.Load()) }

// Of returns the queue of a key.
func (qs *queues) Of(key string) *Queue {
	all := *qs.All.Load()
	if len(all) == 1 {
		return all[0]
	}
	return all[shardkey.Of(key, len(all))]
}

// ofAll returns the queue of a request, or nil if the keys of an AllowAll belong to several queues.
func (qs *queues) ofAll(r *Request) *Queue {
	q := qs.Of(r.Parts[0].Key)
	for i := range r.Parts[1:] {
		if qs.Of(r.Parts[i+1].Key) != q {
			return nil
		}
	}
	return q
}

// Learn makes the missing queues. It returns false if that number of shards is impossible.
func (qs *queues) Learn(shards int) bool {
	if !shardkey.Valid(shards) {
		return false
	}
	qs.mu.Lock()
	defer qs.mu.Unlock()
	all := slices.Clone(*qs.All.Load())
	if len(all) < shards {
		for len(all) < shards {
			all = append(all, qs.add(len(all)))
		}
		qs.All.Store(&all)
	}
	return true
}

// submit sends a request whose keys have one queue. See Queue.Submit.
func (qs *queues) submit(ctx context.Context, r *Request) error {
	return qs.Of(r.Parts[0].Key).Submit(ctx, r)
}

// submitAll sends requests that give back. See Queue.submitAll.
func (qs *queues) submitAll(requests []*Request) {
	for q, its := range qs.divide(requests, nil) {
		q.submitAll(its)
	}
}

// SubmitAgain sends requests again that a statement could not decide, because of the keys beside them or because a
// shard is being split. It ends those whose own keys have several queues, with err.
func (qs *queues) SubmitAgain(requests []*Request, err error) {
	for q, its := range qs.divide(requests, err) {
		q.submitAgain(its)
	}
}

// divide returns the requests of each queue. It ends those whose keys have several queues, with err.
func (qs *queues) divide(requests []*Request, err error) map[*Queue][]*Request {
	each := make(map[*Queue][]*Request)
	for _, r := range requests {
		if q := qs.ofAll(r); q != nil {
			each[q] = append(each[q], r)
		} else {
			r.Finish(err)
		}
	}
	return each
}

// submitAgain puts requests before those that came later, unless the breaker turns them away.
func (q *Queue) submitAgain(requests []*Request) {
	q.PushBack(slices.DeleteFunc(requests, func(r *Request) bool {
		if !r.Probe {
			var pass bool
			if pass, r.Probe = q.Batcher.Breaker.Admit(r.kind(), r.asksAnyway()); !pass {
				r.Finish(ErrNotTried)
				return true
			}
		}
		return false
	}))
}

// MapPause is how long requests wait that were refused because the proxy's map does not match the shards. While shards
// are split, that is so for some 10 ms.
const MapPause = 5 * time.Millisecond

// refusal is such an error, and when it came.
type refusal struct {
	at  time.Time
	err error
}

// asksElsewhere tells whether an error is about shards. If so, it sends the requests again, each through the queue of
// its key.
func (s *batch) asksElsewhere(requests []*Request, err error) bool {
	if err == nil {
		return false
	}
	shards, several := pg.Shards(err)
	several = several && s.queues.Learn(shards)
	switch {
	case several && slices.ContainsFunc(requests, s.isElsewhere):
		s.report(requests[0], nil, s.probe)
		s.queues.SubmitAgain(appendAll(nil, requests), err)
		return true
	case several, // although no request has another queue: the proxy's map is just changing
		pg.OtherShard(err):
		s.refused.Store(&refusal{time.Now(), err})
		all := appendAll(nil, requests)
		time.AfterFunc(MapPause, func() { s.queues.SubmitAgain(all, err) })
		return true
	case s.queues.Shards() == 1 && pg.FromProxy(err):
		s.askShards()
	}
	return false
}

// isElsewhere tells whether a request has keys of other queues.
func (b *Batcher) isElsewhere(r *Request) bool {
	q := b.queues.ofAll(r)
	return q == nil || q.Batcher != b
}

// askShards asks a proxy for the number of shards, before a shard that is away opens the breaker for all.
func (s *batch) askShards() {
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	defer cancel()
	var shards int
	statement := pg.Qualify("SELECT rate_limit_shards()", s.database.schema)
	if pg.Query(ctx, s.database.DB, false, statement, nil, []any{&shards}, func() error { return nil }) == nil {
		s.queues.Learn(shards)
	}
}
