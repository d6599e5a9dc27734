package faults

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shardkey"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

const shardCount = 4

// keyOn returns the n-th key on a shard.
func keyOn(shard, n int) string {
	for tag := 0; ; tag++ {
		if key := fmt.Sprintf("{%d}%d", tag, n); shardkey.Of(key, shardCount) == shard {
			return key
		}
	}
}

// shardCall is the outcome of a call for a key of a shard.
type shardCall struct {
	shard  int
	key    string
	fresh  bool // the key is asked for once
	result ratelimit.Result
	err    error
}

// shardLoad runs callers for keys of all shards until it is stopped.
type shardLoad struct {
	mu    sync.Mutex
	calls []shardCall

	fresh atomic.Int64
	stop  func()
}

const (
	hotKeys  = 3 // for each shard
	hotLimit = 60
)

func newShardLoad(t *testing.T, limiter *ratelimit.Limiter) *shardLoad {
	t.Helper()
	load := &shardLoad{}
	ctx, cancel := context.WithCancel(t.Context())
	var callers sync.WaitGroup
	for i := range 6 * shardCount {
		callers.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				c := shardCall{shard: i % shardCount, fresh: n%2 == 0}
				c.key = keyOn(c.shard, n%hotKeys)
				if c.fresh {
					c.key = keyOn(c.shard, hotKeys+int(load.fresh.Add(1)))
				}
				load.add(limiter, c)
				pause(ctx, 5*time.Millisecond)
			}
		})
	}
	load.stop = sync.OnceFunc(func() {
		cancel()
		callers.Wait()
	})
	t.Cleanup(load.stop)
	return load
}

func (l *shardLoad) add(limiter *ratelimit.Limiter, c shardCall) {
	c.result, c.err = limiter.Allow(context.Background(), c.key)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, c)
}

// count returns how many calls for a shard's keys a source has answered.
func (l *shardLoad) count(shard int, source ratelimit.Source) (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.calls {
		if c.shard == shard && c.err == nil && c.result.Source == source {
			n++
		}
	}
	return n
}

// awaitMore waits until each of the shards has decided n more calls.
func (l *shardLoad) awaitMore(t *testing.T, source ratelimit.Source, n int, shards ...int) {
	t.Helper()
	for _, shard := range shards {
		before := l.count(shard, source)
		testkit.WaitUntil(t, func() bool { return l.count(shard, source) >= before+n }, "shard %d", shard)
	}
}

// requireOthersUntouched checks the keys of shards that did not fail. All calls for them were decided in the database,
// and each key got its limit. Keys of the failed shard must not have got more than their limit from it.
func (l *shardLoad) requireOthersUntouched(t *testing.T, failed int) {
	t.Helper()
	granted := map[string]int{}
	for _, c := range l.calls {
		if c.shard != failed {
			require.NoError(t, c.err)
			require.Equal(t, ratelimit.SourceDatabase, c.result.Source)
			require.True(t, c.result.Allowed || !c.fresh)
		}
		if c.err == nil && c.result.Allowed && c.result.Source == ratelimit.SourceDatabase {
			granted[c.key]++
		}
	}
	for shard := range shardCount {
		for n := range hotKeys {
			if shard == failed {
				require.LessOrEqual(t, granted[keyOn(shard, n)], hotLimit)
			} else {
				require.Equal(t, hotLimit, granted[keyOn(shard, n)], "shard %d", shard)
			}
		}
	}
}

// failing is the shard that fails.
const failing = 2

// fleetThatFails starts shards, one of which will fail. If its disk is to become full, disk is the disk's size in MiB.
func fleetThatFails(t testing.TB, how string, disk int) (fleet *pgtest.Fleet, begin, end func()) {
	t.Helper()
	dir := ""
	if how == "full" {
		dir = smallDisk(t, disk)
	}
	fleet = pgtest.Sharded(t, shardCount)
	begin, end = shardFaults()[how](t, fleet, dir)
	return fleet, begin, end
}

