package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"math"
	"net"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// The text of each sentinel begins with ratelimit.
func TestSentinelsSayWhoseTheyAre(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	file, err := parser.ParseFile(token.NewFileSet(), "errors.go", nil, 0)
	require.NoError(t, err)
	var exported []string
	ast.Inspect(file, func(node ast.Node) bool {
		if spec, ok := node.(*ast.ValueSpec); ok {
			for _, name := range spec.Names {
				if name.IsExported() {
					exported = append(exported, name.Name)
				}
			}
		}
		return true
	})
	all := map[string]error{
		"ErrInvalidKey": ratelimit.ErrInvalidKey, "ErrInvalidCost": ratelimit.ErrInvalidCost, "ErrNothingToRefund": ratelimit.ErrNothingToRefund, "ErrNoReceipt": ratelimit.ErrNoReceipt,
		"ErrCostExceedsLimit": ratelimit.ErrCostExceedsLimit, "ErrWouldExceedDeadline": ratelimit.ErrWouldExceedDeadline,
		"ErrOwesTooMuch": ratelimit.ErrOwesTooMuch, "ErrHoldUnknown": ratelimit.ErrHoldUnknown, "ErrHoldEnded": ratelimit.ErrHoldEnded, "ErrSlotReleased": ratelimit.ErrSlotReleased, "ErrSlotLost": ratelimit.ErrSlotLost,
		"ErrNotMigrated": ratelimit.ErrNotMigrated, "ErrNewerSchema": ratelimit.ErrNewerSchema, "ErrNotPermitted": ratelimit.ErrNotPermitted, "ErrSharded": ratelimit.ErrSharded,
		"ErrPreparedStatements": ratelimit.ErrPreparedStatements, "ErrSetup": ratelimit.ErrSetup, "ErrUnavailable": ratelimit.ErrUnavailable,
		"ErrReadOnly": ratelimit.ErrReadOnly, "ErrTimeout": ratelimit.ErrTimeout, "ErrKeyHeld": ratelimit.ErrKeyHeld,
		"ErrPoolExhausted": ratelimit.ErrPoolExhausted, "ErrOutcomeUnknown": ratelimit.ErrOutcomeUnknown,
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(all)), exported, "the list is complete")
	for name, err := range all {
		require.Equal(t, 1, strings.Count(err.Error(), "ratelimit: "), name)
		require.True(t, strings.HasPrefix(err.Error(), "ratelimit: "), name)
	}
	require.True(t, strings.HasPrefix(ratelimit.ErrAcrossShards.Error(), ratelimit.ErrSharded.Error()))
	require.EqualError(t, pg.NewError(io.EOF, ratelimit.ErrTimeout, ratelimit.ErrOutcomeUnknown),
		"ratelimit: the database did not decide within ClientConfig.Timeout: "+
			"the outcome is unknown; the request may or may not have counted: EOF")
	require.EqualError(t, pg.NewError(io.EOF, ratelimit.ErrTimeout, ratelimit.ErrOutcomeUnknown).InOwnWords(),
		"ratelimit: the outcome is unknown; the request may or may not have counted: EOF")
}

func TestInvalidKeys(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	tx := pgtest.Begin(t, db)
	for _, c := range []struct{ key, says string }{
		{"", "empty"},
		{strings.Repeat("ä", 256) + "x", "513 bytes"},
		{strings.Repeat("personal", 1<<17), "512"},
		{"personal\x00data", "NUL"},
		{"\x00", "NUL"},
		{"personal \xff", "UTF-8"},
		{"\xed\xa0\x80 personal", "UTF-8"},     // a surrogate
		{"personal \xf4\x90\x80\x80", "UTF-8"}, // beyond Unicode
		{"\xc0\x80", "UTF-8"},                  // an overlong encoding of NUL
	} {
		all := limitertest.Calls(limiter, c.key)
		all["AllowTx"] = func() error { _, err := limiter.WithTx(tx).Allow(t.Context(), c.key); return err }
		all["AllowNTx"] = func() error { _, err := limiter.WithTx(tx).AllowN(t.Context(), c.key, 1); return err }
		delete(all, "Refund") // Refund has no argument for a key
		all["GrantTx"] = func() error { _, err := limiter.WithTx(tx).Grant(t.Context(), c.key, 1); return err }
		all["ResetTx"] = func() error { return limiter.WithTx(tx).Reset(t.Context(), c.key) }
		for name, call := range all {
			err := call()
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey, name)
			var keyErr *ratelimit.KeyError
			require.ErrorAs(t, err, &keyErr, name)
			require.Contains(t, err.Error(), "ratelimit: invalid key: ")
			require.Contains(t, err.Error(), c.says)
			require.NotContains(t, err.Error(), "personal")
			require.NotContains(t, err.Error(), "\x00")
		}
	}
	require.Equal(t, "T", string(tx.Conn().PgConn().TxStatus()))
	require.Zero(t, pgtest.Scalar[int](t, tx, "SELECT count(*) FROM rate_limit_ephemeral"))
	require.NoError(t, tx.Rollback(t.Context()))
	require.Empty(t, pgtest.StoredRows(t, db.Pool, false))

	for _, key := range []string{"x", strings.Repeat("ä", 256), "\x01\n\\'\"{}, NULL $1", "\U0010ffff", "﷐", " "} {
		for _, want := range []int64{9, 8} {
			result, err := limiter.Allow(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}
	}
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 6)
}

