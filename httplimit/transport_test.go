package httplimit

import (
	"cmp"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// api answers requests without a network, and records them.
type api struct {
	answer func(n int) (status int, header http.Header) // to request n, counted from 0
	first  time.Duration                                // how long the first answer takes
	body   func() io.ReadCloser                         // for a status other than 200; defaults to a text

	mu     sync.Mutex
	sent   []time.Duration // when requests were sent, since the test began
	bodies []string
	began  time.Time
}

func newAPI(answer func(n int) (int, http.Header)) *api {
	return &api{answer: answer, began: time.Now()}
}

func (a *api) RoundTrip(r *http.Request) (*http.Response, error) {
	body := ""
	if r.Body != nil {
		text, err := io.ReadAll(r.Body)
		if err != nil {
			return nil, err
		}
		_ = r.Body.Close()
		body = string(text)
	}
	a.mu.Lock()
	n := len(a.sent)
	a.sent, a.bodies = append(a.sent, time.Since(a.began)), append(a.bodies, body)
	a.mu.Unlock()
	if n == 0 {
		<-time.After(a.first)
	}
	status, header := http.StatusOK, http.Header{}
	if a.answer != nil {
		status, header = a.answer(n)
	}
	response := &http.Response{
		StatusCode: status, Header: header, Request: r, Body: io.NopCloser(strings.NewReader("text")),
	}
	if a.body != nil && status != http.StatusOK {
		response.Body = a.body()
	}
	return response, nil
}

// times returns, for each request, how long after the start of the test it was sent.
func (a *api) times() []time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sent
}

// retryAfter returns an answer for api: the first n requests get a status and a header, later requests get 200.
func retryAfter(n, status int, lines ...string) func(int) (int, http.Header) {
	return func(i int) (int, http.Header) {
		header := http.Header{}
		if i >= n {
			return http.StatusOK, header
		}
		for j := 0; j < len(lines); j += 2 {
			header.Set(lines[j], lines[j+1])
		}
		return status, header
	}
}

// waiter returns a limiter on db with one policy.
func waiter(t *testing.T, db ratelimit.DBTX, policy ratelimit.Policy) *ratelimit.Limiter {
	t.Helper()
	return limitertest.New(t, db, ratelimit.Config{Name: "api", Policy: policy})
}

// plenty returns a policy under which no request waits.
func plenty() ratelimit.Policy { return ratelimit.FixedWindow{Limit: 1000, Window: time.Second} }

func newRequest(t *testing.T, ctx context.Context, method, url string, body io.Reader) *http.Request { //nolint:revive // as in http
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, method, url, body)
	require.NoError(t, err)
	return r
}

// Transports of several processes share a limit for each host, and keep within it.
func TestTransportKeepsWithinTheLimit(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		db, api := ratelimittest.NewDB(), newAPI(nil)
		transports := make([]*Transport, 3)
		for i := range transports {
			transports[i] = &Transport{
				Limiter: waiter(t, db, ratelimit.SlidingLog{Limit: 2, Window: time.Minute}), Base: api,
			}
		}
		testkit.Together(7, func(i int) {
			url := []string{"https://api.example.com/a", "https://API.example.com/b"}[i%2]
			response, err := transports[i%3].RoundTrip(newRequest(t, t.Context(), http.MethodGet, url, nil))
			if err != nil {
				t.Error(err)
				return
			}
			_ = response.Body.Close()
		})
		sent := api.times()
		require.Len(t, sent, 7)
		for i := 2; i < len(sent); i++ {
			require.GreaterOrEqual(t, sent[i]-sent[i-2], time.Minute)
		}
		require.Less(t, sent[6], 4*time.Minute)

		response, err := transports[0].RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://another.example.com", nil))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, sent[6], api.times()[7])
	})
}

