package engine_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pg"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// deadlocks returns how many deadlocks the database has ever had. It closes the pools first, because a session may
// report its deadlocks only when it ends.
func deadlocks(t *testing.T, db *pgtest.DB, pools ...*pgxpool.Pool) int64 {
	t.Helper()
	for _, pool := range pools {
		pool.Close()
	}
	testkit.WaitUntil(t, func() bool {
		return pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND application_name = 'limiter'`) == 0
	})
	return pgtest.Scalar[int64](t, db.Pool, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
}

// Statements lock the same rows, most of them new, at the same time. Each key gets its limit, without a deadlock.
func TestCrossingBatchesDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const limit, keys, batches, perBatch, workers = 10, 150, 6, 60, 8
	db := pgtest.New(t)
	pools := limitertest.SmallPools(t, db, 4)
	limitertest.EachSlowPolicyAndTable(t, limit, func(t *testing.T, config ratelimit.Config) {
		pgtest.Clear(t, db)
		seed := limitertest.Seed(t)
		var mu sync.Mutex
		granted, asked := map[string]int64{}, map[string]int64{}
		errs := make([]error, workers)
		testkit.Together(workers, func(worker int) {
			limiter, err := ratelimit.New(pools[worker%len(pools)], config)
			if err != nil {
				errs[worker] = err
				return
			}
			r := rand.New(rand.NewPCG(seed, uint64(worker)))
			for batch := range batches {
				var elements []modeltest.Element
				for _, key := range r.Perm(keys)[:perBatch] {
					e := modeltest.Element{Key: fmt.Sprint(key, " ", key%3*batch/4), Cost: 1, Count: 1 + r.Int64N(4)}
					elements = append(elements, e)
					if r.IntN(8) == 0 {
						elements = append(elements, e) // the same key twice in one batch
					}
				}
				if err := decide(context.Background(), limiter, limitertest.Engine(limiter).Database.DB, elements, ownTransaction(limiter)); err != nil {
					errs[worker] = err
					return
				}
				mu.Lock()
				for _, e := range elements {
					granted[e.Key] += e.Decision.Granted
					asked[e.Key] += e.Count
				}
				mu.Unlock()
			}
		})
		require.NoError(t, errors.Join(errs...), "%s=%d", modeltest.SeedVariable, seed)

		stored := pgtest.StoredRows(t, db.Pool, config.Durable)
		require.Len(t, stored, len(asked))
		full := 0
		for key := range asked {
			require.Equal(t, min(asked[key], limit), granted[key], key)
			require.Equal(t, granted[key], limitertest.TakenOf(config, stored, key), key)
			if asked[key] > limit {
				full++
			}
		}
		require.Greater(t, full, keys/2)
	})
	require.Zero(t, deadlocks(t, db, pools...))
}

// A negative control: statements deadlock if they do not lock rows in the lock order. The test rewrites two functions
// so that they lock rows in the order of the arguments. One function is for ordinary takes. The other is for
// rate_limit_all, which decides all takes of a sliding log.
func TestLockingInTheOrderGivenDeadlocks(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	fixed, log := ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}
	takes := []string{
		`DISTINCT ON (octet_length(e.key), e.key COLLATE "C") `, "",
		`ORDER BY octet_length(e.key) DESC, e.key COLLATE "C", e.place`, "ORDER BY e.place",
	}
	sorted := []string{`(ORDER BY e.durable, -octet_length(e.key), e.key COLLATE "C", e.name COLLATE "C")`, "(ORDER BY e.part)"}
	for name, change := range map[string]struct {
		policy   ratelimit.Policy
		function string
		oldNew   []string
	}{
		"keys": {fixed, "_rate_limit_keys_in_lock_order", takes},
		"logs": {log, "_rate_limit_rows_in_lock_order", sorted},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pool := limitertest.SmallPools(t, db, 1)[0]
			for _, broken := range []bool{false, true} {
				if broken {
					pgtest.Rewrite(t, db.Pool, change.function, change.oldNew...)
				}
				for _, exist := range [][]string{{"a", "b", "m"}, {"m"}} { // the keys that have a row at first
					config := ratelimit.Config{Name: fmt.Sprintf("%v, broken: %v", exist, broken), Policy: change.policy}
					limiter := limitertest.New(t, pool, config)
					for _, key := range exist {
						_, err := limiter.Allow(t.Context(), key)
						require.NoError(t, err)
					}

					// One transaction has locked "a" and waits for "m". In the lock order it has locked "b" too. A second
					// transaction wants "a" and "b".
					holder := limitertest.Hold(t, db, config, "m")
					one := takeLater(limiter, "a", "m", "b")
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					other := takeLater(limiter, "b", "a")
					pgtest.WaitUntilBlocked(t, db.Pool, 2)
					require.NoError(t, holder.Commit(t.Context()))

					_, err1 := one()
					_, err2 := other()
					requireDeadlockIf(t, broken, errors.Join(err1, err2))
				}
			}
			testkit.WaitUntil(t, func() bool { return deadlocks(t, db, pool) == 2 })
		})
	}
}

// rate_limit_all decides a key whose row was written by another algorithm. The row of this key is still locked before
// the rows of later keys.
func TestKeysBehindOneThatIsLeftAreNotLocked(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")
	for _, broken := range []bool{false, true} {
		db := pgtest.New(t)
		if broken {
			limitertest.AlwaysArrays(t, db.Pool)
			pgtest.Rewrite(t, db.Pool, "_rate_limit_keys_in_lock_order",
				`DISTINCT ON (octet_length(e.key), e.key COLLATE "C") `, "", `octet_length(e.key) DESC, e.key COLLATE "C"`, "e.key DESC")
		}
		config := ratelimit.Config{
			Name:   "test",
			Policy: ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year},
		}
		limiter := limitertest.New(t, limitertest.SmallPools(t, db, 1)[0], config)
		_, err := limiter.Allow(t.Context(), "b")
		require.NoError(t, err)
		other := config
		other.Policy = ratelimit.SlidingWindow{Limit: 10, Window: limitertest.Year}
		_, err = limitertest.New(t, db.Pool, other).Allow(t.Context(), "a")
		require.NoError(t, err)

		holder := limitertest.Hold(t, db, config, "a")
		take := takeLater(limiter, "a", "b")
		pgtest.WaitUntilBlocked(t, db.Pool, 1)
		looker := pgtest.Begin(t, db)
		_, err = looker.Exec(t.Context(), "SELECT FROM rate_limit_ephemeral WHERE key = 'b' FOR UPDATE NOWAIT")
		require.Equal(t, broken, pg.LockTimeout(err), err)
		require.NoError(t, looker.Rollback(t.Context()))
		require.NoError(t, holder.Commit(t.Context()))
		_, err = take()
		require.NoError(t, err)
	}
}

// A statement makes the row "m" for its first request, and refuses its second request. The first request also has the
// row "z", and the second one has "r" and "s". In the lock order, "r" and "s" are between "m" and "z". When "m" is
// made, "z" is already locked, so "r" and "s" must not be locked any more.
func TestRefusedRequestsLockNothingBehindNewRows(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const call = `SELECT FROM cardinality($2::text[]) AS n, rate_limit_all(
		$1, array_fill('test'::text, ARRAY[n]), $2, array_fill(false, ARRAY[n]),
		array_fill(1::smallint, ARRAY[n]), array_fill(10::bigint, ARRAY[n]), array_fill($4::bigint, ARRAY[n]),
		array_fill(0::bigint, ARRAY[n]), $3)`
	db := pgtest.New(t)
	ask := func(requests []int32, keys []string, costs []int64) error {
		_, err := db.Pool.Exec(context.Background(), call, requests, keys, costs, limitertest.Year.Microseconds())
		return err
	}
	askLater := func(requests []int32, keys []string, costs []int64) func() (struct{}, error) {
		return testkit.Later(func() (struct{}, error) { return struct{}{}, ask(requests, keys, costs) })
	}
	for _, broken := range []bool{false, true} {
		if broken {
			pgtest.Rewrite(t, db.Pool, "rate_limit_all", "        making := true;", `making := true;
				PERFORM FROM public.rate_limit_ephemeral AS d WHERE d.prefix = 'test' ORDER BY d.key DESC FOR UPDATE;`)
		}
		for name, refused := range map[string]struct {
			keys  []string
			costs []int64
		}{
			"by what was taken": {[]string{"r", "s"}, []int64{9, 1}},
			"by its cost":       {[]string{"r"}, []int64{11}},
			"as it only looks":  {[]string{"r"}, []int64{0}},
		} {
			t.Run(fmt.Sprintf("%s, broken: %v", name, broken), func(t *testing.T) {
				pgtest.Clear(t, db)
				require.NoError(t, ask([]int32{1, 2, 3}, []string{"r", "s", "z"}, []int64{5, 1, 1}))

				holder := limitertest.Hold(t, db, ratelimit.Config{Name: "test"}, "z")
				one := askLater([]int32{1, 1, 2, 2}[:2+len(refused.keys)],
					append([]string{"m", "z"}, refused.keys...), append([]int64{1, 1}, refused.costs...))
				pgtest.WaitUntilBlocked(t, db.Pool, 1)
				other := askLater([]int32{1, 1}, []string{"r", "z"}, []int64{1, 1})
				pgtest.WaitUntilBlocked(t, db.Pool, 2)
				require.NoError(t, holder.Commit(t.Context()))
				_, err1 := one()
				_, err2 := other()
				requireDeadlockIf(t, broken, errors.Join(err1, err2))
			})
		}
	}
}

// takeLater starts a goroutine that takes 1 unit from each key, in one statement.
func takeLater(l *ratelimit.Limiter, keys ...string) func() ([]modeltest.Element, error) {
	elements := make([]modeltest.Element, len(keys))
	for i, key := range keys {
		elements[i] = modeltest.Element{Key: key, Cost: 1, Count: 1}
	}
	return testkit.Later(func() ([]modeltest.Element, error) {
		return elements, decide(context.Background(), l, limitertest.Engine(l).Database.DB, elements, engine.Transaction{})
	})
}

// requireDeadlockIf requires a deadlock if variant is true, and no error otherwise.
func requireDeadlockIf(t *testing.T, variant bool, err error) {
	t.Helper()
	if variant {
		requireDeadlock(t, err)
	} else {
		require.NoError(t, err)
	}
}

func requireDeadlock(t *testing.T, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, "40P01", pgErr.Code)
}

// Rows are also made in the lock order. If "a" and "z" are new and another transaction holds "m", "z" is not made
// before "m" is locked. The test notices a variant of rate_limit_all that skips "m". In all other functions, one
// statement makes rows and locks them.
func TestRowsAreMadeAndLockedInOneOrder(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for name, variant := range map[string]struct {
		policy ratelimit.Policy
		broken bool
	}{
		"fixed window":        {ratelimit.FixedWindow{Limit: 10, Window: limitertest.Year}, false},
		"sliding log":         {ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}, false},
		"sliding log, broken": {ratelimit.SlidingLog{Limit: 10, Window: limitertest.Year}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			broken := variant.broken
			if broken {
				pgtest.Rewrite(t, db.Pool, "rate_limit_all", "        making := true;", `making := true;
					INSERT INTO public.rate_limit_ephemeral (prefix, key) SELECT names[p], keys[p] FROM unnest(part_of) AS p ON CONFLICT DO NOTHING;`)
			}
			config := ratelimit.Config{Name: "test", Policy: variant.policy}
			limiter := limitertest.New(t, db.NewPool(t, nil), config)
			_, err := limiter.Allow(t.Context(), "m")
			require.NoError(t, err)

			holder := limitertest.Hold(t, db, config, "m")
			batch := takeLater(limiter, "z", "m", "a")
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			_, err = limiter.WithTx(holder).Allow(t.Context(), "z")
			err = errors.Join(err, holder.Commit(t.Context()))
			_, batchErr := batch()
			if broken {
				requireDeadlock(t, errors.Join(err, batchErr))
				return
			}
			require.NoError(t, errors.Join(err, batchErr))
			for key, want := range map[string]int64{"a": 1, "m": 2, "z": 2} {
				require.Equal(t, want, limitertest.Taken(t, db.Pool, config, key), key)
			}
		})
	}
}

// A statement skips held rows, but waits for rows that other transactions are making. If a held row is deleted during
// the statement, the statement must not make this row after it has locked a later row. A second transaction may make
// the deleted row now and wait for the later row. In this test, the statement has locked "a" and "c", "b" is held and
// then deleted, and "d" is missing. A trigger stops the statement when it begins to make rows.
func TestVanishedRowsAreNotMadeBehindLockedOnes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	for _, broken := range []bool{false, true} {
		for _, durable := range limitertest.TablesFor(t, fmt.Sprint(broken)) {
			t.Run(fmt.Sprintf("%s, broken: %v", pgtest.Table(durable), broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				if broken {
					pgtest.Rewrite(t, db.Pool, "rate_limit_all", "        making := true;", `making := true;
						PERFORM public._rate_limit_try_to_make(names[p], keys[p], durables[p]) FROM unnest(part_of) AS p;`)
				}
				pgtest.Exec(t, db.Pool, `
					CREATE FUNCTION stop() RETURNS trigger LANGUAGE plpgsql AS $$
					BEGIN
						IF current_setting('test.stops', true) = 'yes' THEN
							PERFORM pg_advisory_xact_lock_shared(1);
						END IF;
						RETURN NULL;
					END $$;
					CREATE TRIGGER stop BEFORE INSERT ON `+pgtest.Table(durable)+`
						FOR EACH STATEMENT EXECUTE FUNCTION stop()`)
				ask := func(conn *pgx.Conn, skipHeld bool, keys ...string) (granted int64, err error) {
					err = conn.QueryRow(context.Background(), `SELECT coalesce(sum(granted) FILTER (WHERE granted > 0), 0)::bigint
						FROM cardinality($1::text[]) AS n, rate_limit_all(
							ARRAY(SELECT generate_series(1, n)), array_fill('test'::text, ARRAY[n]), $1, array_fill($2::boolean, ARRAY[n]),
							array_fill(1::smallint, ARRAY[n]), array_fill(10::bigint, ARRAY[n]), array_fill($3::bigint, ARRAY[n]),
							array_fill(0::bigint, ARRAY[n]), skip_held => $4)`,
						keys, durable, limitertest.Year.Microseconds(), skipHeld).Scan(&granted)
					return granted, err
				}
				_, err := ask(pgtest.Connect(t, db), false, "a", "b", "c")
				require.NoError(t, err)

				sweeper := limitertest.Hold(t, db, ratelimit.Config{Name: "test", Durable: durable}, "b")
				stop, one, two := pgtest.Connect(t, db), pgtest.Connect(t, db), pgtest.Connect(t, db)
				pgtest.Exec(t, stop, "SELECT pg_advisory_lock(1)")
				pgtest.Exec(t, one, "SET test.stops = 'yes'")
				skips := testkit.Later(func() (int64, error) { return ask(one, true, "a", "b", "c", "d") })
				pgtest.WaitUntilBlocked(t, db.Pool, 1)
				pgtest.Exec(t, sweeper, "DELETE FROM "+pgtest.Table(durable)+" WHERE key = 'b'")
				require.NoError(t, sweeper.Commit(t.Context()))
				waits := testkit.Later(func() (int64, error) { return ask(two, false, "b", "c") })
				pgtest.WaitUntilBlocked(t, db.Pool, 2)
				pgtest.Exec(t, stop, "SELECT pg_advisory_unlock(1)")

				skipped, err1 := skips()
				waited, err2 := waits()
				requireDeadlockIf(t, broken, errors.Join(err1, err2))
				if !broken {
					require.EqualValues(t, 3, skipped) // the answer says nothing about "b", so "b" is asked again
					require.EqualValues(t, 2, waited)
				}
			})
		}
	}
}

// A transaction that changes several policies, in any order, does not deadlock with a report about these policies.
func TestChangesOfPoliciesDoNotDeadlockWithReports(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	for _, change := range []string{"DELETE FROM rate_limit_policy", "UPDATE rate_limit_policy SET policy = 'fixed 2/1h'"} {
		for _, broken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%.6s, broken: %v", change, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				if broken {
					pgtest.Rewrite(t, db.Pool, "rate_limit_report", "FOR SHARE SKIP LOCKED", "")
				}
				pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, policy, mode, comment) VALUES
					('a', 'fixed 1/1h', 'shadow', 'a'), ('b', 'fixed 1/1h', 'shadow', 'b')`)
				const report = `SELECT rate_limit_report(array_agg(id), array_agg(row_changed_us), ARRAY['', ''], ARRAY[1, 1], ARRAY[0, 0],
					ARRAY[0, 0]) FROM rate_limit_policies()`
				pgtest.Exec(t, db.Pool, report)
				tx := pgtest.Begin(t, db)
				pgtest.Exec(t, tx, change+" WHERE id = 2")
				conn := pgtest.Connect(t, db)
				reports := testkit.Later(func() (pgconn.CommandTag, error) { return conn.Exec(context.Background(), report) })
				if broken {
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
				} else {
					_, err := reports()
					require.NoError(t, err)
				}
				_, err1 := tx.Exec(t.Context(), change+" WHERE id = 1")
				var err2 error
				if broken {
					_, err2 = reports()
				}
				requireDeadlockIf(t, broken, errors.Join(err1, err2))
				if !broken {
					require.NoError(t, tx.Commit(t.Context()))
					require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::integer FROM rate_limit_shadow"))
				}
			})
		}
	}
}

