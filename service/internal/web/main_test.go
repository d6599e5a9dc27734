package web

import (
	"bytes"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

type limiters map[string]*ratelimit.Limiter

func (l limiters) Limiter(name string) (*ratelimit.Limiter, bool) {
	found, ok := l[name]
	return found, ok
}

// log is what a test logs. It may be written by several goroutines.
type log struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *log) Write(text []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(text)
}

func (l *log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// bundle is a handler with limiters.
type bundle struct {
	handler http.Handler
	log     *log
	db      *pgtest.DB
}

func setup(t testing.TB, options Options) bundle {
	t.Helper()
	b := bundle{log: &log{}, db: pgtest.New(t)}
	pool := b.db.NewPool(t, nil)
	logger := slog.New(slog.NewTextHandler(b.log, nil))
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Logger: logger, Timeout: time.Minute})
	require.NoError(t, err)
	l := limiters{}
	for name, policy := range map[string]ratelimit.Policy{
		"login": ratelimit.SlidingWindow{Limit: 3, Window: time.Hour},
		"mail":  ratelimit.FixedWindow{Limit: 100, Window: time.Hour},
		"jobs":  ratelimit.Concurrency{Limit: 2},
		"both":  ratelimit.All(ratelimit.Concurrency{Limit: 3}, ratelimit.FixedWindow{Limit: 5, Window: time.Hour}),
	} {
		l[name], err = client.Limiter(ratelimit.Config{Name: name, Policy: policy})
		require.NoError(t, err)
	}
	options.Limiters, options.DB, options.Logger, options.Timeout = l, pool, logger, time.Minute
	b.handler = New(options)
	return b
}

// reply is an answer in JSON.
type reply struct {
	status int
	header http.Header
	body   map[string]any
}

// post sends a body to a path, and checks the answer against the OpenAPI document.
func post(t testing.TB, h http.Handler, path, body string) reply {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return send(t, h, r)
}

func send(t testing.TB, h http.Handler, r *http.Request) reply {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return replyOf(t, r.URL.Path, r.Method, w)
}

func replyOf(t testing.TB, path, method string, w *httptest.ResponseRecorder) reply {
	t.Helper()
	got := reply{status: w.Code, header: w.Header()}
	text, err := io.ReadAll(w.Body)
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(text, &got.body), string(text))
	checkDocumented(t, path, method, got)
	return got
}
