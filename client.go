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

// Client is one process's use of one database. Make one for each pool, and all limiters with it. They share a
// queue, a breaker, remembered denials, and the connections of at most MaxInFlight statements. Limiters take
// turns, so one with many calls delays one with few by a statement at most. Where many have a few calls each, one
// statement decides for all of them. A Client is safe for concurrent use, starts nothing, and needs no Close.
// Making clients and limiters asks nothing of the database.
//
// Behind a proxy for shards, each shard has a queue and a breaker of its own, as soon as the proxy has told how many
// there are. So a shard that is away holds up only its own keys.
type Client struct {
	engine   *engine.Engine
	timeout  time.Duration // ClientConfig's
	observer *Observer
}

// ClientConfig says how a [Client] uses its database. The zero value is useful.
type ClientConfig struct {
	Schema string // where the migrations were applied; defaults to "": search_path finds it
	// Timeout is how long a call may take until the database has decided, at least 1 ms. Defaults to 1 second. If
	// a transaction holds the row, call and server give up after a quarter of it ([ErrKeyHeld]). That delays calls
	// for other keys by some milliseconds at most. Single connections and transactions keep their own settings.
	Timeout time.Duration
	// MaxInFlight is how many statements are under way at most, and so how many connections the client uses. Keys
	// whose row somebody holds may take one more. From 1; defaults
	// to 2. A second one leaves only if 24 callers wait, if the database is 1 ms away or more, or if the first takes
	// longer than 10 ms. Otherwise, calls wait. Behind a proxy for shards, all of this is for each shard. A pool with a
	// few connections more than MaxInFlight has some to spare for the others while the statements of one shard hang.
	MaxInFlight int
	MaxBatch    int // how many calls leave together in one statement at most; defaults to 500
	// DenialMaxAge is how long this process remembers a denial, if its RetryAfter does not pass earlier. Until
	// then it denies requests of that cost or more without asking the database. Defaults to 1 second.
	// [Config].NoDenialCache turns it off. A limiter, and those that With returns from it, forget a key at once
	// when they take from it, reset it, give back to it or grant it credit, even in a transaction or by AllowAll.
	// What others do takes effect here within this time: until then a reset may not be seen, unless [Policies] hear of
	// it, and a RetryAfter may be too short. Another limiter from [Client.Limiter] or [New] is one of the others, even
	// with the same Name. So is a call that may still count after an [ErrOutcomeUnknown].
	DenialMaxAge time.Duration
	// Logger gets a line with the cause when something keeps the database from deciding, and one when it decides
	// again: for the first call after an outage, or after 10 seconds without such a failure. There is no line for
	// each call, and no key in any. What calls in the caller's transactions and Resets meet is not logged. Defaults
	// to slog.Default(); slog.DiscardHandler turns it off.
	Logger   *slog.Logger
	Observer *Observer  // is told about every decision and statement, for metrics; nil costs nothing
	Test     TestConfig // for tests of the application
}

// TestConfig replaces parts of a client for tests.
type TestConfig struct {
	// Now replaces the clocks of the database and of this process. Calls use it several times, and concurrently.
	Now func() time.Time
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

// NewClient returns a client of the database behind db. Errors: a [*ConfigError].
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

// DBTX is a database for a [Client], usually a *pgxpool.Pool, on which concurrent calls share statements. On one
// connection or transaction (*pgxpool.Conn, *pgx.Conn, pgx.Tx) calls take turns, also with other clients and
// sweepers. Each is a statement of its own in that session, which commits as it says. Denials are not remembered,
// and MaxInFlight, MaxBatch, DenialMaxAge and Observer.Statement mean nothing.
//
// Package sqldb makes a DBTX of a *sql.DB. Any other type counts as a pool: several goroutines use it at once, and it
// gives each statement a connection of its own. So to trace, wrap a pool, or a transaction in a type that is a pgx.Tx.
// A type that has Conn or PgConn and is none of these wraps a single connection, and is refused.
type DBTX interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

var (
	_ DBTX = (*pgxpool.Pool)(nil)
	_ DBTX = (*pgxpool.Conn)(nil)
	_ DBTX = (*pgx.Conn)(nil)
	_ DBTX = (pgx.Tx)(nil)
)

// ownConns is for the statements of the default MaxInFlight, and for keys that somebody holds.
const ownConns = 3

// OwnPool returns a pool for a [Client] of its own, so that it decides while the application holds all connections
// of pool (see [ErrPoolExhausted]). It is configured as pool is, but has at most 3 connections: two for statements,
// and one for while somebody holds keys. They are opened when they are needed. Close it when its client is no longer
// used. WithTx works with transactions of both pools. Errors: a [*ConfigError].
func OwnPool(pool *pgxpool.Pool) (*pgxpool.Pool, error) {
	if pg.IsNil(pool) {
		return nil, &ConfigError{Field: "pool", Reason: "is nil, and must be the application's pool"}
	}
	config := pool.Config()
	config.MaxConns, config.MinConns, config.MinIdleConns = ownConns, 0, 0
	return pgxpool.NewWithConfig(context.Background(), config) // which opens no connection, and cannot fail
}
