package sql_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// owing counts what histories with charges have seen.
type owing struct{ charged, tooLarge, owed, denied, allowed, backWhileOwing, grants, resets, changes int }

// varied tells whether everything has occurred.
func (o owing) varied() bool {
	return min(o.charged, o.tooLarge, o.owed, o.denied, o.allowed, o.backWhileOwing, o.grants, o.resets, o.changes) > 0
}

// TestChargesEqualTheModel compares random histories of takes, charges, refunds, grants, resets and changes of policy
// with the models, for each algorithm.
func TestChargesEqualTheModel(t *testing.T) {
	t.Parallel()
	pool, seed := pgtest.New(t).Pool, limitertest.Seed(t)
	for _, a := range algorithm.All() {
		t.Run(a.Word, func(t *testing.T) {
			t.Parallel()
			var seen owing
			for story := uint64(0); story < uint64(5*limitertest.Rounds(t)) || !seen.varied(); story++ {
				require.Less(t, story, uint64(3_000), "%+v", seen)
				r := rand.New(rand.NewPCG(seed, uint64(a.Code)<<32|story))
				space := fmt.Sprintf("%s %d ", a.Word, story)
				err := playCharges(t.Context(), pool, r, a.Code, space, &seen)
				require.NoError(t, err, "%s=%d, story %d", modeltest.SeedVariable, seed, story)
			}
		})
	}
}

// playCharges plays a history of one key. It returns the first difference from the model.
func playCharges(ctx context.Context, pool *pgxpool.Pool, r *rand.Rand, code int16, space string, seen *owing) error {
	dice := modeltest.Dice(r.Int64N)
	draw := func() model.Rules {
		limit, window := dice.Window()
		switch code {
		case algorithm.FixedWindow:
			return model.FixedWindow{Limit: limit, Window: window}
		case algorithm.SlidingWindow:
			return model.SlidingWindow{Limit: limit, Window: window}
		case algorithm.TokenBucket:
			return dice.Bucket()
		case algorithm.SlidingLog:
			return dice.Log()
		}
		return dice.Calendar()
	}
	p, rows := draw(), modeltest.NewRows()
	id, durable := modeltest.RowID{Name: "a", Key: "key"}, r.IntN(2) == 0
	state := func() model.State {
		return rows.State(modeltest.Part{ID: id, Durable: durable, Policy: p})
	}
	owes := func(s model.State, clock int64) bool {
		rolled, _ := p.Roll(s, clock)
		return model.Owed(p, rolled) > 0
	}
	var takes []model.Take
	var last model.Decision
	clock := dice.Magnitude(1<<50, 1<<51)
	for range 60 {
		switch r.IntN(24) {
		case 0:
			p, takes = draw(), nil
			seen.changes++
		case 1, 2:
			if changed := modeltest.ChangedPolicy(r, p); changed.Numbers().Algorithm == code {
				p = changed
				seen.changes++
			}
		case 3:
			if _, err := pool.Exec(ctx, "SELECT rate_limit_reset($1, $2, $3)", space+id.Name, id.Key, durable); err != nil {
				return err
			}
			delete(rows[durable], id)
			seen.resets++
		}
		if r.IntN(3) > 0 {
			clock = dice.Clock(p, state(), clock, last)
		}
		clock = min(max(clock, 1), 1<<55) // to the year 3111
		before := state()
		limit := p.Numbers().Limit
		e := modeltest.Element{Key: id.Key, Cost: max(dice.Cost(limit, last.Remaining), 1), Count: 1}
		switch r.IntN(8) {
		case 0, 1, 2:
			e.Charge, e.Cost = true, modeltest.RandomCharge(r, p, before, clock)
			if r.IntN(4) == 0 {
				e.Cost, e.Count = max(e.Cost/4, 1), dice.Magnitude(1, 5)
			}
		case 3, 4:
			if len(takes) > 0 {
				e.Cost, e.Count, e.Refund = modeltest.RandomRefund(r, p, takes, -1, 1)
			}
		case 5:
			e.Cost = -dice.Magnitude(1, 2*min(limit, model.MaxCredit/2))
		case 6:
			e.Cost = 0
		}
		steps := []modeltest.Step{{Policy: p, Durable: durable, Name: id.Name, Clock: clock, Elements: []modeltest.Element{e}}}
		batch := &pgx.Batch{}
		queueStep(batch, space, steps[0])
		if err := compare(pool.SendBatch(ctx, batch), space, steps, 0, rows); err != nil {
			return fmt.Errorf("%v, from %+v: %w", steps[0], before, err)
		}
		last = steps[0].Elements[0].Decision
		if e.Cost > 0 && last.Granted > 0 {
			takes = append(takes, takeOf(e, last))
		}
		after := state()
		switch {
		case e.Charge && last.Granted == 0:
			seen.tooLarge++
		case e.Charge && owes(after, clock):
			seen.owed++
		case e.Charge:
			seen.charged++
		case e.Refund != nil && owes(before, clock) && after != before:
			seen.backWhileOwing++
		case e.Refund == nil && e.Cost < 0:
			seen.grants++
		case e.Cost > 0 && owes(before, clock) && last.Granted == 0:
			seen.denied++
		case e.Cost > 0 && last.Granted > 0:
			seen.allowed++
		}
	}
	return nil
}

