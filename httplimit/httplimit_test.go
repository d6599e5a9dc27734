package httplimit

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()

	prefix := netip.MustParsePrefix
	for _, test := range []struct {
		config Config
		field  string
		reason string
	}{
		{Config{}, "Key", "is none"},
		{Config{Key: ByFunc(nil)}, "Key", "no function"},
		{Config{Key: ByHeader("")}, "Key", "no name of a header"},
		{Config{Key: ByHeader("a b")}, "Key", "no name of a header"},
		{Config{Key: ByContext(nil)}, "Key", "ByContext(nil)"},
		{Config{Key: Join()}, "Key", "no keys"},
		{Config{Key: Join(ByIP(), Key{})}, "Key", "is Join of a key that is none"},
		{Config{Key: First()}, "Key", "is First of no keys"},
		{Config{Key: First(ByIP(), Key{})}, "Key", "is First of a key that is none"},
		{Config{Key: HMAC(make([]byte, 15), ByIP())}, "Key", "15 bytes, and needs at least 16"},
		{Config{Key: HMAC(make([]byte, 16), Join(ByHeader("é")))}, "Key", "no name of a header"},
		{Config{Key: ByIP(TrustedProxies(netip.Prefix{}))}, "Key", "not valid"},
		{Config{Key: ByIP(TrustedProxies(prefix("10.0.0.0/8"), prefix("0.0.0.0/0")))}, "Key", "trusts everybody"},
		{Config{Key: ByIP(TrustedProxies(prefix("::/0")))}, "Key", "trusts everybody"},
		{Config{Key: ByIP(TrustedProxies(prefix("::ffff:10.0.0.0/104")))}, "Key", "write it as IPv4"},
		{Config{Key: ByIP(AddressHeader("X Real IP"))}, "Key", "no name of a header"},
		{Config{Key: ByIP(IPv6Prefix(47))}, "Key", "from 48 to 128"},
		{Config{Key: ByIP(IPv6Prefix(129))}, "Key", "from 48 to 128"},
		{Config{Key: ByIP(), PolicyName: `a"b`}, "PolicyName", "printable ASCII"},
		{Config{Key: ByIP(), PolicyName: `a\b`}, "PolicyName", "printable ASCII"},
		{Config{Key: ByIP(), PolicyName: "ä"}, "PolicyName", "printable ASCII"},
		{Config{Key: ByIP(), PolicyName: "a\r\nb"}, "PolicyName", "printable ASCII"},
		{Config{Key: ByIP(), Headers: IETFDraft6 + 1}, "Headers", "IETFDraft11"},
		{Config{Key: ByIP(), Headers: -1}, "Headers", "IETFDraft11"},
	} {
		_, err := New(allowing(), test.config)
		configErr, ok := errors.AsType[*ratelimit.ConfigError](err)
		require.True(t, ok, "%+v", test)
		require.Equal(t, "httplimit.Config."+test.field, configErr.Field)
		require.EqualError(t, err, "ratelimit: httplimit.Config."+test.field+" "+configErr.Reason)
		require.ErrorContains(t, err, test.reason)
	}
	_, err := New(nil, Config{Key: ByIP()})
	require.ErrorContains(t, err, "the limiter is nil")
}

// New requires a choice of what happens while Postgres is unreachable. Its error says how to choose.
func TestChoiceForOutagesIsRequired(t *testing.T) {
	t.Parallel()

	undecided := &fakeLimiter{}
	_, err := New(undecided, Config{Key: ByIP()})
	configErr, ok := errors.AsType[*ratelimit.ConfigError](err)
	require.True(t, ok)
	require.Equal(t, "httplimit.Config.OnError", configErr.Field)
	for _, way := range []string{"OnFailure", "FailOpen", "FailClosed", "FallbackLocal", "ReturnError"} {
		require.ErrorContains(t, err, way)
	}

	_, err = New(undecided, Config{Key: ByIP(), OnError: func(http.ResponseWriter, *http.Request, error) {}})
	require.NoError(t, err)
	for _, mode := range []ratelimit.FailureMode{
		ratelimit.ReturnError(), ratelimit.FailOpen(), ratelimit.FailClosed(), ratelimit.FallbackLocal(0.5),
	} {
		_, err = New(&fakeLimiter{onFailure: mode}, Config{Key: ByIP()})
		require.NoError(t, err)
	}
}