func TestTransportObeysRetryAfter(t *testing.T) {
	t.Parallel()

	const text = "the body"
	again := func() io.Reader { return strings.NewReader(text) }
	once := func() io.Reader { return io.NopCloser(strings.NewReader(text)) }
	s := time.Second
	for name, test := range map[string]struct {
		answer func(int) (int, http.Header)
		method string
		body   func() io.Reader
		header http.Header
		sent   []time.Duration
		status int
	}{
		"nothing to obey":            {answer: nil, sent: []time.Duration{0}, status: 200},
		"seconds, 429":               {answer: retryAfter(1, 429, "Retry-After", "5"), sent: []time.Duration{0, 5 * s}, status: 200},
		"seconds, 503":               {answer: retryAfter(1, 503, "Retry-After", "5"), sent: []time.Duration{0, 5 * s}, status: 200},
		"again and again":            {answer: retryAfter(3, 429, "Retry-After", "5"), sent: []time.Duration{0, 5 * s, 10 * s, 15 * s}, status: 200},
		"at least a second":          {answer: retryAfter(1, 429, "Retry-After", "0"), sent: []time.Duration{0, s}, status: 200},
		"a date of this clock":       {answer: retryAfter(1, 429, "Retry-After", "Sat, 01 Jan 2000 00:00:07 GMT"), sent: []time.Duration{0, 7 * s}, status: 200},
		"a date of RFC 850":          {answer: retryAfter(1, 429, "Retry-After", "Saturday, 01-Jan-00 00:00:07 GMT"), sent: []time.Duration{0, 7 * s}, status: 200},
		"a date that is past":        {answer: retryAfter(1, 429, "Retry-After", "Fri, 31 Dec 1999 00:00:00 GMT"), sent: []time.Duration{0, s}, status: 200},
		"a date of another clock":    {answer: retryAfter(1, 503, "Retry-After", "Sun, 22 Nov 2026 12:00:09 GMT", "Date", "Sun, 22 Nov 2026 12:00:00 GMT"), sent: []time.Duration{0, 9 * s}, status: 200},
		"no Retry-After":             {answer: retryAfter(1, 429), sent: []time.Duration{0}, status: 429},
		"negative":                   {answer: retryAfter(1, 429, "Retry-After", "-5"), sent: []time.Duration{0}, status: 429},
		"403":                        {answer: retryAfter(1, 403, "Retry-After", "5"), method: "POST", body: again, sent: []time.Duration{0, 5 * s}, status: 200},
		"403, and nothing else":      {answer: retryAfter(1, 403), sent: []time.Duration{0}, status: 403},
		"529":                        {answer: retryAfter(1, 529, "Retry-After", "5"), sent: []time.Duration{0, 5 * s}, status: 200},
		"529, and not idempotent":    {answer: retryAfter(1, 529, "Retry-After", "5"), method: "POST", body: again, sent: []time.Duration{0}, status: 529},
		"no date":                    {answer: retryAfter(1, 429, "Retry-After", "tomorrow"), sent: []time.Duration{0}, status: 429},
		"another status":             {answer: retryAfter(1, 500, "Retry-After", "5"), sent: []time.Duration{0}, status: 500},
		"too late":                   {answer: retryAfter(1, 429, "Retry-After", "3601"), sent: []time.Duration{0}, status: 429},
		"much too late":              {answer: retryAfter(1, 429, "Retry-After", "99999999999999999999"), sent: []time.Duration{0}, status: 429},
		"the latest date":            {answer: retryAfter(1, 429, "Retry-After", "Fri, 31 Dec 9999 23:59:59 GMT"), sent: []time.Duration{0}, status: 429},
		"a body in memory":           {answer: retryAfter(2, 429, "Retry-After", "5"), method: "POST", body: again, sent: []time.Duration{0, 5 * s, 10 * s}, status: 200},
		"a body that is gone":        {answer: retryAfter(1, 429, "Retry-After", "5"), method: "POST", body: once, sent: []time.Duration{0}, status: 429},
		"no body":                    {answer: retryAfter(1, 429, "Retry-After", "5"), method: "POST", sent: []time.Duration{0, 5 * s}, status: 200},
		"503, and not idempotent":    {answer: retryAfter(1, 503, "Retry-After", "5"), method: "POST", body: again, sent: []time.Duration{0}, status: 503},
		"503, PATCH":                 {answer: retryAfter(1, 503, "Retry-After", "5"), method: "PATCH", sent: []time.Duration{0}, status: 503},
		"503, PUT":                   {answer: retryAfter(1, 503, "Retry-After", "5"), method: "PUT", body: again, sent: []time.Duration{0, 5 * s}, status: 200},
		"503, with Idempotency-Key":  {answer: retryAfter(1, 503, "Retry-After", "5"), method: "POST", body: again, header: http.Header{"Idempotency-Key": {"1"}}, sent: []time.Duration{0, 5 * s}, status: 200},
		"429 after 503, and so on":   {answer: func(n int) (int, http.Header) { return []int{503, 429, 503, 200}[n], http.Header{"Retry-After": {"2"}} }, sent: []time.Duration{0, 2 * s, 4 * s, 6 * s}, status: 200},
		"a success with Retry-After": {answer: retryAfter(1, 200, "Retry-After", "5"), sent: []time.Duration{0}, status: 200},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				api := newAPI(test.answer)
				client := http.Client{
					Transport: &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api},
					Timeout:   time.Hour,
				}
				var body io.Reader
				if test.body != nil {
					body = test.body()
				}
				r := newRequest(t, t.Context(), test.method, "https://api.example.com", body)
				if test.header != nil {
					r.Header = test.header
				}
				response, err := client.Do(r)
				require.NoError(t, err)
				require.Equal(t, test.status, response.StatusCode)
				require.Equal(t, test.sent, api.times())
				read, err := io.ReadAll(response.Body)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, "text", string(read))
				for _, sent := range api.bodies {
					if test.body != nil {
						require.Equal(t, text, sent)
					}
				}
			})
		})
	}
}

