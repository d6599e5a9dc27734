package web

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func TestAskUntilDenied(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	for left := 2; left >= 0; left-- {
		got := post(t, b.handler, "/v1/ask", `{"limiter": "login", "key": "ada"}`)
		require.Equal(t, http.StatusOK, got.status)
		require.Equal(t, true, got.body["allowed"])
		require.InDelta(t, left, got.body["remaining"], 0)
		require.Equal(t, `"login";q=3;w=3600`, got.header.Get("RateLimit-Policy"))
		require.NotEmpty(t, got.body["receipt"])
	}
	got := post(t, b.handler, "/v1/ask", `{"limiter": "login", "key": "ada"}`)
	require.Equal(t, http.StatusTooManyRequests, got.status)
	require.Equal(t, false, got.body["allowed"])
	require.Equal(t, fmt.Sprint(got.body["retry_after_seconds"]), got.header.Get("Retry-After"))
	require.NotContains(t, got.body, "receipt")
	require.Equal(t, http.StatusTooManyRequests, post(t, b.handler, "/v1/look", `{"limiter":"login","key":"ada"}`).status)
	got = post(t, b.handler, "/v1/wait", `{"limiter": "login", "key": "ada", "timeout": 0.5}`)
	require.Equal(t, http.StatusTooManyRequests, got.status)
	require.Greater(t, got.body["retry_after"], 1.0)
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/wait", `{"limiter": "login", "key": "eva"}`).status)
}

func TestRefundByReceipt(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	got := post(t, b.handler, "/v1/ask", `{"limiter": "mail", "key": "ada", "cost": 10}`)
	receipt, _ := got.body["receipt"].(string)
	body := fmt.Sprintf(`{"limiter": "mail", "receipt": %q, "cost": 4}`, receipt)
	got = post(t, b.handler, "/v1/refund", body)
	require.Equal(t, http.StatusOK, got.status)
	require.InDelta(t, 94, got.body["remaining"], 0)
	require.Equal(t, http.StatusBadRequest,
		post(t, b.handler, "/v1/refund", strings.Replace(body, "mail", "login", 1)).status)
	got = post(t, b.handler, "/v1/charge", `{"limiter": "mail", "key": "ada", "cost": 100}`)
	require.Equal(t, http.StatusOK, got.status)
	require.InDelta(t, 6, got.body["owed"], 0)
	got = post(t, b.handler, "/v1/charge", `{"limiter": "mail", "key": "ada", "cost": 1000}`)
	require.Equal(t, http.StatusConflict, got.status)
	require.Equal(t, "owes_too_much", got.body["kind"])
}

