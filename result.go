package ratelimit

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
)

// Result is a decision. The zero Result denies.
type Result struct {
	Allowed bool   // the cost was taken; for a Peek, a cost of 1 would be allowed
	Source  Source // who decided
	Limit   int64  // the Limit of the policy, or the Capacity of a TokenBucket
	// Remaining is the largest cost that would be allowed next: 7 after taking 3 of 10. Credit from [Limiter.Grant] may
	// raise it above Limit.
	Remaining int64
	// RetryAfter is 0 if Allowed is true. Otherwise it is the time from DecidedAt until the same request is allowed, if
	// nobody else takes. It is exact: 1 µs earlier, the request is still denied. If all of a sliding window of 10 a
	// minute was taken at 0 s, RetryAfter is 61 s at 5 s.
	RetryAfter time.Duration
	// ResetAfter is the time until the key is as good as new, if nobody takes. If all of a sliding window of 10 a
	// minute was taken at 0 s, ResetAfter is 115 s at 5 s: a take counts until the next window ends.
	ResetAfter time.Duration
	// Held is how many units of the key live holds set aside: 4 while a [Limiter.Hold] of 4 lives. Only Peek, Hold,
	// [HoldAll] and [Explanation].State set it; a cached denial has 0.
	Held      int64
	DecidedAt time.Time // by the database's clock, or by this process's if Postgres is unreachable

	// Shadow is the decision of a row of mode shadow, or nil without such a row; see [Policies].
	Shadow *Result

	taken    engine.Claim // what Refund gives back
	fromJSON bool         // taken is empty, because JSON does not contain it

	each *[]Result // for an All; a pointer keeps Result comparable
}

// Balance is what a key has after a refund or a grant: see [Result].
type Balance struct {
	Limit, Remaining int64
	ResetAfter       time.Duration
	DecidedAt        time.Time
}

// Each returns the result of each policy of an [All], in order. A policy that refuses has a RetryAfter above 0. Each
// returns nil for a single policy, or if no policy was asked (SourcePolicy, SourceFailedOpen, SourceFailedClosed).
func (r Result) Each() []Result {
	if r.each == nil {
		return nil
	}
	return slices.Clone(*r.each)
}

// Source says who decided.
type Source uint8

// These are all the sources.
const (
	SourceDatabase     Source = iota // the database
	SourceCachedDenial               // a denial that this process remembers; see [ClientConfig].DenialMaxAge
	SourceFallback                   // this process, because Postgres is unreachable; see [FallbackLocal]
	SourceFailedOpen                 // [FailOpen], because Postgres is unreachable
	SourceFailedClosed               // [FailClosed], because Postgres is unreachable
	SourcePolicy                     // a row of mode off or deny; nothing was counted; see [Policies]
	SourceLease                      // this process, from a lease; see [Lease]
)

// String returns the source in words, such as "cached denial".
func (s Source) String() string {
	switch s {
	case SourceDatabase:
		return "database"
	case SourceCachedDenial:
		return "cached denial"
	case SourceFallback:
		return "fallback"
	case SourceFailedOpen:
		return "failed open"
	case SourceFailedClosed:
		return "failed closed"
	case SourcePolicy:
		return "policy"
	case SourceLease:
		return "lease"
	default:
		return fmt.Sprintf("Source(%d)", uint8(s))
	}
}

// isAway tells whether s is an answer of OnFailure.
func (s Source) isAway() bool {
	return s == SourceFallback || s == SourceFailedOpen || s == SourceFailedClosed
}

// MarshalText returns what String returns.
func (s Source) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what String returns.
func (s *Source) UnmarshalText(text []byte) error {
	for source := SourceDatabase; source <= SourceLease; source++ {
		if source.String() == string(text) {
			*s = source
			return nil
		}
	}
	return fmt.Errorf("ratelimit: %q is no Source", text)
}

// UnmarshalJSON reads all fields, but not what [Limiter.Refund] needs.
func (r *Result) UnmarshalJSON(text []byte) error {
	type plain Result // a Result without this method
	if err := json.Unmarshal(text, (*plain)(r)); err != nil {
		return err
	}
	r.fromJSON = true
	return nil
}

func balanceOf(o *engine.Outcome, err error) (Balance, error) {
	if err != nil {
		return Balance{}, err
	}
	return Balance{Limit: o.Limit, Remaining: o.Remaining, ResetAfter: o.ResetAfter, DecidedAt: o.DecidedAt}, nil
}

func resultOf(o *engine.Outcome) (r Result) {
	r.set(o)
	return r
}

// set does what resultOf does, but writes to r, to save a copy.
func (r *Result) set(o *engine.Outcome) {
	*r = Result{
		Allowed: o.Allowed, Source: sourceOf(o.By), Limit: o.Limit, Remaining: o.Remaining,
		RetryAfter: o.RetryAfter, ResetAfter: o.ResetAfter, Held: o.Held, DecidedAt: o.DecidedAt, taken: o.Claim,
	}
	if o.Each != nil {
		each := make([]Result, len(o.Each))
		for i := range each {
			each[i] = resultOf(&o.Each[i])
		}
		r.each = &each
	}
	if o.Beside != nil {
		shadow := resultOf(o.Beside)
		r.Shadow = &shadow
	}
}

func sourceOf(by engine.By) Source {
	return [...]Source{
		engine.ByDatabase: SourceDatabase, engine.ByDenial: SourceCachedDenial, engine.ByLease: SourceLease,
		engine.ByFallback: SourceFallback,
	}[by]
}
