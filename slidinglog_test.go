package ratelimit

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// The stories of TestSQLEqualsModel have short logs. Those of more than 250 entries are stored in another way.
func TestLongLogsEqualTheModel(t *testing.T) {
	t.Parallel()
	const window = 1000
	policy := SlidingLog{Limit: model.MaxLogLimit, Window: model.Duration(window)}
	for _, durable := range []bool{false, true} {
		var steps []step
		ask := func(p ruled, clock int64, elements ...element) {
			steps = append(steps, step{policy: p, durable: durable, name: "a", clock: clock, elements: elements})
		}
		for i := range int64(window + 20) { // then each is taken when another one leaves
			ask(policy, c0+i, element{key: "x", cost: 1, count: 1})
		}
		for i := range int64(window / 2) {
			ask(
				policy,
				c0+2*window+i,
				element{key: "x", cost: 2, count: 1},
				element{key: "x", cost: 900, count: 1},
				element{key: "y", cost: 1, count: 1},
			)
		}
		ask(
			policy,
			c0+2*window,
			element{key: "x", cost: 3, count: 1},
			element{key: "x", cost: 0, count: 1},
		) // the clock steps back
		ask(
			policy,
			c0-window,
			element{key: "x", cost: 3, count: 1},
			element{key: "x", cost: 1, count: 1},
		) // and jumps
		ask(
			SlidingLog{Limit: 500, Window: model.Duration(window)},
			c0-window+200,
			element{key: "x", cost: 100, count: 1},
		) // not yet
		ask(policy, c0-window+200, element{key: "x", cost: 100, count: 3})
		ask(
			SlidingLog{Limit: model.MaxLogLimit, Window: model.Duration(window / 4)},
			c0-window+200,
			element{key: "x", cost: 100, count: 3},
		)
		ask(FixedWindow{Limit: 10, Window: model.Duration(window)}, c0-window+200, element{key: "x", cost: 1, count: 1})
		ask(policy, c0-window+200, element{key: "x", cost: 1, count: 1})

		pool := pgtest.New(t).Pool
		require.NoError(t, replay(t.Context(), pool, "", steps[:window], 50))
		require.Equal(t, model.MaxLogLimit, pgtest.Scalar[int](t, pool, "SELECT max(cardinality(log)) FROM "+pgtest.Table(durable)))
		pgtest.Exec(t, pool, "DELETE FROM "+pgtest.Table(durable))
		require.NoError(t, replay(t.Context(), pool, "", steps, 50))
	}
}

// Cases that the stories of TestSQLEqualsModel meet too rarely for their controls.
func TestRareStepsOfLogsEqualTheModel(t *testing.T) {
	t.Parallel()
	policy := SlidingLog{Limit: 10, Window: time.Minute}
	ask := func(clock int64, costs ...int64) step {
		s := step{policy: policy, name: "a", clock: clock}
		for _, cost := range costs {
			s.elements = append(s.elements, element{key: "x", cost: cost, count: 1})
		}
		return s
	}
	giveBack := ask(c0+second, -6, 1)
	giveBack.elements[0].refund = []model.Take{{Units: 6, In: c0 + 9*second}}
	for name, test := range map[string]struct {
		steps                  []step
		function, right, wrong string
	}{
		"a refund of the newest entry moves the log's own time back, which what comes behind it goes by": {
			[]step{ask(c0, 2), ask(c0+9*second, 6), giveBack},
			"_rate_limit_log_refund", "s.window_start := t - public._rate_limit_entry_age(s.log[n], t);", "",
		},
		"a denial waits for as many entries as the credit lacks": {
			[]step{ask(c0, -5), ask(c0+second, 4), ask(c0+2*second, 8), ask(c0+4*second, 6)},
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
