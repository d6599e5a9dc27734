package sql_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// seenOfReservations is what TestHoldsEqualTheModel must see of reservations from buckets.
var seenOfReservations = []string{
	"reserve", "reserve later", "reserve later beside holds", "reserve denied", "reserve denied beside holds",
	"reserve moved", "refund while it owes",
}

// The comparison with the model notices mistakes in the functions for reservations.
func TestMistakesInReservationsDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	const (
		reserve, ready, fits = "_rate_limit_reserve", "_rate_limit_ready_after", "_rate_limit_fits_after"
		longest, most        = "_rate_limit_longest_delay", "_rate_limit_most"
		booked               = "_rate_limit_max_booked"
	)
	for _, c := range []struct{ function, right, wrong string }{
		// It books too much or too little.
		{reserve, "ready_us <= delay_us AND", "ready_us < delay_us AND"},
		{reserve, "ready_us <= delay_us AND", ""},
		{reserve, "IF cost <= capacity THEN", "IF true THEN"},
		{reserve, "coalesce(s.held, 0));\n    END IF;", "0);\n    END IF;"},
		{longest, "least(delay_us,", "greatest(delay_us,"},
		{longest, "* every_us / refill", "* every_us / refill + 1"},
		{booked, "public._rate_limit_max_owed(3::smallint, capacity, every_us, refill)", "0"},
		{booked, "every_us - capacity", "every_us"},
		{booked, "least(refill, 2048)", "refill::numeric"},
		{booked, "604800000000 * least(", "604800 * least("},
		{booked, "every_us + 1", "every_us"},
		{"_rate_limit_bucket", "public._rate_limit_max_booked(", "public._rate_limit_max_owed(3::smallint, "},
		{ready, "held - by_credit > s.capacity", "held > s.capacity"},
		{ready, "- (s.credit - by_credit)", ""},
		{ready, "(held - by_credit)", "held"},
		// It is ready too early or too late.
		{reserve, "s.retry_after_us := ready_us;", ""},
		{ready, "needed <= greatest(left_over, 0)", "needed <= left_over"},
		{ready, "s.window_start +", "clock +"},
		{ready, "public._rate_limit_ceil_div(needed - left_over, s.refill)", "(needed - left_over) / s.refill"},
		// The wait is too short or too long.
		{fits, "- delay_us, expires_at - clock", ", expires_at - clock"},
		{fits, "- delay_us, expires_at - clock", "- delay_us, NULL"},
		{most, "delay_us * refill / span_us", "0"},
		{most, "delay_us * refill / span_us", "delay_us * refill / span_us + 1"},
		{reserve, "greatest(s.reset_after_us, s.held_until - clock)", "s.reset_after_us"},
		{reserve, "s.remaining - coalesce(s.held, 0)", "s.remaining"},
		// A clock that is set back changes what is written.
		{reserve, "(s.moved OR s.held_until > longest)", "(s.held_until > longest)"},
		{reserve, "(s.moved OR s.held_until > longest)", "s.moved"},
		{reserve, "s.held_until := least(", "s.held_until := greatest("},
		// While a bucket owes, a booking in the middle of the queue is given back.
		{"_rate_limit_bucket_refund", "IF last OR rolled.count <= rolled.capacity * rolled.scale THEN", "IF true THEN"},
	} {
		t.Run(fmt.Sprintf("%s: %s, not %s", c.function, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db, seed := pgtest.New(t), limitertest.Seed(t)
			pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(3_000), "the model does not tell the mistake")
				r := rand.New(rand.NewPCG(seed, story))
				err := newHeldKey(db.Pool, r, algorithm.TokenBucket, fmt.Sprint(story)).play(t.Context(), map[string]int{})
				if d, found := errors.AsType[*difference](err); !found {
					require.NoError(t, err)
				} else if d.element == 0 { // not an error of Postgres
					return
				}
			}
		})
	}
}

