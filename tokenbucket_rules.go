package ratelimit

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// tokenBucket is the rules of a TokenBucket.
type tokenBucket struct {
	Capacity int64
	Refill   int64
	Every    time.Duration
}

var _ rules = tokenBucket{}

// maxReturned is how much given back a bucket counts before it forgets what was taken. More could overflow the
// sum.
const maxReturned = 1 << 61

func (p tokenBucket) Lasts() int64 { return p.fillTime(p.full()) }

func (p tokenBucket) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.TokenBucket, Limit: p.Capacity, Span: p.Every, Refill: p.Refill}
}

// full is the credit of a full bucket.
func (p tokenBucket) full() int64 { return p.Capacity * micros(p.Every) }

// fillTime is how many microseconds it takes until credit has flowed in.
func (p tokenBucket) fillTime(credit int64) int64 { return ceilDiv(credit, p.Refill) }

// refund gives back what of a take has not flowed in again. The tokens that are missing are a queue: a take joins
// its end, refill serves its front, and a refund leaves from where it stands. If nobody before it has left the
// queue since, a take of n that had others of size b before it has b + n - refill of its own left; and if others
// have, at most b less was before it, but never less than nothing. Not knowing where those stood who have left,
// refund takes them all to have stood before it, the worst case: that is
//
//	max(b - returned since, 0) + n - refill since, and at most n
//
// Why this mints nothing: without the takes that are given back, the queue would be shorter by what is left of
// them at most, because refill that has served them would have served others. So a bucket never holds more than it
// would hold without these takes.
//
// A row that the clock has left behind gives nothing back: the next take makes it a new bucket, with another since.
func (p tokenBucket) Refund(s state, clock int64, k take) (state, decision) {
	every, full := micros(p.Every), p.full()
	rolled, moved := p.Roll(s, clock)
	t := rolled.windowStart
	if moved ||
		// It was taken from under other numbers since.
		s.scale != every || s.capacity != p.Capacity || s.refill != p.Refill ||
		rolled.since != k.since || rolled.credit == full && rolled.count == 0 { // another bucket, or as good as new
		return afterRefund(p, s, clock, false)
	}
	spent := min(k.spent, maxCredit-s.count)
	if spent > 0 {
		s.count += spent
		s.expiresAt = max(s.expiresAt, t+p.Lasts())
	}
	back := int64(0)
	if 0 <= k.in && k.in <= t {
		leased := p.leased(s, t)
		leased.end(k, t)
		n := min(k.units-k.spent, p.Capacity) * every
		left := min(max(max(k.at, 0)-s.returned, n), full) // but for refill
		if elapsed := t - k.in; elapsed <= left/p.Refill {
			back = max(min(n, left-elapsed*p.Refill, full-rolled.credit-p.occupied(leased)), 0)
		}
		if spent > 0 || back > 0 {
			s.log = leased.entries()
		}
	}
	s.credit += back
	s.returned += back
	if s.returned > maxReturned {
		s.since, s.returned = max(s.since+1, t), 0
	}
	return afterRefund(p, s, clock, spent > 0 || back > 0)
}

// bucketLeases are the tokens of a bucket that leases may hold. They stand in the row's log, so that what is given back
// leaves as much of the bucket empty. No lease lasts longer than a period, so those of the current period and of the
// one before are counted. That may be too many: the row does not know which tokens have been spent.
type bucketLeases struct {
	since  int64 // the start of the current period
	now    int64 // what was leased in it
	before int64 // what was leased in the period before
	period int64
}

// leased are the leases of a bucket in the state s at time t.
func (p tokenBucket) leased(s state, t int64) bucketLeases {
	l := bucketLeases{since: t, period: p.Lasts() / leasesInBucket}
	if s.log == "" {
		return l
	}
	switch since := s.log.entry(0); {
	case t-since >= 2*l.period:
	case t-since >= l.period:
		l.before = s.log.entry(1)
	default: // since may be after t, if the clock has jumped back
		l.since, l.now, l.before = min(since, t), s.log.entry(1), s.log.entry(2)
	}
	return l
}

// end ends the lease that k gives back.
func (l *bucketLeases) end(k take, t int64) {
	switch {
	case t-k.in >= l.period: // it may not be counted any more
	case k.in >= l.since:
		l.now = max(l.now-max(k.ended, 0), 0)
	default:
		l.before = max(l.before-max(k.ended, 0), 0)
	}
}

// entries is what the row's log says of them.
func (l bucketLeases) entries() entries {
	if l.now+l.before == 0 {
		return ""
	}
	return newEntries([]int64{l.since, l.now, l.before})
}

