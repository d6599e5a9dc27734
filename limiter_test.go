package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// tuple is where a row's version is in its table, and which transaction wrote it.
type tuple struct{ Ctid, Xmin string }

func tupleOf(t *testing.T, db DBTX, config Config, key string) tuple {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT ctid::text, xmin::text FROM "+table(config.Durable)+" WHERE prefix = $1 AND key = $2", config.Name, key)
	require.NoError(t, err)
	row, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[tuple])
	require.NoError(t, err)
	return row
}

// written is how many tuples the transaction has written to a table.
func written(t *testing.T, tx pgx.Tx, config Config) int64 {
	t.Helper()
	return scalar[int64](t, tx, `SELECT n_tup_ins + n_tup_upd + n_tup_del FROM pg_stat_xact_user_tables WHERE relname = $1`, table(config.Durable))
}

func TestDenialsWriteNothing(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		config.NoDenialCache = true
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		for range 10 {
			result, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.True(t, result.Allowed)
		}
		before, rowsBefore := tupleOf(t, db.Pool, config, "key"), storedRows(t, db.Pool, config.Durable)

		errs := make([]error, 50)
		together(len(errs), func(i int) {
			for call := range 20 {
				result, err := limiter.AllowN(t.Context(), "key", int64(1+call%10))
				if err == nil && result.Allowed {
					err = errors.New("allowed")
				}
				errs[i] = errors.Join(errs[i], err)
			}
		})
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, before, tupleOf(t, db.Pool, config, "key"))
		require.Equal(t, rowsBefore, storedRows(t, db.Pool, config.Durable))

		// In a transaction, where the statistics are those of this very moment.
		tx := begin(t, db)
		for range 3 {
			result, err := limiter.AllowTx(t.Context(), tx, "key")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			_, err = limiter.AllowNTx(t.Context(), tx, "key", 0)
			require.NoError(t, err)
			_, err = limiter.AllowNTx(t.Context(), tx, "unknown", 0)
			require.NoError(t, err)
		}
		require.Zero(t, written(t, tx, config))
		_, err := limiter.AllowTx(t.Context(), tx, "other key")
		require.NoError(t, err)
		require.Positive(t, written(t, tx, config)) // the statistics do count
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

func TestLooksTakeNoTransactionIDAndWaitForNobody(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		peek, err := limiter.Peek(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, Result{Allowed: true, Limit: 10, Remaining: 10}, Result{Allowed: peek.Allowed, Limit: peek.Limit, Remaining: peek.Remaining})
		require.Zero(t, peek.RetryAfter+peek.ResetAfter)
		require.Empty(t, storedRows(t, db.Pool, config.Durable))

		_, err = limiter.AllowN(t.Context(), "key", 10)
		require.NoError(t, err)
		holder := hold(t, db, config, "key")
		require.NoError(t, limiter.ResetTx(t.Context(), holder, "key"))
		for range 10 {
			peek, err = limiter.Peek(t.Context(), "key")
			require.NoError(t, err)
			require.False(t, peek.Allowed)
			require.Zero(t, peek.Remaining)
			require.Positive(t, peek.RetryAfter)
		}
		require.NoError(t, holder.Rollback(t.Context()))

		tx := begin(t, db)
		_, err = limiter.AllowNTx(t.Context(), tx, "key", 0)
		require.NoError(t, err)
		require.Nil(t, scalar[*string](t, tx, "SELECT pg_current_xact_id_if_assigned()::text"))
		require.NoError(t, tx.Rollback(t.Context()))
	})
}

