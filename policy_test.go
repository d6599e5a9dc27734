package ratelimit

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// Of the tests of the models (fixed_test.go, sliding_test.go, tokenbucket_test.go, slidinglog_test.go) this file holds what they share:
//
//   - playModel plays a table of steps worked out by hand;
//   - checkDecision checks around one decision all that the specification promises of it;
//   - walkModel does so at random clocks, costs and policies, for the property tests and for the fuzz targets alike;
//   - slowDecision decides by search over what would fit, in rationals, for the models to be compared with.

// In microseconds, as the models count.
const (
	second int64 = 1_000_000
	minute       = 60 * second
	hour         = 60 * minute
)

// The times of short tables are a second apart.
const (
	c0 = 1_800_000_000*second + iota*second
	c1
	c2
	c3
	c4
	c5
	c6
	c7
	c8
	c9
)

// at is a time of day in microseconds, such as "12:01:15" or "12:01:15.000001". Each day is as good as another.
func at(clock string) int64 {
	t, err := time.Parse(time.DateTime, "2026-07-01 "+clock)
	if err != nil {
		panic(err)
	}
	return t.UnixMicro()
}

// modelStep asks for n at the time at.
type modelStep struct {
	at   int64
	n    int64
	want decision
}

// granted is what is wanted of a request that is allowed; times are in microseconds.
func granted(remaining, resetAfter int64) decision {
	return decision{granted: 1, remaining: remaining, resetAfter: resetAfter}
}

// denied is what is wanted of a request that is not, or of a Peek that says so.
func denied(remaining, retryAfter, resetAfter int64) decision {
	return decision{remaining: remaining, retryAfter: retryAfter, resetAfter: resetAfter}
}

// free is what is wanted of a Peek that says that 1 would fit.
func free(remaining, resetAfter int64) decision { return denied(remaining, 0, resetAfter) }

// playModel plays steps from the state s on and returns the last state. Next to what a step wants, it checks what every
// decision has to keep.
func playModel(t *testing.T, p Policy, s state, steps ...modelStep) state {
	t.Helper()
	require.NoError(t, p.validate())
	for i, step := range steps {
		next, got, err := checkDecision(p, s, step.at, step.n)
		require.NoError(t, err, "step %d", i)
		require.Equal(t, step.want, got, "step %d: %d at %v, from %+v", i, step.n, time.UnixMicro(step.at).UTC(), s)
		s = next
	}
	return s
}

// reach is how far a row's time may lie ahead of the clock: a window, or what it takes to fill a bucket.
func reach(p Policy) int64 {
	switch p := p.(type) {
	case FixedWindow:
		return micros(p.Window)
	case SlidingWindow:
		return micros(p.Window)
	case SlidingLog:
		return micros(p.Window)
	case TokenBucket:
		return p.fillTime(p.full())
	}
	panic("a new policy")
}

// longestWait is the longest RetryAfter and ResetAfter of a row whose time does not lie ahead of the clock.
func longestWait(p Policy) int64 {
	if _, ok := p.(SlidingWindow); ok {
		return 2 * reach(p)
	}
	return reach(p)
}

// leftBehind tells whether the clock has jumped back so far from a row that the row has to be pulled back to it. One that is
// full, because its capacity was lowered or all was given back, is as good as new wherever it is.
func leftBehind(p Policy, s state, clock int64) bool {
	if counted, _ := usage(p, s, clock); counted.Sign() == 0 && creditOf(p, s, clock) == 0 {
		return false
	}
	return clock < s.expiresAt && s.windowStart-clock > reach(p)
}

// ask is decide without the decision's state.
func ask(p Policy, s state, clock, n int64) (state, decision) {
	next, d := p.decide(s, clock, n)
	d.state, d.taken = state{}, take{}
	return next, d
}

// fits tells whether n would be allowed.
func fits(p Policy, s state, clock, n int64) bool {
	_, d := p.decide(s, clock, n)
	return d.granted == 1
}

// peek is what a Peek tells.
func peek(p Policy, s state, clock int64) decision {
	_, d := ask(p, s, clock, 0)
	return d
}

