package engine

import (
	"sync"
	"time"
)

// heldLane is a queue for requests whose keys are held. One goroutine serves it while it has requests. It uses one
// connection, besides those of MaxInFlight.
type heldLane struct {
	batcher  *Batcher
	maxBatch int
	lost     func([]*Request) // called with requests that have lost a race

	Mu       sync.Mutex
	Requests []*Request
	Serving  bool
}

const (
	// laneTurn is how long the lane waits for one key while it has requests for other keys. aloneTurn is how long
	// otherwise.
	laneTurn  = 25 * time.Millisecond
	aloneTurn = 100 * time.Millisecond
	// An AllowAll keeps its other rows locked while it waits for one. So it waits for setWait only, and once in
	// setPause.
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

// serve serves the lane until it is empty. By turns, it asks for all requests while passing over locked rows, and waits
// for the row of the first request alone.
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

// askAll sends statements for requests, and returns those whose keys are held.
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

// ask sends a statement for requests of one group, and returns those whose keys are held.
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

// GiveUp ends requests that have waited long enough for a held key, and returns the others.
//
// Nobody can see who is inserting a row. It may be one statement of ours after the other, each undone because it has
// waited for another key. So such a row counts as held only if a statement for it alone has waited in vain. For an
// AllowAll no statement waits that long, so its rows count at once.
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

// waitForFirst waits for the row of the first request, in a statement for its key alone. It returns the undecided
// requests in such an order that another one has the next turn.
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
	parts := time.Duration(len(first.Parts)) // read now, because the caller uses the request again once it is decided
	if !isSet {
		wait /= parts // it waits for each of its rows
	}
	wait += time.Millisecond // LockTimeout rounds down
	pause := time.Duration(0)
	if isSet {
		pause = min(setPause, wait)
		wait = min(wait, setWait)
	}
	began := time.Now()
	key := first.HeldKeys()[0] // read now, for the same reason
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