// A statement takes one transaction id, however many keys it is about, also if it denies all of them: it has locked their rows.
// Looks take none, and neither does a denial that is remembered.
func TestTransactionIDs(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{"autovacuum": "off"}}) // nobody else takes any there
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	next := func() int64 {
		return scalar[int64](t, pool, "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
	}

	for name, policy := range slowPolicies(10) {
		for _, durable := range []bool{false, true} {
			limiter := newLimiter(t, pool, Config{Name: name, Policy: policy, Durable: durable, Timeout: amply})
			for _, c := range []struct{ cost, granted, want int64 }{
				{10, 1, 1}, // of new keys
				{1, 0, 1},  // denied
				{0, 0, 0},  // a look
			} {
				elements := make([]element, 100)
				for i := range elements {
					elements[i] = element{key: fmt.Sprint(i), cost: c.cost, count: 1}
				}
				before := next()
				require.NoError(t, limiter.decideAndRemember(t.Context(), elements, limiter.settings))
				require.Equal(t, c.want, next()-before, "%s: %+v", name, c)
				for _, e := range elements {
					require.Equal(t, c.granted, e.decision.granted)
				}
			}
			before := next()
			result, err := limiter.Allow(t.Context(), "7")
			require.NoError(t, err)
			require.False(t, result.Allowed)
			require.Equal(t, before, next())
		}
	}
}

func TestReset(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.NewPool(t, nil), config)
		config.Name = "another"
		another := newLimiter(t, db.Pool, config)
		config.Name, config.Durable = "test", !config.Durable
		elsewhere := newLimiter(t, db.Pool, config)
		all := []*Limiter{limiter, another, elsewhere}
		for _, l := range all {
			for _, key := range []string{"key", "other key"} {
				_, err := l.AllowN(t.Context(), key, 10)
				require.NoError(t, err)
				denied, err := l.Allow(t.Context(), key) // which is remembered
				require.NoError(t, err)
				require.False(t, denied.Allowed)
			}
		}

		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.NoError(t, limiter.Reset(t.Context(), "unknown"))
		for i, l := range all {
			for _, key := range []string{"key", "other key"} {
				result, err := l.Allow(t.Context(), key)
				require.NoError(t, err)
				require.Equal(t, i == 0 && key == "key", result.Allowed)
			}
		}
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		require.Len(t, storedRows(t, db.Pool, !config.Durable), 3)
		require.Len(t, storedRows(t, db.Pool, config.Durable), 2)
	})
}

func TestNamesAndTablesKeepLimitersApart(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	base := Config{Name: "a", Policy: FixedWindow{Limit: 3, Window: year}, Timeout: amply}
	durable, other, swapped, same := base, base, base, base
	durable.Durable = true
	other.Name = "b"
	swapped.Name = "key"
	one := newLimiter(t, db.Pool, base)
	for _, config := range []Config{durable, other, swapped} {
		_, err := one.Allow(t.Context(), "key")
		require.NoError(t, err)
		key := "key"
		if config.Name == "key" {
			key = "a"
		}
		result, err := newLimiter(t, db.Pool, config).Allow(t.Context(), key)
		require.NoError(t, err)
		require.EqualValues(t, 2, result.Remaining)
	}
	result, err := newLimiter(t, db.Pool, same).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.Len(t, storedRows(t, db.Pool, false), 3)
	require.Len(t, storedRows(t, db.Pool, true), 1)
}

func TestNowReplacesTheDatabaseClock(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	now := t0
	limiter := newLimiter(t, db.Pool, Config{
		Name: "test", Policy: SlidingWindow{Limit: 10, Window: time.Minute}, Timeout: amply, NoDenialCache: true,
		Test: TestConfig{Now: func() time.Time { return now }},
	})
	for _, step := range []struct {
		at   time.Duration
		n    int64
		want Result
	}{
		// The example of Result's comments.
		{0, 3, Result{Allowed: true, Remaining: 7, ResetAfter: 2 * time.Minute}},
		{0, 7, Result{Allowed: true, Remaining: 0, ResetAfter: 2 * time.Minute}},
		{5 * time.Second, 1, Result{RetryAfter: 61 * time.Second, ResetAfter: 115 * time.Second}},
		{66*time.Second - time.Microsecond, 1, Result{RetryAfter: time.Microsecond, ResetAfter: 54*time.Second + time.Microsecond}},
		{66 * time.Second, 1, Result{Allowed: true, Remaining: 0, ResetAfter: 114 * time.Second}},
		{180 * time.Second, 0, Result{Allowed: true, Remaining: 10}},
	} {
		now = t0.Add(step.at)
		got, err := limiter.AllowN(t.Context(), "key", step.n)
		require.NoError(t, err)
		step.want.Limit, step.want.DecidedAt = 10, now
		require.Equal(t, step.want, utc(got), step.at)
	}
}

