package ratelimit_test

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

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestObserver(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []ratelimit.DecisionEvent
		var batches []ratelimit.StatementEvent
		db := limitertest.NewModelDB()
		slow := func(context.Context) error {
			limitertest.Elapse(3 * time.Millisecond)
			return nil
		}
		db.Set(slow)
		l := limitertest.New(
			t,
			db,
			ratelimit.Config{
				Name:      "test",
				Policy:    ratelimit.FixedWindow{Limit: 2, Window: time.Hour},
				OnFailure: ratelimit.FailOpen(),
			},
			ratelimit.ClientConfig{
				Observer: &ratelimit.Observer{
					Decision:  func(e ratelimit.DecisionEvent) { decisions = append(decisions, e) },
					Statement: func(e ratelimit.StatementEvent) { batches = append(batches, e) },
				},
			},
		)
		next := func(outcome string, source ratelimit.Source, cost int64, latency time.Duration) ratelimit.DecisionEvent {
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
		next("allowed", ratelimit.SourceDatabase, 2, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "personal")
		next("denied", ratelimit.SourceDatabase, 1, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "personal")
		next("denied", ratelimit.SourceCachedDenial, 1, 0)
		_, _ = l.Peek(t.Context(), "personal")
		next("denied", ratelimit.SourceDatabase, 0, 3*time.Millisecond)
		_, _ = l.Allow(t.Context(), "")
		require.ErrorIs(t, next("error", ratelimit.SourceDatabase, 1, 0).Err, ratelimit.ErrInvalidKey)
		db.Set(limitertest.TurnedAway)
		_, _ = l.Allow(t.Context(), "personal 2")
		next("allowed", ratelimit.SourceFailedOpen, 1, 0)
		db.Set(limitertest.SQLState("42883"))
		_, _ = l.Allow(t.Context(), "personal 2")
		require.ErrorIs(t, next("error", ratelimit.SourceDatabase, 1, 0).Err, ratelimit.ErrNotMigrated)
		require.Empty(t, decisions)

		require.Len(t, batches, 5)
		for i, b := range batches {
			if i < 3 {
				require.Equal(t, ratelimit.StatementEvent{Limiter: "test", Size: 1, Latency: 3 * time.Millisecond}, b)
			}
		}
		require.ErrorIs(t, batches[3].Err, ratelimit.ErrUnavailable)
		require.ErrorIs(t, batches[4].Err, ratelimit.ErrNotMigrated)
	})
}

// StatementEvents count the calls in a statement, and the calls that wait for a later statement.
func TestObserverOfBatches(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var batches []ratelimit.StatementEvent
		db := limitertest.NewModelDB()
		release := make(chan struct{})
		db.Set(func(context.Context) error {
			<-release
			return nil
		})
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{
			MaxInFlight: 1,
			MaxBatch:    10,
			Observer: &ratelimit.Observer{
				Statement: func(e ratelimit.StatementEvent) { batches = append(batches, e) }, // no other function is set
			},
		})
		for i := range 26 {
			go func() { _, _ = l.Allow(t.Context(), fmt.Sprint("personal ", i)) }()
			synctest.Wait()
		}
		close(release)
		synctest.Wait()
		for i, want := range []ratelimit.StatementEvent{{Size: 1, Queued: 0}, {Size: 10, Queued: 15}, {Size: 10, Queued: 5}, {Size: 5, Queued: 0}} {
			want.Limiter = "test"
			require.Equal(t, want, batches[i])
		}
		require.Len(t, batches, 4)
	})
}

