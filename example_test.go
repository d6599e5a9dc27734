package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
)

// 1,000 in each hour. The hour begins with a key's first request.
func ExampleFixedWindow() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "reports",
		Policy: ratelimit.FixedWindow{Limit: 1000, Window: time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, err)
}

// 10 in any minute.
func ExampleSlidingWindow() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "login",
		Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, err)
}

// Bursts of 20, and one every 2 seconds in the long run.
func ExampleTokenBucket() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "api",
		Policy: ratelimit.TokenBucket{Capacity: 20, Refill: 5, Every: 10 * time.Second},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, err)
}

// 5 in any hour, exactly: nobody gets a sixth code within 60 minutes.
func ExampleSlidingLog() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "codes",
		Policy: ratelimit.SlidingLog{Limit: 5, Window: time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "phone:+15551234567")
	fmt.Println(result.Allowed, result.RetryAfter, err)
}

// 1,000 in each calendar month in Berlin.
func ExampleCalendarWindow() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:    "mails",
		Policy:  ratelimit.CalendarWindow{Limit: 1000, Unit: ratelimit.CalendarMonth, Zone: "Europe/Berlin"},
		Durable: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "customer:123")
	fmt.Println(result.Allowed, result.Remaining, err)
}

// An order and its use of the quota are committed together, or rolled back together.
func ExampleLimiter_WithTx() {
	var (
		ctx  context.Context
		pool *pgxpool.Pool
	)
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:    "orders",
		Policy:  ratelimit.FixedWindow{Limit: 100, Window: 24 * time.Hour}, // begins with a customer's first order
		Durable: true,
	})
	if err != nil {
		log.Fatal(err)
	}
	errQuota := errors.New("no orders left")
	var result ratelimit.Result
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) (err error) {
		if _, err := tx.Exec(ctx, `INSERT INTO orders (customer) VALUES ('acme')`); err != nil {
			return err
		}
		// Call Allow as late as possible, because other calls for this key wait until the commit.
		result, err = limiter.WithTx(tx).Allow(ctx, "customer:acme")
		if err == nil && !result.Allowed {
			err = errQuota // rolls the order back
		}
		return err
	})
	switch {
	case errors.Is(err, errQuota):
		fmt.Println("429: come back in", result.RetryAfter)
	case errors.Is(err, ratelimit.ErrTimeout):
		fmt.Println("503: somebody else's transaction holds the key, or the database is slow")
	case err != nil:
		fmt.Println("500:", err)
	}
}

func ExampleLimiter_Allow() {
	var limiter *ratelimit.Limiter
	result, err := limiter.Allow(context.Background(), "user:123")
	switch {
	case err != nil:
		fmt.Println("no decision:", err)
	case !result.Allowed:
		fmt.Println("retry after", result.RetryAfter)
	}
}

// Each request has a cost, as in an API that charges by the byte.
func ExampleLimiter_AllowN() {
	var limiter *ratelimit.Limiter
	result, err := limiter.AllowN(context.Background(), "user:123", 1500)
	switch {
	case errors.Is(err, ratelimit.ErrCostExceedsLimit):
		fmt.Println("too large, now and ever")
	case err != nil:
		fmt.Println("no decision:", err)
	case !result.Allowed:
		fmt.Println("retry after", result.RetryAfter)
	}
}

// Customers in different tiers have different policies for the same keys.
func ExampleLimiter_With() {
	var (
		free   *ratelimit.Limiter // TokenBucket{Capacity: 10, Refill: 10, Every: time.Minute}
		paying = true
		err    error
	)
	// After a change of tier, usage still counts, and tokens stay in the bucket.
	limiter := free
	if paying {
		limiter, err = free.With(ratelimit.TokenBucket{Capacity: 1000, Refill: 1000, Every: time.Minute})
	}
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "customer:acme")
	fmt.Println(result.Allowed, err)
}

// The caller waits until the limit of another company's API has room.
func ExampleLimiter_Wait() {
	var limiter *ratelimit.Limiter
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := limiter.Wait(ctx, "api.example.com")
	if errors.Is(err, ratelimit.ErrWouldExceedDeadline) {
		fmt.Println("not within 10 seconds; nothing was taken")
	}
}

// While Postgres is unreachable, each of four processes admits a quarter of the limit.
func ExampleFallbackLocal() {
	var pool *pgxpool.Pool
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{
		Timeout: 200 * time.Millisecond, // the longest that a call waits
	})
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := client.Limiter(ratelimit.Config{
		Name:      "api",
		Policy:    ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		OnFailure: ratelimit.FallbackLocal(0.25), // 25 a minute in each of four processes
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, result.Source, err)
}

