package ratelimit

import (
	"container/list"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"
)

// maxJitter is the most that is added to a retry time. The jitter is random, and at most a 50th of that time.
// Without it, processes that were told the same time would all come at once, and the same one could always be
// first. It costs at most 2 % of a rate that nothing accumulates for (a bucket of capacity 1, or windows that
// begin with the first request), and nothing of a larger bucket's.
const maxJitter = 100 * time.Millisecond

// banPause is how often those who wait look whether another policy has come into force, or a ban has been lifted. To
// look costs no statement.
const banPause = time.Second

// waitLines are where callers wait for keys. A limiter and those that its With has returned share them.
type waitLines struct {
	mu  sync.Mutex
	all map[string][]*waitLine // nil if nobody waits
}

// waitLine is where callers wait for one key under one policy, served in the order in which they came. The
// first to come starts a goroutine, which asks for the head of the line and sleeps until the retry time that it
// is told. When the head is allowed, what remains goes to those behind it in one more statement. When nobody is
// left, the goroutine ends and takes the line away.
type waitLine struct {
	lines  *waitLines
	key    string
	policy Policy
	limit  int64                         // the most that one call may ask for
	ask    func(n int64) (Result, error) // has the database decide, or OnFailure
	answer func(n int64) Result          // is OnFailure's answer
	stale  func() bool                   // another policy has come into force; nil if that cannot be
	owned  bool                          // the connection is the caller's, who must not go on while it is in use

	// Guarded by the mutex of lines.
	waiters list.List     // of *waiter
	retryAt time.Time     // the first one is denied until then; zero if that is not known
	asking  chan struct{} // closed when the request under way has been answered; nil if none is

	signal chan struct{} // ends the sleep
}

// waiter is a caller in a line.
type waiter struct {
	cost     int64
	deadline time.Time     // zero: none
	place    *list.Element // nil once it has been told, or has left
	told     chan struct{} // closed once result and err are set
	result   Result
	err      error
}

// join puts w at the end of the line for key. If w's deadline comes before the retry time of the first one, it
// tells w so instead. start makes the line if there is none.
func (w *waiter) join(lines *waitLines, key string, policy Policy, start func() *waitLine) *waitLine {
	lines.mu.Lock()
	defer lines.mu.Unlock()
	for _, in := range lines.all[key] {
		if in.policy == policy {
			w.place = in.waiters.PushBack(w)
			if w.tooLate(in.retryAt) {
				in.refuse(w)
			}
			return in
		}
	}
	in := start()
	in.lines, in.key, in.policy, in.signal = lines, key, policy, make(chan struct{}, 1)
	w.place = in.waiters.PushBack(w)
	if lines.all == nil {
		lines.all = make(map[string][]*waitLine)
	}
	lines.all[key] = append(lines.all[key], in)
	go in.serve()
	return in
}

// leave takes w out of the line, because its context has ended, unless w has just been told.
func (in *waitLine) leave(w *waiter, err error) {
	in.lines.mu.Lock()
	var asking chan struct{}
	if w.place != nil {
		if in.owned {
			asking = in.asking
		}
		first := in.waiters.Front() == w.place
		in.end(w, Result{}, err)
		if next := in.first(); first && (next == nil || next.cost != w.cost) {
			in.stir()
		}
	}
	in.lines.mu.Unlock()
	if asking != nil {
		<-asking // or the caller would use the connection while the limiter does
	}
}

// serve serves the line until it is empty.
func (in *waitLine) serve() {
	var group []*waiter
	var cost, remaining int64
	for {
		if group, cost = in.nextGroup(group[:0], remaining); cost < 0 {
			return
		}
		result, err := in.ask(cost)
		if errors.Is(err, ErrCostExceedsLimit) && len(group) > 1 {
			result, err = Result{}, nil // a row of rate_limit_policy has lowered the limit: ask for fewer
		}
		in.sleep(in.settle(group, cost, result, err))
		clear(group)
		remaining = 0
		if err == nil && !result.Source.isAway() && result.Source != SourcePolicy {
			remaining = min(result.Remaining, max(cost-1, 0))
			if result.Allowed {
				remaining = result.Remaining
			}
		}
	}
}

