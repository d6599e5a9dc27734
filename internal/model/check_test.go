package model_test

import (
	"fmt"
	"math/big"
	"time"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// usage returns the counted units of a row that refunds can give back, without granted credit. A cost of 1 adds scale
// to counted.
func usage(p model.Rules, s model.State, clock int64) (counted *big.Int, scale int64) {
	_, d := p.Decide(s, clock, 0)
	if bucket, ok := p.(model.TokenBucket); ok {
		return big.NewInt(d.State.Count), model.Micros(bucket.Every)
	}
	return new(big.Int).Add(big.NewInt(d.State.Count), big.NewInt(d.State.PrevCount)), 1
}

// withoutLog returns the state without its log, because the state in a decision has only a part of the log.
func withoutLog(s model.State) model.State {
	s.Log = ""
	return s
}

// longestWait returns the longest RetryAfter and ResetAfter of a row whose WindowStart is not ahead of the clock.
func longestWait(p model.Rules) int64 {
	switch p.(type) {
	case model.SlidingWindow, model.CalendarWindow: // after a longer unit, a CalendarWindow waits up to two windows
		return 2 * modeltest.Reach(p)
	}
	return modeltest.Reach(p)
}

// drains returns how much longer a bucket takes to fill because it owes tokens.
func drains(p model.Rules, s model.State, clock int64) int64 {
	_, d := p.Decide(s, clock, 0)
	if bucket, ok := p.(model.TokenBucket); ok && d.State.Count > bucket.Full() {
		return bucket.FillTime(d.State.Count - bucket.Full())
	}
	return 0
}

// leftBehind tells whether the clock has jumped back so far that a request pulls the row back to the clock. A full
// bucket is never left behind, because it is as good as new at any time.
func leftBehind(p model.Rules, s model.State, clock int64) bool {
	if counted, _ := usage(p, s, clock); counted.Sign() == 0 && modeltest.CreditOf(p, s, clock) == 0 {
		return false
	}
	return clock < s.ExpiresAt && s.WindowStart-clock > modeltest.Reach(p)
}

// ask calls Decide, and removes State and Taken from the decision.
func ask(p model.Rules, s model.State, clock, n int64) (model.State, model.Decision) {
	next, d := p.Decide(s, clock, n)
	d.State, d.Taken = model.State{}, model.Take{}
	return next, d
}

// fits tells whether a request for n would be granted.
func fits(p model.Rules, s model.State, clock, n int64) bool {
	_, d := p.Decide(s, clock, n)
	return d.Granted == 1
}

// rollForward returns the row as it is at the time clock.
func rollForward(p model.Rules, s model.State, clock int64) model.State {
	s, _ = p.Roll(s, clock)
	return s
}

// peek returns the decision of a Peek.
func peek(p model.Rules, s model.State, clock int64) model.Decision {
	_, d := ask(p, s, clock, 0)
	return d
}

// checkDecision decides one request. It returns an error if the decision, or the row before or after it, breaks the
// specification. The returned decision has no State.
func checkDecision(p model.Rules, s model.State, clock, n int64) (model.State, model.Decision, error) {
	limit := p.Numbers().Limit
	before := peek(p, s, clock)
	next, d := p.Decide(s, clock, n)
	rolled := d.State
	d.State, d.Taken = model.State{}, model.Take{}
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// Check what the request is granted, and what is written to the row.
	healed := false
	switch {
	case d.Remaining < 0 || d.Remaining > limit+modeltest.CreditOf(p, next, clock):
		return fail("Remaining is not between 0 and the limit")
	case (d.Granted == 1) != (0 < n && n <= min(before.Remaining, limit)) || d.Granted < 0 || d.Granted > 1:
		return fail("granted, though a Peek has said %+v", before)
	case d.Granted == 1:
		if d.Remaining != before.Remaining-n || d.RetryAfter != 0 {
			return fail("a grant after a Peek that has said %+v", before)
		}
		if next.ExpiresAt != clock+d.ResetAfter || d.ResetAfter <= 0 {
			return fail("the row does not expire when the key is as good as new")
		}
	case next != s:
		healed = leftBehind(p, s, clock) && 0 < n && n <= limit
		// After the window became shorter, rolling the row forward removes entries from its log. In a bucket, Count
		// depends on Every.
		rewritten := s.Log != "" || p.Numbers().Refills()
		kept := next.Count == s.Count && next.PrevCount == s.PrevCount || rewritten && d.Remaining == before.Remaining
		if !healed || next.WindowStart != clock || !kept || next.Credit != s.Credit {
			return fail("a denial has changed the row")
		}
	case d.Remaining != before.Remaining:
		return fail("a denial has changed Remaining from %d", before.Remaining)
	case leftBehind(p, s, clock) && 0 < n && n <= limit:
		return fail("a denial has not pulled the row back to the clock")
	}
	if written := next; d.Granted == 1 || healed {
		written.Log = rolled.Log // the decision's State has only a part of the log
		if rolled != written {
			return fail("its state is %+v", rolled)
		}
	}
	if leftBehind(p, s, clock) && (rolled.WindowStart != clock || rolled.ExpiresAt != clock+d.ResetAfter) {
		return fail("its state is %+v, not that of a row pulled back to the clock", rolled)
	}
	for _, n := range []int64{0, 1, d.Remaining, limit} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}

	// A Peek gets the same answer as a request for 1 unit.
	if _, one := ask(p, s, clock, 1); one.Granted != min(before.Remaining, 1) ||
		one.Granted == 0 &&
			(one.RetryAfter != before.RetryAfter || one.ResetAfter != before.ResetAfter || one.Remaining != before.Remaining) {
		return fail("a Peek says %+v, and a request of 1 is told %+v", before, one)
	}

	// Check RetryAfter and ResetAfter. If the clock has left the row behind, both count from the time when the row is
	// pulled back. A Peek and a cost above the limit write nothing, so they do not pull the row back.
	ahead := max(min(s.WindowStart-clock, modeltest.Reach(p)), 0) + drains(p, next, clock)
	if d.ResetAfter < 0 || modeltest.CreditOf(p, next, clock) == 0 && d.ResetAfter > longestWait(p)+ahead {
		return fail("ResetAfter is out of bounds")
	}
	unwritten := leftBehind(p, s, clock) && next == s
	least := max(n, 1)
	switch {
	case d.Granted == 1, n == 0 && d.Remaining > 0:
		if d.RetryAfter != 0 {
			return fail("RetryAfter is not 0, though it is allowed")
		}
	case n > limit:
		if d.RetryAfter != model.Never {
			return fail("a cost above the limit can never be granted")
		}
	case d.RetryAfter <= 0 || d.RetryAfter > longestWait(p)+ahead:
		return fail("RetryAfter is out of bounds")
	case healed && d.RetryAfter > longestWait(p)+drains(p, next, clock):
		return fail("RetryAfter is longer than a window's, though the row was pulled back")
	case unwritten:
	case !fits(p, next, clock+d.RetryAfter, least):
		return fail("it is denied after RetryAfter")
	default:
		for _, early := range []int64{0, 1, d.RetryAfter / 3, d.RetryAfter / 2, d.RetryAfter - 1} {
			if early < d.RetryAfter && fits(p, next, clock+early, least) {
				return fail("it is allowed %d µs after the decision, before RetryAfter", early)
			}
		}
	}
	if !unwritten {
		if !equalsNoRow(p, next, clock+d.ResetAfter) {
			return fail("after ResetAfter the key is not as good as new")
		}
		if d.ResetAfter > 0 && equalsNoRow(p, next, clock+d.ResetAfter-1) {
			return fail("a µs before ResetAfter the key is as good as new")
		}
	}

	// A process that remembers the state of a denial decides as the row itself would.
	if d.RetryAfter > 0 && n <= limit && !unwritten {
		for _, later := range []int64{1, d.RetryAfter / 2, d.RetryAfter - 1, d.RetryAfter, d.ResetAfter - 1, d.ResetAfter, 2 * modeltest.Reach(p)} {
			for _, n := range []int64{0, 1, least, limit} {
				if _, known := ask(p, rolled, clock+later, n); n == least && 0 < later && later < d.RetryAfter &&
					known.RetryAfter <= 0 &&
					len(rolled.Log) < 8*model.MaxDenialEntries {
					return fail("its state is %+v, by which nothing is known %d µs later", rolled, later)
				}
				if !remembers(p, rolled, next, clock+later, n) {
					return fail("its state is %+v, from which %d is decided otherwise %d µs later", rolled, n, later)
				}
			}
		}
	}

	// Remaining is the largest cost that is allowed now.
	if largest := min(d.Remaining, limit); largest > 0 && !fits(p, next, clock, largest) ||
		fits(p, next, clock, largest+1) {
		return fail("Remaining is not the largest cost that is allowed")
	}

	// From ExpiresAt on, the row decides as a missing row would.
	for _, late := range []int64{0, 1, modeltest.Reach(p), model.MaxSpan} {
		if !equalsNoRow(p, next, max(next.ExpiresAt, clock)+late) {
			return fail("%d µs after it has expired the row does not equal no row", late)
		}
	}

	// A clock that steps back never shows a larger Remaining.
	for _, back := range []int64{1, modeltest.Reach(p) / 2, modeltest.Reach(p), modeltest.Reach(p) + 1, 2*modeltest.Reach(p) + 1, clock} {
		if back > clock {
			continue
		}
		// Granted credit is subtracted, because it may already have expired at the later time.
		if was := peek(p, next, clock-back).Remaining - modeltest.CreditOf(p, next, clock-back); was > d.Remaining {
			return fail("%d µs back, %d remain", back, was)
		}
		if least <= limit && fits(p, next, clock-back, least) && !fits(p, next, clock, least) {
			return fail("%d µs back, it is allowed", back)
		}
	}
	return next, d, nil
}

