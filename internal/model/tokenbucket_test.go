package model_test

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
)

func TestTokenBucket(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy model.TokenBucket
		steps  []modelStep
	}{
		{"a burst, and then one every two seconds", model.TokenBucket{20, 5, 10 * time.Second}, []modelStep{
			{c0, 20, granted(0, 40*second)},
			{c0, 1, denied(0, 2*second, 40*second)},
			{c1, 1, denied(0, second, 39*second)},
			{c2 - 1, 1, denied(0, 1, 38*second+1)},
			{c2, 1, granted(0, 40*second)},
			{c2, 20, denied(0, 40*second, 40*second)},
			{c3, 1, denied(0, second, 39*second)},
			{c4, 1, granted(0, 40*second)},
			{c4 + 40*second - 1, 20, denied(19, 1, 1)},
			{c4 + 40*second, 20, granted(0, 40*second)},
		}},
		{"a bucket does not fill beyond its capacity", model.TokenBucket{3, 1, time.Second}, []modelStep{
			{c0, 1, granted(2, second)},
			{c1 - 1, 0, free(2, 1)},
			{c1, 0, free(3, 0)},
			{c9, 0, free(3, 0)},
			{c9, 4, denied(3, model.Never, 0)},
			{c9, 3, granted(0, 3*second)},
		}},
		{"three tokens flow in over seven microseconds", model.TokenBucket{3, 3, 7 * time.Microsecond}, []modelStep{
			{c0, 3, granted(0, 7)},
			{c0 + 2, 1, denied(0, 1, 5)},
			{c0 + 3, 1, granted(0, 7)}, // 9/7 − 1 = 2/7 of a token are left
			{c0 + 4, 1, denied(0, 1, 6)},
			{c0 + 5, 1, granted(0, 7)}, // 8/7 − 1 = 1/7 of a token is left
			{c0 + 6, 1, denied(0, 1, 6)},
			{c0 + 7, 1, granted(0, 7)}, // 7/7 − 1: no token is left, and no part was lost
			{c0 + 9, 3, denied(0, 5, 5)},
		}},
		{"more than a token each microsecond", model.TokenBucket{10, 7, 2 * time.Microsecond}, []modelStep{
			{c0, 10, granted(0, 3)},
			{c0 + 1, 4, denied(3, 1, 2)},
			{c0 + 1, 3, granted(0, 3)}, // half a token is left
			{c0 + 2, 4, granted(0, 3)}, // 0.5 + 3.5 = 4 tokens
			{c0 + 5, 10, granted(0, 3)},
		}},
		{"costs", model.TokenBucket{10, 1, time.Second}, []modelStep{
			{c0, 0, free(10, 0)},
			{c0, 11, denied(10, model.Never, 0)},
			{c0, 10, granted(0, 10*second)},
			{c0, 0, denied(0, second, 10*second)},
			{c1, 11, denied(1, model.Never, 9*second)},
			{c1, 10, denied(1, 9*second, 9*second)},
			{c1, 2, denied(1, second, 9*second)},
			{c1, 1, granted(0, 10*second)},
			{c1 + second/2, 0, denied(0, second/2, 9*second+second/2)},
		}},
		{"the clock steps back by less than a refill", model.TokenBucket{10, 1, time.Second}, []modelStep{
			{c5, 7, granted(3, 7*second)},
			{c3, 0, free(3, 9*second)},
			{c3, 4, denied(3, 3*second, 9*second)},
			{c3, 3, granted(0, 12*second)},
			{c5, 1, denied(0, second, 10*second)},
			{c6, 1, granted(0, 10*second)},
		}},
		{"the clock steps back by more than a refill", model.TokenBucket{10, 1, time.Second}, []modelStep{
			{at("12:10:00"), 10, granted(0, 10*second)},
			{at("12:09:50"), 1, denied(0, 11*second, 20*second)},
			{at("12:09:49.999999"), 0, denied(0, second, 10*second)}, // a Peek does not pull the row back to the clock
			{at("12:09:50"), 1, denied(0, 11*second, 20*second)},
			{at("12:09:49.999999"), 11, denied(0, model.Never, 10*second)}, // a cost above the capacity does not pull the row
			{at("12:09:50"), 1, denied(0, 11*second, 20*second)},
			{at("12:09:49.999999"), 1, denied(0, second, 10*second)}, // a denial pulls the row back
			{at("12:09:50"), 1, denied(0, second-1, 10*second-1)},
			{at("12:09:50.999998"), 1, denied(0, 1, 9*second+1)},
			{at("12:09:50.999999"), 1, granted(0, 10*second)},
		}},
		{"tokens are kept when the clock jumps back", model.TokenBucket{10, 1, time.Second}, []modelStep{
			{at("12:10:00"), 6, granted(4, 6*second)},
			{at("03:00:00"), 5, denied(4, second, 6*second)},
			{at("03:00:00.5"), 4, granted(0, 9500*second/1000)},
			{at("02:00:00"), 1, denied(0, second/2, 9500*second/1000)},
			{at("02:00:00.5"), 1, granted(0, 10*second)},
			{at("01:00:00"), 0, denied(0, second, 10*second)},
		}},
		{"a jump forward is one full refill", model.TokenBucket{10, 1, time.Second}, []modelStep{
			{at("01:00:00"), 10, granted(0, 10*second)},
			{at("23:00:00"), 10, granted(0, 10*second)},
			{at("23:00:00"), 1, denied(0, second, 10*second)},
		}},
		{"the slowest bucket", model.TokenBucket{2048, 2048, model.MaxSpan * time.Microsecond}, []modelStep{
			{c0, 2048, granted(0, model.MaxSpan)},
			{c0 + model.MaxSpan/2048 - 1, 1, denied(0, 1, model.MaxSpan-model.MaxSpan/2048+1)},
			{c0 + model.MaxSpan/2048, 1, granted(0, model.MaxSpan)},
			{c0 + model.MaxSpan, 2048, denied(2047, model.MaxSpan/2048, model.MaxSpan/2048)},
		}},
		{"the fastest bucket", model.TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond}, []modelStep{
			{c0, model.MaxProduct, granted(0, 1)},
			{c0, model.MaxProduct, denied(0, 1, 1)},
			{c0, model.MaxProduct + 1, denied(0, model.Never, 1)},
			{c0 + 1, model.MaxProduct, granted(0, 1)},
			{c0 + model.MaxSpan, model.MaxProduct - 1, granted(1, 1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			playModel(t, test.policy, model.State{}, test.steps...)
		})
	}
}

