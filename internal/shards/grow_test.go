package shards_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/shards"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

const limit = 1000

// take asks a proxy for n units of a key, and returns how many units were granted.
func take(t *testing.T, proxy *pgtest.DB, key string, n int64) (granted int64, err error) {
	t.Helper()
	err = proxy.Pool.QueryRow(t.Context(), "SELECT granted FROM rate_limit_all('{1}', '{api}', ARRAY[$1], '{f}', '{2}', "+
		"ARRAY[$2::bigint], '{3600000000}', '{0}', counts => ARRAY[$3::bigint])", key, limit, n).Scan(&granted)
	return granted, err
}

// wrongShard tells whether a shard refused a key that it does not own.
func wrongShard(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok && pgErr.Code == "RLS03"
}

func (c *cluster) growConfig(t *testing.T, progress func(int, shards.Step) error) shards.GrowConfig {
	t.Helper()
	config := shards.GrowConfig{
		Schema: "public", Proxies: []*pgx.Conn{connect(t, c.proxy)}, Connections: c.moreStrings, Progress: progress,
	}
	for i := range c.shards {
		config.Old, config.New = append(config.Old, connect(t, c.shards[i])), append(config.New, connect(t, c.more[i]))
	}
	return config
}

// Grow fails after a step, and is called again. Meanwhile no key gets more than its limit, and in the end each key has
// got exactly its limit.
func TestGrowAdmitsWhatTheLimitAdmits(t *testing.T) {
	t.Parallel()

	for _, fails := range []shards.Step{
		"", shards.Copied, shards.Stopped, shards.GaveUp, shards.TookOver, shards.Switched, shards.Deleted,
	} {
		t.Run(string("after "+fails), func(t *testing.T) {
			t.Parallel()

			c := newCluster(t, 2)
			granted := map[string]int64{}
			var keys []string
			for i := range 24 {
				keys = append(keys, fmt.Sprintf("key %d", i))
			}
			refused := 0
			ask := func(count int64, keys ...string) {
				for _, key := range keys {
					n, err := take(t, c.proxy, key, count)
					if wrongShard(err) {
						refused++
						continue
					}
					require.NoError(t, err)
					granted[key] += n
				}
			}
			ask(1, keys...)
			fresh := 0
			failure := errors.New("fails here")
			progress := func(place int, step shards.Step) error {
				if step != shards.Stopped { // calls would wait while the shard is stopped
					ask(1, keys...)
					fresh++
					keys = append(keys, fmt.Sprintf("new %d", fresh))
				}
				if step == shards.Copied { // reset some copied keys, and use one of them again
					for i, key := range keys[:10] {
						pgtest.Exec(t, c.proxy.Pool, "SELECT rate_limit_reset('api', $1)", key)
						granted[key] = 0
						if i < 3 {
							ask(1, key)
						}
					}
				}
				if step == shards.Copied && place == 1 { // reset all keys of the shard, except for later keys
					rows, err := c.shards[1].Pool.Query(t.Context(), "SELECT key FROM rate_limit_ephemeral")
					require.NoError(t, err)
					gone, err := pgx.CollectRows(rows, pgx.RowTo[string])
					require.NoError(t, err)
					require.Greater(t, len(gone), 5)
					pgtest.Exec(t, c.shards[1].Pool, "TRUNCATE rate_limit_ephemeral")
					for _, key := range gone {
						granted[key] = 0
					}
					ask(1, gone[:3]...)
				}
				if step == fails && place == 0 {
					return failure
				}
				return nil
			}
			err := shards.Grow(t.Context(), c.growConfig(t, progress))
			if fails != "" {
				require.ErrorIs(t, err, failure)
				ask(1, keys...)
				fails = ""
				require.NoError(t, shards.Grow(t.Context(), c.growConfig(t, progress)))
			} else {
				require.NoError(t, err)
				require.Positive(t, refused) // between two steps, some keys belong to no shard
			}
			ask(limit+1, keys...)
			for _, key := range keys {
				require.EqualValues(t, limit, granted[key], key)
			}
			// Each row is on exactly one shard.
			rows := int64(0)
			for _, db := range append(c.shards, c.more...) {
				rows += pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral")
			}
			require.EqualValues(t, len(keys), rows)
			require.EqualValues(t, 4, pgtest.Scalar[int64](t, c.proxy.Pool, "SELECT rate_limit_shards()"))
		})
	}
}

