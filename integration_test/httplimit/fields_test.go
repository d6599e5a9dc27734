package httplimit

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// member is a member of a field from the draft: a String and integers.
type member struct {
	name       string
	parameters map[string]int64
}

// parse parses a field according to RFC 9651.
func parse(t *testing.T, header http.Header, field string) []member {
	t.Helper()
	list, err := httpsfv.UnmarshalList(header.Values(field))
	require.NoError(t, err, header.Values(field))
	var members []member
	for _, item := range list {
		item := item.(httpsfv.Item)
		m := member{item.Value.(string), map[string]int64{}}
		for _, name := range item.Params.Names() {
			value, _ := item.Params.Get(name)
			m.parameters[name] = value.(int64)
		}
		members = append(members, m)
	}
	return members
}

// A third-party parser accepts the fields as structured fields with the right values.
func TestFieldsAreStructured(t *testing.T) {
	t.Parallel()

	now := newClock()
	for name, test := range map[string]struct {
		policy         ratelimit.Policy
		quota, window  int64 // window is 0 if the field has none
		allowed, after int64 // the parameter t of an allowed request, or 0; then t of a denied request
	}{
		"fixed":                            {ratelimit.FixedWindow{Limit: 2, Window: 90 * time.Second}, 2, 90, 90, 90},
		"sliding":                          {ratelimit.SlidingWindow{Limit: 2, Window: time.Minute}, 2, 60, 0, 90},
		"bucket":                           {ratelimit.TokenBucket{Capacity: 2, Refill: 1, Every: 1500 * time.Millisecond}, 2, 3, 0, 2},
		"no window":                        {ratelimit.FixedWindow{Limit: 2, Window: 1500 * time.Millisecond}, 2, 0, 2, 2},
		"!#$%&'()*+,-./:;<=>?@[]^_`{|}~ A": {ratelimit.FixedWindow{Limit: 2, Window: time.Second}, 2, 1, 1, 1},
		"huge":                             {ratelimit.FixedWindow{Limit: 1 << 62, Window: time.Microsecond}, 999_999_999_999_999, 0, 1, 0},
	} {
		limiter := newLimiter(t, ratelimit.Config{Policy: test.policy}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: now.read}})
		outer, err := httplimit.New(limiter, httplimit.Config{
			Key: httplimit.ByIP(), Headers: httplimit.IETFDraft11, PolicyName: "outer",
			Skip: func(r *http.Request) bool { return r.URL.Path != "/both" },
		})
		require.NoError(t, err)
		inner, err := httplimit.New(
			limiter,
			httplimit.Config{Key: httplimit.ByHeader("User"), Headers: httplimit.IETFDraft11, PolicyName: name},
		)
		require.NoError(t, err)
		handler := outer(inner(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
		ask := func(path string) (int, http.Header) {
			r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, path, nil)
			r.Header.Set("User", "alice")
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, r)
			return w.Code, w.Header()
		}

		policy := member{name, map[string]int64{"q": test.quota}}
		if test.window > 0 {
			policy.parameters["w"] = test.window
		}
		status, header := ask("/one")
		require.Equal(t, http.StatusOK, status)
		require.Equal(t, []member{policy}, parse(t, header, "RateLimit-Policy"))
		left := member{name, map[string]int64{"r": 1}}
		if test.allowed > 0 {
			left.parameters["t"] = test.allowed
		}
		if name == "huge" {
			left.parameters["r"] = test.quota
			require.Equal(t, []member{left}, parse(t, header, "RateLimit"))
			continue
		}
		require.Equal(t, []member{left}, parse(t, header, "RateLimit"))

		// Two limits are two members of one list.
		status, header = ask("/both")
		require.Equal(t, http.StatusOK, status)
		policies := parse(t, header, "RateLimit-Policy")
		require.Len(t, policies, 2)
		require.Equal(t, "outer", policies[0].name)
		require.Equal(t, policy, policies[1])

		status, header = ask("/one")
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Equal(t, []member{policy}, parse(t, header, "RateLimit-Policy"))
		require.Equal(t, []member{{name, map[string]int64{"r": 0, "t": test.after}}}, parse(t, header, "RateLimit"))
		retryAfter, err := strconv.ParseInt(header.Get("Retry-After"), 10, 64)
		require.NoError(t, err)
		require.Equal(t, test.after, retryAfter)
	}
}

