package engine_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http/httptest"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestSettingsAreThoseOfTheLimitersTransactionsAlone(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	limitertest.Probe(t, db)
	const session = "remote_write, 77s"
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.MaxConns = 1
		config.ConnConfig.RuntimeParams["synchronous_commit"] = "remote_write"
		config.ConnConfig.RuntimeParams["lock_timeout"] = "77s"
	})
	const show = "SELECT current_setting('synchronous_commit') || ', ' || current_setting('lock_timeout')"
	seen := func() []string {
		rows, err := db.Pool.Query(
			t.Context(),
			"WITH seen AS (DELETE FROM probe RETURNING *) SELECT DISTINCT synchronous_commit || ', ' || lock_timeout FROM seen",
		)
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
		for name, policy := range limitertest.SlowPolicies(10) {
			limiter := limitertest.New(t, pool, ratelimit.Config{
				Name: name, Policy: policy, Durable: c.durable, SynchronousCommit: c.synchronous,
			}, ratelimit.ClientConfig{Timeout: 40 * time.Second})
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, []string{c.want + ", 25ms"}, seen(), name)
			require.NoError(t, limiter.Reset(t.Context(), "key"))
			require.Equal(t, []string{c.want + ", 10s"}, seen(), name)
			require.Equal(t, session, pgtest.Scalar[string](t, pool, show))

			tx := limitertest.Begin(t, pool)
			_, err = limiter.WithTx(tx).Allow(t.Context(), "key")
			require.NoError(t, err)
			_, err = limiter.WithTx(tx).AllowN(t.Context(), "key", 0)
			require.NoError(t, err)
			require.Equal(t, session, pgtest.Scalar[string](t, tx, show))
			require.NoError(t, limiter.WithTx(tx).Reset(t.Context(), "key"))
			require.Equal(t, session, pgtest.Scalar[string](t, tx, show))
			pgtest.Exec(t, tx, "SET LOCAL lock_timeout = '5s'; SET LOCAL synchronous_commit = off")
			_, err = limiter.WithTx(tx).Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, "off, 5s", pgtest.Scalar[string](t, tx, show))
			require.NoError(t, tx.Commit(t.Context()))
			require.ElementsMatch(t, []string{session, "off, 5s"}, seen())
			require.Equal(t, session, pgtest.Scalar[string](t, pool, show))
			require.NoError(t, limiter.Reset(t.Context(), "key"))
			seen()
		}
	}
}

// What makes, hands over or releases a slot waits for the WAL, whatever the limiter and the session say.
func TestSlotsWaitForTheLog(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "settings of the session that decides")
	db := pgtest.New(t)
	limitertest.Probe(t, db)
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["synchronous_commit"] = "off"
	})
	seen := func() []string {
		rows, err := db.Pool.Query(t.Context(),
			"WITH seen AS (DELETE FROM probe RETURNING *) SELECT DISTINCT synchronous_commit FROM seen")
		require.NoError(t, err)
		settings, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		return settings
	}
	for _, durable := range []bool{false, true} {
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: "jobs", Policy: ratelimit.Concurrency{Limit: 1}, Durable: durable,
		})
		slot, err := limiter.Acquire(t.Context(), "key", ratelimit.SlotOptions{TTL: 9 * time.Second})
		require.NoError(t, err)
		require.Equal(t, []string{"on"}, seen())
		testkit.WaitUntil(t, func() bool { // it is renewed
			settings := seen()
			return len(settings) == 1 && settings[0] == "on"
		})
		require.NoError(t, slot.Release(t.Context()))
		require.NotContains(t, seen(), "off")
	}
}

// unreadable is a codec that can encode numbers, and cannot decode them.
type unreadable struct{ pgtype.Codec }

func (unreadable) PlanScan(*pgtype.Map, uint32, int16, any) pgtype.ScanPlan { return nil }

