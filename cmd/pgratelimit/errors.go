package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgserver"
)

var (
	errInterrupted = errors.New("interrupted")

	// errDenied has been said on stdout.
	errDenied = errors.New("denied")
)

// failure is an error of a command that has begun its work.
type failure struct{ err error }

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// usageError is about the command line, found by the command itself.
type usageError struct{ error }

func isUsage(err error) bool {
	var (
		usage  usageError
		config *ratelimit.ConfigError
		key    *ratelimit.KeyError
		cost   *ratelimit.CostError
		url    *pgconn.ParseConfigError
	)
	return errors.As(err, &usage) || errors.As(err, &config) || errors.As(err, &key) || errors.As(err, &cost) || errors.As(err, &url)
}

// message is an error in one line, with what to do about it. But a list of ways to get a Postgres stays a list.
func (a *app) message(err error) string {
	if errors.Is(err, pgserver.ErrNotFound) {
		return err.Error()
	}
	text := oneLine(err)
	store, isStore := errors.AsType[*ratelimit.StoreError](err)
	if connect, ok := errors.AsType[*pgconn.ConnectError](err); ok {
		if isStore {
			text = oneLine(connect)
		}
		if !strings.Contains(text, "DATABASE_URL") {
			text += "; --database-url or DATABASE_URL says where the database is"
		}
	}
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return text
	}
	if isStore && !errors.Is(store, ratelimit.ErrOutcomeUnknown) { // else it tells a programmer what to do
		text = oneLine(pgErr)
	}
	switch pgErr.Code {
	case "42P01", "42883", "42704", "42703", "3F000":
		text += "; migrate the database with 'pgratelimit migrate up', or say with --schema where the tables are; " +
			"they cannot be seen without USAGE on their schema"
	case "42501":
		text += "; deploy/grants.sql shows who needs which rights"
	case "57014":
		text += fmt.Sprintf("; --timeout allows a statement more than %v", a.timeout)
	case "55P03":
		text += "; somebody's transaction holds the row, or a lock on the table"
	case "25006", "0A000":
		text += "; connect to the primary"
	case "08P01":
		text += "; connect to Postgres itself rather than to a pooler"
	}
	return text
}

// oneLine is an error in one line: pgx for one has a line for each address that it has tried.
func oneLine(err error) string {
	return strings.NewReplacer(":\n\t", ": ", "\n\t", "; ", "\n", "; ").Replace(err.Error())
}
