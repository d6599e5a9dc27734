package sql_test

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// slotSQL is the row that rate_limit_acquire returns.
type slotSQL struct {
	Allowed    bool
	Slot       *string
	Fence      *int64
	RetryAfter time.Duration
}

func acquireSQL(ctx context.Context, db pgtest.Querier, name, policy string, cost int64, ttl string, durable, wait bool) (slotSQL, error) {
	rows, err := db.Query(ctx, `SELECT allowed, slot::text, fence, retry_after
		FROM rate_limit_acquire($1, 'key', $2, $3, $4::interval, $5, 'worker 7', $6)`, name, policy, cost, ttl, durable, wait)
	if err != nil {
		return slotSQL{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[slotSQL])
}

// Of 2 slots, the third request is denied, and the fourth waits. The first release serves it.
func TestSQLSlots(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	release := func(slot *string) bool {
		return pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_release($1::uuid)", slot)
	}
	renewed := func(slot *string) (allowed bool, fence *int64, ends *time.Time) {
		require.NoError(t, db.Pool.QueryRow(t.Context(),
			"SELECT allowed, fence, ends_at FROM rate_limit_renew($1::uuid, '2 hours')", slot).Scan(&allowed, &fence, &ends))
		return allowed, fence, ends
	}
	for _, durable := range []bool{false, true} {
		name := fmt.Sprint(durable)
		acquire := func(wait bool) slotSQL {
			s, err := acquireSQL(t.Context(), db.Pool, name, "concurrent 2", 1, "1 hour", durable, wait)
			require.NoError(t, err)
			return s
		}
		first, second, denied, waits := acquire(false), acquire(false), acquire(false), acquire(true)
		require.True(t, first.Allowed)
		require.True(t, second.Allowed)
		require.Greater(t, *second.Fence, *first.Fence)
		require.False(t, denied.Allowed)
		require.Nil(t, denied.Slot)
		require.InDelta(t, time.Hour, denied.RetryAfter, float64(time.Minute))
		require.False(t, waits.Allowed)
		require.NotNil(t, waits.Slot)
		require.Nil(t, waits.Fence)
		allowed, _, ends := renewed(waits.Slot)
		require.False(t, allowed)
		require.NotNil(t, ends)

		require.True(t, release(first.Slot))
		require.False(t, release(first.Slot), "a second release")
		allowed, fence, _ := renewed(waits.Slot)
		require.True(t, allowed)
		require.Greater(t, *fence, *second.Fence)
		allowed, _, ends = renewed(first.Slot)
		require.False(t, allowed)
		require.Nil(t, ends, "it is lost")
		require.False(t, acquire(false).Allowed)

		// The holders of a key that is reset have lost their slots, and a stale release changes nothing.
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_reset($1, 'key', $2)", name, durable)
		next := acquire(false)
		require.True(t, next.Allowed)
		require.Greater(t, *next.Fence, *fence)
		require.False(t, release(second.Slot))
		allowed, _, _ = renewed(second.Slot)
		require.False(t, allowed)
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, name))
	}
}

// 5 at a time and 3 a day.
func TestSQLSlotsBesideARate(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, policy := range []string{"concurrent 2, fixed 3/360d", "fixed 3/360d, concurrent 2"} {
		acquire := func() slotSQL {
			s, err := acquireSQL(t.Context(), db.Pool, policy, policy, 1, "1 hour", false, false)
			require.NoError(t, err)
			return s
		}
		first := acquire()
		require.True(t, first.Allowed && acquire().Allowed)
		require.False(t, acquire().Allowed, "no slot is free, so nothing is counted")
		require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_release($1::uuid)", first.Slot))
		third := acquire()
		require.True(t, third.Allowed)
		require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_release($1::uuid)", third.Slot))
		require.Greater(t, acquire().RetryAfter, 24*time.Hour, "a slot is free, but the rate is used up")
		require.EqualValues(t, 0, pgtest.Scalar[int64](t, db.Pool, "SELECT remaining FROM rate_limit_peek($1, 'key', $1)", policy))
	}
}

