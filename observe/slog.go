// Package observe has an observer that logs what limiters do. The module github.com/pgratelimit/ratelimit/otelratelimit
// has an observer for OpenTelemetry.
package observe

import (
	"context"
	"log/slog"

	"github.com/pgratelimit/ratelimit"
)

// Slog returns an observer that logs each decision, statement and lease to logger, at the level Debug. A statement for
// several limiters has limiter="". Behind a proxy for shards, a statement has the attribute shard, except for shard 0.
// The observer does not log outages: the client logs them to [ratelimit.ClientConfig].Logger.
func Slog(logger *slog.Logger) *ratelimit.Observer {
	return &ratelimit.Observer{
		Decision: func(e ratelimit.DecisionEvent) {
			attributes := []slog.Attr{
				slog.String("limiter", e.Limiter), slog.String("outcome", e.Outcome()),
				slog.String("source", e.Result.Source.String()),
				slog.Int64("cost", e.Cost), slog.Duration("latency", e.Latency),
			}
			if shadow := e.ShadowOutcome(); shadow != "" {
				attributes = append(attributes, slog.String("shadow", shadow))
			}
			debug(logger, "ratelimit: decision", e.Err, attributes...)
		},
		Statement: func(e ratelimit.StatementEvent) {
			attributes := []slog.Attr{
				slog.String("limiter", e.Limiter), slog.Int("size", e.Size), slog.Int("queued", e.Queued),
				slog.Duration("latency", e.Latency),
			}
			if e.Shard > 0 {
				attributes = append(attributes, slog.Int("shard", e.Shard))
			}
			debug(logger, "ratelimit: statement", e.Err, attributes...)
		},
		Lease: func(e ratelimit.LeaseEvent) {
			debug(logger, "ratelimit: lease", nil,
				slog.String("limiter", e.Limiter), slog.Int64("taken", e.Taken), slog.Int64("returned", e.Returned),
				slog.Int64("stranded", e.Stranded))
		},
	}
}

// debug logs at the level Debug. It checks the level first, because building a line costs more than the check.
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