// OnFailure never answers if only a person can mend the fault. A fault that only a person can mend does not count for
// the breaker. Each entry of the table is such a fault in the setup of a real server.
func TestThoroughFaultsOfTheSetup(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	server := pgtest.Server(t, pgserver.Config{})
	with := func(url string, configure func(*pgxpool.Config)) func(t *testing.T) *pgxpool.Pool {
		return func(t *testing.T) *pgxpool.Pool {
			config, err := pgxpool.ParseConfig(url)
			require.NoError(t, err)
			configure(config)
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			require.NoError(t, err)
			t.Cleanup(pool.Close)
			return pool
		}
	}
	run := func(sql string) {
		conn, err := pgx.Connect(t.Context(), server.URL())
		require.NoError(t, err)
		defer conn.Close(t.Context())
		_, err = conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	run("CREATE ROLE nobody NOLOGIN; CREATE ROLE somebody LOGIN")
	run("CREATE DATABASE closed")
	run("REVOKE CONNECT ON DATABASE closed FROM PUBLIC")
	run("CREATE ROLE guarded LOGIN PASSWORD 'right'; CREATE ROLE barred LOGIN; CREATE ROLE only_tls LOGIN")
	run("CREATE ROLE expired LOGIN PASSWORD 'right' VALID UNTIL '2000-01-01'")
	run(`DO $do$ BEGIN EXECUTE format($$COPY (SELECT * FROM unnest(ARRAY[
			'host all guarded all scram-sha-256', 'local all guarded scram-sha-256',
			'host all expired all scram-sha-256', 'local all expired scram-sha-256',
			'host all barred all reject', 'local all barred reject',
			'hostssl all only_tls all trust', 'hostnossl all only_tls all reject', 'local all only_tls reject',
			'host all all all trust', 'local all all trust'])) TO %L$$, current_setting('hba_file')); END $do$`)
	run("SELECT pg_reload_conf()")
	user := func(name, password string) func(t *testing.T) *pgxpool.Pool {
		return with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.User, c.ConnConfig.Password = name, password })
	}
	overSimple := func(name, value string) func(*pgxpool.Config) {
		return func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
			c.ConnConfig.RuntimeParams[name] = value
		}
	}
	codec := func(codec pgtype.Codec, typeNames ...string) func(*pgxpool.Config) { // with types of the application
		return func(c *pgxpool.Config) {
			c.AfterConnect = func(_ context.Context, conn *pgx.Conn) error {
				for _, typeName := range typeNames {
					known, ok := conn.TypeMap().TypeForName(typeName)
					require.True(t, ok)
					if unreadable, ok := codec.(unreadable); ok {
						unreadable.Codec = known.Codec
						codec = unreadable
					}
					conn.TypeMap().RegisterType(&pgtype.Type{Name: typeName, OID: known.OID, Codec: codec})
				}
				return nil
			}
		}
	}
	for name, c := range map[string]struct {
		pool func(t *testing.T) *pgxpool.Pool
		want []error
	}{
		"no such role":     {with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.User = "nobody" }), []error{ratelimit.ErrSetup}},
		"no log-in":        {with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.User = "nobody" }), []error{ratelimit.ErrSetup}},
		"no such database": {with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.Database = "missing" }), []error{ratelimit.ErrSetup}},
		"no right to connect": {with(server.URL(), func(c *pgxpool.Config) {
			c.ConnConfig.User, c.ConnConfig.Database = "somebody", "closed"
		}), []error{ratelimit.ErrNotPermitted}},
		"wrong password":   {user("guarded", "wrong"), []error{ratelimit.ErrSetup}},
		"expired password": {user("expired", "right"), []error{ratelimit.ErrSetup}},
		"pg_hba.conf":      {user("barred", ""), []error{ratelimit.ErrSetup}},
		"TLS required":     {user("only_tls", ""), []error{ratelimit.ErrSetup}},
		"no TLS": {with(server.URL(), func(c *pgxpool.Config) {
			c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = &tls.Config{InsecureSkipVerify: true}, nil
		}), []error{ratelimit.ErrSetup}},
		"untrusted certificate": {tlsPool(t, false), []error{ratelimit.ErrSetup}},
		"no client certificate": {tlsPool(t, true), []error{ratelimit.ErrSetup}},
		"no right to take a role": {with(server.URL(), func(c *pgxpool.Config) {
			c.ConnConfig.User, c.ConnConfig.RuntimeParams["role"] = "somebody", "guarded"
		}), []error{ratelimit.ErrNotPermitted}},
		"no such setting": {with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["serch_path"] = "x" }), []error{ratelimit.ErrSetup}},
		"no such value":   {with(server.URL(), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["timezone"] = "Nowhere" }), []error{ratelimit.ErrSetup}},
		"not migrated":    {with(server.URL(), func(*pgxpool.Config) {}), []error{ratelimit.ErrNotMigrated}},
		"strings that pgx does not quote": {func(t *testing.T) *pgxpool.Pool {
			return db.NewPool(t, overSimple("standard_conforming_strings", "off"))
		}, []error{ratelimit.ErrSetup}},
		"an encoding that pgx does not quote": {func(t *testing.T) *pgxpool.Pool {
			return db.NewPool(t, overSimple("client_encoding", "LATIN1"))
		}, []error{ratelimit.ErrSetup}},
		"an encoding whose characters have bytes of ASCII in them": {func(t *testing.T) *pgxpool.Pool {
			return db.NewPool(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["client_encoding"] = "SJIS" })
		}, []error{ratelimit.ErrSetup}},
		"arguments that cannot be sent": {func(t *testing.T) *pgxpool.Pool { return db.NewPool(t, codec(pgtype.BoolCodec{}, "_text")) }, []error{ratelimit.ErrSetup}},
		"results that cannot be read": {func(t *testing.T) *pgxpool.Pool {
			return db.NewPool(t, codec(unreadable{}, "int8", "_int8"))
		}, []error{ratelimit.ErrSetup, ratelimit.ErrOutcomeUnknown}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := c.pool(t)
			for source, mode := range limitertest.Modes {
				var events []ratelimit.DecisionEvent
				var log testkit.Journal
				l := limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode}, ratelimit.ClientConfig{
					Logger: log.Logger(),
					Observer: &ratelimit.Observer{
						Decision: func(e ratelimit.DecisionEvent) { events = append(events, e) },
					},
				})
				// If an outage has opened the breaker, the fault closes it, so that callers see the fault.
				for range engine.BreakerFailures {
					limitertest.Engine(l).Batcher.Breaker.Record(engine.KindEphemeral, turnedAwayError(), false)
				}
				limitertest.Engine(l).Batcher.Breaker.Begin = limitertest.Engine(l).Batcher.Breaker.Begin.Add(-engine.BreakerPause)
				for range 2 * engine.BreakerFailures {
					for method, call := range map[string]func() error{
						"Allow":    func() error { _, err := l.Allow(t.Context(), "personal key"); return err },
						"Peek":     func() error { _, err := l.Peek(t.Context(), "personal key"); return err },
						"Wait":     func() error { _, err := l.Wait(t.Context(), "personal key"); return err },
						"AllowAll": func() error { _, err := ratelimit.AllowAll(t.Context(), l.Request("personal key", 1)); return err },
					} {
						err := call()
						require.Error(t, err, "%s, %v", method, source)
						limitertest.RequireKinds(t, err, c.want...)
						require.False(t, limitertest.Engine(l).Batcher.Breaker.IsOpen(engine.KindEphemeral))
					}
				}
				lines := log.Lines()
				require.Len(t, lines, 1, "one line for all calls: %s", log.String())
				require.Contains(t, lines[0], "level=ERROR")
				require.Contains(t, lines[0], strings.TrimPrefix(c.want[0].Error(), "ratelimit: ")[:20])
				require.NotContains(t, lines[0], "personal key")
				require.NotEmpty(t, events)
				for _, e := range events {
					require.Equal(t, ratelimit.ErrorKind(c.want[0]), ratelimit.ErrorKind(e.Err))
					require.NotEqual(t, "other", ratelimit.ErrorKind(e.Err))
				}
			}
		})
	}
}

