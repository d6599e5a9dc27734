package ratelimit

import (
	"context"
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/policytable"
	"github.com/pgratelimit/ratelimit/internal/waitline"
)

// Wait takes 1 from key's limit as soon as 1 fits, and then returns. It is for work that can be done later. In this
// process, callers that wait for a key are served in order, so a large cost delays smaller costs behind it. Calls of
// Allow and other processes may be served earlier. Each time there is room, two or three statements serve all callers
// that fit. A random time of up to 2 %, and at most 100 ms, is added to the wait, so that processes take turns.
//
// If ctx's deadline is before the retry time, Wait takes nothing, and returns a [*WaitError] at once. A Reset by this
// limiter ends the wait. A Reset by another limiter is noticed at the retry time. If the database cannot decide, all
// callers that wait for the key get the error, or OnFailure answers one after another until it denies one. Errors:
// those of Allow, and a [*WaitError].
func (l *Limiter) Wait(ctx context.Context, key string) (Result, error) {
	return l.WaitN(ctx, key, 1)
}

// WaitN is Wait for n. WaitN with n = 0 waits until 1 would fit, and takes nothing. Callers that one statement allows
// get the same ResetAfter. Errors: those of Wait, and a [*CostError] for n below 0 or above the limit.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) (Result, error) {
	if err := checkKey(key); err != nil {
		return Result{}, err
	}
	policy, row, err := l.inForce(ctx, key)
	if err != nil {
		if err := checkCost(n, policy); err != nil {
			return Result{}, err
		}
		return l.onError(err, policy, key, n)
	}
	if err := checkCost(n, policy); err != nil && (row == nil || n < 0) {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, gaveUp(err)
	}
	result, err := l.waiting.Wait(ctx, key, policy, n, func() waitline.Source[Result] {
		return waitline.Source[Result]{
			Policy: policy,
			Ask: func(n int64) (result Result, err error) {
				err = l.allow(context.Background(), key, n, false, &result)
				return result, err
			},
			Read:    readingOf,
			Answer:  func(n int64) Result { return l.answerAndObserve(policy, key, n) },
			Share:   partOf,
			Owned:   !l.client.engine.Pooled(),
			Stale:   l.staleness(key, policy, row),
			TooMuch: ErrCostExceedsLimit,
		}
	}, gaveUp)
	if late, ok := errors.AsType[*waitline.TooLate](err); ok {
		err = &WaitError{RetryAfter: late.RetryAfter, Deadline: late.Deadline}
	}
	return result, err
}

// readingOf returns the parts of a result that package waitline needs.
func readingOf(r *Result) waitline.Reading {
	return waitline.Reading{
		Allowed: r.Allowed, Away: r.Source.isAway(), Fixed: r.Source == SourcePolicy,
		Remaining: r.Remaining, RetryAfter: r.RetryAfter,
	}
}

// partOf returns one caller's part of a result for several callers: see Share of waitline.Source.
func partOf(all *Result, from, to, behind int64) Result {
	own := *all
	own.Remaining += behind
	own.taken = all.taken.Portion(from, to)
	return own
}

// staleness returns a function that tells whether the policy or row in force for key has changed since its last call.
// The first call compares with the arguments policy and row. staleness returns nil if l has no Policies.
func (l *Limiter) staleness(key string, policy *model.Policy, row *policytable.Row) func() bool {
	if l.view == nil {
		return nil
	}
	return func() bool {
		now, nowRow, err := l.inForce(context.Background(), key)
		if err != nil || nowRow == row && now.Is(policy) {
			return false
		}
		policy, row = now, nowRow
		return true
	}
}

// answerAndObserve returns OnFailure's answer to a caller in line, and tells the observer.
func (l *Limiter) answerAndObserve(policy *model.Policy, key string, n int64) (result Result) {
	if l.client.observer != nil {
		var err error
		defer l.observe(time.Now(), key, n, &result, &err)
	}
	return l.answerOnFailure(policy, key, n)
}
