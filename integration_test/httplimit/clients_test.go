package httplimit

import (
	"context"
	"net/http"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// A client that waits for Retry-After gets through. A second earlier, the client would be denied. The test tries every
// algorithm.
func TestClientThatObeysRetryAfter(t *testing.T) {
	t.Parallel()

	for name, policy := range map[string]ratelimit.Policy{
		"fixed window":   ratelimit.FixedWindow{Limit: 3, Window: time.Minute},
		"sliding window": ratelimit.SlidingWindow{Limit: 3, Window: time.Minute},
		"sliding log":    ratelimit.SlidingLog{Limit: 3, Window: time.Minute},
		"token bucket":   ratelimit.TokenBucket{Capacity: 3, Refill: 1, Every: 20 * time.Second},
	} {
		now := newClock()
		clock := ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now.read}}
		address := serve(t, newLimiter(t, ratelimit.Config{Policy: policy}, clock), httplimit.Config{Key: httplimit.ByIP()}, nil)
		client := newClient(t, "127.0.0.1")
		waits := 0
		for range 30 {
			status, header := client.get(t, address, nil)
			if status == http.StatusOK {
				continue
			}
			waits++
			require.Equal(t, http.StatusTooManyRequests, status, name)
			seconds, err := strconv.Atoi(header.Get("Retry-After"))
			require.NoError(t, err)
			require.Positive(t, seconds)
			now.advance(time.Duration(seconds-1) * time.Second)
			status, header = client.get(t, address, nil)
			require.Equal(t, http.StatusTooManyRequests, status, name)
			require.Equal(t, "1", header.Get("Retry-After"), name)
			now.advance(time.Second)
			status, _ = client.get(t, address, nil)
			require.Equal(t, http.StatusOK, status, name)
		}
		require.GreaterOrEqual(t, waits, 8, name)
	}
}

// curl --retry waits for Retry-After, and gets through.
func TestCurl(t *testing.T) {
	t.Parallel()

	curl := program(t, "curl")
	now := newClock()
	var mu sync.Mutex
	var rejected, through time.Time
	config := httplimit.Config{
		Key: httplimit.ByIP(), Headers: httplimit.XRateLimit,
		Reject: func(w http.ResponseWriter, r *http.Request, rejection httplimit.Rejection) {
			httplimit.PlainText(w, r, rejection)
			if r.Header.Get("User-Agent") == "patient" {
				mu.Lock()
				rejected = time.Now()
				mu.Unlock()
				now.advance(rejection.RetryAfter) // while curl waits
			}
		},
	}
	policy := ratelimit.FixedWindow{Limit: 1, Window: 2 * time.Second} // without the header, curl would wait for 1 s
	address := serve(t, newLimiter(t, ratelimit.Config{Policy: policy}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now.read}}), config,
		func(w http.ResponseWriter, _ *http.Request) {
			mu.Lock()
			defer mu.Unlock()
			through = time.Now()
			_, _ = w.Write([]byte("through\n"))
		})
	run := func(args ...string) string {
		output, err := exec.CommandContext(t.Context(), curl, append(args, "--silent", "--noproxy", "*", "http://"+address)...).
			Output()
		require.NoError(t, err)
		return string(output)
	}

	require.Regexp(
		t,
		`(?s)^HTTP/1.1 200 OK\r\n.*X-Ratelimit-Limit: 1\r\nX-Ratelimit-Remaining: 0\r\nX-Ratelimit-Reset: 2\r\n.*through\n$`,
		run("--include"),
	)
	require.Regexp(
		t,
		`(?s)^HTTP/1.1 429 Too Many Requests\r\n.*Retry-After: 2\r\n.*Too many requests. Try again in 2 s.\n$`,
		run("--include"),
	)
	require.Equal(t, "Too many requests. Try again in 2 s.\nthrough\n", run("--retry", "1", "--user-agent", "patient"))
	mu.Lock()
	defer mu.Unlock()
	require.GreaterOrEqual(t, through.Sub(rejected), 2*time.Second-10*time.Millisecond) // curl counts in milliseconds
}

// wrk and another process make requests. The limiter admits exactly the limit.
func TestWrk(t *testing.T) {
	t.Parallel()

	wrk := program(t, "wrk")
	const limit = 500
	var admitted atomic.Int64
	limiter := newLimiter(
		t,
		ratelimit.Config{
			Policy:        ratelimit.FixedWindow{Limit: limit, Window: 365 * 24 * time.Hour},
			NoDenialCache: true,
		},
	)
	address := serve(
		t,
		limiter,
		httplimit.Config{Key: httplimit.ByIP()},
		func(http.ResponseWriter, *http.Request) { admitted.Add(1) },
	)

	var total, denied, cancelled int
	for allDenied := false; !allDenied; cancelled += 64 { // wrk cancels running requests at its end
		output, err := exec.CommandContext(t.Context(), wrk, "-t2", "-c64", "-d1s", "http://"+address).CombinedOutput()
		require.NoError(t, err, string(output))
		requests, others := number(
			t,
			`(\d+) requests in `,
			output,
		), number(
			t,
			`Non-2xx or 3xx responses: (\d+)`,
			output,
		)
		allDenied = requests > 0 && requests == others
		total, denied = total+requests, denied+others
	}
	require.LessOrEqual(t, admitted.Load(), int64(limit))
	require.GreaterOrEqual(t, admitted.Load(), int64(limit-cancelled))
	require.LessOrEqual(t, total-denied, limit) // wrk does not count the requests still running at its end
	t.Logf("%d of %d requests were admitted", admitted.Load(), total)
	result, err := limiter.Peek(context.Background(), "127.0.0.1")
	require.NoError(t, err)
	require.Zero(t, result.Remaining)
}

// number returns a number in a program's output, or 0 if it is missing.
func number(t *testing.T, pattern string, output []byte) int {
	t.Helper()
	match := regexp.MustCompile(pattern).FindSubmatch(output)
	if match == nil {
		return 0
	}
	n, err := strconv.Atoi(string(match[1]))
	require.NoError(t, err)
	return n
}
