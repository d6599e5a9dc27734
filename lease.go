package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
)

// Lease lets a process take more of a busy key's limit than a call needs, and decide later calls from the rest without
// the database ([SourceLease]). Units are taken in the database before they are spent, so the limit holds for all
// processes together, even if they die, freeze or lose the database. The comment of engine.Leases has the argument.
//
// The first lease of a key is enough for at most 4 calls. After a lease that is used up quickly, the next one is twice
// as large. A lease has at most MaxShare of what remains of a key: 488 of 1,000,000, and nothing of 2,047. So near the
// limit each call asks the database. A lease lasts at most MaxLength, and at most an eighth of a window. For a
// [TokenBucket], it lasts at most 1/128 of the time in which the bucket fills: 470 ms if that is a minute. A lease ends
// before its window does, and then its rest is given back. If the process dies, the rest counts as used.
//
//   - If a lease has less than n left, AllowN asks the database. WithTx, AllowAll and Peek always ask.
//   - Other processes may spend leases from before a Reset until these end, and leases from before a change of policy
//     until they know of it.
//   - A [SlidingLog] or [Concurrency] can have no leases.
//   - A [TokenBucket] with leases keeps 1/128 of Capacity empty, plus the size of recent leases.
type Lease struct {
	MaxShare  float64       // at most 0.1; defaults to 1/2048, so that 16 processes hold less than 1 %
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

// validate checks a lease that has its defaults. c may be nil.
func (c *Lease) validate(policy Policy, pooled bool) error {
	switch {
	case c == nil:
		return nil
	case !pooled:
		return &ConfigError{Field: "Config.Lease", Reason: "needs a *pgxpool.Pool: on a single connection or " +
			"transaction, what is left could go back only while a caller asks"}
	case !(c.MaxShare > 0 && c.MaxShare <= 0.1): // NaN is refused too
		return &ConfigError{Field: "Config.Lease.MaxShare", Reason: fmt.Sprintf(
			"is %v, and must be above 0 and at most 0.1", c.MaxShare)}
	case c.MaxLength < 2*engine.ShortestLease:
		return &ConfigError{Field: "Config.Lease.MaxLength", Reason: fmt.Sprintf(
			"is %v, and must be at least %v", c.MaxLength, 2*engine.ShortestLease)}
	}
	return leasable(policy)
}

// leasable returns an error for a policy that leases do not work with.
func leasable(policy Policy) error {
	if policyModel(policy).HasSlots {
		return &ConfigError{Field: "Config.Lease", Reason: "cannot be had with a Concurrency, whose slots Postgres " +
			"gives one by one, so that each has a Fence"}
	}
	for _, m := range policy.rules() {
		if m.Numbers().Algorithm == algorithm.SlidingLog {
			return &ConfigError{Field: "Config.Lease", Reason: "cannot be had with a SlidingLog, which counts each " +
				"unit from when it was taken, and a lease spends it later; take a SlidingWindow"}
		}
	}
	return nil
}

// ReturnLeases gives back the rest of all leases of the client's limiters. Call it before the application ends. Later
// calls take new leases. Errors: the context's error, if the context ends first; a [*StoreError] if a rest counts as
// used.
func (c *Client) ReturnLeases(ctx context.Context) error {
	return publicError(c.engine.ReturnLeases(ctx))
}