// A limiter works in all of pgx's query exec modes, with keys that need quoting.
func TestThoroughQueryExecModes(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
		limitertest.EachSlowPolicyAndTableAt(t, pgx.TxIsoLevel(mode.String()), 10, func(t *testing.T, config ratelimit.Config) {
			config.Name = `'" ` + t.Name()
			at := limitertest.T0.Add(123456 * time.Microsecond)
			clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(at)}
			config.SynchronousCommit = config.Durable
			limiter := limitertest.New(t, pool, config, clientConfig)

			keys := []string{`'`, `"`, `\`, `{a,b}`, `NULL`, "\u00a0", `ключ`, "\n\t", `$1`, "x", `a"b\c'd,e`}
			var batch []*engine.Request
			for _, key := range keys {
				batch = append(batch, requestsFor(limiter, key, 3, 3, 7, 1)...)
			}
			send(limiter, batch)
			results, errs := outcomes(batch)
			require.NoError(t, errors.Join(errs...))
			for i, result := range results {
				require.Equal(t, []bool{true, true, false, true}[i%4], result.Allowed)
				require.True(t, at.Equal(result.DecidedAt), result.DecidedAt)
			}
			for _, key := range keys {
				require.EqualValues(t, 7, limitertest.Taken(t, db.Pool, config, key))
				peek, err := limiter.Peek(t.Context(), key)
				require.NoError(t, err)
				require.EqualValues(t, 3, peek.Remaining)
				rest := func(tx pgx.Tx) error {
					result, err := limiter.WithTx(tx).AllowN(t.Context(), key, 3)
					require.True(t, result.Allowed)
					return err
				}
				require.NoError(t, pgx.BeginFunc(t.Context(), db.Of(key).Pool, rest))
				require.EqualValues(t, 10, limitertest.Taken(t, db.Pool, config, key))
				require.NoError(t, limiter.Reset(t.Context(), key))
				require.Zero(t, limitertest.Taken(t, db.Pool, config, key))
			}
		})
	}
}