// remembers tells whether a remembered state gives the same decision as the row. A remembered log is used only for
// denials, and only until RetryAfter is over. Later the process asks the database.
func remembers(p model.Rules, known, row model.State, clock, n int64) bool {
	if _, isLog := p.(model.SlidingLog); isLog {
		if _, d := ask(p, known, clock, n); n == 0 || d.RetryAfter <= 0 {
			return true
		}
	}
	return sameDecision(p, known, row, clock, n)
}

// equalsNoRow tells whether a row gives the same decisions as a missing row.
func equalsNoRow(p model.Rules, s model.State, clock int64) bool {
	for _, n := range []int64{0, 1, p.Numbers().Limit, p.Numbers().Limit + 1} {
		if !sameDecision(p, s, model.State{}, clock, n) {
			return false
		}
	}
	return true
}

// sameDecision tells whether two states lead to the same decision.
func sameDecision(p model.Rules, a, b model.State, clock, n int64) bool {
	nextA, dA := ask(p, a, clock, n)
	nextB, dB := ask(p, b, clock, n)
	// Here it matters only whether Since is set.
	nextA.Since, nextB.Since = min(nextA.Since, 1), min(nextB.Since, 1)
	return dA == dB && (dA.Granted == 0 || nextA == nextB)
}

// checkElement decides count requests of cost n one by one. It returns an error if the answers differ from those for
// deciding them together, as one element of a statement. For an element, the database returns only the last decision.
func checkElement(p model.Rules, s model.State, clock, n, count int64) error {
	var single []model.Decision
	last, taken := model.Decision{}, int64(0)
	credit := modeltest.CreditOf(p, s, clock)
	for range count {
		s, last = p.Decide(s, clock, n)
		single = append(single, last)
		taken += last.Granted
	}
	last.DecidedAt = time.UnixMicro(clock)
	last.Taken.Spent = credit - modeltest.CreditOf(p, s, clock)
	// If a request was denied, the variable last has the decision of that denial.
	for i, want := range single[:taken] {
		units := (taken - 1 - int64(i)) * n
		if got := last.Remaining + units; got != want.Remaining {
			return fmt.Errorf("%T%+v: request %d of %d × %d at %d: %d remain, not %d",
				p, p, i+1, count, n, clock, got, want.Remaining)
		}
		if got := p.ResetAfter(last, units); got != want.ResetAfter {
			return fmt.Errorf("%T%+v: request %d of %d × %d at %d: reset after %d, not %d",
				p, p, i+1, count, n, clock, got, want.ResetAfter)
		}
	}
	return nil
}