func TestHolds(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	got := post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "ada", "cost": 60, "ttl": 60}`)
	require.Equal(t, http.StatusOK, got.status)
	hold := fmt.Sprintf(`{"limiter": "mail", "hold": %q`, got.body["hold"])
	require.Equal(t, http.StatusTooManyRequests,
		post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "ada", "cost": 60, "ttl": 60}`).status)
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/extend", hold+`, "ttl": 3600}`).status)
	for range 2 { // a settlement can be repeated
		got = post(t, b.handler, "/v1/settle", hold+`, "used": 25}`)
		require.Equal(t, http.StatusOK, got.status)
		require.InDelta(t, 25, got.body["used"], 0)
	}
	require.Equal(t, http.StatusConflict, post(t, b.handler, "/v1/extend", hold+`, "ttl": 3600}`).status)
	require.InDelta(t, 75, post(t, b.handler, "/v1/look", `{"limiter": "mail", "key": "ada"}`).body["remaining"], 0)
	got = post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "eva", "cost": 60, "ttl": 60}`)
	hold = fmt.Sprintf(`{"limiter": "mail", "hold": %q}`, got.body["hold"])
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/cancel", hold).status)
	got = post(t, b.handler, "/v1/cancel", `{"limiter": "mail", "hold": "00000000-0000-4000-8000-000000000000.e"}`)
	require.Equal(t, http.StatusNotFound, got.status)
	require.Equal(t, "hold_unknown", got.body["kind"])
}

func TestSlots(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	const acquire = `{"limiter": "jobs", "key": "ada", "cost": 2, "ttl": 3600, "holder": "worker-7"`
	first := post(t, b.handler, "/v1/acquire", acquire+"}")
	require.Equal(t, http.StatusOK, first.status)
	slot := fmt.Sprintf(`{"slot": %q`, first.body["slot"])
	require.Equal(t, http.StatusTooManyRequests, post(t, b.handler, "/v1/acquire", acquire+"}").status)
	require.Equal(t, http.StatusTooManyRequests,
		post(t, b.handler, "/v1/acquire", acquire+`, "timeout": 0.001}`).status)
	got := post(t, b.handler, "/v1/renew", slot+`, "ttl": 7200}`)
	require.Equal(t, http.StatusOK, got.status)
	require.Equal(t, first.body["fence"], got.body["fence"])

	second := make(chan *httptest.ResponseRecorder)
	go func() {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/acquire",
			strings.NewReader(acquire+`, "timeout": 60}`))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		b.handler.ServeHTTP(w, r)
		second <- w
	}()
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/release", slot+"}").status)
	waited := replyOf(t, "/v1/acquire", http.MethodPost, <-second)
	require.Equal(t, http.StatusOK, waited.status)
	require.Greater(t, waited.body["fence"], first.body["fence"])
	got = post(t, b.handler, "/v1/renew", slot+"}")
	require.Equal(t, http.StatusConflict, got.status)
	require.Equal(t, "slot_lost", got.body["kind"])
	require.Equal(t, http.StatusConflict, post(t, b.handler, "/v1/release", slot+"}").status)
}

func TestAllOrNone(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	const body = `{"limits": [{"limiter": "mail", "key": "ada", "cost": 7},
		{"limiter": "login", "key": "ada", "cost": 2}]}`
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/all", body).status)
	got := post(t, b.handler, "/v1/all", body)
	require.Equal(t, http.StatusTooManyRequests, got.status)
	require.Equal(t, fmt.Sprint(got.body["retry_after_seconds"]), got.header.Get("Retry-After"))
	require.InDelta(t, 93, post(t, b.handler, "/v1/look", `{"limiter": "mail", "key": "ada"}`).body["remaining"], 0)
}

func TestWrongRequestsAreRefused(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	long := strings.Repeat("secret", 100)
	for _, test := range []struct {
		path, body string
		status     int
		field      string
	}{
		{"/v1/ask", ``, 400, ""},
		{"/v1/ask", `null`, 400, ""},
		{"/v1/ask", `[]`, 400, ""},
		{"/v1/ask", `{"limiter": "mail", "key": "secret"`, 400, ""},
		{"/v1/ask", `{"limiter": "mail", "key": "secret"} {}`, 400, ""},
		{"/v1/ask", "{\"limiter\": \"mail\", \"key\": \"secret\xff\"}", 400, ""},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "n": 1}`, 400, "n"},
		{"/v1/ask", `{"limiter": "mail", "key": 1}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": ""}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret\u0000"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "` + long + `"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "cost": -1}`, 400, "cost"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "cost": 101}`, 400, "cost"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "cost": 1.5}`, 400, "cost"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "cost": 1e99}`, 400, "cost"},
		{"/v1/ask", `{"limiter": "mail", "Key": "secret"}`, 400, "Key"},
		{"/v1/ask", "{\"limiter\": \"mail\", \"\u212aey\" \t: \"secret\"}", 400, "\u212aey"}, // encoding/json takes it for k
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "key": "eva"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "k\u0065y": "eva"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret\ud800"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret\udc00"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret\ud83d\ud83d\ude00"}`, 400, "key"},
		{"/v1/ask", `{"key": "secret"}`, 400, "limiter"},
		{"/v1/ask", `{"limiter": "none", "key": "secret"}`, 404, "limiter"},
		{"/v1/ask", `{"key": "` + strings.Repeat("x", 64<<10) + `"}`, 413, ""},
		{"/v1/wait", `{"limiter": "mail", "key": "secret", "timeout": 61}`, 400, "timeout"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "cost": 1}`, 400, "ttl"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "cost": 1, "ttl": 86401}`, 400, "ttl"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "ttl": 1}`, 400, "cost"},
		{"/v1/settle", `{"limiter": "mail", "hold": "secret", "used": 1}`, 400, "hold"},
		{"/v1/settle", `{"limiter": "mail", "hold": ""}`, 400, "used"},
		{"/v1/refund", `{"limiter": "mail", "receipt": "secret"}`, 400, "receipt"},
		{"/v1/acquire", `{"limiter": "jobs", "key": "secret", "cost": 0}`, 400, "cost"},
		{"/v1/acquire", `{"limiter": "jobs", "key": "secret", "ttl": 0.1}`, 400, "ttl"},
		{"/v1/acquire", `{"limiter": "mail", "key": "secret"}`, 400, ""},
		{"/v1/renew", `{"slot": "secret"}`, 400, "slot"},
		{"/v1/all", `{"limits": []}`, 400, "limits"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "key": "a"}, {"limiter": "mail", "key": ""}]}`, 400, "limits[1].key"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "key": "secret", "cost": 0}]}`, 400, "limits[0].cost"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "key": "a"}, {"limiter": "mail", "N": 2}]}`, 400, "N"},
		{"/v1/none", `{}`, 404, ""},
	} {
		got := post(t, b.handler, test.path, test.body)
		require.Equal(t, test.status, got.status, test.path+" "+test.body)
		field, _ := got.body["field"].(string)
		require.Equal(t, test.field, field, test.path+" "+test.body)
		require.NotContains(t, fmt.Sprint(got.body), "secret")
	}
	require.Empty(t, b.log.String())
}

