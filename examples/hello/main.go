// A server that allows each address ten requests a minute.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func hello(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "hello") }

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool); err != nil { // creates the library's tables and functions
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "address",
		Policy:    ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
		OnFailure: ratelimit.FailOpen(), // allow requests while Postgres is unreachable
	})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httplimit.New(limiter, httplimit.Config{Key: httplimit.ByIP(), Headers: httplimit.IETFDraft11})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/", limit(http.HandlerFunc(hello)))
	log.Fatal(http.ListenAndServe("localhost:8080", nil))
}
