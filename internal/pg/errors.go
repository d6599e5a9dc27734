package pg

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"unicode"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// These are the kinds of an [Error]. Package ratelimit exports and documents the same names.
var (
	ErrNotMigrated = errors.New(prefix + "the database is not migrated, " +
		"or ClientConfig.Schema, cleanup.Config.Schema or search_path does not name the schema; " +
		"call migrations.Up(ctx, pool), or run 'pgratelimit migrate up'")
	ErrNewerSchema = errors.New(prefix + "the database was migrated by a newer release of this library; " +
		"upgrade the application to it")
	ErrNotPermitted = errors.New(prefix + "the database role may not do this; " +
		"GRANT USAGE on the schema, and EXECUTE on its rate_limit_ functions")
	ErrPreparedStatements = errors.New(prefix + "prepared statements are lost between the pool and Postgres, " +
		"as by PgBouncer in transaction mode; set default_query_exec_mode=exec in the connection string")
	ErrSetup = errors.New(prefix + "the connection is not set up for the limiter; " +
		"look at the connection string, pg_hba.conf, and the settings and types of the session")
	ErrUnavailable = errors.New(prefix + "the database is unavailable")
	ErrReadOnly    = errors.New(prefix + "the database is read-only, like a standby or a demoted primary; " +
		"connect to the primary, for example with target_session_attrs=read-write")
	ErrTimeout       = errors.New(prefix + "the database did not decide within ClientConfig.Timeout")
	ErrPoolExhausted = errors.New(prefix + "all connections of the pool are in use; in a transaction use WithTx, " +
		"else hold connections for less time, raise MaxConns, or make the client with OwnPool")
	ErrKeyHeld = errors.New(prefix + "the row of the key is held by a transaction that stays open, " +
		"or by another call's statement on an overloaded server; " +
		"end transactions soon after they call the limiter, or reduce the server's load")
	ErrOutcomeUnknown = errors.New(prefix + "the outcome is unknown; the request may or may not have counted")
)

// ErrHeldUp means that the request's time was used up by locks on rows of other keys.
var ErrHeldUp = errors.New("the time was used up by locks on rows of other keys; nothing was taken")

// prefix begins the text of every error of this library.
const prefix = "ratelimit: "

// Error is a failure of the database or of the connection. Error wraps its kinds, such as ErrTimeout, and the driver's
// error.
type Error struct {
	kinds []error
	err   error
	own   bool // see InOwnWords
}

// NewError returns an error of these kinds that wraps err.
func NewError(err error, kinds ...error) *Error { return &Error{kinds: kinds, err: err} }

// InOwnWords returns an error of the same kinds, whose text does not speak of the database. Of the texts of its kinds,
// it has only that of ErrOutcomeUnknown. It is for what happens between this process and a service.
func (e *Error) InOwnWords() *Error { return &Error{kinds: e.kinds, err: e.err, own: true} }

func (e *Error) Error() string {
	var text strings.Builder
	text.WriteString(prefix)
	for _, kind := range e.kinds {
		if e.own && !errors.Is(kind, ErrOutcomeUnknown) {
			continue
		}
		text.WriteString(strings.TrimPrefix(kind.Error(), prefix) + ": ")
	}
	return text.String() + e.err.Error()
}

// Unwrap returns the kinds of the error and the driver's error, which may be a *pgconn.PgError.
func (e *Error) Unwrap() []error { return append(slices.Clip(e.kinds), e.err) }

// Cause returns the error that an [Error] wraps. If err is not an [Error], Cause returns err.
func Cause(err error) error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e.err
	}
	return err
}

// RolledBack returns the error of a statement in a caller's transaction. RolledBack removes ErrOutcomeUnknown if the
// connection is closed, because the transaction is then certainly rolled back.
func RolledBack(tx any, err error) error {
	if conn := Conn(tx); !errors.Is(err, ErrOutcomeUnknown) || conn == nil || !conn.IsClosed() {
		return err
	}
	var kinds []error
	if e, ok := errors.AsType[*Error](err); ok {
		kinds = slices.DeleteFunc(slices.Clone(e.kinds), func(kind error) bool {
			return errors.Is(kind, ErrOutcomeUnknown)
		})
	}
	why := "the connection is closed, so the transaction is rolled back"
	if slices.Contains(kinds, ErrTimeout) {
		why += "; perhaps another one holds the key's row"
	}
	return NewError(fmt.Errorf("%s: %w", why, Cause(err)), kinds...)
}

