package model

import (
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
)

// TokenBucket has the rules of ratelimit.TokenBucket.
type TokenBucket struct {
	Capacity int64
	Refill   int64
	Every    time.Duration
}

var _ Rules = TokenBucket{}

// MaxReturned is the largest Returned of a bucket, because a larger sum could overflow. Above MaxReturned, the bucket
// forgets its earlier takes.
const MaxReturned = 1 << 61

func (p TokenBucket) Lasts() int64 { return p.FillTime(p.Full()) }

func (p TokenBucket) Numbers() algorithm.Numbers {
	return algorithm.Numbers{Algorithm: algorithm.TokenBucket, Limit: p.Capacity, Span: p.Every, Refill: p.Refill}
}

// Full returns the Count of an empty bucket.
func (p TokenBucket) Full() int64 { return p.Capacity * Micros(p.Every) }

// lasts returns how long a take or a grant keeps a bucket in state s alive. A bucket that owes lives until it is full.
func (p TokenBucket) lasts(s State) int64 { return p.FillTime(max(p.Full(), s.Count)) }

// FillTime returns how many microseconds the refill of this many tokens takes. missing is in 1/Scale token.
func (p TokenBucket) FillTime(missing int64) int64 { return CeilDiv(missing, p.Refill) }

// Refund gives back the units of a take that the refill has not yet replaced. Think of the missing tokens as a queue: a
// take joins at the end, the refill serves the front, and a refund leaves from its place in the middle. Suppose that a
// take of n had b tokens before it. If no refund has left the queue since the take, then b + n - refill of the take's
// tokens are still in the queue. A refund does not record its place, so Refund assumes the worst: all refunds left from
// before the take, unless they left from the end of the queue. Then this many of the take's tokens are left:
//
//	max(b - returned since, 0) + n - refill since, and at most n
//
// While the bucket owes tokens, only the take that joined last is given back. The callers of bookings behind a take
// were told when these are ready, and this stays true. If room were made ahead of a booking, later bookings could be
// ready at the same time.
//
// A refund creates no extra tokens. Without the refunded take, the same refill would have served other tokens instead.
// So the queue would be shorter by no more than what Refund gives back.
//
// If the clock jumped back behind the row, Refund gives nothing back, because the next take makes a bucket with another
// Since.
func (p TokenBucket) Refund(s State, clock int64, k Take) (State, Decision) {
	every, full := Micros(p.Every), p.Full()
	rolled, moved := p.Roll(s, clock)
	t := rolled.WindowStart
	if moved ||
		// A take under other numbers came later.
		s.Scale != every || s.Capacity != p.Capacity || s.Refill != p.Refill ||
		// The row is a later bucket, or it is as good as new.
		rolled.Since != k.Since || rolled.Count == 0 && rolled.Credit == 0 {
		return afterRefund(p, s, clock, false)
	}
	spent := min(k.Spent, MaxCredit-s.Credit)
	if spent > 0 {
		s.Credit += spent
		s.ExpiresAt = max(s.ExpiresAt, t+p.Lasts())
	}
	back, last := int64(0), false // last: they leave from the end of the queue
	if 0 <= k.In && k.In <= t {
		leased := p.leased(s, t)
		leased.End(k, t)
		n := min(k.Units-k.Spent, p.Capacity+MaxOwed(p)) * every
		left := max(max(k.At, 0)-s.Returned, n) // the tokens left in the queue, without the refill
		if elapsed := t - k.In; elapsed <= left/p.Refill {
			place := left - elapsed*p.Refill
			if last = rolled.Count <= place; last || rolled.Count <= full { // see above
				back = max(min(n, place, rolled.Count-p.occupied(leased)), 0)
			}
		}
		if spent > 0 || back > 0 {
			s.Log = leased.entries()
		}
	}
	if s.Count -= back; back == rolled.Count && s.Credit == 0 { // the row is as good as new
		s.Count = 0
	}
	if !last {
		s.Returned += back
	}
	if s.Returned > MaxReturned {
		s.Since, s.Returned = max(s.Since+1, t), 0
	}
	return afterRefund(p, s, clock, spent > 0 || back > 0)
}

