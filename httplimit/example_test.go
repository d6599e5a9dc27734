package httplimit_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/ratelimittest"
)

// 100 requests a minute from each address, behind a load balancer in 10.0.0.0/8.
func Example() {
	var (
		pool *pgxpool.Pool
		mux  *http.ServeMux
	)
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "address",
		Policy:    ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		OnFailure: ratelimit.FailOpen(), // while Postgres is unreachable
	})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key:     httplimit.ByIP(httplimit.TrustedProxies(netip.MustParsePrefix("10.0.0.0/8"))),
		Headers: httplimit.IETFDraft11,
	})
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe("localhost:8080", limit(mux)))
}

// A gateway to a language model holds 4,000 tokens for each request, and counts what was really used.
func ExampleSettle() {
	var (
		limiter  *ratelimit.Limiter
		complete func(w io.Writer, r *http.Request) (used int64)
	)
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key:     httplimit.ByHeader("Tenant"),
		Cost:    func(*http.Request) int64 { return 4000 },
		HoldFor: 2 * time.Minute,
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		used := complete(w, r)
		if _, err := httplimit.Settle(r.Context(), used); err != nil {
			log.Print(err)
		}
	})
	log.Fatal(http.ListenAndServe("localhost:8080", limit(handler)))
}

// At most two exports of a user run at once. Another one gets status 429.
func ExampleSlotOf() {
	var (
		pool   *pgxpool.Pool
		export func(w io.Writer, r *http.Request) error
	)
	type userKey struct{}
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "exports",
		Policy:    ratelimit.Concurrency{Limit: 2},
		OnFailure: ratelimit.FailOpen(),
	})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key:     httplimit.ByContext(userKey{}),
		SlotTTL: 10 * time.Second, // if a process dies, its slots are free after 10 seconds
	})
	if err != nil {
		log.Fatal(err)
	}
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		log.Print("export ", httplimit.SlotOf(r.Context()).Fence())
		if err := export(w, r); err != nil { // r.Context() ends if the slot is lost
			log.Print(err, context.Cause(r.Context()))
		}
	})
	http.Handle("GET /export", limit(handler))
}

// 5 failed logins in a quarter of an hour, for each address and name. The database has an HMAC of address and name.
func ExampleChargeFailures() {
	var (
		pool            *pgxpool.Pool
		passwordIsRight func(r *http.Request) bool
		addresses       *ratelimit.Limiter // such as 50 in a quarter of an hour
	)
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "login",
		Policy:    ratelimit.SlidingWindow{Limit: 5, Window: 15 * time.Minute},
		OnFailure: ratelimit.FailClosed(), // no guesses of passwords while Postgres is unreachable
	})
	if err != nil {
		log.Fatal(err)
	}
	address := httplimit.ByIP() // behind proxies: httplimit.ByIP(httplimit.TrustedProxies(...))
	name := httplimit.ByFunc(func(r *http.Request) (string, error) {
		return strings.ToLower(strings.TrimSpace(r.PostFormValue("name"))), nil // as the application compares names
	})
	secret := []byte(os.Getenv("RATE_LIMIT_SECRET")) // 16 bytes or more, the same in all processes
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key:    httplimit.HMAC(secret, httplimit.Join(address, name)),
		Charge: httplimit.ChargeFailures,
	})
	if err != nil {
		log.Fatal(err)
	}
	login := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !passwordIsRight(r) {
			http.Error(w, "wrong name or password", http.StatusUnauthorized)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	// Guesses of one address at many names. The inner limit's 429 is no guess.
	around, err := httplimit.New(addresses, httplimit.Config{
		Key:    address,
		Charge: func(status int) bool { return status == http.StatusUnauthorized },
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("POST /login", around(limit(login)))
}

// The key is the name in a log-in's JSON.
func ExampleByFunc() {
	name := httplimit.ByFunc(func(r *http.Request) (string, error) {
		body, err := io.ReadAll(io.LimitReader(r.Body, 10_000))
		if err != nil {
			return "", err
		}
		r.Body = io.NopCloser(bytes.NewReader(body)) // for the handler
		var form struct{ Name string }
		err = json.Unmarshal(body, &form)
		return strings.ToLower(strings.TrimSpace(form.Name)), err
	})
	r := httptest.NewRequest(http.MethodPost, "/login", strings.NewReader(`{"name": "Alice", "password": "secret"}`))
	key, err := name.Of(r)
	left, _ := io.ReadAll(r.Body)
	fmt.Println(key, err, string(left))
	// Output: alice <nil> {"name": "Alice", "password": "secret"}
}

func ExampleTransport() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "partner",
		Policy: ratelimit.SlidingLog{Limit: 100, Window: time.Minute}, // from the partner's terms
	})
	if err != nil {
		log.Fatal(err)
	}
	client := &http.Client{
		Transport: &httplimit.Transport{Limiter: limiter},
		Timeout:   2 * time.Minute, // includes all waits
	}
	response, err := client.Get("https://api.example.com/v1/things")
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
}

