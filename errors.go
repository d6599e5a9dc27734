package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// What can go wrong with a call; compare with [errors.Is]. A denial is none of them: it is a [Result].
var (
	// ErrInvalidKey is returned by every method that takes a key, for a key that is empty, longer than 512 bytes, not valid
	// UTF-8, or that has a NUL byte. The error is a [*KeyError]; nothing was asked.
	ErrInvalidKey = errors.New("ratelimit: invalid key")

	// ErrInvalidCost is returned by AllowN and AllowNTx for a cost below 0, and by Refund, Grant and
	// their twins for less than 1. The error is a [*CostError]; nothing was asked.
	ErrInvalidCost = errors.New("ratelimit: invalid cost")

	// ErrCostExceedsLimit is returned by AllowN and AllowNTx for a cost above the policy's limit, which no waiting can make
	// fit, and by Grant and GrantTx for more than a key can hold. The error is a [*CostError]; nothing was asked.
	ErrCostExceedsLimit = errors.New("ratelimit: cost exceeds the limit")

	// ErrWouldExceedDeadline is returned by Wait and WaitN where the context's deadline comes before the retry time. The error is a
	// [*WaitError]; nothing was taken.
	ErrWouldExceedDeadline = errors.New("ratelimit: waiting would exceed the context's deadline")

	// ErrNotMigrated: the tables or functions are not where the call looked for them. Run migrations.Up, or
	// `goose -dir migrations postgres "$DATABASE_URL" up`; see [Config].Schema if they are in a schema of their own.
	ErrNotMigrated = errors.New("the database is not migrated, or Config.Schema or search_path does not name the schema; " +
		`run migrations.Up or 'goose -dir migrations postgres "$DATABASE_URL" up'`)

	// ErrNotPermitted: the database role may not execute the functions. GRANT EXECUTE on them.
	ErrNotPermitted = errors.New("the database role may not do this; GRANT USAGE on the schema, and EXECUTE on its rate_limit_ functions")

	// ErrPreparedStatements: something between the pool and Postgres, PgBouncer in transaction mode most likely, does not keep
	// prepared statements. Set default_query_exec_mode=exec in the connection string.
	ErrPreparedStatements = errors.New("prepared statements are lost between the pool and Postgres, as by PgBouncer in transaction mode; " +
		"set default_query_exec_mode=exec in the connection string")

	// ErrUnavailable: the database could not be reached, is shutting down or starting up, refuses connections, or has ended the
	// connection. Whether the call counted is not in doubt (it did not) unless the error is ErrOutcomeUnknown as well.
	ErrUnavailable = errors.New("the database is unavailable")

	// ErrReadOnly: the database accepts no writes, like a standby or a primary that was demoted. It is an ErrUnavailable too.
	ErrReadOnly = errors.New("the database is read-only, like a standby or a demoted primary; connect to the primary, for example with target_session_attrs=read-write")

	// ErrTimeout: the database did not decide within [Config].Timeout, because it is slow, or because somebody's
	// transaction holds the key's row. It is an ErrOutcomeUnknown too if the request had been sent.
	ErrTimeout = errors.New("the database did not decide within Config.Timeout")

	// ErrOutcomeUnknown: the connection broke, or the time was up, after the request had been sent, so it may or may not have
	// counted. The limiter never repeats such a call by itself.
	ErrOutcomeUnknown = errors.New("the outcome is unknown; the request may or may not have counted")
)

// ConfigError says which field of a [Config] New has refused, and why.
type ConfigError struct {
	Field  string // as written in Go, such as "Policy.Limit"
	Reason string // completes the sentence that Field begins
}

func (e *ConfigError) Error() string { return "ratelimit: Config." + e.Field + " " + e.Reason }

// PolicyError says what [ParsePolicy] could not read. It wraps a [*ConfigError] if only the numbers are wrong.
type PolicyError struct {
	Text string // what was to be read
	Err  error  // what is wrong with it
}

func (e *PolicyError) Error() string {
	return fmt.Sprintf("ratelimit: policy %q: %s; write one of %s", e.Text, strings.TrimPrefix(e.Err.Error(), "ratelimit: Config.Policy."), policyForms)
}

// Unwrap returns what is wrong.
func (e *PolicyError) Unwrap() error { return e.Err }

// KeyError says what is wrong with a key, without the key, which may be personal data. It is an ErrInvalidKey.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return ErrInvalidKey.Error() + ": it " + e.Reason }

// Is tells that it is an ErrInvalidKey.
func (e *KeyError) Is(target error) bool { return target == ErrInvalidKey }

// CostError is a cost that cannot be asked for: too small (ErrInvalidCost), or above the limit (ErrCostExceedsLimit).
type CostError struct {
	Cost, Limit int64
	Least       int64 // what may be asked for: from 0, or from 1 of a Request, Refund or Grant
}

func (e *CostError) Error() string {
	if e.Cost < e.Least {
		return fmt.Sprintf("%v: it is %d, and must be at least %d", ErrInvalidCost, e.Cost, e.Least)
	}
	if e.Limit == maxCredit {
		return fmt.Sprintf("%v: %d is more than the credit that a key can hold, %d; grant less", ErrCostExceedsLimit, e.Cost, e.Limit)
	}
	return fmt.Sprintf("%v: %d can never fit into %d; ask for less at once, or raise the limit", ErrCostExceedsLimit, e.Cost, e.Limit)
}

