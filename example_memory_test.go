package ratelimit_test

import (
	"context"
	"fmt"
	"log"
	"net"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// These examples run. Their database is in memory, and their clock stands at noon.

// newLimiter returns a limiter for an example. On Postgres, it is ratelimit.New(pool, config).
func newLimiter(config ratelimit.Config) *ratelimit.Limiter { return newLimiters(config)[0] }

// newLimiters returns limiters of one client.
func newLimiters(configs ...ratelimit.Config) (limiters []*ratelimit.Limiter) {
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{Test: ratelimit.TestConfig{
		Now: func() time.Time { return time.Date(2026, 11, 22, 12, 0, 0, 0, time.UTC) },
	}})
	if err != nil {
		log.Fatal(err)
	}
	for _, config := range configs {
		limiter, err := client.Limiter(config)
		if err != nil {
			log.Fatal(err)
		}
		limiters = append(limiters, limiter)
	}
	return limiters
}

// Two requests a minute. The third is denied, and is told when to come back.
func Example() {
	limiter := newLimiter(ratelimit.Config{
		Name:   "login",
		Policy: ratelimit.SlidingWindow{Limit: 2, Window: time.Minute},
	})
	for range 3 {
		result, err := limiter.Allow(context.Background(), "user:123")
		fmt.Println(result.Allowed, result.Remaining, result.RetryAfter, err)
	}
	// Output:
	// true 1 0s <nil>
	// true 0 0s <nil>
	// false 0 1m30s <nil>
}

// A file of settings has policies as text.
func ExampleParsePolicy() {
	for _, text := range []string{"sliding 100/1m", "bucket 20 5/10s", "concurrent 5", "sliding 100"} {
		policy, err := ratelimit.ParsePolicy(text)
		fmt.Printf("%T %v\n", policy, err != nil)
	}
	// Output:
	// ratelimit.SlidingWindow false
	// ratelimit.TokenBucket false
	// ratelimit.Concurrency false
	// <nil> true
}

// A page shows how much is left. Peek takes nothing.
func ExampleLimiter_Peek() {
	ctx := context.Background()
	limiter := newLimiter(ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 100, Window: time.Hour},
	})
	_, err := limiter.AllowN(ctx, "user:123", 30)
	fmt.Println(err)
	state, err := limiter.Peek(ctx, "user:123")
	fmt.Println(state.Remaining, "of", state.Limit, "left, all again in", state.ResetAfter, err)
	// Output:
	// <nil>
	// 70 of 100 left, all again in 1h0m0s <nil>
}

// Somebody has logged in, so the failures before do not count any more.
func ExampleLimiter_Reset() {
	ctx := context.Background()
	limiter := newLimiter(ratelimit.Config{
		Name: "failures", Policy: ratelimit.SlidingWindow{Limit: 5, Window: time.Hour},
	})
	_, err := limiter.AllowN(ctx, "user:123", 5)
	fmt.Println(err, limiter.Reset(ctx, "user:123"))
	state, err := limiter.Peek(ctx, "user:123")
	fmt.Println(state.Remaining, err)
	// Output:
	// <nil> <nil>
	// 5 <nil>
}

// Support asks why a customer is limited.
func ExampleLimiter_Explain() {
	limiter := newLimiter(ratelimit.Config{
		Name: "api", Policy: ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
	})
	explanation, err := limiter.Explain(context.Background(), "user:123")
	fmt.Println(explanation.Policy, "by", explanation.Origin, err)
	// Output:
	// sliding 100/1m by code <nil>
}

// One report at a time for each tenant. Whoever is second does not wait.
func ExampleLimiter_TryAcquire() {
	ctx := context.Background()
	limiter := newLimiter(ratelimit.Config{Name: "reports", Policy: ratelimit.Concurrency{Limit: 1}})
	first, err := limiter.TryAcquire(ctx, "tenant:7", ratelimit.SlotOptions{})
	fmt.Println(first.Allowed, err)
	second, err := limiter.TryAcquire(ctx, "tenant:7", ratelimit.SlotOptions{})
	fmt.Println(second.Allowed, err)
	fmt.Println(first.Slot.Release(ctx)) // once the report is done
	// Output:
	// true <nil>
	// false <nil>
	// <nil>
}

