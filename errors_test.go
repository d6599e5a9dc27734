package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// kinds are all errors that a StoreError can be.
var kinds = []error{ErrNotMigrated, ErrNewerSchema, ErrNotPermitted, ErrPreparedStatements, ErrUnavailable, ErrReadOnly, ErrTimeout, ErrOutcomeUnknown}

// calls are all methods that ask the database, each in words, for a key.
func everyCall(l *Limiter, key string) map[string]func() error {
	allowed := func(r Result, err error) error {
		if err == nil && !r.Allowed {
			return errors.New("denied")
		}
		return err
	}
	return map[string]func() error{
		"Allow":  func() error { return allowed(l.Allow(context.Background(), key)) },
		"AllowN": func() error { return allowed(l.AllowN(context.Background(), key, 2)) },
		"Peek":   func() error { return allowed(l.Peek(context.Background(), key)) },
		"Reset":  func() error { return l.Reset(context.Background(), key) },
		"Refund": func() error { return allowed(l.Refund(context.Background(), forged(l, key, 2))) },
		"Grant":  func() error { return allowed(l.Grant(context.Background(), key, 2)) },
	}
}

// forged is a result of a take that there was not.
func forged(l *Limiter, key string, n int64) Result {
	r := newReceipt(l, key, n, len(l.policies()))
	for i := range r.parts {
		r.parts[i].units = n
	}
	return Result{Allowed: true, receipt: r}
}

// requireKinds requires a StoreError of exactly these kinds, which does not show the key.
func requireKinds(t *testing.T, err error, key string, want ...error) {
	t.Helper()
	var store *StoreError
	require.ErrorAs(t, err, &store)
	for _, kind := range kinds {
		require.Equal(t, slices.Contains(want, kind), errors.Is(err, kind), "%v: %v", kind, err)
	}
	require.True(t, strings.HasPrefix(err.Error(), "ratelimit: "), err)
	require.NotContains(t, err.Error(), key)
	require.NotContains(t, fmt.Sprintf("%+v", err), key)
	for _, kind := range want {
		require.Contains(t, err.Error(), kind.Error())
	}
}

func TestInvalidKeys(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	tx := begin(t, db)
	for _, c := range []struct{ key, says string }{
		{"", "empty"},
		{strings.Repeat("ä", 256) + "x", "513 bytes"},
		{strings.Repeat("personal", 1<<17), "512"},
		{"personal\x00data", "NUL"},
		{"\x00", "NUL"},
		{"personal \xff", "UTF-8"},
		{"\xed\xa0\x80 personal", "UTF-8"},     // a surrogate
		{"personal \xf4\x90\x80\x80", "UTF-8"}, // beyond Unicode
		{"\xc0\x80", "UTF-8"},                  // another NUL
	} {
		all := everyCall(limiter, c.key)
		all["AllowTx"] = func() error { _, err := limiter.AllowTx(t.Context(), tx, c.key); return err }
		all["AllowNTx"] = func() error { _, err := limiter.AllowNTx(t.Context(), tx, c.key, 1); return err }
		delete(all, "Refund") // whose key is that of a take
		all["GrantTx"] = func() error { _, err := limiter.GrantTx(t.Context(), tx, c.key, 1); return err }
		all["ResetTx"] = func() error { return limiter.ResetTx(t.Context(), tx, c.key) }
		for name, call := range all {
			err := call()
			require.ErrorIs(t, err, ErrInvalidKey, name)
			var keyErr *KeyError
			require.ErrorAs(t, err, &keyErr, name)
			require.Contains(t, err.Error(), "ratelimit: invalid key: ")
			require.Contains(t, err.Error(), c.says)
			require.NotContains(t, err.Error(), "personal")
			require.NotContains(t, err.Error(), "\x00")
		}
	}
	require.Equal(t, "T", string(tx.Conn().PgConn().TxStatus()))
	require.Zero(t, scalar[int](t, tx, "SELECT count(*) FROM rate_limit_ephemeral"))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, storedRows(t, db.Pool, false))

	for _, key := range []string{"x", strings.Repeat("ä", 256), "\x01\n\\'\"{}, NULL $1", "\U0010ffff", "﷐", " "} {
		for _, want := range []int64{9, 8} {
			result, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}
	}
	require.Len(t, storedRows(t, db.Pool, false), 6)
}

