package sql_test

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// answer is the row that rate_limit_allow and rate_limit_peek return.
type answer struct {
	Allowed                bool
	Remaining              int64
	RetryAfter, ResetAfter time.Duration
}

func askSQL(t testing.TB, db pgtest.Querier, sql string, args ...any) answer {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT allowed, remaining, retry_after, reset_after FROM "+sql, args...)
	require.NoError(t, err, sql)
	got, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[answer])
	require.NoError(t, err, sql)
	return got
}

func allowSQL(t testing.TB, db pgtest.Querier, name, policy string, cost int64, durable bool) answer {
	t.Helper()
	return askSQL(t, db, "rate_limit_allow($1, 'key', $2, $3, $4)", name, policy, cost, durable)
}

func peekSQL(t testing.TB, db pgtest.Querier, name, policy string, durable bool) answer {
	t.Helper()
	return askSQL(t, db, "rate_limit_peek($1, 'key', $2, $3)", name, policy, durable)
}

// A limiter and rate_limit_allow take from the same rows, and decide alike. The clock runs between two calls, so the
// times in the second result may be shorter, but not longer.
func TestSQLAllowsAsALimiterDoes(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	r := rand.New(rand.NewPCG(testkit.Seed(t, modeltest.SeedVariable), 0))
	const year = 365 * 24 * time.Hour
	for i, policy := range []ratelimit.Policy{
		ratelimit.FixedWindow{Limit: 10, Window: year}, ratelimit.SlidingWindow{Limit: 10, Window: year},
		ratelimit.TokenBucket{Capacity: 10, Refill: 1, Every: year / 10}, ratelimit.SlidingLog{Limit: 10, Window: year},
		ratelimit.All(ratelimit.FixedWindow{Limit: 10, Window: year}, ratelimit.SlidingLog{Limit: 8, Window: year}, ratelimit.TokenBucket{Capacity: 9, Refill: 1, Every: year}),
	} {
		for _, durable := range limitertest.TablesFor(t, policy.String()) {
			config := ratelimit.Config{
				Policy: policy, Durable: durable, NoDenialCache: true,
			}
			config.Name = fmt.Sprint("go ", i)
			limiter := limitertest.New(t, db.Pool, config)
			config.Name = fmt.Sprint("sql ", i)
			same := limitertest.New(t, db.Pool, config) // the limiter uses the same rows as the function
			denied := 0
			for range 12 {
				cost := 1 + r.Int64N(4)
				want, err := limiter.AllowN(t.Context(), "key", cost)
				require.NoError(t, err)
				requireAlike(t, want, allowSQL(t, db.Pool, config.Name, policy.String(), cost, durable))
				if !want.Allowed {
					denied++
				}

				want, err = limiter.Peek(t.Context(), "key")
				require.NoError(t, err)
				requireAlike(t, want, peekSQL(t, db.Pool, config.Name, policy.String(), durable))
				got, err := same.Peek(t.Context(), "key")
				require.NoError(t, err)
				require.Equal(t, want.Remaining, got.Remaining)
			}
			require.Positive(t, denied)
			require.NoError(t, same.Reset(t.Context(), "key"))
			fresh, err := same.Peek(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, fresh.Limit, fresh.Remaining)
			require.Equal(t, answer{Allowed: true, Remaining: fresh.Limit}, peekSQL(t, db.Pool, config.Name, policy.String(), durable))
		}
	}
}

// requireAlike compares two decisions. The second decision may be up to a minute earlier or later.
func requireAlike(t *testing.T, want ratelimit.Result, got answer) {
	t.Helper()
	require.Equal(t, want.Allowed, got.Allowed)
	require.Equal(t, want.Remaining, got.Remaining)
	for _, times := range [][2]time.Duration{{want.RetryAfter, got.RetryAfter}, {want.ResetAfter, got.ResetAfter}} {
		require.Equal(t, times[0] > 0, times[1] > 0)
		require.InDelta(t, times[0], times[1], float64(time.Minute))
	}
}

