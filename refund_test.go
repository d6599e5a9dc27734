package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/model"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A take that was lost, with a crash or the transaction that it was in, gives nothing back to a row that the clock has
// left behind. The model's test of the same name says so too.
func TestRefundToABucketThatTheClockHasLeftBehind(t *testing.T) {
	t.Parallel()
	const later = c0 + minute
	p := model.TokenBucket{Capacity: 10, Refill: 1, Every: time.Second}
	db := pgtest.New(t)
	for granted, took := range map[int64]int64{0: 4, 5: 10} {
		var s model.State
		ask := func(clock int64, e modeltest.Element) modeltest.Step {
			e.Key, e.Count = "x", 1
			return modeltest.Step{Policy: p, Name: "a", Clock: clock, Elements: []modeltest.Element{e}}
		}
		var steps []modeltest.Step
		if granted > 0 {
			s, _ = model.Grant(p, s, later, granted)
			steps = append(steps, ask(later, modeltest.Element{Cost: -granted}))
		}
		s, kept := p.Decide(s, later, took)
		_, lost := p.Decide(s, c0, 2)
		steps = append(steps, ask(later, modeltest.Element{Cost: took}), ask(c0, modeltest.Element{Cost: -2, Refund: []model.Take{lost.Taken}}),
			ask(later, modeltest.Element{Cost: -took, Refund: []model.Take{kept.Taken}}), ask(later, modeltest.Element{Cost: 0}))
		require.NoError(t, replay(t.Context(), db.Pool, fmt.Sprintf("granted %d ", granted), steps, 1))
	}
}

// A limiter and what its With has returned: slow requests of a free customer come to nothing after the customer has
// paid, or has used what was paid for.
func TestRefundAfterAChangeOfPolicy(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).Pool
	now := t0
	for _, test := range []struct {
		free, paid       single
		takes, paidTakes int64
		later            time.Duration
		remain, refunded int64
		muchLater        time.Duration
		remainThen       int64
	}{
		// What flowed in under the new numbers stays there, and what the old ones have seen go stays gone.
		{TokenBucket{10, 10, time.Hour}, TokenBucket{1000, 1000, time.Minute}, 9, 0, 30 * time.Second, 500, 501, time.Minute, 1000},
		{SlidingWindow{100, 6 * time.Second}, SlidingWindow{100, 4 * time.Second}, 10, 0, 6 * time.Second, 94, 95, 8 * time.Second, 100},
		// What was taken under a longer window counts for that window still.
		{FixedWindow{10, time.Minute}, FixedWindow{20, time.Hour}, 9, 10, time.Second, 0, 1, 2 * time.Minute, 1},
		{SlidingWindow{10, time.Minute}, SlidingWindow{20, time.Hour}, 9, 10, time.Second, 0, 1, 3 * time.Minute, 1},
		{SlidingLog{10, time.Minute}, SlidingLog{20, time.Hour}, 9, 10, time.Second, 0, 1, 2 * time.Minute, 1},
	} {
		for _, byPaid := range []bool{false, true} {
			name := fmt.Sprint(test.free, " and ", test.paid, byPaid)
			now = t0
			free := newLimiter(
				t,
				pool,
				Config{
					Name:   name,
					Policy: test.free,
				},
				ClientConfig{Test: TestConfig{Now: func() time.Time { return now }}},
			)
			paid := free.with(t, test.paid)
			remain := func(want int64) {
				t.Helper()
				peeked, err := paid.Peek(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, want, peeked.Remaining, name)
			}
			_, err := free.AllowN(t.Context(), "key", test.takes)
			require.NoError(t, err)
			slow, err := free.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, slow.Allowed)
			if test.paidTakes > 0 {
				result, err := paid.AllowN(t.Context(), "key", test.paidTakes)
				require.NoError(t, err)
				require.True(t, result.Allowed)
			}
			now = t0.Add(test.later)
			remain(test.remain)
			by := free
			if byPaid {
				by = paid
			}
			_, err = by.Refund(t.Context(), slow)
			require.NoError(t, err)
			remain(test.refunded)
			now = t0.Add(test.muchLater)
			remain(test.remainThen)
		}
	}
}