func TestDatabaseClockDecides(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: year}, Timeout: amply})
	for _, n := range []int64{1, 0} {
		before := scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
		result, err := limiter.AllowN(t.Context(), "key", n)
		require.NoError(t, err)
		after := scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
		require.False(t, result.DecidedAt.Before(before))
		require.False(t, result.DecidedAt.After(after))
	}
}

// migrateInto migrates into a new schema of the database.
func migrateInto(t *testing.T, db *pgtest.DB, schema string) {
	t.Helper()
	quoted := pgx.Identifier{schema}.Sanitize()
	exec(t, db.Pool, "CREATE SCHEMA "+quoted)
	require.NoError(t, migrations.Up(t.Context(), withSearchPath(t, db, quoted)))
}

func withSearchPath(t *testing.T, db *pgtest.DB, path string) *pgxpool.Pool {
	t.Helper()
	return db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = path })
}

func TestSchema(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	const odd, alike = `Limits; of "us", $1`, "rate_limit_"
	migrateInto(t, db, odd)
	migrateInto(t, db, alike)
	oddPath := withSearchPath(t, db, `"$user", nowhere, `+pgx.Identifier{odd}.Sanitize())
	for name, policy := range slowPolicies(10) {
		config := Config{Name: name, Policy: policy, Timeout: amply}
		in := func(schema string) Config {
			config := config
			config.Schema = schema
			return config
		}
		limiters := []*Limiter{
			newLimiter(t, db.Pool, in(odd)),
			newLimiter(t, oddPath, in("")),
			newLimiter(t, oddPath, in(odd)),
			newLimiter(t, db.Pool, in(alike)),
		}
		for i, want := range []int64{9, 8, 7, 9} {
			result, err := limiters[i].Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}
		require.NoError(t, limiters[2].Reset(t.Context(), "key"))
		for i, want := range []int64{10, 10, 10, 9} {
			result, err := limiters[i].Peek(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}

		// Where nothing is, nothing is found, and nothing in the name is taken for SQL.
		for _, schema := range []string{
			"", "public", "nowhere", `limits; of "us", $1`, `rate_limit_"; DROP SCHEMA rate_limit_ CASCADE; --`, `x'); DROP SCHEMA rate_limit_ CASCADE; --`,
		} {
			_, err := newLimiter(t, db.Pool, in(schema)).Allow(t.Context(), "key")
			require.ErrorIs(t, err, ErrNotMigrated, schema)
			require.ErrorIs(t, newLimiter(t, db.Pool, in(schema)).Reset(t.Context(), "key"), ErrNotMigrated, schema)
		}
	}
	require.True(t, scalar[bool](t, db.Pool, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", alike))
}

func TestOneConnection(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for name, open := range map[string]func() DBTX{
		"connection":               func() DBTX { return connect(t, db) },
		"transaction":              func() DBTX { return begin(t, db) },
		"connection of a pool":     func() DBTX { return acquire(t, db.Pool) },
		"transaction of a pool":    func() DBTX { return poolTx(t, db.Pool) },
		"transaction in one again": func() DBTX { return savepoint(t, begin(t, db)) },
	} {
		for kind, policy := range slowPolicies(60) {
			conn := open()
			limiter := newLimiter(t, conn, Config{Name: name, Policy: policy, Timeout: amply})
			results, errs := make([]Result, 100), make([]error, 100)
			together(len(results), func(i int) { results[i], errs[i] = limiter.Allow(t.Context(), kind) })
			require.NoError(t, errors.Join(errs...), name)
			allowed := 0
			for _, r := range results {
				if r.Allowed {
					allowed++
				}
			}
			require.Equal(t, 60, allowed, name)
			peek, err := limiter.Peek(t.Context(), kind)
			require.NoError(t, err)
			require.False(t, peek.Allowed)
			require.NoError(t, limiter.Reset(t.Context(), kind))
			peek, err = limiter.Peek(t.Context(), kind)
			require.NoError(t, err)
			require.EqualValues(t, 60, peek.Remaining)

			cancelled, cancel := context.WithCancel(t.Context())
			cancel()
			_, err = limiter.Allow(cancelled, kind)
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, limiter.Reset(cancelled, kind), context.Canceled)
			require.Equal(t, 1, scalar[int](t, conn, "SELECT 1")) // the connection is as good as before
			if tx, ok := conn.(pgx.Tx); ok {
				require.NoError(t, tx.Rollback(t.Context()))
			}
		}
	}
}

func acquire(t *testing.T, pool *pgxpool.Pool) *pgxpool.Conn {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	t.Cleanup(conn.Release)
	return conn
}

func poolTx(t *testing.T, pool *pgxpool.Pool) pgx.Tx {
	t.Helper()
	tx, err := pool.Begin(t.Context())
	require.NoError(t, err)
	return tx
}

func savepoint(t *testing.T, tx pgx.Tx) pgx.Tx {
	t.Helper()
	inner, err := tx.Begin(t.Context())
	require.NoError(t, err)
	return inner
}

// All limiters on a connection take turns on it, whatever they were made with: the connection, one of a pool, or a transaction.
func TestLimitersOnOneConnectionTakeTurns(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pooled := acquire(t, db.NewPool(t, nil))
	inPooled, err := pooled.Begin(t.Context())
	require.NoError(t, err)
	conn := connect(t, db)
	tx, err := conn.Begin(t.Context())
	require.NoError(t, err)
	policy := FixedWindow{Limit: 1 << 20, Window: time.Hour}
	for name, dbs := range map[string][]DBTX{
		"connection":        {conn, conn, tx, savepoint(t, tx)},
		"pooled connection": {pooled, inPooled, pooled.Conn()},
	} {
		limiters := make([]*Limiter, 2*len(dbs))
		together(len(limiters), func(i int) {
			limiters[i] = newLimiter(t, dbs[i%len(dbs)], Config{Name: fmt.Sprint(name, i), Policy: policy, Timeout: amply})
		})
		errs := make([]error, 8*len(limiters))
		together(len(errs), func(i int) {
			ctx, l := context.Background(), limiters[i%len(limiters)]
			for range 5 {
				_, err1 := l.Allow(ctx, "key")
				_, err2 := AllowAll(ctx, l.Request("key", 1), l.Request("other key", 1))
				_, err3 := l.give(ctx, "key", 1, []take{{units: 1}})
				_, err4 := l.Grant(ctx, "key", 1)
				_, err5 := l.Wait(ctx, "key")
				_, err6 := l.Peek(ctx, "key")
				errs[i] = errors.Join(errs[i], err1, err2, err3, err4, err5, err6, l.Reset(ctx, "key"))
			}
		})
		require.NoError(t, errors.Join(errs...), name)
	}
}

// The mutex of a connection is of that connection alone, and one that cannot be told has its own.
func TestTurnsAreOfOneConnection(t *testing.T) {
	t.Parallel()

	type strangeTx struct{ pgx.Tx }
	db := pgtest.New(t)
	one, other := connect(t, db), connect(t, db)
	require.NotSame(t, turns(one), turns(other))
	unknown := turns(nil)
	require.NotSame(t, unknown, turns(nil))
	tx, err := one.Begin(t.Context())
	require.NoError(t, err)
	config := Config{Name: "test", Policy: hourly}
	require.Same(t, turns(one), newLimiter(t, strangeTx{tx}, config).single)
	require.Nil(t, newLimiter(t, db.Pool, config).single)
}

// A limiter never takes a second connection for a call, so small pools are enough: also while callers hold a connection
// of the same pool in a transaction of their own.
func TestSmallPools(t *testing.T) {
	t.Parallel()

	for _, maxConns := range []int32{1, 2} {
		db := pgtest.New(t)
		pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = maxConns })
		limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 1000, Window: year}, Timeout: amply})
		errs := make([]error, 60)
		together(len(errs), func(i int) {
			key := fmt.Sprint(i % 5)
			_, err := limiter.Allow(t.Context(), key)
			err = errors.Join(err, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := limiter.AllowTx(t.Context(), tx, key)
				return err
			}))
			_, peekErr := limiter.Peek(t.Context(), key)
			errs[i] = errors.Join(err, peekErr, limiter.Reset(t.Context(), "another key"))
		})
		require.NoError(t, errors.Join(errs...))
		for key := range 5 {
			require.EqualValues(t, 24, taken(t, db.Pool, limiter.config, fmt.Sprint(key)))
		}
	}
}

