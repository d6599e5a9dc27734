package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/doctor"
)

// From Postgres's statistics, doctor learns of dead tuples, free space, expired rows and updates that are not HOT.
// doctor's advice cures each problem.
func TestDoctorOfATableThatNobodyTendsTo(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	require.NoError(t, err)
	for _, sql := range []string{
		"REVOKE CREATE ON SCHEMA public FROM PUBLIC",
		"ALTER TABLE rate_limit_ephemeral SET (autovacuum_enabled = off, fillfactor = 100)",
		"INSERT INTO rate_limit_ephemeral (prefix, key) SELECT 'login', i || repeat('k', 500) FROM generate_series(1, 40000) AS i",
		"DELETE FROM rate_limit_ephemeral WHERE count = 0 AND ctid > '(700,0)'",
		"UPDATE rate_limit_ephemeral SET count = 1",
	} {
		_, err := conn.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	require.NoError(t, conn.Close(t.Context())) // Close makes the session report its statistics

	const of = "rate_limit_ephemeral: "
	var all map[string]cli.Finding
	testkit.WaitUntil(t, func() bool {
		all = examined(t, db.URL)
		return all[of+"HOT updates"].Level == cli.Warning && all[of+"dead tuples"].Level == cli.Warning
	})
	for check, found := range map[string]string{
		"kind":        `^its fillfactor is 100`,
		"HOT updates": `^\d+\.\d % of \d+ updates were HOT`,
		"dead tuples": `^\d{5} dead and \d+ live`,
		"bloat":       `^\d\d\.\d MB, of which its rows need [12]\d %`,
		"sweeping":    `^100 % of the rows have expired`,
		"autovacuum":  `^it is turned off for this table`,
	} {
		require.NotEqual(t, cli.Fine, all[of+check].Level, check)
		require.Regexp(t, found, all[of+check].Found)
	}
	var last map[string]cli.Finding
	// VACUUM FULL, the cure for bloat, would cure more than bloat, so it is in the second part.
	for _, part := range [][]string{{"kind", "dead tuples", "sweeping"}, {"bloat", "HOT updates", "autovacuum"}} {
		for _, check := range part {
			follow(t, db, all[of+check].Do)
		}
		testkit.WaitUntil(t, func() bool { // statistics are delayed, and the snapshot of another session keeps dead rows
			all := examined(t, db.URL)
			for _, check := range part {
				f := all[of+check]
				if f.Level != cli.Fine {
					require.Contains(t, []string{"bloat", "dead tuples"}, check, f)
					follow(t, db, f.Do)
					return false
				}
			}
			last = all
			return true
		})
	}
	for check, f := range last {
		if check != "long transactions" {
			require.Equal(t, cli.Fine, f.Level, f)
		}
	}
}

// doctor finds a table healthy after VACUUM FULL, after updates of all rows, or with long logs. doctor finds a nearly
// empty table healthy only after somebody has followed the advice.
func TestThoroughDoctorTellsBloatFromFillfactor(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const check = "rate_limit_durable: bloat"
	for name, insert := range map[string]string{
		"windows":         "SELECT 'login', 'key ' || i, NULL FROM generate_series(1, 70000) AS i",
		"long keys":       "SELECT 'login', i || repeat('k', 500), NULL FROM generate_series(1, 10000) AS i",
		"logs in the row": "SELECT 'login', 'key ' || i, array_fill(i::bigint, ARRAY[100]) FROM generate_series(1, 8000) AS i",
		"logs in TOAST":   "SELECT 'login', 'key ' || i, array_fill(i::bigint, ARRAY[1000]) FROM generate_series(1, 1600) AS i",
	} {
		pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_durable")
		pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_durable SET (autovacuum_enabled = off, toast.autovacuum_enabled = off)")
		pgtest.Exec(t, db.Pool, "INSERT INTO rate_limit_durable (prefix, key, log) "+insert)
		healthy := func(need string) {
			f := examined(t, db.URL)[check]
			require.Equal(t, cli.Fine, f.Level, f)
			require.Regexp(t, `^[\d.]+ MB, of which its rows need (100|`+need+`) %$`, f.Found, name)
		}
		healthy(`[7-9]\d`)
		pgtest.Exec(t, db.Pool, "UPDATE rate_limit_durable SET count = count + 1") // like a busy limiter
		pgtest.Exec(t, db.Pool, "VACUUM rate_limit_durable")
		if name != "logs in TOAST" { // each update writes the logs again
			pgtest.Exec(t, db.Pool, "UPDATE rate_limit_durable SET count = count + 1")
		}
		healthy(`[4-9]\d`)
		testkit.WaitUntil(t, func() bool { // during an ANALYZE of autovacuum, VACUUM FULL keeps dead rows
			pgtest.Exec(t, db.Pool, "VACUUM FULL rate_limit_durable")
			return regexp.MustCompile(`need (100|[7-9]\d) %$`).MatchString(examined(t, db.URL)[check].Found)
		})
		healthy(`[7-9]\d`)
		// Keep 2 % of the rows, spread over the table, so that doctor still finds enough rows to report the table.
		pgtest.Exec(t, db.Pool, "DELETE FROM rate_limit_durable WHERE abs(hashtext(key)) % 50 > 0")
		pgtest.Exec(t, db.Pool, "VACUUM rate_limit_durable")
		f := examined(t, db.URL)[check]
		require.Equal(t, cli.Warning, f.Level, "%s: %v", name, f)
		require.Regexp(t, `^[\d.]+ MB, of which its rows need [1-4] %$`, f.Found, name)
		testkit.WaitUntil(t, func() bool {
			follow(t, db, f.Do)
			return examined(t, db.URL)[check].Level == cli.Fine
		})
	}
}

// These problems affect a whole server, so the test starts a server of its own.
func TestDoctorOfAServer(t *testing.T) {
	t.Parallel()

	server := pgtest.Server(t, pgserver.Config{Settings: map[string]string{
		"autovacuum_freeze_max_age": "100000", "max_prepared_transactions": "2"}})
	db := &pgtest.DB{URL: server.URL()}
	pool, err := pgxpool.New(t.Context(), db.URL)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	db.Pool = pool
	require.NoError(t, migrations.Up(t.Context(), pool))
	cures := func(check, found string, want cli.Level) {
		t.Helper()
		var f cli.Finding
		testkit.WaitUntil(t, func() bool { // the server applies settings and updates its counts after a delay
			f = examined(t, db.URL)[check]
			return f.Level == want
		})
		require.Regexp(t, found, f.Found)
		follow(t, db, f.Do)
		testkit.WaitUntil(t, func() bool { return examined(t, db.URL)[check].Level == cli.Fine })
	}

	pgtest.Exec(t, pool, "ALTER SYSTEM SET autovacuum = off")
	pgtest.Exec(t, pool, "SELECT pg_reload_conf()")
	testkit.WaitUntil(t, func() bool { return pgtest.Scalar[string](t, pool, "SHOW autovacuum") == "off" })

	// autovacuum is off, so dead tuples accumulate.
	busy := pgtest.Connect(t, db)
	pgtest.Exec(t, busy, `INSERT INTO rate_limit_durable (prefix, key) SELECT 'a', i FROM generate_series(1, 11000) AS i`)
	pgtest.Exec(t, busy, "DELETE FROM rate_limit_durable")
	require.NoError(t, busy.Close(t.Context()))
	cures("rate_limit_durable: autovacuum", "^last visit: never, and there are 11000 dead tuples", cli.Warning)
	cures("statistics", "^autovacuum is off", cli.Problem)

	// A transaction holds up VACUUM while other transactions use up transaction ids.
	old := pgtest.Begin(t, db)
	pgtest.Exec(t, old, "SELECT pg_current_xact_id()")
	pgtest.Exec(t, pool, `CREATE TEMP TABLE spent (n int); DO $$ BEGIN
		FOR i IN 1..111000 LOOP
			BEGIN INSERT INTO pg_temp.spent VALUES (i); EXCEPTION WHEN division_by_zero THEN NULL; END;
		END LOOP; END $$`)
	holding := func() (what, mend *string) {
		require.NoError(t, pool.QueryRow(t.Context(), doctor.HorizonSQL).Scan(nil, &what, &mend, nil))
		return what, mend
	}
	testkit.WaitUntil(t, func() bool { // another worker may have started earlier
		what, mend := holding()
		if what == nil {
			return true
		}
		follow(t, db, doctor.JudgeHorizon(doctor.LongTime, what, mend, true).Do) // the transaction may be younger
		return false
	})
	require.Error(t, old.Commit(t.Context()), "it was not ended")
	cures("rate_limit_durable: transaction ids", `^\d{6} old, and autovacuum should have come at 100000`, cli.Warning)

	pgtest.Exec(t, pool, `BEGIN; SELECT pg_current_xact_id(); LOCK TABLE rate_limit_durable IN SHARE MODE;
		PREPARE TRANSACTION 'it''s'`, pgx.QueryExecModeSimpleProtocol)
	held, err := (&doctor.Examination{DB: open(t, db.URL)}).ReadLocks(t.Context(), 0)
	require.NoError(t, err)
	f := doctor.JudgeLocks(held)
	require.Equal(t, cli.Problem, f.Level)
	require.Contains(t, f.Found, `prepared transaction "it's" (since `)
	require.Contains(t, f.Found, "ShareLock on rate_limit_durable")
	what, mend := holding()
	require.Equal(t, "prepared transaction 'it''s'", *what)
	require.Contains(t, f.Do, "`"+strings.Split(doctor.JudgeHorizon(doctor.LongTime, what, mend, true).Do, "`")[1]+"`")
	follow(t, db, f.Do)
	what, _ = holding()
	require.Nil(t, what)

	if pgtest.Scalar[bool](t, pool, "SELECT pg_jit_available()") { // JIT is a separate package on some systems
		pgtest.Exec(t, pool, "ALTER DATABASE postgres SET jit_above_cost = 0")
		cures("jit", "^with jit_above_cost = 0", cli.Warning)
	}

	testStandby(t, server)
}