func TestObserverOfTransactions(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	var decisions []ratelimit.DecisionEvent
	db := pgtest.New(t)
	l := limitertest.New(t, db.Pool, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{
		Observer: &ratelimit.Observer{
			Decision: func(e ratelimit.DecisionEvent) { decisions = append(decisions, e) },
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

// AllowAll reports an event for each limiter, with the duration of the whole call. Refunds and grants are not
// decisions.
func TestObserverOfSeveralLimits(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")
	var decisions []ratelimit.DecisionEvent
	db := pgtest.New(t)
	observer := &ratelimit.Observer{Decision: func(e ratelimit.DecisionEvent) { decisions = append(decisions, e) }}
	client := limitertest.NewClient(t, db.Pool, ratelimit.ClientConfig{Observer: observer})
	address := limitertest.Of(t, client, ratelimit.Config{Name: "address", Policy: ratelimit.FixedWindow{Limit: 9, Window: limitertest.Year}})
	user := limitertest.Of(t, client, ratelimit.Config{Name: "user", Policy: ratelimit.FixedWindow{Limit: 4, Window: limitertest.Year}})
	both := []ratelimit.Request{address.Request("personal", 2), user.Request("personal", 3)}
	// requireTold requires one event for each limiter, and returns them.
	requireTold := func() (ofAddress, ofUser ratelimit.DecisionEvent) {
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
	calls := map[string]func(requests ...ratelimit.Request) (ratelimit.Results, error){
		"AllowAll": func(requests ...ratelimit.Request) (ratelimit.Results, error) {
			return ratelimit.AllowAll(t.Context(), requests...)
		},
		"AllowAllTx": func(requests ...ratelimit.Request) (results ratelimit.Results, err error) {
			tx := pgtest.Begin(t, db)
			results, err = limitertest.AllowAllTx(t.Context(), tx, requests...)
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
		require.Equal(t, []ratelimit.Result{ofAddress.Result, ofUser.Result}, results.Each)
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
		require.Equal(t, []ratelimit.Result{ofAddress.Result, ofUser.Result}, results.Each)

		_, err = allowAll(address.Request("personal", 1), user.Request("", 2), ratelimit.Request{})
		require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
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

// Wait reports each of its statements, but each unit that it takes is in only one event.
func TestObserverOfWaiters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var decisions []ratelimit.DecisionEvent
		db := limitertest.NewModelDB()
		l := limitertest.New(
			t,
			db,
			ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 3, Window: time.Hour}},
			ratelimit.ClientConfig{
				Observer: &ratelimit.Observer{
					Decision: func(e ratelimit.DecisionEvent) { decisions = append(decisions, e) },
				},
			},
		)
		_, err := l.AllowN(t.Context(), "personal", 3)
		require.NoError(t, err)
		for range 3 {
			go func() { _, _ = l.Wait(t.Context(), "personal") }()
			synctest.Wait()
		}
		limitertest.Elapse(2 * time.Hour)
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
		"invalid_key":           &ratelimit.KeyError{},
		"invalid_cost":          &ratelimit.CostError{Cost: 5, Limit: 3},
		"invalid_request":       &ratelimit.RequestError{Err: ratelimit.ErrSameKey},
		"would_exceed_deadline": &ratelimit.WaitError{},
		"not_migrated":          pg.Translate(limitertest.SQLState("42P01")(nil), true),
		"not_permitted":         pg.Translate(limitertest.SQLState("42501")(nil), true),
		"prepared_statements":   pg.Translate(limitertest.SQLState("26000")(nil), true),
		"setup":                 pg.Translate(limitertest.Fatal("28P01")(nil), false),
		"read_only":             pg.Translate(limitertest.SQLState("25006")(nil), true),
		"timeout":               pg.Translate(context.DeadlineExceeded, true),
		"unavailable":           broken,
		"context":               engine.GaveUp(context.DeadlineExceeded),
		"other":                 pg.Translate(limitertest.SQLState("XX000")(nil), true),
	} {
		require.Equal(t, kind, ratelimit.ErrorKind(err), "%v", err)
		require.Equal(t, kind, ratelimit.ErrorKind(wrapped(err)), "%v", err)
	}
	require.Equal(t, "invalid_cost", ratelimit.ErrorKind(&ratelimit.CostError{Cost: -1, Limit: 3}))
	require.Equal(t, "invalid_hold", ratelimit.ErrorKind(&ratelimit.HoldError{}))
	require.Equal(t, "hold_unknown", ratelimit.ErrorKind(ratelimit.ErrHoldUnknown))
	require.Equal(t, "hold_ended", ratelimit.ErrorKind(ratelimit.ErrHoldEnded))
	require.Equal(t, "context", ratelimit.ErrorKind(engine.GaveUp(context.Canceled)))
	require.Equal(t, "invalid_key", ratelimit.ErrorKind(&ratelimit.RequestError{Err: &ratelimit.KeyError{}}))
	require.Equal(t, "invalid_cost", ratelimit.ErrorKind(&ratelimit.RequestError{Err: &ratelimit.CostError{Cost: 5, Limit: 3}}))
}

// A Result in JSON names its source in words.
func TestResultInJSON(t *testing.T) {
	t.Parallel()
	for source := ratelimit.SourceDatabase; source <= ratelimit.SourcePolicy; source++ {
		text, err := json.Marshal(ratelimit.Result{Source: source})
		require.NoError(t, err)
		require.Contains(t, string(text), fmt.Sprintf(`"Source":%q`, source))
		var back ratelimit.Result
		require.NoError(t, json.Unmarshal(text, &back))
		require.Equal(t, source, back.Source)
	}
	require.ErrorContains(t, json.Unmarshal([]byte(`{"Source":"hearsay"}`), &ratelimit.Result{}), `"hearsay" is no Source`)
	text, err := json.Marshal(ratelimit.Result{Source: ratelimit.SourceCachedDenial})
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
	for mode, text := range map[ratelimit.FailureMode]string{
		{}:                           "return error",
		ratelimit.ReturnError():      "return error",
		ratelimit.FailOpen():         "fail open",
		ratelimit.FailClosed():       "fail closed",
		ratelimit.FallbackLocal(0.2): "fall back to 0.2 of the limit in each process",
	} {
		require.Equal(t, text, mode.String())
		l := limitertest.New(t, limitertest.NewModelDB(), ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: mode})
		require.Equal(t, mode, l.Config().OnFailure)
	}
	require.NotEqual(t, ratelimit.FailureMode{}, ratelimit.ReturnError(), "a choice can be told from none")

	seen := map[string]bool{}
	for source := ratelimit.SourceDatabase; source <= ratelimit.SourcePolicy; source++ {
		seen[source.String()] = true
		require.False(t, strings.HasPrefix(source.String(), "Source("))
	}
	require.Len(t, seen, 6)
	require.Equal(t, "Source(9)", ratelimit.Source(9).String())
}