// occupied is how much of the bucket stays empty for leases: what is held, and what flows in until they end.
func (p tokenBucket) occupied(l bucketLeases) int64 {
	if l.now+l.before == 0 {
		return 0
	}
	return min(l.now+l.before, p.Capacity)*micros(p.Every) + l.period*p.Refill
}

// lend notes that so many of the units just taken are to be spent later, as far as they may be held.
func (p tokenBucket) lend(s state, units int64) state {
	spare, _ := p.LeaseOf(s, s.windowStart, never)
	if units = min(units, spare); units > 0 {
		l := p.leased(s, s.windowStart)
		l.now += units
		s.log = l.entries()
	}
	return s
}

// leaseOf leaves so much of the bucket empty that all that is held could be put back at any time until the lease ends.
func (p tokenBucket) LeaseOf(s state, clock, longest int64) (spare, lasts int64) {
	l := p.leased(s, max(clock, s.windowStart))
	held := min(l.now+l.before, p.Capacity) * micros(p.Every)
	room := p.full() - s.credit - held - l.period*p.Refill
	if lasts = min(longest, l.period); room < 0 {
		return -ceilDiv(-room, micros(p.Every)), lasts
	}
	return min(room/micros(p.Every), maxCredit-l.now), lasts
}

func (p tokenBucket) ResetAfter(last decision, units int64) int64 {
	if last.state.count > 0 || last.taken.spent > 0 { // there is granted credit, or there was
		return creditResetAfter(last, last.state.count, units, p.Lasts())
	}
	need := p.full() - last.state.credit
	// The first two differ by how far the row's time lies ahead of the clock, if it does.
	return last.resetAfter - p.fillTime(need) + p.fillTime(need-units*micros(p.Every))
}

func (p tokenBucket) Roll(s state, clock int64) (rolled state, moved bool) {
	every, full := micros(p.Every), p.full()
	if clock >= s.expiresAt {
		s = state{credit: full, windowStart: clock, expiresAt: s.expiresAt, log: s.log}
	} else {
		if s.scale != every || s.capacity != p.Capacity || s.refill != p.Refill { // what was taken stays taken
			s.since, s.returned = max(s.since+1, s.windowStart, clock), 0
		}
		if s.scale != every { // the policy has changed: keep whole tokens, and the part of one, rounded down
			if tokens := s.credit / s.scale; tokens >= p.Capacity {
				s.credit = full
			} else {
				s.credit = tokens*every + mulDiv(s.credit%s.scale, every, s.scale)
			}
		}
		s.credit = min(s.credit, full)
		if s.credit == full && s.count == 0 { // the capacity is lower now: as good as new
			s = state{credit: full, windowStart: clock, expiresAt: clock, log: s.log}
		} else if s.windowStart-clock > p.fillTime(full) { // the clock has jumped back: keep the credit, from now on
			s.windowStart = clock
			s.since, s.returned = max(s.since+1, clock), 0
			s.expiresAt = clock + p.fillTime(full)
			if s.count == 0 {
				s.expiresAt = clock + p.fillTime(full-s.credit)
			}
			moved = true
		}
	}
	s.scale, s.capacity, s.refill = every, p.Capacity, p.Refill
	t := max(clock, s.windowStart)
	// This divides, because the product overflows after a long time.
	if s.credit < full && t-s.windowStart <= (full-s.credit-1)/p.Refill {
		s.credit += (t - s.windowStart) * p.Refill
	} else {
		s.credit = full
		if s.count == 0 { // as good as new
			s.since, s.returned = t, 0
		}
	}
	s.windowStart = t
	return s, moved
}

func (p tokenBucket) Decide(s state, clock, n int64) (state, decision) {
	every, full, stored := micros(p.Every), p.full(), s
	s, moved := p.Roll(s, clock)
	t := s.windowStart

	// A denial writes nothing, except to a row that the clock has left behind. Left as it is, it would deny for
	// ever.
	changed := moved && 0 < n && n <= p.Capacity

	room := s.credit / every
	d := decision{remaining: room + s.count}
	if 0 < n && n <= min(d.remaining, p.Capacity) {
		changed = true
		d.taken.spent = max(n-room, 0)
		s.credit -= (n - d.taken.spent) * every
		s.count -= d.taken.spent
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
	d.state.log = "" // see request.decideIn
	d.taken.units, d.taken.since, d.taken.in, d.taken.at =
		d.granted*n, s.since, s.windowStart, s.returned+full-s.credit
	return stored, d
}