// checkDecision decides one request, and returns an error if anything is wrong that can be seen from the states and decisions
// around it. The decision that it returns is without its state.
func checkDecision(p Policy, s state, clock, n int64) (state, decision, error) {
	limit := p.limit()
	before := peek(p, s, clock)
	next, d := p.decide(s, clock, n)
	rolled := d.state
	d.state, d.taken = state{}, take{}
	fail := func(format string, args ...any) (state, decision, error) {
		return next, d, fmt.Errorf("%T%+v, %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, s, d, next, fmt.Sprintf(format, args...))
	}

	// What is granted, and what is written.
	healed := false
	switch {
	case d.remaining < 0 || d.remaining > limit+creditOf(p, next, clock):
		return fail("Remaining is not between 0 and the limit")
	case (d.granted == 1) != (0 < n && n <= min(before.remaining, limit)) || d.granted < 0 || d.granted > 1:
		return fail("granted, though a Peek has said %+v", before)
	case d.granted == 1:
		if d.remaining != before.remaining-n || d.retryAfter != 0 {
			return fail("a grant after a Peek that has said %+v", before)
		}
		if next.expiresAt != clock+d.resetAfter || d.resetAfter <= 0 {
			return fail("the row does not expire when the key is as good as new")
		}
	case next != s:
		healed = leftBehind(p, s, clock) && 0 < n && n <= limit
		// A window that has become shorter takes entries from a log.
		kept := next.count == s.count && next.prevCount == s.prevCount || s.log != "" && d.remaining == before.remaining
		if !healed || next.windowStart != clock || !kept {
			return fail("a denial has changed the row")
		}
	case d.remaining != before.remaining:
		return fail("a denial has changed Remaining from %d", before.remaining)
	case leftBehind(p, s, clock) && 0 < n && n <= limit:
		return fail("a denial has not pulled the row back to the clock")
	}
	if written := next; d.granted == 1 || healed {
		written.log = rolled.log // a part of it
		if rolled != written {
			return fail("its state is %+v", rolled)
		}
	}
	if leftBehind(p, s, clock) && (rolled.windowStart != clock || rolled.expiresAt != clock+d.resetAfter) {
		return fail("its state is %+v, not that of a row pulled back to the clock", rolled)
	}
	for _, n := range []int64{0, 1, d.remaining, limit} {
		if !remembers(p, rolled, next, clock, n) {
			return fail("its state is %+v, from which %d is decided otherwise", rolled, n)
		}
	}

	// What a Peek tells is what a request of 1 would be told.
	if _, one := ask(p, s, clock, 1); one.granted != min(before.remaining, 1) ||
		one.granted == 0 && (one.retryAfter != before.retryAfter || one.resetAfter != before.resetAfter || one.remaining != before.remaining) {
		return fail("a Peek says %+v, and a request of 1 is told %+v", before, one)
	}

	// RetryAfter and ResetAfter. Of a row that the clock has left behind they count from when it is pulled back, which what
	// writes nothing cannot do: a Peek, and a cost above the limit.
	ahead := max(min(s.windowStart-clock, reach(p)), 0)
	if d.resetAfter < 0 || creditOf(p, next, clock) == 0 && d.resetAfter > longestWait(p)+ahead {
		return fail("ResetAfter is out of bounds")
	}
	unwritten := leftBehind(p, s, clock) && next == s
	least := max(n, 1)
	switch {
	case d.granted == 1, n == 0 && d.remaining > 0:
		if d.retryAfter != 0 {
			return fail("RetryAfter is not 0, though it is allowed")
		}
	case n > limit:
		if d.retryAfter != never {
			return fail("a cost above the limit can never be granted")
		}
	case d.retryAfter <= 0 || d.retryAfter > longestWait(p)+ahead:
		return fail("RetryAfter is out of bounds")
	case healed && d.retryAfter > longestWait(p):
		return fail("RetryAfter is longer than a window's, though the row was pulled back")
	case unwritten:
	case !fits(p, next, clock+d.retryAfter, least):
		return fail("it is denied after RetryAfter")
	default:
		for _, early := range []int64{0, 1, d.retryAfter / 3, d.retryAfter / 2, d.retryAfter - 1} {
			if early < d.retryAfter && fits(p, next, clock+early, least) {
				return fail("it is allowed %d µs after the decision, before RetryAfter", early)
			}
		}
	}
	if !unwritten {
		if !equalsNoRow(p, next, clock+d.resetAfter) {
			return fail("after ResetAfter the key is not as good as new")
		}
		if d.resetAfter > 0 && equalsNoRow(p, next, clock+d.resetAfter-1) {
			return fail("a µs before ResetAfter the key is as good as new")
		}
	}

	// Whoever remembers the state of a denial can go on from it as from the row.
	if d.retryAfter > 0 && n <= limit && !unwritten {
		for _, later := range []int64{1, d.retryAfter / 2, d.retryAfter - 1, d.retryAfter, d.resetAfter - 1, d.resetAfter, 2 * reach(p)} {
			for _, n := range []int64{0, 1, least, limit} {
				if _, known := ask(p, rolled, clock+later, n); n == least && 0 < later && later < d.retryAfter && known.retryAfter <= 0 && len(rolled.log) < 8*maxDenialEntries {
					return fail("its state is %+v, by which nothing is known %d µs later", rolled, later)
				}
				if !remembers(p, rolled, next, clock+later, n) {
					return fail("its state is %+v, from which %d is decided otherwise %d µs later", rolled, n, later)
				}
			}
		}
	}

	// Remaining is the largest cost that is allowed now.
	if largest := min(d.remaining, limit); largest > 0 && !fits(p, next, clock, largest) || fits(p, next, clock, largest+1) {
		return fail("Remaining is not the largest cost that is allowed")
	}

	// From when it expires, the row equals no row.
	for _, late := range []int64{0, 1, reach(p), maxSpan} {
		if !equalsNoRow(p, next, max(next.expiresAt, clock)+late) {
			return fail("%d µs after it has expired the row does not equal no row", late)
		}
	}

	// A clock that steps back never shows more quota.
	for _, back := range []int64{1, reach(p) / 2, reach(p), reach(p) + 1, 2*reach(p) + 1, clock} {
		if back > clock {
			continue
		}
		// But for credit, which has expired later.
		if was := peek(p, next, clock-back).remaining - creditOf(p, next, clock-back); was > d.remaining {
			return fail("%d µs back, %d remain", back, was)
		}
		if least <= limit && fits(p, next, clock-back, least) && !fits(p, next, clock, least) {
			return fail("%d µs back, it is allowed", back)
		}
	}
	return next, d, nil
}

// remembers tells whether a decision from what was remembered of a row is that from the row. What is remembered of a log suffices for
// denials only, and for no longer than the one that it was told with; without one, the database is asked.
func remembers(p Policy, known, row state, clock, n int64) bool {
	if _, isLog := p.(SlidingLog); isLog {
		if _, d := ask(p, known, clock, n); n == 0 || d.retryAfter <= 0 {
			return true
		}
	}
	return sameDecision(p, known, row, clock, n)
}

// equalsNoRow tells whether a row cannot be told from no row.
func equalsNoRow(p Policy, s state, clock int64) bool {
	for _, n := range []int64{0, 1, p.limit(), p.limit() + 1} {
		if !sameDecision(p, s, state{}, clock, n) {
			return false
		}
	}
	return true
}

// sameDecision tells whether two states give the same decision.
func sameDecision(p Policy, a, b state, clock, n int64) bool {
	nextA, dA := ask(p, a, clock, n)
	nextB, dB := ask(p, b, clock, n)
	nextA.since, nextB.since = min(nextA.since, 1), min(nextB.since, 1) // which tells it from others, whatever it is
	return dA == dB && (dA.granted == 0 || nextA == nextB)
}

// checkElement decides count requests of cost n one by one, and returns an error if one of them is told something else than if all
// were one element, of which the database tells only how it ended.
func checkElement(p Policy, s state, clock, n, count int64) error {
	var single []decision
	last, taken := decision{}, int64(0)
	credit := creditOf(p, s, clock)
	for range count {
		s, last = p.decide(s, clock, n)
		single = append(single, last)
		taken += last.granted
	}
	last.decidedAt = time.UnixMicro(clock)
	last.taken.spent = credit - creditOf(p, s, clock)
	// last is that of a denial, if not all were granted.
	for i, want := range single[:taken] {
		units := (taken - 1 - int64(i)) * n
		if got := last.remaining + units; got != want.remaining {
			return fmt.Errorf("%T%+v: request %d of %d × %d at %d: %d remain, not %d", p, p, i+1, count, n, clock, got, want.remaining)
		}
		if got := p.resetAfter(last, units); got != want.resetAfter {
			return fmt.Errorf("%T%+v: request %d of %d × %d at %d: reset after %d, not %d", p, p, i+1, count, n, clock, got, want.resetAfter)
		}
	}
	return nil
}

// dice returns one of 0 to n-1.
type dice func(n int64) int64

// randomDice are seeded with what the test prints if it fails.
func randomDice(t *testing.T) dice {
	t.Helper()
	seed := testSeed(t)
	t.Logf("%s=%d", seedVariable, seed)
	return rand.New(rand.NewPCG(seed, 0)).Int64N
}

// bytesDice is what a fuzzer has thrown. more tells whether there are bytes left; without any, each throw is a 0.
func bytesDice(b []byte) (d dice, more func() bool) {
	d = func(n int64) int64 {
		if n <= 1<<8 {
			if len(b) == 0 {
				return 0
			}
			throw := int64(b[0]) % n
			b = b[1:]
			return throw
		}
		var wide [8]byte
		b = b[copy(wide[:], b):]
		return int64(binary.LittleEndian.Uint64(wide[:]) % uint64(n))
	}
	return d, func() bool { return len(b) > 0 }
}

// magnitude is a number from lo to hi: every order of magnitude is as likely as another, and so are the ends.
func (d dice) magnitude(lo, hi int64) int64 {
	switch d(16) {
	case 0:
		return lo
	case 1:
		return hi
	}
	width := uint64(hi - lo)
	bits := d(int64(big.NewInt(0).SetUint64(width).BitLen()) + 1)
	if bits == 0 {
		return lo
	}
	return lo + int64(min(uint64(d(1<<min(bits, 62))), width))
}

// window draws the numbers of a window from all of the exact range: everyday ones, and ones up to its edge.
func (d dice) window() (limit int64, window time.Duration) {
	if d(3) == 0 {
		return 1 + d(20), duration(1 + d(100))
	}
	span := d.magnitude(1, maxSpan)
	return d.magnitude(1, maxProduct/span), duration(span)
}

// log draws a SlidingLog in the same way.
func (d dice) log() SlidingLog {
	if d(3) == 0 {
		return SlidingLog{Limit: 1 + d(20), Window: duration(1 + d(100))}
	}
	return SlidingLog{Limit: d.magnitude(1, maxLogLimit), Window: duration(d.magnitude(1, maxSpan))}
}

// bucket draws a TokenBucket in the same way.
func (d dice) bucket() TokenBucket {
	if d(3) == 0 {
		return TokenBucket{Capacity: 1 + d(20), Refill: 1 + d(20), Every: duration(1 + d(100))}
	}
	every := d.magnitude(1, maxSpan)
	capacity := d.magnitude(1, maxProduct/every)
	slowest := ceilDiv(capacity*every, maxSpan)
	return TokenBucket{Capacity: capacity, Refill: d.magnitude(slowest, math.MaxInt64), Every: duration(every)}
}

// clock draws the clock of the next request: where something happens to the row, a microsecond beside it, or any step away,
// forwards and back.
func (d dice) clock(p Policy, s state, clock int64, last decision) int64 {
	const highest = 1 << 60
	start, window := s.windowStart, reach(p)
	events := []int64{
		clock, clock + 1, start, start + window/2, start + window, start + 2*window, s.expiresAt, clock + last.resetAfter,
		start - window, start - 2*window, clock - 1,
	}
	if last.retryAfter != never {
		events = append(events, clock+last.retryAfter)
	}
	switch d(8) {
	case 0, 1, 2:
		clock = events[d(int64(len(events)))] + d(3) - 1
	case 3, 4:
		clock += d.magnitude(0, 3*window)
	case 5:
		clock -= d.magnitude(0, 3*window)
	case 6:
		clock += d.magnitude(0, highest)
	case 7:
		clock -= d.magnitude(0, highest)
	}
	return min(max(clock, 0), highest)
}

// cost draws the cost of the next request.
func (d dice) cost(limit, remaining int64) int64 {
	switch costs := []int64{0, 1, limit, limit + 1, remaining, remaining + 1}; d(3) {
	case 0:
		return costs[d(int64(len(costs)))]
	case 1:
		return min(1+d(3), limit)
	}
	return d.magnitude(0, limit)
}

// refund draws what is given back: all or part of a take, again and again, or something that nobody has taken.
func (d dice) refund(takes []take, p Policy, clock int64) take {
	if len(takes) == 0 || d(8) == 0 {
		k := take{units: d.magnitude(1, math.MaxInt64), since: clock - d.magnitude(0, clock), in: clock - d.magnitude(0, clock), at: d.magnitude(0, math.MaxInt64)}
		k.spent = d.magnitude(0, k.units)
		return k
	}
	k := takes[d(int64(len(takes)))]
	if d(2) == 0 {
		from := d.magnitude(0, k.units-1)
		k = k.part(p, from, d.magnitude(from+1, k.units))
	}
	if d(8) == 0 {
		*[]*int64{&k.units, &k.since, &k.in, &k.at}[d(4)] += 1 + d(3)
	}
	return k
}

// seen counts what a walk has come by, so that a test can tell that it has looked at everything.
type seen struct{ granted, denied, never, peeked, refunded, renewed, stale, credited, spent, ahead, healed, expired, changed, clamped int }

// walkModel asks for one request after the other, at clocks and at costs that d draws, now and then under another policy, and checks
// each decision. It begins with the policy that draw returns first.
func walkModel(d dice, more func() bool, draw func() Policy) (seen, error) {
	var count seen
	var s state
	var last decision
	var takes []take
	p := draw()
	clock := d.magnitude(0, 1<<52)
	for more() {
		if d(32) == 0 {
			p = draw()
			count.changed++
		}
		clock = d.clock(p, s, clock, last)
		if d(12) == 0 {
			next, got, err := checkGrant(p, s, clock, d.magnitude(1, maxCredit))
			if err != nil {
				return count, err
			}
			s, last = next, got
			count.credited++
			continue
		}
		if d(4) == 0 {
			next, got, err := checkRefund(p, s, clock, d.refund(takes, p, clock))
			if err != nil {
				return count, err
			}
			switch {
			case next != s && got.resetAfter == 0:
				count.renewed++
			case next != s:
				count.refunded++
			default:
				count.stale++
			}
			s, last = next, got
			continue
		}
		n := d.cost(p.limit(), peek(p, s, clock).remaining)
		if err := checkElement(p, s, clock, n, 1+d(4)); err != nil {
			return count, err
		}
		next, got, err := checkDecision(p, s, clock, n)
		if err != nil {
			return count, err
		}
		if got.granted == 1 {
			_, d := p.decide(s, clock, n)
			takes = append(takes, d.taken)
		}
		switch {
		case n == 0:
			count.peeked++
		case got.granted == 1:
			count.granted++
			if creditOf(p, next, clock) < creditOf(p, s, clock) {
				count.spent++
			}
		case got.retryAfter == never:
			count.never++
		default:
			count.denied++
			if clock+got.retryAfter == s.expiresAt && s.expiresAt < s.windowStart+longestWait(p) {
				count.clamped++
			}
			if next != s {
				count.healed++
			}
		}
		switch {
		case s == state{}:
		case clock < s.windowStart:
			count.ahead++
		case clock >= s.expiresAt:
			count.expired++
		}
		s, last = next, got
	}
	return count, nil
}

// testModelProperties walks many times, beginning with no row each time.
func testModelProperties(t *testing.T, draw func(dice) Policy) {
	t.Helper()
	d := randomDice(t)
	var total seen
	for range 1000 {
		left := 40
		count, err := walkModel(d, func() bool { left--; return left >= 0 }, func() Policy {
			p := draw(d)
			require.NoError(t, p.validate())
			return p
		})
		require.NoError(t, err)
		total.granted += count.granted
		total.denied += count.denied
		total.never += count.never
		total.peeked += count.peeked
		total.refunded += count.refunded
		total.renewed += count.renewed
		total.stale += count.stale
		total.credited += count.credited
		total.spent += count.spent
		total.ahead += count.ahead
		total.healed += count.healed
		total.expired += count.expired
		total.changed += count.changed
		total.clamped += count.clamped
	}
	t.Logf("seen: %+v", total)
	for what, count := range map[string]int{
		"grants": total.granted, "denials": total.denied, "costs above the limit": total.never, "Peeks": total.peeked,
		"rows ahead of the clock": total.ahead, "rows pulled back": total.healed, "expired rows": total.expired,
		"changes of policy": total.changed, "waits until a row of an older policy expires": total.clamped,
		"refunds": total.refunded, "refunds of everything": total.renewed, "refunds of nothing": total.stale, "Grants": total.credited, "requests that spent credit": total.spent,
	} {
		require.Greater(t, count, 20, "the walks have seen too few %s", what)
	}
}

// fuzzModel walks as the fuzzer's bytes say, under one or the other of two policies.
func fuzzModel(t *testing.T, steps []byte, policies ...Policy) {
	t.Helper()
	for _, p := range policies {
		if p.validate() != nil {
			t.Skip("outside the exact range")
		}
	}
	d, more := bytesDice(steps)
	next := -1
	_, err := walkModel(d, more, func() Policy {
		next++
		return policies[next%len(policies)]
	})
	require.NoError(t, err)
}

// slowModel is an algorithm as the design says it, in rationals.
type slowModel interface {
	// fits tells whether n would be allowed at the time t, which is never before that of the last take.
	fits(t, n int64) bool
	take(t, n int64)
	// state is the row at t as the model rolls it forward, but for when it expires.
	state(t int64) state
}

// slowDecision decides by what fits, and finds Remaining, RetryAfter and ResetAfter by search.
func slowDecision(m slowModel, limit, horizon, t, n int64) decision {
	var d decision
	if 0 < n && m.fits(t, n) {
		m.take(t, n)
		d.granted = 1
	}
	d.remaining = search(0, limit, func(n int64) bool { return !m.fits(t, n+1) })
	least := max(n, 1)
	switch {
	case d.granted == 1, n == 0 && d.remaining > 0:
	case n > limit:
		d.retryAfter = never
	default:
		d.retryAfter = search(1, horizon, func(wait int64) bool { return m.fits(t+wait, least) })
	}
	d.resetAfter = search(0, horizon, func(wait int64) bool { return m.fits(t+wait, limit) })
	d.state = m.state(t)
	return d
}

// search is the smallest number from lo to hi for which is, once true, stays true; hi if there is none.
func search(lo, hi int64, is func(int64) bool) int64 {
	for lo < hi {
		if middle := lo + (hi-lo)/2; is(middle) {
			hi = middle
		} else {
			lo = middle + 1
		}
	}
	return lo
}

func rat(n int64) *big.Rat { return new(big.Rat).SetInt64(n) }

// whole is a rational that has to be a whole number; -1 if it is not.
func whole(r *big.Rat) int64 {
	if !r.IsInt() || !r.Num().IsInt64() {
		return -1
	}
	return r.Num().Int64()
}

// forwards draws the next clock of one that never steps back.
func (d dice) forwards(p Policy, s state, clock int64, last decision) int64 {
	return max(clock, min(d.clock(p, s, clock, last), clock+8*maxSpan))
}

// testAgainstSlowModel compares every field of every decision, for one policy and a clock that never steps back.
func testAgainstSlowModel(t *testing.T, draw func(dice) (Policy, slowModel)) {
	t.Helper()
	d := randomDice(t)
	for range 100 {
		var s state
		var got decision
		p, slow := draw(d)
		clock := d.magnitude(0, 1<<52)
		for range 25 {
			clock = d.forwards(p, s, clock, got)
			n := d.cost(p.limit(), peek(p, s, clock).remaining)
			from := s
			s, got = p.decide(s, clock, n)
			got.state, got.taken = toldState(got.state), take{}
			got.state.expiresAt, got.state.log, got.state.since = 0, "", 0
			want := slowDecision(slow, p.limit(), 2*longestWait(p), clock, n)
			require.Equal(t, want, got, "%T%+v: %d at %d from %+v", p, p, n, clock, from)
		}
	}
}

// testNeverMoreThanTheClockGives lets a clock step forwards and back, and compares all that is granted with how far it has gone
// forwards: at most first, and then rate more in every span. Steps back give nothing.
func testNeverMoreThanTheClockGives(t *testing.T, draw func(dice) (p Policy, first, rate, span int64, whole bool)) {
	t.Helper()
	d := randomDice(t)
	for range 300 {
		var s state
		var last decision
		p, first, rate, span, whole := draw(d)
		clock := d.magnitude(0, 1<<52)
		forwards, total := new(big.Int), new(big.Int)
		for range 40 {
			was := clock
			clock = d.clock(p, s, clock, last)
			forwards.Add(forwards, big.NewInt(max(clock-was, 0)))
			n := d.cost(p.limit(), peek(p, s, clock).remaining)
			s, last = p.decide(s, clock, n)
			total.Add(total, big.NewInt(last.granted*n))

			gives := new(big.Rat).SetFrac(forwards, big.NewInt(span))
			if whole { // windows
				gives.SetInt(new(big.Int).Quo(forwards, big.NewInt(span)))
			}
			gives.Mul(gives, rat(rate)).Add(gives, rat(first))
			require.LessOrEqual(t, new(big.Rat).SetInt(total).Cmp(gives), 0,
				"%T%+v: %v granted while the clock went forwards by %v µs", p, p, total, forwards)
		}
	}
}

func TestCoalescedRequestsAreToldWhatSingleOnesWouldBe(t *testing.T) {
	t.Parallel()
	for _, p := range []Policy{
		FixedWindow{10, 10 * time.Second}, SlidingWindow{10, 10 * time.Second}, TokenBucket{10, 3, 7 * time.Second}, SlidingLog{10, 10 * time.Second},
	} {
		s, _ := p.decide(state{}, c2, 1)
		for _, clock := range []int64{c0, c2, c5, c5 + 1, c2 + 9*second, c2 + 10*second, c2 + 15*second} {
			for count := range int64(12) {
				for n := range int64(6) {
					require.NoError(t, checkElement(p, s, clock, n, count))
				}
			}
		}
	}
	// Three times 2 from a bucket whose time lies 2 s ahead, with one token gone: the first is told 2 + 3 s, the last 2 + 7 s.
	p := TokenBucket{10, 1, time.Second}
	s := playModel(t, p, state{}, modelStep{c2, 1, granted(9, second)})
	var last decision
	for range 3 {
		s, last = p.decide(s, c0, 2)
	}
	require.Equal(t, 9*second, last.resetAfter)
	require.Equal(t, 7*second, p.resetAfter(last, 2))
	require.Equal(t, 5*second, p.resetAfter(last, 4))
	require.Equal(t, 9*second, FixedWindow{10, time.Minute}.resetAfter(last, 4))
	require.Equal(t, 9*second, SlidingWindow{10, time.Minute}.resetAfter(last, 4))
}

func TestMicrosAndDurationAreInverse(t *testing.T) {
	t.Parallel()
	for _, us := range []int64{0, 1, 999, 1000, second, hour, maxSpan - 1, maxSpan, 3 * maxSpan, 4*maxSpan - 1, 4 * maxSpan} {
		require.Equal(t, us, micros(duration(us)))
		require.Equal(t, us, duration(us).Microseconds())
		require.GreaterOrEqual(t, duration(us), time.Duration(0), "overflow at %d µs", us)
	}
	require.Equal(t, time.Minute, duration(minute))
	require.Equal(t, minute, micros(time.Minute))
}

func TestMicrosUpRoundsUp(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		d    time.Duration
		want int64
	}{
		{0, 0}, {1, 1}, {999, 1}, {1000, 1}, {1001, 2}, {time.Minute, minute}, {time.Minute + 1, minute + 1},
		{math.MaxInt64, math.MaxInt64/1000 + 1},
	} {
		require.Equal(t, test.want, microsUp(test.d), "%d ns", test.d)
	}
}

