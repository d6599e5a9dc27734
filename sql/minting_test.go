package sql_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// askLimiter returns a function that calls a limiter. The limiter's time is what the argument clock points to.
func askLimiter(t *testing.T, l *ratelimit.Limiter, clock *time.Time) func(p model.Rules, at, n int64) (*modeltest.Taken, error) {
	return func(p model.Rules, at, n int64) (*modeltest.Taken, error) {
		*clock = time.UnixMicro(at)
		result, err := limitertest.Under(l, limitertest.Policy(p.Numbers())).AllowN(t.Context(), "key", n)
		if err != nil || !result.Allowed {
			return nil, err
		}
		return &modeltest.Taken{Units: n, In: limitertest.Receipt(result).Parts[0].In, GiveBack: func(at, n int64) error {
			*clock = time.UnixMicro(at)
			_, err := l.RefundN(t.Context(), result, n)
			return err
		}}, nil
	}
}

func TestRefundsMintNothingOnAServer(t *testing.T) {
	t.Parallel()
	d, pool := modeltest.RandomDice(t), pgtest.New(t).Pool
	for round := range 2 * limitertest.Rounds(t) {
		for kind := range int64(5) {
			require.NoError(t, mintsOnAServer(t, d, pool, kind, fmt.Sprint(round, kind)))
		}
	}
}

// mintsOnAServer takes and refunds at random with a limiter. mintsOnAServer returns an error if a refund gave back more
// units than were taken.
func mintsOnAServer(t *testing.T, d modeltest.Dice, pool *pgxpool.Pool, kind int64, name string) error {
	t.Helper()
	var clock time.Time
	draw := d.DrawFor(kind)
	l := limitertest.New(t, pool, ratelimit.Config{
		Name:          name,
		Policy:        limitertest.Policy(draw().Numbers()),
		NoDenialCache: true,
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return clock }}})
	takes, _, err := d.History(draw, 40, false, askLimiter(t, l, &clock))
	require.NoError(t, err)
	return modeltest.Mints(takes)
}

func TestMistakesInRefundsMintOnAServer(t *testing.T) {
	t.Parallel()
	d := modeltest.RandomDice(t)
	const ofTheSameWindow, ofAny = "taken_in = s.window_start AND taken_in = rolled.window_start", "taken_in IS NOT NULL"
	for _, mutant := range []struct {
		kind         int64
		function     string
		right, wrong string
	}{
		{0, "_rate_limit_fixed_refund", ofTheSameWindow, ofAny},
		{1, "_rate_limit_sliding_refund", "later = 0 AND taken_in = s.window_start THEN", "later = 0 THEN"},
		{4, "_rate_limit_fixed_refund", ofTheSameWindow, ofAny},
		{2, "_rate_limit_log_refund", "= taken_in << 10", "<> 0"},
		{3, "_rate_limit_bucket_refund", "s.returned := s.returned + back;", ""},
		// If one statement decides a take, the take returns the last unit's position in the bucket's queue.
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

// An attacker takes for a long time, and then refunds all takes together. Only takes that still count are given back.
func TestHoardedTakesGiveNothingBack(t *testing.T) {
	t.Parallel()
	const limit = 5
	pool := pgtest.New(t).Pool
	limitertest.EachSlowPolicyAllAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		now := limitertest.T0
		config.Name, config.NoDenialCache = t.Name(), true
		config.Policy = map[string]ratelimit.Policy{
			"ratelimit.FixedWindow": ratelimit.FixedWindow{Limit: limit, Window: time.Minute}, "ratelimit.SlidingWindow": ratelimit.SlidingWindow{Limit: limit, Window: time.Minute},
			"ratelimit.SlidingLog": ratelimit.SlidingLog{Limit: limit, Window: time.Minute}, "ratelimit.TokenBucket": ratelimit.TokenBucket{Capacity: limit, Refill: limit, Every: time.Minute},
			"ratelimit.CalendarWindow": ratelimit.CalendarWindow{Limit: limit, Unit: ratelimit.CalendarMinute},
			"ratelimit.all":            ratelimit.All(ratelimit.FixedWindow{Limit: limit, Window: time.Minute}, ratelimit.SlidingLog{Limit: limit, Window: time.Minute}),
		}[fmt.Sprintf("%T", config.Policy)]
		limiter := limitertest.New(t, pool, config, ratelimit.ClientConfig{
			Test: ratelimit.TestConfig{Now: func() time.Time { return now }},
		})
		var takes []ratelimit.Result
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
