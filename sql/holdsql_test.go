package sql_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// heldSQL is the row that rate_limit_hold returns.
type heldSQL struct {
	Allowed    bool
	Hold       *string
	Remaining  int64
	RetryAfter time.Duration
}

func holdSQL(ctx context.Context, db pgtest.Querier, name, policy string, cost int64, ttl string, durable bool) (heldSQL, error) {
	rows, err := db.Query(ctx, `SELECT allowed, hold, remaining, retry_after
		FROM rate_limit_hold($1, 'key', $2, $3, $4::interval, $5)`, name, policy, cost, ttl, durable)
	if err != nil {
		return heldSQL{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[heldSQL])
}

// settledSQL is the row that rate_limit_settle returns.
type settledSQL struct {
	Counted   int64
	Late      bool
	SettledAt *time.Time
}

func settleSQL(ctx context.Context, db pgtest.Querier, hold string, used int64) (settledSQL, error) {
	rows, err := db.Query(ctx, "SELECT * FROM rate_limit_settle($1, $2)", hold, used)
	if err != nil {
		return settledSQL{}, err
	}
	return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[settledSQL])
}

// foundSQL is a row that rate_limit_find_hold returns.
type foundSQL struct {
	Name, Key string
	Durable   bool
	Units     int64
	Live      bool
	Used      *int64
}

func findSQL(t *testing.T, db pgtest.Querier, hold string) []foundSQL {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT name, key, durable, units, live, used FROM rate_limit_find_hold($1)", hold)
	require.NoError(t, err)
	found, err := pgx.CollectRows(rows, pgx.RowToStructByPos[foundSQL])
	require.NoError(t, err)
	return found
}

// refusedWith requires an error with this SQLSTATE and column, and returns its detail.
func refusedWith(t *testing.T, err error, code, column string) (detail string) {
	t.Helper()
	var refused *pgconn.PgError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, code, refused.Code, "%+v", refused)
	require.Equal(t, column, refused.ColumnName, "%+v", refused)
	require.Contains(t, refused.Message, "rate_limit: ")
	require.NotEmpty(t, refused.Hint)
	return strings.TrimPrefix(refused.Detail, "Remote detail: ") // a proxy adds this
}

