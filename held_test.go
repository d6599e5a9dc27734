package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// keep begins a transaction that has taken from a key, whose row it has locked, or, if made is true, has just made.
func keep(t *testing.T, db *pgtest.DB, config Config, key string, made bool) pgx.Tx {
	t.Helper()
	db = db.Of(key)
	if !made {
		_, err := newLimiter(
			t,
			db.Pool,
			Config{
				Name:    config.Name,
				Policy:  config.Policy,
				Durable: config.Durable,
			},
		).Allow(t.Context(), key)
		require.NoError(t, err)
		return hold(t, db, config, key)
	}
	tx := pgtest.Begin(t, db)
	_, err := newLimiter(
		t,
		db.Pool,
		Config{Name: config.Name, Policy: config.Policy, Durable: config.Durable},
	).WithTx(tx).Allow(t.Context(), key)
	require.NoError(t, err)
	return tx
}

func eachTableAndRow(t *testing.T, test func(t *testing.T, durable, made bool)) {
	t.Helper()
	for _, made := range []bool{false, true} {
		for _, durable := range tablesFor(t, fmt.Sprint(made)) {
			t.Run(fmt.Sprintf("%s, just made: %t", pgtest.Table(durable), made), func(t *testing.T) {
				t.Parallel()
				test(t, durable, made)
			})
		}
	}
}

// Calls for keys that nobody holds are decided while other keys are held. Calls for held keys are decided one
// after the other as soon as the keys are released. None of this is an outage.
func TestHeldRowsHoldUpNobodyElse(t *testing.T) {
	t.Parallel()

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := Config{
			Name:      "test",
			Policy:    FixedWindow{Limit: 10, Window: year},
			Durable:   durable,
			OnFailure: FailOpen(),
		}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		var holders []pgx.Tx
		var held []func() (Result, error)
		for i := range 4 {
			holders = append(holders, keep(t, db, config, fmt.Sprint("held ", i), made))
		}
		for i := range holders {
			held = append(
				held,
				testkit.Later(func() (Result, error) { return limiter.Allow(context.Background(), fmt.Sprint("held ", i)) }),
			)
		}
		ask := func() {
			errs := make([]error, 20)
			results := make([]Result, len(errs))
			testkit.Together(
				len(errs),
				func(i int) { results[i], errs[i] = limiter.Allow(context.Background(), fmt.Sprint("free ", i)) },
			)
			require.NoError(t, errors.Join(errs...))
			for _, result := range results {
				require.Equal(t, SourceDatabase, result.Source)
				require.True(t, result.Allowed)
			}
		}
		for i, holder := range holders {
			ask()
			require.NoError(t, holder.Commit(t.Context()))
			result, err := held[i]()
			require.NoError(t, err)
			require.Equal(t, SourceDatabase, result.Source)
			require.EqualValues(t, 8, result.Remaining)
		}
		require.False(t, limiter.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.EqualValues(t, 4, taken(t, db.Pool, config, "free 7"))
	})
}

// A key that is held for good is an ErrKeyHeld, whatever OnFailure says, and no more than that.
func TestKeysHeldForGood(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := Config{
			Name:      "test",
			Policy:    FixedWindow{Limit: 10, Window: year},
			Durable:   durable,
			OnFailure: FailOpen(),
		}
		clientConfig := ClientConfig{Timeout: 8 * time.Second}
		limiter := newLimiter(t, db.NewPool(t, nil), config, clientConfig)
		owner := newLimiter(t, db.Pool, config, clientConfig)
		holder := pgtest.Begin(t, db)
		const keys = 45
		for i := range keys {
			if key := fmt.Sprint("held ", i); made {
				_, err := owner.WithTx(holder).Allow(t.Context(), key)
				require.NoError(t, err)
			} else {
				_, err := owner.Allow(t.Context(), key)
				require.NoError(t, err)
			}
		}
		pgtest.Exec(t, holder, "SELECT FROM "+pgtest.Table(durable)+" FOR UPDATE")
		errs := make([]error, keys+20)
		results := make([]Result, len(errs))
		testkit.Together(len(errs), func(i int) {
			key := fmt.Sprint("held ", i)
			if i >= keys {
				key = fmt.Sprint("free ", i)
			}
			results[i], errs[i] = limiter.Allow(context.Background(), key)
		})
		for i, err := range errs {
			if i >= keys {
				require.NoError(t, err)
				require.Equal(t, SourceDatabase, results[i].Source)
				continue
			}
			require.ErrorIs(t, err, ErrKeyHeld, "%+v", results[i])
			require.ErrorIs(t, err, ErrTimeout)
			require.NotErrorIs(t, err, ErrOutcomeUnknown)
			require.Zero(t, results[i])
		}
		if err := limiter.Reset(t.Context(), "held 0"); !made { // what is only being made is not there to be reset
			require.ErrorIs(t, err, ErrKeyHeld)
		}
		peeked, err := limiter.Peek(t.Context(), "held 0")
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, peeked.Source)
		require.False(t, limiter.client.engine.Batcher.Breaker.IsOpen(engine.KindEphemeral))
		require.NoError(t, holder.Commit(t.Context()))
		for i := range keys {
			require.EqualValues(t, 1, taken(t, db.Pool, config, fmt.Sprint("held ", i)))
		}
	})
}

