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

// Two calls of Wait that were allowed together spend the last credit, which lasts longer than what they have taken.
// Both are told when that is over, and nobody else may be told the time of another.
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

// Negative controls: the judge finds what is wrong with broken variants, in histories like those above.
func TestJudgeOfMixesCatches(t *testing.T) {
	t.Parallel()

	random := random(t)
	rewritten := func(oldNew ...string) func(t *testing.T, pool *pgxpool.Pool) {
		return func(t *testing.T, pool *pgxpool.Pool) {
			t.Helper()
			for i := 0; i < len(oldNew); i += 2 {
				pgtest.Rewrite(t, pool, "rate_limit_all", oldNew[i], oldNew[i+1])
			}
		}
	}
	for name, broken := range map[string]struct {
		mix     string
		spoil   func(t *testing.T, pool *pgxpool.Pool)
		misread func(history []mixedOperation)
	}{
		"an AllowAll that takes from one of the tables": {mix: "sets", spoil: rewritten("WHERE n.to_write AND NOT n.durable", "WHERE false")},
		"an AllowAll that takes where there is room": {mix: "sets", spoil: rewritten(
			"                    CASE algorithm\n                    WHEN 1 THEN\n                        IF granted",
			"granted := CASE WHEN just_look THEN 0 ELSE least(asked, remaining / r.cost) END; CASE algorithm WHEN 1 THEN IF granted",
		)},
		"a statement of many limiters that takes from one of the tables": {
			mix: "many limiters", spoil: rewritten("WHERE n.to_write AND NOT n.durable", "WHERE false"),
		},
		"rows that are read without a lock":         {mix: "sets", spoil: rewritten("FOR UPDATE SKIP LOCKED", "OFFSET 0", "FOR UPDATE", "OFFSET 0")},
		"the time of the transaction's begin":       {mix: "sets", spoil: rewritten("clock_timestamp()", "pg_catalog.now()")},
		"a log that forgets nothing but the newest": {mix: "sets", spoil: rewritten("s.log[1:newest] || ARRAY[", "ARRAY[")},
		"another algorithm's row that is taken for one's own": {
			mix: "other policies", spoil: rewritten("writers[at] END) <> algorithm", "writers[at] END) < 0"),
		},
		"a month that is not over while there is credit": {mix: "refunds and grants", spoil: rewritten("OR t - s.window_start >= s.scale", "")},
		"a second policy that counts nothing":            {mix: "several policies", spoil: rewritten("WHERE d.ctid = n.tid", "WHERE d.ctid = n.tid AND d.prefix NOT LIKE '%/2'")},
		"credit that is spent twice": {mix: "refunds and grants", spoil: rewritten(
			"s.expires_at := clock + reset_after_us", "s.expires_at := clock + reset_after_us; s.credit := s.credit + spent",
		)},
		"a refund of what does not count any more": {mix: "several policies", spoil: rewritten(
			"taken_in[part] = s.window_start AND s.window_start = r.window_start", "taken_in[part] IS NOT NULL",
		)},
		"a refund that goes by the old rows of its policies if one of them has none": {
			mix: "refunds of what is made anew", spoil: rewritten(
				"gives AND NOT grants THEN EXISTS (", "gives AND NOT grants THEN NOT EXISTS (",
				".tid IS NOT NULL)", ".tid IS NULL)",
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
		if mixes(briefly)[broken.mix].calls == nil {
			continue
		}
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