// Whatever many acquire, renew and release at once: never are more slots live than the limit, fences ascend, and in the
// end nothing is left.
func TestSlotsAddUp(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, durable := range limitertest.TablesFor(t, "") {
		const callers, limit = 5, 2
		var live, most, last atomic.Int64
		var mu sync.Mutex
		errs := make([]error, callers)
		name := fmt.Sprint(durable)
		testkit.Together(callers, func(i int) {
			for range 12 {
				s, err := acquireSQL(t.Context(), db.Pool, name, fmt.Sprintf("concurrent %d", limit), 1, "1 hour", durable, true)
				for err == nil && !s.Allowed {
					err = db.Pool.QueryRow(t.Context(), "SELECT allowed, fence FROM rate_limit_renew($1::uuid, '1 hour')", s.Slot).
						Scan(&s.Allowed, &s.Fence)
				}
				if err != nil {
					errs[i] = err
					return
				}
				mu.Lock()
				most.Store(max(most.Load(), live.Add(1)))
				last.Store(max(last.Load(), *s.Fence))
				mu.Unlock()
				live.Add(-1)
				var released bool
				err = db.Pool.QueryRow(t.Context(), "SELECT rate_limit_release($1::uuid)", s.Slot).Scan(&released)
				if err == nil && !released {
					err = fmt.Errorf("the slot with the fence %d was lost", *s.Fence)
				}
				if err != nil {
					errs[i] = err
					return
				}
			}
		})
		for _, err := range errs {
			require.NoError(t, err)
		}
		require.LessOrEqual(t, most.Load(), int64(limit))
		require.Zero(t, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM "+pgtest.Table(durable)+"_hold"))
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, name))
	}
}

// A hand-over is announced with the id and the fence of the slot.
func TestHandOverIsAnnounced(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "notifications of a shard")
	db := pgtest.New(t)
	conn, err := db.Pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	_, err = conn.Exec(t.Context(), "LISTEN rate_limit_slot")
	require.NoError(t, err)
	first, err := acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "1 hour", false, false)
	require.NoError(t, err)
	waits, err := acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "1 hour", false, true)
	require.NoError(t, err)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_release($1::uuid)", first.Slot)
	told, err := conn.Conn().WaitForNotification(t.Context())
	require.NoError(t, err)
	fence := pgtest.Scalar[int64](t, db.Pool, "SELECT fence FROM rate_limit_renew($1::uuid)", waits.Slot)
	require.Equal(t, fmt.Sprintf("%s %d", *waits.Slot, fence), told.Payload)
}

// The sweeper keeps the row while a slot lives. A ticket outlives the row, and is served when it is renewed.
func TestSweepingSlots(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the time of a sweep")
	db := pgtest.New(t)
	count := func(table string) int64 { return pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM "+table) }
	sweep := func(after, names string) {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_sweep(now => now() + $1::interval, names => $2::text[])", after, names)
	}
	for _, durable := range []bool{false, true} {
		table := pgtest.Table(durable)
		_, err := acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "1 hour", durable, false)
		require.NoError(t, err)
		waits, err := acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "3 hours", durable, true)
		require.NoError(t, err)
		sweep("30 minutes", "{n}")
		require.EqualValues(t, 1, count(table))
		sweep("2 hours", "{n}")
		require.Zero(t, count(table), "the slot has ended")
		require.EqualValues(t, 2, count(table+"_hold"))
		require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_renew($1::uuid)", waits.Slot))
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, "n"))
		sweep("1 day 5 hours", "{n}")
		sweep("1 day 5 hours", "{n}")
		require.Zero(t, count(table))
		require.Zero(t, count(table+"_hold"))
		_, err = acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "1 hour", durable, false)
		require.NoError(t, err)
		_, err = acquireSQL(t.Context(), db.Pool, "n", "concurrent 1", 1, "1 hour", durable, true)
		require.NoError(t, err)
		sweep("1 second", "{other}")
		require.Zero(t, count(table))
		require.Zero(t, count(table+"_hold"))
	}
}