// An AllowAll with a held part waits in the lane, and keeps its other parts from nobody.
func TestSetsWithAHeldPart(t *testing.T) {
	t.Parallel()

	for _, made := range []bool{false, true} {
		db := pgtest.New(t)
		a, b, c := threeLimits(t, db.NewPool(t, nil), 100, 100, 100)
		holder := keep(t, db, b.Config(), "{all}held", made)
		waits := testkit.Later(func() (Results, error) {
			return AllowAll(context.Background(), a.Request("{all}address", 1), b.Request("{all}held", 1), c.Request("all", 1))
		})
		for i := range 20 {
			results, err := AllowAll(
				t.Context(),
				a.Request("{all}address", 1),
				b.Request(fmt.Sprint("{all}", i), 1),
				c.Request("all", 1),
			)
			require.NoError(t, err)
			require.True(t, results.Allowed)
			_, err = c.Allow(t.Context(), "all")
			require.NoError(t, err)
		}
		require.NoError(t, holder.Commit(t.Context()))
		results, err := waits()
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.EqualValues(t, 21, taken(t, db.Pool, a.Config(), "{all}address"))
		require.EqualValues(t, 41, taken(t, db.Pool, c.Config(), "all"))
		require.EqualValues(t, 2, taken(t, db.Pool, b.Config(), "{all}held"))
	}
}

// A locked table is an outage, not a held row. A table that is locked for a moment is waited for.
func TestLockedTable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, durable := range []bool{false, true} {
		db := pgtest.New(t)
		pool := db.NewPool(t, nil)
		config := Config{
			Name:      "test",
			Policy:    FixedWindow{Limit: 10, Window: year},
			Durable:   durable,
			OnFailure: FailOpen(),
		}
		patient := newLimiter(t, pool, config)
		clientConfig := ClientConfig{Timeout: 3 * time.Second} // a quarter of it, in which a busy machine finds the lock
		open := newLimiter(t, pool, config, clientConfig)
		config.OnFailure = ReturnError()
		strict := newLimiter(t, pool, config, clientConfig)
		earlier, err := strict.Allow(t.Context(), "{key}earlier")
		require.NoError(t, err)
		holder := pgtest.Begin(t, db.Of("key"))
		pgtest.Exec(t, holder, "LOCK TABLE "+pgtest.Table(durable)+" IN ACCESS EXCLUSIVE MODE")
		for _, call := range []func() (Result, error){
			func() (Result, error) { return strict.Allow(t.Context(), "key") },
			func() (Result, error) { return strict.Peek(t.Context(), "key") },
			func() (Result, error) { return asResult(strict.Refund(t.Context(), earlier)) },
			func() (Result, error) { return Result{}, strict.Reset(t.Context(), "key") },
			func() (Result, error) {
				_, err := AllowAll(t.Context(), strict.Request("key", 1))
				return Result{}, err
			},
		} {
			_, err := call()
			require.ErrorIs(t, err, ErrUnavailable)
			require.Equal(t, "unavailable", ErrorKind(err))
			require.NotErrorIs(t, err, ErrKeyHeld)
			require.NotErrorIs(t, err, ErrOutcomeUnknown)
		}
		kind := engine.KindEphemeral
		if durable {
			kind = engine.KindDurable
		}
		for range engine.BreakerFailures {
			require.False(t, open.client.engine.Batcher.Breaker.IsOpen(kind))
			result, err := open.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, SourceFailedOpen, result.Source)
		}
		require.True(t, open.client.engine.Batcher.Breaker.IsOpen(kind))
		waits := testkit.Later(func() (Result, error) { return patient.Allow(context.Background(), "key") })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, holder.Commit(t.Context()))
		result, err := waits()
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source)
		require.EqualValues(t, 1, taken(t, db.Pool, config, "key"))
	}
}

