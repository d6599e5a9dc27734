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

// maxTries is how often a statement is tried if the server rolls it back because of others. At REPEATABLE READ and
// SERIALIZABLE, somebody who locks the row again and again causes that each time.
const maxTries = 5

// Query runs a statement, scans each row into targets and calls each, and translates the error. It retries once if
// nothing was sent, and on the next connection if the server had ended an idle one. own tells that the statement's
// transaction is not the caller's. Then Query also retries up to maxTries times on 40001 and 40P01, and once after a
// migration or a cancellation.
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

// queryOn is queryOnce on a connection or transaction.
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
	// The last column, the log, is missing where there can be no logs.
	targets = targets[:min(len(targets), len(rows.FieldDescriptions()))]
	// ForEachRow closes rows and returns their error, even one that comes after the last row. In the extended protocol,
	// the error of the commit comes there.
	if _, err := pgx.ForEachRow(rows, targets, each); err != nil {
		return StatementError(err)
	}
	return nil
}

// SchemaVersion is the number of the last migration, which has the functions that this release calls.
const SchemaVersion = 3

// ExplainVersion adds the version of the database to the error of a statement that has called a missing function.
func ExplainVersion(ctx context.Context, db DB, schema string, err error) error {
	if !errors.Is(err, ErrNotMigrated) || Remade(err) || FromProxy(err) { // a proxy knows only its own version
		return err
	}
	var version int64
	statement := Qualify("SELECT rate_limit_version()", schema)
	if Query(ctx, db, false, statement, nil, []any{&version}, func() error { return nil }) != nil {
		return err // there is no such function, or the error has ended the transaction
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

// Errors for a text that the encoding of the database or of the connection cannot represent.
var (
	ErrKeyRefused  = errors.New(prefix + "the encoding refuses a key")
	ErrNameRefused = errors.New(prefix + "the encoding refuses the name of a limiter")
)

// StatementError translates an error of a statement. If the encoding of the database or of the connection refuses a
// text, it returns ErrKeyRefused or ErrNameRefused instead, because the database's message shows bytes of the key.
func StatementError(err error) error {
	if argument, ok := Unencodable(err); ok && argument == "name" {
		return ErrNameRefused
	} else if ok {
		return ErrKeyRefused
	}
	return Translate(err, true)
}