func TestSQLSlotsRefuseBadInput(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	held, err := acquireSQL(t.Context(), db.Pool, "n", "concurrent 5", 1, "1 hour", false, false)
	require.NoError(t, err)
	stored := pgtest.StoredRows(t, db.Pool, false)
	for sql, column := range map[string]string{
		"rate_limit_acquire('n', 'k', 'concurrent 5', 0)":                                                             "cost",
		"rate_limit_acquire('n', 'k', 'concurrent 5', 6)":                                                             "cost",
		"rate_limit_acquire('n', 'k', 'concurrent 5', NULL)":                                                          "cost",
		"rate_limit_acquire('n', 'k', 'concurrent 5', 1, '0')":                                                        "ttl",
		"rate_limit_acquire('n', 'k', 'concurrent 5', 1, '100 years')":                                                "ttl",
		"rate_limit_acquire('n', 'k', 'concurrent 5', 1, NULL)":                                                       "ttl",
		"rate_limit_acquire('n', 'k', 'concurrent 0')":                                                                "policy",
		"rate_limit_acquire('n', 'k', 'concurrent 1000001')":                                                          "policy",
		"rate_limit_acquire('n', 'k', 'fixed 5/1m')":                                                                  "policy",
		"rate_limit_acquire('n', 'k', 'concurrent 5, concurrent 6')":                                                  "policy",
		"rate_limit_acquire('n', 'k', 'concurrent 5, fixed 5/1m', wait => true)":                                      "policy",
		"rate_limit_acquire('n', '', 'concurrent 5')":                                                                 "key",
		"rate_limit_acquire('n', 'k', 'concurrent 5', holder => repeat('x', 257))":                                    "holder",
		"rate_limit_acquire('n', 'k', 'concurrent 5', holder => E'a\\nb')":                                            "holder",
		"rate_limit_renew('" + *held.Slot + "', '0')":                                                                 "ttl",
		"rate_limit_renew('" + *held.Slot + "', NULL)":                                                                "ttl",
		"rate_limit_renew_all('{}', 0)":                                                                               "ttl_us",
		"rate_limit_renew_all('{}', 1000, limits => '{1}')":                                                           "",
		"rate_limit_renew_all('{NULL}', 1000, limits => '{0}')":                                                       "",
		"rate_limit_allow('n', 'k', 'concurrent 5')":                                                                  "policy",
		"rate_limit_charge('n', 'k', 'concurrent 5')":                                                                 "policy",
		"rate_limit_hold('n', 'k', 'concurrent 5')":                                                                   "policy",
		"rate_limit_reserve('n', 'k', 'concurrent 5')":                                                                "policy",
		"rate_limit_all('{1}', '{n}', '{k}', '{f}', '{6}', '{5}', '{0}', '{0}')":                                      "",
		"rate_limit_all('{1}', '{n}', '{k}', '{f}', '{6}', '{5}', '{0}', '{0}', '{-1}')":                              "",
		"rate_limit_slots('{n}', '{k}', '{f}', '{5}', '{1}', '{NULL}', ARRAY[gen_random_uuid()], ARRAY['{}'::jsonb])": "",
		"rate_limit_slots('{n}', '{k}', '{f}', '{5}', '{0}', '{1000}', ARRAY[gen_random_uuid()], '{NULL}')":           "",
		"rate_limit_slots('{n}', '{k}', '{f}', '{0}', '{0}', '{NULL}', ARRAY[gen_random_uuid()], '{NULL}')":           "",
		"rate_limit_slots('{n}', '{k}', '{f}', '{5}', '{0}', '{NULL}', '{NULL}', '{NULL}')":                           "",
		"rate_limit_slots('{n}', '{}', '{f}', '{5}', '{0}', '{NULL}', ARRAY[gen_random_uuid()], '{NULL}')":            "",
		"rate_limit_slots('{n,n}', '{k}', '{f}', '{5}', '{0}', '{NULL}', ARRAY[gen_random_uuid()], '{NULL}')":         "",
		"rate_limit_take_all('{n}', '{k}', false, '{6}', '{5}', '{0}', '{0}', NULL, '{1}', '{1}', '{1}', NULL, NULL)": "",
	} {
		_, err := db.Pool.Exec(t.Context(), "SELECT "+sql)
		require.Error(t, err, sql)
		refusedWith(t, err, "22023", column)
	}
	for _, slot := range []string{`{"wait": 7}`, `{"weight": 0}`, `{"weight": 1001}`, `{"weight": "x"}`, `{"who": "x"}`, `[]`, `7`,
		`{"holder": "a\u0007b"}`, `{"group": "` + string(make([]byte, 0)) + fmt.Sprintf("%0257d", 1) + `"}`} {
		_, err := db.Pool.Exec(t.Context(), `SELECT rate_limit_slots('{n}', '{k}', '{f}', '{5}', '{1}', '{1000}', ARRAY[gen_random_uuid()],
			ARRAY[$1::jsonb])`, slot)
		require.Error(t, err, slot)
		refusedWith(t, err, "22023", "")
	}
	_, err = db.Pool.Exec(t.Context(), "SELECT rate_limit_settle($1, 0)", *held.Slot+".e")
	require.Error(t, err)
	require.Equal(t, stored, pgtest.StoredRows(t, db.Pool, false))
	require.NoError(t, sumsDiffer(t.Context(), db.Pool, false, "n"))

	// The policy mode off gives a slot that never ends. The mode deny gives none: a worker that renews NULL must not run.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, mode, policy, comment) VALUES
		('off', 'off', NULL, 'why'), ('deny', 'deny', NULL, 'why'), ('on', 'enforce', 'concurrent 1', 'why')`)
	off := pgtest.Scalar[string](t, db.Pool, "SELECT slot::text FROM rate_limit_acquire('off', 'key') WHERE allowed")
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_renew($1::uuid)", off))
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_release($1::uuid)", off))
	require.True(t, pgtest.Scalar[bool](t, db.Pool,
		"SELECT NOT allowed AND slot IS NULL FROM rate_limit_acquire('deny', 'key', wait => true)"))
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_renew(NULL)"))
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_release(NULL)"))
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_acquire('on', 'key')"))
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_acquire('on', 'key')"))
}

// A renewal locks the keys one after the other in the lock order, also if it has to make rows. It reads the clock after
// the locks, so a slot that ends meanwhile is lost. If somebody has deleted the row of a key, its slots are lost too.
func TestThoroughRenewalsLockKeysInOrder(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the order in which one statement locks rows")
	const renew, makes = "_rate_limit_renew_ephemeral", "DO UPDATE SET held = d.held WHERE false"
	for _, c := range []struct {
		missing, durable bool
		right, wrong     string
		free             []string // the keys that nobody has locked while the renewal waits for "b"
		live             []string // the keys whose slots are renewed
	}{
		{false, false, "", "", []string{"c"}, []string{"b", "c", "dd"}},
		{false, true, "", "", []string{"c"}, []string{"b", "c", "dd"}},
		{true, false, "", "", []string{"c"}, []string{"c", "dd"}},
		{true, true, "", "", []string{"c"}, []string{"c", "dd"}},
		{false, false, "ORDER BY 1, 2, 3", "ORDER BY 2, 3", []string{"c", "dd"}, []string{"b", "c", "dd"}},
		{false, false, "ORDER BY 1, 2, 3", "ORDER BY 1, 2 DESC", []string{"a"}, []string{"b", "c", "dd"}},
		{true, true, "ORDER BY 1, 2, 3", "ORDER BY 1, 2 DESC", []string{"a"}, []string{"c", "dd"}},
		{false, false, makes, "DO NOTHING", []string{"c"}, []string{"a", "b", "c", "dd"}}, // the clock is read before
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			t.Parallel()
			db, table := pgtest.New(t), pgtest.Table(c.durable)
			if c.right != "" {
				pgtest.RewriteTwins(t, db.Pool, renew, c.right, c.wrong)
			}
			ids := []string{}
			for key, ttl := range map[string]string{"a": "2 seconds", "b": "1 hour", "c": "3 hours", "dd": "1 hour"} {
				ids = append(ids, pgtest.Scalar[string](t, db.Pool, `SELECT slot::text FROM rate_limit_acquire(
					'n', $1, 'concurrent 1', ttl => $2::interval, durable => $3)`,
					key, ttl, c.durable))
			}
			holder := pgtest.Begin(t, db)
			if c.missing {
				pgtest.Exec(t, db.Pool, "DELETE FROM "+table+" WHERE key = 'b'")
				pgtest.Exec(t, holder, "INSERT INTO "+table+" (prefix, key) VALUES ('n', 'b')")
			} else {
				pgtest.Exec(t, holder, "SELECT FROM "+table+" WHERE key = 'b' FOR UPDATE")
			}
			renewed := testkit.Later(func() (live []string, err error) {
				err = db.Pool.QueryRow(t.Context(), `SELECT array_agg(h.key ORDER BY h.key)
					FROM rate_limit_renew_all($1::text[]::uuid[], 7200000000) AS r, `+table+"_hold AS h WHERE h.id = r.slot",
					ids).Scan(&live)
				return live, err
			})
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			looker := pgtest.Begin(t, db)
			require.Equal(t, c.free, pgtest.Scalar[[]string](t, looker,
				"SELECT array_agg(d.key ORDER BY d.key) FROM (SELECT key FROM "+table+" FOR UPDATE SKIP LOCKED) AS d"))
			require.NoError(t, looker.Rollback(t.Context()))
			testkit.WaitUntil(t, func() bool {
				return pgtest.Scalar[bool](t, db.Pool, "SELECT clock_timestamp() > to_timestamp(ends_at / 1e6) FROM "+
					table+"_hold WHERE key = 'a'")
			})
			require.NoError(t, holder.Commit(t.Context()))
			live, err := renewed()
			require.NoError(t, err)
			require.Equal(t, c.live, live)
			require.NoError(t, sumsDiffer(t.Context(), db.Pool, c.durable, "n"))
		})
	}
}

// A session plans a renewal while the tables are almost empty. It keeps the plans while they grow.
func TestThoroughPlansOfRenewalsDependOnNoStatistics(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session")
	for _, more := range []string{"", "_hold"} {
		for _, durable := range limitertest.TablesFor(t, more) {
			table := pgtest.Table(durable) + more
			t.Run(table, func(t *testing.T) {
				t.Parallel()
				conn := pgtest.Connect(t, pgtest.New(t))
				acquire := func(from, to int) {
					pgtest.Exec(t, conn, `SELECT rate_limit_acquire('n', concat('key ', i), 'concurrent 1', durable => $3, wait => j = 1)
						FROM generate_series($1::int, $2) AS i, generate_series(0, 1) AS j`, from, to, durable)
				}
				renew := func() {
					pgtest.Exec(t, conn, `SELECT count(*) FROM rate_limit_renew_all(ARRAY(
						SELECT id FROM `+pgtest.Table(durable)+`_hold WHERE key IN ('key 1', 'key 2')), 60000000)`)
				}
				acquire(1, 2)
				scans := pgtest.ScansOfAGrownTable(t, conn, table, "auto", renew, func() { acquire(3, 2_000) }, renew)
				require.LessOrEqual(t, scans.Sequential, int64(1), "the test's own scan of the list")
				require.Less(t, scans.IndexRows, int64(500))
			})
		}
	}
}
