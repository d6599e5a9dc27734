// Package model is the executable specification: it says how each algorithm changes a row. The SQL is tested against
// it.
package model

import (
	"math"
	"math/bits"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// Rules apply a policy to one row. The SQL is tested against them.
type Rules interface {
	Numbers() algorithm.Numbers
	// Roll brings a row forward to the clock. moved tells whether the clock jumped back, so that the row was moved back
	// with it.
	Roll(s State, clock int64) (rolled State, moved bool)
	// Decide takes n from a row in the state s at the time clock, and returns the row's next state. With n = 0 it takes
	// nothing and only looks. It denies an n above the limit.
	Decide(s State, clock, n int64) (State, Decision)
	// Refund gives back the units of the take t.
	Refund(s State, clock int64, t Take) (State, Decision)
	// Lasts is how long a take or a grant keeps the row, in microseconds.
	Lasts() int64
	// LeaseOf returns how many units of a row in the state s may be held at the time clock, to be spent later, and for
	// how many microseconds: at most longest. If spare is below 0, that many units have to be taken from the row before
	// any may be held. docs/guarantees.md says why the policy still holds.
	LeaseOf(s State, clock, longest int64) (spare, lasts int64)
	// ResetAfter returns ResetAfter as it was after a decision in the middle of a statement. The same statement took
	// units more after it, and last is its last decision.
	ResetAfter(last Decision, units int64) int64
}

// State is a row of the table as its algorithm sees it; the zero state is no row. Times are microseconds since 1970.
type State struct {
	// For a window, it is the units taken in the current window. For a log, it is the sum of the entries. For a bucket,
	// it is the granted credit.
	Count     int64
	PrevCount int64 // sliding window: the units taken in the previous window
	// For a window, it is the start of the current window: a key's first take in it. For a log, it is the newest
	// entry's time. For a bucket, it is the time up to which Credit includes refill.
	WindowStart int64
	Credit      int64   // bucket: tokens left, in units of 1/scale token; windows and log: granted credit
	Scale       int64   // bucket: units of credit in a token; calendar: from WindowStart to the end of the window
	ExpiresAt   int64   // from then on, the row means the same as no row
	Log         Entries // sliding log: its entries; bucket: its leased units

	// Since is when this row was created. A refund compares it, so that it does not change a later row. A bucket always
	// has it. The others have it from the first grant on, and 0 before.
	Since    int64
	Capacity int64 // bucket: the policy's
	Refill   int64 // bucket: the policy's
	Returned int64 // bucket: units given back since then, in 1/scale token
}

// Decision is one element's result from the SQL functions, in their units.
type Decision struct {
	Granted    int64 // how many of the element's requests were granted
	Remaining  int64
	RetryAfter int64 // microseconds; Never if no such request can ever be granted
	ResetAfter int64 // microseconds
	DecidedAt  time.Time
	// State is the row after the decision, rolled forward to it. Its log has only the entries that determine a denial's
	// RetryAfter.
	State State
	Taken Take // all granted requests together; meaningless in a denial
}

// Never is the RetryAfter of a cost above the limit. The SQL functions return NULL for it.
const Never = math.MaxInt64

// The exact range. The product of an amount and a time is at most MaxProduct, and a time is at most MaxSpan, so that no
// sum or product in a decision overflows 64 bits. RetryAfter and ResetAfter fit into a time.Duration. They can reach
// three windows after the database's clock stepped back.
const (
	MaxProduct = 1 << 62
	MaxSpan    = 1 << 51 // microseconds, 71 years
)

// The bounds of a lease from a window and from a bucket: see Lease in the root package.
const (
	leasesInWindow = 8
	LeasesInBucket = 128
)

// Micros converts a duration of whole microseconds, as validate requires.
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

// Take is what a request took from a row, with the data that a refund needs.
type Take struct {
	Units int64
	Spent int64 // how many of these came out of granted credit; they are the last ones
	Since int64 // the row's Since
	// In is the row's WindowStart: the start of the window, the time of the log's entry, or the bucket's time.
	In int64
	// At is only for a bucket: the missing tokens just after the take plus all units given back before, in 1/scale
	// token. See TokenBucket.refund.
	At int64
	// Ended is only for the rest of a lease from a bucket: how many of its units the lease no longer holds.
	Ended int64
}

// Portion returns the share of the units from the from-th to the to-th.
func (k Take) Portion(m Rules, from, to int64) Take {
	ordinary := k.Units - k.Spent
	if n := m.Numbers(); n.Algorithm == algorithm.TokenBucket {
		k.At -= (ordinary - min(to, ordinary)) * Micros(n.Span)
	}
	k.Units, k.Spent = to-from, max(to-max(from, ordinary), 0)
	return k
}

// TakenBy returns the take of the granted request at that place.
func (d *Decision) TakenBy(m Rules, cost, place int64) Take {
	k := d.Taken
	k.Units = d.Granted * cost
	return k.Portion(m, (place-1)*cost, place*cost)
}
