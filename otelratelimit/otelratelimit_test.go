package otelratelimit_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	sdk "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	"go.opentelemetry.io/otel/sdk/metric/metricdata/metricdatatest"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/otelratelimit"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newReader(t *testing.T) (*sdk.ManualReader, *ratelimit.Observer) {
	t.Helper()
	reader := sdk.NewManualReader()
	observer, err := otelratelimit.New(sdk.NewMeterProvider(sdk.WithReader(reader)).Meter("test"))
	require.NoError(t, err)
	return reader, observer
}

// collect returns the data and the unit of each instrument.
func collect(t *testing.T, reader sdk.Reader) (data map[string]metricdata.Aggregation, units map[string]string) {
	t.Helper()
	var all metricdata.ResourceMetrics
	require.NoError(t, reader.Collect(t.Context(), &all))
	require.Len(t, all.ScopeMetrics, 1)
	data, units = map[string]metricdata.Aggregation{}, map[string]string{}
	for _, m := range all.ScopeMetrics[0].Metrics {
		data[m.Name], units[m.Name] = m.Data, m.Unit
	}
	return data, units
}

func set(pairs ...string) attribute.Set {
	var attributes []attribute.KeyValue
	for i := 0; i < len(pairs); i += 2 {
		attributes = append(attributes, attribute.String(pairs[i], pairs[i+1]))
	}
	return attribute.NewSet(attributes...)
}

// requireHistogram requires the count and the sum of each set of attributes.
func requireHistogram[N int64 | float64](t *testing.T, data metricdata.Aggregation, want map[attribute.Set]sum[N]) {
	t.Helper()
	histogram, ok := data.(metricdata.Histogram[N])
	require.True(t, ok, "%T", data)
	got := map[attribute.Set]sum[N]{}
	for _, point := range histogram.DataPoints {
		got[point.Attributes] = sum[N]{point.Count, point.Sum}
	}
	require.Equal(t, want, got)
}

type sum[N int64 | float64] struct {
	count uint64
	sum   N
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	reader, o := newReader(t)
	for range 3 {
		o.Decision(
			ratelimit.DecisionEvent{
				Limiter: "login",
				Result:  ratelimit.Result{Allowed: true},
				Latency: 250 * time.Millisecond,
			},
		)
	}
	o.Decision(
		ratelimit.DecisionEvent{
			Limiter: "login",
			Result:  ratelimit.Result{Source: ratelimit.SourceFailedClosed},
			Latency: time.Second,
		},
	)
	o.Decision(ratelimit.DecisionEvent{Limiter: "mail", Err: &ratelimit.KeyError{}, Latency: time.Second})
	o.Statement(ratelimit.StatementEvent{Limiter: "login", Size: 5, Queued: 7, Latency: time.Second})
	o.Statement(ratelimit.StatementEvent{Limiter: "login", Size: 3, Latency: time.Second, Err: ratelimit.ErrTimeout})
	o.Statement(ratelimit.StatementEvent{Size: 40, Queued: 2, Latency: 2 * time.Second}) // for several limiters
	o.Lease(ratelimit.LeaseEvent{Limiter: "login", Taken: 100, Stranded: 1})
	o.Lease(ratelimit.LeaseEvent{Limiter: "login", Taken: 20})
	o.Lease(ratelimit.LeaseEvent{Limiter: "login", Returned: 30})
	o.Breaker(ratelimit.BreakerEvent{Limits: "durable", Open: true, Err: ratelimit.ErrTimeout})
	requireOpen(t, reader, 1)
	o.Breaker(ratelimit.BreakerEvent{Limits: "durable"})
	requireOpen(t, reader, 0)
	o.Breaker(ratelimit.BreakerEvent{Limits: "durable", Shard: 2, Open: true})
	requireOpen(t, reader, 0, metricdata.DataPoint[int64]{
		Attributes: attribute.NewSet(attribute.String("limits", "durable"), attribute.Int("shard", 2)), Value: 1,
	})

	data, units := collect(t, reader)
	require.Equal(t, map[string]string{
		"ratelimit.decision.duration": "s", "ratelimit.statement.duration": "s",
		"ratelimit.statement.size": "{call}", "ratelimit.statement.queued": "{call}", "ratelimit.breaker.open": "",
		"ratelimit.lease.units": "{unit}",
	}, units)
	requireHistogram(t, data["ratelimit.decision.duration"], map[attribute.Set]sum[float64]{
		set("limiter", "login", "outcome", "allowed", "source", "database"):     {3, 0.75},
		set("limiter", "login", "outcome", "denied", "source", "failed closed"): {1, 1},
		set("limiter", "mail", "outcome", "error", "error.type", "invalid_key"): {1, 1},
	})
	requireHistogram(t, data["ratelimit.statement.duration"], map[attribute.Set]sum[float64]{
		set("limiter", "login"):                          {1, 1},
		set("limiter", "login", "error.type", "timeout"): {1, 1},
		set("limiter", ""):                               {1, 2},
	})
	requireHistogram(t, data["ratelimit.statement.size"], map[attribute.Set]sum[int64]{
		set("limiter", "login"): {2, 8}, set("limiter", ""): {1, 40},
	})
	requireHistogram(t, data["ratelimit.statement.queued"], map[attribute.Set]sum[int64]{
		set("limiter", "login"): {2, 7}, set("limiter", ""): {1, 2},
	})
	metricdatatest.AssertAggregationsEqual(t, metricdata.Sum[int64]{
		Temporality: metricdata.CumulativeTemporality, IsMonotonic: true,
		DataPoints: []metricdata.DataPoint[int64]{
			{Attributes: set("limiter", "login", "fate", "taken"), Value: 120},
			{Attributes: set("limiter", "login", "fate", "returned"), Value: 30},
			{Attributes: set("limiter", "login", "fate", "stranded"), Value: 1},
		},
	}, data["ratelimit.lease.units"], metricdatatest.IgnoreTimestamp())
}

