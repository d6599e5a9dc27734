package httplimit

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
)

// That these are structured fields, another parser says: integration_test/httplimit.
func TestHeaders(t *testing.T) {
	t.Parallel()

	fixed := ratelimit.FixedWindow{Limit: 10, Window: time.Minute}
	sliding := ratelimit.SlidingWindow{Limit: 10, Window: time.Hour}
	bucket := ratelimit.TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second}
	at := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	allowed := ratelimit.Result{
		Allowed:    true,
		Limit:      10,
		Remaining:  9,
		ResetAfter: 59*time.Second + time.Microsecond,
		DecidedAt:  at,
	}
	denied := ratelimit.Result{
		Limit:      10,
		RetryAfter: 29*time.Second + time.Microsecond,
		ResetAfter: 41 * time.Second,
		DecidedAt:  at.Add(time.Microsecond),
	}
	huge := ratelimit.Result{Allowed: true, Limit: math.MaxInt64, Remaining: math.MaxInt64, DecidedAt: at}

	for _, test := range []struct {
		headers Headers
		policy  ratelimit.Policy
		result  ratelimit.Result
		want    http.Header
	}{
		{None, fixed, denied, http.Header{}},
		{IETFDraft11, fixed, allowed, http.Header{"Ratelimit-Policy": {`"login";q=10;w=60`}, "Ratelimit": {`"login";r=9;t=60`}}},
		{IETFDraft11, fixed, denied, http.Header{"Ratelimit-Policy": {`"login";q=10;w=60`}, "Ratelimit": {`"login";r=0;t=30`}}},
		// When a little more will be there is not known.
		{IETFDraft11, sliding, allowed, http.Header{"Ratelimit-Policy": {`"login";q=10;w=3600`}, "Ratelimit": {`"login";r=9`}}},
		{IETFDraft11, sliding, denied, http.Header{"Ratelimit-Policy": {`"login";q=10;w=3600`}, "Ratelimit": {`"login";r=0;t=30`}}},
		{IETFDraft11, bucket, allowed, http.Header{"Ratelimit-Policy": {`"login";q=10;w=40`}, "Ratelimit": {`"login";r=9`}}},
		// The largest integer of a structured field.
		{IETFDraft11, bucket, huge, http.Header{
			"Ratelimit-Policy": {`"login";q=999999999999999;w=40`}, "Ratelimit": {`"login";r=999999999999999`},
		}},
		{XRateLimit, fixed, allowed, http.Header{
			"X-Ratelimit-Limit": {"10"}, "X-Ratelimit-Remaining": {"9"}, "X-Ratelimit-Reset": {"60"},
		}},
		{XRateLimit, sliding, denied, http.Header{
			"X-Ratelimit-Limit": {"10"}, "X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {"41"},
		}},
		{GitHub, fixed, denied, http.Header{ // 12:00:41.000001
			"X-Ratelimit-Limit": {"10"}, "X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {"1795262442"},
		}},
		{GitHub, fixed, ratelimit.Result{Allowed: true, Limit: 10, Remaining: 10, DecidedAt: at}, http.Header{
			"X-Ratelimit-Limit": {"10"}, "X-Ratelimit-Remaining": {"10"}, "X-Ratelimit-Reset": {"1795262400"},
		}},
		{IETFDraft6, fixed, allowed, http.Header{
			"Ratelimit-Limit": {"10"}, "Ratelimit-Remaining": {"9"}, "Ratelimit-Reset": {"60"}, "Ratelimit-Policy": {"10;w=60"},
		}},
		{IETFDraft6, sliding, denied, http.Header{ // Reset is not later than Retry-After
			"Ratelimit-Limit": {"10"}, "Ratelimit-Remaining": {"0"}, "Ratelimit-Reset": {"30"}, "Ratelimit-Policy": {"10;w=3600"},
		}},
		{IETFDraft6, ratelimit.FixedWindow{Limit: 10, Window: time.Millisecond}, allowed, http.Header{
			"Ratelimit-Limit": {"10"}, "Ratelimit-Remaining": {"9"}, "Ratelimit-Reset": {"60"},
		}},
		{IETFDraft6, bucket, huge, http.Header{
			"Ratelimit-Limit": {"999999999999999"}, "Ratelimit-Remaining": {"999999999999999"}, "Ratelimit-Reset": {"0"},
			"Ratelimit-Policy": {"999999999999999;w=40"},
		}},
	} {
		limiter := &fakeLimiter{onFailure: ratelimit.ReturnError(), policy: test.policy, result: test.result}
		header := serve(t, limited(t, limiter, Config{Headers: test.headers}, nil)).header
		for _, name := range []string{"Content-Type", "Retry-After"} {
			header.Del(name)
		}
		require.Equal(t, test.want, header, "%d %v", test.headers, test.policy)
	}
}

