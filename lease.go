package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
)

// Lease lets a process take more of a busy key than a call needs, and decide later calls by itself, without asking the
// database ([SourceLease]). All that is spent was taken in the database before, so the limit holds for any number of
// processes, also if they die, freeze or lose the database. docs/guarantees.md has the argument for each policy.
//
// What is taken ahead follows the demand. A key that is asked for once is not leased. If it is asked for again soon, up
// to 4 calls more are taken ahead, and twice as much each time that this is used up in less than half of the lease's
// time. If a lease ends with something left, the next one has only what was used.
//
// One process holds at most MaxShare of what remains of a key. With a limit of 1,000,000 and all of it left, that is
// 488, and with 2,047 left it is none. Near the limit, each call asks. What remains is known from the last answer. If
// that is older than 100 ms, at most 64 units are taken ahead, because others may have taken nearly all.
//
// A lease ends after MaxLength, or an eighth of a window, or 1/128 of the time to fill a bucket, if that is shorter. It
// also ends with its window. Shortly before that, what is left goes back. A process that dies gives nothing back: what
// it held counts as used. Nothing is leased for less than 10 ms. Leases are worth it for keys that each process asks
// for several times while a lease lasts, which is 470 ms for a bucket that fills in a minute.
//
// Of a bucket that is leased from, 1/128 of Capacity stays empty, and as much as was leased in the last 2/128 of the
// time in which it fills. What goes back and does not fit is lost. Of [All] with a bucket, nothing is leased while the
// bucket is fuller than that.
//
//   - AllowN takes from a lease if that has enough for all of n. Otherwise it gives back what is left, and asks.
//   - Remaining is what the database had left when it was last asked, and what is left of the lease.
//   - Wait does what AllowN does. WithTx and AllowAll ask the database and spend no lease. So does Peek, and adds what
//     is held to what remains.
//   - Refund gives back to the database.
//   - With and [Policies] change the policy at once. What was leased under another one is not spent. Other processes
//     may spend what they have leased under the old policy until they hear of the new one, or until the lease ends. So
//     while some obey the one and some the other, a key is admitted that much more at most.
//   - Reset forgets this process's lease. Others may spend what they took before it until that ends.
//   - Keys with a policy of the mode shadow are not leased.
type Lease struct {
	// MaxShare is how much of what remains of a key one process holds at most, from 0 to 0.1. Defaults to 1/2048, so
	// that 16 processes hold less than a hundredth.
	MaxShare float64
	// MaxLength is how long a lease lasts at most, at least 20 ms. Defaults to 30 seconds.
	MaxLength time.Duration
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

// validate is for a lease with its defaults set, or nil.
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

// leasable tells why a policy cannot be leased from.
func leasable(policy Policy) error {
	for _, m := range policy.rules() {
		if m.Numbers().Algorithm == algorithm.SlidingLog {
			return &ConfigError{Field: "Config.Lease", Reason: "cannot be had with a SlidingLog, which counts each " +
				"unit from when it was taken, and a lease spends it later; take a SlidingWindow"}
		}
	}
	return nil
}

// ReturnLeases gives back all that the client's limiters have taken ahead, before an application ends, say. Calls that
// come later take anew. It returns when all is given back. Errors: the context's error, if that ends first; else a
// [*StoreError] if something could not be given back. That counts as used.
func (c *Client) ReturnLeases(ctx context.Context) error {
	return publicError(c.engine.ReturnLeases(ctx))
}
