package ratelimittest_test

import (
	"context"
	"fmt"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

func ExampleNewDB() {
	now := time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC)
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{
		Test: ratelimit.TestConfig{Now: func() time.Time { return now }},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	limiter, err := client.Limiter(ratelimit.Config{
		Name:   "login",
		Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Minute},
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	for range 3 {
		result, err := limiter.Allow(context.Background(), "user:123")
		fmt.Println(result.Allowed, result.RetryAfter, err)
		now = now.Add(10 * time.Second)
	}
	// Output:
	// true 0s <nil>
	// true 0s <nil>
	// false 40s <nil>
}
