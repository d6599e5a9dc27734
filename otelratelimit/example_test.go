package otelratelimit_test

import (
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/otelratelimit"
)

func Example() {
	var pool *pgxpool.Pool
	observer, err := otelratelimit.New(otel.Meter("github.com/pgratelimit/ratelimit"))
	if err != nil {
		fmt.Println(err)
		return
	}
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "login",
		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
		Client: ratelimit.ClientConfig{Observer: observer},
	})
	fmt.Println(limiter != nil, err)
}
