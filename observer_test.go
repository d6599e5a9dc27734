package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []DecisionEvent
		var batches []BatchEvent
		db := newModelDB(FixedWindow{Limit: 2, Window: time.Hour})
		slow := func(context.Context) error {
			elapse(3 * time.Millisecond)
			return nil
		}
		db.set(slow)
		l := newLimiter(t, db, Config{Name: "test", Policy: db.policy, OnFailure: FailOpen(), Observer: &Observer{
			Decision: func(e DecisionEvent) { decisions = append(decisions, e) },
			Batch:    func(e BatchEvent) { batches = append(batches, e) },
		}})
		next := func(outcome string, source Source, cost int64, latency time.Duration) DecisionEvent {
			t.Helper()
			require.NotEmpty(t, decisions)
			e := decisions[0]
			decisions = decisions[1:]
			require.Equal(t, "test", e.Limiter)
			require.Equal(t, outcome, e.Outcome())
			require.Equal(t, outcome == "allowed", e.Result.Allowed)
			require.Equal(t, outcome == "error", e.Err != nil)
			require.Equal(t, source, e.Result.Source)
			require.Equal(t, cost, e.Cost)
			require.Equal(t, latency, e.Latency)
			return e
		}
		_, _ = l.AllowN(t.Context(), "personal", 2)
		next("allowed", SourceDatabase, 2, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "personal")
		next("denied", SourceDatabase, 1, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "personal")
		next("denied", SourceCachedDenial, 1, 0)
		_, _ = l.Peek(t.Context(), "personal")
		next("denied", SourceDatabase, 0, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "")
		require.ErrorIs(t, next("error", SourceDatabase, 1, 0).Err, ErrInvalidKey)
		db.set(turnedAway)
		_, _ = l.Allow(t.Context(), "personal 2")
		next("allowed", SourceFailedOpen, 1, 0)
		db.set(sqlState("42883"))
		_, _ = l.Allow(t.Context(), "personal 2")
		require.ErrorIs(t, next("error", SourceDatabase, 1, 0).Err, ErrNotMigrated)
		require.Empty(t, decisions)

		require.Len(t, batches, 5)
		for i, b := range batches {
			if i < 3 {
				require.Equal(t, BatchEvent{Limiter: "test", Size: 1, Latency: 3 * time.Millisecond}, b)
			}
		}
		require.ErrorIs(t, batches[3].Err, ErrUnavailable)
		require.ErrorIs(t, batches[4].Err, ErrNotMigrated)
	})
}

// How many calls leave together, and how many have to wait for the next statement.
func TestObserverOfBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var batches []BatchEvent
		db := newModelDB(hourly)
		release := make(chan struct{})
		db.set(func(context.Context) error {
			<-release
			return nil
		})
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly, MaxInFlight: 1, MaxBatch: 10, Observer: &Observer{
			Batch: func(e BatchEvent) { batches = append(batches, e) }, // and no other
		}})
		for i := range 26 {
			go func() { _, _ = l.Allow(t.Context(), fmt.Sprint("personal ", i)) }()
			synctest.Wait()
		}
		close(release)
		synctest.Wait()
		for i, want := range []BatchEvent{{Size: 1, Queued: 0}, {Size: 10, Queued: 15}, {Size: 10, Queued: 5}, {Size: 5, Queued: 0}} {
			want.Limiter = "test"
			require.Equal(t, want, batches[i])
		}
		require.Len(t, batches, 4)
	})
}

func TestObserverOfTransactions(t *testing.T) {
	t.Parallel()
	var decisions []DecisionEvent
	db := pgtest.New(t)
	l := newLimiter(t, db.Pool, Config{Name: "test", Policy: hourly, Timeout: amply, Observer: &Observer{
		Decision: func(e DecisionEvent) { decisions = append(decisions, e) },
	}})
	tx := begin(t, db)
	_, err := l.AllowNTx(t.Context(), tx, "personal", 3)
	require.NoError(t, err)
	_, err = l.AllowTx(t.Context(), tx, "")
	require.Error(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Len(t, decisions, 2)
	require.EqualValues(t, 3, decisions[0].Cost)
	require.Positive(t, decisions[0].Latency)
	require.EqualValues(t, 97, decisions[0].Result.Remaining)
	require.Equal(t, "error", decisions[1].Outcome())
	require.NotContains(t, fmt.Sprintf("%+v", decisions), "personal")
}

func TestErrorKinds(t *testing.T) {
	t.Parallel()
	broken := storeError(errors.New("broken"), true)
	for kind, err := range map[string]error{
		"":                    nil,
		"invalid_key":         &KeyError{},
		"invalid_cost":        &CostError{Cost: 5, Limit: 3},
		"not_migrated":        storeError(sqlState("42P01")(nil), true),
		"not_permitted":       storeError(sqlState("42501")(nil), true),
		"prepared_statements": storeError(sqlState("26000")(nil), true),
		"read_only":           storeError(sqlState("25006")(nil), true),
		"timeout":             storeError(context.DeadlineExceeded, true),
		"unavailable":         broken,
		"context":             waitError(context.DeadlineExceeded),
		"other":               storeError(sqlState("XX000")(nil), true),
	} {
		require.Equal(t, kind, ErrorKind(err), "%v", err)
		require.Equal(t, kind, ErrorKind(wrapped(err)), "%v", err)
	}
	require.Equal(t, "invalid_cost", ErrorKind(&CostError{Cost: -1, Limit: 3}))
	require.Equal(t, "context", ErrorKind(waitError(context.Canceled)))
}

func wrapped(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("of the application: %w", err)
}

func TestFailureModes(t *testing.T) {
	t.Parallel()
	for mode, text := range map[FailureMode]string{
		{}:                 "return error",
		ReturnError():      "return error",
		FailOpen():         "fail open",
		FailClosed():       "fail closed",
		FallbackLocal(0.2): "fall back to 0.2 of the limit in each process",
	} {
		require.Equal(t, text, mode.String())
		l := newLimiter(t, newModelDB(hourly), Config{Name: "test", Policy: hourly, OnFailure: mode})
		require.Equal(t, mode, l.OnFailure())
	}
	require.NotEqual(t, FailureMode{}, ReturnError(), "a choice can be told from none")

	seen := map[string]bool{}
	for source := SourceDatabase; source <= SourceFailedClosed; source++ {
		seen[source.String()] = true
		require.False(t, strings.HasPrefix(source.String(), "Source("))
	}
	require.Len(t, seen, 5)
	require.Equal(t, "Source(9)", Source(9).String())
}

// What it costs to have decisions observed, beside BenchmarkCachedDenial.
func BenchmarkObservedDenial(b *testing.B) {
	l := deniedLimiter(b, SlidingWindow{Limit: 10, Window: time.Hour})
	calls := 0
	l.config.Observer = &Observer{Decision: func(DecisionEvent) { calls++ }}
	b.ReportAllocs()
	for b.Loop() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			b.Fatal("not denied")
		}
	}
}
