package cleanup

import (
	"context"
	"errors"
	"math"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestNewRefusesWhatCannotWork(t *testing.T) {
	t.Parallel()

	pool, err := pgxpool.New(t.Context(), "postgres://127.0.0.1:1/nothing") // no test asks this database
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	for _, c := range []struct {
		config Config
		field  string
	}{
		{Config{Schema: "a\x00b"}, "Schema"},
		{Config{Schema: "\xff"}, "Schema"},
		{Config{BatchSize: -1}, "BatchSize"},
		{Config{BatchSize: 1_000_001}, "BatchSize"},
		{Config{Share: -0.1}, "Share"},
		{Config{Share: 1.1}, "Share"},
		{Config{Share: math.NaN()}, "Share"},
		{Config{MaxDuration: -1}, "MaxDuration"},
		{Config{Interval: time.Second - 1}, "Interval"},
		{Config{Names: []string{}}, "Names"},
		{Config{Names: []string{"a", ""}}, "Names"},
		{Config{Names: []string{"a\x00"}}, "Names"},
		{Config{Names: []string{"\xff"}}, "Names"},
	} {
		_, err := New(pool, c.config)
		var configErr *ratelimit.ConfigError
		require.ErrorAs(t, err, &configErr, "%+v", c.config)
		require.Equal(t, "cleanup.Config."+c.field, configErr.Field)
		require.EqualError(t, err, "ratelimit: cleanup.Config."+c.field+" "+configErr.Reason)
	}
	for db, says := range map[ratelimit.DBTX]string{
		nil: "is nil", (*pgxpool.Pool)(nil): "is nil", (*pgxpool.Conn)(nil): "is nil", (*pgx.Conn)(nil): "is nil",
		(*pgxpool.Tx)(nil): "is nil", &pgxpool.Tx{}: "is a transaction",
		struct{ *pgx.Conn }{}: "is a struct { *pgx.Conn }, which wraps a single connection",
	} {
		_, err := New(db, Config{})
		var configErr *ratelimit.ConfigError
		require.ErrorAs(t, err, &configErr)
		require.Equal(t, "db", configErr.Field)
		require.ErrorContains(t, err, "ratelimit: db "+says)
	}

	sweeper, err := New(pool, Config{})
	require.NoError(t, err)
	require.Equal(t, 1000, sweeper.config.BatchSize)
	require.InDelta(t, 0.2, sweeper.config.Share, 0)
	require.Equal(t, 10*time.Minute, sweeper.config.MaxDuration)
	require.Equal(t, 5*time.Minute, sweeper.config.Interval)
	require.Nil(t, sweeper.config.Names)
	_, err = New(pool, Config{BatchSize: 1_000_000, Share: 1, Interval: time.Second, Names: []string{"a"}})
	require.NoError(t, err)
}

func TestWhatIsDeleted(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	stored := map[string]time.Time{
		"never written":         time.UnixMicro(0),
		"expired long ago":      t0.Add(-time.Hour),
		"expired a minute ago":  t0.Add(-margin),
		"expired a moment less": t0.Add(-margin + time.Microsecond),
		"expires now":           t0,
		"expires later":         t0.Add(time.Hour),
	}
	for _, durable := range []bool{false, true} {
		for key, at := range stored {
			pgtest.Exec(
				t,
				db.Pool,
				"INSERT INTO "+pgtest.Table(
					durable,
				)+" (prefix, key, expires_at) VALUES ('a', $1, $2)",
				key,
				at.UnixMicro(),
			)
		}
	}
	result := runOnce(t, newSweeper(t, db.Pool, Config{Test: limitertest.Frozen(t0)}))
	require.Positive(t, result.Took)
	result.Took = 0
	require.Equal(t, Result{Scanned: 2, Deleted: 6, Batches: 1, Complete: true}, result)
	for _, durable := range []bool{false, true} {
		require.Equal(
			t,
			[]string{"expired a moment less", "expires later", "expires now"},
			keys(t, db.Pool, pgtest.Table(durable)),
		)
	}
	require.Equal(t, t0, pgtest.Scalar[time.Time](t, db.Pool, "SELECT completed_at FROM rate_limit_sweeper").UTC())

	// Without Test, the database's clock decides, and its time is long after t0.
	result = runOnce(t, newSweeper(t, db.Pool, Config{}))
	require.EqualValues(t, 6, result.Deleted)
}

// If Names has a limiter with several policies, the rows of all its policies are kept.
func TestRowsOfSeveralPoliciesExist(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{Name: "api", Policy: ratelimit.All(
		ratelimit.SlidingWindow{Limit: 10, Window: time.Second}, ratelimit.FixedWindow{Limit: 3, Window: time.Hour},
	)})
	sweeper := newSweeper(t, db.Pool, Config{Names: []string{limiter.Config().Name}})
	for i := range 5 {
		result, err := limiter.Allow(t.Context(), "alice")
		require.NoError(t, err)
		require.Equal(t, i < 3, result.Allowed)
		_, err = sweeper.RunOnce(t.Context())
		require.NoError(t, err)
	}
}

