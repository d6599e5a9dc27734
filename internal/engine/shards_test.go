package engine_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Each key gets exactly its limit while the client learns the number of shards, and after this number grows.
func TestShardedClientCountsExactly(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	const callers, keys, limit, tries = 64, 200, 3, 5
	p := newProxy(t, 2)
	var refused atomic.Int64
	var perShard [8]atomic.Int64
	client := p.client(t, ratelimit.ClientConfig{MaxBatch: 50, Observer: &ratelimit.Observer{Statement: func(e ratelimit.StatementEvent) {
		if _, several := pg.Shards(e.Err); several {
			refused.Add(1)
		} else if e.Err == nil {
			perShard[e.Shard].Add(1)
		}
	}}})
	for round, policy := range []ratelimit.Policy{
		ratelimit.SlidingWindow{Limit: limit, Window: limitertest.Year},
		ratelimit.All(ratelimit.FixedWindow{Limit: limit, Window: limitertest.Year}, ratelimit.FixedWindow{Limit: 2 * limit, Window: 2 * limitertest.Year}),
		ratelimit.SlidingWindow{Limit: limit, Window: limitertest.Year},
	} {
		config := ratelimit.Config{Name: fmt.Sprint("round ", round), Policy: policy, NoDenialCache: true}
		l := limitertest.Of(t, client, config)
		var each [keys]atomic.Int64
		var next atomic.Int64
		var once sync.Once
		testkit.Together(callers, func(int) {
			for i := next.Add(1) - 1; i < keys*tries; i = next.Add(1) - 1 {
				if round == 1 && i == keys*tries/2 {
					once.Do(func() { p.grow(t, 8) })
				}
				result, err := l.Allow(t.Context(), fmt.Sprint("user:", i%keys))
				require.NoError(t, err)
				if result.Allowed {
					each[i%keys].Add(1)
				}
			}
		})
		stored := pgtest.StoredRows(t, p.Pool, false)
		for i := range each {
			require.EqualValues(t, limit, each[i].Load(), i)
			require.EqualValues(t, limit, stored[modeltest.RowID{Name: config.Name, Key: fmt.Sprint("user:", i)}].Count)
		}
	}
	require.Equal(t, 8, limitertest.EngineOf(client).Queues.Shards())
	require.Positive(t, refused.Load())
	for shard := range perShard {
		require.Positive(t, perShard[shard].Load(), shard)
	}
	for _, q := range *limitertest.EngineOf(client).Queues.All.Load() {
		require.Zero(t, q.Waiting)
	}

	before := refused.Load()
	p.grow(t, 4) // a smaller number, which another proxy may know
	limitertest.Of(t, client, ratelimit.Config{Name: "shrunk", Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}})
	learns(t, client, 8)
	require.Equal(t, before, refused.Load(), "who knows of more shards is never refused")
}

