package sql_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// banned is the row that rate_limit_ban returns.
type banned struct {
	Ends time.Time
	Made bool
}

// ban bans a key of limiter n: first for an hour, later for at most 3 hours. A ban is forgiven a day after its end.
func ban(t *testing.T, db pgtest.Querier, key string) banned {
	t.Helper()
	rows, err := db.Query(t.Context(), "SELECT ends, made FROM rate_limit_ban('n', $1, '1h', '3h', '1d', 'too many')", key)
	require.NoError(t, err)
	answer, err := pgx.CollectOneRow(rows, pgx.RowToStructByName[banned])
	require.NoError(t, err)
	return answer
}

func TestBansBecomeLonger(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	first := ban(t, db.Pool, "k")
	require.True(t, first.Made)
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))
	again := ban(t, db.Pool, "k")
	require.False(t, again.Made)
	require.True(t, first.Ends.Equal(again.Ends)) // the ban in force does not change
	require.True(t, ban(t, db.Pool, "another").Made)
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE key = 'another'")

	for _, want := range []time.Duration{2 * time.Hour, 3 * time.Hour, 3 * time.Hour} { // a repeated ban lasts longer
		pgtest.AgeBans(t, db.Pool, "4h")
		next := ban(t, db.Pool, "k")
		require.True(t, next.Made)
		require.Equal(t, want, pgtest.BanLasts(t, db.Pool, "k"))
		// The new ban replaces the previous ban.
		require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"))
	}
	require.True(t, pgtest.Scalar[bool](t, db.Pool, `SELECT mode = 'deny' AND policy IS NULL AND automatic
		AND comment = 'too many' AND now() BETWEEN valid_from AND valid_until FROM rate_limit_policy`))

	pgtest.AgeBans(t, db.Pool, "27h") // forgiven a day after its end
	require.True(t, ban(t, db.Pool, "k").Made)
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))

	// If a person has shortened a ban, the next ban is at least as long as a first ban.
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET valid_until = clock_timestamp()")
	require.True(t, ban(t, db.Pool, "k").Made)
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET valid_from = '-infinity', valid_until = clock_timestamp()")
	require.True(t, ban(t, db.Pool, "k").Made)
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))

	// If a person has set a ban to infinity and overridden it, the next ban is also as long as a first ban.
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_policy SET valid_until = 'infinity'")
	pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_policy (name, key, mode, comment) VALUES ('n', 'k', 'off', 'why')")
	require.True(t, ban(t, db.Pool, "k").Made)
	pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_policy WHERE mode = 'off'")
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))
}

