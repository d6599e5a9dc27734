package ratelimit

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
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

	receipt *receipt // what was taken, for Refund; nil if nothing was, or the database has not decided it
	// Of a receipt of a lease, which units are this one's. units is 0 if the whole receipt is.
	first, units int64

	each *[]Result // of an All; a pointer, so that Results can be compared
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
	r.receipt = fromJSON
	return nil
}

// result is what the caller of a request of one limiter is told.
func (r *request) result() Result { return r.resultOf(0, len(r.parts), r.policy) }

// resultOf is what is told about the parts from first to before last. They belong to one limiter, with that
// policy.
func (r *request) resultOf(first, last int, policy Policy) Result {
	var result Result
	if last-first == 1 {
		result = r.parts[first].result(r.place)
	} else {
		each := make([]Result, last-first)
		for i := range each {
			each[i] = r.parts[first+i].result(r.place)
		}
		result = resultOfAll(each)
	}
	if p := &r.parts[first]; p.cost > 0 && r.place <= p.decision.Granted {
		result.receipt = newReceipt(p.space, policy, p.key, p.cost, last-first)
		for i := range result.receipt.parts {
			part := &r.parts[first+i]
			result.receipt.parts[i] = part.decision.TakenBy(part.rules, part.cost, r.place)
		}
	}
	return result
}

// resultOfAll is the decision of policies that say that, of which none is allowed alone.
func resultOfAll(each []Result) Result {
	result := each[0]
	result.each = &each
	for _, one := range each[1:] {
		if one.Remaining < result.Remaining {
			result.Limit, result.Remaining = one.Limit, one.Remaining
		}
		result.Allowed = result.Allowed && one.Allowed
		result.RetryAfter = max(result.RetryAfter, one.RetryAfter)
		result.ResetAfter = max(result.ResetAfter, one.ResetAfter)
	}
	return result
}

// result is what the request at that place, from 1, is told about a part that several requests asked for as one.
func (p *part) result(place int64) Result {
	d := &p.decision
	r := Result{
		Limit:      p.rules.Numbers().Limit,
		Remaining:  d.Remaining,
		ResetAfter: model.Duration(d.ResetAfter),
		DecidedAt:  d.DecidedAt,
	}
	switch {
	case place <= d.Granted:
		after := (d.Granted - place) * p.cost // what the requests behind it have taken
		r.Allowed = true
		r.Remaining += after
		r.ResetAfter = model.Duration(p.rules.ResetAfter(*d, after))
	case d.RetryAfter == 0: // it looked, or another part has refused
		r.Allowed = true
	default:
		r.RetryAfter = model.Duration(d.RetryAfter)
	}
	return r
}

// add adds what this process holds of a key to what the database has told about it.
func (r *Result) add(held int64) {
	r.Remaining += held
	if held > 0 {
		r.Allowed, r.RetryAfter = true, 0
	}
	if r.each != nil {
		for i := range *r.each {
			(*r.each)[i].add(held)
		}
	}
}
