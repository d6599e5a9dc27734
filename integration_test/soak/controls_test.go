package soak

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// These tests show that the soak finds faults: each test runs the soak on something that is broken on purpose.

// If a row is read without a lock, the units that other calls take at the same time are lost.
func TestSoakFindsLostUpdates(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, nil, 0)
	s.lockNothing("PERFORM pg_sleep(0.002)") // lets other calls take during the pause
	s.run(time.Minute, nil)                  // the first violation ends it
	require.NotEmpty(t, s.violations)
	require.Regexp(t, "the row says that|remain after a call", s.violations[0])
}

// A commit that does not wait for the log is lost in a crash, although SynchronousCommit promises to keep it.
func TestSoakFindsForgottenGrants(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, map[string]string{
		"synchronous_commit": "off", "wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "wal_buffers": "64MB", "autovacuum": "off",
	}, 0)
	pgtest.Rewrite(s.t, s.extra, "_rate_limit_set", "set_config('synchronous_commit', synchronous_commit::text, true)", "''")
	_, err := s.extra.Exec(t.Context(), "CHECKPOINT") // without this, a crash would lose the tables too
	require.NoError(t, err)
	rng := s.rng(0)
	each := func(do func(a *soakAccount)) {
		for _, l := range s.accounts {
			for _, a := range l.accounts {
				do(a)
			}
		}
	}
	s.waitUntil("a grant is forgotten", func() bool { // repeats until a crash comes before the log is written
		each(func(a *soakAccount) { s.ask(t.Context(), a, 0, rng) })
		require.NoError(t, s.restart(true, s.server.Kill))
		each(func(a *soakAccount) { s.audit(t.Context(), a) })
		return len(s.violations) > 0
	})
	for _, violation := range s.violations {
		require.Contains(t, violation, "synchronous ", "the others may forget")
		require.Contains(t, violation, "the row says that 0 were taken")
	}
}

// If a window begins twice, it grants twice. No other check covers these keys.
func TestSoakFindsTooManyGrants(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, nil, 0)
	for _, function := range soakFunctions() {
		pgtest.LeaveToRules(s.t, s.extra, function)
	}
	const over = "IF clock >= s.expires_at"
	pgtest.Rewrite(s.t, s.extra, "_rate_limit_fixed", over, over+" - 300000")
	pgtest.Rewrite(s.t, s.extra, "_rate_limit_log", over, over+" - 300000")
	pgtest.Rewrite(s.t, s.extra, "_rate_limit_sliding", over, over+" - 800000")
	pgtest.Rewrite(s.t, s.extra, "_rate_limit_bucket", over, over+" - 450000")
	for _, l := range s.passing {
		r := l.regulars[0]
		s.waitUntil("too many grants are found", func() bool {
			s.takeRegular(
				t.Context(),
				r,
				0,
				soakRegularLimit,
			) // takes all units of a window at once, so that a slow machine finds the fault too
			s.judge(r)
			return len(s.violations) > 0
		})
		require.Contains(t, s.violations[0], l.Name+", regular:0: granted")
		s.violations = nil
	}
}

// A call that gets ErrKeyHeld must count nothing.
func TestSoakFindsHeldCallsThatCount(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, nil, 10*time.Second)
	pgtest.Rewrite(s.t, s.extra, "rate_limit_take_fixed_window", "\nBEGIN\n", `
		BEGIN
		RAISE EXCEPTION 'held' USING ERRCODE = 'lock_not_available';
		`)
	// This makes every row look like one that a transaction has locked.
	pgtest.Rewrite(s.t, s.extra, "rate_limit_all", "RETURN NEXT ROW(i::bigint, s.granted,", `
		IF skip_held THEN
			RETURN NEXT ROW(i::bigint, -2::bigint, 1::bigint, NULL::bigint, 0::bigint, decided_at,
				0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint, NULL::bigint[],
				0::bigint, 0::bigint, 0::bigint, 0::bigint, 0::bigint);
			CONTINUE;
		END IF;
		RETURN NEXT ROW(i::bigint, s.granted,`)
	a := s.accounts[0].accounts[0]
	require.Equal(t, ratelimit.FixedWindow{Limit: soakLimit, Window: soakAges}, a.of.Policy)
	result, err := a.of.limiters[0].Allow(t.Context(), a.key)
	require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
	a.note(s.outcomeOf(result, err), 1, 0, 0)
	require.EqualValues(t, 1, s.held.Load())
	require.Empty(t, s.violations)
	s.audit(t.Context(), a)
	require.Len(t, s.violations, 1)
	require.Regexp(t, "the row says that [1-9][0-9]* were taken, the callers that it must be 0 to 0", s.violations[0])
}

