package cleanup

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// margin is how long rate_limit_sweep keeps a row after it has expired.
const margin = time.Minute

// t0 is the time at which clocks of tests begin.
var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

func newSweeper(t *testing.T, db ratelimit.DBTX, config Config) *Sweeper {
	t.Helper()
	sweeper, err := New(db, config)
	require.NoError(t, err)
	return sweeper
}

// runOnce runs a pass that must succeed.
func runOnce(t *testing.T, sweeper *Sweeper) Result {
	t.Helper()
	result, err := sweeper.RunOnce(t.Context())
	require.NoError(t, err)
	return result
}

// policies returns a policy of each kind with a limit of 10. A key is as good as new after one or two hours.
func policies() map[string]ratelimit.Policy {
	return map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 10, Window: time.Hour},
		"sliding window": ratelimit.SlidingWindow{Limit: 10, Window: time.Hour},
		"token bucket":   ratelimit.TokenBucket{Capacity: 10, Refill: 10, Every: time.Hour},
		"sliding log":    ratelimit.SlidingLog{Limit: 10, Window: time.Hour},
		"calendar":       ratelimit.CalendarWindow{Limit: 10, Unit: ratelimit.CalendarHour},
	}
}

// keys lists the keys of a table.
func keys(t *testing.T, db pgtest.Querier, table string) []string {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT key FROM "+table+" ORDER BY key")
	require.NoError(t, err)
	keys, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return keys
}

func rowCount(t *testing.T, db pgtest.Querier, table string) int64 {
	t.Helper()
	return pgtest.Scalar[int64](t, db, "SELECT count(*) FROM "+table)
}

func pageCount(t *testing.T, db pgtest.Querier) int64 {
	t.Helper()
	return pgtest.Scalar[int64](
		t,
		db,
		`SELECT (pg_relation_size('rate_limit_ephemeral') + pg_relation_size('rate_limit_durable'))
		/ current_setting('block_size')::bigint`,
	)
}

// naive is a simple sweeper with a mistake that tests must notice. It finds the keys of expired rows without locking
// them, waits for locked rows, and deletes by key.
func naive(ctx context.Context, db pgtest.Executor, expired time.Time) error {
	for _, durable := range []bool{false, true} {
		if _, err := db.Exec(ctx, fmt.Sprintf(`
			DELETE FROM %[1]s AS d
			USING (SELECT prefix, key FROM %[1]s WHERE expires_at <= $1 OFFSET 0) AS e
			WHERE d.prefix = e.prefix AND d.key = e.key`, pgtest.Table(durable)), expired.UnixMicro()); err != nil {
			return err
		}
	}
	return nil
}