// The error of an unknown field lists those that exist.
func TestUnknownField(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	for _, test := range []struct{ path, body, fields string }{
		{"/v1/ask", `{"limiter": "mail", "key": "ada", "n": 1}`, "limiter, key, cost"},
		{"/v1/ask", `{"limiter": "mail", "Key": "ada"}`, "limiter, key, cost"},
		{"/v1/renew", `{"slots": ""}`, "slot, ttl"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "keys": "ada"}]}`, "limits (each with limiter, key, cost)"},
	} {
		got := post(t, b.handler, test.path, test.body)
		require.Equal(t, "There is no such field; the fields are "+test.fields+".", got.body["detail"], test.body)
	}
}

// A key may have all that JSON can write, and a value may look like a name.
func TestUnusualTexts(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})
	for key, same := range map[string]string{
		`\ud83d\ude00`: "\U0001f600", `\\ud800`: `\\ud800`, `\"key\": \"`: `\u0022key\u0022: \u0022`, `{[`: `\u007b[`,
		`key`: `\u006bey`, `\\`: `\u005c`,
	} {
		require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/ask", `{"limiter": "mail", "key": "`+key+`"}`).status, key)
		got := post(t, b.handler, "/v1/look", ` { "limiter" : "mail" , "key" : "`+same+`" } `)
		require.InDelta(t, 99, got.body["remaining"], 0, key)
	}
}

// All answers that tell of a limit have the header fields of package httplimit, and those that deny have Retry-After.
func TestHeaderFields(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	const ada = `{"limiter": "login", "key": "ada"`
	ask := post(t, b.handler, "/v1/ask", ada+`}`)
	for _, test := range []struct {
		path, body        string
		status, remaining int
	}{
		{"/v1/ask", ada + `}`, 200, 1},
		{"/v1/refund", fmt.Sprintf(`{"limiter": "login", "receipt": %q}`, ask.body["receipt"]), 200, 2},
		{"/v1/look", ada + `}`, 200, 2},
		{"/v1/wait", ada + `, "timeout": 0}`, 200, 1},
		{"/v1/hold", ada + `, "cost": 2, "ttl": 60}`, 429, 1},
		{"/v1/hold", ada + `, "cost": 1, "ttl": 60}`, 200, 0},
		{"/v1/ask", ada + `}`, 429, 0},
		{"/v1/look", ada + `}`, 429, 0},
		{"/v1/wait", ada + `, "timeout": 0.001}`, 429, 0},
		{"/v1/all", `{"limits": [` + ada + `}]}`, 429, 0},
		{"/v1/charge", ada + `, "cost": 5}`, 200, 0},
		{"/v1/acquire", `{"limiter": "jobs", "key": "ada"}`, 200, 1},
		{"/v1/acquire", `{"limiter": "jobs", "key": "ada", "cost": 2}`, 429, 1},
		{"/v1/acquire", `{"limiter": "jobs", "key": "ada"}`, 200, 0},
		{"/v1/acquire", `{"limiter": "jobs", "key": "ada"}`, 429, 0},
		{"/v1/acquire", `{"limiter": "jobs", "key": "ada", "timeout": 0.001}`, 429, 0},
		{"/v1/acquire", `{"limiter": "both", "key": "ada", "cost": 2}`, 200, 1},
	} {
		got := post(t, b.handler, test.path, test.body)
		what := test.path + " " + test.body
		require.Equal(t, test.status, got.status, what)
		require.Contains(t, got.header.Get("RateLimit"), fmt.Sprintf(`;r=%d`, test.remaining), what)
		require.Regexp(t, `^"(login|jobs|both)";q=[235]`, got.header.Get("RateLimit-Policy"), what)
		require.Equal(t, test.status == 429, got.header.Get("Retry-After") != "", what)
		if test.status == 429 {
			require.Equal(t, fmt.Sprint(got.body["retry_after_seconds"]), got.header.Get("Retry-After"), what)
		}
	}
	got := post(t, b.handler, "/v1/acquire", `{"limiter": "both", "key": "eva", "cost": 2}`)
	require.Equal(t, `"both";r=1, "both/2";r=3;t=3600`, got.header.Get("RateLimit"))
}