func TestInvalidCosts(t *testing.T) {
	t.Parallel()

	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		db := pgtest.New(t)
		limiter := newLimiter(t, db.Pool, config)
		tx := begin(t, db)
		for cost, want := range map[int64]error{
			-1: ErrInvalidCost, -1 << 63: ErrInvalidCost, 11: ErrCostExceedsLimit, 1<<63 - 1: ErrCostExceedsLimit,
		} {
			for range 2 {
				result, err := limiter.AllowN(t.Context(), "personal", cost)
				require.Zero(t, result)
				_, errTx := limiter.AllowNTx(t.Context(), tx, "personal", cost)
				for _, err := range []error{err, errTx} {
					require.ErrorIs(t, err, want)
					require.NotEqual(t, errors.Is(err, ErrInvalidCost), errors.Is(err, ErrCostExceedsLimit))
					var costErr *CostError
					require.ErrorAs(t, err, &costErr)
					require.Equal(t, CostError{Cost: cost, Limit: 10}, *costErr)
					require.Contains(t, err.Error(), fmt.Sprint(cost))
					require.Contains(t, err.Error(), want.Error())
					require.NotContains(t, err.Error(), "personal")
				}
			}
		}
		for _, n := range []int64{0, -1, math.MinInt64, 3, math.MaxInt64} {
			says := fmt.Sprintf("ratelimit: invalid cost: it is %d, and must be at least 1", n)
			if n > 0 {
				says = fmt.Sprintf("ratelimit: invalid cost: %d is more than the 2 that are left to give back", n)
			}
			result, err := limiter.RefundN(t.Context(), forged(limiter, "personal", 2), n)
			require.Zero(t, result)
			_, errTx := limiter.RefundNTx(t.Context(), tx, forged(limiter, "personal", 2), n)
			for _, err := range []error{err, errTx} {
				require.ErrorIs(t, err, ErrInvalidCost)
				require.NotErrorIs(t, err, ErrCostExceedsLimit)
				require.EqualError(t, err, says)
			}
		}
		require.Equal(t, "T", string(tx.Conn().PgConn().TxStatus()))
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, storedRows(t, db.Pool, config.Durable))
		result, err := limiter.AllowN(t.Context(), "personal", 10)
		require.NoError(t, err)
		require.True(t, result.Allowed)
	})
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	for _, policy := range slowPolicies(10) {
		limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: policy, Timeout: amply})
		for _, call := range everyCall(limiter, "personal") {
			err := call()
			requireKinds(t, err, "personal", ErrNotMigrated)
			require.Contains(t, err.Error(), "goose -dir migrations")
		}
	}
	require.Zero(t, scalar[int](t, db.Pool, "SELECT count(*) FROM pg_class WHERE relname ~ 'rate_limit'"))

	// A connection is as good as before, and so is the limiter once somebody migrates.
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	for _, policy := range slowPolicies(10) {
		for name, call := range everyCall(newLimiter(t, db.Pool, Config{Name: "test", Policy: policy, Timeout: amply}), "personal") {
			require.NoError(t, call(), name)
		}
	}
}

func TestMigratedAndRolledBack(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	for name, call := range everyCall(limiter, "personal") {
		require.NoError(t, call(), name)
	}
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 0))
	for _, call := range everyCall(limiter, "personal") { // on connections that had it prepared
		requireKinds(t, call(), "personal", ErrNotMigrated)
	}
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	for name, call := range everyCall(limiter, "personal") {
		require.NoError(t, call(), name)
	}
}

