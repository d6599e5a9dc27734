package ratelimit

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// maxPolicies is how many policies All takes, and maxRequests how many requests AllowAll does.
const (
	maxPolicies = 8
	maxRequests = 100
)

// All is several policies for one key: a request is allowed if each of them allows it, and then takes from all of them, else from none.
// 2 to 8 policies; their order is part of what is stored. With
//
//	All(SlidingWindow{Limit: 10, Window: time.Second}, SlidingWindow{Limit: 3000, Window: 10 * time.Minute})
//
// a key may ask 10 times a second, and 3,000 times in ten minutes. A [Result] then tells the Limit and Remaining of the policy with
// the least left, and the longest RetryAfter and ResetAfter: after those all of them allow it, or are as good as new.
//
// A limiter named api keeps the rows of its policies under the names api, api/2, api/3 and so on; do not give these names to others.
// Its denials are not remembered in the process: every call asks the database.
func All(policies ...Policy) Policy {
	p := all{n: len(policies)}
	copy(p.list[:], policies)
	return p
}

// all is comparable, as every Policy.
type all struct {
	Policy // never set: a model of one row is not what decides
	n      int
	list   [maxPolicies]Policy
}

func (p all) policies() []Policy { return p.list[:p.n] }

// String is the policies as [ParsePolicy] reads them: sliding 10/1s, sliding 3000/10m.
func (p all) String() string {
	texts := make([]string, p.n)
	for i, policy := range p.policies() {
		texts[i] = policy.String()
	}
	return strings.Join(texts, ", ")
}

func (p all) validate() error {
	if p.n < 2 || p.n > maxPolicies {
		return &ConfigError{Field: "Policy", Reason: fmt.Sprintf("is All of %d policies, and needs 2 to %d", p.n, maxPolicies)}
	}
	for _, policy := range p.policies() {
		if _, nested := policy.(all); nested {
			return &ConfigError{Field: "Policy", Reason: "is All within All; name all policies in one"}
		}
		if err := validatePolicy(policy); err != nil {
			return err
		}
	}
	return nil
}

// limit is the largest cost that all policies can ever allow.
func (p all) limit() int64 {
	limit := p.list[0].limit()
	for _, policy := range p.policies() {
		limit = min(limit, policy.limit())
	}
	return limit
}

//go:embed sql/call/all.sql
var allStatement string

func (p all) statement() string { return allStatement }
func (p all) numbers() []any    { return nil } // but those of its parts, as columns

// Request is what is asked of one limiter by [AllowAll]; [Limiter.Request] makes one.
type Request struct {
	limiter *Limiter
	key     string
	cost    int64
}

// Request asks for n, at least 1, of key's limit, once it is passed to [AllowAll] or [AllowAllTx]. It does nothing by itself.
func (l *Limiter) Request(key string, n int64) Request { return Request{limiter: l, key: key, cost: n} }

// Results are the decision over several limits. The zero Results deny.
type Results struct {
	// Allowed tells whether all requests were allowed, and their costs taken. If not, nothing was taken from any.
	Allowed bool
	// RetryAfter is 0 if they were allowed; else the time, from the decision, after which all of them fit if nobody else takes
	// anything: the longest of those that refused.
	RetryAfter time.Duration
	// Each tells about each request, in their order. If nothing was taken, Allowed tells whether this limit had room, so those
	// where it is false have refused.
	Each []Result
}

// AllowAll takes from several limits, or from none of them: one for the address, say, one for the user and one for all together. The
// limiters may differ in everything but the database and the schema. It is one round trip and one transaction, in which rows are locked in one order for
// all callers, so that two of them never wait for each other. Concurrent calls coalesce, as those of one limiter do; the first request's
// limiter counts their statements, and its Config says Timeout and MaxBatch.
//
// Every call asks the database: denials are not remembered in the process. A limit that everybody shares is one row, which one
// statement at a time can take from. Rows are locked by the length of their keys, the longest first, because a key that everybody
// shares tends to be short ("all"): the later it is locked, the less the others wait.
//
// [Config].OnFailure does not answer for it: an outage is an error, but one that comes at once while the first limiter's breaker is open.
//
// Errors: a [*RequestError] for a request that cannot be asked, and nothing was taken; the context's error, if that ends first (the requests
// may still count); else a [*StoreError].
func AllowAll(ctx context.Context, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer endedAll(time.Now(), requests, &results, &err)
	}
	s, err := newSet(requests, false)
	if err != nil {
		return Results{}, err
	}
	l := requests[0].limiter
	if err := ctx.Err(); err != nil {
		return Results{}, waitError(err)
	}
	pass, probe := l.breaker.pass()
	if !pass {
		return Results{}, errNotTried
	}
	if !l.shared {
		err := l.takeTurn(probe, func() (err error) {
			results, err = l.allowSet(ctx, l.db, s, l.settings)
			return err
		})
		return results, err
	}
	if _, err := l.enqueue(ctx, "", 1, nil, s, probe); err != nil {
		return Results{}, err
	}
	return s.results, nil
}

