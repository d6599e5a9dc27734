package ratelimit

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Observer has functions that a [Client] calls, for metrics and logs: see packages observe and otelratelimit. Each
// function may be nil. The functions must be quick, and safe for concurrent use. No event has a key. Only DeniedKey
// gets one.
type Observer struct {
	// Decision is called after each Allow, AllowN, Peek, Hold, Reserve and TryAcquire, and for each request of an
	// [AllowAll] or [HoldAll], also in a transaction. Waits that are decided together make one event, with the sum of
	// their costs. Acquire makes none.
	Decision func(DecisionEvent)
	// Statement is called after each statement on a pool. If a row was locked, a key was refused or keys are on several
	// shards, the event has an Err, and later statements decide the calls.
	Statement func(StatementEvent)
	// Lease is called after a lease was taken, and after its rest was given back or lost.
	Lease func(LeaseEvent)
	// Breaker is called when the circuit breaker opens, so that OnFailure answers at once, and when it closes.
	Breaker func(BreakerEvent)
	// Renewal is called after each renewal of slots: see [Limiter.Acquire].
	Renewal func(RenewalEvent)
	// DeniedKey is called after Decision, if the decision is a denial of a cost above 0. A key is personal data, so
	// DeniedKey must not log it, or make it a label of a metric. Package livepage counts the keys denied most.
	DeniedKey func(limiter, key string)
}

// Observers returns an observer that tells all of the observers, in their order. Observers may be nil.
func Observers(observers ...*Observer) *Observer {
	all := &Observer{}
	for _, o := range observers {
		if o == nil {
			continue
		}
		all.Decision = both(all.Decision, o.Decision)
		all.Statement = both(all.Statement, o.Statement)
		all.Lease = both(all.Lease, o.Lease)
		all.Breaker = both(all.Breaker, o.Breaker)
		all.Renewal = both(all.Renewal, o.Renewal)
		if first, second := all.DeniedKey, o.DeniedKey; first == nil {
			all.DeniedKey = second
		} else if second != nil {
			all.DeniedKey = func(limiter, key string) {
				first(limiter, key)
				second(limiter, key)
			}
		}
	}
	return all
}

// both returns a function that calls both functions. Each may be nil.
func both[E any](first, second func(E)) func(E) {
	switch {
	case first == nil:
		return second
	case second == nil:
		return first
	}
	return func(e E) {
		first(e)
		second(e)
	}
}

// DecisionEvent is a call that has ended.
type DecisionEvent struct {
	Limiter string // Config.Name
	Cost    int64  // 0 for a Peek, and for a request that had room in an AllowAll that was denied
	Result  Result // zero if there is an Err
	Err     error
	Latency time.Duration // of the whole AllowAll, if the call is part of one
}

// Outcome returns "allowed", "denied" or "error".
func (e DecisionEvent) Outcome() string {
	switch {
	case e.Err != nil:
		return "error"
	case e.Result.Allowed:
		return "allowed"
	default:
		return "denied"
	}
}

// ShadowOutcome returns "allowed" or "denied", or "" without a Shadow.
func (e DecisionEvent) ShadowOutcome() string {
	if e.Result.Shadow == nil {
		return ""
	}
	return DecisionEvent{Result: *e.Result.Shadow}.Outcome()
}

// StatementEvent is a statement that has ended.
type StatementEvent struct {
	Limiter string // Config.Name; "" if it decided for several limiters
	Shard   int    // the shard behind a proxy, counted from 0
	Size    int    // the number of calls that the statement decided
	Queued  int    // the number of calls that waited for a later statement when this one was sent
	Err     error  // nil if the statement decided
	Latency time.Duration
}

// LeaseEvent counts units of leases. Each Taken unit is spent ([SourceLease]), Returned, Stranded or still in a lease.
type LeaseEvent struct {
	Limiter  string // Config.Name
	Taken    int64  // taken beyond what the callers asked for
	Returned int64  // given back unused
	Stranded int64  // counted as used, because they could not be given back, or made room in a bucket
}

// BreakerEvent says that a circuit breaker has opened or closed.
type BreakerEvent struct {
	// Limits is "ephemeral", "durable", "synchronous" (SynchronousCommit), "several" (an AllowAll over these), or
	// "slots" (of all limiters).
	Limits string
	Shard  int   // the shard behind a proxy, counted from 0
	Open   bool  // true while OnFailure answers, and only one call at a time asks Postgres
	Err    error // the cause, if Open; with an ErrPoolExhausted, Postgres may work
}

// RenewalEvent is a statement that has renewed slots and places in line. A renewal that has failed is repeated.
type RenewalEvent struct {
	Slots    int           // how many were to be renewed
	TTL      time.Duration // [SlotOptions].TTL of all of them
	Lost     int           // how many of them the database has no more
	Failures int           // how many renewals in a row have failed, up to this one
	Err      error
}

// hooks returns the functions by which the engine tells the observer.
func (o *Observer) hooks() (h engine.Hooks) {
	if o == nil {
		return h
	}
	if o.Statement != nil {
		h.Statement = func(e engine.Statement) {
			e.Err = publicError(e.Err)
			o.Statement(StatementEvent(e))
		}
	}
	if o.Lease != nil {
		h.Lease = func(e engine.LeaseUse) { o.Lease(LeaseEvent(e)) }
	}
	if o.Breaker != nil {
		h.Breaker = func(e engine.BreakerChange) {
			o.Breaker(BreakerEvent{Limits: e.Kind, Shard: e.Shard, Open: e.Open, Err: publicError(e.Err)})
		}
	}
	if o.Renewal != nil {
		h.Renewal = func(e keeper.Renewal) {
			e.Err = publicError(e.Err)
			o.Renewal(RenewalEvent(e))
		}
	}
	return h
}

// ErrorKind returns a word for an error, for metrics: "invalid_key", "invalid_cost", "invalid_request"
// ([RequestError]), "invalid_hold" ([HoldError]), "hold_unknown", "hold_ended", "invalid_slot" ([SlotError]),
// "slot_released", "slot_lost", "sharded", "would_exceed_deadline", "not_migrated", "newer_schema", "not_permitted",
// "prepared_statements", "setup", "read_only", "key_held", "pool_exhausted", "timeout", "unavailable", "context" (the
// context has ended), "other", or "" for nil.
func ErrorKind(err error) string {
	_, invalid := errors.AsType[*RequestError](err)
	_, invalidHold := errors.AsType[*HoldError](err)
	_, invalidSlot := errors.AsType[*SlotError](err)
	switch {
	case err == nil:
		return ""
	case errors.Is(err, ErrInvalidKey):
		return "invalid_key"
	case errors.Is(err, ErrInvalidCost), errors.Is(err, ErrCostExceedsLimit):
		return "invalid_cost"
	case invalidHold:
		return "invalid_hold"
	case errors.Is(err, ErrHoldUnknown):
		return "hold_unknown"
	case errors.Is(err, ErrHoldEnded):
		return "hold_ended"
	case invalidSlot:
		return "invalid_slot"
	case errors.Is(err, ErrSlotReleased):
		return "slot_released"
	case errors.Is(err, ErrSlotLost):
		return "slot_lost"
	case errors.Is(err, ErrWouldExceedDeadline):
		return "would_exceed_deadline"
	case invalid && !errors.Is(err, ErrSharded):
		return "invalid_request"
	}
	return pg.KindOf(err)
}