// The database reads a held row without a lock.
func TestSoakFindsGrantsOfHeldRows(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, nil, 0)
	s.lockNothing("RETURN") // otherwise the write would wait for the lock
	rng := s.rng(0)
	s.waitUntil("a grant is found", func() bool { // repeats until the holder does not roll back
		require.NoError(t, s.holdRows(t.Context(), rng))
		return strings.Contains(strings.Join(s.violations, "\n"), "were granted while somebody held the row")
	})
}

// A refund that does not check its take gives back units of later takes.
func TestSoakFindsRefundsOfWhatDoesNotCount(t *testing.T) {
	t.Parallel()
	for _, broken := range []bool{false, true} {
		s := newSoak(t, 1, nil, 10*time.Second)
		if broken {
			pgtest.Rewrite(
				s.t,
				s.extra,
				"_rate_limit_fixed_refund",
				"taken_in = s.window_start AND taken_in = rolled.window_start",
				"true",
			)
		}
		a, rng := s.accounts[0].accounts[0], s.rng(0)
		take := func() {
			result, err := a.of.limiters[0].AllowN(t.Context(), a.key, soakRegularLimit)
			require.NoError(t, err)
			a.note(soakAcknowledged, soakRegularLimit, 0, 0)
			a.keep(soakTake{result: result, n: soakRegularLimit})
		}
		take()
		s.audit(t.Context(), a)
		take()
		a.takes = a.takes[:1] // takes from before the reset
		s.giveBack(t.Context(), a, rng)
		require.EqualValues(t, 1, s.staleRefunds.Load())
		require.Empty(t, s.violations)
		s.audit(t.Context(), a)
		if broken {
			require.Len(t, s.violations, 1)
			require.Contains(t, s.violations[0], "the callers that it must be 20 to 20")
		} else {
			require.Empty(t, s.violations)
		}
	}
}

// A function looks in a schema where other roles can create functions, before it looks in pg_catalog.
func TestSoakFindsDecoysThatRun(t *testing.T) {
	t.Parallel()
	s := newSoak(t, 1, nil, 0)
	pgtest.Rewrite(s.t, s.extra, "rate_limit_take_fixed_window", "'pg_catalog', 'pg_temp'", "'public', 'pg_temp'")
	s.attack()
	s.run(time.Minute, nil) // the first violation ends it
	require.NotEmpty(t, s.violations)
	require.Regexp(
		t,
		"an error that nothing explains: .*(decoy|is not unique|cannot|must have type|does not exist)",
		s.violations[0],
	)
}

// A table that is never swept is an example of a leak.
func TestSoakFindsALeakingTable(t *testing.T) {
	t.Parallel()
	for _, swept := range []bool{true, false} {
		t.Run(fmt.Sprintf("swept %v", swept), func(t *testing.T) {
			t.Parallel()
			s := newSoak(t, 1, map[string]string{"autovacuum": "off"}, 0)
			limiter := s.passing[0].limiters[0]
			sweeper, err := cleanup.New(
				s.extra,
				cleanup.Config{Share: 1, Test: ratelimit.TestConfig{Now: func() time.Time {
					return time.Now().Add(time.Hour)
				}}},
			)
			require.NoError(t, err)
			for step := range 20 {
				errs := make([]error, 300)
				var wg sync.WaitGroup
				for i := range errs {
					wg.Go(func() {
						errs[i] = ratelimit.ErrTimeout // a busy machine may need longer than the timeout
						for errors.Is(errs[i], ratelimit.ErrTimeout) {
							_, errs[i] = limiter.Allow(t.Context(), fmt.Sprintf("visitor:%d:%d", step, i))
						}
					})
				}
				wg.Wait()
				require.NoError(t, errors.Join(errs...))
				var now soakSample
				require.NoError(t, s.take(t.Context(), &now))
				// The other quantities depend on all tests of this process, or on delayed statistics.
				s.samples = append(
					s.samples,
					soakSample{Rows: now.Rows, EphemeralBytes: now.EphemeralBytes, IndexBytes: now.IndexBytes},
				)
				if swept {
					_, err := sweeper.RunOnce(t.Context())
					require.NoError(t, err)
					_, err = s.extra.Exec(t.Context(), "VACUUM rate_limit_ephemeral")
					require.NoError(t, err)
				}
			}
			found := soakLeaks(s.samples)
			if swept {
				require.Empty(t, found)
			} else {
				require.Len(t, found, 1)
				require.Contains(t, found[0], "rows: ")
			}
		})
	}
}