// Of a limit of 10, a hold of 6 leaves 4. A settlement of 2 counts 2 and frees the rest.
func TestSQLHolds(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, durable := range []bool{false, true} {
		for _, policy := range []string{
			"fixed 10/360d", "sliding 10/360d", "log 10/360d", "every 10/month", "bucket 10 1/36d",
			"fixed 10/360d, sliding 12/360d, bucket 20 1/36d",
		} {
			name := fmt.Sprint(policy, durable)
			remaining := func() int64 {
				return pgtest.Scalar[int64](t, db.Pool, "SELECT remaining FROM rate_limit_peek($1, 'key', $2, $3)", name, policy, durable)
			}
			got, err := holdSQL(t.Context(), db.Pool, name, policy, 6, "1 hour", durable)
			require.NoError(t, err)
			require.True(t, got.Allowed)
			require.EqualValues(t, 4, got.Remaining)
			require.NotContains(t, *got.Hold, "key")
			require.Equal(t, foundSQL{name, "key", durable, 6, true, nil}, findSQL(t, db.Pool, *got.Hold)[0])
			require.Len(t, findSQL(t, db.Pool, *got.Hold), strings.Count(policy, ",")+1)
			require.Zero(t, got.RetryAfter)

			denied, err := holdSQL(t.Context(), db.Pool, name, policy, 5, "1 hour", durable)
			require.NoError(t, err)
			require.False(t, denied.Allowed)
			require.Nil(t, denied.Hold)
			require.InDelta(t, time.Hour, denied.RetryAfter, float64(time.Minute), policy)
			require.False(t, allowSQL(t, db.Pool, name, policy, 5, durable).Allowed)
			require.True(t, allowSQL(t, db.Pool, name, policy, 4, durable).Allowed)
			require.Zero(t, remaining())

			ends := pgtest.Scalar[time.Time](t, db.Pool, "SELECT rate_limit_extend($1, interval '2 hours')", *got.Hold)
			require.Greater(t, time.Until(ends), time.Hour)
			require.Equal(t, ends, pgtest.Scalar[time.Time](t, db.Pool, "SELECT rate_limit_extend($1, interval '1 hour')", *got.Hold))

			_, err = settleSQL(t.Context(), db.Pool, *got.Hold, 107)
			require.Equal(t, "106", refusedWith(t, err, "RLS05", ""))
			first, err := settleSQL(t.Context(), db.Pool, *got.Hold, 2)
			require.NoError(t, err)
			require.EqualValues(t, 2, first.Counted)
			require.False(t, first.Late)
			require.EqualValues(t, 4, remaining())
			require.Equal(t, foundSQL{name, "key", durable, 6, false, new(int64(2))}, findSQL(t, db.Pool, *got.Hold)[0])
			again, err := settleSQL(t.Context(), db.Pool, *got.Hold, 9)
			require.NoError(t, err)
			require.Equal(t, first, again)
			_, err = db.Pool.Exec(t.Context(), "SELECT rate_limit_extend($1, interval '1 hour')", *got.Hold)
			refusedWith(t, err, "RLS07", "")

			cancelled, err := holdSQL(t.Context(), db.Pool, name, policy, 4, "1 hour", durable)
			require.NoError(t, err)
			require.Zero(t, remaining())
			pgtest.Exec(t, db.Pool, "SELECT rate_limit_cancel($1)", *cancelled.Hold)
			require.EqualValues(t, 4, remaining())

			// A hold ends with a reset. It is settled late, and counts all the same.
			late, err := holdSQL(t.Context(), db.Pool, name, policy, 4, "1 hour", durable)
			require.NoError(t, err)
			parts := strings.Count(policy, ",") + 1
			for i := range parts {
				part := name
				if i > 0 {
					part = fmt.Sprintf("%s/%d", name, i+1)
				}
				pgtest.Exec(t, db.Pool, "SELECT rate_limit_reset($1, 'key', $2)", part, durable)
				require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, part))
			}
			require.EqualValues(t, 10, remaining())
			require.False(t, findSQL(t, db.Pool, *late.Hold)[0].Live)
			settled, err := settleSQL(t.Context(), db.Pool, *late.Hold, 3)
			require.NoError(t, err)
			require.True(t, settled.Late)
			require.EqualValues(t, 7, remaining())
			require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, name))
		}
	}
}

