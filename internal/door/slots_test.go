package door_test

import (
	"context"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/door"
	"github.com/pgratelimit/ratelimit/internal/keeper"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// While clients have places in line, one connection of the service listens for all of them.
func TestClientsHearOfSlots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "notifications, which a proxy does not hear")
	db := pgtest.New(t)
	address := serveFrom(t, db.NewPool(t, nil))
	const id = "0b0e5ee2-6a4d-4f0c-9d0c-1d2f7f0a6b1c"
	listeners := func() int {
		return pgtest.Scalar[int](t, db.Pool, `SELECT count(*)::int FROM pg_stat_activity
			WHERE datname = current_database() AND query = 'LISTEN rate_limit_slot'`)
	}
	type listener struct {
		client *door.Client
		stop   context.CancelFunc
		ready  chan struct{}
		heard  chan keeper.Told
		end    chan error
	}
	listen := func() *listener {
		c := door.NewClient(door.ClientConfig{Address: address})
		t.Cleanup(c.Close)
		rows, err := c.Query(t.Context(), pg.VersionStatement)
		require.NoError(t, err)
		rows.Close()
		ctx, stop := context.WithCancel(t.Context())
		l := &listener{c, stop, make(chan struct{}, 9), make(chan keeper.Told, 9), make(chan error, 1)}
		go func() {
			l.end <- c.Listen(ctx, func() { l.ready <- struct{}{} }, func(told keeper.Told) { l.heard <- told })
		}()
		<-l.ready
		return l
	}
	one, two := listen(), listen()
	require.Equal(t, 1, listeners())
	pgtest.Exec(t, db.Pool, "SELECT pg_notify('rate_limit_slot', $1)", id+" 42")
	for _, l := range []*listener{one, two} {
		require.Equal(t, keeper.Told{ID: id, Fence: 42}, <-l.heard)
	}

	// When the last one leaves, the connection is closed.
	one.stop()
	require.ErrorIs(t, <-one.end, context.Canceled)
	pgtest.Exec(t, db.Pool, "SELECT pg_notify('rate_limit_slot', $1)", id+" 43")
	require.EqualValues(t, 43, (<-two.heard).Fence)
	require.Empty(t, one.heard)
	two.client.Close()
	require.ErrorIs(t, <-two.end, pg.ErrUnavailable)
	testkit.WaitUntil(t, func() bool { return listeners() == 0 })

	// When the connection is lost, all learn of it, and may ask again.
	three, four := listen(), listen()
	pgtest.Exec(t, db.Pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
		WHERE datname = current_database() AND query = 'LISTEN rate_limit_slot'`)
	require.ErrorIs(t, <-three.end, pg.ErrUnavailable)
	require.ErrorIs(t, <-four.end, pg.ErrUnavailable)
	require.NotNil(t, listen())
}