// If a shard is away, only this shard's breaker opens. Calls for keys of other shards are decided.
func TestDeadShardHoldsUpItsKeysOnly(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	p := newProxy(t, 2)
	p.fail(t, 1, "XX000", `PL/Proxy function proxy._f(13): [limits_1] PQconnectPoll: connection refused`, "", "%")
	journal := &testkit.Journal{}
	var mu sync.Mutex
	var events []ratelimit.BreakerEvent
	client := p.client(t, ratelimit.ClientConfig{Logger: journal.Logger(), Observer: &ratelimit.Observer{Breaker: func(e ratelimit.BreakerEvent) {
		mu.Lock()
		defer mu.Unlock()
		events = append(events, e)
	}}})
	policy := ratelimit.SlidingWindow{Limit: 10, Window: limitertest.Year}
	fails := limitertest.Of(t, client, ratelimit.Config{Name: "fails", Policy: policy})
	closes := limitertest.Of(t, client, ratelimit.Config{Name: "closes", Policy: policy, OnFailure: ratelimit.FailClosed()})
	dead, alive := keysOf(1, 2, 100), keysOf(0, 2, 100)

	// One failed call is enough to learn the number of shards, before the breaker opens for all keys.
	_, err := fails.Allow(t.Context(), dead[0])
	require.ErrorIs(t, err, ratelimit.ErrUnavailable)
	require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
	require.Equal(t, 2, limitertest.EngineOf(client).Queues.Shards())

	testkit.Together(100, func(i int) {
		for _, l := range []*ratelimit.Limiter{fails, closes} {
			result, err := l.Allow(t.Context(), alive[i])
			require.NoError(t, err)
			require.True(t, result.Allowed)
			require.Equal(t, ratelimit.SourceDatabase, result.Source)
		}
		_, err := fails.Allow(t.Context(), dead[i])
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
		result, err := closes.Allow(t.Context(), dead[i])
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedClosed, result.Source)
	})
	all := *limitertest.EngineOf(client).Queues.All.Load()
	require.False(t, all[0].Batcher.Breaker.IsOpen(engine.KindEphemeral))
	require.True(t, all[1].Batcher.Breaker.IsOpen(engine.KindEphemeral))
	mu.Lock()
	told := slices.Clone(events)
	mu.Unlock()
	require.NotEmpty(t, told)
	for _, e := range told {
		require.Equal(t, 1, e.Shard)
	}
	require.Contains(t, journal.String(), "shard=1")
	require.NotContains(t, journal.String(), dead[0])

	pgtest.Exec(t, p.Pool, "TRUNCATE proxy.broken")
	testkit.WaitUntil(t, func() bool {
		result, err := closes.Allow(t.Context(), dead[0])
		require.NoError(t, err)
		return result.Source == ratelimit.SourceDatabase
	})
}

// An AllowAll with keys of several shards is refused, and takes nothing, whether the client knows the shards or not.
// The refusal does not affect other calls.
func TestAllowAllAcrossShards(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	p := newProxy(t, 4)
	config := ratelimit.Config{Name: "set", Policy: ratelimit.FixedWindow{Limit: 1000, Window: limitertest.Year}}
	here, there := keysOf(0, 4, 100), keysOf(3, 4, 1)[0]
	conn := pgtest.Connect(t, p.DB)
	var statements atomic.Int64
	observer := &ratelimit.Observer{Statement: func(ratelimit.StatementEvent) { statements.Add(1) }}
	for title, client := range map[string]*ratelimit.Client{
		"pool": p.client(t, ratelimit.ClientConfig{Observer: observer}), "connection": limitertest.NewClient(t, conn, ratelimit.ClientConfig{Schema: "proxy"}),
	} {
		l := limitertest.Of(t, client, config)
		across := func() error {
			_, err := ratelimit.AllowAll(t.Context(), l.Request(here[0], 1), l.Request(here[1], 1), l.Request(there, 1))
			return err
		}
		for _, when := range []string{"before the shards are known", "then"} {
			err := across()
			request, ok := errors.AsType[*ratelimit.RequestError](err)
			require.True(t, ok, "%s, %s: %v", title, when, err)
			require.Equal(t, 2, request.Index)
			require.ErrorIs(t, err, ratelimit.ErrSharded)
			require.Equal(t, "sharded", ratelimit.ErrorKind(err))
			require.ErrorContains(t, err, "{user:1}:minute")
			require.NotContains(t, err.Error(), there)
		}
		require.LessOrEqual(t, statements.Load(), int64(1), "the second one is refused before it is queued")
		require.Empty(t, pgtest.StoredRows(t, p.Pool, false))
		result, err := ratelimit.AllowAll(t.Context(), l.Request("{a}:minute", 1), l.Request("{a}:day", 1), l.Request("a", 1))
		require.NoError(t, err)
		require.True(t, result.Allowed)
		pgtest.Exec(t, p.Pool, "TRUNCATE rate_limit_ephemeral")
		statements.Store(0)
	}

	client := p.client(t, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, config)
	testkit.Together(100, func(i int) {
		second := l.Request(here[i]+"{"+here[i]+"}", 1)
		if i == 50 {
			second = l.Request(there, 1)
		}
		result, err := ratelimit.AllowAll(t.Context(), l.Request(here[i], 1), second)
		if i == 50 {
			require.ErrorIs(t, err, ratelimit.ErrSharded)
			return
		}
		if shardkey.Of(here[i]+"{"+here[i]+"}", 4) == 0 {
			require.NoError(t, err)
			require.True(t, result.Allowed)
		}
	})
	require.NotContains(t, pgtest.StoredRows(t, p.Pool, false), modeltest.RowID{Name: "set", Key: there})
}