// For each quantity, soakLeaks finds steady growth, and does not report variation.
func TestSoakLeaks(t *testing.T) {
	t.Parallel()
	run := func(change func(s *soakSample, step int64)) []string {
		var samples []soakSample
		for step := range int64(200) {
			s := soakSample{
				At: float64(
					step,
				), EphemeralBytes: 4 << 20, DurableBytes: 4 << 20, IndexBytes: 4 << 20, Rows: 5000, DeadTuples: 9000,
				Updates: 1000 * step, HOTUpdates: 950 * step, TransactionIDs: 500 * step, Connections: 30, Goroutines: 100,
				HeapBytes: 20 << 20, Calls: 1000 * step,
			}
			if change != nil {
				change(&s, step)
			}
			samples = append(samples, s)
		}
		return soakLeaks(samples)
	}
	require.Empty(t, run(nil))
	require.Empty(t, run(func(s *soakSample, step int64) {
		saw := 1 + step%20
		s.EphemeralBytes, s.DeadTuples, s.Connections, s.HeapBytes = saw<<20, 1000*saw, saw, saw<<20
	}))
	for name, change := range map[string]func(s *soakSample, step int64){
		"rate_limit_ephemeral": func(s *soakSample, step int64) { s.EphemeralBytes = step << 15 },
		"rate_limit_durable":   func(s *soakSample, step int64) { s.DurableBytes = step << 15 },
		"indexes":              func(s *soakSample, step int64) { s.IndexBytes = step << 15 },
		"rows":                 func(s *soakSample, step int64) { s.Rows = 20 * step },
		"dead tuples":          func(s *soakSample, step int64) { s.DeadTuples = 40 * step },
		"connections":          func(s *soakSample, step int64) { s.Connections = step / 8 },
		"goroutines":           func(s *soakSample, step int64) { s.Goroutines = step },
		"heap":                 func(s *soakSample, step int64) { s.HeapBytes = step << 18 },
		"transaction ids":      func(s *soakSample, step int64) { s.TransactionIDs = 5 * step * step },
		"HOT":                  func(s *soakSample, step int64) { s.HOTUpdates = 900*step - 2*step*step },
	} {
		found := run(change)
		require.Len(t, found, 1, name)
		require.Contains(t, found[0], name)
	}
}

// soakFunctions returns the functions that take from keys of one limiter.
func soakFunctions() []string {
	return []string{
		"rate_limit_take_fixed_window",
		"rate_limit_take_sliding_window",
		"rate_limit_take_token_bucket",
		"rate_limit_take_sliding_log",
	}
}

// lockNothing makes rate_limit_all decide without locking rows. The statement beforeWriting runs before the rows are
// written.
func (s *soak) lockNothing(beforeWriting string) {
	s.t.Helper()
	for _, function := range soakFunctions() {
		pgtest.LeaveToAll(s.t, s.extra, function)
	}
	pgtest.Rewrite(s.t, s.extra, "rate_limit_all", "FOR UPDATE SKIP LOCKED", "OFFSET 0")
	pgtest.Rewrite(s.t, s.extra, "rate_limit_all", "FOR UPDATE", "OFFSET 0")
	const writing = "IF writes THEN"
	pgtest.Rewrite(s.t, s.extra, "rate_limit_all", writing, writing+" "+beforeWriting+";")
}
