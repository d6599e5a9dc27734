package model

import "time"

// BookedAhead is how far ahead a bucket can always be booked, within the exact range.
const BookedAhead = 7 * 24 * time.Hour

// MaxBooked returns how many tokens a bucket can owe by reservations: those that flow in within BookedAhead, or as many
// as by charges, if these are more. It bounds how long a key is denied at most. The result is smaller at the edge of
// the exact range, as that of MaxOwed.
func (p TokenBucket) MaxBooked() int64 {
	ahead := Micros(BookedAhead)
	inflow := ahead*min(p.Refill, MaxProduct/ahead)/Micros(p.Every) + 1
	return max(MaxOwed(p), min(inflow, largest(p)-p.Capacity))
}

// Reserve books n tokens of a bucket if they will have flowed in within maxDelay. The result readyAfter is how long
// that takes. Until then the bucket owes tokens, so later requests come after the booking. A booking that needs a
// longer delay is denied, and RetryAfter says when it would succeed. A booking is given back as a take is: see
// TokenBucket.Refund. Held units count as taken.
//
// For example, a bucket with a capacity of 1 that refills once a second is empty. A first Reserve of 1 is ready after 1
// s, and a second one after 2 s. A third one with a maxDelay of 2 s is denied, with a RetryAfter of 1 s.
func (k Key) Reserve(p TokenBucket, clock, n, maxDelay int64) (next Key, d Decision, readyAfter int64) {
	every, booked := Micros(p.Every), p.MaxBooked()
	maxDelay = min(maxDelay, booked*every/p.Refill) // the bucket may owe no more

	// need returns how much the bucket must have left, in 1/Scale token, so that n fits beside the held tokens, with
	// granted credit. It returns Never if no bucket can owe that much.
	need := func(held, granted int64) int64 {
		both := min(held, granted)
		if held-both > p.Capacity+booked-n {
			return Never
		}
		return max(n+(held-both)-(granted-both), 0) * every
	}
	delay := func(s State, need int64) int64 {
		left := p.Full() - s.Count
		if need <= max(left, 0) {
			return 0
		}
		return s.WindowStart + p.FillTime(need-left) - clock
	}
	rolled, _ := p.Roll(k.State, clock)
	if now := need(k.Held(clock), rolled.Credit); n <= p.Capacity && now != Never {
		if readyAfter = delay(rolled, now); readyAfter <= maxDelay {
			next, d = k.changed(p, clock, func(State) (State, Decision) { return count(p, rolled, clock, n) })
			return next, d, readyAfter
		}
	}
	next, d = k.denied(p, clock, n, p.Capacity, func(s State, held, after int64) int64 {
		// A full bucket gets no tokens, and granted credit expires with the row.
		most := p.Full() + maxDelay*p.Refill
		withCredit := need(held, s.Credit)
		if withCredit > most {
			return Never
		}
		wait := max(min(delay(s, withCredit)-maxDelay, s.ExpiresAt-clock), after)
		if clock+wait >= s.ExpiresAt && need(held, 0) > most {
			return Never
		}
		return wait
	})
	return next, d, 0
}
