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

// queues has a queue and a breaker for each shard. So a slow shard delays only requests for its own keys.
//
// At the beginning there is one queue. A proxy refuses a statement for keys of several shards, and its error says how
// many shards there are. After such an error, queues adds the missing queues. If shards are split later, their number
// grows, and queues adds queues again. A queue is never removed. If another proxy knows fewer shards, all keys of a
// queue are still in one shard.
type queues struct {
	add func(shard int) *Queue

	mu  sync.Mutex // serializes the adding of queues
	All atomic.Pointer[[]*Queue]
}

// start adds the first queue, and returns it.
func (qs *queues) start(add func(shard int) *Queue) *Queue {
	qs.add = add
	qs.All.Store(&[]*Queue{add(0)})
	return qs.First()
}

func (qs *queues) First() *Queue { return (*qs.All.Load())[0] }

// Shards returns the number of known shards, or 1 if there is no proxy.
func (qs *queues) Shards() int { return len(*qs.All.Load()) }

// Of returns the queue of the shard that has a key.
func (qs *queues) Of(key string) *Queue {
	all := *qs.All.Load()
	if len(all) == 1 {
		return all[0]
	}
	return all[shardkey.Of(key, len(all))]
}

// ofAll returns the queue for all keys of a request. It returns nil if the keys belong to several queues.
func (qs *queues) ofAll(r *Request) *Queue {
	q := qs.Of(r.Parts[0].Key)
	for i := range r.Parts[1:] {
		if qs.Of(r.Parts[i+1].Key) != q {
			return nil
		}
	}
	return q
}

// Learn adds the missing queues for a number of shards. It returns false if the number is not valid.
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

func (qs *queues) submit(ctx context.Context, r *Request) error {
	return qs.Of(r.Parts[0].Key).Submit(ctx, r)
}

// submitAll queues requests, and does not wait for their decisions.
func (qs *queues) submitAll(requests []*Request) {
	if all := *qs.All.Load(); len(all) == 1 {
		all[0].submitAll(requests)
		return
	}
	each := make(map[*Queue][]*Request)
	for _, r := range requests {
		q := qs.Of(r.Parts[0].Key)
		each[q] = append(each[q], r)
	}
	for q, its := range each {
		q.submitAll(its)
	}
}

// SubmitAgain passes undecided requests to their queues again. A statement could not decide these requests, because its
// keys are in several shards or a shard is being split. If the keys of a single request belong to several queues, the
// request ends with err.
func (qs *queues) SubmitAgain(requests []*Request, err error) {
	for q, its := range qs.divide(requests, err) {
		q.submitAgain(its)
	}
}

// divide sorts requests by queue. If the keys of a single request belong to several queues, the request ends with err.
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

// submitAgain puts requests at the beginning of their groups. If the breaker turns a request away, the request ends
// with ErrNotTried.
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

// MapPause is the pause before a request is sent again. A proxy has refused the request, because the proxy's map of
// shards is outdated. While shards are split, the map is outdated for about 10 ms.
const MapPause = 5 * time.Millisecond

// whileSplit calls a function, and calls it again while the shard of its key is being split, until ctx ends. Only a
// statement in an own transaction can be repeated.
func whileSplit(ctx context.Context, own bool, statement func() error) error {
	err := statement()
	for own && pg.OtherShard(err) {
		timer := time.NewTimer(MapPause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
		}
		if ctx.Err() != nil {
			break
		}
		err = statement()
	}
	return err
}

// refusal is an error of a proxy with an outdated map of shards, and the time of the error.
type refusal struct {
	at  time.Time
	err error
}

// asksElsewhere returns whether an error is about shards. If so, asksElsewhere submits the requests again, each to the
// queue of its keys.
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
	case several, // all requests are in the right queue, so the proxy's map is just changing
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

// isElsewhere returns whether a request has keys of another queue.
func (b *Batcher) isElsewhere(r *Request) bool {
	q := b.queues.ofAll(r)
	return q == nil || q.Batcher != b
}

// askShards asks a proxy for the number of shards. When the number is known, each shard gets a breaker, so that one
// failing shard does not open the breaker for all keys.
func (s *batch) askShards() {
	ctx, cancel := context.WithDeadline(context.Background(), s.deadline)
	defer cancel()
	var shards int
	statement := pg.Qualify("SELECT rate_limit_shards()", s.database.schema)
	db := s.database.forStatements()
	if pg.Query(ctx, db, false, statement, nil, []any{&shards}, func() error { return nil }) == nil {
		s.queues.Learn(shards)
	}
}
