package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// A row that somebody's transaction has locked, such as one that has called AllowTx, must not hold up the calls for other keys. So a
// statement that decides several rows waits for none of them longer than rowWait, nor for all together longer than 25 times that (see
// rate_limit_late), because it keeps the rows that it has locked before from everybody. If that is not enough, nothing was taken, and
// the same calls are asked for at once in a statement that passes over what is locked. The calls that it has passed over go to the
// lane: a queue of its own, which one goroutine serves for as long as there are calls in it, on one connection beside those of
// MaxInFlight. For a moment, heldFor, all calls for these keys go there at once.
const (
	// maxRowWait is long beside the statements of others, which take a millisecond or a few, and short beside what a caller notices.
	maxRowWait = 10 * time.Millisecond
	// makingWait is how long a statement that passes over rows waits for one that somebody is just making. Nobody can see it, so the
	// elements are asked for in eighths until it is alone, and each of them may have to wait.
	makingWait = time.Millisecond
	// laneTurn is how long the lane waits for one key while there are calls for others in it, and aloneTurn while there are none: not
	// for as long as a statement_timeout may be, which looks like an outage.
	laneTurn  = 25 * time.Millisecond
	aloneTurn = 100 * time.Millisecond
	// setWait is how long the lane has an AllowAll wait for a row while it holds the others, once in setPause.
	setWait  = 5 * time.Millisecond
	setPause = 20 * time.Millisecond

	maxHeld = 1024 // keys
)

// rowWait is how long a statement that holds rows waits for another one.
func (c *core) rowWait() time.Duration {
	return min(max(c.config.Timeout/100, time.Millisecond), maxRowWait)
}

// patience is how long a call waits for a row that is held, from when it was made.
func (c *core) patience() time.Duration { return c.config.Timeout / 4 }

// heldFor is how long a key counts as held after it was found so: longer than the time between two transactions that hold it in turn.
func (c *core) heldFor() time.Duration { return max(c.patience(), 100*time.Millisecond) }

// heldKey is a key of a limiter; of no name, all the keys of an AllowAll, of which it is not known which one is held.
type heldKey struct {
	durable   bool
	name, key string
}

// keys are what a call asks for.
func (c *call) keys() []heldKey {
	if c.set == nil {
		return []heldKey{{c.by.config.Durable, c.by.config.Name, c.key}}
	}
	keys := []heldKey{c.set.whole()}
	for _, p := range c.set.parts {
		keys = append(keys, p.heldKey())
	}
	return keys
}

func (p *part) heldKey() heldKey { return heldKey{p.of.config.Durable, p.of.config.Name, p.key} }

func (s *set) whole() heldKey {
	var text strings.Builder
	for _, p := range s.parts {
		text.WriteString(p.name + "\x00" + p.key + "\x00" + fmt.Sprint(p.of.config.Durable) + "\x00")
	}
	return heldKey{key: text.String()}
}

// heldRow is what is known of a key that was found locked.
type heldRow struct {
	first, until time.Time
	// It was locked for long. One that statements of other processes take in turn is not: it is decided in between.
	sure bool
}

// isHeld tells whether a call, which takes or gives back, is for a key that was held a moment ago. c.mu is locked.
func (c *core) isHeld(asks *call) bool {
	if len(c.held) == 0 || asks.cost == 0 {
		return false
	}
	now := time.Now()
	for _, key := range asks.keys() {
		switch row, ok := c.held[key]; {
		case ok && !now.Before(row.until):
			delete(c.held, key)
		case row.sure:
			return true
		}
	}
	return false
}

// decided forgets what was locked for a moment only.
func (c *core) decided(elements []element) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range elements {
		if len(c.held) == 0 {
			return
		}
		if elements[i].held {
			continue
		}
		for _, key := range elements[i].first.keys() {
			if row, ok := c.held[key]; ok && !row.sure {
				delete(c.held, key)
			}
		}
	}
}

// lockedKeys are the keys of an element that is held, as far as that is known.
func (e *element) lockedKeys() (keys []heldKey) {
	s := e.first.set
	if s == nil {
		return e.first.keys()
	}
	for i := range s.parts {
		if e.held && e.decisions[i].granted == passedOver {
			keys = append(keys, s.parts[i].heldKey())
		}
	}
	if keys == nil {
		keys = []heldKey{s.whole()}
	}
	return keys
}

