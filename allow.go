package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/policytable"
)

// Allow takes 1 from key's limit if 1 fits, and tells whether it did. It uses a connection of the client's pool. A
// caller that already has a connection needs [Limiter.WithTx] or [OwnPool], or risks [ErrPoolExhausted].
//
// Errors: a [*KeyError]; the context's error, if the context ends first (the request may still count); a [*StoreError].
func (l *Limiter) Allow(ctx context.Context, key string) (Result, error) {
	return l.AllowN(ctx, key, 1)
}

// AllowN takes n from key's limit if all of n fits. AllowN with n = 0 is Peek. Errors: those of Allow, and a
// [*CostError] for n below 0 or above the limit.
func (l *Limiter) AllowN(ctx context.Context, key string, n int64) (Result, error) {
	var result Result
	err := l.allow(ctx, key, n, true, &result)
	l.countDenial(key, n, &result, err)
	return result, err
}

// Peek takes nothing. Allowed tells whether a cost of 1 would fit. Peek waits for no lock, and does not see uncommitted
// takes. For a [Concurrency], Remaining is the number of free slots, even if callers wait in line for them. Errors:
// those of Allow.
func (l *Limiter) Peek(ctx context.Context, key string) (Result, error) {
	var result Result
	err := l.allow(ctx, key, 0, true, &result)
	return result, err
}

// allow is AllowN without counting denials for bans. The argument shadows tells whether to decide a row of mode shadow
// too.
func (l *Limiter) allow(ctx context.Context, key string, n int64, shadows bool, result *Result) (err error) {
	if l.client.observer != nil {
		defer l.observe(time.Now(), key, n, result, &err)
	}
	if err := checkKey(key); err != nil {
		return err
	}
	policy, row, err := l.inForce(ctx, key)
	switch {
	case err != nil:
		if err := checkCost(n, policy); err != nil {
			return err
		}
		*result, err = l.onError(err, policy, key, n)
		return err
	case row != nil:
		*result, err = l.byRow(row, n)
		return err
	}
	if err := checkCost(n, policy); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	ask := l.question(policy, key, n)
	var beside *policytable.Row
	if shadows {
		if beside = l.view.Shadow(l.model, key); beside != nil {
			ask.Beside = &engine.Beside{Space: l.beside, Policy: beside.Value.Policy}
		}
	}
	var o engine.Outcome
	if err := l.client.engine.Allow(ctx, &ask, &o); err != nil {
		*result, err = l.onError(publicError(err), policy, key, n)
		return err
	}
	if o.Beside != nil && n > 0 {
		l.view.Table.Count(beside, key, !o.Allowed, !o.Beside.Allowed)
	}
	result.set(&o)
	return nil
}

// inForce returns the policy that is in force for a key: the limiter's policy, or the policy of a row of
// rate_limit_policy. It also returns the row if the row allows or denies everything.
func (l *Limiter) inForce(ctx context.Context, key string) (policy *model.Policy, row *policytable.Row, err error) {
	policy, row, err = l.view.InForce(ctx, l.client.timeout, l.model, key)
	switch {
	case err == nil:
	case ctx.Err() != nil && errors.Is(err, ctx.Err()):
		err = gaveUp(err)
	default:
		err = publicError(err)
	}
	return policy, row, err
}

// byRow returns the answer of a row that allows or denies everything.
func (l *Limiter) byRow(row *policytable.Row, n int64) (Result, error) {
	if n < 0 {
		return Result{}, &CostError{Cost: n, Limit: l.model.Limit}
	}
	now := l.view.Now()
	result := Result{Source: SourcePolicy, Limit: l.model.Limit, DecidedAt: now}
	if row.Value.Mode == policytable.ModeOff {
		result.Allowed, result.Remaining = true, l.model.Limit
		return result, nil
	}
	result.RetryAfter = model.Duration(min(max(row.Value.Until-now.UnixMicro(), 1), model.MaxSpan))
	result.ResetAfter = result.RetryAfter
	return result, nil
}

// onError returns OnFailure's answer to a call that the database did not decide. If OnFailure has no answer, onError
// returns err.
func (l *Limiter) onError(err error, policy *model.Policy, key string, n int64) (Result, error) {
	if l.onFailure.answer > returnError && pg.IsAway(err) {
		return l.answerOnFailure(policy, key, n), nil
	}
	return Result{}, err
}

// countDenial counts a denial for the limiter's Ban. Only the database's denials count, whether fresh or remembered.
func (l *Limiter) countDenial(key string, n int64, result *Result, err error) {
	if l.ban != nil && err == nil && !result.Allowed && n > 0 && result.Source <= SourceCachedDenial {
		l.view.Strike(key)
	}
}

// observe tells the observer about a call that has just ended.
func (l *Limiter) observe(began time.Time, key string, n int64, result *Result, err *error) {
	if tell := l.client.observer.Decision; tell != nil {
		tell(DecisionEvent{Limiter: l.space.Name, Cost: n, Result: *result, Err: *err, Latency: time.Since(began)})
	}
	if tell := l.client.observer.DeniedKey; tell != nil && *err == nil && !result.Allowed && n > 0 {
		tell(l.space.Name, key)
	}
}

// checkCost returns an error for a cost that is negative or above the limit, or that cannot be taken.
func checkCost(n int64, policy *model.Policy) error {
	if n < 0 || n > policy.Limit {
		return &CostError{Cost: n, Limit: policy.Limit}
	}
	if n > 0 {
		return checkTakes(policy)
	}
	return nil
}

const (
	maxNameLen = 128 // bytes
	// maxKeyLen keeps every index entry within a page.
	maxKeyLen = 512 // bytes
)

func checkKey(key string) error {
	switch {
	case key == "":
		return &KeyError{Reason: "is empty, and needs at least 1 byte"}
	case len(key) > maxKeyLen:
		return &KeyError{Reason: fmt.Sprintf(
			"has %d bytes, and may have at most %d; hash long keys", len(key), maxKeyLen)}
	case strings.IndexByte(key, 0) >= 0:
		return &KeyError{Reason: "contains a NUL byte, which Postgres cannot store"}
	case !utf8.ValidString(key):
		return &KeyError{Reason: "is not valid UTF-8; encode binary keys, for example in base64"}
	}
	return nil
}