// TestVersionOfTheSchema has a database of another release answer: what is missing there is told by the version that it says it has.
func TestVersionOfTheSchema(t *testing.T) {
	t.Parallel()

	all, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	require.Len(t, all, schemaVersion)

	db := pgtest.New(t)
	limiter := newLimiter(t, db.Pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	// One that is newer and has all that is called goes on to work.
	version := func(n int) {
		exec(t, db.Pool, fmt.Sprintf("CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT %d::bigint'", n))
	}
	version(schemaVersion + 1)
	for name, call := range everyCall(limiter, "personal") {
		require.NoError(t, call(), name)
	}

	exec(t, db.Pool, `DO $$
		DECLARE fn regprocedure;
		BEGIN
			FOR fn IN SELECT oid FROM pg_proc WHERE proname LIKE 'rate_limit_%' AND proname NOT IN ('rate_limit_version', 'rate_limit_late') LOOP
				EXECUTE 'DROP FUNCTION ' || fn;
			END LOOP;
		END $$`)
	for n, want := range map[int]struct {
		kind error
		says string
	}{
		schemaVersion - 1: {ErrNotMigrated, "version 2 of the migrations, and what is missing came later; this release was made for version 3"},
		schemaVersion:     {ErrNotMigrated, "version 3 of the migrations, which has what is missing"},
		schemaVersion + 1: {ErrNewerSchema, "version 4 of the migrations, which has it no longer; this release was made for version 3"},
	} {
		version(n)
		for name, call := range everyCall(limiter, "personal") {
			err := call()
			requireKinds(t, err, "personal", want.kind)
			require.Contains(t, err.Error(), want.says, name)
		}
	}
}

func TestUnreachable(t *testing.T) {
	t.Parallel()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	pool, err := pgxpool.New(t.Context(), fmt.Sprintf("postgres://someone:secret@%v/nothing?sslmode=disable", listener.Addr()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	for _, call := range everyCall(limiter, "personal") {
		err := call()
		requireKinds(t, err, "personal", ErrUnavailable)
		require.NotContains(t, err.Error(), "secret")
	}
}

func TestServerThatHangsUp(t *testing.T) {
	t.Parallel()

	pool := poolOf(t, func(net.Conn) {})
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
	for _, call := range everyCall(limiter, "personal") {
		requireKinds(t, call(), "personal", ErrUnavailable)
	}
}

func TestServerThatNeverAnswers(t *testing.T) {
	t.Parallel()

	pool := poolOf(t, func(conn net.Conn) { _, _ = io.Copy(io.Discard, conn) })
	limiter := newLimiter(t, pool, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: 50 * time.Millisecond})
	for _, call := range everyCall(limiter, "personal") {
		requireKinds(t, call(), "personal", ErrTimeout)
	}
}

// poolOf returns a pool whose server does that with each connection.
func poolOf(t *testing.T, serve func(net.Conn)) *pgxpool.Pool {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				serve(conn)
			}()
		}
	}()
	t.Cleanup(func() { listener.Close() })
	pool, err := pgxpool.New(t.Context(), fmt.Sprintf("postgres://someone@%v/nothing?sslmode=disable", listener.Addr()))
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func TestReadOnlySession(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	readOnly := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
	})
	eachSlowPolicyAndTable(t, 10, func(t *testing.T, config Config) {
		limiter := newLimiter(t, readOnly, config)
		for name, call := range everyCall(limiter, "personal") {
			err := call()
			if name == "Peek" { // which only reads
				require.NoError(t, err)
				continue
			}
			requireKinds(t, err, "personal", ErrUnavailable, ErrReadOnly)
			require.Contains(t, err.Error(), "target_session_attrs")
		}
		require.Empty(t, storedRows(t, db.Pool, config.Durable))
	})
}

// standby turns a server into one that waits for the WAL of a primary that does not come.
func standby(t *testing.T, server *pgserver.Server) {
	t.Helper()
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	require.NoError(t, os.WriteFile(filepath.Join(server.DataDir(), "standby.signal"), nil, 0o666))
	require.NoError(t, server.Restart(t.Context()))
}

// A primary that has become a standby, under a pool that still is connected to it.
func TestStandby(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{})
	if server.DataDir() == "" {
		t.Skip("a standby is made in the data directory, which a server in Docker does not show")
	}
	pool, err := pgxpool.New(t.Context(), server.URL())
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	require.NoError(t, migrations.Up(t.Context(), pool))
	pool.Reset()
	standby(t, server)
	require.True(t, scalar[bool](t, pool, "SELECT pg_is_in_recovery()"))

	for _, durable := range []bool{true, false} {
		for _, policy := range slowPolicies(10) {
			limiter := newLimiter(t, pool, Config{Name: "test", Policy: policy, Durable: durable, Timeout: amply})
			for method, call := range everyCall(limiter, "personal") {
				err := call()
				if method == "Peek" && durable { // which only reads
					require.NoError(t, err)
					continue
				}
				requireKinds(t, err, "personal", ErrUnavailable, ErrReadOnly)
			}
		}
	}
}

