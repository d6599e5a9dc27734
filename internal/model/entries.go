package model

import (
	"encoding/binary"
)

// Entries is a log, with the oldest entry first. Each entry has 8 bytes: the time in microseconds × 1024 + the units
// taken. An entry keeps 53 bits of the time, so entries within 285 years of each other stay distinct. Entries is a
// string so that Go can compare two States with ==.
type Entries string

// NewEntries encodes the values of the table's column log.
func NewEntries(log []int64) Entries {
	var packed []byte
	for _, entry := range log {
		packed = binary.BigEndian.AppendUint64(packed, uint64(entry))
	}
	return Entries(packed)
}

func (e Entries) Entry(i int) int64 { return int64(binary.BigEndian.Uint64([]byte(e[8*i : 8*i+8]))) }

func (e Entries) Units(i int) int64 { return e.Entry(i) & 1023 }

// Age returns the time from the i-th entry to t.
func (e Entries) Age(i int, t int64) int64 { return (t - e.Entry(i)>>10) & (1<<53 - 1) }

// With returns the log plus n units at the time t. t must not be before the newest entry. A charge may need several
// entries of the same time, because an entry has at most MaxLogLimit units.
func (e Entries) With(t, n int64) Entries {
	if i := len(e)/8 - 1; i >= 0 && e.Age(i, t) == 0 {
		e, n = e[:8*i], n+e.Units(i)
	}
	for ; n > MaxLogLimit; n -= MaxLogLimit {
		e += NewEntries([]int64{t<<10 | MaxLogLimit})
	}
	return e + NewEntries([]int64{t<<10 | n})
}

// without removes up to n of the units taken at time t. It returns the rest of the log and how many units it removed.
func (e Entries) without(t, n int64) (rest Entries, back int64) {
	for i := 0; i < len(e)/8 && back < n; {
		entry, before, after := e.Entry(i), e[:8*i], e[8*(i+1):]
		if entry>>10<<10 != t<<10 {
			i++
			continue
		}
		units := min(n-back, e.Units(i))
		if e = before + after; units < entry&1023 {
			e = before + NewEntries([]int64{entry - units}) + after
		}
		back += units
	}
	return e, back
}

// Shifted returns the log with each entry moved back in time by the given microseconds.
func (e Entries) Shifted(by int64) Entries {
	var log []int64
	for i := range len(e) / 8 {
		log = append(log, (e.Entry(i)>>10-by)<<10|e.Units(i))
	}
	return NewEntries(log)
}
