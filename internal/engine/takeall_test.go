package engine_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// Several clients call AllowAll for known and new rows. All calls share some of the rows. Exactly as many calls are
// allowed as fit, and each row has counted its allowed calls.
func TestTakesFromAllAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()

	const users, tries, userLimit, everybody = 20, 20, 12, 200
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 4)
	type limits struct{ address, user, month, all *ratelimit.Limiter }
	processes := make([]limits, len(pools))
	for i, pool := range pools {
		client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{MaxInFlight: 3})
		limitertest.EngineOf(client).Database.ManyParts = i % 2 * limitertest.EngineOf(client).Database.ManyParts // 0 means always
		processes[i] = limits{
			address: limitertest.Of(t, client, ratelimit.Config{Name: "address", Policy: ratelimit.TokenBucket{Capacity: 1000, Refill: 1, Every: 24 * time.Hour}}),
			user:    limitertest.Of(t, client, ratelimit.Config{Name: "user", Policy: ratelimit.SlidingWindow{Limit: userLimit, Window: limitertest.Year}}),
			month:   limitertest.Of(t, client, ratelimit.Config{Name: "month", Policy: limitertest.SlowCalendar(1000)}),
			all:     limitertest.Of(t, client, ratelimit.Config{Name: "all", Policy: ratelimit.FixedWindow{Limit: everybody, Window: limitertest.Year}}),
		}
	}
	var allowed [users]atomic.Int64
	errs := make([]error, users*tries)
	testkit.Together(users*tries, func(i int) {
		user, l := i/len(pools)%users, processes[i%len(pools)] // all processes ask for a new user at once
		results, err := ratelimit.AllowAll(t.Context(), l.user.Request(fmt.Sprint("{all}user ", user), 1),
			l.all.Request("all", 1), l.month.Request(fmt.Sprint("{all}user ", user), 1),
			l.address.Request(fmt.Sprint("{all}address ", i%7), 1))
		if errs[i] = err; results.Allowed {
			allowed[user].Add(1)
		}
	})
	require.NoError(t, errors.Join(errs...))
	var total, addresses int64
	for user := range users {
		key, n := fmt.Sprint("{all}user ", user), allowed[user].Load()
		require.LessOrEqual(t, n, int64(userLimit))
		require.Equal(t, n, limitertest.Taken(t, db.Pool, processes[0].user.Config(), key))
		require.Equal(t, n, limitertest.Taken(t, db.Pool, processes[0].month.Config(), key))
		total += n
	}
	for i := range 7 {
		addresses += limitertest.Taken(t, db.Pool, processes[0].address.Config(), fmt.Sprint("{all}address ", i))
	}
	require.EqualValues(t, everybody, total)
	require.EqualValues(t, everybody, addresses)
	require.EqualValues(t, everybody, limitertest.Taken(t, db.Pool, processes[0].all.Config(), "all"))
	require.Zero(t, deadlocks(t, db, pools...))
}

// takingAll is the function that contains the statements of rate_limit_take_all.
const takingAll = "_rate_limit_take_all_ephemeral"

