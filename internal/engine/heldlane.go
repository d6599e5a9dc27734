package engine

import (
	"sync"
	"time"
)

// heldLane is a queue for requests whose keys are held. One goroutine serves the lane while there are requests in it.
// The lane uses one connection on top of MaxInFlight.
type heldLane struct {
	batcher  *Batcher
	maxBatch int
	lost     func([]*Request) // receives the requests that have lost a race

	Mu       sync.Mutex
	Requests []*Request
	Serving  bool
}

const (
	// laneTurn is how long the lane waits for one key while it has requests for other keys. aloneTurn is how long the
	// lane waits for its only key.
	laneTurn  = 25 * time.Millisecond
	aloneTurn = 100 * time.Millisecond
	// A statement of AllowAll keeps rows locked while it waits for another row. So AllowAll waits only for setWait, and
	// only once in each setPause.
	setWait  = 5 * time.Millisecond
	setPause = 40 * time.Millisecond
)

// Add adds requests to the lane.
func (h *heldLane) Add(requests []*Request) {
	if len(requests) == 0 {
		return
	}
	h.Mu.Lock()
	h.Requests = append(h.Requests, requests...)
	serve := !h.Serving
	h.Serving = true
	h.Mu.Unlock()
	if serve {
		go h.serve()
	}
}

// serve sends statements until the lane is empty. By turns, it sends one statement that skips locked rows for all
// requests, and one statement that waits for the first request's row.
func (h *heldLane) serve() {
	var requests []*Request
	for {
		h.Mu.Lock()
		requests = append(requests, h.Requests...)
		h.Requests = nil
		h.Serving = len(requests) > 0
		h.Mu.Unlock()
		if len(requests) == 0 {
			return
		}
		var sure, others []*Request
		for _, r := range requests {
			if h.batcher.Held.Knows(r) {
				sure = append(sure, r)
			} else {
				others = append(others, r)
			}
		}
		requests = append(h.askAll(others), h.GiveUp(h.askAll(sure))...)
		if len(requests) > 0 {
			requests = h.waitForFirst(requests)
		}
	}
}

// askAll sends statements for requests, and returns the requests whose keys are still held.
func (h *heldLane) askAll(requests []*Request) (held []*Request) {
	for len(requests) > 0 {
		var batch, rest []*Request
		for _, r := range requests {
			if len(batch) < h.maxBatch && r.sameGroup(requests[0]) && r.kind() == requests[0].kind() {
				batch = append(batch, r)
			} else {
				rest = append(rest, r)
			}
		}
		held = append(held, h.ask(batch, true, makingWait)...)
		requests = rest
	}
	return held
}

// ask sends a statement for requests of one group, and returns the requests whose keys are still held.
func (h *heldLane) ask(requests []*Request, skip bool, wait time.Duration) (held []*Request) {
	requests, probe := h.batcher.Breaker.turnAway(requests)
	if len(requests) == 0 {
		return nil
	}
	s := h.batcher.newBatch(requests, probe)
	s.again, s.alone = true, !skip
	s.ask(MergeAlike(requests), skip, wait)
	h.lost(s.lost)
	return s.held
}

// GiveUp ends the requests that have waited for Patience, and returns the other requests.
//
// If a row is being inserted, no statement can see which transaction inserts it. Perhaps statements of the engine
// insert the row one after the other, and each statement is undone because it waits for another key. So a row that is
// being inserted counts as held only after a statement for its key alone has waited in vain. For AllowAll, a row that
// is being inserted counts as held at once, because no statement of AllowAll waits that long.
func (h *heldLane) GiveUp(requests []*Request) (others []*Request) {
	known := h.batcher.Held
	for _, r := range requests {
		row, held := known.longHeld(r)
		one := row.by != 0 || row.waited || r.Policy == nil
		if time.Since(r.Since) >= known.Patience() && held && one {
			r.Finish(keyHeld())
		} else {
			others = append(others, r)
		}
	}
	return others
}

// waitForFirst waits for the row of the first request, in a statement for the key of this row alone. It returns the
// undecided requests, and puts the requests for this key last.
func (h *heldLane) waitForFirst(requests []*Request) []*Request {
	known, first := h.batcher.Held, requests[0]
	oldest := first.Since
	var mine, others []*Request
	for _, r := range requests {
		if r != first && (!r.sameGroup(first) || !r.joins(first)) {
			others = append(others, r)
			continue
		}
		mine = append(mine, r)
		if r.Since.Before(oldest) {
			oldest = r.Since
		}
	}
	wait := aloneTurn
	h.Mu.Lock()
	if len(others) > 0 || len(h.Requests) > 0 {
		wait = laneTurn
	}
	h.Mu.Unlock()
	if left := known.Patience() - time.Since(oldest); left > 0 {
		wait = min(wait, left)
	}
	isSet := first.Policy == nil             // AllowAll
	parts := time.Duration(len(first.Parts)) // read now, because the caller reuses the request after the decision
	if !isSet {
		wait /= parts // the statement may wait for each of these rows
	}
	wait += time.Millisecond // makes up for LockTimeout, which rounds down
	pause := time.Duration(0)
	if isSet {
		pause = min(setPause, wait)
		wait = min(wait, setWait)
	}
	began := time.Now()
	key := first.HeldKeys()[0] // read now, because the caller reuses the request after the decision
	held := h.ask(mine, false, wait)
	took := time.Since(began)
	if !isSet && took >= known.long()/parts {
		known.Still(key, len(held) > 0)
	}
	if len(held) > 0 && took < pause {
		<-time.After(pause - took)
	}
	return append(others, held...)
}
