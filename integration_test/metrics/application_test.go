package metrics

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/otelratelimit"
)

// newClient returns a client, and lets mux serve its metrics. docs/operating.md shows this code.
func newClient(pool *pgxpool.Pool, mux *http.ServeMux) (*ratelimit.Client, error) {
	exporter, err := prometheus.New()
	if err != nil {
		return nil, err
	}
	otel.SetMeterProvider(metric.NewMeterProvider(metric.WithReader(exporter)))
	mux.Handle("/metrics", promhttp.Handler())

	meter := otel.Meter("ratelimit")
	observer, err := otelratelimit.New(meter) // decisions, statements, breaker
	if err != nil {
		return nil, err
	}
	if _, err := otelratelimit.ObserveTables(meter, pool, ""); err != nil { // tables, sweeper
		return nil, err
	}
	return ratelimit.NewClient(pool, ratelimit.ClientConfig{Observer: observer})
}

// application has two limiters with many callers.
type application struct {
	address    string // the address of its /metrics
	pool       *pgxpool.Pool
	api, login *ratelimit.Limiter
}

func newApplication(t *testing.T, pool *pgxpool.Pool) *application {
	t.Helper()
	mux := http.NewServeMux()
	client, err := newClient(pool, mux)
	require.NoError(t, err)
	t.Cleanup(func() { // without this, Prometheus would mix the metrics of this test and the next one
		provider, ok := otel.GetMeterProvider().(*metric.MeterProvider)
		require.True(t, ok)
		require.NoError(t, provider.Shutdown(context.Background()))
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return &application{
		address: strings.TrimPrefix(server.URL, "http://"),
		pool:    pool,
		api: limitertest.Of(t, client, ratelimit.Config{
			Name:      "api",
			Policy:    ratelimit.TokenBucket{Capacity: 10, Refill: 10, Every: time.Second},
			OnFailure: ratelimit.FailOpen(),
		}),
		login: limitertest.Of(t, client, ratelimit.Config{
			Name:   "login",
			Policy: ratelimit.SlidingWindow{Limit: 5, Window: 3 * time.Second},
		}),
	}
}

// run calls both limiters until end is called. Some of the keys are new.
func (a *application) run() (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			testkit.Together(12, func(i int) { // the errors appear in the metrics
				user := fmt.Sprint("user ", n/10+rand.IntN(30))
				if i < 3 {
					_, _ = a.login.Allow(context.Background(), user)
				} else {
					_, _ = a.api.Allow(context.Background(), user)
				}
			})
			select {
			case <-ticker.C:
			case <-ctx.Done():
			}
		}
	})
	return func() {
		cancel()
		running.Wait()
	}
}

// hold begins a transaction that holds a key that callers use, until end is called.
func (a *application) hold(t *testing.T) (end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	tx, err := a.pool.BeginTx(ctx, pgx.TxOptions{})
	require.NoError(t, err)
	_, err = a.login.WithTx(tx).Allow(ctx, "held")
	require.NoError(t, err)
	var asking sync.WaitGroup
	for range 4 {
		asking.Go(func() {
			for ctx.Err() == nil {
				_, _ = a.login.Allow(context.Background(), "held") // this call returns ErrKeyHeld
			}
		})
	}
	end = sync.OnceFunc(func() {
		_ = tx.Rollback(context.Background())
		cancel()
		asking.Wait()
	})
	t.Cleanup(end)
	return end
}