// bucketLeases are the tokens that leases of a bucket may still hold. The row's log stores them, so that a refund
// leaves room for them in the bucket. No lease lasts longer than a period, so only the leases of the current and the
// previous period count. bucketLeases may count too many tokens, because the row does not know which tokens were spent.
type bucketLeases struct {
	since  int64 // the start of the current period
	now    int64 // tokens leased in the current period
	before int64 // tokens leased in the previous period
	period int64
}

// leased returns the leases of a bucket in the state s at time t.
func (p TokenBucket) leased(s State, t int64) bucketLeases {
	l := bucketLeases{since: t, period: p.Lasts() / LeasesInBucket}
	if s.Log == "" {
		return l
	}
	switch since := s.Log.Entry(0); {
	case t-since >= 2*l.period:
	case t-since >= l.period:
		l.before = s.Log.Entry(1)
	default: // since is after t if the clock has jumped back
		l.since, l.now, l.before = min(since, t), s.Log.Entry(1), s.Log.Entry(2)
	}
	return l
}

// End subtracts a lease that has ended. The refund k gives back the rest of the lease.
func (l *bucketLeases) End(k Take, t int64) {
	switch {
	case t-k.In >= l.period: // the lease's period may be over, so nothing is subtracted
	case k.In >= l.since:
		l.now = max(l.now-max(k.Ended, 0), 0)
	default:
		l.before = max(l.before-max(k.Ended, 0), 0)
	}
}

// entries encodes the leases for the row's log.
func (l bucketLeases) entries() Entries {
	if l.now+l.before == 0 {
		return ""
	}
	return NewEntries([]int64{l.since, l.now, l.before})
}

// occupied returns how much of the bucket stays empty for leases: the held tokens, and the refill until the leases end.
func (p TokenBucket) occupied(l bucketLeases) int64 {
	if l.now+l.before == 0 {
		return 0
	}
	return min(l.now+l.before, p.Capacity)*Micros(p.Every) + l.period*p.Refill
}

// Lend records in the row's log that a lease holds units of the last take, but no more than LeaseOf allows.
func (p TokenBucket) Lend(s State, units int64) State {
	spare, _ := p.LeaseOf(s, s.WindowStart, Never)
	if units = min(units, spare); units > 0 {
		l := p.leased(s, s.WindowStart)
		l.now += units
		s.Log = l.entries()
	}
	return s
}

// LeaseOf keeps enough room in the bucket to put all held tokens back at any time until the lease ends.
func (p TokenBucket) LeaseOf(s State, clock, longest int64) (spare, lasts int64) {
	l := p.leased(s, max(clock, s.WindowStart))
	held := min(l.now+l.before, p.Capacity) * Micros(p.Every)
	room := s.Count - held - l.period*p.Refill
	if lasts = min(longest, l.period); room < 0 {
		return -CeilDiv(-room, Micros(p.Every)), lasts
	}
	return min(room/Micros(p.Every), MaxCredit-l.now), lasts
}

func (p TokenBucket) ResetAfter(last Decision, units int64) int64 {
	if last.State.Credit > 0 || last.Taken.Spent > 0 { // the row has or had granted credit
		return creditResetAfter(last, units, p.lasts(last.State))
	}
	// If holds leave less room than the row, the last of them may end after the earlier ResetAfter of the row.
	if _, row := p.Decide(last.State, last.DecidedAt.UnixMicro(), 0); row.Remaining > last.Remaining {
		return last.ResetAfter
	}
	// The two terms differ by the time from the clock to WindowStart.
	return last.ResetAfter - p.FillTime(last.State.Count) + p.FillTime(last.State.Count-units*Micros(p.Every))
}

