package httplimit

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// asked is a recorded call of a limiter.
type asked struct {
	key  string
	cost int64
}

// fakeLimiter returns prepared results, and records its calls.
type fakeLimiter struct {
	policy    ratelimit.Policy // by default 10 a minute
	onFailure ratelimit.FailureMode
	result    ratelimit.Result
	err       error
	refund    func(ctx context.Context) (ratelimit.Balance, error)

	mu       sync.Mutex
	asked    []asked
	refunded []ratelimit.Result
}

func (f *fakeLimiter) Config() ratelimit.Config {
	config := ratelimit.Config{Name: "login", Policy: f.policy, OnFailure: f.onFailure}
	if config.Policy == nil {
		config.Policy = ratelimit.FixedWindow{Limit: 10, Window: time.Minute}
	}
	return config
}

func (f *fakeLimiter) AllowN(_ context.Context, key string, n int64) (ratelimit.Result, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.asked = append(f.asked, asked{key, n})
	return f.result, f.err
}

func (f *fakeLimiter) Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error) {
	f.mu.Lock()
	f.refunded = append(f.refunded, result)
	f.mu.Unlock()
	if f.refund != nil {
		return f.refund(ctx)
	}
	return ratelimit.Balance{}, nil
}

// Hold is not used by the tests with a fakeLimiter.
func (f *fakeLimiter) Hold(context.Context, string, int64, time.Duration) (ratelimit.HoldResult, error) {
	return ratelimit.HoldResult{}, f.err
}

// TryAcquire is not used by the tests with a fakeLimiter.
func (f *fakeLimiter) TryAcquire(context.Context, string, ratelimit.SlotOptions) (ratelimit.SlotResult, error) {
	return ratelimit.SlotResult{}, f.err
}

func (f *fakeLimiter) refunds() []ratelimit.Result {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.refunded
}

// allowing returns a limiter that allows everything, with 7 of 10 left.
func allowing() *fakeLimiter {
	return &fakeLimiter{onFailure: ratelimit.ReturnError(), result: ratelimit.Result{
		Allowed: true, Limit: 10, Remaining: 7, ResetAfter: 41*time.Second + time.Microsecond, DecidedAt: time.Unix(1_800_000_000, 0),
	}}
}

func denying(retryAfter time.Duration) *fakeLimiter {
	return &fakeLimiter{onFailure: ratelimit.ReturnError(), result: ratelimit.Result{
		Limit: 10, RetryAfter: retryAfter, ResetAfter: time.Minute, DecidedAt: time.Unix(1_800_000_000, 1),
	}}
}

// limited returns a handler behind a limiter. Config.Key defaults to ByIP.
func limited(t testing.TB, limiter Limiter, config Config, handler http.HandlerFunc) http.Handler {
	t.Helper()
	if config.Key.find == nil {
		config.Key = ByIP()
	}
	limit, err := New(limiter, config)
	require.NoError(t, err)
	if handler == nil {
		handler = func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("through")) }
	}
	return limit(handler)
}

// answer is a complete response.
type answer struct {
	status int
	header http.Header
	body   string
}

// serve returns the answer to a request, by default to a GET from 192.0.2.1.
func serve(t *testing.T, handler http.Handler, requests ...*http.Request) answer {
	t.Helper()
	request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
	if len(requests) > 0 {
		request = requests[0]
	}
	recorder := httptest.NewRecorder()
	handler.ServeHTTP(recorder, request)
	header := recorder.Header()
	if result := recorder.Result(); result.Body.Close() == nil {
		header = result.Header // as it was when the status was written
	}
	return answer{recorder.Code, header, recorder.Body.String()}
}

func get(t *testing.T, client *http.Client, url string) answer {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	response, err := client.Do(request)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return answer{response.StatusCode, response.Header, string(body)}
}
