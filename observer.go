package ratelimit

import (
	"context"
	"errors"
	"time"
)

// Observer is told what a limiter does, for metrics: see package observe for one that logs, and otelratelimit for one that feeds
// OpenTelemetry. Functions that are nil are not called. The others are called by many goroutines at the same time, and calls wait for
// them, so they must be quick. None of them is ever told a key.
type Observer struct {
	// Decision is called after each Allow, AllowN and Peek, also within a caller's transaction; after an [AllowAll], for each of its
	// requests by its own limiter's observer; and each time that those who Wait have been asked for, together with the sum of their costs.
	// Refund, Grant and Reset decide nothing.
	Decision func(DecisionEvent)
	// Batch is called after each statement in which calls of several callers may have left together, those of Refund and Grant too; so
	// not for a limiter on a single connection. A statement that met a held row, or a key that the encoding refuses, has an Err, and its
	// calls come again in others.
	Batch func(BatchEvent)
	// Breaker is called when decisions begin to be made by [Config].OnFailure, and when Postgres makes them again.
	Breaker func(BreakerEvent)
}

// DecisionEvent is a call that has ended. The costs of those that were allowed add up to what was let through.
type DecisionEvent struct {
	Limiter string        // Config.Name
	Cost    int64         // 0: it only looked, or it had room for its part of an AllowAll, but another limiter had not
	Result  Result        // with its Source
	Err     error         // if there is no Result
	Latency time.Duration // of an AllowAll, that of all of it
}

// Outcome is "allowed", "denied" or "error"; of an AllowAll, allowed by this limiter.
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

// ErrorKind is an error of a limiter in a word, for the labels of metrics: "invalid_key", "invalid_cost", "not_migrated",
// "newer_schema", "not_permitted", "prepared_statements", "read_only", "key_held", "timeout", "unavailable", "context" if the caller's has ended, "other", or
// "" for nil.
func ErrorKind(err error) string {
	for _, known := range []struct {
		err  error
		kind string
	}{
		{nil, ""},
		{ErrInvalidKey, "invalid_key"},
		{ErrInvalidCost, "invalid_cost"},
		{ErrCostExceedsLimit, "invalid_cost"},
		{ErrNotMigrated, "not_migrated"},
		{ErrNewerSchema, "newer_schema"},
		{ErrNotPermitted, "not_permitted"},
		{ErrPreparedStatements, "prepared_statements"},
		{ErrReadOnly, "read_only"},
		{ErrKeyHeld, "key_held"},
		{ErrTimeout, "timeout"},
		{ErrUnavailable, "unavailable"},
		{context.Canceled, "context"}, // behind those above, which may wrap the end of a context of the limiter's own
		{context.DeadlineExceeded, "context"},
	} {
		if errors.Is(err, known.err) {
			return known.kind
		}
	}
	return "other"
}

// ended has the observer told about a call that ends here.
func (l *Limiter) ended(began time.Time, n int64, result *Result, err *error) {
	if tell := l.config.Observer.Decision; tell != nil {
		tell(DecisionEvent{Limiter: l.config.Name, Cost: n, Result: *result, Err: *err, Latency: time.Since(began)})
	}
}

// observed tells whether somebody wants to be told about an AllowAll.
func observed(requests []Request) bool {
	for _, r := range requests {
		if r.limiter != nil && r.limiter.config.Observer != nil {
			return true
		}
	}
	return false
}

// endedAll has the observers told about an AllowAll that ends here, each about its limiter's part.
func endedAll(began time.Time, requests []Request, results *Results, err *error) {
	latency := time.Since(began)
	for i, r := range requests {
		if r.limiter == nil || r.limiter.config.Observer == nil || r.limiter.config.Observer.Decision == nil {
			continue
		}
		e := DecisionEvent{Limiter: r.limiter.config.Name, Cost: r.cost, Err: *err, Latency: latency}
		if *err == nil {
			e.Result = results.Each[i]
			if e.Result.Allowed && !results.Allowed {
				e.Cost = 0
			}
		}
		r.limiter.config.Observer.Decision(e)
	}
}

// sent has the observer told about a statement.
func (l *Limiter) sent(began time.Time, size, queued int, err error) {
	if o := l.config.Observer; o != nil && o.Batch != nil {
		o.Batch(BatchEvent{Limiter: l.config.Name, Size: size, Queued: queued, Err: err, Latency: time.Since(began)})
	}
}
