package httplimit

import (
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// An attacker keeps successful logins open over several windows. Then the attacker finishes one login at a time, to
// make room for a failed login.
func TestHeldRequestsDoNotLetFailuresThrough(t *testing.T) {
	t.Parallel()
	const limit = 5
	for name, policy := range map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: limit, Window: time.Minute},
		"sliding window": ratelimit.SlidingWindow{Limit: limit, Window: time.Minute},
		"token bucket":   ratelimit.TokenBucket{Capacity: limit, Refill: limit, Every: time.Minute},
		"sliding log":    ratelimit.SlidingLog{Limit: limit, Window: time.Minute},
		"calendar":       ratelimit.CalendarWindow{Limit: limit, Unit: ratelimit.CalendarMinute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var mu sync.Mutex
			now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
			limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
				Name: "login", Policy: policy, NoDenialCache: true,
			}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time {
				mu.Lock()
				defer mu.Unlock()
				return now
			}}})
			began, finish := make(chan struct{}), make(chan struct{})
			handler := limited(
				t,
				limiter,
				Config{Charge: ChargeFailures, OnError: func(w http.ResponseWriter, _ *http.Request, _ error) {
					w.WriteHeader(http.StatusServiceUnavailable)
				}},
				func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Path == "/bad" {
						w.WriteHeader(http.StatusUnauthorized)
						return
					}
					began <- struct{}{}
					<-finish
					w.WriteHeader(http.StatusOK)
				},
			)
			login := func(path string) int {
				recorder := httptest.NewRecorder()
				handler.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, path, nil))
				return recorder.Code
			}

			done := make(chan int)
			for range 8 {
				for range limit {
					go func() { done <- login("/good") }()
					<-began
				}
				mu.Lock()
				now = now.Add(2 * time.Minute)
				mu.Unlock()
			}
			failures := 0
			for range 8 * limit {
				finish <- struct{}{}
				require.Equal(t, http.StatusOK, <-done)
				for login("/bad") == http.StatusUnauthorized {
					failures++
				}
			}
			require.Equal(t, limit, failures)
		})
	}
}