// What is in the table after each call, in both of them.
func TestRefundWritesOnlyWhatItGivesBack(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		clientConfig := ClientConfig{Test: frozen(t0)}
		limiter := newLimiter(t, db.NewPool(t, nil), config, clientConfig)
		refund := func(taken Result, n, remaining int64) Balance {
			balance, err := limiter.RefundN(t.Context(), taken, n)
			require.NoError(t, err)
			require.Equal(t, t0, balance.DecidedAt.UTC())
			require.EqualValues(t, 10, balance.Limit)
			require.Equal(t, remaining, balance.Remaining)
			return balance
		}
		version := func() string {
			return pgtest.Scalar[string](
				t,
				db.Pool,
				"SELECT string_agg(format('%s %s', ctid, xmin), ' ' ORDER BY prefix) FROM "+pgtest.Table(config.Durable),
			)
		}

		refund(forged(limiter, "key", 3), 3, 10)
		require.Empty(t, storedRows(t, db.Pool, config.Durable)) // it makes no row

		seven, err := limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		require.Positive(t, refund(seven, 3, 6).ResetAfter)
		require.EqualValues(t, 4, taken(t, db.Pool, config, "key"))

		require.Zero(t, refund(seven, 4, 10).ResetAfter)
		row := storedRows(t, db.Pool, config.Durable)[modeltest.RowID{Name: "test", Key: "key"}]
		require.Equal(t, t0.UnixMicro(), row.ExpiresAt)
		before := version()
		refund(forged(limiter, "key", 3), 1, 10)
		require.Equal(t, before, version(), "it had nothing to give back")

		// A row that is locked is not waited for by those who ask for others, and is by a refund.
		seven, err = limiter.AllowN(t.Context(), "key", 7)
		require.NoError(t, err)
		tx := hold(t, db, config, "key")
		waiting := testkit.Later(func() (Balance, error) { return limiter.Refund(context.Background(), seven) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := waiting()
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
	})
}

func TestRefundIsKeptOrTakenAgainWithTheTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	eachSlowPolicyAllAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		eight, err := limiter.AllowN(t.Context(), "key", 8)
		require.NoError(t, err)
		refund := func(tx pgx.Tx, n, remaining int64) {
			balance, err := limiter.WithTx(tx).RefundN(t.Context(), eight, n)
			require.NoError(t, err)
			require.Equal(t, remaining, balance.Remaining)
		}

		tx := pgtest.Begin(t, db)
		refund(tx, 3, 5)
		inner := savepoint(t, tx)
		refund(inner, 5, 10)
		require.NoError(t, inner.Rollback(t.Context()))
		refund(tx, 1, 6)
		peek, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 2, peek.Remaining) // nobody else sees it yet
		require.NoError(t, tx.Rollback(t.Context()))
		require.EqualValues(t, 8, taken(t, db.Pool, config, "key"))

		tx = pgtest.Begin(t, db)
		refund(tx, 3, 5)
		other := testkit.Later(func() (Result, error) { return limiter.AllowN(context.Background(), "key", 5) })
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		require.NoError(t, tx.Commit(t.Context()))
		result, err := other()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.EqualValues(t, 10, taken(t, db.Pool, config, "key"))
	})
}

