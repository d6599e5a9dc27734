// Package pg has what limiters and sweepers share to use Postgres by pgx. It says what an error of the database means,
// finds the connection behind a value, and puts the schema into statements.
package pg

import (
	"context"
	"fmt"
	"reflect"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// IsNil tells whether db is nil, or an interface that holds a nil pointer, such as (*pgxpool.Pool)(nil).
func IsNil(db any) bool {
	if db == nil {
		return true
	}
	v := reflect.ValueOf(db)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// Conn returns the connection behind db, if db is a connection or a transaction. It returns nil for a pool, and for a
// type of the application's that implements pgx.Tx without a connection.
func Conn(db any) *pgx.Conn {
	var conn *pgx.Conn
	switch db := db.(type) {
	case *pgx.Conn:
		conn = db
	case interface{ Conn() *pgx.Conn }: // pgx.Tx, *pgxpool.Conn
		conn = db.Conn()
	}
	if conn == nil || conn.PgConn() == nil {
		return nil
	}
	return conn
}

// WrapsConn tells what is wrong with db if it hides a single connection: it lends one, but is no type that takes turns.
// It would count as a pool, and concurrent calls would use the connection at the same time. Otherwise it returns "".
func WrapsConn(db any) (reason string) {
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn, pgx.Tx, Pool:
	case interface{ Conn() *pgx.Conn }, interface{ PgConn() *pgconn.PgConn },
		interface{ Hijack() *pgx.Conn }: // is left of an embedded *pgxpool.Conn, whose name hides its method Conn
		return fmt.Sprintf("is a %T, which wraps a single connection; "+
			"pass the connection itself, or wrap a *pgxpool.Pool or a pgx.Tx", db)
	}
	return ""
}

// InTransaction tells whether a statement on db belongs to a transaction that goes on after it.
func InTransaction(db any) bool {
	if _, ok := db.(pgx.Tx); ok {
		return true
	}
	conn := Conn(db)
	return conn != nil && conn.PgConn().TxStatus() != 'I'
}

// Qualify puts the schema before the functions in a statement. Their names must all begin with rate_limit_.
func Qualify(statement, schema string) string {
	if schema == "" {
		return statement
	}
	return strings.ReplaceAll(statement, "rate_limit_", pgx.Identifier{schema}.Sanitize()+".rate_limit_")
}

// Pool is a pool of connections that is not a *pgxpool.Pool: the one of package sqldb.
type Pool interface {
	// Use calls use with a connection that nobody else uses until it returns. It returns use's error, or an [Error] if
	// it gets no connection.
	Use(ctx context.Context, use func(*pgx.Conn) error) error
}

// Use calls use with a connection of a pool. It returns use's error, or an [Error] if it gets no connection.
func Use(ctx context.Context, pool any, use func(*pgx.Conn) error) error {
	switch pool := pool.(type) {
	case *pgxpool.Pool:
		// An error of Acquire proves that no statement was sent.
		full := allAcquired(pool)
		conn, err := pool.Acquire(ctx)
		switch {
		case err != nil && ctx.Err() != nil && full && allAcquired(pool):
			return NewError(err, ErrPoolExhausted, ErrTimeout)
		case err != nil:
			return Translate(err, false)
		}
		defer release(conn)
		return use(conn.Conn())
	case Pool:
		return pool.Use(ctx, use)
	}
	return NewError(fmt.Errorf("a %T is no *pgxpool.Pool, nor a *sql.DB in sqldb.Pool", pool), ErrSetup)
}

// cancelGrace is how long a connection that was closed within a statement keeps its place in the pool. Meanwhile the
// server is asked to cancel the statement, which takes Postgres a millisecond.
const cancelGrace = 250 * time.Millisecond

// release gives a connection back to its pool. If the server does not cancel a closed connection's statement, pgxpool
// would keep its place for 15 s. Each call for a frozen shard would take such a place, and soon fill a small pool.
func release(conn *pgxpool.Conn) {
	if !conn.Conn().IsClosed() {
		conn.Release()
		return
	}
	closed := conn.Conn().PgConn().CleanupDone()
	go func() {
		select {
		case <-closed:
			conn.Release()
		case <-time.After(cancelGrace):
			conn.Hijack()
		}
	}()
}

// allAcquired tells whether all connections of the pool are in use. If that is so before and after a failed wait, the
// wait was for a connection to come back. The check takes 100 ns.
func allAcquired(pool *pgxpool.Pool) bool {
	stat := pool.Stat()
	return stat.AcquiredConns() == stat.MaxConns()
}