// Five at a time for a tenant. Limiter.Acquire waits for a slot, and Limiter.TryAcquire does not.
func ExampleConcurrency() {
	limiter := newLimiter(ratelimit.Config{Name: "jobs", Policy: ratelimit.Concurrency{Limit: 5}})
	ctx := context.Background()
	slot, err := limiter.Acquire(ctx, "tenant:7", ratelimit.SlotOptions{N: 3}) // a big job takes 3 of the 5
	if err != nil {
		log.Fatal(err)
	}
	state, err := limiter.Peek(ctx, "tenant:7")
	fmt.Println(state.Remaining, err)
	fmt.Println(slot.Release(ctx))
	// Output:
	// 2 <nil>
	// <nil>
}

// A queue has the receipt of a take. The worker that fails gives the units back.
func ExampleLimiter_ParseReceipt() {
	ctx := context.Background()
	limiter := newLimiter(ratelimit.Config{
		Name: "exports", Policy: ratelimit.FixedWindow{Limit: 10, Window: time.Hour},
	})
	taken, err := limiter.AllowN(ctx, "user:123", 4)
	if err != nil {
		log.Fatal(err)
	}
	receipt, err := taken.Receipt() // text, for the queue
	fmt.Println(receipt != "", err)

	taken, err = limiter.ParseReceipt(receipt)
	if err != nil {
		log.Fatal(err)
	}
	balance, err := limiter.Refund(ctx, taken)
	fmt.Println(balance.Remaining, err)
	// Output:
	// true <nil>
	// 10 <nil>
}

// A request to a language model holds 4,000 tokens of the minute and of the day, and uses 2,719.
func ExampleHoldAll() {
	ctx := context.Background()
	limiters := newLimiters(
		ratelimit.Config{Name: "minute", Policy: ratelimit.SlidingWindow{Limit: 10_000, Window: time.Minute}},
		ratelimit.Config{Name: "day", Policy: ratelimit.FixedWindow{Limit: 100_000, Window: 24 * time.Hour}},
	)
	results, err := ratelimit.HoldAll(ctx, 2*time.Minute,
		limiters[0].Request("tenant:7", 4000), limiters[1].Request("tenant:7", 4000))
	if err != nil || results.Hold == nil {
		log.Fatal(err)
	}
	settlement, err := results.Hold.Settle(ctx, 2719)
	fmt.Println(settlement.Used, err)
	// Output:
	// 2719 <nil>
}

// Metrics count errors by kind.
func ExampleErrorKind() {
	limiter := newLimiter(ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 100, Window: time.Hour},
	})
	_, err := limiter.Allow(context.Background(), "")
	fmt.Println(ratelimit.ErrorKind(err))
	_, err = limiter.AllowN(context.Background(), "user:123", 101)
	fmt.Println(ratelimit.ErrorKind(err))
	// Output:
	// invalid_key
	// invalid_cost
}

// Two observers see each decision.
func ExampleObservers() {
	count, denials := 0, 0
	client, err := ratelimit.NewClient(ratelimittest.NewDB(), ratelimit.ClientConfig{Observer: ratelimit.Observers(
		&ratelimit.Observer{Decision: func(ratelimit.DecisionEvent) { count++ }},
		&ratelimit.Observer{Decision: func(e ratelimit.DecisionEvent) {
			if e.Outcome() == "denied" {
				denials++
			}
		}},
	)})
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := client.Limiter(ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Hour}})
	for range 3 {
		_, _ = limiter.Allow(context.Background(), "user:123")
	}
	fmt.Println(count, denials, err)
	// Output:
	// 3 1 <nil>
}

// A key that is denied 100 times within a minute is banned for an hour, and for longer the next time.
func ExampleBan() {
	var (
		client   *ratelimit.Client
		policies *ratelimit.Policies // reads the bans of all processes; see NewPolicies
	)
	limiter, err := client.Limiter(ratelimit.Config{
		Name: "login", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}, Policies: policies,
		Ban: &ratelimit.Ban{Denials: 100, Within: time.Minute, First: time.Hour, Longest: 24 * time.Hour},
	})
	fmt.Println(limiter != nil, err)
}

// Limits work even while the application holds all connections of its pool.
func ExampleOwnPool() {
	var pool *pgxpool.Pool // the application's
	own, err := ratelimit.OwnPool(pool)
	if err != nil {
		log.Fatal(err)
	}
	defer own.Close()
	client, err := ratelimit.NewClient(own, ratelimit.ClientConfig{})
	fmt.Println(client != nil, err)
}

// A process decides for others on its host, which use NewService. The command pgratelimit serve does the same.
func ExampleClient_Serve() {
	var client *ratelimit.Client
	listener, err := net.Listen("unix", "/run/pgratelimit.sock")
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(client.Serve(context.Background(), listener, ratelimit.ServeConfig{}))
}