// A caller whose context ends while somebody's transaction holds the row leaves at once. The connection stays, and so does what
// was asked.
func TestCallerLeavesWhileTheRowIsHeld(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: 4 * amply})
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	conns := pool.Stat().NewConnsCount()

	holder := hold(t, db, limiter.config, "key")
	for name, call := range map[string]func(context.Context) (Result, error){
		"Allow": func(ctx context.Context) (Result, error) { return limiter.Allow(ctx, "key") },
		"Reset": func(ctx context.Context) (Result, error) { return Result{}, limiter.Reset(ctx, "key") },
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		wait := later(func() (Result, error) { return call(ctx) })
		waitUntilBlocked(t, db.Pool, 1)
		cancel(errors.New("the client has gone"))
		result, err := wait()
		require.ErrorIs(t, err, context.Canceled, name)
		require.Zero(t, result)
		waitUntil(t, func() bool { return pool.Stat().AcquiredConns() > 0 }) // between two statements it has none

		_, err = call(ctx) // nor does one begin whose context has ended before
		require.ErrorIs(t, err, context.Canceled, name)

		require.NoError(t, holder.Commit(t.Context()))
		want := map[string]int64{"Allow": 2, "Reset": 0}[name]
		waitUntil(t, func() bool { return taken(t, db.Pool, limiter.config, "key") == want })
		waitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 0 })
		_, err = limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.NoError(t, limiter.Reset(t.Context(), "key"))
		_, err = limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		holder = hold(t, db, limiter.config, "key")
	}
	require.NoError(t, holder.Rollback(t.Context()))
	require.Equal(t, conns, pool.Stat().NewConnsCount())
}

