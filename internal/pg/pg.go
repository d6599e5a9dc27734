// Package pg has functions for limiters and sweepers that use Postgres by pgx. The functions translate errors of the
// database, find the connection behind a value, and put the schema into statements.
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

// IsNil tells whether db is nil or holds a nil pointer, such as (*pgxpool.Pool)(nil).
func IsNil(db any) bool {
	if db == nil {
		return true
	}
	v := reflect.ValueOf(db)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// Conn returns the connection behind db, if db is a connection or a transaction. Conn returns nil for a pool, and for
// an application's implementation of pgx.Tx that has no connection.
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

// WrapsConn returns "" or an error text. The error is that db wraps a single connection, but is not a type for which
// calls take turns. Concurrent calls would then use the connection at the same time.
func WrapsConn(db any) (reason string) {
	switch db.(type) {
	case *pgx.Conn, *pgxpool.Conn, pgx.Tx, Pool:
	case interface{ Conn() *pgx.Conn }, interface{ PgConn() *pgconn.PgConn },
		interface{ Hijack() *pgx.Conn }: // an embedded *pgxpool.Conn, whose method Conn the field's name hides
		return fmt.Sprintf("is a %T, which wraps a single connection; "+
			"pass the connection itself, or wrap a *pgxpool.Pool or a pgx.Tx", db)
	}
	return ""
}

// InTransaction tells whether a statement on db runs in a transaction that continues after the statement.
func InTransaction(db any) bool {
	if _, ok := db.(pgx.Tx); ok {
		return true
	}
	conn := Conn(db)
	return conn != nil && conn.PgConn().TxStatus() != 'I'
}

// Qualify puts the schema before each name that begins with rate_limit_ in the statement.
func Qualify(statement, schema string) string {
	if schema == "" {
		return statement
	}
	return strings.ReplaceAll(statement, "rate_limit_", pgx.Identifier{schema}.Sanitize()+".rate_limit_")
}

// Pool is a pool of connections that is not a *pgxpool.Pool. Package sqldb implements Pool.
type Pool interface {
	// Use calls the function use with a connection that no other caller uses meanwhile. Use returns the function's
	// error, or an [Error] if there is no connection.
	Use(ctx context.Context, use func(*pgx.Conn) error) error
}

// Use calls a function with a connection of a pool, and returns its error, or an [Error] without a connection.
func Use(ctx context.Context, pool any, use func(*pgx.Conn) error) error {
	switch pool := pool.(type) {
	case *pgxpool.Pool:
		// If Acquire fails, no statement was sent.
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

// cancelGrace is how long a connection that was closed during a statement keeps its place in the pool. Meanwhile
// Postgres cancels the statement, which usually takes a millisecond.
const cancelGrace = 250 * time.Millisecond

// release gives a connection back to its pool. If the connection is closed, release does not wait longer than
// cancelGrace for the server to cancel the statement. pgxpool would wait 15 s, and calls for a frozen shard would fill
// the pool.
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

// allAcquired tells whether all connections of the pool are in use. If all connections are in use before and after a
// failed wait, the pool was exhausted. The check takes 100 ns.
func allAcquired(pool *pgxpool.Pool) bool {
	stat := pool.Stat()
	return stat.AcquiredConns() == stat.MaxConns()
}
