package ratelimit

import (
	"container/list"
	"context"
	"math/rand/v2"
	"slices"
	"time"
)

// Wait takes 1 from key's limit as soon as that fits, and returns then: for work that can be done later, such as calls of somebody
// else's API.
//
// Those who wait in this process for one key, under one policy, are served in the order in which they came, so a large cost at the
// head of the line keeps smaller ones behind it waiting. Other processes and Allow do not stand in that line, and may be served
// before it. Only the head asks the database, and sleeps until the retry time that it is told; what remains when it is allowed goes
// to those behind it in one more statement. So the statements are two or three for each time at which something is to be had,
// however many wait, and none in between. While nobody waits, nothing runs.
//
// To the retry time a random 50th of it is added, at most 100 ms, so that processes that were told the same time do not all come at
// once, and each of them is the first now and then. That costs at most 2 % of a rate that nothing accumulates for (a bucket of
// capacity 1, or windows that begin with the first request), and nothing of a larger bucket's.
//
// If ctx has a deadline before the retry time, Wait returns a [*WaitError] as soon as that is known, usually at once, and takes
// nothing. When ctx ends during the wait, the caller leaves the line; if the request was being asked then, it may still count, as with
// Allow. A Reset by this limiter ends the sleep. One that is made elsewhere, or a transaction that gives back, is not noticed before
// the retry time.
//
// Errors: as Allow, which has asked, and a [*WaitError]. An error is told to all who are in the line then, and so is what OnFailure answers,
// until that is a denial: nobody waits for a second Timeout.
func (l *Limiter) Wait(ctx context.Context, key string) (Result, error) {
	return l.WaitN(ctx, key, 1)
}

// WaitN takes n from key's limit as soon as that fits; see Wait. With n = 0 it waits until 1 would fit, and takes nothing. Of those that
// are allowed together, all are told the ResetAfter of the last. Errors: as Wait, and a [*CostError] for n below 0 or above the
// policy's limit.
func (l *Limiter) WaitN(ctx context.Context, key string, n int64) (Result, error) {
	if err := l.validate(key, n); err != nil {
		return Result{}, err
	}
	if err := ctx.Err(); err != nil {
		return Result{}, waitError(err)
	}
	w := &waiter{cost: n, told: make(chan struct{})}
	w.deadline, _ = ctx.Deadline()
	in := l.join(key, w)
	select {
	case <-w.told:
	case <-ctx.Done():
		in.leave(w, waitError(ctx.Err()))
	}
	return w.result, w.err
}

// maxJitter is the most that is added to a retry time.
const maxJitter = 100 * time.Millisecond

// line is where those wait who ask for one key under one policy. The first of them is asked for by a goroutine, which the first to come
// starts, and which ends, and takes the line away, when nobody is left.
type line struct {
	l   *Limiter
	key string

	// Guarded by the limiter's linesMu.
	waiters list.List     // of *waiter
	retryAt time.Time     // the first one is denied until then; zero if that is not known
	asking  chan struct{} // closed when the request under way has been answered; nil if none is

	wake chan struct{} // ends the sleep
}

// waiter is somebody in a line.
type waiter struct {
	cost     int64
	deadline time.Time     // zero: none
	place    *list.Element // nil once he has been told, or has left
	told     chan struct{} // closed once result and err are set
	result   Result
	err      error
}

// join puts w at the end of the line for key, or tells him that his deadline comes before that of the first one's retry time.
func (l *Limiter) join(key string, w *waiter) *line {
	l.linesMu.Lock()
	defer l.linesMu.Unlock()
	for _, in := range l.lines[key] {
		if in.l.policy == l.policy {
			w.place = in.waiters.PushBack(w)
			if w.tooLate(in.retryAt) {
				in.refuse(w)
			}
			return in
		}
	}
	in := &line{l: l, key: key, wake: make(chan struct{}, 1)}
	w.place = in.waiters.PushBack(w)
	if l.lines == nil {
		l.lines = make(map[string][]*line)
	}
	l.lines[key] = append(l.lines[key], in)
	go in.serve()
	return in
}

// leave takes w, whose context has ended, out of the line, unless he has just been told.
func (in *line) leave(w *waiter, err error) {
	in.l.linesMu.Lock()
	var asking chan struct{}
	if w.place != nil {
		if !in.l.shared {
			asking = in.asking
		}
		first := in.waiters.Front() == w.place
		in.tell(w, Result{}, err)
		if next := in.first(); first && (next == nil || next.cost != w.cost) {
			in.wakeUp()
		}
	}
	in.l.linesMu.Unlock()
	if asking != nil {
		<-asking // or the caller would use his connection while the limiter does
	}
}