func TestCallerThatLeavesDoesNotDisturbOthers(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	config := Config{Name: "test", Policy: FixedWindow{Limit: 100, Window: year}, Timeout: 4 * amply, MaxInFlight: 1}
	pool := db.NewPool(t, nil)
	limiter := newLimiter(t, pool, config)
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)

	holder := hold(t, db, config, "key")
	first := later(func() (Result, error) { return limiter.Allow(context.Background(), "key") })
	waitUntilHeld(t, db.Pool, limiter)
	// While the table is locked, too, the lane waits in one statement, and those who come stay in its queue.
	locked := savepoint(t, holder)
	exec(t, locked, "LOCK TABLE rate_limit_ephemeral")
	waitUntilBlocked(t, db.Pool, 1)
	var waits []func() (Result, error)
	ctx, cancel := context.WithCancel(t.Context())
	for i := range 9 {
		call := context.Background()
		if i%3 == 1 {
			call = ctx
		}
		waits = append(waits, later(func() (Result, error) { return limiter.Allow(call, "key") }))
		waitUntil(t, func() bool { return limiter.inLane() == i+1 })
	}
	cancel()
	for i := 1; i < len(waits); i += 3 {
		_, err := waits[i]()
		require.ErrorIs(t, err, context.Canceled)
	}
	require.NoError(t, locked.Rollback(t.Context()))
	// Calls that come later may use the memory of those that have left, or not: it must not matter.
	waits = append(waits, later(func() (Result, error) { return limiter.Allow(context.Background(), "other key") }))
	_, err = waits[9]()
	require.NoError(t, err)
	require.NoError(t, holder.Commit(t.Context()))

	result, err := first()
	require.NoError(t, err)
	require.EqualValues(t, 98, result.Remaining)
	for i, want := range map[int]int64{0: 97, 2: 95, 3: 94, 5: 92, 6: 91, 8: 89, 9: 99} {
		result, err := waits[i]()
		require.NoError(t, err)
		require.True(t, result.Allowed)
		require.Equal(t, want, result.Remaining, i)
	}
	require.EqualValues(t, 11, taken(t, db.Pool, config, "key"))
	require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(2)) // MaxInFlight, and the lane
}

