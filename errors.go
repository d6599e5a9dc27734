package ratelimit

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pg"
)

// What can go wrong with a call, to compare with [errors.Is]. A denial is a [Result], and no error.
var (
	// ErrInvalidKey: the key is empty, longer than 512 bytes or not valid UTF-8, has a NUL byte, or does not fit
	// the database's encoding. It is a [*KeyError]. Nothing was taken.
	ErrInvalidKey = errors.New("ratelimit: invalid key")
	// ErrInvalidCost: the cost is below 0, or of a Request, RefundN or Grant below 1, or it is more than is left
	// to give back. It is a [*CostError]. The database was not asked.
	ErrInvalidCost = errors.New("ratelimit: invalid cost")
	// ErrNothingToRefund: the result took nothing (a denial or a Peek), all of it was given back, its Receipt was
	// handed on, or OnFailure has decided it instead of the database. The database was not asked.
	ErrNothingToRefund = errors.New("ratelimit: nothing to refund: " +
		"the result took nothing from the database, all of it was given back, or its Receipt was handed on")
	// ErrNoReceipt: the result was read from JSON, which does not have what it took. The database was not asked.
	ErrNoReceipt = errors.New("ratelimit: a result that was read from JSON cannot be given back; " +
		"send its Receipt too, and refund what ParseReceipt makes of it")
	// ErrCostExceedsLimit: the cost is above the policy's limit, so that no waiting helps, or a Grant is more than
	// a key can hold. It is a [*CostError]. The database was not asked.
	ErrCostExceedsLimit = errors.New("ratelimit: cost exceeds the limit")
	// ErrWouldExceedDeadline: the context ends before Wait's retry time. It is a [*WaitError]. Nothing was taken.
	ErrWouldExceedDeadline = errors.New("ratelimit: waiting would exceed the context's deadline")

	// ErrNotMigrated: the tables or functions are not where the call looked. Call migrations.Up, or run
	// `pgratelimit migrate up`. Set [ClientConfig].Schema if they have a schema of their own.
	ErrNotMigrated = pg.ErrNotMigrated
	// ErrNewerSchema: a newer release has migrated the database, and removed what this one calls. Upgrade the
	// application to it. Older releases go on to use what a newer one leaves as it is.
	ErrNewerSchema = pg.ErrNewerSchema
	// ErrNotPermitted: the database role may not execute the functions. GRANT EXECUTE on them.
	ErrNotPermitted = pg.ErrNotPermitted
	// ErrPreparedStatements: prepared statements get lost before Postgres, most likely in PgBouncer in transaction
	// mode. Set default_query_exec_mode=exec in the connection string.
	ErrPreparedStatements = pg.ErrPreparedStatements
	// ErrSetup: the log-in was refused, there is no such database, the two sides do not agree on TLS, the server
	// refuses a setting of the connection, or a setting or type of the application's keeps pgx from sending arguments
	// or reading results. The message says which. OnFailure does not answer it. Nothing was taken; with
	// ErrOutcomeUnknown, the result was unreadable.
	ErrSetup = pg.ErrSetup
	// ErrSharded: the database is a proxy for shards, which cannot do that. The keys of an AllowAll are on several
	// shards: write a part that they share in braces ([*RequestError]). Or the call is part of a transaction of the
	// caller's, which could not take back what a shard has committed: call Allow before it, or use a pool of the
	// shard's own database. Nothing was taken.
	ErrSharded = pg.ErrSharded
	// ErrUnavailable: the database is not reachable, starts or stops, refuses connections or has ended this one,
	// or somebody has locked the table, as VACUUM FULL does. The call did not count, except with
	// ErrOutcomeUnknown.
	ErrUnavailable = pg.ErrUnavailable
	// ErrReadOnly: the database accepts no writes, like a standby or a demoted primary. It is ErrUnavailable too.
	ErrReadOnly = pg.ErrReadOnly
	// ErrTimeout: the database did not decide within [ClientConfig].Timeout, because it is slow, somebody holds the
	// key's row (ErrKeyHeld), or the pool has no connection (ErrPoolExhausted). It is an ErrOutcomeUnknown if the
	// request had been sent.
	ErrTimeout = pg.ErrTimeout
	// ErrKeyHeld: a transaction, such as one that has asked by WithTx, held the key's row for a quarter of the
	// Timeout. On an overloaded server it may be another call's statement, in this process or another one. Nothing was
	// taken. It is an ErrTimeout too, but OnFailure does not answer it.
	ErrKeyHeld = pg.ErrKeyHeld
	// ErrPoolExhausted: others held all connections of the *pgxpool.Pool for the whole Timeout. Nothing was taken.
	// Most likely, transactions call Allow of the limiter, so that each needs a second connection. Use WithTx
	// there, raise MaxConns, or give the client a pool of its own ([OwnPool]). It is an ErrTimeout too, and
	// OnFailure answers it.
	ErrPoolExhausted = pg.ErrPoolExhausted
	// ErrOutcomeUnknown: the connection broke or the time was up after the request had been sent, so it may
	// have counted. The limiter never repeats such a call. In a transaction of the caller's, it has not counted: the
	// error says that the transaction is rolled back, and is not an ErrOutcomeUnknown.
	ErrOutcomeUnknown = pg.ErrOutcomeUnknown
)

