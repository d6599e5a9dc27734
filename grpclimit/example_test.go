package grpclimit_test

import (
	"context"
	"errors"
	"log"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/grpclimit"
	"github.com/pgratelimit/ratelimit/httplimit"
)

// Each address may fail to log in 5 times in a quarter of an hour. Other methods are not limited.
func Example() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "login",
		Policy:    ratelimit.SlidingWindow{Limit: 5, Window: 15 * time.Minute},
		OnFailure: ratelimit.FailClosed(), // no log-ins while Postgres is unreachable
	})
	if err != nil {
		log.Fatal(err)
	}
	server := newServer(limiter)
	defer server.Stop()
	// Register the services here, and serve.
}

func newServer(limiter httplimit.Limiter) *grpc.Server {
	limit, err := grpclimit.New(limiter, grpclimit.Config{
		Key:    httplimit.ByIP(),
		Charge: grpclimit.ChargeFailures,
		Cost: func(_ context.Context, fullMethod string) int64 {
			if fullMethod == "/shop.Account/LogIn" {
				return 1
			}
			return 0 // other methods are not limited
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	server := grpc.NewServer(grpc.ChainUnaryInterceptor(limit.Unary), grpc.ChainStreamInterceptor(limit.Stream))
	return server
}

// The key is the customer in the metadata of the call.
func ExampleByFunc() {
	var limiter *ratelimit.Limiter
	limit, err := grpclimit.New(limiter, grpclimit.Config{
		Key: grpclimit.ByFunc(func(ctx context.Context, _ string) (string, error) {
			customers := metadata.ValueFromIncomingContext(ctx, "customer") // set by an interceptor that authenticates
			if len(customers) != 1 {
				return "", errors.New("no customer")
			}
			return customers[0], nil
		}),
	})
	if err != nil {
		log.Fatal(err)
	}
	_ = grpc.NewServer(grpc.ChainUnaryInterceptor(limit.Unary))
}
