// Package waitline has callers wait for keys in lines, so that however many wait, few ask.
package waitline

import (
	"container/list"
	"context"
	"errors"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
)

// maxJitter is the most that is added to a retry time. The jitter is random, and at most a 50th of that time.
// Without it, processes that were told the same time would all come at once, and the same one could always be
// first. It costs at most 2 % of a rate that nothing accumulates for (a bucket of capacity 1, or windows that
// begin with the first request), and nothing of a larger bucket's.
const maxJitter = 100 * time.Millisecond

// banPause is how often those who wait look whether another policy has come into force, or a ban has been lifted. To
// look costs no statement.
const banPause = time.Second

// Lines are where callers wait for keys, and get a result R. The zero Lines are ready to use.
type Lines[R any] struct {
	mu  sync.Mutex
	all map[string][]*line[R] // nil if nobody waits
}

// Source is what a line asks for its key.
type Source[R any] struct {
	Policy *model.Policy // equal policies have one line
	// Ask has a cost of n decided. Its error is a TooMuch if n is above a limit that has come into force meanwhile.
	Ask    func(n int64) (R, error)
	Read   func(*R) Reading
	Answer func(n int64) R // decides instead of a database that is away
	// Share is what one of those gets who were allowed together: the units from one to before another. Those behind it
	// have taken as many as behind.
	Share   func(all *R, from, to, behind int64) R
	Stale   func() bool // another policy has come into force; nil if that cannot be
	Owned   bool        // the connection is the caller's, who must not go on while it is in use
	TooMuch error
}

// Reading is what a line has to know of a result.
type Reading struct {
	Allowed    bool
	Away       bool // the database is
	Fixed      bool // a row has decided, and Remaining means nothing
	Remaining  int64
	RetryAfter time.Duration
}

// TooLate tells that a deadline comes before the retry time.
type TooLate struct {
	RetryAfter time.Duration
	Deadline   time.Time
}

func (e *TooLate) Error() string { return "the deadline comes before the retry time" }

// line is where callers wait for one key under one policy, served in the order in which they came. The first to come
// starts a goroutine, which asks for the head of the line and sleeps until the retry time that it is told. When the
// head is allowed, what remains goes to those behind it in one more statement. When nobody is left, the goroutine ends
// and takes the line away.
type line[R any] struct {
	Source[R]
	lines *Lines[R]
	key   string

	// Guarded by the mutex of lines.
	waiters list.List     // of *waiter[R]
	retryAt time.Time     // the first one is denied until then; zero if that is not known
	asking  chan struct{} // closed when the request under way has been answered; nil if none is

	signal chan struct{} // ends the sleep
}

// waiter is a caller in a line.
type waiter[R any] struct {
	cost     int64
	deadline time.Time     // zero: none
	place    *list.Element // nil once it has been told, or has left
	told     chan struct{} // closed once result and err are set
	result   R
	err      error
}

// Wait waits until a cost of n fits, with start's Source if there is no line yet. Errors: a [*TooLate] if the context's
// deadline comes before that; what Ask has returned; ended's, if the context has ended.
func (l *Lines[R]) Wait(
	ctx context.Context, key string, policy *model.Policy, n int64, start func() Source[R], ended func(error) error,
) (R, error) {
	w := &waiter[R]{cost: n, told: make(chan struct{})}
	w.deadline, _ = ctx.Deadline()
	in := l.join(w, key, policy, start)
	select {
	case <-w.told:
	case <-ctx.Done():
		in.leave(w, ended(ctx.Err()))
	}
	return w.result, w.err
}

// join puts w at the end of the line for key. If w's deadline comes before the retry time of the first one, it
// tells w so instead. start makes the line if there is none.
func (l *Lines[R]) join(w *waiter[R], key string, policy *model.Policy, start func() Source[R]) *line[R] {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, in := range l.all[key] {
		if in.Policy.Is(policy) {
			w.place = in.waiters.PushBack(w)
			if w.tooLate(in.retryAt) {
				in.refuse(w)
			}
			return in
		}
	}
	in := &line[R]{Source: start(), lines: l, key: key, signal: make(chan struct{}, 1)}
	w.place = in.waiters.PushBack(w)
	if l.all == nil {
		l.all = make(map[string][]*line[R])
	}
	l.all[key] = append(l.all[key], in)
	go in.serve()
	return in
}

