package sqldb_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/sqldb"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

const year = 365 * 24 * time.Hour

var now = time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)

// open returns a *sql.DB of a database. configure may change its configuration first.
func open(t *testing.T, db *pgtest.DB, configure func(*pgx.ConnConfig)) *sql.DB {
	t.Helper()
	config, err := pgx.ParseConfig(db.URL)
	require.NoError(t, err)
	if configure != nil {
		configure(config)
	}
	opened := stdlib.OpenDB(*config)
	t.Cleanup(func() { require.NoError(t, opened.Close()) })
	return opened
}

// eachMode runs a test in each of pgx's modes of execution.
func eachMode(t *testing.T, test func(t *testing.T, on *pgtest.DB, db *sql.DB)) {
	t.Helper()
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			on := pgtest.New(t)
			test(t, on, open(t, on, func(config *pgx.ConnConfig) { config.DefaultQueryExecMode = mode }))
		})
	}
}

func policies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed":   ratelimit.FixedWindow{Limit: 10, Window: year},
		"sliding": ratelimit.SlidingWindow{Limit: 10, Window: year},
		"bucket":  ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: 24 * time.Hour},
		"log":     ratelimit.SlidingLog{Limit: 10, Window: year},
		"every":   ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarMonth, Zone: "Asia/Tokyo"},
		"all": ratelimit.All(
			ratelimit.SlidingLog{Limit: 10, Window: year}, ratelimit.FixedWindow{Limit: 12, Window: year},
		),
	}
}

// told is what a call has returned, without the unexported fields of a result.
type told struct {
	result ratelimit.Result
	err    error
}

func tell(result ratelimit.Result, err error) told {
	result = limitertest.Plain(result)
	result.DecidedAt = result.DecidedAt.UTC()
	return told{result, err}
}

// A limiter on a *sql.DB and a limiter on a *pgxpool.Pool return the same results, also in transactions.
func TestAnswersAreThoseOfAPool(t *testing.T) {
	t.Parallel()

	eachMode(t, func(t *testing.T, on *pgtest.DB, db *sql.DB) {
		ctx, pool := t.Context(), on.NewPool(t, nil)
		for name, policy := range policies() {
			clock := now
			config := ratelimit.Config{Name: name + " pool", Policy: policy, Durable: name == "bucket"}
			clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return clock }}}
			want := limitertest.New(t, pool, config, clientConfig)
			config.Name = name + " sql"
			got := limitertest.New(t, sqldb.Pool(db), config, clientConfig)
			r := rand.New(rand.NewPCG(1, 2))
			var takes [2][]ratelimit.Result
			for step := range 60 {
				clock = clock.Add(time.Duration(r.Int64N(int64(20*24*time.Hour))) / 1000 * 1000)
				n, kind, inTx, commit := r.Int64N(5), r.IntN(8), r.IntN(2) == 0, r.IntN(3) > 0
				var answers [2]told
				for i, l := range []*ratelimit.Limiter{want, got} {
					var tx pgx.Tx
					end := func() error { return nil }
					switch {
					case inTx && i == 0:
						begun, err := pool.Begin(ctx)
						require.NoError(t, err)
						tx, end = begun, func() error { return begun.Commit(ctx) }
						if !commit {
							end = func() error { return begun.Rollback(ctx) }
						}
					case inTx:
						begun, err := db.BeginTx(ctx, nil)
						require.NoError(t, err)
						tx, end = sqldb.Tx(begun), begun.Commit
						if !commit {
							end = begun.Rollback
						}
					}
					var result ratelimit.Result
					var err error
					switch {
					case kind < 4 && inTx:
						result, err = l.WithTx(tx).AllowN(ctx, "key", n)
					case kind < 4:
						result, err = l.AllowN(ctx, "key", n)
					case kind == 4 && inTx:
						result, err = limitertest.AsResult(l.WithTx(tx).Grant(ctx, "key", n))
					case kind == 4:
						result, err = limitertest.AsResult(l.Grant(ctx, "key", n))
					case kind == 5 && inTx:
						err = l.WithTx(tx).Reset(ctx, "key")
					case kind == 5 && step%3 == 0:
						err = l.Reset(ctx, "key")
					case len(takes[i]) > 0 && inTx:
						result, err = limitertest.AsResult(l.WithTx(tx).Refund(ctx, takes[i][len(takes[i])-1]))
					case len(takes[i]) > 0:
						result, err = limitertest.AsResult(l.Refund(ctx, takes[i][len(takes[i])-1]))
					}
					answers[i] = tell(result, err)
					require.NoError(t, end())
					if kind < 4 && n > 0 && result.Allowed && (!inTx || commit) {
						takes[i] = append(takes[i], result)
					}
				}
				require.Equal(t, answers[0], answers[1], "%s, step %d, kind %d of %d, in a transaction %t, commit %t",
					name, step, kind, n, inTx, commit)
			}
			require.NotEmpty(t, takes[1])
		}
	})
}

