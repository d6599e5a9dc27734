package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// FailureMode is what a limiter answers when Postgres is away or too slow, the table is locked, or the application
// has all connections of the pool ([ErrPoolExhausted]). What only a person can mend is an error in all modes, such as
// [ErrSetup], [ErrNotMigrated] or [ErrNotPermitted]. The zero FailureMode does what ReturnError does.
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

// FailOpen allows what the database does not decide, for limits that nobody misses during an outage.
func FailOpen() FailureMode { return FailureMode{answer: failOpen} }

// FailClosed denies what the database does not decide, for what costs money or must not be guessed, such as
// logins.
func FailClosed() FailureMode { return FailureMode{answer: failClosed} }

// FallbackLocal decides in this process, by the same policy with a share of its limit. With 10 a minute and a
// share of 0.2, a key has 2 a minute from each process while Postgres is away. A share is above 0 and at most 1.
// It leaves at least 1 of a small limit. A cost above what it leaves is denied.
//
// Process and database do not know what the other has admitted. So over an outage, a key of n processes is
// admitted the limit and n × share of it at most: twice the limit with a share of 1/n. A process remembers 65,536
// keys, in less than 19 MB; under a SlidingLog fewer, 2,277 with a Limit of 1,000, because each may need 8 bytes for
// each unit of its Limit. Until one of them expires, all others share what is one key's. Windows of the calendar are
// those of this process's time zone data, or of UTC if it has none for a Zone.
func FallbackLocal(share float64) FailureMode {
	return FailureMode{answer: fallbackLocal, share: share}
}

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

// answerOnFailure is what OnFailure answers to a request that the database does not decide.
func (l *Limiter) answerOnFailure(policy *model.Policy, key string, n int64) Result {
	switch l.onFailure.answer {
	case failOpen:
		return Result{Allowed: true, Source: SourceFailedOpen, Limit: policy.Limit, DecidedAt: time.Now()}
	case fallbackLocal:
		o := l.client.engine.FallBack(l.question(policy, key, n), l.onFailure.share)
		return resultOf(&o)
	default:
		return Result{
			Source: SourceFailedClosed, Limit: policy.Limit, RetryAfter: engine.BreakerPause, DecidedAt: time.Now(),
		}
	}
}