// While shards are divided, each unit that is held leaves once: holds are made, settled, extended and forgotten between
// the steps, and Grow also goes on after a failure.
func TestGrowMovesHolds(t *testing.T) {
	t.Parallel()

	for _, fails := range []shards.Step{"", shards.Copied, shards.GaveUp, shards.Switched} {
		t.Run(string("after "+fails), func(t *testing.T) {
			t.Parallel()

			c := newCluster(t, 2)
			live, used := map[string][]string{}, map[string]int64{} // of each key
			// call calls a function for a hold, unless the key belongs to no shard between two steps.
			call := func(sql string, args ...any) (result string, ok bool) {
				err := c.proxy.Pool.QueryRow(t.Context(), sql, args...).Scan(&result)
				if wrongShard(err) {
					return "", false
				}
				require.NoError(t, err)
				return result, true
			}
			step := 0
			more := func() {
				step++
				for i := range 24 {
					key := fmt.Sprint("key ", i)
					if hold, ok := call("SELECT hold FROM rate_limit_hold('api', $1, 'fixed 1000/1d', 7, durable => $2)", key, i%2 == 0); ok {
						live[key] = append(live[key], hold)
					}
					if len(live[key]) == 0 || (i+step)%2 == 0 {
						continue
					}
					if _, ok := call("SELECT rate_limit_extend($1, interval '2 hours')::text", live[key][0]); !ok {
						continue
					}
					if late, ok := call("SELECT late::text FROM rate_limit_settle($1, 3)", live[key][0]); ok {
						require.Equal(t, "false", late)
						live[key], used[key] = live[key][1:], used[key]+3
					}
				}
			}
			more()
			failure := errors.New("fails here")
			progress := func(_ int, step shards.Step) error {
				if step != shards.Stopped { // calls would wait while the shard is stopped
					more()
				}
				if step == shards.Copied { // forget the holds that are settled
					for _, db := range c.shards {
						pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral_hold WHERE status = 2")
						pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_durable_hold WHERE status = 2")
					}
				}
				if step == fails {
					fails = ""
					return failure
				}
				return nil
			}
			if fails != "" {
				require.ErrorIs(t, shards.Grow(t.Context(), c.growConfig(t, progress)), failure)
			}
			require.NoError(t, shards.Grow(t.Context(), c.growConfig(t, progress)))
			more()

			rows := int64(0)
			for _, db := range append(c.shards, c.more...) {
				rows += pgtest.Scalar[int64](t, db.Pool, `SELECT (SELECT count(*) FROM rate_limit_ephemeral_hold WHERE status = 0)
					+ (SELECT count(*) FROM rate_limit_durable_hold WHERE status = 0)`)
			}
			want := int64(0)
			for i := range 24 {
				key := fmt.Sprint("key ", i)
				remaining := func() int64 {
					return pgtest.Scalar[int64](t, c.proxy.Pool, "SELECT remaining FROM rate_limit_peek('api', $1, 'fixed 1000/1d', $2)", key, i%2 == 0)
				}
				want += int64(len(live[key]))
				require.Equal(t, 1000-used[key]-7*int64(len(live[key])), remaining(), key)
				for _, hold := range live[key] {
					require.Equal(t, key, pgtest.Scalar[string](t, c.proxy.Pool, "SELECT key FROM rate_limit_find_hold($1) WHERE live", hold))
					require.False(t, pgtest.Scalar[bool](t, c.proxy.Pool, "SELECT late FROM rate_limit_cancel($1)", hold))
				}
				require.Equal(t, 1000-used[key], remaining(), key)
			}
			require.Equal(t, want, rows, "each hold is on exactly one shard")
		})
	}
}

