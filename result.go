package ratelimit

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
)

// Result is a decision. The zero Result denies. A Result remembers what it took, for [Limiter.Refund].
type Result struct {
	Allowed bool   // and its cost taken; of a Peek: whether a cost of 1 would be allowed
	Source  Source // who decided; see [Config].OnFailure and [ClientConfig].DenialMaxAge
	Limit   int64  // the policy's; of a bucket, its capacity
	// Remaining is the largest cost that would be allowed right after the decision: 7 after taking 3 of 10. Credit
	// from [Limiter.Grant] may raise it above Limit, and then no single request may take all of it.
	Remaining int64
	// RetryAfter is 0 if the request was allowed. Else the same request is allowed this long after the decision,
	// and not a microsecond earlier, if nobody else takes anything. With 10 a minute in a sliding window, all
	// taken at 0 s, it is 61 s at 5 s.
	RetryAfter time.Duration
	// ResetAfter is how long after the decision the key is as good as new if nobody takes; 0 if it already is. In
	// that example it is 115 s at 5 s, because what was taken counts for two windows.
	ResetAfter time.Duration
	DecidedAt  time.Time // the database's clock, or this process's if Source says that Postgres is away

	// Shadow is what a row of the mode shadow would have decided, with a count of its own; see [Policies]. It is nil if
	// there is no such row, or if it was not decided. It changes nothing.
	Shadow *Result

	taken    engine.Claim // for Refund
	fromJSON bool         // what was taken is not known

	each *[]Result // of an All; a pointer, so that Results can be compared
}

// Balance is what a key has right after a [Limiter.Refund] or a [Limiter.Grant]. Its fields are those of [Result].
type Balance struct {
	Limit, Remaining int64
	ResetAfter       time.Duration
	DecidedAt        time.Time
}

// Each is what each policy of an [All] says, in their order. Those that refuse have a RetryAfter above 0. It is nil if
// there is one policy, and if no policy was asked: see SourcePolicy, SourceFailedOpen and SourceFailedClosed.
func (r Result) Each() []Result {
	if r.each == nil {
		return nil
	}
	return slices.Clone(*r.each)
}

// Source says how a decision came about.
type Source uint8

// The sources of a decision.
const (
	SourceDatabase     Source = iota // the database decided
	SourceCachedDenial               // it had denied before, and would again; see [ClientConfig].DenialMaxAge
	SourceFallback                   // Postgres is away, and this process decided; see [FallbackLocal]
	SourceFailedOpen                 // Postgres is away, and the request is allowed for that; see [FailOpen]
	SourceFailedClosed               // Postgres is away, and the request is denied for that; see [FailClosed]
	SourcePolicy                     // a row of the mode off or deny decided, and nothing was counted; see [Policies]
	SourceLease                      // this process had taken it from the database before; see [Lease]
)

// String is "database", "cached denial", "fallback", "failed open", "failed closed", "policy" or "lease", for logs and
// metrics.
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

// isAway tells whether OnFailure has answered.
func (s Source) isAway() bool {
	return s == SourceFallback || s == SourceFailedOpen || s == SourceFailedClosed
}

// MarshalText returns the String, for JSON.
func (s Source) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText reads what MarshalText wrote.
func (s *Source) UnmarshalText(text []byte) error {
	for source := SourceDatabase; source <= SourceLease; source++ {
		if source.String() == string(text) {
			*s = source
			return nil
		}
	}
	return fmt.Errorf("ratelimit: %q is no Source", text)
}

// UnmarshalJSON reads what JSON has of a Result, which is not what it took: see [Result.Receipt].
func (r *Result) UnmarshalJSON(text []byte) error {
	type plain Result // without this method
	if err := json.Unmarshal(text, (*plain)(r)); err != nil {
		return err
	}
	r.fromJSON = true
	return nil
}

// balanceOf is what the caller is told of a refund or a grant.
func balanceOf(o *engine.Outcome, err error) (Balance, error) {
	if err != nil {
		return Balance{}, err
	}
	return Balance{Limit: o.Limit, Remaining: o.Remaining, ResetAfter: o.ResetAfter, DecidedAt: o.DecidedAt}, nil
}

// resultOf is what the caller is told of a decision.
func resultOf(o *engine.Outcome) (r Result) {
	r.set(o)
	return r
}

// set is resultOf for a Result that is there already, which saves copying it.
func (r *Result) set(o *engine.Outcome) {
	*r = Result{
		Allowed: o.Allowed, Source: sourceOf(o.By), Limit: o.Limit, Remaining: o.Remaining,
		RetryAfter: o.RetryAfter, ResetAfter: o.ResetAfter, DecidedAt: o.DecidedAt, taken: o.Claim,
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
