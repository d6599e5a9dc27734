package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// with is the limiter's view under a policy that must be good.
func (l *Limiter) with(t testing.TB, policy Policy) *Limiter {
	t.Helper()
	other, err := l.With(policy)
	require.NoError(t, err)
	return other
}

// statements counts the statements of a pool, and how many were under way at once.
type statements struct {
	mu                 sync.Mutex
	total, now, atOnce int
}

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.total++
	s.now++
	s.atOnce = max(s.atOnce, s.now)
	return ctx
}

func (s *statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now--
}

// count is how many there have been.
func (s *statements) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.total
}

// tracedPool is a pool of the database's whose statements are counted.
func tracedPool(t *testing.T, db *pgtest.DB) (*pgxpool.Pool, *statements) {
	t.Helper()
	counted := &statements{}
	return db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.Tracer = counted }), counted
}

// What becomes of usage when the policy changes, worked out by hand.
func TestOtherNumbersOnLiveKeys(t *testing.T) {
	t.Parallel()

	pool := pgtest.New(t).Pool
	type step struct {
		at     time.Duration
		policy single
		n      int64
		want   Result // but for Limit and DecidedAt
	}
	allowed := func(remaining int64, resetAfter time.Duration) Result {
		return Result{Allowed: true, Remaining: remaining, ResetAfter: resetAfter}
	}
	fixed := func(limit int64, window time.Duration) single { return FixedWindow{Limit: limit, Window: window} }
	sliding := func(limit int64, window time.Duration) single { return SlidingWindow{Limit: limit, Window: window} }
	bucket := func(capacity int64, every time.Duration) single {
		return TokenBucket{Capacity: capacity, Refill: 10, Every: every}
	}
	for name, steps := range map[string][]step{
		"a raised limit helps at once": {
			{0, fixed(10, time.Minute), 10, allowed(0, time.Minute)},
			{time.Second, fixed(10, time.Minute), 1, Result{RetryAfter: 59 * time.Second, ResetAfter: 59 * time.Second}},
			{time.Second, fixed(15, time.Minute), 5, allowed(0, 59*time.Second)},
			{time.Second, fixed(15, time.Minute), 1, Result{RetryAfter: 59 * time.Second, ResetAfter: 59 * time.Second}},
		},
		"a lowered limit denies until enough has drained": {
			{0, sliding(10, time.Minute), 10, allowed(0, 2*time.Minute)},
			// 10 of the window before weigh 5 after half of the next one.
			{time.Second, sliding(6, time.Minute), 1, Result{RetryAfter: 89 * time.Second, ResetAfter: 119 * time.Second}},
			{90*time.Second - time.Microsecond, sliding(6, time.Minute), 1, Result{RetryAfter: time.Microsecond, ResetAfter: 30*time.Second + time.Microsecond}},
			{90 * time.Second, sliding(6, time.Minute), 1, allowed(0, 90*time.Second)},
		},
		"a longer window counts from where the shorter began": {
			{0, fixed(10, time.Minute), 10, allowed(0, time.Minute)},
			{59 * time.Second, fixed(10, time.Hour), 1, Result{RetryAfter: time.Second, ResetAfter: time.Second}}, // the row expires as it was written
			{59 * time.Second, fixed(11, time.Hour), 1, allowed(0, 3541*time.Second)},                             // and is written anew
			{time.Hour, fixed(11, time.Hour), 11, allowed(0, time.Hour)},
		},
		"a shorter window may have ended": {
			{0, fixed(10, time.Hour), 10, allowed(0, time.Hour)},
			{59 * time.Second, fixed(10, time.Minute), 1, Result{RetryAfter: time.Second, ResetAfter: time.Second}},
			{time.Minute, fixed(10, time.Minute), 1, allowed(9, time.Minute)},
		},
		"tokens are kept, and clamped to the capacity": {
			{0, bucket(20, 10*time.Second), 8, allowed(12, 8*time.Second)},
			{0, bucket(40, 10*time.Second), 13, Result{Remaining: 12, RetryAfter: time.Second, ResetAfter: 8 * time.Second}},
			{0, bucket(5, 10*time.Second), 5, allowed(0, 5*time.Second)},
			{time.Second, bucket(40, 10*time.Second), 1, allowed(0, 40*time.Second)},
		},
		"tokens flow in at the new rate": {
			{0, bucket(10, 10*time.Second), 10, allowed(0, 10*time.Second)},
			{time.Second, bucket(10, 100*time.Second), 1, Result{RetryAfter: 9 * time.Second, ResetAfter: 9 * time.Second}},
			{9 * time.Second, bucket(10, 5*time.Second), 10, allowed(0, 5*time.Second)},
		},
		"another algorithm begins anew": {
			{0, fixed(10, time.Minute), 10, allowed(0, time.Minute)},
			{0, sliding(10, time.Minute), 4, allowed(6, 2*time.Minute)},
			{0, bucket(10, 10*time.Second), 7, allowed(3, 7*time.Second)},
			{0, sliding(10, time.Minute), 0, allowed(10, 0)},
			{0, bucket(10, 10*time.Second), 4, Result{Remaining: 3, RetryAfter: time.Second, ResetAfter: 7 * time.Second}}, // a look has changed nothing
			{0, fixed(10, time.Minute), 10, allowed(0, time.Minute)},
			{0, bucket(10, 10*time.Second), 10, allowed(0, 10*time.Second)},
		},
	} {
		clock := &setClock{at: t0}
		limiter := newLimiter(
			t,
			pool,
			Config{
				Name:   name,
				Policy: FixedWindow{Limit: 1, Window: time.Second},
			},
			ClientConfig{Test: TestConfig{Now: clock.now}},
		)
		for i, step := range steps {
			clock.at = t0.Add(step.at)
			step.want.Limit, step.want.DecidedAt = step.policy.one().Numbers().Limit, clock.at
			got, err := limiter.under(step.policy).AllowN(t.Context(), "key", step.n)
			require.NoError(t, err)
			require.Equal(t, step.want, utc(got), "%s, step %d", name, i)
		}
	}
}

