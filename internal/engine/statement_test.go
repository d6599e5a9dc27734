package engine_test

import (
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// kept describes the units that a limiter has taken from a key, for a later refund.
type kept struct {
	limiter *ratelimit.Limiter
	key     string
	units   int64
	takes   []model.Take
}

// One statement decides requests of six limiters, with all algorithms and both tables. The decisions are those of the
// models. The denials are remembered as usual.
func TestMixedStatementEqualsTheModel(t *testing.T) {
	t.Parallel()

	const stories, steps = 30, 20
	db := pgtest.New(t)
	seed := limitertest.Seed(t)
	var takes, refusals, looks, grants, refunds, sets int
	remembered := map[int16]int{}
	for story := range uint64(stories * limitertest.Rounds(t)) {
		pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_ephemeral, rate_limit_durable")
		r := rand.New(rand.NewPCG(seed, story))
		clock := &limitertest.Clock{At: limitertest.T0}
		client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{
			DenialMaxAge: testkit.Amply, Test: ratelimit.TestConfig{Now: clock.Now},
		})
		limiters := make([][]*ratelimit.Limiter, 6) // each limiter, and the same limiter with other numbers
		for i := range limiters {
			draw := func() ratelimit.Policy {
				limit, window := 1+r.Int64N(8), time.Duration(1+r.IntN(20))*time.Second
				policy := []ratelimit.Policy{
					ratelimit.FixedWindow{Limit: limit, Window: window}, ratelimit.SlidingWindow{Limit: limit, Window: window},
					ratelimit.TokenBucket{Capacity: limit, Refill: 1 + r.Int64N(3), Every: window}, ratelimit.SlidingLog{Limit: limit, Window: window},
				}[i%4]
				if i == 3 && story%2 == 0 {
					return limitertest.Policy(model.CalendarWindow{
						Limit: limit, Span: modeltest.OneOf(r, modeltest.Units()), Zone: modeltest.OneOf(r, modeltest.SteadyZones()),
					}.Numbers())
				}
				if i == 4 {
					return ratelimit.All(policy, ratelimit.SlidingLog{Limit: limit + 2, Window: window}, ratelimit.TokenBucket{Capacity: limit + 1, Refill: 1, Every: window})
				}
				return policy
			}
			config := ratelimit.Config{Name: fmt.Sprint("limiter ", i), Policy: draw(), Durable: i%3 == 2}
			l := limitertest.Of(t, client, config)
			config.Policy = draw()
			limiters[i] = []*ratelimit.Limiter{l, limitertest.With(t, l, draw()), limitertest.Of(t, client, config)}
		}
		limiters[5][0] = limitertest.With(t, limiters[5][0], limiters[1][0].Config().Policy) // two limiters have the same policy
		asModel := modeltest.NewRows()
		var given []kept
		for step := range steps {
			clock.At = clock.At.Add(time.Duration(r.IntN(4)*r.IntN(4)) * time.Second)
			if r.IntN(20) == 0 {
				clock.At = clock.At.Add(-time.Duration(r.IntN(60)) * time.Second)
			}
			look, onePolicy := r.IntN(8) == 0, r.IntN(5) == 0
			var requests []*engine.Request
			asked := map[*engine.Request][]kept{} // the parts of each request, by limiter
			for range 2 + r.IntN(9) {
				l, key := limiters[r.IntN(6)][r.IntN(3)], fmt.Sprintf("{%d}%s", story, [...]string{"x", "y", "longer"}[r.IntN(3)])
				if onePolicy {
					l = limiters[1+4*r.IntN(2)][0]
				}
				q := limitertest.EngineOf(client).Requests.Get(limitertest.Space(l), limitertest.Model(l.Config().Policy))
				add := func(l *ratelimit.Limiter, cost int64, back []model.Take) {
					q.Add(limitertest.Space(l), limitertest.Model(l.Config().Policy), key, cost, back)
					asked[q] = append(asked[q], kept{limiter: l, key: key, units: cost})
				}
				switch kind := r.IntN(8); {
				case look:
					add(l, 0, nil)
				case onePolicy:
					add(l, 1+r.Int64N(min(limitertest.Model(l.Config().Policy).Limit, 3)), nil)
				case kind == 0:
					add(l, -1-r.Int64N(3), nil)
					grants++
				case kind == 1 && len(given) > 0:
					k := given[r.IntN(len(given))] // may be refunded more than once
					q.Space, q.Policy, key = limitertest.Space(k.limiter), limitertest.Model(k.limiter.Config().Policy), k.key
					add(k.limiter, -k.units, k.takes)
					refunds++
				case kind == 2:
					set := limitertest.EngineOf(client).NewSet()
					q = set.Request
					for _, i := range r.Perm(6)[:2+r.IntN(3)] {
						l := limiters[i][r.IntN(3)]
						cost := 1 + r.Int64N(min(limitertest.Model(l.Config().Policy).Limit, 3))
						require.True(t, set.Add(engine.Ask{Space: limitertest.Space(l), Policy: limitertest.Model(l.Config().Policy), Key: key, Cost: cost}))
						asked[q] = append(asked[q], kept{limiter: l, key: key, units: cost})
					}
					sets++
				default:
					q.Count = 1 + r.Int64N(4)
					add(l, 1+r.Int64N(min(limitertest.Model(l.Config().Policy).Limit, 3)), nil)
				}
				requests = append(requests, q)
			}
			expected := make([]modeltest.Request, len(requests))
			for i, q := range requests {
				expected[i].Count = q.Count
				for _, p := range q.Parts {
					part := modeltest.Part{ID: modeltest.RowID{Name: p.Name, Key: p.Key}, Durable: p.Space.Durable, Policy: p.Rules, Cost: p.Cost}
					if p.Refund != nil {
						part.Refund = []model.Take{*p.Refund}
					}
					expected[i].Parts = append(expected[i].Parts, part)
				}
			}
			title := fmt.Sprintf("%s=%d, story %d, step %d: %+v", modeltest.SeedVariable, seed, story, step, expected)
			asModel.DecideAll(expected, clock.At.UnixMicro())
			tx := ownTransaction(limiters[0][0])
			tx.SkipHeld = r.IntN(3) == 0
			require.NoError(t, limitertest.EngineOf(client).Batcher.Decide(t.Context(), db.Pool, requests, tx), title)

			denied := map[engine.DenialKey]*engine.Request{} // the last denial of each key; nil if forgotten
			for i, q := range requests {
				for j := range q.Parts {
					got, want := q.Parts[j].Decision, expected[i].Parts[j].Decision
					got.DecidedAt = got.DecidedAt.UTC()
					want.State, want.Taken.Units = modeltest.Told(want.State), 0
					require.Equal(t, want, got, "request %d, part %d, of %s", i, j, title)
				}
				granted, first := q.Parts[0].Decision.Granted, 0
				for _, k := range asked[q] {
					if granted > 0 && !q.Looks() {
						denied[limitertest.Space(k.limiter).DenialKey(k.key)] = nil
					}
					parts := q.Parts[first : first+len(limitertest.Model(k.limiter.Config().Policy).Rules)]
					first += len(parts)
					if k.units > 0 && granted > 0 {
						for j := range parts {
							k.takes = append(k.takes, parts[j].Decision.TakenBy(parts[j].Rules, k.units, granted))
						}
						given = append(given, k)
					}
				}
				switch {
				case q.Looks():
					looks++
				case q.Parts[0].Cost > 0 && granted == q.Count:
					takes++
				case q.Parts[0].Cost > 0:
					refusals++
					if len(q.Parts) == 1 {
						denied[q.Space.DenialKey(q.Parts[0].Key)] = q
					}
				}
			}
			for key, q := range denied {
				if q == nil {
					for _, view := range limiters {
						if limitertest.Space(view[0]).DenialKey(key.Key) == key && len(limitertest.Model(view[0].Config().Policy).Rules) == 1 {
							for _, l := range view {
								require.False(t, remembersDenial(l, key.Key, limitertest.Model(l.Config().Policy).Limit), title)
							}
						}
					}
					continue
				}
				p := &q.Parts[0]
				var result engine.Outcome
				ok := limitertest.EngineOf(client).Denials.Lookup(q.Space, p.Rules, key.Key, p.Cost, &result)
				require.True(t, ok, "a denial of %v: %s", p.Rules, title)
				require.Equal(t, model.Duration(p.Decision.RetryAfter), result.RetryAfter, title)
				remembered[p.Rules.Numbers().Algorithm]++
			}
			for durable, want := range asModel {
				require.Equal(t, want, pgtest.StoredRows(t, db.Pool, durable), title)
			}
		}
	}
	for _, n := range []int{takes, refusals, looks, grants, refunds, sets} {
		require.Greater(t, n, 100, "takes %d, refusals %d, looks %d, grants %d, refunds %d, sets %d",
			takes, refusals, looks, grants, refunds, sets)
	}
	for _, a := range algorithm.All() {
		require.Greater(t, remembered[a.Code], 20, a.Word)
	}
}