// closing tells when a body is closed.
type closing struct {
	io.Reader
	closed bool
}

func (c *closing) Close() error { c.closed = true; return nil }

// retryAt reads the time of the next try from all fields, in all notations seen in practice.
func TestWhenToTryAgain(t *testing.T) {
	t.Parallel()

	const none, hour, day = time.Duration(-1), time.Hour, 24 * time.Hour
	s := time.Second
	began := time.Unix(1795262400, 0)
	for _, test := range []struct {
		status int
		lines  []string
		want   time.Duration
	}{
		{429, []string{"Retry-After", "1.5"}, 2 * s},
		{429, []string{"Retry-After", "0.503"}, s},
		{429, []string{"Retry-After", "2.0"}, 2 * s},
		{429, []string{"Retry-After", "2.000000000000000000001"}, 3 * s},
		{429, []string{"Retry-After", "2."}, 2 * s},
		{429, []string{"Retry-After", ".5"}, s},
		{429, []string{"Retry-After", " 7 "}, 7 * s},
		{429, []string{"Retry-After", "0000000000000000000000007"}, 7 * s},
		{429, []string{"Retry-After", "9223372036854775807.5"}, day},
		{503, []string{"Retry-After", "59.25"}, 60 * s},
		{529, []string{"Retry-After", "1.5"}, 2 * s},
		{403, []string{"Retry-After", "1.5"}, 2 * s},
		{429, []string{"Retry-After", "3", "Retry-After", "9"}, 9 * s},
		{429, []string{"Retry-After", "1795262405"}, 5 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 12:00:07 UTC"}, 7 * s},
		{429, []string{"Retry-After", "2026-11-21T13:00:07+01:00"}, 7 * s},
		{429, []string{"Retry-After", "."}, none},
		{429, []string{"Retry-After", "-1.5"}, none},
		{429, []string{"Retry-After", "+5"}, none},
		{429, []string{"Retry-After", "1e3"}, none},
		{429, []string{"Retry-After", "120, 120"}, 120 * s},
		{429, []string{"Retry-After", "30, 60"}, 60 * s},
		{429, []string{"Retry-After", "60,30, soon"}, 60 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 12:00:07 GMT, 5"}, 7 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 12:00:07 GMT, Sat, 21 Nov 2026 12:00:09 GMT"}, 9 * s},
		{429, []string{"Retry-After", `"30"`}, 30 * s},
		{429, []string{"Retry-After", "30;w=60"}, 30 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 12:00:07 +0000"}, 7 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 13:00:07 +0100"}, 7 * s},
		{429, []string{"Retry-After", "sat, 21 nov 2026 12:00:07 gmt"}, 7 * s},
		{429, []string{"Retry-After", "21 Nov 2026 12:00:07 GMT"}, 7 * s},
		{429, []string{"Retry-After", "Saturday, 21-Nov-26 12:00:07 GMT"}, 7 * s},
		{429, []string{"Retry-After", "Sat Nov 21 12:00:07 2026"}, 7 * s},
		{429, []string{"Retry-After", "2026-11-21t12:00:07z"}, 7 * s},
		{429, []string{"Retry-After", `"Sat, 21 Nov 2026 12:00:07 GMT"`}, 7 * s},
		{429, []string{"Retry-After", "Sat, 21 Nov 2026 12:00:07"}, none},
		{429, []string{"Retry-After", "1.5.5"}, none},
		{429, []string{"Retry-After", "0x5"}, none},
		{429, []string{"Retry-After", "NaN"}, none},
		{429, []string{"Retry-After", "Inf"}, none},
		{429, []string{"Retry-After", "5s"}, none},

		{429, []string{"Retry-After-Ms", "1503"}, 1503 * time.Millisecond},
		{503, []string{"Retry-After-Ms", "1503.5"}, 1504 * time.Millisecond},
		{429, []string{"Retry-After-Ms", "20"}, s},
		{429, []string{"Retry-After-Ms", "99999999999999999999"}, day},
		{429, []string{"Retry-After-Ms", "soon"}, none},
		{429, []string{"Retry-After-Ms", "1503, 2503"}, 2503 * time.Millisecond},
		{429, []string{"Retry-After-Ms", "1503", "Retry-After", "2"}, 2 * s},
		{429, []string{"Retry-After-Ms", "2503", "Retry-After", "2"}, 2503 * time.Millisecond},

		// Refusals of GitHub.
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262460"}, 60 * s},
		{429, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262460"}, 60 * s},
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262400"}, s},
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262300"}, s},
		{403, []string{"X-RateLimit-Remaining", "1", "X-RateLimit-Reset", "1795262460"}, none},
		{429, []string{"X-RateLimit-Remaining", "4990", "X-RateLimit-Reset", "1795262460"}, none},
		{403, []string{"X-RateLimit-Reset", "1795262460"}, none},
		{403, []string{"X-RateLimit-Remaining", "0"}, none},
		{403, []string{"X-RateLimit-Remaining", "4990", "X-RateLimit-Reset", "1795266000", "Retry-After", "60"}, 60 * s},
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795266000", "Retry-After", "60"}, 60 * s},
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262460", "Retry-After", "soon"}, 60 * s},
		// Refusals of other services.
		{429, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "30"}, 30 * s},
		{429, []string{"X-RateLimit-Remaining", "0.0", "X-RateLimit-Reset", "29.2"}, 30 * s},
		{429, []string{"X-RateLimit-Remaining", "-1", "X-RateLimit-Reset", "30"}, 30 * s},
		{429, []string{"X-RateLimit-Remaining", "few", "X-RateLimit-Reset", "30"}, none},
		{429, []string{"X-RateLimit-Reset", "30"}, 30 * s},
		{429, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262430.25"}, 31 * s},
		{429, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "1795262430250"}, 30250 * time.Millisecond},
		{429, []string{"X-Rate-Limit-Remaining", "0", "X-Rate-Limit-Reset", "1795262430"}, 30 * s},
		{529, []string{"RateLimit-Remaining", "0", "RateLimit-Reset", "30"}, 30 * s},
		{429, []string{"RateLimit-Remaining", "0", "RateLimit-Reset", "30"}, 30 * s},
		{503, []string{"RateLimit-Reset", "30"}, none},
		{403, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset-After", "29.2"}, 30 * s}, // Discord
		{429, []string{"X-RateLimit-Reset-After", "30"}, 30 * s},
		{403, []string{"X-RateLimit-Remaining", "1", "X-RateLimit-Reset-After", "30"}, none},
		{403, []string{"RateLimit-Remaining", "0, 0", "RateLimit-Reset", "30, 30"}, 30 * s},
		{403, []string{"RateLimit-Remaining", "0, 0", "RateLimit-Reset", "30, 60"}, 60 * s},
		{403, []string{"RateLimit-Remaining", "0", "RateLimit-Remaining", "0", "RateLimit-Reset", "30", "RateLimit-Reset", "60"}, 60 * s},
		{403, []string{"RateLimit-Remaining", "0, 5", "RateLimit-Reset", "30, 60"}, 30 * s},
		{403, []string{"RateLimit-Remaining", "5, 0", "RateLimit-Reset", "30"}, 30 * s},
		{403, []string{"RateLimit-Remaining", "0", "RateLimit-Reset", "30, 60"}, 60 * s},
		{403, []string{"RateLimit-Remaining", "0;w=60", "RateLimit-Reset", "30;w=60"}, 30 * s},
		{403, []string{"RateLimit-Remaining", `"0"`, "RateLimit-Reset", `"30"`}, 30 * s},
		{403, []string{"RateLimit-Remaining", `"-1"`, "RateLimit-Reset", "Sat, 21 Nov 2026 12:00:30 GMT"}, 30 * s},

		{429, []string{"RateLimit", `"default";r=0;t=30`}, 30 * s},
		{403, []string{"RateLimit", `"default"; r=0; t=30`}, 30 * s},
		{429, []string{"RateLimit", `"burst";r=0;t=3, "daily";r=5;t=80000`}, 3 * s},
		{429, []string{"RateLimit", `"burst";r=0;t=3, "daily";r=0;t=80`}, 80 * s},
		{429, []string{"RateLimit", `"burst";r=0;t=3`, "RateLimit", `"daily";r=0;t=80`}, 80 * s},
		{429, []string{"RateLimit", `"a;t=99,\";r=0;t=99";r=0;t=3;pk=:cHsdsRa894==:`}, 3 * s},
		{403, []string{"RateLimit", `"default";r="0";t="30"`}, 30 * s},
		{403, []string{"RateLimit", `"default"; r = 0; t = 30`}, 30 * s},
		{429, []string{"RateLimit", `"default";r=0`}, none},
		{429, []string{"RateLimit", `"default";r=5;t=30`}, none},
		{429, []string{"RateLimit", `"default`}, none},
		{200, []string{"RateLimit", `"default";r=0;t=30`}, none},
		{429, []string{"RateLimit", `"default";r=0;t=30`, "Retry-After", "31"}, 31 * s},
		{429, []string{"RateLimit", `limit=100, remaining=0, reset=30`}, 30 * s},
		{403, []string{"RateLimit", `limit=100, remaining=1, reset=30`}, none},
		{403, []string{"RateLimit", `limit=9, remaining=0, reset=60`, "RateLimit", `limit=9, remaining=0, reset=30`}, 60 * s},

		// The server's clock is hours off, years off, or not shown. A time may be by the server's clock or by the clock
		// of this process.
		{429, []string{"Date", "Sat, 21 Nov 2026 07:00:00 +0000", "Retry-After", "Sat, 21 Nov 2026 08:00:00 GMT"}, hour},
		{429, []string{"Date", "Sun, 22 Nov 2026 11:00:00 GMT", "Retry-After", "Sun, 22 Nov 2026 12:00:00 GMT"}, hour},
		{429, []string{"Date", "Thu, 01 Jan 1970 00:00:00 GMT", "Retry-After", "Sat, 21 Nov 2026 13:00:00 GMT"}, hour},
		{429, []string{"Date", "Thu, 01 Jan 1970 00:00:00 GMT", "Retry-After", "Sat, 21 Nov 2026 11:00:00 GMT"}, s},
		{429, []string{"Date", "Thu, 01 Jan 1970 00:00:00 GMT", "Retry-After", "Thu, 01 Jan 1970 01:00:00 GMT"}, hour},
		{429, []string{"Date", "Thu, 01 Jan 1970 00:00:00 GMT", "X-RateLimit-Reset", "1795266000"}, hour},
		{429, []string{"Date", "Tue, 24 Nov 2026 12:00:00 GMT", "Retry-After", "Tue, 24 Nov 2026 13:00:00 GMT"}, hour},
		{429, []string{"Date", "Fri, 31 Dec 9999 23:59:59 GMT", "Retry-After", "Sat, 21 Nov 2026 13:00:00 GMT"}, hour},
		{429, []string{"Date", "today", "Retry-After", "Sat, 21 Nov 2026 13:00:00 GMT"}, hour},

		{200, []string{"X-RateLimit-Remaining", "0", "X-RateLimit-Reset", "30"}, none},
		{413, []string{"Retry-After", "30"}, none},
		{301, []string{"Retry-After", "30"}, none},
	} {
		synctest.Test(t, func(t *testing.T) {
			<-time.After(time.Until(began)) // in a bubble, the first year is 2000
			header := http.Header{}
			for i := 0; i < len(test.lines); i += 2 {
				header.Add(test.lines[i], test.lines[i+1])
			}
			until, ok := retryAt(&http.Response{StatusCode: test.status, Header: header})
			require.Equal(t, test.want != none, ok, "%d %q", test.status, test.lines)
			if ok {
				require.Equal(t, test.want, time.Until(until), "%d %q", test.status, test.lines)
			}
		})
	}
}