// The upload has failed, so its cost is given back.
func ExampleLimiter_Refund() {
	var (
		ctx     context.Context
		limiter *ratelimit.Limiter
		upload  func(context.Context) error
		size    int64
	)
	taken, err := limiter.AllowN(ctx, "user:123", size)
	if err != nil || !taken.Allowed {
		return
	}
	if err := upload(ctx); err != nil {
		// The refund works even if the upload failed because ctx ended.
		balance, err := limiter.Refund(context.WithoutCancel(ctx), taken)
		fmt.Println(balance.Remaining, err)
	}
}

// A call of a language model may use 1,000 tokens. Unused tokens are given back.
func ExampleLimiter_RefundN() {
	var (
		ctx      context.Context
		limiter  *ratelimit.Limiter
		complete func(context.Context) (used int64)
	)
	reserved, err := limiter.AllowN(ctx, "user:123", 1000)
	if err != nil || !reserved.Allowed {
		return
	}
	if unused := 1000 - complete(ctx); unused > 0 {
		balance, err := limiter.RefundN(context.WithoutCancel(ctx), reserved, unused)
		fmt.Println(balance.Remaining, err)
	}
}

// A customer has bought 500 more orders. They count when the purchase is committed.
func ExampleLimiter_Grant() {
	var (
		ctx     context.Context
		pool    *pgxpool.Pool
		limiter *ratelimit.Limiter
	)
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `INSERT INTO purchases (customer, amount) VALUES ('acme', 500)`); err != nil {
			return err
		}
		_, err := limiter.WithTx(tx).Grant(ctx, "customer:acme", 500) // without a transaction: limiter.Grant
		return err
	})
	if err != nil {
		log.Print(err)
	}
}

// The answer of a language model has used 2,719 tokens. They count even if fewer were left. If more than the limit is
// counted, further requests are denied until enough has drained.
func ExampleLimiter_Charge() {
	var (
		ctx      context.Context
		limiter  *ratelimit.Limiter
		complete func(context.Context) (used int64)
	)
	allowed, err := limiter.Allow(ctx, "user:123") // at least 1 token is left
	if err != nil || !allowed.Allowed {
		return
	}
	charged, err := limiter.Charge(context.WithoutCancel(ctx), "user:123", complete(ctx)-1)
	fmt.Println(charged.Remaining, charged.Owed, err)
}

// The caller waits until its place is ready, and then acts. If it gives up before, it gives the place back.
func ExampleLimiter_Reserve() {
	var (
		ctx     context.Context
		limiter *ratelimit.Limiter // of TokenBucket{Capacity: 1, Refill: 20, Every: time.Second}
		act     func(context.Context)
	)
	booked, err := limiter.Reserve(ctx, "partner", 1, 300*time.Millisecond)
	switch {
	case err != nil:
		log.Print(err)
		return
	case !booked.Allowed:
		log.Printf("too many calls; try again in %v", booked.RetryAfter)
		return
	}
	select {
	case <-time.After(booked.ReadyAfter):
		act(ctx)
	case <-ctx.Done():
		_, _ = limiter.Refund(context.WithoutCancel(ctx), booked.Result)
	}
}

// A tenant may use 100,000 tokens of a language model a day, and 20,000 a minute. Nobody knows how many tokens an answer
// takes before it ends, so 4,000 are held while it is written.
func ExampleLimiter_Hold_stream() {
	type part struct {
		text   string
		tokens int64
	}
	var (
		w      http.ResponseWriter
		r      *http.Request
		client *ratelimit.Client
		stream func(context.Context) iter.Seq[part]
	)
	limiter, err := client.Limiter(ratelimit.Config{
		Name: "tokens",
		Policy: ratelimit.All(
			ratelimit.CalendarWindow{Limit: 100_000, Unit: ratelimit.CalendarDay},
			ratelimit.SlidingWindow{Limit: 20_000, Window: time.Minute},
		),
		Durable:   true, // kept if the server crashes
		OnFailure: ratelimit.FailOpen(),
	})
	if err != nil {
		log.Fatal(err)
	}

	held, err := limiter.Hold(r.Context(), "tenant:7", 4000, time.Minute)
	switch {
	case err != nil:
		http.Error(w, "try again", http.StatusServiceUnavailable)
		return
	case !held.Allowed:
		w.Header().Set("Retry-After", strconv.Itoa(int(math.Ceil(held.RetryAfter.Seconds()))))
		http.Error(w, "too many tokens", http.StatusTooManyRequests)
		return
	}
	used := int64(0)
	defer func() { // also if the tenant has left, or the model fails
		if _, err := held.Hold.Settle(context.WithoutCancel(r.Context()), used); err != nil {
			log.Print(err)
		}
	}()
	extended := time.Now()
	for part := range stream(r.Context()) {
		used += part.tokens
		fmt.Fprint(w, part.text)
		if time.Since(extended) > 20*time.Second { // a long answer keeps its hold
			extended = time.Now()
			if err := held.Hold.Extend(r.Context(), time.Minute); err != nil {
				log.Print(err)
			}
		}
	}
}

