// Package sqldb lets an application that uses database/sql keep its *sql.DB, if pgx's driver stdlib opened it:
//
//	db, err := sql.Open("pgx", os.Getenv("DATABASE_URL"))
//	…
//	pool := sqldb.Pool(db)
//	err = migrations.Up(ctx, pool)
//	limiter, err := ratelimit.New(pool, ratelimit.Config{Name: "login", Policy: policy})
//	…
//	tx, err := db.BeginTx(ctx, nil)
//	result, err := limiter.WithTx(sqldb.Tx(tx)).Allow(ctx, "user:123")
//	err = tx.Commit()
//
// Everything works as with a *pgxpool.Pool: concurrent calls share statements, a limiter uses at most two connections,
// and Durable, SynchronousCommit, OnFailure and the errors mean the same. All of pgx's modes of execution work.
package sqldb

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// Pool makes a *sql.DB usable by a limiter, a client, a sweeper or package migrations. pgx's package stdlib must have
// opened the *sql.DB: sql.Open("pgx", …), stdlib.OpenDB or stdlib.OpenDBFromPool. With any other driver, or one that
// wraps it, calls return [ratelimit.ErrSetup]. All Pools of a *sql.DB are equal. The caller still configures and closes
// the *sql.DB.
func Pool(db *sql.DB) ratelimit.DBTX {
	if db == nil {
		return nil
	}
	return pool{db}
}

type pool struct{ db *sql.DB }

var _ pg.Pool = pool{}

// Use gives a limiter the pgx.Conn itself, because database/sql hides whether a statement was sent, and sends some
// statements twice.
func (p pool) Use(ctx context.Context, use func(*pgx.Conn) error) error {
	conn, err := p.db.Conn(ctx)
	if err != nil {
		return pg.Translate(err, false)
	}
	defer func() { _ = conn.Close() }() // only returns it to the pool
	var used error
	if err := conn.Raw(func(conn any) error {
		c, ok := conn.(*stdlib.Conn)
		if !ok {
			used = pg.NewError(fmt.Errorf("the driver of the *sql.DB is a %T; open it by package stdlib of pgx, "+
				`such as with sql.Open("pgx", …), or make a *pgxpool.Pool for the limiter`, conn), pg.ErrSetup)
			return nil
		}
		used = use(c.Conn())
		if c.Conn().IsClosed() {
			return driver.ErrBadConn // the pool then drops the connection
		}
		return nil
	}); err != nil && !errors.Is(err, driver.ErrBadConn) {
		return pg.Translate(err, false)
	}
	return used
}

// Query is for sweepers.
func (p pool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return query(p.db.QueryContext(ctx, sql, args...))
}

// Tx makes a *sql.Tx usable in [ratelimit.Limiter.WithTx]. Its driver must be pgx's, or one that wraps it and passes
// arguments on unchanged.
//
// The result is only for the limiter: methods of pgx.Tx other than Query, Commit and Rollback panic. Commit or roll
// back the *sql.Tx itself.
func Tx(tx *sql.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return transaction{tx: tx}
}

// transaction is a value, so that two for one *sql.Tx are equal: AllowAll requires requests of one transaction.
type transaction struct {
	pgx.Tx // nil
	tx     *sql.Tx
}

func (t transaction) Commit(context.Context) error   { return t.tx.Commit() }
func (t transaction) Rollback(context.Context) error { return t.tx.Rollback() }

// Conn returns nil: database/sql does not lend the connection of a transaction.
func (transaction) Conn() *pgx.Conn { return nil }

func (t transaction) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return query(t.tx.QueryContext(ctx, sql, args...))
}