// A key that a person has banned gets no second ban. Rows of people and of other limiters do not change.
func TestBansByPeopleStay(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, policy, valid_from, valid_until, comment) VALUES
		('n', 'k', 'deny', NULL, now(), '2100-01-01Z', 'by hand'), ('n', 'ended', 'deny', NULL, '2000-01-01', '2001-01-01', 'by hand'),
		('n', 'soon', 'deny', NULL, '2100-01-01', '2101-01-01', 'by hand'), ('n', 'off', 'off', NULL, now(), 'infinity', 'by hand'),
		('n', 'own', 'enforce', 'fixed 1/1h', now(), 'infinity', 'by hand'), ('m', 'own', 'deny', NULL, now(), 'infinity', 'by hand'),
		('n', 'ever', 'deny', NULL, now(), 'infinity', 'by hand')`)
	for key, made := range map[string]bool{"k": false, "ended": true, "soon": true, "off": true, "own": true} {
		answer := ban(t, db.Pool, key)
		require.Equal(t, made, answer.Made, key)
		if key == "k" {
			require.Equal(t, time.Date(2100, 1, 1, 0, 0, 0, 0, time.UTC), answer.Ends.UTC())
		}
	}
	require.Equal(t, 7, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy WHERE NOT automatic"))
	require.True(t, pgtest.Scalar[bool](t, db.Pool,
		"SELECT ends = 'infinity' AND NOT made FROM rate_limit_ban('n', 'ever', '1h', '1h', '1h', 'why')"))
}

// If many processes ban a key at once, there is one ban.
func TestConcurrentBansOfAKey(t *testing.T) {
	t.Parallel()

	const callers = 16
	db := pgtest.New(t)
	answers := make([]banned, callers)
	testkit.Together(callers, func(i int) { answers[i] = ban(t, db.Pool, "k") })
	made := 0
	for _, answer := range answers {
		require.True(t, answers[0].Ends.Equal(answer.Ends))
		if answer.Made {
			made++
		}
	}
	require.Equal(t, 1, made)
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"))
}

// Each ban deletes up to ten forgiven bans, and no other rows.
func TestForgivenBansAreClearedAway(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `INSERT INTO rate_limit_policy (name, key, mode, valid_from, valid_until, comment, automatic)
		SELECT CASE n WHEN 1 THEN 'm' ELSE 'n' END, n, 'deny', '2000-01-01',
			CASE n WHEN 2 THEN now() ELSE '2001-01-01' END, 'why', n <> 3
		FROM generate_series(1, 28) AS n`)
	count := func() int { return pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy") }
	ban(t, db.Pool, "a")
	require.Equal(t, 19, count()) // ten bans were deleted, and one was added
	locked := pgtest.Begin(t, db)
	pgtest.Exec(t, locked, "SELECT FROM rate_limit_policy FOR UPDATE")
	ban(t, db.Pool, "b") // rate_limit_ban does not wait for a locked row
	require.Equal(t, 20, count())
	require.NoError(t, locked.Rollback(t.Context()))
	ban(t, db.Pool, "c")
	ban(t, db.Pool, "d")
	require.Equal(t, []string{"1", "2", "3", "a", "b", "c", "d"},
		pgtest.Scalar[[]string](t, db.Pool, "SELECT array_agg(key ORDER BY key) FROM rate_limit_policy"))
}

// A ban waits up to lock_timeout for a transaction that changes policies. A ban never deadlocks with such a
// transaction.
func TestBansWaitForWriters(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the table of policies, which is on the first shard")

	db := pgtest.New(t)
	ban(t, db.Pool, "k")
	pgtest.AgeBans(t, db.Pool, "2h")
	person := pgtest.Begin(t, db)
	pgtest.Exec(t, person, addPolicySQL, "a", "fixed 1/1h")
	pgtest.Refused(t, db.Pool, "lock_timeout_ms", "SELECT rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why', 1)", "55P03")
	conn := pgtest.Connect(t, db)
	pgtest.Exec(t, conn, "SET lock_timeout = 1")
	pgtest.Refused(t, conn, "the session's", "SELECT rate_limit_ban('n', 'k', '1h', '1h', '1h', 'why', NULL)", "55P03")
	waiting := testkit.Later(func() (banned, error) { return ban(t, db.Pool, "k"), nil })
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	// The waiting call will lock this row.
	pgtest.Exec(t, person, "DELETE FROM rate_limit_policy WHERE key = 'k'")
	require.NoError(t, person.Commit(t.Context()))
	answer, err := waiting()
	require.NoError(t, err)
	require.True(t, answer.Made)
	require.Equal(t, time.Hour, pgtest.BanLasts(t, db.Pool, "k"))
}

func TestBansThatMakeNoSense(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, arguments := range []string{
		"'n', 'k', '0', '1h', '1h', 'why'", "'n', 'k', '-1h', '1h', '1h', 'why'", "'n', 'k', NULL, '1h', '1h', 'why'",
		"'n', 'k', '1h', '59min', '1h', 'why'", "'n', 'k', '1h', NULL, '1h', 'why'",
		"'n', 'k', '1h', '1h', '-1us', 'why'", "'n', 'k', '1h', '1h', NULL, 'why'",
		"'', 'k', '1h', '1h', '1h', 'why'", "NULL, 'k', '1h', '1h', '1h', 'why'",
		"'n', '', '1h', '1h', '1h', 'why'", "'n', repeat('k', 513), '1h', '1h', '1h', 'why'",
		"'n', 'k', '1h', '1h', '1h', ''", "'n', 'k', '1h', '1h', '1h', NULL",
	} {
		pgtest.Refused(t, db.Pool, "ban", "SELECT rate_limit_ban("+arguments+")", "22023")
	}
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_policy"))
}

// The collation of the caller's arguments does not matter.
func TestBansUnderEveryCollation(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "CREATE COLLATION loose (provider = icu, locale = 'und-u-ks-level1', deterministic = false)")
	for i, key := range []string{"'k'", "'k' COLLATE loose", "'K' COLLATE loose"} {
		require.Equal(t, i != 1, pgtest.Scalar[bool](t, db.Pool,
			"SELECT made FROM (SELECT "+key+" AS key) AS k, rate_limit_ban('n', k.key, '1h', '1h', '1h', 'why')"), key)
	}
}
