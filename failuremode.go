package ratelimit

import (
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// FailureMode says what a limiter answers when Postgres is unreachable or too slow, the table is locked, or the pool is
// exhausted. In all modes, errors that only a person can fix are returned ([ErrSetup], [ErrNotMigrated],
// [ErrNotPermitted]). The zero FailureMode is ReturnError.
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

// ReturnError makes the limiter return the error.
func ReturnError() FailureMode { return FailureMode{answer: returnError} }

// FailOpen allows requests that Postgres does not decide.
func FailOpen() FailureMode { return FailureMode{answer: failOpen} }

// FailClosed denies requests that Postgres does not decide, such as logins.
func FailClosed() FailureMode { return FailureMode{answer: failClosed} }

// FallbackLocal decides in this process, with a share of the policy's limit. The share is above 0, and at most 1. With
// 10 a minute and a share of 0.2, a key gets 2 a minute in each process while Postgres is unreachable. A key gets at
// least 1. Requests that cost more than a key gets are denied.
//
// Takes in this process and takes in the database do not count each other. So over an outage, n processes admit at most
// (1 + n × share) × limit: twice the limit with a share of 1/n. A process remembers 65,536 keys, in less than 19 MB.
// Under a [SlidingLog] of 1,000, it remembers 2,277 keys. All further keys share one key's limit.
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

// answerOnFailure returns OnFailure's answer to a request that the database does not decide.
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
