package httplimit

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// slots returns a limiter of this many slots, and its database.
func slots(t *testing.T, limit int64, onFailure ratelimit.FailureMode) (*ratelimit.Limiter, *faultyDB) {
	t.Helper()
	db := &faultyDB{DBTX: pgtest.New(t).Pool}
	return limitertest.New(t, db, ratelimit.Config{
		Name: "exports", Policy: ratelimit.Concurrency{Limit: limit}, OnFailure: onFailure,
	}), db
}

// waitUntilFree waits until no slot is held. A slow release goes on after the response.
func waitUntilFree(t *testing.T, limiter *ratelimit.Limiter) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		_, held := remaining(t, limiter)
		return held == 0
	})
}

// Of 100 requests at once to two processes, exactly 5 run. Clients that try again all get through, never more than 5 at
// a time.
func TestAtMostFiveRequestsAtOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	config := ratelimit.Config{
		Name: "exports", Policy: ratelimit.Concurrency{Limit: 5}, OnFailure: ratelimit.ReturnError(),
	}
	var running, most atomic.Int64
	finish := make(chan struct{})
	handler := func(w http.ResponseWriter, _ *http.Request) {
		now := running.Add(1)
		defer running.Add(-1)
		for before := most.Load(); before < now && !most.CompareAndSwap(before, now); before = most.Load() {
		}
		<-finish
		_, _ = io.WriteString(w, "through")
	}
	var processes []http.Handler
	for range 2 {
		processes = append(processes, limited(t, limitertest.New(t, db.NewPool(t, nil), config), Config{}, handler))
	}
	ask := func(i int) int { return serve(t, processes[i%2]).status }

	statuses := make(chan int, 100)
	for i := range 100 {
		go func() { statuses <- ask(i) }()
	}
	for range 95 {
		require.Equal(t, http.StatusTooManyRequests, <-statuses)
	}
	close(finish)
	for range 5 {
		require.Equal(t, http.StatusOK, <-statuses)
	}
	testkit.Together(100, func(i int) {
		for ask(i) != http.StatusOK {
		}
	})
	require.EqualValues(t, 5, most.Load())
}

// The slot is free when the handler has returned, however it returns. While the handler runs, it has the slot.
func TestSlotIsReleased(t *testing.T) {
	t.Parallel()

	ctx, leave := context.WithCancel(t.Context())
	hijack := func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			panic(err)
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nthrough")
		_ = conn.Close()
	}
	stream := func(w http.ResponseWriter, _ *http.Request) {
		for _, part := range []string{"thr", "ough"} {
			_, _ = io.WriteString(w, part)
			_ = http.NewResponseController(w).Flush()
		}
	}
	for name, test := range map[string]struct {
		handler http.HandlerFunc
		leaves  bool
		fails   bool
	}{
		"returns": {handler: func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "through") }},
		"streams": {handler: stream},
		"hijacks": {handler: hijack},
		"panics":  {handler: func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }, fails: true},
		"releases it": {handler: func(w http.ResponseWriter, r *http.Request) {
			if err := SlotOf(r.Context()).Release(r.Context()); err != nil {
				panic(err)
			}
			_, _ = io.WriteString(w, "through")
		}},
		"the client leaves": {handler: func(_ http.ResponseWriter, r *http.Request) {
			leave()
			<-r.Context().Done()
		}, leaves: true, fails: true},
	} {
		limiter, _ := slots(t, 3, ratelimit.ReturnError())
		handler := limited(t, limiter, Config{
			Key:  ByFunc(func(*http.Request) (string, error) { return "192.0.2.1", nil }),
			Cost: func(*http.Request) int64 { return 2 },
		}, func(w http.ResponseWriter, r *http.Request) {
			looked, err := limiter.Peek(r.Context(), "192.0.2.1")
			if err != nil || looked.Held != 2 || SlotOf(r.Context()).Fence() == 0 {
				t.Error(name, looked, err)
			}
			test.handler(w, r)
		})
		server := httptest.NewServer(handler)
		client := t.Context()
		if test.leaves {
			client = ctx
		}
		request, err := http.NewRequestWithContext(client, http.MethodGet, server.URL, nil)
		require.NoError(t, err)
		response, err := server.Client().Do(request)
		if !test.fails {
			require.NoError(t, err, name)
			body, err := io.ReadAll(response.Body)
			require.NoError(t, err, name)
			require.NoError(t, response.Body.Close())
			require.Equal(t, "through", string(body), name)
		} else {
			require.Error(t, err, name)
		}
		waitUntilFree(t, limiter)
		server.Close()
	}
	require.Nil(t, SlotOf(t.Context()))
}

