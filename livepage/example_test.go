package livepage_test

import (
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/livepage"
)

// The page is at http://localhost:8080/debug/ratelimit, for programs on this host.
func Example() {
	var (
		pool    *pgxpool.Pool
		server  = &http.Server{Addr: "localhost:8080"}
		mux     = http.NewServeMux()
		metrics *ratelimit.Observer
	)
	_, _ = newLimiter(pool, server, mux, metrics)
}

func newLimiter(
	pool *pgxpool.Pool, server *http.Server, mux *http.ServeMux, metrics *ratelimit.Observer,
) (*ratelimit.Limiter, error) {
	page := livepage.New(livepage.Config{})
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{
		Observer: ratelimit.Observers(page.Observer(), metrics), // metrics is an observer that you have, or nil
	})
	if err != nil {
		return nil, err
	}
	mux.Handle("/debug/ratelimit", page)
	server.RegisterOnShutdown(page.Close) // otherwise open pages delay the server's Shutdown
	return client.Limiter(ratelimit.Config{
		Name: "login", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}, OnFailure: ratelimit.FailOpen(),
	})
}
