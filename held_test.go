package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// keep begins a transaction that has taken from a key, whose row it has locked, or, if made is true, has just made.
func keep(t *testing.T, db *pgtest.DB, config Config, key string, made bool) pgx.Tx {
	t.Helper()
	if !made {
		_, err := newLimiter(t, db.Pool, Config{Name: config.Name, Policy: config.Policy, Durable: config.Durable, Timeout: amply}).Allow(t.Context(), key)
		require.NoError(t, err)
		return hold(t, db, config, key)
	}
	tx := begin(t, db)
	_, err := newLimiter(t, db.Pool, Config{Name: config.Name, Policy: config.Policy, Durable: config.Durable, Timeout: amply}).AllowTx(t.Context(), tx, key)
	require.NoError(t, err)
	return tx
}

func eachTableAndRow(t *testing.T, test func(t *testing.T, durable, made bool)) {
	t.Helper()
	for _, durable := range []bool{false, true} {
		for _, made := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, just made: %t", table(durable), made), func(t *testing.T) {
				t.Parallel()
				test(t, durable, made)
			})
		}
	}
}

// Calls for keys that nobody holds are decided while others are held; those for held keys as soon as they are released, one after the
// other, and none of them is an outage.
func TestHeldRowsHoldUpNobodyElse(t *testing.T) {
	t.Parallel()

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Durable: durable, Timeout: amply, OnFailure: FailOpen()}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		var holders []pgx.Tx
		var held []func() (Result, error)
		for i := range 4 {
			holders = append(holders, keep(t, db, config, fmt.Sprint("held ", i), made))
		}
		for i := range holders {
			held = append(held, later(func() (Result, error) { return limiter.Allow(context.Background(), fmt.Sprint("held ", i)) }))
		}
		ask := func() {
			errs := make([]error, 20)
			results := make([]Result, len(errs))
			together(len(errs), func(i int) { results[i], errs[i] = limiter.Allow(context.Background(), fmt.Sprint("free ", i)) })
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
		require.False(t, limiter.breaker.open())
		require.EqualValues(t, 4, taken(t, db.Pool, config, "free 7"))
	})
}

// A key that is held for good is an ErrKeyHeld, whatever OnFailure says, and no more than that.
func TestKeysHeldForGood(t *testing.T) {
	t.Parallel()

	eachTableAndRow(t, func(t *testing.T, durable, made bool) {
		db := pgtest.New(t)
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Durable: durable, Timeout: 8 * time.Second, OnFailure: FailOpen()}
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		owner := newLimiter(t, db.Pool, config)
		holder := begin(t, db)
		const keys = 45
		for i := range keys {
			if key := fmt.Sprint("held ", i); made {
				_, err := owner.AllowTx(t.Context(), holder, key)
				require.NoError(t, err)
			} else {
				_, err := owner.Allow(t.Context(), key)
				require.NoError(t, err)
			}
		}
		exec(t, holder, "SELECT FROM "+table(durable)+" FOR UPDATE")
		errs := make([]error, keys+20)
		results := make([]Result, len(errs))
		together(len(errs), func(i int) {
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
		require.False(t, limiter.breaker.open())
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
		holder := keep(t, db, b.config, "held", made)
		waits := later(func() (Results, error) {
			return AllowAll(context.Background(), a.Request("address", 1), b.Request("held", 1), c.Request("all", 1))
		})
		for i := range 20 {
			results, err := AllowAll(t.Context(), a.Request("address", 1), b.Request(fmt.Sprint(i), 1), c.Request("all", 1))
			require.NoError(t, err)
			require.True(t, results.Allowed)
			_, err = c.Allow(t.Context(), "all")
			require.NoError(t, err)
		}
		require.NoError(t, holder.Commit(t.Context()))
		results, err := waits()
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.EqualValues(t, 21, taken(t, db.Pool, a.config, "address"))
		require.EqualValues(t, 41, taken(t, db.Pool, c.config, "all"))
		require.EqualValues(t, 2, taken(t, db.Pool, b.config, "held"))
	}
}

// A locked table is an outage, and not a held row; one that is locked for a moment is waited for.
func TestLockedTable(t *testing.T) {
	t.Parallel()

	for _, durable := range []bool{false, true} {
		db := pgtest.New(t)
		pool := db.NewPool(t, nil)
		config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Durable: durable, Timeout: amply, OnFailure: FailOpen()}
		patient := newLimiter(t, pool, config)
		config.Timeout = 400 * time.Millisecond
		open := newLimiter(t, pool, config)
		config.OnFailure = ReturnError()
		strict := newLimiter(t, pool, config)
		earlier, err := strict.Allow(t.Context(), "earlier")
		require.NoError(t, err)
		holder := begin(t, db)
		exec(t, holder, "LOCK TABLE "+table(durable)+" IN ACCESS EXCLUSIVE MODE")
		for _, call := range []func() (Result, error){
			func() (Result, error) { return strict.Allow(t.Context(), "key") },
			func() (Result, error) { return strict.Peek(t.Context(), "key") },
			func() (Result, error) { return strict.Refund(t.Context(), earlier) },
			func() (Result, error) { return Result{}, strict.Reset(t.Context(), "key") },
			func() (Result, error) {
				_, err := AllowAll(t.Context(), strict.Request("key", 1))
				return Result{}, err
			},
		} {
			_, err := call()
			require.ErrorIs(t, err, ErrUnavailable)
			require.NotErrorIs(t, err, ErrKeyHeld)
			require.NotErrorIs(t, err, ErrOutcomeUnknown)
		}
		for range breakerFailures {
			require.False(t, open.breaker.open())
			result, err := open.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, SourceFailedOpen, result.Source)
		}
		require.True(t, open.breaker.open())
		waits := later(func() (Result, error) { return patient.Allow(context.Background(), "key") })
		waitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, holder.Commit(t.Context()))
		result, err := waits()
		require.NoError(t, err)
		require.Equal(t, SourceDatabase, result.Source)
		require.EqualValues(t, 1, taken(t, db.Pool, config, "key"))
	}
}

