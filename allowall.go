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

	"github.com/pgratelimit/ratelimit/internal/engine"
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

// Request is for [AllowAll]: it asks for n of key's limit, at least 1.
func (l *Limiter) Request(key string, n int64) Request {
	return Request{limiter: l, key: key, cost: n}
}

// Format writes the cost and the limiter's name. The key may be personal data.
func (r Request) Format(s fmt.State, _ rune) {
	if r.limiter == nil {
		_, _ = io.WriteString(s, "of no limiter")
		return
	}
	_, _ = fmt.Fprintf(s, "%d of %s", r.cost, r.limiter.space.Name)
}

// Results are the decision over several limits. The zero Results deny.
type Results struct {
	Allowed bool // all costs were taken; else none was
	// RetryAfter is 0 if Allowed. Else it is the longest of Each: after it, all fit if nobody else takes anything.
	RetryAfter time.Duration
	Each       []Result // in the order of the requests; those that refused have a RetryAfter above 0
}

// AllowAll takes from several limits, or from none of them: one for the address, say, one for the user and one for
// everybody. The limiters share a [Client], and may differ in all else. It asks the database, in one round trip and one
// transaction. Two calls never deadlock, because all lock rows in one order: the longest keys first. So give a key that
// all calls share a short name ("all"), and it is locked for the shortest time.
//
// Within a transaction, pass requests of [TxLimiter.Request]; one schema is enough then, instead of one client. Behind
// a proxy for shards, all keys must be on one shard: let them share a part in braces, such as {user:1}:minute and
// {user:1}:day.
//
// [Config].OnFailure does not answer an outage. Errors: a [*RequestError]; the context's error, if that ends first
// (they may still count); else a [*StoreError].
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
	if !inTx {
		if err := ctx.Err(); err != nil {
			return Results{}, gaveUp(err)
		}
		if err := s.across(s.client.engine.Shards()); err != nil {
			return Results{}, err
		}
	}
	return s.decide(ctx, tx)
}

// transactionOf returns the transaction of all requests. inTx is false if they have none.
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

// sameTx says whether two transactions are one. A type of the application's own need not be comparable.
func sameTx(a, b pgx.Tx) bool {
	if conn := pg.Conn(a); conn != nil {
		return conn == pg.Conn(b)
	}
	return reflect.ValueOf(a).Comparable() && a == b
}

// set is the requests of one AllowAll.
type set struct {
	client  *Client
	asked   *engine.Set // the requests that the database decides
	entries []setEntry
	denied  *Result // the denial of a row of rate_limit_policy, if one denies, so that nobody is asked
}

// setEntry is one of the requests.
type setEntry struct {
	key, name string
	limit     int64
	answer    *Result // of a row that allows or denies everything, if there is one
}

// newSet checks the requests. In a caller's transaction, the limiters may have different databases.
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
	l := q.limiter
	policy, row, err := l.inForce(ctx, q.key)
	if err != nil {
		return err
	}
	if q.cost < 1 {
		return &CostError{Cost: q.cost, Limit: policy.Limit, Least: 1}
	}
	if err := checkCost(q.cost, policy); err != nil && row == nil {
		return err
	}
	if s.client == nil {
		s.client, s.asked = l.client, l.client.engine.NewSet()
	}
	if l.client != s.client && (!inTx || !l.client.engine.SameSchema(s.client.engine)) {
		if inTx {
			return errOtherSchema
		}
		return errOtherClient
	}
	s.entries[i] = setEntry{key: q.key, name: l.space.Name, limit: policy.Limit}
	if row != nil {
		answer, _ := l.byRow(row, q.cost)
		if s.entries[i].answer = &answer; !answer.Allowed {
			s.denied = &answer
		}
		return nil
	}
	if !s.asked.Add(l.question(policy, q.key, q.cost)) {
		return errSameKey
	}
	return nil
}

// decide has the set decided, unless rows of rate_limit_policy decide it. tx is the caller's, or nil.
func (s *set) decide(ctx context.Context, tx pgx.Tx) (Results, error) {
	var outcomes []engine.Outcome
	if s.denied == nil {
		var err error
		if outcomes, err = s.asked.Decide(ctx, tx); err != nil {
			return Results{}, s.explain(publicError(err))
		}
	}
	results := Results{Allowed: s.denied == nil, Each: make([]Result, len(s.entries))}
	if len(outcomes) > 0 {
		results.Allowed = outcomes[0].Allowed
	}
	for i, e := range s.entries {
		each := &results.Each[i]
		switch {
		case e.answer != nil:
			*each = *e.answer
		case s.denied == nil:
			*each, outcomes = resultOf(&outcomes[0]), outcomes[1:]
		default: // nobody has been asked
			*each = Result{Source: SourcePolicy, Limit: e.limit, DecidedAt: s.denied.DecidedAt}
		}
		each.Allowed = results.Allowed
		results.RetryAfter = max(results.RetryAfter, each.RetryAfter)
	}
	return results, nil
}

// explain adds to an error which request is to blame.
func (s *set) explain(err error) error {
	if errors.Is(err, errRefused) {
		return s.refused()
	}
	if shards, _ := pg.Shards(err); shardkey.Valid(shards) {
		return cmp.Or(s.across(shards), err)
	}
	return err
}

// across returns the error for a set whose keys are on several shards, else nil.
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

// refused returns the error for a set that the database's encoding refuses. It names the request if only one can be to
// blame.
func (s *set) refused() error {
	index, suspects := 0, 0
	for i, e := range s.entries {
		if e.answer == nil && !engine.IsASCII(e.key+e.name) {
			index, suspects = i, suspects+1
		}
	}
	if suspects != 1 {
		return errRefused
	}
	return &RequestError{Index: index, Err: errRefused}
}

// observed says whether any observer wants to know about an AllowAll.
func observed(requests []Request) bool {
	for _, r := range requests {
		if r.limiter != nil && r.limiter.client.observer != nil {
			return true
		}
	}
	return false
}

// observeAll tells the observers about each limiter's part in an AllowAll that ends now.
func observeAll(began time.Time, requests []Request, results *Results, err *error) {
	latency := time.Since(began)
	for i, r := range requests {
		if r.limiter == nil || r.limiter.client.observer == nil ||
			r.limiter.client.observer.Decision == nil {
			continue
		}
		e := DecisionEvent{Limiter: r.limiter.space.Name, Cost: r.cost, Err: *err, Latency: latency}
		if *err == nil {
			e.Result = results.Each[i]
			if !results.Allowed && e.Result.RetryAfter == 0 { // it had room
				e.Cost, e.Result.Allowed = 0, true
			}
		}
		r.limiter.client.observer.Decision(e)
	}
}
