package engine_test

import (
	"context"
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
)

// holdsDB passes the statements that find holds to a function of the test.
type holdsDB struct {
	ratelimit.DBTX

	find func(ctx context.Context) error
}

func (db *holdsDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if sql == engine.Text("findhold", "") {
		if err := db.find(ctx); err != nil {
			return nil, err
		}
	}
	return db.DBTX.Query(ctx, sql, args...)
}

func dividing() error {
	return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "RLS03", Message: "rate_limit: this database is shard 1 of 8"}
}

// While a shard is being divided, a hold is looked for again.
func TestFindHoldWhileAShardIsDivided(t *testing.T) {
	t.Parallel()
	db, asked := &holdsDB{DBTX: pgtest.New(t).NewPool(t, nil)}, 0
	db.find = func(context.Context) error {
		if asked++; asked <= 3 {
			return dividing()
		}
		return nil
	}
	l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	held, err := l.Hold(t.Context(), "key", 1, time.Minute)
	require.NoError(t, err)
	found, err := l.HoldFromText(t.Context(), held.Hold.String())
	require.NoError(t, err)
	require.Equal(t, held.Hold.String(), found.String())
	require.Equal(t, 4, asked)
}

// If a shard never has the hold's key, a call waits no longer than Timeout.
func TestFindHoldOnAShardThatDoesNotFitTheMap(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		db := &holdsDB{DBTX: limitertest.NewModelDB(), find: func(context.Context) error { asked++; return dividing() }}
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly},
			ratelimit.ClientConfig{Timeout: time.Second})
		began := time.Now()
		_, err := l.HoldFromText(t.Context(), aHold)
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		require.ErrorContains(t, err, "run 'pgratelimit shard list'")
		require.LessOrEqual(t, time.Since(began), time.Second)
		require.InDelta(t, time.Second/engine.MapPause, asked, 2, "each with a pause")
	})
}

const aHold = "00000000-0000-4000-8000-000000000000.e"

// A ModelDB decides no holds, and a test that sends it one fails.
func TestModelDBHasNoHolds(t *testing.T) {
	t.Parallel()
	db := limitertest.NewModelDB()
	l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	r := newRequest(l, "key", 1)
	r.Parts[0].Hold, r.Parts[0].TTL = aHold, 1
	c := limitertest.Engine(l).Database.Call([]*engine.Request{r}, engine.Transaction{})
	find := engine.Call{SQL: engine.Text("findhold", ""), Args: []any{aHold, nil}}
	for _, c := range []engine.Call{c, find} {
		require.Panics(t, func() { _ = c.Query(t.Context(), db, false) })
	}
}

// If the keys of a hold have got to different shards, a settlement settles none of them.
func TestSettleOfKeysThatHaveParted(t *testing.T) {
	t.Parallel()
	p := newProxy(t, 2)
	l := limitertest.Of(t, p.client(t, ratelimit.ClientConfig{}), ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
	keys := []string{keysOf(0, 4, 1)[0], keysOf(2, 4, 1)[0]} // both on shard 0 of 2
	held, err := ratelimit.HoldAll(t.Context(), time.Minute, l.Request(keys[0], 1), l.Request(keys[1], 1))
	require.NoError(t, err)
	p.grow(t, 4)
	_, err = held.Hold.Settle(t.Context(), 1)
	require.ErrorIs(t, err, ratelimit.ErrSharded)
	require.ErrorContains(t, err, "on several shards")
	for _, key := range keys {
		result, err := l.Peek(t.Context(), key)
		require.NoError(t, err)
		require.EqualValues(t, 1, result.Held)
	}
}