// A worker in another process settles the hold that was made with its job.
func ExampleLimiter_HoldFromText() {
	var (
		ctx      context.Context
		pool     *pgxpool.Pool
		limiter  *ratelimit.Limiter
		complete func(context.Context) (used int64)
	)
	// The application makes the job and the hold, or neither of them.
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		held, err := limiter.WithTx(tx).Hold(ctx, "tenant:7", 4000, time.Hour)
		if err != nil || !held.Allowed {
			return err
		}
		_, err = tx.Exec(ctx, "INSERT INTO jobs (hold) VALUES ($1)", held.Hold.String())
		return err
	})
	if err != nil {
		log.Fatal(err)
	}

	// The worker reads the job, and settles the hold.
	var text string
	if err := pool.QueryRow(ctx, "DELETE FROM jobs RETURNING hold").Scan(&text); err != nil {
		log.Fatal(err)
	}
	hold, err := limiter.HoldFromText(ctx, text)
	if err != nil {
		log.Fatal(err)
	}
	settlement, err := hold.Settle(ctx, complete(ctx))
	fmt.Println(settlement.Used, settlement.Late, err)
}

// Nightly imports. One import of a tenant runs at a time, and imports of 4 units in all. A large import has 3 units.
func ExampleLimiter_Acquire() {
	var (
		ctx       context.Context
		client    *ratelimit.Client
		importAll func(ctx context.Context, tenant string, fence int64) error
		units     func(tenant string) int64
	)
	perTenant, err := client.Limiter(ratelimit.Config{
		Name: "import", Policy: ratelimit.Concurrency{Limit: 1},
	})
	if err != nil {
		log.Fatal(err)
	}
	overall, err := client.Limiter(ratelimit.Config{
		Name: "imports", Policy: ratelimit.Concurrency{Limit: 4},
	})
	if err != nil {
		log.Fatal(err)
	}

	nightly := func(ctx context.Context, tenant string) (err error) {
		own, err := perTenant.Acquire(ctx, tenant, ratelimit.SlotOptions{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, own.Release(ctx)) }()
		ctx = own.Context(ctx)
		shared, err := overall.Acquire(ctx, "all", ratelimit.SlotOptions{N: units(tenant)})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, shared.Release(ctx)) }()
		return importAll(shared.Context(ctx), tenant, own.Fence())
	}
	fmt.Println(nightly(ctx, "tenant:7"))
}