func TestAllowedRequestReachesTheHandler(t *testing.T) {
	t.Parallel()

	limiter := allowing()
	response := serve(t, limited(t, limiter, Config{}, nil))
	require.Equal(t, http.StatusOK, response.status)
	require.Equal(t, "through", response.body)
	require.Empty(t, response.header.Get("Retry-After"))
	require.Equal(t, []asked{{"192.0.2.1", 1}}, limiter.asked)
	require.Empty(t, limiter.refunds())
}

// The handler does not see a denied request. The client learns why, and when to try again.
func TestDeniedRequest(t *testing.T) {
	t.Parallel()

	handler := func(http.ResponseWriter, *http.Request) { t.Error("it reached the handler") }
	for retryAfter, seconds := range map[time.Duration]string{
		time.Microsecond:               "1",
		time.Second - time.Microsecond: "1",
		time.Second:                    "1",
		time.Second + time.Microsecond: "2",
		61 * time.Second:               "61",
		71 * 365 * 24 * time.Hour:      "2239056000",
	} {
		response := serve(t, limited(t, denying(retryAfter), Config{}, handler))
		require.Equal(t, http.StatusTooManyRequests, response.status)
		require.Equal(t, seconds, response.header.Get("Retry-After"))
		require.Equal(t, "application/problem+json", response.header.Get("Content-Type"))
		require.JSONEq(t, `{
			"type": "https://iana.org/assignments/http-problem-types#quota-exceeded", "title": "Too many requests.", "status": 429,
			"violated-policies": ["login"]
		}`, response.body)
	}

	response := serve(t, limited(t, denying(1500*time.Millisecond), Config{Reject: PlainText}, handler))
	require.Equal(t, http.StatusTooManyRequests, response.status)
	require.Equal(t, "text/plain; charset=utf-8", response.header.Get("Content-Type"))
	require.Equal(t, "Too many requests. Try again in 2 s.\n", response.body)

	own := func(w http.ResponseWriter, r *http.Request, rejection Rejection) {
		require.Equal(t, Rejection{
			Status: 429, Policy: "slow <down>", RetryAfter: 2 * time.Second, Result: denying(1500 * time.Millisecond).result,
		}, rejection)
		http.Redirect(w, r, "/wait", http.StatusSeeOther)
	}
	config := Config{PolicyName: "slow <down>", Headers: IETFDraft11, Reject: own}
	response = serve(t, limited(t, denying(1500*time.Millisecond), config, handler))
	require.Equal(t, http.StatusSeeOther, response.status)
	require.Equal(t, "2", response.header.Get("Retry-After"))
	require.Equal(t, `"slow <down>";r=0;t=2`, response.header.Get("RateLimit"))
}

// While Postgres is unreachable, Result.Source says how the limiter decided. Without a decision, the fields show no
// limit.
func TestSourcesOfADecision(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		source  ratelimit.Source
		allowed bool
		status  int
		headers bool
	}{
		{ratelimit.SourceDatabase, true, 200, true},
		{ratelimit.SourceDatabase, false, 429, true},
		{ratelimit.SourceCachedDenial, false, 429, true},
		{ratelimit.SourceFallback, true, 200, true},
		{ratelimit.SourceFallback, false, 429, true},
		{ratelimit.SourceFailedOpen, true, 200, false},
		{ratelimit.SourceFailedClosed, false, 503, false},
	} {
		limiter := allowing()
		limiter.result.Allowed, limiter.result.Source = test.allowed, test.source
		// Only takes from the database can be given back.
		response := serve(t, limited(t, limiter, Config{Headers: IETFDraft11, Charge: ChargeFailures}, nil))
		require.Equal(t, test.status, response.status, test)
		require.Equal(t, test.headers, response.header.Get("RateLimit-Policy") != "", test)
		require.Equal(t, test.headers, response.header.Get("RateLimit") != "", test)
		require.Equal(t, !test.allowed, response.header.Get("Retry-After") != "", test)
		require.Equal(t, test.allowed && test.source == ratelimit.SourceDatabase, len(limiter.refunds()) == 1, test)
		if test.status == http.StatusServiceUnavailable {
			require.JSONEq(t, `{
				"type": "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
				"title": "The service cannot take this request for now.", "status": 503, "violated-policies": ["login"]
			}`, response.body)
		}
	}
}