func TestCeilDivRoundsUpAndNeverOverflows(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ a, b, want int64 }{
		{0, 1, 0}, {0, math.MaxInt64, 0},
		{1, 1, 1}, {1, 2, 1}, {1, math.MaxInt64, 1},
		{6, 3, 2}, {7, 3, 3}, {8, 3, 3}, {9, 3, 3},
		{maxProduct, maxSpan, maxProduct / maxSpan}, {maxProduct - 1, maxSpan, maxProduct / maxSpan}, {maxProduct, 3, maxProduct/3 + 1},
		{math.MaxInt64, 1, math.MaxInt64}, {math.MaxInt64, 2, 1 << 62}, {math.MaxInt64, math.MaxInt64, 1},
		{math.MaxInt64, math.MaxInt64 - 1, 2}, {math.MaxInt64 - 1, math.MaxInt64, 1},
	} {
		require.Equal(t, test.want, ceilDiv(test.a, test.b), "%d / %d", test.a, test.b)
	}
	d := randomDice(t)
	for range 10_000 {
		a, b := d.magnitude(0, math.MaxInt64), d.magnitude(1, math.MaxInt64)
		quotient, rest := new(big.Int).QuoRem(big.NewInt(a), big.NewInt(b), new(big.Int))
		require.Equal(t, quotient.Int64()+int64(rest.Sign()), ceilDiv(a, b), "%d / %d", a, b)
	}
}

