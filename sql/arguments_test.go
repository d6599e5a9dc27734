package sql_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/algorithm"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// Invalid calls from psql fail with a clear message, and change no row.
func TestSQLRefusesBadArguments(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	calls := map[string]string{
		"fixed window":   "rate_limit_take_fixed_window(%s, %s, 10, 1000%s)",
		"sliding window": "rate_limit_take_sliding_window(%s, %s, 10, 1000%s)",
		"token bucket":   "rate_limit_take_token_bucket(%s, %s, 10, 1, 1000%s)",
		"sliding log":    "rate_limit_take_sliding_log(%s, %s, 10, 1000%s)",
		"calendar":       "rate_limit_take_calendar_window(%s, %s, 10, 60000000, 'UTC'%s)",
	}
	const invalid = "22023"
	long := "repeat('ä', 257)"
	for name, call := range calls {
		for what, arguments := range map[string]struct{ name, keys, more, code string }{
			"no name":                        {"NULL", "ARRAY['a']", "", invalid},
			"an empty name":                  {"''", "ARRAY['a']", "", invalid},
			"a long name":                    {"repeat('n', 129)", "ARRAY['a']", "", invalid},
			"no keys":                        {"'n'", "NULL", "", invalid},
			"an empty array":                 {"'n'", "ARRAY[]::text[]", "", invalid},
			"an empty array of everything":   {"'n'", "ARRAY[]::text[]", ", ARRAY[]::bigint[], ARRAY[]::bigint[]", invalid},
			"a key that is NULL":             {"'n'", "ARRAY[NULL]::text[]", "", invalid},
			"NULL among keys":                {"'n'", "ARRAY['a', NULL, 'b']", "", invalid},
			"NULL among keys to look at":     {"'n'", "ARRAY['a', NULL, 'b']", ", ARRAY[0, 0, 0]", invalid},
			"an empty key":                   {"'n'", "ARRAY['a', '']", "", invalid},
			"a long key":                     {"'n'", "ARRAY[" + long + "]", "", invalid},
			"a long key among others":        {"'n'", "ARRAY['a', " + long + ", 'z']", "", invalid},
			"a long key to look at":          {"'n'", "ARRAY[" + long + "]", ", ARRAY[0]", invalid},
			"a huge key":                     {"'n'", "ARRAY['a', (SELECT string_agg(md5(i::text), '') FROM generate_series(1, 30000) AS i)]", "", invalid},
			"keys in two dimensions":         {"'n'", "ARRAY[ARRAY['a'], ARRAY['b']]", "", invalid},
			"keys that are counted from 5":   {"'n'", "'[5:6]={a,b}'::text[]", "", invalid},
			"a count of 0":                   {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1, 0]", invalid},
			"a negative count":               {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1, -1]", invalid},
			"fewer costs than keys":          {"'n'", "ARRAY['a', 'b']", ", ARRAY[1]", invalid},
			"more costs than keys":           {"'n'", "ARRAY['a']", ", ARRAY[1, 1]", invalid},
			"no costs for one key":           {"'n'", "ARRAY['a']", ", ARRAY[]::bigint[]", invalid},
			"fewer counts than keys":         {"'n'", "ARRAY['a', 'b']", ", NULL, ARRAY[1]", invalid},
			"more counts than keys":          {"'n'", "ARRAY['a']", ", NULL, ARRAY[1, 1]", invalid},
			"a cost that is NULL":            {"'n'", "ARRAY['a', 'b']", ", ARRAY[1, NULL], ARRAY[1, 1]", invalid},
			"a NULL among costs that fit":    {"'n'", "ARRAY['ccc', 'bb', 'a']", ", ARRAY[1, NULL, 1], ARRAY[1, 1, 1]", invalid},
			"a NULL among counts that fit":   {"'n'", "ARRAY['ccc', 'bb', 'a']", ", ARRAY[1, 1, 1], ARRAY[1, NULL, 1]", invalid},
			"a negative lock timeout":        {"'n'", "ARRAY['a']", ", lock_timeout_ms => -2", invalid},
			"a key that cannot be in UTF-8":  {"'n'", `ARRAY[E'\xff']`, "", "22021"},
			"a key with NUL":                 {"'n'", `ARRAY[E'\u0000']`, "", "42601"},
			"a cost that is no whole number": {"'n'", "ARRAY['a']", ", ARRAY['1.5']::bigint[]", "22P02"},
		} {
			for _, durable := range limitertest.TablesFor(t, name+what) {
				pgtest.Refused(
					t,
					db.Pool,
					fmt.Sprintf("%s, %s", name, what),
					"SELECT * FROM "+fmt.Sprintf(
						call,
						arguments.name,
						arguments.keys,
						fmt.Sprintf("%s, durable => %t", arguments.more, durable),
					),
					arguments.code,
				)
			}
		}
	}

	for _, numbers := range []string{
		"NULL, 1000", "10, NULL", "0, 1000", "10, 0", "-1, 1000", "10, -1", "-9223372036854775808, -9223372036854775808",
		"1, 2251799813685249", "2049, 2251799813685248", "4611686018427387905, 1", "2305843009213693953, 2", "9223372036854775807, 9223372036854775807",
	} {
		pgtest.Refused(t, db.Pool, numbers, "SELECT rate_limit_take_fixed_window('n', ARRAY['a'], "+numbers+")", invalid)
		pgtest.Refused(t, db.Pool, numbers, "SELECT rate_limit_take_sliding_window('n', ARRAY['a'], "+numbers+")", invalid)
		pgtest.Refused(t, db.Pool, numbers, "SELECT rate_limit_take_sliding_log('n', ARRAY['a'], "+numbers+")", invalid)
	}
	pgtest.Refused(t, db.Pool, "1001 in a log", "SELECT rate_limit_take_sliding_log('n', ARRAY['a'], 1001, 1000)", invalid)
	for _, numbers := range []string{
		"NULL, 1, 1000", "10, NULL, 1000", "10, 1, NULL", "0, 1, 1000", "10, 0, 1000", "10, 1, 0", "-1, 1, 1000", "10, -1, 1000", "10, 1, -1",
		"1, 1, 2251799813685249", "2, 1, 2251799813685248", "4611686018427387905, 4611686018427387905, 1", "4611686018427387904, 2047, 1",
		"9223372036854775807, 9223372036854775807, 9223372036854775807",
	} {
		pgtest.Refused(t, db.Pool, numbers, "SELECT rate_limit_take_token_bucket('n', ARRAY['a'], "+numbers+")", invalid)
	}
	for _, numbers := range []string{
		"NULL, 60000000, 'UTC'", "10, NULL, 'UTC'", "10, 60000000, NULL", "0, 60000000, 'UTC'", "-1, 60000000, 'UTC'",
		"4611686018427387905, 60000000, 'UTC'", "10, 0, 'UTC'", "10, 60000001, 'UTC'", "10, 2592000000000, 'UTC'",
		"10, 60000000, ''", "10, 60000000, 'utc'", "10, 60000000, 'CET'", "10, 60000000, 'EST5EDT'", "10, 60000000, '<+03>-3'",
		"10, 60000000, 'Etc/GMT+3'", "10, 60000000, 'Europe/Berlin1'",
	} {
		pgtest.Refused(t, db.Pool, numbers, "SELECT rate_limit_take_calendar_window('n', ARRAY['a'], "+numbers+")", invalid)
		number := strings.Split(numbers, ", ")
		pgtest.Refused(t, db.Pool, numbers, fmt.Sprintf("SELECT * FROM rate_limit_all('{1}', '{n}', '{a}', '{f}', '{5}', "+
			"ARRAY[%s]::bigint[], ARRAY[%s]::bigint[], '{0}', zones => ARRAY[%s]::text[])", number[0], number[1], number[2]), invalid)
	}
	pgtest.Refused(t, db.Pool, "too few zones", "SELECT * FROM rate_limit_all('{1,2}', '{n,n}', '{a,b}', '{f,f}', '{5,5}', "+
		"'{1,1}', '{60000000,60000000}', '{0,0}', zones => '{UTC}')", invalid)
	for _, key := range []string{"NULL, NULL", "NULL, 'a'", "'n', NULL", "'', ''"} {
		require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT rate_limit_reset("+key+")"))
	}
	for _, key := range []string{"'n', " + long, long + ", 'a'"} {
		pgtest.Refused(t, db.Pool, key, "SELECT rate_limit_reset("+key+")", invalid)
	}
	for _, durable := range []bool{false, true} {
		require.Empty(t, pgtest.StoredRows(t, db.Pool, durable))
	}

	// Costs and counts that are NULL, below 1 or in arrays of another shape are refused, even if the key has no row.
	for name, call := range calls {
		for _, durable := range []string{"", ", durable => true"} {
			pgtest.Exec(t, db.Pool, "SELECT "+fmt.Sprintf(call, "'n'", "'{there}'", durable))
			for _, odd := range []string{
				"'[0:0]={5}', '{1}'", "'{{5}}', '{1}'", "'{NULL}', '{1}'", "'[0:0]={0}', NULL", "'[5:5]={0}', '{1}'", "'{{0}}', '{1}'",
				"'{1}', '[0:0]={5}'", "'{1}', '{{5}}'", "'{1}', '{NULL}'", "NULL, '{NULL}'", "'{NULL}', NULL",
			} {
				for _, key := range []string{"'{there}'", "'{new}'"} {
					pgtest.Refused(t, db.Pool, name, "SELECT "+fmt.Sprintf(call, "'n'", key, ", "+odd+durable), invalid)
				}
			}
			for _, odd := range []string{"'[5:6]={0,0}', NULL", "'[0:1]={0,0}', NULL", "'[2:3]={0,0}', NULL", "'{{0,0}}', NULL"} {
				pgtest.Refused(t, db.Pool, name, "SELECT "+fmt.Sprintf(call, "'n'", "'{there,new}'", ", "+odd+durable), invalid)
			}
		}
	}

	// The smallest and the largest value of each range are valid.
	for _, call := range []string{
		"fixed_window('n', ARRAY['a'], 2048, 2251799813685248)", "fixed_window('n', ARRAY['a'], 4611686018427387904, 1)",
		"sliding_window('n', ARRAY['a'], 2048, 2251799813685248)", "sliding_window('n', ARRAY['a'], 4611686018427387904, 1)",
		"token_bucket('n', ARRAY['a'], 1, 1, 2251799813685248)", "token_bucket('n', ARRAY['a'], 4611686018427387904, 2048, 1)",
		"token_bucket('n', ARRAY['a'], 1, 9223372036854775807, 1)", "sliding_log('n', ARRAY['a'], 1000, 2251799813685248)",
		"fixed_window(repeat('n', 128), ARRAY[repeat('k', 512)], 1, 1)",
		"calendar_window('n', ARRAY['a'], 4611686018427387904, 2678400000000, 'America/Argentina/ComodRivadavia')",
	} {
		// A granted take returns nine numbers. The second number of a longer result is the number of granted requests.
		taken := pgtest.Scalar[[]int64](t, db.Pool, "SELECT array_remove(rate_limit_take_"+call+", NULL)")
		require.True(t, len(taken) <= 9 || taken[1] == 1, "%s: %v", call, taken)
	}
	require.EqualValues(t, 1, pgtest.Scalar[int64](t, db.Pool, // the default time zone is UTC
		"SELECT granted FROM rate_limit_all('{1}', '{n}', '{b}', '{f}', '{5}', '{10}', '{3600000000}', '{0}')"))
}

