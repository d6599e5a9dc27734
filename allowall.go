package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

const maxRequests = 100 // of one AllowAll

// Request is what [AllowAll] asks of one limiter.
type Request struct {
	limiter *Limiter
	key     string
	cost    int64
	inTx    bool // see WithTx
	tx      pgx.Tx
}

// Request asks for n, at least 1, of key's limit. It does nothing until it is passed to [AllowAll].
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
// Behind a proxy for shards, the keys of a call must be on one shard. They are if they share a part in braces, such as
// {user:1}:minute and {user:1}:day. Otherwise it is an [ErrSharded] before anything is taken, also if a row of
// [Policies] answers for a key.
//
// A limit that everybody shares is one row, from which one statement at a time can take. Give it a short key
// ("all"): the longest keys are locked first, and the later a row is locked, the less the others wait.
//
// [Config].OnFailure does not answer for it. An outage is an error, which comes at once while Postgres is known to
// be away, unless all of the limiters return errors. Errors: a [*RequestError] (nothing was taken); the context's
// error, if that ends first (the requests may still count); else a [*StoreError].
//
// Within a transaction of the caller's, pass requests of [TxLimiter.Request]. Their limiters may have several clients,
// of one schema.
func AllowAll(ctx context.Context, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer observeAll(time.Now(), requests, &results, &err)
	}
	tx, inTx, err := transactionOf(requests)
	if err != nil {
		return Results{}, err
	}
	s, err := newSet(ctx, requests, inTx)
	if err != nil {
		return Results{}, err
	}
	if inTx {
		return s.decide(func(c *Client, r *request) error { return c.batcher.decideInTx(ctx, tx, r) })
	}
	if err := ctx.Err(); err != nil {
		return Results{}, gaveUp(err)
	}
	if err := s.across(s.client.queues.shards()); err != nil {
		return Results{}, err
	}
	return s.decide(func(c *Client, r *request) error { return c.queues.submit(ctx, r) })
}

// transactionOf is the transaction that all of the requests are of. inTx is false if they are of none.
func transactionOf(requests []Request) (tx pgx.Tx, inTx bool, err error) {
	for i, q := range requests {
		if q.inTx {
			if err := checkTx(q.tx); err != nil {
				return nil, false, err
			}
		}
		switch {
		case i == 0:
			tx, inTx = q.tx, q.inTx
		case q.inTx != inTx || inTx && !sameTx(q.tx, tx):
			return nil, false, &RequestError{Index: i, Err: errOtherTx}
		}
	}
	return tx, inTx, nil
}

// sameTx tells whether two transactions are one. A type of the application's own need not be comparable.
func sameTx(a, b pgx.Tx) bool {
	if conn := pg.Conn(a); conn != nil {
		return conn == pg.Conn(b)
	}
	return reflect.ValueOf(a).Comparable() && a == b
}

// set is the requests of one AllowAll, as one request.
type set struct {
	client  *Client
	request *request
	entries []setEntry
	denied  *Result // what a row of rate_limit_policy denies, so that nobody is asked; else nil
}

// setEntry is one of the requests.
type setEntry struct {
	limiter     *Limiter // of the policy in force
	key         string
	first, last int     // its parts: from first to before last; none if a row allows or denies everything
	answer      *Result // what that row says
}

// newSet checks the requests. In a transaction of the caller's it does not matter which databases the limiters have.
func newSet(ctx context.Context, requests []Request, inTx bool) (*set, error) {
	if len(requests) == 0 || len(requests) > maxRequests {
		return nil, &RequestError{
			Err: fmt.Errorf("there are %d requests; pass 1 to %d", len(requests), maxRequests),
		}
	}
	s := &set{entries: make([]setEntry, len(requests))}
	for i, q := range requests {
		if err := s.add(ctx, i, q, inTx); err != nil {
			if _, store := errors.AsType[*StoreError](err); store || errors.Is(err, ctx.Err()) {
				return nil, err
			}
			return nil, &RequestError{Index: i, Err: err}
		}
	}
	return s, nil
}