// FuzzRetryAt tests that the pause is between one second and ten years, whatever a server sends.
func FuzzRetryAt(f *testing.F) {
	for _, text := range []string{
		"1.5", "99999999999999999999", "1795262430250", `"a";r=0;t=3, "b`, "30;w=60, Sat, 21 Nov 2026 12:00:30 +0000", "remaining=0,reset=-1",
		"-",
	} {
		f.Add(text, text)
	}
	f.Fuzz(func(t *testing.T, remaining, text string) {
		for _, name := range []string{"Retry-After", "Retry-After-Ms", "Ratelimit", "Ratelimit-Reset", "X-Ratelimit-Reset",
			"X-Ratelimit-Reset-After", "Date"} {
			header := http.Header{name: {text}, "Ratelimit-Remaining": {remaining}, "X-Ratelimit-Remaining": {"0"}}
			if name == "Date" {
				header["Retry-After"] = []string{remaining}
			}
			before := time.Now()
			until, ok := retryAt(&http.Response{StatusCode: http.StatusTooManyRequests, Header: header})
			if ok {
				require.GreaterOrEqual(t, until.Sub(before), minPause)
				require.LessOrEqual(t, time.Until(until), noEnd)
			}
		}
	})
}

// If a caller has no deadline, a server cannot block it for longer than MaxPause. The Transport sends nothing before
// the time that the server named, and the error contains this time.
func TestTransportWaitsForMaxPauseAtMost(t *testing.T) {
	t.Parallel()

	for _, test := range []struct{ maxPause, longest time.Duration }{
		{0, time.Hour}, {time.Minute, time.Minute}, {48 * time.Hour, 48 * time.Hour}, {-1, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			seconds := int(test.longest/time.Second) + 60
			api := newAPI(retryAfter(1, 429, "Retry-After", strconv.Itoa(seconds)))
			transport := &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api, MaxPause: test.maxPause}
			began := time.Now()
			send := func() (*http.Response, error) {
				return transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
			}
			response, err := send()
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, http.StatusTooManyRequests, response.StatusCode)
			require.Equal(t, strconv.Itoa(seconds), response.Header.Get("Retry-After"))

			until := began.Add(time.Duration(seconds) * time.Second)
			_, err = send() //nolint:bodyclose // there is no body
			var long *PauseError
			require.ErrorAs(t, err, &long)
			require.Equal(t, PauseError{Until: until, MaxPause: cmp.Or(test.maxPause, time.Hour)}, *long)
			require.ErrorContains(t, err, until.Format(time.RFC3339))
			require.NotContains(t, err.Error(), "example.com")
			require.Zero(t, time.Since(began))

			<-time.After(time.Until(until) - max(0, test.longest)) // now the pause is not longer than MaxPause
			if test.maxPause >= 0 {
				response, err = send()
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, http.StatusOK, response.StatusCode)
				require.Equal(t, until, time.Now())
			}
		})
	}
}

