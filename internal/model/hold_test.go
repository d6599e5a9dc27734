package model_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// The tests of holds share these helpers:
//
//   - heldKey, a key with the operations that a test compares. The negative controls replace one of these operations.
//   - slowKey, the definition of holds on top of the algorithms' own definitions in rationals.
//   - checkHeld, which checks a decision beside holds at any clock.

// heldKey is a key under one policy.
type heldKey struct {
	model.Key
	policy model.Rules
	holdOperations
}

// holdOperations are the operations that a negative control can replace.
type holdOperations struct {
	decide func(k model.Key, p model.Rules, clock, n int64) (model.Key, model.Decision)
	settle func(k model.Key, p model.Rules, clock, id, used int64) (model.Key, model.Settlement, error)
	extend func(k model.Key, p model.Rules, clock, id, ttl int64) (model.Key, error)
}

func rightOperations() holdOperations {
	return holdOperations{model.Key.Decide, model.Key.Settle, model.Key.Extend}
}

// slowHold is a hold as the design defines it.
type slowHold struct {
	units, end int64
	settled    *model.Settlement
}

// slowKey has what a key counts, and the key's holds. Its clock never steps back.
type slowKey struct {
	slowModel
	limit int64
	holds []*slowHold
}

func (m *slowKey) held(t int64) (held int64) {
	for _, h := range m.holds {
		if h.settled == nil && t < h.end {
			held += h.units
		}
	}
	return held
}

// fits tells whether n would be allowed: the limit covers what is used, what is held, and n.
func (m *slowKey) fits(t, n int64) bool {
	held := m.held(t)
	return n <= m.limit-held && m.slowModel.fits(t, n+held) // the sum of two limits could overflow
}

// decide decides by search. The argument horizon is the longest time that anything lasts.
func (m *slowKey) decide(horizon, t, n int64) (d model.Decision) {
	if 0 < n && m.fits(t, n) {
		m.take(t, n)
		d.Granted = 1
	}
	d.Remaining = search(0, m.limit, func(n int64) bool { return !m.fits(t, n+1) })
	d.Held = m.held(t)
	switch {
	case d.Granted == 1, n == 0 && d.Remaining > 0:
	case n > m.limit:
		d.RetryAfter = model.Never
	default:
		d.RetryAfter = search(1, horizon, func(wait int64) bool { return m.fits(t+wait, max(n, 1)) })
	}
	d.ResetAfter = search(0, horizon, func(wait int64) bool {
		return m.held(t+wait) == 0 && m.fits(t+wait, m.limit)
	})
	return d
}

// settle is the definition of a settlement.
func (m *slowKey) settle(t int64, h *slowHold, used int64) (model.Settlement, error) {
	forgotten := h.end + model.Micros(24*time.Hour)
	if h.settled != nil {
		forgotten = h.settled.At + model.Micros(time.Hour)
	}
	switch {
	case t >= forgotten:
		return model.Settlement{}, model.ErrHoldUnknown
	case h.settled == nil:
		h.settled = &model.Settlement{Used: used, Late: t >= h.end, At: t}
		if used > 0 { // otherwise, no window starts
			m.take(t, used)
		}
	}
	return *h.settled, nil
}

// slowKind draws a policy of one kind, and its definition.
func slowKind(d modeltest.Dice, kind int64) (model.Rules, slowModel) {
	switch kind {
	case 0:
		limit, window := d.Window()
		return model.FixedWindow{limit, window}, &slowFixed{limit: limit, window: model.Micros(window)}
	case 1:
		limit, window := d.Window()
		return model.SlidingWindow{limit, window}, &slowSliding{limit: limit, window: model.Micros(window)}
	case 2:
		p := d.Log()
		return p, &slowLog{limit: p.Limit, window: model.Micros(p.Window)}
	case 3:
		p := d.Bucket()
		return p, &slowBucket{TokenBucket: p}
	}
	p := d.Calendar()
	if p.Zone == algorithm.Epoch {
		return p, &slowCalendarModel{limit: p.Limit, unit: p.Span}
	}
	p.Zone = "UTC"
	return p, &slowCalendarModel{limit: p.Limit, unit: p.Span, zone: time.UTC}
}

// seenHolds counts the cases of a history.
type seenHolds struct{ held, denied, low, exact, high, again, late, forgotten, extended, ended, charged, tooMuch, released int }

