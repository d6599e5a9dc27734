package modeltest

import (
	"math/big"
	"slices"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// InRange tells whether a policy's numbers are within the exact range.
func InRange(p model.Rules) bool {
	n := p.Numbers()
	product := new(big.Int).Mul(big.NewInt(n.Limit), big.NewInt(model.Micros(n.Span)))
	within := func(factor int64) bool { // whether product ≤ MaxSpan × factor
		return product.Cmp(new(big.Int).Mul(big.NewInt(model.MaxSpan), big.NewInt(factor))) <= 0
	}
	switch {
	case n.Limit < 1, n.Span%time.Microsecond != 0, n.Span < time.Microsecond, n.Span > model.MaxSpan*time.Microsecond:
		return false
	case n.Algorithm == algorithm.CalendarWindow:
		return n.Limit <= model.MaxProduct && (n.Zone == algorithm.Epoch || slices.Contains(Units(), n.Span))
	case n.Algorithm == algorithm.SlidingLog && n.Limit > model.MaxLogLimit:
		return false
	case n.Refills() && (n.Refill < 1 || !within(n.Refill)):
		return false
	}
	return within(model.MaxProduct / model.MaxSpan)
}

// Reach returns how far a row's time may be ahead of the clock: a window, or the time to fill a bucket.
func Reach(p model.Rules) int64 {
	n := p.Numbers()
	if n.Refills() {
		return model.CeilDiv(n.Limit*model.Micros(n.Span), n.Refill)
	}
	return model.Micros(n.Span)
}

// CreditOf returns a row's granted credit at the time clock.
func CreditOf(p model.Rules, s model.State, clock int64) int64 {
	_, d := p.Decide(s, clock, 0)
	return d.State.Credit
}

// Told returns the state without the field that a client does not know.
func Told(s model.State) model.State {
	s.Returned = 0
	return s
}
