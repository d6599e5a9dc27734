package engine

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Breaker is a circuit breaker. During an outage, it keeps calls from waiting until their Timeout ends. The breaker
// opens after BreakerFailures failed statements in a row. A statement fails if Postgres is away or slow, or if the pool
// is exhausted. An open breaker turns all calls away for BreakerPause. After the pause, it lets one call at a time ask
// the database, as a probe. A failed probe begins another pause, and a successful probe closes the breaker. The breaker
// counts statements, not calls, so a failed statement for 64 calls is one failure. A call whose caller has left is not
// a failure.
//
// The breaker has a separate state for each kind of request.
//
// The breaker never turns away requests of a limiter with ReturnsErrors. Callers of such a limiter could not
// distinguish an error of the breaker from an error of Postgres. While the breaker is open, each of these requests is a
// probe.
type Breaker struct {
	shard   int
	Timeout time.Duration       // the Timeout of a call
	told    func(BreakerChange) // may be nil
	Begin   time.Time           // the breaker's clock counts from here, in nanoseconds
	of      [kindCount]struct {
		probeAt  atomic.Int64 // when the next probe may be sent; 0 if the breaker is closed
		failures int          // failed statements in a row; guarded by mu
	}
	mu sync.Mutex
}

const (
	// BreakerFailures is how many failures in a row open the breaker. With two statements in flight, one broken
	// connection or one slow batch causes at most two failures. If every statement takes the whole Timeout, the breaker
	// opens after at most two Timeouts.
	BreakerFailures = 3
	// BreakerPause is long compared with a call. BreakerPause is short enough that limiters work again within 2 s after
	// the database is back. In the worst case, a probe is sent just before the database is back. With the default
	// Timeout of 1 s, that probe and the next pause take 1.5 s.
	BreakerPause = 500 * time.Millisecond
)

func (b *Breaker) clock() time.Duration { return time.Since(b.Begin) }

// Admit returns whether a request may ask the database (always if asksAnyway), and whether the request is a probe.
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
	// If a caller gives up a probe before it is sent, Record is never called. Another probe may be sent at time next.
	next := now + b.Timeout + BreakerPause
	probe = now >= time.Duration(at) && probeAt.CompareAndSwap(at, int64(next))
	return probe, probe
}

// IsOpen returns whether the breaker is open for a kind of request. An open breaker turns away all requests but probes.
func (b *Breaker) IsOpen(k kind) bool { return b.of[k].probeAt.Load() != 0 }

// turnAway ends the requests that must not be sent because the breaker has opened since they came. It returns the
// remaining requests, and whether one of them is a probe. All requests must be of one kind.
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

// Record counts the result of a statement, and opens or closes the breaker. The argument probe says whether one of the
// statement's requests was a probe. Record returns true if it has just closed the breaker.
func (b *Breaker) Record(k kind, err error, probe bool) (closed bool) {
	if _, ok := errors.AsType[*pg.Error](err); !ok && err != nil {
		return false // no statement was sent
	}
	b.mu.Lock()
	of, wasOpen := &b.of[k], b.IsOpen(k)
	switch {
	case wasOpen && !probe: // the statement was sent before the breaker opened
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

// open opens the breaker, or keeps it open, until BreakerPause from now. The caller holds b.mu.
func (b *Breaker) open(k kind) { b.of[k].probeAt.Store(int64(b.clock() + BreakerPause)) }

// close closes the breaker, and sets its count of failures to 0. The caller holds b.mu.
func (b *Breaker) close(k kind) {
	b.of[k].failures = 0
	b.of[k].probeAt.Store(0)
}
