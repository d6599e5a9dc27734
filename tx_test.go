package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A transaction that has ended takes nothing, and the error says so.
func TestTransactionThatHasEnded(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	pool := pgtest.New(t).Pool
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "orders", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour},
	})
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	_, err = limiter.WithTx(tx).Allow(t.Context(), "personal")
	require.EqualError(t, err,
		"ratelimit: the transaction has ended; call the limiter before Commit or Rollback: tx is closed")
	require.ErrorIs(t, err, pgx.ErrTxClosed)
	limitertest.RequireKinds(t, err)
	result, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}

// A transaction in which a statement has failed takes nothing, and the error says what to do.
func TestTransactionThatHasFailed(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "orders", Policy: ratelimit.FixedWindow{Limit: 1, Window: time.Hour},
	})
	tx := pgtest.Begin(t, db)
	_, err := tx.Exec(t.Context(), "SELECT 1/0")
	require.Error(t, err)
	_, err = limiter.WithTx(tx).Allow(t.Context(), "personal")
	require.ErrorContains(t, err, "ratelimit: an earlier statement of the transaction has failed; roll the transaction back")
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	require.True(t, ok)
	require.Equal(t, "25P02", pgErr.Code)
	limitertest.RequireKinds(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	result, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}

func TestTransactionKeepsOrGivesBack(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		remaining := func() int64 {
			peek, err := limiter.Peek(t.Context(), "key")
			require.NoError(t, err)
			return peek.Remaining
		}
		take := func(tx pgx.Tx, n, want int64) {
			result, err := limiter.WithTx(tx).AllowN(t.Context(), "key", n)
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, want, result.Remaining)
		}

		// After a rollback, a new key has no row again.
		tx := limitertest.Begin(t, db.Pool)
		take(tx, 4, 6)
		take(tx, 1, 5)
		require.EqualValues(t, 10, remaining()) // other sessions do not see the take yet
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))

		tx = limitertest.Begin(t, db.Pool)
		take(tx, 4, 6)
		result, err := limiter.WithTx(tx).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 5, result.Remaining)
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 5, remaining())

		tx = limitertest.Begin(t, db.Pool)
		take(tx, 1, 4)
		inner := limitertest.Savepoint(t, tx)
		take(inner, 3, 1)
		require.NoError(t, inner.Rollback(t.Context()))
		take(tx, 1, 3)
		inner = limitertest.Savepoint(t, tx)
		take(inner, 2, 1)
		require.NoError(t, inner.Commit(t.Context()))
		require.EqualValues(t, 5, remaining())
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 1, remaining())

		tx = limitertest.Begin(t, db.Pool)
		require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), "key"))
		take(tx, 10, 0)
		require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), "key"))
		inner = limitertest.Savepoint(t, tx)
		take(inner, 7, 3)
		require.NoError(t, inner.Rollback(t.Context()))
		take(tx, 2, 8)
		require.EqualValues(t, 1, remaining())
		require.NoError(t, tx.Rollback(t.Context()))
		require.EqualValues(t, 1, remaining())

		tx = limitertest.Begin(t, db.Pool)
		require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), "key"))
		require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), "unknown"))
		require.NoError(t, tx.Commit(t.Context()))
		require.EqualValues(t, 10, remaining())
	})
}