// A request that finds no free slot gets FullStatus. The fields show the free slots.
func TestFull(t *testing.T) {
	t.Parallel()

	daily := ratelimit.CalendarWindow{Limit: 2, Unit: ratelimit.CalendarDay}
	for _, test := range []struct {
		policy           ratelimit.Policy
		full, status     int
		problem          string
		policies, fields string // of the denied request
	}{
		{
			ratelimit.Concurrency{Limit: 1}, 0, 429, "quota-exceeded",
			`"exports";q=1;qu="concurrent-requests"`, `"exports";r=0;t=20`,
		},
		{
			ratelimit.Concurrency{Limit: 1}, 503, 503, "temporary-reduced-capacity",
			`"exports";q=1;qu="concurrent-requests"`, `"exports";r=0;t=20`,
		},
		{
			ratelimit.All(daily, ratelimit.Concurrency{Limit: 1}), 503, 503, "temporary-reduced-capacity",
			`"exports";q=2;w=86400, "exports/2";q=1;qu="concurrent-requests"`, `"exports";r=1, "exports/2";r=0;t=20`,
		},
		{ // the second request is denied by the day
			ratelimit.All(ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarDay}, ratelimit.Concurrency{Limit: 2}),
			503, 429, "quota-exceeded",
			`"exports";q=1;w=86400, "exports/2";q=2;qu="concurrent-requests"`, `"exports";r=0;t=86400, "exports/2";r=1`,
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			limiter := limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{
				Name: "exports", Policy: test.policy, OnFailure: ratelimit.ReturnError(),
			})
			config := Config{Headers: IETFDraft11, SlotTTL: 20 * time.Second, FullStatus: test.full}
			var denied answer
			free := serve(t, limited(t, limiter, config, func(http.ResponseWriter, *http.Request) {
				denied = serve(t, limited(t, limiter, config, nil))
			}))
			require.Equal(t, http.StatusOK, free.status)
			require.Equal(t, test.policies, free.header.Get("RateLimit-Policy"))
			require.Equal(t, test.status, denied.status)
			require.Equal(t, test.policies, denied.header.Get("RateLimit-Policy"))
			require.Equal(t, test.fields, denied.header.Get("RateLimit"))
			require.Contains(t, test.fields, "t="+denied.header.Get("Retry-After"))
			require.Contains(t, denied.body, test.problem)
		})
	}
}

// While a handler runs, its slot is renewed. If somebody takes the slot away, the context of the request ends.
func TestLostSlotEndsTheRequest(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		limiter := limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{
			Name: "exports", Policy: ratelimit.Concurrency{Limit: 1}, OnFailure: ratelimit.ReturnError(),
		})
		var log testkit.Journal
		serve(t, limited(t, limiter, Config{Logger: log.Logger()}, func(_ http.ResponseWriter, r *http.Request) {
			<-time.After(time.Hour + time.Second) // between two renewals
			if err := r.Context().Err(); err != nil {
				t.Error(err)
			}
			if err := limiter.Reset(r.Context(), "192.0.2.1"); err != nil {
				t.Error(err)
			}
			<-r.Context().Done()
			if err := context.Cause(r.Context()); err != ratelimit.ErrSlotLost { //nolint:errorlint // exactly this
				t.Error(err)
			}
		}))
		require.Empty(t, log.Lines())
	})
}

