package model_test

import (
	"math/big"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

type refundFunc func(p model.Rules, s model.State, clock int64, k model.Take) model.State

// askModel returns a function that asks the model. In the takes that this function returns, GiveBack calls refund.
func askModel(refund refundFunc) func(p model.Rules, clock, n int64) (*modeltest.Taken, error) {
	var s model.State
	return func(p model.Rules, clock, n int64) (*modeltest.Taken, error) {
		next, d := p.Decide(s, clock, n)
		s = next
		if d.Granted == 0 {
			return nil, nil
		}
		left := n
		return &modeltest.Taken{Units: n, In: d.Taken.In, GiveBack: func(clock, n int64) error {
			k := d.Taken.Portion(p, left-n, left)
			left -= n
			s = refund(p, s, clock, k)
			return nil
		}}, nil
	}
}

func rightRefund(p model.Rules, s model.State, clock int64, k model.Take) model.State {
	next, _ := p.Refund(s, clock, k)
	return next
}

// For any sequence of refunds, the units admitted and not given back stay within the policy's limit.
func TestRefundsMintNothing(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 400 * testkit.Rounds(t, "RATELIMIT_TEST_ROUNDS", 1) {
		for kind := range int64(5) {
			takes, _, err := d.History(d.DrawFor(kind), 60, false, askModel(rightRefund))
			require.NoError(t, err)
			require.NoError(t, modeltest.Mints(takes))
		}
	}
}

// If the clock steps back, the model admits at most as much as a clock that only goes forward would allow.
func TestRefundsMintNothingWhenTheClockStepsBack(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 1000 {
		for kind := range int64(5) {
			p := d.DrawFor(kind)()
			takes, forwards, err := d.History(func() model.Rules { return p }, 60, true, askModel(rightRefund))
			require.NoError(t, err)
			kept := int64(0)
			for _, took := range takes {
				kept += took.Kept
			}
			gives := new(big.Int).Quo(forwards, big.NewInt(modeltest.Reach(p)))
			gives.Mul(gives, big.NewInt(p.Numbers().Limit))
			// almost all windows last nine tenths of SpanMicros or more: the first window and an hour with a clock
			// change may be shorter
			if calendar, ok := p.(model.CalendarWindow); ok {
				gives.Quo(forwards, big.NewInt(calendar.SpanMicros()/10*9))
				gives.Add(gives, big.NewInt(2)).Mul(gives, big.NewInt(calendar.Limit))
			}
			if bucket, ok := p.(model.TokenBucket); ok {
				gives.Mul(forwards, big.NewInt(bucket.Refill))
				gives.Quo(gives, big.NewInt(model.Micros(bucket.Every)))
			}
			gives.Add(gives, big.NewInt(p.Numbers().Limit))
			require.LessOrEqual(t, big.NewInt(kept).Cmp(gives), 0, "%T%+v: %d kept", p, p, kept)
		}
	}
}

// A refund with a bug lets too many units through, and Mints notices it.
func TestBrokenRefundsMint(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kinds  []int64
		refund refundFunc
	}{
		"of whatever the row counts now": {[]int64{0, 1, 2, 3, 4}, func(p model.Rules, s model.State, clock int64, k model.Take) model.State {
			row := rollForward(p, s, clock)
			k.Since, k.In = row.Since, row.WindowStart
			return rightRefund(p, s, clock, k)
		}},
		"twice": {[]int64{0, 1, 2, 3, 4}, func(p model.Rules, s model.State, clock int64, k model.Take) model.State {
			return rightRefund(p, rightRefund(p, s, clock, k), clock, k)
		}},
		"that do not move later takes forward": {[]int64{3}, func(p model.Rules, s model.State, clock int64, k model.Take) model.State {
			next := rightRefund(p, s, clock, k)
			next.Returned = 0
			return next
		}},
		"of tokens that have flowed in since": {[]int64{3}, func(p model.Rules, s model.State, clock int64, k model.Take) model.State {
			k.In = max(rollForward(p, s, clock).WindowStart, k.In)
			return rightRefund(p, s, clock, k)
		}},
	} {
		for _, kind := range c.kinds {
			d := modeltest.RandomDice(t)
			caught := false
			for range 3000 {
				takes, _, err := d.History(d.DrawFor(kind), 60, false, askModel(c.refund))
				require.NoError(t, err)
				if caught = modeltest.Mints(takes) != nil; caught {
					break
				}
			}
			require.True(t, caught, "refunds %s, of kind %d", name, kind)
		}
	}
}
