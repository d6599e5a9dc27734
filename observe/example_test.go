package observe_test

import (
	"context"
	"fmt"
	"log"
	"log/slog"
	"os"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/observe"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// Each decision is a line at the level Debug.
func ExampleSlog() {
	logger := slog.New(slog.NewTextHandler(os.Stdout, &slog.HandlerOptions{Level: slog.LevelDebug}))
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{Observer: observe.Slog(logger)})
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := client.Limiter(ratelimit.Config{
		Name: "login", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, err)
}
