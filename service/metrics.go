package service

import (
	"context"
	"log/slog"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/ratelimit/otelratelimit"
	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

// metrics has what /metrics shows.
type metrics struct {
	registry    *client.Registry
	meter       metric.Meter
	requests    *client.HistogramVec
	connections *client.GaugeVec
}

// newMetrics returns metrics without a measurement. Instruments of the meter have the names that the alerts and the
// dashboard in deploy use: ratelimit.breaker.open becomes ratelimit_breaker_open.
func newMetrics() (*metrics, error) {
	registry := client.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry), prometheus.WithoutScopeInfo(),
		prometheus.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	provider := sdk.NewMeterProvider(sdk.WithReader(exporter))
	m := &metrics{
		registry: registry, meter: provider.Meter("github.com/pgratelimit/ratelimit/service"),
		requests: client.NewHistogramVec(client.HistogramOpts{
			Name: "ratelimit_service_request_duration_seconds",
			Help: "How long requests over gRPC and HTTP took, with the time in which they waited for room.",
			Buckets: []float64{
				0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5,
			},
		}, []string{"door", "answer"}),
		connections: client.NewGaugeVec(client.GaugeOpts{
			Name: "ratelimit_service_connections", Help: "How many connections callers have.",
		}, []string{"door"}),
	}
	registry.MustRegister(m.requests, m.connections)
	return m, nil
}

func (m *metrics) observe(door, answer string, begin time.Time) {
	m.requests.WithLabelValues(door, answer).Observe(time.Since(begin).Seconds())
}

// tables measures the tables of the limiters. Only the first of several failures is logged.
func (m *metrics) tables(db *pgxpool.Pool, schema string, logger *slog.Logger) error {
	var failing atomic.Bool
	_, err := otelratelimit.ObserveTables(reportingMeter{m.meter, func(ctx context.Context, err error) {
		if failing.Swap(err != nil) || err == nil {
			return
		}
		logger.WarnContext(ctx, "ratelimit: /metrics lacks the tables and sweeps; further failures are not logged "+
			"until it succeeds", "error", err)
	}}, db, schema)
	return err
}

// reportingMeter is a meter whose callbacks report their errors. OpenTelemetry would print one at each collection.
type reportingMeter struct {
	metric.Meter

	report func(ctx context.Context, err error)
}

func (m reportingMeter) RegisterCallback(
	f metric.Callback, instruments ...metric.Observable,
) (metric.Registration, error) {
	return m.Meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		m.report(ctx, f(ctx, o))
		return nil
	}, instruments...)
}

// gauge adds a gauge whose value is read when /metrics is asked for.
func (m *metrics) gauge(name, help string, value func() float64) {
	m.registry.MustRegister(client.NewGaugeFunc(client.GaugeOpts{Name: name, Help: help}, value))
}

func (m *metrics) handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// envoyStats collects what a server for Envoy counts, under the names of the reference service. The name of a rule is a
// label.
type envoyStats struct{ server *envoy.Server }

// Describe sends nothing, because the rules are not known in advance.
func (envoyStats) Describe(chan<- *client.Desc) {}

func (e envoyStats) Collect(to chan<- client.Metric) {
	stats := e.server.Stats()
	send := func(name, help string, value uint64, labels ...string) {
		names := []string{"rule", "domain"}
		used := client.Labels{}
		for i, label := range labels {
			if label != "" {
				used[names[i]] = label
			}
		}
		desc := client.NewDesc("ratelimit_service_"+name, help, nil, used)
		to <- client.MustNewConstMetric(desc, client.CounterValue, float64(value))
	}
	for _, r := range stats.Rules {
		rule := strings.ToValidUTF8(r.Name, "?")
		send("rate_limit_total_hits", "Hits that were asked for.", r.TotalHits, rule)
		send("rate_limit_over_limit", "Hits that were denied.", r.OverLimit, rule)
		send("rate_limit_near_limit", "Hits that were allowed above 0.8 of the limit.", r.NearLimit, rule)
		send("rate_limit_over_limit_with_local_cache", "Hits that were denied from memory.",
			r.OverLimitWithLocalCache, rule)
		send("rate_limit_within_limit", "Hits that were allowed.", r.WithinLimit, rule)
		send("rate_limit_shadow_mode", "Hits that were allowed although the limit had no room.", r.ShadowMode, rule)
	}
	for _, d := range stats.UnknownDomains {
		domain := strings.ToValidUTF8(d.Name, "?")
		send("domain_not_found", "Requests for a domain without a file.", d.NotFound, "", domain)
	}
	send("call_should_rate_limit_redis_error", "Requests that Postgres did not decide.", stats.RedisErrors)
	send("call_should_rate_limit_service_error", "Requests that are wrong.", stats.ServiceErrors)
	send("global_shadow_mode", "Requests that the flag --shadow-mode let pass.", stats.GlobalShadowMode)
	send("config_load_success", "How often the files were put in force.", stats.ConfigLoads)
	send("config_load_error", "How often the files had a mistake.", stats.ConfigLoadErrors)
}
