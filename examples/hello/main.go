package main

import (
	"context"
	"log"
	"net/http"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
)

func main() {
	pool, err := pgxpool.New(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{Name: "hello", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}})
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe("localhost:8080", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if result, err := limiter.Allow(r.Context(), r.URL.Path); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		} else if !result.Allowed {
			http.Error(w, "retry after "+result.RetryAfter.String(), http.StatusTooManyRequests)
		}
	})))
}
