package modeltest

import (
	"fmt"
	"math/big"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
)

// Taken is a take that was allowed in a random history.
type Taken struct {
	Units, In int64
	GiveBack  func(clock, n int64) error
	Kept      int64 // the units that were never given back

	policy model.Rules
	clock  int64
}

// History plays a random history of one key: takes under the policies that draw returns, and refunds. Each unit is
// refunded at most once. The function ask returns nil for a denial. The result forwards is the total time by which the
// clock went forward.
func (d Dice) History(
	draw func() model.Rules, steps int, back bool, ask func(p model.Rules, clock, n int64) (*Taken, error),
) (takes []*Taken, forwards *big.Int, err error) {
	p, clock, forwards := draw(), d.Magnitude(1<<50, 1<<51), new(big.Int)
	for range steps {
		step := d.Magnitude(1, 2*Reach(p))
		if d(4) == 0 {
			step = 1
		}
		if back && d(8) == 0 {
			clock -= step
		} else {
			clock += step
			forwards.Add(forwards, big.NewInt(step))
		}
		if d(10) == 0 {
			p = draw()
		}
		for range 1 + d(4) {
			if len(takes) == 0 || d(2) == 0 {
				limit := p.Numbers().Limit
				took, err := ask(p, clock, min(d.Magnitude(1, limit), 1+d(max(limit/2, 1))))
				if err != nil {
					return nil, nil, err
				}
				if took != nil {
					took.policy, took.clock, took.Kept = p, clock, took.Units
					takes = append(takes, took)
				}
			} else if took := takes[len(takes)-1-int(d(int64(min(len(takes), 12))))]; took.Kept > 0 {
				n := took.Kept
				if d(3) == 0 {
					n = 1 + d(n)
				}
				if err := took.GiveBack(clock, n); err != nil {
					return nil, nil, err
				}
				took.Kept -= n
			}
		}
	}
	return takes, forwards, nil
}

// Mints returns an error if too many units were kept in a history.
func Mints(takes []*Taken) error {
	var without model.State // a bucket that never saw the refunded units
	largest := int64(0)
	for i, took := range takes {
		if took.Kept == 0 {
			continue
		}
		limit, window := took.policy.Numbers().Limit, Reach(took.policy)
		// Kept units: in the window up to took.clock, in the row's window, and in the window before that.
		var within, same, before int64
		for _, other := range takes[:i+1] {
			if other.clock > took.clock-window {
				within += other.Kept
			}
			switch other.In {
			case took.In:
				same += other.Kept
			case took.In - window:
				before += other.Kept
			}
		}
		largest = max(largest, limit)
		ok := false
		switch p := took.policy.(type) {
		case model.FixedWindow: // a refund may have given back the take that opened the window
			ok = same <= limit && within <= 2*largest
		case model.SlidingWindow:
			sum := new(big.Int).Mul(big.NewInt(before), big.NewInt(window-(took.clock-took.In)))
			sum.Add(sum, new(big.Int).Mul(big.NewInt(same), big.NewInt(window)))
			ok = sum.Cmp(new(big.Int).Mul(big.NewInt(limit), big.NewInt(window))) <= 0 && within <= 2*largest-1
		case model.CalendarWindow:
			ok = same <= limit && ofTheCalendar(p, takes[:i+1]) <= limit
		case model.SlidingLog:
			ok = within <= limit
		case model.TokenBucket:
			var d model.Decision
			without, d = p.Decide(without, took.clock, took.Kept)
			ok = d.Granted == 1
		}
		if !ok {
			return fmt.Errorf("%T%+v: %d at %d are too many: %d in the row's window, %d in the one before, "+
				"%d within the window that ends here",
				took.policy, took.policy, took.Kept, took.clock, same, before, within)
		}
	}
	return nil
}

// ofTheCalendar returns the number of units kept in the calendar window of the last take.
func ofTheCalendar(p model.CalendarWindow, takes []*Taken) (kept int64) {
	end := p.End(takes[len(takes)-1].clock)
	for _, took := range takes {
		if p.End(took.clock) == end {
			kept += took.Kept
		}
	}
	return kept
}

// DrawFor returns a function that draws policies of one algorithm. The policies differ only in their limit. All buckets
// are equal, because a bucket under other numbers could let a request through that Mints does not expect.
func (d Dice) DrawFor(kind int64) func() model.Rules {
	window := 1_000_000 + d.Magnitude(0, 1<<40)
	capacity := 1 + d(20)
	refill := model.CeilDiv(capacity*window, model.MaxSpan) + d(20)
	unit, zone := Units()[d(5)], append(SteadyZones(), algorithm.Epoch)[d(int64(len(SteadyZones()))+1)]
	return func() model.Rules {
		limit, span := 1+d(20), model.Duration(window)
		return []model.Rules{
			model.FixedWindow{Limit: limit, Window: span}, model.SlidingWindow{Limit: limit, Window: span},
			model.SlidingLog{Limit: limit, Window: span},
			model.TokenBucket{Capacity: capacity, Refill: refill, Every: span},
			model.CalendarWindow{Limit: limit, Span: unit, Zone: zone},
		}[kind]
	}
}
