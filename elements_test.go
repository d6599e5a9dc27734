package ratelimit

import (
	"context"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// requestsOf are the requests that ask for elements.
func (l *Limiter) requestsOf(elements []modeltest.Element) []*request {
	requests := make([]*request, len(elements))
	for i, e := range elements {
		requests[i] = l.client.requests.get(l.space, l.Config().Policy)
		requests[i].add(l.space, l.models, e.Key, e.Cost, e.Refund)
		requests[i].count, requests[i].since = e.Count, time.Now()
	}
	return requests
}

// requestsFor are requests for a key, one of each cost.
func (l *Limiter) requestsFor(key string, costs ...int64) (requests []*request) {
	for _, cost := range costs {
		requests = append(requests, l.requestsOf([]modeltest.Element{{Key: key, Cost: cost, Count: 1}})...)
	}
	return requests
}

// decide has one statement decide elements.
func (l *Limiter) decide(ctx context.Context, db DBTX, elements []modeltest.Element, tx transaction) error {
	return decideElements(l.requestsOf(elements), elements, func(requests []*request) error {
		return l.client.database.execute(ctx, db, requests, tx)
	})
}

// decideAndRemember has one statement of the limiter's own decide elements, and remembers denials.
func (l *Limiter) decideAndRemember(ctx context.Context, elements []modeltest.Element) error {
	return decideElements(l.requestsOf(elements), elements, func(requests []*request) error {
		return l.client.batcher.decide(ctx, l.client.database.db, requests, l.ownTransaction())
	})
}

func decideElements(requests []*request, elements []modeltest.Element, decide func([]*request) error) error {
	err := decide(requests)
	for i, r := range requests {
		elements[i].Decision = r.parts[0].decision
	}
	return err
}

// ownTransaction is one that waits for rows as long as a call does.
func (l *Limiter) ownTransaction() transaction {
	return transaction{lockTimeout: lockTimeout(l.client.batcher.held.patience())}
}

// send has a batch leave at once.
func (l *Limiter) send(batch []*request) {
	q := l.client.queues.first()
	held, lost := q.batcher.send(&buffers{batch: slices.Clone(batch)})
	q.lane.add(q.lane.giveUp(held))
	q.pushBack(lost)
}

// queryDecisions runs a statement that decides, and passes on the decisions that come back, with their places.
func queryDecisions(ctx context.Context, db DBTX, sql string, args []any, each func(ord int64, d model.Decision)) error {
	const none = -9
	parts := make([]*part, 1000)
	for i := range parts {
		parts[i] = &part{decision: model.Decision{Granted: none}}
	}
	c := call{sql: sql, args: args, into: parts}
	err := c.query(ctx, db, false)
	for i, p := range parts {
		if p.decision.Granted != none {
			each(int64(i)+1, p.decision)
		}
	}
	return err
}
