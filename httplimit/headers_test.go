package httplimit

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// Tests in integration_test/httplimit check with another parser that these header fields are structured fields.
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
		// A sliding window shows no time with an allowed request, because the time until more remains is not known.
		{IETFDraft11, sliding, allowed, http.Header{"Ratelimit-Policy": {`"login";q=10;w=3600`}, "Ratelimit": {`"login";r=9`}}},
		{IETFDraft11, sliding, denied, http.Header{"Ratelimit-Policy": {`"login";q=10;w=3600`}, "Ratelimit": {`"login";r=0;t=30`}}},
		{IETFDraft11, bucket, allowed, http.Header{"Ratelimit-Policy": {`"login";q=10;w=40`}, "Ratelimit": {`"login";r=9`}}},
		// 999999999999999 is the largest integer of a structured field.
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

// A ban without an end is shown as a ban that ends in a day. Other times are shown unchanged.
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
			require.Equal(t, denied, rejection.Result) // unchanged
		}
		limiter := &fakeLimiter{onFailure: ratelimit.ReturnError(), policy: sliding, result: denied}
		header := serve(t, limited(t, limiter, Config{Headers: GitHub}, nil)).header
		require.Equal(t, strconv.FormatInt(at.Unix()+want, 10), header.Get("X-Ratelimit-Reset"))
	}
}

// allLimiter allows 3 in 10 s and 5 in an hour, in memory.
func allLimiter(t *testing.T, now func() time.Time) *ratelimit.Limiter {
	t.Helper()
	return limitertest.New(t, ratelimittest.NewDB(), ratelimit.Config{
		Name: "login", OnFailure: ratelimit.ReturnError(),
		Policy: ratelimit.All(
			ratelimit.FixedWindow{Limit: 3, Window: 10 * time.Second},
			ratelimit.SlidingLog{Limit: 5, Window: time.Hour},
		),
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now}})
}

