package faults

import (
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Two calls of Wait that were allowed together spend the last credit, which lasts longer than ordinary units. Both
// calls get the ResetAfter after the credit is spent. No other call may get another call's ResetAfter.
func TestJudgeOfMixesKnowsWhoWaitedTogether(t *testing.T) {
	t.Parallel()

	const window = 40 * time.Millisecond
	log := ratelimit.SlidingLog{Limit: 4, Window: window}
	m := mix{limits: []limit{{name: "log", keys: 1, policies: [][]ratelimit.Policy{{log}}}}}
	history := func(second ratelimit.Result) []mixedOperation {
		call := func(k kind, ms, cost, remaining, reset int64) mixedOperation {
			at := time.UnixMilli(ms)
			one := ratelimit.Result{
				Allowed: true, Limit: 4, Remaining: remaining, ResetAfter: time.Duration(reset) * time.Millisecond,
				DecidedAt: at,
			}
			return mixedOperation{
				kind: k, client: int(remaining), asks: []ask{{cost: cost}}, call: at.UnixMicro(), end: at.UnixMicro(),
				results: ratelimit.Results{Allowed: true, Each: []ratelimit.Result{one}},
			}
		}
		last := call(wait, 1030, 2, 0, 30)
		last.results.Each[0].ResetAfter += second.ResetAfter
		last.results.Each[0].Remaining += second.Remaining
		return []mixedOperation{
			call(grant, 1000, -3, 7, 40),
			call(allow, 1020, 4, 3, 40),
			call(wait, 1030, 1, 2, 30),
			last,
		}
	}
	for name, of := range map[string]struct {
		history []mixedOperation
		want    porcupine.CheckResult
	}{
		"together":                           {history(ratelimit.Result{}), porcupine.Ok},
		"the last is told another time":      {history(ratelimit.Result{ResetAfter: 1}), porcupine.Illegal},
		"the last is told that more is left": {history(ratelimit.Result{Remaining: 1}), porcupine.Illegal},
		"alone":                              {history(ratelimit.Result{})[:3], porcupine.Illegal},
	} {
		got, picture := m.judge(t).check(t, of.history)
		require.Equal(t, of.want, got, name)
		if picture != "" {
			require.NoError(t, os.Remove(picture))
		}
	}
}

// This is a negative control: the judge finds the faults of broken variants in the same kinds of histories.
func TestJudgeOfMixesCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	rewritten := func(function string, oldNew ...string) func(t *testing.T, pool *pgxpool.Pool) {
		return func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			for i := 0; i < len(oldNew); i += 2 {
				pgtest.Rewrite(t, pool, function, oldNew[i], oldNew[i+1])
			}
		}
	}
	for name, broken := range map[string]struct {
		mix     string
		spoil   func(t *testing.T, pool *pgxpool.Pool)
		misread func(history []mixedOperation)
	}{
		"an AllowAll that takes from one of the tables": {mix: "sets", spoil: rewritten("rate_limit_all", "n.changed AND NOT n.durable", "false")},
		"an AllowAll that takes where there is room": {mix: "sets", spoil: rewritten("rate_limit_all",
			"EXIT WHEN granted = 0 AND most > 0 AND from_part < to_part;", "", "EXIT WHEN granted = most OR from_part = to_part;", "EXIT;",
		)},
		"a statement of many limiters that takes from one of the tables": {
			mix: "many limiters", spoil: rewritten("rate_limit_all", "n.changed AND NOT n.durable", "false"),
		},
		"rows that are read without a lock":         {mix: "sets", spoil: rewritten("rate_limit_all", "FOR UPDATE SKIP LOCKED", "OFFSET 0", "FOR UPDATE", "OFFSET 0")},
		"the time of the transaction's begin":       {mix: "sets", spoil: rewritten("rate_limit_all", "clock_timestamp()", "pg_catalog.now()")},
		"a log that forgets nothing but the newest": {mix: "sets", spoil: rewritten("_rate_limit_log", "log[1:n] || ARRAY[", "ARRAY[")},
		"another algorithm's row that is taken for one's own": {
			mix: "other policies", spoil: rewritten("rate_limit_all", "s.algorithm IS DISTINCT FROM algorithms[i]", "s.algorithm IS NULL"),
		},
		"a month that is not over while there is credit": {mix: "refunds and grants", spoil: rewritten("_rate_limit_calendar", "OR t - s.window_start >= s.scale", "")},
		"a second policy that counts nothing":            {mix: "several policies", spoil: rewritten("rate_limit_all", "WHERE d.ctid = n.tid", "WHERE d.ctid = n.tid AND d.prefix NOT LIKE '%/2'")},
		"credit that is spent twice": {mix: "refunds and grants", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			for _, step := range []string{"_rate_limit_fixed", "_rate_limit_sliding", "_rate_limit_log", "_rate_limit_calendar"} {
				rewritten(step, "s.expires_at := clock + s.reset_after_us",
					"s.expires_at := clock + s.reset_after_us; s.credit := s.credit + s.spent")(t, pool)
			}
		}},
		"a charge of no more than what is left": {mix: "charges", spoil: rewritten("_rate_limit_count",
			"units := units - spent;", "units := least(units - spent, greatest(s.remaining - s.credit, 0));",
		)},
		"a debt that is forgotten": {mix: "charges", spoil: rewritten("_rate_limit_count",
			"s.expires_at := clock + s.reset_after_us;", "s.expires_at := clock + s.reset_after_us / 2;",
		)},
		"a hold that outlives its end": {mix: "holds", spoil: rewritten("_rate_limit_live_durable", "s.held_next <= clock", "false")},
		"a hold that others do not see": {mix: "holds", spoil: rewritten("_rate_limit_beside_ephemeral",
			"s.held := coalesce(s.held, 0) + cost;", "s.held := 0;",
		)},
		"a settlement that keeps the hold": {mix: "holds", spoil: rewritten("_rate_limit_beside_ephemeral",
			"s.held := s.held - units;", "s.held := s.held;",
		)},
		"a settlement that counts what was held": {mix: "holds", spoil: rewritten("_rate_limit_beside_durable",
			"ELSIF cost > 0 THEN", "ELSIF cost > 0 THEN cost := units;",
		)},
		"a refund of what does not count any more": {mix: "several policies", spoil: rewritten("_rate_limit_fixed_refund",
			"taken_in = s.window_start AND taken_in = rolled.window_start", "taken_in IS NOT NULL",
		)},
		"a refund that goes by the old rows of its policies if one of them has none": {
			mix: "refunds of what is made anew", spoil: rewritten("rate_limit_all",
				"OR s.tid IS NOT NULL;", "OR NOT EXISTS (SELECT FROM unnest(row_of[from_part : to_part]) AS r (i) WHERE (rows[r.i]).tid IS NULL);",
			),
		},
		"a reset that resets nothing": {mix: "resets", spoil: func(t *testing.T, pool *pgxpool.Pool) {
			pgtest.Rewrite(t, pool, "rate_limit_reset", "r.key = key", "r.key = ''")
		}},
		"transactions that are rolled back, and said to be committed": {mix: "transactions", misread: func(history []mixedOperation) {
			for i := range history {
				if history[i].kind == rolledBack {
					history[i].kind = allowAllTx
				}
			}
		}},
		"an AllowAll that says it was denied": {mix: "sets", misread: func(history []mixedOperation) {
			i := slices.IndexFunc(history, func(op mixedOperation) bool { return op.kind == allowAll && op.results.Allowed })
			if i >= 0 {
				history[i].results.Allowed = false
			}
		}},
	} {
		require.Contains(t, mixes(briefly), broken.mix)
		random := rand.New(rand.NewPCG(random.Uint64(), 0))
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			caught := porcupine.Ok
			for attempt := 0; caught == porcupine.Ok && attempt < 100; attempt++ {
				m := mixes(briefly << min(attempt/4, 5))[broken.mix] // a busy machine needs more time
				db := withMonths(t, m.month)
				if broken.spoil != nil {
					broken.spoil(t, db.Pool)
				}
				history, _ := m.run(t, db, random.Uint64())
				if broken.misread != nil {
					broken.misread(history)
				}
				var picture string
				if caught, picture = m.judge(t).check(t, history); picture != "" {
					require.NoError(t, os.Remove(picture))
				}
			}
			require.Equal(t, porcupine.Illegal, caught)
		})
	}
}