// If the limiter returns an error, the status is 503. The log has one line when errors begin and one line when they
// end, even if only some requests fail.
func TestErrorsOfTheLimiter(t *testing.T) {
	t.Parallel()

	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		limiter := allowing()
		handler := limited(t, limiter, Config{Logger: log.Logger()}, nil)
		for range 3 {
			for range 100 {
				limiter.err = errors.New("the database is gone")
				response := serve(t, handler)
				require.Equal(t, http.StatusServiceUnavailable, response.status)
				require.Equal(t, "1", response.header.Get("Retry-After"))
				require.Contains(t, response.body, "temporary-reduced-capacity")
				limiter.err = nil
				require.Equal(t, http.StatusOK, serve(t, handler).status)
			}
			lines := log.Lines()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "level=WARN")
			require.Contains(t, lines[0], "the database is gone")
			require.Contains(t, lines[0], "policy=login")

			<-time.After(calm)
			for range 100 {
				require.Equal(t, http.StatusOK, serve(t, handler).status)
			}
			lines = log.Lines()
			require.Len(t, lines, 1)
			require.Contains(t, lines[0], "level=INFO")
		}
	})

	limiter := allowing()
	limiter.err = errors.New("the database is gone")
	own := Config{
		OnError: func(w http.ResponseWriter, _ *http.Request, err error) { http.Error(w, err.Error(), http.StatusTeapot) },
	}
	response := serve(t, limited(t, limiter, own, nil))
	require.Equal(t, http.StatusTeapot, response.status)
	require.Equal(t, "the database is gone\n", response.body)
}

