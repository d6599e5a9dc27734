package httplimit

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// faultyDB is a database whose next answers can be errors, or late.
type faultyDB struct {
	ratelimit.DBTX

	failures atomic.Int64
	late     atomic.Pointer[chan struct{}] // if not nil, the next answer comes when the channel is closed
}

var errAway = errors.New("the connection is closed")

func (d *faultyDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.failures.Load() > 0 && d.failures.Add(-1) >= 0 {
		return nil, errAway
	}
	if late := d.late.Swap(nil); late != nil {
		<-*late
	}
	return d.DBTX.Query(ctx, sql, args...)
}

// tokens returns a limiter of 100 tokens.
func tokens(t *testing.T, onFailure ratelimit.FailureMode) (*ratelimit.Limiter, *faultyDB) {
	t.Helper()
	db := &faultyDB{DBTX: pgtest.New(t).Pool}
	return limitertest.New(t, db, ratelimit.Config{
		Name: "tokens", Policy: ratelimit.FixedWindow{Limit: 100, Window: time.Hour}, OnFailure: onFailure,
	}), db
}

// requireLeft waits until so much of the limit is left, and nothing is held. On a busy machine the settlement goes on
// after the response.
func requireLeft(t *testing.T, limiter *ratelimit.Limiter, want int64) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		left, held := remaining(t, limiter)
		return left == want && held == 0
	})
}

// remaining returns what is left of the limit, and what is held.
func remaining(t *testing.T, limiter *ratelimit.Limiter) (left, held int64) {
	t.Helper()
	result, err := limiter.Peek(t.Context(), "192.0.2.1")
	require.NoError(t, err)
	return result.Remaining, result.Held
}

// A request holds its cost while its handler runs. Afterwards, what Settle has said counts, or what Charge decides.
func TestHoldFor(t *testing.T) {
	t.Parallel()

	settles := func(used int64) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			w.WriteHeader(http.StatusTeapot) // which only ChargeSuccesses does not charge
			settlement, err := Settle(r.Context(), used)
			if err != nil || settlement.Used != used {
				panic(errors.Join(err, errors.New("settled with another number")))
			}
		}
	}
	writes := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }
	}
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		charge  func(int) bool
		used    int64
	}{
		"less than the cost":         {settles(7), nil, 7},
		"more than the cost":         {settles(55), nil, 55},
		"nothing":                    {settles(0), nil, 0},
		"not settled":                {writes(500), nil, 40},
		"not settled, and charged":   {writes(200), ChargeSuccesses, 40},
		"not settled, not charged":   {writes(500), ChargeSuccesses, 0},
		"settled, charged or not":    {settles(7), ChargeSuccesses, 7},
		"a handler that says little": {func(http.ResponseWriter, *http.Request) {}, ChargeFailures, 40},
		"twice": {func(_ http.ResponseWriter, r *http.Request) {
			_, _ = Settle(r.Context(), 7)
			_, _ = Settle(r.Context(), 9)
		}, nil, 7},
		"a number that is refused, and another one": {func(_ http.ResponseWriter, r *http.Request) {
			for _, used := range []int64{-1, 1_000_000, 7} {
				_, _ = Settle(r.Context(), used)
			}
		}, nil, 7},
	} {
		limiter, _ := tokens(t, ratelimit.ReturnError())
		handler := limited(t, limiter, Config{
			Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute, Charge: test.charge, Headers: XRateLimit,
		}, func(w http.ResponseWriter, r *http.Request) {
			left, held := remaining(t, limiter)
			if err := Extend(r.Context(), 2*time.Minute); err != nil || left != 60 || held != 40 {
				t.Error(name, left, held, err)
			}
			test.handler(w, r)
		})
		serve(t, handler)
		requireLeft(t, limiter, 100-test.used)
	}
}

func TestHoldForDenies(t *testing.T) {
	t.Parallel()

	limiter, _ := tokens(t, ratelimit.ReturnError())
	config := Config{Cost: func(*http.Request) int64 { return 60 }, HoldFor: 30 * time.Second}
	var inner answer
	serve(t, limited(t, limiter, config, func(http.ResponseWriter, *http.Request) {
		inner = serve(t, limited(t, limiter, config, nil))
	}))
	require.Equal(t, http.StatusTooManyRequests, inner.status)
	require.Equal(t, "30", inner.header.Get("Retry-After")) // then the hold ends
}

// After a panic, the whole cost counts.
func TestHoldForAPanic(t *testing.T) {
	t.Parallel()

	for _, charge := range []func(int) bool{nil, ChargeSuccesses} {
		limiter, _ := tokens(t, ratelimit.ReturnError())
		handler := limited(t, limiter, Config{
			Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute, Charge: charge,
		}, func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusInternalServerError)
			panic(http.ErrAbortHandler)
		})
		require.PanicsWithValue(t, http.ErrAbortHandler, func() { serve(t, handler) })
		requireLeft(t, limiter, 60)
	}
}

// A handler whose client has gone settles, and gets the answer.
func TestSettleAfterTheClientHasGone(t *testing.T) {
	t.Parallel()

	limiter, _ := tokens(t, ratelimit.ReturnError())
	ctx, leave := context.WithCancel(t.Context())
	handler := limited(t, limiter, Config{
		Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute,
	}, func(_ http.ResponseWriter, r *http.Request) {
		leave()
		settlement, err := Settle(r.Context(), 7)
		if err != nil || settlement.Used != 7 {
			t.Error(settlement, err)
		}
	})
	serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	requireLeft(t, limiter, 93)
}

