package engine_test

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// inQueue returns how many calls wait for the next statement, in the queues of all shards.
func inQueue(c *ratelimit.Client) (waiting int) {
	for _, q := range *limitertest.EngineOf(c).Queues.All.Load() {
		q.Mu.Lock()
		waiting += q.Waiting
		q.Mu.Unlock()
	}
	return waiting
}

// waitUntilHeld waits until the lane of a limiter waits for a row.
func waitUntilHeld(t *testing.T, pool *pgxpool.Pool, l *ratelimit.Limiter) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		held := limitertest.Engine(l).Batcher.Held
		held.Mu.Lock()
		defer held.Mu.Unlock()
		for _, row := range held.Rows {
			if row.Sure {
				return true
			}
		}
		return false
	})
	pgtest.WaitUntilBlocked(t, pool, 1)
}

// inLane returns how many calls are in the lane.
func inLane(c *ratelimit.Client) int {
	limitertest.EngineOf(c).Queues.First().Lane.Mu.Lock()
	defer limitertest.EngineOf(c).Queues.First().Lane.Mu.Unlock()
	return len(limitertest.EngineOf(c).Queues.First().Lane.Requests)
}

func newRequest(l *ratelimit.Limiter, key string, cost int64) *engine.Request {
	return limitertest.Engine(l).Request(&engine.Ask{Space: limitertest.Space(l), Policy: limitertest.Model(l.Config().Policy), Key: key, Cost: cost})
}

func newShadow(l *ratelimit.Limiter, row *policytable.Row, key string, cost int64) *engine.Shadow {
	beside := *limitertest.Space(l)
	beside.Name += policytable.ShadowSuffix
	return engine.NewShadow(&engine.Ask{
		Space: limitertest.Space(l), Policy: limitertest.Model(l.Config().Policy), Key: key, Cost: cost,
		Beside: &engine.Beside{Space: &beside, Policy: row.Value.Policy},
	})
}

func requestsOf(l *ratelimit.Limiter, elements []modeltest.Element) []*engine.Request {
	requests := make([]*engine.Request, len(elements))
	for i, e := range elements {
		requests[i] = limitertest.Engine(l).Requests.Get(limitertest.Space(l), limitertest.Model(l.Config().Policy))
		requests[i].Add(limitertest.Space(l), limitertest.Model(l.Config().Policy), e.Key, e.Cost, e.Refund)
		requests[i].Count, requests[i].Since = e.Count, time.Now()
		for j := range requests[i].Parts {
			requests[i].Parts[j].Charge = e.Charge
		}
	}
	return requests
}

// requestsFor returns requests for a key, one for each cost.
func requestsFor(l *ratelimit.Limiter, key string, costs ...int64) (requests []*engine.Request) {
	for _, cost := range costs {
		requests = append(requests, requestsOf(l, []modeltest.Element{{Key: key, Cost: cost, Count: 1}})...)
	}
	return requests
}

// decide decides elements in one statement.
func decide(ctx context.Context, l *ratelimit.Limiter, db ratelimit.DBTX, elements []modeltest.Element, tx engine.Transaction) error {
	return decideElements(requestsOf(l, elements), elements, func(requests []*engine.Request) error {
		return limitertest.Engine(l).Database.Execute(ctx, db, requests, tx)
	})
}

// decideAndRemember decides elements in one statement on the limiter's database, and remembers denials.
func decideAndRemember(ctx context.Context, l *ratelimit.Limiter, elements []modeltest.Element) error {
	return decideElements(requestsOf(l, elements), elements, func(requests []*engine.Request) error {
		return limitertest.Engine(l).Batcher.Decide(ctx, limitertest.Engine(l).Database.DB, requests, ownTransaction(l))
	})
}

func decideElements(requests []*engine.Request, elements []modeltest.Element, decide func([]*engine.Request) error) error {
	err := decide(requests)
	for i, r := range requests {
		elements[i].Decision = r.Parts[0].Decision
	}
	return err
}

// ownTransaction returns the settings of a transaction that waits for rows as long as a call does.
func ownTransaction(l *ratelimit.Limiter) engine.Transaction {
	return engine.Transaction{LockTimeout: engine.LockTimeout(limitertest.Engine(l).Batcher.Held.Patience())}
}

func send(l *ratelimit.Limiter, batch []*engine.Request) {
	q := limitertest.Engine(l).Queues.First()
	held, lost := q.Batcher.Send(&engine.Departure{Requests: slices.Clone(batch)})
	q.Lane.Add(q.Lane.GiveUp(held))
	q.PushBack(lost)
}

// outcomes waits until the requests are decided, and returns their results and errors.
func outcomes(batch []*engine.Request) (results []ratelimit.Result, errs []error) {
	for _, c := range batch {
		<-c.Done
		var result ratelimit.Result
		if c.Err == nil {
			o := c.Outcome()
			result = limitertest.ResultOf(&o)
		}
		results, errs = append(results, result), append(errs, c.Err)
	}
	return results, errs
}
