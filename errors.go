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
	// UTF-8, that has a NUL byte, or that the encoding of the database has no characters for. The error is a [*KeyError]; nothing was taken.
	ErrInvalidKey = errors.New("ratelimit: invalid key")

	// ErrInvalidCost is returned by AllowN and AllowNTx for a cost below 0, and by RefundN, Grant and
	// their twins for less than 1, or more than is left to give back. The error is a [*CostError]; nothing was asked.
	ErrInvalidCost = errors.New("ratelimit: invalid cost")

	// ErrNothingToRefund is returned by Refund and its twins for a result that took nothing, of which all was given back, or that
	// the database has not decided: a denial, a Peek, or what [Config].OnFailure has answered. Nothing was asked.
	ErrNothingToRefund = errors.New("ratelimit: nothing to refund: the result took nothing from the database, or all of it was given back")

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

	// ErrNewerSchema: a newer release of this library has migrated the database, and taken away what this one calls. Upgrade the
	// application to that release. (What a newer release leaves as it is, older ones go on to use.)
	ErrNewerSchema = errors.New("the database was migrated by a newer release of this library; upgrade the application to it")

	// ErrNotPermitted: the database role may not execute the functions. GRANT EXECUTE on them.
	ErrNotPermitted = errors.New("the database role may not do this; GRANT USAGE on the schema, and EXECUTE on its rate_limit_ functions")

	// ErrPreparedStatements: something between the pool and Postgres, PgBouncer in transaction mode most likely, does not keep
	// prepared statements. Set default_query_exec_mode=exec in the connection string.
	ErrPreparedStatements = errors.New("prepared statements are lost between the pool and Postgres, as by PgBouncer in transaction mode; " +
		"set default_query_exec_mode=exec in the connection string")

	// ErrUnavailable: the database could not be reached, is shutting down or starting up, refuses connections, or has ended the
	// connection, or somebody has locked the table, as VACUUM FULL does. Whether the call counted is not in doubt (it did not) unless the error is ErrOutcomeUnknown as well.
	ErrUnavailable = errors.New("the database is unavailable")

	// ErrReadOnly: the database accepts no writes, like a standby or a primary that was demoted. It is an ErrUnavailable too.
	ErrReadOnly = errors.New("the database is read-only, like a standby or a demoted primary; connect to the primary, for example with target_session_attrs=read-write")

	// ErrTimeout: the database did not decide within [Config].Timeout, because it is slow, or, if it is an ErrKeyHeld too, because
	// somebody's transaction holds the key's row. It is an ErrOutcomeUnknown too if the request had been sent.
	ErrTimeout = errors.New("the database did not decide within Config.Timeout")

	// ErrKeyHeld: somebody's transaction, such as one that has called AllowTx, has held the key's row for a quarter of Config.Timeout.
	// Nothing was taken. It is an ErrTimeout too, but no outage: OnFailure does not answer it.
	ErrKeyHeld = errors.New("somebody's transaction holds the row of the key; end transactions soon after AllowTx")

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
	Least       int64 // what may be asked for: from 0, or from 1 of a Request, RefundN or Grant
	refund      bool  // Limit is what is left to give back
}

func (e *CostError) Error() string {
	if e.Cost < e.Least {
		return fmt.Sprintf("%v: it is %d, and must be at least %d", ErrInvalidCost, e.Cost, e.Least)
	}
	if e.refund {
		return fmt.Sprintf("%v: %d is more than the %d that are left to give back", ErrInvalidCost, e.Cost, e.Limit)
	}
	if e.Limit == maxCredit {
		return fmt.Sprintf("%v: %d is more than the credit that a key can hold, %d; grant less", ErrCostExceedsLimit, e.Cost, e.Limit)
	}
	return fmt.Sprintf("%v: %d can never fit into %d; ask for less at once, or raise the limit", ErrCostExceedsLimit, e.Cost, e.Limit)
}

// Is tells which of the two it is.
func (e *CostError) Is(target error) bool {
	switch target {
	case ErrInvalidCost:
		return e.refund || e.Cost < e.Least
	case ErrCostExceedsLimit:
		return !e.refund && e.Cost > e.Limit
	}
	return false
}

// RefundError says that a result cannot be given back by this limiter, because another one has taken it: one of another name, or of
// another table, schema or database. Nothing was asked.
type RefundError struct{ Limiter, TakenBy string } // their names

