package httplimit

import (
	"context"
	"net/http"
	"net/netip"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
)

// instant is a limiter that decides without any work.
type instant struct{ *fakeLimiter }

func (i instant) AllowN(context.Context, string, int64) (ratelimit.Result, error) {
	return i.result, nil
}

func (i instant) Refund(context.Context, ratelimit.Result) (ratelimit.Balance, error) {
	return ratelimit.Balance{}, nil
}

// sink is a ResponseWriter that discards everything. Its header is empty, as a server's is before the handler runs.
type sink struct{ header http.Header }

func (s sink) Header() http.Header             { return s.header }
func (sink) Write(data []byte) (int, error)    { return len(data), nil }
func (sink) WriteString(s string) (int, error) { return len(s), nil }
func (sink) WriteHeader(int)                   {}

// BenchmarkMiddleware measures what the middleware adds to a call of the limiter.
func BenchmarkMiddleware(b *testing.B) {
	proxied := ByIP(TrustedProxies(netip.MustParsePrefix("10.0.0.0/8")))
	for _, bench := range []struct {
		name    string
		limiter *fakeLimiter
		config  Config
	}{
		{"address", allowing(), Config{Key: ByIP()}},
		{"address, IETFDraft11", allowing(), Config{Key: ByIP(), Headers: IETFDraft11}},
		{"address, XRateLimit", allowing(), Config{Key: ByIP(), Headers: XRateLimit}},
		{"address, GitHub", allowing(), Config{Key: ByIP(), Headers: GitHub}},
		{"proxied, IETFDraft11", allowing(), Config{Key: proxied, Headers: IETFDraft11}},
		{"header, IETFDraft11", allowing(), Config{Key: ByHeader("X-Api-Key"), Headers: IETFDraft11}},
		{"HMAC of address, IETFDraft11", allowing(), Config{Key: HMAC(make([]byte, 32), ByIP()), Headers: IETFDraft11}},
		{"address, IETFDraft11, charged", allowing(), Config{Key: ByIP(), Headers: IETFDraft11, Charge: ChargeSuccesses}},
		{"address, IETFDraft11, refunded", allowing(), Config{Key: ByIP(), Headers: IETFDraft11, Charge: ChargeFailures}},
		{"address, IETFDraft11, denied", denying(time.Second), Config{Key: ByIP(), Headers: IETFDraft11}},
	} {
		b.Run(bench.name, func(b *testing.B) {
			handler := limited(b, instant{bench.limiter}, bench.config, func(http.ResponseWriter, *http.Request) {})
			r := from("10.0.0.1:4711", "X-Forwarded-For", "198.51.100.1, 203.0.113.9, 10.0.0.2")
			r.Header["X-Api-Key"] = []string{"key"}
			w := sink{http.Header{}}
			b.ReportAllocs()
			for b.Loop() {
				clear(w.header)
				handler.ServeHTTP(w, r)
			}
		})
	}
}
