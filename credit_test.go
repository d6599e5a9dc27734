package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// creditStep grants credit, or asks for n, or gives back, for n below 0, what was taken last.
type creditStep struct {
	at    int64
	grant int64
	n     int64
	want  model.Decision
}

func TestCreditIsSpentAfterTheOrdinaryRoom(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		policy ruled
		steps  []creditStep
	}{
		{"fixed window", FixedWindow{10, time.Minute}, []creditStep{
			{c0, 5, 0, granted(15, minute)},
			{c1, 0, 11, denied(15, model.Never, 59*second)}, // no single request costs more than the limit
			{c1, 0, 4, granted(11, minute)},                 // a window starts here, and the credit lives for one from here
			{c2, 0, 8, granted(3, minute)},                  // 6 of the window, 2 of the credit
			{c3, 0, 4, denied(3, 58*second, 59*second)},
			{c3, 0, -4, granted(7, 59*second)}, // gives back what the window counts, and no credit
			{c3, 0, 7, granted(0, 58*second)},  // the credit is spent: what is left to wait for is the window's end
			{c4, 0, 1, denied(0, 57*second, 57*second)},
			{c4, 2, 0, granted(2, minute)},
			{c4, 3, 0, granted(5, minute)},
			{c1 + minute, 0, 10, granted(5, minute)},
			{c1 + minute, 0, -100, granted(15, minute)},
			{c0 + 2*minute, 0, 10, granted(5, minute)},
			{c0 + 3*minute - 1, 0, 0, free(5, 1)},
			{c0 + 3*minute, 0, 0, free(10, 0)}, // nothing was taken for a window
		}},
		{"sliding window", SlidingWindow{10, time.Minute}, []creditStep{
			{at("12:00:00"), 5, 0, granted(15, 2*minute)},
			{at("12:00:30"), 0, 10, granted(5, 2*minute)}, // a window starts here
			{at("12:00:40"), 0, 3, granted(2, 2*minute)},
			{at("12:00:40"), 0, 3, denied(2, 56*second, 2*minute)}, // 9 of 10, at 12:01:36
			{at("12:01:36"), 0, 3, granted(0, 114*second)},
			{at("12:02:30"), 4, 0, granted(13, 2*minute)}, // 1 weighs in full
			{at("12:03:30"), 0, 10, granted(4, 2*minute)},
			{at("12:05:29.999999"), 0, 0, free(14-1, 1)}, // as in any other, the 10 weigh 0.000…
			{at("12:05:30"), 0, 0, free(10, 0)},
		}},
		{"token bucket", TokenBucket{10, 1, time.Second}, []creditStep{
			{c0, 5, 0, granted(15, 10*second)},
			{c1, 0, 8, granted(7, 10*second)},
			{c1, 0, 4, granted(3, 10*second)},          // 2 of the bucket, 2 of the credit
			{c1, 0, 6, denied(3, 3*second, 10*second)}, // 3 of the bucket are to come
			{c4, 0, 6, granted(0, 10*second)},          // and the credit is spent
			{c4, 0, 1, denied(0, 1*second, 10*second)}, // so this is the ordinary bucket
			{c4, 3, 0, granted(3, 10*second)},
			{c9, 0, 0, free(8, 5*second)},
			{c4 + 10*second, 0, 0, free(10, 0)},
		}},
		{"sliding log", SlidingLog{10, time.Minute}, []creditStep{
			{c0, 5, 0, granted(15, minute)},
			{c1, 0, 11, denied(15, model.Never, 59*second)},
			{c1, 0, 4, granted(11, minute)},
			{c2, 0, 8, granted(3, minute)}, // 6 into the log, 2 of the credit
			{c3, 0, 2, granted(1, minute)}, // of the credit alone, which then lives on from here
			{c4, 0, 4, denied(1, 57*second, 59*second)},
			{c4, 0, 6, denied(1, 58*second, 59*second)}, // with the credit, the 4 that leave at c1 + minute would make 5
			{c4, 0, -6, granted(7, 59*second)},          // those of c2
			{c4, 0, -1, granted(8, 59*second)},          // one of c1
			{c5, 0, 8, granted(0, minute)},
			{c5, 0, 1, denied(0, 56*second, minute)},
			{c6, 2, 0, granted(2, minute)},
			{c7, 0, 2, granted(0, 58*second)}, // the credit is spent: what is left to wait for are the entries
			{c1 + minute, 0, 3, granted(0, minute)},
			{c2 + minute, 7, 0, granted(7, minute)},
			{c3 + minute, 0, -100, granted(10, 59*second)}, // the 3 of c1 + minute
			{c3 + minute, 0, -100, granted(17, 59*second)},
			{c2 + 2*minute - 1, 0, 0, free(17, 1)},
			{c2 + 2*minute, 0, 0, free(10, 0)},
		}},
		{"the largest numbers", FixedWindow{model.MaxProduct, time.Microsecond}, []creditStep{
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)},
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)}, // a key holds no more
			{c0, 0, model.MaxProduct, granted(model.MaxCredit, 1)},
			{c0, 0, model.MaxProduct, denied(model.MaxCredit, 1, 1)},
			{c0, 0, model.MaxCredit, granted(0, 1)},
		}},
		{"the largest bucket", TokenBucket{model.MaxProduct, math.MaxInt64, time.Microsecond}, []creditStep{
			{c0, model.MaxCredit, 0, granted(model.MaxProduct+model.MaxCredit, 1)},
			{c0, 0, model.MaxProduct, granted(model.MaxCredit, 1)},
			{c0, 0, model.MaxCredit, granted(0, 1)},
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var s model.State
			for i, step := range test.steps {
				if step.grant > 0 {
					next, got, err := checkedGrant(test.policy, s, step.at, step.grant)
					require.NoError(t, err)
					require.Equal(t, step.want, got, "step %d: Grant of %d from %+v", i, step.grant, s)
					s = next
				} else if step.n < 0 {
					k := model.Take{Units: -step.n, In: rollForward(test.policy, s, step.at).WindowStart}
					next, got, err := checkRefund(test.policy, s, step.at, k)
					require.NoError(t, err)
					require.Equal(t, step.want, got, "step %d", i)
					s = next
				} else {
					s = playModel(t, test.policy, s, modelStep{step.at, step.n, step.want})
				}
			}
		})
	}
}