func TestNullMeansTheDefaultInSQL(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for i, more := range []string{"", ", NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL"} {
		rows, err := db.Pool.Query(t.Context(), "SELECT remaining FROM "+
			pgtest.Each(fmt.Sprint(i), "ARRAY['x', 'y']", "false", "1, 10, 1000000, 0", more))
		require.NoError(t, err)
		remaining, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		require.NoError(t, err)
		require.Equal(t, []int64{9, 9}, remaining)
	}
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 4)
	require.Empty(t, pgtest.StoredRows(t, db.Pool, true))
}

// The statement after "Example:" in each function's comment works.
func TestExamplesInCommentsWork(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	rows, err := db.Pool.Query(t.Context(), `
		SELECT proname, coalesce(obj_description(oid, 'pg_proc'), '') FROM pg_proc
		WHERE pronamespace = 'public'::regnamespace AND starts_with(proname, 'rate_limit_') AND proname <> 'rate_limit_version'
		ORDER BY proname`)
	require.NoError(t, err)
	type function struct{ Name, Comment string }
	functions, err := pgx.CollectRows(rows, pgx.RowToStructByPos[function])
	require.NoError(t, err)
	require.Len(t, functions, 26)

	for _, f := range functions {
		_, example, found := strings.Cut(f.Comment, "Example: ")
		require.True(t, found, f.Name)
		sql := example[:closing(example)+1]

		rows, err := db.Pool.Query(t.Context(), sql)
		require.NoError(t, err, sql)
		values, err := pgx.CollectRows(rows, pgx.RowToMap)
		require.NoError(t, err, sql)
		if f.Name == "rate_limit_all" {
			require.Len(t, values, 2, sql)
			require.EqualValues(t, 1, values[0]["granted"], sql)
			require.EqualValues(t, 1, values[1]["granted"], sql)
			for _, column := range []string{"ord", "remaining", "retry_after_us", "reset_after_us", "decided_at"} {
				require.Contains(t, values[0], column)
				require.Contains(t, f.Comment, column)
			}
			continue
		}
		require.Len(t, values, 1, sql)
		if f.Name == "rate_limit_sweep" {
			require.Equal(t, true, values[0]["complete"])
			for column := range values[0] {
				require.Contains(t, f.Comment, column)
			}
			continue
		}
		if f.Name == "rate_limit_allow" || f.Name == "rate_limit_peek" {
			require.Equal(t, true, values[0]["allowed"])
			for column := range values[0] {
				require.Contains(t, functions[2].Comment, column)
			}
			continue
		}
		if f.Name == "rate_limit_reserve" {
			require.Equal(t, true, values[0]["allowed"])
			for column := range values[0] {
				require.Contains(t, f.Comment, column)
			}
			continue
		}
		if f.Name == "rate_limit_charge" {
			require.EqualValues(t, 0, values[0]["owed"])
			for column := range values[0] {
				require.Contains(t, f.Comment, column)
			}
			continue
		}
		if strings.HasPrefix(f.Name, "rate_limit_take_") {
			numbers, ok := values[0][f.Name].([]any)
			require.True(t, ok, "%T", values[0][f.Name])
			require.NotEmpty(t, numbers)
			continue
		}
		if f.Name == "rate_limit_reset" {
			// rate_limit_reset runs after rate_limit_allow with the same key, so the key has a row.
			require.Equal(t, true, values[0]["rate_limit_reset"])
		}
	}
}

