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
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
)

const maxRequests = 100 // in one AllowAll

// Request is the part of an [AllowAll] or [HoldAll] that one limiter decides.
type Request struct {
	limiter *Limiter
	key     string
	cost    int64
	inTx    bool // see WithTx
	tx      pgx.Tx
}

// Request returns a request for n of key's limit, to be passed to [AllowAll] or [HoldAll]. n must be at least 1.
func (l *Limiter) Request(key string, n int64) Request {
	return Request{limiter: l, key: key, cost: n}
}

// Format writes the cost and the limiter's name, but not the key.
func (r Request) Format(s fmt.State, _ rune) {
	if r.limiter == nil {
		_, _ = io.WriteString(s, "of no limiter")
		return
	}
	_, _ = fmt.Fprintf(s, "%d of %s", r.cost, r.limiter.space.Name)
}

// Results is the decision of an [AllowAll]. Its zero value denies.
type Results struct {
	Allowed bool // true if all costs were taken; if false, none was taken
	// RetryAfter is 0 if Allowed is true. Otherwise it is the longest RetryAfter in Each. After that time all requests
	// fit, if nobody else takes anything.
	RetryAfter time.Duration
	Each       []Result // in the order of the requests; RetryAfter is above 0 where a limit refused
}

// AllowAll takes from all of several limits, such as the limits of an address and of a user, or from none of them. It
// asks the database in one round trip. The limiters must share a [Client]. All calls lock rows in the same order,
// longer keys first, so they never deadlock. If all calls use a key, give it a short name ("all"), so that its row is
// locked last.
//
// Within a transaction, pass requests of [TxLimiter.Request]. The limiters of these requests may have different
// clients, but must have the same schema. Behind a proxy for shards, all keys must share a part in braces, such as
// {user:1}:minute and {user:1}:day.
//
// AllowAll ignores [Config].OnFailure. Errors: a [*RequestError]; a [*StoreError]; the context's error, if it ends
// first (the requests may still count).
func AllowAll(ctx context.Context, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer observeAll(time.Now(), requests, &results, &err)
	}
	s, tx, err := prepare(ctx, requests)
	if err != nil {
		return Results{}, err
	}
	return s.decide(ctx, tx)
}

// prepare returns a set of the requests, and the transaction to decide it in, or nil.
func prepare(ctx context.Context, requests []Request) (*set, pgx.Tx, error) {
	tx, inTx, err := transactionOf(requests)
	if err != nil {
		return nil, nil, err
	}
	s, err := newSet(ctx, requests, inTx)
	if err != nil {
		return nil, nil, err
	}
	if !inTx {
		if err := ctx.Err(); err != nil {
			return nil, nil, gaveUp(err)
		}
		if err := s.across(s.client.engine.Shards()); err != nil {
			return nil, nil, err
		}
	}
	return s, tx, nil
}

// transactionOf returns the transaction that all requests share. inTx is false if the requests have no transaction.
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

// sameTx tells whether a and b are the same transaction. If an application has its own pgx.Tx type, == may panic.
func sameTx(a, b pgx.Tx) bool {
	if conn := pg.Conn(a); conn != nil {
		return conn == pg.Conn(b)
	}
	return reflect.ValueOf(a).Comparable() && a == b
}

// set has the requests of one AllowAll.
type set struct {
	client  *Client
	asked   *engine.Set // the requests that no row of rate_limit_policy answers
	entries []setEntry
	denied  *Result // the denial by a row of rate_limit_policy; if not nil, the database is not asked
}

type setEntry struct {
	limiter   *Limiter
	key, name string
	policy    *model.Policy
	answer    *Result // the answer of a row of mode off or deny, or nil
}

// newSet checks the requests, and returns a set of them. If inTx is true, the limiters may have different clients.
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
	s.entries[i] = setEntry{limiter: l, key: q.key, name: l.space.Name, policy: policy}
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

// decide asks the database about the set, unless a row of rate_limit_policy denies it. The argument tx is the caller's
// transaction, or nil.
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
		default: // a row of another request denies the set
			*each = Result{Source: SourcePolicy, Limit: e.policy.Limit, DecidedAt: s.denied.DecidedAt}
		}
		each.Allowed = results.Allowed
		results.RetryAfter = max(results.RetryAfter, each.RetryAfter)
	}
	return results, nil
}

// explain returns a [*RequestError] instead of err if it can find the request that caused err.
func (s *set) explain(err error) error {
	if errors.Is(err, errRefused) {
		return s.refused()
	}
	if shards, _ := pg.Shards(err); shardkey.Valid(shards) {
		return cmp.Or(s.across(shards), err)
	}
	return err
}

// across returns an error if the keys of the set are on several shards.
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

// refused returns the error for a set with text that the database's encoding refuses. If only one request has non-ASCII
// text, the error names this request.
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

// observed tells whether the limiter of any request has an observer.
func observed(requests []Request) bool {
	for _, r := range requests {
		if r.limiter != nil && r.limiter.client.observer != nil {
			return true
		}
	}
	return false
}

// observeAll tells the observers about each request of an AllowAll that has just ended.
func observeAll(began time.Time, requests []Request, results *Results, err *error) {
	latency := time.Since(began)
	for i, r := range requests {
		if r.limiter == nil || r.limiter.client.observer == nil {
			continue
		}
		observer := r.limiter.client.observer
		e := DecisionEvent{Limiter: r.limiter.space.Name, Cost: r.cost, Err: *err, Latency: latency}
		if *err == nil {
			e.Result = results.Each[i]
			if !results.Allowed && e.Result.RetryAfter == 0 { // this limit had room
				e.Cost, e.Result.Allowed = 0, true
			}
		}
		if observer.Decision != nil {
			observer.Decision(e)
		}
		if observer.DeniedKey != nil && e.Err == nil && !e.Result.Allowed {
			observer.DeniedKey(e.Limiter, r.key)
		}
	}
}