// A statement with a key whose row is held by somebody's transaction fails for that key alone.
func TestHeldKeyDoesNotSpoilItsBatch(t *testing.T) {
	t.Parallel()

	for _, durable := range []bool{false, true} {
		t.Run(table(durable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			// A quarter of the Timeout is waited for the row, and what is left must be enough for the others on any machine.
			config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Durable: durable, Timeout: 10 * time.Second}
			pool := db.NewPool(t, nil)
			limiter := newLimiter(t, pool, config)
			for _, key := range []string{"b", "held", "deleted"} {
				_, err := limiter.Allow(t.Context(), key)
				require.NoError(t, err)
			}
			holder := hold(t, db, config, "held")
			exec(t, holder, "DELETE FROM "+table(durable)+" WHERE key = 'deleted'")

			batch := slices.Concat(newCalls("z", 1), newCalls("held", 1, 2), newCalls("b", 1, 1), newCalls("a", 2, 1), newCalls("deleted", 1), newCalls("held", 1))
			for _, c := range batch {
				c.by = limiter
			}
			limiter.send(&flight{batch: batch})
			results, errs := outcomes(batch)
			require.NoError(t, holder.Rollback(t.Context()))
			for i, c := range batch {
				if c.key == "held" || c.key == "deleted" {
					require.ErrorIs(t, errs[i], ErrTimeout)
					require.ErrorIs(t, errs[i], ErrKeyHeld)
					require.NotErrorIs(t, errs[i], ErrOutcomeUnknown) // it has not counted
					require.Zero(t, results[i])
					continue
				}
				require.NoError(t, errs[i])
				require.True(t, results[i].Allowed)
			}
			for key, want := range map[string]int64{"z": 1, "held": 1, "deleted": 1, "b": 3, "a": 3} {
				require.Equal(t, want, taken(t, db.Pool, config, key), key)
			}
			require.LessOrEqual(t, pool.Stat().NewConnsCount(), int64(2)) // the lane's
		})
	}
}

// Who has nearly no time left would leave none to the others of his batch.
func TestCallThatHasWaitedTooLongIsNotAsked(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	batch := newCalls("key", 1, 1, 1, 1)
	batch[0].since = batch[0].since.Add(-2 * amply)
	batch[1].since = batch[1].since.Add(-amply * 19 / 20)
	batch[2].since = batch[2].since.Add(-amply / 2)
	limiter.send(&flight{batch: batch})
	results, errs := outcomes(batch)
	for i := range 2 {
		require.ErrorIs(t, errs[i], ErrTimeout)
		require.NotErrorIs(t, errs[i], ErrOutcomeUnknown)
		require.Zero(t, results[i])
	}
	for i, want := range map[int]int64{2: 9, 3: 8} {
		require.NoError(t, errs[i])
		require.Equal(t, want, results[i].Remaining)
	}
	require.EqualValues(t, 2, taken(t, db.Pool, limiter.config, "key"))
}

func TestResetOfAHeldKeyGivesUp(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: 4 * time.Second})
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	holder := hold(t, db, limiter.config, "key")
	require.ErrorIs(t, limiter.Reset(t.Context(), "key"), ErrTimeout)
	require.NoError(t, holder.Rollback(t.Context()))
	require.EqualValues(t, 1, taken(t, db.Pool, limiter.config, "key"))
}

// However many wait for a key that somebody holds, the pool's other connections are free for the application.
func TestHeldKeyLeavesThePoolToOthers(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.MaxConns = 4 })
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 5000, Window: year}, Timeout: 4 * amply})
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	holder := hold(t, db, limiter.config, "key")

	const callers = 2000
	errs := make([]error, callers)
	done := later(func() (any, error) {
		together(callers, func(i int) { _, errs[i] = limiter.Allow(context.Background(), "key") })
		return nil, errors.Join(errs...)
	})
	waitUntilHeld(t, db.Pool, limiter)
	for range 20 {
		require.Equal(t, 1, scalar[int](t, pool, "SELECT 1"))
	}
	require.LessOrEqual(t, pool.Stat().AcquiredConns(), int32(3)) // MaxInFlight, and the lane
	require.NoError(t, holder.Commit(t.Context()))
	_, err = done()
	require.NoError(t, err)
	require.EqualValues(t, callers+1, taken(t, db.Pool, limiter.config, "key"))
}

