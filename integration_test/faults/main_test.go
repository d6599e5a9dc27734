// Package faults breaks the database and the connections to it while limiters are at work. It cuts connections at every
// message, and kills, stops, demotes, replaces and fills up servers. It also judges histories of concurrent calls.
//
// The variable ROUNDS sets the number of rounds of random tests, and the variable SEED their seed.
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

	"github.com/pgratelimit/ratelimit/internal/doortest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestMain(m *testing.M) {
	if work := os.Getenv(workVariable); work != "" {
		os.Exit(workInChild(work))
	}
	if work := os.Getenv(holdWorkVariable); work != "" {
		os.Exit(holdInChild(work))
	}
	if work := os.Getenv(slotWorkVariable); work != "" {
		os.Exit(slotsInChild(work))
	}
	if settings := os.Getenv(slotPuppetVariable); settings != "" {
		os.Exit(slotPuppetInChild(settings))
	}
	if work := os.Getenv(leaseWorkVariable); work != "" {
		os.Exit(leaseInChild(work))
	}
	// A server elsewhere would have another clock, and might require TLS or a password.
	_ = os.Unsetenv("RATELIMIT_TEST_DATABASE_URL")
	doortest.Main(m)
}

const (
	// amply is a ClientConfig.Timeout that no call reaches, even on a slow machine.
	amply = testkit.Amply

	day  = 24 * time.Hour
	year = 365 * day
)

// random returns the source of a test's random numbers. With the same SEED, the numbers are the same.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	return rand.New(rand.NewPCG(testkit.Seed(t, "SEED"), 0))
}

// withMonths returns a database whose calendar months last as long as the argument month, so that many months end
// during a history. It replaces only the function for the end of a month. Other tests check that function.
func withMonths(t *testing.T, month time.Duration) *pgtest.DB {
	t.Helper()
	db := pgtest.New(t)
	pgtest.Rewrite(t, db.Pool, "_rate_limit_window_end", "extract(epoch FROM ends)::bigint * 1000000",
		fmt.Sprintf("(clock / %[1]d + 1) * %[1]d", month.Microseconds()))
	db.Pool.Reset() // a test has many databases, and the server too few connections for all of them
	return db
}

// newPool returns a pool for a server's database. The pool is closed at the end of the test.
func newPool(t *testing.T, url string, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return (&pgtest.DB{URL: url}).OwnerPool(t, configure)
}

// counted returns the units in each key's window in a table.
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

// pause waits for the time d, or until the context ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

func keyNumber(i int) string { return fmt.Sprint("key ", i) }