// Reports of shadow denials also lock rows in one order. A report that deletes surplus rows waits for no lock.
func TestReportsDoNotDeadlock(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")

	const shadows = `SELECT rate_limit_report(array_agg(id), array_agg(row_changed_us), array_agg(e.key), array_agg(0::bigint),
		array_agg(0::bigint), array_agg(1::bigint))
		FROM unnest($1::bigint[], $2::text[]) AS e (id, key) JOIN rate_limit_policies() AS p USING (id)`
	for name, c := range map[string]struct {
		sql      string
		numbers  [2][]int64
		keys     [2][]string
		exist    string
		hold     string
		function string
		oldNew   []string
	}{
		"a shadow's surplus": {
			sql:     shadows,
			numbers: [2][]int64{{1, 2, 2}, {1, 2}},
			keys:    [2][]string{{"k1", "a", "m"}, {"least", "a"}},
			exist: `INSERT INTO rate_limit_policy (name, policy, mode, comment) VALUES
					('a', 'fixed 1/1h', 'shadow', 'a'), ('b', 'fixed 1/1h', 'shadow', 'b');
				INSERT INTO rate_limit_shadow
				SELECT n, key, 0, 0, denied, now(), now() FROM (
					SELECT 1, 'k' || i, 9 FROM generate_series(1, 1000) AS i
					UNION ALL VALUES (1, 'least', 0), (2, 'a', 1), (2, 'm', 1)) AS e (n, key, denied)`,
			hold:     "SELECT FROM rate_limit_shadow WHERE policy_id = 2 AND key = 'm' FOR UPDATE",
			function: "rate_limit_report",
			oldNew:   []string{"FOR UPDATE SKIP LOCKED", "FOR UPDATE"},
		},
	} {
		for _, broken := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, broken: %v", name, broken), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				if broken {
					pgtest.Rewrite(t, db.Pool, c.function, c.oldNew...)
				}
				pgtest.Exec(t, db.Pool, c.exist)
				holder := pgtest.Begin(t, db)
				pgtest.Exec(t, holder, c.hold)
				var reports [2]func() (pgconn.CommandTag, error)
				for i := range reports {
					conn := pgtest.Connect(t, db)
					reports[i] = testkit.Later(func() (pgconn.CommandTag, error) {
						return conn.Exec(context.Background(), c.sql, c.numbers[i], c.keys[i])
					})
					pgtest.WaitUntilBlocked(t, db.Pool, i+1)
				}
				require.NoError(t, holder.Commit(t.Context()))
				_, err1 := reports[0]()
				_, err2 := reports[1]()
				requireDeadlockIf(t, broken, errors.Join(err1, err2))
			})
		}
	}
}