func TestMulDivIsExactOver128Bits(t *testing.T) {
	t.Parallel()
	for _, test := range []struct{ a, b, c, want int64 }{
		{0, 0, 1, 0}, {0, math.MaxInt64, 1, 0}, {1, 0, 2, 0},
		{1, 1, 2, 0}, {1, 3, 2, 1}, {2, 2, 3, 1}, {2, 3, 3, 2},
		{math.MaxInt64 - 1, math.MaxInt64, math.MaxInt64, math.MaxInt64 - 1},
		{math.MaxInt64 - 1, math.MaxInt64 - 1, math.MaxInt64, math.MaxInt64 - 2},
		{maxSpan - 1, maxSpan, maxSpan, maxSpan - 1},
		{1 << 61, maxProduct, maxProduct, 1 << 61},
	} {
		require.Equal(t, test.want, mulDiv(test.a, test.b, test.c), "%d × %d / %d", test.a, test.b, test.c)
	}
	d := randomDice(t)
	for range 10_000 {
		c := d.magnitude(1, math.MaxInt64)
		a, b := d.magnitude(0, c-1), d.magnitude(0, math.MaxInt64)
		want := new(big.Int).Mul(big.NewInt(a), big.NewInt(b))
		want.Quo(want, big.NewInt(c))
		require.Equal(t, want.Int64(), mulDiv(a, b, c), "%d × %d / %d", a, b, c)
	}
}

