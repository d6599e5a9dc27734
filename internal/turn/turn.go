// Package turn prevents two users of a connection from using it at the same time.
package turn

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Turn is held by the present user of a connection.
type Turn struct{ held chan struct{} }

// New returns a free turn.
func New() *Turn { return &Turn{make(chan struct{}, 1)} }

// Take waits for the turn and takes it. It returns the context's error if the context ends first.
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

// TryTake takes the turn if it is free.
func (t *Turn) TryTake() bool {
	select {
	case t.held <- struct{}{}:
		return true
	default:
		return false
	}
}

// Pass ends the turn.
func (t *Turn) Pass() { <-t.held }

// connections guards the CustomData maps, because several goroutines may create limiters and sweepers at once.
//
//nolint:gochecknoglobals // the maps belong to pgx, so all limiters and sweepers need one common lock
var connections sync.Mutex

// Of returns the turn of db's connection. It returns nil if db is not a connection or a transaction.
func Of(db any) *Turn {
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn, pgx.Tx:
	default:
		return nil
	}
	conn := pg.Conn(db)
	if conn == nil { // a transaction that the application itself implements
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
