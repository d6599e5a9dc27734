package ratelimit

import (
	"errors"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Observer is told what a client's limiters do, for metrics; see package observe for logs, and otelratelimit for
// OpenTelemetry. Functions may be nil. Goroutines call the others concurrently and wait for them, so they must be
// quick. None is ever told a key. Refund, Grant and Reset are no decisions.
type Observer struct {
	// Decision is called after each Allow, AllowN and Peek, also in a transaction; for each request of an
	// [AllowAll]; and once for all Waits that were asked for together, with the sum of their costs.
	Decision func(DecisionEvent)
	// Statement is called after each statement that calls may share, also of Refund and Grant; not for a single
	// connection. After a held row, a key that the encoding refuses, or keys of several shards, it has an Err, and its
	// calls come again.
	Statement func(StatementEvent)
	// Lease is called when a process has taken more of a key than its callers asked for, and when it has given the rest
	// back, or could not; see [Config].Lease.
	Lease func(LeaseEvent)
	// Breaker is called when OnFailure begins to answer at once, because Postgres is away or too slow or the pool is
	// exhausted, and when Postgres decides again.
	Breaker func(BreakerEvent)
}

// DecisionEvent is a call that has ended. The costs of allowed ones add up to what was let through.
type DecisionEvent struct {
	Limiter string        // Config.Name
	Cost    int64         // 0 if it only looked, or if it had room in an AllowAll that another limiter denied
	Result  Result        // with its Source
	Err     error         // if there is no Result
	Latency time.Duration // of the whole AllowAll, if it is part of one
}

// Outcome is "allowed", "denied" or "error"; in an AllowAll, of this limiter's part.
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

// ShadowOutcome is what a row of the mode shadow would have decided, "allowed" or "denied", or "" if none was asked.
func (e DecisionEvent) ShadowOutcome() string {
	if e.Result.Shadow == nil {
		return ""
	}
	return DecisionEvent{Result: *e.Result.Shadow}.Outcome()
}

// StatementEvent is a statement that has ended.
type StatementEvent struct {
	Limiter string // Config.Name; "" if it decided for several limiters
	Shard   int    // behind a proxy for shards, which one, from 0; else 0
	Size    int    // how many calls it decided
	Queued  int    // how many calls stayed behind when it left
	Err     error  // nil if it decided
	Latency time.Duration
}

// LeaseEvent counts units of keys that a process has taken ahead. Taken is what was spent in decisions with the
// [SourceLease], plus Returned, plus Stranded, plus what is still held.
type LeaseEvent struct {
	Limiter  string // Config.Name
	Taken    int64  // beyond what the callers asked for
	Returned int64  // went back unused; of what does not fit into a bucket, nothing is told
	Stranded int64  // counts as used, because it could not go back, or made room in a bucket: see [Lease]
}

// BreakerEvent is a change between decisions by Postgres and by [Config].OnFailure.
type BreakerEvent struct {
	// Limits are the limiters of the client that it is for: "ephemeral", "durable", "synchronous" (durable, with
	// SynchronousCommit), or "several", which is AllowAll over more than one of these.
	Limits string
	Shard  int // behind a proxy for shards, which one, from 0; else 0

	Open bool  // Postgres is asked by one call at a time only, and by limiters that return errors
	Err  error // why, if Open; an ErrPoolExhausted if Postgres may be well
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

// ErrorKind names an error of a limiter in a word, for metrics: "invalid_key", "invalid_cost",
// "sharded" ([ErrSharded]), "invalid_request" (any other [RequestError]), "would_exceed_deadline", "not_migrated",
// "newer_schema", "not_permitted", "prepared_statements", "setup", "read_only", "key_held", "pool_exhausted",
// "timeout", "unavailable", "context" (the caller's has ended), "other", or "" for nil.
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
