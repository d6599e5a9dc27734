package sql_test

import (
	"os"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// examples/trigger/orders.sql works as its comments say, for a role with the rights that the comments name.
func TestTriggerExample(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	example, err := os.ReadFile("../examples/trigger/orders.sql")
	require.NoError(t, err)
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, string(example))
	pgtest.Exec(t, db.Pool, "GRANT INSERT, SELECT ON orders TO pg_monitor; GRANT EXECUTE ON FUNCTION rate_limit_allow TO pg_monitor")
	shop := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = "pg_monitor" })
	const order = "INSERT INTO orders (customer, item) SELECT $1, 'book' FROM generate_series(1, $2)"
	refused := func(err error) {
		t.Helper()
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "RL001", pgErr.Code)
		require.Regexp(t, `^Order again in (01:00:00|00:59:\d\d(\.\d+)?)\.$`, pgErr.Hint)
		require.NotContains(t, pgErr.Message, "alice")
	}
	orders := func() int { return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM orders") }

	// A rollback or a refused statement takes nothing.
	tx, err := shop.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, order, "alice", 10)
	require.NoError(t, tx.Rollback(t.Context()))
	pgtest.Exec(t, shop, order, "alice", 8)
	_, err = shop.Exec(t.Context(), order, "alice", 3)
	refused(err)
	require.Equal(t, 8, orders())
	pgtest.Exec(t, shop, order, "alice", 2)
	_, err = shop.Exec(t.Context(), order, "alice", 1)
	refused(err)
	pgtest.Exec(t, shop, order, "bob", 1)
	require.Equal(t, 11, orders())

	// The limit also holds for concurrent orders.
	errs := make([]error, 20)
	testkit.Together(len(errs), func(i int) {
		errs[i] = pgx.BeginFunc(t.Context(), shop, func(tx pgx.Tx) error {
			_, err := tx.Exec(t.Context(), order, "carol", 1)
			return err
		})
	})
	failed := 0
	for _, err := range errs {
		if err != nil {
			refused(err)
			failed++
		}
	}
	require.Equal(t, 10, failed)
	require.Equal(t, 21, orders())
}
