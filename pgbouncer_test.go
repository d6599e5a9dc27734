package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// The clients of several pools share two connections to the database. All methods of a limiter work, and exactly Limit
// are admitted.
func TestPgBouncer(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	b := limitertest.StartBouncer(t, db, 2)
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		pools := []*pgxpool.Pool{b.Pool(t, mode), b.Pool(t, mode)}
		for name, policy := range limitertest.SlowPolicies(40) {
			for _, durable := range limitertest.TablesFor(t, name) {
				config := ratelimit.Config{
					Name:              fmt.Sprint(mode, name),
					Policy:            policy,
					Durable:           durable,
					SynchronousCommit: durable,
				}
				limiters := []*ratelimit.Limiter{limitertest.New(t, pools[0], config), limitertest.New(t, pools[1], config)}
				admitted, errs := make([]bool, 150), make([]error, 150)
				testkit.Together(len(errs), func(i int) {
					result, err := limiters[i%2].Allow(t.Context(), fmt.Sprint("key ", i%3))
					admitted[i], errs[i] = result.Allowed, err
				})
				require.NoError(t, errors.Join(errs...))
				for key := range 3 {
					count := 0
					for i := key; i < len(admitted); i += 3 {
						if admitted[i] {
							count++
						}
					}
					require.Equal(t, 40, count)
					require.EqualValues(t, 40, limitertest.Taken(t, db.Pool, config, fmt.Sprint("key ", key)))
				}

				for name, call := range limitertest.Calls(limiters[0], "another") {
					require.NoError(t, call(), name)
				}
				require.NoError(t, pgx.BeginFunc(t.Context(), pools[0], func(tx pgx.Tx) error {
					require.NoError(t, limiters[0].WithTx(tx).Reset(t.Context(), "key 0"))
					result, err := limiters[0].WithTx(tx).AllowN(t.Context(), "key 0", 7)
					require.True(t, result.Allowed)
					return err
				}))
				require.EqualValues(t, 7, limitertest.Taken(t, db.Pool, config, "key 0"))
			}
		}
	}
}

// By default, pgx prepares statements. Prepared statements fail with PgBouncer, because a connection may already have a
// statement of the same name, or may lack the prepared statement. The error names the setting that helps.
func TestPgBouncerWithoutPreparedStatements(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	config := ratelimit.Config{
		Name:          "test",
		Policy:        ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		NoDenialCache: true,
	}
	for _, method := range []string{"Allow", "AllowN", "Peek", "Reset"} {
		b := limitertest.StartBouncer(t, db, 1)
		limiter := func() *ratelimit.Limiter {
			return limitertest.New(t, b.Pool(t, pgx.QueryExecModeCacheStatement), config)
		}
		first := limitertest.Calls(limiter(), "personal")[method]
		require.NoError(t, first())
		before := limitertest.Taken(t, db.Pool, config, "personal")

		err := limitertest.Calls(limiter(), "personal")[method]()
		limitertest.RequireKinds(t, err, ratelimit.ErrPreparedStatements)
		require.Contains(t, err.Error(), "42P05") // a statement of that name exists
		require.Contains(t, err.Error(), "default_query_exec_mode=exec")

		// A new connection to the database has no such statement.
		server := pgtest.Scalar[int32](t, b.Pool(t, pgx.QueryExecModeExec), "SELECT pg_backend_pid()")
		pgtest.Exec(t, db.Pool, "SELECT pg_terminate_backend($1, 10000)", server)
		testkit.WaitUntil(t, func() bool {
			err = first()
			return !errors.Is(err, ratelimit.ErrUnavailable) // until PgBouncer has noticed the end of the connection
		})
		limitertest.RequireKinds(t, err, ratelimit.ErrPreparedStatements)
		require.Contains(t, err.Error(), "26000") // no statement of that name exists
		require.Equal(t, before, limitertest.Taken(t, db.Pool, config, "personal"))
	}
}