// serve serves the line until it is empty.
func (in *line) serve() {
	var group []*waiter
	var cost, remaining int64
	for {
		if group, cost = in.board(group[:0], remaining); cost < 0 {
			return
		}
		result, err := in.l.allow(context.Background(), in.key, cost)
		if pause := in.settle(group, cost, result, err); pause > 0 {
			timer := time.NewTimer(pause)
			select {
			case <-timer.C:
			case <-in.wake:
				timer.Stop()
			}
		}
		clear(group)
		remaining = 0
		if err == nil && (result.Source == SourceDatabase || result.Source == SourceCachedDenial) {
			remaining = min(result.Remaining, max(cost-1, 0))
			if result.Allowed {
				remaining = result.Remaining
			}
		}
	}
}

// board returns those who are asked for next, all together: the first, and as many behind him as fit into what remains; and the
// sum of their costs, or -1 if nobody is left: the line is gone then.
func (in *line) board(group []*waiter, remaining int64) ([]*waiter, int64) {
	in.l.linesMu.Lock()
	defer in.l.linesMu.Unlock()
	in.retryAt = time.Time{}
	remaining = min(remaining, in.l.policy.limit()) // which nobody may ask for more than
	var cost int64
	for e := in.waiters.Front(); e != nil; e = e.Next() {
		w := e.Value.(*waiter)
		if len(group) > 0 && (w.cost == 0 || w.cost > remaining-cost) {
			break
		}
		group = append(group, w)
		cost += w.cost
	}
	if len(group) > 0 {
		in.asking = make(chan struct{})
		return group, cost
	}
	in.l.lines[in.key] = slices.DeleteFunc(in.l.lines[in.key], func(other *line) bool { return other == in })
	if len(in.l.lines[in.key]) == 0 {
		delete(in.l.lines, in.key)
	}
	if len(in.l.lines) == 0 {
		in.l.lines = nil // or what a crowd needed would stay
	}
	return nil, -1
}

// settle tells the group what has been decided about all of it, and returns for how long there is nothing to ask.
func (in *line) settle(group []*waiter, cost int64, result Result, err error) (pause time.Duration) {
	in.l.linesMu.Lock()
	defer in.l.linesMu.Unlock()
	close(in.asking)
	in.asking = nil
	switch {
	case err != nil || result.Allowed:
		behind := cost // what those behind have taken
		for _, w := range group {
			behind -= w.cost
			if w.place != nil {
				own := result
				own.Remaining += behind
				own.receipt = result.receipt.share(cost-behind-w.cost, cost-behind)
				in.tell(w, own, err)
			}
		}
		if err != nil || result.Source != SourceDatabase {
			in.answerAll(err)
		}
		return 0
	case len(group) > 1:
		return 0 // somebody else has taken in between: ask for fewer
	}

	in.retryAt = time.Now().Add(result.RetryAfter)
	for e := in.waiters.Front(); e != nil; {
		w := e.Value.(*waiter)
		if w.cost < cost && e == in.waiters.Front() {
			break // fits earlier, perhaps, and nobody is before him any more
		}
		e = e.Next()
		if w.tooLate(in.retryAt) {
			in.refuse(w)
		}
	}
	first := in.first()
	if first == nil || first.cost != cost {
		return 0
	}
	jitter := min(result.RetryAfter/50, maxJitter)
	if !first.deadline.IsZero() {
		jitter = min(jitter, first.deadline.Sub(in.retryAt)/2)
	}
	return result.RetryAfter + rand.N(jitter+1)
}

// answerAll tells all who are in the line what the first of them were told by a database that is away: the error, or the limiter's own
// answer until that is a denial. If each of them asked, the last would wait for as many timeouts.
func (in *line) answerAll(err error) {
	for e := in.waiters.Front(); e != nil; e = in.waiters.Front() {
		w := e.Value.(*waiter)
		if err != nil {
			in.tell(w, Result{}, err)
			continue
		}
		began := time.Now()
		result := in.l.substitute(in.key, w.cost)
		if in.l.config.Observer != nil {
			in.l.ended(began, w.cost, &result, &err)
		}
		if !result.Allowed {
			return
		}
		in.tell(w, result, nil)
	}
}

// first is nil if nobody waits.
func (in *line) first() *waiter {
	if e := in.waiters.Front(); e != nil {
		return e.Value.(*waiter)
	}
	return nil
}

// tell ends the wait of somebody who is in the line.
func (in *line) tell(w *waiter, result Result, err error) {
	in.waiters.Remove(w.place)
	w.place, w.result, w.err = nil, result, err
	close(w.told)
}

// refuse tells w that his deadline comes before the retry time.
func (in *line) refuse(w *waiter) {
	in.tell(w, Result{}, &WaitError{RetryAfter: time.Until(in.retryAt), Deadline: w.deadline})
}

func (w *waiter) tooLate(retryAt time.Time) bool {
	return !w.deadline.IsZero() && w.deadline.Before(retryAt)
}

// wakeUp has the first one asked for before the retry time.
func (in *line) wakeUp() {
	in.retryAt = time.Time{}
	select {
	case in.wake <- struct{}{}:
	default:
	}
}

// wakeUp has those who wait for key ask again.
func (c *core) wakeUp(key string) {
	c.linesMu.Lock()
	defer c.linesMu.Unlock()
	for _, in := range c.lines[key] {
		in.wakeUp()
	}
}