// numbersOf are a policy and what may become of it: more or less, and in more or less time.
func numbersOf(p Policy) map[string]single {
	numbers := map[string]single{}
	for name, change := range map[string]struct {
		limit int64
		time  time.Duration
	}{
		"as it is": {10, time.Minute}, "raised": {20, time.Minute}, "lowered": {4, time.Minute},
		"longer": {10, 5 * time.Minute}, "shorter": {10, 7 * time.Second},
		"raised and longer": {25, 5 * time.Minute}, "lowered and shorter": {3, 7 * time.Second},
	} {
		switch p.(type) {
		case FixedWindow:
			numbers[name] = FixedWindow{Limit: change.limit, Window: change.time}
		case SlidingWindow:
			numbers[name] = SlidingWindow{Limit: change.limit, Window: change.time}
		case SlidingLog:
			numbers[name] = SlidingLog{Limit: change.limit, Window: change.time}
		case CalendarWindow:
			unit := map[time.Duration]Unit{time.Minute: CalendarHour, 5 * time.Minute: CalendarDay, 7 * time.Second: CalendarMinute}[change.time]
			numbers[name] = CalendarWindow{Limit: change.limit, Unit: unit, Zone: "Asia/Kolkata"}
		case TokenBucket:
			numbers[name] = TokenBucket{Capacity: change.limit, Refill: 7, Every: change.time}
		}
	}
	return numbers
}