// trickling is a body that never ends.
type trickling struct{ closed chan struct{} }

func (b trickling) Read(p []byte) (int, error) {
	select {
	case <-time.After(100 * time.Millisecond):
		p[0] = 'x'
		return 1, nil
	case <-b.closed:
		return 0, io.ErrClosedPipe
	}
}
func (b trickling) Close() error { close(b.closed); return nil }

// The body of a refusal does not delay the next try, whether the body is slow, stops, or never ends.
func TestTransportIsNotHeldUpByABody(t *testing.T) {
	t.Parallel()

	for name, body := range map[string]func() io.ReadCloser{
		"trickling": func() io.ReadCloser { return trickling{make(chan struct{})} },
		"silent":    func() io.ReadCloser { r, _ := io.Pipe(); return r },
		"endless":   func() io.ReadCloser { return io.NopCloser(endless{}) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				api := newAPI(retryAfter(2, 429, "Retry-After", "1"))
				api.body = body
				transport := &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api}
				response, err := transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
				require.Equal(t, []time.Duration{0, time.Second, 2 * time.Second}, api.times())

				api = newAPI(retryAfter(1, 429, "Retry-After", "60"))
				api.body = body
				transport.Base = api
				ctx, cancel := context.WithCancel(t.Context())
				began := time.Now()
				time.AfterFunc(50*time.Millisecond, cancel)
				_, err = transport.RoundTrip(newRequest(t, ctx, http.MethodGet, "https://api.example.com", nil)) //nolint:bodyclose // there is no body
				require.ErrorIs(t, err, context.Canceled)
				require.Equal(t, 50*time.Millisecond, time.Since(began))
			})
		})
	}
}

