package ratelimit

import (
	"encoding/binary"
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
)

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
		return 1 + d(20), model.Duration(1 + d(100))
	}
	span := d.magnitude(1, model.MaxSpan)
	return d.magnitude(1, model.MaxProduct/span), model.Duration(span)
}

// log draws a SlidingLog in the same way.
func (d dice) log() SlidingLog {
	if d(3) == 0 {
		return SlidingLog{Limit: 1 + d(20), Window: model.Duration(1 + d(100))}
	}
	return SlidingLog{Limit: d.magnitude(1, model.MaxLogLimit), Window: model.Duration(d.magnitude(1, model.MaxSpan))}
}

// bucket draws a TokenBucket in the same way.
func (d dice) bucket() TokenBucket {
	if d(3) == 0 {
		return TokenBucket{Capacity: 1 + d(20), Refill: 1 + d(20), Every: model.Duration(1 + d(100))}
	}
	every := d.magnitude(1, model.MaxSpan)
	capacity := d.magnitude(1, model.MaxProduct/every)
	slowest := model.CeilDiv(capacity*every, model.MaxSpan)
	return TokenBucket{Capacity: capacity, Refill: d.magnitude(slowest, math.MaxInt64), Every: model.Duration(every)}
}

// calendar draws a CalendarWindow.
func (d dice) calendar() CalendarWindow {
	limit := 1 + d(20)
	if d(3) == 0 {
		limit = d.magnitude(1, model.MaxProduct)
	}
	units, zones := calendarUnits(), steadyZones()
	return CalendarWindow{Limit: limit, Unit: units[d(int64(len(units)))], Zone: zones[d(int64(len(zones)))]}
}

// clock draws the clock of the next request: where something happens to the row, a microsecond beside that, or any
// step away, forwards and back.
func (d dice) clock(p ruled, s model.State, clock int64, last model.Decision) int64 {
	const highest = 1 << 60
	start, window := s.WindowStart, reach(p)
	events := []int64{
		clock, clock + 1, start, start + window/2, start + window, start + 2*window, s.ExpiresAt, clock + last.ResetAfter,
		start - window, start - 2*window, clock - 1,
	}
	if last.RetryAfter != model.Never {
		events = append(events, clock+last.RetryAfter)
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
func (d dice) refund(takes []model.Take, p ruled, clock int64) model.Take {
	if len(takes) == 0 || d(8) == 0 {
		k := model.Take{
			Units: d.magnitude(1, math.MaxInt64),
			Since: clock - d.magnitude(0, clock),
			In:    clock - d.magnitude(0, clock),
			At:    d.magnitude(0, math.MaxInt64),
		}
		k.Spent = d.magnitude(0, k.Units)
		return k
	}
	k := takes[d(int64(len(takes)))]
	if d(2) == 0 {
		from := d.magnitude(0, k.Units-1)
		k = k.Portion(p, from, d.magnitude(from+1, k.Units))
	}
	if d(8) == 0 {
		*[]*int64{&k.Units, &k.Since, &k.In, &k.At}[d(4)] += 1 + d(3)
	}
	return k
}

// seen counts what a walk has come by, so that a test can tell that it has looked at everything.
type seen struct{ granted, denied, never, peeked, refunded, renewed, stale, credited, spent, ahead, healed, expired, changed, clamped int }

// walkModel asks for one request after the other, at clocks and costs that d draws, and now and then under another
// policy. It checks each decision. It begins with the policy that draw returns first.
func walkModel(d dice, more func() bool, draw func() ruled) (seen, error) {
	var count seen
	var s model.State
	var last model.Decision
	var takes []model.Take
	p := draw()
	clock := d.magnitude(0, 1<<52)
	for more() {
		if d(32) == 0 {
			p = draw()
			count.changed++
		}
		clock = d.clock(p, s, clock, last)
		if d(12) == 0 {
			next, got, err := checkedGrant(p, s, clock, d.magnitude(1, model.MaxCredit))
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
			case next != s && got.ResetAfter == 0:
				count.renewed++
			case next != s:
				count.refunded++
			default:
				count.stale++
			}
			s, last = next, got
			continue
		}
		n := d.cost(p.Numbers().Limit, peek(p, s, clock).Remaining)
		if err := checkElement(p, s, clock, n, 1+d(4)); err != nil {
			return count, err
		}
		next, got, err := checkDecision(p, s, clock, n)
		if err != nil {
			return count, err
		}
		if got.Granted == 1 {
			_, d := p.Decide(s, clock, n)
			takes = append(takes, d.Taken)
		}
		switch {
		case n == 0:
			count.peeked++
		case got.Granted == 1:
			count.granted++
			if creditOf(p, next, clock) < creditOf(p, s, clock) {
				count.spent++
			}
		case got.RetryAfter == model.Never:
			count.never++
		default:
			count.denied++
			if clock+got.RetryAfter == s.ExpiresAt && s.ExpiresAt < s.WindowStart+longestWait(p) {
				count.clamped++
			}
			if next != s {
				count.healed++
			}
		}
		switch {
		case s == model.State{}:
		case clock < s.WindowStart:
			count.ahead++
		case clock >= s.ExpiresAt:
			count.expired++
		}
		s, last = next, got
	}
	return count, nil
}

// testModelProperties walks many times, beginning with no row each time.
func testModelProperties(t *testing.T, draw func(dice) ruled) {
	t.Helper()
	d := randomDice(t)
	var total seen
	for range 1000 {
		left := 40
		count, err := walkModel(d, func() bool { left--; return left >= 0 }, func() ruled {
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
func fuzzModel(t *testing.T, steps []byte, policies ...ruled) {
	t.Helper()
	for _, p := range policies {
		if p.validate() != nil {
			t.Skip("outside the exact range")
		}
	}
	d, more := bytesDice(steps)
	next := -1
	_, err := walkModel(d, more, func() ruled {
		next++
		return policies[next%len(policies)]
	})
	require.NoError(t, err)
}

// forwards draws the next clock of one that never steps back.
func (d dice) forwards(p ruled, s model.State, clock int64, last model.Decision) int64 {
	return max(clock, min(d.clock(p, s, clock, last), clock+8*model.MaxSpan))
}

// fuzzWindows fuzzes a policy that has a limit and a window, and its change to another limit and window.
func fuzzWindows(f *testing.F, policy func(limit int64, window time.Duration) ruled) {
	f.Helper()
	f.Add(int64(10), minute, int64(20), minute, []byte("a request at each of some clocks, at some costs"))
	f.Add(
		int64(2048),
		int64(model.MaxSpan),
		int64(1),
		int64(1),
		[]byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"),
	)
	f.Add(
		int64(model.MaxProduct),
		int64(1),
		int64(2048),
		int64(model.MaxSpan),
		[]byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5\xf4\xf3\xf2\xf1\xf0"),
	)
	f.Add(int64(1), int64(3), int64(3), int64(1), []byte("the clock steps back and the policy changes"))
	f.Fuzz(func(t *testing.T, limit, window, limit2, window2 int64, steps []byte) {
		fuzzModel(t, steps, policy(limit, model.Duration(window)), policy(limit2, model.Duration(window2)))
	})
}