// A denial that is remembered does not outlive a refund by the same limiter, whether the refund came through or
// may have.
func TestRefundForgetsTheDenial(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		clientConfig := ClientConfig{DenialMaxAge: time.Hour}
		limiter := newLimiter(t, db.NewPool(t, nil), config, clientConfig)
		exhaust := func() (all Result) {
			for _, want := range []bool{true, false, false} {
				result, err := limiter.AllowN(t.Context(), "key", 10)
				require.NoError(t, err)
				require.Equal(t, want, result.Allowed)
				if want {
					all = result
				}
			}
			remembered := limiter.remembersDenial("key", 1)
			require.True(t, remembered)
			return all
		}
		_, err := limiter.Refund(t.Context(), exhaust())
		require.NoError(t, err)
		all := exhaust()
		tx := pgtest.Begin(t, db)
		_, err = limiter.WithTx(tx).Refund(t.Context(), all)
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		all = exhaust()

		// The caller leaves before the refund, which goes on.
		tx = hold(t, db, config, "key")
		ctx, leave := context.WithCancel(t.Context())
		waiting := testkit.Later(func() (Balance, error) { return limiter.Refund(ctx, all) })
		waitUntilHeld(t, db.Pool, limiter) // before, it might be the caller's own statement, which ends soon after him
		leave()
		_, err = waiting()
		require.ErrorIs(t, err, context.Canceled)
		require.NoError(t, tx.Commit(t.Context()))
		testkit.WaitUntil(t, func() bool {
			result, err := limiter.Peek(t.Context(), "key")
			return err == nil && result.Remaining == 10
		})
		testkit.WaitUntil(t, func() bool {
			all, err = limiter.AllowN(t.Context(), "key", 10)
			return err == nil && all.Allowed
		})
		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)

		// After an error too.
		pgtest.Exec(t, db.Pool, "ALTER TABLE "+pgtest.Table(config.Durable)+" RENAME TO elsewhere")
		_, err = limiter.Refund(t.Context(), all)
		require.ErrorIs(t, err, ErrNotMigrated)
		require.EqualValues(t, 10, all.taken.Receipt.Left(), "it was surely not given back")
		remembered := limiter.remembersDenial("key", 1)
		require.False(t, remembered)
	})
}