func TestPolicyOutsideTheExactRangeIsRefused(t *testing.T) {
	t.Parallel()
	const longest = maxSpan * time.Microsecond
	windows := []struct {
		name    string
		limit   int64
		window  time.Duration
		field   string
		allowed string // what the error says may be given
	}{
		{"no limit", 0, time.Minute, "Policy.Limit", "is 0, and must be at least 1"},
		{"a negative limit", -5, time.Minute, "Policy.Limit", "is -5, and must be at least 1"},
		{"the smallest limit", math.MinInt64, time.Minute, "Policy.Limit", "must be at least 1"},
		{"no window", 10, 0, "Policy.Window", "is 0s, and must be at least 1µs"},
		{"a negative window", 10, -time.Minute, "Policy.Window", "is -1m0s, and must be at least 1µs"},
		{"the smallest window", 10, math.MinInt64, "Policy.Window", "must be at least 1µs"},
		{"less than a microsecond", 10, time.Microsecond - 1, "Policy.Window", "is 999ns, and must be at least 1µs"},
		{"parts of a microsecond", 10, 1500 * time.Nanosecond, "Policy.Window", "is 1.5µs, and must be whole microseconds"},
		{"a window beyond 71 years", 1, longest + time.Microsecond, "Policy.Window", "may be at most " + longest.String() + " (71 years)"},
		{"the largest window", 1, math.MaxInt64 / 1000 * 1000, "Policy.Window", "may be at most " + longest.String() + " (71 years)"},
		{"a product beyond 2^62", 2049, longest, "Policy.Limit", "is 2049 with a Window of " + longest.String() +
			", outside the exact range: for this Window it may be at most 2048"},
		{"the largest limit", math.MaxInt64, time.Microsecond, "Policy.Limit", "it may be at most 4611686018427387904"},
		{"a product of 2^64", maxProduct, 4 * time.Microsecond, "Policy.Limit", "it may be at most 1152921504606846976"},
		{"a product that rounds down", 1537228672809129302, 3 * time.Microsecond, "Policy.Limit", "it may be at most 1537228672809129301"},
	}
	for _, test := range windows {
		for _, p := range []Policy{FixedWindow{test.limit, test.window}, SlidingWindow{test.limit, test.window}} {
			requireRefused(t, p, test.name, test.field, test.allowed)
		}
	}
	requireRefused(t, SlidingLog{1001, time.Microsecond}, "a long log", "Policy.Limit", "is 1001, and may be at most 1000")
	for _, test := range windows[:10] {
		requireRefused(t, SlidingLog{test.limit, test.window}, test.name, test.field, test.allowed)
	}
	for _, test := range []struct {
		name    string
		policy  TokenBucket
		field   string
		allowed string
	}{
		{"no capacity", TokenBucket{0, 1, time.Second}, "Policy.Capacity", "is 0, and must be at least 1"},
		{"a negative capacity", TokenBucket{math.MinInt64, 1, time.Second}, "Policy.Capacity", "must be at least 1"},
		{"no refill", TokenBucket{10, 0, time.Second}, "Policy.Refill", "is 0, and must be at least 1"},
		{"a negative refill", TokenBucket{10, -1, time.Second}, "Policy.Refill", "is -1, and must be at least 1"},
		{"no time", TokenBucket{10, 1, 0}, "Policy.Every", "is 0s, and must be at least 1µs"},
		{"a negative time", TokenBucket{10, 1, math.MinInt64}, "Policy.Every", "must be at least 1µs"},
		{"parts of a microsecond", TokenBucket{10, 1, time.Second + 1}, "Policy.Every", "is 1.000000001s, and must be whole microseconds"},
		{"a time beyond 71 years", TokenBucket{1, 1, longest + time.Microsecond}, "Policy.Every", "may be at most " + longest.String() + " (71 years)"},
		{"a product beyond 2^62", TokenBucket{2049, math.MaxInt64, longest}, "Policy.Capacity", "is 2049 with Every " + longest.String() +
			", outside the exact range: for this Every it may be at most 2048"},
		{"the largest capacity", TokenBucket{math.MaxInt64, math.MaxInt64, time.Microsecond}, "Policy.Capacity", "it may be at most 4611686018427387904"},
		{"a product of 2^64", TokenBucket{maxProduct, math.MaxInt64, 4 * time.Microsecond}, "Policy.Capacity", "it may be at most 1152921504606846976"},
		{"a microsecond too long to fill", TokenBucket{maxSpan + 1, 1, time.Microsecond}, "Policy.Refill",
			"is 1 every 1µs, which takes more than 71 years to fill a Capacity of 2251799813685249"},
		{"a rounded microsecond too long to fill", TokenBucket{2*maxSpan + 1, 2, time.Microsecond}, "Policy.Refill", "more than 71 years"},
	} {
		requireRefused(t, test.policy, test.name, test.field, test.allowed)
	}
}