func TestSQLHoldsRefuseBadInput(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")
	db := pgtest.New(t)
	const unknown = "00000000-0000-4000-8000-000000000000"
	good, err := holdSQL(t.Context(), db.Pool, "n", "fixed 10/1d", 3, "1 hour", false)
	require.NoError(t, err)
	stored := pgtest.StoredRows(t, db.Pool, false)
	for sql, column := range map[string]string{
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, interval '0')":               "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, interval '-1 s')":            "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, interval '999 us')":          "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, interval '25 hours')":        "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, interval '100 years')":       "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 1, NULL)":                       "ttl",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 0)":                             "cost",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', 11)":                            "cost",
		"rate_limit_hold('n', 'k', 'fixed 10/1d', NULL)":                          "cost",
		"rate_limit_hold('n', '', 'fixed 10/1d')":                                 "key",
		"rate_limit_hold('n', 'k', 'fixed')":                                      "policy",
		"rate_limit_settle('" + *good.Hold + "', -1)":                             "used",
		"rate_limit_settle('" + *good.Hold + "', 4611686018427387905)":            "used",
		"rate_limit_settle('" + *good.Hold + "', NULL)":                           "used",
		"rate_limit_settle('" + *good.Hold + "', 1, 'fixed')":                     "policy",
		"rate_limit_settle('" + *good.Hold + "', 1, 'fixed 10/1d, fixed 100/1d')": "policy",
		"rate_limit_settle('" + (*good.Hold)[1:] + "', 1)":                        "hold",
		"rate_limit_settle('" + *good.Hold + "x', 1)":                             "hold",
		"rate_limit_settle(NULL, 1)":                                              "hold",
		"rate_limit_cancel('" + unknown + "')":                                    "hold",
		"rate_limit_extend('" + *good.Hold + "', interval '25 hours')":            "ttl",
		"rate_limit_extend('" + unknown + ".x', interval '1 hour')":               "hold",
		"rate_limit_find_hold('" + unknown + "')":                                 "hold",
		"rate_limit_find_hold(NULL)":                                              "hold",
	} {
		_, err := db.Pool.Exec(t.Context(), "SELECT "+sql)
		refusedWith(t, err, "22023", column)
	}
	for _, sql := range []string{
		"rate_limit_settle('" + unknown + ".e', 1)", "rate_limit_cancel('" + unknown + ".ed')",
		"rate_limit_extend('" + unknown + ".d', interval '1 hour')",
		"rate_limit_settle('" + strings.Replace(*good.Hold, ".e", ".d", 1) + "', 1)",
	} {
		_, err := db.Pool.Exec(t.Context(), "SELECT "+sql)
		refusedWith(t, err, "RLS06", "")
	}
	require.Empty(t, findSQL(t, db.Pool, unknown+".e"))
	require.Equal(t, stored, pgtest.StoredRows(t, db.Pool, false))
	require.NoError(t, sumsDiffer(t.Context(), db.Pool, false, "n"))

	// The policy mode off makes an empty hold. The mode deny denies.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, mode, policy, comment) VALUES
		('off', 'off', NULL, 'why'), ('deny', 'deny', NULL, 'why')`)
	require.Empty(t, pgtest.Scalar[string](t, db.Pool, "SELECT hold FROM rate_limit_hold('off', 'key')"))
	require.Empty(t, findSQL(t, db.Pool, ""))
	require.EqualValues(t, 7, pgtest.Scalar[int64](t, db.Pool, "SELECT counted FROM rate_limit_settle('', 7)"))
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_hold('deny', 'key')"))
	require.Equal(t, stored, pgtest.StoredRows(t, db.Pool, false))
}

// A settlement by the policy of the hold would lose what the key counts by another algorithm.
func TestSettlingAfterAChangeOfAlgorithm(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, durable := range []bool{false, true} {
		got, err := holdSQL(t.Context(), db.Pool, "n", "fixed 10/1d", 3, "1 hour", durable)
		require.NoError(t, err)
		require.True(t, allowSQL(t, db.Pool, "n", "log 10/1d", 4, durable).Allowed)
		require.False(t, allowSQL(t, db.Pool, "n", "log 10/1d", 4, durable).Allowed) // the hold stays
		stored := pgtest.StoredRows(t, db.Pool, durable)
		_, err = settleSQL(t.Context(), db.Pool, *got.Hold, 2)
		refusedWith(t, err, "RLS08", "")
		require.Equal(t, stored, pgtest.StoredRows(t, db.Pool, durable))
		require.EqualValues(t, 2, pgtest.Scalar[int64](t, db.Pool, "SELECT counted FROM rate_limit_settle($1, 2, 'log 10/1d')", *got.Hold))
		again, err := settleSQL(t.Context(), db.Pool, *got.Hold, 5)
		require.NoError(t, err)
		require.EqualValues(t, 2, again.Counted)
		require.EqualValues(t, 4, pgtest.Scalar[int64](t, db.Pool, "SELECT remaining FROM rate_limit_peek('n', 'key', 'log 10/1d', $1)", durable))
	}
}

// However many hold, settle, cancel, extend and take at once, the sum in the row is that of the list, each settlement
// counts once, and no more is admitted than fits.
func TestHoldsAddUp(t *testing.T) {
	t.Parallel()
	db, seed := pgtest.New(t), limitertest.Seed(t)
	for _, policy := range []string{"fixed 100/360d", "sliding 100/360d", "log 100/360d", "bucket 100 1/36d", "fixed 100/360d, log 100/360d"} {
		for _, durable := range limitertest.TablesFor(t, policy) {
			const callers = 4
			var counted atomic.Int64
			errs := make([]error, callers)
			testkit.Together(callers, func(i int) {
				r := rand.New(rand.NewPCG(seed, uint64(i)))
				for range 12 {
					n := 1 + r.Int64N(20)
					got, err := holdSQL(t.Context(), db.Pool, policy, policy, n, "1 hour", durable)
					if err == nil && got.Allowed {
						used := r.Int64N(min(n, 3))
						testkit.Together(2, func(int) { // the same settlement twice at once
							if _, again := settleSQL(t.Context(), db.Pool, *got.Hold, used); again != nil {
								errs[i] = again
							}
						})
						counted.Add(used)
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
			left := pgtest.Scalar[int64](t, db.Pool, "SELECT remaining FROM rate_limit_peek($1, 'key', $1, $2)", policy, durable)
			require.EqualValues(t, 100, counted.Load()+left, policy)
			require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, policy))
		}
	}
}

// The sweeper keeps a row while a hold of it lives, and a hold for a day after its end, or for an hour after its
// settlement. A row that goes ends its holds.
func TestSweepingHolds(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the time of a sweep")
	db := pgtest.New(t)
	count := func(table string) int64 { return pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM "+table) }
	sweep := func(after, names string) {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_sweep(now => now() + $1::interval, names => $2::text[])", after, names)
	}
	for _, durable := range []bool{false, true} {
		table := pgtest.Table(durable)
		got, err := holdSQL(t.Context(), db.Pool, "n", "fixed 10/1s", 3, "2 hours", durable)
		require.NoError(t, err)
		sweep("1 hour", "{n}")
		require.EqualValues(t, 1, count(table))
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, "n"))
		sweep("3 hours", "{n}")
		require.Zero(t, count(table))
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, "n"))
		sweep("25 hours", "{n}")
		require.EqualValues(t, 1, count(table+"_hold"), "it is kept for a day after its end")
		settled, err := settleSQL(t.Context(), db.Pool, *got.Hold, 2)
		require.NoError(t, err)
		require.True(t, settled.Late, "the hold has ended with its row")
		sweep("59 minutes", "{n}")
		again, err := settleSQL(t.Context(), db.Pool, *got.Hold, 9)
		require.NoError(t, err)
		require.Equal(t, settled, again)
		sweep("62 minutes", "{n}")
		require.Zero(t, count(table+"_hold"))
		_, err = holdSQL(t.Context(), db.Pool, "n", "fixed 10/1s", 3, "2 hours", durable)
		require.NoError(t, err)
		sweep("25 hours", "{n}") // ends it with its row
		require.EqualValues(t, 1, count(table+"_hold"))
		sweep("27 hours", "{n}")
		require.Zero(t, count(table+"_hold"))

		_, err = holdSQL(t.Context(), db.Pool, "n", "fixed 10/1s", 3, "2 hours", durable)
		require.NoError(t, err)
		sweep("1 second", "{other}") // the limiter n no longer exists
		require.Zero(t, count(table))
		require.Zero(t, count(table+"_hold"))

		// A hold that has ended stays as long as it is in the sum of its row. It goes if somebody deletes the row.
		_, err = holdSQL(t.Context(), db.Pool, "n", "fixed 10/360d", 3, "2 hours", durable)
		require.NoError(t, err)
		require.True(t, allowSQL(t, db.Pool, "n", "fixed 10/360d", 1, durable).Allowed)
		sweep("27 hours", "{n}")
		require.EqualValues(t, 1, count(table+"_hold"))
		require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, "n"))
		pgtest.Exec(t, db.Pool, "DELETE FROM "+table)
		sweep("25 hours", "{n}")
		require.EqualValues(t, 1, count(table+"_hold"), "it is kept for a day after its end")
		sweep("27 hours", "{n}")
		require.Zero(t, count(table+"_hold"))
	}
}

// If somebody deletes a row, its holds are over. The next hold notes that.
func TestHoldsOfADeletedRow(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	for _, durable := range []bool{false, true} {
		for range 2 {
			_, err := holdSQL(t.Context(), db.Pool, "n", "fixed 10/1d", 6, "1 hour", durable)
			require.NoError(t, err)
			require.NoError(t, sumsDiffer(t.Context(), db.Pool, durable, "n"))
			pgtest.Exec(t, db.Pool, "DELETE FROM "+pgtest.Table(durable))
		}
	}
}

// A peek, and a denial that finds a missing row, lock nothing. So the key and its holds may change after the key was
// read. Even then the time until the request fits is that of one moment, before the change or after it.
func TestWaitsBesideHoldsAreOfOneMoment(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "a setting of the session")
	type told struct {
		Allowed    bool
		RetryAfter *time.Duration
	}
	// The limit is 10. A hold of 2 hours is changed. The row of name/2 is not locked, because its turn is after that of
	// name, which has no row.
	const (
		peek   = "rate_limit_peek($1 || '/2', 'key', 'fixed 10/360d', $2)"
		allow5 = "rate_limit_allow($1, 'key', 'fixed 100/360d, fixed 10/360d', 5, $2)"
		cancel = "SELECT rate_limit_cancel($1)"
		settle = "SELECT rate_limit_settle($1, 6)"
		window = 360 * 24 * time.Hour
	)
	cases := []struct {
		name, ask     string
		hold, other   int64 // the units of the hold that is changed, and of a hold of 1 hour
		change        string
		before, after time.Duration
	}{
		{"a cancelled hold", peek, 6, 4, cancel, time.Hour, 0},
		{"the only hold", peek, 10, 0, "SELECT rate_limit_settle($1, 10)", 2 * time.Hour, window},
		{"a settled hold beside a missing row", allow5, 6, 4, settle, 2 * time.Hour, window},
		{
			"a new hold beside a missing row", allow5, 6, 0, `SELECT rate_limit_hold(f.name, f.key, 'fixed 10/360d', 4, '1 hour', f.durable)
				FROM rate_limit_find_hold($1) AS f`, 2 * time.Hour, 2 * time.Hour,
		},
	}
	const stop = "IF current_setting('test.stops', true) = 'yes' THEN PERFORM pg_advisory_xact_lock_shared(1); END IF; "
	for _, moment := range []string{"before", "after", "broken"} {
		for _, durable := range limitertest.TablesFor(t, moment) {
			t.Run(fmt.Sprint(pgtest.Table(durable), " ", moment), func(t *testing.T) {
				t.Parallel()
				db := pgtest.New(t)
				if moment == "before" {
					const next = "IF s.algorithm IS DISTINCT FROM algorithm THEN"
					pgtest.Rewrite(t, db.Pool, "_rate_limit_earliest_unlocked", next, stop+next)
				} else {
					const next = "IF beside AND s.retry_after_us = -1 THEN"
					pgtest.Rewrite(t, db.Pool, "rate_limit_all", next, stop+next)
				}
				if moment == "broken" { // only the list of the holds is read then
					pgtest.Rewrite(t, db.Pool, "rate_limit_all", "WHEN NOT locking THEN", "WHEN false THEN")
				}
				stopper, asker := pgtest.Connect(t, db), pgtest.Connect(t, db)
				pgtest.Exec(t, asker, "SET test.stops = 'yes'")
				wrong := 0
				for _, c := range cases {
					if c.other > 0 {
						_, err := holdSQL(t.Context(), db.Pool, c.name+"/2", "fixed 10/360d", c.other, "1 hour", durable)
						require.NoError(t, err)
					}
					hold, err := holdSQL(t.Context(), db.Pool, c.name+"/2", "fixed 10/360d", c.hold, "2 hours", durable)
					require.NoError(t, err)
					pgtest.Exec(t, stopper, "SELECT pg_advisory_lock(1)")
					ask := testkit.Later(func() (told, error) {
						rows, err := asker.Query(t.Context(), "SELECT coalesce(allowed, false), retry_after FROM "+c.ask, c.name, durable)
						if err != nil {
							return told{}, err
						}
						return pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[told])
					})
					pgtest.WaitUntilBlocked(t, db.Pool, 1)
					pgtest.Exec(t, db.Pool, c.change, *hold.Hold)
					pgtest.Exec(t, stopper, "SELECT pg_advisory_unlock(1)")
					got, err := ask()
					require.NoError(t, err)

					want := c.after
					if moment == "before" {
						want = c.before
					}
					right := !got.Allowed && got.RetryAfter != nil && *got.RetryAfter > 0 &&
						(*got.RetryAfter-want).Abs() < time.Minute
					if !right {
						wrong++
					}
					require.True(t, right || moment == "broken", "%s: %+v", c.name, got)
				}
				require.Equal(t, moment == "broken", wrong == len(cases), "%d of %d", wrong, len(cases))
			})
		}
	}
}