// The fields show all policies of an All, in order. Each policy that denies also shows the time until it allows the
// request.
func TestHeadersOfAll(t *testing.T) {
	t.Parallel()

	second := int64(0)
	now := func() time.Time { return time.Unix(1_800_000_000+second, 0) }
	limiter := allLimiter(t, now)
	const policy = `"login";q=3;w=10, "login/2";q=5;w=3600`
	for i, test := range []struct {
		at                 int64
		status             int
		limits, retryAfter string
		violated           string
	}{
		{0, 200, `"login";r=2;t=10, "login/2";r=4`, "", ""},
		{0, 200, `"login";r=1;t=10, "login/2";r=3`, "", ""},
		{0, 200, `"login";r=0;t=10, "login/2";r=2`, "", ""},
		{4, 429, `"login";r=0;t=6, "login/2";r=2`, "6", `["login"]`},
		{10, 200, `"login";r=2;t=10, "login/2";r=1`, "", ""},
		{10, 200, `"login";r=1;t=10, "login/2";r=0`, "", ""},
		{11, 429, `"login";r=1, "login/2";r=0;t=3589`, "3589", `["login/2"]`},
	} {
		second = test.at
		answer := serve(t, limited(t, limiter, Config{Headers: IETFDraft11}, nil))
		require.Equal(t, test.status, answer.status, i)
		require.Equal(t, []string{policy}, answer.header["Ratelimit-Policy"], i)
		require.Equal(t, []string{test.limits}, answer.header["Ratelimit"], i)
		require.Equal(t, test.retryAfter, answer.header.Get("Retry-After"), i)
		if test.violated != "" {
			require.Contains(t, answer.body, `"violated-policies":`+test.violated+`}`)
		}
	}

	// Here both policies deny.
	limiter = allLimiter(t, now)
	second = 0
	for range 3 {
		serve(t, limited(t, limiter, Config{}, nil))
	}
	second = 10
	serve(t, limited(t, limiter, Config{}, nil))
	serve(t, limited(t, limiter, Config{}, nil))
	costly := Config{Headers: IETFDraft11, Cost: func(*http.Request) int64 { return 2 }}
	answer := serve(t, limited(t, limiter, costly, nil))
	require.Equal(t, []string{`"login";r=1;t=10, "login/2";r=0;t=3590`}, answer.header["Ratelimit"])
	require.Contains(t, answer.body, `"violated-policies":["login","login/2"]}`)

	// Fields that can show only one limit show the same policy in all formats: the policy that denies for the longest
	// time, or the policy that has the least left.
	for headers, want := range map[Headers][2]http.Header{
		XRateLimit: {
			{"X-Ratelimit-Limit": {"3"}, "X-Ratelimit-Remaining": {"2"}, "X-Ratelimit-Reset": {"10"}},
			{"X-Ratelimit-Limit": {"5"}, "X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {"3600"}},
		},
		GitHub: {
			{"X-Ratelimit-Limit": {"3"}, "X-Ratelimit-Remaining": {"2"}, "X-Ratelimit-Reset": {"1800000010"}},
			{"X-Ratelimit-Limit": {"5"}, "X-Ratelimit-Remaining": {"0"}, "X-Ratelimit-Reset": {"1800003610"}},
		},
		IETFDraft6: {
			{"Ratelimit-Limit": {"3"}, "Ratelimit-Remaining": {"2"}, "Ratelimit-Reset": {"10"}, "Ratelimit-Policy": {"3;w=10, 5;w=3600"}},
			{"Ratelimit-Limit": {"5"}, "Ratelimit-Remaining": {"0"}, "Ratelimit-Reset": {"3590"}, "Ratelimit-Policy": {"3;w=10, 5;w=3600"}},
		},
	} {
		limiter := allLimiter(t, now)
		fields := func() http.Header {
			header := serve(t, limited(t, limiter, Config{Headers: headers}, nil)).header
			header.Del("Content-Type")
			header.Del("Retry-After")
			return header
		}
		second = 0
		require.Equal(t, want[0], fields())
		fields()
		fields()
		second = 10
		fields()
		fields()
		require.Equal(t, want[1], fields())
	}

	// For each policy, the fields include a cost that will be given back. If a row denies or allows everything, the
	// fields show that for each policy.
	second = 0
	charge := Config{Headers: IETFDraft11, Charge: ChargeFailures}
	answer = serve(t, limited(t, allLimiter(t, now), charge, nil))
	require.Equal(t, []string{`"login";r=3;t=10, "login/2";r=5`}, answer.header["Ratelimit"])
	row := denying(time.Minute)
	row.policy, row.result.Source = allLimiter(t, now).Config().Policy, ratelimit.SourcePolicy
	answer = serve(t, limited(t, row, Config{Headers: IETFDraft11}, nil))
	require.Equal(t, []string{policy}, answer.header["Ratelimit-Policy"])
	require.Equal(t, []string{`"login";r=0;t=60, "login/2";r=0;t=60`}, answer.header["Ratelimit"])
	row.result = ratelimit.Result{Allowed: true, Source: ratelimit.SourcePolicy, Limit: 3, Remaining: 3}
	answer = serve(t, limited(t, row, Config{Headers: IETFDraft11}, nil))
	require.Equal(t, []string{`"login";r=3;t=0, "login/2";r=5`}, answer.header["Ratelimit"])
}

// The decision and all fields use the numbers of the request's tier. All tiers share the usage.
func TestTier(t *testing.T) {
	t.Parallel()

	free := waiter(t, ratelimittest.NewDB(), ratelimit.FixedWindow{Limit: 2, Window: time.Minute})
	paid, err := free.With(ratelimit.FixedWindow{Limit: 4, Window: time.Minute})
	require.NoError(t, err)
	handler := limited(t, free, Config{
		Headers: IETFDraft11,
		OnError: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusServiceUnavailable) },
		Charge:  ChargeAllButServerErrors,
		Tier: func(r *http.Request) Limiter {
			switch r.Header.Get("Tier") {
			case "paid":
				return paid
			case "none":
				return (*ratelimit.Limiter)(nil)
			}
			return nil
		},
	}, nil)
	for i, test := range []struct {
		tier          string
		status        int
		policy, limit string
	}{
		{"", 200, `"api";q=2;w=60`, `"api";r=1`},
		{"none", 200, `"api";q=2;w=60`, `"api";r=0`},
		{"", 429, `"api";q=2;w=60`, `"api";r=0`},
		{"paid", 200, `"api";q=4;w=60`, `"api";r=1`},
		{"paid", 200, `"api";q=4;w=60`, `"api";r=0`},
		{"paid", 429, `"api";q=4;w=60`, `"api";r=0`},
		{"", 429, `"api";q=2;w=60`, `"api";r=0`},
	} {
		answer := serve(t, handler, from("192.0.2.1:1", "Tier", test.tier))
		require.Equal(t, test.status, answer.status, i)
		require.Equal(t, test.policy, answer.header.Get("Ratelimit-Policy"), i)
		require.Contains(t, answer.header.Get("Ratelimit"), test.limit+";t=", i)
		if test.status == http.StatusTooManyRequests {
			require.NotEmpty(t, answer.header.Get("Retry-After"))
			require.Contains(t, answer.body, quotaExceeded)
		}
	}

	// A tier's take is given back to that tier.
	mine, other := allowing(), allowing()
	config := Config{Charge: ChargeFailures, Tier: func(*http.Request) Limiter { return other }}
	serve(t, limited(t, mine, config, nil))
	require.Empty(t, mine.asked)
	require.Empty(t, mine.refunds())
	require.Len(t, other.asked, 1)
	require.Len(t, other.refunds(), 1)
}

