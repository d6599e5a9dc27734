package model_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

// lives is a test's own list of the holds that are not over. The first write to the key at or after a hold's end ends
// the hold, even if the clock steps back afterwards.
type lives map[int64]*slowHold

func (l lives) held(clock int64) (held int64) {
	for _, h := range l {
		if h.settled == nil && clock < h.end {
			held += h.units
		}
	}
	return held
}

// wrote removes the holds that are over after a write at this time.
func (l lives) wrote(clock int64) {
	for id, h := range l {
		if h.settled != nil || h.end <= clock {
			delete(l, id)
		} else {
			h.end = min(h.end, clock+model.Micros(model.MaxHold))
		}
	}
}

// checkHeld decides one request for a key with holds. It returns an error if the decision breaks the specification. The
// argument held is the number of held units in the test's own list.
func checkHeld(p model.Rules, k model.Key, clock, n, held int64) (model.Key, model.Decision, error) {
	limit := p.Numbers().Limit
	row := peek(p, k.State, clock).Remaining
	next, d := k.Decide(p, clock, n)
	d = bare(d)
	fail := func(format string, args ...any) (model.Key, model.Decision, error) {
		return next, d, fmt.Errorf("%T%+v, %d at %d from %+v: decided %+v, and then %+v: %s",
			p, p, n, clock, k, d, next, fmt.Sprintf(format, args...))
	}
	fits := func(later, n int64) bool {
		_, d := next.Decide(p, clock+later, n)
		return d.Granted == 1
	}
	switch {
	case (d.Granted == 1) != (0 < n && n <= min(row-held, limit)):
		return fail("%d remain in the row, and %d are held", row, held)
	case d.Remaining != max(row-held-d.Granted*n, 0):
		return fail("%d remain in the row, and %d are held", row, held)
	case d.Granted == 1 && d.RetryAfter != 0:
		return fail("it is granted, and has a RetryAfter")
	}
	_, moved := p.Roll(k.State, clock)
	ends := []int64{0}
	for _, h := range k.Holds {
		if h.Status == model.Live && h.End > clock {
			ends = append(ends, h.End-clock)
			moved = moved || h.End-clock > model.Micros(model.MaxHold)
		}
	}
	if moved && (n == 0 || n > limit) {
		return next, d, nil // a Peek cannot pull the row back to the clock
	}
	least := max(n, 1)
	switch {
	case d.Granted == 1, n == 0 && d.Remaining > 0:
	case n > limit:
		if d.RetryAfter != model.Never {
			return fail("it can never fit")
		}
	case d.RetryAfter <= 0 || d.RetryAfter == model.Never:
		return fail("RetryAfter is out of bounds")
	case !fits(d.RetryAfter, least):
		return fail("it is denied after RetryAfter")
	default:
		early := []int64{1, d.RetryAfter / 2, d.RetryAfter - 1, next.State.ExpiresAt - clock - 1, next.State.ExpiresAt - clock}
		for _, end := range ends {
			early = append(early, end-1, end, end+1)
		}
		for _, early := range early {
			if 0 <= early && early < d.RetryAfter && fits(early, least) {
				return fail("it is allowed %d µs after the decision, before RetryAfter", early)
			}
		}
	}
	isNew := func(later int64) bool {
		return next.Held(clock+later) == 0 && equalsNoRow(p, next.State, clock+later)
	}
	if !isNew(d.ResetAfter) || d.ResetAfter > 0 && isNew(d.ResetAfter-1) {
		return fail("ResetAfter is not when the key becomes as good as new")
	}
	return next, d, nil
}