func TestRowsOfNamesThatNoLongerExist(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, durable := range []bool{false, true} {
		for _, name := range []string{"kept", "kept too", "gone", `"; DROP TABLE x; --`} {
			pgtest.Fill(t, db.Pool, pgtest.Table(durable), name, 3, t0.Add(time.Hour))
		}
	}
	require.Zero(t, runOnce(t, newSweeper(t, db.Pool, Config{Test: limitertest.Frozen(t0)})).Deleted)
	names := []string{"kept", "kept too", `never "seen"`}
	sweeper := newSweeper(t, db.Pool, Config{Names: names, BatchSize: 5, Test: limitertest.Frozen(t0)})
	names[0] = "changed by the caller"
	result := runOnce(t, sweeper)
	require.EqualValues(t, 12, result.Deleted)
	require.True(t, result.Complete)
	for _, durable := range []bool{false, true} {
		require.EqualValues(t, 6, rowCount(t, db.Pool, pgtest.Table(durable)))
		require.Zero(
			t,
			pgtest.Scalar[int](
				t,
				db.Pool,
				"SELECT count(*) FROM "+pgtest.Table(durable)+" WHERE prefix NOT LIKE 'kept%'",
			),
		)
	}
}

// Each batch deletes at most BatchSize rows, and is committed before the next batch begins.
func TestBatchesAreBoundedAndCommitted(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	other := pgtest.Connect(t, db)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 1234, t0)
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 766, t0)
	pages := pageCount(t, db.Pool)
	left := []int64{2000}
	var done []int64
	sweeper := newSweeper(t, db.Pool, Config{
		BatchSize: 100, Share: 1, Progress: func(scanned, total int64) {
			left = append(left, rowCount(t, other, pgtest.Table(false))+rowCount(t, other, pgtest.Table(true)))
			done = append(done, scanned)
			require.Equal(t, pages, total)
		},
	})
	result := runOnce(t, sweeper)
	require.Equal(t, int64(2000), result.Deleted)
	require.Equal(t, pages, result.Scanned)
	require.True(t, result.Complete)
	require.Len(t, done, result.Batches)
	for i, at := range done {
		require.LessOrEqual(t, left[i]-left[i+1], int64(100))
		if i > 0 {
			require.GreaterOrEqual(t, at, done[i-1])
		}
	}
	require.Equal(t, pages, done[len(done)-1])
	require.Zero(t, left[len(left)-1])
}

// Each of these passes ends after one batch. Together these passes read every page once, like one complete pass.
func TestPassThatIsCutOffGoesOnWhereItStopped(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(
		t,
		db.Pool,
		pgtest.Table(false),
		"kept",
		500,
		t0.Add(time.Hour),
	) // rows that stay, to notice a pass that begins at the start
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 500, t0.Add(-time.Hour))
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 500, t0.Add(-time.Hour))
	pages := pageCount(t, db.Pool)

	var all Result
	for i := 0; !all.Complete; i++ {
		// Each sweeper stands for another process, 11 seconds after the previous process.
		sweeper := newSweeper(
			t,
			db.Pool,
			Config{
				BatchSize:   70,
				MaxDuration: 1,
				Test:        limitertest.Frozen(t0.Add(time.Duration(i) * 11 * time.Second)),
			},
		)
		result := runOnce(t, sweeper)
		require.Equal(t, 1, result.Batches)
		all.Scanned += result.Scanned
		all.Deleted += result.Deleted
		all.Complete = result.Complete
	}
	require.Equal(t, Result{Scanned: pages, Deleted: 1000, Complete: true}, all)
}