func TestInvalidCosts(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		limiter := limitertest.New(t, db.Pool, config)
		tx := limitertest.Begin(t, db.Pool)
		for cost, want := range map[int64]error{
			-1: ratelimit.ErrInvalidCost, -1 << 63: ratelimit.ErrInvalidCost, 11: ratelimit.ErrCostExceedsLimit, 1<<63 - 1: ratelimit.ErrCostExceedsLimit,
		} {
			for range 2 {
				result, err := limiter.AllowN(t.Context(), "personal", cost)
				require.Zero(t, result)
				_, errTx := limiter.WithTx(tx).AllowN(t.Context(), "personal", cost)
				for _, err := range []error{err, errTx} {
					require.ErrorIs(t, err, want)
					require.NotEqual(t, errors.Is(err, ratelimit.ErrInvalidCost), errors.Is(err, ratelimit.ErrCostExceedsLimit))
					var costErr *ratelimit.CostError
					require.ErrorAs(t, err, &costErr)
					require.Equal(t, ratelimit.CostError{Cost: cost, Limit: 10}, *costErr)
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
			result, err := limiter.RefundN(t.Context(), limitertest.Forged(limiter, "personal", 2), n)
			require.Zero(t, result)
			_, errTx := limiter.WithTx(tx).RefundN(t.Context(), limitertest.Forged(limiter, "personal", 2), n)
			for _, err := range []error{err, errTx} {
				require.ErrorIs(t, err, ratelimit.ErrInvalidCost)
				require.NotErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
				require.EqualError(t, err, says)
			}
		}
		require.Equal(t, "T", string(tx.Conn().PgConn().TxStatus()))
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, pgtest.StoredRows(t, db.Pool, config.Durable))
		result, err := limiter.AllowN(t.Context(), "personal", 10)
		require.NoError(t, err)
		require.True(t, result.Allowed)
	})
}

func TestNotMigrated(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	for _, policy := range limitertest.SlowPolicies(10) {
		limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: policy})
		for _, call := range limitertest.Calls(limiter, "personal") {
			err := call()
			limitertest.RequireKinds(t, err, ratelimit.ErrNotMigrated)
			require.Contains(t, err.Error(), "call migrations.Up(ctx, pool), or run 'pgratelimit migrate up'")
			require.NotContains(t, err.Error(), "goose") // goose would need -table, so the text must not recommend goose
		}
	}
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM pg_class WHERE relname ~ 'rate_limit'"))

	// The connection still works, and so does the limiter once the database is migrated.
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	for _, policy := range limitertest.SlowPolicies(10) {
		for name, call := range limitertest.Calls(limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: policy}), "personal") {
			require.NoError(t, call(), name)
		}
	}
}

func TestMigratedAndRolledBack(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	for name, call := range limitertest.Calls(limiter, "personal") {
		require.NoError(t, call(), name)
	}
	require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 0))
	// Connections that have prepared the statement return the same error.
	for _, call := range limitertest.Calls(limiter, "personal") {
		limitertest.RequireKinds(t, call(), ratelimit.ErrNotMigrated)
	}
	require.NoError(t, migrations.Up(t.Context(), db.Pool))
	for name, call := range limitertest.Calls(limiter, "personal") {
		require.NoError(t, call(), name)
	}
}

