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
	_, _ = fmt.Fprintf(s, "%d of %s", r.cost, r.limiter.space.Name)
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

// set is the requests of one AllowAll.
type set struct {
	client  *Client
	asked   *engine.Set // those that the database has to decide
	entries []setEntry
	denied  *Result // what a row of rate_limit_policy denies, so that nobody is asked; else nil
}

// setEntry is one of the requests.
type setEntry struct {
	key, name string
	limit     int64
	answer    *Result // what a row says that allows or denies everything; else nil
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

// decide has the set decided, unless rows of rate_limit_policy have decided it already. tx is nil, or the caller's.
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

// refused is the error for a set that the database's encoding refuses. It says which of the requests is to blame if
// only one can be.
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

// observed tells whether any observer is to be told about an AllowAll.
func observed(requests []Request) bool {
	for _, r := range requests {
		if r.limiter != nil && r.limiter.client.observer != nil {
			return true
		}
	}
	return false
}

// observeAll tells the observers about each limiter's part in an AllowAll that ends here.
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
