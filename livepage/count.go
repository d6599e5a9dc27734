package livepage

import (
	"maps"
	"math/bits"
	"sync/atomic"
	"time"
)

// count counts the decisions of a limiter.
type count struct {
	allowed, denied, errors            atomic.Int64
	remembered, leased                 atomic.Int64 // decided by this process
	failedOpen, failedClosed, fallback atomic.Int64 // decided by OnFailure
	taken, returned, stranded          atomic.Int64 // units of leases
	latency                            histogram
}

// statements counts the statements of all limiters. A statement can decide for several limiters.
type statements struct {
	sent, calls, errors atomic.Int64
	latency             histogram
}

func (s *statements) reset() {
	s.sent.Store(0)
	s.calls.Store(0)
	s.errors.Store(0)
	for i := range s.latency.buckets {
		s.latency.buckets[i].Store(0)
	}
}

// countOf returns the count of a limiter. Only the first event of a limiter allocates.
func (p *Page) countOf(limiter string) *count {
	if c := (*p.counts.Load())[limiter]; c != nil {
		return c
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := *p.counts.Load()
	if old[limiter] == nil && len(old) >= maxLimiters {
		limiter = others
	}
	if c := old[limiter]; c != nil {
		return c
	}
	c := &count{}
	all := maps.Clone(old)
	all[limiter] = c
	p.counts.Store(&all)
	return c
}

// histogram counts durations in buckets. The upper end of a bucket is at most a quarter above its lower end.
type histogram struct{ buckets [256]atomic.Int64 }

func (h *histogram) add(d time.Duration) { h.buckets[bucketOf(d)].Add(1) }

// bucketOf returns the bucket of a duration: four for each power of two nanoseconds.
func bucketOf(d time.Duration) int {
	n := uint64(max(d, 4))
	power := bits.Len64(n) - 1
	return power<<2 | int(n>>(power-2)&3)
}

// endOf returns the upper end of a bucket.
func endOf(bucket int) time.Duration {
	return time.Duration(uint64(5+bucket&3) << (bucket>>2 - 2))
}

// quantile returns the upper end of the bucket that has the quantile, or 0 without durations.
func (h *histogram) quantile(q float64) time.Duration {
	var counts [len(h.buckets)]int64
	var total int64
	for i := range counts {
		counts[i] = h.buckets[i].Load()
		total += counts[i]
	}
	rank := int64(q * float64(total))
	for i, n := range counts {
		if rank -= n; rank < 0 {
			return endOf(i)
		}
	}
	return 0
}