// checkedGrant makes a grant of n, and returns an error if the result breaks the specification.
func checkedGrant(p model.Rules, s model.State, clock, n int64) (model.State, model.Decision, error) {
	before, held := peek(p, s, clock), modeltest.CreditOf(p, s, clock)
	counted, _ := usage(p, s, clock)
	next, d := model.Grant(p, s, clock, n)
	rolled := d.State
	d.State, d.Taken = model.State{}, model.Take{}
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, Grant of %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}
	credit := modeltest.CreditOf(p, next, clock)
	now, _ := usage(p, next, clock)
	switch {
	case credit != min(held+n, model.MaxCredit):
		return fail("it had %d, and has %d", held, credit)
	case counted.Cmp(now) != 0:
		return fail("it counted %v, and counts %v", counted, now)
	case d.Granted != 1 || d.RetryAfter != 0:
		return fail("it is refused")
	case d.Remaining != before.Remaining+credit-held:
		return fail("Remaining was %d", before.Remaining)
	case next.ExpiresAt != clock+d.ResetAfter || d.ResetAfter < longestWait(p):
		return fail("it does not last")
	case !equalsNoRow(p, next, next.ExpiresAt) || equalsNoRow(p, next, next.ExpiresAt-1):
		return fail("it does not last until it expires")
	}
	for _, n := range []int64{0, 1, d.Remaining, p.Numbers().Limit} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}
	return next, d, nil
}