// found remembers keys that were found locked. If waited is true, they were so for rowWait, or one of them was.
func (c *core) found(keys []heldKey, waited bool) {
	if len(keys) == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if len(c.held) >= maxHeld {
		for key, row := range c.held {
			if !now.Before(row.until) {
				delete(c.held, key)
			}
		}
	}
	for _, key := range keys {
		row, ok := c.held[key]
		if !ok || !now.Before(row.until) {
			row = heldRow{first: now}
		}
		if !ok && len(c.held) >= maxHeld {
			return // then it is found again the next time
		}
		if c.held == nil {
			c.held = make(map[heldKey]heldRow)
		}
		row.sure = row.sure || waited && len(keys) == 1 || now.Sub(row.first) >= 5*maxRowWait
		row.until = now.Add(c.heldFor())
		key.key = strings.Clone(key.key)
		c.held[key] = row
	}
}

// toLane has the lane ask for calls.
func (c *core) toLane(calls []*call) {
	if len(calls) == 0 {
		return
	}
	c.mu.Lock()
	c.lane = append(c.lane, calls...)
	serve := !c.serving
	c.serving = true
	c.mu.Unlock()
	if serve {
		go c.serveLane()
	}
}

// serveLane serves the lane until it is empty. By turns, it asks for all its calls while passing over what is held, and waits for the
// row of the first of them alone.
func (c *core) serveLane() {
	var f flight
	var calls []*call
	for {
		c.mu.Lock()
		calls = append(calls, c.lane...)
		c.lane = nil
		c.serving = len(calls) > 0
		c.mu.Unlock()
		if len(calls) == 0 {
			return
		}
		calls = c.giveUp(c.askLane(&f, calls))
		if len(calls) > 0 {
			calls = c.waitAlone(&f, calls)
		}
	}
}

// askLane asks for calls, and returns those whose keys are held.
func (c *core) askLane(f *flight, calls []*call) (held []*call) {
	for len(calls) > 0 {
		var batch, rest []*call
		for _, next := range calls {
			if len(batch) < c.config.MaxBatch && next.leavesWith(calls[0]) {
				batch = append(batch, next)
			} else {
				rest = append(rest, next)
			}
		}
		held = append(held, batch[0].by.askHeld(f, batch, true, makingWait)...)
		calls = rest
	}
	return held
}

// askHeld asks for calls of the lane that can leave together, and returns those whose keys are held.
func (l *Limiter) askHeld(f *flight, batch []*call, skip bool, wait time.Duration) []*call {
	batch, probe := l.breaker.board(batch)
	oldest := time.Now()
	for _, c := range batch {
		if c.since.Before(oldest) {
			oldest = c.since
		}
		c.next = nil
	}
	if len(batch) == 0 {
		return nil
	}
	deadline := oldest.Add(l.config.Timeout)
	a := asking{l: l, deadline: deadline, probe: probe, again: true}
	a.ask(f.group(batch), skip, wait)
	return a.held
}

// giveUp tells the calls that have waited long enough that their key is held, and returns the others.
func (c *core) giveUp(calls []*call) (others []*call) {
	for _, asks := range calls {
		if time.Since(asks.since) < c.patience() {
			others = append(others, asks)
		} else {
			asks.finish(Result{}, keyHeld())
		}
	}
	return others
}

// waitAlone waits for the row of the first call, in a statement for its key alone, and returns the calls that are not decided yet: it is
// the turn of another one of them then.
func (c *core) waitAlone(f *flight, calls []*call) []*call {
	first := calls[0]
	oldest := first.since
	var mine, others []*call
	for _, asks := range calls {
		same := asks == first || asks.set == nil && asks.cost > 0 && asks.key == first.key && asks.cost == first.cost && asks.leavesWith(first)
		if !same {
			others = append(others, asks)
			continue
		}
		mine = append(mine, asks)
		if asks.since.Before(oldest) {
			oldest = asks.since
		}
	}
	wait := min(c.patience()-time.Since(oldest), aloneTurn)
	c.mu.Lock()
	if len(others) > 0 || len(c.lane) > 0 {
		wait = min(wait, laneTurn)
	}
	c.mu.Unlock()
	if several, ok := first.by.policy.(all); ok && first.set == nil {
		wait /= time.Duration(several.n) // for each of its rows
	}
	wait += time.Millisecond // which millis cuts off
	if first.set != nil {
		wait = min(wait, setWait)
	}
	began := time.Now()
	held := first.by.askHeld(f, mine, false, wait)
	if len(held) > 0 && time.Since(began) < setPause {
		<-time.After(setPause)
	}
	return append(others, held...)
}