// At rest, a limiter that has met held rows has no goroutine.
func TestLaneIsServedByNobodyAtRest(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.NewPool(t, nil), Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	holder := keep(t, db, limiter.config, "key", false)
	var call func() (Result, error)
	goroutines := offspring(t, func(context.Context) {
		call = later(func() (Result, error) { return limiter.Allow(context.Background(), "key") })
	})
	waitUntilHeld(t, db.Pool, limiter)
	require.Positive(t, goroutines())
	require.NoError(t, holder.Commit(t.Context()))
	_, err := call()
	require.NoError(t, err)
	waitUntil(t, func() bool { return goroutines() == 0 })
	limiter.mu.Lock()
	defer limiter.mu.Unlock()
	require.False(t, limiter.serving)
}

// What the functions decide while they pass over held rows is what the model decides of the others.
func TestSkippingHeldRowsEqualsTheModel(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	seed := testSeed(t)
	passed, refused := 0, 0
	for story := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, story))
		steps, err := newStory(r, 12)
		require.NoError(t, err)
		space := fmt.Sprintf("%d ", story)
		holder := begin(t, db)
		held := map[rowID]bool{}
		model := rows{false: {}, true: {}}
		for i := range steps {
			s := &steps[i]
			s.skip = true
			if i == len(steps)/2 { // from here on, half of the rows are held
				for _, durable := range []bool{false, true} {
					for id := range model[durable] {
						if r.IntN(2) == 0 {
							exec(t, holder, "SELECT FROM "+table(durable)+" WHERE prefix = $1 AND key = $2 FOR UPDATE", space+id.name, id.key)
							held[rowID{table(durable) + id.name, id.key}] = true
						}
					}
				}
			}
			if slices.ContainsFunc(s.elements, func(e element) bool { return e.cost != 0 }) {
				before := len(s.elements)
				all := s.elements
				s.elements = slices.DeleteFunc(slices.Clone(all), func(e element) bool { return held[rowID{table(s.durable) + s.name, e.key}] })
				passed += before - len(s.elements)
				model.decide(*s)
				queued := &pgx.Batch{}
				asked := *s
				asked.elements = all
				queueStep(queued, space, asked)
				got := map[int64]decision{}
				query := queued.QueuedQueries[0]
				require.NoError(t, queryDecisions(t.Context(), db.Pool, false, query.SQL, query.Arguments, func(ord int64, d decision) { got[ord] = d }))
				place := 0
				for ord, e := range all {
					title := fmt.Sprintf("%s=%d, story %d, element %d of %v", seedVariable, seed, story, ord+1, asked)
					d, ok := got[int64(ord+1)]
					var want decision
					if held[rowID{table(s.durable) + s.name, e.key}] {
						if !ok {
							continue
						}
						// Where rows are missing, the function looks first: what is refused then is refused.
						one := *s
						one.elements = []element{e}
						model.decide(one)
						want = one.elements[0].decision
						require.Zero(t, want.granted, title)
						refused++
					} else {
						require.True(t, ok, title)
						want = s.elements[place].decision
						place++
					}
					require.Equal(t, []any{want.granted, want.remaining, want.retryAfter, want.resetAfter}, []any{d.granted, d.remaining, d.retryAfter, d.resetAfter}, title)
				}
			}
		}
		require.NoError(t, holder.Rollback(t.Context()))
	}
	require.Greater(t, passed-refused, 50)
	require.Less(t, refused, passed/2)
}