// varied tells whether everything has occurred.
func (s seenHolds) varied() bool {
	return min(s.held, s.denied, s.low, s.exact, s.high, s.again, s.late, s.forgotten, s.extended, s.ended, s.charged,
		s.tooMuch, s.released) > 0
}

// holdHistory plays a random history of one key, and compares each answer with the definition.
func holdHistory(d modeltest.Dice, kind int64, operations holdOperations, steps int, count *seenHolds) error {
	p, definition := slowKind(d, kind)
	limit := p.Numbers().Limit
	k := heldKey{policy: p, holdOperations: operations}
	slow := &slowKey{slowModel: definition, limit: limit}
	var last model.Decision
	clock := d.Magnitude(1<<51, 1<<52)
	horizon := 20*longestWait(p) + model.Micros(model.MaxHold)

	for range steps {
		events := []int64{clock}
		for _, h := range slow.holds {
			events = append(events, h.end, h.end+model.Micros(model.HoldsKept))
			if h.settled != nil {
				events = append(events, h.settled.At+model.Micros(model.SettledKept))
			}
		}
		if at := events[d(int64(len(events)))] + d(3) - 1; at > clock && d(2) == 0 {
			clock = at
		} else if d(3) > 0 {
			clock = d.Forwards(p, k.State, clock, last)
		}
		ttl := min(d.Magnitude(1, 4*modeltest.Reach(p)), model.Micros(model.MaxHold))
		id, h := int64(0), (*slowHold)(nil)
		if len(slow.holds) > 0 {
			id = int64(len(slow.holds)) - 1 - d(min(int64(len(slow.holds)), 4))
			h = slow.holds[id]
		}
		_, _, fits := k.Charge(p, clock, 0)
		fail := func(what string, got, want any) error {
			return fmt.Errorf("%T%+v, %s at %d: %+v, not %+v; the key is %+v", p, p, what, clock, got, want, k.Key)
		}
		switch action := d(10); {
		case action < 3: // a hold
			n := d.Cost(limit, last.Remaining)
			var got model.Decision
			want := slow.decide(horizon, clock, 0)
			if n > 0 && slow.fits(clock, n) {
				slow.holds = append(slow.holds, &slowHold{units: n, end: clock + ttl})
				want = slow.decide(horizon, clock, 0)
				want.Granted, want.RetryAfter = 1, 0
				count.held++
			} else if n > 0 {
				want = slow.decide(horizon, clock, n)
				count.denied++
			}
			if denied, d := k.decide(k.Key, p, clock, n); d.Granted == 0 {
				k.Key, got = denied, d
			} else {
				k.Key, got = k.Hold(p, clock, int64(len(slow.holds))-1, n, ttl)
			}
			if got = bare(got); got != want {
				return fail(fmt.Sprintf("a hold of %d for %d", n, ttl), got, want)
			}
			last = got
		case action < 6 && h != nil: // a settlement
			used := []int64{0, h.units, d(h.units + 1), h.units + d.Magnitude(1, limit), fits + 1}[d(5)]
			first := h.settled == nil && clock < h.end+model.Micros(model.HoldsKept)
			next, got, err := k.settle(k.Key, p, clock, id, used)
			if first && used > fits {
				if !errors.Is(err, model.ErrOwesTooMuch) {
					return fail("a settlement above what fits", err, model.ErrOwesTooMuch)
				}
				count.tooMuch++
				continue
			}
			switch {
			case !first && h.settled == nil:
				count.forgotten++
			case !first:
				count.again++
			case clock >= h.end:
				count.late++
			case used < h.units:
				count.low++
			case used == h.units:
				count.exact++
			default:
				count.high++
			}
			want, wantErr := slow.settle(clock, h, used)
			if got != want || !errors.Is(err, wantErr) {
				return fail(fmt.Sprintf("a settlement of %d", used), got, want)
			}
			k.Key = next
		case action < 8 && h != nil:
			next, err := k.extend(k.Key, p, clock, id, ttl)
			lives := h.settled == nil && clock < h.end
			if lives != (err == nil) {
				return fail("an extension", err, lives)
			}
			if lives {
				h.end = max(h.end, clock+ttl)
				count.extended++
			} else {
				count.ended++
			}
			k.Key = next
		case action < 9:
			if n := d.Magnitude(1, max(fits, 1)); n <= fits {
				slow.take(clock, n)
				k.Key, _, _ = k.Charge(p, clock, n)
				count.charged++
			}
		}
		for _, n := range []int64{0, d.Cost(limit, last.Remaining)} { // a Peek and a take
			held := slow.held(clock)
			want := slow.decide(horizon, clock, n)
			next, got := k.decide(k.Key, p, clock, n)
			if got = bare(got); got != want {
				return fail(fmt.Sprintf("a request of %d", n), got, want)
			}
			if want.RetryAfter > 0 && held > 0 && want.RetryAfter != model.Never && slow.held(clock+want.RetryAfter) < held {
				count.released++
			}
			k.Key, last = next, got
		}
	}
	return nil
}