// closing returns the position where the first parenthesis of a text closes.
func closing(text string) int {
	depth := 0
	return strings.IndexFunc(text, func(r rune) bool {
		switch r {
		case '(':
			depth++
		case ')':
			depth--
			return depth == 0
		}
		return false
	})
}

// If all rows exist, the take functions check only some arguments. However, the functions refuse all invalid arguments,
// and take nothing.
func TestTakesFromRowsRefuseBadArguments(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `SELECT
		rate_limit_take_fixed_window('fixed', '{aaa,bb,c}', 3, 60000000, '{1,3,1}', '{1,1,1}'),
		rate_limit_take_sliding_window('sliding', '{aaa,bb,c}', 3, 60000000, '{1,3,1}', '{1,1,1}'),
		rate_limit_take_token_bucket('bucket', '{aaa,bb,c}', 3, 1, 60000000, '{1,3,1}', '{1,1,1}'),
		rate_limit_take_sliding_log('log', '{aaa,bb,c}', 3, 60000000, '{1,3,1}', '{1,1,1}'),
		rate_limit_take_calendar_window('calendar', '{aaa,bb,c}', 3, 2678400000000, 'UTC', '{1,3,1}', '{1,1,1}')`)
	before := pgtest.StoredRows(t, db.Pool, false)
	require.Len(t, before, 15)
	const most = "9223372036854775807"
	for _, call := range []string{
		// These arrays do not begin at 1.
		"fixed_window('fixed', '[0:2]={aaa,bb,c}', 3, 60000000)",
		"fixed_window('fixed', '[-1:1]={aaa,bb,c}', 3, 60000000)",
		"fixed_window('fixed', '[0:7]={aaa,w2,w3,w4,w5,w6,w7,w8}', 3, 60000000)",
		"fixed_window('fixed', '{aaa,bb,c}', 3, 60000000, '[0:2]={1,1,3}', '{1,1,1}')",
		"fixed_window('fixed', '{aaa,bb,c}', 3, 60000000, '{1,1,1}', '[0:2]={1,1,3}')",
		"sliding_window('sliding', '[0:2]={aaa,bb,c}', 3, 60000000)",
		"token_bucket('bucket', '[0:2]={aaa,bb,c}', 3, 1, 60000000)",
		"sliding_log('log', '[0:2]={aaa,bb,c}', 3, 60000000)",
		"calendar_window('calendar', '[0:2]={aaa,bb,c}', 3, 2678400000000, 'UTC')",
		// These policies are outside the range of exact arithmetic.
		"fixed_window('fixed', '{c}', " + most + ", 60000000)",
		"fixed_window('fixed', '{c}', " + most + ", 60000000, '{4611686018427387904}', '{1}')",
		"fixed_window('fixed', '{c}', -" + most + " - 1, 60000000)",
		"fixed_window('fixed', '{c}', 3, " + most + ")",
		"sliding_window('sliding', '{c}', 3, " + most + ")",
		"sliding_window('sliding', '{c}', 3, 0)",
		"sliding_window('sliding', '{c}', " + most + ", 60000000, '{4611686018427387904}', '{1}')",
		"token_bucket('bucket', '{c}', 3, 0, 60000000)",
		"token_bucket('bucket', '{c}', " + most + ", 1, 60000000)",
		"sliding_log('log', '{c}', 1001, 60000000)",
		"calendar_window('calendar', '{c}', 3, " + most + ", 'UTC')",
		"calendar_window('calendar', '{c}', 3, 86400000001, 'UTC')",
		"calendar_window('calendar', '{c}', 3, 2678400000000, '+02')",
		"calendar_window('calendar', '{c}', 3, 2678400000000, 'EST5EDT')",
		"calendar_window('calendar', '{c}', " + most + ", 2678400000000, 'UTC')",
	} {
		_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_take_"+call)
		var refused *pgconn.PgError
		require.ErrorAs(t, err, &refused, call)
		require.Equal(t, "22023", refused.Code, "%s: %v", call, refused)
		require.Equal(t, before, pgtest.StoredRows(t, db.Pool, false), call)
	}
}

