package ratelimit

import (
	"errors"
	"time"

	"github.com/jackc/pgx/v5/pgtype"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// onlyTake tells whether the requests, which one function of an algorithm can decide, all take. Then its sibling whose
// name begins with rate_limit_take_ decides them for less. For several keys of a log it would do nothing by itself.
func onlyTake(requests []*request, tx transaction) bool {
	for _, r := range requests {
		if r.parts[0].cost < 1 {
			return false
		}
	}
	log := requests[0].parts[0].model.numbers().Algorithm == algorithm.SlidingLog
	return !tx.skipHeld && (len(requests) == 1 || !log)
}

// How many numbers sql/limit.sql says that such a function returns for a key: of one whose requests were all granted by
// its one statement, and of one that was left to the rules of rate_limit_all.
const (
	takenNumbers = 9
	leftNumbers  = 15
)

var errUnlikeAnswer = errors.New("the answer is not one about these keys: does another function have this name?")

// takenInto reads the answer of such a function to requests for the parts, of which each stands for counts[i] requests.
// counts is nil if that is 1 each.
func takenInto(into []*part, counts []int64, numbers []pgtype.Int8) error {
	left := (len(numbers) - takenNumbers*len(into)) / (leftNumbers - takenNumbers)
	if len(into) == 1 { // the log comes behind
		left = min(left, 1)
	}
	want := takenNumbers*(len(into)-left) + leftNumbers*left
	if left < 0 || left > len(into) || len(numbers) < want || len(numbers) > want && len(into) > 1 {
		return errUnlikeAnswer
	}
	taken, others := numbers[:takenNumbers*(len(into)-left)], numbers[takenNumbers*(len(into)-left):]
	for i, p := range into {
		if len(others) > 0 && others[0].Int64 == int64(i)+1 {
			p.decision = leftDecision(others)
			if len(into) == 1 {
				p.decision.state.log = entriesOf(others[leftNumbers:])
			}
			others = others[leftNumbers:]
			continue
		}
		if len(taken) == 0 {
			return errUnlikeAnswer
		}
		count := int64(1)
		if counts != nil {
			count = counts[i]
		}
		p.decision = p.takenDecision(count, taken)
		taken = taken[takenNumbers:]
	}
	return nil
}

// leftDecision is a decision by the rules of rate_limit_all.
func leftDecision(n []pgtype.Int8) decision {
	d := decision{
		granted: n[1].Int64, remaining: n[2].Int64, retryAfter: never, resetAfter: n[4].Int64,
		decidedAt: time.UnixMicro(n[5].Int64),
		state: state{
			count: n[6].Int64, prevCount: n[7].Int64, windowStart: n[8].Int64,
			credit: n[9].Int64, scale: n[10].Int64, expiresAt: n[11].Int64, since: n[13].Int64,
		},
		taken: take{spent: n[12].Int64, since: n[13].Int64, in: n[8].Int64, at: n[14].Int64},
	}
	if n[3].Valid {
		d.retryAfter = n[3].Int64
	}
	return d
}

func entriesOf(numbers []pgtype.Int8) entries {
	log := make([]int64, len(numbers))
	for i, n := range numbers {
		log[i] = n.Int64
	}
	return newEntries(log)
}

// takenDecision is the decision about as many requests as count, which were all granted. n has the time and the row.
// The model tells what remains, and for how long.
func (p *part) takenDecision(count int64, n []pgtype.Int8) decision {
	of, units, at := p.model.numbers(), count*p.cost, n[0].Int64
	s := state{
		count: n[1].Int64, prevCount: n[2].Int64, windowStart: n[3].Int64,
		credit: n[4].Int64, scale: n[5].Int64, expiresAt: n[6].Int64, since: n[7].Int64,
	}
	d := decision{granted: count, state: s, taken: take{since: s.since, in: s.windowStart}}
	// A window or a bucket that begins with this take does so at the reading of the clock that decided.
	begins := s.count == units && s.prevCount == 0
	if of.Refills() {
		full := of.Limit * micros(of.Span)
		begins = s.credit == full-units*micros(of.Span)
		d.taken.at = n[8].Int64 + full - s.credit
		s.capacity, s.refill, s.returned = of.Limit, of.Refill, n[8].Int64
	}
	if begins {
		at = s.windowStart
	}
	_, now := p.model.decide(s, at, 0)
	d.remaining, d.resetAfter, d.decidedAt = now.remaining, now.resetAfter, time.UnixMicro(at)
	return d
}
