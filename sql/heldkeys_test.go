package sql_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// If skip_held is true, requests for rows that are not held are decided as the model decides them.
func TestSkippingHeldRowsEqualsTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	seed := limitertest.Seed(t)
	passed, refused := 0, 0
	enough := 8 * limitertest.Rounds(t)
	for story := uint64(0); story < uint64(enough) || passed-refused <= enough; story++ {
		require.Less(t, story, uint64(3_000), "passed over %d, refused %d", passed, refused)
		r := rand.New(rand.NewPCG(seed, story))
		steps, err := modeltest.NewStory(r, 12)
		require.NoError(t, err)
		space := fmt.Sprintf("%d ", story)
		holder := pgtest.Begin(t, db)
		held := map[modeltest.RowID]bool{}
		asModel := modeltest.NewRows()
		for i := range steps {
			s := &steps[i]
			s.Skip = true
			if i == len(steps)/2 { // from here on, half of the rows are held
				for _, durable := range []bool{false, true} {
					for id := range asModel[durable] {
						if r.IntN(2) == 0 {
							pgtest.Exec(
								t,
								holder,
								"SELECT FROM "+pgtest.Table(durable)+" WHERE prefix = $1 AND key = $2 FOR UPDATE",
								space+id.Name,
								id.Key,
							)
							held[modeltest.RowID{Name: pgtest.Table(durable) + id.Name, Key: id.Key}] = true
						}
					}
				}
			}
			if slices.ContainsFunc(s.Elements, func(e modeltest.Element) bool { return e.Cost != 0 }) {
				before := len(s.Elements)
				all := s.Elements
				s.Elements = slices.DeleteFunc(
					slices.Clone(all),
					func(e modeltest.Element) bool {
						return held[modeltest.RowID{Name: pgtest.Table(s.Durable) + s.Name, Key: e.Key}]
					},
				)
				passed += before - len(s.Elements)
				asModel.Decide(*s)
				asked := *s
				asked.Elements = all
				c := callOf(space, asked)
				c.Undecide()
				require.NoError(t, c.Query(t.Context(), db.Pool, false))
				got := map[int64]model.Decision{}
				for i, p := range c.Into {
					if p.Decision.Granted != engine.PassedOver {
						got[int64(i+1)] = p.Decision
					}
				}
				place := 0
				for ord, e := range all {
					title := fmt.Sprintf("%s=%d, story %d, element %d of %v", modeltest.SeedVariable, seed, story, ord+1, asked)
					d, ok := got[int64(ord+1)]
					var want model.Decision
					if held[modeltest.RowID{Name: pgtest.Table(s.Durable) + s.Name, Key: e.Key}] {
						require.True(t, ok, title)
						if d.Granted == engine.Locked {
							continue
						}
						// If a row is missing, rate_limit_all first reads rows without locks. A request that is denied then stays denied.
						one := *s
						one.Elements = []modeltest.Element{e}
						asModel.Decide(one)
						want = one.Elements[0].Decision
						require.Zero(t, want.Granted, title)
						refused++
					} else {
						require.True(t, ok, title)
						want = s.Elements[place].Decision
						place++
					}
					require.Equal(
						t,
						[]any{want.Granted, want.Remaining, want.RetryAfter, want.ResetAfter},
						[]any{d.Granted, d.Remaining, d.RetryAfter, d.ResetAfter},
						title,
					)
				}
			}
		}
		require.NoError(t, holder.Rollback(t.Context()))
	}
	require.Less(t, refused, passed/2)
}

// rate_limit_all takes nothing for a request if one of the request's rows is held. rate_limit_all decides all other
// requests.
func TestAllSkipsRequestsWithAHeldPart(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	a, b, c := limitertest.ThreeLimits(t, db.Pool, 10, 10, 10)
	part := func(l *ratelimit.Limiter, key string) modeltest.Part {
		return modeltest.Part{ID: modeltest.RowID{Name: l.Config().Name, Key: key}, Durable: l.Config().Durable, Policy: limitertest.Model(l.Config().Policy).Rules[0], Cost: 2}
	}
	_, err := b.Allow(t.Context(), "held")
	require.NoError(t, err)
	holder := limitertest.Hold(t, db, b.Config(), "held")
	requests := []modeltest.Request{
		{Parts: []modeltest.Part{part(a, "x"), part(b, "held"), part(c, "all")}, Count: 1},
		{Parts: []modeltest.Part{part(a, "x"), part(b, "new"), part(c, "all")}, Count: 2},
		{Parts: []modeltest.Part{part(b, "held")}, Count: 1},
	}
	got := map[int64]int64{}
	args := limitertest.AllArguments(append(limitertest.AllArrays(requests), nil, nil, limitertest.T0, nil, nil, nil, nil, true)...)
	require.NoError(
		t,
		queryDecisions(t.Context(), db.Pool, engine.Text("all", ""), args, func(ord int64, d model.Decision) { got[ord] = d.Granted }),
	)
	require.Equal(t, map[int64]int64{1: engine.Undecided, 2: engine.Locked, 3: engine.Undecided, 4: 2, 5: 2, 6: 2, 7: engine.Locked}, got)
	require.NoError(t, holder.Commit(t.Context()))
	require.EqualValues(t, 4, limitertest.Taken(t, db.Pool, a.Config(), "x"))
	require.EqualValues(t, 4, limitertest.Taken(t, db.Pool, c.Config(), "all"))
	require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, b.Config(), "held"))
}