// A row that another transaction is inserting is skipped. All other requests of the call are decided.
func TestRowsBeingMadeSpoilNoOthers(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "SELECT rate_limit_take_fixed_window('n', '{a}', 20, 60000000, '{3}', '{1}')")
	holder := pgtest.Begin(t, db)
	pgtest.Exec(t, holder, "INSERT INTO rate_limit_ephemeral (prefix, key) VALUES ('n', 'bb')")
	granted := pgtest.Scalar[[]int64](t, db.Pool, `SELECT array_agg(coalesce(granted, 0) ORDER BY ord) FROM rate_limit_all(
		'{1,2,3}', '{n,n,n}', '{bb,a,a}', '{f,f,f}', '{1,1,1}', '{20,20,20}', '{60000000,60000000,60000000}', '{0,0,0}',
		'{1,2,7}', NULL, 50, skip_held => true)`)
	require.Equal(t, []int64{-2, 1, 1}, granted)
	require.EqualValues(t, 12, pgtest.Scalar[int64](t, db.Pool, "SELECT count FROM rate_limit_ephemeral WHERE key = 'a'"))
}

// rate_limit_all sees all rows at the same moment when it reads rows without locks. In this test, every take counts in
// both rows, so their counts must always be equal.
func TestLooksSeeOneMoment(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "transactions of the caller, or one connection")

	const takes, looks = 600, 150
	db := pgtest.New(t)
	var group sync.WaitGroup
	var failed error
	ended := make(chan struct{})
	group.Go(func() {
		defer close(ended)
		for range takes {
			if _, err := db.Pool.Exec(t.Context(), `SELECT FROM rate_limit_all('{1,1}', '{n,n}', '{bb,a}', '{f,t}', '{1,1}',
				'{1000000,1000000}', '{3600000000,3600000000}', '{0,0}', synchronous_commit => false)`); err != nil {
				failed = err
				return
			}
		}
	})
	defer group.Wait()
	for look := 0; ; look++ {
		select {
		case <-ended:
			if look >= looks {
				require.NoError(t, failed)
				return
			}
		default:
		}
		// The missing row ccc never fits its cost of 1000001.
		for _, costs := range []string{"{0,0,0}", "{1,1,1000001}"} {
			counts := pgtest.Scalar[[]int64](t, db.Pool, `SELECT array_agg(count ORDER BY ord) FROM rate_limit_all(
				'{1,1,1}', '{n,n,n}', '{bb,a,ccc}', '{f,t,f}', '{1,1,1}', '{1000000,1000000,1000000}',
				'{3600000000,3600000000,3600000000}', '{0,0,0}', $1)`, costs)
			require.Equal(t, counts[0], counts[1], costs)
		}
	}
}