// eachExecMode runs a test for each of pgx's query exec modes, with a pool of this mode and the mode's place.
func eachExecMode(
	t *testing.T,
	db *pgtest.DB,
	configure func(*pgxpool.Config),
	test func(t *testing.T, pool *pgxpool.Pool, mode int),
) {
	t.Helper()
	for i, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			test(t, db.NewPool(t, func(config *pgxpool.Config) {
				config.ConnConfig.DefaultQueryExecMode = mode
				configure(config)
			}), i)
		})
	}
}

// policiesByTurns returns n of five policies for the variant i of a test, and an All. So five variants try each policy.
func policiesByTurns(i, n int) (policies []ratelimit.Policy) {
	slow := limitertest.SlowPolicies(100)
	kinds := slices.Sorted(maps.Keys(slow))
	for j := range n {
		policies = append(policies, slow[kinds[(i+j)%len(kinds)]])
	}
	return append(policies, ratelimit.All(slow["token bucket"], slow["sliding log"]))
}

// The session's settings do not change how the engine reads times and numbers.
func TestSettingsOfTheOutput(t *testing.T) {
	t.Parallel()
	testSettingsOfTheOutput(t, 1)
}

// Each query exec mode tries each policy.
func TestThoroughSettingsOfTheOutput(t *testing.T) {
	t.Parallel()
	testSettingsOfTheOutput(t, 5)
}

func testSettingsOfTheOutput(t *testing.T, policies int) {
	t.Helper()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")
	db := pgtest.New(t)
	for name, settings := range map[string]map[string]string{
		"German": {"datestyle": "German", "timezone": "Asia/Kolkata", "extra_float_digits": "-15", "intervalstyle": "sql_standard"},
		"SQL":    {"datestyle": "SQL, DMY", "timezone": "America/St_Johns", "extra_float_digits": "0"},
	} {
		eachExecMode(
			t,
			db,
			func(config *pgxpool.Config) { maps.Copy(config.ConnConfig.RuntimeParams, settings) },
			func(t *testing.T, pool *pgxpool.Pool, mode int) {
				for _, policy := range policiesByTurns(mode, policies) {
					config := ratelimit.Config{Name: name + t.Name(), Policy: policy}
					for method, call := range limitertest.Calls(limitertest.New(t, pool, config), "personal") {
						require.NoError(t, call(), method)
					}
					at := limitertest.T0.Add(123456 * time.Microsecond)
					clientConfig := ratelimit.ClientConfig{Test: limitertest.Frozen(at)}
					result, err := limitertest.New(t, pool, config, clientConfig).Peek(t.Context(), "another")
					require.NoError(t, err)
					require.True(t, at.Equal(result.DecidedAt), result.DecidedAt)
				}
			},
		)
	}
}