// A pass ends instead of beginning a pause that would go beyond MaxDuration. Here the pause would last 5 s.
func TestPauseIsNotBegunIfThePassEndsInIt(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 10, t0)
	result := runOnce(t, newSweeper(t, db.Pool, Config{BatchSize: 1, Share: 1e-9, MaxDuration: maxPause}))
	require.Equal(t, 1, result.Batches)
	require.False(t, result.Complete)
	require.Less(t, result.Took, maxPause)
}

func TestOneSweeperAtATime(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
	at := t0.Add(time.Hour)
	other := func(after time.Duration) *Sweeper {
		return newSweeper(t, db.Pool, Config{BatchSize: 10, MaxDuration: 1, Test: limitertest.Frozen(at.Add(after))})
	}
	requireSkipped := func(result Result) {
		t.Helper()
		result.Took = 0
		require.Equal(t, Result{Skipped: true}, result)
	}

	runOnce(t, newSweeper(t, db.Pool, Config{Test: limitertest.Frozen(t0)})) // makes the row of rate_limit_sweeper

	// During a batch, another sweeper skips its pass without waiting.
	batch := pgtest.Begin(t, db)
	pgtest.Exec(t, batch, "SELECT rate_limit_sweep(max_rows => 10, now => $1)", at)
	requireSkipped(runOnce(t, other(0)))
	require.NoError(t, batch.Rollback(t.Context()))

	// Between two batches, other sweepers, the same sweeper and pg_cron skip their passes.
	var sweeper *Sweeper
	batches := 0
	sweeper = newSweeper(
		t,
		db.Pool,
		Config{BatchSize: 10, Share: 1, Test: limitertest.Frozen(at), Progress: func(done, total int64) {
			batches++
			if done == total {
				return
			}
			requireSkipped(runOnce(t, sweeper))
			requireSkipped(runOnce(t, other(0)))
			requireSkipped(runOnce(t, other(10*time.Second)))
			require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT skipped FROM rate_limit_sweep(now => $1)", at))
		}},
	)
	result := runOnce(t, sweeper)
	require.Greater(t, batches, 9)
	require.EqualValues(t, 100, result.Deleted)
	require.True(t, result.Complete)
	require.False(t, result.Skipped)

	// If a pass stops before the end of the tables, other sweepers skip for 10 s, unless the clock has stepped back.
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
	require.EqualValues(t, 10, runOnce(t, other(0)).Deleted)
	requireSkipped(runOnce(t, other(10*time.Second)))
	require.EqualValues(t, 10, runOnce(t, other(10*time.Second+time.Microsecond)).Deleted)
	requireSkipped(runOnce(t, other(10*time.Second+time.Microsecond)))
	require.EqualValues(t, 10, runOnce(t, other(-time.Microsecond)).Deleted)

	// A sweeper stops if another sweeper has continued its pass.
	first := newSweeper(
		t,
		db.Pool,
		Config{BatchSize: 10, Share: 1, Test: limitertest.Frozen(at.Add(time.Minute)), Progress: func(int64, int64) {
			pgtest.Exec(t, db.Pool, "UPDATE rate_limit_sweeper SET held_by = 'somebody else'")
		}},
	)
	result = runOnce(t, first)
	require.True(t, result.Skipped)
	require.EqualValues(t, 10, result.Deleted)
	require.Equal(t, 1, result.Batches)
	require.False(t, result.Complete)
}

// turns runs each statement in another session, as PgBouncer does in transaction mode.
type turns struct {
	ratelimit.DBTX
	conns []*pgx.Conn
	next  int
}