// A proxy refuses calls in transactions, because a rollback would not undo what a shard has committed. Calls on a
// single connection outside of a transaction still work.
func TestTransactionsOverShardsAreRefused(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	p := newProxy(t, 2)
	config := ratelimit.Config{Name: "tx", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}}
	clientConfig := ratelimit.ClientConfig{Schema: "proxy"}
	l := limitertest.New(t, p.pool, config, clientConfig)
	before, err := l.Allow(t.Context(), "key")
	require.NoError(t, err)
	requireRefused := func(err error) {
		t.Helper()
		require.ErrorIs(t, err, ratelimit.ErrSharded)
		require.ErrorContains(t, err, "call Allow before the transaction, or use a pool of the shard's own database")
	}
	inTx := func(call func(l *ratelimit.Limiter, tx ratelimit.DBTX) error) {
		t.Helper()
		tx := pgtest.Begin(t, p.DB)
		defer func() { _ = tx.Rollback(context.Background()) }()
		requireRefused(call(l, tx))
		conn := pgtest.Connect(t, p.DB)
		pgtest.Exec(t, conn, "BEGIN")
		requireRefused(call(limitertest.New(t, conn, config, clientConfig), nil))
	}
	inTx(func(l *ratelimit.Limiter, db ratelimit.DBTX) error {
		if db == nil {
			_, err := l.Allow(t.Context(), "key")
			return err
		}
		_, err := limitertest.New(t, db, config, clientConfig).Allow(t.Context(), "key")
		return err
	})
	for name, call := range map[string]func() error{
		"AllowTx":  func() error { _, err := l.WithTx(pgtest.Begin(t, p.DB)).Allow(t.Context(), "key"); return err },
		"AllowNTx": func() error { _, err := l.WithTx(pgtest.Begin(t, p.DB)).AllowN(t.Context(), "key", 0); return err },
		"RefundTx": func() error { _, err := l.WithTx(pgtest.Begin(t, p.DB)).Refund(t.Context(), before); return err },
		"GrantTx":  func() error { _, err := l.WithTx(pgtest.Begin(t, p.DB)).Grant(t.Context(), "key", 1); return err },
		"ResetTx":  func() error { return l.WithTx(pgtest.Begin(t, p.DB)).Reset(t.Context(), "key") },
		"AllowAllTx": func() error {
			_, err := limitertest.AllowAllTx(t.Context(), pgtest.Begin(t, p.DB), l.Request("key", 1))
			return err
		},
	} {
		t.Run(name, func(*testing.T) { requireRefused(call()) })
	}
	conn := pgtest.Connect(t, p.DB)
	pgtest.Exec(t, conn, "BEGIN")
	requireRefused(limitertest.New(t, conn, config, clientConfig).Reset(t.Context(), "key"))
	pgtest.Exec(t, conn, "ROLLBACK")

	single := limitertest.New(t, conn, config, clientConfig)
	result, err := single.Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
	require.NoError(t, single.Reset(t.Context(), "key"))
}

// While a shard is split, it may refuse its keys for a moment. The requests are sent again.
func TestRefusalsOfADividedShard(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	p := newProxy(t, 4)
	pgtest.Exec(t, p.Pool, "UPDATE proxy.map SET refusals = 5")
	config := ratelimit.Config{Name: "divided", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}}
	client := p.client(t, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, config)
	const calls = 20
	testkit.Together(calls, func(int) {
		_, err := l.Allow(t.Context(), "key")
		require.NoError(t, err)
	})
	require.EqualValues(t, 10, limitertest.Taken(t, p.Pool, config, "key"))
	require.Greater(t, pgtest.Scalar[int64](t, p.Pool, "SELECT last_value FROM proxy.refused"), int64(5))
	require.False(t, limitertest.EngineOf(client).Queues.First().Batcher.Breaker.IsOpen(engine.KindEphemeral))

	pgtest.Exec(t, p.Pool, "ALTER SEQUENCE proxy.refused RESTART")
	require.NoError(t, l.Reset(t.Context(), "key"))
	require.Zero(t, limitertest.Taken(t, p.Pool, config, "key"))

	pgtest.Exec(t, p.Pool, "ALTER SEQUENCE proxy.refused RESTART")
	clientConfig := ratelimit.ClientConfig{Schema: "proxy"}
	_, err := limitertest.New(t, pgtest.Connect(t, p.DB), config, clientConfig).Allow(t.Context(), "key")
	require.ErrorIs(t, err, ratelimit.ErrUnavailable)
	require.ErrorContains(t, err, "run 'pgratelimit shard list'")
}

