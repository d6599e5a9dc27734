package otelratelimit

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// patience is how long a collection waits for Postgres. It is well below Prometheus's scrape timeout of 10 seconds, so
// that other metrics arrive even in an outage.
const patience = 2 * time.Second

//go:embed tables.sql
var tablesQL string

// ObserveTables reads the size of the limiters' tables and the state of sweeps whenever meter's metrics are collected,
// until Unregister is called. It includes all sweeps: by package cleanup, pg_cron or the command.
//
//   - ratelimit.table.size, a gauge in bytes, with indexes;
//   - ratelimit.table.rows, a gauge of the number of rows, as Postgres estimates it;
//   - ratelimit.table.deleted, a counter of rows that were deleted, by sweeps and resets;
//   - ratelimit.sweep.age, a gauge of the seconds since a sweep last reached the end of all tables. It is missing
//     before the first sweep.
//
// The first three metrics have the attribute table, which is ephemeral, durable, ephemeral_hold or durable_hold. All
// processes of an application may call ObserveTables. They report the same values.
//
// db is a *pgxpool.Pool, or a *sql.DB in sqldb.Pool. Its role needs USAGE on the schema, and SELECT on the table
// rate_limit_sweeper. schema is the schema that has the tables, or "" for the schema that the connection's search_path
// finds.
//
// A collection sends one statement, which reads no rows of limiters. It waits for Postgres for at most two seconds. If
// the statement fails, OpenTelemetry gets the error, and the collection lacks the metrics above.
func ObserveTables(meter metric.Meter, db ratelimit.DBTX, schema string) (metric.Registration, error) {
	switch db := db.(type) {
	case nil, *pgx.Conn, interface{ Conn() *pgx.Conn }:
		return nil, &ratelimit.ConfigError{Field: "db", Reason: "must be a pool: collections come at any time"}
	case *pgxpool.Pool:
		if db == nil {
			return nil, &ratelimit.ConfigError{Field: "db", Reason: "is nil, and must be a pool"}
		}
	}
	size, err1 := meter.Int64ObservableGauge("ratelimit.table.size",
		metric.WithUnit("By"), metric.WithDescription("The size of a table and its indexes."))
	rows, err2 := meter.Int64ObservableGauge("ratelimit.table.rows",
		metric.WithUnit("{row}"), metric.WithDescription("How many rows a table has, as Postgres estimates it."))
	deleted, err3 := meter.Int64ObservableCounter("ratelimit.table.deleted",
		metric.WithUnit("{row}"), metric.WithDescription("How many rows were deleted, by sweeps and resets."))
	age, err4 := meter.Float64ObservableGauge("ratelimit.sweep.age",
		metric.WithUnit("s"), metric.WithDescription("How long ago a sweep last reached the end of all tables."))
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		return nil, err
	}
	statement := pg.Qualify(tablesQL, schema)
	return meter.RegisterCallback(func(ctx context.Context, o metric.Observer) error {
		tables, err := askTables(ctx, db, statement)
		if err != nil {
			return err
		}
		for _, t := range tables {
			table := metric.WithAttributes(attribute.String("table", t.Name))
			o.ObserveInt64(size, t.Size, table)
			o.ObserveInt64(rows, t.Rows, table)
			o.ObserveInt64(deleted, t.Deleted, table)
			if t.SweepAge != nil {
				o.ObserveFloat64(age, *t.SweepAge) // all rows have the same age
			}
		}
		return nil
	}, size, rows, deleted, age)
}

// table is a row of the result of tables.sql.
type table struct {
	Name                string
	Size, Rows, Deleted int64
	SweepAge            *float64
}

// askTables returns both tables, or an error.
func askTables(ctx context.Context, db ratelimit.DBTX, statement string) ([]table, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var tables []table
	ask := func(db ratelimit.DBTX) error {
		if err := pg.Garbled(db, statement); err != nil {
			return err
		}
		found, err := db.Query(ctx, statement)
		if err == nil {
			tables, err = pgx.CollectRows(found, pgx.RowToStructByPos[table])
		}
		return err
	}
	var err error
	switch db.(type) {
	case *pgxpool.Pool, pg.Pool:
		err = pg.Use(ctx, db, func(conn *pgx.Conn) error { return ask(conn) })
	default: // a pool of another type
		err = ask(db)
	}
	if refused, ok := errors.AsType[*pgconn.PgError](err); ok && refused.Code == "42501" {
		return nil, fmt.Errorf("otelratelimit: GRANT USAGE on the schema, and SELECT on its table rate_limit_sweeper, "+
			"to the role: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("otelratelimit: ask for the tables of the limiters: %w", err)
	}
	return tables, nil
}
