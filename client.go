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

// Client is one process's use of one database. Make one for each pool, and all limiters with it. They share statements,
// connections, a breaker and remembered denials. Limiters take turns, so one with many calls delays another by a
// statement at most. A Client is safe for concurrent use, starts nothing, and needs no Close.
//
// Behind a proxy for shards, a shard that is away holds up only its own keys.
type Client struct {
	engine   *engine.Engine
	timeout  time.Duration // ClientConfig's
	observer *Observer
}

// ClientConfig says how a [Client] uses its database. The zero value is useful.
type ClientConfig struct {
	Schema string // where the migrations were applied; defaults to "": search_path finds it
	// Timeout is how long a call may take until the database has decided, at least 1 ms. Defaults to 1 second. For a
	// row that a transaction holds, call and server wait a quarter of it ([ErrKeyHeld]), which delays calls for other
	// keys by some milliseconds at most. Single connections and transactions keep their own lock_timeout.
	Timeout time.Duration
	// MaxInFlight is how many statements may be under way, for each shard, and so how many connections they use; held
	// keys may use one more. At least 1; defaults to 2. The second one leaves only where it pays: if 24 callers wait,
	// if the database is 1 ms away, or if the first one takes longer than 10 ms.
	MaxInFlight int
	MaxBatch    int // how many calls may share a statement, at least 1; defaults to 500
	// DenialMaxAge is how long this process remembers a denial, if RetryAfter is not shorter. Until then it denies
	// requests of that cost or more by itself. Defaults to 1 second; [Config].NoDenialCache turns it off. A limiter
	// forgets a key's denial when it takes, resets, gives back or grants, and so do those made by With. What others do,
	// even with the same Name, may be seen up to DenialMaxAge later, unless [Policies] hear of it.
	DenialMaxAge time.Duration
	// Logger gets a line with the cause when the database cannot decide, and one when it decides again. There is no
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

// NewClient returns a client of db. Errors: a [*ConfigError].
func NewClient(db DBTX, config ClientConfig) (*Client, error) {
	if pg.IsNil(db) {
		return nil, &ConfigError{
			Field: "db", Reason: "is nil, and must be a *pgxpool.Pool, a connection or a transaction",
		}
	}
	if reason := pg.WrapsConn(db); reason != "" {
		return nil, &ConfigError{Field: "db", Reason: reason}
	}
	if !reflect.ValueOf(db).Comparable() { // Refund compares it with the db of other clients
		return nil, &ConfigError{
			Field: "db", Reason: fmt.Sprintf("is a %T, which cannot be compared; pass a pointer to it", db),
		}
	}
	config = config.withDefaults()
	if err := config.validate(); err != nil {
		return nil, err
	}
	return &Client{
		engine: engine.NewEngine(db, engine.Settings{
			Schema: config.Schema, Timeout: config.Timeout, MaxInFlight: config.MaxInFlight, MaxBatch: config.MaxBatch,
			DenialMaxAge: config.DenialMaxAge, Clock: config.Test.Now, Logger: config.Logger,
			Hooks: config.Observer.hooks(),
		}),
		timeout: config.Timeout, observer: config.Observer,
	}, nil
}

// DBTX is a database for a [Client]. Pass a *pgxpool.Pool, or a *sql.DB by package sqldb. On one connection or
// transaction (*pgxpool.Conn, *pgx.Conn, pgx.Tx) calls take turns, each in a statement of its own. Denials are not
// remembered there, and MaxInFlight, MaxBatch and DenialMaxAge mean nothing.
//
// Any other type must give each statement a connection of its own, because goroutines call it concurrently. So to
// trace, wrap a pool, or a transaction in a type that is a pgx.Tx. A wrapper around a single connection is refused.
type DBTX interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

var (
	_ DBTX = (*pgxpool.Pool)(nil)
	_ DBTX = (*pgxpool.Conn)(nil)
	_ DBTX = (*pgx.Conn)(nil)
	_ DBTX = (pgx.Tx)(nil)
)

// ownConns is for the two statements of the default MaxInFlight, and one for held keys.
const ownConns = 3

// OwnPool returns a pool for a [Client] of its own, which decides even if the application holds all connections of
// pool. It is configured like pool, but has at most 3 connections. WithTx works with transactions of both pools. Close
// it when its client is no longer used. Errors: a [*ConfigError].
func OwnPool(pool *pgxpool.Pool) (*pgxpool.Pool, error) {
	if pg.IsNil(pool) {
		return nil, &ConfigError{Field: "pool", Reason: "is nil, and must be the application's pool"}
	}
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = ownConns, 0, 0
	return pgxpool.NewWithConfig(context.Background(), config) // which opens no connection, and cannot fail
}