// A limit of slots has a unit of the draft.
func TestFieldsOfSlotsAreStructured(t *testing.T) {
	t.Parallel()

	limiter := newLimiter(t, ratelimit.Config{Policy: ratelimit.Concurrency{Limit: 2}})
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key: httplimit.ByIP(), Headers: httplimit.IETFDraft11, Cost: func(*http.Request) int64 { return 2 },
	})
	require.NoError(t, err)
	ask := func(next http.HandlerFunc) http.Header {
		w := httptest.NewRecorder()
		limit(next).ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
		return w.Header()
	}
	var denied http.Header
	allowed := ask(func(http.ResponseWriter, *http.Request) { denied = ask(nil) })
	for _, header := range []http.Header{allowed, denied} {
		list, err := httpsfv.UnmarshalList(header.Values("RateLimit-Policy"))
		require.NoError(t, err)
		require.Len(t, list, 1)
		require.Equal(t, "api", list[0].(httpsfv.Item).Value)
		require.Equal(t, []string{"q", "qu"}, list[0].(httpsfv.Item).Params.Names())
		unit, _ := list[0].(httpsfv.Item).Params.Get("qu")
		require.Equal(t, "concurrent-requests", unit)
	}
	require.Equal(t, []member{{"api", map[string]int64{"r": 0}}}, parse(t, allowed, "RateLimit"))
	retryAfter, err := strconv.ParseInt(denied.Get("Retry-After"), 10, 64)
	require.NoError(t, err)
	require.Equal(t, []member{{"api", map[string]int64{"r": 0, "t": retryAfter}}}, parse(t, denied, "RateLimit"))
}

// In revision 6 of the draft, the fields are Items, and the policy field is a List of integers.
func TestFieldsOfDraft6AreStructured(t *testing.T) {
	t.Parallel()

	for _, test := range []struct {
		policy ratelimit.Policy
		limit  int64
		window any // nil if the field has none
		resets [2]int64
	}{
		{ratelimit.SlidingWindow{Limit: 1, Window: time.Minute}, 1, int64(60), [2]int64{120, 120}},
		{ratelimit.TokenBucket{Capacity: 1, Refill: 1, Every: 1500 * time.Millisecond}, 1, nil, [2]int64{2, 2}},
		{ratelimit.SlidingLog{Limit: 1, Window: time.Hour}, 1, int64(3600), [2]int64{3600, 3600}},
	} {
		limiter := newLimiter(t, ratelimit.Config{Policy: test.policy}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: newClock().read}})
		limit, err := httplimit.New(limiter, httplimit.Config{Key: httplimit.ByIP(), Headers: httplimit.IETFDraft6})
		require.NoError(t, err)
		handler := limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
		for i, reset := range test.resets {
			w := httptest.NewRecorder()
			handler.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil))
			for field, want := range map[string]int64{
				"RateLimit-Limit": test.limit, "RateLimit-Remaining": 0, "RateLimit-Reset": reset,
			} {
				item, err := httpsfv.UnmarshalItem(w.Header().Values(field))
				require.NoError(t, err)
				require.Equal(t, want, item.Value, "%s of %v", field, test.policy)
				require.Empty(t, item.Params.Names())
			}
			if i == 1 {
				require.Equal(t, http.StatusTooManyRequests, w.Code)
				require.Equal(t, w.Header().Get("RateLimit-Reset"), w.Header().Get("Retry-After"))
			}
			policies, err := httpsfv.UnmarshalList(w.Header().Values("RateLimit-Policy"))
			if test.window == nil {
				require.Empty(t, policies)
				continue
			}
			require.NoError(t, err)
			require.Len(t, policies, 1)
			item := policies[0].(httpsfv.Item)
			require.Equal(t, test.limit, item.Value)
			window, _ := item.Params.Get("w")
			require.Equal(t, test.window, window)
		}
	}
}

// This is a negative control: the parser refuses malformed fields.
func TestParserRefuses(t *testing.T) {
	t.Parallel()

	for _, field := range []string{`"a"b";q=1`, `"a";q=1000000000000000`, `"a\";q=1`, `"ä";q=1`, `"a";q=`} {
		_, err := httpsfv.UnmarshalList([]string{field})
		require.Error(t, err, field)
	}
}
