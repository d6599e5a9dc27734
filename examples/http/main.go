// A small API with three limits. Each address may make 100 requests a minute, and each user may make 20. Each address
// may fail to log in 5 times in 15 minutes.
package main

import (
	"context"
	"errors"
	"log"
	"net/http"
	"net/netip"
	"os"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, os.Getenv("DATABASE_URL"))
	if err != nil {
		log.Fatal(err)
	}
	if err := migrations.Up(ctx, pool); err != nil {
		log.Fatal(err)
	}
	api, err := newAPI(pool)
	if err != nil {
		log.Fatal(err)
	}
	log.Fatal(http.ListenAndServe("localhost:8080", api))
}

func newAPI(pool *pgxpool.Pool) (http.Handler, error) {
	// The three limiters have one client, so they share two of the pool's connections.
	client, err := ratelimit.NewClient(pool, ratelimit.ClientConfig{})
	if err != nil {
		return nil, err
	}
	// Only a load balancer in 10.0.0.0/8 is trusted to name the client's address.
	address := httplimit.ByIP(httplimit.TrustedProxies(netip.MustParsePrefix("10.0.0.0/8")))

	perAddress, err := limit(client, ratelimit.Config{
		Name:      "address",
		Policy:    ratelimit.SlidingWindow{Limit: 100, Window: time.Minute},
		OnFailure: ratelimit.FailOpen(),
	}, httplimit.Config{Key: address})
	perUser, err2 := limit(client, ratelimit.Config{
		Name:      "user",
		Policy:    ratelimit.TokenBucket{Capacity: 20, Refill: 20, Every: time.Minute},
		OnFailure: ratelimit.FailOpen(),
	}, httplimit.Config{Key: httplimit.ByContext(userKey{})})
	perFailure, err3 := limit(client, ratelimit.Config{
		Name:      "login",
		Policy:    ratelimit.SlidingWindow{Limit: 5, Window: 15 * time.Minute},
		OnFailure: ratelimit.FailClosed(),
	}, httplimit.Config{Key: address, Charge: httplimit.ChargeFailures})
	if err := errors.Join(err, err2, err3); err != nil {
		return nil, err
	}

	mux := http.NewServeMux()
	mux.Handle("POST /login", perFailure(http.HandlerFunc(login)))
	mux.Handle("GET /hello", authenticate(perUser(http.HandlerFunc(hello))))
	return perAddress(mux), nil
}

// limit returns a middleware with a new limiter. httplimit.New requires OnFailure, which says what happens while
// Postgres is unreachable.
func limit(
	client *ratelimit.Client, config ratelimit.Config, web httplimit.Config,
) (func(http.Handler) http.Handler, error) {
	limiter, err := client.Limiter(config)
	if err != nil {
		return nil, err
	}
	web.Headers = httplimit.IETFDraft11
	return httplimit.New(limiter, web)
}

func login(w http.ResponseWriter, r *http.Request) {
	if r.PostFormValue("password") != "correct horse" {
		http.Error(w, "wrong password", http.StatusUnauthorized)
		return
	}
	http.SetCookie(w, &http.Cookie{Name: "user", Value: r.PostFormValue("user")})
	w.WriteHeader(http.StatusNoContent) // without a status, this would count as a failed login
}

type userKey struct{}

// authenticate is a placeholder for the application's authentication.
func authenticate(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		cookie, err := r.Cookie("user")
		if err != nil {
			http.Error(w, "log in first", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), userKey{}, cookie.Value)))
	})
}

func hello(w http.ResponseWriter, r *http.Request) {
	_, _ = w.Write([]byte("hello, " + r.Context().Value(userKey{}).(string) + "\n"))
}
