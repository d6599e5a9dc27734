package ratelimit

import (
	"cmp"
	"context"
	"errors"
	"runtime"
	"slices"
	"strings"
	"time"
)

// call is a caller that waits for a decision.
type call struct {
	by     *Limiter
	key    string
	cost   int64         // below 0: a grant, or a refund
	refund []take        // and then of this
	since  time.Time     // when it was made
	done   chan struct{} // gets one value, once result and err are set
	probe  bool          // it may ask the database although the breaker is open
	result Result
	err    error
	next   *call // the next one of the same element
	set    *set  // what AllowAll asks, which gets its results; key is "" then, and cost 1
}

// A second statement beside the one that is under way costs the server nearly as much again as one for both, and where many processes
// share it that decides. So it leaves only where it is worth that: if enough callers wait for it, or if the database is so far away
// that most of the time it is the network that works, or if the one under way takes so long that something is wrong with it.
const (
	enough  = 24
	far     = time.Millisecond
	tooLong = 10 * time.Millisecond
)

// few is how many keys a function decides one after the other: Few in internal/gensql.
const few = 8

// mayLeave tells whether a statement leaves for those who wait. c.mu is locked.
func (c *core) mayLeave() bool {
	return c.inFlight == 0 || c.inFlight < c.config.MaxInFlight && (len(c.queue) >= min(enough, c.config.MaxBatch) || c.fastest >= far)
}

// took remembers how fast the fastest statements are: what one takes that meets nobody. c.mu is locked.
func (c *core) took(d time.Duration) {
	if c.fastest == 0 || d < c.fastest {
		c.fastest = d
	} else {
		c.fastest += (d - c.fastest) / 4096 // it forgets, but slowly
	}
}

// enqueue has a request decided: at once if no statement is under way, or it is worth another, else with the next one.
func (l *Limiter) enqueue(ctx context.Context, key string, cost int64, refund []take, s *set, probe bool) (Result, error) {
	c, ok := l.calls.Get().(*call)
	if !ok {
		c = &call{done: make(chan struct{}, 1)}
	}
	c.by, c.key, c.cost, c.refund, c.set, c.since, c.probe, c.next = l, key, cost, refund, s, time.Now(), probe, nil

	l.mu.Lock()
	held := l.isHeld(c)
	if !held {
		l.queue = append(l.queue, c)
	}
	leave := !held && l.mayLeave()
	if leave {
		l.inFlight++
	}
	first := !held && !leave && len(l.queue) == 1
	l.mu.Unlock()
	if held {
		l.toLane([]*call{c})
	} else if leave {
		go l.fly()
	}

	var late *time.Timer
	if first { // the others leave with it
		late = time.AfterFunc(tooLong, l.leaveAnyway)
	}
	select {
	case <-c.done:
		if late != nil {
			late.Stop()
		}
		result, err := c.result, c.err
		c.by, c.key, c.refund, c.set, c.result, c.err = nil, "", nil, nil, Result{}, nil
		l.calls.Put(c)
		return result, err
	case <-ctx.Done(): // the timer goes on, for those behind
		return Result{}, waitError(ctx.Err())
	}
}

// leaveAnyway sends those who wait, although the statement that they wait for is still under way.
func (c *core) leaveAnyway() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.queue) > 0 && c.inFlight < c.config.MaxInFlight {
		c.inFlight++
		go c.fly()
	}
}

// flight is what the statements of one goroutine need, used again from one to the next.
type flight struct {
	batch    []*call
	queued   int // how many calls had to stay
	elements []element
	last     map[string]int // the last element of a key
}

// fly sends one statement after the other until nobody waits. As many of it run as statements are in flight: at rest, none.
func (c *core) fly() {
	var f flight
	var took time.Duration
	for {
		c.mu.Lock()
		if took > 0 {
			c.took(took)
		}
		f.batch = c.board(f.batch[:0])
		if len(f.batch) == 0 {
			c.inFlight--
			c.queue = nil // or what a burst needed would stay
			c.mu.Unlock()
			return
		}
		f.queued = len(c.queue)
		c.mu.Unlock()
		left := time.Now()
		f.batch[0].by.send(&f)
		took = time.Since(left)
		clear(f.batch)
		// Those who were just told often ask again at once. Let them come aboard: without this, 64 callers leave in batches
		// of 16 on average, with it of 22, and a sixth more are decided.
		runtime.Gosched()
	}
}

// board moves the calls that leave next from the queue to batch: the first, and at most MaxBatch in all of those that can leave with it,
// first come, first served.
func (c *core) board(batch []*call) []*call {
	n := 0
	for n < len(c.queue) && n < c.config.MaxBatch && c.queue[n].leavesWith(c.queue[0]) {
		n++
	}
	if n == len(c.queue) {
		batch, c.queue = c.queue, batch
		return batch
	}
	batch = append(batch, c.queue[:n]...)
	stay := 0
	for ; n < len(c.queue) && len(batch) < c.config.MaxBatch; n++ {
		if next := c.queue[n]; next.leavesWith(batch[0]) {
			batch = append(batch, next)
		} else {
			c.queue[stay] = next
			stay++
		}
	}
	stay += copy(c.queue[stay:], c.queue[n:])
	clear(c.queue[stay:])
	c.queue = c.queue[:stay]
	return batch
}

