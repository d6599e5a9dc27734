package ratelimit

import (
	"fmt"
	"math/big"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// aTake is one that was allowed in a random history: what is kept was never given back.
type aTake struct {
	policy      ruled
	clock, in   int64
	units, kept int64
	giveBack    func(clock, n int64) error
}

// takesOf plays a random history for one key: takes, now and then under another limit, and refunds of what was
// taken, each unit at most once. take returns nil if it is denied.
func takesOf(
	d dice,
	draw func() ruled,
	steps int,
	back bool,
	ask func(p ruled, clock, n int64) (*aTake, error),
) (takes []*aTake, forwards *big.Int, err error) {
	p, clock, forwards := draw(), d.magnitude(1<<50, 1<<51), new(big.Int)
	for range steps {
		step := d.magnitude(1, 2*reach(p))
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
				took, err := ask(p, clock, min(d.magnitude(1, p.Numbers().Limit), 1+d(max(p.Numbers().Limit/2, 1))))
				if err != nil {
					return nil, nil, err
				}
				if took != nil {
					took.policy, took.clock, took.kept = p, clock, took.units
					takes = append(takes, took)
				}
			} else if took := takes[len(takes)-1-int(d(int64(min(len(takes), 12))))]; took.kept > 0 {
				n := took.kept
				if d(3) == 0 {
					n = 1 + d(n)
				}
				if err := took.giveBack(clock, n); err != nil {
					return nil, nil, err
				}
				took.kept -= n
			}
		}
	}
	return takes, forwards, nil
}

// mints tells what is wrong with what a history has kept.
func mints(takes []*aTake) error {
	var without model.State // of a bucket without all that was given back
	largest := int64(0)
	for i, took := range takes {
		if took.kept == 0 {
			continue
		}
		limit, window := took.policy.Numbers().Limit, reach(took.policy)
		var within, same, before int64 // kept in the window that ends here, in the same of the row's and in the one before
		for _, other := range takes[:i+1] {
			if other.clock > took.clock-window {
				within += other.kept
			}
			switch other.in {
			case took.in:
				same += other.kept
			case took.in - window:
				before += other.kept
			}
		}
		largest = max(largest, limit)
		ok := true
		switch p := took.policy.(type) {
		case FixedWindow: // the take that has opened a window may have been given back
			ok = same <= limit && within <= 2*largest
		case SlidingWindow:
			sum := new(big.Int).Mul(big.NewInt(before), big.NewInt(window-(took.clock-took.in)))
			sum.Add(sum, new(big.Int).Mul(big.NewInt(same), big.NewInt(window)))
			ok = sum.Cmp(new(big.Int).Mul(big.NewInt(limit), big.NewInt(window))) <= 0 && within <= 2*largest-1
		case CalendarWindow:
			ok = same <= limit && ofTheCalendar(p, takes[:i+1]) <= limit
		case SlidingLog:
			ok = within <= limit
		case TokenBucket:
			var d model.Decision
			without, d = p.Decide(without, took.clock, took.kept)
			ok = d.Granted == 1
		}
		if !ok {
			return fmt.Errorf(
				"%T%+v: %d at %d are too many: %d in the row's window, %d in the one before, %d within the window that ends here",
				took.policy,
				took.policy,
				took.kept,
				took.clock,
				same,
				before,
				within,
			)
		}
	}
	return nil
}

// ofTheCalendar is what is kept in the window of the calendar that the last take is in.
func ofTheCalendar(p CalendarWindow, takes []*aTake) (kept int64) {
	end := p.end(takes[len(takes)-1].clock)
	for _, took := range takes {
		if p.end(took.clock) == end {
			kept += took.kept
		}
	}
	return kept
}

// drawFor returns policies of one kind, which differ in nothing but their limit, and buckets in nothing: of a
// bucket it matters whose numbers it was last rolled forward by, so that a take can let others through that would
// not have been without it.
func (d dice) drawFor(kind int64) func() ruled {
	window := 1_000_000 + d.magnitude(0, 1<<40)
	capacity := 1 + d(20)
	refill := model.CeilDiv(capacity*window, model.MaxSpan) + d(20)
	unit, zone := calendarUnits()[d(5)], steadyZones()[d(int64(len(steadyZones())))]
	return func() ruled {
		limit := 1 + d(20)
		return []ruled{
			FixedWindow{limit, model.Duration(window)}, SlidingWindow{limit, model.Duration(window)}, SlidingLog{limit, model.Duration(window)},
			TokenBucket{capacity, refill, model.Duration(window)}, CalendarWindow{Limit: limit, Unit: unit, Zone: zone},
		}[kind]
	}
}