// A limit of 2^62 admits a cost of 2^62 once. The sum of two such requests is too large for a bigint.
func TestLargestTakes(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	const largest = "4611686018427387904" // 2^62
	for name, policy := range map[string]string{
		"fixed_window": largest + ", 1", "sliding_window": largest + ", 1", "token_bucket": largest + ", " + largest + ", 1",
		"calendar_window": largest + ", 2678400000000, 'UTC'",
	} {
		for _, count := range []string{"2", "9223372036854775807"} {
			for keys, arrays := range map[string]string{
				"{a}":    fmt.Sprintf("'{%s}', '{%s}'", largest, count),
				"{bb,a}": fmt.Sprintf("'{%s,%[1]s}', '{%s,%[2]s}'", largest, count),
			} {
				numbers := pgtest.Scalar[[]*int64](t, db.Pool,
					fmt.Sprintf("SELECT rate_limit_take_%s('n', '%s', %s, %s)", name, keys, policy, arrays))
				require.EqualValues(t, 1, *numbers[1], "%s %s %s", name, keys, count)
				pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral")
			}
		}
	}
}

// rate_limit_take_all leaves calls with odd arguments to rate_limit_all. For example, the rows are repeated or in
// another order, parts do not belong to the rows, or requests never fit. No row loses more units than the row has.
func TestTakesOfSetsAskedBadly(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	// now_us is a clock that stands still while the call waits.
	const good = `'{n,n,n}', '{ccc,bb,a}', false, '{1,2,3}', '{3,3,3}', '{60000000,60000000,60000000}', '{0,0,1}', NULL,
		'{1,1,1}', '{1,1,1}', '{1,2,3}', NULL, NULL, now_us => 1800000000000000`
	ask := func(oldNew ...string) (numbers []int64, err error) {
		rows, err := db.Pool.Query(t.Context(), "SELECT array_replace(rate_limit_take_all("+
			strings.NewReplacer(oldNew...).Replace(good)+"), NULL, 0)")
		require.NoError(t, err)
		return pgx.CollectOneRow(rows, pgx.RowTo[[]int64])
	}
	leaveOne := func() { // each row has 1 of its 3 units left
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_ephemeral")
		for range 2 {
			numbers, err := ask()
			require.NoError(t, err)
			require.Len(t, numbers, 3*9)
		}
	}
	for _, bad := range [][]string{
		{"{ccc,bb,a}", "{bb,ccc,a}", "{1,2,3}', '{3", "{2,1,3}', '{3"}, // rows in another order
		{"{ccc,bb,a}", "[0:2]={ccc,bb,a}"},
		{"{n,n,n}", "[0:2]={n,n,n}"},
		{"{1,1,1}', '{1,1,1}", "{2,1,1}', '{1,1,1}", "'{1,2,3}', NULL", "'{1,2,3}', '{2,1,1}'"}, // more than is left
		{"{1,1,1}', '{1,1,1}", "{0,1,1}', '{1,1,1}"},
		{"{1,1,1}', '{1,1,1}", "{1,1,9223372036854775807}', '{1,1,1}"},
	} {
		leaveOne()
		numbers, err := ask(bad...)
		require.NoError(t, err, bad)
		require.Len(t, numbers, 3*16, bad)
		for id, row := range pgtest.StoredRows(t, db.Pool, false) {
			taken := row.Count
			if row.Algorithm == algorithm.TokenBucket {
				taken /= row.Scale
			}
			require.LessOrEqual(t, taken, int64(3), "%v: %v", id, bad)
		}
	}
	for _, c := range []struct {
		bad     []string
		message string
	}{
		{[]string{"{ccc,bb,a}", "{ccc,ccc,a}", "{1,2,3}', '{3", "{1,1,3}', '{3"}, "one request are for the same key"},
		{[]string{"{ccc,bb,a}", "[0:2]={ccc,ccc,a}"}, "one request are for the same key"},
		{[]string{"{n,n,n}", "{n,n}"}, "the name of part 3 is not valid"},
		{[]string{"{3,3,3}", "{3,3,9223372036854775807}"}, "outside the exact range"},
		{[]string{"60000000}", "0}"}, "outside the exact range"},
		{[]string{"{1,2,3}', '{3", "{1,2,9}', '{3"}, "is no algorithm"},
		{[]string{"{ccc,bb,a}", "{ccc,bb,NULL}"}, "the key of part 3 is not valid"},
	} {
		leaveOne()
		_, err := ask(c.bad...)
		require.ErrorContains(t, err, c.message, c.bad)
	}
}