// takeOf returns what all granted requests of an element took together.
func takeOf(e modeltest.Element, d model.Decision) model.Take {
	k := d.Taken
	k.Units = d.Granted * e.Cost
	return k
}

// The comparison with the models notices mistakes in the functions that charge, and in how they treat keys that owe.
func TestMistakesInChargesDifferFromTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	const fixed, sliding, bucket, log, calendar = algorithm.FixedWindow, algorithm.SlidingWindow, algorithm.TokenBucket,
		algorithm.SlidingLog, algorithm.CalendarWindow
	const charge, count = "_rate_limit_charge", "_rate_limit_count"
	for _, c := range []struct {
		algorithm    int16
		function     string
		right, wrong string
	}{
		{fixed, "_rate_limit_max_owed", "THEN 10 * max_count", "THEN 9 * max_count"},
		{fixed, "_rate_limit_max_owed", "most - max_count", "most"},
		{bucket, "_rate_limit_max_owed", "least(refill, 2048)", "2048"},
		{calendar, "_rate_limit_max_owed", "IF algorithm <> 5", "IF true"},
		{fixed, "_rate_limit_chargeable", "credit + greatest", "greatest"},
		{sliding, "_rate_limit_chargeable", "END, 0)", "END, 1)"},
		{bucket, "_rate_limit_chargeable", "public._rate_limit_ceil_div(count, scale)", "count / scale"},
		{fixed, count, "s.credit := s.credit - spent;", ""},
		{fixed, count, "units - (s.remaining - s.credit)", "units"},
		{fixed, count, "s.expires_at := clock + s.reset_after_us;", ""},
		{sliding, count, "s.count := s.count + units", "s.count := s.count + 0 * units"},
		{bucket, count, "THEN s.scale ELSE", "THEN 1 ELSE"},
		{log, count, "s.window_start := t;", ""},
		{log, count, "AND units > 0", ""},
		{log, count, "s.spent := spent;", ""},
		{calendar, count, "s.expires_at := t +", "s.expires_at := s.expires_at +"},
		{calendar, charge, "asked <= public", "asked <= 1 + public"},
		{log, "_rate_limit_log_with", "least(units, 1000)", "least(units, 1023)"},
		{log, "_rate_limit_log_with", "n := n - 1;", ""},
		{log, "_rate_limit_log_refund", "least(units, sum(e.entry & 1023))", "least(units, max(e.entry & 1023))"},
		{log, "_rate_limit_log_refund", "WHILE back >= s.log[place] & 1023 LOOP", "IF back >= s.log[place] & 1023 THEN"},
		{bucket, "_rate_limit_lasts", "greatest(max_count * span_us, count)", "max_count * span_us"},
		{sliding, "_rate_limit_lasts", "IN (2, 5) THEN 2 * span_us", "IN (5) THEN 2 * span_us"},
		{bucket, "_rate_limit_bucket", "greatest(full_count - s.count, 0) / every_us", "(full_count - s.count) / every_us"},
		{bucket, "_rate_limit_bucket", "least(greatest(left_over, -most_owed), full_count)", "least(left_over, full_count)"},
		{bucket, "_rate_limit_bucket", "-div(s.scale - 1 - left_over", "-div(-left_over"},
		{bucket, "_rate_limit_bucket", "THEN greatest(full_count, s.count) ELSE", "THEN full_count ELSE"},
		{bucket, "_rate_limit_bucket", "greatest(full_count, s.count), refill);\n    END IF", "full_count, refill);\n    END IF"},
		{bucket, "_rate_limit_bucket_refund", "last OR rolled.count <=", "true OR rolled.count <="},
		{bucket, "_rate_limit_bucket_refund", "last := rolled.count <= need", "last := false"},
		{bucket, "_rate_limit_bucket_refund", "last := rolled.count <= need", "last := rolled.count <= need + 1"},
		{bucket, "_rate_limit_bucket_refund", "rolled.capacity + public._rate_limit_max_owed", "0 * public._rate_limit_max_owed"},
		{bucket, "rate_limit_all", "AND charges[1] IS NOT TRUE", ""},
		{fixed, "rate_limit_all", "charging := coalesce(charges[from_part]", "charging := coalesce(false"},
	} {
		t.Run(fmt.Sprintf("%s, %d: %s, not %s", c.function, c.algorithm, c.wrong, c.right), func(t *testing.T) {
			t.Parallel()
			db, seed := pgtest.New(t), limitertest.Seed(t)
			wrong := []string{c.right, c.wrong}
			if strings.HasPrefix(c.wrong, "IF ") && strings.HasPrefix(c.right, "WHILE ") {
				wrong = append(wrong, "END LOOP;", "END IF;")
			}
			pgtest.Rewrite(t, db.Pool, c.function, wrong...)
			for story := uint64(0); ; story++ {
				require.Less(t, story, uint64(3_000), "the models do not tell the mistake")
				r := rand.New(rand.NewPCG(seed, story))
				err := playCharges(t.Context(), db.Pool, r, c.algorithm, fmt.Sprint(story, " "), &owing{})
				if _, found := errors.AsType[*difference](err); found {
					return
				}
				require.NoError(t, err)
			}
		})
	}
}