// A reservation of several parts books all of them or none. Several requests of one call are decided one after the
// other. The parts are compared with the model.
func TestReservationsOfSeveralKeysEqualTheModel(t *testing.T) {
	t.Parallel()
	pool, seed := pgtest.New(t).Pool, limitertest.Seed(t)
	seen := map[string]int{}
	wanted := []string{"later", "true 1 true", "true 0 true", "true 1 false", "false 1 true", "false 0 true"}
	for story := uint64(0); story < uint64(6*limitertest.Rounds(t)) || lacks(seen, wanted) != nil; story++ {
		require.Less(t, story, uint64(1_000), "%v were never seen", lacks(seen, wanted))
		r := rand.New(rand.NewPCG(seed, story))
		var parts []modeltest.Part
		keys := map[string]model.Key{}
		for _, name := range []string{"a", "b", "c"} {
			p := model.TokenBucket{
				Capacity: 1 + r.Int64N(4), Refill: 1 + r.Int64N(3), Every: time.Duration(1+r.Int64N(1e4)) * time.Millisecond,
			}
			id := modeltest.RowID{Name: fmt.Sprintf("%d %s", story, name), Key: fmt.Sprintf("{%d}", story)}
			parts = append(parts, modeltest.Part{ID: id, Policy: p, Durable: r.IntN(2) == 0})
		}
		clock := int64(1)<<50 + r.Int64N(1<<50)
		for range 25 {
			clock += r.Int64N(2e7)
			type told struct{ granted, remaining, retryAfter int64 }
			var want []told
			var requests []modeltest.Request
			var delays []*int64
			for range 1 + r.IntN(3) {
				q := modeltest.Request{Count: 1}
				if r.IntN(4) > 0 {
					q.Delay = new(r.Int64N(1e8))
				}
				after, decisions, granted := map[string]model.Key{}, []model.Decision{}, int64(1)
				for _, i := range r.Perm(3)[:1+r.IntN(3)] {
					part := parts[i]
					bucket := part.Policy.(model.TokenBucket)
					part.Cost = 1 + r.Int64N(bucket.Capacity)
					var next model.Key
					var d model.Decision
					if q.Delay == nil {
						next, d = keys[part.ID.Name].Decide(bucket, clock, part.Cost)
					} else {
						var readyAfter int64
						if next, d, readyAfter = keys[part.ID.Name].Reserve(bucket, clock, part.Cost, *q.Delay); d.Granted == 1 {
							d.RetryAfter = readyAfter
						}
					}
					after[part.ID.Name], decisions = next, append(decisions, d)
					granted = min(granted, d.Granted)
					q.Parts, delays = append(q.Parts, part), append(delays, q.Delay)
				}
				for i, part := range q.Parts {
					if granted == 1 {
						keys[part.ID.Name] = after[part.ID.Name]
					} else if decisions[i].Granted == 1 { // this part has room
						decisions[i].RetryAfter = 0
					}
					_, d := keys[part.ID.Name].Decide(part.Policy, clock, 0)
					want = append(want, told{granted, d.Remaining, decisions[i].RetryAfter})
				}
				requests = append(requests, q)
				seen[fmt.Sprint(q.Delay != nil, granted, len(q.Parts) > 1)]++
			}
			args := append(limitertest.AllArrays(requests), time.UnixMicro(clock), delays)
			rows, err := pool.Query(t.Context(), `SELECT granted, remaining, retry_after_us FROM rate_limit_all($1, $2, $3, $4, $5,
				$6, $7, $8, $9, $10, now => $11, delays_us => $12) ORDER BY ord`, args...)
			title := fmt.Sprintf("%s=%d, story %d", modeltest.SeedVariable, seed, story)
			require.NoError(t, err, title)
			got, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (is told, err error) {
				return is, row.Scan(&is.granted, &is.remaining, &is.retryAfter)
			})
			require.NoError(t, err, title)
			require.Equal(t, want, got, "%s: %+v %v", title, requests, delays)
			if slices.ContainsFunc(want, func(is told) bool { return is.granted == 1 && is.retryAfter > 0 }) {
				seen["later"]++
			}
		}
	}
	t.Logf("%v", seen)
}

// rate_limit_reserve is for people. It says how long to wait, or when to ask again.
func TestSQLReserves(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	reserve := func(durable bool, delay string) (allowed bool, readyAfter *time.Duration, retryAfter time.Duration) {
		t.Helper()
		err := db.Pool.QueryRow(t.Context(), `SELECT allowed, ready_after, retry_after
			FROM rate_limit_reserve('partner', 'key', $1, 1, $2::text::interval, $3)`,
			"bucket 1 1/365d", delay, durable).Scan(&allowed, &readyAfter, &retryAfter)
		require.NoError(t, err)
		return allowed, readyAfter, retryAfter
	}
	for _, durable := range []bool{false, true} {
		const year = 365 * 24 * time.Hour
		allowed, readyAfter, retryAfter := reserve(durable, "2 years")
		require.True(t, allowed)
		require.Zero(t, *readyAfter)
		require.Zero(t, retryAfter)
		allowed, readyAfter, retryAfter = reserve(durable, "2 years")
		require.True(t, allowed)
		require.InDelta(t, year, *readyAfter, float64(time.Hour))
		require.Zero(t, retryAfter)
		allowed, readyAfter, retryAfter = reserve(durable, "365 days")
		require.False(t, allowed)
		require.Nil(t, readyAfter)
		require.InDelta(t, year, retryAfter, float64(time.Hour))
		require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM "+pgtest.Table(durable)))
	}

	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES
		('partner', 'large', 'enforce', 'bucket 2 1/365d', 'why'), ('partner', 'fixed', 'enforce', 'fixed 2/1h', 'why'),
		('partner', 'off', 'off', NULL, 'why'), ('partner', 'banned', 'deny', NULL, 'why')`)
	for key, want := range map[string]string{"large": "t 00:00:00", "off": "t 00:00:00", "banned": "f -"} {
		require.Equal(t, want, pgtest.Scalar[string](t, db.Pool,
			"SELECT concat_ws(' ', allowed, coalesce(ready_after::text, '-')) FROM rate_limit_reserve('partner', $1, cost => 2)", key))
	}
	_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_reserve('partner', 'fixed')")
	require.ErrorContains(t, err, "policy has no places")
}
