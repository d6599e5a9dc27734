// Package otelratelimit makes OpenTelemetry metrics. [New] measures what limiters do. [ObserveTables] measures the size
// of their tables and the age of the last sweep. The package is a separate module, so that programs without it do not
// depend on OpenTelemetry.
//
// The folder deploy has Prometheus alerts and a Grafana dashboard for these metrics.
package otelratelimit

import (
	"context"
	"errors"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pgratelimit/ratelimit"
)

// New returns an observer that records what all limiters of a client do. All these instruments except the last one have
// the attribute limiter, which is the limiter's name:
//
//   - ratelimit.decision.duration, a histogram in seconds whose count is the number of decisions. Its attributes are
//     outcome (allowed, denied, error) and source (see [ratelimit.Source]); shadow (allowed, denied) if a row of mode
//     shadow was decided; and error.type (see [ratelimit.ErrorKind]) for an error;
//   - ratelimit.statement.duration, a histogram in seconds, with error.type;
//   - ratelimit.statement.size, a histogram of how many calls shared a statement;
//   - ratelimit.statement.queued, a histogram of how many calls had to wait for a later statement;
//   - ratelimit.lease.units, a counter of units in leases (see [ratelimit.LeaseEvent]), with fate (taken, returned,
//     stranded);
//   - ratelimit.breaker.open, a gauge that is 1 while Postgres is not asked, otherwise 0. It has the attribute limits
//     (see [ratelimit.BreakerEvent]) and, behind a proxy for shards, the attribute shard, except for shard 0.
//
// A statement for several limiters has the empty string as its limiter. Each client has separate breakers. So an
// application with several clients needs an observer with a separate meter for each client. Otherwise the clients would
// overwrite each other's ratelimit.breaker.open.
//
// No measurement has a key, so the number of time series does not grow with the number of users.
func New(meter metric.Meter) (*ratelimit.Observer, error) {
	seconds := metric.WithExplicitBucketBoundaries(
		0.00001, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
	calls := metric.WithExplicitBucketBoundaries(0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
	decisions, err1 := meter.Float64Histogram("ratelimit.decision.duration", seconds,
		metric.WithUnit("s"), metric.WithDescription("How long callers waited for a decision."))
	statements, err2 := meter.Float64Histogram("ratelimit.statement.duration", seconds,
		metric.WithUnit("s"), metric.WithDescription("How long statements took."))
	sizes, err3 := meter.Int64Histogram("ratelimit.statement.size", calls,
		metric.WithUnit("{call}"), metric.WithDescription("How many calls shared a statement."))
	queued, err4 := meter.Int64Histogram("ratelimit.statement.queued", calls,
		metric.WithUnit("{call}"), metric.WithDescription("How many calls had to wait for the next statement."))
	breaker, err5 := meter.Int64Gauge("ratelimit.breaker.open",
		metric.WithDescription("1 while decisions are made without Postgres, else 0."))
	leases, err6 := meter.Int64Counter("ratelimit.lease.units",
		metric.WithUnit("{unit}"), metric.WithDescription("How many units were leased, returned or lost."))
	if err := errors.Join(err1, err2, err3, err4, err5, err6); err != nil {
		return nil, err
	}
	ctx := context.Background()
	return &ratelimit.Observer{
		Decision: func(e ratelimit.DecisionEvent) {
			attributes := []attribute.KeyValue{
				attribute.String("limiter", e.Limiter), attribute.String("outcome", e.Outcome()),
			}
			if e.Err == nil {
				attributes = append(attributes, attribute.String("source", e.Result.Source.String()))
			}
			if shadow := e.ShadowOutcome(); shadow != "" {
				attributes = append(attributes, attribute.String("shadow", shadow))
			}
			decisions.Record(ctx, e.Latency.Seconds(), with(e.Err, attributes...))
		},
		Statement: func(e ratelimit.StatementEvent) {
			limiter := attribute.String("limiter", e.Limiter)
			statements.Record(ctx, e.Latency.Seconds(), with(e.Err, limiter))
			sizes.Record(ctx, int64(e.Size), with(nil, limiter))
			queued.Record(ctx, int64(e.Queued), with(nil, limiter))
		},
		Lease: func(e ratelimit.LeaseEvent) {
			for fate, units := range map[string]int64{
				"taken": e.Taken, "returned": e.Returned, "stranded": e.Stranded,
			} {
				if units > 0 {
					limiter := attribute.String("limiter", e.Limiter)
					leases.Add(ctx, units, with(nil, limiter, attribute.String("fate", fate)))
				}
			}
		},
		Breaker: func(e ratelimit.BreakerEvent) {
			state := int64(0)
			if e.Open {
				state = 1
			}
			attributes := []attribute.KeyValue{attribute.String("limits", e.Limits)}
			if e.Shard > 0 {
				attributes = append(attributes, attribute.Int("shard", e.Shard))
			}
			breaker.Record(ctx, state, metric.WithAttributes(attributes...))
		},
	}, nil
}

// with returns the attributes of a measurement. If err is not nil, it adds error.type.
func with(err error, attributes ...attribute.KeyValue) metric.MeasurementOption {
	if err != nil {
		attributes = append(attributes, attribute.String("error.type", ratelimit.ErrorKind(err)))
	}
	return metric.WithAttributeSet(attribute.NewSet(attributes...))
}