// The settings of a limiter's transaction end with the transaction, and do not reach the next client of the same
// connection. The test fails if a function makes these settings for the session.
func TestPgBouncerHandsNoSettingsOn(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	const show = "SELECT current_setting('lock_timeout') || ', ' || current_setting('synchronous_commit')"
	rows, err := pgtest.New(t).Pool.Query(t.Context(), `SELECT proname FROM pg_proc
		WHERE pronamespace = 'public'::regnamespace AND prosrc LIKE '%set_config(''lock_timeout''%'`)
	require.NoError(t, err)
	setters, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	require.Equal(t, []string{"_rate_limit_set"}, setters)
	for _, broken := range append(setters, "") {
		db := pgtest.New(t)
		if broken != "" {
			pgtest.Rewrite(t, db.Pool, broken, "lock_timeout_ms::text, true", "lock_timeout_ms::text, false")
		}
		b := limitertest.StartBouncer(t, db, 1)
		limiters, somebody := b.Pool(t, pgx.QueryExecModeExec), b.Pool(t, pgx.QueryExecModeExec)
		before := pgtest.Scalar[string](t, somebody, show)
		after := before
		policies := limitertest.SlowPolicies(10)
		policies["all"] = ratelimit.All(policies["fixed window"], policies["token bucket"])
		for name, policy := range policies {
			limiter := limitertest.New(t, limiters, ratelimit.Config{
				Name: name, Policy: policy, Durable: true, SynchronousCommit: before[len(before)-2:] != "on",
			}, ratelimit.ClientConfig{Timeout: 40 * time.Second})
			if name == "all" {
				limitertest.Engine(limiter).Database.ManyParts = 0
			}
			for method, call := range limitertest.Calls(limiter, "key") {
				require.NoError(t, call(), method)
				after = pgtest.Scalar[string](t, somebody, show)
				if broken == "" {
					require.Equal(t, before, after, "%s %s", name, method)
				}
			}
		}
		if broken == "" || broken == "rate_limit_ban" {
			pgtest.Exec(t, limiters, "SELECT rate_limit_ban('a', 'b', '1h', '1h', '1h', 'why', 10000)")
			if after = pgtest.Scalar[string](t, somebody, show); broken == "" {
				require.Equal(t, before, after)
			}
		}
		if broken != "" { // a broken function leaves its settings in the session
			require.Regexp(t, "^(10s|5s|25ms), ", after, broken) // 10 s is 5 s for each of the two rows of a policy
		}
	}
}

// A server dies behind PgBouncer. PgBouncer's error has another text than Postgres's, and the SQLSTATE of a protocol
// violation. The calls under way may have counted.
func TestPgBouncerLosesItsServer(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	server := pgtest.Server(t, pgserver.Config{Fsync: true})
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	db := &pgtest.DB{Pool: pool, URL: server.URL()}
	b := limitertest.StartBouncer(t, db, 2)

	config := ratelimit.Config{
		Name:   "test",
		Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
	}
	clientConfig := ratelimit.ClientConfig{MaxInFlight: 1}
	bounced := b.Pool(t, pgx.QueryExecModeExec)
	limiter := limitertest.New(t, bounced, config, clientConfig)
	_, err = limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	limitertest.Hold(t, db, config, "personal")
	// In a transaction the call waits in one statement. Outside a transaction it would send several statements.
	tx, err := bounced.Begin(t.Context())
	require.NoError(t, err)
	wait := testkit.Later(func() (ratelimit.Result, error) { return limiter.WithTx(tx).Allow(context.Background(), "personal") })
	pgtest.WaitUntilBlocked(t, pool, 1)
	require.NoError(t, server.Kill())
	_, err = wait()
	_ = tx.Rollback(t.Context()) // its connection is gone
	require.Contains(t, err.Error(), "08P01")
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)

	require.NoError(t, server.Restart(t.Context()))
	testkit.WaitUntil(t, func() bool {
		_, err = limiter.Allow(t.Context(), "personal")
		return !errors.Is(err, ratelimit.ErrUnavailable) // until PgBouncer has connected again
	})
	require.NoError(t, err)
}