// charged is the row that rate_limit_charge returns.
type charged struct {
	Remaining, Owed        int64
	RetryAfter, ResetAfter time.Duration
	RetryAfterSeconds      int64
}

func chargeSQL(ctx context.Context, db pgtest.Querier, name, policy string, cost int64, durable bool) (charged, error) {
	rows, err := db.Query(ctx, `SELECT remaining, owed, retry_after, reset_after, retry_after_seconds
		FROM rate_limit_charge($1, 'key', $2, $3, $4)`, name, policy, cost, durable)
	if err != nil {
		return charged{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[charged])
}

// A key may owe 10 limits. A charge of more counts nothing, and the error says what would be accepted.
func TestSQLChargesWhatWasUsed(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, durable := range []bool{false, true} {
		for policy, retries := range map[string]time.Duration{
			"fixed 10/360d": 360 * 24 * time.Hour, "sliding 10/360d": 360 * 24 * time.Hour, "log 10/360d": 360 * 24 * time.Hour,
			"every 10/month": 0, "bucket 10 1/36d": 16 * 36 * 24 * time.Hour,
			"fixed 10/360d, sliding 12/360d, bucket 20 1/36d": 0,
		} {
			name := fmt.Sprint(policy, durable)
			got, err := chargeSQL(t.Context(), db.Pool, name, policy, 0, durable) // charges nothing
			require.NoError(t, err)
			require.Equal(t, charged{Remaining: 10}, got, policy)
			require.True(t, allowSQL(t, db.Pool, name, policy, 4, durable).Allowed)
			got, err = chargeSQL(t.Context(), db.Pool, name, policy, 5, durable)
			require.NoError(t, err)
			require.Positive(t, got.ResetAfter)
			got.ResetAfter = 0
			require.Equal(t, charged{Remaining: 1}, got, policy)

			got, err = chargeSQL(t.Context(), db.Pool, name, policy, 16, durable) // 25 of 10
			require.NoError(t, err)
			require.Zero(t, got.Remaining, policy)
			require.EqualValues(t, 15, got.Owed, policy)
			require.InDelta(t, got.RetryAfter.Seconds(), got.RetryAfterSeconds, 1, policy)
			if retries > 0 && !strings.HasPrefix(policy, "sliding") {
				require.InDelta(t, retries, got.RetryAfter, float64(time.Hour), policy)
			}
			denied := allowSQL(t, db.Pool, name, policy, 1, durable)
			require.False(t, denied.Allowed, policy)
			require.InDelta(t, got.RetryAfter, denied.RetryAfter, float64(time.Hour), policy)

			rows := pgtest.StoredRows(t, db.Pool, durable)
			_, err = chargeSQL(t.Context(), db.Pool, name, policy, 86, durable)
			var refused *pgconn.PgError
			require.ErrorAs(t, err, &refused, policy)
			require.Equal(t, "RLS05", refused.Code)
			require.Contains(t, refused.Message, "rate_limit: a charge of 86 is too large, and 85 would be accepted")
			// PL/Proxy puts words of its own before the DETAIL.
			require.Equal(t, "85", strings.TrimPrefix(refused.Detail, "Remote detail: "))
			require.NotEmpty(t, refused.Hint)
			require.NotContains(t, fmt.Sprintf("%+v", *refused), "'key'")
			require.Equal(t, rows, pgtest.StoredRows(t, db.Pool, durable))
			got, err = chargeSQL(t.Context(), db.Pool, name, policy, 85, durable)
			require.NoError(t, err)
			require.EqualValues(t, 100, got.Owed)
			_, err = chargeSQL(t.Context(), db.Pool, name, policy, 1, durable)
			require.ErrorContains(t, err, "a charge of 1 is too large, and 0 would be accepted")
		}
		// A charge that is refused makes no row.
		rows := len(pgtest.StoredRows(t, db.Pool, durable))
		for _, cost := range []int64{111, math.MaxInt64} {
			_, err := chargeSQL(t.Context(), db.Pool, "new", "fixed 100/1d, fixed 10/1d", cost, durable)
			require.ErrorContains(t, err, "and 110 would be accepted")
		}
		require.Len(t, pgtest.StoredRows(t, db.Pool, durable), rows)
	}
}

// However many charge a key at once, each charge counts once, and no more are accepted than the key can owe.
func TestChargesAddUp(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, policy := range []string{"fixed 10/360d", "sliding 10/360d", "log 10/360d", "bucket 10 1/36d", "fixed 10/360d, log 10/360d"} {
		var accepted atomic.Int64
		const callers, cost = 6, 5
		errs := make([]error, callers)
		testkit.Together(callers, func(i int) {
			for errs[i] == nil {
				if _, errs[i] = chargeSQL(t.Context(), db.Pool, policy, policy, cost, i%2 == 0); errs[i] == nil {
					accepted.Add(1)
				}
			}
		})
		for _, err := range errs {
			var refused *pgconn.PgError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, "RLS05", refused.Code)
		}
		require.EqualValues(t, 2*110/cost, accepted.Load(), policy)
	}
}

// Policies in the table decide too. The modes off and deny count nothing.
func TestSQLChargesUnderThePolicyInForce(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES
		('n', NULL, 'enforce', 'fixed 10/1d', 'why'), ('n', 'off', 'off', NULL, 'why'), ('n', 'banned', 'deny', NULL, 'why')`)
	owed := func(key string) int64 {
		return pgtest.Scalar[int64](t, db.Pool, "SELECT owed FROM rate_limit_charge('n', $1, cost => 12)", key)
	}
	require.EqualValues(t, 2, owed("a"))
	require.EqualValues(t, 14, owed("a"))
	require.Zero(t, owed("off"))
	require.Zero(t, owed("banned"))
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 1)
}