// The first SELECT finds no row "a" and stops there. While the INSERT waits for another transaction's row "a", the row
// "m" is deleted. The SELECT has not reached "m". The row "n" is also deleted, and made again.
func TestRowDeletedBetweenLookAndInsert(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pool := db.NewPool(t, nil)
	limitertest.EachSlowPolicyAndTable(t, 10, func(t *testing.T, config ratelimit.Config) {
		for _, commit := range []bool{true, false} {
			pgtest.Clear(t, db)
			limiter := limitertest.New(t, pool, config)
			for _, key := range []string{"m", "n", "z"} {
				_, err := limiter.AllowN(t.Context(), key, 4)
				require.NoError(t, err)
			}

			somebody := limitertest.Begin(t, db.Pool)
			_, err := limiter.WithTx(somebody).AllowN(t.Context(), "a", 5)
			require.NoError(t, err)
			wait := takeLater(limiter, "z", "n", "m", "a")
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			pgtest.Exec(t, db.Pool, "DELETE FROM "+pgtest.Table(config.Durable)+" WHERE key IN ('m', 'n')")
			_, err = limiter.AllowN(t.Context(), "n", 2)
			require.NoError(t, err)
			if commit {
				require.NoError(t, somebody.Commit(t.Context()))
			} else {
				require.NoError(t, somebody.Rollback(t.Context()))
			}

			elements, err := wait()
			require.NoError(t, err)
			want := map[string]int64{"a": 1, "m": 1, "n": 3, "z": 5}
			if commit {
				want["a"] += 5
			}
			for _, e := range elements {
				require.EqualValues(t, 1, e.Decision.Granted, e.Key)
				require.Equal(t, 10-want[e.Key], e.Decision.Remaining, e.Key)
				require.Equal(t, want[e.Key], limitertest.Taken(t, db.Pool, config, e.Key), e.Key)
			}
		}
	})
}