// With array_nulls off, Postgres reads NULL in the text of an array as a word. A statement with refunds and other
// requests sends arrays with NULL.
func TestArrayNullsOff(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t).NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["array_nulls"] = "off"
		config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	})
	limiter := limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	taken, err := limiter.AllowN(t.Context(), "personal", 3)
	require.NoError(t, err)
	requests := []*engine.Request{newRequest(limiter, "other", 1), newRequest(limiter, "personal", -3)}
	requests[1].Parts[0].Refund = &limitertest.Receipt(taken).Between(0, 3)[0]
	err = limitertest.Engine(limiter).Batcher.Decide(t.Context(), pool, requests, ownTransaction(limiter))
	require.ErrorIs(t, err, ratelimit.ErrSetup)
	require.ErrorContains(t, err, "array_nulls")
	_, err = limiter.Refund(t.Context(), taken)
	require.NoError(t, err)
}

// The functions use the types of Postgres, even if the application has types with the same names in pg_temp.
func TestTypesOfTheApplication(t *testing.T) {
	t.Parallel()
	testTypesOfTheApplication(t, 1)
}

// Each query exec mode tries each policy.
func TestThoroughTypesOfTheApplication(t *testing.T) {
	t.Parallel()
	testTypesOfTheApplication(t, 5)
}

func testTypesOfTheApplication(t *testing.T, policies int) {
	t.Helper()
	db := pgtest.New(t)
	eachExecMode(t, db, func(config *pgxpool.Config) {
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `DO $$
				DECLARE name pg_catalog.text;
				BEGIN
					FOR name IN
						SELECT typname FROM pg_catalog.pg_type
						WHERE typnamespace = 'pg_catalog'::pg_catalog.regnamespace AND typtype = 'b' AND typelem = 0::pg_catalog.oid AND typname !~ '^pg_'
					LOOP
						EXECUTE pg_catalog.format('CREATE TYPE pg_temp.%I AS (a integer)', name);
					END LOOP;
				END $$`)
			return err
		}
	}, func(t *testing.T, pool *pgxpool.Pool, mode int) {
		for _, policy := range policiesByTurns(mode, policies) {
			for method, call := range limitertest.Calls(limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: policy}), "personal") {
				require.NoError(t, call(), method)
			}
		}
	})
}

// The statements read a time as a double precision number of seconds. The seconds reach 2^32 in 2106. Until then, this
// number differs from the time by less than a quarter of a microsecond. So the rounded product with a million is the
// exact time.
func TestTimesAreReadExactly(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	read := regexp.MustCompile(`\S+date_part.*::bigint`).FindString(engine.Text("all", ""))
	require.NotEmpty(t, read)
	wrong := `SELECT count(*) FROM (SELECT d.decided_at, (extract(epoch FROM d.decided_at) * 1000000)::bigint AS us FROM (
			SELECT timestamptz 'epoch' + us * interval '1 us' AS decided_at FROM (%s) AS t (us)
		) AS d) AS t WHERE us <> ` + read
	count := func(times string) int { return pgtest.Scalar[int](t, db.Pool, fmt.Sprintf(wrong, times)) }
	for _, seconds := range []int64{0, 1, 1 << 30, 1 << 31, 1<<31 - 1, limitertest.T0.Unix(), 1<<32 - 1, 1<<32 - 2} {
		require.Zero(t, count(fmt.Sprintf("SELECT %d::bigint * 1000000 + generate_series(0, 999999, 7)", seconds)))
		require.Zero(t, count(fmt.Sprintf("SELECT %d::bigint * 1000000 + generate_series(0, 200)", seconds)))
		require.Zero(t, count(fmt.Sprintf("SELECT %d::bigint * 1000000 + generate_series(999800, 999999)", seconds)))
	}
	require.Zero(t, count("SELECT floor(random() * 4294967296000000)::bigint FROM generate_series(1, 200000)"))
	require.Positive(t, count("SELECT 4294967296000000 + generate_series(0, 999999, 7)"), "this test can fail")
}

