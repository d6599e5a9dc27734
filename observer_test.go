package ratelimit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []DecisionEvent
		var batches []StatementEvent
		db := newModelDB()
		slow := func(context.Context) error {
			elapse(3 * time.Millisecond)
			return nil
		}
		db.set(slow)
		l := newLimiter(
			t,
			db,
			Config{
				Name:      "test",
				Policy:    FixedWindow{Limit: 2, Window: time.Hour},
				OnFailure: FailOpen(),
			},
			ClientConfig{
				Observer: &Observer{
					Decision:  func(e DecisionEvent) { decisions = append(decisions, e) },
					Statement: func(e StatementEvent) { batches = append(batches, e) },
				},
			},
		)
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
				require.Equal(t, StatementEvent{Limiter: "test", Size: 1, Latency: 3 * time.Millisecond}, b)
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
		var batches []StatementEvent
		db := newModelDB()
		release := make(chan struct{})
		db.set(func(context.Context) error {
			<-release
			return nil
		})
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly}, ClientConfig{
			MaxInFlight: 1,
			MaxBatch:    10,
			Observer: &Observer{
				Statement: func(e StatementEvent) { batches = append(batches, e) }, // and no other
			},
		})
		for i := range 26 {
			go func() { _, _ = l.Allow(t.Context(), fmt.Sprint("personal ", i)) }()
			synctest.Wait()
		}
		close(release)
		synctest.Wait()
		for i, want := range []StatementEvent{{Size: 1, Queued: 0}, {Size: 10, Queued: 15}, {Size: 10, Queued: 5}, {Size: 5, Queued: 0}} {
			want.Limiter = "test"
			require.Equal(t, want, batches[i])
		}
		require.Len(t, batches, 4)
	})
}

func TestObserverOfTransactions(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	var decisions []DecisionEvent
	db := pgtest.New(t)
	l := newLimiter(t, db.Pool, Config{Name: "test", Policy: hourly}, ClientConfig{
		Observer: &Observer{
			Decision: func(e DecisionEvent) { decisions = append(decisions, e) },
		},
	})
	tx := pgtest.Begin(t, db)
	_, err := l.WithTx(tx).AllowN(t.Context(), "personal", 3)
	require.NoError(t, err)
	_, err = l.WithTx(tx).Allow(t.Context(), "")
	require.Error(t, err)
	require.NoError(t, tx.Rollback(t.Context()))
	require.Len(t, decisions, 2)
	require.EqualValues(t, 3, decisions[0].Cost)
	require.Positive(t, decisions[0].Latency)
	require.EqualValues(t, 97, decisions[0].Result.Remaining)
	require.Equal(t, "error", decisions[1].Outcome())
	require.NotContains(t, fmt.Sprintf("%+v", decisions), "personal")
}