// ConfigError says which field of a configuration cannot work, and why. A call returns it for a nil transaction, if
// the database's encoding refuses the Name, or if its server does not know the Zone of a [CalendarWindow].
type ConfigError struct {
	Field  string // such as "Config.Policy.Limit" or "cleanup.Config.Share", or an argument: "db", "tx"
	Reason string // completes the sentence that Field begins
}

func (e *ConfigError) Error() string { return "ratelimit: " + e.Field + " " + e.Reason }

// PolicyError says what [ParsePolicy] could not read. It wraps a [*ConfigError] if only the numbers are wrong.
type PolicyError struct {
	Text string // what was to be read
	Err  error  // what is wrong with it
}

func (e *PolicyError) Error() string {
	return fmt.Sprintf("ratelimit: policy %q: %s; write one of %s",
		e.Text, strings.TrimPrefix(e.Err.Error(), "ratelimit: Config.Policy."), policyForms())
}

func (e *PolicyError) Unwrap() error { return e.Err }

// KeyError says what is wrong with a key, without the key, which may be personal data. It is an ErrInvalidKey.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return ErrInvalidKey.Error() + ": it " + e.Reason }

// Is reports ErrInvalidKey.
func (e *KeyError) Is(target error) bool { return target == ErrInvalidKey }

// CostError is a cost that is too small (ErrInvalidCost) or above the limit (ErrCostExceedsLimit).
type CostError struct {
	Cost, Limit int64
	Least       int64 // the least that may be asked for: 0, or 1 of a Request, RefundN or Grant
	refund      bool  // Limit is what is left to give back
	grant       bool  // Limit is the credit that a key can hold
}

