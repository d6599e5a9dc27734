package engine

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// heldKeys remembers which keys other transactions have recently kept locked.
type heldKeys struct {
	timeout time.Duration // the Timeout of a call

	Mu   sync.Mutex
	Rows map[HeldKey]heldRow // nil if no key is held
	size atomic.Int32        // the length of Rows, to be read without the mutex
}

const (
	maxHeldKeys = 1024

	// MaxRowWait is the longest rowWait. Statements of other processes take a few milliseconds, so a wait of MaxRowWait
	// is long enough for them. MaxRowWait is also so short that callers do not notice it.
	MaxRowWait = 10 * time.Millisecond
)

// HeldKey is a key of a limiter, in one of the two tables.
type HeldKey struct {
	durable   bool
	name, key string
}

type heldRow struct {
	by           int64 // the transaction that has locked the row; 0 if the row is being inserted
	since, until time.Time
	seen         time.Time // when the transaction was last found to lock the row
	Sure         bool      // a transaction has kept the row locked for longer than the engine's statements do
	waited       bool      // a statement for this key alone has waited for the transaction in vain
}

// Patience returns how long a call waits for a locked row, counted from the start of the call.
func (h *heldKeys) Patience() time.Duration { return h.timeout / 4 }

// long returns how long a row must be locked to count as surely held. The engine's statements lock rows for less time.
func (h *heldKeys) long() time.Duration { return min(MaxRowWait, h.Patience()) }

// Memory returns how long a key counts as held after it was found locked. The result is longer than the pause between
// two transactions that take turns in locking the key.
func (h *heldKeys) Memory() time.Duration { return max(h.Patience(), 100*time.Millisecond) }

// HeldKeys returns the keys that a request asks for. Only a request of AllowAll has more than one key.
func (r *Request) HeldKeys() []HeldKey {
	n := len(r.Parts)
	if r.Policy != nil { // a limiter of several policies has several rows, which count as one key
		n = 1
	}
	keys := make([]HeldKey, n)
	for i := range keys {
		p := &r.Parts[i]
		keys[i] = HeldKey{p.Space.Durable, p.Name, p.Key}
	}
	return keys
}

// lockedBy returns, for each key of a request, the id of the transaction that has locked the row. The id is NotLocked
// if no transaction has locked the row, or if the statement has not reached the key.
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

// NotLocked stands for "no transaction" in place of a transaction's id.
const NotLocked = -1

// Knows returns whether one of a request's keys is surely held.
func (h *heldKeys) Knows(r *Request) bool {
	if h.size.Load() == 0 || r.Looks() {
		return false
	}
	h.Mu.Lock()
	defer h.Mu.Unlock()
	_, ok := h.find(r)
	return ok
}

// longHeld returns the held row of a request, and whether the row was locked for so long that the caller gets an error.
// Half of Patience is long enough, because the row was first found locked several statements after the start of the
// call.
func (h *heldKeys) longHeld(r *Request) (row heldRow, long bool) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	row, ok := h.find(r)
	return row, ok && row.seen.Sub(row.since) >= h.Patience()/2
}

// find returns the first surely held row of a request. The caller holds h.Mu.
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

// NoTime returns the error for a caller whose timeout has passed while statements waited for locks.
func (h *heldKeys) NoTime(r *Request) error {
	if _, held := h.longHeld(r); held {
		return keyHeld()
	}
	return errOthersHeld
}

// Decided forgets the keys of decided requests, because nobody locks their rows any more. It keeps the keys that were
// surely held, unless their row was being inserted.
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

// Found remembers which transactions lock a request's keys. It returns whether one of the keys is surely held.
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
			sure = true // the map is full, so the request goes to the lane, where its row is found locked again
			continue
		}
		if ok && !now.Before(row.until) {
			row = heldRow{}
		}
		if row.since.IsZero() || row.by != holders[i] {
			row.by, row.since, row.waited = holders[i], now, false
		}
		row.seen = now
		// A row that is being inserted counts as held at once, because a statement has already waited for it.
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

// Still makes a key count as held for another Memory(). A statement for this key alone has just waited for long(). The
// argument inVain says whether the key was still locked after this wait.
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