// TestVersionOfTheSchema uses a database of another release. The database's version tells why functions are missing.
func TestVersionOfTheSchema(t *testing.T) {
	t.Parallel()

	all, err := fs.Glob(migrations.FS, "*.sql")
	require.NoError(t, err)
	require.Len(t, all, pg.SchemaVersion)

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
	)
	// A newer schema works if it has all functions that this release calls.
	version := func(n int) {
		pgtest.Exec(
			t,
			db.Pool,
			fmt.Sprintf(
				"CREATE OR REPLACE FUNCTION rate_limit_version() RETURNS bigint LANGUAGE sql IMMUTABLE AS 'SELECT %d::bigint'",
				n,
			),
		)
	}
	version(pg.SchemaVersion + 1)
	for name, call := range limitertest.Calls(limiter, "personal") {
		require.NoError(t, call(), name)
	}

	pgtest.Exec(t, db.Pool, `DO $$
		DECLARE fn regprocedure;
		BEGIN
			FOR fn IN SELECT oid FROM pg_proc WHERE proname LIKE 'rate_limit_%' AND proname NOT IN ('rate_limit_version', '_rate_limit_late') LOOP
				EXECUTE 'DROP FUNCTION ' || fn;
			END LOOP;
		END $$`)
	for n, want := range map[int]struct {
		kind error
		says string
	}{
		pg.SchemaVersion - 1: {ratelimit.ErrNotMigrated, "version 2 of the migrations, and what is missing came later; this release was made for version 3"},
		pg.SchemaVersion:     {ratelimit.ErrNotMigrated, "version 3 of the migrations, which has what is missing"},
		pg.SchemaVersion + 1: {ratelimit.ErrNewerSchema, "version 4 of the migrations, which has it no longer; this release was made for version 3"},
	} {
		version(n)
		for name, call := range limitertest.Calls(limiter, "personal") {
			err := call()
			limitertest.RequireKinds(t, err, want.kind)
			require.Contains(t, err.Error(), want.says, name)
		}
	}
}

func TestNotPermitted(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM CURRENT_USER")
	superuser := pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		if superuser { // a superuser has all rights
			config.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		}
	})
	for _, policy := range limitertest.SlowPolicies(10) {
		for _, call := range limitertest.Calls(limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: policy}), "personal") {
			err := call()
			limitertest.RequireKinds(t, err, ratelimit.ErrNotPermitted)
			require.Contains(t, err.Error(), "GRANT")
		}
		// Without USAGE on the schema, calls also fail.
		for _, call := range limitertest.Calls(limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: policy}, ratelimit.ClientConfig{Schema: "pg_toast"}), "personal") {
			limitertest.RequireKinds(t, call(), ratelimit.ErrNotPermitted)
		}
	}
	require.Empty(t, pgtest.StoredRows(t, db.Pool, false))

	// A role needs only EXECUTE on the functions. The role has no access to the tables.
	if !superuser {
		return
	}
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION "+strings.Join(algorithm.Functions(), ", ")+" TO pg_monitor")
	for _, policy := range limitertest.SlowPolicies(10) {
		for name, call := range limitertest.Calls(limitertest.New(t, pool, ratelimit.Config{Name: "test", Policy: policy}), "personal") {
			require.NoError(t, call(), name)
		}
	}
	for _, sql := range []string{
		"SELECT * FROM rate_limit_ephemeral", "DELETE FROM rate_limit_durable",
		"SELECT _rate_limit_late()",
	} {
		pgtest.Refused(t, pool, sql, sql, "42501")
	}
}

