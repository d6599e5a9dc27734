package limitertest

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
)

// TurnedAway returns the error of a server that does not accept connections now.
func TurnedAway(context.Context) error {
	return &pgconn.PgError{Severity: "FATAL", SeverityUnlocalized: "FATAL", Code: "57P03"}
}

// Fatal returns a function that fails like a server that ends the connection with this SQLSTATE.
func Fatal(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "FATAL", Code: code} }
}

// SQLState returns a function that fails like a statement with this SQLSTATE.
func SQLState(code string) func(context.Context) error {
	return func(context.Context) error { return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: code} }
}

var (
	// Hourly is a policy for tests in which the numbers do not matter.
	Hourly = ratelimit.FixedWindow{Limit: 100, Window: time.Hour}

	// Modes maps the Source of a result in an outage to the failure mode that gives this result.
	Modes = map[ratelimit.Source]ratelimit.FailureMode{
		ratelimit.SourceFailedOpen:   ratelimit.FailOpen(),
		ratelimit.SourceFailedClosed: ratelimit.FailClosed(),
		ratelimit.SourceFallback:     ratelimit.FallbackLocal(0.1),
	}
)

// NotSent is the error of a statement that was never sent.
type NotSent struct{}

func (NotSent) Error() string { return "the connection was closed already" }

// SafeToRetry tells pgx that the statement was not sent.
func (NotSent) SafeToRetry() bool { return true }
