package ratelimit

import (
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// requestsOf are the requests that ask for elements.
func (l *Limiter) requestsOf(elements []modeltest.Element) []*engine.Request {
	requests := make([]*engine.Request, len(elements))
	for i, e := range elements {
		requests[i] = l.client.engine.Requests.Get(l.space, l.model)
		requests[i].Add(l.space, l.model, e.Key, e.Cost, e.Refund)
		requests[i].Count, requests[i].Since = e.Count, time.Now()
	}
	return requests
}

// requestsFor are requests for a key, one of each cost.
func (l *Limiter) requestsFor(key string, costs ...int64) (requests []*engine.Request) {
	for _, cost := range costs {
		requests = append(requests, l.requestsOf([]modeltest.Element{{Key: key, Cost: cost, Count: 1}})...)
	}
	return requests
}

// decide has one statement decide elements.
func (l *Limiter) decide(ctx context.Context, db DBTX, elements []modeltest.Element, tx engine.Transaction) error {
	return decideElements(l.requestsOf(elements), elements, func(requests []*engine.Request) error {
		return l.client.engine.Database.Execute(ctx, db, requests, tx)
	})
}

// decideAndRemember has one statement of the limiter's own decide elements, and remembers denials.
func (l *Limiter) decideAndRemember(ctx context.Context, elements []modeltest.Element) error {
	return decideElements(l.requestsOf(elements), elements, func(requests []*engine.Request) error {
		return l.client.engine.Batcher.Decide(ctx, l.client.engine.Database.DB, requests, l.ownTransaction())
	})
}

func decideElements(requests []*engine.Request, elements []modeltest.Element, decide func([]*engine.Request) error) error {
	err := decide(requests)
	for i, r := range requests {
		elements[i].Decision = r.Parts[0].Decision
	}
	return err
}

// ownTransaction is one that waits for rows as long as a call does.
func (l *Limiter) ownTransaction() engine.Transaction {
	return engine.Transaction{LockTimeout: engine.LockTimeout(l.client.engine.Batcher.Held.Patience())}
}

// send has a batch leave at once.
func (l *Limiter) send(batch []*engine.Request) {
	q := l.client.engine.Queues.First()
	held, lost := q.Batcher.Send(&engine.Departure{Requests: slices.Clone(batch)})
	q.Lane.Add(q.Lane.GiveUp(held))
	q.PushBack(lost)
}

// queryDecisions runs a statement that decides, and passes on the decisions that come back, with their places.
func queryDecisions(ctx context.Context, db DBTX, sql string, args []any, each func(ord int64, d model.Decision)) error {
	const none = -9
	parts := make([]*engine.Part, 1000)
	for i := range parts {
		parts[i] = &engine.Part{Decision: model.Decision{Granted: none}}
	}
	c := engine.Call{SQL: sql, Args: args, Into: parts}
	err := c.Query(ctx, db, false)
	for i, p := range parts {
		if p.Decision.Granted != none {
			each(int64(i)+1, p.Decision)
		}
	}
	return err
}
