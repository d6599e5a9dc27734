// Package sqldb makes a *sql.DB or *sql.Tx usable by limiters. pgx's driver stdlib must have opened the *sql.DB:
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
// Everything works as with a *pgxpool.Pool: concurrent calls share statements, a client uses few connections, and all
// settings and errors mean the same. All of pgx's modes of execution work.
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
// opened the *sql.DB: sql.Open("pgx", …), stdlib.OpenDB or stdlib.OpenDBFromPool. With another driver, or a driver that
// wraps stdlib, calls return [ratelimit.ErrSetup]. All Pools of the same *sql.DB are equal. The caller still configures
// and closes the *sql.DB.
func Pool(db *sql.DB) ratelimit.DBTX {
	if db == nil {
		return nil
	}
	return pool{db}
}

type pool struct{ db *sql.DB }

var _ pg.Pool = pool{}

// Use calls the function use with a pgx.Conn of the pool. Limiters need the pgx.Conn, because database/sql hides
// whether a statement was sent, and sends some statements twice.
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
			return driver.ErrBadConn // makes the pool drop the connection
		}
		return nil
	}); err != nil && !errors.Is(err, driver.ErrBadConn) {
		return pg.Translate(err, false)
	}
	return used
}

// Query sends a statement of a sweeper.
func (p pool) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return query(p.db.QueryContext(ctx, sql, args...))
}

// Tx makes a *sql.Tx usable in [ratelimit.Limiter.WithTx]. Its driver must be pgx's stdlib, or a driver that wraps
// stdlib and does not change arguments.
//
// Pass the result only to WithTx: all methods of pgx.Tx except Query, Commit and Rollback panic. Commit or roll back
// the *sql.Tx itself.
func Tx(tx *sql.Tx) pgx.Tx {
	if tx == nil {
		return nil
	}
	return transaction{tx: tx}
}

// transaction is a pgx.Tx for a *sql.Tx. Two transactions for the same *sql.Tx are equal, because AllowAll compares
// them.
type transaction struct {
	pgx.Tx // nil
	tx     *sql.Tx
}

func (t transaction) Commit(context.Context) error   { return t.tx.Commit() }
func (t transaction) Rollback(context.Context) error { return t.tx.Rollback() }

// Conn returns nil, because database/sql does not expose the connection of a transaction.
func (transaction) Conn() *pgx.Conn { return nil }

func (t transaction) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return query(t.tx.QueryContext(ctx, sql, args...))
}
