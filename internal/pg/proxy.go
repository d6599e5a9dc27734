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

// The SQLSTATEs of a proxy for shards. A shard raises otherShard, and the proxy's functions raise the others.
const (
	severalShards = "RLS01" // the keys are on several shards; DETAIL has the number of shards
	inTransaction = "RLS02" // the call is part of the caller's transaction
	otherShard    = "RLS03" // the shard does not own a key
	acrossShards  = "RLS04" // the keys of one request of rate_limit_all are on several shards; DETAIL as for RLS01
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

// FromProxy tells whether an error came through PL/Proxy, which proves that the database is a proxy.
func FromProxy(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (remote(pgErr) != pgErr || ofProxy(pgErr))
}

// shardsError translates an error of a proxy for shards. It returns nil for all others.
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

// remoteError matches the message in which PL/Proxy passes on an error of a shard, or of PgBouncer in front of it. The
// SQLSTATE stays, but the severity becomes ERROR. The function, the database and the original severity come first:
//
//	rate_limit.f(13): [limits_2] REMOTE FATAL: terminating connection due to administrator command
var remoteError = regexp.MustCompile(`(?s)^.*?\(\d+\): \[[^\]]*\] REMOTE (\pL+): (.*)$`)

// remote returns an error of a shard as a direct connection to the shard would have had it. PL/Proxy does not pass on
// some fields, such as the Routine, so they are missing. All other errors stay as they are.
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
	// The severity is in the language of the shard, so the codes of errors that end the connection count too.
	if slices.Contains([]string{"FATAL", "PANIC"}, parts[1]) || strings.HasPrefix(err.Code, "57P") {
		there.SeverityUnlocalized = "FATAL"
	}
	return &there
}

// ofProxy tells whether PL/Proxy itself has raised an error.
func ofProxy(err *pgconn.PgError) bool {
	return err.Code == "XX000" && strings.HasPrefix(err.Message, "PL/Proxy function ")
}

// proxyKinds returns the kinds of an error that came through PL/Proxy. known tells whether it has another meaning than
// the same error from a database without a proxy. there is the result of remote.
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
	case err.Code == "08P01" && there.SeverityUnlocalized == "FATAL" && // PgBouncer had no connection to the shard
		(strings.Contains(there.Message, "server_login_retry") || there.Message == "query_wait_timeout"):
		return []error{ErrUnavailable}, true
	}
	return nil, false
}
