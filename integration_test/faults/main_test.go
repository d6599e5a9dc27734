// Package faults breaks the database, and the way to it, while limiters are at work: connections that are cut at
// every message, servers that are killed, stopped, demoted, replaced and filled up. It also judges histories of
// concurrent calls.
//
// Tests of random events go round as often as the variable ROUNDS says, and draw from the seed of the variable
// SEED.
package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) {
	if work := os.Getenv(workVariable); work != "" {
		os.Exit(workInChild(work))
	}
	if work := os.Getenv(leaseWorkVariable); work != "" {
		os.Exit(leaseInChild(work))
	}
	// A server elsewhere would have another clock, and might want TLS or a password of the proxy.
	_ = os.Unsetenv("RATELIMIT_TEST_DATABASE_URL")
	pgtest.Main(m)
}

const (
	// amply is a ClientConfig.Timeout that no call comes near, however slow the machine.
	amply = testkit.Amply

	day  = 24 * time.Hour
	year = 365 * day
)

// random is what a test draws from. The variable SEED makes it draw the same again.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(testkit.Seed(t, "SEED"), 0))
}

// withMonths returns a database in whose calendar the months last that long, so that many end during a history. Only
// where a month ends is replaced. That this is right is tested where the calendar is.
func withMonths(t *testing.T, month time.Duration) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	pgtest.Rewrite(t, db.Pool, "_rate_limit_window_end", "extract(epoch FROM ends)::bigint * 1000000",
		fmt.Sprintf("(clock / %[1]d + 1) * %[1]d", month.Microseconds()))
	db.Pool.Reset() // a test has many databases, and the server not as many connections
	return db
}

// newPool is a pool of any server's database, closed at the end of the test.
func newPool(t *testing.T, url string, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return (&pgtest.DB{URL: url}).OwnerPool(t, configure)
}

// counted is what the windows in a table hold, for each key.
func counted(t *testing.T, db pgtest.Querier, durable bool) map[string]int64 {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT key, count FROM "+pgtest.Table(durable))
	require.NoError(t, err)
	counts := map[string]int64{}
	var key string
	var count int64
	_, err = pgx.ForEachRow(rows, []any{&key, &count}, func() error {
		counts[key] = count
		return nil
	})
	require.NoError(t, err)
	return counts
}

// pause waits for that long, or until the context ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func keyNumber(i int) string { return fmt.Sprint("key ", i) }