// A ban without an end is told as one of a day, and other times as they are.
func TestBanWithoutAnEnd(t *testing.T) {
	t.Parallel()

	const day, ever = 24 * time.Hour, math.MaxInt64 / 4096 * time.Microsecond
	sliding := ratelimit.SlidingWindow{Limit: 10, Window: time.Hour}
	at := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	fields := map[Headers][2]string{
		None: {"Retry-After", "%d"}, IETFDraft11: {"Ratelimit", `"login";r=0;t=%d`},
		XRateLimit: {"X-Ratelimit-Reset", "%d"}, IETFDraft6: {"Ratelimit-Reset", "%d"},
	}
	for _, test := range []struct {
		source     ratelimit.Source
		lasts, say time.Duration
	}{
		{ratelimit.SourcePolicy, ever, day},
		{ratelimit.SourcePolicy, noEnd + 1, day},
		{ratelimit.SourcePolicy, noEnd, noEnd},
		{ratelimit.SourcePolicy, 30 * day, 30 * day},
		{ratelimit.SourceDatabase, noEnd + day, noEnd + day},
	} {
		denied := ratelimit.Result{
			Source: test.source, Limit: 10, RetryAfter: test.lasts, ResetAfter: test.lasts, DecidedAt: at,
		}
		want := int64(test.say / time.Second)
		var rejection Rejection
		reject := func(w http.ResponseWriter, _ *http.Request, r Rejection) { rejection = r; w.WriteHeader(r.Status) }
		for headers, field := range fields {
			limiter := &fakeLimiter{onFailure: ratelimit.ReturnError(), policy: sliding, result: denied}
			header := serve(t, limited(t, limiter, Config{Headers: headers, Reject: reject}, nil)).header
			require.Equal(t, strconv.FormatInt(want, 10), header.Get("Retry-After"))
			require.Equal(t, fmt.Sprintf(field[1], want), header.Get(field[0]))
			require.Equal(t, test.say, rejection.RetryAfter)
			require.Equal(t, denied, rejection.Result) // as it is
		}
		limiter := &fakeLimiter{onFailure: ratelimit.ReturnError(), policy: sliding, result: denied}
		header := serve(t, limited(t, limiter, Config{Headers: GitHub}, nil)).header
		require.Equal(t, strconv.FormatInt(at.Unix()+want, 10), header.Get("X-Ratelimit-Reset"))
	}
}