// The policy changes from each algorithm to every other and back, with larger and smaller numbers, after few or many
// takes, and at different times. The limiter's results are those of the models, with and without remembered denials.
func TestThoroughEveryChangeOfPolicyEqualsTheModel(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	algorithms := limitertest.SlowPolicies(10)
	moments := []time.Duration{0, 8 * time.Second, 40 * time.Second, 119 * time.Second}
	for fromName, from := range algorithms {
		from := limitertest.NumbersOf(from)["as it is"]
		for toName, to := range algorithms {
			t.Run(fromName+" to "+toName, func(t *testing.T) {
				t.Parallel()
				half := crc32.ChecksumIEEE([]byte(t.Name())) % 2
				afterwards := []time.Duration{moments[half], moments[half+2]}
				if limitertest.Rounds(t) > 1 {
					afterwards = slices.Concat(moments, []time.Duration{time.Microsecond, time.Minute, time.Hour})
				}
				clock := &limitertest.Clock{At: limitertest.T0}
				config := ratelimit.Config{
					Name:   fromName + " to " + toName,
					Policy: from,
				}
				clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: clock.Now}}
				remembers := limitertest.New(t, db.Pool, config, clientConfig)
				config.NoDenialCache = true
				asks := limitertest.New(t, db.Pool, config, clientConfig)
				type caller struct {
					limiter *ratelimit.Limiter
					taken   int64
				}
				var callers []caller // these callers ask at the same time, each for a different key
				for _, taken := range []int64{1, 6, 10} {
					callers = append(callers, caller{limiter: remembers, taken: taken}, caller{limiter: asks, taken: taken})
				}
				for change, to := range limitertest.NumbersOf(to) {
					for _, later := range afterwards {
						expected := modeltest.NewRows()
						clock.At = limitertest.T0
						for i, ask := range []struct {
							after  time.Duration
							policy ratelimit.Policy
							cost   int64
						}{
							{0, from, -1}, {0, from, 10}, {later, to, 0}, {0, to, 2}, {0, to, 1}, // the first ask takes the units
							{time.Second, from, 0}, {0, from, 2}, {0, to, 1},
						} {
							clock.At = clock.At.Add(ask.after)
							s := modeltest.Step{Policy: limitertest.Rule(ask.policy), Name: config.Name, Clock: clock.At.UnixMicro()}
							views := make([]*ratelimit.Limiter, len(callers))
							for n, c := range callers {
								views[n] = limitertest.Under(c.limiter, ask.policy)
								e := modeltest.Element{Key: fmt.Sprint(n, change, later), Cost: ask.cost, Count: 1}
								if i == 0 {
									e.Cost = c.taken
								}
								s.Elements = append(s.Elements, e)
							}
							expected.Decide(s)
							got, errs := make([]ratelimit.Result, len(callers)), make([]error, len(callers))
							testkit.Together(
								len(callers),
								func(n int) { got[n], errs[n] = views[n].AllowN(t.Context(), s.Elements[n].Key, s.Elements[n].Cost) },
							)
							require.NoError(t, errors.Join(errs...))
							for n := range callers {
								got[n].Source = ratelimit.SourceDatabase // may also be a remembered denial
								want := requestsOf(views[n], s.Elements[n:n+1])[0]
								want.Parts[0].Decision = s.Elements[n].Decision
								require.Equal(
									t,
									limitertest.Plain(limitertest.ResultOf(new(want.Outcome()))),
									limitertest.Plain(got[n]),
									"%s, caller %d, %v later, request %d",
									change,
									n,
									later,
									i,
								)
							}
						}
					}
				}
			})
		}
	}
}