// While its map changes, a proxy may refuse a statement for keys of a single shard. If a proxy uses another hash, it
// always refuses such statements. A refused call waits no longer than Timeout.
func TestProxyThatRefusesKeysOfOneShard(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")
	for _, refusals := range []int{3, 1000} {
		synctest.Test(t, func(t *testing.T) {
			db, asked := limitertest.NewModelDB(), 0
			db.Set(func(context.Context) error {
				if asked++; asked <= refusals {
					return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "RLS01", Detail: "2"}
				}
				return nil
			})
			client := limitertest.NewClient(t, db, ratelimit.ClientConfig{Timeout: time.Second})
			l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly})
			began := time.Now()
			_, err := l.Allow(t.Context(), keysOf(0, 2, 1)[0])
			if refusals == 3 {
				require.NoError(t, err)
				require.Equal(t, 3*engine.MapPause, time.Since(began))
				return
			}
			require.ErrorIs(t, err, ratelimit.ErrSharded)
			require.LessOrEqual(t, time.Since(began), time.Second)
			require.Zero(t, db.Taken())
		})
	}
}

// If a shard always refuses its keys, calls wait no longer than Timeout, and the requests are not sent for ever.
func TestShardThatDoesNotFitTheMap(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Set(func(context.Context) error {
			return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "RLS03", Message: "rate_limit: this database is shard 1 of 8"}
		})
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{Timeout: time.Second})
		fails := limitertest.Of(t, client, ratelimit.Config{Name: "fails", Policy: limitertest.Hourly})
		opens := limitertest.Of(t, client, ratelimit.Config{Name: "opens", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()})
		began := time.Now()
		testkit.Together(10, func(int) {
			_, err := fails.Allow(t.Context(), "key")
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			require.NotErrorIs(t, err, ratelimit.ErrOutcomeUnknown)
			require.ErrorContains(t, err, "run 'pgratelimit shard list'")
			require.ErrorContains(t, err, "shard 1 of 8")
		})
		took := time.Since(began)
		require.Greater(t, took, 900*time.Millisecond)
		require.LessOrEqual(t, took, time.Second)
		require.LessOrEqual(t, db.Statements(), 10*(int(took/engine.MapPause)+1), "each call with a pause")

		require.True(t, limitertest.EngineOf(client).Batcher.Breaker.IsOpen(engine.KindEphemeral))
		result, err := opens.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceFailedOpen, result.Source)
		require.Equal(t, took, time.Since(began))

		reset := time.Now()
		require.ErrorContains(t, fails.Reset(t.Context(), "key"), "shard 1 of 8")
		require.Equal(t, time.Second, time.Since(reset))

		db.Set(nil)
		limitertest.Elapse(engine.BreakerPause)
		result, err = opens.Allow(t.Context(), "key")
		require.NoError(t, err)
		require.Equal(t, ratelimit.SourceDatabase, result.Source)
	})
}

// An impossible number of shards in a proxy's error is ignored.
func TestUnbelievableProxies(t *testing.T) {
	t.Parallel()

	p := newProxy(t, 2)
	key := keysOf(0, 2, 1)[0]
	for _, detail := range []string{"3", "0", "1", "2048", "-2", "", "many"} {
		pgtest.Exec(t, p.Pool, "TRUNCATE proxy.broken")
		p.fail(t, 0, "RLS01", "rate_limit: several shards", detail, "%")
		client := p.client(t, ratelimit.ClientConfig{})
		_, err := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}).Allow(t.Context(), key)
		require.ErrorIs(t, err, ratelimit.ErrSharded, detail)
		require.ErrorContains(t, err, "RLS01")
		_, err = ratelimit.AllowAll(t.Context(), limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}).Request(key, 1))
		require.ErrorContains(t, err, "RLS01")
		require.Equal(t, 1, limitertest.EngineOf(client).Queues.Shards(), detail)
	}
}