func TestWindowSeconds(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		policy ratelimit.Policy
		want   int64
	}{
		{ratelimit.FixedWindow{Limit: 1, Window: time.Second}, 1},
		{ratelimit.FixedWindow{Limit: 1, Window: 1500 * time.Millisecond}, 0},
		{ratelimit.FixedWindow{Limit: 1, Window: time.Microsecond}, 0},
		{ratelimit.SlidingWindow{Limit: 1, Window: 24 * time.Hour}, 86400},
		{ratelimit.SlidingLog{Limit: 1, Window: time.Hour}, 3600},
		{ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.Day, Zone: "Europe/Berlin"}, 86400},
		{ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.Month}, 31 * 86400},
		{ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: time.Second}, 1},
		{ratelimit.TokenBucket{Capacity: 1, Refill: 3, Every: time.Second}, 0},
		{ratelimit.TokenBucket{Capacity: 3, Refill: 3, Every: time.Second}, 1},
		{ratelimit.TokenBucket{Capacity: 1 << 42, Refill: 1, Every: time.Second}, 1 << 42},
		{ratelimit.TokenBucket{Capacity: 1 << 62, Refill: 1 << 62, Every: time.Microsecond}, 0},
		{nil, 0},
	} {
		require.Equal(t, test.want, shapeOf(test.policy).window, "%v", test.policy)
	}
}

// Of several limits on one way the draft's fields list all, and the others show the last.
func TestSeveralLimits(t *testing.T) {
	t.Parallel()

	for headers, want := range map[Headers]http.Header{
		IETFDraft11: {"Ratelimit-Policy": {`"address";q=10;w=60`, `"user";q=3;w=60`}, "Ratelimit": {`"address";r=7;t=42`, `"user";r=2;t=1`}},
		XRateLimit:  {"X-Ratelimit-Limit": {"3"}, "X-Ratelimit-Remaining": {"2"}, "X-Ratelimit-Reset": {"1"}},
		IETFDraft6: {
			"Ratelimit-Limit": {"3"}, "Ratelimit-Remaining": {"2"}, "Ratelimit-Reset": {"1"}, "Ratelimit-Policy": {"3;w=60"},
		},
	} {
		second := allowing()
		second.result.Limit, second.result.Remaining, second.result.ResetAfter = 3, 2, time.Millisecond
		inner := limited(
			t,
			second,
			Config{Headers: headers, PolicyName: "user"},
			func(http.ResponseWriter, *http.Request) {},
		)
		outer := limited(t, allowing(), Config{Headers: headers, PolicyName: "address"}, inner.ServeHTTP)
		require.Equal(t, want, serve(t, outer).header)
	}
}

// The application's own fields are on responses to what is let through, once, and on no others. They tell what the
// other fields tell.
func TestAddFields(t *testing.T) {
	t.Parallel()

	calls := 0
	add := func(header http.Header, result ratelimit.Result) {
		calls++
		header.Add("Left", strconv.FormatInt(result.Remaining, 10)+" after "+header.Get("X-Ratelimit-Remaining"))
		header.Add("Source", result.Source.String())
	}
	failedOpen := allowing()
	failedOpen.result = ratelimit.Result{Allowed: true, Source: ratelimit.SourceFailedOpen, Limit: 10}
	failed := allowing()
	failed.err = errors.New("it is gone")
	for name, test := range map[string]struct {
		limiter *fakeLimiter
		config  Config
		status  int
		want    []string
	}{
		"allowed":     {allowing(), Config{}, 200, []string{"7 after 7"}},
		"denied":      {denying(time.Second), Config{}, 429, nil},
		"failed":      {failed, Config{}, 503, nil},
		"failed open": {failedOpen, Config{}, 200, []string{"0 after "}},
		"given back":  {allowing(), Config{Charge: ChargeFailures}, 200, []string{"8 after 8"}},
		"charged":     {allowing(), Config{Charge: ChargeSuccesses}, 200, []string{"7 after 7"}},
		"skipped":     {allowing(), Config{Skip: func(*http.Request) bool { return true }}, 200, nil},
	} {
		calls = 0
		test.config.Headers, test.config.AddFields = XRateLimit, add
		answer := serve(t, limited(t, test.limiter, test.config, nil))
		require.Equal(t, test.status, answer.status, name)
		require.Equal(t, test.want, answer.header["Left"], name)
		require.Len(t, test.want, calls, name)
		if calls > 0 {
			require.Equal(t, test.limiter.result.Source.String(), answer.header.Get("Source"), name)
		}
	}
}