// A denial in a transaction may be caused by units that the transaction took. This process must not remember such a
// denial, because after a rollback other calls are admitted.
func TestDenialInATransactionIsForgottenWithIt(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		tx := limitertest.Begin(t, db.Pool)
		for _, want := range []bool{true, false} {
			result, err := limiter.WithTx(tx).AllowN(t.Context(), "key", 10)
			require.NoError(t, err)
			require.Equal(t, want, result.Allowed)
		}
		require.NoError(t, tx.Rollback(t.Context()))
		result, err := limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		require.True(t, result.Allowed)

		// A transaction also ignores denials that this process remembers, because it may have reset the key.
		denied, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		tx = limitertest.Begin(t, db.Pool)
		pgtest.Exec(t, tx, "DELETE FROM "+pgtest.Table(config.Durable))
		result, err = limiter.WithTx(tx).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

func TestTransactionStaysUsable(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	pgtest.Exec(t, db.Pool, "CREATE TABLE work (done text)")
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		pgtest.Exec(t, db.Pool, "DELETE FROM work")
		limiter := limitertest.New(t, pool, config)
		cancelled, cancel := context.WithCancel(t.Context())
		cancel()

		tx := limitertest.Begin(t, db.Pool)
		pgtest.Exec(t, tx, "INSERT INTO work VALUES ('before')")
		_, err := limiter.WithTx(tx).AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		denied, err := limiter.WithTx(tx).Allow(t.Context(), "key")
		require.NoError(t, err)
		require.False(t, denied.Allowed)
		require.Positive(t, denied.RetryAfter)
		for _, call := range []struct {
			key  string
			n    int64
			want error
		}{
			{"", 1, ratelimit.ErrInvalidKey}, {"nul \x00", 1, ratelimit.ErrInvalidKey}, {"key", -1, ratelimit.ErrInvalidCost}, {"key", 11, ratelimit.ErrCostExceedsLimit},
		} {
			_, err := limiter.WithTx(tx).AllowN(t.Context(), call.key, call.n)
			require.ErrorIs(t, err, call.want)
		}
		_, err = limiter.WithTx(tx).Allow(cancelled, "key")
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, limiter.WithTx(tx).Reset(t.Context(), "\xff"), ratelimit.ErrInvalidKey)
		require.ErrorIs(t, limiter.WithTx(tx).Reset(cancelled, "key"), context.Canceled)
		pgtest.Exec(t, tx, "INSERT INTO work VALUES ('after')")
		require.NoError(t, tx.Commit(t.Context()))
		require.Equal(t, 2, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM work"))
		require.EqualValues(t, 10, limitertest.Taken(t, db.Pool, config, "key"))
	})
}

func TestOthersWaitForATransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		for _, commit := range []bool{true, false} {
			pgtest.Clear(t, db)
			limiter := limitertest.New(t, pool, config)
			_, err := limiter.AllowN(t.Context(), "key", 2)
			require.NoError(t, err)

			tx := limitertest.Begin(t, db.Pool)
			_, err = limiter.WithTx(tx).AllowN(t.Context(), "key", 7)
			require.NoError(t, err)
			other := testkit.Later(func() (ratelimit.Result, error) { return limiter.AllowN(context.Background(), "key", 3) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			_, err = limiter.Allow(t.Context(), "another key") // this call need not wait
			require.NoError(t, err)
			want := ratelimit.Result{Allowed: true, Remaining: 5}
			if commit {
				require.NoError(t, tx.Commit(t.Context()))
				want = ratelimit.Result{Remaining: 1}
			} else {
				require.NoError(t, tx.Rollback(t.Context()))
			}
			result, err := other()
			require.NoError(t, err)
			require.Equal(t, want, ratelimit.Result{Allowed: result.Allowed, Remaining: result.Remaining})
		}
	})
}

func TestTransactionThatWaitsTooLong(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	config := ratelimit.Config{
		Name:   "test",
		Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
	}
	clientConfig := ratelimit.ClientConfig{Timeout: 500 * time.Millisecond}
	limiter := limitertest.New(t, db.NewPool(t, nil), config, clientConfig)
	first, second := pgtest.Begin(t, db), pgtest.Begin(t, db)
	_, err := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: config.Policy},
	).WithTx(first).Allow(t.Context(), "key")
	require.NoError(t, err)
	result, err := limiter.WithTx(second).Allow(t.Context(), "key")
	require.ErrorIs(t, err, ratelimit.ErrTimeout)
	require.Zero(t, result)
	require.Error(t, second.Commit(t.Context()))
	require.NoError(t, first.Commit(t.Context()))
	require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, config, "key"))
}