// shardFaults returns the possible faults of a shard. The argument dir is a folder on a small disk.
func shardFaults() map[string]func(t testing.TB, fleet *pgtest.Fleet, dir string) (begin, end func()) {
	return map[string]func(t testing.TB, fleet *pgtest.Fleet, dir string) (begin, end func()){
		"killed": func(t testing.TB, fleet *pgtest.Fleet, _ string) (begin, end func()) {
			t.Helper()
			server := fleet.ShardServers[failing]
			return func() { require.NoError(t, server.Kill()) },
				func() { require.NoError(t, server.Restart(t.Context())) }
		},
		// PL/Proxy waits for a frozen server for ever. The PgBouncer between PL/Proxy and the shard gives up.
		"frozen": func(t testing.TB, fleet *pgtest.Fleet, _ string) (begin, end func()) {
			t.Helper()
			connections := slices.Clone(fleet.Connections)
			for i, shard := range fleet.Shards {
				connections[i], _, _ = strings.Cut(pgtest.PgBouncer(t, shard, "transaction", 10,
					"query_timeout = 3", "query_wait_timeout = 3", "server_connect_timeout = 3"), " user=")
				connections[i] += " dbname=" + shard.Pool.Config().ConnConfig.Database
			}
			fleet.Connect(t, connections)
			server := fleet.ShardServers[failing]
			return func() { require.NoError(t, server.Freeze()) }, func() { require.NoError(t, server.Thaw()) }
		},
		"full": func(t testing.TB, fleet *pgtest.Fleet, dir string) (begin, end func()) {
			t.Helper()
			pool := fleet.Shards[failing].Pool
			give(t, fleet.ShardServers[failing], dir)
			pgtest.Exec(t, pool, fmt.Sprintf("CREATE TABLESPACE small LOCATION '%s'", dir))
			pgtest.Exec(t, pool, "ALTER TABLE rate_limit_durable SET TABLESPACE small")
			return func() {
				pgtest.Exec(t, pool, "CREATE TABLE filler (padding text) TABLESPACE small")
				var err error
				for err == nil {
					_, err = pool.Exec(t.Context(), "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 20)")
				}
				require.ErrorContains(t, err, "53100")
			}, func() { mount(t, dir, "remount,size=64m") }
		},
	}
}

// One of four shards is killed, frozen or full while callers use keys of all shards. No call for a key of another shard
// fails or is answered by OnFailure, and the limits of these keys are exact. The breaker opens only for the failed
// shard, and closes when this shard is back.
func TestShardThatFails(t *testing.T) {
	t.Parallel()

	for name := range shardFaults() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			fleet, begin, end := fleetThatFails(t, name, 1)

			var mu sync.Mutex
			var transitions []ratelimit.BreakerEvent
			turned := func(open bool) bool {
				mu.Lock()
				defer mu.Unlock()
				return len(transitions) > 0 && transitions[len(transitions)-1].Open == open
			}
			pool := fleet.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 12 })
			client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{
				Timeout: 12 * time.Second,
				Observer: &ratelimit.Observer{Breaker: func(e ratelimit.BreakerEvent) {
					mu.Lock()
					defer mu.Unlock()
					transitions = append(transitions, e)
				}},
			})
			config := ratelimit.Config{
				Name: "test", Policy: ratelimit.FixedWindow{Limit: hotLimit, Window: year}, Durable: true,
				SynchronousCommit: true, NoDenialCache: true, OnFailure: ratelimit.FailOpen(),
			}
			limiter := limitertest.Of(t, client, config)
			config.Name, config.OnFailure = "strict", ratelimit.ReturnError()
			strict := limitertest.Of(t, client, config)

			load := newShardLoad(t, limiter)
			load.awaitMore(t, ratelimit.SourceDatabase, 20, 0, 1, 2, 3)
			begin()
			load.awaitMore(t, ratelimit.SourceFailedOpen, 20, failing)
			testkit.WaitUntil(t, func() bool { return turned(true) })
			load.awaitMore(t, ratelimit.SourceDatabase, 20, 0, 1, 3)
			var err error
			testkit.WaitUntil(t, func() bool { // a full disk may still have room for a few rows
				_, err = strict.Allow(t.Context(), keyOn(failing, int(load.fresh.Add(1))))
				return err != nil
			})
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			_, err = strict.Allow(t.Context(), keyOn(1, 0))
			require.NoError(t, err)
			end()
			testkit.WaitUntil(t, func() bool { return turned(false) })
			load.awaitMore(t, ratelimit.SourceDatabase, 20, 0, 1, 2, 3)
			load.stop()

			for shard := range shardCount {
				for n := range hotKeys * hotLimit {
					load.add(limiter, shardCall{shard: shard, key: keyOn(shard, n%hotKeys)})
				}
			}
			load.requireOthersUntouched(t, failing)
			require.Zero(t, load.count(0, ratelimit.SourceFailedOpen))
			for _, e := range transitions {
				require.Equal(t, failing, e.Shard)
			}
		})
	}
}