// If policy is NULL, the row of rate_limit_policy in force decides, as it does for a limiter with Config.Policies.
func TestSQLAllowsUnderThePolicyInForce(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	// If no row is in force, the error says what to do.
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, policy, comment) VALUES ('n', 'other', 'fixed 1/1d', 'why')`)
	for _, call := range []string{"allow('n', 'secret')", "peek('n', 'secret')", "allow('m', 'other')", "allow('n', 'secret', NULL)"} {
		_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_"+call)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Equal(t, "22023", pgErr.Code)
		require.Equal(t, "rate_limit: no policy is given, and none is in force for the key", pgErr.Message)
		require.Contains(t, pgErr.Hint, "INSERT INTO rate_limit_policy (name, policy, comment) VALUES (<name>, 'sliding 10/1m', <why>)")
		require.NotContains(t, fmt.Sprintf("%+v", *pgErr), "secret")
	}
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, key_prefix, mode, policy, valid_from, valid_until, comment) VALUES
		('n', NULL, NULL, 'enforce', 'fixed 50/1d', now(), 'infinity', 'why'),
		('n', NULL, NULL, 'shadow', 'fixed 51/1d', now(), 'infinity', 'why'),
		('n', NULL, NULL, 'enforce', 'fixed 52/1d', now() - interval '2 h', now() - interval '1 h', 'ended'),
		('n', NULL, NULL, 'enforce', 'fixed 53/1d', now() + interval '1 d', 'infinity', 'to come'),
		('n', NULL, NULL, 'enforce', 'fixed 54/1d', '-infinity', 'infinity', 'began earlier'),
		('n', NULL, 'a', 'enforce', 'fixed 40/1d', now(), 'infinity', 'why'),
		('n', NULL, 'a%', 'enforce', 'fixed 41/1d', now(), 'infinity', 'no pattern'),
		('n', NULL, 'ab', 'enforce', 'fixed 30/1d, log 20/1d', now(), 'infinity', 'why'),
		('n', 'abc', NULL, 'enforce', 'fixed 10/1d', now(), 'infinity', 'why'),
		('n', 'abc', NULL, 'enforce', 'fixed 9/1d', now(), 'infinity', 'of two, the higher id'),
		('n', 'off', NULL, 'off', NULL, now(), 'infinity', 'why'),
		('n', 'banned', NULL, 'deny', NULL, now(), now() + interval '1 day', 'why'),
		('n', 'banned for good', NULL, 'deny', NULL, now(), 'infinity', 'why')`)
	for key, remaining := range map[string]int64{"b": 50, "a": 40, "ac": 40, "ab": 20, "abd": 20, "abc": 9, "a%": 41} {
		require.Equal(t, answer{Allowed: true, Remaining: remaining}, askSQL(t, db.Pool, "rate_limit_peek('n', $1)", key), key)
		require.Equal(t, remaining-1, askSQL(t, db.Pool, "rate_limit_allow('n', $1)", key).Remaining)
		require.Equal(t, remaining-3, askSQL(t, db.Pool, "rate_limit_allow('n', $1, cost => 2)", key).Remaining)
		require.Equal(t, remaining-1, askSQL(t, db.Pool, "rate_limit_allow('n', $1, durable => true)", key).Remaining)
		_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_allow('n', $1, cost => $2)", key, remaining+1)
		require.ErrorContains(t, err, "the policy can never allow it")
	}
	// The modes off and deny count nothing.
	rows := pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral")
	require.Equal(t, answer{true, math.MaxInt64, 0, 0}, askSQL(t, db.Pool, "rate_limit_allow('n', 'off', cost => 1000)"))
	for _, call := range []string{"rate_limit_allow('n', 'banned', cost => 1000)", "rate_limit_peek('n', 'banned')"} {
		banned := askSQL(t, db.Pool, call)
		require.False(t, banned.Allowed)
		require.Zero(t, banned.Remaining)
		require.InDelta(t, 24*time.Hour, banned.RetryAfter, float64(time.Hour))
		require.Equal(t, banned.RetryAfter, banned.ResetAfter)
	}
	require.Equal(t, math.MaxInt32, pgtest.Scalar[int](t, db.Pool, "SELECT retry_after_seconds FROM rate_limit_peek('n', 'banned for good')"))
	require.Equal(t, rows, pgtest.Scalar[int64](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
	for _, call := range []string{"allow(NULL, 'b')", "allow('', 'b')", "allow('n', NULL)", "allow('n', '')", "allow('n', 'off', cost => -1)", "allow('n', 'banned', cost => NULL)"} {
		_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_"+call)
		require.ErrorContains(t, err, "22023")
		require.NotContains(t, err.Error(), "no policy")
	}
}

// rate_limit_allow and limiters ignore the same invalid rows. The triggers would refuse to write such rows.
func TestSQLPassesOverWhatLimitersPassOver(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, `SET LOCAL session_replication_role = replica;
		INSERT INTO rate_limit_policy (name, key, mode, policy, comment) VALUES
			('n', NULL, 'enforce', 'fixed 50/1d', 'why'), ('n', 'a', 'enforce', NULL, 'why'), ('n', 'a', 'leap', 'fixed 9/1d', 'why'),
			('n', 'a', 'leap', NULL, 'why'), ('n', 'a', '', NULL, 'why'), ('n', 'off', 'off', 'leap 1', 'why'),
			('n', 'deny', 'deny', 'leap 1', 'why'), ('m', 'a', 'enforce', NULL, 'why'), ('n', 'a', 'enforce', 'leap 9/1d', 'why'),
			('n', 'a', 'enforce', 'fixed 0/1d', 'why'), ('n', 'a', 'enforce', '', 'why'), ('n', 'a', 'enforce', 'fixed 9/72y', 'why'),
			('n', 'a', 'enforce', 'fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d, fixed 1/1d', 'why'),
			('m', 'a', 'enforce', 'leap 1/1d', 'why'), ('m', NULL, 'enforce', 'leap 1/1d', 'why')`)
	require.NoError(t, tx.Commit(t.Context()))
	require.Equal(t, answer{Allowed: true, Remaining: 50}, askSQL(t, db.Pool, "rate_limit_peek('n', 'a')"))
	require.Equal(t, int64(49), askSQL(t, db.Pool, "rate_limit_allow('n', 'a')").Remaining)
	require.True(t, askSQL(t, db.Pool, "rate_limit_allow('n', 'off')").Allowed)
	require.False(t, askSQL(t, db.Pool, "rate_limit_allow('n', 'deny')").Allowed)
	_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_allow('m', 'a')")
	require.ErrorContains(t, err, "no policy is given, and none is in force for the key")
	_, err = db.Pool.Exec(t.Context(), "SELECT rate_limit_allow('', 'a')")
	require.ErrorContains(t, err, "name is NULL, empty or too long")
	_, err = db.Pool.Exec(t.Context(), "SELECT rate_limit_allow('n', NULL)")
	require.ErrorContains(t, err, "key is NULL, empty or too long")
}

