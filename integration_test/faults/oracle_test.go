package faults

import (
	"sort"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// account is a key as the oracle keeps it. The zero value is a key that nobody has asked for. It says nothing of rows: what has
// run out is still in it.
type account struct {
	kind    string                    // the algorithm that it was written by
	clock   int64                     // of the last decision under the row's lock, in microseconds since 1970
	start   int64                     // of the window; of a bucket, the time that count holds for
	count   int64                     // taken in the window; of a bucket, what it lacks, in units of 1/scale token; of a log, its entries
	prev    int64                     // taken in the window before
	log     [24]struct{ at, n int64 } // of a log: what was taken, oldest first
	scale   int64                     // of a bucket: Every(µs)
	full    int64                     // and what it holds at most
	credit  int64                     // granted above the limit
	expires int64                     // when the key is as good as new, by the policy that has written it
}

// rule is an algorithm as its documentation states it, written a second time. All that it knows is how an account moves on to a
// time, and how much room there is then. What a caller is told follows from that by search: RetryAfter is the first time at
// which the request fits, ResetAfter the first at which everything does.
type rule struct {
	kind    string
	limit   int64
	horizon int64 // microseconds, after which a key is as good as new
	roll    func(a account, t int64) account
	room    func(a account, t int64) int64 // of an account that was rolled to t
	take    func(a account, t, n int64) account
	back    func(a account, n int64) account // after a refund of n
	life    int64                            // microseconds after a take or a grant, in which all of it is over; credit lasts that long
}

func ruleOf(policy ratelimit.Policy) rule {
	switch p := policy.(type) {
	case ratelimit.FixedWindow:
		window := p.Window.Microseconds()
		return rule{
			kind: "fixed window", limit: p.Limit, horizon: window, take: count(1), back: uncount(1), life: window,
			roll: func(a account, t int64) account {
				if t >= a.start+window || a.count == 0 {
					a.start, a.count = t, 0
				}
				return a
			},
			room: func(a account, _ int64) int64 { return max(0, p.Limit-a.count) },
		}
	case ratelimit.SlidingWindow:
		window := p.Window.Microseconds()
		return rule{
			kind: "sliding window", limit: p.Limit, horizon: 2 * window, take: count(1), back: uncount(1), life: 2 * window,
			roll: func(a account, t int64) account {
				switch {
				case t >= a.start+2*window, a.count == 0 && (a.prev == 0 || t >= a.start+window):
					a.start, a.prev, a.count = t, 0, 0
				case t >= a.start+window:
					a.start, a.prev, a.count = a.start+window, a.count, 0
				}
				return a
			},
			room: func(a account, t int64) int64 {
				covered := a.start + window - t
				return max(0, p.Limit*window-a.prev*covered-a.count*window) / window
			},
		}
	case ratelimit.TokenBucket:
		every := p.Every.Microseconds()
		return rule{
			kind: "token bucket", limit: p.Capacity, horizon: p.Capacity*every/p.Refill + 1, take: count(every),
			back: uncount(every), life: (p.Capacity*every + p.Refill - 1) / p.Refill,
			roll: func(a account, t int64) account {
				full := p.Capacity * every
				if a.scale > 0 && (a.scale != every || a.full != full) { // other numbers: it keeps its tokens
					a.count = max(0, full-(a.full-a.count)*every/a.scale)
				}
				a.scale, a.full = every, full
				if a.count > 0 {
					a.count = max(0, a.count-(t-a.start)*p.Refill)
				}
				a.start = t
				return a
			},
			room: func(a account, _ int64) int64 { return (p.Capacity*every - a.count) / every },
		}
	case ratelimit.SlidingLog:
		window := p.Window.Microseconds()
		return rule{
			kind: "sliding log", limit: p.Limit, horizon: window, life: window,
			roll: func(a account, t int64) account {
				kept := a
				kept.count, kept.log = 0, account{}.log
				for _, entry := range a.log[:a.count] {
					if t < entry.at+window {
						kept.log[kept.count] = entry
						kept.count++
					}
				}
				return kept
			},
			room: func(a account, _ int64) int64 {
				room := p.Limit
				for _, entry := range a.log[:a.count] {
					room -= entry.n
				}
				return max(0, room)
			},
			take: func(a account, t, n int64) account {
				if n > 0 {
					a.log[a.count].at, a.log[a.count].n = t, n
					a.count++
				}
				return a
			},
			back: func(a account, n int64) account {
				for n > 0 && a.count > 0 {
					newest := &a.log[a.count-1]
					given := min(n, newest.n)
					n -= given
					if newest.n -= given; newest.n == 0 {
						newest.at = 0
						a.count--
					}
				}
				return a
			},
		}
	}
	return rule{}
}

// count is how algorithms take that count only, and uncount how they give back; unit is what a cost of 1 adds.
func count(unit int64) func(a account, t, n int64) account {
	return func(a account, _, n int64) account {
		a.count += n * unit
		return a
	}
}

func uncount(unit int64) func(a account, n int64) account {
	return func(a account, n int64) account {
		back := n * unit
		a.count, back = max(0, a.count-back), max(0, back-a.count)
		a.prev = max(0, a.prev-back)
		return a
	}
}

// at moves an account on to t. It may have been written by another algorithm, or one of other numbers.
func (r rule) at(a account, t int64) account {
	if t >= a.expires || a.kind != r.kind {
		a = account{clock: a.clock, kind: r.kind}
	}
	return r.roll(a, t)
}

// roomAt is the largest cost that fits at t.
func (r rule) roomAt(a account, t int64) int64 {
	a = r.at(a, t)
	return r.room(a, t) + a.credit
}

// fits is the first time from t on at which a cost of n does.
func (r rule) fits(a account, t, n int64) int64 {
	return t + int64(sort.Search(int(r.horizon), func(d int) bool { return r.roomAt(a, t+int64(d)) >= n }))
}

// decide is what has to come of a request for n at t; n = 0 looks, n below 0 gives back or grants.
func (r rule) decide(a account, t, n int64, grant bool) (account, ratelimit.Result) {
	result := ratelimit.Result{Limit: r.limit, DecidedAt: time.UnixMicro(t)}
	switch result.Allowed = r.roomAt(a, t) >= max(n, 1); {
	case grant:
		a = r.at(a, t)
		a.credit, a.expires = a.credit-n, t+r.life
		result.Allowed = true
	case n < 0:
		a = r.back(r.at(a, t), -n)
		result.Allowed = true
	case !result.Allowed:
		result.RetryAfter = time.Duration(r.fits(a, t, max(n, 1))-t) * time.Microsecond
	case n > 0:
		a = r.at(a, t)
		ordinary := min(n, r.room(a, t))
		a = r.take(a, t, ordinary)
		a.credit, a.expires = a.credit-(n-ordinary), t+r.life
	}
	result.Remaining = r.roomAt(a, t)
	reset := r.fits(a, t, r.limit)
	if rolled := r.at(a, t); rolled.credit > 0 {
		reset = rolled.expires
	}
	result.ResetAfter = time.Duration(reset-t) * time.Microsecond
	if n < 0 || n > 0 && result.Allowed {
		a.expires = reset
	}
	return a, result
}

// usage is what counts at t, and can be given back.
func (r rule) usage(a account, t int64) int64 {
	a = r.at(a, t)
	return a.count + a.prev
}
