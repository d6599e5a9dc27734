package engine

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Breaker tells whether to ask the database at all, so that an outage does not cost every call its Timeout. It opens
// after BreakerFailures statements in a row have failed because Postgres is away or slow, or because the pool was
// exhausted. Then nobody asks for BreakerPause. After that, one call at a time goes to the database as usual: the
// probe. All others are answered at once. A probe that fails begins another pause, and a probe that succeeds closes the
// breaker. Statements count, not calls: 64 calls that shared a broken connection are one failure. A caller who leaves
// is no failure.
//
// Each kind of request has its own state. If somebody locks one table, the limits of the other one stay in force.
//
// The breaker turns no request away if its limiter returns errors. The caller would get an error for a call that was
// never made, and could not tell it from others. While the breaker is open, each of these calls is a probe.
type Breaker struct {
	shard   int
	Timeout time.Duration       // of calls
	told    func(BreakerChange) // may be nil
	Begin   time.Time           // the breaker's clock counts from here, in nanoseconds
	of      [kindCount]struct {
		probeAt  atomic.Int64 // when the next probe may leave; 0 if the breaker is closed
		failures int          // in a row; guarded by mu
	}
	mu sync.Mutex
}

const (
	// BreakerFailures is more than one broken connection or one slow batch can cause with two statements in flight. If
	// every statement takes the whole Timeout, the breaker opens within two Timeouts.
	BreakerFailures = 3
	// BreakerPause is long compared with a call, and short enough for a limiter to be back 2 s after the database. In
	// the worst case, a probe is lost just before the database comes back. With the default Timeout of 1 s, that probe
	// and the pause after it end 1.5 s later.
	BreakerPause = 500 * time.Millisecond
)

func (b *Breaker) clock() time.Duration { return time.Since(b.Begin) }

// Admit tells whether a request of a kind may ask the database, and whether it is a probe. A request with asksAnyway is
// never turned away.
func (b *Breaker) Admit(k kind, asksAnyway bool) (pass, probe bool) {
	probeAt := &b.of[k].probeAt
	at := probeAt.Load()
	if at == 0 {
		return true, false
	}
	if asksAnyway {
		return true, true
	}
	now := b.clock()
	// A probe may be given up before it is sent, and never reported. The next one leaves this much later at most.
	next := now + b.Timeout + BreakerPause
	probe = now >= time.Duration(at) && probeAt.CompareAndSwap(at, int64(next))
	return probe, probe
}

// IsOpen tells whether requests of a kind are turned away, except probes.
func (b *Breaker) IsOpen(k kind) bool { return b.of[k].probeAt.Load() != 0 }

// turnAway ends the requests that must not ask because the breaker has opened since they were submitted. It returns the
// others, and whether one of them is a probe. All requests are of one kind.
func (b *Breaker) turnAway(requests []*Request) (others []*Request, probe bool) {
	if len(requests) == 0 || !b.IsOpen(requests[0].kind()) {
		return requests, slices.ContainsFunc(requests, func(r *Request) bool { return r.Probe })
	}
	for _, r := range requests {
		if r.Probe || r.asksAnyway() {
			others = append(others, r)
		} else {
			r.Finish(ErrNotTried)
		}
	}
	return others, len(others) > 0
}

// Record notes how a statement for requests of a kind has ended, and opens or closes the breaker. probe tells whether
// one of the requests was a probe. It returns whether the breaker has closed now.
func (b *Breaker) Record(k kind, err error, probe bool) (closed bool) {
	if _, ok := errors.AsType[*pg.Error](err); !ok && err != nil {
		return false // no statement was sent
	}
	b.mu.Lock()
	of, wasOpen := &b.of[k], b.IsOpen(k)
	switch {
	case wasOpen && !probe: // it was sent before the breaker opened
	case pg.IsAway(err):
		if of.failures++; of.failures >= BreakerFailures {
			b.open(k)
		}
	default:
		b.close(k)
	}
	isOpen := b.IsOpen(k)
	b.mu.Unlock()
	if isOpen != wasOpen && b.told != nil {
		b.told(BreakerChange{Kind: k.String(), Shard: b.shard, Open: isOpen, Err: err})
	}
	return wasOpen && !isOpen
}

// open opens the breaker for a BreakerPause, or keeps it open for another one. The caller holds b.mu.
func (b *Breaker) open(k kind) { b.of[k].probeAt.Store(int64(b.clock() + BreakerPause)) }

// close closes the breaker, and forgets the failures. The caller holds b.mu.
func (b *Breaker) close(k kind) {
	b.of[k].failures = 0
	b.of[k].probeAt.Store(0)
}
