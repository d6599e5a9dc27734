// Package faults breaks the database, and the way to it, while limiters are at work: connections that are cut at every message,
// servers that are killed, stopped, demoted, replaced and filled up. And it judges histories of concurrent calls.
//
// Tests of random events go round as often as the variable ROUNDS says, and draw from the seed of the variable SEED.
package faults

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) {
	if work := os.Getenv(workVariable); work != "" {
		os.Exit(workInChild(work))
	}
	// A server elsewhere would have another clock, and might want TLS or a password of the proxy.
	_ = os.Unsetenv("RATELIMIT_TEST_DATABASE_URL")
	pgtest.Main(m)
}

const (
	// amply is a Config.Timeout that no call comes near, however slow the machine, and the longest that a test waits for
	// an event that is certain to come.
	amply = time.Minute

	// tick is how often a test looks whether the event has come.
	tick = 2 * time.Millisecond

	year = 365 * 24 * time.Hour
)

// rounds is how often a test of random events goes round: as the variable ROUNDS says, or few times.
func rounds(t *testing.T, few int) int {
	t.Helper()
	text := os.Getenv("ROUNDS")
	if text == "" {
		return few
	}
	n, err := strconv.Atoi(text)
	require.NoError(t, err, "ROUNDS")
	return n
}

// random is what a test draws from. The variable SEED makes it draw the same again.
func random(t *testing.T) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv("SEED"); text != "" {
		var err error
		seed, err = strconv.ParseUint(text, 10, 64)
		require.NoError(t, err, "SEED")
	}
	t.Logf("SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

func newLimiter(t *testing.T, db ratelimit.DBTX, config ratelimit.Config) *ratelimit.Limiter {
	t.Helper()
	limiter, err := ratelimit.New(db, config)
	require.NoError(t, err)
	return limiter
}

// newPool is a pool of any server's database, closed at the end of the test.
func newPool(t *testing.T, url string, configure func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return (&pgtest.DB{URL: url}).NewPool(t, configure)
}

func execute(t *testing.T, db ratelimit.DBTX, sql string, args ...any) {
	t.Helper()
	_, err := db.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// scalar runs a query for one value.
func scalar[T any](t *testing.T, db ratelimit.DBTX, sql string, args ...any) T {
	t.Helper()
	var value T
	require.NoError(t, db.QueryRow(t.Context(), sql, args...).Scan(&value))
	return value
}

// counted is what the windows in a table hold, for each key.
func counted(t *testing.T, db ratelimit.DBTX, durable bool) map[string]int64 {
	t.Helper()
	table := "rate_limit_ephemeral"
	if durable {
		table = "rate_limit_durable"
	}
	rows, err := db.Query(t.Context(), "SELECT key, count FROM "+table)
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

// waitUntil returns when condition is true.
func waitUntil(t *testing.T, condition func() bool) {
	t.Helper()
	ticker := time.NewTicker(tick)
	defer ticker.Stop()
	for deadline := time.Now().Add(amply); !condition(); <-ticker.C {
		require.True(t, time.Now().Before(deadline), "what the test waits for does not happen")
	}
}

// pause waits for that long, or until the context ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}

// rewrite replaces part of a function in the test's database: a broken variant, for a check to prove itself on.
func rewrite(t *testing.T, db ratelimit.DBTX, function, old, replacement string) {
	t.Helper()
	source := scalar[string](t, db, "SELECT pg_get_functiondef($1::regproc)", function)
	require.Contains(t, source, old)
	execute(t, db, strings.ReplaceAll(source, old, replacement))
}

func keyNumber(i int) string { return fmt.Sprint("key ", i) }