func TestNotPermitted(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	exec(t, db.Pool, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM CURRENT_USER")
	superuser := scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		if superuser { // to whom everything is permitted
			config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		}
	})
	for _, policy := range slowPolicies(10) {
		for _, call := range everyCall(newLimiter(t, pool, Config{Name: "test", Policy: policy, Timeout: amply}), "personal") {
			err := call()
			requireKinds(t, err, "personal", ErrNotPermitted)
			require.Contains(t, err.Error(), "GRANT")
		}
		// Nor without USAGE on the schema.
		for _, call := range everyCall(newLimiter(t, pool, Config{Name: "test", Policy: policy, Timeout: amply, Schema: "pg_toast"}), "personal") {
			requireKinds(t, call(), "personal", ErrNotPermitted)
		}
	}
	require.Empty(t, storedRows(t, db.Pool, false))

	// EXECUTE on the functions is all that it takes: the tables stay closed.
	if !superuser {
		return
	}
	exec(t, db.Pool, `
		GRANT EXECUTE ON FUNCTION rate_limit_fixed_window, rate_limit_sliding_window, rate_limit_token_bucket, rate_limit_sliding_log, rate_limit_all, rate_limit_reset TO pg_monitor`)
	for _, policy := range slowPolicies(10) {
		for name, call := range everyCall(newLimiter(t, pool, Config{Name: "test", Policy: policy, Timeout: amply}), "personal") {
			require.NoError(t, call(), name)
		}
	}
	for _, sql := range []string{
		"SELECT * FROM rate_limit_ephemeral", "DELETE FROM rate_limit_durable",
		"SELECT rate_limit_late()",
	} {
		refused(t, pool, sql, sql, "42501")
	}
}

// A statement that takes longer than the server or the client allows.
func TestStatementTimeout(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["statement_timeout"] = "100ms" })
	limiter := newLimiter(t, pool, config)
	_, err := newLimiter(t, db.Pool, config).Allow(t.Context(), "personal")
	require.NoError(t, err)
	holder := hold(t, db, config, "personal")
	_, err = limiter.Allow(t.Context(), "personal")
	requireKinds(t, err, "personal", ErrTimeout)
	requireKinds(t, limiter.Reset(t.Context(), "personal"), "personal", ErrTimeout)
	require.NoError(t, holder.Rollback(t.Context()))
	require.EqualValues(t, 1, taken(t, db.Pool, config, "personal"))
}

