package otelratelimit_test

import (
	"fmt"

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
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{Observer: observer})
	fmt.Println(client != nil, err)
}

// Gauges of the tables, and of how long ago a sweep has finished.
func ExampleObserveTables() {
	var pool *pgxpool.Pool
	registration, err := otelratelimit.ObserveTables(otel.Meter("github.com/pgratelimit/ratelimit"), pool, "")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer func() { _ = registration.Unregister() }()
}