// While shards are divided, the fences of each key ascend, a slot of before can be renewed and released, and who stands in
// line is served. Grow also goes on after a failure.
func TestGrowMovesSlots(t *testing.T) {
	t.Parallel()

	for _, fails := range []shards.Step{"", shards.Copied, shards.GaveUp, shards.TookOver, shards.Switched} {
		t.Run(string("after "+fails), func(t *testing.T) {
			t.Parallel()

			c := newCluster(t, 2)
			type state struct {
				held, waits string // a slot and a place in line
				fence       int64
			}
			keys := map[string]*state{}
			// call calls a function for a key, unless the key belongs to no shard between two steps.
			call := func(into []any, sql string, args ...any) bool {
				err := c.proxy.Pool.QueryRow(t.Context(), sql, args...).Scan(into...)
				if wrongShard(err) {
					return false
				}
				require.NoError(t, err)
				return true
			}
			acquire := func(key string, durable bool) (slot string, fence *int64, ok bool) {
				ok = call([]any{&slot, &fence}, `SELECT slot::text, fence
					FROM rate_limit_acquire('api', $1, 'concurrent 1', ttl => '1 hour', durable => $2, wait => true)`, key, durable)
				return slot, fence, ok
			}
			ascends := func(key string, fence *int64) {
				require.NotNil(t, fence, key)
				require.Greater(t, *fence, keys[key].fence, key)
				keys[key].fence = *fence
			}
			for i := range 24 {
				key, s := fmt.Sprint("key ", i), &state{}
				keys[key] = s
				var fence *int64
				s.held, fence, _ = acquire(key, i%2 == 0)
				ascends(key, fence)
				s.waits, fence, _ = acquire(key, i%2 == 0)
				require.Nil(t, fence)
			}
			more := func() { // a release hands over, and another caller stands in line
				for i := range 24 {
					key := fmt.Sprint("key ", i)
					s := keys[key]
					var released, allowed bool
					var fence *int64
					if s.held == "" || s.waits == "" || !call([]any{&released}, "SELECT rate_limit_release($1)", s.held) {
						continue
					}
					require.True(t, released, key)
					s.held, s.waits = s.waits, ""
					if call([]any{&allowed, &fence}, "SELECT allowed, fence FROM rate_limit_renew($1, '2 hours')", s.held) {
						require.True(t, allowed, key)
						ascends(key, fence)
					}
					s.waits, _, _ = acquire(key, i%2 == 0)
				}
			}
			failure := errors.New("fails here")
			progress := func(_ int, step shards.Step) error {
				if step != shards.Stopped { // calls would wait while the shard is stopped
					more()
				}
				if step == fails {
					fails = ""
					return failure
				}
				return nil
			}
			if fails != "" {
				require.ErrorIs(t, shards.Grow(t.Context(), c.growConfig(t, progress)), failure)
			}
			require.NoError(t, shards.Grow(t.Context(), c.growConfig(t, progress)))
			var ids []string
			for i := range 24 {
				key := fmt.Sprint("key ", i)
				if s := keys[key]; s.waits == "" { // the key belonged to no shard when this caller came
					s.waits, _, _ = acquire(key, i%2 == 0)
				}
				ids = append(ids, keys[key].held, keys[key].waits)
			}
			require.Equal(t, len(ids), pgtest.Scalar[int](t, c.proxy.Pool,
				"SELECT count(*)::int FROM rate_limit_renew_all($1::text[]::uuid[], 7200000000)", ids))
			more()
			more()
		})
	}
}

// A proxy looks for no hold whose keys may be on several shards, because it would find only some of its parts.
func TestHoldsOfPartedKeysAreRefused(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	for _, sql := range []string{
		"rate_limit_settle($1, 1)", "rate_limit_cancel($1)", "rate_limit_extend($1, interval '1 hour')", "rate_limit_find_hold($1)",
	} {
		_, err := c.proxy.Pool.Exec(t.Context(), "SELECT "+sql, "00000000-0000-8000-8000-000000000000.e")
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, sql)
		require.Equal(t, "RLS04", refused.Code, sql)
		require.Contains(t, refused.Hint, "the same part in braces")
	}
	require.Zero(t, pgtest.Scalar[int](t, c.proxy.Pool,
		"SELECT count(*) FROM rate_limit_find_hold('00000000-0000-4000-8000-800000000000.e')"))
}

// No key gets more than its limit while calls go on during all steps of Grow.
func TestGrowUnderLoad(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	const keys = 200
	var granted [keys]atomic.Int64
	var calls, refused atomic.Int64
	var done atomic.Bool
	var callers sync.WaitGroup
	ask := func(i int, count int64) {
		n, err := take(t, c.proxy, fmt.Sprint(i), count)
		if wrongShard(err) {
			refused.Add(1)
			return
		}
		if err != nil {
			t.Error(err)
		}
		granted[i].Add(n)
		calls.Add(1)
	}
	for range 6 {
		callers.Go(func() {
			for !done.Load() {
				ask(rand.IntN(keys), 1)
			}
		})
	}
	waited := 0
	progress := func(place int, step shards.Step) error {
		if step == shards.Stopped { // wait until calls wait for the stopped shard
			testkit.WaitUntil(t, func() bool {
				return pgtest.Scalar[bool](t, c.shards[place].Pool, "SELECT EXISTS (SELECT FROM pg_locks "+
					"WHERE NOT granted AND relation = 'rate_limit_shard'::regclass AND database = ("+
					"SELECT oid FROM pg_database WHERE datname = current_database()))")
			})
			waited++
			return nil
		}
		for before := calls.Load(); calls.Load() < before+50; { // wait for calls in each step
			runtime.Gosched()
		}
		return nil
	}
	require.NoError(t, shards.Grow(t.Context(), c.growConfig(t, progress)))
	done.Store(true)
	callers.Wait()
	require.Equal(t, 2, waited)
	require.Positive(t, refused.Load())
	for i := range keys {
		ask(i, limit+1)
		require.EqualValues(t, limit, granted[i].Load())
	}
}