// Some other limiters round the elapsed intervals down, but store the current time. So they grant half of the refill.
func TestTokenBucketCallEveryPartOfAnIntervalGetsTheFullRate(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{10 * time.Microsecond, time.Second, 24 * time.Hour} {
		p := model.TokenBucket{Capacity: 2, Refill: 1, Every: every}
		s := playModel(t, p, model.State{}, modelStep{c0, 2, granted(0, 2*model.Micros(every))})
		taken := int64(0)
		for i := range int64(1000) {
			var d model.Decision
			s, d = p.Decide(s, c0+(i+1)*model.Micros(every)*9/10, 1)
			taken += d.Granted
			require.Equal(t, (i+1)*9/10, taken, "after %d calls, one every 0.9 × %v", i+1, every)
		}
	}
}

func TestTokenBucketOlderClockAfterALockWaitRefillsNothingTwice(t *testing.T) {
	t.Parallel()
	playModel(t, model.TokenBucket{10, 1, time.Second}, model.State{},
		modelStep{c0, 10, granted(0, 10*second)},
		modelStep{c5, 4, granted(1, 9*second)},
		modelStep{c2, 1, granted(0, 13*second)}, // it waited for the row since c2, and takes the refill up to c5
		modelStep{c2, 1, denied(0, 4*second, 13*second)},
		modelStep{c5, 1, denied(0, second, 10*second)},
		modelStep{c6, 1, granted(0, 10*second)},
		modelStep{c6, 1, denied(0, second, 10*second)})
}