// If a proxy cancels a statement, the shard may have decided the requests. If the shard itself cancels the statement,
// nothing was taken.
func TestStatementsThatAProxyCancels(t *testing.T) {
	t.Parallel()
	for message, unknown := range map[string]bool{
		"canceling statement due to statement timeout":                            true,
		"f(13): [limits_1] REMOTE ERROR: canceling statement due to user request": false,
	} {
		synctest.Test(t, func(t *testing.T) {
			db, asked := limitertest.NewModelDB(), 0
			db.Set(func(context.Context) error {
				if asked++; asked == 1 {
					return &pgconn.PgError{SeverityUnlocalized: "ERROR", Code: "57014", Message: message}
				}
				return nil
			})
			client := limitertest.NewClient(t, db, ratelimit.ClientConfig{})
			limitertest.EngineOf(client).Queues.Learn(2)
			_, err := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}).Allow(t.Context(), "key")
			require.Equal(t, unknown, errors.Is(err, ratelimit.ErrOutcomeUnknown), err)
			require.Equal(t, unknown, asked == 1)
		})
	}
}

// Leased units of keys on several shards go back to their shards.
func TestLeasesGoBackOverShards(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	const keys, calls = 40, 20
	p := newProxy(t, 4)
	var sum struct {
		sync.Mutex
		ratelimit.LeaseEvent
	}
	var refused atomic.Int64
	client := p.client(t, ratelimit.ClientConfig{Observer: &ratelimit.Observer{
		Lease: func(e ratelimit.LeaseEvent) {
			sum.Lock()
			defer sum.Unlock()
			sum.Taken, sum.Returned, sum.Stranded = sum.Taken+e.Taken, sum.Returned+e.Returned, sum.Stranded+e.Stranded
		},
		Statement: func(e ratelimit.StatementEvent) {
			if _, several := pg.Shards(e.Err); several {
				refused.Add(1)
			}
		},
	}})
	learns(t, client, 4)
	refused.Store(0)
	config := ratelimit.Config{Name: "lease", Policy: ratelimit.FixedWindow{Limit: 100_000, Window: limitertest.Year}, Lease: &ratelimit.Lease{MaxShare: 0.01}}
	l := limitertest.Of(t, client, config)
	testkit.Together(keys, func(i int) {
		for range calls {
			_, err := l.Allow(t.Context(), fmt.Sprint("user:", i))
			require.NoError(t, err)
		}
	})
	require.NoError(t, limitertest.Client(l).ReturnLeases(t.Context()))
	sum.Lock()
	defer sum.Unlock()
	require.Positive(t, sum.Returned)
	require.Zero(t, sum.Stranded)
	require.Zero(t, refused.Load(), "each goes to the queue of its shard")
	for i := range keys {
		require.EqualValues(t, calls, limitertest.Taken(t, p.Pool, config, fmt.Sprint("user:", i)))
	}
}

// While the client learns the number of shards, a held key does not delay calls for other keys.
func TestHeldKeyOfAShard(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	p := newProxy(t, 4)
	config := ratelimit.Config{Name: "held", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, NoDenialCache: true}
	client := p.client(t, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, config)
	held := keysOf(2, 4, 1)[0]
	_, err := l.Allow(t.Context(), held)
	require.NoError(t, err)
	tx := limitertest.Hold(t, p.DB, config, held)
	wait := testkit.Later(func() (ratelimit.Result, error) { return l.Allow(t.Context(), held) })
	pgtest.WaitUntilBlocked(t, p.Pool, 1)
	var others sync.WaitGroup
	for _, key := range append(keysOf(0, 4, 50), keysOf(2, 4, 50)[1:]...) {
		others.Go(func() {
			result, err := l.Allow(t.Context(), key)
			require.NoError(t, err)
			require.True(t, result.Allowed)
		})
	}
	others.Wait()
	require.Equal(t, 4, limitertest.EngineOf(client).Queues.Shards())
	require.NoError(t, tx.Rollback(t.Context()))
	result, err := wait()
	require.NoError(t, err)
	require.EqualValues(t, 8, result.Remaining)
	require.EqualValues(t, 2, limitertest.Taken(t, p.Pool, config, held))
}

