package cli

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

var (
	ErrInterrupted = errors.New("interrupted")

	// ErrDenied is not printed, because the output already says that the request was denied.
	ErrDenied = errors.New("denied")

	// ErrProblems is not printed, because the output already lists the problems.
	ErrProblems = errors.New("the doctor has found a problem")
)

// Failure is an error that occurs after a command has begun its work.
type Failure struct{ Err error }

func (f *Failure) Error() string { return f.Err.Error() }
func (f *Failure) Unwrap() error { return f.Err }

// usageError is an error that a command has found in its command line.
type usageError struct{ error }

// Usage marks an error as an error in the command line.
func Usage(err error) error { return usageError{err} }

func IsUsage(err error) bool {
	return errors.As(err, new(usageError)) || errors.As(err, new(*pgconn.ParseConfigError)) ||
		errors.As(err, new(*ratelimit.ConfigError)) || errors.As(err, new(*ratelimit.KeyError)) ||
		errors.As(err, new(*ratelimit.CostError)) || errors.As(err, new(*ratelimit.SlotError))
}

// refusedText replaces errors about a text that is too long or that the database's encoding cannot represent. The
// server's message may contain bytes of a key.
func refusedText(err error) error {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	switch {
	case ok && (pgErr.Code == "22021" || pgErr.Code == "22P05"):
		return Usage(errors.New("a name or key is not valid in the encoding of the connection, " +
			"or cannot be stored in that of the database; use ASCII, a database in UTF8, and client_encoding=UTF8"))
	case ok && pgErr.Code == "22023" && slices.Contains([]string{"name", "key", "key_prefix"}, pgErr.ColumnName):
		return Usage(errors.New("a name may have at most 128 bytes, and a key or a prefix 512, " +
			"in the encoding of the database"))
	case ok && pgErr.Code == "22023" && strings.Contains(pgErr.Message, "rate_limit: hold cannot be read"):
		return Usage(errors.New("the hold cannot be read: pass the whole text that 'pgratelimit hold' printed"))
	}
	return err
}

// Message returns an error in one line, with advice. Only the advice on ways to get a Postgres has several lines.
func (a *App) Message(err error) string {
	if errors.Is(err, pgserver.ErrNotFound) {
		return err.Error()
	}
	text := OneLine(err)
	store, isStore := errors.AsType[*ratelimit.StoreError](err)
	if connect, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		if isStore || strings.HasPrefix(text, "ratelimit/migrations: ") { // these have advice for programmers
			text = OneLine(connect)
		}
		if _, ok := errors.AsType[*shardError](err); !ok && !strings.Contains(text, "DATABASE_URL") {
			text += "; --database-url or DATABASE_URL says where the database is"
		}
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return text
	}
	if isStore && !errors.Is(store, ratelimit.ErrOutcomeUnknown) { // otherwise the text has advice for programmers
		text = OneLine(pgErr)
	}
	switch pgErr.Code {
	case "42P01", "42883", "42704", "42703", "3F000":
		text += "; 'pgratelimit doctor' finds out why: the database is not migrated ('pgratelimit migrate up'), " +
			"or the tables are elsewhere (--schema), or this role lacks USAGE on their schema, or something is missing"
	case "42501":
		if pgErr.Routine == "check_enable_rls" {
			text += "; 'pgratelimit doctor' says what to do about row-level security"
			break
		}
		text += "; deploy/roles.sql and deploy/grants.sql show who needs which rights"
		if strings.Contains(pgErr.Message, "rate_limit_policy") {
			text += ": rate_limit_policy_admin changes policies, and rate_limit_reader reads them"
		}
		if strings.Contains(pgErr.Message, "function rate_limit_") {
			text += ": rate_limit_app takes and holds, and rate_limit_sweeper sweeps, " +
				"once grants.sql has run after the last migration"
		}
	case "22023", "RLS05", "RLS06", "RLS07", "RLS08":
		if strings.Contains(pgErr.Message, "rate_limit: ") && pgErr.Hint != "" {
			text += "; " + OneLine(errors.New(strings.TrimPrefix(pgErr.Hint, "Remote hint: ")))
		}
	case "54000":
		text += "; 'pgratelimit doctor' says which database it is, and what holds VACUUM back"
	case "57014":
		text += fmt.Sprintf("; --timeout allows a statement more than %v", a.Timeout)
	case "55P03":
		text += "; a transaction, or a call on an overloaded server, holds the row or a lock on the table: " +
			"'pgratelimit doctor' says which"
	case "25006", "0A000":
		text += "; connect to the primary"
	case "08P01":
		text += "; connect to Postgres itself rather than to a pooler"
	}
	return text
}

// OneLine returns the text of an error in one line. An error of pgx may have a line for each address.
func OneLine(err error) string {
	return strings.NewReplacer(":\n\t", ": ", "\n\t", "; ", "\n", "; ").Replace(err.Error())
}