// While the functions pass over held rows, they decide the others as the model does.
func TestSkippingHeldRowsEqualsTheModel(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	seed := testSeed(t)
	passed, refused := 0, 0
	for story := range uint64(20 * rounds(t)) {
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
					title := fmt.Sprintf("%s=%d, story %d, element %d of %v", seedVariable, seed, story, ord+1, asked)
					d, ok := got[int64(ord+1)]
					var want model.Decision
					if held[modeltest.RowID{Name: pgtest.Table(s.Durable) + s.Name, Key: e.Key}] {
						require.True(t, ok, title)
						if d.Granted == engine.Locked {
							continue
						}
						// If rows are missing, the function looks first. A request that is refused then stays
						// refused.
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
	require.Greater(t, passed-refused, 20*rounds(t))
	require.Less(t, refused, passed/2)
}

// A statement that passes over rows tells which transactions have locked them, also for rows that are just being
// made, and decides the others.
func TestHoldersOfSkippedRows(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, durable := range []bool{false, true} {
		db := pgtest.New(t)
		config := Config{
			Name:    "test",
			Policy:  FixedWindow{Limit: 10, Window: year},
			Durable: durable,
		}
		limiter := newLimiter(t, db.Pool, config)
		for _, key := range []string{"there", "held"} {
			_, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
		}
		maker := keep(t, db, config, "made", true)
		holder := hold(t, db, config, "held")
		var by int64
		require.NoError(t, holder.QueryRow(t.Context(), "SELECT pg_current_xact_id()::text::bigint").Scan(&by))
		elements := []modeltest.Element{
			{Key: "there", Cost: 1, Count: 1}, {Key: "made", Cost: 1, Count: 1},
			{Key: "held", Cost: 1, Count: 1}, {Key: "new", Cost: 1, Count: 1},
		}
		// Long enough for "new", too, to be made, which comes last.
		skip := engine.Transaction{LockTimeout: engine.LockTimeout(time.Second), SkipHeld: true}
		require.NoError(t, limiter.decide(t.Context(), db.Pool, elements, skip))
		granted := map[string]int64{}
		for i := range elements {
			granted[elements[i].Key] = elements[i].Decision.Granted
		}
		require.Equal(t, map[string]int64{"there": 1, "made": engine.Locked, "held": engine.Locked, "new": 1}, granted)
		require.Zero(t, elements[1].Decision.Remaining)
		require.Equal(t, by, elements[2].Decision.Remaining)
		require.NoError(t, maker.Rollback(t.Context()))
		require.NoError(t, holder.Commit(t.Context()))
		require.EqualValues(t, 2, taken(t, db.Pool, config, "there"))
	}
}

// Calls for rows that are there are decided by the second statement, however many are being made beside them.
func TestRowsBeingMadeDelayNobody(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	var statements []StatementEvent
	config := Config{
		Name:          "test",
		Policy:        FixedWindow{Limit: 10, Window: year},
		NoDenialCache: true,
	}
	owner := newLimiter(t, db.Pool, config)
	var mu sync.Mutex
	clientConfig := ClientConfig{Observer: &Observer{Statement: func(e StatementEvent) {
		mu.Lock()
		defer mu.Unlock()
		statements = append(statements, e)
	}}}
	limiter := newLimiter(t, db.NewPool(t, nil), config, clientConfig)
	holder := pgtest.Begin(t, db)
	var there, made []*engine.Request
	for i := range 45 {
		_, err := owner.Allow(t.Context(), fmt.Sprint("there ", i))
		require.NoError(t, err)
		_, err = owner.WithTx(holder).Allow(t.Context(), fmt.Sprint("made ", i))
		require.NoError(t, err)
		there = append(there, limiter.requestsFor(fmt.Sprint("there ", i), 1)...)
		made = append(made, limiter.requestsFor(fmt.Sprint("made ", i), 1)...)
	}
	all := slices.Concat(made, there)
	limiter.send(all)
	_, errs := outcomes(there)
	require.NoError(t, errors.Join(errs...))
	mu.Lock()
	require.Equal(t, 90, statements[0].Size)
	require.Error(t, statements[0].Err)
	require.Equal(t, 90, statements[1].Size)
	require.NoError(t, statements[1].Err)
	for _, e := range statements[2:] {
		require.Less(t, e.Size, 46)
	}
	mu.Unlock()
	require.NoError(t, holder.Commit(t.Context()))
	_, errs = outcomes(made)
	require.NoError(t, errors.Join(errs...))
}

// An AllowAll whose key is held by one transaction after the other has lost races, and is not told that somebody holds
// it. Nor is it in anybody's way that the key of another AllowAll is held for good.
func TestSetsThatLoseRacesAreNotHeld(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, made := range []bool{false, true} {
		t.Run(fmt.Sprint("just made: ", made), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			config := Config{
				Name:   "test",
				Policy: FixedWindow{Limit: 100, Window: year},
			}
			clientConfig := ClientConfig{Timeout: 8 * time.Second}
			limiter := newLimiter(t, db.NewPool(t, nil), config, clientConfig)
			holder := keep(t, db, config, "somebody else", made)
			turn := keep(t, db, config, "all", false)
			var calls []func() (Results, error)
			for _, user := range []string{"user 1", "user 2", "user 3", "somebody else"} {
				calls = append(calls, testkit.Later(func() (Results, error) {
					return AllowAll(context.Background(), limiter.Request(user, 1), limiter.Request("all", 1))
				}))
			}
			// Nobody but these transactions gets a turn, because each of them waits before the one before it ends.
			conns := []*pgx.Conn{turn.Conn(), pgtest.Connect(t, db)}
			for began, i := time.Now(), 1; time.Since(began) < limiter.client.engine.Batcher.Held.Patience()*5/4; i++ {
				next, err := conns[i%2].Begin(t.Context())
				require.NoError(t, err)
				locks := testkit.Later(func() (any, error) {
					return next.Exec(
						context.Background(),
						"SELECT FROM rate_limit_ephemeral WHERE key = 'all' FOR UPDATE",
					)
				})
				pgtest.Exec(t, turn, "SELECT pg_sleep(0.02)")
				require.NoError(t, turn.Commit(t.Context()))
				_, err = locks()
				require.NoError(t, err)
				turn = next
			}
			require.NoError(t, turn.Commit(t.Context()))
			for i, call := range calls {
				results, err := call()
				if i == 3 {
					require.ErrorIs(t, err, ErrKeyHeld)
					continue
				}
				require.NoError(t, err)
				require.True(t, results.Allowed)
			}
			require.NoError(t, holder.Commit(t.Context()))
		})
	}
}

// rate_limit_all passes over a request with a held part, which takes nothing. The others are decided.
func TestAllSkipsRequestsWithAHeldPart(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	a, b, c := threeLimits(t, db.Pool, 10, 10, 10)
	part := func(l *Limiter, key string) modeltest.Part {
		return modeltest.Part{ID: modeltest.RowID{Name: l.Config().Name, Key: key}, Durable: l.Config().Durable, Policy: l.model.Rules[0], Cost: 2}
	}
	_, err := b.Allow(t.Context(), "held")
	require.NoError(t, err)
	holder := hold(t, db, b.Config(), "held")
	requests := []modeltest.Request{
		{Parts: []modeltest.Part{part(a, "x"), part(b, "held"), part(c, "all")}, Count: 1},
		{Parts: []modeltest.Part{part(a, "x"), part(b, "new"), part(c, "all")}, Count: 2},
		{Parts: []modeltest.Part{part(b, "held")}, Count: 1},
	}
	got := map[int64]int64{}
	args := append(allArrays(requests), nil, nil, t0, nil, nil, nil, nil, true, nil, nil)
	require.NoError(
		t,
		queryDecisions(t.Context(), db.Pool, engine.Text("all", ""), args, func(ord int64, d model.Decision) { got[ord] = d.Granted }),
	)
	require.Equal(t, map[int64]int64{1: engine.Undecided, 2: engine.Locked, 3: engine.Undecided, 4: 2, 5: 2, 6: 2, 7: engine.Locked}, got)
	require.NoError(t, holder.Commit(t.Context()))
	require.EqualValues(t, 4, taken(t, db.Pool, a.Config(), "x"))
	require.EqualValues(t, 4, taken(t, db.Pool, c.Config(), "all"))
	require.EqualValues(t, 1, taken(t, db.Pool, b.Config(), "held"))
}
