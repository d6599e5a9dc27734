// Package memdb has the in-memory database of package ratelimittest. Package engine decides on it, by the rules of
// package model.
package memdb

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
)

// DB replaces a database. All limiters of one DB share its rows. The zero DB is ready to use.
type DB struct {
	Mu   sync.Mutex
	Rows map[Row]any // the rows of package engine; nil if there is none
}

// Row identifies a row of one of the tables.
type Row struct {
	Durable   bool
	Name, Key string
}

// Query refuses everything. Limiters do not call Query, but sweepers and migrations might.
func (*DB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("ratelimittest: there is no SQL in memory; test this on Postgres")
}