// With the settings in docs/operating.md, PgBouncer connects to the shards over TCP, and ends a call to a frozen shard.
func TestPgBouncerAsDocumented(t *testing.T) {
	t.Parallel()

	page, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	_, settings, found := strings.Cut(string(page), "```ini\n")
	require.True(t, found)
	settings, _, _ = strings.Cut(settings, "```")
	require.Contains(t, settings, "query_timeout = ")
	fleet := pgtest.Sharded(t, 2)
	connections := slices.Clone(fleet.Connections)
	for i, shard := range fleet.Shards {
		require.False(t, strings.HasPrefix(shard.Pool.Config().ConnConfig.Host, "/"), "over TCP")
		connections[i], _, _ = strings.Cut(pgtest.PgBouncer(t, shard, "transaction", 10, settings), " user=")
		connections[i] += " dbname=" + shard.Pool.Config().ConnConfig.Database
	}
	fleet.Connect(t, connections)
	ask := func(shard int) error {
		key := "key"
		for shardkey.Of(key, 2) != shard {
			key += "s"
		}
		_, err := fleet.Pool.Exec(t.Context(), "SELECT FROM rate_limit_allow('test', $1, 'fixed 5/1h')", key)
		return err
	}
	for shard := range 2 { // a slow machine may need longer than the settings allow
		testkit.WaitUntil(t, func() bool { return ask(shard) == nil }, "shard %d", shard)
	}
	require.NoError(t, fleet.ShardServers[1].Freeze())
	require.ErrorContains(t, ask(1), fleet.Shards[1].Pool.Config().ConnConfig.Database)
	testkit.WaitUntil(t, func() bool { return ask(0) == nil })
	require.NoError(t, fleet.ShardServers[1].Thaw())
	testkit.WaitUntil(t, func() bool { return ask(1) == nil })
}

// The proxy cannot end a call to a frozen shard. Such a call uses no pool connection that other shards' calls need.
func TestFrozenShardLeavesThePool(t *testing.T) {
	t.Parallel()

	fleet := pgtest.Sharded(t, 2)
	pool := fleet.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	key := "key"
	for shardkey.Of(key, 2) != 1 {
		key += "s"
	}
	var hangs *pgconn.PgConn
	ask := func(ctx context.Context) error {
		return pg.Use(ctx, pool, func(conn *pgx.Conn) error {
			hangs = conn.PgConn()
			_, err := conn.Exec(ctx, "SELECT FROM rate_limit_allow('test', $1, 'fixed 5/1h')", key)
			return err
		})
	}
	require.NoError(t, ask(t.Context())) // opens PL/Proxy's connection
	require.NoError(t, fleet.ShardServers[1].Freeze())
	t.Cleanup(func() { _ = fleet.ShardServers[1].Thaw() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	require.Error(t, ask(ctx))
	require.NoError(t, pg.Use(t.Context(), pool, func(conn *pgx.Conn) error { return conn.Ping(t.Context()) }))
	select {
	case <-hangs.CleanupDone():
		require.Fail(t, "the next call has waited for the one that hangs")
	default:
	}
}

// allowForSure repeats a call until its outcome is known. The context may end the repetition.
func allowForSure(t *testing.T, limiter *ratelimit.Limiter, key string) (err error) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		_, err = limiter.Allow(t.Context(), key)
		return !errors.Is(err, ratelimit.ErrOutcomeUnknown)
	})
	return err
}