// requireOpen requires a value of ratelimit.breaker.open for durable limiters.
func requireOpen(t *testing.T, reader sdk.Reader, want int64, ofShards ...metricdata.DataPoint[int64]) {
	t.Helper()
	data, _ := collect(t, reader)
	metricdatatest.AssertAggregationsEqual(t, metricdata.Gauge[int64]{
		DataPoints: append(ofShards, metricdata.DataPoint[int64]{Attributes: set("limits", "durable"), Value: want}),
	}, data["ratelimit.breaker.open"], metricdatatest.IgnoreTimestamp())
}

// For a limiter on Postgres, the metrics count its calls.
func TestMetricsOfALimiter(t *testing.T) {
	t.Parallel()
	reader, o := newReader(t)
	limiter := limitertest.New(t, pgtest.New(t).Pool, ratelimit.Config{
		Name: "login", Policy: ratelimit.FixedWindow{Limit: 3, Window: time.Hour},
	}, ratelimit.ClientConfig{Observer: o})
	for range 5 {
		_, err := limiter.Allow(t.Context(), "personal")
		require.NoError(t, err)
	}
	data, _ := collect(t, reader)
	histogram, ok := data["ratelimit.decision.duration"].(metricdata.Histogram[float64])
	require.True(t, ok)
	counts := map[attribute.Set]uint64{}
	for _, point := range histogram.DataPoints {
		counts[point.Attributes] = point.Count
		require.Positive(t, point.Sum)
	}
	require.Equal(t, map[attribute.Set]uint64{
		set("limiter", "login", "outcome", "allowed", "source", "database"):     3,
		set("limiter", "login", "outcome", "denied", "source", "database"):      1,
		set("limiter", "login", "outcome", "denied", "source", "cached denial"): 1,
	}, counts)
	requireHistogram(t, data["ratelimit.statement.size"], map[attribute.Set]sum[int64]{set("limiter", "login"): {4, 4}})
}

// failing is a meter that has no histograms.
type failing struct{ metric.Meter }

func (failing) Float64Histogram(string, ...metric.Float64HistogramOption) (metric.Float64Histogram, error) {
	return noop.Float64Histogram{}, context.Canceled
}

func TestErrorOfTheMeter(t *testing.T) {
	t.Parallel()
	observer, err := otelratelimit.New(failing{noop.Meter{}})
	require.ErrorIs(t, err, context.Canceled)
	require.Nil(t, observer)
}

func BenchmarkDecision(b *testing.B) {
	o, err := otelratelimit.New(sdk.NewMeterProvider(sdk.WithReader(sdk.NewManualReader())).Meter("test"))
	require.NoError(b, err)
	b.ReportAllocs()
	for b.Loop() {
		o.Decision(ratelimit.DecisionEvent{Limiter: "login", Latency: time.Millisecond})
	}
}
