package pg_test

import (
	"errors"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pg"
)

// The messages were copied from PL/Proxy 2.10, with PgBouncer 1.18 between the proxy and a shard.
func TestErrorsOfAProxy(t *testing.T) {
	t.Parallel()

	unavailable, unknown := []error{pg.ErrUnavailable}, []error{pg.ErrUnavailable, pg.ErrOutcomeUnknown}
	for _, test := range []struct {
		code, message string
		kinds         []error
		direct        bool // whether the error did not come through PL/Proxy
	}{
		{"XX000", `PL/Proxy function rate_limit._split_shards(13): [limits_2] PQconnectPoll: connection to server at ` +
			`"127.0.0.1", port 6603 failed: Connection refused`, unavailable, false},
		{"XX000", `PL/Proxy function rate_limit._one(16): [limits_2] PQconnectPoll: connection to server at "127.0.0.1", ` +
			`port 6602 failed: FATAL:  password authentication failed for user "shard_app"`, unavailable, false},
		{"XX000", `PL/Proxy function rate_limit._one(16): [limits_2] PQconnectStart: out of memory`, unavailable, false},
		{"XX000", "PL/Proxy function rate_limit._one(16): [limits_2] PQconsumeInput: server closed the connection unexpectedly",
			unknown, false},
		{"57P01", "rate_limit._split_shards(13): [limits_2] REMOTE FATAL: terminating connection due to administrator command",
			unknown, false},
		{"57P01", "rate_limit._one(16): [limits_2] REMOTE ВАЖНО: закрытие подключения по команде администратора", unknown, false},
		{"XX001", "rate_limit._one(16): [limits_2] REMOTE PANIC: could not read block", unknown, false},
		{"57P05", "rate_limit._one(16): [limits_2] REMOTE FATAL: terminating connection due to idle-session timeout",
			unavailable, false},
		{"08P01", "rate_limit._one(16): [s2] REMOTE FATAL: query timeout", unknown, false},
		{"08P01", "rate_limit._one(16): [s2] REMOTE FATAL: query_wait_timeout", unavailable, false},
		{"08P01", "rate_limit._one(16): [s2] REMOTE FATAL: server login has been failing, try again later (server_login_retry)",
			unavailable, false},
		{"22023", "rate_limit.f(6): [limits_2] REMOTE ERROR: rate_limit: max_count 0, window_us 1 are not valid", nil, false},
		{"25006", "rate_limit.f(6): [limits_2] REMOTE ERROR: cannot execute UPDATE in a read-only transaction",
			[]error{pg.ErrUnavailable, pg.ErrReadOnly}, false},
		{"0A000", "rate_limit.f(6): [limits_2] REMOTE ERROR: cannot access temporary or unlogged relations during recovery",
			[]error{pg.ErrUnavailable, pg.ErrReadOnly}, false},
		{"53100", `rate_limit.f(6): [limits_2] REMOTE ERROR: could not extend file "pg_tblspc/1": No space left on device`,
			unavailable, false},
		{"55P03", "rate_limit.f(6): [limits_2] REMOTE ERROR: canceling statement due to lock timeout", []error{pg.ErrTimeout}, false},
		{"XX000", "rate_limit.f(6): [limits_2] REMOTE ERROR: cache lookup failed for function 1", []error{pg.ErrNotMigrated}, false},
		{"40001", "PL/Proxy function rate_limit.f(6): [limits_2] REMOTE ERROR: could not serialize access", nil, false},
		{"RLS03", "rate_limit.f(6): [limits_2] REMOTE ERROR: rate_limit: this database is shard 1 of 8, and was asked for " +
			"keys of shard 1 of 4", unavailable, false},

		{"XX000", "Pl/Proxy: invalid server option: connect_timeout", nil, true},
		{"08P01", "bind message supplies 1 parameters", []error{pg.ErrPreparedStatements}, true},
		{"57P01", "terminating connection due to administrator command", unavailable, true},
		{"0A000", "cannot access temporary or unlogged relations during recovery", nil, true},
		{"RLS01", "rate_limit: several shards", []error{pg.ErrSharded}, true},
		{"RLS02", "rate_limit: part of a transaction", []error{pg.ErrSharded}, true},
		{"RLS04", "rate_limit: a request on several shards", []error{pg.ErrSharded}, true},
	} {
		// PL/Proxy raises every error with the severity ERROR.
		err := pg.Translate(&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: test.code, Message: test.message}, true)
		for _, kind := range []error{
			pg.ErrNotMigrated, pg.ErrNewerSchema, pg.ErrNotPermitted, pg.ErrPreparedStatements, pg.ErrSetup, pg.ErrUnavailable,
			pg.ErrReadOnly, pg.ErrTimeout, pg.ErrPoolExhausted, pg.ErrKeyHeld, pg.ErrOutcomeUnknown, pg.ErrSharded,
		} {
			wants := false
			for _, want := range test.kinds {
				wants = wants || errors.Is(want, kind)
			}
			require.Equal(t, wants, errors.Is(err, kind), "%s %s: %v", test.code, test.message, kind)
		}
		require.Equal(t, !test.direct, pg.FromProxy(err), test.message)
		_, ok := errors.AsType[*pgconn.PgError](err)
		require.True(t, ok)
	}
}

func TestShards(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		code, detail string
		shards       int
		refused      bool
	}{
		{"RLS01", "4", 4, true}, {"RLS04", "16", 16, true}, {"RLS01", "", 0, true}, {"RLS01", "4 shards", 0, true},
		{"RLS02", "4", 0, false}, {"RLS03", "4", 0, false}, {"55P03", "4", 0, false},
	} {
		err := pg.Translate(&pgconn.PgError{SeverityUnlocalized: "ERROR", Code: test.code, Detail: test.detail}, true)
		shards, refused := pg.Shards(err)
		require.Equal(t, test.shards, shards)
		require.Equal(t, test.refused, refused)
		require.Equal(t, test.code == "RLS03", pg.OtherShard(err))
	}
	_, refused := pg.Shards(errors.New("broken"))
	require.False(t, refused)
	require.False(t, pg.OtherShard(nil))
}

// If a proxy canceled a statement, a shard may already have decided.
func TestCanceledWithUnknownOutcome(t *testing.T) {
	t.Parallel()
	err := &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "57014", Message: "canceling statement due to statement timeout"}
	require.True(t, pg.Canceled(pg.Translate(err, true)))
	require.False(t, pg.Canceled(pg.NewError(err, pg.ErrTimeout, pg.ErrOutcomeUnknown)))
}
