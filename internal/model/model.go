// Package model is the executable specification: it says how each algorithm changes a row. Tests compare the SQL
// functions with this package.
package model

import (
	"math"
	"math/bits"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Rules apply a policy to one row. Tests compare the SQL functions with Rules.
type Rules interface {
	Numbers() algorithm.Numbers
	// Roll brings a row forward to the clock. moved is true if the clock jumped back so far that Roll moved the row
	// back to the clock.
	Roll(s State, clock int64) (rolled State, moved bool)
	// Decide takes n from a row in the state s at the time clock, and returns the row's next state. If n is 0, Decide
	// takes nothing. If n is above the limit, Decide denies it.
	Decide(s State, clock, n int64) (State, Decision)
	// Refund gives back the units of the take t.
	Refund(s State, clock int64, t Take) (State, Decision)
	// Lasts returns how many microseconds a take or a grant keeps the row alive.
	Lasts() int64
	// LeaseOf returns how many units of a row a lease may hold, and for how many microseconds. The result lasts is at
	// most longest. If spare is negative, the caller must take -spare units from the row before a lease may hold any.
	// The comment of engine.Leases says why the limit still holds.
	LeaseOf(s State, clock, longest int64) (spare, lasts int64)
	// ResetAfter returns the ResetAfter of an earlier decision of a statement. The argument last is the statement's
	// last decision. The argument units is what the statement took after the earlier decision. Beside holds, the result
	// may be too large, but not above the ResetAfter of the last decision.
	ResetAfter(last Decision, units int64) int64
}

// State is a row of the table, as its algorithm sees it. The zero State means that there is no row. All times are
// microseconds since 1970.
type State struct {
	// Count is what was taken and still counts: the units taken in the current window, the sum of a log's entries, or
	// the tokens missing in a bucket, in 1/Scale token. Count is above the limit if the key owes units.
	Count     int64
	PrevCount int64 // sliding window: the units taken in the previous window
	// WindowStart is the start of the current window, that is, when its first take was. In a log it is the newest
	// entry's time, and in a bucket the time up to which Count includes the refill.
	WindowStart int64
	Credit      int64   // granted credit: see Grant
	Scale       int64   // bucket: Count of one token; calendar: microseconds from WindowStart to the window's end
	ExpiresAt   int64   // from this time on, the row means the same as a missing row
	Log         Entries // sliding log: the entries; bucket: the leased tokens

	// Since is when this row was created. A refund compares it with Take.Since, so that units do not go back to a newer
	// row of the key. In a window or a log, Since is 0 until the first grant.
	Since    int64
	Capacity int64 // bucket: the policy's Capacity at the last decision
	Refill   int64 // bucket: the policy's Refill at the last decision
	Returned int64 // bucket: what refunds gave back after Since, in 1/Scale token
}

// Decision is the result of the SQL functions for one element of a statement, in their units.
type Decision struct {
	Granted    int64 // how many of the element's requests were granted
	Remaining  int64
	RetryAfter int64 // microseconds; Never if the cost is above the limit
	ResetAfter int64 // microseconds
	Held       int64 // the units of live holds after the decision
	DecidedAt  time.Time
	// State is the row after the decision, rolled forward to it. The log of State has only the entries that determine a
	// denial's RetryAfter.
	State State
	Taken Take // what all granted requests took together; meaningless in a denial
}

// Never is the RetryAfter of a cost above the limit. The SQL functions return NULL for it.
const Never = math.MaxInt64

// MaxProduct bounds the product of an amount and a time, and MaxSpan bounds a time. Within these bounds, no sum or
// product in a decision overflows 64 bits. RetryAfter and ResetAfter can reach three windows after the database's clock
// stepped back. Both still fit into a time.Duration.
const (
	MaxProduct = 1 << 62
	MaxSpan    = 1 << 51 // microseconds, 71 years
)

// These numbers bound a lease from a window and from a bucket. Lease in the root package explains them.
const (
	leasesInWindow = 8
	LeasesInBucket = 128
)

// Micros converts a duration to microseconds. The root package allows only whole microseconds in a policy.
func Micros(d time.Duration) int64 { return int64(d / time.Microsecond) }

// MicrosUp converts a duration ≥ 0 to microseconds, rounded up.
func MicrosUp(d time.Duration) int64 { return CeilDiv(int64(d), int64(time.Microsecond)) }

// Duration converts microseconds to a time.Duration. micros is at most 4 × MaxSpan.
func Duration(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// CeilDiv returns a/b rounded up, for a ≥ 0 and b > 0. It cannot overflow.
func CeilDiv(a, b int64) int64 {
	if a == 0 {
		return 0
	}
	return (a-1)/b + 1
}

// MulDiv returns a × b / c rounded down, for 0 ≤ a < c and b ≥ 0. The product a × b may need 128 bits.
func MulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	quotient, _ := bits.Div64(hi, lo, uint64(c))
	return int64(quotient)
}

// Take is what a request took from a row. It has the data that a refund needs.
type Take struct {
	Units int64
	Spent int64 // units from granted credit, which are the last of Units
	Since int64 // the row's Since
	// In is the row's WindowStart: the start of the window, the time of the log's entry, or the bucket's time.
	In int64
	// At is only for a bucket. It is the tokens missing just after the take, plus Returned at that time, both in
	// 1/Scale token. TokenBucket.Refund explains it.
	At int64
	// Ended is only for a refund of the rest of a bucket's lease: how many of its units the lease no longer holds.
	Ended int64
}

// Portion returns the part of the take that has the units in the range [from, to).
func (k Take) Portion(m Rules, from, to int64) Take {
	ordinary := k.Units - k.Spent
	if n := m.Numbers(); n.Algorithm == algorithm.TokenBucket {
		k.At -= (ordinary - min(to, ordinary)) * Micros(n.Span)
	}
	k.Units, k.Spent = to-from, max(to-max(from, ordinary), 0)
	return k
}

// TakenBy returns the take of one granted request. place is the request's number in the element, counted from 1.
func (d *Decision) TakenBy(m Rules, cost, place int64) Take {
	k := d.Taken
	k.Units = d.Granted * cost
	return k.Portion(m, (place-1)*cost, place*cost)
}
