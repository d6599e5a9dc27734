package keeper_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// The listener hears what any session of the database announces, and ignores what is no announcement. When its
// connection is cut, it returns.
func TestListenOn(t *testing.T) {
	t.Parallel()
	db := pgtest.Empty(t)
	pool := db.NewPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["application_name"] = "listener"
	})
	listen := keeper.ListenOn(pool)
	ready, all, ended := make(chan bool, 1), make(chan keeper.Told, 10), make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	start := func() {
		go func() {
			ended <- listen(ctx, func() { ready <- true }, func(told keeper.Told) { all <- told })
		}()
		<-ready
	}
	start()
	for _, payload := range []string{"", "hello", "hello x", "a", "a b", " ", "a 1 2", "b 99999999999999999999"} {
		pgtest.Exec(t, db.Pool, "SELECT pg_notify('rate_limit_slot', $1)", payload)
	}
	pgtest.Exec(t, db.Pool, "SELECT pg_notify('rate_limit', 'other 1'), pg_notify('rate_limit_slot', 'some 42')")
	require.Equal(t, keeper.Told{ID: "some", Fence: 42}, <-all)

	pgtest.Exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE application_name = 'listener' AND query LIKE 'LISTEN%'`)
	require.Error(t, <-ended)
	start()
	cancel()
	require.ErrorIs(t, <-ended, context.Canceled)
	require.Empty(t, all)
}

// Only a pool tells with which settings it connects.
func TestListenOnNoPool(t *testing.T) {
	t.Parallel()
	conn := pgtest.Connect(t, pgtest.Empty(t))
	err := keeper.ListenOn(conn)(t.Context(), func() { t.Error("ready") }, func(keeper.Told) {})
	require.ErrorIs(t, err, pg.ErrNoPool)
}

// A pooler in transaction mode lets LISTEN pass, but no notification comes back.
func TestListenOnAPooler(t *testing.T) {
	t.Parallel()
	url := pgtest.PgBouncer(t, pgtest.Empty(t), "transaction", 2)
	pool, err := pgxpool.New(t.Context(), url+"&default_query_exec_mode=exec")
	require.NoError(t, err)
	defer pool.Close()
	err = keeper.ListenOn(pool)(t.Context(), func() { t.Error("ready") }, func(keeper.Told) {})
	require.ErrorIs(t, err, keeper.ErrDeaf)
}