// At the higher isolation levels the database may refuse a call, but only with SQLSTATE 40001. The database never
// grants more than is left.
func TestIsolationLevels(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const limit, workers, each = 40, 6, 8
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		db := pgtest.New(t)
		pool := db.NewPool(t, nil)
		limitertest.EachSlowPolicyAndTableAt(t, level, limit, func(t *testing.T, config ratelimit.Config) {
			pgtest.Clear(t, db)
			limiter := limitertest.New(t, pool, config)
			var granted, refused atomic.Int64
			errs := make([]error, workers)
			testkit.Together(workers, func(i int) {
				for call := 0; call < each && errs[i] == nil; {
					allowed := int64(0)
					err := pgx.BeginTxFunc(t.Context(), db.Pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						// This statement takes the snapshot before the limiter is asked.
						if _, err := tx.Exec(t.Context(), "SELECT count(*) FROM pg_class"); err != nil {
							return err
						}
						for _, key := range []string{"key", fmt.Sprint("key of round ", call)} {
							result, err := limiter.WithTx(tx).Allow(t.Context(), key)
							if err != nil {
								return err
							}
							if key == "key" && result.Allowed {
								allowed = 1
							}
						}
						return nil
					})
					var pgErr *pgconn.PgError
					switch {
					case err == nil:
						granted.Add(allowed)
						call++
					case errors.As(err, &pgErr) && pgErr.Code == "40001":
						refused.Add(1)
					default:
						errs[i] = err
					}
				}
			})
			require.NoError(t, errors.Join(errs...))
			require.EqualValues(t, limit, granted.Load())
			require.EqualValues(t, limit, limitertest.Taken(t, db.Pool, config, "key"))
			for call := range each {
				require.EqualValues(t, workers, limitertest.Taken(t, db.Pool, config, fmt.Sprint("key of round ", call)))
			}
			if level == pgx.ReadCommitted {
				require.Zero(t, refused.Load())
			}
		})
	}
}

// Another transaction has changed, made or deleted the row since the snapshot. A decision from the old snapshot would
// be wrong.
func TestOldSnapshots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	for _, level := range []pgx.TxIsoLevel{pgx.RepeatableRead, pgx.Serializable} {
		db := pgtest.New(t)
		pool := db.NewPool(t, nil)
		limitertest.EachSlowPolicyAndTableAt(t, level, 10, func(t *testing.T, config ratelimit.Config) {
			pgtest.Clear(t, db)
			limiter := limitertest.New(t, pool, config)
			for _, key := range []string{"changed", "deleted", "untouched"} {
				_, err := limiter.AllowN(t.Context(), key, 6)
				require.NoError(t, err)
			}
			old := map[string]pgx.Tx{}
			for _, key := range []string{"changed", "deleted", "untouched", "made"} {
				tx, err := db.Pool.BeginTx(t.Context(), pgx.TxOptions{IsoLevel: level})
				require.NoError(t, err)
				pgtest.Exec(t, tx, "SELECT FROM pg_class")
				old[key] = tx
			}
			for _, key := range []string{"changed", "made"} {
				_, err := limiter.AllowN(t.Context(), key, 3)
				require.NoError(t, err)
			}
			require.NoError(t, limiter.Reset(t.Context(), "deleted"))

			for key, tx := range old {
				result, err := limiter.WithTx(tx).AllowN(t.Context(), key, 4)
				if key == "untouched" {
					require.NoError(t, err)
					require.True(t, result.Allowed)
					require.NoError(t, tx.Commit(t.Context()))
					continue
				}
				if key == "deleted" && err == nil { // an INSERT does not conflict with a row that was deleted
					require.True(t, result.Allowed)
					require.Equal(t, int64(6), result.Remaining)
					require.NoError(t, tx.Rollback(t.Context()))
					continue
				}
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr, key)
				require.Equal(t, "40001", pgErr.Code, key)
				require.Zero(t, result)
				require.NoError(t, tx.Rollback(t.Context()))
			}
			for key, want := range map[string]int64{"changed": 9, "made": 3, "deleted": 0, "untouched": 10} {
				require.Equal(t, want, limitertest.Taken(t, db.Pool, config, key), key)
			}
		})
	}
}

// Outside a caller's transaction, a limiter's statements decide correctly at each default isolation level of the pool.
func TestDefaultIsolationOfThePool(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	limiter := limitertest.New(
		t,
		pool,
		ratelimit.Config{
			Name:          "test",
			Policy:        ratelimit.FixedWindow{Limit: 30, Window: limitertest.Year},
			NoDenialCache: true,
		},
		ratelimit.ClientConfig{MaxBatch: 1, MaxInFlight: 6},
	)
	var granted atomic.Int64
	errs := make([]error, 100)
	testkit.Together(len(errs), func(i int) {
		result, err := limiter.Allow(t.Context(), "key")
		if errs[i] = err; result.Allowed {
			granted.Add(1)
		}
	})
	require.NoError(t, errors.Join(errs...))
	require.Equal(t, int64(30), granted.Load())
	require.Equal(t, int64(30), limitertest.Taken(t, db.Pool, limiter.Config(), "key"))
}

