package httplimit_test

import (
	"log"
	"net/http"
	"net/netip"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/httplimit"
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
		OnFailure: ratelimit.FailOpen(), // while Postgres is away
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

// 5 failed logins in a quarter of an hour, for each address and name. Neither is stored in plain text.
func ExampleChargeFailures() {
	var (
		limiter *ratelimit.Limiter
		login   http.Handler
		secret  []byte
	)
	name := httplimit.ByFunc(func(r *http.Request) (string, error) { return r.PostFormValue("name"), nil })
	limit, err := httplimit.New(limiter, httplimit.Config{
		Key:    httplimit.HMAC(secret, httplimit.Join(httplimit.ByIP(), name)),
		Charge: httplimit.ChargeFailures,
	})
	if err != nil {
		log.Fatal(err)
	}
	http.Handle("POST /login", limit(login))
}
