package envoy

import (
	"context"
	"errors"
	"sync"
	"time"

	pb "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"

	"github.com/pgratelimit/ratelimit"
)

// ask is a descriptor that has a limit, and what is answered for it.
type ask struct {
	*match
	key   string
	hits  int64 // 0 only looks
	back  bool  // the hits are given back
	total int64 // the limit, in hits

	over      bool      // the limit has no room for the hits; also set for a rule in shadow_mode
	remaining int64     // 0 if over
	at        time.Time // when this was so
	cached    bool      // this process remembered that the limit has no room
}

// query decides a request. Its rules are these:
//
// The descriptors without shadow_mode are decided in their order, as if each took its hits from what the others before
// it have left. The request is denied if there is no room for one of them without quota_mode, or for none of those with
// quota_mode. A denied request takes nothing and gives nothing back. Otherwise all hits for which there is room are
// taken by one statement.
//
// Descriptors in shadow_mode take theirs afterwards, each by itself, if the request is not denied. A descriptor that
// gives back does so then, too.
type query struct {
	limiters *limiters
	domain   string
	now      func() time.Time
	asks     []*ask
	counts   map[string]count // what is known of the keys
	trouble  error            // an error after the decision
}

// count is how much a key counts before this request.
type count struct {
	hits  int64
	least bool // it may be more
	at    time.Time
}

// group has the live asks for a key: those that are not over.
type group struct {
	key  string
	unit pb.RateLimitResponse_RateLimit_Unit
	asks []*ask
	sum  int64 // of the hits
	// limit is the limit under which the sum fits if and only if all asks fit in their order, also if they have
	// different limits. It may be less than the sum.
	limit int64
	same  bool // all asks take, and have the same limit
}

func (q *query) decide(ctx context.Context) error {
	for _, a := range q.asks {
		a.at = q.now()
		a.over = !a.back && a.hits > a.total
	}
	for !q.denied() {
		allowed, err := q.try(ctx)
		if err != nil {
			return err
		}
		if allowed {
			return q.allow(ctx)
		}
	}
	q.deny(ctx)
	return nil
}

// denied tells whether the asks that are over deny the request.
func (q *query) denied() bool {
	quotas, quotasOver := 0, 0
	for _, a := range q.asks {
		over := a.over && !a.limit.shadow
		switch {
		case a.limit.quota && over:
			quotasOver++
			fallthrough
		case a.limit.quota:
			quotas++
		case over:
			return true
		}
	}
	return quotas > 0 && quotas == quotasOver
}

// try takes the hits of all live asks, or none. If it returns false, at least one more ask is over.
func (q *query) try(ctx context.Context) (bool, error) {
	groups := groupsOf(q.asks, func(a *ask) bool { return !a.over && !a.back && !a.limit.shadow })
	var takes, looks []group
	for _, g := range groups {
		switch {
		case g.limit < g.sum: // no request can have this cost, so see who fits
			if err := q.look(ctx, groups); err != nil {
				return false, err
			}
			q.judge(groups)
			return false, nil
		case g.sum > 0:
			takes = append(takes, g)
		default:
			looks = append(looks, g)
		}
	}
	if err := q.look(ctx, looks); err != nil {
		return false, err
	}
	if q.judge(looks) {
		return false, nil
	}
	if len(takes) == 0 {
		return true, nil
	}
	allowed, results, err := q.take(ctx, takes)
	if err != nil {
		return false, err
	}
	var unclear []group
	for i, g := range takes {
		result := results[i]
		c := count{hits: g.limit - result.Remaining, at: result.DecidedAt}
		if allowed {
			c.hits -= g.sum
		} else if c.least = result.Remaining == 0; c.least && !g.same {
			unclear = append(unclear, g)
		}
		q.counts[g.key] = c
		for _, a := range g.asks {
			a.cached = result.Source == ratelimit.SourceCachedDenial
		}
	}
	if allowed {
		return true, nil
	}
	if err := q.lookAgain(ctx, unclear); err != nil {
		return false, err
	}
	if !q.judge(takes) {
		return false, errors.New("envoy: the database denied a request that fits")
	}
	return false, nil
}

// take asks the database. A single key is asked for by AllowN, so that denials are remembered, and calls are merged.
func (q *query) take(ctx context.Context, groups []group) (bool, []ratelimit.Result, error) {
	requests := make([]ratelimit.Request, len(groups))
	for i, g := range groups {
		limiter, err := q.limiters.get(policy{q.domain, g.limit, g.unit})
		if err != nil {
			return false, nil, err
		}
		if len(groups) == 1 {
			result, err := limiter.AllowN(ctx, g.key, g.sum)
			return result.Allowed, []ratelimit.Result{result}, err
		}
		requests[i] = limiter.Request(g.key, g.sum)
	}
	results, err := ratelimit.AllowAll(ctx, requests...)
	return results.Allowed, results.Each, err
}

