package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// kept is what a limiter has taken of a key, for a refund.
type kept struct {
	limiter *Limiter
	key     string
	units   int64
	takes   []model.Take
}

// One statement decides requests of six limiters, of all algorithms and in both tables, as the models do. Their denials
// are remembered as those of any statement.
func TestMixedStatementEqualsTheModel(t *testing.T) {
	t.Parallel()

	const stories, steps = 30, 20
	db := pgtest.New(t)
	seed := testSeed(t)
	var takes, refusals, looks, grants, refunds, sets int
	remembered := map[int16]int{}
	for story := range uint64(stories * rounds(t)) {
		pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_ephemeral, rate_limit_durable")
		r := rand.New(rand.NewPCG(seed, story))
		clock := &setClock{at: t0}
		client := newClient(t, db.Pool, ClientConfig{
			DenialMaxAge: amply, Test: TestConfig{Now: clock.now},
		})
		limiters := make([][]*Limiter, 6) // and the same with other numbers
		for i := range limiters {
			draw := func() Policy {
				limit, window := 1+r.Int64N(8), time.Duration(1+r.IntN(20))*time.Second
				policy := []Policy{
					FixedWindow{limit, window}, SlidingWindow{limit, window},
					TokenBucket{limit, 1 + r.Int64N(3), window}, SlidingLog{limit, window},
				}[i%4]
				if i == 3 && story%2 == 0 {
					return policyOf(model.CalendarWindow{
						Limit: limit, Span: modeltest.OneOf(r, modeltest.Units()), Zone: modeltest.OneOf(r, modeltest.SteadyZones()),
					}.Numbers())
				}
				if i == 4 {
					return All(policy, SlidingLog{limit + 2, window}, TokenBucket{limit + 1, 1, window})
				}
				return policy
			}
			l := client.limiter(t, Config{Name: fmt.Sprint("limiter ", i), Policy: draw(), Durable: i%3 == 2})
			limiters[i] = []*Limiter{l, l.with(t, draw())}
		}
		limiters[5][0] = limiters[5][0].with(t, limiters[1][0].Config().Policy) // two limiters have the same policy
		asModel := modeltest.NewRows()
		var given []kept
		for step := range steps {
			clock.at = clock.at.Add(time.Duration(r.IntN(4)*r.IntN(4)) * time.Second)
			if r.IntN(20) == 0 {
				clock.at = clock.at.Add(-time.Duration(r.IntN(60)) * time.Second)
			}
			look, onePolicy := r.IntN(8) == 0, r.IntN(5) == 0
			var requests []*engine.Request
			asked := map[*engine.Request][]kept{} // its parts, by limiter
			for range 2 + r.IntN(9) {
				l, key := limiters[r.IntN(6)][r.IntN(2)], fmt.Sprintf("{%d}%s", story, [...]string{"x", "y", "longer"}[r.IntN(3)])
				if onePolicy {
					l = limiters[1+4*r.IntN(2)][0]
				}
				q := client.engine.Requests.Get(l.space, l.model)
				add := func(l *Limiter, cost int64, back []model.Take) {
					q.Add(l.space, l.model, key, cost, back)
					asked[q] = append(asked[q], kept{limiter: l, key: key, units: cost})
				}
				switch kind := r.IntN(8); {
				case look:
					add(l, 0, nil)
				case onePolicy:
					add(l, 1+r.Int64N(min(l.model.Limit, 3)), nil)
				case kind == 0:
					add(l, -1-r.Int64N(3), nil)
					grants++
				case kind == 1 && len(given) > 0:
					k := given[r.IntN(len(given))] // perhaps once more
					q.Space, q.Policy, key = k.limiter.space, k.limiter.model, k.key
					add(k.limiter, -k.units, k.takes)
					refunds++
				case kind == 2:
					set := client.engine.NewSet()
					q = set.Request
					for _, i := range r.Perm(6)[:2+r.IntN(3)] {
						l := limiters[i][r.IntN(2)]
						cost := 1 + r.Int64N(min(l.model.Limit, 3))
						require.True(t, set.Add(engine.Ask{Space: l.space, Policy: l.model, Key: key, Cost: cost}))
						asked[q] = append(asked[q], kept{limiter: l, key: key, units: cost})
					}
					sets++
				default:
					q.Count = 1 + r.Int64N(4)
					add(l, 1+r.Int64N(min(l.model.Limit, 3)), nil)
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
			title := fmt.Sprintf("%s=%d, story %d, step %d: %+v", seedVariable, seed, story, step, expected)
			asModel.DecideAll(expected, clock.at.UnixMicro())
			tx := limiters[0][0].ownTransaction()
			tx.SkipHeld = r.IntN(3) == 0
			require.NoError(t, client.engine.Batcher.Decide(t.Context(), db.Pool, requests, tx), title)

			denied := map[engine.DenialKey]*engine.Request{} // the last of each key; nil: none, or it is forgotten
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
						denied[engine.DenialKey{Space: k.limiter.space, Key: k.key}] = nil
					}
					parts := q.Parts[first : first+len(k.limiter.model.Rules)]
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
						denied[engine.DenialKey{Space: q.Space, Key: q.Parts[0].Key}] = q
					}
				}
			}
			for key, q := range denied {
				if q == nil {
					for _, view := range limiters {
						if view[0].space == key.Space && len(view[0].model.Rules) == 1 {
							for _, l := range view {
								require.False(t, l.remembersDenial(key.Key, l.model.Limit), title)
							}
						}
					}
					continue
				}
				p := &q.Parts[0]
				var result engine.Outcome
				ok := client.engine.Denials.Lookup(key.Space, p.Rules, key.Key, p.Cost, &result)
				require.True(t, ok, "a denial of %v: %s", p.Rules, title)
				require.Equal(t, model.Duration(p.Decision.RetryAfter), result.RetryAfter, title)
				remembered[p.Rules.Numbers().Algorithm]++
			}
			for durable, want := range asModel {
				require.Equal(t, want, storedRows(t, db.Pool, durable), title)
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

// Twenty limiters of a client, each with eight callers, keep two connections busy, and each of them decides exactly.
// Twenty clients keep more busy.
func TestTwentyLimitersShareTwoConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const limiters, callers, limit, calls = 20, 8, 10, 15
	load := func(t *testing.T, share bool) *statements {
		t.Helper()
		pool, asked := tracedPool(t, pgtest.New(t))
		client := newClient(t, pool, ClientConfig{})
		var all []*Limiter
		for i := range limiters {
			kind := [...]string{"fixed window", "sliding window", "token bucket", "sliding log", "calendar"}[i%5]
			name, policy := fmt.Sprint("limiter ", i), slowPolicies(limit)[kind]
			config := Config{Name: name, Policy: policy, Durable: i%3 == 0, NoDenialCache: true}
			if share {
				all = append(all, client.limiter(t, config))
			} else {
				all = append(all, newLimiter(t, pool, config))
			}
		}
		errs := make([]error, limiters*callers)
		testkit.Together(len(errs), func(i int) { // each with a key of its own, so that no row is waited for
			allowed := 0
			for range calls {
				result, err := all[i%limiters].Allow(context.Background(), fmt.Sprint("caller ", i))
				errs[i] = errors.Join(errs[i], err)
				if result.Allowed {
					allowed++
				}
			}
			if allowed != limit {
				errs[i] = errors.Join(errs[i], fmt.Errorf("%d of %d were allowed", allowed, limit))
			}
		})
		require.NoError(t, errors.Join(errs...))
		return asked
	}
	one := load(t, true)
	require.LessOrEqual(t, one.atOnce, 2)
	require.Less(t, one.count(), limiters*callers*calls/10)
	require.Greater(t, load(t, false).atOnce, 2)
}

// An outage is noticed once for all limiters of a client, and so is its end.
func TestOneOutageOpensOneBreaker(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log strings.Builder
		var events []BreakerEvent
		db := newModelDB()
		client := newClient(t, db, ClientConfig{
			Logger:   slog.New(slog.NewTextHandler(&log, nil)),
			Observer: &Observer{Breaker: func(e BreakerEvent) { events = append(events, e) }},
		})
		var answers, returns []*Limiter
		for i := range 20 {
			config := Config{Name: fmt.Sprint("limiter ", i), Policy: hourly}
			if i%4 == 3 {
				returns = append(returns, client.limiter(t, config))
				continue
			}
			config.OnFailure = []FailureMode{FailOpen(), FailClosed(), FallbackLocal(0.5)}[i%4]
			answers = append(answers, client.limiter(t, config))
		}
		answered := func(fromDatabase bool) {
			t.Helper()
			for _, l := range answers {
				result, err := l.Allow(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, fromDatabase, result.Source == SourceDatabase)
			}
		}
		db.set(turnedAway)
		answered(false)
		require.Equal(t, engine.BreakerFailures, db.statements())
		require.Len(t, events, 1)
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		for _, l := range returns {
			_, err := l.Allow(t.Context(), "key")
			require.ErrorIs(t, err, ErrUnavailable)
		}
		require.Equal(t, engine.BreakerFailures+len(returns), db.statements(), "they ask")

		db.set(nil)
		answered(false)
		require.Zero(t, db.statements())
		_, err := returns[0].Allow(t.Context(), "key")
		require.NoError(t, err)
		answered(true)
		require.Len(t, events, 2)
		require.True(t, events[0].Open)
		require.False(t, events[1].Open)
		require.Equal(t, 2, strings.Count(log.String(), "\n"))
	})
}