// checkRefund refunds k, and returns an error if the result breaks the specification.
func checkRefund(p model.Rules, s model.State, clock int64, k model.Take) (model.State, model.Decision, error) {
	before := peek(p, s, clock)
	next, d := p.Refund(s, clock, k)
	rolled := d.State
	d.State, d.Taken = model.State{}, model.Take{}
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, refund of %+v at %d from %+v: decided %+v, and then %+v: %s",
			p, p, k, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// A refund gives back at most what was asked. The check counts ordinary units and granted credit separately.
	counted, scale := usage(p, s, clock)
	left, _ := usage(p, next, clock)
	ordinary := new(big.Int).Mul(big.NewInt(k.Units-k.Spent), big.NewInt(scale))
	back, credited := new(big.Int).Sub(counted, left), modeltest.CreditOf(p, next, clock)-modeltest.CreditOf(p, s, clock)
	switch {
	case back.Sign() < 0 || back.Cmp(ordinary) > 0:
		return fail("it counted %v, and counts %v", counted, left)
	case credited < 0 || credited > k.Spent:
		return fail("it has given back a credit of %d", credited)
	case d.Granted != 1 || d.RetryAfter != 0:
		return fail("it is refused")
	case d.Remaining < before.Remaining || d.Remaining > p.Numbers().Limit+modeltest.CreditOf(p, next, clock):
		return fail("Remaining was %d", before.Remaining)
	case d.Remaining != peek(p, next, clock).Remaining:
		return fail("Remaining is %d", peek(p, next, clock).Remaining)
	case d.ResetAfter > before.ResetAfter && credited == 0:
		return fail("ResetAfter was %d", before.ResetAfter)
	case (back.Sign() == 0 && credited == 0) != (next == s):
		return fail("it has changed the row, or given back nothing, and not both")
	case withoutLog(rollForward(p, next, clock)) != withoutLog(rolled):
		return fail("its state is %+v", rolled)
	case next.ExpiresAt < s.ExpiresAt && (next.Count > 0 || next.PrevCount > 0 || d.ResetAfter > 0):
		return fail("something in it counts, and is forgotten earlier")
	}

	// After everything is given back, the key is as good as new.
	if (left.Sign() == 0 && modeltest.CreditOf(p, next, clock) == 0) != (d.ResetAfter == 0) {
		return fail("ResetAfter does not go with what it counts")
	}
	unwritten := leftBehind(p, s, clock) && next == s // as in checkDecision
	for _, late := range []int64{0, 1, modeltest.Reach(p), model.MaxSpan} {
		if !unwritten && !equalsNoRow(p, next, max(next.ExpiresAt, clock+d.ResetAfter)+late) {
			return fail("%d µs after ResetAfter it does not equal no row", late)
		}
	}
	if d.ResetAfter > 0 && !unwritten && equalsNoRow(p, next, clock+d.ResetAfter-1) {
		return fail("a µs before ResetAfter the key is as good as new")
	}

	// After a refund, every request that would have been allowed without the refund is still allowed. There are two
	// exceptions: a row that is pulled back to the clock, and a row that gets granted credit and so lives longer. A
	// clock that steps back does not show a larger Remaining either.
	for _, later := range []int64{0, 1, d.ResetAfter, before.ResetAfter - 1, before.ResetAfter, modeltest.Reach(p), 2 * modeltest.Reach(p)} {
		for _, n := range []int64{1, before.Remaining, d.Remaining, p.Numbers().Limit} {
			if later >= 0 && credited == 0 && !leftBehind(p, s, clock) && fits(p, s, clock+later, n) &&
				!fits(p, next, clock+later, n) {
				return fail("%d would have been allowed %d µs later, and is not", n, later)
			}
		}
	}
	for _, back := range []int64{1, modeltest.Reach(p) / 2, modeltest.Reach(p), modeltest.Reach(p) + 1, 2*modeltest.Reach(p) + 1, clock} {
		if was := peek(p, next, max(clock-back, 0)).Remaining - modeltest.CreditOf(p, next, max(clock-back, 0)); was > d.Remaining {
			return fail("%d µs back, %d remain", back, was)
		}
	}
	return next, d, nil
}