func (e *RefundError) Error() string {
	if e.Limiter == e.TakenBy {
		return fmt.Sprintf("ratelimit: the result is of a limiter %q with another Durable, Schema or database; refund it there", e.TakenBy)
	}
	return fmt.Sprintf("ratelimit: the result is of the limiter %q, and not of %q; refund it there", e.TakenBy, e.Limiter)
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

// StoreError is a failure of the database, or on the way to it. It is one or more of ErrNotMigrated, ErrNewerSchema, ErrNotPermitted,
// ErrPreparedStatements, ErrUnavailable, ErrReadOnly, ErrTimeout, ErrKeyHeld and ErrOutcomeUnknown, and wraps the driver's error.
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

// lockTimeout tells whether the database gave up waiting for a lock, so that nothing was taken.
func lockTimeout(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03"
}

// tableLocked tells of a lockTimeout whether it was the table that was locked, as far as the statement has told that apart: it waits
// for the table in a LOCK TABLE of its own then, and the text of a statement is the same in every language of the server.
func tableLocked(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "55P03" && strings.Contains(pgErr.Where, "LOCK TABLE")
}

// keyHeld is what a caller is told whose key is held.
func keyHeld() error {
	return &StoreError{kinds: []error{ErrTimeout, ErrKeyHeld}, err: errStillHeld}
}

// lockedTable is what the callers are told who have waited for the table.
func lockedTable(err error) *StoreError {
	return &StoreError{kinds: []error{ErrUnavailable}, err: fmt.Errorf("somebody has locked the table, as VACUUM FULL does: %w", err)}
}

var (
	errStillHeld = errors.New("it was held each time that it was asked for, and nothing was taken")
	errHeldUp    = errors.New("rows that somebody holds have taken the time; it was not asked")
	// errOthersHeld is what callers are told whom held rows, not of theirs, have kept from being asked for in time.
	errOthersHeld error = &StoreError{kinds: []error{ErrTimeout}, err: errHeldUp}
)

// errNotAsked is why a call that has waited too long in the process is given up.
var errNotAsked = errors.New("the statements before this one took that long; it was not asked")

// undone tells whether the database has rolled a statement back for a reason that is gone when it runs again: it lost a race
// that isolation levels above READ COMMITTED do not let it win, or it was chosen to end a deadlock that a caller's transaction made.
func undone(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == "40001" || pgErr.Code == "40P01")
}

// canceled tells whether the server was told to end the statement. If our time is not up, it may have told itself: a lock_timeout that
// ends just when the lock is granted, while the statement goes on to wait for the next one, is reported as if somebody had asked for it.
func canceled(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "57014"
}

// remade tells whether the database has rolled a statement back because a function or type that it used was dropped under it, as a
// migration may: if it has been made again, the statement works when it runs again.
func remade(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (pgErr.Code == "XX000" && (strings.HasPrefix(pgErr.Message, "cache lookup failed for ") || // which is in English everywhere
		pgErr.Routine == "relation_open") ||
		pgErr.Code == "0A000" && pgErr.Routine == "RevalidateCachedQuery") // the plan of a prepared statement returned another type
}

// NewStoreError translates an error of the driver, for statements that are not a limiter's, such as those of package cleanup.
func NewStoreError(err error) *StoreError {
	_, refused := errors.AsType[*pgconn.ConnectError](err)
	return storeError(err, !refused)
}

// storeError translates an error of the driver. sent tells whether the request may have reached the database.
func storeError(err error, sent bool) *StoreError {
	if tableLocked(err) {
		return lockedTable(err)
	}
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

// schemaVersion is the number of the last migration: of that version is what this package calls.
const schemaVersion = 3

// explain says which version the database has been migrated to if what was called is not there. That takes a query more, but only then.
func (c *core) explain(ctx context.Context, db DBTX, err error) error {
	if !errors.Is(err, ErrNotMigrated) || remade(err) {
		return err
	}
	var version int64
	statement := qualify("SELECT rate_limit_version()", c.config.Schema)
	if query(ctx, db, false, statement, nil, []any{&version}, func() error { return nil }) != nil {
		return err // there is no such function, or this was in a transaction, which the error has ended
	}
	kind, says := ErrNotMigrated, "which has what is missing: search_path may name another schema first"
	if version < schemaVersion {
		says = "and what is missing came later"
	} else if version > schemaVersion {
		kind = ErrNewerSchema
		says = "which has it no longer"
	}
	why := err
	if stored, ok := errors.AsType[*StoreError](err); ok {
		why = stored.err
	}
	return &StoreError{kinds: []error{kind}, err: fmt.Errorf("the database is at version %d of the migrations, %s; this release was made for version %d: %w",
		version, says, schemaVersion, why)}
}

// statementError translates an error of a statement of a limiter's. One that says that the database's encoding, or the connection's, has
// no place for a key becomes a KeyError: the message of the database shows bytes of it.
func statementError(err error) error {
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok && pgErr.SeverityUnlocalized == "ERROR" {
		switch pgErr.Code {
		case "22021", "22P05": // no such character
			return errRefused
		case "22023": // of our functions: it has become too long
			if pgErr.ColumnName == "key" {
				return errRefused
			}
		}
	}
	return storeError(err, true)
}

// errRefused is the KeyError of a key that Go accepts and the database does not.
var errRefused error = &KeyError{Reason: "cannot be stored in the encoding of the database, or of the connection, or has more than 512 bytes in it; " +
	"use ASCII, a database in UTF8, and client_encoding=UTF8"}

// neverSent tells whether an error surely came before anything was sent. pgconn.SafeToRetry says that of ErrConnClosed too, but in
// the simple protocol that is what comes of a connection that breaks after the statement was sent.
func neverSent(err error) bool {
	return pgconn.SafeToRetry(err) && !errors.Is(err, pgconn.ErrConnClosed)
}

// sqlStateKinds tells what the database means by an error.
func sqlStateKinds(err *pgconn.PgError, sent bool) []error {
	if remade(err) {
		return []error{ErrNotMigrated}
	}
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