func requireRefused(t *testing.T, p Policy, name, field, reason string) {
	t.Helper()
	var err *ConfigError
	require.ErrorAs(t, p.validate(), &err, "%T, %s", p, name)
	require.Equal(t, field, err.Field, "%T, %s", p, name)
	require.Contains(t, err.Reason, reason, "%T, %s", p, name)
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: Config."+field+" is "), err.Error())
}

func TestPolicyAtTheEdgeOfTheExactRangeIsAccepted(t *testing.T) {
	t.Parallel()
	const longest = maxSpan * time.Microsecond
	for _, p := range []Policy{
		FixedWindow{1, time.Microsecond}, FixedWindow{maxProduct, time.Microsecond}, FixedWindow{2048, longest},
		SlidingWindow{1, time.Microsecond}, SlidingWindow{maxProduct, time.Microsecond}, SlidingWindow{2048, longest},
		SlidingLog{1, time.Microsecond}, SlidingLog{1000, time.Microsecond}, SlidingLog{1000, longest},
		TokenBucket{1, 1, time.Microsecond}, TokenBucket{2048, 2048, longest}, TokenBucket{maxSpan, 1, time.Microsecond},
		TokenBucket{2 * maxSpan, 2, time.Microsecond}, TokenBucket{1, 1, longest}, TokenBucket{2048, math.MaxInt64, longest},
		TokenBucket{maxProduct, 2048, time.Microsecond}, TokenBucket{maxProduct, math.MaxInt64, time.Microsecond},
	} {
		require.NoError(t, p.validate(), "%T%+v", p, p)
	}
}

