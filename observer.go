package ratelimit

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Observer is told what a client's limiters do, for metrics: see packages observe (logs) and otelratelimit. Functions
// may be nil. Goroutines call them concurrently and wait, so they must be quick. None is told a key.
type Observer struct {
	// Decision is called after each Allow, AllowN and Peek, also in a transaction; for each request of an [AllowAll];
	// and once for all Waits that were asked for together, with the sum of their costs.
	Decision func(DecisionEvent)
	// Statement is called after each statement of a pool. After a held row, a key that the encoding refuses, or keys of
	// several shards, it has an Err, and its calls come again.
	Statement func(StatementEvent)
	// Lease is called when a process has taken ahead, and when it has given back or could not.
	Lease func(LeaseEvent)
	// Breaker is called when OnFailure begins to answer at once, and when Postgres decides again.
	Breaker func(BreakerEvent)
}

// DecisionEvent is a call that has ended.
type DecisionEvent struct {
	Limiter string // Config.Name
	Cost    int64  // 0 if it only looked, or had room in an AllowAll that another limiter denied
	Result  Result // zero if there is an Err
	Err     error
	Latency time.Duration // of the whole AllowAll, if it is part of one
}

// Outcome is "allowed", "denied" or "error".
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

// ShadowOutcome is "allowed" or "denied", or "" without a shadow.
func (e DecisionEvent) ShadowOutcome() string {
	if e.Result.Shadow == nil {
		return ""
	}
	return DecisionEvent{Result: *e.Result.Shadow}.Outcome()
}

// StatementEvent is a statement that has ended.
type StatementEvent struct {
	Limiter string // Config.Name; "" if it decided for several limiters
	Shard   int    // behind a proxy for shards, from 0
	Size    int    // calls that it decided
	Queued  int    // calls that stayed behind when it left
	Err     error  // nil if it decided
	Latency time.Duration
}

// LeaseEvent counts units that a process has taken ahead.
type LeaseEvent struct {
	Limiter  string // Config.Name
	Taken    int64  // beyond what the callers asked for; spent by [SourceLease] + Returned + Stranded + still held
	Returned int64  // unused
	Stranded int64  // counts as used, because it could not go back, or made room in a bucket
}

// BreakerEvent is a change between Postgres and [Config].OnFailure.
type BreakerEvent struct {
	Limits string // "ephemeral", "durable", "synchronous" (SynchronousCommit), or "several" (an AllowAll over these)
	Shard  int    // behind a proxy for shards, from 0
	Open   bool   // OnFailure answers, and one call at a time asks Postgres
	Err    error  // why, if Open; an ErrPoolExhausted if Postgres may be well
}

// hooks has the engine tell the observer.
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
	return h
}

// ErrorKind names an error in a word, for metrics: "invalid_key", "invalid_cost", "invalid_request" ([RequestError]),
// "sharded", "would_exceed_deadline", "not_migrated", "newer_schema", "not_permitted", "prepared_statements", "setup",
// "read_only", "key_held", "pool_exhausted", "timeout", "unavailable", "context" (it has ended), "other", or "" for
// nil.
func ErrorKind(err error) string {
	_, invalid := errors.AsType[*RequestError](err)
	switch {
	case err == nil:
		return ""
	case errors.Is(err, ErrInvalidKey):
		return "invalid_key"
	case errors.Is(err, ErrInvalidCost), errors.Is(err, ErrCostExceedsLimit):
		return "invalid_cost"
	case errors.Is(err, ErrWouldExceedDeadline):
		return "would_exceed_deadline"
	case invalid && !errors.Is(err, ErrSharded):
		return "invalid_request"
	}
	return pg.KindOf(err)
}