// retry_after_seconds is a whole number for the header Retry-After. The request is allowed after retry_after_seconds.
func TestSQLRoundsRetryAfterUp(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, policy := range []string{
		"fixed 1/1d", "sliding 1/100d", "bucket 1 1/70d", "log 1/36h", "fixed 1/1d, every 1/month", "fixed 1/900000000us",
		"bucket 1 1/25000d",
	} {
		const seconds = "SELECT retry_after_seconds FROM rate_limit_allow($1, 'k', $1)"
		require.Zero(t, pgtest.Scalar[int64](t, db.Pool, seconds, policy), policy)
		for { // until a request is denied
			var allowed, rounded bool
			var retry int64
			require.NoError(t, db.Pool.QueryRow(t.Context(), `SELECT allowed, retry_after_seconds, retry_after_seconds
				= least(ceil(extract(epoch FROM retry_after)), 2147483647) FROM rate_limit_allow($1, 'k', $1)`, policy).
				Scan(&allowed, &retry, &rounded))
			require.True(t, rounded, policy)
			require.Equal(t, !allowed, retry > 0, policy)
			if !allowed {
				break
			}
		}
	}
}

// The error for a wrong argument names the argument and says what is right. The error does not contain the key.
func TestSQLNamesTheArgumentThatItRefuses(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	const all = "rate_limit_all(%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
	part := []any{"'{1}'", "'{n}'", "'{k}'", "'{f}'", "'{1}'", "'{5}'", "'{1000}'", "'{0}'", "NULL", "NULL"}
	with := func(i int, argument string) string {
		changed := append([]any{}, part...)
		changed[i] = argument
		return fmt.Sprintf(all, changed...)
	}
	pgtest.Exec(t, db.Pool, "SELECT * FROM "+fmt.Sprintf(all, part...))
	for call, argument := range map[string]string{
		"rate_limit_allow(NULL, 'secret', 'fixed 1/1m')":                             "name",
		"rate_limit_allow('', 'secret', 'fixed 1/1m')":                               "name",
		"rate_limit_allow(repeat('n', 129), 'secret', 'fixed 1/1m')":                 "name",
		"rate_limit_allow(repeat('n', 127), 'secret', 'fixed 1/1m, log 1/1m')":       "name",
		"rate_limit_allow('n', NULL, 'fixed 1/1m')":                                  "key",
		"rate_limit_allow('n', '', 'fixed 1/1m')":                                    "key",
		"rate_limit_allow('n', repeat('secret', 100), 'fixed 1/1m')":                 "key",
		"rate_limit_allow('n', 'secret', NULL)":                                      "policy",
		"rate_limit_allow('n', 'secret', '60')":                                      "policy",
		"rate_limit_allow('n', 'fixed 1/1m', 'secret')":                              "policy",
		"rate_limit_allow('n', 'secret', 'log 1001/1m')":                             "policy",
		"rate_limit_allow('n', 'secret', 'fixed 1/1m', NULL)":                        "cost",
		"rate_limit_allow('n', 'secret', 'fixed 1/1m', -1)":                          "cost",
		"rate_limit_allow('n', 'secret', 'fixed 1/1m', 2)":                           "cost",
		"rate_limit_allow('n', 'secret', 'fixed 2/1m, log 1/1m', 2)":                 "cost",
		"rate_limit_peek(NULL, 'secret', 'fixed 1/1m')":                              "name",
		"rate_limit_peek('n', NULL, 'fixed 1/1m')":                                   "key",
		"rate_limit_peek('n', 'secret', '')":                                         "policy",
		"rate_limit_charge(NULL, 'secret', 'fixed 1/1m')":                            "name",
		"rate_limit_charge('n', repeat('secret', 100), 'fixed 1/1m')":                "key",
		"rate_limit_charge('n', 'secret', 'fixed 0/1m')":                             "policy",
		"rate_limit_charge('n', 'secret', 'fixed 1/1m', NULL)":                       "cost",
		"rate_limit_charge('n', 'secret', 'fixed 1/1m', -1)":                         "cost",
		"rate_limit_reserve(NULL, 'secret', 'bucket 1 1/1m')":                        "name",
		"rate_limit_reserve('n', repeat('secret', 100), 'bucket 1 1/1m')":            "key",
		"rate_limit_reserve('n', 'secret', 'fixed 1/1m')":                            "policy",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m, fixed 1/1m')":             "policy",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', NULL)":                   "cost",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', 0)":                      "cost",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', 2)":                      "cost",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', 1, NULL)":                "max_delay",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', 1, '-1 us')":             "max_delay",
		"rate_limit_reserve('n', 'secret', 'bucket 1 1/1m', 1, '72 years')":          "max_delay",
		"rate_limit_reset(repeat('n', 129), 'secret')":                               "name",
		"rate_limit_reset('n', repeat('secret', 100))":                               "key",
		"rate_limit_sweep(0)":                                                        "max_rows",
		"rate_limit_sweep(1, NULL)":                                                  "max_pages",
		"rate_limit_sweep(1, 1, '{}')":                                               "names",
		"rate_limit_take_fixed_window('', '{k}', 1, 1)":                              "name",
		"rate_limit_take_fixed_window('n', '{}', 1, 1)":                              "keys",
		"rate_limit_take_fixed_window('n', '{k}', 0, 1)":                             "limit",
		"rate_limit_take_fixed_window('n', '{k}', 1, 0)":                             "span",
		"rate_limit_take_token_bucket('n', '{k}', 1, 0, 1)":                          "refill",
		"rate_limit_take_fixed_window('n', '{k}', 1, 1, '{}')":                       "costs",
		"rate_limit_take_fixed_window('n', '{k}', 1, 1, '{1}', '{}')":                "counts",
		"rate_limit_take_fixed_window('n', '{k}', 1, 1, '{1}', '{0}')":               "count",
		"rate_limit_take_fixed_window('n', ARRAY['k', repeat('secret', 100)], 1, 1)": "key",
		with(0, "'{}'"):                      "requests",
		with(1, "'{}'"):                      "names",
		with(1, "'{\"\"}'"):                  "name",
		with(2, "'{}'"):                      "keys",
		with(2, "'{\"\"}'"):                  "key",
		with(3, "'{}'"):                      "durables",
		with(3, "'{NULL}'"):                  "durable",
		with(4, "'{}'"):                      "algorithms",
		with(4, "'{9}'"):                     "9 is no algorithm",
		with(5, "NULL"):                      "limits",
		with(5, "'{0}'"):                     "limit",
		with(6, "'{}'"):                      "spans_us",
		with(7, "'{}'"):                      "refills",
		with(8, "'{}'"):                      "costs",
		with(8, "'{NULL}'"):                  "cost",
		with(9, "'{}'"):                      "counts",
		with(9, "'{0}'"):                     "count",
		with(9, "NULL, taken_in => '{}'"):    "taken_in",
		with(9, "NULL, leased => '{}'"):      "leased",
		with(9, "NULL, delays_us => '{}'"):   "delays_us",
		with(9, "NULL, delays_us => '{-1}'"): "delay",
		with(9, "NULL, charges => '{}'"):     "charges",
	} {
		_, err := db.Pool.Exec(t.Context(), "SELECT * FROM "+call)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr, call)
		require.Equal(t, "22023", pgErr.Code, call)
		require.Regexp(t, `^rate_limit: .*\b`+argument+`\b`, pgErr.Message, call)
		require.NotEmpty(t, pgErr.Hint, call)
		require.NotContains(t, strings.ToLower(fmt.Sprintf("%+v", *pgErr)), "secret", call)
	}
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 1)
}

