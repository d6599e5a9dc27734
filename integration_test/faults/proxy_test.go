package faults

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

func throughProxy(t *testing.T, mode pgx.QueryExecMode) (*wireProxy, *pgtest.DB, *pgxpool.Pool) {
	t.Helper()
	db := pgtest.New(t)
	proxy := newWireProxy(t, db.URL)
	return proxy, db, newPool(t, proxy.url, func(config *pgxpool.Config) {
		config.ConnConfig.DefaultQueryExecMode = mode
		// Without this, a ping of the pool would be the next statement.
		config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	})
}

// wireFault is a fault, with the answer that the caller must get and the usage that the database must have.
type wireFault struct {
	fault
	kinds []error
	taken int64
}

// wireFaults returns all faults.
func wireFaults(mode pgx.QueryExecMode) map[string]wireFault {
	unknown := []error{ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown}
	timeout := []error{ratelimit.ErrTimeout, ratelimit.ErrOutcomeUnknown}
	faults := map[string]wireFault{
		"cut before the first byte of the request": {fault{request: anyRequest}, unknown, 0},
		"cut before the first byte of the reply":   {fault{reply: anyReply}, unknown, 1},
		"cut before the decision":                  {fault{reply: replyIs[*pgproto3.DataRow]}, unknown, 1},
		"cut between decision and CommandComplete": {fault{reply: replyIs[*pgproto3.CommandComplete]}, unknown, 1},
		"cut between CommandComplete and ReadyForQuery": {
			fault{reply: replyIs[*pgproto3.ReadyForQuery]}, unknown, 1,
		},
		"reply late":         {fault{reply: anyReply, then: late}, nil, 1},
		"ReadyForQuery late": {fault{reply: replyIs[*pgproto3.ReadyForQuery], then: late}, nil, 1},
	}
	if mode == pgx.QueryExecModeCacheStatement { // in the other modes, the same result takes as long
		faults["request swallowed"] = wireFault{fault{request: anyRequest, then: swallow}, timeout, 0}
		faults["reply swallowed"] = wireFault{fault{reply: anyReply, then: swallow}, timeout, 1}
		faults["ReadyForQuery swallowed"] = wireFault{
			fault{reply: replyIs[*pgproto3.ReadyForQuery], then: swallow},
			timeout,
			1,
		}
	}
	if mode != pgx.QueryExecModeSimpleProtocol {
		// Without Sync, the statement is executed, and rolled back when the connection ends.
		faults["cut before Sync"] = wireFault{fault{request: requestIs[*pgproto3.Sync]}, unknown, 0}
	}
	return faults
}

// The test checks the caller's answer and the usage, that the database was asked once, and that the next call works.
func TestBrokenConnections(t *testing.T) {
	t.Parallel()

	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		for name, c := range wireFaults(mode) {
			t.Run(mode.String()+": "+name, func(t *testing.T) {
				t.Parallel()
				proxy, db, pool := throughProxy(t, mode)
				config := ratelimit.Config{
					Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}, Durable: true,
				}
				limiter := limitertest.New(t, pool, config)
				_, err := limiter.Allow(t.Context(), "key") // prepares the statement
				require.NoError(t, err)

				var clientConfig ratelimit.ClientConfig
				if c.then == swallow {
					clientConfig.Timeout = 2 * time.Second
				}
				failing := limitertest.New(t, pool, config, clientConfig)
				moment := make(chan struct{})
				c.until = moment
				time.AfterFunc(50*time.Millisecond, func() { close(moment) })
				proxy.fail(&c.fault)
				result, err := failing.Allow(t.Context(), "key")
				require.Equal(t, 1, proxy.sent())
				if c.kinds == nil {
					require.NoError(t, err)
					require.EqualValues(t, 8, result.Remaining)
				} else {
					limitertest.RequireKinds(t, err, c.kinds...)
					require.Zero(t, result)
				}
				want := 1 + c.taken
				require.Equal(t, want, counted(t, db.Pool, true)["key"])

				result, err = limiter.Allow(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, 10-want-1, result.Remaining)
			})
		}
	}
}

// A connection breaks while the statement is prepared. Nothing was taken. A retry takes once.
func TestBrokenConnectionWhilePreparing(t *testing.T) {
	t.Parallel()

	for _, f := range []fault{{request: anyRequest, preparing: true}, {reply: anyReply, preparing: true}} {
		proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
		})
		proxy.fail(&f)
		_, err := limiter.Allow(t.Context(), "key")
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		t.Log(err)
		require.Zero(t, proxy.sent())
		require.Empty(t, counted(t, db.Pool, false))
		result, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 9, result.Remaining)
	}
}

