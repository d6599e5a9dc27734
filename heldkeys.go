package ratelimit

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// heldKeys knows which keys were found locked a moment ago, by transactions that are not statements of ours.
type heldKeys struct {
	timeout time.Duration // of calls

	mu   sync.Mutex
	rows map[heldKey]heldRow // nil if there are none
	size atomic.Int32        // of rows, to be read without the mutex
}

const (
	maxHeldKeys = 1024

	// maxRowWait is long compared with statements of others, which take a few milliseconds at most. It is short
	// enough for a caller not to notice.
	maxRowWait = 10 * time.Millisecond
)

// heldKey is a key of a limiter.
type heldKey struct {
	durable   bool
	name, key string
}

// heldRow is what is known of a key that was found locked.
type heldRow struct {
	by           int64 // the transaction that has locked it; 0 if the row is being made
	since, until time.Time
	seen         time.Time // when that transaction was last found to hold it
	sure         bool      // some transaction has held it for longer than a statement of ours would
	waited       bool      // a statement for it alone has waited for that transaction in vain
}

// patience is how long a call waits for a held row, counted from when the call was made.
func (h *heldKeys) patience() time.Duration { return h.timeout / 4 }

// long is how long a row must be held for it to be no statement of ours.
func (h *heldKeys) long() time.Duration { return min(maxRowWait, h.patience()) }

// memory is how long a key counts as held after it was found so. It is longer than the time between two
// transactions that hold the key in turn.
func (h *heldKeys) memory() time.Duration { return max(h.patience(), 100*time.Millisecond) }

// heldKeys are the keys that a request asks for: one, except for AllowAll.
func (r *request) heldKeys() []heldKey {
	n := len(r.parts)
	if r.policy != nil { // the rows of all its policies count as one key
		n = 1
	}
	keys := make([]heldKey, n)
	for i := range keys {
		p := &r.parts[i]
		keys[i] = heldKey{p.space.durable, p.name, p.key}
	}
	return keys
}

// lockedBy returns which transactions have locked a request's keys, in their order. For a key that none has
// locked, or that the statement did not come to, it is notLocked.
func (r *request) lockedBy() []int64 {
	holders := make([]int64, len(r.parts))
	for i := range r.parts {
		holders[i] = notLocked
		if d := &r.parts[i].decision; d.Granted == locked {
			holders[i] = d.Remaining
		}
	}
	if r.policy != nil {
		return []int64{slices.Max(holders)}
	}
	return holders
}

const notLocked = -1

// knows tells whether one of a request's keys is surely held.
func (h *heldKeys) knows(r *request) bool {
	if h.size.Load() == 0 || r.looks() {
		return false
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.find(r)
	return ok
}

// longHeld returns what is known of a request's key, if it was seen to be held for so long that the caller can be told.
// Half the patience is enough, because the row was first looked at some statements after the call was made.
func (h *heldKeys) longHeld(r *request) (row heldRow, long bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	row, ok := h.find(r)
	return row, ok && row.seen.Sub(row.since) >= h.patience()/2
}

// find returns the first key of a request that is surely held. h.mu is locked.
func (h *heldKeys) find(r *request) (row heldRow, ok bool) {
	if len(h.rows) == 0 || r.looks() {
		return heldRow{}, false
	}
	now := time.Now()
	for _, key := range r.heldKeys() {
		switch row, ok := h.rows[key]; {
		case ok && !now.Before(row.until):
			h.delete(key)
		case row.sure:
			return row, true
		}
	}
	return heldRow{}, false
}

// noTime is the error for callers whom held rows have left no time.
func (h *heldKeys) noTime(r *request) error {
	if _, held := h.longHeld(r); held {
		return keyHeld()
	}
	return errOthersHeld
}

// decided forgets keys that others have held for a moment only, or rows that they have made.
func (h *heldKeys) decided(requests []*request) {
	if h.size.Load() == 0 {
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, r := range requests {
		if r.passedOver() {
			continue
		}
		for _, key := range r.heldKeys() {
			if row, ok := h.rows[key]; ok && (!row.sure || row.by == 0) {
				h.delete(key)
			}
		}
	}
}

// found remembers which transactions lock a request's keys, and tells whether one of the keys is surely held.
func (h *heldKeys) found(r *request, holders []int64) (sure bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	if len(h.rows) >= maxHeldKeys {
		for key, row := range h.rows {
			if !now.Before(row.until) {
				h.delete(key)
			}
		}
	}
	for i, key := range r.heldKeys() {
		if holders[i] == notLocked {
			continue
		}
		row, ok := h.rows[key]
		if !ok && len(h.rows) >= maxHeldKeys {
			sure = true // there is no room to remember it, and it will be found again
			continue
		}
		if ok && !now.Before(row.until) {
			row = heldRow{}
		}
		if row.since.IsZero() || row.by != holders[i] {
			row.by, row.since, row.waited = holders[i], now, false
		}
		row.seen = now
		// Statements of ours make rows too, but this statement has come after a wait.
		long := row.by == 0 || now.Sub(row.since) >= h.long()
		if long || !row.sure {
			row.until = now.Add(h.memory())
		}
		row.sure = row.sure || long
		if h.rows == nil {
			h.rows = make(map[heldKey]heldRow)
		}
		key.key = strings.Clone(key.key)
		h.rows[key] = row
		h.size.Store(int32(len(h.rows)))
		sure = sure || row.sure
	}
	return sure
}

// still makes a key count as held for another moment, because a statement for it alone has waited for long.
func (h *heldKeys) still(key heldKey, inVain bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if row, ok := h.rows[key]; ok {
		row.until = time.Now().Add(h.memory())
		row.waited = row.waited || inVain
		h.rows[key] = row
	}
}

func (h *heldKeys) delete(key heldKey) {
	delete(h.rows, key)
	h.size.Store(int32(len(h.rows)))
}