// sleep lasts until there may be room: for that long, or until something is given, or another policy is in force.
func (in *waitLine) sleep(pause time.Duration) {
	for end := time.Now().Add(pause); pause > 0; pause = time.Until(end) {
		if in.stale != nil {
			pause = min(pause, banPause)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-in.signal:
			timer.Stop()
			return
		}
		if in.stale != nil && in.stale() {
			return
		}
	}
}

// nextGroup returns those who are asked for next, all together, and the sum of their costs. They are the first
// one, and as many behind it as fit into what remains. If nobody is left, it removes the line and returns -1.
func (in *waitLine) nextGroup(group []*waiter, remaining int64) ([]*waiter, int64) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	in.retryAt = time.Time{}
	remaining = min(remaining, in.limit) // the most that may be asked for at once
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
	in.lines.all[in.key] = slices.DeleteFunc(in.lines.all[in.key], func(other *waitLine) bool { return other == in })
	if len(in.lines.all[in.key]) == 0 {
		delete(in.lines.all, in.key)
	}
	if len(in.lines.all) == 0 {
		in.lines.all = nil // or the memory that a crowd needed would stay
	}
	return nil, -1
}

// settle tells the group what was decided about all of it, and returns for how long there is nothing to ask.
func (in *waitLine) settle(group []*waiter, cost int64, result Result, err error) (pause time.Duration) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	close(in.asking)
	in.asking = nil
	switch {
	case err != nil || result.Allowed:
		behind, taken := cost, result.taken() // what those behind have taken
		for _, w := range group {
			behind -= w.cost
			if w.place != nil {
				own := result
				own.Remaining += behind
				own.receipt, own.first, own.units = taken.share(cost-behind-w.cost, cost-behind), 0, 0
				in.end(w, own, err)
			}
		}
		if errors.Is(err, ErrCostExceedsLimit) {
			return 0 // which is only this one's fault
		}
		if err != nil || result.Source.isAway() {
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
			break // it may fit earlier, and nobody is before it any more
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
	if result.Source == SourcePolicy {
		return min(result.RetryAfter, banPause)
	}
	jitter := min(result.RetryAfter/50, maxJitter)
	if !first.deadline.IsZero() {
		jitter = min(jitter, first.deadline.Sub(in.retryAt)/2)
	}
	return result.RetryAfter + rand.N(jitter+1)
}

// answerAll tells everybody in the line what the first one was told by a database that is away: the error, or
// the limiter's own answer until that is a denial. If each of them asked, the last would wait for as many
// timeouts.
func (in *waitLine) answerAll(err error) {
	for e := in.waiters.Front(); e != nil; e = in.waiters.Front() {
		w := e.Value.(*waiter)
		if err != nil {
			in.end(w, Result{}, err)
			continue
		}
		result := in.answer(w.cost)
		if !result.Allowed {
			return
		}
		in.end(w, result, nil)
	}
}

// first returns nil if nobody waits.
func (in *waitLine) first() *waiter {
	if e := in.waiters.Front(); e != nil {
		return e.Value.(*waiter)
	}
	return nil
}

// end ends the wait of a caller who is in the line.
func (in *waitLine) end(w *waiter, result Result, err error) {
	in.waiters.Remove(w.place)
	w.place, w.result, w.err = nil, result, err
	close(w.told)
}

// refuse tells w that its deadline comes before the retry time.
func (in *waitLine) refuse(w *waiter) {
	in.end(w, Result{}, &WaitError{RetryAfter: time.Until(in.retryAt), Deadline: w.deadline})
}

func (w *waiter) tooLate(retryAt time.Time) bool {
	return !w.deadline.IsZero() && w.deadline.Before(retryAt)
}

// stir has the line ask for its head before the retry time.
func (in *waitLine) stir() {
	in.retryAt = time.Time{}
	select {
	case in.signal <- struct{}{}:
	default:
	}
}

// wakeUp has those who wait for key ask again.
func (l *waitLines) wakeUp(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, in := range l.all[key] {
		in.stir()
	}
}