// An AllowAll waits for a row that another transaction has changed, and then decides by the new state of the row. A
// variant that does not lock the row admits too much.
func TestSetsDecideFromTheRowsThatTheyHaveLocked(t *testing.T) {
	t.Parallel()

	for name, oldNew := range map[string][]string{
		"as it is":      nil,
		"without locks": {"FOR UPDATE", "OFFSET 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, takingAll, oldNew...)
			client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{})
			limitertest.EngineOf(client).Database.ManyParts = 0
			user := limitertest.Of(t, client, ratelimit.Config{Name: "user", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
			all := limitertest.Of(t, client, ratelimit.Config{Name: "all", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
			conn := pgtest.Connect(t, db.Of("all"))
			decides := func(key string) bool {
				_, err := ratelimit.AllowAll(t.Context(), user.Request("{all}"+key, 1), all.Request("{all}all"+key, 1))
				require.NoError(t, err)
				somebody := pgtest.Begin(t, db.Of("all"))
				_, err = all.WithTx(somebody).AllowN(t.Context(), "{all}all"+key, 6)
				require.NoError(t, err)
				tx, err := conn.Begin(t.Context())
				require.NoError(t, err)
				set := testkit.Later(func() (ratelimit.Results, error) {
					return limitertest.AllowAllTx(context.Background(), tx, user.Request("{all}"+key, 1), all.Request("{all}all"+key, 5))
				})
				pgtest.WaitUntilBlocked(t, db.Pool, 1)
				require.NoError(t, somebody.Commit(t.Context()))
				results, err := set()
				_ = tx.Commit(t.Context())
				return err == nil && !results.Allowed && results.Each[1].Remaining == 3 &&
					limitertest.Taken(t, db.Pool, user.Config(), "{all}"+key) == 1 && limitertest.Taken(t, db.Pool, all.Config(), "{all}all"+key) == 7
			}
			if oldNew == nil {
				require.True(t, decides(""))
				return
			}
			for i := 0; decides(fmt.Sprint(i)); i++ { // rate_limit_all may decide a slow statement
				require.Less(t, i, 50, "nothing was noticed")
			}
		})
	}
}

// All results of an AllowAll have the same DecidedAt, even if one window begins and another one goes on. A variant that
// reads the clock for each row has different times.
func TestSetsThatTakeAreDecidedAtOneInstant(t *testing.T) {
	t.Parallel()

	for name, oldNew := range map[string][]string{
		"as it is":             nil,
		"a clock for each row": {"ARRAY[clock,", "ARRAY[(extract(epoch FROM clock_timestamp()) * 1000000)::bigint,"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, takingAll, oldNew...)
			client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{})
			limitertest.EngineOf(client).Database.ManyParts = 0
			var limiters []*ratelimit.Limiter
			for i, policy := range []ratelimit.Policy{
				ratelimit.FixedWindow{Limit: 100, Window: limitertest.Year}, ratelimit.SlidingWindow{Limit: 100, Window: limitertest.Year},
				ratelimit.TokenBucket{Capacity: 100, Refill: 1, Every: time.Hour}, limitertest.SlowCalendar(100),
			} {
				limiters = append(limiters, limitertest.Of(t, client, ratelimit.Config{Name: fmt.Sprint(i), Policy: policy}))
			}
			oneInstant := true
			for i := range 50 {
				var requests []ratelimit.Request
				for _, l := range limiters {
					requests = append(requests, l.Request("{x}", 1), l.Request(fmt.Sprint("{x}new ", i), 1))
				}
				results, err := ratelimit.AllowAll(t.Context(), requests...)
				require.NoError(t, err)
				require.True(t, results.Allowed)
				for _, r := range results.Each {
					oneInstant = oneInstant && r.DecidedAt.Equal(results.Each[0].DecidedAt)
				}
			}
			require.Equal(t, oldNew == nil, oneInstant)
		})
	}
}