// Limiters of one client share its connections. If many limiters have a few calls each, one statement decides all these
// calls.
func ExampleClient() {
	pool, err := pgxpool.New(context.Background(), "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{})
	if err != nil {
		log.Fatal(err)
	}
	perAddress, err := client.Limiter(ratelimit.Config{
		Name:      "address",
		Policy:    ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		OnFailure: ratelimit.FailOpen(),
	})
	if err != nil {
		log.Fatal(err)
	}
	perUser, err := client.Limiter(ratelimit.Config{
		Name:   "user",
		Policy: ratelimit.TokenBucket{Capacity: 50, Refill: 10, Every: time.Second},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(perAddress.Config().Policy, perUser.Config().Policy)
	// Output: sliding 100/1m bucket 50 10/1s
}

// The rows of rate_limit_policy override the policy in the code.
func ExamplePolicies() {
	var (
		ctx  context.Context // ends with the application
		pool *pgxpool.Pool
	)
	policies, err := ratelimit.NewPolicies(pool, ratelimit.PoliciesConfig{})
	if err != nil {
		log.Fatal(err)
	}
	go policies.Run(ctx)
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:     "api",
		Policy:   ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		Policies: policies,
		Ban:      &ratelimit.Ban{Denials: 500, Within: time.Minute, First: time.Hour, Longest: 24 * time.Hour},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(ctx, "customer:42")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Allowed, result.Limit)
}

// The limit serves many calls, so each process takes units in advance.
func ExampleLease() {
	var (
		ctx  context.Context // ends with the application
		pool *pgxpool.Pool
	)
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{})
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := client.Limiter(ratelimit.Config{
		Name:   "api",
		Policy: ratelimit.SlidingWindow{Limit: 1_000_000, Window: time.Minute},
		Lease:  &ratelimit.Lease{},
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(ctx, "partner:7")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(result.Allowed, "by the", result.Source)
	// Before the application ends, it may give back its leases.
	if err := client.ReturnLeases(context.Background()); err != nil {
		log.Print("what was taken ahead counts as used: ", err)
	}
}

// A request takes from the limits of its address, its user and the whole service, or from none of them.
func ExampleAllowAll() {
	var (
		ctx                          = context.Background()
		perAddress, perUser, overall *ratelimit.Limiter // of one client
	)
	results, err := ratelimit.AllowAll(ctx,
		perAddress.Request("192.0.2.1", 1), perUser.Request("user:123", 1), overall.Request("all", 1))
	if err != nil {
		log.Fatal(err)
	}
	if !results.Allowed {
		fmt.Println("retry after", results.RetryAfter)
		for i, limit := range []string{"address", "user", "service"} {
			fmt.Println(limit, "has room:", results.Each[i].RetryAfter == 0)
		}
	}
}

// The tokens of an answer are known only when it ends. Until then, an estimate is held.
func ExampleLimiter_Hold() {
	var (
		ctx     = context.Background()
		limiter *ratelimit.Limiter
		answer  func(context.Context) (used int64, err error)
	)
	held, err := limiter.Hold(ctx, "tenant:42", 4000, 2*time.Minute)
	if err != nil {
		log.Fatal(err)
	}
	if !held.Allowed {
		fmt.Println("retry after", held.RetryAfter)
		return
	}
	used, err := answer(ctx) // 2,719; if the process dies, the 4,000 are free again after two minutes
	if err != nil {
		log.Print(err) // the tokens until then count too
	}
	if _, err := held.Hold.Settle(context.WithoutCancel(ctx), used); err != nil { // also if the client has gone
		log.Print("settle it again, here or in another process: ", held.Hold, ": ", err)
	}
}

// A worker in another process settles a hold of two limits, which it gets as a text.
func ExampleHoldFromText() {
	var (
		ctx             = context.Background()
		perDay, perHour *ratelimit.Limiter // of one client
	)
	held, err := ratelimit.HoldAll(ctx, time.Hour, perDay.Request("tenant:42", 4000), perHour.Request("tenant:42", 4000))
	if err != nil || !held.Allowed {
		log.Fatal(held.RetryAfter, err)
	}
	text := held.Hold.String() // to be sent to the worker with its task

	hold, err := ratelimit.HoldFromText(ctx, text, perDay, perHour)
	if err != nil {
		log.Fatal(err)
	}
	settlement, err := hold.Settle(ctx, 2719)
	fmt.Println(settlement.Used, settlement.Late, err)
}

// 10 a second, and 3,000 in ten minutes.
func ExampleAll() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name: "api",
		Policy: ratelimit.All(
			ratelimit.SlidingWindow{Limit: 10, Window: time.Second},
			ratelimit.SlidingWindow{Limit: 3000, Window: 10 * time.Minute},
		),
	})
	if err != nil {
		log.Fatal(err)
	}
	result, err := limiter.Allow(context.Background(), "user:123")
	fmt.Println(result.Allowed, err)
}

func ExampleNewService() {
	service, err := ratelimit.NewService("unix:/run/pgratelimit.sock", ratelimit.ServiceConfig{})
	if err != nil {
		log.Fatal(err)
	}
	defer service.Close()
	client, err := ratelimit.NewClient(service, ratelimit.ClientConfig{})
	if err != nil {
		log.Fatal(err)
	}
	limiter, err := client.Limiter(ratelimit.Config{
		Name:      "login",
		Policy:    ratelimit.SlidingWindow{Limit: 10, Window: time.Minute},
		OnFailure: ratelimit.FailClosed(), // also while the service is away
	})
	if err != nil {
		log.Fatal(err)
	}
	_, _ = limiter.Allow(context.Background(), "user:123")
}
