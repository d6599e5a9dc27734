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

// What can go wrong with a call. Compare with [errors.Is]. A denial is a [Result], and no error. Nothing was taken,
// except perhaps with ErrOutcomeUnknown.
var (
	// ErrInvalidKey: a key must be 1 to 512 bytes of UTF-8 without NUL, and fit the database's encoding. See
	// [KeyError].
	ErrInvalidKey = errors.New("ratelimit: invalid key")
	// ErrInvalidCost: the cost is too small, or above what is left to give back. See [CostError].
	ErrInvalidCost = errors.New("ratelimit: invalid cost")
	// ErrNothingToRefund: see its text. A denial, a Peek and what OnFailure answers take nothing.
	ErrNothingToRefund = errors.New("ratelimit: nothing to refund: " +
		"the result took nothing from the database, all of it was given back, or its Receipt was handed on")
	// ErrNoReceipt: JSON does not have what a result took.
	ErrNoReceipt = errors.New("ratelimit: a result that was read from JSON cannot be given back; " +
		"send its Receipt too, and refund what ParseReceipt makes of it")
	// ErrCostExceedsLimit: waiting does not help, because the cost is above the policy's limit. See [CostError].
	ErrCostExceedsLimit = errors.New("ratelimit: cost exceeds the limit")
	// ErrWouldExceedDeadline: the context ends before Wait's retry time. See [WaitError].
	ErrWouldExceedDeadline = errors.New("ratelimit: waiting would exceed the context's deadline")

	// ErrNotMigrated: the call did not find the tables or functions. Call migrations.Up, or set [ClientConfig].Schema.
	ErrNotMigrated = pg.ErrNotMigrated
	// ErrNewerSchema: a newer release migrated the database and removed what this one calls. Upgrade the application.
	ErrNewerSchema = pg.ErrNewerSchema
	// ErrNotPermitted: the database role may not execute the functions. GRANT EXECUTE on them.
	ErrNotPermitted = pg.ErrNotPermitted
	// ErrPreparedStatements: prepared statements get lost before Postgres, as in PgBouncer in transaction mode. Set
	// default_query_exec_mode=exec in the connection string.
	ErrPreparedStatements = pg.ErrPreparedStatements
	// ErrSetup: the server refuses the log-in, the database, TLS or a setting, or something of the application's keeps
	// pgx from sending arguments or reading results, or uses the connection at the same time. The message says which.
	// With ErrOutcomeUnknown, the result was unreadable.
	ErrSetup = pg.ErrSetup
	// ErrSharded: the database is a proxy for shards, and cannot do this. If the keys of an AllowAll are on several
	// shards, write a part that they share in braces. For WithTx, see there.
	ErrSharded = pg.ErrSharded
	// ErrUnavailable: the database cannot be reached, refuses or ends connections, or somebody has locked the table, as
	// VACUUM FULL does.
	ErrUnavailable = pg.ErrUnavailable
	// ErrReadOnly: the database accepts no writes, like a standby. It is an ErrUnavailable too.
	ErrReadOnly = pg.ErrReadOnly
	// ErrTimeout: the database did not decide within [ClientConfig].Timeout. If the request was sent, it is an
	// ErrOutcomeUnknown too.
	ErrTimeout = pg.ErrTimeout
	// ErrKeyHeld: a transaction, such as one that asked by WithTx, held the key's row for a quarter of the Timeout; or,
	// on an overloaded server, another call did. It is an ErrTimeout too, but OnFailure does not answer it.
	ErrKeyHeld = pg.ErrKeyHeld
	// ErrPoolExhausted: others held all connections of the pool for the whole Timeout, most likely transactions that
	// call Allow, which needs a second one. Use WithTx there, raise MaxConns, or call [OwnPool]. It is an ErrTimeout
	// too.
	ErrPoolExhausted = pg.ErrPoolExhausted
	// ErrOutcomeUnknown: the connection broke or the time was up after the request was sent, so it may have counted.
	// The limiter never repeats such a call. In a caller's transaction this does not occur, because it is rolled back.
	ErrOutcomeUnknown = pg.ErrOutcomeUnknown
)

// ConfigError says which field cannot work, and why. Calls return it for a nil transaction, and for a Name that the
// encoding refuses.
type ConfigError struct {
	Field  string // such as "Config.Policy.Limit" or "cleanup.Config.Share", or an argument: "db", "tx"
	Reason string // completes the sentence that Field begins
}

func (e *ConfigError) Error() string { return "ratelimit: " + e.Field + " " + e.Reason }

// PolicyError says what is wrong with a text for [ParsePolicy].
type PolicyError struct {
	Text string
	Err  error // a [*ConfigError] if only the numbers are wrong
}

func (e *PolicyError) Error() string {
	return fmt.Sprintf("ratelimit: policy %q: %s; write one of %s",
		e.Text, strings.TrimPrefix(e.Err.Error(), "ratelimit: Config.Policy."), policyForms())
}

func (e *PolicyError) Unwrap() error { return e.Err }

// KeyError is an [ErrInvalidKey]. It does not show the key.
type KeyError struct{ Reason string }

func (e *KeyError) Error() string { return ErrInvalidKey.Error() + ": it " + e.Reason }

func (e *KeyError) Unwrap() error { return ErrInvalidKey }

// CostError is an [ErrInvalidCost] or an [ErrCostExceedsLimit].
type CostError struct {
	Cost, Limit int64
	Least       int64 // the least possible cost: 0, and 1 for a Request, RefundN or Grant
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

func (e *CostError) Unwrap() error {
	if e.refund || e.Cost < e.Least {
		return ErrInvalidCost
	}
	return ErrCostExceedsLimit
}

// RequestError says which request of [AllowAll] cannot be asked.
type RequestError struct {
	Index int   // from 0
	Err   error // a [*KeyError] or a [*CostError] if the key or the cost is wrong
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

// RefundError says that another limiter took the result: one of another name, table, schema, pool or connection.
// Nothing was asked.
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

// WaitError is an [ErrWouldExceedDeadline].
type WaitError struct {
	RetryAfter time.Duration // the least that the wait would take for this request, or one before it in the line
	Deadline   time.Time
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("%v: nothing can be allowed within %v, and the deadline is %s",
		ErrWouldExceedDeadline, e.RetryAfter, e.Deadline.Format(time.RFC3339Nano))
}

func (e *WaitError) Unwrap() error { return ErrWouldExceedDeadline }

// StoreError is a failure of the database, or on the way to it.
type StoreError struct {
	Err error // is one or more of ErrNotMigrated to ErrOutcomeUnknown, and wraps the driver's error
}

func (e *StoreError) Error() string { return e.Err.Error() }

func (e *StoreError) Unwrap() error { return e.Err }

// publicError turns an error of package engine or pg into one that callers know.
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
	// errRefused is for a key that Go accepts and the database refuses.
	errRefused error = &KeyError{Reason: "cannot be stored in the encoding of the database, or of the connection, " +
		"or has more than 512 bytes in it; use ASCII, a database in UTF8, and client_encoding=UTF8"}
	// errNameRefused is for all callers of a limiter whose name the database refuses.
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

// gaveUp is the error for a caller whose context has ended.
func gaveUp(err error) error { return engine.GaveUp(err) }

// policyForms is what an error of ParsePolicy shows.
func policyForms() string {
	return algorithm.Examples() + ", or several with commas between them " +
		"(100/1m is 100 a minute; 20 5/10s is 20 at once, and 5 more every 10 seconds; " +
		"1000/month is by the calendar, of UTC if no time zone follows)"
}