// Translate makes an [Error] of an error of the driver, and returns an [Error] unchanged. The argument sent tells
// whether the statement may have reached the database.
func Translate(err error, sent bool) *Error {
	if e, ok := errors.AsType[*Error](err); ok {
		return e
	}
	if TableLocked(err) {
		return LockedTable(err)
	}
	if _, refused := errors.AsType[*pgconn.ConnectError](err); refused {
		sent = false
	}
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		if e := shardsError(pgErr); e != nil {
			return e
		}
		switch pgErr.Code {
		case "22P02": // with array_nulls off, the server reads NULL in an array as the text "NULL"
			err = fmt.Errorf("is array_nulls off in this session? %w", err)
		case "25P02":
			err = fmt.Errorf("an earlier statement of the transaction has failed; "+
				"roll the transaction back and mend that statement, or put it into a savepoint: %w", err)
		}
		return NewError(err, kindsOf(pgErr, sent)...)
	}
	if _, unreadable := errors.AsType[pgx.ScanArgError](err); unreadable {
		return NewError(err, ErrSetup, ErrOutcomeUnknown)
	}
	if NeverSent(err) && strings.HasSuffix(err.Error(), "conn busy") { // pgx's error has no type
		return NewError(fmt.Errorf("the single connection is in use, or its rows are not closed; "+
			"close the rows, or pass a *pgxpool.Pool: %w", err), ErrSetup)
	}
	if !sent && notSecure(err) {
		return NewError(err, ErrSetup)
	}
	kind := ErrUnavailable
	if errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) {
		kind = ErrTimeout
	}
	if sent && !NeverSent(err) {
		return NewError(err, kind, ErrOutcomeUnknown)
	}
	return NewError(err, kind)
}

// notSecure tells whether one side does not support TLS, or does not trust the other side's certificate.
func notSecure(err error) bool {
	_, untrusted := errors.AsType[*tls.CertificateVerificationError](err)
	alert, ok := errors.AsType[*net.OpError](err)
	refused := ok && alert.Op == "remote error" // crypto/tls uses this word for an alert that the server sent
	_, noTLS := errors.AsType[tls.RecordHeaderError](err)
	_, connecting := errors.AsType[*pgconn.ConnectError](err)
	return untrusted || refused || noTLS ||
		connecting && strings.Contains(err.Error(), "server refused TLS connection")
}

// kindsOf returns the kinds of an error that the database raised.
func kindsOf(err *pgconn.PgError, sent bool) []error {
	there := remote(err)
	if kinds, known := proxyKinds(err, there); known {
		return kinds
	}
	err = there
	if Remade(err) {
		return []error{ErrNotMigrated}
	}
	class := err.Code[:min(2, len(err.Code))]
	switch {
	case err.Code == "42501":
		return []error{ErrNotPermitted}
	case class == "28", class == "3D", // login refused, or no such database
		err.Code == "22P02", // the server cannot parse an argument's text
		!sent && (class == "22" || class == "42" || err.Code == "0A000"): // unknown setting, or wrong value
		return []error{ErrSetup}
	}
	switch err.Code {
	case "42P01", "42883", "3F000", "42704", "42703": // no such table, function, schema, type, column
		return []error{ErrNotMigrated}
	case "26000", "42P05": // missing or duplicate prepared statement
		return []error{ErrPreparedStatements}
	case "08P01": // protocol violation
		// Postgres raises 08P01 as an ERROR if the parameters do not fit the prepared statement. PgBouncer raises 08P01
		// as FATAL for many reasons, such as the end of its connection to Postgres.
		if err.SeverityUnlocalized == "ERROR" {
			return []error{ErrPreparedStatements}
		}
	case "25006": // a write in a read-only database
		return []error{ErrUnavailable, ErrReadOnly}
	case "55P03", "57014": // lock_timeout; statement_timeout or a cancel request
		return []error{ErrTimeout}
	}
	switch {
	case err.Code == "0A000" && err.Routine == "get_relation_info": // a read of an unlogged table on a standby
		return []error{ErrUnavailable, ErrReadOnly}
	case sent && err.SeverityUnlocalized != "ERROR" && !EndedIdle(err):
		// A FATAL or PANIC ends the connection. A FATAL or PANIC may come after the commit.
		return []error{ErrUnavailable, ErrOutcomeUnknown}
	case !sent, // the connection was refused
		class == "08", class == "53", class == "58",
		err.Code == "54000", // transaction ids have run out; the limiter's short keys prevent other causes
		slices.Contains([]string{"57P01", "57P02", "57P03", "57P05"}, err.Code):
		return []error{ErrUnavailable}
	}
	return nil // an ERROR has rolled back the statement
}