func TestTokenBucketRaisedLimitsHelpAtOnce(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.TokenBucket{10, 1, time.Second}, model.State{},
		modelStep{c0, 10, granted(0, 10*second)},
		modelStep{c1, 2, denied(1, second, 9*second)})
	playModel(t, model.TokenBucket{10, 4, time.Second}, s,
		modelStep{c1, 5, denied(4, second/4, second+second/2)},
		modelStep{c1, 4, granted(0, 10*second/4)})
	// The tokens stay, and the bucket becomes larger. According to the last write, the row expires at c0 + 10 s.
	playModel(t, model.TokenBucket{20, 1, time.Second}, s,
		modelStep{c9, 10, denied(9, second, second)},
		modelStep{c9, 1, granted(8, 12*second)},
		modelStep{c9 + 12*second, 20, granted(0, 20*second)})
	playModel(t, model.TokenBucket{20, 1, time.Second}, s, modelStep{c9 + second, 20, granted(0, 20*second)})
}

func TestTokenBucketCostAboveTheCapacityNeverFits(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{10, 1, time.Second}
	playModel(t, p, model.State{}, modelStep{c0, 11, denied(10, model.Never, 0)}, modelStep{c0, model.MaxProduct, denied(10, model.Never, 0)})
	s := playModel(t, p, model.State{}, modelStep{c0, 3, granted(7, 3*second)})
	require.Equal(t, s, playModel(t, p, s, modelStep{c1, 11, denied(8, model.Never, 2*second)}))
}

func TestTokenBucketDenialConsumesNothing(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{10, 1, time.Second}
	s := playModel(t, p, model.State{}, modelStep{c0, 8, granted(2, 8*second)})
	for range 100 {
		require.Equal(t, s, playModel(t, p, s, modelStep{c1, 4, denied(3, second, 7*second)}))
	}
	playModel(t, p, s, modelStep{c1, 3, granted(0, 10*second)})
}

func TestTokenBucketLoweredCapacityClampsTheTokens(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.TokenBucket{10, 1, time.Second}, model.State{}, modelStep{c0, 3, granted(7, 3*second)})
	playModel(t, model.TokenBucket{8, 1, time.Second}, s,
		modelStep{c0, 0, free(7, second)},
		modelStep{c1, 8, granted(0, 8*second)})
	playModel(t, model.TokenBucket{5, 1, time.Second}, s,
		modelStep{c0, 0, free(5, 0)},
		modelStep{c0, 6, denied(5, model.Never, 0)},
		modelStep{c0, 5, granted(0, 5*second)})
}

// A bucket that is full after its capacity was lowered is as good as new, even if its time is ahead of the clock.
func TestTokenBucketLoweredCapacityThatIsFullIsAsGoodAsNew(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.TokenBucket{10, 1, time.Second}, model.State{}, modelStep{c5, 1, granted(9, second)})
	lowered := model.TokenBucket{5, 1, time.Second}
	for _, clock := range []int64{c5, c3, c0, at("03:00:00")} {
		_, d := lowered.Decide(s, clock, 0)
		require.Equal(t, model.State{
			Scale: second, WindowStart: clock, ExpiresAt: clock, Since: clock, Capacity: 5, Refill: 1,
		}, d.State)
		playModel(t, lowered, s,
			modelStep{clock, 0, free(5, 0)},
			modelStep{clock, 6, denied(5, model.Never, 0)},
			modelStep{clock, 5, granted(0, 5*second)},
			modelStep{clock, 1, denied(0, second, 5*second)})
	}
}

func TestTokenBucketKeepsItsTokensWhenTheIntervalChanges(t *testing.T) {
	t.Parallel()
	s := playModel(t, model.TokenBucket{10, 1, time.Second}, model.State{}, modelStep{c0, 4, granted(6, 4*second)})
	playModel(t, model.TokenBucket{10, 1, time.Minute}, s,
		modelStep{c0, 0, free(6, 4*second)}, // the row expires after 4 s, as the old policy promised
		modelStep{c0, 7, denied(6, 4*second, 4*second)},
		modelStep{c0, 6, granted(0, 10*minute)},
		modelStep{c0 + minute, 1, granted(0, 10*minute)})
	playModel(t, model.TokenBucket{10, 1, time.Millisecond}, s,
		modelStep{c0, 7, denied(6, second/1000, 4*second/1000)},
		modelStep{c0, 6, granted(0, 10*second/1000)})

	// Two thirds of a token are rounded down to each scale: to one half, two thirds and five eighths.
	s = playModel(t, model.TokenBucket{10, 1, 3 * time.Microsecond}, model.State{},
		modelStep{c0, 10, granted(0, 30)},
		modelStep{c0 + 8, 2, granted(0, 28)})
	for _, test := range []struct{ every, missing int64 }{{2, 1}, {3, 1}, {6, 2}, {8, 3}} {
		_, d := model.TokenBucket{10, 1, model.Duration(test.every)}.Decide(s, c0+8, 1)
		require.Equal(t, 9*test.every+test.missing, d.State.Count)
		playModel(t, model.TokenBucket{10, 1, model.Duration(test.every)}, s,
			modelStep{c0 + 8, 1, denied(0, test.missing, min(28, 9*test.every+test.missing))})
	}
}