// FuzzPolicyValidate: whatever the numbers are, validate tells rightly whether they are in the exact range, and what it accepts
// never overflows.
func FuzzPolicyValidate(f *testing.F) {
	f.Add(int64(10), int64(5), int64(time.Minute))
	f.Add(int64(2048), int64(2048), int64(maxSpan*time.Microsecond))
	f.Add(int64(2049), int64(1), int64(maxSpan*time.Microsecond))
	f.Add(int64(maxProduct), int64(math.MaxInt64), int64(time.Microsecond))
	f.Add(int64(maxProduct), int64(2048), int64(time.Microsecond))
	f.Add(int64(maxProduct), int64(2047), int64(time.Microsecond))
	f.Add(int64(math.MaxInt64), int64(math.MaxInt64), int64(math.MaxInt64))
	f.Add(int64(math.MinInt64), int64(math.MinInt64), int64(math.MinInt64))
	f.Add(int64(1), int64(1), int64(1500))
	f.Fuzz(func(t *testing.T, limit, refill, nanoseconds int64) {
		span := time.Duration(nanoseconds)
		us := nanoseconds / 1000
		product := new(big.Int).Mul(big.NewInt(limit), big.NewInt(us))
		exact := limit >= 1 && us >= 1 && us <= maxSpan && nanoseconds%1000 == 0 && product.Cmp(big.NewInt(maxProduct)) <= 0
		for _, p := range []Policy{FixedWindow{limit, span}, SlidingWindow{limit, span}} {
			requireValidated(t, p, exact)
		}
		requireValidated(t, SlidingLog{limit, span}, exact && limit <= maxLogLimit)
		fillable := refill >= 1 && product.Cmp(new(big.Int).Mul(big.NewInt(maxSpan), big.NewInt(refill))) <= 0
		requireValidated(t, TokenBucket{limit, refill, span}, exact && fillable)
	})
}

func requireValidated(t *testing.T, p Policy, exact bool) {
	t.Helper()
	err := p.validate()
	if !exact {
		var refused *ConfigError
		require.True(t, errors.As(err, &refused) && strings.HasPrefix(refused.Field, "Policy.") && refused.Reason != "", "%T%+v: %v", p, p, err)
		return
	}
	require.NoError(t, err, "%T%+v", p, p)
	// Everything is taken, and asked for again when the clock has stepped back by as much as it may.
	var s state
	for _, clock := range []int64{4 * maxSpan, 4*maxSpan - reach(p), 4*maxSpan - reach(p)/2, 4 * maxSpan, 4*maxSpan + reach(p), 4*maxSpan + reach(p)/2} {
		for _, n := range []int64{1, p.limit() / 2, p.limit(), p.limit() + 1} {
			next, d, err := checkDecision(p, s, clock, n)
			require.NoError(t, err)
			require.LessOrEqual(t, duration(d.resetAfter), 4*maxSpan*time.Microsecond)
			require.True(t, d.retryAfter == never || 0 <= d.retryAfter && d.retryAfter <= 4*maxSpan, "%T%+v: %+v", p, p, d)
			s = next
		}
	}
}