// tlsPool returns a pool whose server has a certificate that no authority has signed. If the argument asks is true, the
// pool trusts this certificate, but the server asks for a client certificate that the pool does not have.
func tlsPool(t *testing.T, asks bool) func(t *testing.T) *pgxpool.Pool {
	t.Helper()
	web := httptest.NewTLSServer(nil) // only for its certificate
	t.Cleanup(web.Close)
	served := &tls.Config{Certificates: web.TLS.Certificates}
	trusted := &tls.Config{ServerName: "example.com"}
	if asks {
		served.ClientAuth = tls.RequireAnyClientCert
		trusted.InsecureSkipVerify = true
	}
	pool := limitertest.PoolOf(t, func(conn net.Conn) {
		request := make([]byte, 8)
		_, _ = io.ReadFull(conn, request)
		_, _ = conn.Write([]byte("S"))
		secured := tls.Server(conn, served)
		_, _ = io.Copy(io.Discard, secured)
	})
	config := pool.Config()
	config.ConnConfig.TLSConfig = trusted
	return func(t *testing.T) *pgxpool.Pool {
		t.Helper()
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		t.Cleanup(pool.Close)
		return pool
	}
}

// A server or role without a free connection counts as an outage, because the fault ends when other connections close.
func TestTooManyConnectionsOfARole(t *testing.T) {
	t.Parallel()
	server := pgtest.Server(t, pgserver.Config{})
	conn, err := pgx.Connect(t.Context(), server.URL())
	require.NoError(t, err)
	defer conn.Close(t.Context())
	_, err = conn.Exec(t.Context(), "CREATE ROLE crowd LOGIN CONNECTION LIMIT 0")
	require.NoError(t, err)
	config, err := pgxpool.ParseConfig(server.URL())
	require.NoError(t, err)
	config.ConnConfig.User = "crowd"
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	var log testkit.Journal
	l := limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()}, ratelimit.ClientConfig{
		Logger: log.Logger(),
	})
	for range 2 * engine.BreakerFailures {
		result, err := l.Allow(t.Context(), "personal key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
	}
	lines := log.Lines()
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], "level=WARN")
	require.Contains(t, lines[0], "too many connections for role")
}

// A server's settings may turn PL/pgSQL's extra checks into errors, and may quote all identifiers in definitions. The
// functions can be created, and work, with these settings.
func TestFunctionsUnderStrictSettings(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `DO $$ BEGIN
		EXECUTE format('ALTER DATABASE %I SET plpgsql.extra_errors = ''all''', current_database());
		EXECUTE format('ALTER DATABASE %I SET quote_all_identifiers = on', current_database()); END $$`)
	pool := db.NewPool(t, nil)
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.NoError(t, migrations.DownTo(t.Context(), pool, 1))
	require.NoError(t, migrations.Up(t.Context(), pool))
	require.Equal(t, "all", pgtest.Scalar[string](t, pool, "SHOW plpgsql.extra_errors"))
	policies := limitertest.SlowPolicies(3)
	policies["all"] = ratelimit.All(policies["fixed window"], policies["token bucket"])
	for name, policy := range policies {
		for _, durable := range []bool{false, true} {
			limiter := limitertest.New(t, pool, ratelimit.Config{Name: name, Policy: policy, Durable: durable})
			for method, call := range limitertest.Calls(limiter, "key") {
				require.NoError(t, limiter.Reset(t.Context(), "key"))
				require.NoError(t, call(), method)
			}
			_, err := limiter.AllowN(t.Context(), "denied", 2)
			require.NoError(t, err)
			result, err := limiter.AllowN(t.Context(), "denied", 2)
			require.NoError(t, err)
			require.False(t, result.Allowed)
		}
	}
	for _, call := range []string{
		"rate_limit_allow('sql', 'key', 'sliding 2/1m, log 1/1m')", "rate_limit_peek('sql', 'key', 'fixed 1/1m')",
		"rate_limit_ban('sql', 'key', '1h', '1h', '1h', 'why')", "rate_limit_policies()", "rate_limit_sweep()",
		"rate_limit_report(ARRAY[1], ARRAY[1], ARRAY[''], ARRAY[1], ARRAY[0], ARRAY[1])",
	} {
		pgtest.Exec(t, pool, "SELECT * FROM "+call)
	}
}