// incomparable is a limiter that cannot be a key of a map.
type incomparable []Limiter

func (i incomparable) Config() ratelimit.Config { return i[0].Config() }

func (i incomparable) AllowN(ctx context.Context, key string, n int64) (ratelimit.Result, error) {
	return i[0].AllowN(ctx, key, n)
}

func (i incomparable) Refund(ctx context.Context, result ratelimit.Result) (ratelimit.Balance, error) {
	return i[0].Refund(ctx, result)
}

func (i incomparable) Hold(
	ctx context.Context, key string, n int64, ttl time.Duration,
) (ratelimit.HoldResult, error) {
	return i[0].Hold(ctx, key, n, ttl)
}

func (i incomparable) TryAcquire(
	ctx context.Context, key string, options ratelimit.SlotOptions,
) (ratelimit.SlotResult, error) {
	return i[0].TryAcquire(ctx, key, options)
}

// A request that passes the same middleware twice is logged once. Different requests that look alike are not logged.
func TestMountedTwice(t *testing.T) {
	t.Parallel()

	const tells = "passes this middleware twice, and is charged twice"
	copied := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), contextKey{}, "x")))
		})
	}
	for name, test := range map[string]struct {
		mount func(one, another func(http.Handler) http.Handler, h http.Handler) http.Handler
		tells bool
	}{
		"twice": {func(one, _ func(http.Handler) http.Handler, h http.Handler) http.Handler { return one(one(h)) }, true},
		"in between": {func(one, another func(http.Handler) http.Handler, h http.Handler) http.Handler {
			return one(copied(another(one(h))))
		}, true},
		"on the router and the route": {func(one, _ func(http.Handler) http.Handler, h http.Handler) http.Handler {
			mux := http.NewServeMux()
			mux.Handle("/", copied(one(h)))
			return one(mux)
		}, true},
		"once": {func(one, _ func(http.Handler) http.Handler, h http.Handler) http.Handler { return copied(one(h)) }, false},
		"two of them": {func(one, another func(http.Handler) http.Handler, h http.Handler) http.Handler {
			return one(another(h))
		}, false},
		"two routes": {func(one, _ func(http.Handler) http.Handler, h http.Handler) http.Handler {
			first, second := one(h), one(h)
			return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				first.ServeHTTP(w, r)
				second.ServeHTTP(w, r) // two requests, one after the other
			})
		}, false},
	} {
		var log testkit.Journal
		one, err := New(allowing(), Config{Key: ByIP(), Logger: log.Logger()})
		require.NoError(t, err)
		another, err := New(allowing(), Config{Key: ByIP(), Logger: log.Logger(), Charge: ChargeFailures})
		require.NoError(t, err)
		handler := test.mount(one, another, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
		}))
		for range 2 * firstLooks {
			require.Equal(t, http.StatusNoContent, serve(t, handler).status)
		}
		lines := log.Lines()
		if !test.tells {
			require.Empty(t, lines, name)
			continue
		}
		require.Len(t, lines, 1, name)
		require.Contains(t, lines[0], tells, name)
		require.Contains(t, lines[0], "mount it once", name)
		require.NotContains(t, lines[0], "192.0.2.1", name)
	}

	// Two middlewares charge a request twice if they have the same limiter and find the same key.
	inner := struct{ Limiter }{allowing()}
	byOther := ByFunc(func(*http.Request) (string, error) { return "somebody", nil })
	for _, test := range []struct {
		outer, inner Limiter
		key          Key
		tells        bool
	}{
		{inner.Limiter, inner.Limiter, ByIP(), true},
		{inner, inner, ByIP(), true}, // not a pointer
		{inner.Limiter, inner.Limiter, byOther, false},
		{inner.Limiter, allowing(), ByIP(), false},
		{incomparable{inner}, incomparable{inner}, ByIP(), false},
	} {
		var log testkit.Journal
		one, err := New(test.outer, Config{Key: ByIP(), Logger: log.Logger()})
		require.NoError(t, err)
		two, err := New(test.inner, Config{Key: test.key, Logger: log.Logger(), Charge: ChargeFailures})
		require.NoError(t, err)
		h := two(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for _, handler := range []http.Handler{h, one(copied(h)), one(copied(h))} {
			serve(t, handler)
		}
		lines := log.Lines()
		if !test.tells {
			require.Empty(t, lines)
			continue
		}
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "the same limiter and find the same key, and is charged twice: mount one of them")
		require.NotContains(t, lines[0], "192.0.2.1")
	}

	// Two middlewares of a limiter may find different keys, such as one key for all and one key for each client. The
	// log has a line only if one of these middlewares is mounted twice.
	var log testkit.Journal
	one, err := New(inner, Config{Key: ByIP(), Logger: log.Logger()})
	require.NoError(t, err)
	other, err := New(inner, Config{Key: byOther, Logger: log.Logger()})
	require.NoError(t, err)
	serve(t, one(other(other(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))))
	require.Len(t, log.Lines(), 1)
	one, err = New(incomparable{inner}, Config{Key: ByIP(), Logger: log.Logger()})
	require.NoError(t, err)
	serve(t, one(one(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))))
	require.Len(t, log.Lines(), 1)

	// Double charges that begin after many requests are logged too.
	one, err = New(allowing(), Config{Key: ByIP(), Logger: log.Logger()})
	require.NoError(t, err)
	once := one(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for range firstLooks + 1 {
		serve(t, once)
	}
	for range laterLooks {
		serve(t, one(once))
	}
	require.Len(t, log.Lines(), 1)
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
		{ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarDay, Zone: "Europe/Berlin"}, 86400},
		{ratelimit.CalendarWindow{Limit: 1, Unit: ratelimit.CalendarMonth}, 31 * 86400},
		{ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: time.Second}, 1},
		{ratelimit.TokenBucket{Capacity: 1, Refill: 3, Every: time.Second}, 0},
		{ratelimit.TokenBucket{Capacity: 3, Refill: 3, Every: time.Second}, 1},
		{ratelimit.TokenBucket{Capacity: 1 << 42, Refill: 1, Every: time.Second}, 1 << 42},
		{ratelimit.TokenBucket{Capacity: 1 << 62, Refill: 1 << 62, Every: time.Microsecond}, 0},
	} {
		shapes := shapesOf(test.policy)
		require.Len(t, shapes, 1)
		require.Equal(t, test.want, shapes[0].window, "%v", test.policy)
	}
}

// If a request passes several limits, the fields of IETFDraft11 list all limits, and other fields show the last limit.
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

// AddFields is called once for each allowed request, with the same numbers as in the fields of Headers.
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

// Set sets the same fields as the middleware.
func TestSetHeaders(t *testing.T) {
	t.Parallel()
	header := http.Header{}
	policy := ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}
	IETFDraft11.Set(header, "login", policy, ratelimit.Result{Limit: 10, RetryAfter: 1500 * time.Millisecond})
	require.Equal(t, http.Header{
		"Ratelimit-Policy": {`"login";q=10;w=60`}, "Ratelimit": {`"login";r=0;t=2`}, "Retry-After": {"2"},
	}, header)
}