// A role that has EXECUTE on rate_limit_allow needs no other right, and cannot call internal functions.
func TestSQLForPeopleNeedsNothingButExecute(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pool := pgtest.Application(t, db, "..") // search_path and pg_temp have decoys
	const call, look = "public.rate_limit_allow('n', 'key', 'fixed 2/1h, log 1/1h')", "public.rate_limit_peek('n', 'key', 'fixed 2/1h')"
	const charge = "public.rate_limit_charge('n', 'key', 'fixed 2/1h, log 1/1h', 5)"
	for _, sql := range []string{"SELECT * FROM " + call, "SELECT * FROM " + look, "SELECT * FROM " + charge} {
		pgtest.Refused(t, pool, sql, sql, "42501")
	}
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION rate_limit_allow, rate_limit_peek, rate_limit_charge TO pg_monitor")
	require.True(t, askSQL(t, pool, call).Allowed)
	require.False(t, askSQL(t, pool, call).Allowed)
	require.EqualValues(t, 1, askSQL(t, pool, look).Remaining)
	require.EqualValues(t, 5, pgtest.Scalar[int64](t, pool, "SELECT owed FROM "+charge))
	for _, sql := range []string{
		"SELECT * FROM public._rate_limit_ask('n', 'key', 'fixed 2/1h', 1, false, true, NULL, NULL, NULL, NULL)",
		"SELECT * FROM public._rate_limit_read_policy('fixed 2/1h'::text)", "SELECT public._rate_limit_late()",
	} {
		pgtest.Refused(t, pool, sql, sql, "42501")
	}
}