// Unsent returns the error of a statement that pgx refused to send on db. Unsent returns nil for any other error. pgx's
// refusals have no type, but leave the connection open, unlike network errors.
func Unsent(db any, err error) error {
	conn := Conn(db)
	_, answered := errors.AsType[*pgconn.PgError](err)
	if conn == nil || conn.IsClosed() || answered || NeverSent(err) || pgconn.Timeout(err) ||
		errors.Is(err, context.DeadlineExceeded) {
		return nil
	}
	if refused := Unencoded(err); refused != nil {
		return refused
	}
	if errors.Is(err, pgx.ErrTxClosed) {
		return TxEnded(err)
	}
	return NewError(err, ErrSetup)
}

// TxEnded returns the error of a statement that the driver refused to send, because the caller's transaction has ended.
func TxEnded(err error) *Error {
	return NewError(fmt.Errorf("the transaction has ended; call the limiter before Commit or Rollback: %w", err))
}

// Garbled returns an error if the server would misread the statement because of the connection's client_encoding. In
// encodings such as SJIS, a character may contain ASCII bytes, so the server would misread keys. In LATIN1 and similar
// encodings, the server would misread a schema's name that is not ASCII.
func Garbled(db any, statement string) error {
	conn := Conn(db)
	if conn == nil {
		return nil
	}
	switch encoding := conn.PgConn().ParameterStatus("client_encoding"); encoding {
	case "UTF8", "SQL_ASCII", "": // Postgres does not convert SQL_ASCII
		return nil
	case "SJIS", "SHIFT_JIS_2004", "BIG5", "GBK", "UHC", "GB18030", "JOHAB":
		return NewError(
			errors.New("client_encoding is "+encoding+", in which pgx does not write; set it to UTF8"), ErrSetup)
	default:
		if strings.ContainsFunc(statement, func(r rune) bool { return r > unicode.MaxASCII }) {
			return NewError(errors.New("client_encoding is "+encoding+", in which the server would read the name of "+
				"the schema as another one; set it to UTF8, or give the schema a name of ASCII letters"), ErrSetup)
		}
		return nil
	}
}

// Unencoded returns the error of a statement whose arguments pgx could not encode. Unencoded returns nil for any other
// error. Unencoded hides pgx's text, because that text contains the argument.
func Unencoded(err error) error {
	if _, answered := errors.AsType[*pgconn.PgError](err); answered || !strings.Contains(err.Error(), "encode ") {
		return nil
	}
	return NewError(errors.New(
		"pgx cannot encode an argument; has the application registered another codec for its type?"), ErrSetup)
}

// NeverSent tells whether an error certainly came before anything was sent. NeverSent ignores pgconn.SafeToRetry for
// ErrConnClosed, which pgx also returns if a connection breaks after the simple protocol has sent the statement.
func NeverSent(err error) bool {
	return pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
}

// EndedIdle tells whether idle_session_timeout had ended the connection before the statement reached the server.
func EndedIdle(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57P05"
}