// A commit keeps what was taken in the transaction, and a rollback gives it back, for AllowAll too.
func TestSQLTransactionKeepsOrGivesBack(t *testing.T) {
	t.Parallel()

	eachMode(t, func(t *testing.T, on *pgtest.DB, db *sql.DB) {
		client := limitertest.NewClient(t, sqldb.Pool(db), ratelimit.ClientConfig{})
		left := func(l *ratelimit.Limiter, key string) int64 {
			result, err := l.Peek(t.Context(), key)
			require.NoError(t, err)
			return result.Remaining
		}
		for name, policy := range policies() {
			l := limitertest.Of(t, client, ratelimit.Config{Name: name, Policy: policy})
			other := limitertest.Of(t, client, ratelimit.Config{Name: name + " too", Policy: policy, Durable: true})
			for i, end := range []func(*sql.Tx) error{(*sql.Tx).Rollback, (*sql.Tx).Commit} {
				tx, err := db.BeginTx(t.Context(), nil)
				require.NoError(t, err)
				result, err := l.WithTx(sqldb.Tx(tx)).Allow(t.Context(), "key")
				require.NoError(t, err)
				require.True(t, result.Allowed)
				results, err := ratelimit.AllowAll(
					t.Context(), l.WithTx(sqldb.Tx(tx)).Request("key", 2), other.WithTx(sqldb.Tx(tx)).Request("key", 3))
				require.NoError(t, err)
				require.True(t, results.Allowed)
				require.NoError(t, end(tx))
				require.EqualValues(t, 10-3*i, left(l, "key"))
				require.EqualValues(t, 10-3*i, left(other, "key"))
			}
			// A client may be made on a transaction, which a test may roll back.
			tx, err := db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
			require.NoError(t, err)
			within := limitertest.New(t, sqldb.Tx(tx), ratelimit.Config{Name: name, Policy: policy})
			results, err := ratelimit.AllowAll(t.Context(), within.Request("key", 7), within.Request("another", 10))
			require.NoError(t, err)
			require.True(t, results.Allowed)
			require.EqualValues(t, 0, left(within, "key"))
			require.NoError(t, sqldb.Tx(tx).Rollback(t.Context()))
			require.EqualValues(t, 7, left(l, "key"))
		}
	})
}

// Together, callers of several processes take exactly the limit. No client uses more than two connections, plus one for
// held keys.
func TestSQLDBIsExactUnderConcurrency(t *testing.T) {
	t.Parallel()

	eachMode(t, func(t *testing.T, on *pgtest.DB, first *sql.DB) {
		second := open(t, on, nil)
		config := ratelimit.Config{Name: "test", Policy: ratelimit.SlidingLog{Limit: 100, Window: year}}
		config.NoDenialCache = true
		limiters := []*ratelimit.Limiter{
			limitertest.New(t, sqldb.Pool(first), config), limitertest.New(t, sqldb.Pool(second), config),
		}
		var granted atomic.Int64
		testkit.Together(300, func(i int) {
			result, err := limiters[i%2].Allow(t.Context(), "key")
			if err != nil {
				t.Error(err)
			}
			if result.Allowed {
				granted.Add(1)
			}
		})
		require.EqualValues(t, 100, granted.Load())
		require.LessOrEqual(t, first.Stats().OpenConnections, 3) // two, plus one if the row was locked
		require.LessOrEqual(t, second.Stats().OpenConnections, 3)
	})
}