func TestCreditStaysWhenThePolicyChanges(t *testing.T) {
	t.Parallel()
	s, _ := model.Grant(FixedWindow{10, time.Minute}, model.State{}, c0, 5)
	playModel(t, FixedWindow{3, time.Hour}, s, modelStep{c1, 3, granted(5, hour)}, modelStep{c1, 3, granted(2, hour)})
	s, _ = model.Grant(SlidingWindow{10, time.Minute}, model.State{}, c0, 5)
	playModel(
		t,
		SlidingWindow{3, time.Hour},
		s,
		modelStep{c1, 3, granted(5, 2*hour)},
		modelStep{c1, 3, granted(2, 2*hour)},
	)
	s, _ = model.Grant(SlidingLog{10, time.Minute}, model.State{}, c0, 5)
	playModel(t, SlidingLog{3, time.Hour}, s, modelStep{c1, 3, granted(5, hour)}, modelStep{c1, 3, granted(2, hour)})
	s, _ = model.Grant(TokenBucket{10, 1, time.Second}, model.State{}, c0, 5)
	playModel(
		t,
		TokenBucket{3, 1, time.Hour},
		s,
		modelStep{c1, 3, granted(5, 3*hour)},
		modelStep{c1, 3, granted(2, 3*hour)},
	)
}

// Calls ask, grant and give back at one time. What is taken stays within the limit and what was granted.
func TestNeverMoreThanTheLimitAndWhatWasGranted(t *testing.T) {
	t.Parallel()
	d := randomDice(t)
	spent := 0
	for range 500 {
		limit, window := d.window()
		limit = min(limit, 1<<40)
		p := []ruled{
			FixedWindow{limit, window}, SlidingWindow{limit, window}, TokenBucket{limit, 1 + limit, window},
			SlidingLog{limit, window}, d.calendar(),
		}[d(5)]
		if calendar, ok := p.(CalendarWindow); ok {
			calendar.Limit = limit
			p = calendar
		}
		if p.validate() != nil {
			continue
		}
		var s model.State
		allowance, taken := limit, int64(0)
		for range 40 {
			var got model.Decision
			if d(5) == 0 {
				n := d.magnitude(1, limit)
				s, got = model.Grant(p, s, c0, n)
				allowance += n
			} else {
				n := d.cost(limit, peek(p, s, c0).Remaining)
				s, got = p.Decide(s, c0, n)
				taken += got.Granted * n
			}
			require.Equal(t, allowance-taken, got.Remaining, "%T%+v", p, p)
		}
		if taken > limit {
			spent++
		}
	}
	require.Greater(t, spent, 50)
}