// While the breaker is open, whatever concerns only limiters that return errors is asked. If it fails, another pause
// begins, and if it succeeds, the breaker closes for all.
func TestLimiterThatReturnsErrorsAsksWhileTheBreakerIsOpen(t *testing.T) {
	t.Parallel()
	setUp := func(t *testing.T, config ClientConfig) (db *modelDB, closed, one, two *Limiter) {
		t.Helper()
		db = newModelDB()
		client := newClient(t, db, config)
		closed = client.limiter(t, Config{Name: "closed", Policy: hourly, OnFailure: FailClosed()})
		one = client.limiter(t, Config{Name: "one", Policy: hourly})
		two = client.limiter(t, Config{Name: "two", Policy: hourly, OnFailure: ReturnError()})
		return db, closed, one, two
	}
	source := func(t *testing.T, l *Limiter) Source {
		t.Helper()
		result, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
		return result.Source
	}
	t.Run("one after the other", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			db, closed, one, two := setUp(t, ClientConfig{})
			open(t, closed, db)
			calls := []func() error{
				func() error { _, err := one.Allow(t.Context(), "key"); return err },
				func() error { _, err := one.Peek(t.Context(), "key"); return err },
				func() error { _, err := two.Grant(t.Context(), "key", 1); return err },
				func() error { _, err := two.Refund(t.Context(), forged(two, "key", 1)); return err },
				func() error {
					_, err := AllowAll(t.Context(), one.Request("key", 1), two.Request("key", 1))
					return err
				},
			}
			for i, call := range calls {
				require.ErrorIs(t, call(), ErrUnavailable)
				require.Equal(t, 1+i, db.statements())
			}
			_, err := AllowAll(t.Context(), one.Request("key", 1), closed.Request("key", 1))
			require.ErrorIs(t, err, engine.ErrNotTried)
			_, err = closed.Grant(t.Context(), "key", 1)
			require.ErrorIs(t, err, engine.ErrNotTried)

			// Each failure begins another pause.
			elapse(engine.BreakerPause - 1)
			require.ErrorIs(t, calls[0](), ErrUnavailable)
			elapse(engine.BreakerPause - 1)
			require.Equal(t, SourceFailedClosed, source(t, closed))
			require.Equal(t, 1+len(calls), db.statements())

			for _, call := range calls {
				db.set(nil)
				require.NoError(t, call())
				require.False(t, one.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
				require.Equal(t, SourceDatabase, source(t, closed))
				open(t, closed, db)
			}
		})
	})
	t.Run("on one connection", func(t *testing.T) {
		t.Parallel()
		client := newClient(t, pgtest.Connect(t, pgtest.New(t)), ClientConfig{})
		l := client.limiter(t, Config{Name: "test", Policy: hourly})
		for range engine.BreakerFailures {
			client.engine.Batcher.Breaker.Report(engine.KindEphemeral, turnedAwayError(), false)
		}
		require.True(t, client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.Equal(t, SourceDatabase, source(t, l))
		require.False(t, client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	})
	t.Run("those in the queue", func(t *testing.T) {
		t.Parallel()
		synctest.Test(t, func(t *testing.T) {
			const each = 10
			db, closed, one, _ := setUp(t, ClientConfig{MaxBatch: 1, MaxInFlight: 1})
			db.set(func(ctx context.Context) error {
				elapse(time.Millisecond)
				return turnedAway(ctx)
			})
			var wg sync.WaitGroup
			ask := func(l *Limiter) {
				for i := range each {
					wg.Go(func() {
						result, err := l.Allow(t.Context(), fmt.Sprint("key ", i))
						if l == one && !errors.Is(err, ErrUnavailable) || l == closed && err != nil {
							t.Error(err)
						}
						if l == closed && result.Source != SourceFailedClosed {
							t.Error(result)
						}
					})
				}
			}
			ask(closed)
			synctest.Wait()
			ask(one)
			wg.Wait()
			// They take turns until it opens, and then only one of them asks.
			require.Equal(t, engine.BreakerFailures-1+each, db.statements())
		})
	})
}

// However many calls a limiter has, and however slow its statements are, another one's call waits for the statement
// under way and for one more of them.
func TestSlowLimiterDelaysOthersByOneStatement(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		const slow = 100 * time.Millisecond
		db := newModelDB()
		db.takes = slow
		client := newClient(t, db, ClientConfig{MaxInFlight: 1, MaxBatch: 100})
		huge := client.limiter(t, Config{Name: "huge", Policy: FixedWindow{Limit: 10_000, Window: time.Hour}})
		small := client.limiter(t, Config{Name: "small", Policy: hourly})
		began := time.Now()
		var wg sync.WaitGroup
		defer wg.Wait()
		for range 2000 {
			wg.Go(func() {
				if _, err := huge.Allow(context.Background(), "key"); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		for told := 3 * slow; told <= 15*slow; told += 3 * slow {
			elapse(slow / 2) // a statement is under way
			result, err := small.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, told, time.Since(began))
			require.Less(t, db.taken(), int64(2000))
		}
	})
}

// One cache holds the denials of all limiters of a client, and none of them is taken for another's.
func TestDenialsOfLimitersStayApart(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		policy := FixedWindow{Limit: 1, Window: time.Hour}
		db := newModelDB()
		client := newClient(t, db, ClientConfig{DenialMaxAge: time.Hour})
		limiters := []*Limiter{
			client.limiter(t, Config{Name: "a", Policy: policy}), client.limiter(t, Config{Name: "b", Policy: policy}),
			client.limiter(t, Config{Name: "a", Policy: policy, Durable: true}),
		}
		ask := func(l *Limiter, allowed bool, source Source) {
			t.Helper()
			result, err := l.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, allowed, result.Allowed)
			require.Equal(t, source, result.Source)
		}
		for _, l := range limiters {
			ask(l, true, SourceDatabase)
			ask(l, false, SourceDatabase)
			ask(l, false, SourceCachedDenial)
		}
		for i, l := range limiters {
			_, err := l.Grant(t.Context(), "key", 1)
			require.NoError(t, err)
			for j, other := range limiters {
				require.Equal(t, i != j, other.remembersDenial("key", 1))
			}
			ask(l, true, SourceDatabase)
			ask(l, false, SourceDatabase)
		}
		again := client.limiter(t, limiters[0].Config()) // is somebody else
		ask(again, false, SourceDatabase)
		_, err := again.Grant(t.Context(), "key", 1)
		require.NoError(t, err)
		ask(limiters[0], false, SourceCachedDenial)
		ask(again, true, SourceDatabase)
	})
}

