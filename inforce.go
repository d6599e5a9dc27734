package ratelimit

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// inForce returns the limiter of the policy that holds for a key now: l itself, or one of a row of rate_limit_policy.
// If a row allows or denies everything, it returns that row too, whose answer is the decision.
func (l *Limiter) inForce(ctx context.Context, key string) (*Limiter, *rule, error) {
	p := l.space.policies
	if p == nil {
		return l, nil, nil
	}
	if err := p.await(ctx, l.client.config.Timeout); err != nil {
		return l, nil, err
	}
	if l.space.page.Empty() {
		return l, nil, nil
	}
	r := l.rule(key)
	switch {
	case r == nil:
		return l, nil, nil
	case r.Value.mode != modeEnforce:
		return l, r, nil
	}
	return r.Value.under(l), nil, nil
}

// knownInForce is inForce for what is given to a key: as far as this process knows, and l if a row allows or denies
// everything.
func (l *Limiter) knownInForce(key string) *Limiter {
	p := l.space.policies
	if p == nil || p.clock.Load() == nil {
		return l
	}
	if r := l.rule(key); r != nil && r.Value.mode == modeEnforce {
		return r.Value.under(l)
	}
	return l
}

// rule returns the row that holds for a key, or nil if the policy in the code does.
func (l *Limiter) rule(key string) *rule {
	return l.space.page.Find(key, func(r *rule) bool { return l.space.policies.counts(r) && l.canObey(r) })
}

// canObey tells whether the limiter's keys can be decided by a row, and logs once if not.
func (l *Limiter) canObey(r *rule) bool {
	if r.Value.mode != modeEnforce {
		return true
	}
	with := r.Value.under(l)
	if with.sameKind(l) == nil {
		return true
	}
	p := l.space.policies
	if policy, told := p.told.Swap(r.ID, r.Value.policy); !told || policy != r.Value.policy {
		p.log(context.Background(), slog.LevelWarn, "ratelimit: a policy is of another kind than the limiter's, and "+
			"is passed over", slog.Int64("id", r.ID), slog.String("limiter", l.space.name),
			slog.Any("error", otherKind(with.models, l.models)))
	}
	return false
}

// otherKind says what differs between the models of a row and those of the code.
func otherKind(row, code []model.Rules) error {
	for i := range min(len(row), len(code)) {
		if row[i].Numbers().Algorithm != code[i].Numbers().Algorithm {
			return fmt.Errorf("the row's policy is a %s, and Config.Policy is a %s",
				typeName(row[i]), typeName(code[i]))
		}
	}
	return nil
}

// under returns l with the row's policy.
func (v *ruling) under(l *Limiter) *Limiter {
	with := v.limiter.Load()
	if with == nil || with.space != l.space {
		with = l.under(v.policy)
		v.limiter.Store(with)
	}
	return with
}

// decision is what a row that allows or denies everything says to a request for n.
func (l *Limiter) decision(r *rule, n int64) (Result, error) {
	if n < 0 {
		return Result{}, &CostError{Cost: n, Limit: l.limit}
	}
	now := l.space.policies.now()
	result := Result{Source: SourcePolicy, Limit: l.limit, DecidedAt: time.UnixMicro(now)}
	if r.Value.mode == modeOff {
		result.Allowed, result.Remaining = true, l.limit
		return result, nil
	}
	result.RetryAfter = model.Duration(min(max(r.Value.until-now, 1), model.MaxSpan))
	result.ResetAfter = result.RetryAfter
	return result, nil
}

// whileUnknown is what a call ends with while this process does not know yet which policy is in force.
func (l *Limiter) whileUnknown(err error, key string, n int64) (Result, error) {
	if err := l.checkCost(n); err != nil {
		return Result{}, err
	}
	if isAway(err) && !l.space.returnsErrors {
		return l.answerOnFailure(key, n), nil
	}
	return Result{}, err
}

// requestInForce returns a request for a key under the policy in force. If a row allows or denies everything,
// there is no request, and answer is the decision.
func (l *Limiter) requestInForce(ctx context.Context, key string, n int64) (r *request, answer Result, err error) {
	if err := checkKey(key); err != nil {
		return nil, Result{}, err
	}
	in, row, err := l.inForce(ctx, key)
	switch {
	case err != nil:
		return nil, Result{}, err
	case row != nil:
		answer, err = l.decision(row, n)
		return nil, answer, err
	}
	if err := in.checkCost(n); err != nil {
		return nil, Result{}, err
	}
	return in.newRequest(key, n), Result{}, nil
}