func TestTokenBucketChangedIntervalNeverOverflows(t *testing.T) {
	t.Parallel()
	slow, fast := model.TokenBucket{2048, 2048, model.MaxSpan * time.Microsecond}, model.TokenBucket{model.MaxProduct, 2048, time.Microsecond}
	s := playModel(t, slow, model.State{}, modelStep{c0, 1, granted(2047, model.MaxSpan/2048)})
	playModel(t, fast, s, modelStep{c0, 0, free(2047, model.MaxSpan/2048)})
	s = playModel(t, fast, model.State{}, modelStep{c0, 1, granted(model.MaxProduct-1, 1)})
	playModel(t, slow, s, modelStep{c0, 0, free(2048, 0)})

	// The product of a part of a token and the longest interval needs more than 64 bits.
	s = model.State{Count: 1, Scale: model.MaxSpan - 1, Capacity: 1, Refill: 1, WindowStart: c0, ExpiresAt: c9}
	_, d := slow.Decide(s, c0, 1)
	require.Equal(t, slow.Full()-(model.MaxSpan-2), d.State.Count)
	playModel(t, slow, s, modelStep{c0, 1, denied(0, 1, 9*second)})
}

func TestTokenBucketKeepsItsTokensWhateverChanges(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 5000 {
		before, after := d.Bucket(), d.Bucket()
		s, _ := before.Decide(model.State{}, c0, d.Magnitude(1, before.Capacity))
		s, _ = before.Decide(s, c0+d(s.ExpiresAt-c0), 1) // a part of a token is left
		start := s.WindowStart
		clock := start + d.Magnitude(0, s.ExpiresAt-start-1)
		_, got := after.Decide(s, clock, 0)

		every, refill := big.NewInt(model.Micros(after.Every)), big.NewInt(after.Refill)
		want := new(big.Int).Mul(big.NewInt(before.Full()-s.Count), every)
		want.Quo(want, big.NewInt(model.Micros(before.Every)))
		want.Add(want, refill.Mul(refill, big.NewInt(clock-start)))
		if full := big.NewInt(after.Full()); want.Cmp(full) > 0 {
			want = full
		}
		require.Equal(t, want.Int64(), after.Full()-got.State.Count, "%+v at %d, from %+v", after, clock, s)
		require.Equal(t, want.Quo(want, every).Int64(), got.Remaining)
	}
}

func TestTokenBucketExpiredRowEqualsNoRow(t *testing.T) {
	t.Parallel()
	p := model.TokenBucket{10, 1, time.Second}
	row := model.State{Count: 10 * second, Scale: second, Capacity: 10, Refill: 1, WindowStart: c0, ExpiresAt: c5} // the row expires before the bucket is full
	require.False(t, equalsNoRow(p, row, c5-1))
	for _, clock := range []int64{c5, c5 + 1, c9, c9 + second, c0 + hour} {
		require.True(t, equalsNoRow(p, row, clock))
	}
}

func TestTokenBucketProperties(t *testing.T) {
	t.Parallel()
	testModelProperties(t, func(d modeltest.Dice) model.Rules { return d.Bucket() })
}

// slowBucket is the definition of a bucket: Refill tokens flow in evenly over each Every, up to Capacity. A new key
// starts with a full bucket.
type slowBucket struct {
	model.TokenBucket
	last   int64
	tokens *big.Rat
}