// boundedDB is a database that looks at the deadlines of statements.
type boundedDB struct {
	ratelimit.DBTX

	unbounded atomic.Bool // whether a statement had no deadline
}

func (d *boundedDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if _, ok := ctx.Deadline(); !ok {
		d.unbounded.Store(true)
	}
	return d.DBTX.Query(ctx, sql, args...)
}

// The end of its context does not end a settlement, but the client's Timeout does.
func TestSettleHasADeadline(t *testing.T) {
	t.Parallel()

	db := &boundedDB{DBTX: pgtest.New(t).Pool}
	limiter := limitertest.New(t, db, ratelimit.Config{Name: "tokens", Policy: limitertest.Hourly})
	result, err := limiter.Hold(t.Context(), "192.0.2.1", 1, time.Minute)
	require.NoError(t, err)
	ctx, leave := context.WithCancel(context.WithValue(t.Context(), heldKey{}, &held{hold: result.Hold}))
	leave()
	_, err = Settle(ctx, 1)
	require.NoError(t, err)
	require.False(t, db.unbounded.Load())
}

// A settlement that has failed is sent again after the handler has returned.
func TestSettleFails(t *testing.T) {
	t.Parallel()

	limiter, db := tokens(t, ratelimit.ReturnError())
	handler := limited(t, limiter, Config{
		Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute,
	}, func(_ http.ResponseWriter, r *http.Request) {
		db.failures.Store(1)
		_, err := Settle(r.Context(), 7)
		if !errors.Is(err, errAway) {
			t.Error(err)
		}
	})
	serve(t, handler)
	requireLeft(t, limiter, 93)
}

// A slow settlement goes on after the response has ended.
func TestSettlementIsSlow(t *testing.T) {
	t.Parallel()

	limiter, db := tokens(t, ratelimit.ReturnError())
	late := make(chan struct{})
	var hold *held
	handler := limited(t, limiter, Config{
		Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute,
	}, func(_ http.ResponseWriter, r *http.Request) {
		db.late.Store(&late)
		hold, _ = r.Context().Value(heldKey{}).(*held)
	})
	ctx, leave := context.WithCancel(t.Context())
	serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	leave()
	close(late)
	requireLeft(t, limiter, 60)
	testkit.WaitUntil(t, func() bool { return !hold.open() }) // the call has not given up meanwhile
}

// While Postgres is away, OnFailure decides, and there is nothing to settle.
func TestHoldForWhilePostgresIsAway(t *testing.T) {
	t.Parallel()

	for mode, status := range map[ratelimit.FailureMode]int{
		ratelimit.FailOpen(): 200, ratelimit.FallbackLocal(1): 200, ratelimit.FailClosed(): 503,
		ratelimit.ReturnError(): 503,
	} {
		limiter, db := tokens(t, mode)
		db.failures.Store(1)
		handler := limited(t, limiter, Config{HoldFor: time.Minute}, func(w http.ResponseWriter, r *http.Request) {
			_, err := Settle(r.Context(), 7)
			if err := errors.Join(err, Extend(r.Context(), time.Minute)); err != nil {
				t.Error(err)
			}
			_, _ = io.WriteString(w, "through")
		})
		require.Equal(t, status, serve(t, handler).status)
		requireLeft(t, limiter, 100)
	}
}

// An empty hold of an outage says nothing about whether settlements count again.
func TestEmptyHoldAfterAFailedSettlement(t *testing.T) {
	t.Parallel()

	limiter, _ := tokens(t, ratelimit.ReturnError())
	var log testkit.Journal
	m := &middleware{config: Config{Logger: log.Logger()}}
	m.refunds.failing.Store(1) // settlements have failed since 1970
	empty, err := limiter.HoldFromText(t.Context(), "")
	require.NoError(t, err)
	m.end(t.Context(), &held{hold: empty}, 1)
	require.Empty(t, log.Lines())
	result, err := limiter.Hold(t.Context(), "192.0.2.1", 1, time.Minute)
	require.NoError(t, err)
	m.end(t.Context(), &held{hold: result.Hold}, 1)
	testkit.WaitUntil(t, func() bool { return strings.Contains(log.String(), "is counted again") })
}

// Settle settles the hold of the innermost middleware.
func TestNestedHolds(t *testing.T) {
	t.Parallel()

	outer, _ := tokens(t, ratelimit.ReturnError())
	inner, _ := tokens(t, ratelimit.ReturnError())
	config := Config{Cost: func(*http.Request) int64 { return 40 }, HoldFor: time.Minute}
	serve(t, limited(t, outer, config, limited(t, inner, config, func(_ http.ResponseWriter, r *http.Request) {
		if _, err := Settle(r.Context(), 7); err != nil {
			t.Error(err)
		}
	}).ServeHTTP))
	requireLeft(t, inner, 93)
	requireLeft(t, outer, 60)
}

func TestNoHold(t *testing.T) {
	t.Parallel()

	_, err := Settle(t.Context(), 7)
	require.ErrorIs(t, err, ErrNoHold)
	require.ErrorIs(t, Extend(t.Context(), time.Minute), ErrNoHold)
	for _, ttl := range []time.Duration{-1, 1, time.Millisecond - 1, 24*time.Hour + 1} {
		_, err := New(allowing(), Config{Key: ByIP(), HoldFor: ttl})
		refused, ok := errors.AsType[*ratelimit.ConfigError](err)
		require.True(t, ok, ttl)
		require.Equal(t, "httplimit.Config.HoldFor", refused.Field)
	}
}
