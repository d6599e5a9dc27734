package engine

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// heldKeys knows which keys were found locked a moment ago by transactions of others.
type heldKeys struct {
	timeout time.Duration // of calls

	Mu   sync.Mutex
	Rows map[HeldKey]heldRow // nil if there are none
	size atomic.Int32        // the length of Rows, to be read without the mutex
}

const (
	maxHeldKeys = 1024

	// MaxRowWait is long compared with the statements of other processes, which take a few milliseconds, and short
	// enough for a caller not to notice.
	MaxRowWait = 10 * time.Millisecond
)

// HeldKey is a key of a limiter.
type HeldKey struct {
	durable   bool
	name, key string
}

// heldRow describes a key that was found locked.
type heldRow struct {
	by           int64 // the transaction that has locked it; 0 if the row is being inserted
	since, until time.Time
	seen         time.Time // when that transaction last held it
	Sure         bool      // some transaction has held it for longer than a statement of ours would
	waited       bool      // a statement for this key alone has waited for that transaction in vain
}

// Patience is how long a call waits for a held row, counted from the call.
func (h *heldKeys) Patience() time.Duration { return h.timeout / 4 }

// long is how long a row must be locked to tell a transaction from a statement of ours.
func (h *heldKeys) long() time.Duration { return min(MaxRowWait, h.Patience()) }

// Memory is how long a key counts as held after it was found locked. It is longer than the gap between two transactions
// that lock the key by turns.
func (h *heldKeys) Memory() time.Duration { return max(h.Patience(), 100*time.Millisecond) }

// HeldKeys returns the keys that a request asks for. There is one, except for AllowAll.
func (r *Request) HeldKeys() []HeldKey {
	n := len(r.Parts)
	if r.Policy != nil { // the rows of all policies of an All count as one key
		n = 1
	}
	keys := make([]HeldKey, n)
	for i := range keys {
		p := &r.Parts[i]
		keys[i] = HeldKey{p.Space.Durable, p.Name, p.Key}
	}
	return keys
}

// lockedBy returns the transactions that have locked a request's keys, in the order of the keys. NotLocked stands for a
// key that no transaction has locked, or that the statement did not get to.
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

// NotLocked stands for no transaction.
const NotLocked = -1

// Knows tells whether one of a request's keys is surely held.
func (h *heldKeys) Knows(r *Request) bool {
	if h.size.Load() == 0 || r.Looks() {
		return false
	}
	h.Mu.Lock()
	defer h.Mu.Unlock()
	_, ok := h.find(r)
	return ok
}

// longHeld returns the held row of a request, and whether it was locked for so long that the caller can be told. Half
// the patience is enough, because the row was first looked at some statements after the call.
func (h *heldKeys) longHeld(r *Request) (row heldRow, long bool) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	row, ok := h.find(r)
	return row, ok && row.seen.Sub(row.since) >= h.Patience()/2
}

// find returns the row of the first key of a request that is surely held. The caller holds h.Mu.
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

// NoTime returns the error for a caller whose time was used up by locks.
func (h *heldKeys) NoTime(r *Request) error {
	if _, held := h.longHeld(r); held {
		return keyHeld()
	}
	return errOthersHeld
}

// Decided forgets keys that are not locked any more: those that were locked only for a moment, and those whose row was
// being inserted.
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

// Found remembers which transactions lock a request's keys. It tells whether one of the keys is surely held.
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
		// Statements of ours insert rows too, but this one was found after a wait.
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

// Still makes a key count as held for another Memory, because a statement for it alone has waited for long. inVain
// tells whether the key stayed locked.
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