// A statement takes longer than the server or the client allows.
func TestStatementTimeout(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	db := pgtest.New(t)
	config := ratelimit.Config{
		Name:   "test",
		Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
	}
	// The statement that finds the held row must not take that long, even on a busy machine.
	pool := db.NewPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["statement_timeout"] = "3s" })
	limiter := limitertest.New(t, pool, config, ratelimit.ClientConfig{Timeout: 20 * time.Second})
	_, err := limitertest.New(t, db.Pool, config).Allow(t.Context(), "personal")
	require.NoError(t, err)
	holder := limitertest.Hold(t, db, config, "personal")
	_, err = limiter.Allow(t.Context(), "personal")
	limitertest.RequireKinds(t, err, ratelimit.ErrTimeout, ratelimit.ErrKeyHeld)
	limitertest.RequireKinds(t, limiter.Reset(t.Context(), "personal"), ratelimit.ErrTimeout)
	require.NoError(t, holder.Rollback(t.Context()))
	require.EqualValues(t, 1, limitertest.Taken(t, db.Pool, config, "personal"))
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
		{"42P01 42883 3F000 42704 42703", []error{ratelimit.ErrNotMigrated}},
		{"42501", []error{ratelimit.ErrNotPermitted}},
		{"26000 42P05", []error{ratelimit.ErrPreparedStatements}},
		{"28000 28P01 3D000 22P02", []error{ratelimit.ErrSetup}},
		{"25006", []error{ratelimit.ErrUnavailable, ratelimit.ErrReadOnly}},
		{"55P03 57014", []error{ratelimit.ErrTimeout}},
		{"08000 08003 08006 53000 53100 53200 53300 53400 58000 58030 54000 57P01 57P02 57P03", []error{ratelimit.ErrUnavailable}},
		{"40001 40P01 22023 23502 23505 XX000 57P04 25P02 42601 0 00000", nil},
		{"", nil},
	} {
		for code := range strings.SplitSeq(c.codes, " ") {
			for _, sent := range []bool{false, true} {
				failed, fatal := c.want, c.want
				switch other := failed == nil || slices.Equal(failed, []error{ratelimit.ErrUnavailable}); {
				case other && sent:
					fatal = []error{ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown}
				case other:
					failed, fatal = []error{ratelimit.ErrUnavailable}, []error{ratelimit.ErrUnavailable}
				}
				tests = append(
					tests,
					test{code: code, severity: "ERROR", sent: sent, want: failed},
					test{code: code, severity: "FATAL", sent: sent, want: fatal},
					test{code: code, severity: "PANIC", sent: sent, want: fatal},
				)
			}
		}
	}
	for _, sent := range []bool{false, true} {
		// Postgres sends these errors.
		tests = append(tests, test{code: "08P01", severity: "ERROR", sent: sent, want: []error{ratelimit.ErrPreparedStatements}})
	}
	// A server refuses unknown settings and invalid values when a client connects.
	for i := range tests {
		if c := &tests[i]; !c.sent && c.code != "42501" &&
			(strings.HasPrefix(c.code, "42") || strings.HasPrefix(c.code, "22")) {
			c.want = []error{ratelimit.ErrSetup}
		}
	}
	tests = append(
		tests, // PgBouncer sends these errors
		test{
			code:     "08P01",
			severity: "FATAL",
			sent:     false,
			want:     []error{ratelimit.ErrUnavailable},
		},
		test{code: "08P01", severity: "FATAL", sent: true, want: []error{ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown}},
		// The server cannot convert this client_encoding.
		test{code: "0A000", severity: "FATAL", sent: false, want: []error{ratelimit.ErrSetup}},
	)
	for _, c := range tests {
		pgErr := &pgconn.PgError{
			Code:                c.code,
			Severity:            "GRAVE",
			SeverityUnlocalized: c.severity,
			Message:             "words of the database",
			Detail:              "Key (key)=(personal)",
		}
		err := ratelimit.PublicError(pg.Translate(fmt.Errorf("driver: %w", pgErr), c.sent))
		limitertest.RequireKinds(t, err, c.want...)
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
		{io.ErrUnexpectedEOF, false, []error{ratelimit.ErrUnavailable}},
		{io.ErrUnexpectedEOF, true, []error{ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown}},
		{net.ErrClosed, true, []error{ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown}},
		{context.DeadlineExceeded, false, []error{ratelimit.ErrTimeout}},
		{context.DeadlineExceeded, true, []error{ratelimit.ErrTimeout, ratelimit.ErrOutcomeUnknown}},
		{os.ErrDeadlineExceeded, false, []error{ratelimit.ErrUnavailable}},
		{limitertest.NotSent{}, true, []error{ratelimit.ErrUnavailable}},
		{limitertest.NotSent{}, false, []error{ratelimit.ErrUnavailable}},
	} {
		err := ratelimit.PublicError(pg.Translate(fmt.Errorf("driver: %w", c.err), c.sent))
		limitertest.RequireKinds(t, err, c.want...)
		require.ErrorIs(t, err, c.err)
	}
}
