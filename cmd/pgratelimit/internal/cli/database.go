package cli

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/ratelimit/internal/lockholders"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

const (
	ConnectTimeout = 10 * time.Second // the timeout of a connection string without connect_timeout

	// cancelGrace is how long an interrupted statement may take to end.
	cancelGrace = 2 * time.Second
)

var (
	//go:embed sql/session.sql
	SessionSQL string
	//go:embed sql/lockable.sql
	lockableSQL string
	//go:embed sql/foreign.sql
	foreignSQL string
)

// DB is an App with a pool of connections to its database, or to the shard at App.Place.
type DB struct {
	*App
	Pool *pgxpool.Pool
}

// WithPool opens a pool, calls do with the pool, and closes the pool.
func (a *App) WithPool(ctx context.Context, do func(db DB) error) error {
	pool, err := a.Open(ctx)
	if err != nil {
		return err
	}
	defer pool.Close()
	return do(DB{a, pool})
}

// Open returns a pool of a few connections. Open does not connect yet.
func (a *App) Open(ctx context.Context, configure ...func(*pgxpool.Config)) (*pgxpool.Pool, error) {
	config, err := a.Config()
	if err != nil {
		return nil, err
	}
	config.MaxConns = 2
	conn := config.ConnConfig
	// Do not prepare statements. Each statement is sent only once, and a pooler may not support prepared statements.
	conn.DefaultQueryExecMode = pgx.QueryExecModeExec
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = ConnectTimeout
	}
	NameSession(conn, "pgratelimit")
	// On an interruption, send a cancel request, so that the server also ends the statement.
	conn.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: cancelGrace}
	}
	config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
		conn.TypeMap().RegisterType(&pgtype.Type{ // print all times in UTC
			Name: "timestamptz", OID: pgtype.TimestamptzOID, Codec: &pgtype.TimestamptzCodec{ScanLocation: time.UTC},
		})
		if err := pg.Garbled(conn, a.Schema); err != nil {
			return err
		}
		return checkSearchPath(ctx, conn)
	}
	for _, change := range configure {
		change(config)
	}
	return pgxpool.NewWithConfig(ctx, config)
}

// checkSearchPath returns an error if search_path has another schema before pg_catalog, perhaps with foreign functions.
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

// Home returns the schema of the tables and functions, or "" if there is none. Home checks whether the owners of these
// objects are trusted.
func (db DB) Home(ctx context.Context) (schema string, err error) {
	err = db.Read(ctx, func(tx Tx) error {
		schema = tx.Schema
		return nil
	})
	return schema, err
}

// InSchema sets search_path to --schema in all connections of a pool, for work in several transactions.
func (a *App) InSchema(config *pgxpool.Config) {
	if a.Schema != "" {
		config.ConnConfig.RuntimeParams["search_path"] = pgx.Identifier{a.Schema}.Sanitize()
	}
}

// Read runs a read-only transaction. No statement in the transaction may take longer than --timeout.
func (db DB) Read(ctx context.Context, query func(tx Tx) error) error {
	return db.Transaction(ctx, pgx.ReadOnly, "", false, query)
}

// Rows returns the rows of a query. The query's columns must be in the order of the exported fields of T.
func Rows[T any](ctx context.Context, tx pgx.Tx, sql string, args ...any) ([]T, error) {
	rows, _ := tx.Query(ctx, sql, args...) // CollectRows returns the error that is in rows
	return pgx.CollectRows(rows, pgx.RowToStructByPos[T])
}

// Look is like Read, but for statements that call none of the limiter's functions.
func (db DB) Look(ctx context.Context, query func(tx Tx) error) error {
	return db.Transaction(ctx, pgx.ReadOnly, AccessShare, false, query)
}

// LookOnce is like Look, with a pool of its own.
func (a *App) LookOnce(ctx context.Context, query func(tx Tx) error) error {
	return a.WithPool(ctx, func(db DB) error { return db.Look(ctx, query) })
}

// Call is like Write, but for statements that change rows only by calling the limiter's functions.
func (db DB) Call(ctx context.Context, query func(tx Tx) error) error {
	return db.Transaction(ctx, pgx.ReadWrite, "", false, query)
}

