package pg

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"
)

// What a proxy for shards says. Its functions raise the first two and the last, and a shard the third.
const (
	severalShards = "RLS01" // the keys are on several shards; DETAIL is how many shards there are
	inTransaction = "RLS02" // the call is part of the caller's transaction
	otherShard    = "RLS03" // the shard does not own a key
	acrossShards  = "RLS04" // the keys of one request of rate_limit_all are on several shards; DETAIL as above
)

// ErrSharded is one of the kinds of an [Error].
var ErrSharded = errors.New(prefix + "the database is a proxy for shards")

// Shards tells whether a proxy has refused a statement because its keys are on several shards. Nothing was taken.
// shards is how many there are, or 0 if that is unreadable.
func Shards(err error) (shards int, refused bool) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != severalShards && pgErr.Code != acrossShards {
		return 0, false
	}
	shards, _ = strconv.Atoi(pgErr.Detail) // 0 if it is no number
	return shards, true
}

// OtherShard tells whether a shard has refused a statement because it does not own a key. Nothing was taken.
func OtherShard(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == otherShard
}

// FromProxy tells whether an error came by PL/Proxy, so that the database is a proxy.
func FromProxy(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (remote(pgErr) != pgErr || ofProxy(pgErr))
}

// shardsError returns the error that is told for one of a proxy for shards, or nil if it is another one.
func shardsError(err *pgconn.PgError) *Error {
	switch err.Code {
	case severalShards, acrossShards:
		return NewError(err, ErrSharded)
	case inTransaction:
		return NewError(fmt.Errorf("it takes on its shards at once, and cannot take that back with the transaction; "+
			"call Allow before the transaction, or use a pool of the shard's own database: %w", err), ErrSharded)
	case otherShard:
		return NewError(fmt.Errorf("the shard's place does not fit the proxy's map, and nothing was taken; "+
			"run 'pgratelimit shard list': %w", err), ErrUnavailable)
	}
	return nil
}

// remoteError is how PL/Proxy passes on what a shard has told, or PgBouncer in front of it: with the SQLSTATE, but as
// an ERROR. Its function, the database and the severity come first:
//
//	rate_limit.f(13): [limits_2] REMOTE FATAL: terminating connection due to administrator command
var remoteError = regexp.MustCompile(`(?s)^.*?\(\d+\): \[[^\]]*\] REMOTE (\pL+): (.*)$`)

// remote returns the error of a shard as a connection of our own would have had it, and others as they are. What
// PL/Proxy does not pass on stays lost, such as the Routine.
func remote(err *pgconn.PgError) *pgconn.PgError {
	if !strings.Contains(err.Message, "] REMOTE ") {
		return err
	}
	parts := remoteError.FindStringSubmatch(err.Message)
	if parts == nil {
		return err
	}
	there := *err
	there.SeverityUnlocalized, there.Message = "ERROR", parts[2]
	// The word is in the language of the shard. The codes are of errors that end the connection.
	if slices.Contains([]string{"FATAL", "PANIC"}, parts[1]) || strings.HasPrefix(err.Code, "57P") {
		there.SeverityUnlocalized = "FATAL"
	}
	return &there
}

// ofProxy tells whether an error is PL/Proxy's own.
func ofProxy(err *pgconn.PgError) bool {
	return err.Code == "XX000" && strings.HasPrefix(err.Message, "PL/Proxy function ")
}

// proxyKinds tells what an error means that came by PL/Proxy, and whether it is one that a database without a proxy has
// not, or has with another SQLSTATE. there is what remote made of it.
func proxyKinds(err, there *pgconn.PgError) (kinds []error, known bool) {
	switch {
	case there == err && ofProxy(err):
		if strings.Contains(err.Message, "] PQconnectPoll: ") || strings.Contains(err.Message, "] PQconnectStart: ") {
			return []error{ErrUnavailable}, true // the shard refuses connections
		}
		return []error{ErrUnavailable, ErrOutcomeUnknown}, true
	case there == err:
		return nil, false
	case err.Code == "0A000" && // a read of an unlogged table on a standby
		there.Message == "cannot access temporary or unlogged relations during recovery":
		return []error{ErrUnavailable, ErrReadOnly}, true
	case err.Code == "08P01" && there.SeverityUnlocalized == "FATAL" && // of PgBouncer, which had no connection for it
		(strings.Contains(there.Message, "server_login_retry") || there.Message == "query_wait_timeout"):
		return []error{ErrUnavailable}, true
	}
	return nil, false
}
