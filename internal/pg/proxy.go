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

// These are the SQLSTATEs that a proxy for shards raises. A shard itself raises otherShard.
const (
	severalShards = "RLS01" // the keys are on several shards; DETAIL is the number of shards
	inTransaction = "RLS02" // the call is part of the caller's transaction
	otherShard    = "RLS03" // the shard does not own a key
	acrossShards  = "RLS04" // one rate_limit_all request's keys are on several shards; DETAIL is the number of shards
)

// ErrSharded is a kind of an [Error].
var ErrSharded = errors.New(prefix + "the database is a proxy for shards")

// Shards tells whether a proxy has refused a statement because its keys are on several shards. Nothing was taken. The
// result shards is the number of shards, or 0 if the error does not contain this number.
func Shards(err error) (shards int, refused bool) {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	if !ok || pgErr.Code != severalShards && pgErr.Code != acrossShards {
		return 0, false
	}
	shards, _ = strconv.Atoi(pgErr.Detail) // 0 if DETAIL is not a number
	return shards, true
}

// OtherShard tells whether a shard has refused a statement because the shard does not own a key. Nothing was taken.
func OtherShard(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == otherShard
}

// FromProxy tells whether an error came through PL/Proxy. Such an error proves that the database is a proxy.
func FromProxy(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && (remote(pgErr) != pgErr || ofProxy(pgErr))
}

// shardsError translates an error that a proxy for shards raised. shardsError returns nil for any other error.
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

// remoteError matches the message of an error that PL/Proxy passes on from a shard, or from PgBouncer in front of the
// shard. PL/Proxy keeps the SQLSTATE and changes the severity to ERROR. The message begins with the function, the
// database and the original severity:
//
//	rate_limit.f(13): [limits_2] REMOTE FATAL: terminating connection due to administrator command
var remoteError = regexp.MustCompile(`(?s)^.*?\(\d+\): \[[^\]]*\] REMOTE (\pL+): (.*)$`)

// remote returns a shard's error as a direct connection to the shard would have returned it, except for fields such as
// Routine, which PL/Proxy drops. remote returns any other error unchanged.
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
	// The severity may be in any language, so SQLSTATEs of errors that end the connection count as FATAL too.
	if slices.Contains([]string{"FATAL", "PANIC"}, parts[1]) || strings.HasPrefix(err.Code, "57P") {
		there.SeverityUnlocalized = "FATAL"
	}
	return &there
}

// ofProxy tells whether PL/Proxy itself raised the error.
func ofProxy(err *pgconn.PgError) bool {
	return err.Code == "XX000" && strings.HasPrefix(err.Message, "PL/Proxy function ")
}

// proxyKinds returns the kinds of an error that came through PL/Proxy. The argument there is the result of remote. The
// result known is false if the error has the same kinds as an error from a database without a proxy.
func proxyKinds(err, there *pgconn.PgError) (kinds []error, known bool) {
	switch {
	case there == err && ofProxy(err):
		if strings.Contains(err.Message, "] PQconnectPoll: ") || strings.Contains(err.Message, "] PQconnectStart: ") {
			return []error{ErrUnavailable}, true // the shard refuses connections
		}
		return []error{ErrUnavailable, ErrOutcomeUnknown}, true
	case there == err:
		return nil, false
	case err.Code == "0A000" && // a statement read an unlogged table on a standby
		there.Message == "cannot access temporary or unlogged relations during recovery":
		return []error{ErrUnavailable, ErrReadOnly}, true
	case err.Code == "08P01" && there.SeverityUnlocalized == "FATAL" && // PgBouncer could not connect to the shard
		(strings.Contains(there.Message, "server_login_retry") || there.Message == "query_wait_timeout"):
		return []error{ErrUnavailable}, true
	}
	return nil, false
}