// bare returns a decision without its state.
func bare(d model.Decision) model.Decision {
	d.State, d.Taken = model.State{}, model.Take{}
	return d
}

func TestHoldsEqualTheirDefinition(t *testing.T) {
	t.Parallel()
	for kind := range int64(5) {
		t.Run(fmt.Sprint(kind), func(t *testing.T) {
			t.Parallel()
			d := modeltest.RandomDice(t)
			var count seenHolds
			for history := 0; history < 20 || !count.varied(); history++ {
				require.Less(t, history, 1000, "%+v", count)
				require.NoError(t, holdHistory(d, kind, rightOperations(), 30, &count))
			}
			t.Logf("seen: %+v", count)
		})
	}
}

// Negative controls: each mistake shows in histories of every kind.
func TestMistakesInHoldsAreSeen(t *testing.T) {
	t.Parallel()
	right := rightOperations()
	for name, breakIt := range map[string]func(*holdOperations){
		"a settlement that counts twice": func(o *holdOperations) {
			o.settle = func(k model.Key, p model.Rules, clock, id, used int64) (model.Key, model.Settlement, error) {
				next, s, err := right.settle(k, p, clock, id, used)
				if err == nil && s.At != clock { // a repetition
					next, _, _ = next.Charge(p, clock, s.Used)
				}
				return next, s, err
			}
		},
		"a late settlement that is lost": func(o *holdOperations) {
			o.settle = func(k model.Key, p model.Rules, clock, id, used int64) (model.Key, model.Settlement, error) {
				next, s, err := right.settle(k, p, clock, id, used)
				if s.Late {
					next.State = k.State
				}
				return next, s, err
			}
		},
		"a hold that outlives its end": func(o *holdOperations) {
			o.decide = func(k model.Key, p model.Rules, clock, n int64) (model.Key, model.Decision) {
				longer := model.Key{State: k.State, Holds: slices.Clone(k.Holds)}
				for i := range longer.Holds {
					longer.Holds[i].End++
				}
				next, d := right.decide(longer, p, clock, n)
				return model.Key{State: next.State, Holds: k.Holds}, d
			}
		},
		"a hold that is revived": func(o *holdOperations) {
			o.extend = func(k model.Key, p model.Rules, clock, id, ttl int64) (model.Key, error) {
				next, err := right.extend(k, p, clock, id, ttl)
				if err == nil {
					return next, nil
				}
				next.Holds = slices.Clone(next.Holds)
				for i, h := range next.Holds {
					if h.ID == id && h.Status == model.Ended {
						next.Holds[i].Status, next.Holds[i].End = model.Live, clock+ttl
					}
				}
				return next, err
			}
		},
		"a sum that keeps what a low settlement frees": func(o *holdOperations) {
			o.settle = func(k model.Key, p model.Rules, clock, id, used int64) (model.Key, model.Settlement, error) {
				next, s, err := right.settle(k, p, clock, id, used)
				if i := slices.IndexFunc(k.Holds, func(h model.Hold) bool { return h.ID == id }); err == nil && s.At == clock && !s.Late && used < k.Holds[i].Units {
					next.Holds = append(slices.Clone(next.Holds), model.Hold{ID: -1, Units: k.Holds[i].Units - used, End: k.Holds[i].End})
				}
				return next, s, err
			}
		},
		"a sum that a late settlement lowers again": func(o *holdOperations) {
			o.settle = func(k model.Key, p model.Rules, clock, id, used int64) (model.Key, model.Settlement, error) {
				next, s, err := right.settle(k, p, clock, id, used)
				if err == nil && s.At == clock && s.Late {
					next.Holds = append(slices.Clone(next.Holds), model.Hold{ID: -1, Units: -1, End: clock + second})
				}
				return next, s, err
			}
		},
		"a retry time that knows no holds": func(o *holdOperations) {
			o.decide = func(k model.Key, p model.Rules, clock, n int64) (model.Key, model.Decision) {
				next, d := right.decide(k, p, clock, n)
				if _, alone := p.Decide(k.State, clock, n); d.RetryAfter != 0 && alone.RetryAfter > 0 {
					d.RetryAfter = alone.RetryAfter
				}
				return next, d
			}
		},
		"a retry time that waits for all holds": func(o *holdOperations) {
			o.decide = func(k model.Key, p model.Rules, clock, n int64) (model.Key, model.Decision) {
				next, d := right.decide(k, p, clock, n)
				if d.RetryAfter > 0 && d.RetryAfter != model.Never {
					for _, h := range next.Holds {
						if h.Status == model.Live {
							d.RetryAfter = max(d.RetryAfter, h.End-clock)
						}
					}
				}
				return next, d
			}
		},
		"a hold that does not weigh": func(o *holdOperations) {
			o.decide = func(k model.Key, p model.Rules, clock, n int64) (model.Key, model.Decision) {
				s, d := p.Decide(k.State, clock, n)
				return model.Key{State: s, Holds: k.Holds}, d
			}
		},
	} {
		for kind := range int64(5) {
			t.Run(fmt.Sprintf("%s, %d", name, kind), func(t *testing.T) {
				t.Parallel()
				operations := right
				breakIt(&operations)
				d := modeltest.RandomDice(t)
				var err error
				for i := 0; err == nil && i < 1000; i++ {
					err = holdHistory(d, kind, operations, 30, &seenHolds{})
				}
				require.Error(t, err)
			})
		}
	}
}

