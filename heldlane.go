package ratelimit

import (
	"sync"
	"time"
)

// heldLane is a queue for requests whose keys are held. While there are any, one goroutine serves them, on one
// connection besides those of MaxInFlight.
type heldLane struct {
	batcher  *batcher
	maxBatch int
	lost     func([]*request) // gets requests that have lost a race

	mu       sync.Mutex
	requests []*request
	serving  bool
}

const (
	// laneTurn is how long the lane waits for one key while requests for others are in it. aloneTurn is for when
	// there are none.
	laneTurn  = 25 * time.Millisecond
	aloneTurn = 100 * time.Millisecond
	// An AllowAll holds its other rows while the lane has it wait for one. So it waits for setWait only, and once
	// in setPause.
	setWait  = 5 * time.Millisecond
	setPause = 40 * time.Millisecond
)

// add has the lane ask for requests.
func (h *heldLane) add(requests []*request) {
	if len(requests) == 0 {
		return
	}
	h.mu.Lock()
	h.requests = append(h.requests, requests...)
	serve := !h.serving
	h.serving = true
	h.mu.Unlock()
	if serve {
		go h.serve()
	}
}

// serve serves the lane until it is empty. By turns, it asks for all its requests while passing over what is held,
// and waits for the row of the first request alone.
func (h *heldLane) serve() {
	var buf buffers
	var requests []*request
	for {
		h.mu.Lock()
		requests = append(requests, h.requests...)
		h.requests = nil
		h.serving = len(requests) > 0
		h.mu.Unlock()
		if len(requests) == 0 {
			return
		}
		var sure, others []*request
		for _, r := range requests {
			if h.batcher.held.knows(r) {
				sure = append(sure, r)
			} else {
				others = append(others, r)
			}
		}
		requests = append(h.askAll(&buf, others), h.giveUp(h.askAll(&buf, sure))...)
		if len(requests) > 0 {
			requests = h.waitForFirst(&buf, requests)
		}
	}
}

// askAll asks for requests, and returns those whose keys are held.
func (h *heldLane) askAll(buf *buffers, requests []*request) (held []*request) {
	for len(requests) > 0 {
		var batch, rest []*request
		for _, r := range requests {
			if len(batch) < h.maxBatch && r.sameLine(requests[0]) && r.kind() == requests[0].kind() {
				batch = append(batch, r)
			} else {
				rest = append(rest, r)
			}
		}
		held = append(held, h.ask(buf, batch, true, makingWait)...)
		requests = rest
	}
	return held
}

// ask asks for requests of one line, and returns those whose keys are held.
func (h *heldLane) ask(buf *buffers, requests []*request, skip bool, wait time.Duration) (held []*request) {
	requests, probe := h.batcher.breaker.turnAway(requests)
	if len(requests) == 0 {
		return nil
	}
	s := h.batcher.newBatch(requests, probe)
	s.again, s.alone = true, !skip
	s.ask(buf.mergeAlike(requests), skip, wait)
	h.lost(s.lost)
	return s.held
}

// giveUp takes requests whose keys were just found held. It tells those that have waited long enough, and returns
// the others.
//
// Nobody can see who makes a row. It may be one statement of ours after the other, each undone because it has waited
// for another key. So a row that is being made is held for long only if a statement for it alone has waited in vain.
// For an AllowAll there is none that waits for long.
func (h *heldLane) giveUp(requests []*request) (others []*request) {
	known := h.batcher.held
	for _, r := range requests {
		row, held := known.longHeld(r)
		one := row.by != 0 || row.waited || r.policy == nil
		if time.Since(r.since) >= known.patience() && held && one {
			r.finish(keyHeld())
		} else {
			others = append(others, r)
		}
	}
	return others
}

// waitForFirst waits for the row of the first request, in a statement for its key alone. It returns the requests
// that are not decided yet, ordered so that another one has the next turn.
func (h *heldLane) waitForFirst(buf *buffers, requests []*request) []*request {
	known, first := h.batcher.held, requests[0]
	oldest := first.since
	var mine, others []*request
	for _, r := range requests {
		if r != first && (!r.sameLine(first) || !r.joins(first)) {
			others = append(others, r)
			continue
		}
		mine = append(mine, r)
		if r.since.Before(oldest) {
			oldest = r.since
		}
	}
	wait := aloneTurn
	h.mu.Lock()
	if len(others) > 0 || len(h.requests) > 0 {
		wait = laneTurn
	}
	h.mu.Unlock()
	if left := known.patience() - time.Since(oldest); left > 0 {
		wait = min(wait, left)
	}
	isSet := first.policy == nil             // AllowAll
	parts := time.Duration(len(first.parts)) // read now, because the caller uses the request again once it is decided
	if !isSet {
		wait /= parts // for each of its rows
	}
	wait += time.Millisecond // lockTimeout rounds down
	pause := time.Duration(0)
	if isSet {
		pause = min(setPause, wait)
		wait = min(wait, setWait)
	}
	began := time.Now()
	key := first.heldKeys()[0] // read now, too
	held := h.ask(buf, mine, false, wait)
	took := time.Since(began)
	if !isSet && took >= known.long()/parts {
		known.still(key, len(held) > 0)
	}
	if len(held) > 0 && took < pause {
		<-time.After(pause - took)
	}
	return append(others, held...)
}