func (m *slowBucket) at(t int64) *big.Rat {
	if m.tokens == nil {
		return rat(m.Capacity)
	}
	tokens := new(big.Rat).SetFrac(big.NewInt(m.Refill), big.NewInt(model.Micros(m.Every)))
	tokens.Mul(tokens, rat(t-m.last)).Add(tokens, m.tokens)
	if tokens.Cmp(rat(m.Capacity)) > 0 {
		return rat(m.Capacity)
	}
	return tokens
}

func (m *slowBucket) fits(t, n int64) bool { return rat(n).Cmp(m.at(t)) <= 0 }

func (m *slowBucket) take(t, n int64) {
	m.last, m.tokens = t, new(big.Rat).Sub(m.at(t), rat(n))
}

func (m *slowBucket) state(t int64) model.State {
	missing := new(big.Rat).Sub(rat(m.Capacity), m.at(t))
	return model.State{
		WindowStart: t, Count: whole(missing.Mul(missing, rat(model.Micros(m.Every)))), Scale: model.Micros(m.Every),
		Capacity: m.Capacity, Refill: m.Refill,
	}
}

func TestTokenBucketEqualsTheDesignInRationals(t *testing.T) {
	t.Parallel()
	testAgainstSlowModel(t, func(d modeltest.Dice) (model.Rules, slowModel) {
		p := d.Bucket()
		return p, &slowBucket{TokenBucket: p}
	})
}

func TestTokenBucketNeverGrantsMoreThanCapacityAndRefillInAnyInterval(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	for range 500 {
		p := d.Bucket()
		var s model.State
		var last model.Decision
		clock := d.Magnitude(0, 1<<52)
		// level is all granted units minus all refill so far. Of all intervals that end now, the interval that began at
		// the lowest level has the most granted units beyond its refill.
		level, lowest := new(big.Rat), new(big.Rat)
		for range 40 {
			was := clock
			clock = d.Forwards(p, s, clock, last)
			refill := new(big.Rat).SetFrac(big.NewInt(p.Refill), big.NewInt(model.Micros(p.Every)))
			level.Sub(level, refill.Mul(refill, rat(clock-was)))
			if level.Cmp(lowest) < 0 {
				lowest.Set(level)
			}
			n := d.Cost(p.Capacity, peek(p, s, clock).Remaining)
			s, last = p.Decide(s, clock, n)
			level.Add(level, rat(last.Granted*n))
			require.LessOrEqual(
				t,
				new(big.Rat).Sub(level, lowest).Cmp(rat(p.Capacity)),
				0,
				"%+v: %d at %d",
				p,
				n,
				clock,
			)
		}
	}
}

func TestTokenBucketNeverGrantsMoreThanTheClockGives(t *testing.T) {
	t.Parallel()
	testNeverMoreThanTheClockGives(t, func(d modeltest.Dice) (p model.Rules, first, rate, span int64, whole bool) {
		b := d.Bucket()
		return b, b.Capacity, b.Refill, model.Micros(b.Every), false
	})
}

func FuzzTokenBucket(f *testing.F) {
	f.Add(
		int64(10),
		int64(1),
		second,
		int64(20),
		int64(5),
		10*second,
		[]byte("a request at each of some clocks, at some costs"),
	)
	f.Add(int64(2048), int64(2048), int64(model.MaxSpan), int64(3), int64(3), int64(7),
		[]byte("\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\x0e\x0f"))
	f.Add(int64(model.MaxProduct), int64(math.MaxInt64), int64(1), int64(model.MaxProduct), int64(2048), int64(1),
		[]byte("\xff\xfe\xfd\xfc\xfb\xfa\xf9\xf8\xf7\xf6\xf5\xf4\xf3\xf2\xf1\xf0"))
	f.Add(
		int64(2),
		int64(7),
		int64(5),
		int64(5),
		int64(2),
		int64(3),
		[]byte("the clock steps back and the policy changes"),
	)
	f.Fuzz(func(t *testing.T, capacity, refill, every, capacity2, refill2, every2 int64, steps []byte) {
		fuzzModel(
			t,
			steps,
			model.TokenBucket{capacity, refill, model.Duration(every)},
			model.TokenBucket{capacity2, refill2, model.Duration(every2)},
		)
	})
}
