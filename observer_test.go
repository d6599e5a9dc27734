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

// Each limiter of an AllowAll is told of its part, with the time that all of it took; refunds and grants are no decisions.
func TestObserverOfSeveralLimits(t *testing.T) {
	t.Parallel()
	var decisions []DecisionEvent
	db := pgtest.New(t)
	limiter := func(name string, limit int64, observer *Observer) *Limiter {
		return newLimiter(t, db.Pool, Config{Name: name, Policy: FixedWindow{Limit: limit, Window: year}, Timeout: amply, Observer: observer})
	}
	observer := &Observer{Decision: func(e DecisionEvent) { decisions = append(decisions, e) }}
	silent, address, user := limiter("silent", 9, nil), limiter("address", 9, observer), limiter("user", 4, observer)
	deaf := limiter("deaf", 9, &Observer{})
	three := []Request{silent.Request("personal", 1), address.Request("personal", 2), user.Request("personal", 3), deaf.Request("personal", 1)}
	// requireTold requires one event of each limiter that has an observer, and returns them.
	requireTold := func() (ofAddress, ofUser DecisionEvent) {
		t.Helper()
		require.Len(t, decisions, 2)
		ofAddress, ofUser = decisions[0], decisions[1]
		decisions = nil
		require.Equal(t, "address", ofAddress.Limiter)
		require.Equal(t, "user", ofUser.Limiter)
		require.Equal(t, ofAddress.Latency, ofUser.Latency)
		require.Positive(t, ofUser.Latency)
		require.NotContains(t, fmt.Sprintf("%+v", ofAddress)+fmt.Sprintf("%+v", ofUser), "personal")
		return ofAddress, ofUser
	}
	calls := map[string]func(requests ...Request) (Results, error){
		"AllowAll": func(requests ...Request) (Results, error) { return AllowAll(t.Context(), requests...) },
		"AllowAllTx": func(requests ...Request) (results Results, err error) {
			tx := begin(t, db)
			results, err = AllowAllTx(t.Context(), tx, requests...)
			require.NoError(t, tx.Commit(t.Context()))
			return results, err
		},
	}
	for name, allowAll := range calls {
		results, err := allowAll(three...)
		require.NoError(t, err, name)
		ofAddress, ofUser := requireTold()
		require.Equal(t, "allowed", ofAddress.Outcome())
		require.Equal(t, "allowed", ofUser.Outcome())
		require.Equal(t, []int64{2, 3}, []int64{ofAddress.Cost, ofUser.Cost})
		require.Equal(t, []Result{ofAddress.Result, ofUser.Result}, results.Each[1:3])
		taken := results.Each[2]

		results, err = allowAll(three...)
		require.NoError(t, err, name)
		ofAddress, ofUser = requireTold()
		require.Equal(t, "allowed", ofAddress.Outcome(), "it had room")
		require.Zero(t, ofAddress.Cost, "but nothing was taken")
		require.Equal(t, "denied", ofUser.Outcome())
		require.EqualValues(t, 3, ofUser.Cost)
		require.Equal(t, []Result{ofAddress.Result, ofUser.Result}, results.Each[1:3])

		_, err = allowAll(address.Request("personal", 1), user.Request("", 2), Request{})
		require.ErrorIs(t, err, ErrInvalidKey)
		ofAddress, ofUser = requireTold()
		require.Equal(t, []int64{1, 2}, []int64{ofAddress.Cost, ofUser.Cost})
		require.Equal(t, err, ofAddress.Err)
		require.Equal(t, err, ofUser.Err)

		_, err = allowAll()
		require.Error(t, err)
		require.Empty(t, decisions)

		_, err = user.Refund(t.Context(), taken)
		require.NoError(t, err)
		_, err = user.Grant(t.Context(), "other", 3)
		require.NoError(t, err)
		require.Empty(t, decisions)
	}
}

// What is asked for those who wait is told, and what they take is told once.
func TestObserverOfWaiters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []DecisionEvent
		db := newModelDB(FixedWindow{Limit: 3, Window: time.Hour})
		l := newLimiter(t, db, Config{Name: "test", Policy: db.policy, Observer: &Observer{
			Decision: func(e DecisionEvent) { decisions = append(decisions, e) },
		}})
		_, err := l.AllowN(t.Context(), "personal", 3)
		require.NoError(t, err)
		for range 3 {
			go func() { _, _ = l.Wait(t.Context(), "personal") }()
			synctest.Wait()
		}
		elapse(2 * time.Hour)
		synctest.Wait()
		var outcomes []string
		taken := int64(0)
		for _, e := range decisions {
			outcomes = append(outcomes, e.Outcome())
			if e.Result.Allowed {
				taken += e.Cost
			}
		}
		require.Equal(t, []string{"allowed", "denied", "allowed", "allowed"}, outcomes)
		require.EqualValues(t, 6, taken)
		require.EqualValues(t, 2, decisions[3].Cost, "the two behind the first, in one")
	})
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
