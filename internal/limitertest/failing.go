package limitertest

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// TurnedAway is how a stopped server answers, at once.
func TurnedAway(context.Context) error {
	return &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03"}
}

// Fatal returns how a server ends a connection.
func Fatal(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: code} }
}

// SQLState returns how a statement fails.
func SQLState(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: code} }
}

var (
	// Hourly is a policy for tests to which the numbers do not matter.
	Hourly = ratelimit.FixedWindow{Limit: 100, Window: time.Hour}

	// Modes are those that answer in an outage.
	Modes = map[ratelimit.Source]ratelimit.FailureMode{
		ratelimit.SourceFailedOpen:   ratelimit.FailOpen(),
		ratelimit.SourceFailedClosed: ratelimit.FailClosed(),
		ratelimit.SourceFallback:     ratelimit.FallbackLocal(0.1),
	}
)

// NotSent is an error of a statement that never left.
type NotSent struct{}

func (NotSent) Error() string { return "the connection was closed already" }

// SafeToRetry is what pgx asks.
func (NotSent) SafeToRetry() bool { return true }
