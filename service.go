package ratelimit

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/door"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/turn"
)

// Service asks a process that asks Postgres for many processes. Pass it to [NewClient], [New] or [NewPolicies] in place
// of a pool. The service merges the requests of all its clients, as a [Client] merges those of its process, so many
// small processes cost Postgres little and need few connections. `pgratelimit serve --door` is such a service, and so
// is every process that calls [Client.Serve].
//
// Everything works as with a pool, but for [Limiter.WithTx], package cleanup and package migrations: these need
// Postgres itself. The database is that of the service, and so is its schema. When the service is away, OnFailure
// answers, or the process asks [ServiceConfig].Direct. A call whose request was sent returns an [ErrOutcomeUnknown] if
// the connection breaks. Of the Timeouts of service and client, the shorter one ends a call.
//
// A Service has one connection, which it opens at the first call. It is safe for concurrent use. Share it among all
// clients of a process, and close it at the end.
type Service struct{ client *door.Client }

// ServiceConfig says how to reach a [Service]. The zero value is useful for a Unix socket.
type ServiceConfig struct {
	TLS   *tls.Config // nil means no TLS
	Token string      // the token that the service asks for; defaults to "", for a service without one
	// Direct is a *pgxpool.Pool or a sqldb.Pool, which the process asks itself while it cannot reach the service. A
	// request that was sent to the service is not sent again. Defaults to nil: the call fails, and OnFailure answers.
	Direct DBTX
}

// NewService returns a Service for an address: host:port, or unix:/path. It does not connect yet. Errors: a
// [*ConfigError].
func NewService(address string, config ServiceConfig) (*Service, error) {
	network, addr := door.Network(address)
	if _, _, err := net.SplitHostPort(addr); network == "tcp" && err != nil || addr == "" {
		return nil, &ConfigError{
			Field: "address", Reason: fmt.Sprintf("is %q, and must be host:port or unix:/path", address),
		}
	}
	direct := config.Direct
	if pg.IsNil(direct) {
		direct = nil
	}
	if _, nested := direct.(*Service); nested {
		return nil, &ConfigError{Field: "ServiceConfig.Direct", Reason: "is a Service, and must be a *pgxpool.Pool"}
	}
	if direct != nil && (pg.WrapsConn(direct) != "" || turn.Of(direct) != nil) {
		return nil, &ConfigError{
			Field: "ServiceConfig.Direct", Reason: "is a single connection or transaction, and must be a *pgxpool.Pool",
		}
	}
	return &Service{door.NewClient(door.ClientConfig{
		Address: address, TLS: config.TLS, Token: config.Token, Direct: direct,
	})}, nil
}

// Query sends one of this library's statements to the service, which refuses all others.
func (s *Service) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return s.client.Query(ctx, sql, args...)
}

// Close closes the connection. Calls under way and all later calls return an error.
func (s *Service) Close() { s.client.Close() }

// behind returns the database that a client asks: db itself, or the client of a Service.
func behind(db DBTX) DBTX {
	if s, ok := db.(*Service); ok && s != nil {
		return s.client
	}
	return db
}

// ServeConfig says how [Client.Serve] serves. The zero value is useful.
type ServeConfig struct {
	Token    string        // the token that clients must send; defaults to "": whoever can connect is served
	MaxConns int           // the most connections; defaults to 10,000
	Grace    time.Duration // how long clients have to go elsewhere when ctx ends; defaults to 5 seconds
	// Logger gets a line when a process is refused, but no more than one each second. Defaults to slog.Default().
	Logger *slog.Logger
}

// Serve lets other processes ask c in place of Postgres: see [Service]. Their requests share the statements, the
// connections and the breaker of c. Serve closes the listener when ctx ends, lets clients go elsewhere, answers what is
// under way, and returns.
//
// Whoever can connect, and knows the token, can take from all limiters. So listen on a Unix socket or on loopback, or
// on a [tls.NewListener] that wants client certificates, or set a Token. Errors: a [*ConfigError] for a client that has
// no pool; an error of the listener.
func (c *Client) Serve(ctx context.Context, listener net.Listener, config ServeConfig) error {
	switch {
	case !c.engine.Pooled() || c.engine.Asks():
		return &ConfigError{Field: "db", Reason: "must be a *pgxpool.Pool for Serve"}
	case config.MaxConns < 0:
		return &ConfigError{Field: "ServeConfig.MaxConns", Reason: "must not be negative"}
	case config.Grace < 0:
		return &ConfigError{Field: "ServeConfig.Grace", Reason: "must not be negative"}
	}
	return door.Serve(ctx, listener, c.engine, door.Options{
		Valid: isValid, Token: config.Token, MaxConns: config.MaxConns, Grace: config.Grace, Logger: config.Logger,
	})
}

// isValid returns whether a policy may have these numbers, whose algorithm is known.
func isValid(n algorithm.Numbers) bool { return policyOf(n).validate() == nil }
