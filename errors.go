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

// These are errors of calls: compare with [errors.Is]. A denial is a [Result], not an error. Except perhaps with
// ErrOutcomeUnknown, nothing was taken.
var (
	// ErrInvalidKey: a key must be 1 to 512 bytes of UTF-8 without NUL, and fit the database's encoding. See
	// [KeyError].
	ErrInvalidKey = errors.New("ratelimit: invalid key")
	// ErrInvalidCost: the cost is too small, or RefundN asks for more than is left to give back. See [CostError].
	ErrInvalidCost = errors.New("ratelimit: invalid cost")
	// ErrNothingToRefund: the message has the possible reasons. A denial, a Peek and OnFailure's answers take nothing.
	ErrNothingToRefund = errors.New("ratelimit: nothing to refund: " +
		"the result took nothing from the database, all of it was given back, or its Receipt was handed on")
	// ErrNoReceipt: the result was read from JSON, which does not contain what the result took.
	ErrNoReceipt = errors.New("ratelimit: a result that was read from JSON cannot be given back; " +
		"send its Receipt too, and refund what ParseReceipt makes of it")
	// ErrCostExceedsLimit: waiting does not help, because the cost is above the policy's limit. See [CostError].
	ErrCostExceedsLimit = errors.New("ratelimit: cost exceeds the limit")
	// ErrOwesTooMuch: the key would owe more than 10 limits after the charge. See [ChargeError].
	ErrOwesTooMuch = errors.New("ratelimit: the key would owe too much")
	// ErrHoldUnknown: the database knows no such hold. It knows a hold until an hour after its settlement, or until 24
	// hours after its end.
	ErrHoldUnknown = errors.New("ratelimit: no such hold: it was never made, " +
		"was forgotten an hour after its settlement or a day after its end, was lost in a crash of the server, " +
		"or is in another schema or database; to count what was used, call Charge")
	// ErrHoldEnded: a hold that has ended or is settled cannot be extended.
	ErrHoldEnded = errors.New("ratelimit: the hold has ended, or is settled; " +
		"settle it all the same, and make another hold if more is to come")
	// ErrSlotReleased: the slot was released before.
	ErrSlotReleased = errors.New("ratelimit: the slot is released")
	// ErrSlotLost: the slot has ended, because it was not renewed in time, or an operator has taken it away. Somebody
	// else may have it.
	ErrSlotLost = errors.New("ratelimit: the slot is lost: it was not renewed in time, or somebody took it away; " +
		"stop the work, and acquire another slot")
	// ErrWouldExceedDeadline: the context ends before Wait's retry time. See [WaitError].
	ErrWouldExceedDeadline = errors.New("ratelimit: waiting would exceed the context's deadline")

	// ErrNotMigrated: the call did not find the tables or functions. Call migrations.Up, or set [ClientConfig].Schema.
	ErrNotMigrated = pg.ErrNotMigrated
	// ErrNewerSchema: a newer release removed functions that this release calls. Upgrade the application.
	ErrNewerSchema = pg.ErrNewerSchema
	// ErrNotPermitted: the database role may not execute the functions. GRANT EXECUTE on them.
	ErrNotPermitted = pg.ErrNotPermitted
	// ErrPreparedStatements: prepared statements do not reach Postgres, for example through PgBouncer in transaction
	// mode. Set default_query_exec_mode=exec in the connection string.
	ErrPreparedStatements = pg.ErrPreparedStatements
	// ErrSetup: the server refuses the log-in, the database, TLS or a setting; the application's pgx types or tracer
	// break arguments or results; or the application uses the connection concurrently. The message says which of these
	// is the case. With ErrOutcomeUnknown, the result was unreadable.
	ErrSetup = pg.ErrSetup
	// ErrSharded: the database is a proxy for shards, and cannot do what the call needs. AllowAll needs keys on one
	// shard: see [AllowAll]. For transactions, see [Limiter.WithTx].
	ErrSharded = pg.ErrSharded
	// ErrUnavailable: the database or the [Service] is unreachable, it refuses or ends connections, or the table is
	// locked.
	ErrUnavailable = pg.ErrUnavailable
	// ErrReadOnly: the database is a standby, or accepts no writes for another reason. It is an ErrUnavailable too.
	ErrReadOnly = pg.ErrReadOnly
	// ErrTimeout: the database did not decide within [ClientConfig].Timeout. If the request was sent, the error is an
	// ErrOutcomeUnknown too.
	ErrTimeout = pg.ErrTimeout
	// ErrKeyHeld: a transaction had the key's row locked for a quarter of the Timeout, for example after WithTx. On an
	// overloaded server, another call may have locked it. It is an ErrTimeout too, but OnFailure does not answer it.
	ErrKeyHeld = pg.ErrKeyHeld
	// ErrPoolExhausted: all connections of the pool were in use for the whole Timeout, often by transactions that call
	// Allow. Use WithTx in transactions, raise MaxConns, or call [OwnPool]. The error is an ErrTimeout too.
	ErrPoolExhausted = pg.ErrPoolExhausted
	// ErrOutcomeUnknown: after the request was sent, the connection broke or the Timeout ended, so the request may have
	// counted. The limiter never repeats such a call. WithTx does not return it, because the transaction is rolled
	// back.
	ErrOutcomeUnknown = pg.ErrOutcomeUnknown
)

