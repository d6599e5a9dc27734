package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

// ErrNoPool is the error for a database that is no *pgxpool.Pool, whose settings are not known.
var ErrNoPool = errors.New("ratelimit: no *pgxpool.Pool")

// ConnectBeside opens a connection with the settings of the pool db, which does not count among those of the pool. The
// function hear gets the connection's notifications.
func ConnectBeside(ctx context.Context, db DB, hear pgconn.NotificationHandler) (*pgx.Conn, error) {
	pool, ok := db.(*pgxpool.Pool)
	if !ok {
		return nil, fmt.Errorf("%w, but a %T", ErrNoPool, db)
	}
	config := pool.Config()
	if config.BeforeConnect != nil {
		if err := config.BeforeConnect(ctx, config.ConnConfig); err != nil {
			return nil, err
		}
	}
	// When a wait ends without a notification, the connection must stay open.
	config.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.DeadlineContextWatcherHandler{Conn: conn.Conn()}
	}
	config.ConnConfig.OnNotification = hear
	conn, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	if err != nil {
		return nil, err
	}
	if config.AfterConnect != nil {
		err = config.AfterConnect(ctx, conn)
	}
	if err == nil { // a statement may take longer than the application's statement_timeout
		_, err = conn.Exec(ctx, "SET statement_timeout = 0")
	}
	if err != nil {
		_ = conn.Close(ctx)
		return nil, err
	}
	return conn, nil
}