// asking asks for the elements of a batch, in as many statements as held rows and refused keys make it.
type asking struct {
	l        *Limiter
	deadline time.Time
	probe    bool
	queued   int       // calls that had to stay
	again    bool      // it is not the first statement
	waited   bool      // the one before was of the same elements, and has waited for a row in vain
	until    time.Time // when the rest goes to the lane; zero: never
	held     []*call   // whose keys are held
}

// ask asks for elements and tells their callers, but those whose keys are held. If skip is true, it passes over these.
func (a *asking) ask(elements []element, skip bool, wait time.Duration) {
	l, now := a.l, time.Now()
	left := a.deadline.Sub(now)
	switch {
	case a.again && left < l.config.Timeout/10:
		a.tell(elements, errOthersHeld)
		return
	case a.again && !a.until.IsZero() && now.After(a.until):
		a.pass(elements)
		return
	}
	a.again = true
	settings := l.settings
	settings.skipHeld = skip
	if elements[0].cost == 0 { // there is no row to wait for
		wait = l.patience()
	}
	settings.lockTimeout = millis(min(wait, left/2))
	ctx, cancel := context.WithDeadline(context.Background(), a.deadline)
	err := l.decideAndRemember(ctx, elements, settings)
	cancel()
	calls := int64(0)
	for i := range elements {
		calls += elements[i].count
	}
	l.sent(now, int(calls), a.queued, err)

	waited := lockTimeout(err)
	if waited || errors.Is(err, errRefused) {
		l.heldAt.Store(int64(time.Since(l.begin)))
	}
	switch {
	case waited && tableLocked(err) && wait < l.patience():
		a.ask(elements, skip, l.patience()) // it may be free soon
		return
	case waited && !isAway(err) && !skip:
		a.waited = true
		a.ask(elements, true, makingWait)
		return
	case errors.Is(err, errRefused):
		l.breaker.report(nil, a.probe)
	default:
		l.breaker.report(err, a.probe)
	}
	afterWait := a.waited
	a.waited = false
	switch {
	case err == nil:
		l.decided(elements)
		var keys []heldKey
		for i := range elements {
			if e := &elements[i]; e.held {
				keys = append(keys, e.lockedKeys()...)
				a.pass(elements[i : i+1])
			}
		}
		l.found(keys, afterWait)
		for i := range elements {
			if e := &elements[i]; !e.held {
				l.tell(e, nil)
			}
		}
	case errors.Is(err, errRefused) && len(elements) > 1:
		// Every encoding of a database has the characters of ASCII.
		plain, others := splitASCII(elements)
		if len(plain) == 0 || len(others) == 0 {
			plain, others = elements[:len(elements)/2], elements[len(elements)/2:]
		}
		a.ask(plain, skip, wait)
		a.ask(others, skip, wait)
	case waited && !isAway(err) && len(elements) > 1:
		for part := range slices.Chunk(elements, (len(elements)+7)/8) {
			a.ask(part, skip, wait)
		}
	case waited && !isAway(err):
		l.found(elements[0].lockedKeys(), afterWait)
		a.pass(elements)
	default:
		a.tell(elements, err)
	}
}

func (a *asking) tell(elements []element, err error) {
	for i := range elements {
		a.l.tell(&elements[i], err)
	}
}

// pass leaves the calls of elements to the lane.
func (a *asking) pass(elements []element) {
	for i := range elements {
		for c := elements[i].first; c != nil; c = c.next {
			a.held = append(a.held, c)
		}
	}
}

func splitASCII(elements []element) (plain, others []element) {
	for _, e := range elements {
		if e.isASCII() {
			plain = append(plain, e)
		} else {
			others = append(others, e)
		}
	}
	return plain, others
}

func (e *element) isASCII() bool {
	return isASCII(e.key) && (e.set == nil || !slices.ContainsFunc(e.set.parts, func(p part) bool { return !isASCII(p.key + p.name) }))
}

func isASCII(text string) bool {
	return strings.IndexFunc(text, func(r rune) bool { return r > 127 }) < 0
}

// refused is errRefused of a set, with the request if only one of them can be meant.
func (s *set) refused() error {
	index, suspects := 0, 0
	for i, first := range s.firsts {
		if p := s.parts[first]; !isASCII(p.key + p.name) {
			index, suspects = i, suspects+1
		}
	}
	if suspects != 1 {
		return errRefused
	}
	return &RequestError{Index: index, Err: errRefused}
}