// leave sends a request whose caller leaves when a condition holds. The function wait waits until the request has ended.
func (b *bundle) leave(t *testing.T, path, body string, condition func() bool) (wait func()) {
	t.Helper()
	ctx, leave := context.WithCancel(t.Context())
	left := make(chan struct{})
	go func() {
		defer close(left)
		r := httptest.NewRequestWithContext(ctx, http.MethodPost, path, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		b.handler.ServeHTTP(httptest.NewRecorder(), r)
	}()
	testkit.WaitUntil(t, condition)
	leave()
	return func() { <-left }
}

func (b *bundle) slots(t *testing.T) int {
	t.Helper()
	return pgtest.Scalar[int](t, b.db.Pool, "SELECT count(*) FROM rate_limit_ephemeral_hold")
}

const takesBoth = `{"limiter": "jobs", "key": "ada", "cost": 2, "ttl": 3600`

// A caller who leaves while he waits in line leaves no slot and no place.
func TestCallerLeavesTheLine(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	first := post(t, b.handler, "/v1/acquire", takesBoth+"}")
	require.Equal(t, http.StatusOK, first.status)
	b.leave(t, "/v1/acquire", takesBoth+`, "timeout": 60}`, func() bool { return b.slots(t) == 2 })()
	require.Equal(t, 1, b.slots(t))
	post(t, b.handler, "/v1/release", fmt.Sprintf(`{"slot": %q}`, first.body["slot"]))
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/acquire", takesBoth+"}").status)
	require.Empty(t, b.log.String())
}

// So does a caller who leaves while the database decides.
func TestCallerLeavesDuringTheStatement(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "it locks a table of the database")
	b := setup(t, Options{})

	tx, err := b.db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE rate_limit_ephemeral_hold IN SHARE MODE")
	require.NoError(t, err)
	wait := b.leave(t, "/v1/acquire", takesBoth+`}`, func() bool {
		return pgtest.Scalar[int](t, b.db.Pool, "SELECT count(*) FROM pg_locks WHERE NOT granted AND "+
			"relation = 'rate_limit_ephemeral_hold'::regclass") > 0
	})
	require.NoError(t, tx.Rollback(t.Context()))
	wait()
	require.Zero(t, b.slots(t))
}

func TestMethodTypeAndToken(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{Token: "open sesame"})

	request := func(method, kind, token string) *http.Request {
		r := httptest.NewRequestWithContext(t.Context(), method, "/v1/ask",
			strings.NewReader(`{"limiter": "mail", "key": "ada"}`))
		r.Header.Set("Content-Type", kind)
		r.Header.Set("Authorization", token)
		return r
	}
	const right = "Bearer open sesame"
	require.Equal(t, http.StatusOK, send(t, b.handler, request("POST", "application/json", right)).status)
	for _, token := range []string{"", "Bearer", "Bearer open", "Basic open sesame", right + "!"} {
		got := send(t, b.handler, request("POST", "application/json", token))
		require.Equal(t, http.StatusUnauthorized, got.status, token)
		require.Equal(t, "Bearer", got.header.Get("WWW-Authenticate"))
	}
	got := send(t, b.handler, request("GET", "application/json", right))
	require.Equal(t, http.StatusMethodNotAllowed, got.status)
	require.Equal(t, "POST", got.header.Get("Allow"))
	require.Equal(t, "Use POST.", got.body["detail"])
	require.Equal(t, http.StatusUnsupportedMediaType, send(t, b.handler, request("POST", "text/plain", right)).status)
}
