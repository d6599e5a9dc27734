package engine_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

// If a statement was never sent, it is repeated once. If the database has undone a statement, it is repeated too,
// unless it was in a caller's transaction.
func TestOnlyWhatDidNotCountIsRepeated(t *testing.T) {
	t.Parallel()

	dropped := &pgconn.PgError{
		Code:                "XX000",
		SeverityUnlocalized: "ERROR",
		Message:             "cache lookup failed for type 12345",
	}
	otherType := &pgconn.PgError{
		Code:                "XX000",
		SeverityUnlocalized: "ERROR",
		Message:             "function in FROM has unsupported return type",
	}
	raced, deadlock := &pgconn.PgError{
		Code:                "40001",
		SeverityUnlocalized: "ERROR",
	}, &pgconn.PgError{
		Code:                "40P01",
		SeverityUnlocalized: "ERROR",
	}
	canceled := &pgconn.PgError{Code: "57014", SeverityUnlocalized: "ERROR"} // see pg.Canceled
	pool := pgtest.New(t).Pool
	for i, c := range []struct {
		errs  []error
		tries int
		want  error
	}{
		{[]error{limitertest.NotSent{}, nil}, 2, nil},
		{[]error{limitertest.NotSent{}, limitertest.NotSent{}, nil}, 2, ratelimit.ErrUnavailable},
		{[]error{io.ErrUnexpectedEOF, nil}, 1, ratelimit.ErrOutcomeUnknown},
		{[]error{&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "FATAL"}, nil}, 1, ratelimit.ErrOutcomeUnknown},
		{[]error{&pgconn.PgError{Code: "57P01", SeverityUnlocalized: "ERROR"}, nil}, 1, ratelimit.ErrUnavailable},
		{[]error{limitertest.NotSent{}, raced, raced, deadlock, nil}, 5, nil},
		{[]error{canceled, nil}, 2, nil},
		{[]error{canceled, canceled, nil}, 3, nil}, // the third statement skips locked rows
		{[]error{canceled, canceled, canceled, canceled, nil}, 4, ratelimit.ErrTimeout},
		{[]error{dropped, nil}, 2, nil},
		{[]error{otherType, nil}, 2, nil},
		{[]error{dropped, dropped, nil}, 2, ratelimit.ErrNotMigrated},
	} {
		db := &failing{DBTX: pool, errs: c.errs}
		limiter := limitertest.New(
			t,
			db,
			ratelimit.Config{Name: fmt.Sprint("test ", i), Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}},
		)
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

// failing is a database whose queries fail with the errors in errs, one after the other.
type failing struct {
	ratelimit.DBTX
	errs  []error
	tries int
}

func (f *failing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	f.tries++
	if err := f.errs[min(f.tries, len(f.errs))-1]; err != nil {
		return nil, err
	}
	return f.DBTX.Query(ctx, sql, args...)
}

// While the schema is dropped and made again, a call returns a decision or ErrNotMigrated.
func TestMigratingUnderLoad(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.OwnerPool(t, nil),
		ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 1_000_000, Window: time.Hour}, NoDenialCache: true,
		},
	)
	stop := make(chan struct{})
	errs := make(chan error, 4)
	for i := range cap(errs) {
		go func() {
			for {
				_, err := limiter.Allow(t.Context(), fmt.Sprint("key ", i))
				if err != nil && !errors.Is(err, ratelimit.ErrNotMigrated) {
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
	for range 2 * limitertest.Rounds(t) {
		require.NoError(t, migrations.DownTo(t.Context(), db.Pool, 1))
		require.NoError(t, migrations.Up(t.Context(), db.Pool))
	}
	close(stop)
	for range cap(errs) {
		require.NoError(t, <-errs)
	}
}

// A statement waits for a row while its functions and types are dropped and made again. The statement succeeds, or
// fails with ErrNotMigrated. The test uses the first statement of a connection, because later statements have more
// types in their cache.
func TestMigratingWhileAStatementWaits(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	ctx, holder, failed := context.Background(), pgtest.Begin(t, db), map[string]int{}
	type waiting struct {
		policy, method string
		end            func() (any, error)
	}
	var calls []waiting
	for policy, p := range limitertest.SlowPolicies(10) {
		limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: policy, Policy: p})
		for method, call := range map[string]func(key string, tx pgx.Tx) error{
			"AllowTx": func(key string, tx pgx.Tx) error { _, err := limiter.WithTx(tx).Allow(ctx, key); return err },
			"AllowAllTx": func(key string, tx pgx.Tx) error {
				_, err := limitertest.AllowAllTx(ctx, tx, limiter.Request(key, 1), limiter.Request("other", 1))
				return err
			},
			"RefundTx": func(key string, tx pgx.Tx) error {
				_, err := limiter.WithTx(tx).Refund(ctx, limitertest.Forged(limiter, key, 2))
				return err
			},
			"GrantTx": func(key string, tx pgx.Tx) error { _, err := limiter.WithTx(tx).Grant(ctx, key, 2); return err },
			"ResetTx": func(key string, tx pgx.Tx) error { return limiter.WithTx(tx).Reset(ctx, key) },
		} {
			_, err := limiter.Allow(ctx, method)
			require.NoError(t, err)
			pgtest.Exec(t, holder, "SELECT FROM rate_limit_ephemeral WHERE prefix = $1 AND key = $2 FOR UPDATE", policy, method)
			tx := pgtest.Begin(t, db)
			end := testkit.Later(func() (any, error) { return nil, call(method, tx) })
			calls = append(calls, waiting{policy: policy, method: method, end: end})
			pgtest.WaitUntilBlocked(t, db.Pool, len(calls))
		}
	}
	require.NoError(t, migrations.DownTo(ctx, db.Pool, 1))
	require.NoError(t, migrations.Up(ctx, db.Pool))
	require.NoError(t, holder.Rollback(ctx))
	for _, call := range calls {
		if _, err := call.end(); err != nil {
			failed[call.policy]++
			require.ErrorIs(t, err, ratelimit.ErrNotMigrated, call.method)
		}
	}
	require.Len(t, failed, len(limitertest.SlowPolicies(10)), "the types were not missed")
}

// At REPEATABLE READ and SERIALIZABLE, a transaction that changes a row undoes each statement that waits for the row.
// Even if all statements are undone, that is not an outage.
func TestStatementsThatAreAlwaysUndone(t *testing.T) {
	t.Parallel()
	for _, callers := range []int{1, 8} {
		synctest.Test(t, func(t *testing.T) {
			db := limitertest.NewModelDB()
			db.Set(func(ctx context.Context) error {
				select {
				case <-time.After(20 * time.Millisecond):
					return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "40001"}
				case <-ctx.Done():
					return ctx.Err()
				}
			})
			limiter := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()})
			for range 5 {
				errs := make([]error, callers)
				testkit.Together(callers, func(i int) { _, errs[i] = limiter.Allow(context.Background(), "key") })
				for _, err := range errs {
					require.ErrorIs(t, err, ratelimit.ErrTimeout)
					require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
				}
				require.False(t, limitertest.Engine(limiter).Batcher.Breaker.IsOpen(engine.KindEphemeral))
			}
		})
	}
}
