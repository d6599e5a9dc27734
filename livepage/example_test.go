package livepage_test

import (
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/livepage"
)

func Example() {
	newServer := func(pool, readerPool *pgxpool.Pool, other *ratelimit.Observer) (*http.Server, error) {
		page := livepage.New(livepage.Config{DB: readerPool}) // without DB, the page shows only this process
		client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{
			Observer: ratelimit.Observers(page.Observer(), other),
		})
		if err != nil {
			return nil, err
		}
		login, err := client.Limiter(ratelimit.Config{
			Name: "login", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
			OnFailure: ratelimit.FailOpen(),
		})
		if err != nil {
			return nil, err
		}
		page.AddLimiters(login)

		mux := http.NewServeMux()
		mux.Handle("/debug/ratelimit", page)
		server := &http.Server{Addr: "localhost:8080", Handler: mux}
		server.RegisterOnShutdown(page.Close)
		return server, nil
	}
	fmt.Println(newServer != nil)
	// Output: true
}