func (d *turns) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	d.next++
	return d.conns[d.next%len(d.conns)].Query(ctx, sql, args...)
}

func TestEachBatchMayHaveAnotherSession(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 100, t0)
	sessions := &turns{conns: []*pgx.Conn{pgtest.Connect(t, db), pgtest.Connect(t, db), pgtest.Connect(t, db)}}
	result := runOnce(t, newSweeper(t, sessions, Config{BatchSize: 10, Share: 1}))
	require.True(t, result.Complete)
	require.EqualValues(t, 200, result.Deleted)
	require.GreaterOrEqual(t, result.Batches, 20)

	// The sessions hold no locks, so another sweeper can begin at once.
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, `SELECT count(*) FROM pg_locks
		WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`))
	require.True(t, runOnce(t, newSweeper(t, db.Pool, Config{})).Complete)
}

// Eight sweepers run at once and take turns. No sweeper fails, and each row is deleted once.
func TestManySweepersAtOnce(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	const sweepers, rows = 8, 3000
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", rows/2, t0)
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", rows/2, t0)
	results := make([]Result, sweepers)
	errs := make([]error, sweepers)
	testkit.Together(sweepers, func(i int) {
		sweeper, err := New(db.Pool, Config{BatchSize: 50, Share: 1})
		for !results[i].Complete && err == nil {
			var result Result
			result, err = sweeper.RunOnce(context.Background())
			results[i].Deleted += result.Deleted
			results[i].Complete = result.Complete
		}
		errs[i] = err
	})
	require.NoError(t, errors.Join(errs...))
	var deleted int64
	for _, result := range results {
		deleted += result.Deleted
	}
	require.EqualValues(t, rows, deleted)
	require.Zero(t, rowCount(t, db.Pool, pgtest.Table(false))+rowCount(t, db.Pool, pgtest.Table(true)))
}

// A sweeper skips locked rows. A naive sweeper does wait for the locked rows, and this test notices its wait.
func TestLockedRowIsPassedOver(t *testing.T) {
	t.Parallel()

	for _, durable := range []bool{false, true} {
		t.Run(pgtest.Table(durable), func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			pgtest.Fill(t, db.Pool, pgtest.Table(durable), "a", 9, t0)
			holder := pgtest.Begin(t, db)
			pgtest.Exec(t, holder, "SELECT FROM "+pgtest.Table(durable)+" WHERE key IN ('key 1', 'key 5') FOR UPDATE")

			// The batches contain other rows instead.
			result := runOnce(t, newSweeper(t, db.Pool, Config{BatchSize: 3, Share: 1}))
			require.True(t, result.Complete)
			require.EqualValues(t, 7, result.Deleted)
			require.Equal(t, []string{"key 1", "key 5"}, keys(t, db.Pool, pgtest.Table(durable)))

			// A naive sweeper waits for the locked rows, and this test notices the wait.
			wait := testkit.Later(func() (any, error) { return nil, naive(context.Background(), db.Pool, t0) })
			pgtest.WaitUntilBlocked(t, db.Pool, 1)
			require.NoError(t, holder.Rollback(t.Context()))
			_, err := wait()
			require.NoError(t, err)
		})
	}
}