// leavesWith tells whether one statement can decide both. It has one policy, and calls that look leave apart from those that
// take, because they need no lock.
func (c *call) leavesWith(other *call) bool {
	return (c.cost == 0) == (other.cost == 0) && (c.set != nil) == (other.set != nil) &&
		(c.by == other.by || c.set != nil || c.by.policy == other.by.policy)
}

// send has the batch, calls under l's policy, decided in one statement, and tells each caller.
func (l *Limiter) send(f *flight) {
	// The batch has the time that its oldest call still has. One that has next to none left would cost the others theirs.
	batch, now := f.batch, time.Now()
	for len(batch) > 0 && now.Sub(batch[0].since) > l.config.Timeout/10*9 {
		var err error = &StoreError{kinds: []error{ErrTimeout}, err: errNotAsked}
		if l.begin.Add(time.Duration(l.heldAt.Load())).After(batch[0].since) {
			err = errOthersHeld // and then it is no outage
		}
		batch[0].finish(Result{}, err)
		batch = batch[1:]
	}
	batch, probe := l.breaker.board(batch)
	if len(batch) == 0 {
		return
	}
	deadline := batch[0].since.Add(l.config.Timeout)
	// What held rows leave undecided after some time goes to the lane, which is there for it.
	a := asking{l: l, deadline: deadline, probe: probe, queued: f.queued, until: now.Add(l.patience() / 5)}
	elements, wait := f.group(batch), l.rowWait()
	if len(elements) == 1 { // it keeps no other row from anybody
		wait = wait * 5 / 2
	}
	a.ask(elements, false, wait)
	l.toLane(a.held)
}

// decideAndRemember decides elements, and remembers the keys that were denied.
func (l *Limiter) decideAndRemember(ctx context.Context, elements []element, settings settings) error {
	if l.denials == nil || elements[0].set != nil {
		err := l.decide(ctx, l.db, elements, settings)
		l.changed(elements, err, nil)
		return err
	}
	asked, since := l.denials.local(), l.denials.leave()
	err := l.decide(ctx, l.db, elements, settings)
	told := l.denials.local()
	for i := range elements {
		e := &elements[i]
		l.changed(elements[i:i+1], err, &since)
		if err == nil && e.set == nil && !e.held && e.cost > 0 && e.decision.granted < e.count {
			l.denials.remember(l.policy, e.key, e.decision, asked, told, &since)
		}
	}
	return err
}

// changed has what is remembered of the elements' keys forgotten if they have taken or given something, or may have.
func (l *Limiter) changed(elements []element, err error, since *changes) {
	for i := range elements {
		e := &elements[i]
		switch granted := e.decision.granted > 0 || len(e.decisions) > 0 && e.decisions[0].granted > 0; {
		case e.cost == 0 || err == nil && !granted:
		case e.key != "":
			l.denials.changed(e.key, since)
		default:
			for _, p := range e.set.parts {
				p.of.denials.changed(p.key, since)
			}
		}
	}
}

// group makes elements of calls: those for the same key and of the same cost become one, unless one of another cost lies between
// them, so that all calls for a key are decided in the order in which they came. A few keys are put into the order in which their rows
// are locked: the functions decide such ones faster. Refunds and grants stay apart: what remains after
// all of them does not tell what remained after each, because they stop at full.
func (f *flight) group(batch []*call) []element {
	f.elements = f.elements[:0]
	clear(f.last)
	if f.last == nil && len(batch) > 1 {
		f.last = make(map[string]int, len(batch))
	}
	for _, c := range batch {
		if c.set != nil {
			f.elements = append(f.elements, element{cost: 1, count: 1, first: c, last: c, set: c.set})
			continue
		}
		if i, ok := f.last[c.key]; ok && f.elements[i].cost == c.cost && c.cost >= 0 {
			e := &f.elements[i]
			e.count++
			e.last.next = c
			e.last = c
			continue
		}
		if len(batch) > 1 {
			f.last[c.key] = len(f.elements)
		}
		f.elements = append(f.elements, element{key: c.key, cost: c.cost, count: 1, refund: c.refund, first: c, last: c})
	}
	if len(f.elements) <= few {
		slices.SortStableFunc(f.elements, func(a, b element) int {
			return cmp.Or(len(b.key)-len(a.key), strings.Compare(a.key, b.key))
		})
	}
	return f.elements
}

// tell tells the callers of an element.
func (l *Limiter) tell(e *element, err error) {
	i := int64(1)
	for c := e.first; c != nil; i++ {
		next := c.next // before the caller goes on, and uses the call again
		if errors.Is(err, errRefused) && c.set != nil {
			c.finish(Result{}, c.set.refused())
		} else if err != nil {
			c.finish(Result{}, err)
		} else if c.set != nil {
			c.set.results = e.results(i)
			c.finish(Result{}, nil)
		} else {
			c.finish(l.result(e, i), nil)
		}
		c = next
	}
}

func (c *call) finish(result Result, err error) {
	c.result, c.err = result, err
	c.done <- struct{}{}
}