// However many limiters of a client have held keys, one connection waits for all of these, and other keys are decided
// meanwhile.
func TestHeldKeysOfFourLimitersLeaveConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const callers = 100
	db := pgtest.New(t)
	asked := &statements{}
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns, config.ConnConfig.Tracer = 4, asked })
	client := newClient(t, pool, ClientConfig{Timeout: 4 * amply})
	var limiters []*Limiter
	holder := pgtest.Begin(t, db)
	for i := range 4 {
		l := client.limiter(t, Config{
			Name: fmt.Sprint("limiter ", i), Policy: FixedWindow{Limit: 1000, Window: year}, Durable: i%2 == 0,
		})
		_, err := l.WithTx(holder).Allow(t.Context(), "held")
		require.NoError(t, err)
		limiters = append(limiters, l)
	}
	errs := make([]error, len(limiters)*callers)
	done := testkit.Later(func() (any, error) {
		testkit.Together(len(errs), func(i int) { _, errs[i] = limiters[i%len(limiters)].Allow(context.Background(), "held") })
		return nil, errors.Join(errs...)
	})
	testkit.WaitUntil(t, func() bool {
		known, sure := client.engine.Batcher.Held, 0
		known.Mu.Lock()
		defer known.Mu.Unlock()
		for _, row := range known.Rows {
			if row.Sure {
				sure++
			}
		}
		return sure == len(limiters)
	})
	for round := range 10 {
		free := make([]error, 10*len(limiters))
		testkit.Together(len(free), func(i int) {
			_, free[i] = limiters[i%len(limiters)].Allow(context.Background(), fmt.Sprintf("free %d, %d", round, i))
		})
		require.NoError(t, errors.Join(free...))
	}
	require.NoError(t, holder.Commit(t.Context()))
	_, err := done()
	require.NoError(t, err)
	require.LessOrEqual(t, asked.atOnce, client.engine.Settings.MaxInFlight+1)
	for _, l := range limiters {
		require.EqualValues(t, 1+callers, taken(t, db.Pool, l.Config(), "held"))
	}
}
