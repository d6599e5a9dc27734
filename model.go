package ratelimit

import (
	"math"
	"math/bits"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// rules are what a policy means for one row. The SQL is tested against them.
type rules interface {
	Numbers() algorithm.Numbers
	// roll brings a row forward to the clock. moved tells whether the clock has jumped back, and the row with it.
	Roll(s state, clock int64) (rolled state, moved bool)
	// decide takes n at the time clock from a row in the state s, and returns the row's next state. With n = 0 it
	// looks. It denies an n above the limit.
	Decide(s state, clock, n int64) (state, decision)
	// refund gives back what t says.
	Refund(s state, clock int64, t take) (state, decision)
	// lasts is for how many microseconds a take or a grant keeps the row.
	Lasts() int64
	// leaseOf tells how many units may be held of a row in the state s, at the time clock, to be spent later, and for
	// how many microseconds, at most longest. If it is below 0, as many have to be taken from the row before any may
	// be held. docs/guarantees.md says why these bounds keep the policy.
	LeaseOf(s state, clock, longest int64) (spare, lasts int64)
	// resetAfter is the ResetAfter of a decision after which the same statement took units more. last is what the
	// database said after all of them.
	ResetAfter(last decision, units int64) int64
}

// state is a row of the table as its algorithm sees it; the zero state is no row. Times are microseconds since 1970.
type state struct {
	// Of a window, what was taken in the current one. Of a log, its sum. Of a bucket, what was granted above its
	// capacity.
	count     int64
	prevCount int64 // sliding window: what was taken in the window before
	// Of a window, the start of the current one, which is a key's first take in it. Of a log, its newest time. Of a
	// bucket, the time up to which credit includes refill.
	windowStart int64
	credit      int64   // bucket: what is left, in units of 1/scale token; windows and log: granted above the limit
	scale       int64   // bucket: units of credit in a token; calendar: from windowStart to the end of the window
	expiresAt   int64   // from then on the row means the same as no row
	log         entries // sliding log: what was taken, and when; bucket: what is leased

	// since is when the row became what it is, so that a refund can tell that it still is. A bucket always has it, and
	// the others from the first grant on. 0 is none.
	since    int64
	capacity int64 // bucket: the policy's
	refill   int64 // bucket: the policy's
	returned int64 // bucket: what was given back since then, in units of 1/scale token
}

// decision is what the SQL functions return for an element, in their units.
type decision struct {
	granted    int64 // requests of the element that were granted
	remaining  int64
	retryAfter int64 // microseconds; never if no such request can ever be granted
	resetAfter int64 // microseconds
	decidedAt  time.Time
	// state is the row after the decision, rolled forward to it. Its log has only the entries that a denial's
	// retryAfter comes from.
	state state
	taken take // by all requests that were granted; means nothing in a denial
}

// never is the retryAfter of a cost above the limit. The SQL functions return NULL for it.
const never = math.MaxInt64

// The exact range. Products of an amount and a time stay within maxProduct, and times within maxSpan. So no sum or
// product in a decision overflows 64 bits. RetryAfter and ResetAfter fit into a time.Duration, although they reach
// three windows when the database's clock has stepped back.
const (
	maxProduct = 1 << 62
	maxSpan    = 1 << 51 // microseconds, 71 years
)

// The bounds of a lease of a window and of a bucket: see Lease in the root package.
const (
	leasesInWindow = 8
	leasesInBucket = 128
)

// micros converts a duration that validate has found to be whole microseconds.
func micros(d time.Duration) int64 { return int64(d / time.Microsecond) }

// microsUp converts any duration ≥ 0, rounded up.
func microsUp(d time.Duration) int64 { return ceilDiv(int64(d), int64(time.Microsecond)) }

// duration converts microseconds, at most 4 × maxSpan of them.
func duration(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// ceilDiv is a/b rounded up, for a ≥ 0 and b > 0. It cannot overflow.
func ceilDiv(a, b int64) int64 {
	if a == 0 {
		return 0
	}
	return (a-1)/b + 1
}

// mulDiv is a × b / c rounded down, for 0 ≤ a < c and b ≥ 0. The product may need 128 bits.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	quotient, _ := bits.Div64(hi, lo, uint64(c))
	return int64(quotient)
}

// take is what a request has taken from a row, and what the row needs to know to take it back.
type take struct {
	units int64
	spent int64 // how many of these, the last ones, came out of granted credit
	since int64 // the row's since
	// in is the row's windowStart: the start of the window, the time of the log's entry, or the time in the bucket's
	// life.
	in int64
	// at is only for a bucket: what was missing from it just after the take, plus all that was given back before, in
	// units of 1/scale token. See TokenBucket.refund.
	at int64
	// ended is only for what is left of a lease from a bucket: how many units are not held by it any more.
	ended int64
}

// portion is what the units from the from-th to the to-th have taken.
func (k take) portion(m rules, from, to int64) take {
	ordinary := k.units - k.spent
	if n := m.Numbers(); n.Algorithm == algorithm.TokenBucket {
		k.at -= (ordinary - min(to, ordinary)) * micros(n.Span)
	}
	k.units, k.spent = to-from, max(to-max(from, ordinary), 0)
	return k
}

// takenBy is what the request at that place has taken. It is one of those that were granted.
func (d *decision) takenBy(m rules, cost, place int64) take {
	k := d.taken
	k.units = d.granted * cost
	return k.portion(m, (place-1)*cost, place*cost)
}
