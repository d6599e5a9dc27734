package ratelimit

import (
	_ "embed"
	"fmt"
	"math"
	"time"
)

// TokenBucket holds up to Capacity tokens, starts full, and gets Refill tokens, evenly, over every Every. A request of cost
// n takes n tokens, or none if there are fewer. So bursts of Capacity pass, and Refill/Every in the long run.
//
// No refill is rounded: the bucket counts in units of 1/Every(µs) token, of which exactly Refill flow in each microsecond.
//
// With TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}, a new key may take 20 at once; then it gets one more every
// 2 s, is told so by RetryAfter, and is full again 40 s after the last request.
type TokenBucket struct {
	// Capacity is the size of the bucket, the largest burst: at least 1, and Capacity × Every in microseconds at most 2^62.
	Capacity int64
	// Refill is how many tokens flow in over Every: at least 1.
	Refill int64
	// Every is the time over which Refill tokens flow in: whole microseconds, at least 1 µs. To fill an empty bucket,
	// Capacity × Every / Refill, may take at most 2^51 µs (71 years).
	Every time.Duration
}

var _ Policy = TokenBucket{}

//go:embed sql/call/tokenbucket.sql
var tokenBucketStatement string

// String is the policy as [ParsePolicy] reads it: bucket 20 5/10s.
func (p TokenBucket) String() string {
	return fmt.Sprintf("bucket %d %d/%s", p.Capacity, p.Refill, spanText(p.Every))
}

func (p TokenBucket) validate() error {
	if p.Capacity < 1 {
		return &ConfigError{Field: "Policy.Capacity", Reason: fmt.Sprintf("is %d, and must be at least 1", p.Capacity)}
	}
	if p.Refill < 1 {
		return &ConfigError{Field: "Policy.Refill", Reason: fmt.Sprintf("is %d, and must be at least 1", p.Refill)}
	}
	if err := validateSpan("Policy.Every", p.Every); err != nil {
		return err
	}
	if p.Capacity > maxProduct/micros(p.Every) {
		return &ConfigError{Field: "Policy.Capacity", Reason: fmt.Sprintf(
			"is %d with Every %v, outside the exact range: for this Every it may be at most %d", p.Capacity, p.Every, maxProduct/micros(p.Every))}
	}
	if p.fillTime(p.full()) > maxSpan {
		return &ConfigError{Field: "Policy.Refill", Reason: fmt.Sprintf(
			"is %d every %v, which takes more than 71 years to fill a Capacity of %d", p.Refill, p.Every, p.Capacity)}
	}
	return nil
}

func (p TokenBucket) limit() int64      { return p.Capacity }
func (p TokenBucket) statement() string { return tokenBucketStatement }
func (p TokenBucket) numbers() []any    { return []any{p.Capacity, p.Refill, micros(p.Every)} }

// full is the credit of a full bucket.
func (p TokenBucket) full() int64 { return p.Capacity * micros(p.Every) }

// fillTime is how many microseconds it takes until credit has flowed in.
func (p TokenBucket) fillTime(credit int64) int64 { return ceilDiv(credit, p.Refill) }

//go:embed sql/call/tokenbucket_grant.sql
var tokenBucketGrantStatement string

func (p TokenBucket) grantStatement() string { return tokenBucketGrantStatement }

func (p TokenBucket) grant(s state, clock, n int64) (state, decision) {
	s = rollForward(p, s, clock)
	s.count = min(s.count+n, maxCredit)
	s.expiresAt = s.windowStart + p.fillTime(p.full())
	return afterGrant(p, s, clock)
}

func (p TokenBucket) resetAfter(last decision, units int64) int64 {
	if last.state.count > 0 || last.state.prevCount > 0 { // there is granted credit, or was
		return creditResetAfter(last, last.state.count, last.state.prevCount, units, p.fillTime(p.full()))
	}
	need := p.full() - last.state.credit
	// What the two have in common is how far the row's time lies ahead of the clock, if it does.
	return last.resetAfter - p.fillTime(need) + p.fillTime(need-units*micros(p.Every))
}

func (p TokenBucket) scaled(share float64) Policy {
	p.Capacity = shareOf(p.Capacity, share)
	// Every rather than Refill, of which a share might be less than 1; but no further than the exact range.
	every := int64(min(math.Ceil(float64(micros(p.Every))/share), maxSpan))
	every = min(every, maxProduct/p.Capacity)
	if p.Refill < p.Capacity {
		every = min(every, mulDiv(p.Refill, maxSpan, p.Capacity))
	}
	p.Every = duration(every)
	return p
}

func (p TokenBucket) decide(s state, clock, n int64) (state, decision) {
	every, full := micros(p.Every), p.full()
	stored, moved := s, false

	// Roll the row forward to the clock.
	if clock >= s.expiresAt {
		s = state{credit: full, windowStart: clock, expiresAt: s.expiresAt}
	} else {
		if s.scale != every { // the policy has changed: keep whole tokens, and the part of one, rounded down
			if tokens := s.credit / s.scale; tokens >= p.Capacity {
				s.credit = full
			} else {
				s.credit = tokens*every + mulDiv(s.credit%s.scale, every, s.scale)
			}
		}
		s.credit = min(s.credit, full)
		if s.credit == full && s.count == 0 { // the capacity is lower now: as good as new
			s.windowStart, s.expiresAt = clock, clock
		} else if s.windowStart-clock > p.fillTime(full) { // the clock has jumped back: keep the credit, from now on
			s.windowStart = clock
			s.expiresAt = clock + p.fillTime(full)
			if s.count == 0 {
				s.expiresAt = clock + p.fillTime(full-s.credit)
			}
			moved = true
		}
	}
	s.scale = every
	t := max(clock, s.windowStart)
	// Asked by division, because the product overflows after a long time.
	if s.credit < full && t-s.windowStart <= (full-s.credit-1)/p.Refill {
		s.credit += (t - s.windowStart) * p.Refill
	} else {
		s.credit = full
	}
	s.windowStart = t

	// A denial writes nothing, but for a row that the clock has left behind: unwritten, it would deny for ever.
	changed := moved && 0 < n && n <= p.Capacity

	room := s.credit / every
	d := decision{remaining: room + s.count}
	switch {
	case n < 0: // a refund
		changed = s.credit < full
		if n >= -((full - s.credit) / every) {
			s.credit -= n * every
		} else {
			s.credit = full
		}
		if changed && s.credit == full { // as good as new
			s.windowStart = clock
		}
		d.granted = 1
		d.remaining = s.credit/every + s.count
	case 0 < n && n <= min(d.remaining, p.Capacity):
		changed = true
		s.credit -= min(n, room) * every
		s.count -= max(n-room, 0)
		s.expiresAt = t + p.fillTime(full)
		d.granted = 1
		d.remaining -= n
	}
	switch ask := max(n, 1) - s.count; {
	case d.granted == 1 || n == 0 && d.remaining > 0:
	case n > p.Capacity:
		d.retryAfter = never
	default:
		d.retryAfter = min(t+p.fillTime(ask*every-s.credit), s.expiresAt) - clock
	}
	switch {
	case s.count > 0:
		d.resetAfter = s.expiresAt - clock
	case s.credit < full:
		d.resetAfter = min(t+p.fillTime(full-s.credit), s.expiresAt) - clock
	}
	if changed {
		s.expiresAt = clock + d.resetAfter
		stored = s
	}
	d.state = s
	return stored, d
}
