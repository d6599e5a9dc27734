package faults

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// crashLimit is so low that some keys reach it before the server is killed.
const crashLimit = 200

// crashes kills the server under load at random moments, and starts it again. After each crash it calls check.
func crashes(t *testing.T, settings map[string]string, config ratelimit.Config, longest time.Duration,
	check func(known entries, table map[string]int64, killed time.Time)) {
	t.Helper()
	random := random(t)
	server, pool := newServer(t, pgserver.Config{Fsync: true, Settings: settings})
	require.Equal(t, "on", pgtest.Scalar[string](t, pool, "SHOW fsync"))
	config.Name, config.Policy = "test", ratelimit.FixedWindow{Limit: crashLimit, Window: year}

	var known ledger
	for round := range testkit.Rounds(t, "ROUNDS", 3) {
		limiter := limitertest.New(t, newPool(t, server.URL(), nil), config)
		before := known.count()
		wait := known.load(t, limiter, random.Uint64(), func(random *rand.Rand) string {
			return fmt.Sprint("round ", round, ", key ", random.IntN(1+random.IntN(30)))
		})
		testkit.WaitUntil(t, func() bool { return known.count() > before })
		pause(t.Context(), time.Duration(random.Int64N(int64(longest))))
		killed := time.Now()
		require.NoError(t, server.Kill())
		wait()

		require.NoError(t, server.Restart(t.Context()))
		pool.Reset()
		check(known.entries, counted(t, pool, config.Durable), killed)
		requireHealed(t, limiter)
		pgtest.Exec(t, pool, "DELETE FROM rate_limit_durable WHERE key = 'healed'")
	}
	t.Logf("%d grants, acknowledged or perhaps", len(known.entries))
}

// With synchronous commit, no number of crashes makes the database forget an acknowledged request.
func TestKilledServerForgetsNoAcknowledgedGrant(t *testing.T) {
	t.Parallel()

	config := ratelimit.Config{Durable: true, SynchronousCommit: true}
	crashes(t, nil, config, 600*time.Millisecond, func(known entries, table map[string]int64, _ time.Time) {
		known.requireTable(t, table, crashLimit, time.Now())
	})
}

// This is a negative control: with asynchronous commit and a WAL writer that rarely writes, a crash forgets the last
// acknowledged requests.
func TestForgottenGrantIsCaught(t *testing.T) {
	t.Parallel()

	lazy := map[string]string{"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "wal_buffers": "64MB"}
	caught := 0
	crashes(
		t,
		lazy,
		ratelimit.Config{Durable: true},
		600*time.Millisecond,
		func(known entries, table map[string]int64, _ time.Time) {
			if acknowledged, _ := known.sums(time.Now()); forgotten(acknowledged, table) != "" {
				caught++
			}
		},
	)
	require.Positive(t, caught)
}

// With asynchronous commit, a crash forgets at most the requests acknowledged in the last three wal_writer_delays.
func TestKilledServerForgetsLittle(t *testing.T) {
	t.Parallel()

	const bound = 3 * 200 * time.Millisecond // wal_writer_delay is 200 ms by default
	var before entries
	crashes(
		t,
		nil,
		ratelimit.Config{Durable: true},
		2*bound,
		func(known entries, table map[string]int64, killed time.Time) {
			// Requests that an earlier crash forgot stay forgotten.
			this := known[len(before):]
			before = known
			acknowledged, atMost := this.sums(killed.Add(-bound))
			require.Empty(t, forgotten(acknowledged, table))
			for key, sum := range atMost {
				require.LessOrEqual(t, table[key], min(sum, crashLimit))
			}
		},
	)
}

// After a crash the unlogged table is empty, and all keys start again.
func TestKilledServerForgetsEphemeral(t *testing.T) {
	t.Parallel()

	crashes(t, nil, ratelimit.Config{}, 300*time.Millisecond, func(_ entries, table map[string]int64, _ time.Time) {
		require.Empty(t, table)
	})
}
