package engine_test

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// If one limiter makes statements fail, other limiters still work, even if their calls are in the same statements.
func TestFailureOfOneLimiterLeavesOthersAlone(t *testing.T) {
	t.Parallel()

	const limiters, callers, calls, guilty = 8, 4, 6, 7
	trigger := func(code string) string {
		return `CREATE FUNCTION boom() RETURNS trigger LANGUAGE plpgsql AS
				$$BEGIN RAISE 'boom' USING ERRCODE = '` + code + `'; END$$;
			CREATE TRIGGER boom BEFORE INSERT OR UPDATE ON rate_limit_durable FOR EACH ROW EXECUTE FUNCTION boom()`
	}
	for what, fault := range map[string]struct {
		durable bool // whether the failing limiter is durable
		sql     string
	}{
		"a damaged page":  {true, trigger("XX001")},
		"a full disk":     {true, trigger("53100")},
		"wraparound":      {true, trigger("54000")},
		"a cancellation":  {true, trigger("57014")},
		"a missing table": {true, "ALTER TABLE rate_limit_durable RENAME TO gone"},
		"a refused row":   {false, fmt.Sprintf("ALTER TABLE rate_limit_ephemeral ADD CHECK (prefix <> '%d')", guilty)},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()

			db := pgtest.New(t)
			client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{})
			all := make([]*ratelimit.Limiter, limiters)
			for i := range all {
				all[i] = limitertest.Of(t, client, ratelimit.Config{
					Name: fmt.Sprint(i), Policy: ratelimit.SlidingWindow{Limit: 5, Window: time.Hour},
					Durable: fault.durable && i == guilty, OnFailure: ratelimit.FailOpen(),
				})
			}
			for _, db := range db.All() {
				pgtest.Exec(t, db.Pool, fault.sql)
			}
			var mu sync.Mutex
			var failed, decided int
			testkit.Together(limiters*callers, func(g int) {
				for i := range calls {
					result, err := all[g%limiters].Allow(context.Background(), fmt.Sprint(g, i))
					ok := err == nil && result.Source == ratelimit.SourceDatabase
					mu.Lock()
					if g%limiters == guilty && ok {
						decided++
					} else if g%limiters != guilty && !ok {
						failed++
					}
					mu.Unlock()
				}
			})
			require.Zero(t, failed)
			require.Zero(t, decided, "there was no fault")
		})
	}
}

// A lock on one table does not open the breaker for limiters of the other table.
func TestLockedTableOpensNoBreakerForTheOther(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	db := pgtest.New(t)
	client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{Timeout: 8 * time.Second})
	policy := ratelimit.FixedWindow{Limit: 5, Window: time.Hour}
	login := limitertest.Of(t, client, ratelimit.Config{Name: "login", Policy: policy, OnFailure: ratelimit.FailOpen()})
	quota := limitertest.Of(t, client, ratelimit.Config{Name: "quota", Policy: policy, Durable: true, OnFailure: ratelimit.FailOpen()})
	pgtest.Exec(t, pgtest.Begin(t, db), "LOCK TABLE rate_limit_durable IN SHARE MODE") // CREATE INDEX takes this lock
	for i := range engine.BreakerFailures {
		result, err := quota.Allow(t.Context(), fmt.Sprint(i))
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
	}
	require.True(t, limitertest.EngineOf(client).Batcher.Breaker.IsOpen(engine.KindDurable))
	require.False(t, limitertest.EngineOf(client).Batcher.Breaker.IsOpen(engine.KindEphemeral))
	through := 0
	for range 100 {
		if result, err := login.Allow(t.Context(), "attacker"); err == nil && result.Allowed {
			through++
		}
	}
	require.Equal(t, 5, through)
}

// Slow statements of one kind leave a place for other kinds, whose statements are sent at once.
func TestSlowKindLeavesAPlace(t *testing.T) {
	t.Parallel()

	b := newBoard(500)
	q := b.queue
	q.MaxInFlight, q.Batcher = 2, &engine.Batcher{Begin: time.Now()}
	b.spaces["bills"] = &engine.Space{Name: "bills", Durable: true}
	b.push("bills", 5, 30, 1)
	q.Departs(engine.KindDurable)
	q.InFlight++
	require.True(t, q.MayLeave(engine.KindDurable), "30 wait")
	q.Lands(engine.KindDurable, 2*engine.TooLong)
	q.Departs(engine.KindDurable)
	require.True(t, q.MayLeave(engine.KindDurable), "there are no others")
	require.Equal(t, []string{"bills 5: 30"}, b.next())

	q.Departs(engine.KindEphemeral)
	q.Lands(engine.KindEphemeral, time.Millisecond)
	b.push("bills", 5, 30, 1)
	require.False(t, q.MayLeave(engine.KindDurable), "the second place is for others")
	require.Empty(t, b.next())
	b.push("login", 5, 1, 1)
	require.True(t, q.MayLeave(engine.KindEphemeral), "what is in flight may take long")
	require.Equal(t, []string{"login 5: 1"}, b.next())
	q.Departs(engine.KindEphemeral)
	q.InFlight++
	require.False(t, q.MayLeave(engine.KindEphemeral), "all places are taken")

	q.Lands(engine.KindDurable, time.Millisecond)
	require.Equal(t, []string{"bills 5: 30"}, b.next())
	q.Departs(engine.KindDurable)
	q.InFlight--
	b.push("bills", 5, 30, 1)
	require.True(t, q.MayLeave(engine.KindDurable), "it is fast again")
}

// While the only statement is being prepared, or has just ended, no second statement is sent. New requests go into the
// next statement of the same goroutine.
func TestSecondStatementDoesNotLeaveBetweenTwo(t *testing.T) {
	t.Parallel()

	b := newBoard(500)
	q := b.queue
	q.MaxInFlight, q.Batcher = 2, &engine.Batcher{Begin: time.Now()}
	b.push("login", 5, 1, 1)
	require.True(t, q.MayLeave(engine.KindEphemeral), "nothing is in flight")
	q.InFlight++ // the goroutine of a statement starts
	b.push("login", 5, 1, 1)
	require.False(t, q.MayLeave(engine.KindEphemeral))
	require.Equal(t, []string{"login 5: 2"}, b.next())
	q.Departs(engine.KindEphemeral)
	b.push("login", 5, 1, 1)
	require.False(t, q.MayLeave(engine.KindEphemeral))
	for _, took := range []time.Duration{500 * time.Microsecond, 2 * engine.TooLong} {
		q.Lands(engine.KindEphemeral, took)
		require.False(t, q.MayLeave(engine.KindEphemeral))
		require.False(t, q.MayLeave(engine.KindDurable), "nor one of another kind")
		q.Departs(engine.KindEphemeral)
	}
}
