package faults

import (
	"reflect"
	"slices"
	"sort"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// account is the oracle's state of a key. The zero account is a new key. An account keeps expired usage.
type account struct {
	kind  string // the algorithm of the last write
	clock int64  // time of the last decision under the row's lock, in microseconds since 1970
	start int64  // the window's start; bucket: the time of count
	// count is the units taken in the window. In a bucket it is the missing tokens in 1/scale token, and in a log the
	// number of entries.
	count   int64
	prev    int64                              // units taken in the previous window
	log     [40]struct{ at, n int64 }          // log: the takes and charges, oldest first
	scale   int64                              // bucket: Every in µs
	full    int64                              // bucket: its capacity, in 1/scale token
	credit  int64                              // granted credit
	since   int64                              // when the bucket, or an account with credit, was created
	refill  int64                              // bucket: its Refill
	back    int64                              // bucket: units given back after since, in the unit of count
	expires int64                              // when the row is as good as new, by the policy of the last write
	holds   [24]struct{ id, units, end int64 } // the holds, without gaps; an ended hold stays until the next write
	locked  int                                // how many operations have locked the row
}

// rule is an algorithm as documented, implemented a second time. A rule only knows how time changes an account, and how
// much room the account has at a time. A search finds RetryAfter and ResetAfter: the first time at which the request
// fits, and the first time at which everything fits.
type rule struct {
	kind    string
	limit   int64
	horizon int64 // microseconds until a key is as good as new, even if it owes as much as it may
	roll    func(a account, t int64) account
	room    func(a account, t int64) int64 // for an account rolled forward to t
	take    func(a account, t, n int64) account
	// back returns what account a becomes after a refund of n ordinary units of a take. The argument rolled is the
	// account brought forward to time t. Only units that rolled still counts go back. The result is not brought
	// forward, because other policies may still count more of the usage.
	back func(a, rolled account, t, n int64, of portion) account
	// life is how many microseconds a take, a charge or a grant lasts. Credit lasts that long.
	life func(a account) int64
}

// ruleOf returns the rule of a policy. month is the length of withMonths' months.
func ruleOf(policy ratelimit.Policy, month time.Duration) rule {
	switch p := policy.(type) {
	case ratelimit.FixedWindow:
		window := p.Window.Microseconds()
		return rule{
			kind: "fixed window", limit: p.Limit, horizon: window, take: count(1), life: always(window),
			back: func(a, rolled account, _, n int64, of portion) account {
				if of.In == a.start && a.start == rolled.start {
					a.count -= min(n, a.count)
				}
				return a
			},
			roll: func(a account, t int64) account {
				if t >= a.start+window || a.count == 0 {
					a.start, a.count = t, 0
					a.since = a.unlessNew()
				}
				return a
			},
			room: func(a account, _ int64) int64 { return max(0, p.Limit-a.count) },
		}
	case ratelimit.SlidingWindow:
		window := p.Window.Microseconds()
		return rule{
			kind: "sliding window", limit: p.Limit, horizon: 2 * window, take: count(1), life: always(2 * window),
			back: func(a, rolled account, _, n int64, of portion) account {
				switch {
				case of.In == a.start && (rolled.start == a.start || rolled.start == a.start+window):
					a.count -= min(n, a.count)
				case of.In == a.start-window && rolled.start == a.start:
					a.prev -= min(n, a.prev)
				}
				return a
			},
			roll: func(a account, t int64) account {
				switch {
				case t >= a.start+2*window, a.count == 0 && (a.prev == 0 || t >= a.start+window):
					a.start, a.prev, a.count = t, 0, 0
					a.since = a.unlessNew()
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
			kind: "token bucket", limit: p.Capacity, horizon: (1+owedLimits)*p.Capacity*every/p.Refill + 1, take: count(every),
			back: func(a, rolled account, t, n int64, of portion) account {
				if of.Since != rolled.since || of.In > t {
					return a
				}
				// This assumes that all refunds since the take gave back units of earlier takes, except refunds of the
				// last units, which no other units stand behind.
				left := max(of.At-a.back, n*every) - (t-of.In)*p.Refill
				given := max(0, min(left, n*every, rolled.count))
				if rolled.count > max(left, rolled.full) { // while the bucket owes, only the last units go back
					return a
				}
				a.count -= given
				if rolled.count > left {
					a.back += given
				}
				return a
			},
			life: func(a account) int64 { return (max(p.Capacity*every, a.count) + p.Refill - 1) / p.Refill },
			roll: func(a account, t int64) account {
				full := p.Capacity * every
				if a.scale > 0 && (a.scale != every || a.full != full) { // another policy wrote a, which keeps its tokens
					a.count = max(0, full-(a.full-a.count)*every/a.scale)
				}
				if a.scale > 0 && (a.scale != every || a.full != full || a.refill != p.Refill) {
					a.since, a.back = max(a.since+1, a.start, t), 0
				}
				a.scale, a.full, a.refill = every, full, p.Refill
				if a.count > 0 {
					a.count = max(0, a.count-(t-a.start)*p.Refill)
				}
				if a.count == 0 && a.credit == 0 {
					a.since, a.back = t, 0
				}
				a.start = t
				return a
			},
			room: func(a account, _ int64) int64 { return max(0, p.Capacity*every-a.count) / every },
		}
	case ratelimit.CalendarWindow:
		window := month.Microseconds()
		return rule{
			kind: "calendar window", limit: p.Limit, horizon: window, take: count(1), life: always(62 * day.Microseconds()),
			back: func(a, rolled account, _, n int64, of portion) account {
				if of.In == a.start && a.start == rolled.start {
					a.count -= min(n, a.count)
				}
				return a
			},
			roll: func(a account, t int64) account {
				if t/window > a.start/window || a.count == 0 {
					a.start, a.count = t, 0
					a.since = a.unlessNew()
				}
				return a
			},
			room: func(a account, _ int64) int64 { return max(0, p.Limit-a.count) },
		}
	case ratelimit.SlidingLog:
		window := p.Window.Microseconds()
		return rule{
			kind: "sliding log", limit: p.Limit, horizon: window, life: always(window),
			roll: func(a account, t int64) account {
				kept := a
				kept.count, kept.log = 0, account{}.log
				for _, entry := range a.log[:a.count] {
					if t < entry.at+window {
						kept.log[kept.count] = entry
						kept.count++
					}
				}
				if kept.count == 0 {
					kept.since = kept.unlessNew()
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
			back: func(a, _ account, t, n int64, of portion) account {
				for i := int64(0); i < a.count && n > 0; {
					if a.log[i].at != of.In || t >= of.In+window {
						i++
						continue
					}
					given := min(n, a.log[i].n)
					n -= given
					if a.log[i].n -= given; a.log[i].n > 0 {
						i++
						continue
					}
					copy(a.log[i:], a.log[i+1:])
					a.log[len(a.log)-1] = account{}.log[0]
					a.count--
				}
				return a
			},
		}
	}
	return rule{}
}

// unlessNew returns what since becomes in an account without usage. If there is no credit either, that is 0.
func (a account) unlessNew() int64 {
	if a.credit == 0 {
		return 0
	}
	return a.since
}

// portion is the unexported data of a result about a take from one row.
type portion struct{ Units, Spent, Since, In, At int64 }

// partsOf returns the parts of a result. It returns nil if the result took nothing.
func partsOf(result ratelimit.Result) []portion {
	receipt := reflect.ValueOf(result).FieldByName("taken").FieldByName("Receipt")
	if receipt.IsNil() {
		return nil
	}
	var parts []portion
	for _, p := range receipt.Elem().FieldByName("Parts").Seq2() {
		number := func(field string) int64 { return p.FieldByName(field).Int() }
		parts = append(parts, portion{number("Units"), number("Spent"), number("Since"), number("In"), number("At")})
	}
	return parts
}

// count returns the take function of algorithms that only count. The argument unit is the amount for a cost of 1.
func count(unit int64) func(a account, t, n int64) account {
	return func(a account, _, n int64) account {
		a.count += n * unit
		return a
	}
}

// always returns the life function of algorithms whose takes last equally long.
func always(life int64) func(account) int64 { return func(account) int64 { return life } }

// at rolls an account forward to t. Another algorithm may have written the account, or the same algorithm with other
// numbers.
func (r rule) at(a account, t int64) account {
	if t >= a.expires || a.kind != r.kind {
		a = account{clock: a.clock, kind: r.kind, holds: a.holds}
	}
	return r.roll(a, t)
}

// roomAt returns the largest cost that fits at t beside the holds.
func (r rule) roomAt(a account, t int64) int64 {
	held, _ := a.held(t)
	a = r.at(a, t)
	return max(0, r.room(a, t)+a.credit-held)
}

// held returns how many units are held at t, and when the last of these holds ends.
func (a account) held(t int64) (held, until int64) {
	for _, h := range a.holds {
		if h.end > t {
			held, until = held+h.units, max(until, h.end)
		}
	}
	return held, until
}

// without returns an account without its ended holds and the hold id. The result live tells whether id was live.
func (a account) without(id, t int64) (_ account, live bool) {
	holds := a.holds
	a.holds = account{}.holds
	n := 0
	for _, h := range holds {
		switch {
		case h.end <= t:
		case h.id == id:
			live = true
		default:
			a.holds[n] = h
			n++
		}
	}
	return a, live
}

// hold adds a hold of n units, or prolongs the hold id.
func (a account) hold(id, n, t, end int64) account {
	a, _ = a.without(id, t)
	i := slices.IndexFunc(a.holds[:], func(h struct{ id, units, end int64 }) bool { return h.id == 0 })
	a.holds[i].id, a.holds[i].units, a.holds[i].end = id, n, end
	return a
}

// fits returns the first time, from t on, at which a cost of n fits. The room grows as time passes, except when granted
// credit expires.
func (r rule) fits(a account, t, n int64) int64 {
	_, until := a.held(t)
	first := func(from, to int64) int64 {
		return from + int64(sort.Search(int(to-from), func(d int) bool { return r.roomAt(a, from+int64(d)) >= n }))
	}
	if rolled := r.at(a, t); rolled.credit > 0 {
		if at := first(t, rolled.expires); at < rolled.expires {
			return at
		}
		return first(rolled.expires, max(rolled.expires+r.horizon, until))
	}
	return first(t, max(t+r.horizon, until))
}

// reset returns the first time, from t on, at which a row is as good as new. Holds are not in the row.
func (r rule) reset(a account, t int64) int64 {
	if rolled := r.at(a, t); rolled.credit > 0 {
		return rolled.expires
	}
	a.holds = account{}.holds
	return r.fits(a, t, r.limit)
}

// owedLimits is how many limits a key may owe.
const owedLimits = 10

// owed returns how many units above the limit an account counts at t.
func (r rule) owed(a account, t int64) int64 {
	a = r.at(a, t)
	switch r.kind {
	case "token bucket":
		return max(0, a.count-a.full+a.scale-1) / a.scale
	case "sliding log":
		a.prev, a.count = a.count, 0
		for _, entry := range a.log[:a.prev] {
			a.count += entry.n
		}
	}
	return max(0, a.count-r.limit)
}

// charge returns the right answer to a charge of n at t that is not refused.
func (r rule) charge(a account, t, n int64) (account, ratelimit.Result) {
	a = r.at(a, t)
	spent := min(max(n-r.room(a, t), 0), a.credit)
	a = r.take(a, t, n-spent)
	a.credit, a.expires = a.credit-spent, t+r.life(a)
	next, result := r.decide(a, t, 0, nil)
	next.expires = r.reset(next, t)
	result.Allowed = true // although a further request may be denied
	return next, result
}

// decide returns the right answer to a request for n at t. If n is 0, the request is a Peek. A negative n is a refund
// or a grant.
func (r rule) decide(a account, t, n int64, of *portion) (account, ratelimit.Result) {
	grant, changed := n < 0 && of == nil, true
	result := ratelimit.Result{Limit: r.limit, DecidedAt: time.UnixMicro(t)}
	switch result.Allowed = r.roomAt(a, t) >= max(n, 1); {
	case grant:
		a = r.at(a, t)
		a.credit, a.expires = a.credit-n, t+r.life(a)
		if a.since == 0 {
			a.since = t
		}
		result.Allowed = true
	case n < 0:
		rolled, next := r.at(a, t), a
		if t < a.expires && a.kind == r.kind {
			next = r.back(a, rolled, t, of.Units-of.Spent, *of)
		}
		if of.Spent > 0 && of.Since == rolled.since && rolled.since > 0 &&
			(r.kind != "token bucket" || rolled.count > 0 || rolled.credit > 0) {
			next.credit, next.expires = next.credit+of.Spent, max(next.expires, t+r.life(account{}))
		}
		changed = next != a
		a = next
		result.Allowed = true
	case !result.Allowed:
		result.RetryAfter = time.Duration(r.fits(a, t, max(n, 1))-t) * time.Microsecond
	case n > 0:
		a = r.at(a, t)
		ordinary := min(n, r.room(a, t))
		a = r.take(a, t, ordinary)
		a.credit, a.expires = a.credit-(n-ordinary), t+r.life(a)
	}
	result.Remaining = r.roomAt(a, t)
	reset := r.reset(a, t)
	_, until := a.held(t)
	result.ResetAfter = time.Duration(max(reset, until)-t) * time.Microsecond
	nothing := reset == t && (r.kind == "token bucket" || a.count == 0 && a.prev == 0) // whether no usage is left
	if grant || n < 0 && changed && nothing || n > 0 && result.Allowed {
		a.expires = reset
	}
	return a, result
}