// Callers take and give back what they have taken. At no time is more than the limit taken, and in the end the
// books agree with the row.
func TestRefundsAreExactUnderConcurrency(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 20, func(t *testing.T, config Config) {
		const callers, calls = 16, 60
		clientConfig := ClientConfig{Test: frozen(t0)} // what flows into a bucket meanwhile is not given back
		db := pgtest.New(t)
		limiters := []*Limiter{newLimiter(t, db.NewPool(t, nil), config, clientConfig), newLimiter(t, db.NewPool(t, nil), config, clientConfig)}
		var out, refunded atomic.Int64 // what is taken for certain, and not yet on its way back
		errs := make([]error, callers)
		testkit.Together(callers, func(i int) {
			limiter := limiters[i%2]
			var mine []Result
			for call := range calls {
				n := 1 + int64((i+call)%5)
				var result Result
				if len(mine) > 0 && call%3 > 0 {
					at := call % len(mine)
					result = mine[at]
					mine = slices.Delete(mine, at, at+1)
					n = result.taken.Receipt.Left()
					out.Add(-n)
					if _, errs[i] = limiter.Refund(t.Context(), result); errs[i] != nil {
						return
					}
					refunded.Add(n)
					continue
				}
				if result, errs[i] = limiter.AllowN(t.Context(), "key", n); errs[i] != nil {
					return
				}
				if result.Allowed {
					mine = append(mine, result)
					if now := out.Add(n); now > 20 {
						errs[i] = fmt.Errorf("%d of 20 are taken", now)
						return
					}
				}
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, out.Load(), taken(t, db.Pool, config, "key"))
		require.Greater(t, refunded.Load(), int64(100))
	})
}

// What cannot be given back is refused before the database is asked.
func TestWhatCannotBeRefunded(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	config := Config{Name: "a", Policy: FixedWindow{Limit: 10, Window: year}}
	limiter := newLimiter(t, pool, config)
	take := func(n int64) Result {
		result, err := limiter.AllowN(t.Context(), "personal", n)
		require.NoError(t, err)
		return result
	}
	six := take(6)
	denied := take(5)
	require.False(t, denied.Allowed)
	cached := take(5)
	require.Equal(t, SourceCachedDenial, cached.Source)
	for name, result := range map[string]Result{"the zero Result": {}, "a denial": denied, "one that was remembered": cached, "a Peek": take(0)} {
		_, err := limiter.Refund(t.Context(), result)
		require.ErrorIs(t, err, ErrNothingToRefund, name)
		_, err = limiter.RefundN(t.Context(), result, 1)
		require.ErrorIs(t, err, ErrNothingToRefund, name)
	}

	// Another limiter is one of another name, table, schema or database; a policy does not make one.
	other := func(pool *pgxpool.Pool, change func(*Config, *ClientConfig)) {
		config, clientConfig := config, ClientConfig{}
		change(&config, &clientConfig)
		l := newLimiter(t, pool, config, clientConfig)
		_, err := l.Refund(t.Context(), six)
		var refused *RefundError
		require.ErrorAs(t, err, &refused)
		require.NotContains(t, err.Error(), "personal")
	}
	other(pool, func(c *Config, _ *ClientConfig) { c.Name = "b" })
	other(pool, func(c *Config, _ *ClientConfig) { c.Durable = true })
	other(pool, func(_ *Config, c *ClientConfig) { c.Schema = "public" })
	other(db.NewPool(t, nil), func(*Config, *ClientConfig) {})

	back, err := newLimiter(t, pool, config).with(t, FixedWindow{Limit: 3, Window: year}).RefundN(t.Context(), six, 2)
	require.NoError(t, err)
	require.EqualValues(t, 6, back.Remaining) // under the policy that took

	// Each unit once, whoever is first.
	var given atomic.Int64
	testkit.Together(8, func(int) {
		if _, err := limiter.RefundN(context.Background(), six, 1); err == nil {
			given.Add(1)
		}
	})
	require.EqualValues(t, 4, given.Load())
	_, err = limiter.Refund(t.Context(), six)
	require.ErrorIs(t, err, ErrNothingToRefund)
	require.Zero(t, taken(t, db.Pool, config, "personal"))

	// In a transaction, which may be run again, it stays.
	four := take(4)
	for range 2 {
		tx := pgtest.Begin(t, db)
		result, err := limiter.WithTx(tx).Refund(t.Context(), four)
		require.NoError(t, err)
		require.EqualValues(t, 10, result.Remaining)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.EqualValues(t, 4, four.taken.Receipt.Left())
}

// Those who are decided together, wait together or ask several limits can each give back what is theirs.
func TestEachGivesBackItsOwn(t *testing.T) {
	t.Parallel()
	eachSlowPolicyAllAndTable(t, 12, func(t *testing.T, config Config) {
		pool := pgtest.New(t).Pool
		clientConfig := ClientConfig{Test: frozen(t0)}
		limiter := newLimiter(t, pool, config, clientConfig)
		batch := limiter.requestsFor("key", 3, 3, 3)
		limiter.send(batch)
		results, errs := outcomes(batch)
		require.NoError(t, errors.Join(errs...))
		for i, left := range []int64{6, 3, 0} {
			_, err := limiter.Refund(t.Context(), results[[]int{1, 0, 2}[i]])
			require.NoError(t, err)
			require.Equal(t, left, taken(t, pool, config, "key"))
		}

		waited, errs := make([]Result, 3), make([]error, 3)
		testkit.Together(3, func(i int) { waited[i], errs[i] = limiter.WaitN(t.Context(), "key", int64(1+i)) })
		require.NoError(t, errors.Join(errs...))
		require.EqualValues(t, 6, taken(t, pool, config, "key"))
		for i, left := range []int64{5, 3, 0} {
			_, err := limiter.Refund(t.Context(), waited[i])
			require.NoError(t, err)
			require.Equal(t, left, taken(t, pool, config, "key"))
		}

		config.Name = "other"
		other := limiter.client.limiter(t, config)
		both, err := AllowAll(t.Context(), limiter.Request("key", 2), other.Request("key", 5))
		require.NoError(t, err)
		_, err = limiter.Refund(t.Context(), both.Each[1])
		require.ErrorContains(t, err, "refund it there")
		_, err = other.RefundN(t.Context(), both.Each[1], 4)
		require.NoError(t, err)
		require.EqualValues(t, 1, taken(t, pool, config, "key"))
		config.Name = limiter.Config().Name
		require.EqualValues(t, 2, taken(t, pool, config, "key"))
	})
}