// A Base may leave out parts of a response that net/http's client does not need. The Transport still obeys refusals.
func TestTransportOverABaseThatLeavesThingsOut(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		api := newAPI(retryAfter(1, 429, "Retry-After", "5"))
		api.body = func() io.ReadCloser { return nil }
		client := http.Client{Transport: &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api}}
		response, err := client.Do(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, []time.Duration{0, 5 * time.Second}, api.times())

		client.Transport = &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: failing{}}
		_, err = client.Do(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil)) //nolint:bodyclose // there is no body
		require.ErrorContains(t, err, "nil *Response")
	})
}

type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// For a time more than ten years ahead, the pause is a day. A long pause below ten years is kept.
func TestTransportAfterAnEndThatNobodyMeans(t *testing.T) {
	t.Parallel()

	const day = 24 * time.Hour
	for text, pause := range map[string]time.Duration{
		"2251799814":                    day, // the Retry-After of a ban without an end
		"99999999999999999999":          day,
		"Fri, 31 Dec 9999 23:59:59 GMT": day,
		"315360001":                     day,
		"315360000":                     noEnd,
		"Tue, 01 Feb 2000 00:00:00 GMT": 31 * day,
	} {
		synctest.Test(t, func(t *testing.T) {
			api := newAPI(retryAfter(1, 429, "Retry-After", text))
			transport := &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api, MaxPause: noEnd}
			response, err := transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			require.Equal(t, []time.Duration{0, pause}, api.times(), text)
		})
	}
}

