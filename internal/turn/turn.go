// Package turn keeps those who share a connection from using it at the same time.
package turn

import (
	"context"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Turn is held by whoever uses a connection.
type Turn struct{ held chan struct{} }

// New returns a turn that nobody has.
func New() *Turn { return &Turn{make(chan struct{}, 1)} }

// Take waits for the turn. It returns the context's error if the context ends before.
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

// TryTake takes the turn if nobody has it.
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

// connections guards the maps of CustomData while limiters and sweepers are made, which several goroutines may do.
//
//nolint:gochecknoglobals // the maps are pgx's, so nobody but all limiters and sweepers together can guard them
var connections sync.Mutex

// Of returns the turn of the connection behind db. It returns nil if db is neither a connection nor a transaction.
func Of(db any) *Turn {
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn, pgx.Tx:
	default:
		return nil
	}
	conn := pg.Conn(db)
	if conn == nil { // a transaction of the application's own making
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
