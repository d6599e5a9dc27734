package metrics

import (
	"encoding/json"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	registries "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/exporters/prometheus"
	"go.opentelemetry.io/otel/sdk/metric"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/cleanup"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
	"github.com/pgratelimit/ratelimit/otelratelimit"
)

// dashboard is the part of deploy/grafana-dashboard.json that the tests use.
type dashboard struct {
	Title         string
	UID           string
	SchemaVersion int
	Templating    struct{ List []struct{ Name string } }
	Panels        []panel
}

type panel struct {
	ID                       int
	Type, Title, Description string
	FieldConfig              struct{ Defaults struct{ Unit string } }
	GridPos                  struct{ X, Y, W, H int }
	Targets                  []struct{ RefID, Expr, LegendFormat string }
}

func readDashboard(t *testing.T) (d dashboard) {
	t.Helper()
	content, err := os.ReadFile(deploy + "grafana-dashboard.json")
	require.NoError(t, err)
	require.NoError(t, json.Unmarshal(content, &d))
	return d
}

// query returns an expression of a panel with values for Grafana's variables. The interval is long enough for a busy
// machine, on which Prometheus may miss a scrape.
func (p *panel) query(expr string) string {
	interval := time.Minute
	if drawing() {
		interval = 4 * scrapes // four scrapes, as in Grafana
	}
	job := "app"
	if strings.HasPrefix(p.Title, "Service: ") || strings.HasPrefix(p.Title, "Envoy: ") {
		job = "service"
	}
	return strings.NewReplacer("$job", job, "$__rate_interval", interval.String()).Replace(expr)
}

// A person who edits the dashboard may forget these fields.
func TestDashboardIsComplete(t *testing.T) {
	t.Parallel()

	d := readDashboard(t)
	require.Equal(t, "pgratelimit", d.UID)
	require.GreaterOrEqual(t, d.SchemaVersion, 39)
	require.Equal(t, "datasource", d.Templating.List[0].Name)
	explained := named(t, docs+"operating.md", `(?m)^\| ([^|]+) \|`)
	drawn := named(t, docs+"dashboard.svg", `<text class="strong"[^>]*>([^<]+)<`)
	ids := map[int]bool{}
	places := map[[2]int]bool{}
	for _, p := range d.Panels {
		ids[p.ID] = true
		places[[2]int{p.GridPos.X, p.GridPos.Y}] = true
		require.NotEmpty(t, p.Description, p.Title)
		require.NotEmpty(t, p.FieldConfig.Defaults.Unit, p.Title)
		require.NotEmpty(t, p.Targets, p.Title)
		for _, target := range p.Targets {
			require.NotEmpty(t, target.Expr, p.Title)
			require.NotEmpty(t, target.LegendFormat, p.Title)
		}
		require.True(t, explained[p.Title], "docs/operating.md does not explain %s", p.Title)
		require.True(t, drawn[p.Title], "docs/dashboard.svg lacks %s: set %s=1 to draw it anew", p.Title, drawVariable)
	}
	require.Len(t, ids, len(d.Panels))
	require.Len(t, places, len(d.Panels))
}

// The exporter has every metric that the dashboard and the alerts use.
func TestMetricsExist(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	registry := registries.NewRegistry()
	exporter, err := prometheus.New(prometheus.WithRegisterer(registry))
	require.NoError(t, err)
	meter := metric.NewMeterProvider(metric.WithReader(exporter)).Meter("test")
	observer, err := otelratelimit.New(meter)
	require.NoError(t, err)
	_, err = otelratelimit.ObserveTables(meter, db.Pool, "")
	require.NoError(t, err)
	observer.Decision(ratelimit.DecisionEvent{})
	observer.Statement(ratelimit.StatementEvent{})
	observer.Breaker(ratelimit.BreakerEvent{})
	sweep(t, db.Pool)

	printed := map[string]bool{}
	see := func(text string) {
		for _, match := range regexp.MustCompile(`(?m)^ratelimit_\w+`).FindAllString(text, -1) {
			printed[match] = true
		}
	}
	response := httptest.NewRecorder()
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).
		ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	see(response.Body.String())
	service, _ := startService(t, db.Pool)
	service.askAll(t.Context(), 1)
	see(service.metrics(t))
	require.Greater(t, len(printed), 10)
	asked := 0
	for _, file := range []string{"grafana-dashboard.json", "prometheus-rules.yml"} {
		content, err := os.ReadFile(deploy + file)
		require.NoError(t, err)
		for _, name := range regexp.MustCompile(`\bratelimit_\w+`).FindAllString(string(content), -1) {
			require.True(t, printed[name], "%s asks for %s, which there is not", file, name)
			asked++
		}
	}
	require.Greater(t, asked, 20)
}

func sweep(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	sweeper, err := cleanup.New(pool, cleanup.Config{})
	require.NoError(t, err)
	result, err := sweeper.RunOnce(t.Context())
	require.NoError(t, err)
	require.True(t, result.Complete)
}