// askModel asks the model, and gives back as refund does.
func askModel(refund func(p ruled, s model.State, clock int64, k model.Take) model.State) func(p ruled, clock, n int64) (*aTake, error) {
	var s model.State
	return func(p ruled, clock, n int64) (*aTake, error) {
		next, d := p.Decide(s, clock, n)
		s = next
		if d.Granted == 0 {
			return nil, nil
		}
		left := n
		return &aTake{units: n, in: d.Taken.In, giveBack: func(clock, n int64) error {
			k := d.Taken.Portion(p, left-n, left)
			left -= n
			s = refund(p, s, clock, k)
			return nil
		}}, nil
	}
}

func rightRefund(p ruled, s model.State, clock int64, k model.Take) model.State {
	next, _ := p.Refund(s, clock, k)
	return next
}

// What is admitted and never given back stays within what the policy admits without refunds, whatever is given
// back and when.
func TestRefundsMintNothing(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	for range 400 * rounds(t) {
		for kind := range int64(5) {
			takes, _, err := takesOf(d, d.drawFor(kind), 60, false, askModel(rightRefund))
			require.NoError(t, err)
			require.NoError(t, mints(takes))
		}
	}
}

// With a clock that steps back, at most what the clock gives forwards.
func TestRefundsMintNothingWhenTheClockStepsBack(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	for range 1000 {
		for kind := range int64(5) {
			p := d.drawFor(kind)()
			takes, forwards, err := takesOf(d, func() ruled { return p }, 60, true, askModel(rightRefund))
			require.NoError(t, err)
			kept := int64(0)
			for _, took := range takes {
				kept += took.kept
			}
			gives := new(big.Int).Quo(forwards, big.NewInt(reach(p)))
			gives.Mul(gives, big.NewInt(p.Numbers().Limit))
			if calendar, ok := p.(CalendarWindow); ok { // few windows are shorter: the first, and an hour that is cut short
				gives.Quo(forwards, big.NewInt(calendar.spanMicros()/10*9))
				gives.Add(gives, big.NewInt(2)).Mul(gives, big.NewInt(calendar.Limit))
			}
			if bucket, ok := p.(TokenBucket); ok {
				gives.Mul(forwards, big.NewInt(bucket.Refill))
				gives.Quo(gives, big.NewInt(model.Micros(bucket.Every)))
			}
			require.LessOrEqual(
				t,
				big.NewInt(kept).Cmp(gives.Add(gives, big.NewInt(p.Numbers().Limit))),
				0,
				"%T%+v: %d kept",
				p,
				p,
				kept,
			)
		}
	}
}

// Negative controls: refunds that are broken in one way mint, and the check sees it.
func TestBrokenRefundsMint(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		kinds  []int64
		refund func(p ruled, s model.State, clock int64, k model.Take) model.State
	}{
		"of whatever the row counts now": {[]int64{0, 1, 2, 3, 4}, func(p ruled, s model.State, clock int64, k model.Take) model.State {
			row := rollForward(p, s, clock)
			k.Since, k.In = row.Since, row.WindowStart
			return rightRefund(p, s, clock, k)
		}},
		"twice": {[]int64{0, 1, 2, 3, 4}, func(p ruled, s model.State, clock int64, k model.Take) model.State {
			return rightRefund(p, rightRefund(p, s, clock, k), clock, k)
		}},
		"that do not move up those behind them": {[]int64{3}, func(p ruled, s model.State, clock int64, k model.Take) model.State {
			next := rightRefund(p, s, clock, k)
			next.Returned = 0
			return next
		}},
		"of tokens that have flowed in since": {[]int64{3}, func(p ruled, s model.State, clock int64, k model.Take) model.State {
			k.In = max(rollForward(p, s, clock).WindowStart, k.In)
			return rightRefund(p, s, clock, k)
		}},
	} {
		for _, kind := range c.kinds {
			d := randomDice(t)
			caught := false
			for range 3000 {
				takes, _, err := takesOf(d, d.drawFor(kind), 60, false, askModel(c.refund))
				require.NoError(t, err)
				if caught = mints(takes) != nil; caught {
					break
				}
			}
			require.True(t, caught, "refunds %s, of kind %d", name, kind)
		}
	}
}

