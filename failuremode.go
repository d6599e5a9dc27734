package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// FailureMode is what a limiter answers when Postgres is away or too slow, the table is locked, or the pool is
// exhausted. What only a person can mend ([ErrSetup], [ErrNotMigrated], [ErrNotPermitted]) stays an error in all modes.
// The zero FailureMode is ReturnError.
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

// FailOpen allows what Postgres does not decide, for limits nobody misses.
func FailOpen() FailureMode { return FailureMode{answer: failOpen} }

// FailClosed denies what Postgres does not decide, for logins and billing.
func FailClosed() FailureMode { return FailureMode{answer: failClosed} }

// FallbackLocal decides in this process, by the same policy with a share of its limit: above 0, at most 1. With 10 a
// minute and a share of 0.2, a key has 2 a minute in each process while Postgres is away. It is at least 1. A higher
// cost is denied.
//
// Process and database do not know what the other admits. So over an outage, n processes admit at most the limit and n
// × share of it: twice the limit with a share of 1/n. A process remembers 65,536 keys, in less than 19 MB; under a
// [SlidingLog] fewer, such as 2,277 with a Limit of 1,000. All further keys share the room of one key.
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

// answerOnFailure is OnFailure's answer to a request that the database does not decide.
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
