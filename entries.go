package ratelimit

import (
	"encoding/binary"
)

// entries is a log, oldest first. Each entry is 8 bytes: the time in microseconds × 1024 + the units taken. 53
// bits of the time are kept, so it can be told from any other within 285 years. It is a string to make states
// comparable.
type entries string

func newEntries(log []int64) entries {
	var packed []byte
	for _, entry := range log {
		packed = binary.BigEndian.AppendUint64(packed, uint64(entry))
	}
	return entries(packed)
}

func (e entries) entry(i int) int64 { return int64(binary.BigEndian.Uint64([]byte(e[8*i : 8*i+8]))) }

func (e entries) units(i int) int64 { return e.entry(i) & 1023 }

// age is how long before t the i-th entry was taken.
func (e entries) age(i int, t int64) int64 { return (t - e.entry(i)>>10) & (1<<53 - 1) }

// with is the log after n was taken at t, which is not before its newest entry.
func (e entries) with(t, n int64) entries {
	if i := len(e)/8 - 1; i >= 0 && e.age(i, t) == 0 {
		e, n = e[:8*i], n+e.units(i)
	}
	return e + newEntries([]int64{t<<10 | n})
}

// without is the log after up to n of what was taken at t were given back, and how much that is.
func (e entries) without(t, n int64) (rest entries, back int64) {
	for i := range len(e) / 8 {
		entry, units := e.entry(i), e.units(i)
		if entry>>10<<10 != t<<10 {
			continue
		}
		back = min(n, units)
		if back == units {
			return e[:8*i] + e[8*(i+1):], back
		}
		return e[:8*i] + newEntries([]int64{entry - back}) + e[8*(i+1):], back
	}
	return e, 0
}

// shifted is the log as if all had been taken earlier.
func (e entries) shifted(by int64) entries {
	var log []int64
	for i := range len(e) / 8 {
		log = append(log, (e.entry(i)>>10-by)<<10|e.units(i))
	}
	return newEntries(log)
}