// checkCharge does for a charge of n what checkDecision does for a request.
func checkCharge(p model.Rules, s model.State, clock, n int64) (model.State, model.Decision, error) {
	before, held := peek(p, s, clock), modeltest.CreditOf(p, s, clock)
	counted, scale := usage(p, s, clock)
	next, d, fits := model.Charge(p, s, clock, n)
	taken, rolled := d.Taken, d.State
	fail := func(format string, args ...any) (model.State, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, charge of %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}
	if largest := p.Numbers().Limit + model.MaxOwed(p); fits < before.Remaining || fits > largest+held {
		return fail("%d fit", fits)
	}
	if n > fits || n == 0 {
		if next != s || d.Remaining != before.Remaining || d.Granted != 0 && n > 0 {
			return fail("%d fit, and something is counted", fits)
		}
		return next, d, nil
	}
	now, _ := usage(p, next, clock)
	spent := held - modeltest.CreditOf(p, next, clock)
	// A SlidingWindow and a log round nothing; a bucket counts in parts of a token.
	ordinary := new(big.Int).Mul(big.NewInt(n-spent), big.NewInt(scale))
	switch {
	case new(big.Int).Sub(now, counted).Cmp(ordinary) != 0:
		return fail("it counted %v, and counts %v", counted, now)
	case spent != min(max(n-(before.Remaining-held), 0), held):
		return fail("it has spent a credit of %d", spent)
	case taken.Units != n || taken.Spent != spent:
		return fail("its take is %+v", taken)
	case d.Granted != 1 || d.RetryAfter != 0 || d.Remaining != max(before.Remaining-n, 0):
		return fail("Remaining was %d", before.Remaining)
	case next.ExpiresAt != clock+d.ResetAfter || !equalsNoRow(p, next, next.ExpiresAt) ||
		equalsNoRow(p, next, next.ExpiresAt-1):
		return fail("it does not last until the key is as good as new")
	case withoutLog(next) != rolled:
		return fail("its state is %+v", rolled)
	}
	if n <= min(before.Remaining, p.Numbers().Limit) {
		if took, asTake := p.Decide(s, clock, n); took != next || asTake.Taken != taken {
			return fail("a take leads to %+v and %+v", took, asTake)
		}
	}
	if _, _, left := model.Charge(p, next, clock, 0); left != fits-n {
		return fail("%d fitted, and %d fit", fits, left)
	}
	// No caller is denied for longer than the largest debt of a key takes to drain.
	d.State, d.Taken = model.State{}, model.Take{}
	if longest := longestWait(p) + drains(p, next, clock) + max(next.WindowStart-clock, 0); spent == held && d.ResetAfter > longest {
		return fail("ResetAfter is out of bounds")
	}
	return next, d, nil
}