func TestGrantMakesARowAndIsWritten(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		result, err := limiter.Grant(t.Context(), "key", 5)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 15, result.Remaining)
		require.EqualValues(t, 10, result.Limit)
		require.Positive(t, result.ResetAfter)
		require.Len(t, storedRows(t, db.Pool, config.Durable), len(limiter.models))

		_, err = limiter.AllowN(t.Context(), "key", 11)
		require.ErrorIs(t, err, ErrCostExceedsLimit)
		for _, want := range []int64{8, 1} {
			result, err := limiter.AllowN(t.Context(), "key", 7)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, want, result.Remaining)
		}
		denied, err := limiter.AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		require.False(t, denied.Allowed)

		// The denial that was remembered is forgotten.
		_, err = limiter.Grant(t.Context(), "key", 1)
		require.NoError(t, err)
		result, err = limiter.AllowN(t.Context(), "key", 2)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Zero(t, result.Remaining)

		// It goes with a Reset.
		_, err = limiter.Grant(t.Context(), "key", 5)
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		result, err = limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
	})
}

func TestGrantIsKeptOrUndoneWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		grant := func(tx pgx.Tx, n, remaining int64) {
			result, err := limiter.WithTx(tx).Grant(t.Context(), "key", n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, remaining, result.Remaining)
		}
		remaining := func() int64 {
			result, err := limiter.Peek(t.Context(), "key")
			require.NoError(t, err)
			return result.Remaining
		}
		tx := pgtest.Begin(t, db)
		grant(tx, 5, 15)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, storedRows(t, db.Pool, config.Durable))

		tx = pgtest.Begin(t, db)
		grant(tx, 5, 15)
		inner := savepoint(t, tx)
		grant(inner, 7, 22)
		require.NoError(t, inner.Rollback(t.Context()))
		grant(tx, 1, 16)
		require.EqualValues(t, 10, remaining())
		other := testkit.Later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 10) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.EqualValues(t, 6, result.Remaining)
	})
}

// Many callers grant, take and refund at once. Each unit is spent once.
func TestCreditIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 20, func(t *testing.T, config Config) {
		const callers, calls = 16, 60
		db := pgtest.New(t)
		limiters := []*Limiter{newLimiter(t, db.NewPool(t, nil), config), newLimiter(t, db.NewPool(t, nil), config)}
		var allowance, out atomic.Int64
		allowance.Store(20)
		errs := make([]error, callers)
		testkit.Together(callers, func(i int) {
			limiter := limiters[i%2]
			for call := 0; call < calls && errs[i] == nil; call++ {
				n := 1 + int64((i+call)%5)
				if (i+call)%6 == 0 {
					allowance.Add(n)
					_, errs[i] = limiter.Grant(t.Context(), "key", n)
					continue
				}
				var result Result
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); result.Allowed {
					if now := out.Add(n); now > allowance.Load() {
						errs[i] = fmt.Errorf("%d of %d are taken", now, allowance.Load())
					}
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		result, err := limiters[0].Peek(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, allowance.Load()-out.Load(), result.Remaining)
		require.Greater(t, out.Load(), int64(100))
	})
}

func TestGrantOfABadAmount(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}})
	tx := pgtest.Begin(t, db)
	for n, want := range map[int64]error{
		0: ErrInvalidCost, -1: ErrInvalidCost, math.MinInt64: ErrInvalidCost, model.MaxCredit + 1: ErrCostExceedsLimit, math.MaxInt64: ErrCostExceedsLimit,
	} {
		result, err := limiter.Grant(t.Context(), "personal", n)
		require.Zero(t, result)
		_, errTx := limiter.WithTx(tx).Grant(t.Context(), "personal", n)
		for _, err := range []error{err, errTx} {
			require.ErrorIs(t, err, want)
			require.NotEqual(t, errors.Is(err, ErrInvalidCost), errors.Is(err, ErrCostExceedsLimit))
			require.NotContains(t, err.Error(), "personal")
		}
		if n > model.MaxCredit {
			require.EqualError(
				t,
				err,
				fmt.Sprintf("ratelimit: cost exceeds the limit: %d is more than the credit that a key can hold, "+
					"2305843009213693952; grant less", n),
			)
		}
	}
	require.NoError(t, tx.Commit(t.Context()))
	require.Empty(t, storedRows(t, db.Pool, false))
}
