package policytable_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// While only one of two processes knows of a change, both together admit at most what the larger limit admits. The
// clock stands still, so no window or bucket gets room again.
func TestProcessesThatDisagree(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, policies := range map[string][2]ratelimit.Policy{
		"fixed":   {ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, ratelimit.FixedWindow{Limit: 25, Window: time.Minute}},
		"sliding": {ratelimit.SlidingWindow{Limit: 10, Window: time.Hour}, ratelimit.SlidingWindow{Limit: 25, Window: time.Minute}},
		"log":     {ratelimit.SlidingLog{Limit: 10, Window: time.Hour}, ratelimit.SlidingLog{Limit: 25, Window: time.Minute}},
		"bucket":  {ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: time.Hour}, ratelimit.TokenBucket{Capacity: 25, Refill: 2, Every: time.Minute}},
		"all":     {ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, ratelimit.FixedWindow{Limit: 10, Window: time.Hour}), ratelimit.FixedWindow{Limit: 25, Window: time.Hour}},
	} {
		for _, raised := range []bool{true, false} {
			older, newer := policies[0], policies[1]
			if !raised {
				older, newer = newer, older
			}
			key := fmt.Sprint(name, raised)
			pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api"+key, "", "", "enforce", older.String())
			limiters := make([]*ratelimit.Limiter, 2)
			for i := range limiters {
				p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{})
				require.NoError(t, err)
				if i == 1 {
					pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api"+key, "", "", "enforce", newer.String())
				}
				require.NoError(t, limitertest.Table(p).ReadChanges(t.Context(), db.Pool, testkit.Amply)) // and never again
				limiters[i] = limitertest.New(t, db.Pool, ratelimit.Config{
					Name: "api" + key, Policy: older, Policies: p,
				}, ratelimit.ClientConfig{Test: limitertest.Frozen(limitertest.T0)})
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
			if name != "bucket" { // a smaller capacity empties a bucket
				require.EqualValues(t, 25, admitted.Load(), key)
			}
		}
	}
}

// Policies change in the middle of a history, by rows for the key, for its prefix and for all keys. At each step, the
// limiter must give the same answer as a second limiter on the same rows. The second limiter gets the policy by With.
func TestHistoriesInWhichPoliciesChange(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	now := limitertest.T0
	clock := ratelimit.TestConfig{Now: func() time.Time { return now }}
	for name, random := range map[string]func() ratelimit.Policy{
		"fixed": func() ratelimit.Policy {
			return ratelimit.FixedWindow{Limit: 1 + rand.Int64N(9), Window: time.Duration(1+rand.IntN(3)) * time.Minute}
		},
		"sliding": func() ratelimit.Policy {
			return ratelimit.SlidingWindow{Limit: 1 + rand.Int64N(9), Window: time.Duration(1+rand.IntN(3)) * time.Minute}
		},
		"log": func() ratelimit.Policy {
			return ratelimit.SlidingLog{Limit: 1 + rand.Int64N(9), Window: time.Duration(1+rand.IntN(3)) * time.Minute}
		},
		"bucket": func() ratelimit.Policy {
			return ratelimit.TokenBucket{Capacity: 1 + rand.Int64N(9), Refill: 1 + rand.Int64N(3), Every: time.Minute}
		},
		"calendar": func() ratelimit.Policy {
			return ratelimit.CalendarWindow{Limit: 1 + rand.Int64N(9), Unit: []ratelimit.Unit{ratelimit.CalendarMinute, ratelimit.CalendarHour}[rand.IntN(2)]}
		},
	} {
		p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{})
		require.NoError(t, err)
		code := random()
		l := limitertest.New(t, db.Pool, ratelimit.Config{Name: name, Policy: code, Policies: p}, ratelimit.ClientConfig{Test: clock})
		twin := limitertest.New(t, db.Pool, ratelimit.Config{Name: name + " twin", Policy: code}, ratelimit.ClientConfig{Test: clock})
		inForce := map[string]ratelimit.Policy{}
		for range 60 * limitertest.Rounds(t) {
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
					pgtest.Exec(t, db.Pool, limitertest.AddPolicy, name, key, prefix, "enforce", inForce[target].String())
				}
			}
			require.NoError(t, limitertest.Table(p).ReadChanges(t.Context(), db.Pool, testkit.Amply))
			policy := code
			for _, target := range []string{"key", "ke", ""} {
				if row, ok := inForce[target]; ok {
					policy = row
					break
				}
			}
			n := rand.Int64N(4)
			got, err := l.AllowN(t.Context(), "key", n)
			want, wantErr := limitertest.With(t, twin, policy).AllowN(t.Context(), "key", n)
			require.Equal(t, wantErr, err)
			require.Equal(t, limitertest.Plain(want), limitertest.Plain(got), "%s: %d under %v", name, n, policy)
		}
	}
}

// Callers of Wait hear of another policy. If a policy is lowered below the cost of one caller, the other callers still
// wait successfully.
func TestWaitersHearOfPolicies(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	p := limitertest.RunningPolicies(t, db.Pool, ratelimit.PoliciesConfig{})
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour}, Policies: p,
		Ban: &ratelimit.Ban{Denials: 2, Within: time.Hour, First: time.Hour},
	})
	full, err := l.AllowN(t.Context(), "key", 10)
	require.NoError(t, err)
	require.True(t, full.Allowed)
	waits := make([]func() (ratelimit.Result, error), 4)
	for i := range waits {
		n := int64(1)
		if i == 0 {
			n = 8
		}
		waits[i] = testkit.Later(func() (ratelimit.Result, error) { return l.WaitN(t.Context(), "key", n) })
		testkit.WaitUntil(t, func() bool {
			_, callers, _ := limitertest.Lines(l).Waiting("key")
			return callers == i+1
		})
	}
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "enforce", "fixed 5/1h")
	_, err = waits[0]()
	require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "key", "", "off", "")
	for _, wait := range waits[1:] {
		result, err := wait()
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourcePolicy, result.Source)
	}
	require.Zero(t, counted(limitertest.View(l).Strikes, "key")) // Wait counts no denial
	require.Empty(t, limitertest.Table(p).NextBans())
}

// lateReader calls a function before each query.
type lateReader struct {
	db     *pgxpool.Pool
	before func()
}

func (r lateReader) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	r.before()
	return r.db.Query(ctx, sql, args...)
}

// Two reads at once may both return a change. A row that cannot be read is logged once all the same, and again after it
// has changed.
func TestUnreadableRowsAreLoggedOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	var journal testkit.Journal
	p, err := ratelimit.NewPolicies(db.Pool, ratelimit.PoliciesConfig{Logger: journal.Logger()})
	require.NoError(t, err)
	table := limitertest.Table(p)
	read := func(db pg.DB) { require.NoError(t, table.ReadChanges(t.Context(), db, testkit.Amply)) }
	pgtest.Exec(t, db.Pool, limitertest.AddPolicy, "api", "", "", "enforce", "fixed 20/1h")
	read(db.Pool)
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_policy DISABLE TRIGGER rate_limit_policy_check")
	for _, policy := range []string{"leaky 30/1h", "leaky 31/1h"} {
		pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET policy = $1", policy)
		read(lateReader{db.Pool, func() { read(db.Pool) }})
		require.Len(t, journal.Lines(), 1, journal.String())
	}
}