func (p TokenBucket) Roll(s State, clock int64) (rolled State, moved bool) {
	every, full := Micros(p.Every), p.Full()
	if clock >= s.ExpiresAt {
		s = State{WindowStart: clock, ExpiresAt: s.ExpiresAt, Log: s.Log}
	} else {
		// From now on, a refund cannot give back an older take.
		if s.Scale != every || s.Capacity != p.Capacity || s.Refill != p.Refill {
			s.Since, s.Returned = max(s.Since+1, s.WindowStart, clock), 0
		}
		left := s.Capacity*s.Scale - s.Count // below 0 if the bucket owes
		if s.Scale != every {                // the policy has changed: keep whole tokens, and round the rest down
			tokens, part := left/s.Scale, left%s.Scale
			if part < 0 {
				tokens, part = tokens-1, part+s.Scale
			}
			tokens = min(max(tokens, -p.MaxBooked()-1), p.Capacity) // -1 allows for the part of a token
			left = tokens*every + MulDiv(part, every, s.Scale)
		}
		s.Count = full - min(max(left, -p.MaxBooked()*every), full)
		if s.Count == 0 && s.Credit == 0 { // the capacity was lowered, so the row is as good as new
			s = State{WindowStart: clock, ExpiresAt: clock, Log: s.Log}
		} else if s.WindowStart-clock > p.FillTime(full) { // the clock jumped back, so the refill counts from now on
			s.WindowStart = clock
			s.Since, s.Returned = max(s.Since+1, clock), 0
			s.ExpiresAt = clock + p.lasts(s)
			if s.Credit == 0 {
				s.ExpiresAt = clock + p.FillTime(s.Count)
			}
			moved = true
		}
	}
	s.Scale, s.Capacity, s.Refill = every, p.Capacity, p.Refill
	t := max(clock, s.WindowStart)
	// Divide instead of multiplying, because the product overflows after a long time.
	if s.Count > 0 && t-s.WindowStart <= (s.Count-1)/p.Refill {
		s.Count -= (t - s.WindowStart) * p.Refill
	} else {
		s.Count = 0
		if s.Credit == 0 { // the row is as good as new
			s.Since, s.Returned = t, 0
		}
	}
	s.WindowStart = t
	return s, moved
}

func (p TokenBucket) Decide(s State, clock, n int64) (State, Decision) {
	every, full, stored := Micros(p.Every), p.Full(), s
	s, moved := p.Roll(s, clock)
	t := s.WindowStart

	// A denial writes the row only if the clock has jumped far behind the row. Without this write, the row would deny
	// until the clock catches up.
	changed := moved && 0 < n && n <= p.Capacity

	room := max(full-s.Count, 0) / every
	d := Decision{Remaining: room + s.Credit}
	if 0 < n && n <= min(d.Remaining, p.Capacity) {
		changed = true
		d.Taken.Spent = max(n-room, 0)
		s.Count += (n - d.Taken.Spent) * every
		s.Credit -= d.Taken.Spent
		s.ExpiresAt = t + p.lasts(s)
		d.Granted = 1
		d.Remaining -= n
	}
	switch ask := max(n, 1) - s.Credit; {
	case d.Granted == 1 || n == 0 && d.Remaining > 0:
	case n > p.Capacity:
		d.RetryAfter = Never
	default:
		d.RetryAfter = min(t+p.FillTime(ask*every-(full-s.Count)), s.ExpiresAt) - clock
	}
	switch {
	case s.Credit > 0:
		d.ResetAfter = s.ExpiresAt - clock
	case s.Count > 0:
		d.ResetAfter = min(t+p.FillTime(s.Count), s.ExpiresAt) - clock
	}
	if changed {
		s.ExpiresAt = clock + d.ResetAfter
		stored = s
	}
	d.State = s
	d.State.Log = "" // Request.decideIn in internal/engine does not need the log
	d.Taken.Units, d.Taken.Since, d.Taken.In, d.Taken.At =
		d.Granted*n, s.Since, s.WindowStart, s.Returned+s.Count
	return stored, d
}