// rate_limit_peek writes nothing, so it works on a standby. rate_limit_allow fails on a standby.
func TestSQLPeeksWhereNothingCanBeWritten(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "pages, plans and settings of the session that decides")

	db := pgtest.New(t)
	conn := pgtest.Connect(t, db)
	pgtest.Exec(t, conn, "SET default_transaction_read_only = on")
	require.True(t, peekSQL(t, conn, "n", "bucket 20 5/10s", true).Allowed)
	require.EqualValues(t, 20, allowSQL(t, conn, "n", "bucket 20 5/10s", 0, true).Remaining)
	_, err := conn.Exec(t.Context(), "SELECT rate_limit_allow('n', 'key', 'bucket 20 5/10s')")
	require.ErrorContains(t, err, "25006")
}

// The collation of the caller's arguments does not matter.
func TestSQLAllowsUnderEveryCollation(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
	for _, collate := range []string{`COLLATE "C"`, "COLLATE loose"} {
		const call = "rate_limit_allow('n' %[1]s, 'key' %[1]s, 'sliding 10/1h, Bucket 1 1/1h' %[1]s)"
		sql := "SELECT * FROM " + fmt.Sprintf(call, collate)
		pgtest.Refused(t, db.Pool, sql, sql, "22023")
		require.True(t, askSQL(t, db.Pool, strings.Replace(fmt.Sprintf(call, collate), "Bucket 1", "bucket 9", 1)).Allowed)
	}
	require.True(t, askSQL(t, db.Pool, `(SELECT 'n' COLLATE "C" AS n, 'key' COLLATE loose AS k) AS t, rate_limit_allow(t.n, t.k, 'fixed 1/1h')`).Allowed)
}

// The list of functions in psql has only the functions that people and programs call.
func TestHelpersAreOutOfSight(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	// This is the query of psql's \df rate_limit_*.
	names := pgtest.Scalar[[]string](t, db.Pool, `
		SELECT array_agg(proname::text ORDER BY proname) FROM pg_proc
		WHERE pronamespace = 'public'::regnamespace AND proname ~ '^(rate_limit_.*)$'`)
	want := append([]string{
		"rate_limit_allow", "rate_limit_peek", "rate_limit_charge", "rate_limit_reserve", "rate_limit_hold", "rate_limit_settle", "rate_limit_cancel",
		"rate_limit_extend", "rate_limit_find_hold", "rate_limit_sweep", "rate_limit_version", "rate_limit_policies", "rate_limit_ban",
		"rate_limit_report", "rate_limit_slots", "rate_limit_acquire", "rate_limit_renew", "rate_limit_renew_all", "rate_limit_release",
	}, algorithm.Functions()...)
	require.ElementsMatch(t, want, names)
}
