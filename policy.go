package ratelimit

import (
	"fmt"
	"math"
	"math/bits"
	"time"
)

// Policy says how much a key may take. It is one of [FixedWindow], [SlidingWindow], [TokenBucket] and [SlidingLog].
//
// A policy may be changed while keys are in use. What has been taken stays taken, and the new numbers apply at once: a
// raised limit helps immediately, and a lowered one denies until enough has drained. A bucket keeps its tokens, up to its
// new capacity. A key that another kind of policy was used for starts anew. What a row holds is forgotten when it
// expires, and that is when its key would have been as good as new under the policy that last took from it.
//
// Its String is the text that [ParsePolicy] reads.
type Policy interface {
	fmt.Stringer

	// validate returns a *ConfigError for a policy outside the exact range.
	validate() error
	// limit is the largest cost that can ever be allowed.
	limit() int64
	// statement is the SQL that decides, and numbers are its arguments from $9 on.
	statement() string
	numbers() []any
	// resetAfter is ResetAfter of a decision after which units more were taken in the same statement; last is what the
	// database said after all of them.
	resetAfter(last decision, units int64) int64
	// scaled is the policy with a share of its limit, above 0 and at most 1.
	scaled(share float64) Policy
	// decide is the model: the specification that the SQL is tested against. It takes n at the time clock from a row in
	// the state s (n = 0 looks), and returns the row's next state. Above the limit, n is denied.
	decide(s state, clock, n int64) (state, decision)
	// grant is the model of a grant: n is at least 1.
	grant(s state, clock, n int64) (state, decision)
	// refund is the model of a refund: t says what is to be given back.
	refund(s state, clock int64, t take) (state, decision)
}

// state is a row of the table as its algorithm sees it; the zero state is no row. Times are microseconds since 1970.
type state struct {
	count       int64   // windows: taken in the current window; sliding window log: the sum of the log; bucket: granted above the capacity
	prevCount   int64   // sliding window: taken in the window before
	windowStart int64   // start of the current window; of a log, its newest time; of a bucket, the time up to which refill is part of credit
	credit      int64   // bucket: what is left, in units of 1/scale token; windows and log: granted above the limit
	scale       int64   // bucket: units of credit in a token
	expiresAt   int64   // from then on the row means the same as no row
	log         entries // sliding window log: what has been taken, and when

	// since is when the row began to be what it is, for refunds to tell that it still is: of a bucket always, of the others
	// from the first grant on; 0 is none.
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
	// after the decision, rolled forward to it; of the log, only the entries that a denial's retryAfter comes from
	state state
	taken take // its units are those of the requests that were granted; of a denial it means nothing
}

// never is the retryAfter of a cost above the limit, which the SQL functions return as NULL.
const never = math.MaxInt64

// The exact range: products of an amount and a time stay within maxProduct, and times within maxSpan, so that no sum or
// product in a decision overflows 64 bits, and that RetryAfter and ResetAfter, which reach three windows when the
// database's clock has stepped back, fit into a time.Duration.
const (
	maxProduct = 1 << 62
	maxSpan    = 1 << 51 // microseconds, 71 years
)

// micros converts a duration that validate has found to be whole microseconds.
func micros(d time.Duration) int64 { return int64(d / time.Microsecond) }

// microsUp converts any duration ≥ 0, rounded up.
func microsUp(d time.Duration) int64 { return ceilDiv(int64(d), int64(time.Microsecond)) }

// duration converts microseconds, at most 4 × maxSpan of them.
func duration(micros int64) time.Duration { return time.Duration(micros) * time.Microsecond }

// ceilDiv is a/b rounded up, for a ≥ 0 and b > 0; it cannot overflow.
func ceilDiv(a, b int64) int64 {
	if a == 0 {
		return 0
	}
	return (a-1)/b + 1
}

// mulDiv is a × b / c rounded down, for 0 ≤ a < c and b ≥ 0; the product may need 128 bits.
func mulDiv(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	quotient, _ := bits.Div64(hi, lo, uint64(c))
	return int64(quotient)
}

// validateWindow checks the numbers of both kinds of window.
func validateWindow(limit int64, window time.Duration) error {
	if limit < 1 {
		return &ConfigError{Field: "Policy.Limit", Reason: fmt.Sprintf("is %d, and must be at least 1", limit)}
	}
	if err := validateSpan("Policy.Window", window); err != nil {
		return err
	}
	if limit > maxProduct/micros(window) {
		return &ConfigError{Field: "Policy.Limit", Reason: fmt.Sprintf(
			"is %d with a Window of %v, outside the exact range: for this Window it may be at most %d", limit, window, maxProduct/micros(window))}
	}
	return nil
}

func validateSpan(field string, d time.Duration) error {
	switch {
	case d < time.Microsecond:
		return &ConfigError{Field: field, Reason: fmt.Sprintf("is %v, and must be at least 1µs", d)}
	case d%time.Microsecond != 0:
		return &ConfigError{Field: field, Reason: fmt.Sprintf("is %v, and must be whole microseconds, the resolution of Postgres's clock", d)}
	case micros(d) > maxSpan:
		return &ConfigError{Field: field, Reason: fmt.Sprintf("is %v, and may be at most %v (71 years)", d, duration(maxSpan))}
	}
	return nil
}