// AllowAllTx is AllowAll within the caller's transaction; see [Limiter.AllowTx]. It locks several rows until tx ends: if a transaction
// calls it, or AllowTx, more than once, another one that does so in another order may wait for it while it waits for that one,
// and Postgres ends one of the two with SQLSTATE 40P01. Ask once.
func AllowAllTx(ctx context.Context, tx pgx.Tx, requests ...Request) (results Results, err error) {
	if observed(requests) {
		defer endedAll(time.Now(), requests, &results, &err)
	}
	s, err := newSet(requests, true)
	if err != nil {
		return Results{}, err
	}
	return requests[0].limiter.allowSet(ctx, tx, s, settings{})
}

// set is what AllowAll asks.
type set struct {
	parts   []part
	firsts  []int      // the first part of each request: a limiter of several policies has several
	by      []*Limiter // of each request
	results Results
}

// part is one row that a request takes from.
type part struct {
	policy Policy
	of     *core
	name   string
	key    string
	cost   int64
}

// newSet checks the requests. In a transaction of the caller's it does not matter what the limiters' own databases are.
func newSet(requests []Request, inTx bool) (*set, error) {
	if len(requests) == 0 || len(requests) > maxRequests {
		return nil, &RequestError{Err: fmt.Errorf("there are %d requests; pass 1 to %d", len(requests), maxRequests)}
	}
	s := &set{parts: make([]part, 0, len(requests)), firsts: make([]int, 0, len(requests))}
	for i, r := range requests {
		if r.limiter == nil {
			return nil, &RequestError{Index: i, Err: errNoLimiter}
		}
		err := r.limiter.validate(r.key, max(r.cost, 1))
		if err == nil && r.cost < 1 {
			err = &CostError{Cost: r.cost, Limit: r.limiter.policy.limit(), Least: 1}
		}
		first := requests[0].limiter
		if err == nil && (r.limiter.config.Schema != first.config.Schema || !inTx && r.limiter.db != first.db) {
			err = errOtherDatabase
		}
		if err != nil {
			return nil, &RequestError{Index: i, Err: err}
		}
		s.firsts, s.by = append(s.firsts, len(s.parts)), append(s.by, r.limiter)
		s.parts = r.limiter.appendParts(s.parts, r.key, r.cost)
		for _, p := range s.parts[s.firsts[i]:] {
			for _, other := range s.parts[:s.firsts[i]] {
				if p.key == other.key && p.name == other.name && p.of.config.Durable == other.of.config.Durable {
					return nil, &RequestError{Index: i, Err: errSameKey}
				}
			}
		}
	}
	return s, nil
}

func (l *Limiter) appendParts(parts []part, key string, cost int64) []part {
	several, ok := l.policy.(all)
	if !ok {
		return append(parts, part{l.policy, l.core, l.config.Name, key, cost})
	}
	for i, policy := range several.policies() {
		parts = append(parts, part{policy, l.core, partName(l.config.Name, i), key, cost})
	}
	return parts
}

// partName is the name under which the row of the i-th policy of All is stored, from 0.
func partName(name string, i int) string {
	if i == 0 {
		return name
	}
	return fmt.Sprintf("%s/%d", name, i+1)
}

// allowSet decides on one connection, like allowOne.
func (l *Limiter) allowSet(ctx context.Context, db DBTX, s *set, settings settings) (Results, error) {
	elements := []element{{cost: 1, count: 1, set: s}}
	if err := l.decideWithin(ctx, db, elements, settings); errors.Is(err, errRefused) {
		return Results{}, s.refused()
	} else if err != nil {
		return Results{}, err
	}
	return elements[0].results(1), nil
}

// lockOrder is the order in which rate_limit_all locks parts. It need not be told, but finds the rows of a request that is alone faster.
func lockOrder(parts []part) []int {
	order := make([]int, len(parts))
	for i := range order {
		order[i] = i
	}
	table := func(p part) int {
		if p.of.config.Durable {
			return 1
		}
		return 0
	}
	slices.SortFunc(order, func(i, j int) int {
		a, b := parts[i], parts[j]
		return cmp.Or(table(a)-table(b), len(b.key)-len(a.key), strings.Compare(a.key, b.key), strings.Compare(a.name, b.name))
	})
	return order
}