// Holds are mixed with everything else that changes a key. At each admission, the used units, the held units and the
// request are together within the limit and the granted credit, whatever the clock does. Each hold stops counting once.
func TestHoldsWhateverElseHappens(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	counts := map[string]int{}
	for range 400 {
		kind := d(5)
		draw := func() model.Rules {
			for {
				p, _ := slowKind(d, kind)
				if modeltest.InRange(p) {
					return p
				}
			}
		}
		var k model.Key
		var last model.Decision
		var takes []model.Take
		p, own := draw(), lives{}
		clock := d.Magnitude(1<<40, 1<<52)
		for id := range int64(40) {
			if d(16) == 0 {
				p = draw()
				counts["changes of policy"]++
			}
			clock = max(d.Clock(p, k.State, clock, last), 1)
			if len(k.Holds) > 0 && d(3) == 0 {
				clock = max(k.Holds[d(int64(len(k.Holds)))].End+d(3)-1, 1)
			}
			limit := p.Numbers().Limit
			var some int64 // the id of a hold
			for some = range own {
				break
			}
			switch action := d(12); {
			case action < 4:
				n := d.Cost(limit, last.Remaining)
				asked, got, err := checkHeld(p, k, clock, n, own.held(clock))
				require.NoError(t, err)
				if got.Granted == 0 {
					if n > 0 && own.held(clock) > 0 {
						counts["denials beside holds"]++
					}
					if changed(k, asked) { // the key was pulled back to the clock
						own.wrote(clock)
					}
					k = asked
					break
				}
				ttl := d.Magnitude(1, model.Micros(model.MaxHold))
				held, got := k.Hold(p, clock, id, n, ttl)
				require.EqualValues(t, 1, got.Granted)
				require.Equal(t, peek(p, k.State, clock).Remaining, peek(p, held.State, clock).Remaining, "a hold takes nothing")
				own.wrote(clock)
				own[id] = &slowHold{units: n, end: clock + ttl}
				k = held
				counts["holds"]++
			case action < 6 && own[some] != nil:
				h := own[some]
				used := []int64{0, h.units, d.Magnitude(0, 2*h.units)}[d(3)]
				counted, scale := usage(p, k.State, clock)
				credit := modeltest.CreditOf(p, k.State, clock)
				next, s, err := k.Settle(p, clock, some, used)
				if err != nil {
					require.Equal(t, k, next)
					counts["refused settlements"]++
					break
				}
				now, _ := usage(p, next.State, clock)
				spent := credit - modeltest.CreditOf(p, next.State, clock)
				require.Equal(t, clock >= h.end, s.Late)
				require.Zero(t, now.Sub(now, counted).Cmp(rat(used-spent).Mul(rat(used-spent), rat(scale)).Num()),
					"%d are used, and %v counted", used, now)
				own.wrote(clock)
				delete(own, some)
				again, repeated, err := next.Settle(p, clock, some, used+1)
				require.NoError(t, err)
				require.Equal(t, s, repeated)
				require.Equal(t, next, again)
				k = next
				counts["settlements"]++
			case action == 6 && own[some] != nil:
				ttl := d.Magnitude(1, model.Micros(model.MaxHold))
				next, err := k.Extend(p, clock, some, ttl)
				require.Equal(t, clock < own[some].end, err == nil)
				if err == nil {
					h := own[some]
					own.wrote(clock)
					h.end = max(h.end, clock+ttl)
					counts["extensions"]++
				}
				k = next
			case action == 7:
				k, _ = k.Grant(p, clock, d.Magnitude(1, limit))
				own.wrote(clock)
				counts["grants"]++
			case action == 8:
				next, got, _ := k.Charge(p, clock, d.Magnitude(1, limit))
				if got.Granted == 1 {
					own.wrote(clock)
					counts["charges"]++
				}
				k = next
			case action == 9 && len(takes) > 0:
				next, _ := k.Refund(p, clock, d.Refund(takes, p, clock))
				if next.State != k.State {
					own.wrote(clock)
					counts["refunds"]++
				}
				k = next
			case action == 10 && d(8) == 0:
				k = k.Reset()
				clear(own)
				counts["resets"]++
			}
			n := d.Cost(limit, last.Remaining)
			asked, got, err := checkHeld(p, k, clock, n, own.held(clock))
			require.NoError(t, err)
			if got.Granted == 1 {
				_, full := k.Decide(p, clock, n)
				takes = append(takes, full.Taken)
				own.wrote(clock)
			} else if changed(k, asked) {
				own.wrote(clock)
			}
			k, last = asked, got
		}
	}
	t.Logf("seen: %v", counts)
	for _, what := range []string{
		"changes of policy", "denials beside holds", "holds", "settlements", "refused settlements", "extensions", "grants", "charges",
		"refunds", "resets",
	} {
		require.Greater(t, counts[what], 10, "too few %s", what)
	}
}