// Transactions of the limiter have the limiter's settings. The settings of the session do not change.
func TestSQLDBSettings(t *testing.T) {
	t.Parallel()

	eachMode(t, func(t *testing.T, on *pgtest.DB, db *sql.DB) {
		pgtest.Exec(t, on.Pool, `
			CREATE TABLE seen (synchronous_commit text, lock_timeout text);
			CREATE FUNCTION see() RETURNS trigger LANGUAGE plpgsql AS $$
			BEGIN
				INSERT INTO public.seen VALUES (current_setting('synchronous_commit'), current_setting('lock_timeout'));
				RETURN NULL;
			END $$;
			CREATE TRIGGER see AFTER INSERT OR UPDATE ON rate_limit_durable FOR EACH STATEMENT EXECUTE FUNCTION see()`)
		db.SetMaxOpenConns(1)
		_, err := db.ExecContext(t.Context(), "SET synchronous_commit = remote_write; SET lock_timeout = '77s'",
			pgx.QueryExecModeSimpleProtocol)
		require.NoError(t, err)
		for synchronous, want := range map[bool]string{false: "off", true: "on"} {
			l := limitertest.New(t, sqldb.Pool(db), ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}, Durable: true,
				SynchronousCommit: synchronous,
			}, ratelimit.ClientConfig{Timeout: 40 * time.Second})
			_, err := l.Allow(t.Context(), fmt.Sprint(synchronous))
			require.NoError(t, err)
			require.Equal(t, want+", 25ms", pgtest.Scalar[string](t, on.Pool, `WITH seen AS (DELETE FROM seen RETURNING *)
				SELECT DISTINCT synchronous_commit || ', ' || lock_timeout FROM seen`))
			var session string
			require.NoError(t, db.QueryRowContext(t.Context(),
				"SELECT current_setting('synchronous_commit') || ', ' || current_setting('lock_timeout')").Scan(&session))
			require.Equal(t, "remote_write, 77s", session)
		}
	})
}

// Calls for a key whose row a transaction has locked return ErrKeyHeld. Other keys are decided meanwhile.
func TestSQLDBHeldKey(t *testing.T) {
	t.Parallel()

	eachMode(t, func(t *testing.T, _ *pgtest.DB, db *sql.DB) {
		config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}}
		holder := limitertest.New(t, sqldb.Pool(db), config)
		_, err := holder.Allow(t.Context(), "held")
		require.NoError(t, err)
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, tx.Rollback()) }()
		_, err = holder.WithTx(sqldb.Tx(tx)).Allow(t.Context(), "held")
		require.NoError(t, err)

		config.OnFailure = ratelimit.FailOpen()                          // OnFailure does not answer ErrKeyHeld
		clientConfig := ratelimit.ClientConfig{Timeout: 8 * time.Second} // slow machines need time to find the holder
		l := limitertest.New(t, sqldb.Pool(db), config, clientConfig)
		_, err = l.Allow(t.Context(), "held")
		require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
		result, err := holder.Allow(t.Context(), "another")
		require.NoError(t, err)
		require.True(t, result.Allowed)
	})
}

