package main

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/lockwait"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

const (
	connectTimeout = 10 * time.Second // unless the connection string has another

	// cancelGrace is how long an interrupted statement may take to end.
	cancelGrace = 2 * time.Second
)

var (
	//go:embed sql/session.sql
	sessionSQL string
	//go:embed sql/lockable.sql
	lockableSQL string
	//go:embed sql/foreign.sql
	foreignSQL string
)

// open returns a pool of a few connections. It connects when it is first used.
func (a *app) open(ctx context.Context, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := a.config()
	if err != nil {
		return nil, err
	}
	config.MaxConns = 2
	conn := config.ConnConfig
	// Each statement is sent once, so there is nothing to gain from preparing it, and a pooler may not allow it.
	conn.DefaultQueryExecMode = pgx.QueryExecModeExec
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = connectTimeout
	}
	if conn.RuntimeParams["application_name"] == "" {
		conn.RuntimeParams["application_name"] = "pgratelimit"
	}
	// This ends an interrupted statement on the server too.
	conn.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: cancelGrace}
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		if err := pg.Garbled(conn, a.schema); err != nil {
			return err
		}
		return checkSearchPath(ctx, conn)
	}
	for _, change := range configure {
		change(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// checkSearchPath refuses a search_path in which others' functions and types come before those of Postgres.
func checkSearchPath(ctx context.Context, conn *pgx.Conn) error {
	var path string
	if err := conn.QueryRow(ctx, "SHOW search_path").Scan(&path); err != nil {
		return err
	}
	if first, rest, _ := strings.Cut(path, ","); first != "pg_catalog" && strings.Contains(rest, "pg_catalog") {
		return errors.New("search_path names pg_catalog behind another schema, " +
			"so whoever may create there could have code run by this command: " +
			"leave pg_catalog out, which is then the first")
	}
	return nil
}

// home returns the schema of the tables and functions, or "" if there are none, after a check of who owns them.
func (a *app) home(ctx context.Context, pool *pgxpool.Pool) (schema string, err error) {
	err = a.read(ctx, pool, func(tx pgx.Tx) error {
		schema = tx.(qualified).schema
		return nil
	})
	return schema, err
}

// inSchema makes --schema the whole search_path of a pool's connections, for work that is not in one transaction.
func (a *app) inSchema(config *pgxpool.Config) {
	if a.schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{a.schema}.Sanitize()
	}
}

// read runs a transaction that cannot write, and in which no statement takes longer than --timeout.
func (a *app) read(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadOnly, "", false, query)
}

// list reads rows that one database has for all, and prints them.
func list[T any](
	ctx context.Context, a *app, scan pgx.RowToFunc[T], text func(io.Writer, []T), sql string, args ...any,
) error {
	pool, err := a.openFirst(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	all := []T{} // JSON has [] for no rows
	if err := a.read(ctx, pool, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		all, err = pgx.AppendRows(all, rows, scan)
		return err
	}); err != nil {
		return err
	}
	return a.print(all, func(w io.Writer) { text(w, all) })
}

// look is read for statements that call no function of ours.
func (a *app) look(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadOnly, accessShare, false, query)
}

// call is write for statements that change rows by nothing but calls of our functions.
func (a *app) call(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadWrite, "", false, query)
}

// write runs a transaction in which no statement takes longer than --timeout.
func (a *app) write(ctx context.Context, pool *pgxpool.Pool, query func(tx pgx.Tx) error) error {
	return a.transaction(ctx, pool, pgx.ReadWrite, "", true, query)
}

// The modes of locks on our tables. Whoever calls functions of ours takes none.
const (
	accessShare     = "ACCESS SHARE"
	accessExclusive = "ACCESS EXCLUSIVE"
)

// allTables is the order in which all tables are locked: those first that calls read first.
var allTables = []string{"rate_limit_policy", "rate_limit_policy_history", "rate_limit_shadow", "rate_limit_sweeper",
	table(true), table(false)}