// While Postgres is away, OnFailure decides. A slot of FailOpen limits nothing.
func TestSlotsWhilePostgresIsAway(t *testing.T) {
	t.Parallel()

	for mode, status := range map[ratelimit.FailureMode]int{
		ratelimit.FailOpen(): 200, ratelimit.FallbackLocal(1): 503, ratelimit.FailClosed(): 503,
		ratelimit.ReturnError(): 503,
	} {
		limiter := limitertest.New(t, limitertest.PoolOf(t, func(net.Conn) {}), ratelimit.Config{
			Name: "exports", Policy: ratelimit.Concurrency{Limit: 1}, OnFailure: mode,
		}, ratelimit.ClientConfig{Logger: (&testkit.Journal{}).Logger()})
		handler := limited(t, limiter, Config{}, func(_ http.ResponseWriter, r *http.Request) {
			if slot := SlotOf(r.Context()); slot == nil || slot.Fence() != 0 || r.Context().Err() != nil {
				t.Error("the slot is not empty")
			}
		})
		require.Equal(t, status, serve(t, handler).status)
	}
}

// A failed release is logged once, and so is the next one that succeeds, if releases have failed for long.
func TestReleaseFails(t *testing.T) {
	t.Parallel()

	limiter, db := slots(t, 5, ratelimit.ReturnError())
	var log testkit.Journal
	m := &middleware{config: Config{Logger: log.Logger()}}
	for range 2 {
		result, err := limiter.TryAcquire(t.Context(), "192.0.2.1", ratelimit.SlotOptions{})
		require.NoError(t, err)
		db.failures.Store(1)
		m.release(t.Context(), result.Slot) // which goes on if it takes long
		testkit.WaitUntil(t, func() bool {
			return db.failures.Load() == 0 && strings.Contains(log.String(), "may last until its TTL ends")
		})
	}
	require.Len(t, log.Lines(), 1)
	require.NotContains(t, log.String(), "192.0.2.1")

	m.releases.failing.Store(1) // since 1970
	m.release(t.Context(), &ratelimit.Slot{})
	require.Empty(t, log.Lines())
	result, err := limiter.TryAcquire(t.Context(), "192.0.2.1", ratelimit.SlotOptions{})
	require.NoError(t, err)
	m.release(t.Context(), result.Slot)
	testkit.WaitUntil(t, func() bool { return strings.Contains(log.String(), "slots are released again") })
}

// A tier may have slots beside the policies of the others.
func TestTierWithSlots(t *testing.T) {
	t.Parallel()

	daily := ratelimit.FixedWindow{Limit: 10, Window: 24 * time.Hour}
	limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "api", Policy: daily, OnFailure: ratelimit.ReturnError(),
	})
	free, err := limiter.With(ratelimit.All(daily, ratelimit.Concurrency{Limit: 1}))
	require.NoError(t, err)
	var inner answer
	serve(t, limited(t, limiter, Config{
		Tier: func(*http.Request) Limiter { return free }, Charge: ChargeFailures, HoldFor: time.Minute,
	}, func(http.ResponseWriter, *http.Request) {
		inner = serve(t, limited(t, free, Config{}, nil))
	}))
	require.Equal(t, http.StatusTooManyRequests, inner.status)
	waitUntilFree(t, free)
	left, _ := remaining(t, limiter)
	require.EqualValues(t, 9, left)
}

func TestConfigurationsOfSlotsThatCannotWork(t *testing.T) {
	t.Parallel()

	limiter := &fakeLimiter{onFailure: ratelimit.ReturnError(), policy: ratelimit.All(
		ratelimit.SlidingWindow{Limit: 1, Window: time.Hour}, ratelimit.Concurrency{Limit: 1})}
	for field, configs := range map[string][]Config{
		"SlotTTL":    {{SlotTTL: -1}, {SlotTTL: time.Second - 1}, {SlotTTL: 24*time.Hour + 1}},
		"FullStatus": {{FullStatus: 200}, {FullStatus: 500}, {FullStatus: -1}},
		"Charge":     {{Charge: ChargeFailures}},
		"HoldFor":    {{HoldFor: time.Minute}},
	} {
		for _, config := range configs {
			config.Key = ByIP()
			_, err := New(limiter, config)
			refused, ok := errors.AsType[*ratelimit.ConfigError](err)
			require.True(t, ok, field)
			require.Equal(t, "httplimit.Config."+field, refused.Field)
		}
	}
}