// probe makes a table write down the settings of each transaction that writes to it.
func probe(t *testing.T, db *pgtest.DB) {
	t.Helper()
	exec(t, db.Pool, `
		CREATE TABLE probe (operation text, synchronous_commit text, lock_timeout text);
		CREATE FUNCTION probe() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN
			INSERT INTO public.probe VALUES (tg_op, current_setting('synchronous_commit'), current_setting('lock_timeout'));
			RETURN NULL;
		END $$;
		CREATE TRIGGER probe AFTER INSERT OR UPDATE OR DELETE ON rate_limit_durable FOR EACH STATEMENT EXECUTE FUNCTION probe();
		CREATE TRIGGER probe AFTER INSERT OR UPDATE OR DELETE ON rate_limit_ephemeral FOR EACH STATEMENT EXECUTE FUNCTION probe()`)
}

func TestSettingsAreThoseOfTheLimitersTransactionsAlone(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	probe(t, db)
	const session = "remote_write, 77s"
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 1
		config.ConnConfig.RuntimeParams["synchronous_commit"] = "remote_write"
		config.ConnConfig.RuntimeParams["lock_timeout"] = "77s"
	})
	const show = "SELECT current_setting('synchronous_commit') || ', ' || current_setting('lock_timeout')"
	seen := func() []string {
		rows, err := db.Pool.Query(t.Context(), "WITH seen AS (DELETE FROM probe RETURNING *) SELECT DISTINCT synchronous_commit || ', ' || lock_timeout FROM seen")
		require.NoError(t, err)
		settings, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return settings
	}

	for _, c := range []struct {
		durable, synchronous bool
		want                 string
	}{
		{false, false, "remote_write"},
		{true, false, "off"},
		{true, true, "on"},
	} {
		for name, policy := range slowPolicies(10) {
			limiter := newLimiter(t, pool, Config{
				Name: name, Policy: policy, Durable: c.durable, SynchronousCommit: c.synchronous, Timeout: 40 * time.Second,
			})
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, []string{c.want + ", 25ms"}, seen(), name)
			require.NoError(t, limiter.Reset(t.Context(), "key"))
			require.Equal(t, []string{c.want + ", 10s"}, seen(), name)
			require.Equal(t, session, scalar[string](t, pool, show))

			tx := poolTx(t, pool)
			_, err = limiter.AllowTx(t.Context(), tx, "key")
			require.NoError(t, err)
			_, err = limiter.AllowNTx(t.Context(), tx, "key", 0)
			require.NoError(t, err)
			require.Equal(t, session, scalar[string](t, tx, show))
			require.NoError(t, limiter.ResetTx(t.Context(), tx, "key"))
			require.Equal(t, session, scalar[string](t, tx, show))
			exec(t, tx, "SET LOCAL lock_timeout = '5s'; SET LOCAL synchronous_commit = off")
			_, err = limiter.AllowTx(t.Context(), tx, "key")
			require.NoError(t, err)
			require.Equal(t, "off, 5s", scalar[string](t, tx, show))
			require.NoError(t, tx.Commit(t.Context()))
			require.ElementsMatch(t, []string{session, "off, 5s"}, seen())
			require.Equal(t, session, scalar[string](t, pool, show))
			require.NoError(t, limiter.Reset(t.Context(), "key"))
			seen()
		}
	}
}