// The session of a statement is ended by an administrator.
func TestConnectionIsEndedMeanwhile(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	config := Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply}
	pool := db.NewPool(t, nil)
	limiter := newLimiter(t, pool, config)
	_, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	holder := hold(t, db, config, "personal")
	tx, err := pool.Begin(t.Context()) // in which one statement waits; outside of it, one after the other would
	require.NoError(t, err)
	wait := later(func() (Result, error) { return limiter.AllowTx(context.Background(), tx, "personal") })
	waitUntilBlocked(t, db.Pool, 1)
	exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND cardinality(pg_blocking_pids(pid)) > 0`)
	_, err = wait()
	requireKinds(t, err, "personal", ErrUnavailable, ErrOutcomeUnknown) // the FATAL might have come after the commit
	_ = tx.Rollback(t.Context())                                        // its connection is gone
	require.NoError(t, holder.Rollback(t.Context()))
	result, err := limiter.Allow(t.Context(), "personal")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
}

func TestStoreErrors(t *testing.T) {
	t.Parallel()

	type test struct {
		code, severity string
		sent           bool
		want           []error
	}
	var tests []test
	for _, c := range []struct {
		codes string
		want  []error
	}{
		{"42P01 42883 3F000 42704 42703", []error{ErrNotMigrated}},
		{"42501", []error{ErrNotPermitted}},
		{"26000 42P05", []error{ErrPreparedStatements}},
		{"25006", []error{ErrUnavailable, ErrReadOnly}},
		{"55P03 57014", []error{ErrTimeout}},
		{"08000 08003 08006 53000 53100 53200 53300 53400 58000 58030 57P01 57P02 57P03", []error{ErrUnavailable}},
		{"40001 40P01 22023 23502 23505 XX000 57P04 25P02 42601 0 00000", nil},
		{"", nil},
	} {
		for code := range strings.SplitSeq(c.codes, " ") {
			for _, sent := range []bool{false, true} {
				failed, fatal := c.want, c.want
				switch other := failed == nil || slices.Equal(failed, []error{ErrUnavailable}); {
				case other && sent:
					fatal = []error{ErrUnavailable, ErrOutcomeUnknown}
				case other:
					failed, fatal = []error{ErrUnavailable}, []error{ErrUnavailable}
				}
				tests = append(tests, test{code, "ERROR", sent, failed}, test{code, "FATAL", sent, fatal}, test{code, "PANIC", sent, fatal})
			}
		}
	}
	for _, sent := range []bool{false, true} {
		tests = append(tests, test{"08P01", "ERROR", sent, []error{ErrPreparedStatements}}) // of Postgres
	}
	tests = append(tests, // of PgBouncer
		test{"08P01", "FATAL", false, []error{ErrUnavailable}}, test{"08P01", "FATAL", true, []error{ErrUnavailable, ErrOutcomeUnknown}})
	for _, c := range tests {
		pgErr := &pgconn.PgError{Code: c.code, Severity: "GRAVE", SeverityUnlocalized: c.severity, Message: "words of the database", Detail: "Key (key)=(personal)"}
		err := storeError(fmt.Errorf("driver: %w", pgErr), c.sent)
		requireKinds(t, err, "personal", c.want...)
		require.Contains(t, err.Error(), "words of the database")
		var got *pgconn.PgError
		require.ErrorAs(t, err, &got)
		require.Same(t, pgErr, got)
	}

	for _, c := range []struct {
		err  error
		sent bool
		want []error
	}{
		{io.ErrUnexpectedEOF, false, []error{ErrUnavailable}},
		{io.ErrUnexpectedEOF, true, []error{ErrUnavailable, ErrOutcomeUnknown}},
		{net.ErrClosed, true, []error{ErrUnavailable, ErrOutcomeUnknown}},
		{context.DeadlineExceeded, false, []error{ErrTimeout}},
		{context.DeadlineExceeded, true, []error{ErrTimeout, ErrOutcomeUnknown}},
		{os.ErrDeadlineExceeded, false, []error{ErrUnavailable}},
		{notSent{}, true, []error{ErrUnavailable}},
		{notSent{}, false, []error{ErrUnavailable}},
	} {
		err := storeError(fmt.Errorf("driver: %w", c.err), c.sent)
		requireKinds(t, err, "personal", c.want...)
		require.ErrorIs(t, err, c.err)
	}
}

// notSent is an error of a statement that never left.
type notSent struct{}

func (notSent) Error() string     { return "the connection was closed already" }
func (notSent) SafeToRetry() bool { return true }

// A database call is repeated if it never left, once, and if the database has undone it and the transaction is the limiter's own.
func TestOnlyWhatDidNotCountIsRepeated(t *testing.T) {
	t.Parallel()

	dropped := &pgconn.PgError{Code: "XX000", SeverityUnlocalized: "ERROR", Message: "cache lookup failed for type 12345"}
	raced, deadlock := &pgconn.PgError{Code: "40001", SeverityUnlocalized: "ERROR"}, &pgconn.PgError{Code: "40P01", SeverityUnlocalized: "ERROR"}
	canceled := &pgconn.PgError{Code: "57014", SeverityUnlocalized: "ERROR"} // see canceled in errors.go
	for _, c := range []struct {
		errs  []error
		tries int
		want  error
	}{
		{[]error{notSent{}, nil}, 2, nil},
		{[]error{notSent{}, notSent{}, nil}, 2, ErrUnavailable},
		{[]error{io.ErrUnexpectedEOF, nil}, 1, ErrOutcomeUnknown},
		{[]error{&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "FATAL"}, nil}, 1, ErrOutcomeUnknown},
		{[]error{&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "ERROR"}, nil}, 1, ErrUnavailable},
		{[]error{notSent{}, raced, raced, deadlock, nil}, 5, nil},
		{[]error{canceled, nil}, 2, nil},
		{[]error{canceled, canceled, nil}, 2, ErrTimeout},
		{[]error{dropped, nil}, 2, nil},
		{[]error{dropped, dropped, nil}, 2, ErrNotMigrated},
	} {
		db := &failing{DBTX: pgtest.New(t).Pool, errs: c.errs}
		limiter := newLimiter(t, db, Config{Name: "test", Policy: FixedWindow{Limit: 10, Window: year}, Timeout: amply})
		result, err := limiter.Allow(t.Context(), "key")
		require.Equal(t, c.tries, db.tries)
		if c.want == nil {
			require.NoError(t, err)
			require.EqualValues(t, 9, result.Remaining)
			continue
		}
		require.ErrorIs(t, err, c.want)
	}
}

// failing is a database some of whose queries fail, in turn.
type failing struct {
	DBTX
	errs  []error
	tries int
}

func (f *failing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	err := f.errs[f.tries]
	f.tries++
	if err != nil {
		return nil, err
	}
	return f.DBTX.Query(ctx, sql, args...)
}

// Every way in which pgx sends statements, with keys that each of them has to quote.
func TestQueryExecModes(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
		eachSlowPolicyAndTableAt(t, pgx.TxIsoLevel(mode.String()), 10, func(t *testing.T, config Config) {
			config.Name = `'" ` + t.Name()
			at := t0.Add(123456 * time.Microsecond)
			config.Test = frozen(at)
			config.SynchronousCommit = config.Durable
			limiter := newLimiter(t, pool, config)

			keys := []string{`'`, `"`, `\`, `{a,b}`, `NULL`, "\u00a0", `ключ`, "\n\t", `$1`, "x", `a"b\c'd,e`}
			var batch []*call
			for _, key := range keys {
				batch = append(batch, newCalls(key, 3, 3, 7, 1)...)
			}
			limiter.send(&flight{batch: batch})
			results, errs := outcomes(batch)
			require.NoError(t, errors.Join(errs...))
			for i, result := range results {
				require.Equal(t, []bool{true, true, false, true}[i%4], result.Allowed)
				require.True(t, at.Equal(result.DecidedAt), result.DecidedAt)
			}
			for _, key := range keys {
				require.EqualValues(t, 7, taken(t, db.Pool, config, key))
				peek, err := limiter.Peek(t.Context(), key)
				require.NoError(t, err)
				require.EqualValues(t, 3, peek.Remaining)
				require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
					result, err := limiter.AllowNTx(t.Context(), tx, key, 3)
					require.True(t, result.Allowed)
					return err
				}))
				require.EqualValues(t, 10, taken(t, db.Pool, config, key))
				require.NoError(t, limiter.Reset(t.Context(), key))
				require.Zero(t, taken(t, db.Pool, config, key))
			}
		})
	}
}

// Whoever calls while the schema is taken away and made again is told so, or gets a decision.
func TestMigratingUnderLoad(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := newLimiter(t, db.NewPool(t, func(config *pgxpool.Config) { delete(config.ConnConfig.RuntimeParams, "role") }), Config{
		Name: "test", Policy: FixedWindow{Limit: 1_000_000, Window: time.Hour}, Timeout: amply, NoDenialCache: true,
	})
	stop := make(chan struct{})
	errs := make(chan error, 6)
	for i := range cap(errs) {
		go func() {
			for {
				_, err := limiter.Allow(t.Context(), fmt.Sprint("key ", i))
				if err != nil && !errors.Is(err, ErrNotMigrated) {
					errs <- err
					return
				}
				select {
				case <-stop:
					errs <- nil
					return
				default:
				}
			}
		}()
	}
	for range 8 * rounds(t) {
		require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 1))
		require.NoError(t, migrations.Up(t.Context(), db.Pool))
	}
	close(stop)
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
}
