package ratelimit

import (
	"context"
	"time"
)

// Allow takes 1 from key's limit if that fits, and tells whether it did. It uses a connection of the client's pool.
// A caller that holds one already, as in a transaction, asks [Limiter.WithTx], or makes the client with [OwnPool].
// Otherwise enough such callers wait for each other ([ErrPoolExhausted]). Errors: a [*KeyError]; the context's error,
// if that ends first (the request may still count); else a [*StoreError].
func (l *Limiter) Allow(ctx context.Context, key string) (Result, error) {
	return l.AllowN(ctx, key, 1)
}

// AllowN takes n from key's limit if that fits, or nothing; with n = 0 it is Peek. Errors: as Allow, and a
// [*CostError] for n below 0 or above the policy's limit.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Result, error) {
	result, err := l.allow(ctx, key, n, true)
	l.strike(key, n, &result, err)
	return result, err
}

// allow is AllowN without what counts denials for bans. If shadows is false, none is decided beside it.
func (l *Limiter) allow(ctx context.Context, key string, n int64, shadows bool) (result Result, err error) {
	if l.client.config.Observer != nil {
		defer l.observe(time.Now(), n, &result, &err)
	}
	if err := checkKey(key); err != nil {
		return Result{}, err
	}
	in, row, err := l.inForce(ctx, key)
	switch {
	case err != nil:
		return l.whileUnknown(err, key, n)
	case row != nil:
		return l.decision(row, n)
	}
	if err := in.checkCost(n); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, gaveUp(err)
	}
	var beside *rule
	if shadows {
		beside = l.shadowOf(key)
	}
	leases := l.client.batcher.leases
	leased := in.space.lease != nil && beside == nil && n > 0
	if leased {
		if result, ok := leases.spend(in.space, in.policy, key, n); ok {
			return result, nil
		}
		if back := leases.release(in.space, key); back != nil {
			go l.client.startGiving(back)()
		}
	}
	if in.remembers() && n > 0 {
		if result, ok := in.remembered(beside, key, n); ok {
			l.count(beside, key, &result)
			return result, nil
		}
	}
	r := in.newRequest(key, n)
	if beside != nil {
		r.shadow = l.newShadow(beside, key, n)
	}
	if leased {
		r.ahead = leases.ahead(in, key, n)
	}
	if err := l.client.queues.submit(ctx, r); err != nil {
		if isAway(err) && !l.space.returnsErrors {
			return in.answerOnFailure(key, n), nil
		}
		return Result{}, err
	}
	result = r.result()
	result.Shadow = r.shadow.result()
	l.client.requests.put(r)
	switch {
	case n > 0:
		l.count(beside, key, &result)
	case in.space.lease != nil: // a look
		result.add(leases.held(in.space, in.policy, key))
	}
	return result, nil
}

// remembered returns a denial that the database would repeat, as would the row that is decided beside it, if any.
func (l *Limiter) remembered(beside *rule, key string, n int64) (Result, bool) {
	denials := l.client.batcher.denials
	result, ok := denials.lookup(l.space, l.models[0], key, n)
	if !ok || beside == nil {
		return result, ok
	}
	models := beside.Value.policy.rules()
	if len(models) > 1 || n > models[0].Numbers().Limit {
		return Result{}, false
	}
	shadow, ok := denials.lookup(l.space.shadow, models[0], key, n)
	if !ok {
		return Result{}, false
	}
	result.Shadow = &shadow
	return result, true
}

// remembers tells whether the limiter's denials are remembered.
func (l *Limiter) remembers() bool {
	return l.space.remember && len(l.models) == 1 && l.client.batcher.denials != nil
}

// observe tells the observer about a call that ends here.
func (l *Limiter) observe(began time.Time, n int64, result *Result, err *error) {
	if tell := l.client.config.Observer.Decision; tell != nil {
		tell(DecisionEvent{Limiter: l.space.name, Cost: n, Result: *result, Err: *err, Latency: time.Since(began)})
	}
}
