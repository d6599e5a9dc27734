// Package model is the executable specification: what each algorithm makes of a row. The SQL is tested against it.
package model

import (
	"math"
	"math/bits"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Rules are what a policy means for one row. The SQL is tested against them.
type Rules interface {
	Numbers() algorithm.Numbers
	// Roll brings a row forward to the clock. moved tells whether the clock has jumped back, and the row with it.
	Roll(s State, clock int64) (rolled State, moved bool)
	// Decide takes n at the time clock from a row in the state s, and returns the row's next state. With n = 0 it
	// looks. It denies an n above the limit.
	Decide(s State, clock, n int64) (State, Decision)
	// Refund gives back what t says.
	Refund(s State, clock int64, t Take) (State, Decision)
	// Lasts is for how many microseconds a take or a grant keeps the row.
	Lasts() int64
	// LeaseOf tells how many units may be held of a row in the state s, at the time clock, to be spent later, and for
	// how many microseconds, at most longest. If it is below 0, as many have to be taken from the row before any may
	// be held. docs/guarantees.md says why these bounds keep the policy.
	LeaseOf(s State, clock, longest int64) (spare, lasts int64)
	// ResetAfter is the ResetAfter of a decision after which the same statement took units more. last is what the
	// database said after all of them.
	ResetAfter(last Decision, units int64) int64
}

// State is a row of the table as its algorithm sees it; the zero state is no row. Times are microseconds since 1970.
type State struct {
	// Of a window, what was taken in the current one. Of a log, its sum. Of a bucket, what was granted above its
	// capacity.
	Count     int64
	PrevCount int64 // sliding window: what was taken in the window before
	// Of a window, the start of the current one, which is a key's first take in it. Of a log, its newest time. Of a
	// bucket, the time up to which Credit includes refill.
	WindowStart int64
	Credit      int64   // bucket: what is left, in units of 1/scale token; windows and log: granted above the limit
	Scale       int64   // bucket: units of credit in a token; calendar: from WindowStart to the end of the window
	ExpiresAt   int64   // from then on the row means the same as no row
	Log         Entries // sliding log: what was taken, and when; bucket: what is leased

	// Since is when the row became what it is, so that a refund can tell that it still is. A bucket always has it, and
	// the others from the first grant on. 0 is none.
	Since    int64
	Capacity int64 // bucket: the policy's
	Refill   int64 // bucket: the policy's
	Returned int64 // bucket: what was given back since then, in units of 1/scale token
}

// Decision is what the SQL functions return for an element, in their units.
type Decision struct {
	Granted    int64 // requests of the element that were granted
	Remaining  int64
	RetryAfter int64 // microseconds; Never if no such request can ever be granted
	ResetAfter int64 // microseconds
	DecidedAt  time.Time
	// State is the row after the decision, rolled forward to it. Its log has only the entries that a denial's
	// RetryAfter comes from.
	State State
	Taken Take // by all requests that were granted; means nothing in a denial
}

// Never is the RetryAfter of a cost above the limit. The SQL functions return NULL for it.
const Never = math.MaxInt64

// The exact range. Products of an amount and a time stay within MaxProduct, and times within MaxSpan. So no sum or
// product in a decision overflows 64 bits. RetryAfter and ResetAfter fit into a time.Duration, although they reach
// three windows when the database's clock has stepped back.
const (
	MaxProduct = 1 << 62
	MaxSpan    = 1 << 51 // microseconds, 71 years
)

// The bounds of a lease of a window and of a bucket: see Lease in the root package.
const (
	leasesInWindow = 8
	LeasesInBucket = 128
)

// Micros converts a duration that validate has found to be whole microseconds.
func Micros(d time.Duration) int64 { return int64(d / time.Microsecond) }

// MicrosUp converts any duration ≥ 0, rounded up.
func MicrosUp(d time.Duration) int64 { return CeilDiv(int64(d), int64(time.Microsecond)) }

// Duration converts microseconds, at most 4 × MaxSpan of them.
func Duration(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// CeilDiv is a/b rounded up, for a ≥ 0 and b > 0. It cannot overflow.
func CeilDiv(a, b int64) int64 {
	if a == 0 {
		return 0
	}
	return (a-1)/b + 1
}

// MulDiv is a × b / c rounded down, for 0 ≤ a < c and b ≥ 0. The product may need 128 bits.
func MulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	quotient, _ := bits.Div64(hi, lo, uint64(c))
	return int64(quotient)
}

// Take is what a request has taken from a row, and what the row needs to know to take it back.
type Take struct {
	Units int64
	Spent int64 // how many of these, the last ones, came out of granted credit
	Since int64 // the row's Since
	// In is the row's WindowStart: the start of the window, the time of the log's entry, or the time in the bucket's
	// life.
	In int64
	// At is only for a bucket: what was missing from it just after the take, plus all that was given back before, in
	// units of 1/scale token. See TokenBucket.refund.
	At int64
	// Ended is only for what is left of a lease from a bucket: how many units are not held by it any more.
	Ended int64
}

// Portion is what the units from the from-th to the to-th have taken.
func (k Take) Portion(m Rules, from, to int64) Take {
	ordinary := k.Units - k.Spent
	if n := m.Numbers(); n.Algorithm == algorithm.TokenBucket {
		k.At -= (ordinary - min(to, ordinary)) * Micros(n.Span)
	}
	k.Units, k.Spent = to-from, max(to-max(from, ordinary), 0)
	return k
}

// TakenBy is what the request at that place has taken. It is one of those that were granted.
func (d *Decision) TakenBy(m Rules, cost, place int64) Take {
	k := d.Taken
	k.Units = d.Granted * cost
	return k.Portion(m, (place-1)*cost, place*cost)
}
