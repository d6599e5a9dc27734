package ratelimit

import (
	"context"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pg"
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