func TestNothingIsLeftAtRest(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	exec(t, pool, "SELECT 1")
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 100, Window: year}, Timeout: amply, MaxInFlight: 4, MaxBatch: 7})
	left := offspring(t, func(context.Context) {
		errs := make([]error, 500)
		together(len(errs), func(i int) {
			_, err := limiter.Allow(t.Context(), fmt.Sprint(i%30))
			_, peekErr := limiter.Peek(t.Context(), "key")
			errs[i] = errors.Join(err, peekErr, limiter.Reset(t.Context(), "key"))
		})
		require.NoError(t, errors.Join(errs...))
	})
	waitUntil(t, func() bool { return left() == 0 })
	limiter.mu.Lock()
	defer limiter.mu.Unlock()
	require.Zero(t, limiter.inFlight)
	require.Nil(t, limiter.queue)
	require.Zero(t, pool.Stat().AcquiredConns())
}

func TestNewAsksNothing(t *testing.T) {
	t.Parallel()

	pool, err := pgxpool.New(t.Context(), "postgres://nobody@127.0.0.1:1/nothing")
	require.NoError(t, err)
	defer pool.Close()
	left := offspring(t, func(context.Context) {
		for range 100 {
			newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 1, Window: time.Second}})
		}
	})
	require.Zero(t, left())
	require.Zero(t, pool.Stat().NewConnsCount())
}

// A server that stops answering. All callers are told so within their budget, the limiter holds two connections, not the pool,
// and nothing of the crowd stays in memory.
//
//nolint:paralleltest // it looks at the memory of the process
func TestFrozenServer(t *testing.T) {
	server := pgtest.Server(t, pgserver.Config{})
	config, err := pgxpool.ParseConfig(server.URL())
	require.NoError(t, err)
	config.MaxConns = 6
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	all := pool.AcquireAllIdle(t.Context())
	for len(all) < int(config.MaxConns) {
		all = append(all, acquire(t, pool))
	}
	for _, conn := range all {
		conn.Release()
	}

	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10_000, Window: year}, Timeout: 3 * time.Second, MaxBatch: 100})
	require.NoError(t, server.Freeze())
	const callers = 10_000
	errs := make([]error, callers)
	heap := func() int64 {
		runtime.GC()
		runtime.GC() // what a sync.Pool keeps goes with the second
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	together(callers, func(int) {}) // the runtime keeps what so many goroutines need
	before := heap()
	var free []*pgxpool.Conn
	left := offspring(t, func(context.Context) {
		done := later(func() (any, error) {
			together(callers, func(i int) { _, errs[i] = limiter.Allow(context.Background(), fmt.Sprint("key ", i%50)) })
			return nil, nil
		})
		// All others of the pool can still be had.
		waitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 2 })
		free = pool.AcquireAllIdle(t.Context())
		_, _ = done()
	})
	require.Len(t, free, 4)
	for _, conn := range free {
		conn.Release()
	}

	unknown := 0
	for _, err := range errs {
		var store *StoreError
		require.ErrorAs(t, err, &store)
		require.ErrorIs(t, err, ErrTimeout)
		require.NotContains(t, err.Error(), "key ")
		if errors.Is(err, ErrOutcomeUnknown) {
			unknown++
		}
	}
	clear(errs)
	waitUntil(t, func() bool { return heap() < before+1<<20 }) // a call kept would be 200 bytes of 2 MB
	require.Positive(t, unknown)
	require.LessOrEqual(t, unknown, 2*limiter.config.MaxBatch) // what was under way; all others were not asked
	require.Zero(t, limiter.waiting())
	waitUntil(t, func() bool { return left() < 20 }) // what closes the two connections

	require.NoError(t, server.Thaw())
	waitUntil(t, func() bool { return left() == 0 })
	waitUntil(t, func() bool { return pool.Stat().AcquiredConns() == 0 })
	waitUntil(t, func() bool {
		return scalar[int](t, pool, "SELECT count(*) FROM pg_stat_activity WHERE state <> 'idle' AND backend_type = 'client backend'") == 1
	})
	var counted int64
	for _, row := range storedRows(t, pool, false) {
		counted += row.count
	}
	require.LessOrEqual(t, counted, int64(unknown)) // only of those it was said that they might count
	result, err := newLimiter(t, pool, Config{Name: "test", Policy: limiter.policy, Timeout: amply}).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}
