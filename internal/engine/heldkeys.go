package engine

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

	Mu   sync.Mutex
	Rows map[HeldKey]heldRow // nil if there are none
	size atomic.Int32        // of rows, to be read without the mutex
}

const (
	maxHeldKeys = 1024

	// MaxRowWait is long compared with statements of others, which take a few milliseconds at most. It is short
	// enough for a caller not to notice.
	MaxRowWait = 10 * time.Millisecond
)

// HeldKey is a key of a limiter.
type HeldKey struct {
	durable   bool
	name, key string
}

// heldRow is what is known of a key that was found locked.
type heldRow struct {
	by           int64 // the transaction that has locked it; 0 if the row is being made
	since, until time.Time
	seen         time.Time // when that transaction was last found to hold it
	Sure         bool      // some transaction has held it for longer than a statement of ours would
	waited       bool      // a statement for it alone has waited for that transaction in vain
}

// patience is how long a call waits for a held row, counted from when the call was made.
func (h *heldKeys) Patience() time.Duration { return h.timeout / 4 }

// long is how long a row must be held for it to be no statement of ours.
func (h *heldKeys) long() time.Duration { return min(MaxRowWait, h.Patience()) }

// memory is how long a key counts as held after it was found so. It is longer than the time between two
// transactions that hold the key in turn.
func (h *heldKeys) Memory() time.Duration { return max(h.Patience(), 100*time.Millisecond) }

// HeldKeys are the keys that a request asks for: one, except for AllowAll.
func (r *Request) HeldKeys() []HeldKey {
	n := len(r.Parts)
	if r.Policy != nil { // the rows of all its policies count as one key
		n = 1
	}
	keys := make([]HeldKey, n)
	for i := range keys {
		p := &r.Parts[i]
		keys[i] = HeldKey{p.Space.Durable, p.Name, p.Key}
	}
	return keys
}

// lockedBy returns which transactions have locked a request's keys, in their order. For a key that none has
// locked, or that the statement did not come to, it is notLocked.
func (r *Request) lockedBy() []int64 {
	holders := make([]int64, len(r.Parts))
	for i := range r.Parts {
		holders[i] = NotLocked
		if d := &r.Parts[i].Decision; d.Granted == Locked {
			holders[i] = d.Remaining
		}
	}
	if r.Policy != nil {
		return []int64{slices.Max(holders)}
	}
	return holders
}

// NotLocked stands for the transaction that has locked a row where there is none.
const NotLocked = -1

// knows tells whether one of a request's keys is surely held.
func (h *heldKeys) Knows(r *Request) bool {
	if h.size.Load() == 0 || r.Looks() {
		return false
	}
	h.Mu.Lock()
	defer h.Mu.Unlock()
	_, ok := h.find(r)
	return ok
}

// longHeld returns what is known of a request's key, if it was seen to be held for so long that the caller can be told.
// Half the patience is enough, because the row was first looked at some statements after the call was made.
func (h *heldKeys) longHeld(r *Request) (row heldRow, long bool) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	row, ok := h.find(r)
	return row, ok && row.seen.Sub(row.since) >= h.Patience()/2
}

// find returns the first key of a request that is surely held. h.mu is locked.
func (h *heldKeys) find(r *Request) (row heldRow, ok bool) {
	if len(h.Rows) == 0 || r.Looks() {
		return heldRow{}, false
	}
	now := time.Now()
	for _, key := range r.HeldKeys() {
		switch row, ok := h.Rows[key]; {
		case ok && !now.Before(row.until):
			h.delete(key)
		case row.Sure:
			return row, true
		}
	}
	return heldRow{}, false
}

// noTime is the error for callers whom held rows have left no time.
func (h *heldKeys) NoTime(r *Request) error {
	if _, held := h.longHeld(r); held {
		return keyHeld()
	}
	return errOthersHeld
}

// decided forgets keys that others have held for a moment only, or rows that they have made.
func (h *heldKeys) Decided(requests []*Request) {
	if h.size.Load() == 0 {
		return
	}
	h.Mu.Lock()
	defer h.Mu.Unlock()
	for _, r := range requests {
		if r.PassedOver() {
			continue
		}
		for _, key := range r.HeldKeys() {
			if row, ok := h.Rows[key]; ok && (!row.Sure || row.by == 0) {
				h.delete(key)
			}
		}
	}
}

// found remembers which transactions lock a request's keys, and tells whether one of the keys is surely held.
func (h *heldKeys) Found(r *Request, holders []int64) (sure bool) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	now := time.Now()
	if len(h.Rows) >= maxHeldKeys {
		for key, row := range h.Rows {
			if !now.Before(row.until) {
				h.delete(key)
			}
		}
	}
	for i, key := range r.HeldKeys() {
		if holders[i] == NotLocked {
			continue
		}
		row, ok := h.Rows[key]
		if !ok && len(h.Rows) >= maxHeldKeys {
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
		if long || !row.Sure {
			row.until = now.Add(h.Memory())
		}
		row.Sure = row.Sure || long
		if h.Rows == nil {
			h.Rows = make(map[HeldKey]heldRow)
		}
		key.key = strings.Clone(key.key)
		h.Rows[key] = row
		h.size.Store(int32(len(h.Rows)))
		sure = sure || row.Sure
	}
	return sure
}

// still makes a key count as held for another moment, because a statement for it alone has waited for long.
func (h *heldKeys) Still(key HeldKey, inVain bool) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	if row, ok := h.Rows[key]; ok {
		row.until = time.Now().Add(h.Memory())
		row.waited = row.waited || inVain
		h.Rows[key] = row
	}
}

func (h *heldKeys) delete(key HeldKey) {
	delete(h.Rows, key)
	h.size.Store(int32(len(h.Rows)))
}