// decideSets is decide for elements of several parts: those of AllowAll, or of a policy that is All.
func (l *Limiter) decideSets(ctx context.Context, db DBTX, elements []element, settings settings) error {
	n := 0
	for i := range elements {
		e := &elements[i]
		if e.set == nil {
			e.set = &set{parts: l.appendParts(nil, e.key, e.cost)}
		}
		e.decisions, e.held = make([]decision, len(e.set.parts)), false
		for j := range e.decisions {
			e.decisions[j].granted = passedOver // unless a row comes back
		}
		n += len(e.set.parts)
	}
	owners, names, keys := make([]int32, 0, n), make([]string, 0, n), make([]string, 0, n)
	durables, algorithms := make([]bool, 0, n), make([]int16, 0, n)
	limits, spans, refills := make([]int64, 0, n), make([]int64, 0, n), make([]int64, 0, n)
	costs, counts := make([]int64, 0, n), make([]int64, 0, n)
	of := make([]*decision, 0, n)
	var refunds refunds
	durable, synchronous := false, false
	order := lockOrder(elements[0].set.parts)
	for i := range elements {
		for j := range elements[i].set.parts {
			if len(elements) == 1 {
				j = order[j]
			}
			p := elements[i].set.parts[j]
			numbers := columnsOf(p.policy)
			owners, names, keys = append(owners, int32(i)), append(names, p.name), append(keys, p.key)
			durables, algorithms = append(durables, p.of.config.Durable), append(algorithms, numbers.algorithm)
			limits, spans, refills = append(limits, numbers.limit), append(spans, numbers.span), append(refills, numbers.refill)
			costs, counts = append(costs, p.cost), append(counts, elements[i].count)
			if elements[i].refund != nil {
				refunds.add(len(of), n, elements[i].refund[j])
			}
			of = append(of, &elements[i].decisions[j])
			durable = durable || p.of.config.Durable
			synchronous = synchronous || p.of.config.SynchronousCommit
		}
	}
	if settings.own() && durable {
		settings.synchronousCommit = &synchronous
	}
	args := []any{owners, names, keys, durables, algorithms, limits, spans, refills, costs, counts,
		settings.lockTimeout, settings.synchronousCommit, l.now(), refunds.since, refunds.in, refunds.at, refunds.spent, settings.skipHeld}
	err := queryDecisions(ctx, db, settings.own(), qualify(allStatement, l.config.Schema), args, func(ord int64, d decision) {
		*of[ord-1] = d
	})
	for i := range elements {
		elements[i].held = err == nil && elements[i].decisions[0].granted < 0
	}
	return err
}

// What granted is of a part that is not decided: its row is held, or that of another part of the request is.
const (
	passedOver = -2
	undecided  = -1
)

// columns are the numbers of a policy as rate_limit_all takes them.
type columns struct {
	algorithm           int16
	limit, span, refill int64
}

func columnsOf(p Policy) columns {
	switch p := p.(type) {
	case FixedWindow:
		return columns{1, p.Limit, micros(p.Window), 0}
	case SlidingWindow:
		return columns{2, p.Limit, micros(p.Window), 0}
	case TokenBucket:
		return columns{3, p.Capacity, micros(p.Every), p.Refill}
	case SlidingLog:
		return columns{4, p.Limit, micros(p.Window), 0}
	}
	return columns{} // which the function refuses
}

// results is what the i-th request of an element, from 1, is told.
func (e *element) results(i int64) Results {
	r := Results{Allowed: i <= e.decisions[0].granted, Each: make([]Result, len(e.set.firsts))}
	for request, first := range e.set.firsts {
		last := len(e.set.parts)
		if request+1 < len(e.set.firsts) {
			last = e.set.firsts[request+1]
		}
		r.Each[request] = e.combined(first, last, i)
		r.Each[request].receipt = e.receipt(e.set.by[request], first, last, i)
		r.RetryAfter = max(r.RetryAfter, r.Each[request].RetryAfter)
	}
	return r
}

// combined is what the i-th request of an element is told of several of its parts.
func (e *element) combined(first, last int, i int64) Result {
	var r Result
	for j := first; j < last; j++ {
		one := told(e.set.parts[j].policy, &e.decisions[j], e.set.parts[j].cost, i)
		if j == first {
			r = one
			continue
		}
		if one.Remaining < r.Remaining {
			r.Limit, r.Remaining = one.Limit, one.Remaining
		}
		r.Allowed = r.Allowed && one.Allowed
		r.RetryAfter = max(r.RetryAfter, one.RetryAfter)
		r.ResetAfter = max(r.ResetAfter, one.ResetAfter)
	}
	return r
}

// receipt is that of what a limiter has taken for the i-th request of an element, or nil.
func (e *element) receipt(by *Limiter, first, last int, i int64) *receipt {
	p := e.set.parts[first]
	if p.cost < 1 || i > e.decisions[first].granted {
		return nil
	}
	r := newReceipt(by, p.key, p.cost, last-first)
	for j := range r.parts {
		r.parts[j] = e.decisions[first+j].takenBy(e.set.parts[first+j].policy, p.cost, i)
	}
	return r
}

// RequestError says which request of [AllowAll] cannot be asked, and why; nothing was taken. It wraps a [*KeyError] or a
// [*CostError] if the key or the cost is wrong.
type RequestError struct {
	Index int // of the request, from 0
	Err   error
}

func (e *RequestError) Error() string {
	return fmt.Sprintf("ratelimit: request %d of AllowAll: %s", e.Index, strings.TrimPrefix(e.Err.Error(), "ratelimit: "))
}

// Unwrap returns what is wrong.
func (e *RequestError) Unwrap() error { return e.Err }

var (
	errNoLimiter     = errors.New("it has no limiter; make it with Limiter.Request")
	errSameKey       = errors.New("it is for the same limiter and key as one before it; ask once, for the sum of the costs")
	errOtherDatabase = errors.New("its limiter has another database or schema than that of the first request, and one transaction cannot span both")
)
