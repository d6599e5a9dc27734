package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
)

// Lease lets a process take more of a busy key than a call needs, and decide later calls by itself ([SourceLease]).
// What is spent was taken in the database before. So the limit holds for all processes together, even if they die,
// freeze or lose the database. docs/guarantees.md has the argument.
//
// Up to 4 calls are taken ahead at first, then twice as much each time that it is used up quickly. A process holds at
// most MaxShare of what remains of a key: with 1,000,000 left that is 488, and with 2,047 left none. So near the limit
// each call asks. A lease lasts at most MaxLength, an eighth of a window, or 1/128 of the time to fill a bucket (470 ms
// for a minute), and not longer than its window. Before it ends, what is left goes back. What a dead process held
// counts as used.
//
//   - AllowN spends a lease that has enough for all of n, else it asks. WithTx, AllowAll and Peek always ask.
//   - After a Reset, other processes may spend a lease until it ends; after a change of policy, until they hear of it.
//   - In a bucket that is leased from, 1/128 of Capacity stays empty, plus recent leases.
type Lease struct {
	MaxShare  float64       // at most 0.1; defaults to 1/2048, with which 16 processes hold less than a hundredth
	MaxLength time.Duration // at least 20 ms; defaults to 30 seconds
}

func (c *Lease) withDefaults() *Lease {
	if c == nil {
		return nil
	}
	with := *c
	if with.MaxShare == 0 {
		with.MaxShare = 1.0 / 2048
	}
	if with.MaxLength == 0 {
		with.MaxLength = 30 * time.Second
	}
	return &with
}

// validate checks a lease that has its defaults, or nil.
func (c *Lease) validate(policy Policy, pooled bool) error {
	switch {
	case c == nil:
		return nil
	case !pooled:
		return &ConfigError{Field: "Config.Lease", Reason: "needs a *pgxpool.Pool: on a single connection or " +
			"transaction, what is left could go back only while a caller asks"}
	case !(c.MaxShare > 0 && c.MaxShare <= 0.1): // which NaN is not
		return &ConfigError{Field: "Config.Lease.MaxShare", Reason: fmt.Sprintf(
			"is %v, and must be above 0 and at most 0.1", c.MaxShare)}
	case c.MaxLength < 2*engine.ShortestLease:
		return &ConfigError{Field: "Config.Lease.MaxLength", Reason: fmt.Sprintf(
			"is %v, and must be at least %v", c.MaxLength, 2*engine.ShortestLease)}
	}
	return leasable(policy)
}

// leasable says why a policy cannot be leased from.
func leasable(policy Policy) error {
	for _, m := range policy.rules() {
		if m.Numbers().Algorithm == algorithm.SlidingLog {
			return &ConfigError{Field: "Config.Lease", Reason: "cannot be had with a SlidingLog, which counts each " +
				"unit from when it was taken, and a lease spends it later; take a SlidingWindow"}
		}
	}
	return nil
}

// ReturnLeases gives back all that the client's limiters have taken ahead, before an application ends, say. Later calls
// take anew. Errors: the context's error, if that ends first; else a [*StoreError] if something could not be given
// back, which then counts as used.
func (c *Client) ReturnLeases(ctx context.Context) error {
	return publicError(c.engine.ReturnLeases(ctx))
}