// lockedError says that somebody else kept a lock on our tables.
type lockedError struct{ error }

func (a *app) transaction(
	ctx context.Context, pool *pgxpool.Pool, mode pgx.TxAccessMode, lock string, changes bool,
	query func(tx pgx.Tx) error,
) error {
	// Each statement has to see what has happened before it, whatever the database's default is.
	return refusedText(pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{
		IsoLevel: pgx.ReadCommitted, AccessMode: mode,
	}, func(tx pgx.Tx) error {
		// Where enable_nestloop is off, Postgres takes statements that look at its catalogs for dear ones, and would
		// compile them for seconds.
		if _, err := tx.Exec(ctx, "SET LOCAL jit = off"); err != nil {
			return err
		}
		var schema string
		var pid uint32
		if err := tx.QueryRow(ctx, sessionSQL, strconv.FormatInt(a.timeout.Milliseconds(), 10), a.schema).Scan(
			&schema, &pid, nil, nil, nil, nil); err != nil {
			return err
		}
		if err := pg.Garbled(tx.Conn(), schema); err != nil { // search_path has named it
			return err
		}
		defer lockwait.Watch(ctx, tx.Conn(), pid)()
		locked := []string{}
		if lock != "" {
			// A stranger who may create in the schema could have made the tables. Then the doctor is to say so.
			// The lock keeps them tables.
			var tables []string
			of, whole := []string{table(false), table(true), "rate_limit_policy"}, lock == accessExclusive
			if whole {
				of = allTables
			}
			if err := tx.QueryRow(ctx, lockableSQL, of, whole).Scan(&locked, &tables); err != nil {
				return err
			}
			if len(tables) > 0 {
				// statement_timeout bounds the wait for all of them.
				_, err := tx.Exec(ctx, "LOCK TABLE "+strings.Join(tables, ", ")+" IN "+lock+" MODE")
				if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && ctx.Err() == nil &&
					(pgErr.Code == "55P03" || pgErr.Code == "57014") {
					return lockedError{err}
				}
				if err != nil {
					return err
				}
			}
		}
		var foreign string
		var mend *string
		switch err := tx.QueryRow(ctx, foreignSQL, lock == "", locked, changes).Scan(&foreign, &mend); {
		case err == nil && mend != nil:
			return fmt.Errorf("%s, so calls could fail, or somebody's code run with your rights: as the owner of the "+
				"table, %s", foreign, *mend)
		case err == nil:
			return fmt.Errorf("%s, so somebody's code could run with your rights; "+
				"drop it if it is not yours, or name the limiters' schema with --schema; "+
				"if it is right, let the owner of the schema own it, or run this as its owner", foreign)
		case !errors.Is(err, pgx.ErrNoRows):
			return err
		}
		return query(qualified{tx, schema})
	}))
}

// qualified is a transaction that adds the schema to all names in its statements that begin with rate_limit_.
type qualified struct {
	pgx.Tx
	schema string
}

func (q qualified) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return q.Tx.Query(ctx, q.qualify(sql), args...)
}

func (q qualified) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.Tx.QueryRow(ctx, q.qualify(sql), args...)
}

func (q qualified) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return q.Tx.Exec(ctx, q.qualify(sql), args...)
}

var (
	commentLine = regexp.MustCompile(`(?m)^--.*\n`)
	ourName     = regexp.MustCompile(`([^'\w.])(rate_limit_)`) // outside of quotes
)

func (q qualified) qualify(sql string) string {
	if q.schema == "" {
		return sql
	}
	prefix := pgx.Identifier{q.schema}.Sanitize() + "."
	return ourName.ReplaceAllStringFunc(commentLine.ReplaceAllString(sql, ""), func(name string) string {
		return name[:1] + prefix + name[1:]
	})
}

// table returns the name of the table with the limiters' rows.
func table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}