// If a call in a transaction gets no answer, the call closes the connection, so the transaction is rolled back. So the
// call has certainly not counted.
func TestTimeoutRollsTheTransactionBack(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	config := ratelimit.Config{Name: "test", Policy: limitertest.Hourly}
	patient := limitertest.New(t, db.Pool, config)
	taken, err := patient.Allow(t.Context(), "key")
	require.NoError(t, err)
	clientConfig := ratelimit.ClientConfig{Timeout: 100 * time.Millisecond}
	limiter := limitertest.New(t, db.Pool, config, clientConfig)
	holder := pgtest.Begin(t, db)
	_, err = patient.WithTx(holder).Allow(t.Context(), "key")
	require.NoError(t, err)
	for name, call := range map[string]func(tx pgx.Tx) error{
		"AllowTx": func(tx pgx.Tx) error {
			_, err := limiter.WithTx(tx).Allow(t.Context(), "key")
			return err
		},
		"AllowAllTx": func(tx pgx.Tx) error {
			_, err := limitertest.AllowAllTx(t.Context(), tx, limiter.Request("key", 1), limiter.Request("other", 1))
			return err
		},
		"RefundTx": func(tx pgx.Tx) error {
			_, err := limiter.WithTx(tx).Refund(t.Context(), taken)
			return err
		},
		"ResetTx": func(tx pgx.Tx) error { return limiter.WithTx(tx).Reset(t.Context(), "key") },
	} {
		tx, err := db.Pool.Begin(t.Context())
		require.NoError(t, err)
		err = call(tx)
		require.ErrorIs(t, err, ratelimit.ErrTimeout, name)
		require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown, name)
		require.ErrorContains(t, err, "the connection is closed, so the transaction is rolled back", name)
		require.Error(t, tx.Commit(t.Context()), name)
	}
	require.NoError(t, holder.Rollback(t.Context()))
	result, err := patient.Refund(t.Context(), taken)
	require.NoError(t, err)
	require.Equal(t, limitertest.Hourly.Limit, result.Remaining)
}

// taggedTx is a transaction type of an application. It cannot be compared with ==.
type taggedTx struct {
	pgx.Tx
	tags []string
}

// All requests of one AllowAll use the same transaction, or none.
func TestRequestsOfOneTransaction(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	tx, other := pgtest.Begin(t, db), pgtest.Begin(t, db)
	within, err := tx.Begin(t.Context())
	require.NoError(t, err)
	mine := limiter.WithTx(tx).Request("a", 1)
	for name, second := range map[string]ratelimit.Request{
		"itself":    limiter.WithTx(tx).Request("b", 1),
		"savepoint": limiter.WithTx(within).Request("b", 1),
		"wrapped":   limiter.WithTx(taggedTx{tx, []string{"a"}}).Request("b", 1),
	} {
		results, err := ratelimit.AllowAll(t.Context(), mine, second)
		require.NoError(t, err, name)
		require.True(t, results.Allowed, name)
	}
	for name, second := range map[string]ratelimit.Request{
		"none":    limiter.Request("b", 1),
		"another": limiter.WithTx(other).Request("b", 1),
		"wrapped": limiter.WithTx(taggedTx{other, []string{"a"}}).Request("b", 1),
	} {
		_, err := ratelimit.AllowAll(t.Context(), mine, second)
		request, ok := errors.AsType[*ratelimit.RequestError](err)
		require.True(t, ok, name)
		require.Equal(t, 1, request.Index, name)
		require.ErrorIs(t, err, ratelimit.ErrOtherTx, name)
	}
	_, err = ratelimit.AllowAll(t.Context(), limiter.Request("b", 1), mine)
	require.ErrorIs(t, err, ratelimit.ErrOtherTx)
	_, err = ratelimit.AllowAll(t.Context(), mine, limiter.WithTx(nil).Request("b", 1))
	wrong, ok := errors.AsType[*ratelimit.ConfigError](err)
	require.True(t, ok)
	require.Equal(t, "tx", wrong.Field)
	require.NoError(t, within.Rollback(t.Context()))
	require.NoError(t, tx.Rollback(t.Context()))
	require.EqualValues(t, 0, limitertest.Taken(t, db.Pool, limiter.Config(), "a"))
}