// This is a negative control: if a client repeats uncertain statements, the proxy and the table show the repetition.
func TestBlindRetryIsCaught(t *testing.T) {
	t.Parallel()

	proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
	})
	proxy.fail(&fault{reply: anyReply})
	_, err := limiter.Allow(t.Context(), "key")
	require.Error(t, err)
	_, err = limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.Equal(t, 2, proxy.sent())
	require.EqualValues(t, 2, counted(t, db.Pool, false)["key"])
}

// All callers of a batch learn that its outcome is unknown. All other callers get their decision.
func TestBrokenConnectionOfABatch(t *testing.T) {
	t.Parallel()

	for name, c := range map[string]struct {
		fault         fault
		unknownCounts int64
	}{
		"before the request":                        {fault{request: anyRequest}, 0},
		"before the reply":                          {fault{reply: anyReply}, 1},
		"between CommandComplete and ReadyForQuery": {fault{reply: replyIs[*pgproto3.ReadyForQuery]}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
			limiter := limitertest.New(t, pool, ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: 1000, Window: year},
			}, ratelimit.ClientConfig{MaxInFlight: 1})
			// While the reply to the first call is delayed, all other calls queue. One statement sends them all, and
			// its connection breaks.
			release := make(chan struct{})
			proxy.fail(&fault{reply: anyReply, then: late, until: release}, &c.fault)
			const callers = 40
			var wg sync.WaitGroup
			errs := make([]error, callers)
			call := func(i int) { wg.Go(func() { _, errs[i] = limiter.Allow(t.Context(), "key") }) }
			call(0)
			testkit.WaitUntil(t, func() bool { return proxy.sent() == 1 })
			for i := 1; i < callers; i++ {
				call(i)
			}
			close(release)
			wg.Wait()

			var granted, unknown int64
			for _, err := range errs {
				if err == nil {
					granted++
					continue
				}
				limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown)
				unknown++
			}
			require.Positive(t, unknown)
			require.Equal(t, granted+c.unknownCounts*unknown, counted(t, db.Pool, false)["key"])
			_, err := limiter.Allow(t.Context(), "key")
			require.NoError(t, err)
		})
	}
}

// Everything on a connection arrives byte by byte.
func TestOneByteAtATime(t *testing.T) {
	t.Parallel()

	proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	proxy.trickle = true
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
	})
	for want := range int64(10) {
		result, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, 9-want, result.Remaining)
	}
	result, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.NoError(t, limiter.Reset(t.Context(), "key"))
	require.Empty(t, counted(t, db.Pool, false))
}

// A connection that was cut while idle looks alive until something is sent on it. The outcome of the statement sent
// then is unknown.
func TestConnectionCutAtRest(t *testing.T) {
	t.Parallel()

	proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
	})
	_, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	proxy.cutAll()
	_, err = limiter.Allow(t.Context(), "key")
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown)
	require.EqualValues(t, 1, counted(t, db.Pool, false)["key"])
	result, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
}

// The connection of the caller's transaction breaks. The units that the limiter took in it are rolled back.
func TestBrokenConnectionOfATransaction(t *testing.T) {
	t.Parallel()

	for _, f := range []fault{{request: anyRequest}, {reply: anyReply}, {reply: replyIs[*pgproto3.ReadyForQuery]}} {
		proxy, db, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
		limiter := limitertest.New(t, pool, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
		})
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
		err = pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			proxy.fail(&f)
			_, err := limiter.WithTx(tx).Allow(t.Context(), "key")
			return err
		})
		limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable)
		require.Equal(t, 1, proxy.sent())
		// The server may notice the broken connection a moment later.
		result, err := limitertest.New(t, db.Pool, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 10, Window: year},
		}, ratelimit.ClientConfig{Timeout: 4 * amply}).
			Allow(t.Context(), "key")
		require.NoError(t, err)
		require.EqualValues(t, 8, result.Remaining)
	}
}

// If the reply to a reset is lost, the key is reset nevertheless, and its remembered denials are dropped.
func TestBrokenConnectionOfAReset(t *testing.T) {
	t.Parallel()

	proxy, _, pool := throughProxy(t, pgx.QueryExecModeCacheStatement)
	limiter := limitertest.New(t, pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: year},
	}, ratelimit.ClientConfig{DenialMaxAge: amply})
	for range 2 {
		_, err := limiter.Allow(t.Context(), "key")
		require.NoError(t, err)
	}
	proxy.fail(&fault{reply: anyReply})
	err := limiter.Reset(t.Context(), "key")
	require.Equal(t, 1, proxy.sent())
	limitertest.RequireKinds(t, err, ratelimit.ErrUnavailable, ratelimit.ErrOutcomeUnknown)
	result, err := limiter.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.True(t, result.Allowed)
}
