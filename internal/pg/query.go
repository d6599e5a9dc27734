package pg

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// DB is a pool, a connection or a transaction.
type DB interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// maxTries is how often Query sends a statement that the server rolls back because of other transactions. At REPEATABLE
// READ and SERIALIZABLE, a row that other transactions keep locking can cause a rollback each time.
const maxTries = 5

// Query sends a statement, scans each row into targets, and then calls the function each. Query returns a translated
// error. Query retries once if nothing was sent, and retries if the server had ended an idle connection. The argument
// own tells that Query's statement has its own transaction. If own is true, Query also retries on 40001 and 40P01, up
// to maxTries times, and once after a migration or a cancellation.
func Query(ctx context.Context, db DB, own bool, sql string, args, targets []any, each func() error) error {
	for n := 1; ; n++ {
		first := n == 1
		err := queryOnce(ctx, db, sql, args, targets, each)
		again := first && NeverSent(err) || EndedIdle(err) ||
			own && (n < maxTries && Undone(err) || first && (Remade(err) || Canceled(err)))
		if err == nil || !again || ctx.Err() != nil {
			return err
		}
	}
}

func queryOnce(ctx context.Context, db DB, sql string, args, targets []any, each func() error) error {
	switch db.(type) {
	case *pgxpool.Pool, Pool:
		return Use(ctx, db, func(conn *pgx.Conn) error { return queryOn(ctx, conn, sql, args, targets, each) })
	}
	return queryOn(ctx, db, sql, args, targets, each)
}

// queryOn runs the statement of queryOnce on a connection or transaction.
func queryOn(ctx context.Context, db DB, sql string, args, targets []any, each func() error) error {
	if err := Garbled(db, sql); err != nil {
		return err
	}
	rows, err := db.Query(ctx, sql, args...)
	if err != nil {
		if err := Unsent(db, err); err != nil {
			return err
		}
		return StatementError(err)
	}
	// Statements without logs do not return the last column, the log.
	targets = targets[:min(len(targets), len(rows.FieldDescriptions()))]
	// ForEachRow closes rows and returns their error. In the extended protocol, an error of the commit comes after the
	// last row.
	if _, err := pgx.ForEachRow(rows, targets, each); err != nil {
		return StatementError(err)
	}
	return nil
}

// SchemaVersion is the number of the migration that creates all functions that this release calls.
const SchemaVersion = 3

// VersionStatement asks for the version of the migrations.
const VersionStatement = "SELECT rate_limit_version()"

// ExplainVersion adds the database's version to the error of a statement that called a missing function.
func ExplainVersion(ctx context.Context, db DB, schema string, err error) error {
	if !errors.Is(err, ErrNotMigrated) || Remade(err) || FromProxy(err) { // a proxy only knows its own version
		return err
	}
	var version int64
	statement := Qualify(VersionStatement, schema)
	if Query(ctx, db, false, statement, nil, []any{&version}, func() error { return nil }) != nil {
		return err // the function rate_limit_version is missing, or the error has ended the transaction
	}
	kind, says := ErrNotMigrated, "which has what is missing: search_path may name another schema first"
	if version < SchemaVersion {
		says = "and what is missing came later"
	} else if version > SchemaVersion {
		kind = ErrNewerSchema
		says = "which has it no longer"
	}
	return NewError(fmt.Errorf("the database is at version %d of the migrations, %s; "+
		"this release was made for version %d: %w", version, says, SchemaVersion, Cause(err)), kind)
}

// The encoding of the database or of the connection cannot represent a text.
var (
	ErrKeyRefused  = errors.New(prefix + "the encoding refuses a key")
	ErrNameRefused = errors.New(prefix + "the encoding refuses the name of a limiter")
)

// StatementError translates an error of a statement. StatementError returns ErrKeyRefused or ErrNameRefused if the
// encoding of the database or of the connection refuses a text, because the database's message contains bytes of the
// key.
func StatementError(err error) error {
	if errors.Is(err, ErrKeyRefused) || errors.Is(err, ErrNameRefused) { // a service has translated it
		return err
	}
	if argument, ok := Unencodable(err); ok && argument == "name" {
		return ErrNameRefused
	} else if ok {
		return ErrKeyRefused
	}
	return Translate(err, true)
}
