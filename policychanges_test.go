package ratelimit

import (
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// While one process knows of a change and another one does not, a key is admitted what the larger limit admits, in
// all, whoever asks when. Their clock stands still, so nothing flows back.
func TestProcessesThatDisagree(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, policies := range map[string][2]Policy{
		"fixed":   {FixedWindow{10, time.Hour}, FixedWindow{25, time.Minute}},
		"sliding": {SlidingWindow{10, time.Hour}, SlidingWindow{25, time.Minute}},
		"log":     {SlidingLog{10, time.Hour}, SlidingLog{25, time.Minute}},
		"bucket":  {TokenBucket{10, 1, time.Hour}, TokenBucket{25, 2, time.Minute}},
		"all":     {All(FixedWindow{10, time.Hour}, FixedWindow{10, time.Hour}), FixedWindow{25, time.Hour}},
	} {
		for _, raised := range []bool{true, false} {
			older, newer := policies[0], policies[1]
			if !raised {
				older, newer = newer, older
			}
			key := fmt.Sprint(name, raised)
			pgtest.Exec(t, db.Pool, addPolicy, "api"+key, "", "", "enforce", older.String())
			limiters := make([]*Limiter, 2)
			for i := range limiters {
				p, err := NewPolicies(db.Pool, PoliciesConfig{})
				require.NoError(t, err)
				if i == 1 {
					pgtest.Exec(t, db.Pool, addPolicy, "api"+key, "", "", "enforce", newer.String())
				}
				require.NoError(t, p.table.Load(t.Context(), db.Pool, amply)) // and never again
				limiters[i] = newLimiter(t, db.Pool, Config{
					Name: "api" + key, Policy: older, Policies: p,
				}, ClientConfig{Test: frozen(t0)})
			}
			var admitted atomic.Int64
			testkit.Together(60, func(i int) {
				result, err := limiters[i%2].Allow(t.Context(), "key")
				require.NoError(t, err)
				if result.Allowed {
					admitted.Add(1)
				}
			})
			require.LessOrEqual(t, admitted.Load(), int64(25), key)
			if name != "bucket" { // which a smaller capacity empties
				require.EqualValues(t, 25, admitted.Load(), key)
			}
		}
	}
}

// Policies change in the middle of a history, by rows for the key, its prefix and everybody. At each step the limiter
// decides as one of the same rows does that is given the policy in force by With.
func TestHistoriesInWhichPoliciesChange(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	now := t0
	clock := TestConfig{Now: func() time.Time { return now }}
	for name, random := range map[string]func() Policy{
		"fixed":   func() Policy { return FixedWindow{1 + rand.Int64N(9), time.Duration(1+rand.IntN(3)) * time.Minute} },
		"sliding": func() Policy { return SlidingWindow{1 + rand.Int64N(9), time.Duration(1+rand.IntN(3)) * time.Minute} },
		"log":     func() Policy { return SlidingLog{1 + rand.Int64N(9), time.Duration(1+rand.IntN(3)) * time.Minute} },
		"bucket":  func() Policy { return TokenBucket{1 + rand.Int64N(9), 1 + rand.Int64N(3), time.Minute} },
		"calendar": func() Policy {
			return CalendarWindow{Limit: 1 + rand.Int64N(9), Unit: []Unit{CalendarMinute, CalendarHour}[rand.IntN(2)]}
		},
	} {
		p, err := NewPolicies(db.Pool, PoliciesConfig{})
		require.NoError(t, err)
		code := random()
		l := newLimiter(t, db.Pool, Config{Name: name, Policy: code, Policies: p}, ClientConfig{Test: clock})
		twin := newLimiter(t, db.Pool, Config{Name: name + " twin", Policy: code}, ClientConfig{Test: clock})
		inForce := map[string]Policy{}
		for range 60 * rounds(t) {
			now = now.Add(time.Duration(rand.IntN(40)) * time.Second)
			if rand.IntN(4) == 0 {
				target := []string{"", "ke", "key"}[rand.IntN(3)]
				pgtest.Exec(t, db.Pool,
					"DELETE FROM rate_limit_policy WHERE name = $1 AND coalesce(key, key_prefix, '') = $2", name, target)
				delete(inForce, target)
				if rand.IntN(3) > 0 {
					inForce[target] = random()
					key, prefix := target, ""
					if target == "ke" {
						key, prefix = "", target
					}
					pgtest.Exec(t, db.Pool, addPolicy, name, key, prefix, "enforce", inForce[target].String())
				}
			}
			require.NoError(t, p.table.Load(t.Context(), db.Pool, amply))
			policy := code
			for _, target := range []string{"key", "ke", ""} {
				if row, ok := inForce[target]; ok {
					policy = row
					break
				}
			}
			n := rand.Int64N(4)
			got, err := l.AllowN(t.Context(), "key", n)
			want, wantErr := twin.with(t, policy).AllowN(t.Context(), "key", n)
			require.Equal(t, wantErr, err)
			require.Equal(t, utc(want), utc(got), "%s: %d under %v", name, n, policy)
		}
	}
}

// Those who wait hear of another policy, and a policy that is lowered below what one of them asks for is not the fault
// of the others.
func TestWaitersHearOfPolicies(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := runningPolicies(t, db.Pool, PoliciesConfig{})
	l := newLimiter(t, db.Pool, Config{
		Name: "api", Policy: FixedWindow{10, time.Hour}, Policies: p,
		Ban: &Ban{Denials: 2, Within: time.Hour, First: time.Hour},
	})
	full, err := l.AllowN(t.Context(), "key", 10)
	require.NoError(t, err)
	require.True(t, full.Allowed)
	waits := make([]func() (Result, error), 4)
	for i := range waits {
		n := int64(1)
		if i == 0 {
			n = 8
		}
		waits[i] = testkit.Later(func() (Result, error) { return l.WaitN(t.Context(), "key", n) })
		testkit.WaitUntil(t, func() bool {
			_, callers, _ := l.waiting.Waiting("key")
			return callers == i+1
		})
	}
	pgtest.Exec(t, db.Pool, addPolicy, "api", "key", "", "enforce", "fixed 5/1h")
	_, err = waits[0]()
	require.ErrorIs(t, err, ErrCostExceedsLimit)
	pgtest.Exec(t, db.Pool, addPolicy, "api", "key", "", "off", "")
	for _, wait := range waits[1:] {
		result, err := wait()
		require.NoError(t, err)
		require.Equal(t, SourcePolicy, result.Source)
	}
	require.Zero(t, counted(l.view.Strikes, "key")) // to wait is no denial
	require.Empty(t, p.table.NextBans())
}