// Each limiter of an AllowAll is told of its part, with the time that all of it took. Refunds and grants are no
// decisions.
func TestObserverOfSeveralLimits(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	var decisions []DecisionEvent
	db := pgtest.New(t)
	observer := &Observer{Decision: func(e DecisionEvent) { decisions = append(decisions, e) }}
	client := newClient(t, db.Pool, ClientConfig{Observer: observer})
	address := client.limiter(t, Config{Name: "address", Policy: FixedWindow{Limit: 9, Window: year}})
	user := client.limiter(t, Config{Name: "user", Policy: FixedWindow{Limit: 4, Window: year}})
	both := []Request{address.Request("personal", 2), user.Request("personal", 3)}
	// requireTold requires one event of each limiter, and returns them.
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
			tx := pgtest.Begin(t, db)
			results, err = allowAllTx(t.Context(), tx, requests...)
			require.NoError(t, tx.Commit(t.Context()))
			return results, err
		},
	}
	for name, allowAll := range calls {
		results, err := allowAll(both...)
		require.NoError(t, err, name)
		ofAddress, ofUser := requireTold()
		require.Equal(t, "allowed", ofAddress.Outcome())
		require.Equal(t, "allowed", ofUser.Outcome())
		require.Equal(t, []int64{2, 3}, []int64{ofAddress.Cost, ofUser.Cost})
		require.Equal(t, []Result{ofAddress.Result, ofUser.Result}, results.Each)
		taken := results.Each[1]

		results, err = allowAll(both...)
		require.NoError(t, err, name)
		ofAddress, ofUser = requireTold()
		require.Equal(t, "allowed", ofAddress.Outcome(), "it had room")
		require.Zero(t, ofAddress.Cost, "but nothing was taken")
		require.Equal(t, "denied", ofUser.Outcome())
		require.EqualValues(t, 3, ofUser.Cost)
		require.False(t, results.Each[0].Allowed)
		ofAddress.Result.Allowed = false
		require.Equal(t, []Result{ofAddress.Result, ofUser.Result}, results.Each)

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

// What is asked for waiting callers is told, and what they take is told once.
func TestObserverOfWaiters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []DecisionEvent
		db := newModelDB()
		l := newLimiter(
			t,
			db,
			Config{Name: "test", Policy: FixedWindow{Limit: 3, Window: time.Hour}},
			ClientConfig{
				Observer: &Observer{
					Decision: func(e DecisionEvent) { decisions = append(decisions, e) },
				},
			},
		)
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
	broken := pg.Translate(errors.New("broken"), true)
	for kind, err := range map[string]error{
		"":                      nil,
		"invalid_key":           &KeyError{},
		"invalid_cost":          &CostError{Cost: 5, Limit: 3},
		"invalid_request":       &RequestError{Err: errSameKey},
		"would_exceed_deadline": &WaitError{},
		"not_migrated":          pg.Translate(sqlState("42P01")(nil), true),
		"not_permitted":         pg.Translate(sqlState("42501")(nil), true),
		"prepared_statements":   pg.Translate(sqlState("26000")(nil), true),
		"setup":                 pg.Translate(fatal("28P01")(nil), false),
		"read_only":             pg.Translate(sqlState("25006")(nil), true),
		"timeout":               pg.Translate(context.DeadlineExceeded, true),
		"unavailable":           broken,
		"context":               gaveUp(context.DeadlineExceeded),
		"other":                 pg.Translate(sqlState("XX000")(nil), true),
	} {
		require.Equal(t, kind, ErrorKind(err), "%v", err)
		require.Equal(t, kind, ErrorKind(wrapped(err)), "%v", err)
	}
	require.Equal(t, "invalid_cost", ErrorKind(&CostError{Cost: -1, Limit: 3}))
	require.Equal(t, "context", ErrorKind(gaveUp(context.Canceled)))
	require.Equal(t, "invalid_key", ErrorKind(&RequestError{Err: &KeyError{}}))
	require.Equal(t, "invalid_cost", ErrorKind(&RequestError{Err: &CostError{Cost: 5, Limit: 3}}))
}

// A Result in JSON says in words how it came about.
func TestResultInJSON(t *testing.T) {
	t.Parallel()
	for source := SourceDatabase; source <= SourcePolicy; source++ {
		text, err := json.Marshal(Result{Source: source})
		require.NoError(t, err)
		require.Contains(t, string(text), fmt.Sprintf(`"Source":%q`, source))
		var back Result
		require.NoError(t, json.Unmarshal(text, &back))
		require.Equal(t, source, back.Source)
	}
	require.ErrorContains(t, json.Unmarshal([]byte(`{"Source":"hearsay"}`), &Result{}), `"hearsay" is no Source`)
	text, err := json.Marshal(Result{Source: SourceCachedDenial})
	require.NoError(t, err)
	require.Contains(t, string(text), `"Source":"cached denial"`)
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
		l := newLimiter(t, newModelDB(), Config{Name: "test", Policy: hourly, OnFailure: mode})
		require.Equal(t, mode, l.Config().OnFailure)
	}
	require.NotEqual(t, FailureMode{}, ReturnError(), "a choice can be told from none")

	seen := map[string]bool{}
	for source := SourceDatabase; source <= SourcePolicy; source++ {
		seen[source.String()] = true
		require.False(t, strings.HasPrefix(source.String(), "Source("))
	}
	require.Len(t, seen, 6)
	require.Equal(t, "Source(9)", Source(9).String())
}

// What it costs to have decisions observed, beside BenchmarkCachedDenial.
func BenchmarkObservedDenial(b *testing.B) {
	calls := 0
	observer := &Observer{Decision: func(DecisionEvent) { calls++ }}
	l := deniedLimiter(b, SlidingWindow{Limit: 10, Window: time.Hour}, observer)
	b.ReportAllocs()
	for b.Loop() {
		if result, err := l.Allow(context.Background(), "user:123"); err != nil || result.Allowed {
			b.Fatal("not denied")
		}
	}
}