// An error that only a person can fix is no outage. A request that was not sent has surely not counted.
func TestSQLDBErrors(t *testing.T) {
	t.Parallel()

	on := pgtest.New(t)
	config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}}
	ask := func(db *sql.DB, timeout time.Duration) error {
		clientConfig := ratelimit.ClientConfig{Timeout: timeout}
		_, err := limitertest.New(t, sqldb.Pool(db), config, clientConfig).Allow(t.Context(), "secret")
		return err
	}
	otherCodec := func(ctx context.Context, conn *pgx.Conn) error {
		known, _ := conn.TypeMap().TypeForName("_text")
		conn.TypeMap().RegisterType(&pgtype.Type{Name: "_text", OID: known.OID, Codec: pgtype.BoolCodec{}})
		return nil
	}
	connConfig, err := pgx.ParseConfig(on.URL)
	require.NoError(t, err)
	odd := stdlib.OpenDB(*connConfig, stdlib.OptionAfterConnect(otherCodec))
	defer odd.Close()

	// The *sql.DB has another driver.
	stranger := sql.OpenDB(strangers{})
	defer stranger.Close()
	err = ask(stranger, testkit.Amply)
	limitertest.RequireKinds(t, err, ratelimit.ErrSetup)
	require.ErrorContains(t, err, "sqldb_test.strangers")
	require.ErrorContains(t, migrations.Up(t.Context(), sqldb.Pool(stranger)), "sqldb_test.strangers")

	// The arguments cannot be sent.
	err = ask(odd, testkit.Amply)
	limitertest.RequireKinds(t, err, ratelimit.ErrSetup)
	require.NotContains(t, err.Error(), "secret")
	tx, err := odd.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	l := limitertest.New(t, sqldb.Pool(odd), ratelimit.Config{Name: "test", Policy: config.Policy})
	_, err = l.WithTx(sqldb.Tx(tx)).Allow(t.Context(), "secret")
	limitertest.RequireKinds(t, err, ratelimit.ErrSetup)
	require.NotContains(t, err.Error(), "secret")
	require.NoError(t, tx.Rollback())

	// The transaction has ended.
	_, err = l.WithTx(sqldb.Tx(tx)).Allow(t.Context(), "key")
	limitertest.RequireKinds(t, err)
	require.ErrorIs(t, err, sql.ErrTxDone)
	require.ErrorContains(t, err, "ratelimit: the transaction has ended; ")

	// No connection is free, the server does not answer, or the pool is closed.
	busy := open(t, on, nil)
	busy.SetMaxOpenConns(1)
	conn, err := busy.Conn(t.Context())
	require.NoError(t, err)
	limitertest.RequireKinds(t, ask(busy, 50*time.Millisecond), ratelimit.ErrTimeout)
	require.NoError(t, conn.Close())
	nobody := open(t, on, func(config *pgx.ConnConfig) { config.Host, config.Port, config.Fallbacks = "127.0.0.1", 1, nil })
	limitertest.RequireKinds(t, ask(nobody, testkit.Amply), ratelimit.ErrUnavailable)
	closed := open(t, on, nil)
	require.NoError(t, closed.Close())
	limitertest.RequireKinds(t, ask(closed, testkit.Amply), ratelimit.ErrUnavailable)

	// The server has ended the connection.
	ended := open(t, on, nil)
	ended.SetMaxOpenConns(1)
	require.NoError(t, ask(ended, testkit.Amply))
	pgtest.Exec(t, on.Pool, `SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity
		WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	_ = ask(ended, testkit.Amply) // may return an error, if database/sql did not check the connection
	require.NoError(t, ask(ended, testkit.Amply))

	// The *sql.DB or *sql.Tx is nil.
	var refused *ratelimit.ConfigError
	_, err = ratelimit.New(sqldb.Pool(nil), config)
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "db", refused.Field)
	_, err = l.WithTx(sqldb.Tx(nil)).Allow(t.Context(), "key")
	require.ErrorAs(t, err, &refused)
	require.Equal(t, "tx", refused.Field)
	require.ErrorContains(t, migrations.Up(t.Context(), sqldb.Pool(nil)), "nil")
}

// strangers is a driver that is not pgx's.
type strangers struct{ driver.Conn }

func (s strangers) Connect(context.Context) (driver.Conn, error) { return s, nil }
func (s strangers) Driver() driver.Driver                        { return nil }
func (s strangers) Close() error                                 { return nil }

// Two limiters with the same name on the same *sql.DB refund each other's results.
func TestPoolsOfOneDBAreTheSame(t *testing.T) {
	t.Parallel()

	on := pgtest.New(t)
	db, another := open(t, on, nil), open(t, on, nil)
	config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}}
	result, err := limitertest.New(t, sqldb.Pool(db), config).Allow(t.Context(), "key")
	require.NoError(t, err)
	var refused *ratelimit.RefundError
	_, err = limitertest.New(t, sqldb.Pool(another), config).Refund(t.Context(), result)
	require.ErrorAs(t, err, &refused)
	_, err = limitertest.New(t, sqldb.Pool(db), config).Refund(t.Context(), result)
	require.NoError(t, err)
}

// Migrations and sweepers work on a *sql.DB in every mode of execution.
func TestSQLDBMigrationsAndSweeper(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		on := pgtest.Empty(t)
		db := open(t, on, func(config *pgx.ConnConfig) { config.DefaultQueryExecMode = mode })
		db.SetMaxOpenConns(1)
		pool := sqldb.Pool(db)
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.NoError(t, migrations.Up(t.Context(), pool))
		config := ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Second}}
		clientConfig := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}}
		_, err := limitertest.New(t, pool, config, clientConfig).Allow(t.Context(), "key")
		require.NoError(t, err)
		sweeper, err := cleanup.New(pool, cleanup.Config{})
		require.NoError(t, err)
		swept, err := sweeper.RunOnce(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, swept.Deleted)
		require.True(t, swept.Complete)

		all, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		require.NoError(t, migrations.Down(t.Context(), pool))
		fewer, err := migrations.Status(t.Context(), pool)
		require.NoError(t, err)
		require.True(t, all[len(all)-1].Applied)
		require.False(t, fewer[len(all)-1].Applied)
		require.NoError(t, migrations.DownTo(t.Context(), pool, 0))
		_, err = limitertest.New(t, pool, config, clientConfig).Allow(t.Context(), "key")
		require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	}
}
