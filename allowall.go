package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/jackc/pgx/v5"
)

const maxRequests = 100 // of one AllowAll

// Request is what [AllowAll] asks of one limiter.
type Request struct {
	limiter *Limiter
	key     string
	cost    int64
}

// Request asks for n, at least 1, of key's limit. It does nothing until it is passed to [AllowAll] or
// [AllowAllTx].
func (l *Limiter) Request(key string, n int64) Request {
	return Request{limiter: l, key: key, cost: n}
}

// Format writes the cost and the limiter's name, but not the key, which may be personal data.
func (r Request) Format(s fmt.State, _ rune) {
	if r.limiter == nil {
		_, _ = io.WriteString(s, "of no limiter")
		return
	}
	_, _ = fmt.Fprintf(s, "%d of %s", r.cost, r.limiter.space.name)
}

// Results are the decision over several limits. The zero Results deny.
type Results struct {
	Allowed bool // all of them, and their costs taken; else nothing was taken
	// RetryAfter is 0 if they were allowed. Else it is the longest of those that refused: after that time, from
	// the decision, all fit if nobody else takes anything.
	RetryAfter time.Duration
	// Each tells about each request, in order. If nothing was taken, none says Allowed; RetryAfter is above 0 for
	// limits that refused, and 0 for those that had room.
	Each []Result
}

// AllowAll takes from several limits, or from none of them: one for the address, say, one for the user and one for
// everybody. The limiters may differ in everything but their [Client]. It is one round trip and one transaction.
// All callers lock rows in one order, so that two never wait for each other. Concurrent calls share statements.
// Every call asks the database, because denials are not remembered.
//
// A limit that everybody shares is one row, from which one statement at a time can take. Give it a short key
// ("all"): the longest keys are locked first, and the later a row is locked, the less the others wait.
//
// [Config].OnFailure does not answer for it. An outage is an error, which comes at once while Postgres is known to
// be away, unless all of the limiters return errors. Errors: a [*RequestError] (nothing was taken); the context's
// error, if that ends first (the requests may still count); else a [*StoreError].
func AllowAll(ctx context.Context, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer observeAll(time.Now(), requests, &results, &err)
	}
	r, firsts, err := newSet(requests, false)
	if err != nil {
		return Results{}, err
	}
	if err := ctx.Err(); err != nil {
		return Results{}, gaveUp(err)
	}
	c := requests[0].limiter.client
	if err := c.queue.submit(ctx, r); errors.Is(err, errRefused) {
		return Results{}, refusedRequest(r, firsts)
	} else if err != nil {
		return Results{}, err
	}
	results = resultsOf(r, firsts, requests)
	c.requests.put(r)
	return results, nil
}

// AllowAllTx is AllowAll within the caller's transaction; see [Limiter.AllowTx]. The limiters may have several
// clients, of one schema. Ask once in a transaction: two transactions that ask several times, in different orders,
// may wait for each other. Postgres then ends one of them with SQLSTATE 40P01.
func AllowAllTx(ctx context.Context, tx pgx.Tx, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer observeAll(time.Now(), requests, &results, &err)
	}
	if err := checkTx(tx); err != nil {
		return Results{}, err
	}
	r, firsts, err := newSet(requests, true)
	if err != nil {
		return Results{}, err
	}
	c := requests[0].limiter.client
	if err := c.batcher.decideInTx(ctx, tx, r); errors.Is(err, errRefused) {
		return Results{}, refusedRequest(r, firsts)
	} else if err != nil {
		return Results{}, err
	}
	results = resultsOf(r, firsts, requests)
	c.requests.put(r)
	return results, nil
}

// newSet checks the requests, and makes one request of them. firsts are the indices of the first part of
// each. In a transaction of the caller's it does not matter which databases the limiters have.
func newSet(requests []Request, inTx bool) (r *request, firsts []int, err error) {
	if len(requests) == 0 || len(requests) > maxRequests {
		return nil, nil, &RequestError{
			Err: fmt.Errorf("there are %d requests; pass 1 to %d", len(requests), maxRequests),
		}
	}
	for i, q := range requests {
		if q.limiter == nil {
			return nil, nil, &RequestError{Index: i, Err: errNoLimiter}
		}
		l, first := q.limiter, requests[0].limiter
		err := l.check(q.key, max(q.cost, 1))
		if err == nil && q.cost < 1 {
			err = &CostError{Cost: q.cost, Limit: l.limit, Least: 1}
		}
		if err == nil && l.client != first.client && (!inTx || l.client.config.Schema != first.client.config.Schema) {
			err = errOtherClient
			if inTx {
				err = errOtherSchema
			}
		}
		if err != nil {
			return nil, nil, &RequestError{Index: i, Err: err}
		}
		if r == nil {
			r = first.client.requests.get(first.client.setSpace(), nil)
		}
		firsts = append(firsts, len(r.parts))
		r.add(l.space, l.models, q.key, q.cost, nil)
		for _, p := range r.parts[firsts[i]:] {
			for _, other := range r.parts[:firsts[i]] {
				if p.key == other.key && p.name == other.name && p.space.durable == other.space.durable {
					return nil, nil, &RequestError{Index: i, Err: errSameKey}
				}
			}
		}
	}
	return r, firsts, nil
}

// setSpace is whose turn it is for AllowAll.
func (c *Client) setSpace() *keyspace {
	if c.sets.Load() == nil {
		c.sets.CompareAndSwap(nil, &keyspace{})
	}
	return c.sets.Load()
}

// resultsOf is what the caller of a request of several limiters is told.
func resultsOf(r *request, firsts []int, requests []Request) Results {
	results := Results{Allowed: r.place <= r.parts[0].decision.granted, Each: make([]Result, len(requests))}
	for i, first := range firsts {
		last := len(r.parts)
		if i+1 < len(firsts) {
			last = firsts[i+1]
		}
		each := r.resultOf(first, last, requests[i].limiter.policy)
		each.Allowed = results.Allowed
		results.Each[i] = each
		results.RetryAfter = max(results.RetryAfter, each.RetryAfter)
	}
	return results
}

// refusedRequest is the error for a request of several limiters that the database's encoding refuses. It says
// which of them is to blame if only one can be.
func refusedRequest(r *request, firsts []int) error {
	index, suspects := 0, 0
	for i, first := range firsts {
		if p := r.parts[first]; !isASCII(p.key + p.name) {
			index, suspects = i, suspects+1
		}
	}
	if suspects != 1 {
		return errRefused
	}
	return &RequestError{Index: index, Err: errRefused}
}

// observed tells whether any observer is to be told about an AllowAll.
func observed(requests []Request) bool {
	for _, r := range requests {
		if r.limiter != nil && r.limiter.client.config.Observer != nil {
			return true
		}
	}
	return false
}

// observeAll tells the observers about each limiter's part in an AllowAll that ends here.
func observeAll(began time.Time, requests []Request, results *Results, err *error) {
	latency := time.Since(began)
	for i, r := range requests {
		if r.limiter == nil || r.limiter.client.config.Observer == nil ||
			r.limiter.client.config.Observer.Decision == nil {
			continue
		}
		e := DecisionEvent{Limiter: r.limiter.space.name, Cost: r.cost, Err: *err, Latency: latency}
		if *err == nil {
			e.Result = results.Each[i]
			if !results.Allowed && e.Result.RetryAfter == 0 { // it had room
				e.Cost, e.Result.Allowed = 0, true
			}
		}
		r.limiter.client.config.Observer.Decision(e)
	}
}