// A statement decides several takes of a key, and tells only the last decision. The client computes ResetAfter of the
// earlier takes. Beside holds it is never too small, and exact if the last hold ends after the row is as good as new.
func TestResetAfterOfMergedTakesBesideHolds(t *testing.T) {
	t.Parallel()
	dice := modeltest.RandomDice(t)
	for name, draw := range map[string]func() model.Rules{
		"fixed":    func() model.Rules { limit, window := dice.Window(); return model.FixedWindow{limit, window} },
		"sliding":  func() model.Rules { limit, window := dice.Window(); return model.SlidingWindow{limit, window} },
		"log":      func() model.Rules { return dice.Log() },
		"bucket":   func() model.Rules { return dice.Bucket() },
		"calendar": func() model.Rules { return dice.Calendar() },
	} {
		longer, exact := 0, 0
		for range 3000 {
			p, clock := draw(), int64(1<<51)
			limit := p.Numbers().Limit
			var k model.Key
			if dice(3) == 0 {
				k, _ = k.Grant(p, clock, dice.Magnitude(1, limit))
			}
			k, _ = k.Decide(p, clock, dice.Magnitude(1, limit))
			ttl := dice.Magnitude(1, min(8*modeltest.Reach(p), model.Micros(model.MaxHold)))
			k, held := k.Hold(p, clock, 1, dice.Magnitude(1, limit), ttl)
			clock += dice.Magnitude(0, ttl)
			var each []model.Decision
			n := dice.Magnitude(1, max(limit/8, 1))
			for range 5 {
				next, d := k.Decide(p, clock, n)
				if d.Granted == 0 {
					break
				}
				d.DecidedAt = time.UnixMicro(clock)
				k, each = next, append(each, d)
			}
			if len(each) < 2 {
				continue
			}
			last := each[len(each)-1]
			for _, d := range each {
				last.Taken.Spent = max(last.Taken.Spent, d.Taken.Spent) // as the statement tells it
			}
			for i, d := range each {
				got := p.ResetAfter(last, n*int64(len(each)-1-i))
				require.GreaterOrEqual(t, got, d.ResetAfter, "%+v: take %d of %+v", p, i, each)
				require.LessOrEqual(t, got, max(d.ResetAfter, last.ResetAfter))
				if _, row := p.Decide(last.State, clock, 0); held.Granted == 1 && last.ResetAfter > row.ResetAfter {
					longer++
					require.Equal(t, d.ResetAfter, got, "%+v: take %d of %+v", p, i, each)
				} else if got == d.ResetAfter {
					exact++
				}
			}
		}
		require.Greater(t, longer, 50, name)
		require.Greater(t, exact, 50, name)
	}
}