// groupsOf returns the asks for which of returns true, by their keys.
func groupsOf(asks []*ask, of func(*ask) bool) (groups []group) {
	places := make(map[string]int, len(asks))
	for _, a := range asks {
		if !of(a) {
			continue
		}
		place, known := places[a.key]
		if !known {
			place = len(groups)
			places[a.key] = place
			groups = append(groups, group{key: a.key, unit: a.limit.unit, same: true})
		}
		g := &groups[place]
		g.sum += a.hits
		g.asks = append(g.asks, a)
		g.same = g.same && a.hits > 0 && a.total == g.asks[0].total
	}
	for i := range groups {
		groups[i].limit = limitOf(&groups[i])
	}
	return groups
}

func limitOf(g *group) int64 {
	spare, before := g.asks[0].total, int64(0)
	for _, a := range g.asks {
		before += a.hits
		spare = min(spare, a.total-before)
	}
	return g.sum + spare
}

// judge sets over for the asks of the groups that have no room beside those before them. It tells whether it found one.
func (q *query) judge(groups []group) (found bool) {
	for _, g := range groups {
		c := q.counts[g.key]
		for _, a := range g.asks {
			if a.at = c.at; c.hits+a.hits > a.total {
				a.over, found = true, true
			} else {
				c.hits += a.hits
			}
		}
	}
	return found
}

// look finds out what the keys of the groups count, unless it is known exactly.
func (q *query) look(ctx context.Context, groups []group) error {
	var unknown []group
	for _, g := range groups {
		if c, known := q.counts[g.key]; !known || c.least {
			unknown = append(unknown, g)
		}
	}
	return q.lookAgain(ctx, unknown)
}

func (q *query) lookAgain(ctx context.Context, groups []group) error {
	found := make([]count, len(groups))
	err := together(len(groups), func(i int) (err error) {
		found[i], err = q.limiters.count(ctx, q.domain, groups[i].key, groups[i].unit)
		return err
	})
	if err != nil {
		return err
	}
	for i, g := range groups {
		q.counts[g.key] = found[i]
	}
	return nil
}

// allow answers a request whose hits were taken, and does what is left to do.
func (q *query) allow(ctx context.Context) error {
	taken := map[string]int64{}
	var shadows []group
	for _, a := range q.asks {
		c, known := q.counts[a.key]
		switch {
		case a.back:
			c, err := q.limiters.giveBack(ctx, q.domain, a.key, a.limit.unit, a.hits)
			if err != nil {
				return err
			}
			a.remaining, a.at = a.total-c.hits, c.at
		case !a.limit.shadow && !a.over && known:
			taken[a.key] += a.hits
			a.remaining, a.at = a.total-c.hits-taken[a.key], c.at
		}
	}
	shadows = groupsOf(q.asks, func(a *ask) bool { return a.limit.shadow && !a.back && !a.over })
	q.trouble = together(len(shadows), func(i int) error {
		return q.shadow(ctx, shadows[i])
	})
	return nil
}

// shadow takes from the limits of asks in shadow_mode, for the same key.
func (q *query) shadow(ctx context.Context, g group) error {
	for _, a := range g.asks {
		if a.hits == 0 {
			c, err := q.limiters.count(ctx, q.domain, a.key, a.limit.unit)
			if err != nil {
				return err
			}
			a.over, a.remaining, a.at = c.hits > a.total, a.total-c.hits, c.at
			continue
		}
		limiter, err := q.limiters.get(policy{q.domain, a.total, a.limit.unit})
		if err != nil {
			return err
		}
		result, err := limiter.AllowN(ctx, a.key, a.hits)
		if err != nil {
			return err
		}
		a.over, a.remaining, a.at = !result.Allowed, result.Remaining, result.DecidedAt
		a.cached = result.Source == ratelimit.SourceCachedDenial
	}
	return nil
}

// deny answers a request that took nothing. What it says of the limits that have room is only for people, so an error
// does not matter.
func (q *query) deny(ctx context.Context) {
	if q.trouble = q.look(ctx, groupsOf(q.asks, func(a *ask) bool { return !a.over })); q.trouble != nil {
		return
	}
	for _, shadow := range []bool{false, true} {
		q.judge(groupsOf(q.asks, func(a *ask) bool { return a.limit.shadow == shadow && !a.back && !a.over }))
	}
	for _, a := range q.asks {
		if c, known := q.counts[a.key]; known && !a.over {
			a.remaining, a.at = a.total-c.hits, c.at
		}
	}
}

// together calls f with 0 to n-1, at the same time, and returns one of the errors.
func together(n int, f func(i int) error) error {
	if n == 1 {
		return f(0)
	}
	errs := make([]error, n)
	var calls sync.WaitGroup
	for i := range n {
		calls.Go(func() { errs[i] = f(i) })
	}
	calls.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