// leave takes w out of the line, because its context has ended, unless w has just been told.
func (in *line[R]) leave(w *waiter[R], err error) {
	in.lines.mu.Lock()
	var asking chan struct{}
	if w.place != nil {
		if in.Owned {
			asking = in.asking
		}
		first := in.waiters.Front() == w.place
		in.end(w, *new(R), err)
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
func (in *line[R]) serve() {
	var group []*waiter[R]
	var cost, remaining int64
	for {
		if group, cost = in.nextGroup(group[:0], remaining); cost < 0 {
			return
		}
		result, err := in.Ask(cost)
		var read Reading
		if errors.Is(err, in.TooMuch) && len(group) > 1 {
			err = nil // a row of rate_limit_policy has lowered the limit: ask for fewer
		} else if err == nil {
			read = in.Read(&result)
		}
		in.sleep(in.settle(group, cost, &result, read, err))
		clear(group)
		remaining = 0
		if err == nil && !read.Away && !read.Fixed {
			remaining = min(read.Remaining, max(cost-1, 0))
			if read.Allowed {
				remaining = read.Remaining
			}
		}
	}
}

// sleep lasts until there may be room: for that long, or until something is given, or another policy is in force.
func (in *line[R]) sleep(pause time.Duration) {
	for end := time.Now().Add(pause); pause > 0; pause = time.Until(end) {
		if in.Stale != nil {
			pause = min(pause, banPause)
		}
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-in.signal:
			timer.Stop()
			return
		}
		if in.Stale != nil && in.Stale() {
			return
		}
	}
}

// nextGroup returns those who are asked for next, all together, and the sum of their costs. They are the first
// one, and as many behind it as fit into what remains. If nobody is left, it removes the line and returns -1.
func (in *line[R]) nextGroup(group []*waiter[R], remaining int64) ([]*waiter[R], int64) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	in.retryAt = time.Time{}
	remaining = min(remaining, in.Policy.Limit) // the most that may be asked for at once
	var cost int64
	for e := in.waiters.Front(); e != nil; e = e.Next() {
		w := e.Value.(*waiter[R])
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
	in.lines.all[in.key] = slices.DeleteFunc(in.lines.all[in.key], func(other *line[R]) bool { return other == in })
	if len(in.lines.all[in.key]) == 0 {
		delete(in.lines.all, in.key)
	}
	if len(in.lines.all) == 0 {
		in.lines.all = nil // or the memory that a crowd needed would stay
	}
	return nil, -1
}

// settle tells the group what was decided about all of it, and returns for how long there is nothing to ask.
func (in *line[R]) settle(group []*waiter[R], cost int64, result *R, read Reading, err error) (pause time.Duration) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	close(in.asking)
	in.asking = nil
	switch {
	case err != nil || read.Allowed:
		behind := cost // what those behind have taken
		for _, w := range group {
			behind -= w.cost
			if w.place != nil {
				in.end(w, in.Share(result, cost-behind-w.cost, cost-behind, behind), err)
			}
		}
		if errors.Is(err, in.TooMuch) {
			return 0 // only this waiter asked for too much
		}
		if err != nil || read.Away {
			in.answerAll(err)
		}
		return 0
	case len(group) > 1:
		return 0 // somebody else has taken in between: ask for fewer
	}

	in.retryAt = time.Now().Add(read.RetryAfter)
	for e := in.waiters.Front(); e != nil; {
		w := e.Value.(*waiter[R])
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
	if read.Fixed {
		return min(read.RetryAfter, banPause)
	}
	jitter := min(read.RetryAfter/50, maxJitter)
	if !first.deadline.IsZero() {
		jitter = min(jitter, first.deadline.Sub(in.retryAt)/2)
	}
	return read.RetryAfter + rand.N(jitter+1)
}

// answerAll tells everybody in the line what the first one was told by a database that is away: the error, or
// the limiter's own answer until that is a denial. If each of them asked, the last would wait for as many
// timeouts.
func (in *line[R]) answerAll(err error) {
	for e := in.waiters.Front(); e != nil; e = in.waiters.Front() {
		w := e.Value.(*waiter[R])
		if err != nil {
			in.end(w, *new(R), err)
			continue
		}
		result := in.Answer(w.cost)
		if !in.Read(&result).Allowed {
			return
		}
		in.end(w, result, nil)
	}
}

// first returns nil if nobody waits.
func (in *line[R]) first() *waiter[R] {
	if e := in.waiters.Front(); e != nil {
		return e.Value.(*waiter[R])
	}
	return nil
}

// end ends the wait of a caller who is in the line.
func (in *line[R]) end(w *waiter[R], result R, err error) {
	in.waiters.Remove(w.place)
	w.place, w.result, w.err = nil, result, err
	close(w.told)
}

// refuse tells w that its deadline comes before the retry time.
func (in *line[R]) refuse(w *waiter[R]) {
	in.end(w, *new(R), &TooLate{RetryAfter: time.Until(in.retryAt), Deadline: w.deadline})
}

func (w *waiter[R]) tooLate(retryAt time.Time) bool {
	return !w.deadline.IsZero() && w.deadline.Before(retryAt)
}

// stir has the line ask for its head before the retry time.
func (in *line[R]) stir() {
	in.retryAt = time.Time{}
	select {
	case in.signal <- struct{}{}:
	default:
	}
}

// WakeUp has those who wait for key ask again.
func (l *Lines[R]) WakeUp(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, in := range l.all[key] {
		in.stir()
	}
}

// Waiting tells how many lines there are for a key, how many callers are in them, and whether the first of these know
// when to ask next. It is for tests.
func (l *Lines[R]) Waiting(key string) (lines, callers int, known bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	known = len(l.all[key]) > 0
	for _, in := range l.all[key] {
		callers += in.waiters.Len()
		known = known && !in.retryAt.IsZero()
	}
	return len(l.all[key]), callers, known
}

// Empty tells whether nobody waits. It is for tests.
func (l *Lines[R]) Empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all == nil
}
