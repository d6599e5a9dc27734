package service

import (
	"net/http"
	"strings"

	client "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/metric"
	sdk "go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/ratelimit/service/internal/envoy"
)

// metrics has what /metrics shows.
type metrics struct {
	registry *client.Registry
	meter    metric.Meter
}

// newMetrics returns metrics without a measurement. Instruments of the meter have the names that the alerts and the
// dashboard in deploy use: ratelimit.breaker.open becomes ratelimit_breaker_open.
func newMetrics() (*metrics, error) {
	registry := client.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry), prometheus.WithoutScopeInfo(),
		prometheus.WithoutTargetInfo())
	if err != nil {
		return nil, err
	}
	provider := sdk.NewMeterProvider(sdk.WithReader(exporter))
	return &metrics{registry: registry, meter: provider.Meter("github.com/pgratelimit/ratelimit/service")}, nil
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
