package metrics

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/service"
)

// serving is a service with a limiter and a rule for Envoy, whose callers ask over HTTP.
type serving struct {
	address string // of HTTP
	dir     string
}

// startService starts a service. The function end ends it.
func startService(t *testing.T, pool *pgxpool.Pool) (s *serving, end func()) {
	t.Helper()
	s = &serving{dir: t.TempDir()}
	s.mend(t)
	s.write(t, "shop.yaml", "domain: shop\ndescriptors:\n- key: address\n"+
		"  rate_limit: {unit: minute, requests_per_unit: 100}\n")
	ctx, cancel := context.WithCancel(context.Background())
	started, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		ended <- service.Run(ctx, service.Options{
			DB: pool, Dir: s.dir, HTTP: "127.0.0.1:0", GRPC: "127.0.0.1:0", Drain: time.Minute,
			Logger: slog.New(slog.DiscardHandler),
			Started: func(_, http, _ net.Addr) {
				s.address = http.String()
				close(started)
			},
		})
	}()
	select {
	case <-started:
	case err := <-ended:
		require.NoError(t, err, "the service has ended")
	}
	end = sync.OnceFunc(func() {
		cancel()
		require.NoError(t, <-ended)
	})
	t.Cleanup(end)
	return s, end
}

func (s *serving) write(t *testing.T, name, content string) {
	t.Helper()
	require.NoError(t, os.WriteFile(filepath.Join(s.dir, name), []byte(content), 0o600))
}

// mend writes the right limiters.
func (s *serving) mend(t *testing.T) {
	t.Helper()
	s.write(t, "limiters.yaml", "limiters:\n- {name: uploads, policy: "+uploads+", on_failure: allow}\n")
}

const uploads = "bucket 5 5/1s"

// hold begins a transaction that holds a key that callers use, until end is called.
func (s *serving) hold(t *testing.T, pool *pgxpool.Pool) (end func()) {
	t.Helper()
	tx, err := pool.Begin(context.Background())
	require.NoError(t, err)
	end = sync.OnceFunc(func() { _ = tx.Rollback(context.Background()) })
	t.Cleanup(end)
	_, err = tx.Exec(t.Context(), "SELECT rate_limit_allow('uploads', 'user 0', $1)", uploads)
	require.NoError(t, err)
	return end
}

// metrics returns what the service serves at /metrics.
func (s *serving) metrics(t *testing.T) string {
	t.Helper()
	response, err := http.Get("http://" + s.address + "/metrics")
	require.NoError(t, err)
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return string(text)
}

// run asks until end is called. Some requests are denied, and some are wrong.
func (s *serving) run() (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	for i := range 4 {
		running.Go(func() {
			ticker := time.NewTicker(50 * time.Millisecond)
			defer ticker.Stop()
			for ctx.Err() == nil {
				s.askAll(ctx, i)
				select {
				case <-ticker.C:
				case <-ctx.Done():
				}
			}
		})
	}
	return func() {
		cancel()
		running.Wait()
	}
}

// askAll sends a request to a limiter, one to a rule, and two that are wrong.
func (s *serving) askAll(ctx context.Context, caller int) {
	s.ask(ctx, "/v1/ask", fmt.Sprintf(`{"limiter": "uploads", "key": "user %d"}`, caller))
	for _, domain := range []string{"shop", "unknown", ""} {
		s.ask(ctx, "/json", fmt.Sprintf(`{"domain": %q, "descriptors": [{"entries": [{"key": "address", `+
			`"value": "192.0.2.%d"}]}]}`, domain, caller))
	}
}

// ask sends a request. Errors appear in the metrics.
func (s *serving) ask(ctx context.Context, path, body string) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+s.address+path, strings.NewReader(body))
	if err != nil {
		return
	}
	request.Header.Set("Content-Type", "application/json")
	if response, err := http.DefaultClient.Do(request); err == nil {
		response.Body.Close()
	}
}
