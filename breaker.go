package ratelimit

import (
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// breaker tells whether to ask the database at all, so that an outage does not cost every call its Config.Timeout. It is closed until
// breakerFailures statements in a row have failed because Postgres is away or slow. Then it is open: for breakerPause nobody asks;
// after that one call at a time, the probe, goes to the database as any other, and everybody else is answered at once. A probe that
// fails begins another pause, and one that does not closes the breaker. Statements count, not calls: 64 calls that shared a broken
// connection are one failure, and a caller who leaves is none.
//
// A limiter that returns errors has no breaker: a call that is not made is an error that its caller could not tell from the
// others, and would have to explain.
type breaker struct {
	config  Config
	begin   time.Time    // the breaker's clock, in nanoseconds, counts from here
	probeAt atomic.Int64 // when the next call may try, or 0: the breaker is closed

	mu       sync.Mutex
	failures int           // in a row
	opened   time.Duration // when it last was
}

const (
	// breakerFailures is more than what one connection that breaks or one batch that is slow can cause, with two in flight; where
	// every statement takes the whole Timeout, the breaker opens within two of them.
	breakerFailures = 3
	// breakerPause is short beside the 2 s within which a limiter is to be back, and long beside a call: with the default Timeout of
	// 1 s, a probe that has just been swallowed and the pause behind it end 1.5 s after the database has come back.
	breakerPause = 500 * time.Millisecond
)

// errNotTried is why a call is not made while the breaker is open. Callers see OnFailure's answer instead.
var errNotTried error = &StoreError{
	kinds: []error{ErrUnavailable},
	err:   errors.New("it has just failed, and is tried by one call at a time; this was not the one"),
}

func newBreaker(config Config) *breaker {
	if config.OnFailure.answer <= returnError {
		return nil
	}
	return &breaker{config: config, begin: time.Now()}
}

func (b *breaker) clock() time.Duration { return time.Since(b.begin) }

// pass tells whether a call may ask the database, and whether it is the probe.
func (b *breaker) pass() (pass, probe bool) {
	if b == nil {
		return true, false
	}
	at := b.probeAt.Load()
	if at == 0 {
		return true, false
	}
	now := b.clock()
	// A probe that is never heard of again, because it waited too long to be sent, holds up the next one no longer than this.
	next := now + b.config.Timeout + breakerPause
	probe = now >= time.Duration(at) && b.probeAt.CompareAndSwap(at, int64(next))
	return probe, probe
}

// open tells whether calls other than the probe are turned away.
func (b *breaker) open() bool { return b != nil && b.probeAt.Load() != 0 }

// report tells how a statement has ended; probe, whether the probe was part of it.
func (b *breaker) report(err error, probe bool) {
	if b == nil {
		return
	}
	if _, ok := errors.AsType[*StoreError](err); !ok && err != nil {
		return // it never came to a statement
	}
	b.mu.Lock()
	wasOpen, failed, now := b.open(), isAway(err), b.clock()
	switch {
	case wasOpen && !probe: // it was sent before the breaker opened
	case !failed:
		b.failures = 0
		b.probeAt.Store(0)
	default:
		b.failures++
		if b.failures >= breakerFailures {
			b.probeAt.Store(int64(now + breakerPause))
		}
	}
	isOpen := b.open()
	if isOpen && !wasOpen {
		b.opened = now
	}
	away := now - b.opened
	b.mu.Unlock()
	if isOpen != wasOpen {
		b.tell(isOpen, err, away)
	}
}

// tell tells that the breaker has opened, because of err, or has closed, after that time.
func (b *breaker) tell(open bool, err error, away time.Duration) {
	name := b.config.Name
	switch log := b.config.Logger; {
	case log == nil:
	case open:
		log.Warn("ratelimit: Postgres is away or slow", "limiter", name, "until it is back", b.config.OnFailure.String(), "error", err)
	default:
		log.Info("ratelimit: Postgres decides again", "limiter", name, "after", away)
	}
	if o := b.config.Observer; o != nil && o.Breaker != nil {
		o.Breaker(BreakerEvent{Limiter: name, Open: open, Err: err})
	}
}

// isAway tells whether an error means that Postgres is away or slow. A fault of the set-up does not: it has to be seen, and waiting
// does not mend it. Nor does a row that somebody's transaction holds: Postgres has answered, and whoever can keep a row locked must
// not be let through for it; a locked table is an outage.
func isAway(err error) bool {
	_, ok := errors.AsType[*StoreError](err)
	held := errors.Is(err, ErrKeyHeld) || errors.Is(err, errHeldUp) || lockTimeout(err) && !errors.Is(err, ErrUnavailable)
	return ok && !held && (errors.Is(err, ErrUnavailable) || errors.Is(err, ErrTimeout) || errors.Is(err, ErrOutcomeUnknown))
}

// board turns away the calls of a batch that must not be made, because the breaker has opened since they were asked for. It returns
// the others, and whether the probe is one of them.
func (b *breaker) board(batch []*call) (others []*call, probe bool) {
	if b == nil {
		return batch, false
	}
	if !b.open() {
		return batch, slices.ContainsFunc(batch, isProbe)
	}
	for _, c := range batch {
		if isProbe(c) {
			others = append(others, c)
		} else {
			c.finish(Result{}, errNotTried)
		}
	}
	return others, len(others) > 0
}

func isProbe(c *call) bool { return c.probe }