// If a row of an AllowAll is missing, the statement releases its locks, because the transaction that is making the row
// may wait for them. If a variant of the statement keeps its locks, both deadlock.
func TestSetsThatMakeRowsHoldNone(t *testing.T) {
	t.Parallel()

	for name, oldNew := range map[string][]string{
		"as it is":       nil,
		"locks are kept": {"RAISE EXCEPTION USING ERRCODE = 'RLS00';", "EXIT WHEN attempt = 2 OR NOT missing;"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, takingAll, oldNew...)
			client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{})
			limitertest.EngineOf(client).Database.ManyParts = 0
			user := limitertest.Of(t, client, ratelimit.Config{Name: "user", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
			all := limitertest.Of(t, client, ratelimit.Config{Name: "all", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
			_, err := all.Allow(t.Context(), "all")
			require.NoError(t, err)

			somebody := pgtest.Begin(t, db.Of("all"))
			_, err = user.WithTx(somebody).Allow(t.Context(), "{all}new")
			require.NoError(t, err)
			tx := pgtest.Begin(t, db.Of("all"))
			set := testkit.Later(func() (ratelimit.Results, error) {
				return limitertest.AllowAllTx(context.Background(), tx, user.Request("{all}new", 1), all.Request("all", 1))
			})
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			_, err = all.WithTx(somebody).Allow(t.Context(), "all")
			if oldNew == nil {
				require.NoError(t, err)
				require.NoError(t, somebody.Commit(t.Context()))
			} else {
				_ = somebody.Rollback(t.Context())
			}
			results, setErr := set()
			if oldNew != nil {
				requireDeadlock(t, errors.Join(err, setErr))
				return
			}
			require.NoError(t, setErr)
			require.True(t, results.Allowed)
			require.NoError(t, tx.Commit(t.Context()))
			require.EqualValues(t, 2, limitertest.Taken(t, db.Pool, user.Config(), "{all}new"))
			require.EqualValues(t, 3, limitertest.Taken(t, db.Pool, all.Config(), "all"))
		})
	}
}

// An AllowAll that makes missing rows also locks its existing rows in the same step, all in the lock order. A variant
// that only makes the missing rows deadlocks.
func TestSetsMakeRowsInTheOrderOfLocking(t *testing.T) {
	t.Parallel()

	all := "FROM unnest(names, keys) AS e (name, key)\n        ON CONFLICT"
	missing := `FROM unnest(names, keys) AS e (name, key)
		WHERE NOT EXISTS (SELECT FROM public.rate_limit_ephemeral AS d WHERE d.prefix = e.name AND d.key = e.key) ON CONFLICT`
	for name, oldNew := range map[string][]string{"as it is": nil, "only the missing ones": {all, missing}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Rewrite(t, db.Pool, takingAll, oldNew...)
			ask := func(manyParts int, keys ...string) func() (ratelimit.Results, error) {
				client := limitertest.NewClient(t, db.NewPool(t, nil), ratelimit.ClientConfig{})
				limitertest.EngineOf(client).Database.ManyParts = manyParts
				l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
				tx := pgtest.Begin(t, db.Of("{x}"))
				requests := make([]ratelimit.Request, len(keys))
				for i, key := range keys {
					requests[i] = l.Request(key, 1)
				}
				return testkit.Later(func() (ratelimit.Results, error) {
					results, err := limitertest.AllowAllTx(context.Background(), tx, requests...)
					return results, errors.Join(err, tx.Commit(context.Background()))
				})
			}
			_, err := ask(0, "{x}a")()
			require.NoError(t, err)
			l := limitertest.New(t, db.NewPool(t, nil), ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			})
			maker := pgtest.Begin(t, db.Of("{x}"))
			_, err = l.WithTx(maker).Allow(t.Context(), "{x}c")
			require.NoError(t, err)

			one := ask(0, "{x}a", "{x}b", "{x}c") // waits for the last row
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			other := ask(100, "{x}a", "{x}b")
			pgtest.WaitUntilBlocked(t, db.Pool, 2)
			require.NoError(t, maker.Commit(t.Context()))
			_, err1 := one()
			_, err2 := other()
			err = errors.Join(err1, err2)
			requireDeadlockIf(t, oldNew != nil, err)
		})
	}
}