func TestSweepFromSQL(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 1000, t0)
	pgtest.Fill(t, db.Pool, pgtest.Table(true), "a", 1000, t0)
	pages := pageCount(t, db.Pool)

	// With max_pages => 1, each call reads one page, in order.
	for page := int64(1); page <= pages; page++ {
		var skipped, complete bool
		var scanned, deleted, done, total int64
		row := db.Pool.QueryRow(t.Context(), "SELECT * FROM rate_limit_sweep(max_pages => 1)")
		require.NoError(t, row.Scan(&skipped, &complete, &scanned, &deleted, &done, &total))
		require.False(t, skipped)
		require.Equal(t, page == pages, complete)
		require.EqualValues(t, 1, scanned)
		require.Positive(t, deleted)
		require.Equal(t, page, done)
		require.Equal(t, pages, total)
	}
	require.Zero(t, rowCount(t, db.Pool, pgtest.Table(false))+rowCount(t, db.Pool, pgtest.Table(true)))

	// The table has become smaller than the page where the last pass stopped.
	pgtest.Exec(t, db.Pool, "UPDATE rate_limit_sweeper SET durable = true, next_page = 1000000")
	pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_durable")
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT complete AND scanned = 0 FROM rate_limit_sweep()"))
	// Somebody has emptied the table that says where the last pass stopped.
	pgtest.Exec(t, db.Pool, "TRUNCATE rate_limit_sweeper")
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT complete FROM rate_limit_sweep()"))

	// The commit of a sweep does not wait for the disk.
	tx := pgtest.Begin(t, db)
	pgtest.Exec(t, tx, "SET LOCAL synchronous_commit = on")
	pgtest.Exec(t, tx, "SELECT rate_limit_sweep()")
	require.Equal(t, "off", pgtest.Scalar[string](t, tx, "SHOW synchronous_commit"))
	require.NoError(t, tx.Rollback(t.Context()))

	for _, arguments := range []string{"0", "-1", "NULL", "1, 0", "1, NULL", "names => '{}'"} {
		_, err := db.Pool.Exec(t.Context(), "SELECT rate_limit_sweep("+arguments+")")
		require.ErrorContains(t, err, "SQLSTATE 22023", arguments)
	}
	// With a NULL among the names, no row is deleted because of its name.
	pgtest.Fill(t, db.Pool, pgtest.Table(false), "live", 1, time.Now().Add(time.Hour))
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT deleted FROM rate_limit_sweep(names => ARRAY['a', NULL])"))
}

// An application may have set another default_transaction_isolation.
func TestIsolationLevels(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
		pool := db.OwnerPool(
			t,
			func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["default_transaction_isolation"] = level },
		)
		result := runOnce(t, newSweeper(t, pool, Config{BatchSize: 30, Share: 1}))
		require.True(t, result.Complete)
		require.EqualValues(t, 100, result.Deleted, level)
	}
}

func TestQueryExecModesAndSchemas(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, `CREATE SCHEMA "Odd ""na'me"`)
	require.NoError(t, migrations.Up(t.Context(), db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = `"Odd ""na'me"`
	})))
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(mode.String(), func(t *testing.T) { // one after the other, because all modes sweep the same table
			pool := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.DefaultQueryExecMode = mode })
			const odd = `"Odd ""na'me".rate_limit_durable`
			for _, names := range [][]string{nil, {"a", `quo"ted', {}`}} {
				for _, test := range []ratelimit.TestConfig{{}, limitertest.Frozen(t0.Add(time.Hour))} {
					pgtest.Exec(t, pool, "TRUNCATE "+odd)
					pgtest.Fill(t, pool, odd, "a", 3, t0)
					pgtest.Fill(t, pool, odd, "b", 2, t0.Add(20*365*24*time.Hour))
					sweeper := newSweeper(t, pool, Config{Schema: `Odd "na'me`, Names: names, Test: test})
					interval := time.Duration(0)
					result, err := sweeper.pass(t.Context(), &interval)
					require.NoError(t, err)
					require.EqualValues(t, 3+len(names), result.Deleted)
				}
			}
		})
	}
}

func TestOneConnectionIsEnough(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	one := db.OwnerPool(t, func(config *pgxpool.Config) { config.MaxConns = 1 })
	conn, err := one.Acquire(t.Context())
	require.NoError(t, err)
	for i, of := range []ratelimit.DBTX{pgtest.Connect(t, db), conn, one} {
		if of == ratelimit.DBTX(one) {
			conn.Release()
		}
		pgtest.Fill(t, db.Pool, pgtest.Table(false), "a", 100, t0)
		config := Config{BatchSize: 10, Share: 1, Progress: func(int64, int64) {
			require.LessOrEqual(t, one.Stat().AcquiredConns(), int32(1-i/2), "it keeps a connection in the pause")
		}}
		require.EqualValues(t, 100, runOnce(t, newSweeper(t, of, config)).Deleted, "%T", of)
	}
}
