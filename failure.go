package ratelimit

import (
	"fmt"
	"time"
)

// FailureMode is what a limiter answers when Postgres is away or too slow to decide, or the table is locked: one of [ReturnError], [FailOpen],
// [FailClosed] and [FallbackLocal]. The zero FailureMode is no choice; it does what ReturnError does.
type FailureMode struct {
	answer failureAnswer
	share  float64
}

type failureAnswer uint8

const (
	noChoice failureAnswer = iota
	returnError
	failOpen
	failClosed
	fallbackLocal
)

// ReturnError returns the error, and the caller decides.
func ReturnError() FailureMode { return FailureMode{answer: returnError} }

// FailOpen allows what the database does not decide: for limits whose absence, for the time of an outage, harms nobody.
func FailOpen() FailureMode { return FailureMode{answer: failOpen} }

// FailClosed denies what the database does not decide: for limits on what costs money, or must not be guessed, such as logins.
func FailClosed() FailureMode { return FailureMode{answer: failClosed} }

// FallbackLocal decides in this process what the database does not, by the same policy with a share of its limit: with 10 a
// minute and a share of 0.2, a key has 2 a minute from each process while Postgres is away. What was taken in the database before
// is not known here, nor the other way round: over an outage, a key of n processes is admitted the limit and n × share of it at most.
// With a share of 1/n that is twice the limit. A share is above 0 and at most 1, and of a small limit at least 1.
//
// A cost above the share is denied. A process remembers 65,536 keys, in less than 19 MB; as long as none of them has expired, all others
// share what is one key's.
func FallbackLocal(share float64) FailureMode {
	return FailureMode{answer: fallbackLocal, share: share}
}

// String describes it, for logs.
func (m FailureMode) String() string {
	switch m.answer {
	case failOpen:
		return "fail open"
	case failClosed:
		return "fail closed"
	case fallbackLocal:
		return fmt.Sprintf("fall back to %v of the limit in each process", m.share)
	default:
		return "return error"
	}
}

// Source says how a decision came about.
type Source uint8

const (
	// SourceDatabase means that the database decided.
	SourceDatabase Source = iota
	// SourceCachedDenial means that the database had denied before, and would do so again; see [Config].DenialMaxAge.
	SourceCachedDenial
	// SourceFallback means that Postgres is away, and this process decided; see [FallbackLocal].
	SourceFallback
	// SourceFailedOpen means that Postgres is away, and the request is allowed for that reason; see [FailOpen].
	SourceFailedOpen
	// SourceFailedClosed means that Postgres is away, and the request is denied for that reason; see [FailClosed].
	SourceFailedClosed
)

// String is a word or two, for logs and the labels of metrics: "database", "cached denial", "fallback", "failed open", "failed closed".
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
	default:
		return fmt.Sprintf("Source(%d)", uint8(s))
	}
}

// OnFailure is the limiter's [Config].OnFailure; the zero FailureMode if none was chosen.
func (l *Limiter) OnFailure() FailureMode { return l.config.OnFailure }

// substitute is the answer to a request that the database does not decide.
func (l *Limiter) substitute(key string, n int64) Result {
	switch l.config.OnFailure.answer {
	case failOpen:
		return Result{Allowed: true, Source: SourceFailedOpen, Limit: l.policy.limit(), DecidedAt: time.Now()}
	case fallbackLocal:
		parts := l.appendParts(nil, key, n)
		shares := make([]Policy, len(parts))
		for i, p := range parts {
			shares[i] = p.policy.scaled(l.config.OnFailure.share)
		}
		decisions, now := l.fallback.decide(shares, key, n)
		for i := range decisions {
			decisions[i].decidedAt = now
			if decisions[i].retryAfter == never {
				decisions[i].retryAfter = micros(breakerPause)
			}
		}
		e := element{set: &set{parts: parts}, decisions: decisions}
		result := e.combined(0, len(parts), 1)
		result.Source = SourceFallback
		return result
	default:
		return Result{Source: SourceFailedClosed, Limit: l.policy.limit(), RetryAfter: breakerPause, DecidedAt: time.Now()}
	}
}
