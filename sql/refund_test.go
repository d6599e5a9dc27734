package sql_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Batches with takes of new keys and refunds of old keys lock rows in one order, so they do not deadlock. Without this
// order, batches deadlock.
func TestCrossingRefundsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")
	cross := func(db *pgtest.DB, rounds int) error {
		const workers = 4
		pgtest.Exec(
			t,
			db.Pool,
			"SELECT rate_limit_take_fixed_window('n', array_agg('old ' || k), 1000000, 1000000000) FROM generate_series(0, 9) AS k",
		)
		errs := make([]error, workers)
		var over atomic.Bool
		testkit.Together(workers, func(i int) {
			random := rand.New(rand.NewPCG(1, uint64(i)))
			for round := 0; round < rounds && !over.Load(); round++ {
				var keys []string
				var costs []int64
				for range 6 {
					keys = append(keys, fmt.Sprint("old ", random.IntN(10)))
					costs = append(costs, 2*random.Int64N(2)-1)
				}
				keys, costs = append(keys, fmt.Sprintf("old %d, new %d", random.IntN(10), round)), append(costs, 1)
				_, errs[i] = db.Pool.Exec(
					t.Context(),
					"SELECT "+pgtest.Each("'n'", "$1::text[]", "false", "1, 1000000, 1000000000, 0", ", $2"),
					keys,
					costs,
				)
				if errs[i] != nil {
					over.Store(true)
				}
			}
		})
		return errors.Join(errs...)
	}
	require.NoError(t, cross(pgtest.New(t), 150))

	db := pgtest.New(t)
	pgtest.Rewrite(
		t,
		db.Pool,
		"_rate_limit_rows_in_lock_order",
		`(ORDER BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C")`, "(ORDER BY e.part)",
	)
	var pgErr *pgconn.PgError
	require.ErrorAs(t, cross(db, 100_000), &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
}