// A real Prometheus, with the configuration in deploy/, watches an application in normal operation, with a held key, in
// an outage and during a sweep. Then each query of the dashboard must have a result. Prometheus must be able to
// evaluate every alert, and must have seen the breaker's alert pending.
func TestDashboard(t *testing.T) {
	t.Parallel()

	program(t, "prometheus")
	server := pgtest.Server(t, pgserver.Config{})
	pool := (&pgtest.DB{URL: server.URL()}).OwnerPool(t, nil)
	require.NoError(t, migrations.Up(t.Context(), pool))
	sweep(t, pool)
	pgtest.Fill(t, pool, pgtest.Table(false), "yesterday", 20_000, time.Now().Add(-24*time.Hour))

	app := newApplication(t, pool)
	own := (&pgtest.DB{URL: server.URL()}).OwnerPool(t, nil)
	service, endService := startService(t, own)
	p := startPrometheus(t, app.address, service.address)
	began := time.Now()
	endApp, endCallers := app.run(), service.run()
	end := func() {
		endApp()
		endCallers()
	}
	defer end()
	for _, outcome := range []string{"allowed", "denied"} {
		for _, limiter := range []string{"api", "login"} {
			p.waitFor(t, `rate(ratelimit_decision_duration_seconds_count{`+
				`limiter="`+limiter+`",outcome="`+outcome+`"}[1m]) > 0`)
		}
	}
	look(t)

	release, releaseService := app.hold(t), service.hold(t, pool)
	p.waitFor(t, `rate(ratelimit_decision_duration_seconds_count{error_type="key_held"}[1m]) > 0`)
	p.waitFor(t, `ratelimit_service_pool_in_use > 0`)
	look(t)
	release()
	releaseService()
	service.write(t, "limiters.yaml", "limiters: 1")
	p.waitFor(t, `ALERTS{alertname="RateLimitServiceConfigurationRefused"}`)
	look(t)
	service.mend(t)
	p.waitFor(t, `ratelimit_service_configuration_broken == 0`)

	outage := period{from: time.Now()}
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	p.waitFor(t, "ratelimit_breaker_open == 1")
	p.waitFor(t, `rate(ratelimit_decision_duration_seconds_count{source="failed open"}[1m]) > 0`)
	p.waitFor(t, `rate(ratelimit_decision_duration_seconds_count{error_type="unavailable"}[1m]) > 0`)
	p.waitFor(t, `ALERTS{alertname="RateLimitBreakerOpen", limits="ephemeral"}`) // the alert fires after a minute
	p.waitFor(t, `ALERTS{alertname="RateLimitServiceWithoutDatabase", limits="ephemeral"}`)
	p.waitFor(t, `rate(ratelimit_service_call_should_rate_limit_redis_error[1m]) > 0`)
	look(t)
	require.NoError(t, server.Restart(t.Context()))
	outage.to = time.Now()
	p.waitFor(t, "max(ratelimit_breaker_open) == 0")
	look(t)

	sweep(t, pool)
	p.waitFor(t, `rate(ratelimit_table_deleted_total{table="ephemeral"}[1m]) > 0`)
	look(t)
	end()
	endService()

	all := period{began, time.Now()}
	d := readDashboard(t)
	shown := make([][]series, len(d.Panels))
	for i, panel := range d.Panels {
		for _, target := range panel.Targets {
			found := p.over(t, panel.query(target.Expr), all.from, all.to)
			requireSomething(t, panel.Title+": "+target.Expr, found)
			for j := range found {
				found[j].name = legend(target.LegendFormat, found[j].Metric)
			}
			shown[i] = append(shown[i], found...)
		}
	}
	alerts := p.alerts(t)
	require.Len(t, alerts, len(ruleNames(t)))
	for name, alert := range alerts {
		require.Equal(t, "ok", alert.Health, "%s: %s", name, alert.LastError)
	}
	drawn, err := draw(d, shown, all, outage)
	require.NoError(t, err)
	requireWellFormed(t, drawn)
	if drawing() {
		require.NoError(t, os.WriteFile(docs+"dashboard.svg", drawn, 0o644))
	}
}

func drawing() bool { return os.Getenv(drawVariable) != "" }

// look pauses, so that the events are apart in the chart.
func look(t *testing.T) {
	t.Helper()
	if drawing() {
		select {
		case <-time.After(15 * time.Second):
		case <-t.Context().Done():
		}
	}
}

// requireSomething requires that a query found a number other than 0.
func requireSomething(t *testing.T, query string, found []series) {
	t.Helper()
	for _, s := range found {
		for _, point := range s.Values {
			if point.Value != 0 && !math.IsNaN(point.Value) {
				return
			}
		}
	}
	require.Fail(t, "nothing to show", query)
}

// legend fills in Grafana's LegendFormat, such as "{{limiter}} p99", for a series.
func legend(format string, labels map[string]string) string {
	return regexp.MustCompile(`{{(\w+)}}`).ReplaceAllStringFunc(format, func(label string) string {
		return labels[strings.Trim(label, "{}")]
	})
}