// During a pause the Transport sends nothing for the key. A caller whose deadline is before the end of the pause gets
// an error at once. Another caller gets an error when its context ends.
func TestTransportDuringAPause(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		api := newAPI(retryAfter(1, 429, "Retry-After", "60"))
		transport := &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: api}
		began := time.Now()
		first := testkit.Later(func() (int, error) {
			response, err := transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
			if err != nil {
				return 0, err
			}
			return response.StatusCode, response.Body.Close()
		})
		synctest.Wait()
		require.Len(t, api.times(), 1)

		soon, cancel := context.WithTimeout(t.Context(), 59*time.Second)
		defer cancel()
		body := &closing{Reader: strings.NewReader("x")}
		_, err := transport.RoundTrip(newRequest(t, soon, http.MethodPost, "https://api.example.com", body)) //nolint:bodyclose // there is no body
		var late *ratelimit.WaitError
		require.ErrorAs(t, err, &late)
		require.Equal(t, time.Minute, late.RetryAfter)
		require.Zero(t, time.Since(began))
		require.True(t, body.closed)

		canceled, leave := context.WithCancel(t.Context())
		time.AfterFunc(10*time.Second, leave)
		body = &closing{Reader: strings.NewReader("x")}
		_, err = transport.RoundTrip(newRequest(t, canceled, http.MethodPost, "https://api.example.com", body)) //nolint:bodyclose // there is no body
		require.ErrorIs(t, err, context.Canceled)
		require.Equal(t, 10*time.Second, time.Since(began))
		require.True(t, body.closed)
		require.Len(t, api.times(), 1)

		other, err := transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com:444", nil))
		require.NoError(t, err)
		require.NoError(t, other.Body.Close())
		status, err := first()
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, []time.Duration{0, 10 * time.Second, time.Minute}, api.times())
		transport.pause("another", time.Now().Add(time.Second))
		require.Len(t, transport.pauses, 1) // the pause that has ended is deleted
	})
}

// If the server asks for a pause while requests wait for the limiter, these requests are not sent during the pause, and
// not all at once after it. What they take during the pause is given back.
func TestTransportPausesThoseWhoWait(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		api := newAPI(retryAfter(1, 429, "Retry-After", "100"))
		api.first = 50 * time.Second
		limiter := waiter(t, ratelimittest.NewDB(), ratelimit.FixedWindow{Limit: 1, Window: 100 * time.Second})
		transport := &Transport{Limiter: limiter, Base: api}
		testkit.Together(3, func(int) {
			response, err := transport.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil))
			if err != nil {
				t.Error(err)
				return
			}
			_ = response.Body.Close()
		})
		sent := api.times()
		require.Len(t, sent, 4)
		for i, least := range []time.Duration{0, 150 * time.Second, 250 * time.Second, 350 * time.Second} {
			require.GreaterOrEqual(t, sent[i], least)
			require.Less(t, sent[i], least+time.Second)
		}
	})
}

// failingWaiter is a limiter whose calls fail.
type failingWaiter struct{ err error }

func (f failingWaiter) Wait(context.Context, string) (ratelimit.Result, error) {
	return ratelimit.Result{}, f.err
}

func (f failingWaiter) Refund(context.Context, ratelimit.Result) (ratelimit.Balance, error) {
	return ratelimit.Balance{}, f.err
}