// If a shard fails to decide a shadow, the request itself is not sent again, because the shard has already committed
// the request's decision.
func TestShadowOfAShard(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	p := newProxy(t, 2)
	pgtest.Exec(t, p.Pool, limitertest.AddPolicy, "api", "", "", "shadow", "fixed 5/1h")
	policies := limitertest.RunningPolicies(t, p.Pool, ratelimit.PoliciesConfig{})
	limitertest.WaitUntilKnown(t, policies, p.Pool)
	l := limitertest.Of(t, p.client(t, ratelimit.ClientConfig{}), ratelimit.Config{Name: "api", Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, Policies: policies})
	for shard, message := range []string{"f(13): [limits_0] REMOTE ERROR: disk full", "disk full"} {
		p.fail(t, shard, "53100", message, "", "api/shadow")
	}
	asked := 0
	ask := func(key string) (granted int64) {
		r := newRequest(l, key, 1)
		r.Shadow = newShadow(l, limitertest.View(l).Shadow(limitertest.Model(l.Config().Policy), key), key, 1)
		asked++
		require.NoError(t, limitertest.Engine(l).Database.Execute(t.Context(), p.pool, []*engine.Request{r}, ownTransaction(l)))
		require.Nil(t, r.Shadow.Outcome())
		return r.Parts[0].Decision.Granted
	}
	// Without a real proxy, a failing second statement rolls the first one back too.
	require.EqualValues(t, 1, ask(keysOf(0, 2, 1)[0]), "the error tells of a proxy")
	require.Empty(t, pgtest.StoredRows(t, p.Pool, false), "so it is not asked again")
	limitertest.Engine(l).Queues.Learn(2)
	require.EqualValues(t, 1, ask(keysOf(1, 2, 1)[0]), "the proxy is known")
	require.Empty(t, pgtest.StoredRows(t, p.Pool, false))
	require.Equal(t, 2, asked)
}

// If a request goes to another queue, it keeps its start time, and the breaker of the new queue may turn it away.
func TestQueuesOfShards(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a proxy of its own, or none")

	client := limitertest.NewClient(t, &pgxpool.Pool{}, ratelimit.ClientConfig{})
	l := limitertest.Of(t, client, ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailClosed()})
	first := limitertest.EngineOf(client).Queues.First()
	require.True(t, limitertest.EngineOf(client).Queues.Learn(4))
	require.True(t, limitertest.EngineOf(client).Queues.Learn(2))
	require.Equal(t, 4, limitertest.EngineOf(client).Queues.Shards())
	require.Same(t, first, limitertest.EngineOf(client).Queues.First())
	three := limitertest.EngineOf(client).Queues.Of(keysOf(3, 4, 1)[0])
	require.Equal(t, 3, three.Batcher.Shard)
	require.Same(t, first.Batcher.Denials, three.Batcher.Denials)
	require.Same(t, first.Batcher.Leases, three.Batcher.Leases)
	for range engine.BreakerFailures {
		three.Batcher.Breaker.Record(engine.KindEphemeral, turnedAwayError(), false)
	}
	require.False(t, first.Batcher.Breaker.IsOpen(engine.KindEphemeral))
	r, probe := newRequest(l, keysOf(3, 4, 1)[0], 1), newRequest(l, keysOf(3, 4, 2)[1], 1)
	probe.Probe, probe.Since = true, time.Now().Add(-time.Minute)
	since := probe.Since
	three.InFlight = three.MaxInFlight // so that no statement is sent
	limitertest.EngineOf(client).Queues.SubmitAgain([]*engine.Request{r, probe}, nil)
	<-r.Done
	require.Equal(t, engine.ErrNotTried, r.Err)
	require.Equal(t, since, probe.Since)
	require.Equal(t, 1, three.Waiting)
}