// Of rate_limit_all: a request with a held part is passed over, and takes nothing; the others are decided.
func TestAllSkipsRequestsWithAHeldPart(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	a, b, c := threeLimits(t, db.Pool, 10, 10, 10)
	part := func(l *Limiter, key string) modelPart {
		return modelPart{id: rowID{l.config.Name, key}, durable: l.config.Durable, policy: l.policy, cost: 2}
	}
	_, err := b.Allow(t.Context(), "held")
	require.NoError(t, err)
	holder := hold(t, db, b.config, "held")
	requests := []modelRequest{
		{parts: []modelPart{part(a, "x"), part(b, "held"), part(c, "all")}, count: 1},
		{parts: []modelPart{part(a, "x"), part(b, "new"), part(c, "all")}, count: 2},
		{parts: []modelPart{part(b, "held")}, count: 1},
	}
	got := map[int64]int64{}
	args := append(allArrays(requests), nil, nil, t0, nil, nil, nil, nil, true)
	require.NoError(t, queryDecisions(t.Context(), db.Pool, false, allStatement, args, func(ord int64, d decision) { got[ord] = d.granted }))
	require.Equal(t, map[int64]int64{1: undecided, 3: undecided, 4: 2, 5: 2, 6: 2}, got)
	require.NoError(t, holder.Commit(t.Context()))
	require.EqualValues(t, 4, taken(t, db.Pool, a.config, "x"))
	require.EqualValues(t, 4, taken(t, db.Pool, c.config, "all"))
	require.EqualValues(t, 1, taken(t, db.Pool, b.config, "held"))
}

// Only the caller whose key the encoding refuses is told an error, and it shows nothing of the key.
func TestKeyThatTheEncodingRefuses(t *testing.T) {
	t.Parallel()

	const emoji = "caller \U0001F600"
	for name, open := range map[string]func(t *testing.T) *pgxpool.Pool{
		"client_encoding": func(t *testing.T) *pgxpool.Pool {
			return pgtest.New(t).NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["client_encoding"] = "EUC_JP" })
		},
		"server_encoding": func(t *testing.T) *pgxpool.Pool {
			db := pgtest.New(t)
			other := db.Pool.Config().ConnConfig.Database + "_win1252"
			exec(t, db.Pool, fmt.Sprintf("CREATE DATABASE %s ENCODING WIN1252 LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0", other))
			pool := db.NewPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.Database = other
				config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8" // else the bytes of the key are those of other characters, which is no error
			})
			t.Cleanup(func() {
				pool.Close()
				_, err := db.Pool.Exec(context.Background(), "DROP DATABASE "+other)
				require.NoError(t, err)
			})
			require.NoError(t, migrations.Up(t.Context(), pool))
			return pool
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := open(t)
			limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply, OnFailure: FailOpen()})
			var calls []*call
			for i := range 64 {
				key := fmt.Sprint("caller ", i)
				if i == 17 {
					key = emoji
				}
				calls = append(calls, newCalls(key, 1)...)
				calls[i].by = limiter
			}
			limiter.send(&flight{batch: calls})
			results, errs := outcomes(calls)
			refused := func(err error) {
				t.Helper()
				var wrong *KeyError
				require.ErrorAs(t, err, &wrong)
				require.ErrorIs(t, err, ErrInvalidKey)
				require.NotContains(t, err.Error(), "0x")
				require.NotContains(t, err.Error(), emoji)
			}
			for i := range calls {
				if i == 17 {
					refused(errs[i])
					continue
				}
				require.NoError(t, errs[i])
				require.Equal(t, SourceDatabase, results[i].Source)
			}
			peeked, err := limiter.Peek(t.Context(), emoji)
			require.Zero(t, peeked)
			refused(err)
			refused(limiter.Reset(t.Context(), emoji))
			_, err = limiter.Grant(t.Context(), emoji, 1)
			refused(err)
			_, err = AllowAll(t.Context(), limiter.Request("plain", 1), limiter.Request(emoji, 1))
			refused(err)
			var which *RequestError
			require.ErrorAs(t, err, &which)
			require.Equal(t, 1, which.Index)
			tx := poolTx(t, pool)
			_, err = limiter.AllowTx(t.Context(), tx, emoji)
			refused(err)
			require.NoError(t, tx.Rollback(t.Context()))
			require.Len(t, storedRows(t, pool, false), 63)
		})
	}
}

// All who wait for a database that does not answer are told within one budget.
func TestWaitersOnAFrozenDatabase(t *testing.T) {
	t.Parallel()

	for name, mode := range map[string]FailureMode{"error": {}, "fail open": FailOpen(), "fallback": FallbackLocal(0.1)} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				db := newModelDB(hourly)
				db.set(silent)
				var observed int64
				limiter := newLimiter(t, db, Config{Name: "test", Policy: hourly, Timeout: 300 * time.Millisecond, OnFailure: mode, Observer: &Observer{
					Decision: func(e DecisionEvent) {
						if e.Err == nil && e.Result.Allowed {
							observed += e.Cost
						}
					},
				}})
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
				defer cancel()
				w := newWaits(t)
				for who := range 20 {
					w.add(ctx, limiter, who, 1)
				}
				<-time.After(301 * time.Millisecond)
				told := w.told()
				switch name {
				case "error":
					require.Len(t, told, 20)
					for _, one := range told {
						require.ErrorIs(t, one.err, ErrTimeout)
					}
				case "fail open":
					require.Len(t, told, 20)
					require.EqualValues(t, 20, observed)
					for _, one := range told {
						require.Equal(t, SourceFailedOpen, one.result.Source)
					}
				case "fallback":
					require.Len(t, told, 10) // a tenth of 100
					require.EqualValues(t, 10, observed)
				}
				cancel()
				<-time.After(time.Second)
				w.all(limiter)
			})
		})
	}
}
