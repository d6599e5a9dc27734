// Package turn lets users of one database connection take turns, so that no two use the connection at the same time.
package turn

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Turn is a lock for one connection. The goroutine that uses the connection holds the Turn.
type Turn struct{ held chan struct{} }

// New returns a Turn that nobody holds.
func New() *Turn { return &Turn{make(chan struct{}, 1)} }

// Take waits until nobody holds the turn, and takes it. Take returns the context's error if the context ends first.
func (t *Turn) Take(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	select {
	case t.held <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// TryTake takes the turn if nobody holds it, and tells whether it has taken the turn.
func (t *Turn) TryTake() bool {
	select {
	case t.held <- struct{}{}:
		return true
	default:
		return false
	}
}

// Pass releases the turn. The caller must hold the turn.
func (t *Turn) Pass() { <-t.held }

// connections guards the CustomData maps of all connections.
//
//nolint:gochecknoglobals // the maps belong to pgx, so all limiters and sweepers must share this lock
var connections sync.Mutex

// Of returns the turn of db's connection. Of returns nil if db is neither a connection nor a transaction.
func Of(db any) *Turn {
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn, pgx.Tx:
	default:
		return nil
	}
	conn := pg.Conn(db)
	if conn == nil { // the application's own implementation of pgx.Tx
		return New()
	}
	const name = "github.com/pgratelimit/ratelimit: turns"
	connections.Lock()
	defer connections.Unlock()
	data := conn.PgConn().CustomData()
	turn, ok := data[name].(*Turn)
	if !ok {
		turn = New()
		data[name] = turn
	}
	return turn
}