// changed tells whether a key was written to.
func changed(k, next model.Key) bool {
	return next.State != k.State || !slices.Equal(next.Holds, k.Holds)
}

// The test tries all sequences of a few operations, under small policies.
func TestHoldsInEveryOrder(t *testing.T) {
	t.Parallel()
	depth := 5
	for _, p := range []model.Rules{
		model.FixedWindow{3, 4 * time.Microsecond}, model.SlidingWindow{3, 4 * time.Microsecond},
		model.SlidingLog{3, 4 * time.Microsecond}, model.TokenBucket{3, 2, 3 * time.Microsecond},
	} {
		var play func(k model.Key, own lives, clock int64, left int)
		play = func(k model.Key, own lives, clock int64, left int) {
			for n := range int64(5) {
				_, _, err := checkHeld(p, k, clock, n, own.held(clock))
				require.NoError(t, err)
			}
			if left == 0 {
				return
			}
			step := func(next model.Key, wrote bool, change func(own lives), clock int64) {
				after := lives{}
				for id, h := range own {
					one := *h
					after[id] = &one
				}
				if wrote {
					after.wrote(clock)
				}
				change(after)
				play(next, after, clock, left-1)
			}
			same := func(lives) {}
			for _, later := range []int64{1, 3, -2} {
				step(k, false, same, clock+later)
			}
			for n, ttl := range map[int64]int64{1: 5, 2: 2} {
				id := int64(left)
				if next, d := k.Hold(p, clock, id, n, ttl); d.Granted == 1 {
					step(next, true, func(own lives) { own[id] = &slowHold{units: n, end: clock + ttl} }, clock)
				}
			}
			if next, d := k.Decide(p, clock, 2); d.Granted == 1 {
				step(next, true, same, clock)
			}
			for id := range own {
				for _, used := range []int64{0, 2} {
					next, s, err := k.Settle(p, clock, id, used)
					require.NoError(t, err)
					require.Equal(t, clock >= own[id].end, s.Late)
					step(next, true, func(own lives) { delete(own, id) }, clock)
				}
				if next, err := k.Extend(p, clock, id, 3); err == nil {
					step(next, true, func(own lives) { own[id].end = max(own[id].end, clock+3) }, clock)
				}
			}
		}
		play(model.Key{}, lives{}, c0, depth)
	}
}

// A negative control of both tests: a step back of the clock revives a hold.
func TestRevivedHoldIsSeen(t *testing.T) {
	t.Parallel()
	p := model.FixedWindow{3, time.Minute}
	k, _ := model.Key{}.Hold(p, c0, 1, 2, second)
	own := lives{1: &slowHold{units: 2, end: c1}}
	k, d := k.Decide(p, c1, 3) // this take gets the room of the hold that has ended
	require.EqualValues(t, 1, d.Granted)
	own.wrote(c1)
	_, _, err := checkHeld(p, k, c0, 1, own.held(c0))
	require.NoError(t, err)
	k.Holds[0].Status = model.Live
	k.State = model.State{}
	_, _, err = checkHeld(p, k, c0, 2, own.held(c0))
	require.Error(t, err)
}

func TestHoldsBesideGrantedCredit(t *testing.T) {
	t.Parallel()
	p := model.FixedWindow{10, time.Minute}
	k, _ := model.Key{}.Grant(p, c0, 5)
	k, _ = k.Decide(p, c1, 3)         // the window and the credit last until c1 + minute
	k, d := k.Hold(p, c2, 1, 8, hour) // 4 units are left, and all of them are credit
	want := granted(4, hour)
	want.Held = 8
	require.Equal(t, want, bare(d))
	// With credit, 5 would fit into the next window, but the credit ends before it. So 5 fit when the hold has ended.
	_, d, err := checkHeld(p, k, c3, 5, 8)
	require.NoError(t, err)
	require.Equal(t, hour-second, d.RetryAfter)
	_, d, err = checkHeld(p, k, c3, 2, 8)
	require.NoError(t, err)
	require.EqualValues(t, 1, d.Granted)
}
