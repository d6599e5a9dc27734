package ratelimit

import (
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/deadline"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Client sends the requests of a process to one database. Make one Client for each pool, and make all limiters with it.
// The limiters share statements, connections, a circuit breaker and remembered denials. They take turns, so a busy
// limiter delays the others by at most one statement. A Client is safe for concurrent use, has no goroutine while it is
// idle, and needs no Close.
//
// Behind a proxy for shards, an unreachable shard delays only its own keys.
type Client struct {
	engine   *engine.Engine
	timeout  time.Duration // ClientConfig.Timeout
	observer *Observer
}

// ClientConfig says how a [Client] uses its database. The zero value is useful.
type ClientConfig struct {
	Schema string // the schema that has the tables; defaults to "": search_path finds it
	// Timeout is the longest time that a call waits for a decision. It is at least 1 ms, and defaults to 1 second. If a
	// transaction has locked the key's row, the call waits a quarter of Timeout, and returns [ErrKeyHeld]. This delays
	// other keys by a few milliseconds at most. Single connections and transactions keep their lock_timeout.
	Timeout time.Duration
	// MaxInFlight is how many statements may run at once on each shard. Each statement uses a connection of the pool.
	// Keys whose rows are locked may use one more connection, and each Reset and HoldFromText uses one. At least 1;
	// defaults to 2. A second statement starts only if callers wait for 24 keys, or if the first statement takes longer
	// than 10 ms.
	MaxInFlight int
	MaxBatch    int // how many calls may share a statement, at least 1; defaults to 500
	// DenialMaxAge is how long the client remembers a denial, unless RetryAfter is shorter. Until then, the client
	// denies requests of the same cost or more without asking the database. Defaults to 1 second;
	// [Config].NoDenialCache turns it off. A take, refund, grant or reset by any limiter of the client ends the key's
	// denial. A refund, grant or reset by another client or process is noticed at most DenialMaxAge later, or sooner
	// with [Policies].
	DenialMaxAge time.Duration
	// Logger gets a line with the cause when the database stops deciding, and a line when it decides again. It gets no
	// line for each call, and no key. Defaults to slog.Default().
	Logger   *slog.Logger
	Observer *Observer // is told about every decision and statement, for metrics
	Test     TestConfig
}

// TestConfig replaces parts of a client for tests of an application.
type TestConfig struct {
	Now func() time.Time // replaces the clocks of the database and of this process; is called concurrently
}

func (c ClientConfig) withDefaults() ClientConfig {
	if c.Timeout == 0 {
		c.Timeout = deadline.Default
	}
	if c.MaxInFlight == 0 {
		c.MaxInFlight = 2
	}
	if c.MaxBatch == 0 {
		c.MaxBatch = 500
	}
	if c.DenialMaxAge == 0 {
		c.DenialMaxAge = time.Second
	}
	return c
}

func (c ClientConfig) validate() error {
	switch {
	case !utf8.ValidString(c.Schema) || strings.ContainsAny(c.Schema, "\x00\n\r"):
		return &ConfigError{Field: "ClientConfig.Schema", Reason: "must be valid UTF-8 without NUL and line breaks"}
	case c.Timeout < time.Millisecond:
		return &ConfigError{
			Field: "ClientConfig.Timeout", Reason: fmt.Sprintf("is %v, and must be at least 1ms", c.Timeout),
		}
	case c.MaxInFlight < 1:
		return &ConfigError{
			Field: "ClientConfig.MaxInFlight", Reason: fmt.Sprintf("is %d, and must be at least 1", c.MaxInFlight),
		}
	case c.MaxBatch < 1:
		return &ConfigError{
			Field: "ClientConfig.MaxBatch", Reason: fmt.Sprintf("is %d, and must be at least 1", c.MaxBatch),
		}
	case c.DenialMaxAge < 0:
		return &ConfigError{Field: "ClientConfig.DenialMaxAge", Reason: fmt.Sprintf(
			"is %v, and must not be negative; Config.NoDenialCache turns the cache off", c.DenialMaxAge)}
	}
	return nil
}

// NewClient returns a client for db. Errors: a [*ConfigError].
func NewClient(db DBTX, config ClientConfig) (*Client, error) {
	if pg.IsNil(db) {
		return nil, &ConfigError{
			Field: "db", Reason: "is nil, and must be a *pgxpool.Pool, a connection or a transaction",
		}
	}
	if reason := pg.WrapsConn(db); reason != "" {
		return nil, &ConfigError{Field: "db", Reason: reason}
	}
	if !reflect.ValueOf(db).Comparable() { // Refund compares db with the db of other clients
		return nil, &ConfigError{
			Field: "db", Reason: fmt.Sprintf("is a %T, which cannot be compared; pass a pointer to it", db),
		}
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	if _, ok := db.(*Service); ok && config.Schema != "" {
		return nil, &ConfigError{Field: "ClientConfig.Schema", Reason: "must be empty for a Service, which has its own"}
	}
	return &Client{
		engine: engine.NewEngine(behind(db), engine.Settings{
			Schema: config.Schema, Timeout: config.Timeout, MaxInFlight: config.MaxInFlight, MaxBatch: config.MaxBatch,
			DenialMaxAge: config.DenialMaxAge, Clock: config.Test.Now, Logger: config.Logger,
			Hooks: config.Observer.hooks(),
		}),
		timeout: config.Timeout, observer: config.Observer,
	}, nil
}

// DBTX is a database for a [Client]. Pass a *pgxpool.Pool, a *sql.DB that package sqldb wraps, or a [*Service]. A
// single connection or transaction (*pgxpool.Conn, *pgx.Conn, pgx.Tx) serves one call at a time, and ignores
// MaxInFlight and DenialMaxAge.
//
// Any other type must run each statement on a separate connection, because goroutines call it concurrently. For
// tracing, wrap a pool, or wrap a transaction in another pgx.Tx. A wrapped connection is refused.
type DBTX interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

var (
	_ DBTX = (*pgxpool.Pool)(nil)
	_ DBTX = (*pgxpool.Conn)(nil)
	_ DBTX = (*pgx.Conn)(nil)
	_ DBTX = (pgx.Tx)(nil)
	_ DBTX = (*Service)(nil)
)

// ownConns is enough for two statements (the default MaxInFlight), and for one statement for keys whose rows are
// locked.
const ownConns = 3

// OwnPool returns a second pool, for a [Client] that decides even if the application holds all connections of pool. The
// second pool is configured like pool, but has at most 3 connections. WithTx works with transactions of both. Close it
// after use. Errors: a [*ConfigError].
func OwnPool(pool *pgxpool.Pool) (*pgxpool.Pool, error) {
	if pg.IsNil(pool) {
		return nil, &ConfigError{Field: "pool", Reason: "is nil, and must be the application's pool"}
	}
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = ownConns, 0, 0
	return pgxpool.NewWithConfig(context.Background(), config) // opens no connection, and cannot fail
}
