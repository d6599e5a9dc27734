package sql_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Postgres stores a log of more than 250 entries outside of its row. TestSQLEqualsModel has only short logs.
func TestThoroughLongLogsEqualTheModel(t *testing.T) {
	t.Parallel()
	const window = 1000
	policy := model.SlidingLog{Limit: model.MaxLogLimit, Window: model.Duration(window)}
	for _, durable := range []bool{false, true} {
		var steps []modeltest.Step
		ask := func(p model.Rules, clock int64, elements ...modeltest.Element) {
			steps = append(steps, modeltest.Step{Policy: p, Durable: durable, Name: "a", Clock: clock, Elements: elements})
		}
		for i := range int64(window + 20) { // each take after the first 1000 fits because an older entry leaves
			ask(policy, limitertest.C0+i, modeltest.Element{Key: "x", Cost: 1, Count: 1})
		}
		for i := range int64(window / 2) {
			ask(
				policy,
				limitertest.C0+2*window+i,
				modeltest.Element{Key: "x", Cost: 2, Count: 1},
				modeltest.Element{Key: "x", Cost: 900, Count: 1},
				modeltest.Element{Key: "y", Cost: 1, Count: 1},
			)
		}
		ask(
			policy,
			limitertest.C0+2*window,
			modeltest.Element{Key: "x", Cost: 3, Count: 1},
			modeltest.Element{Key: "x", Cost: 0, Count: 1},
		) // the clock is set back
		ask(
			policy,
			limitertest.C0-window,
			modeltest.Element{Key: "x", Cost: 3, Count: 1},
			modeltest.Element{Key: "x", Cost: 1, Count: 1},
		) // the clock jumps ahead
		ask(
			model.SlidingLog{Limit: 500, Window: model.Duration(window)},
			limitertest.C0-window+200,
			modeltest.Element{Key: "x", Cost: 100, Count: 1},
		) // the request does not fit yet
		ask(policy, limitertest.C0-window+200, modeltest.Element{Key: "x", Cost: 100, Count: 3})
		ask(
			model.SlidingLog{Limit: model.MaxLogLimit, Window: model.Duration(window / 4)},
			limitertest.C0-window+200,
			modeltest.Element{Key: "x", Cost: 100, Count: 3},
		)
		ask(model.FixedWindow{Limit: 10, Window: model.Duration(window)}, limitertest.C0-window+200, modeltest.Element{Key: "x", Cost: 1, Count: 1})
		ask(policy, limitertest.C0-window+200, modeltest.Element{Key: "x", Cost: 1, Count: 1})

		pool := pgtest.New(t).Pool
		require.NoError(t, replay(t.Context(), pool, "", steps[:window], 50))
		require.Equal(t, model.MaxLogLimit, pgtest.Scalar[int](t, pool, "SELECT max(cardinality(log)) FROM "+pgtest.Table(durable)))
		pgtest.Exec(t, pool, "DELETE FROM "+pgtest.Table(durable))
		require.NoError(t, replay(t.Context(), pool, "", steps, 50))
	}
}

// These steps of a log are too rare in the stories of TestSQLEqualsModel.
func TestRareStepsOfLogsEqualTheModel(t *testing.T) {
	t.Parallel()
	policy := model.SlidingLog{Limit: 10, Window: time.Minute}
	ask := func(clock int64, costs ...int64) modeltest.Step {
		s := modeltest.Step{Policy: policy, Name: "a", Clock: clock}
		for _, cost := range costs {
			s.Elements = append(s.Elements, modeltest.Element{Key: "x", Cost: cost, Count: 1})
		}
		return s
	}
	giveBack := ask(limitertest.C0+limitertest.Second, -6, 1)
	giveBack.Elements[0].Refund = []model.Take{{Units: 6, In: limitertest.C0 + 9*limitertest.Second}}
	for name, test := range map[string]struct {
		steps                  []modeltest.Step
		function, right, wrong string
	}{
		"a refund of the newest entry moves the log's own time back, which what comes behind it goes by": {
			[]modeltest.Step{ask(limitertest.C0, 2), ask(limitertest.C0+9*limitertest.Second, 6), giveBack},
			"_rate_limit_log_refund", "s.window_start := t - public._rate_limit_entry_age(s.log[n], t);", "",
		},
		"a denial waits for as many entries as the credit lacks": {
			[]modeltest.Step{ask(limitertest.C0, -5), ask(limitertest.C0+limitertest.Second, 4), ask(limitertest.C0+2*limitertest.Second, 8), ask(limitertest.C0+4*limitertest.Second, 6)},
			"_rate_limit_log", "s.count - s.credit + greatest", "s.count + greatest",
		},
	} {
		for _, broken := range []bool{false, true} {
			db := pgtest.New(t)
			if broken {
				pgtest.Rewrite(t, db.Pool, test.function, test.right, test.wrong)
			}
			err := replay(t.Context(), db.Pool, "", test.steps, 10)
			if !broken {
				require.NoError(t, err, name)
				continue
			}
			var found *difference
			require.ErrorAs(t, err, &found, name)
		}
	}
}
