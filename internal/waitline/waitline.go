// Package waitline lets callers wait for a key in a line. Only the line asks for the key, however many callers wait.
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

// maxJitter bounds the random time that a line adds to a retry time. The added time is also at most a 50th of the retry
// time. Without this random time, processes with the same retry time would all ask at once, and the same process could
// always be first. The random time costs up to 2 % of the rate of a bucket of capacity 1, or of windows that begin with
// the first request. A larger bucket loses nothing, because tokens accumulate meanwhile.
const maxJitter = 100 * time.Millisecond

// banPause is how often a line checks whether another policy applies now, or whether a ban has been lifted. The check
// needs no statement.
const banPause = time.Second

// Lines holds the lines of all keys. Callers get results of type R. The zero Lines is ready to use.
type Lines[R any] struct {
	mu  sync.Mutex
	all map[string][]*line[R] // nil if nobody waits
}

// Source says how a line asks for its key.
type Source[R any] struct {
	Policy *model.Policy // callers with equal policies share a line
	// Ask requests a cost of n. It returns TooMuch if n is above the limit. The limit can fall while callers wait.
	Ask    func(n int64) (R, error)
	Read   func(*R) Reading
	Answer func(n int64) R // decides while the database is away
	// Share returns one caller's part of a result for several callers: the units in the range [from, to). The argument
	// behind is how many units the callers behind this one have taken.
	Share   func(all *R, from, to, behind int64) R
	Stale   func() bool // whether another policy applies now; nil if that cannot happen
	Owned   bool        // the connection is the caller's, and the caller must not use it while the line does
	TooMuch error       // the error of Ask for a cost above the limit
}

// Reading is the part of a result that a line needs.
type Reading struct {
	Allowed    bool
	Away       bool // whether the database is away
	Fixed      bool // whether a row of rate_limit_policy decided, so that Remaining means nothing
	Remaining  int64
	RetryAfter time.Duration
}

// TooLate is the error for a caller whose deadline comes before the retry time.
type TooLate struct {
	RetryAfter time.Duration
	Deadline   time.Time
}

func (e *TooLate) Error() string { return "the deadline comes before the retry time" }

// line serves the callers who wait for one key under one policy, in the order in which they came. The first caller
// starts a goroutine. The goroutine asks for the head of the line, and sleeps until the retry time in the answer. Once
// the head is allowed, one more statement asks for as many callers behind the head as fit into Remaining. When nobody
// is left, the goroutine removes the line and ends.
type line[R any] struct {
	Source[R]
	lines *Lines[R]
	key   string

	// lines.mu guards these fields.
	waiters list.List     // of *waiter[R]
	retryAt time.Time     // until this time, the head is denied; zero if unknown
	asking  chan struct{} // closed when the request under way is answered; nil if there is none

	signal chan struct{} // ends the goroutine's sleep
}

// waiter is a caller in a line.
type waiter[R any] struct {
	cost     int64
	deadline time.Time     // zero if there is none
	place    *list.Element // nil once the caller was told, or has left
	told     chan struct{} // closed once result and err are set
	result   R
	err      error
}

// Wait waits until a cost of n fits. If the key has no line yet, the function start returns the Source for a new line.
// The error is a [*TooLate] if the context's deadline comes before the retry time, or else the error of Ask or
// ended(ctx.Err()).
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

// join puts w at the end of the line for key, and makes the line if there is none. It refuses w if the deadline of w
// comes before the retry time of the head.
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

// leave takes w out of the line because the context of w has ended. If w got a result just before, w keeps this result.
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
		<-asking // the caller must not use the connection while the line does
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
			err = nil // the limit was lowered, so ask for fewer callers
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

// sleep pauses until there may be room. It ends early when something is given back, or another policy applies.
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

// nextGroup returns the callers of the next request, and the sum of their costs. The callers are the head, and as many
// callers behind it as fit into remaining. If nobody is left, nextGroup removes the line and returns -1.
func (in *line[R]) nextGroup(group []*waiter[R], remaining int64) ([]*waiter[R], int64) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	in.retryAt = time.Time{}
	remaining = min(remaining, in.Policy.Limit) // a request must not cost more than the limit
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
		in.lines.all = nil // frees the memory that a crowd needed
	}
	return nil, -1
}

// settle tells the group the decision about its request. It returns how long to wait before asking again.
func (in *line[R]) settle(group []*waiter[R], cost int64, result *R, read Reading, err error) (pause time.Duration) {
	in.lines.mu.Lock()
	defer in.lines.mu.Unlock()
	close(in.asking)
	in.asking = nil
	switch {
	case err != nil || read.Allowed:
		behind := cost // how many units the callers behind w have taken
		for _, w := range group {
			behind -= w.cost
			if w.place != nil {
				in.end(w, in.Share(result, cost-behind-w.cost, cost-behind, behind), err)
			}
		}
		if errors.Is(err, in.TooMuch) {
			return 0 // the line goes on: only this caller asked for too much
		}
		if err != nil || read.Away {
			in.answerAll(err)
		}
		return 0
	case len(group) > 1:
		return 0 // another process has taken in between, so ask for fewer callers
	}

	in.retryAt = time.Now().Add(read.RetryAfter)
	for e := in.waiters.Front(); e != nil; {
		w := e.Value.(*waiter[R])
		if w.cost < cost && e == in.waiters.Front() {
			break // the head has left, and this caller's smaller cost may fit earlier
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

// answerAll answers the callers in the line while the database is away. All callers get err. If err is nil, each caller
// gets its Answer, up to the first denial. If each caller asked the database, the last caller would wait until all
// timeouts have passed. The caller of answerAll holds in.lines.mu.
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

// first returns the head of the line, or nil if nobody waits. The caller holds in.lines.mu.
func (in *line[R]) first() *waiter[R] {
	if e := in.waiters.Front(); e != nil {
		return e.Value.(*waiter[R])
	}
	return nil
}

// end ends the wait of a caller in the line. The caller holds in.lines.mu.
func (in *line[R]) end(w *waiter[R], result R, err error) {
	in.waiters.Remove(w.place)
	w.place, w.result, w.err = nil, result, err
	close(w.told)
}

// refuse tells w that its deadline comes before the retry time. The caller holds in.lines.mu.
func (in *line[R]) refuse(w *waiter[R]) {
	in.end(w, *new(R), &TooLate{RetryAfter: time.Until(in.retryAt), Deadline: w.deadline})
}

func (w *waiter[R]) tooLate(retryAt time.Time) bool {
	return !w.deadline.IsZero() && w.deadline.Before(retryAt)
}

// stir wakes the line to ask for its head before the retry time. The caller holds in.lines.mu.
func (in *line[R]) stir() {
	in.retryAt = time.Time{}
	select {
	case in.signal <- struct{}{}:
	default:
	}
}

// WakeUp makes the lines of a key ask again.
func (l *Lines[R]) WakeUp(key string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, in := range l.all[key] {
		in.stir()
	}
}

// Waiting returns how many lines a key has, how many callers wait in them, and whether all lines have a retry time. It
// is for tests.
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

// Empty returns whether nobody waits. It is for tests.
func (l *Lines[R]) Empty() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all == nil
}
