package ratelimit

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Lease lets a process take more of a busy key than a call needs, and decide later calls by itself, without asking the
// database ([SourceLease]). All that is spent was taken in the database before, so the limit holds for any number of
// processes, also if they die, freeze or lose the database. docs/guarantees.md has the argument for each policy.
//
// What is taken ahead follows the demand. A key that is asked for once is not leased. If it is asked for again soon, up
// to 4 calls more are taken ahead, and twice as much each time that this is used up in less than half of the lease's
// time. If a lease ends with something left, the next one has only what was used. One process never holds more of a
// key than MaxShare of what remains of it. With a limit of 1,000,000 and all of it left, that is 488, and with 2,047
// left it is none. Near the limit, each call asks.
//
// A lease ends after MaxLength, or an eighth of a window, or 1/128 of the time to fill a bucket, if that is shorter. It
// also ends with its window. Before that, what is left goes back. A process that dies gives nothing back: what it held
// counts as used. A bucket that is leased from fills up to 127/128 of its Capacity only.
//
//   - AllowN takes from a lease if that has enough for all of n, and asks for all of n otherwise.
//   - Remaining is what the database had left when it was last asked, and what is left of the lease.
//   - Wait does what AllowN does. AllowTx and AllowAll ask the database and spend no lease. So does Peek, and adds what
//     is held to what remains.
//   - Refund gives back to the database.
//   - With and [Policies] change the policy at once. What was leased under another one is not spent.
//   - Reset forgets this process's lease. Others may spend what they took before it until that ends.
//   - Keys with a policy of the mode shadow are not leased.
type Lease struct {
	// MaxShare is how much of what remains of a key one process holds at most, from 0 to 0.1. Defaults to 1/2048, so
	// that 16 processes hold less than a hundredth.
	MaxShare float64
	// MaxLength is how long a lease lasts at most, at least 1 ms. Defaults to 30 seconds.
	MaxLength time.Duration
}

// The bounds of a lease of a window and of a bucket: see [Lease].
const (
	leasesInWindow = 8
	leasesInBucket = 128
)

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
	case c.MaxLength < time.Millisecond:
		return &ConfigError{Field: "Config.Lease.MaxLength", Reason: fmt.Sprintf(
			"is %v, and must be at least 1ms", c.MaxLength)}
	}
	return leasable(policy)
}

// leasable tells why a policy cannot be leased from.
func leasable(policy Policy) error {
	for _, m := range policy.models() {
		if m.numbers().Algorithm == algorithm.SlidingLog {
			return &ConfigError{Field: "Config.Lease", Reason: "cannot be had with a SlidingLog, which counts each " +
				"unit from when it was taken, and a lease spends it later; take a SlidingWindow"}
		}
	}
	return nil
}

// ReturnLeases gives back all that this process has taken ahead, before an application ends, say. Calls that come
// later take anew. It returns when all is given back. Limiters of one [Client] share their leases, and all of them are
// given back. Errors: the context's error, if that ends first; else a [*StoreError] if something could not be given
// back. That counts as used.
func (l *Limiter) ReturnLeases(ctx context.Context) error { return l.client.ReturnLeases(ctx) }

// ReturnLeases is [Limiter.ReturnLeases] for all limiters of the client.
func (c *Client) ReturnLeases(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return gaveUp(err)
	}
	done := make(chan error, 1)
	go func() {
		done <- c.giveBack(c.batcher.leases.collect(func(*lease) (lapse, forget bool) { return true, false }))
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return gaveUp(ctx.Err())
	}
}

// giveBack gives back what is left of leases, and returns when that is done, with the first error.
func (c *Client) giveBack(rests []rest) (err error) {
	if len(rests) == 0 {
		return nil
	}
	requests := make([]*request, len(rests))
	for i, back := range rests {
		r := c.requests.get(back.space, back.receipt.policy)
		r.add(back.space, back.receipt.policy.models(), back.receipt.key, back.from-back.to,
			back.receipt.between(back.from, back.to))
		r.ofLease = true
		requests[i] = r
	}
	c.queue.submitAll(requests)
	for i, r := range requests {
		<-r.done
		back, units := &rests[i], rests[i].to-rests[i].from
		if r.err == nil {
			c.config.Observer.lease(LeaseEvent{Limiter: back.space.name, Returned: units})
		} else {
			c.config.Observer.lease(LeaseEvent{Limiter: back.space.name, Stranded: units})
			err = firstError(err, r.err)
		}
		c.requests.put(r)
	}
	return err
}

func firstError(first, err error) error {
	if first != nil {
		return first
	}
	return err
}