func TestTransportErrors(t *testing.T) {
	t.Parallel()

	gone := errors.New("it is gone")
	limiter := waiter(t, ratelimittest.NewDB(), plenty())
	slots := waiter(t, ratelimittest.NewDB(), ratelimit.All(ratelimit.Concurrency{Limit: 5}, plenty()))
	for name, test := range map[string]struct {
		transport *Transport
		url, want string
	}{
		"no limiter":      {&Transport{}, "https://api.example.com", "httplimit.Transport.Limiter is required"},
		"a limiter fails": {&Transport{Limiter: failingWaiter{gone}}, "https://api.example.com", "it is gone"},
		"slots":           {&Transport{Limiter: slots}, "https://api.example.com", "call Acquire"},
		"slots by places": {&Transport{Limiter: slots, MaxDelay: time.Hour}, "https://api.example.com", "call Acquire"},
		"no key":          {&Transport{Limiter: limiter, Key: ByHeader("Account")}, "https://api.example.com", "no header Account"},
		"a bad Key":       {&Transport{Limiter: limiter, Key: ByHeader("")}, "https://api.example.com", "no name of a header"},
		"a long host":     {&Transport{Limiter: limiter}, "https://" + strings.Repeat("x", 513), "invalid key"},
	} {
		test.transport.Base = newAPI(nil)
		body := &closing{Reader: strings.NewReader("x")}
		_, err := test.transport.RoundTrip(newRequest(t, t.Context(), http.MethodPost, test.url, body)) //nolint:bodyclose // there is no body
		require.ErrorContains(t, err, test.want, name)
		require.True(t, body.closed, name)
		require.Empty(t, test.transport.Base.(*api).times(), name)
	}
	base := &Transport{Limiter: limiter, Base: failing{gone}}
	_, err := base.RoundTrip(newRequest(t, t.Context(), http.MethodGet, "https://api.example.com", nil)) //nolint:bodyclose // there is no body
	require.ErrorIs(t, err, gone)
}

type failing struct{ err error }

func (f failing) RoundTrip(*http.Request) (*http.Response, error) { return nil, f.err }

// pipes is a network in memory, for tests with synctest's clock.
type pipes chan net.Conn

func (p pipes) Accept() (net.Conn, error) {
	if conn, ok := <-p; ok {
		return conn, nil
	}
	return nil, net.ErrClosed
}
func (p pipes) Close() error { close(p); return nil }
func (pipes) Addr() net.Addr { return &net.UnixAddr{Name: "pipes", Net: "unix"} }
func (p pipes) dial(context.Context, string, string) (net.Conn, error) {
	client, server := net.Pipe()
	p <- server
	return client, nil
}

// With a real client and server, a repeated request arrives with its whole body on the same connection. The caller's
// request is not changed.
func TestTransportOnARealServer(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		network := make(pipes)
		var bodies []string
		server := http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			body, err := io.ReadAll(r.Body)
			if err != nil {
				t.Error(err)
			}
			if bodies = append(bodies, string(body)); len(bodies) == 1 {
				w.Header().Set("Retry-After", time.Now().Add(time.Minute).UTC().Format(http.TimeFormat))
				w.WriteHeader(http.StatusTooManyRequests)
			}
			_, _ = io.WriteString(w, "answer")
		})}
		ended := make(chan error, 1)
		go func() { ended <- server.Serve(network) }()
		dials := 0
		base := &http.Transport{DialContext: func(ctx context.Context, kind, address string) (net.Conn, error) {
			dials++
			return network.dial(ctx, kind, address)
		}}
		began := time.Now()
		client := http.Client{Transport: &Transport{Limiter: waiter(t, ratelimittest.NewDB(), plenty()), Base: base}}
		text := strings.Repeat("x", 100_000)
		r := newRequest(t, t.Context(), http.MethodPost, "http://api.example.com", strings.NewReader(text))
		before := r.Body
		response, err := client.Do(r)
		require.NoError(t, err)
		require.Equal(t, http.StatusOK, response.StatusCode)
		answer, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, "answer", string(answer))
		require.Equal(t, []string{text, text}, bodies)
		require.Equal(t, time.Minute, time.Since(began))
		require.Equal(t, 1, dials)
		require.Equal(t, before, r.Body)
		base.CloseIdleConnections()
		require.NoError(t, server.Close())
		require.ErrorIs(t, <-ended, http.ErrServerClosed)
	})
}