// After an interrupted division, Grow can only continue with the database that has the keys.
func TestGrowGoesOnWithTheSameDatabases(t *testing.T) {
	t.Parallel()

	for _, fails := range []shards.Step{shards.GaveUp, shards.TookOver} {
		t.Run(string("after "+fails), func(t *testing.T) {
			t.Parallel()

			c := newCluster(t, 2)
			failure := errors.New("fails here")
			config := c.growConfig(t, func(_ int, step shards.Step) error {
				if step == fails {
					return failure
				}
				return nil
			})
			require.ErrorIs(t, shards.Grow(t.Context(), config), failure)

			config.Progress = func(int, shards.Step) error { return nil }
			same := config.New
			config.New = []*pgx.Conn{same[1], same[0]}
			require.ErrorContains(t, shards.Grow(t.Context(), config), "shard 0 of 2: it has given half of its keys to another")
			config.New = []*pgx.Conn{connect(t, pgtest.New(t)), same[1]}
			require.ErrorContains(t, shards.Grow(t.Context(), config), "shard 0 of 2: it has given half of its keys to another")
			config.New = same
			require.NoError(t, shards.Grow(t.Context(), config))
		})
	}
}

// A new installation drops functions of another release, and keeps grants.
func TestInstallAnew(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	functions := func() string {
		return pgtest.Scalar[string](t, c.proxy.Pool, "SELECT string_agg(p.oid::regprocedure || ' ' || "+
			"coalesce(p.proacl::text, ''), ', ' ORDER BY p.oid::regprocedure::text) "+
			"FROM pg_proc AS p WHERE p.proname ~ '^rate_limit'")
	}
	before := functions()
	require.Contains(t, before, "rate_limit_allow(text,text,text,bigint,boolean)")
	pgtest.Exec(t, c.proxy.Pool, "CREATE FUNCTION rate_limit_allow(name text) RETURNS text LANGUAGE sql AS 'SELECT 1::text'")
	require.NotEqual(t, before, functions())
	c.install(t, c.proxy)
	require.Equal(t, before, functions())
}

// Grow fails while a transaction takes units on the shard itself, because the transaction's usage cannot be copied. The
// next call of Grow continues.
func TestGrowBesideATransactionOnTheShard(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	const key = "one"
	_, err := take(t, c.proxy, key, 1)
	require.NoError(t, err)
	place := pgtest.Scalar[int](t, c.shards[0].Pool, "SELECT _rate_limit_shard($1, 2)", key)
	var direct pgx.Tx
	progress := func(at int, step shards.Step) error {
		if step != shards.Copied || at != place || direct != nil {
			return nil
		}
		direct = pgtest.Begin(t, c.shards[place])
		pgtest.Exec(t, direct, "SELECT rate_limit_take_sliding_window('api', ARRAY[$1], $2, 3600000000, '{1}', '{3}')",
			key, limit)
		return shards.Grow(t.Context(), c.growConfig(t, nil)) // fails, because the outer Grow has the lock
	}
	err = shards.Grow(t.Context(), c.growConfig(t, progress))
	require.ErrorContains(t, err, "these shards are being divided already")
	err = shards.Grow(t.Context(), c.growConfig(t, progress))
	require.ErrorContains(t, err, "a transaction uses the tables for longer than a second")
	require.NoError(t, direct.Commit(t.Context()))
	require.NoError(t, shards.Grow(t.Context(), c.growConfig(t, progress)))
	granted, err := take(t, c.proxy, key, limit)
	require.NoError(t, err)
	require.EqualValues(t, limit-4, granted)
}

// A transaction with an old snapshot cannot see that the shard was divided, so shards refuse it.
func TestShardsDecideReadCommitted(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	for _, db := range c.shards {
		pgtest.Exec(t, db.Pool, "DO $$ BEGIN EXECUTE format("+
			"'ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), 'repeatable read'); END $$")
	}
	_, err := take(t, c.proxy, "key", 1)
	require.ErrorContains(t, err, "a shard decides in transactions that are read committed")
}

// A proxy does not get functions that another role created in a shard's schema.
func TestStrangersFunctionsAreNotRead(t *testing.T) {
	t.Parallel()

	c := newCluster(t, 2)
	conn := connect(t, c.shards[0])
	before, err := shards.Read(t.Context(), conn, "public")
	require.NoError(t, err)
	pgtest.Exec(t, c.shards[0].Pool, `
		CREATE FUNCTION "rate_limit; x"(a text) RETURNS SETOF rate_limit_decision LANGUAGE sql AS 'SELECT NULL::rate_limit_decision';
		CREATE FUNCTION rate_limit_more(a text) RETURNS SETOF rate_limit_decision LANGUAGE sql AS 'SELECT NULL::rate_limit_decision';
		ALTER FUNCTION rate_limit_more(text) OWNER TO pg_monitor;
		CREATE FUNCTION rate_limit_other("a; b" text) RETURNS SETOF rate_limit_decision
		LANGUAGE sql AS 'SELECT NULL::rate_limit_decision'`)
	after, err := shards.Read(t.Context(), conn, "public")
	require.NoError(t, err)
	require.Equal(t, before, after)
}