// ConfigError says which field cannot work, and why. Calls return it for a nil transaction, an unknown Zone, or a Name
// that the encoding refuses.
type ConfigError struct {
	Field  string // such as "Config.Policy.Limit" or "cleanup.Config.Share", or an argument: "db", "tx"
	Reason string // completes the sentence that Field begins
}

func (e *ConfigError) Error() string { return "ratelimit: " + e.Field + " " + e.Reason }

// PolicyError says why [ParsePolicy] cannot read a text.
type PolicyError struct {
	Text string
	Err  error // a [*ConfigError] if the form is right and the numbers are wrong
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
	Least       int64 // the least possible cost: 1 for a Request, Hold, RefundN or Grant, otherwise 0
	refund      bool  // true if Limit is what is left to give back
	grant       bool  // true if Limit is the credit that a key can hold
	settle      bool  // true if Limit is what a settlement can count
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
	if e.settle {
		return fmt.Sprintf("%v: %d is more than a settlement can count, %d; settle less",
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

// ChargeError is an [ErrOwesTooMuch].
type ChargeError struct {
	Charge   int64
	Accepted int64 // the largest charge that would have been counted
}

func (e *ChargeError) Error() string {
	return fmt.Sprintf("%v: a charge of %d is too large, and %d would be accepted; charge less, or raise the limit",
		ErrOwesTooMuch, e.Charge, e.Accepted)
}

func (e *ChargeError) Unwrap() error { return ErrOwesTooMuch }

// HoldError says why a hold cannot be used as it was asked. Nothing was counted, and the hold stays as it is.
type HoldError struct {
	Reason string // completes a sentence
	// Limiter and HeldBy are set if [HoldFromText] got the text of a hold of another limiter. They are the names of
	// the first limiter that was passed, and of the one that the hold belongs to.
	Limiter, HeldBy string
}

func (e *HoldError) Error() string { return "ratelimit: " + e.Reason }

// RequestError says which request of an [AllowAll] or [HoldAll] is wrong.
type RequestError struct {
	Index int   // counted from 0
	Err   error // a [*KeyError] or a [*CostError] if the key or the cost is wrong
}

func (e *RequestError) Error() string {
	reason := strings.TrimPrefix(e.Err.Error(), "ratelimit: ")
	return fmt.Sprintf("ratelimit: request %d of the call: %s", e.Index, reason)
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

// RefundError says that the result is from a limiter with another name, table, schema, pool or connection. The database
// was not asked.
type RefundError struct{ Limiter, TakenBy string } // their names

func (e *RefundError) Error() string {
	if e.Limiter == e.TakenBy {
		return fmt.Sprintf("ratelimit: the result is of a limiter %q with another Durable, Schema, "+
			"pool or connection; refund it there", e.TakenBy)
	}
	return fmt.Sprintf("ratelimit: the result is of the limiter %q, and not of %q; refund it there",
		e.TakenBy, e.Limiter)
}

// ReceiptError says why [Limiter.ParseReceipt] cannot read a text.
type ReceiptError struct{ Reason string }

func (e *ReceiptError) Error() string {
	return "ratelimit: this text is no receipt: " + e.Reason + "; pass what Result.Receipt has returned"
}

// WaitError is an [ErrWouldExceedDeadline].
type WaitError struct {
	RetryAfter time.Duration // the shortest possible wait of this request, or of a request before it in the line
	Deadline   time.Time
}

func (e *WaitError) Error() string {
	return fmt.Sprintf("%v: nothing can be allowed within %v, and the deadline is %s",
		ErrWouldExceedDeadline, e.RetryAfter, e.Deadline.Format(time.RFC3339Nano))
}

func (e *WaitError) Unwrap() error { return ErrWouldExceedDeadline }

// StoreError is a failure of the database, of the connection to it, or of the caller's transaction.
type StoreError struct {
	Err error // wraps the driver's error, and those of ErrNotMigrated to ErrOutcomeUnknown that apply
}

func (e *StoreError) Error() string { return e.Err.Error() }

func (e *StoreError) Unwrap() error { return e.Err }

// publicError converts an error of package engine or pg into an exported one.
func publicError(err error) error {
	_, inner := errors.AsType[*pg.Error](err) // ReturnLeases joins several errors
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
	case errors.Is(err, engine.ErrDoorTx):
		return errServiceTx
	case errors.Is(err, engine.ErrHoldUnknown):
		return ErrHoldUnknown
	}
	if zone, ok := errors.AsType[*engine.ZoneError](err); ok {
		return &ConfigError{Field: "Config.Policy.Zone", Reason: fmt.Sprintf("is %q, %s", zone.Zone, zone.Why)}
	}
	return err
}

var (
	// errRefused is the error for a key that Go accepts and the database refuses.
	errRefused error = &KeyError{Reason: "cannot be stored in the encoding of the database, or of the connection, " +
		"or has more than 512 bytes in it; use ASCII, a database in UTF8, and client_encoding=UTF8"}
	// errNameRefused is the error of all calls of a limiter whose name the database refuses.
	errNameRefused error = &ConfigError{
		Field: "Config.Name",
		Reason: "cannot be stored in the encoding of the database, or of the connection, " +
			"or has more than 128 bytes in it; use ASCII, a database in UTF8, and client_encoding=UTF8",
	}
	// errMemoryTx is the error for a transaction that is used with a limiter in memory.
	errMemoryTx error = &ConfigError{
		Field: "tx",
		Reason: "cannot be used with a limiter in memory (package ratelimittest); " +
			"test what asks in a transaction on Postgres",
	}
	// errServiceTx is the error for a transaction that is used with a limiter that asks a Service.
	errServiceTx error = &ConfigError{
		Field: "tx",
		Reason: "cannot be used with a limiter that asks a Service, because the service uses connections of its own; " +
			"make a limiter with the pool for it, or call Allow before the transaction",
	}
)

// gaveUp returns the error for a caller whose context has ended with err.
func gaveUp(err error) error { return engine.GaveUp(err) }

// policyForms returns examples of policies, for the errors of ParsePolicy.
func policyForms() string {
	return algorithm.Examples() + ", or several with commas between them " +
		"(100/1m is 100 a minute; 20 5/10s is 20 at once, and 5 more every 10 seconds; " +
		"1000/month is by the calendar, of UTC if no time zone follows)"
}
