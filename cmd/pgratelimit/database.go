package main

import (
	"context"
	_ "embed"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	connectTimeout = 10 * time.Second // unless the connection string has another

	// cancelGrace is how long a statement that was interrupted may take to end.
	cancelGrace = 2 * time.Second
)

//go:embed sql/session.sql
var sessionSQL string

// open returns a pool of a few connections. It connects when it is used.
func (a *app) open(ctx context.Context, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(a.databaseURL)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 2
	conn := config.ConnConfig
	// Each statement is sent once, so there is nothing to gain from preparing it, which a pooler may not like.
	conn.DefaultQueryExecMode = pgx.QueryExecModeExec
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = connectTimeout
	}
	if conn.RuntimeParams["application_name"] == "" {
		conn.RuntimeParams["application_name"] = "pgratelimit"
	}
	// An interrupted statement is ended on the server too.
	conn.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: cancelGrace}
	}
	for _, change := range configure {
		change(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// inSchema makes --schema the whole search_path of a pool's connections, for work that is not in one transaction.
func (a *app) inSchema(config *pgxpool.Config) {
	if a.schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{a.schema}.Sanitize()
	}
}

// read runs a transaction that cannot write, and in which no statement takes longer than --timeout.
func (a *app) read(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadOnly, query)
}

// write runs a transaction in which no statement takes longer than --timeout.
func (a *app) write(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadWrite, query)
}

func (a *app) transaction(ctx context.Context, pool *pgxpool.Pool, mode pgx.TxAccessMode, query func(tx pgx.Tx) error) error {
	return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{AccessMode: mode}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sessionSQL, a.timeout.Milliseconds(), a.schema); err != nil {
			return err
		}
		return query(tx)
	})
}

// table is where the limiters' rows are.
func table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}