// askLimiter asks a limiter, whose clock is clock.
func askLimiter(t *testing.T, l *Limiter, clock *time.Time) func(p ruled, at, n int64) (*aTake, error) {
	return func(p ruled, at, n int64) (*aTake, error) {
		*clock = time.UnixMicro(at)
		result, err := l.under(p).AllowN(t.Context(), "key", n)
		if err != nil || !result.Allowed {
			return nil, err
		}
		return &aTake{units: n, in: result.receipt.parts[0].In, giveBack: func(at, n int64) error {
			*clock = time.UnixMicro(at)
			_, err := l.RefundN(t.Context(), result, n)
			return err
		}}, nil
	}
}

func TestRefundsMintNothingOnAServer(t *testing.T) {
	t.Parallel()
	d, pool := randomDice(t), pgtest.New(t).Pool
	for round := range 4 * rounds(t) {
		for kind := range int64(5) {
			require.NoError(t, mintsOnAServer(t, d, pool, kind, fmt.Sprint(round, kind)))
		}
	}
}

// mintsOnAServer has a limiter of a kind take and give back at random. It returns an error if a refund has minted units.
func mintsOnAServer(t *testing.T, d dice, pool *pgxpool.Pool, kind int64, name string) error {
	t.Helper()
	var clock time.Time
	draw := d.drawFor(kind)
	l := newLimiter(t, pool, Config{
		Name:          name,
		Policy:        draw(),
		Client:        ClientConfig{Timeout: amply, Test: TestConfig{Now: func() time.Time { return clock }}},
		NoDenialCache: true,
	})
	takes, _, err := takesOf(d, draw, 40, false, askLimiter(t, l, &clock))
	require.NoError(t, err)
	return mints(takes)
}

func TestMistakesInRefundsMintOnAServer(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	const ofTheSameWindow, ofAny = "taken_in = s.window_start AND taken_in = rolled.window_start", "taken_in IS NOT NULL"
	for _, mutant := range []struct {
		kind         int64
		function     string
		right, wrong string
	}{
		{0, "_rate_limit_fixed_refund", ofTheSameWindow, ofAny},
		{1, "_rate_limit_sliding_refund", "later = 0 AND taken_in = s.window_start THEN", "later = 0 THEN"},
		{4, "_rate_limit_fixed_refund", ofTheSameWindow, ofAny},
		{2, "_rate_limit_log_refund", "= taken_in << 10", "<> 0 LIMIT 1"},
		{3, "_rate_limit_bucket_refund", "s.returned := s.returned + back;", ""},
		// What a take that was decided in one statement says of itself: its place in the queue.
		{3, "rate_limit_take_token_bucket", "d.since, d.returned]", "d.since, d.returned + capacity * every_us]"},
	} {
		db := pgtest.New(t)
		pgtest.Rewrite(t, db.Pool, mutant.function, mutant.right, mutant.wrong)
		caught := false
		for round := 0; round < 1000 && !caught; round++ {
			caught = mintsOnAServer(t, d, db.Pool, mutant.kind, fmt.Sprint(round)) != nil
		}
		require.True(t, caught, "%+v", mutant)
	}
}

// The attack that refunds by key alone allowed: takes all along, which are given back together.
func TestHoardedTakesGiveNothingBack(t *testing.T) {
	t.Parallel()
	const limit = 5
	eachSlowPolicyAllAndTable(t, limit, func(t *testing.T, config Config) {
		now := t0
		config.Client.Test.Now, config.NoDenialCache = func() time.Time { return now }, true
		config.Policy = map[string]Policy{
			"ratelimit.FixedWindow": FixedWindow{limit, time.Minute}, "ratelimit.SlidingWindow": SlidingWindow{limit, time.Minute},
			"ratelimit.SlidingLog": SlidingLog{limit, time.Minute}, "ratelimit.TokenBucket": TokenBucket{limit, limit, time.Minute},
			"ratelimit.CalendarWindow": CalendarWindow{Limit: limit, Unit: CalendarMinute},
			"ratelimit.all":            All(FixedWindow{limit, time.Minute}, SlidingLog{limit, time.Minute}),
		}[fmt.Sprintf("%T", config.Policy)]
		limiter := newLimiter(t, pgtest.New(t).Pool, config)
		var takes []Result
		for range 10 {
			result, err := limiter.AllowN(t.Context(), "key", limit)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			takes = append(takes, result)
			now = now.Add(2 * time.Minute)
		}
		admitted := 0
		for _, result := range takes {
			_, err := limiter.Refund(t.Context(), result)
			require.NoError(t, err)
			for {
				result, err := limiter.Allow(t.Context(), "key")
				require.NoError(t, err)
				if !result.Allowed {
					break
				}
				admitted++
			}
			now = now.Add(50 * time.Millisecond)
		}
		require.Equal(t, limit, admitted)
	})
}
