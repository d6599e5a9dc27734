// Package observe has an observer of limiters that logs. One for OpenTelemetry is in the module
// github.com/pgratelimit/ratelimit/otelratelimit, because of its dependencies.
package observe

import (
	"context"
	"log/slog"

	"github.com/pgratelimit/ratelimit"
)

// Slog returns an observer that logs to logger: each decision and each statement at the level Debug, and when Postgres is away and
// when it is back at Warn and Info. A limiter whose Config.Logger is the same logger would log those last two twice.
func Slog(logger *slog.Logger) *ratelimit.Observer {
	return &ratelimit.Observer{
		Decision: func(e ratelimit.DecisionEvent) {
			debug(logger, "ratelimit: decision", e.Err,
				slog.String("limiter", e.Limiter), slog.String("outcome", e.Outcome()), slog.String("source", e.Result.Source.String()),
				slog.Int64("cost", e.Cost), slog.Duration("latency", e.Latency))
		},
		Batch: func(e ratelimit.BatchEvent) {
			debug(logger, "ratelimit: statement", e.Err,
				slog.String("limiter", e.Limiter), slog.Int("size", e.Size), slog.Int("queued", e.Queued), slog.Duration("latency", e.Latency))
		},
		Breaker: func(e ratelimit.BreakerEvent) {
			if e.Open {
				logger.Warn("ratelimit: Postgres is away or slow", slog.String("limiter", e.Limiter), slog.Any("error", e.Err))
			} else {
				logger.Info("ratelimit: Postgres decides again", slog.String("limiter", e.Limiter))
			}
		},
	}
}

// debug logs, if anybody reads that. Building the line costs more than to find out.
func debug(logger *slog.Logger, message string, err error, attributes ...slog.Attr) {
	ctx := context.Background()
	if !logger.Enabled(ctx, slog.LevelDebug) {
		return
	}
	if err != nil {
		attributes = append(attributes, slog.Any("error", err))
	}
	logger.LogAttrs(ctx, slog.LevelDebug, message, attributes...)
}
