package ratelimit

import (
	"context"
	"time"
)

// Wait takes 1 from key's limit as soon as that fits, and then returns. It is for work that can be done later,
// such as calls of somebody else's API. Those who wait in this process for one key under one policy are served in
// order, so a large cost holds up smaller ones behind it. Other processes and Allow may be served before them. Two
// or three statements serve each time at which there is room, however many wait, with none in between. Wait adds a
// random time to the retry time, up to a 50th of it and 100 ms, so that processes take turns.
//
// If ctx's deadline is before the retry time, Wait takes nothing, and returns a [*WaitError] as soon as it knows,
// usually at once. If ctx ends while the request is being asked, it may still count. A Reset by this limiter ends
// the wait. One made elsewhere, or a transaction that gives back, is noticed at the retry time. Errors: as Allow,
// and a [*WaitError]. All in the line get the same error, or OnFailure's answer until that is a denial, so that
// nobody waits for a second Timeout.
func (l *Limiter) Wait(ctx context.Context, key string) (Result, error) {
	return l.WaitN(ctx, key, 1)
}

// WaitN is Wait for n. With n = 0 it waits until 1 would fit, and takes nothing. All that are allowed together get
// the ResetAfter of the last. Errors: as Wait, and a [*CostError] for n below 0 or above the limit.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) (Result, error) {
	if err := checkKey(key); err != nil {
		return Result{}, err
	}
	in, row, err := l.inForce(ctx, key)
	if err != nil {
		return l.whileUnknown(err, key, n)
	}
	if err := in.checkCost(n); err != nil && (row == nil || n < 0) {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, gaveUp(err)
	}
	w := &waiter{cost: n, told: make(chan struct{})}
	w.deadline, _ = ctx.Deadline()
	line := w.join(l.waiting, key, in.policy, func() *waitLine {
		return &waitLine{
			limit:  in.limit,
			ask:    func(n int64) (Result, error) { return l.allow(context.Background(), key, n, false) },
			answer: func(n int64) Result { return in.answerAndObserve(key, n) },
			owned:  !l.client.database.pooled(),
			stale:  l.staleness(key, in.policy, row),
		}
	})
	select {
	case <-w.told:
	case <-ctx.Done():
		line.leave(w, gaveUp(ctx.Err()))
	}
	return w.result, w.err
}

// staleness tells whether what is in force for a key has changed since it was last asked, or since it was this policy
// or row. It is nil if that cannot be.
func (l *Limiter) staleness(key string, policy Policy, row *rule) func() bool {
	if l.space.policies == nil {
		return nil
	}
	return func() bool {
		in, now, err := l.inForce(context.Background(), key)
		if err != nil || now == row && in.policy == policy {
			return false
		}
		policy, row = in.policy, now
		return true
	}
}

// answerAndObserve is OnFailure's answer to a caller who has waited behind one that the database did not
// decide.
func (l *Limiter) answerAndObserve(key string, n int64) (result Result) {
	if l.client.config.Observer != nil {
		var err error
		defer l.observe(time.Now(), n, &result, &err)
	}
	return l.answerOnFailure(key, n)
}