// Is tells which of the two it is.
func (e *CostError) Is(target error) bool {
	return target == ErrInvalidCost && e.Cost < e.Least || target == ErrCostExceedsLimit && e.Cost > e.Limit
}

// WaitError says why Wait has not waited: the request, or one before it in the line, cannot be allowed before Deadline, that of the
// context. It is an ErrWouldExceedDeadline.
type WaitError struct {
	RetryAfter time.Duration // the least that the wait would have taken
	Deadline   time.Time
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("%v: nothing can be allowed within %v, and the deadline is %s",
		ErrWouldExceedDeadline, e.RetryAfter, e.Deadline.Format(time.RFC3339Nano))
}

// Is tells that it is an ErrWouldExceedDeadline.
func (e *WaitError) Is(target error) bool { return target == ErrWouldExceedDeadline }

// StoreError is a failure of the database, or on the way to it. It is one or more of ErrNotMigrated, ErrNotPermitted,
// ErrPreparedStatements, ErrUnavailable, ErrReadOnly, ErrTimeout and ErrOutcomeUnknown, and wraps the driver's error.
type StoreError struct {
	kinds []error
	err   error
}

func (e *StoreError) Error() string {
	var text strings.Builder
	text.WriteString("ratelimit: ")
	for _, kind := range e.kinds {
		text.WriteString(kind.Error() + ": ")
	}
	return text.String() + e.err.Error()
}

// Unwrap returns the kinds of the error and the driver's error, which may be a *pgconn.PgError.
func (e *StoreError) Unwrap() []error { return append(slices.Clip(e.kinds), e.err) }

// lockTimeout tells whether the database gave up waiting for a row, so that nothing was taken.
func (e *StoreError) lockTimeout() bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](e.err)
	return ok && pgErr.Code == "55P03"
}

// errNotAsked is why a call that has waited too long in the process is given up.
var errNotAsked = errors.New("the statements before this one took that long; it was not asked")

// undone tells whether the database has rolled a statement back for a reason that is gone when it runs again: it lost a race
// that isolation levels above READ COMMITTED do not let it win, or it was chosen to end a deadlock that a caller's transaction made.
func undone(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// NewStoreError translates an error of the driver, for statements that are not a limiter's, such as those of package cleanup.
func NewStoreError(err error) *StoreError {
	_, refused := errors.AsType[*pgconn.ConnectError](err)
	return storeError(err, !refused)
}

// storeError translates an error of the driver. sent tells whether the request may have reached the database.
func storeError(err error, sent bool) *StoreError {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		return &StoreError{kinds: sqlStateKinds(pgErr, sent), err: err}
	}
	kind := ErrUnavailable
	if errors.Is(err, context.DeadlineExceeded) || pgconn.Timeout(err) {
		kind = ErrTimeout
	}
	if sent && !neverSent(err) {
		return &StoreError{kinds: []error{kind, ErrOutcomeUnknown}, err: err}
	}
	return &StoreError{kinds: []error{kind}, err: err}
}

// neverSent tells whether an error surely came before anything was sent. pgconn.SafeToRetry says that of ErrConnClosed too, but in
// the simple protocol that is what comes of a connection that breaks after the statement was sent.
func neverSent(err error) bool {
	return pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
}

// sqlStateKinds tells what the database means by an error.
func sqlStateKinds(err *pgconn.PgError, sent bool) []error {
	switch err.Code {
	case "42P01", "42883", "3F000", "42704", "42703": // no such table, function, schema, type, column
		return []error{ErrNotMigrated}
	case "42501":
		return []error{ErrNotPermitted}
	case "26000", "42P05": // no such prepared statement, one of that name already
		return []error{ErrPreparedStatements}
	case "08P01": // protocol violation
		// Of Postgres: these are not the parameters of the statement prepared. Of PgBouncer, whose errors are FATAL: nearly
		// anything, such as the end of its connection to Postgres during the call.
		if err.SeverityUnlocalized == "ERROR" {
			return []error{ErrPreparedStatements}
		}
	case "25006": // a write to a read-only database
		return []error{ErrUnavailable, ErrReadOnly}
	case "55P03", "57014": // lock_timeout; statement_timeout or a cancel request
		return []error{ErrTimeout}
	}
	switch class := err.Code[:min(2, len(err.Code))]; {
	case err.Code == "0A000" && err.Routine == "get_relation_info": // a read of an unlogged table on a standby
		return []error{ErrUnavailable, ErrReadOnly}
	case sent && err.SeverityUnlocalized != "ERROR": // a FATAL or PANIC ends the connection, and may come after the commit
		return []error{ErrUnavailable, ErrOutcomeUnknown}
	case !sent, // the connection was refused: no such role or database, a wrong password
		class == "08" || class == "53" || class == "58" || err.Code == "57P01" || err.Code == "57P02" || err.Code == "57P03":
		return []error{ErrUnavailable}
	}
	return nil // an ERROR has rolled the statement back
}
