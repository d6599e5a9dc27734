// Package modeltest has helpers for tests of the model, and for tests that compare something with the model.
package modeltest

import (
	"math"
	"math/big"
	"math/rand/v2"
	"testing"
	"time"
	_ "time/tzdata" // gives the tests time zones on every machine

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// SeedVariable is the environment variable that sets the seed, to repeat the random cases of a failed run.
const SeedVariable = "RATELIMIT_TEST_SEED"

// Dice is a function that returns a random number from 0 to n-1.
type Dice func(n int64) int64

// RandomDice returns dice with a seed that is printed if the test fails.
func RandomDice(t testing.TB) Dice {
	t.Helper()
	return rand.New(rand.NewPCG(testkit.Seed(t, SeedVariable), 0)).Int64N
}

// Magnitude draws a number from lo to hi. All orders of magnitude are equally likely, and lo and hi are frequent.
func (d Dice) Magnitude(lo, hi int64) int64 {
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

// Window draws the limit and the window of a policy: small values, or any values within the exact range.
func (d Dice) Window() (limit int64, window time.Duration) {
	if d(3) == 0 {
		return 1 + d(20), model.Duration(1 + d(100))
	}
	span := d.Magnitude(1, model.MaxSpan)
	return d.Magnitude(1, model.MaxProduct/span), model.Duration(span)
}

// Log draws a SlidingLog with small values, or with any values within the exact range.
func (d Dice) Log() model.SlidingLog {
	if d(3) == 0 {
		return model.SlidingLog{Limit: 1 + d(20), Window: model.Duration(1 + d(100))}
	}
	return model.SlidingLog{
		Limit: d.Magnitude(1, model.MaxLogLimit), Window: model.Duration(d.Magnitude(1, model.MaxSpan)),
	}
}

// Bucket draws a TokenBucket with small values, or with any values within the exact range.
func (d Dice) Bucket() model.TokenBucket {
	if d(3) == 0 {
		return model.TokenBucket{Capacity: 1 + d(20), Refill: 1 + d(20), Every: model.Duration(1 + d(100))}
	}
	every := d.Magnitude(1, model.MaxSpan)
	capacity := d.Magnitude(1, model.MaxProduct/every)
	slowest := model.CeilDiv(capacity*every, model.MaxSpan)
	return model.TokenBucket{
		Capacity: capacity, Refill: d.Magnitude(slowest, math.MaxInt64), Every: model.Duration(every),
	}
}

// Calendar draws a CalendarWindow. One in three is aligned to the epoch.
func (d Dice) Calendar() model.CalendarWindow {
	if d(3) == 0 {
		limit, window := d.Window()
		return model.CalendarWindow{Limit: limit, Span: window, Zone: algorithm.Epoch}
	}
	limit := 1 + d(20)
	if d(3) == 0 {
		limit = d.Magnitude(1, model.MaxProduct)
	}
	units, zones := Units(), SteadyZones()
	return model.CalendarWindow{Limit: limit, Span: units[d(int64(len(units)))], Zone: zones[d(int64(len(zones)))]}
}

// Units returns the spans of the calendar units.
func Units() (spans []time.Duration) {
	for _, unit := range []string{"minute", "hour", "day", "week", "month"} {
		spans = append(spans, algorithm.UnitSpan(unit))
	}
	return spans
}

// SteadyZones returns time zones whose rules have not changed for years. So this process and a server agree on the
// rules. Some zones change their clocks by half an hour, or one minute after midnight.
func SteadyZones() []string {
	return []string{
		"UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "America/St_Johns", "Asia/Kolkata",
	}
}

// Clock draws the clock of the next request: a time when the row changes, a microsecond before or after it, or any step
// forward or back.
func (d Dice) Clock(p model.Rules, s model.State, clock int64, last model.Decision) int64 {
	const highest = 1 << 60
	start, window := s.WindowStart, Reach(p)
	events := []int64{
		clock, clock + 1, start, start + window/2, start + window, start + 2*window, s.ExpiresAt,
		clock + last.ResetAfter, start - window, start - 2*window, clock - 1,
	}
	if last.RetryAfter != model.Never {
		events = append(events, clock+last.RetryAfter)
	}
	switch d(8) {
	case 0, 1, 2:
		clock = events[d(int64(len(events)))] + d(3) - 1
	case 3, 4:
		clock += d.Magnitude(0, 3*window)
	case 5:
		clock -= d.Magnitude(0, 3*window)
	case 6:
		clock += d.Magnitude(0, highest)
	case 7:
		clock -= d.Magnitude(0, highest)
	}
	return min(max(clock, 0), highest)
}

// Forwards draws the next time of a clock that never steps back.
func (d Dice) Forwards(p model.Rules, s model.State, clock int64, last model.Decision) int64 {
	return max(clock, min(d.Clock(p, s, clock, last), clock+8*model.MaxSpan))
}

// Cost draws the cost of the next request.
func (d Dice) Cost(limit, remaining int64) int64 {
	switch costs := []int64{0, 1, limit, limit + 1, remaining, remaining + 1}; d(3) {
	case 0:
		return costs[d(int64(len(costs)))]
	case 1:
		return min(1+d(3), limit)
	}
	return d.Magnitude(0, limit)
}

// Refund draws a refund. It gives back a take or a part of it, perhaps a second time, or a take that never happened.
func (d Dice) Refund(takes []model.Take, p model.Rules, clock int64) model.Take {
	if len(takes) == 0 || d(8) == 0 {
		k := model.Take{
			Units: d.Magnitude(1, math.MaxInt64),
			Since: clock - d.Magnitude(0, clock),
			In:    clock - d.Magnitude(0, clock),
			At:    d.Magnitude(0, math.MaxInt64),
		}
		k.Spent = d.Magnitude(0, k.Units)
		return k
	}
	k := takes[d(int64(len(takes)))]
	if d(2) == 0 {
		from := d.Magnitude(0, k.Units-1)
		k = k.Portion(p, from, d.Magnitude(from+1, k.Units))
	}
	if d(8) == 0 {
		*[]*int64{&k.Units, &k.Since, &k.In, &k.At}[d(4)] += 1 + d(3)
	}
	return k
}
