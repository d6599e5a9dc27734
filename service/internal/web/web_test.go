package web

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
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

	got := post(t, b.handler, "/v1/ask", `{"limiter": "mail", "key": "ada", "n": 10}`)
	receipt, _ := got.body["receipt"].(string)
	body := fmt.Sprintf(`{"limiter": "mail", "receipt": %q, "n": 4}`, receipt)
	got = post(t, b.handler, "/v1/refund", body)
	require.Equal(t, http.StatusOK, got.status)
	require.InDelta(t, 94, got.body["remaining"], 0)
	require.Equal(t, http.StatusBadRequest,
		post(t, b.handler, "/v1/refund", strings.Replace(body, "mail", "login", 1)).status)
	got = post(t, b.handler, "/v1/charge", `{"limiter": "mail", "key": "ada", "n": 100}`)
	require.Equal(t, http.StatusOK, got.status)
	require.InDelta(t, 6, got.body["owed"], 0)
	got = post(t, b.handler, "/v1/charge", `{"limiter": "mail", "key": "ada", "n": 1000}`)
	require.Equal(t, http.StatusConflict, got.status)
	require.Equal(t, "owes_too_much", got.body["kind"])
}

func TestHolds(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	got := post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "ada", "n": 60, "ttl": 60}`)
	require.Equal(t, http.StatusOK, got.status)
	hold := fmt.Sprintf(`{"limiter": "mail", "hold": %q`, got.body["hold"])
	require.Equal(t, http.StatusTooManyRequests,
		post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "ada", "n": 60, "ttl": 60}`).status)
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/extend", hold+`, "ttl": 3600}`).status)
	for range 2 { // a settlement can be repeated
		got = post(t, b.handler, "/v1/settle", hold+`, "used": 25}`)
		require.Equal(t, http.StatusOK, got.status)
		require.InDelta(t, 25, got.body["used"], 0)
	}
	require.Equal(t, http.StatusConflict, post(t, b.handler, "/v1/extend", hold+`, "ttl": 3600}`).status)
	require.InDelta(t, 75, post(t, b.handler, "/v1/look", `{"limiter": "mail", "key": "ada"}`).body["remaining"], 0)
	got = post(t, b.handler, "/v1/hold", `{"limiter": "mail", "key": "eva", "n": 60, "ttl": 60}`)
	hold = fmt.Sprintf(`{"limiter": "mail", "hold": %q}`, got.body["hold"])
	require.Equal(t, http.StatusOK, post(t, b.handler, "/v1/cancel", hold).status)
	got = post(t, b.handler, "/v1/cancel", `{"limiter": "mail", "hold": "00000000-0000-4000-8000-000000000000.e"}`)
	require.Equal(t, http.StatusNotFound, got.status)
	require.Equal(t, "hold_unknown", got.body["kind"])
}

func TestSlots(t *testing.T) {
	t.Parallel()
	b := setup(t, Options{})

	const acquire = `{"limiter": "jobs", "key": "ada", "ttl": 3600, "holder": "worker-7"`
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

	const body = `{"limits": [{"limiter": "mail", "key": "ada", "n": 7}, {"limiter": "login", "key": "ada", "n": 2}]}`
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
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "cost": 1}`, 400, "cost"},
		{"/v1/ask", `{"limiter": "mail", "key": 1}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": ""}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret\u0000"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "` + long + `"}`, 400, "key"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "n": -1}`, 400, "n"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "n": 101}`, 400, "n"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "n": 1.5}`, 400, "n"},
		{"/v1/ask", `{"limiter": "mail", "key": "secret", "n": 1e99}`, 400, "n"},
		{"/v1/ask", `{"key": "secret"}`, 400, "limiter"},
		{"/v1/ask", `{"limiter": "none", "key": "secret"}`, 404, "limiter"},
		{"/v1/ask", `{"key": "` + strings.Repeat("x", 64<<10) + `"}`, 413, ""},
		{"/v1/wait", `{"limiter": "mail", "key": "secret", "timeout": 61}`, 400, "timeout"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "n": 1}`, 400, "ttl"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "n": 1, "ttl": 86401}`, 400, "ttl"},
		{"/v1/hold", `{"limiter": "mail", "key": "secret", "ttl": 1}`, 400, "n"},
		{"/v1/settle", `{"limiter": "mail", "hold": "secret", "used": 1}`, 400, "hold"},
		{"/v1/settle", `{"limiter": "mail", "hold": ""}`, 400, "used"},
		{"/v1/refund", `{"limiter": "mail", "receipt": "secret"}`, 400, "receipt"},
		{"/v1/acquire", `{"limiter": "jobs", "key": "secret", "n": 0}`, 400, "n"},
		{"/v1/acquire", `{"limiter": "jobs", "key": "secret", "ttl": 0.1}`, 400, "ttl"},
		{"/v1/acquire", `{"limiter": "mail", "key": "secret"}`, 400, ""},
		{"/v1/renew", `{"slot": "secret"}`, 400, "slot"},
		{"/v1/all", `{"limits": []}`, 400, "limits"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "key": "a"}, {"limiter": "mail", "key": ""}]}`, 400, "limits[1].key"},
		{"/v1/all", `{"limits": [{"limiter": "mail", "key": "secret", "n": 0}]}`, 400, "limits[0].n"},
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
	require.Equal(t, http.StatusUnsupportedMediaType, send(t, b.handler, request("POST", "text/plain", right)).status)
}
