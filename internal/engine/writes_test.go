package engine_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// tuple is the place of a row's version in its table, and the transaction that wrote it.
type tuple struct{ Ctid, Xmin string }

func tupleOf(t *testing.T, db pgtest.Executor, config ratelimit.Config, key string) tuple {
	t.Helper()
	rows, err := db.Query(
		t.Context(),
		"SELECT ctid::text, xmin::text FROM "+pgtest.Table(config.Durable)+" WHERE prefix = $1 AND key = $2",
		config.Name,
		key,
	)
	require.NoError(t, err)
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[tuple])
	require.NoError(t, err)
	return row
}

func TestDenialsWriteNothing(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		config.NoDenialCache = true
		limiter := limitertest.New(t, pool, config)
		for range 10 {
			result, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
		}
		before, rowsBefore := tupleOf(t, db.Pool, config, "key"), pgtest.StoredRows(t, db.Pool, config.Durable)

		errs := make([]error, 20)
		testkit.Together(len(errs), func(i int) {
			for call := range 10 {
				result, err := limiter.AllowN(t.Context(), "key", int64(1+call%10))
				if err == nil && result.Allowed {
					err = errors.New("allowed")
				}
				errs[i] = errors.Join(errs[i], err)
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, before, tupleOf(t, db.Pool, config, "key"))
		require.Equal(t, rowsBefore, pgtest.StoredRows(t, db.Pool, config.Durable))

		// Inside a transaction, the statistics of the transaction itself are visible at once. A new connection has no
		// older ones.
		tx := pgtest.Begin(t, db)
		for range 3 {
			result, err := limiter.WithTx(tx).Allow(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			_, err = limiter.WithTx(tx).AllowN(t.Context(), "key", 0)
			require.NoError(t, err)
			_, err = limiter.WithTx(tx).AllowN(t.Context(), "unknown", 0)
			require.NoError(t, err)
		}
		require.Zero(t, limitertest.Written(t, tx, config))
		_, err := limiter.WithTx(tx).Allow(t.Context(), "other key")
		require.NoError(t, err)
		require.Positive(t, limitertest.Written(t, tx, config)) // shows that the statistics count writes
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

func TestLooksTakeNoTransactionIDAndWaitForNobody(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, pool, config)
		peek, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(
			t,
			ratelimit.Result{Allowed: true, Limit: 10, Remaining: 10},
			ratelimit.Result{Allowed: peek.Allowed, Limit: peek.Limit, Remaining: peek.Remaining},
		)
		require.Zero(t, peek.RetryAfter+peek.ResetAfter)
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))

		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		holder := limitertest.Hold(t, db, config, "key")
		require.NoError(t, limiter.WithTx(holder).Reset(t.Context(), "key"))
		for range 10 {
			peek, err = limiter.Peek(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, peek.Allowed)
			require.Zero(t, peek.Remaining)
			require.Positive(t, peek.RetryAfter)
		}
		require.NoError(t, holder.Rollback(t.Context()))

		tx := limitertest.Begin(t, db.Pool)
		_, err = limiter.WithTx(tx).AllowN(t.Context(), "key", 0)
		require.NoError(t, err)
		require.Nil(t, pgtest.Scalar[*string](t, tx, "SELECT pg_current_xact_id_if_assigned()::text"))
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

// A statement uses one transaction id, for any number of keys. It uses an id even if it denies all requests, because it
// locks their rows. Looks and remembered denials use no id. A statement for many requests of AllowAll uses two ids.
func TestTransactionIDs(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	// On this server, only this test uses transaction ids.
	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"autovacuum": "off"}})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	next := func() int64 {
		return pgtest.Scalar[int64](t, pool, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
	}

	for name, policy := range limitertest.SlowPolicies(10) {
		for _, durable := range []bool{false, true} {
			limiter := limitertest.New(
				t,
				pool,
				ratelimit.Config{Name: name, Policy: policy, Durable: durable},
				ratelimit.ClientConfig{DenialMaxAge: time.Hour}, // a busy machine may stand still for a second
			)
			for _, c := range []struct{ cost, granted, want int64 }{
				{10, 1, 1}, // new keys
				{1, 0, 1},  // denied
				{0, 0, 0},  // a look
			} {
				elements := make([]modeltest.Element, 100)
				for i := range elements {
					elements[i] = modeltest.Element{Key: fmt.Sprint(i), Cost: c.cost, Count: 1}
				}
				before := next()
				require.NoError(t, decideAndRemember(t.Context(), limiter, elements))
				require.Equal(t, c.want, next()-before, "%s: %+v", name, c)
				for _, e := range elements {
					require.Equal(t, c.granted, e.Decision.Granted)
				}
			}
			before := next()
			result, err := limiter.Allow(t.Context(), "7")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			require.Equal(t, before, next())
		}
	}

	client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{})
	limitertest.EngineOf(client).Database.ManyParts = 0
	a := limitertest.Of(t, client, ratelimit.Config{Name: "a", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
	b := limitertest.Of(t, client, ratelimit.Config{Name: "b", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}})
	for range 2 { // first with new rows, then with known rows
		before := next()
		results, err := ratelimit.AllowAll(t.Context(), a.Request("set", 1), b.Request("set", 1))
		require.NoError(t, err)
		require.True(t, results.Allowed)
		require.LessOrEqual(t, next()-before, int64(3)) // one more if a subtransaction is rolled back
	}
	before := next()
	_, err = ratelimit.AllowAll(t.Context(), a.Request("set", 1), b.Request("set", 1))
	require.NoError(t, err)
	require.EqualValues(t, 2, next()-before)
}
