package sql_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// seenOfReservations is what TestHoldsEqualTheModel must see of reservations from buckets.
var seenOfReservations = []string{ //nolint:gochecknoglobals // nobody changes it
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
		earliest             = "_rate_limit_earliest_ephemeral"
	)
	for _, c := range []struct{ function, right, wrong string }{
		// It books too much or too little.
		{reserve, "ready_us <= delay_us AND", "ready_us < delay_us AND"},
		{reserve, "ready_us <= delay_us AND", ""},
		{reserve, "IF cost <= capacity THEN", "IF true THEN"},
		{reserve, "coalesce(s.held, 0));\n    END IF;", "0);\n    END IF;"},
		{longest, "least(delay_us,", "greatest(delay_us,"},
		{longest, "* every_us / refill", "* every_us / refill + 1"},
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
		{earliest, "(WHERE e.rest > most - n)", "(WHERE e.rest > max_count - n)"},
		{reserve, "WHEN ready_us <= delay_us THEN 0", "WHEN false THEN 0"},
		{reserve, "greatest(s.reset_after_us, s.held_until - clock)", "s.reset_after_us"},
		{reserve, "s.remaining - coalesce(s.held, 0)", "s.remaining"},
		// A clock that is set back changes what is written.
		{reserve, "(s.moved OR s.held_until > longest)", "(s.held_until > longest)"},
		{reserve, "(s.moved OR s.held_until > longest)", "s.moved"},
		{reserve, "CASE WHEN s.moved THEN clock + s.reset_after_us ELSE s.expires_at END", "s.expires_at"},
		{reserve, "s.held_until := least(", "s.held_until := greatest("},
		// While a bucket owes, a booking in the middle of the queue is given back.
		{"_rate_limit_bucket_refund", "IF last OR rolled.count <= rolled.capacity * rolled.scale THEN", "IF true THEN"},
	} {
		t.Run(fmt.Sprintf("%s: %s, not %s", c.function, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db, seed := pgtest.New(t), limitertest.Seed(t)
			if c.function == earliest {
				pgtest.RewriteTwins(t, db.Pool, c.function, c.right, c.wrong)
			} else {
				pgtest.Rewrite(t, db.Pool, c.function, c.right, c.wrong)
			}
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(400), "the model does not tell the mistake")
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