func (e *CostError) Error() string {
	if e.Cost < e.Least {
		return fmt.Sprintf("%v: it is %d, and must be at least %d", ErrInvalidCost, e.Cost, e.Least)
	}
	if e.refund {
		return fmt.Sprintf("%v: %d is more than the %d that are left to give back", ErrInvalidCost, e.Cost, e.Limit)
	}
	if e.grant {
		return fmt.Sprintf("%v: %d is more than the credit that a key can hold, %d; grant less",
			ErrCostExceedsLimit, e.Cost, e.Limit)
	}
	return fmt.Sprintf("%v: %d can never fit into %d; ask for less at once, or raise the limit",
		ErrCostExceedsLimit, e.Cost, e.Limit)
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

// RequestError says which request of [AllowAll] cannot be asked, and why. Nothing was taken. It wraps a
// [*KeyError] or a [*CostError] if the key or the cost is wrong.
type RequestError struct {
	Index int // from 0
	Err   error
}

func (e *RequestError) Error() string {
	reason := strings.TrimPrefix(e.Err.Error(), "ratelimit: ")
	return fmt.Sprintf("ratelimit: request %d of AllowAll: %s", e.Index, reason)
}

func (e *RequestError) Unwrap() error { return e.Err }

var (
	errNoLimiter = errors.New("it has no limiter; make it with Limiter.Request")
	errSameKey   = errors.New("it is for the same limiter and key as one before it; " +
		"ask once, for the sum of the costs")
	errOtherClient = errors.New("its limiter has another client than that of the first request; " +
		"make both with Client.Limiter")
	errAcrossShards = fmt.Errorf("%w: its key is on another shard than that of the first request; "+
		"write a part that they share in braces, such as {user:1}:minute and {user:1}:day", ErrSharded)
	errOtherTx = errors.New("it is of another transaction than the first request; " +
		"make all of them with WithTx of the same transaction, or none")
	errOtherSchema = errors.New("its limiter has another schema than that of the first request")
)

// RefundError says that another limiter has taken the result: one of another name, table or schema, or of another
// pool or connection, even to the same database. Nothing was asked.
type RefundError struct{ Limiter, TakenBy string } // their names

func (e *RefundError) Error() string {
	if e.Limiter == e.TakenBy {
		return fmt.Sprintf("ratelimit: the result is of a limiter %q with another Durable, Schema, "+
			"pool or connection; refund it there", e.TakenBy)
	}
	return fmt.Sprintf("ratelimit: the result is of the limiter %q, and not of %q; refund it there",
		e.TakenBy, e.Limiter)
}

// ReceiptError says why a text is no receipt.
type ReceiptError struct{ Reason string }

func (e *ReceiptError) Error() string {
	return "ratelimit: this text is no receipt: " + e.Reason + "; pass what Result.Receipt has returned"
}

// WaitError is an ErrWouldExceedDeadline: the request, or one before it in the line, cannot be allowed before the
// context's Deadline.
type WaitError struct {
	RetryAfter time.Duration // the least that the wait would have taken
	Deadline   time.Time
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("%v: nothing can be allowed within %v, and the deadline is %s",
		ErrWouldExceedDeadline, e.RetryAfter, e.Deadline.Format(time.RFC3339Nano))
}

// Is reports ErrWouldExceedDeadline.
func (e *WaitError) Is(target error) bool { return target == ErrWouldExceedDeadline }

// StoreError is a failure of the database, or on the way to it: one or more of ErrNotMigrated to
// ErrOutcomeUnknown.
type StoreError struct {
	Err error // has these, and wraps the driver's error, which may be a *pgconn.PgError
}

func (e *StoreError) Error() string { return e.Err.Error() }

func (e *StoreError) Unwrap() error { return e.Err }

// publicError makes an error that callers know of one of package engine or pg.
func publicError(err error) error {
	_, inner := errors.AsType[*pg.Error](err) // or several, of ReturnLeases
	_, public := errors.AsType[*StoreError](err)
	switch {
	case inner && !public:
		return &StoreError{err}
	case errors.Is(err, pg.ErrKeyRefused):
		return errRefused
	case errors.Is(err, pg.ErrNameRefused):
		return errNameRefused
	case errors.Is(err, engine.ErrMemoryTx):
		return errMemoryTx
	}
	if zone, ok := errors.AsType[*engine.ZoneError](err); ok {
		return &ConfigError{Field: "Config.Policy.Zone", Reason: fmt.Sprintf("is %q, %s", zone.Zone, zone.Why)}
	}
	return err
}

var (
	// errRefused is for a key that Go accepts and the database does not.
	errRefused error = &KeyError{Reason: "cannot be stored in the encoding of the database, or of the connection, " +
		"or has more than 512 bytes in it; use ASCII, a database in UTF8, and client_encoding=UTF8"}
	// errNameRefused is for all callers of a limiter with such a name.
	errNameRefused error = &ConfigError{
		Field: "Config.Name",
		Reason: "cannot be stored in the encoding of the database, or of the connection, " +
			"or has more than 128 bytes in it; use ASCII, a database in UTF8, and client_encoding=UTF8",
	}
	// errMemoryTx is for a transaction with a limiter in memory.
	errMemoryTx error = &ConfigError{
		Field: "tx",
		Reason: "cannot be used with a limiter in memory (package ratelimittest); " +
			"test what asks in a transaction on Postgres",
	}
)

// gaveUp is what callers get whose context has ended.
func gaveUp(err error) error { return engine.GaveUp(err) }

// policyForms is what an error of ParsePolicy shows.
func policyForms() string {
	return algorithm.Examples() + ", or several with commas between them " +
		"(100/1m is 100 a minute; 20 5/10s is 20 at once, and 5 more every 10 seconds; " +
		"1000/month is by the calendar, of UTC if no time zone follows)"
}
