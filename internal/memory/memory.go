// Package memory holds the database in memory of package ratelimittest. Package ratelimit decides on it by its models.
package memory

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
)

// DB stands for a database. All limiters on one DB share its rows. The zero DB is ready to use.
type DB struct {
	Mu   sync.Mutex
	Rows map[Row]any // what package ratelimit keeps there; nil if there is nothing
}

// Row says which row of which table.
type Row struct {
	Durable   bool
	Name, Key string
}

// Query refuses everything. Limiters do not call it, but sweepers and migrations might.
func (*DB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("ratelimittest: there is no SQL in memory; test this on Postgres")
}