// A client that leaves while its request waits for a decision does not count as a failure of the limiter.
func TestClientThatLeavesIsNoFailure(t *testing.T) {
	t.Parallel()

	var log testkit.Journal
	limiter := allowing()
	limiter.err = fmt.Errorf("ratelimit: gave up waiting: %w", context.Canceled)
	config := Config{
		Logger:  log.Logger(),
		OnError: func(http.ResponseWriter, *http.Request, error) { t.Error("it is no error") },
	}
	handler := limited(t, limiter, config, nil)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	response := serve(t, handler, httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	require.Equal(t, statusClientClosedRequest, response.status)
	require.Empty(t, response.body)
	require.Empty(t, log.Lines())

	// After the request's own deadline, the client still waits for an answer.
	ctx, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	limiter.err = fmt.Errorf("ratelimit: gave up waiting: %w", context.DeadlineExceeded)
	config.OnError = nil
	response = serve(t, limited(t, limiter, config, nil), httptest.NewRequestWithContext(ctx, http.MethodGet, "/", nil))
	require.Equal(t, http.StatusServiceUnavailable, response.status)
	require.Empty(t, log.Lines())

	// If a context inside the limiter ends while the client waits, the limiter has failed.
	require.Equal(t, http.StatusServiceUnavailable, serve(t, limited(t, limiter, config, nil)).status)
	require.Len(t, log.Lines(), 1)
}

func TestSkip(t *testing.T) {
	t.Parallel()

	limiter := denying(time.Second)
	config := Config{
		Key:  ByHeader("X-Api-Key"), // a skipped request does not need this header
		Skip: func(r *http.Request) bool { return r.Method == http.MethodGet },
	}
	require.Equal(t, http.StatusOK, serve(t, limited(t, limiter, config, nil)).status)
	require.Empty(t, limiter.asked)

	request := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/", nil)
	request.Header.Set("X-Api-Key", "secret")
	require.Equal(t, http.StatusTooManyRequests, serve(t, limited(t, limiter, config, nil), request).status)
}

func TestCost(t *testing.T) {
	t.Parallel()

	var log testkit.Journal
	cost, limiter := int64(0), allowing()
	handler := limited(t, limiter, Config{
		Logger: log.Logger(), Cost: func(*http.Request) int64 { return cost },
	}, nil)
	require.Equal(t, http.StatusOK, serve(t, handler).status)
	require.Empty(t, limiter.asked)

	cost = 3
	require.Equal(t, http.StatusOK, serve(t, handler).status)
	require.Equal(t, []asked{{"192.0.2.1", 3}}, limiter.asked)

	// Waiting does not help, so there is no Retry-After.
	for range 100 {
		for _, cost := range []int64{11, -1} {
			limiter.err = &ratelimit.CostError{Cost: cost, Limit: 10}
			response := serve(t, handler)
			require.Equal(t, http.StatusBadRequest, response.status)
			require.Empty(t, response.header.Get("Retry-After"))
		}
	}
	require.Len(t, log.Lines(), 1)
}

// A request without a usable key is rejected with status 400. The log has one line, without anything that the client
// sent.
func TestRequestsWithoutAKey(t *testing.T) {
	t.Parallel()

	const personal = "personal"
	proxied := ByIP(TrustedProxies(netip.MustParsePrefix("192.0.2.0/24")))
	forwarded := func(header string, values ...string) func(*http.Request) {
		return func(r *http.Request) { r.Header[header] = values }
	}
	for name, test := range map[string]struct {
		key    Key
		change func(*http.Request)
	}{
		"no header":                    {ByHeader("X-Api-Key"), func(*http.Request) {}},
		"empty header":                 {ByHeader("x-api-key"), forwarded("X-Api-Key", "")},
		"two headers":                  {ByHeader("x-api-key"), forwarded("X-Api-Key", personal, personal)},
		"control characters":           {ByHeader("x-api-key"), forwarded("X-Api-Key", personal+"\x00")},
		"a header of 1 MB":             {ByHeader("x-api-key"), forwarded("X-Api-Key", strings.Repeat(personal, 1<<17))},
		"nothing in the context":       {ByContext(contextKey{}), func(*http.Request) {}},
		"a part is missing":            {Join(ByIP(), ByHeader("X-Api-Key")), func(*http.Request) {}},
		"none of several":              {First(ByHeader("X-Api-Key"), ByContext(contextKey{})), func(*http.Request) {}},
		"nothing to hash":              {HMAC(make([]byte, 16), ByHeader("X-Api-Key")), func(*http.Request) {}},
		"an address of nothing":        {ByIP(), func(r *http.Request) { r.RemoteAddr = "" }},
		"a Unix socket":                {ByIP(), func(r *http.Request) { r.RemoteAddr = "@" }},
		"a name":                       {ByIP(), func(r *http.Request) { r.RemoteAddr = personal + ":80" }},
		"an empty X-Forwarded-For":     {proxied, forwarded("X-Forwarded-For", "")},
		"unknown in X-Forwarded-For":   {proxied, forwarded("X-Forwarded-For", "unknown")},
		"a name in X-Forwarded-For":    {proxied, forwarded("X-Forwarded-For", personal)},
		"1 MB of X-Forwarded-For":      {proxied, forwarded("X-Forwarded-For", strings.Repeat(personal, 1<<17))},
		"thousands of trusted proxies": {proxied, forwarded("X-Forwarded-For", strings.Repeat("192.0.2.1,", 100_000)+"192.0.2.1")},
		"thousands of lines":           {proxied, forwarded("X-Forwarded-For", strings.Split(strings.Repeat("192.0.2.1,", 10_000)+"192.0.2.1", ",")...)},
		"an error of a function":       {ByFunc(func(*http.Request) (string, error) { return "", errors.New(personal) }), func(*http.Request) {}},
		"a key of no text":             {ByFunc(func(*http.Request) (string, error) { return "", nil }), func(*http.Request) {}},
		"a wrapped error of ours": {ByFunc(func(r *http.Request) (string, error) {
			_, err := ByHeader("X").Of(r)
			return "", fmt.Errorf("%s: %w", personal, err)
		}), func(*http.Request) {}},
	} {
		var log testkit.Journal
		limiter := allowing()
		config := Config{Key: test.key, Logger: log.Logger()}
		handler := limited(t, limiter, config, nil)
		for range 100 {
			request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
			test.change(request)
			response := serve(t, handler, request)
			require.Equal(t, http.StatusBadRequest, response.status, name)
			require.Empty(t, response.header.Get("Retry-After"), name)
			require.NotContains(t, response.body, personal, name)
		}
		require.Empty(t, limiter.asked, name)
		lines := log.Lines()
		require.Len(t, lines, 1, name)
		require.NotContains(t, lines[0], personal, name)

		config.Reject = func(w http.ResponseWriter, _ *http.Request, rejection Rejection) {
			require.Error(t, rejection.Err)
			w.WriteHeader(http.StatusForbidden)
		}
		request := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		test.change(request)
		require.Equal(t, http.StatusForbidden, serve(t, limited(t, limiter, config, nil), request).status)
	}
}

// A request whose key the database cannot store gets status 400 too.
func TestKeyThatCannotBeStored(t *testing.T) {
	t.Parallel()

	var log testkit.Journal
	limiter := allowing()
	limiter.err = &ratelimit.KeyError{Reason: "has 513 bytes"}
	handler := limited(t, limiter, Config{Logger: log.Logger()}, nil)
	for range 100 {
		require.Equal(t, http.StatusBadRequest, serve(t, handler).status)
	}
	require.Len(t, log.Lines(), 1)
}

type contextKey struct{}