// Write runs a transaction that may change rows. No statement in the transaction may take longer than --timeout.
func (db DB) Write(ctx context.Context, query func(tx Tx) error) error {
	return db.Transaction(ctx, pgx.ReadWrite, "", true, query)
}

// These are the lock modes for the limiter's tables. Statements that call the limiter's functions need no lock.
const (
	AccessShare     = "ACCESS SHARE"
	AccessExclusive = "ACCESS EXCLUSIVE"
)

// AllTables lists the tables in the order in which commands lock them. The functions use the tables in the same order.
// Only rate_limit_sweep uses some in another order, but it begins with rate_limit_sweeper.
var AllTables = []string{"rate_limit_policy", "rate_limit_policy_history", "rate_limit_shadow", "rate_limit_sweeper",
	Table(false), Table(true), Table(false) + "_hold", Table(true) + "_hold"}

// LockedError means that another session has locked the limiter's tables for too long.
type LockedError struct{ error }

func (db DB) Transaction(
	ctx context.Context, mode pgx.TxAccessMode, lock string, changes bool, query func(tx Tx) error,
) error {
	// READ COMMITTED lets each statement see all earlier commits. A database may have another default.
	return refusedText(pgx.BeginTxFunc(ctx, db.Pool, pgx.TxOptions{
		IsoLevel: pgx.ReadCommitted, AccessMode: mode,
	}, func(tx pgx.Tx) error {
		// With enable_nestloop off, Postgres overestimates the cost of catalog queries, and JIT would take seconds.
		if _, err := tx.Exec(ctx, "SET LOCAL jit = off"); err != nil {
			return err
		}
		var schema string
		var pid uint32
		if err := tx.QueryRow(ctx, SessionSQL, strconv.FormatInt(db.Timeout.Milliseconds(), 10), db.Schema).Scan(
			&schema, &pid, nil, nil, nil, nil, nil); err != nil {
			return err
		}
		if err := pg.Garbled(tx.Conn(), schema); err != nil { // search_path may name a schema that the encoding garbles
			return err
		}
		defer lockholders.Watch(ctx, tx.Conn(), pid)()
		locked := []string{}
		if lock != "" {
			// If another role can create objects in the schema, it may have created the tables, and doctor must report
			// them. While the lock is held, nobody can replace a table.
			var tables []string
			of := []string{"rate_limit_policy",
				Table(false), Table(true), Table(false) + "_hold", Table(true) + "_hold"}
			whole := lock == AccessExclusive
			if whole {
				of = AllTables
			}
			if err := tx.QueryRow(ctx, lockableSQL, of, whole).Scan(&locked, &tables); err != nil {
				return err
			}
			if len(tables) > 0 {
				// statement_timeout limits the wait for all locks.
				_, err := tx.Exec(ctx, "LOCK TABLE "+strings.Join(tables, ", ")+" IN "+lock+" MODE")
				if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && ctx.Err() == nil &&
					(pgErr.Code == "55P03" || pgErr.Code == "57014") {
					return LockedError{err}
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
		return query(Tx{tx, schema})
	}))
}

// Tx is a transaction. In each statement, Tx adds the schema to all names that begin with rate_limit_.
type Tx struct {
	pgx.Tx
	Schema string
}

func (q Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return q.Tx.Query(ctx, q.qualify(sql), args...)
}

func (q Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return q.Tx.QueryRow(ctx, q.qualify(sql), args...)
}

func (q Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return q.Tx.Exec(ctx, q.qualify(sql), args...)
}

var (
	commentLine = regexp.MustCompile(`(?m)^--.*\n`)
	ourName     = regexp.MustCompile(`([^'\w.])(rate_limit_)`) // matches names that are not in quotation marks
)

func (q Tx) qualify(sql string) string {
	if q.Schema == "" {
		return sql
	}
	prefix := pgx.Identifier{q.Schema}.Sanitize() + "."
	return ourName.ReplaceAllStringFunc(commentLine.ReplaceAllString(sql, ""), func(name string) string {
		return name[:1] + prefix + name[1:]
	})
}

// Table returns the name of the table with durable or ephemeral rows.
func Table(durable bool) string {
	if durable {
		return "rate_limit_durable"
	}
	return "rate_limit_ephemeral"
}