// Undone tells whether the database has rolled back a statement that may succeed when it is repeated. Either another
// transaction changed the row first, at an isolation level above READ COMMITTED, or Postgres ended a deadlock.
func Undone(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// Canceled tells whether the statement was canceled, so that nothing was taken. The server may cancel a statement that
// nobody asked it to cancel: when lock_timeout ends just as the lock is granted, Postgres cancels the next wait.
func Canceled(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57014" && !errors.Is(err, ErrOutcomeUnknown)
}

// Remade tells whether the database has rolled back a statement because a function or type was dropped. If a migration
// dropped and created the function or type, the statement succeeds when it is repeated.
func Remade(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return false
	}
	switch pgErr.Code {
	case "XX000": // both messages are in English in every language of the server
		message := remote(pgErr).Message
		return strings.HasPrefix(message, "cache lookup failed for ") ||
			message == "function in FROM has unsupported return type" || pgErr.Routine == "relation_open"
	case "42804": // in PL/pgSQL, a variable and a row have different types
		return pgErr.Routine == "exec_assign_value"
	case "0A000": // the plan of a prepared statement returned another type
		return pgErr.Routine == "RevalidateCachedQuery"
	}
	return false
}

// LockTimeout tells whether lock_timeout ended the statement, so that nothing was taken.
func LockTimeout(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03"
}

// RowHeld tells whether a locked row caused the error. A locked table causes ErrUnavailable, and not ErrKeyHeld.
func RowHeld(err error) bool {
	return errors.Is(err, ErrKeyHeld) || errors.Is(err, ErrHeldUp) ||
		LockTimeout(err) && !errors.Is(err, ErrUnavailable)
}

// IsAway tells whether an error means that Postgres is unavailable or slow, so that the OnFailure policy decides. A
// wrong set-up is not an outage, because an operator must see and repair it. A locked row is not an outage, because
// locking a row must not let a caller through. A locked table is an outage. An exhausted pool is one too, because an
// unresponsive Postgres fills the application's pool.
func IsAway(err error) bool {
	_, ok := errors.AsType[*Error](err)
	return ok && !RowHeld(err) && !errors.Is(err, ErrSetup) &&
		(errors.Is(err, ErrUnavailable) || errors.Is(err, ErrTimeout) || errors.Is(err, ErrOutcomeUnknown))
}

// KindOf returns a word for the kind of an error, or "other".
func KindOf(err error) string {
	for _, known := range []struct {
		err  error
		kind string
	}{
		{ErrNotMigrated, "not_migrated"},
		{ErrNewerSchema, "newer_schema"},
		{ErrNotPermitted, "not_permitted"},
		{ErrSharded, "sharded"},
		{ErrPreparedStatements, "prepared_statements"},
		{ErrSetup, "setup"},
		{ErrReadOnly, "read_only"},
		{ErrKeyHeld, "key_held"},
		{ErrPoolExhausted, "pool_exhausted"},
		{ErrTimeout, "timeout"},
		{ErrUnavailable, "unavailable"},
		{context.Canceled, "context"}, // last, because the errors above may wrap the end of the limiter's context
		{context.DeadlineExceeded, "context"},
	} {
		if errors.Is(err, known.err) {
			return known.kind
		}
	}
	return "other"
}

// IsTrouble tells whether an error means that the database cannot decide. Clients log such errors. An error that
// concerns only one key or transaction is not trouble.
func IsTrouble(err error) bool {
	_, ok := errors.AsType[*Error](err)
	return ok && !RowHeld(err) && !Undone(err)
}

// TableLocked tells whether a LockTimeout came from a locked table. The limiter's functions wait for table locks only
// in a LOCK TABLE statement. The error's context then contains these two words, whatever the server's language is.
func TableLocked(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03" && strings.Contains(pgErr.Where, "LOCK TABLE")
}

// LockedTable returns the error for callers who waited for a locked table.
func LockedTable(err error) *Error {
	err = Cause(err) // otherwise the result would be an ErrTimeout as well
	return NewError(fmt.Errorf("another session has locked the table, as VACUUM FULL does: %w", err), ErrUnavailable)
}

// Unencodable tells whether the encoding of the database or of the connection cannot represent a text. argument is
// "key" or "name" if a function of the limiter refused that argument, because it is too long in the encoding.
func Unencodable(err error) (argument string, unencodable bool) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.SeverityUnlocalized != "ERROR" {
		return "", false
	}
	switch pgErr.Code {
	case "22021", "22P05": // the encoding has no such character
		return "", true
	case "22023":
		return pgErr.ColumnName, pgErr.ColumnName == "key" || pgErr.ColumnName == "name"
	}
	return "", false
}