// The partner accepts 20 requests a second, and must not get them all at once. All processes together send one every 50
// ms. A request that would wait for more than 300 ms gets a *httplimit.PaceError.
func ExampleTransport_paced() {
	var pool *pgxpool.Pool
	limiter, err := ratelimit.New(pool, ratelimit.Config{
		Name:   "partner",
		Policy: ratelimit.TokenBucket{Capacity: 1, Refill: 20, Every: time.Second},
	})
	if err != nil {
		log.Fatal(err)
	}
	client := &http.Client{
		Transport: &httplimit.Transport{Limiter: limiter, MaxDelay: 300 * time.Millisecond},
		Timeout:   10 * time.Second, // includes the wait
	}
	response, err := client.Get("https://api.example.com/v1/things")
	if err != nil {
		log.Fatal(err)
	}
	defer response.Body.Close()
}

// Paying customers have a higher limit. When customers change tiers, their usage is kept.
func ExampleConfig_tier() {
	var (
		pool *pgxpool.Pool
		pays func(r *http.Request) bool
	)
	type userKey struct{} // before the limit: r.WithContext(context.WithValue(r.Context(), userKey{}, "alice"))
	free, err := ratelimit.New(pool, ratelimit.Config{
		Name:      "api",
		Policy:    ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		OnFailure: ratelimit.FailOpen(),
	})
	if err != nil {
		log.Fatal(err)
	}
	paid, err := free.With(ratelimit.SlidingWindow{Limit: 1000, Window: time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httplimit.New(free, httplimit.Config{
		Key: httplimit.ByContext(userKey{}),
		Tier: func(r *http.Request) httplimit.Limiter {
			if pays(r) {
				return paid
			}
			return free
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("/", limit(http.NotFoundHandler()))
}

// Two requests a minute for each customer. A limiter on Postgres takes the place of the one in memory.
func ExampleNew() {
	limiter, err := ratelimit.New(ratelimittest.NewDB(), ratelimit.Config{
		Name: "api", Policy: ratelimit.FixedWindow{Limit: 2, Window: time.Minute}, OnFailure: ratelimit.FailOpen(),
	})
	if err != nil {
		log.Fatal(err)
	}
	limit, err := httplimit.New(limiter, httplimit.Config{Key: httplimit.ByHeader("Customer")})
	if err != nil {
		log.Fatal(err)
	}
	handler := limit(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for range 3 {
		request, answer := httptest.NewRequest(http.MethodGet, "/", nil), httptest.NewRecorder()
		request.Header.Set("Customer", "acme")
		handler.ServeHTTP(answer, request)
		fmt.Println(answer.Code)
	}
	// Output:
	// 200
	// 200
	// 429
}

// The database sees no addresses, only what HMAC makes of them.
func ExampleHMAC() {
	secret := []byte("32 random bytes, from a safe place") // the same in all processes
	key, err := httplimit.HMAC(secret, httplimit.ByIP()).Of(httptest.NewRequest(http.MethodGet, "/", nil))
	fmt.Println(key, err)
	// Output: -hZrJCBekFfhx_feU0olhg <nil>
}

// Each address has its own limit for each path.
func ExampleJoin() {
	path := httplimit.ByFunc(func(r *http.Request) (string, error) { return r.URL.Path, nil })
	key, err := httplimit.Join(httplimit.ByIP(), path).Of(httptest.NewRequest(http.MethodGet, "/search", nil))
	fmt.Println(key, err)
	// Output: 192.0.2.1|/search <nil>
}

// One limit for each user who is logged in, and one for each address of everybody else.
func ExampleFirst() {
	var (
		limiter *ratelimit.Limiter
		mux     *http.ServeMux
		userOf  func(r *http.Request) string
	)
	type userKey struct{}
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key: httplimit.First(httplimit.ByContext(userKey{}), httplimit.ByIP()),
	})
	if err != nil {
		log.Fatal(err)
	}
	authenticate := func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if user := userOf(r); user != "" { // such as the user of a valid session
				r = r.WithContext(context.WithValue(r.Context(), userKey{}, user))
			}
			next.ServeHTTP(w, r)
		})
	}
	http.Handle("/", authenticate(limit(mux)))
}

// A proxy in 10.0.0.0/8 puts the client's address into X-Real-IP.
func ExampleAddressHeader() {
	key := httplimit.ByIP(
		httplimit.TrustedProxies(netip.MustParsePrefix("10.0.0.0/8")), httplimit.AddressHeader("X-Real-IP"))
	request := httptest.NewRequest(http.MethodGet, "/", nil)
	request.RemoteAddr = "10.0.0.7:4711"
	request.Header.Set("X-Real-IP", "198.51.100.4")
	fmt.Println(key.Of(request))
	// Output: 198.51.100.4 <nil>
}

// An answer of your own.
func ExampleProblemJSON() {
	config := httplimit.Config{
		Key: httplimit.ByIP(),
		Reject: func(w http.ResponseWriter, r *http.Request, rejection httplimit.Rejection) {
			if strings.Contains(r.Header.Get("Accept"), "text/html") {
				httplimit.PlainText(w, r, rejection)
				return
			}
			httplimit.ProblemJSON(w, r, rejection)
		},
	}
	_, err := httplimit.New(&ratelimit.Limiter{}, config)
	fmt.Println(err)
}