// Two proxies disagree about the places of two shards. Each shard refuses calls for keys that it does not own, so the
// combined history of both proxies is right.
func TestProxiesWhoseMapsDiffer(t *testing.T) {
	t.Parallel()

	fleet := pgtest.Sharded(t, shardCount)
	swapped := slices.Clone(fleet.Connections)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	other := fleet.Proxy(t, swapped)

	// Each misrouted call fails, and takes nothing.
	config := ratelimit.Config{Name: "wrong", Policy: ratelimit.FixedWindow{Limit: 10, Window: year}}
	for shard := range shardCount {
		clientConfig := ratelimit.ClientConfig{Timeout: time.Minute}
		if shard < 2 {
			clientConfig.Timeout = 4 * time.Second // the call is tried again until then
		}
		err := allowForSure(t, limitertest.New(t, other.Pool, config, clientConfig), keyOn(shard, 0))
		if shard < 2 {
			require.ErrorIs(t, err, ratelimit.ErrUnavailable)
			require.ErrorContains(t, err, "RLS03")
			require.ErrorContains(t, err, fmt.Sprintf("this database is shard %d of 4, and was asked for keys of shard %d of 4", 1-shard, shard))
			require.NotContains(t, err.Error(), keyOn(shard, 0))
		} else {
			require.NoError(t, err)
		}
	}

	// Callers of both proxies use keys of all shards.
	judged := func() porcupine.CheckResult {
		for _, db := range fleet.Shards {
			pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_ephemeral")
		}
		w := workload{Algorithm: "fixed window", Limit: 8, Span: year, Limiters: 1, Callers: 6, Calls: 10, Keys: 8, MaxCost: 3}
		var histories [2][]operation
		var errs [2]error
		var work sync.WaitGroup
		for i, db := range []*pgtest.DB{fleet.DB, other} {
			w := w
			w.URL, w.First, w.Seed = db.URL, i, uint64(i)
			if db == other {
				w.Timeout = 4 * time.Second // the shards refuse calls for some keys until then
			}
			work.Go(func() { histories[i], errs[i] = w.run(t.Context(), func() error { return nil }) })
		}
		work.Wait()
		require.NoError(t, errs[0])
		require.NoError(t, errs[1])
		history := slices.Concat(histories[:]...)
		require.True(t, hasBothOutcomes(history))
		result, picture := judge{ruleOf(w.policy(), w.Span), false, false}.check(t, history, 0)
		if picture != "" {
			t.Cleanup(func() {
				if !t.Failed() { // the fleet belongs to the negative control
					require.NoError(t, os.Remove(picture))
				}
			})
		}
		return result
	}
	require.Equal(t, porcupine.Ok, judged())

	// This is a negative control: the shards do not check who owns a key.
	for _, db := range fleet.Shards {
		pgtest.Exec(t, db.Pool, `
			CREATE OR REPLACE FUNCTION _rate_limit_own_shard(shard integer, shards integer) RETURNS boolean
			LANGUAGE sql AS 'SELECT true'`)
	}
	require.Equal(t, porcupine.Illegal, judged())
}

// If a shard cannot decide, the error names the kind of failure and the database, and nothing was taken. Other shards
// decide calls for their keys.
func TestShardThatCannotDecide(t *testing.T) {
	t.Parallel()

	const wrong = 2
	fleet := pgtest.Sharded(t, shardCount)
	shard := fleet.Shards[wrong]
	name := shard.Pool.Config().ConnConfig.Database
	missing := slices.Clone(fleet.Connections)
	missing[wrong] += "_missing"
	sql := func(statement string) func() {
		return func() { pgtest.Exec(t, shard.Pool, statement) }
	}
	// New sessions have the setting from the start, so end the old sessions.
	reconnect := "; SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '" + name + "' AND pid <> pg_backend_pid()"
	for what, c := range map[string]struct {
		spoil, mend func()
		kind        error
		text        string
	}{
		"no such database": {
			func() { fleet.Connect(t, missing) }, func() { fleet.Connect(t, fleet.Connections) },
			ratelimit.ErrUnavailable, "[" + name + "_missing]",
		},
		"another version": {
			sql("ALTER FUNCTION rate_limit_take_fixed_window RENAME TO gone"), sql("ALTER FUNCTION gone RENAME TO rate_limit_take_fixed_window"),
			ratelimit.ErrNotMigrated, "[" + name + "]",
		},
		"no shard yet": {
			sql("CREATE TABLE kept AS TABLE rate_limit_shard; DELETE FROM rate_limit_shard"),
			sql("INSERT INTO rate_limit_shard TABLE kept; DROP TABLE kept"),
			ratelimit.ErrUnavailable, "no shard yet",
		},
		"read-only": {
			sql("ALTER DATABASE " + name + " SET default_transaction_read_only = on" + reconnect),
			sql("SET default_transaction_read_only = off; ALTER DATABASE " + name + " RESET default_transaction_read_only" + reconnect),
			ratelimit.ErrReadOnly, "[" + name + "]",
		},
	} {
		c.spoil()
		limiter := limitertest.New(t, fleet.OwnerPool(t, nil), ratelimit.Config{
			Name: what, Policy: ratelimit.FixedWindow{Limit: 5, Window: year},
		}, ratelimit.ClientConfig{Timeout: 3 * time.Second})
		key := keyOn(wrong, 0)
		err := allowForSure(t, limiter, key)
		t.Log(what, err)
		require.ErrorIs(t, err, c.kind, what)
		require.ErrorContains(t, err, c.text, what)
		require.NotContains(t, err.Error(), key)
		result, err := limiter.Allow(t.Context(), keyOn(1, 0))
		require.NoError(t, err, what)
		require.EqualValues(t, 4, result.Remaining)
		c.mend()
		testkit.WaitUntil(t, func() bool {
			result, err = limiter.Allow(t.Context(), key)
			return err == nil
		}, what)
		require.EqualValues(t, 4, result.Remaining, what)
	}
}