// In a database with another encoding, keys have other lengths, so the lock order differs from the client's order of
// rows. In such a database, rate_limit_all decides before any row is locked. A variant that does not check the order
// deadlocks.
func TestTakesOfSetsInAnotherOrderLockNothing(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const long, short = "ää", "abc" // 2 and 3 bytes in LATIN1
	ordered := "SELECT bool_and("
	for name, oldNew := range map[string][]string{
		"as it is":               nil,
		"the order is not known": {ordered, "SELECT true OR bool_and("},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.Empty(t)
			latin := pgtest.Scalar[string](t, db.Pool, "SELECT current_database()") + "_latin1"
			pgtest.Exec(t, db.Pool, "CREATE DATABASE "+latin+" ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'")
			pool := db.OwnerPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.Database, config.ConnConfig.RuntimeParams["client_encoding"] = latin, "UTF8"
			})
			defer func() {
				pool.Close()
				pgtest.Exec(t, db.Pool, "DROP DATABASE "+latin)
			}()
			require.NoError(t, migrations.Up(t.Context(), pool))
			pgtest.Rewrite(t, pool, "rate_limit_take_all", oldNew...)
			set := func(manyParts int) func() error {
				client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
				limitertest.EngineOf(client).Database.ManyParts = manyParts
				l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
				for _, key := range []string{long, short} {
					_, err := l.Allow(t.Context(), key)
					require.NoError(t, err)
				}
				return func() error {
					return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
						_, err := limitertest.AllowAllTx(t.Context(), tx, l.Request(long, 1), l.Request(short, 1))
						return err
					})
				}
			}
			one, other := set(0), set(100)
			holder, err := pool.Begin(t.Context())
			require.NoError(t, err)
			_, err = limitertest.New(t, pool, ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
			}).WithTx(holder).Allow(t.Context(), long)
			require.NoError(t, err)
			first := testkit.Later(func() (any, error) { return nil, one() })
			pgtest.WaitUntilBlocked(t, pool, 1)
			second := testkit.Later(func() (any, error) { return nil, other() })
			pgtest.WaitUntilBlocked(t, pool, 2)
			require.NoError(t, holder.Commit(t.Context()))
			_, err1 := first()
			_, err2 := second()
			err = errors.Join(err1, err2)
			requireDeadlockIf(t, oldNew != nil, err)
		})
	}
}

// If most sets are denied, few statements try rate_limit_take_all in vain.
func TestSetsThatAreLeftAreNotTriedAgainAtOnce(t *testing.T) {
	t.Parallel()

	d := engine.NewDatabase(&limitertest.ModelDB{}, "", time.Now)
	requests := make([]*engine.Request, 10)
	for i := range requests {
		r := &engine.Request{Count: 1}
		r.Add(&engine.Space{Name: "a"}, limitertest.Model(ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}), fmt.Sprint(i), 1, nil)
		r.Add(&engine.Space{Name: "b"}, limitertest.Model(ratelimit.FixedWindow{Limit: 20, Window: limitertest.Year}), "all", 1, nil)
		requests[i] = r
	}
	told := map[bool]int{true: engine.NumbersOfAll * 20, false: engine.NumbersOfTake * 11}
	pauses := func(left bool) (n int) { // counts the calls of rate_limit_all before the next attempt
		for ; ; n++ {
			if c := d.Call(requests, engine.Transaction{}); c.SQL == engine.Text("takeall", "") {
				numbers := make([]pgtype.Int8, told[left])
				for i := range numbers {
					numbers[i] = pgtype.Int8{Int64: int64(i)/engine.NumbersOfAll + 1, Valid: true}
				}
				require.NoError(t, c.From.ReadTakes(c.Into, c.Counts, numbers))
				return n
			}
		}
	}
	var each []int
	for _, left := range []bool{false, true, true, true, true, true, false, true, false, false} {
		each = append(each, pauses(left))
	}
	require.Equal(t, []int{0, 0, 1, 3, 7, 15, 15, 0, 1, 0}, each)
	require.Equal(t, engine.Text("all", ""), d.Call(requests[:1], engine.Transaction{}).SQL, "for few, rate_limit_all is as fast")
}

// If an answer cannot be about the rows of the statement, the caller gets an error and no decision.
func TestAnswersUnlikeTheQuestion(t *testing.T) {
	t.Parallel()

	p := &engine.Part{Space: &engine.Space{}, Rules: limitertest.Rule(ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: time.Minute}), Cost: 1}
	from := &engine.RowSet{Rows: []*engine.Part{p}, Units: []int64{1}, RowOf: []int32{1}, Ended: func(bool) {}}
	for n := range 2 * engine.NumbersOfAll { // an answer of n zeros
		require.ErrorIs(t, from.ReadTakes([]*engine.Part{p}, []int64{1}, make([]pgtype.Int8, n)), engine.ErrUnlikeAnswer, n)
		if n < engine.NumbersOfAll {
			require.ErrorIs(t, engine.ReadTakes([]*engine.Part{p}, nil, make([]pgtype.Int8, n)), engine.ErrUnlikeAnswer, n)
		}
	}
}