func (s *set) add(ctx context.Context, i int, q Request, inTx bool) error {
	if q.limiter == nil {
		return errNoLimiter
	}
	if err := checkKey(q.key); err != nil {
		return err
	}
	in, row, err := q.limiter.inForce(ctx, q.key)
	if err != nil {
		return err
	}
	if q.cost < 1 {
		return &CostError{Cost: q.cost, Limit: in.limit, Least: 1}
	}
	if err := in.checkCost(q.cost); err != nil && row == nil {
		return err
	}
	if s.client == nil {
		s.client = in.client
		s.request = s.client.requests.get(s.client.setSpace(), nil)
	}
	if in.client != s.client && (!inTx || in.client.config.Schema != s.client.config.Schema) {
		if inTx {
			return errOtherSchema
		}
		return errOtherClient
	}
	r, e := s.request, &s.entries[i]
	e.limiter, e.key, e.first = in, q.key, len(r.parts)
	if row != nil {
		answer, _ := in.decision(row, q.cost)
		if e.answer = &answer; !answer.Allowed {
			s.denied = &answer
		}
		e.last = e.first
		return nil
	}
	r.add(in.space, in.models, q.key, q.cost, nil)
	e.last = len(r.parts)
	for _, p := range r.parts[e.first:] {
		for _, other := range r.parts[:e.first] {
			if p.key == other.key && p.name == other.name && p.space.durable == other.space.durable {
				return errSameKey
			}
		}
	}
	return nil
}

// decide has the set decided by ask, unless rows of rate_limit_policy have decided it already.
func (s *set) decide(ask func(*Client, *request) error) (Results, error) {
	if s.denied == nil && len(s.request.parts) > 0 {
		if err := ask(s.client, s.request); err != nil {
			return Results{}, s.explain(err)
		}
	}
	results := s.results()
	s.client.requests.put(s.request)
	return results, nil
}

// explain adds to the error of a set which of its requests is to blame.
func (s *set) explain(err error) error {
	if errors.Is(err, errRefused) {
		return s.refused()
	}
	if shards, _ := pg.Shards(err); shardkey.Valid(shards) {
		return cmp.Or(s.across(shards), err)
	}
	return err
}

// across is the error for a set whose keys are on several shards, or nil if they are not.
func (s *set) across(shards int) error {
	if shards == 1 {
		return nil
	}
	first := shardkey.Of(s.entries[0].key, shards)
	for i, e := range s.entries {
		if shardkey.Of(e.key, shards) != first {
			return &RequestError{Index: i, Err: errAcrossShards}
		}
	}
	return nil
}

// setSpace is whose turn it is for AllowAll.
func (c *Client) setSpace() *keyspace {
	if c.sets.Load() == nil {
		c.sets.CompareAndSwap(nil, &keyspace{})
	}
	return c.sets.Load()
}

// results is what the caller is told.
func (s *set) results() Results {
	r := s.request
	results := Results{Allowed: s.denied == nil, Each: make([]Result, len(s.entries))}
	if results.Allowed && len(r.parts) > 0 {
		results.Allowed = r.place <= r.parts[0].decision.Granted
	}
	for i, e := range s.entries {
		var each Result
		switch {
		case e.first == e.last:
			each = *e.answer
		case s.denied == nil:
			each = r.resultOf(e.first, e.last, e.limiter.policy)
		default: // nobody has been asked
			each = Result{Source: SourcePolicy, Limit: e.limiter.limit, DecidedAt: s.denied.DecidedAt}
		}
		each.Allowed = results.Allowed
		results.Each[i] = each
		results.RetryAfter = max(results.RetryAfter, each.RetryAfter)
	}
	return results
}

// refused is the error for a set that the database's encoding refuses. It says which of the requests is to blame if
// only one can be.
func (s *set) refused() error {
	index, suspects := 0, 0
	for i, e := range s.entries {
		if e.first == e.last {
			continue
		}
		if p := s.request.parts[e.first]; !isASCII(p.key + p.name) {
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