// From every algorithm to every other and back, raised and lowered, longer and shorter, with much and little
// taken, sooner and later: the limiter says what the models say, whether it remembers denials or not.
func TestEveryChangeOfPolicyEqualsTheModel(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	algorithms := slowPolicies(10)
	moments := []time.Duration{0, 8 * time.Second, 40 * time.Second, 119 * time.Second}
	for fromName, from := range algorithms {
		from := numbersOf(from)["as it is"]
		for toName, to := range algorithms {
			t.Run(fromName+" to "+toName, func(t *testing.T) {
				t.Parallel()
				half := crc32.ChecksumIEEE([]byte(t.Name())) % 2
				afterwards := []time.Duration{moments[half], moments[half+2]}
				if rounds(t) > 1 {
					afterwards = slices.Concat(moments, []time.Duration{time.Microsecond, time.Minute, time.Hour})
				}
				clock := &setClock{at: t0}
				config := Config{
					Name:   fromName + " to " + toName,
					Policy: from,
				}
				clientConfig := ClientConfig{Test: TestConfig{Now: clock.now}}
				remembers := newLimiter(t, db.Pool, config, clientConfig)
				config.NoDenialCache = true
				asks := newLimiter(t, db.Pool, config, clientConfig)
				type caller struct {
					limiter *Limiter
					taken   int64
				}
				var callers []caller // who ask at the same time, each for a key of his own
				for _, taken := range []int64{1, 6, 10} {
					callers = append(callers, caller{remembers, taken}, caller{asks, taken})
				}
				for change, to := range numbersOf(to) {
					for _, later := range afterwards {
						expected := modeltest.NewRows()
						clock.at = t0
						for i, ask := range []struct {
							after  time.Duration
							policy single
							cost   int64
						}{
							{0, from, -1}, {0, from, 10}, {later, to, 0}, {0, to, 2}, {0, to, 1}, // the first takes what is to be taken
							{time.Second, from, 0}, {0, from, 2}, {0, to, 1},
						} {
							clock.at = clock.at.Add(ask.after)
							s := modeltest.Step{Policy: ask.policy.one(), Name: config.Name, Clock: clock.at.UnixMicro()}
							views := make([]*Limiter, len(callers))
							for n, c := range callers {
								views[n] = c.limiter.under(ask.policy)
								e := modeltest.Element{Key: fmt.Sprint(n, change, later), Cost: ask.cost, Count: 1}
								if i == 0 {
									e.Cost = c.taken
								}
								s.Elements = append(s.Elements, e)
							}
							expected.Decide(s)
							got, errs := make([]Result, len(callers)), make([]error, len(callers))
							testkit.Together(
								len(callers),
								func(n int) { got[n], errs[n] = views[n].AllowN(t.Context(), s.Elements[n].Key, s.Elements[n].Cost) },
							)
							require.NoError(t, errors.Join(errs...))
							for n := range callers {
								got[n].Source = SourceDatabase // or a denial that was remembered
								want := views[n].requestsOf(s.Elements[n : n+1])[0]
								want.Parts[0].Decision = s.Elements[n].Decision
								require.Equal(
									t,
									utc(resultOf(new(want.Outcome()))),
									utc(got[n]),
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

func TestWithRefusesWhatNewRefuses(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, unusedPool(t), policy(FixedWindow{Limit: 1, Window: time.Second}))
	for _, bad := range []single{
		nil, &FixedWindow{Limit: 1, Window: time.Second}, (*TokenBucket)(nil), FixedWindow{}, FixedWindow{Limit: -1, Window: time.Second},
		SlidingWindow{Limit: math.MaxInt64, Window: time.Second}, TokenBucket{Capacity: 1, Every: time.Second},
	} {
		_, want := New(unusedPool(t), policy(bad))
		require.Error(t, want)
		with, err := limiter.With(bad)
		require.Nil(t, with)
		require.Equal(t, want, err)
	}
}

// Another kind of policy would take the rows of the first for none, so With refuses it, for each policy of All.
func TestWithKeepsTheAlgorithm(t *testing.T) {
	t.Parallel()

	kinds, raised := slowPolicies(10), slowPolicies(20)
	for from, one := range kinds {
		for to := range kinds {
			var policies [][2]Policy // of the limiter, and of With
			for other := range kinds {
				policies = append(policies, [2]Policy{one, raised[to]},
					[2]Policy{one, All(raised[to], raised[other])}, [2]Policy{All(one, kinds[other]), raised[to]},
					[2]Policy{All(one, kinds[other]), All(raised[to], kinds[other])},
					[2]Policy{All(kinds[other], one), All(kinds[other], raised[to])})
			}
			for _, p := range policies {
				with, err := newLimiter(t, unusedPool(t), policy(p[0])).With(p[1])
				if from == to {
					require.NoError(t, err)
					require.Equal(t, p[1], with.Config().Policy)
					continue
				}
				require.Nil(t, with)
				var refused *ConfigError
				require.ErrorAs(t, err, &refused, "%v to %v", p[0], p[1])
				kind := func(p Policy) string { return strings.TrimPrefix(fmt.Sprintf("%T", p), "ratelimit.") }
				require.Equal(t, "Config.Policy", refused.Field)
				require.Equal(t, fmt.Sprintf("is a %s, and the keys' rows are of a %s, which would start anew; "+
					"make a limiter of another name", kind(raised[to]), kind(one)), refused.Reason)
			}
		}
	}
}

// What Policy says of two kinds of policy on one key: each takes the other's row for none.
func TestTwoAlgorithmsOnOneKeyAdmitBoth(t *testing.T) {
	t.Parallel()

	const limit, calls = 10, 40
	client := newClient(t, pgtest.New(t).Pool, ClientConfig{})
	for oneName, one := range slowPolicies(limit) {
		for otherName, other := range slowPolicies(limit) {
			name := oneName + " and " + otherName
			limiters := []*Limiter{
				client.limiter(t, Config{Name: name, Policy: one}),
				client.limiter(t, Config{Name: name, Policy: other}),
			}
			allowed := 0
			for call := range calls {
				result, err := limiters[call%2].Allow(t.Context(), "key")
				require.NoError(t, err)
				if result.Allowed {
					allowed++
				}
			}
			if oneName == otherName {
				require.Equal(t, limit, allowed)
			} else {
				require.Equal(t, calls, allowed)
			}
		}
	}
}

func TestWithSharesEverythingElse(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	const schema = `a "schema"`
	migrateInto(t, db, schema)
	for name, policy := range slowPolicies(10) {
		limiter := newLimiter(
			t,
			db.Pool,
			Config{
				Name:    "test",
				Policy:  FixedWindow{Limit: 1, Window: year},
				Durable: true,
			},
			ClientConfig{Schema: schema},
		)
		view := limiter.under(policy)
		result, err := view.AllowN(t.Context(), name, 10)
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 10, result.Limit)
		_, err = limiter.AllowN(t.Context(), name, 10)
		require.ErrorIs(t, err, ErrCostExceedsLimit) // its own numbers are as they were
		result, err = limiter.Allow(t.Context(), name)
		require.NoError(t, err)
		require.Equal(t, name != "fixed window", result.Allowed)

		tx := pgtest.Begin(t, db)
		_, err = view.WithTx(tx).Allow(t.Context(), "in a transaction")
		require.NoError(t, err)
		require.NoError(t, view.WithTx(tx).Reset(t.Context(), name))
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(
			t,
			"in a transaction",
			pgtest.Scalar[string](
				t,
				db.Pool,
				"DELETE FROM "+pgx.Identifier{schema, "rate_limit_durable"}.Sanitize()+" RETURNING key",
			),
		)
	}
}

// A customer who has just paid need not wait for a denial to be forgotten; one who has not costs the database nothing.
func TestDenialIsRememberedForItsPolicy(t *testing.T) {
	t.Parallel()

	pool, asked := tracedPool(t, pgtest.New(t))
	for name, base := range slowPolicies(10) {
		free := newLimiter(
			t,
			pool,
			Config{Name: name, Policy: base},
			ClientConfig{DenialMaxAge: amply},
		)
		paid := free.with(t, slowPolicies(100)[name])
		ask := func(limiter *Limiter, n int64, allowed bool, statements int) {
			t.Helper()
			before := asked.count()
			result, err := limiter.AllowN(t.Context(), "key", n)
			require.NoError(t, err)
			require.Equal(t, allowed, result.Allowed)
			require.Equal(t, statements, asked.count()-before)
		}
		ask(free, 10, true, 1)
		ask(free, 1, false, 1)
		ask(free, 1, false, 0)
		ask(free.with(t, base), 1, false, 0) // as good as free
		if _, isBucket := base.(TokenBucket); isBucket {
			ask(paid, 1, false, 1) // its tokens are kept: none
			ask(paid, 1, false, 0)
		} else {
			ask(paid, 90, true, 1)
			ask(paid, 1, false, 1)
			ask(paid, 1, false, 0)
		}
		require.NoError(t, free.Reset(t.Context(), "key")) // is one for all
		ask(paid, 1, true, 1)
	}
}

// However many policies there are, their calls share MaxInFlight connections, and each is decided under its own.
func TestPoliciesShareTheConnections(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	const policies, callers = 12, 40
	pool, asked := tracedPool(t, pgtest.New(t))
	limiter := newLimiter(
		t,
		pool,
		Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: year}},
	)
	var mu sync.Mutex
	allowed := map[string]int{}
	errs := make([]error, policies*callers)
	testkit.Together(len(errs), func(i int) {
		number := i % policies
		view, err := limiter.With(FixedWindow{Limit: int64(1 + number), Window: year})
		if number%2 == 1 {
			view = limiter.under(SlidingWindow{Limit: int64(1 + number), Window: year})
		}
		if err == nil {
			var result Result
			result, err = view.Allow(t.Context(), fmt.Sprint(number))
			if result.Allowed {
				mu.Lock()
				defer mu.Unlock()
				allowed[fmt.Sprint(number)]++
			}
		}
		errs[i] = err
	})
	require.NoError(t, errors.Join(errs...))
	for number := range policies {
		require.Equal(t, 1+number, allowed[fmt.Sprint(number)])
	}
	require.LessOrEqual(
		t,
		asked.atOnce,
		3,
	) // one of them for keys whose row was waited for, on a busy machine
	require.Less(t, asked.count(), policies*callers/2) // they do coalesce
}

func TestBoardTakesCallsOfOnePolicy(t *testing.T) {
	t.Parallel()

	free := newLimiter(
		t,
		&pgxpool.Pool{},
		Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: time.Second}},
		ClientConfig{MaxBatch: 3},
	)
	paid := free.with(t, FixedWindow{Limit: 2, Window: time.Second})
	again := free.with(t, FixedWindow{Limit: 1, Window: time.Second})
	other := free.under(SlidingWindow{Limit: 1, Window: time.Second})
	for key, by := range []*Limiter{free, paid, again, other, free, paid, free, other, again, paid, free} {
		free.client.engine.Queues.First().Push(by.requestsFor(fmt.Sprint(key), 1)[0])
	}
	for _, want := range []string{"0 2 4", "1 5 9", "3 7", "6 8 10", ""} {
		var keys []string
		for _, c := range free.client.engine.Queues.First().NextBatch(nil) {
			keys = append(keys, c.Parts[0].Key)
		}
		require.Equal(t, want, strings.Join(keys, " "))
	}
	require.Zero(t, free.client.engine.Queues.First().Waiting)
}

func BenchmarkWith(b *testing.B) {
	for _, policy := range []single{FixedWindow{Limit: 20, Window: time.Minute}, SlidingWindow{Limit: 20, Window: time.Minute}} {
		config := Config{Name: "test", Policy: policy}
		client, err := NewClient(&pgxpool.Pool{}, ClientConfig{Schema: "limits"})
		require.NoError(b, err)
		limiter, err := client.Limiter(config)
		require.NoError(b, err)
		b.Run(fmt.Sprintf("%T", policy), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := limiter.With(policy); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
