package ratelimit

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// What only a person can mend is an error in every mode. It is logged once until it is mended, and so is its end.
func TestFaultIsLoggedOnceUntilItIsMended(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]FailureMode{
		"none": {}, "error": ReturnError(), "open": FailOpen(), "closed": FailClosed(), "fallback": FallbackLocal(0.1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log testkit.Journal
				db := newModelDB()
				l := newLimiter(t, db, Config{
					Name: "login", Policy: FixedWindow{Limit: 1000, Window: time.Hour}, OnFailure: mode,
				}, ClientConfig{Logger: log.Logger()})
				for range 2 {
					db.set(sqlState("42883"))
					for range 100 {
						_, err := l.Allow(t.Context(), "personal")
						require.ErrorIs(t, err, ErrNotMigrated)
						elapse(time.Minute)
					}
					lines := log.Lines()
					require.Len(t, lines, 1)
					require.Contains(t, lines[0], "level=ERROR")
					require.Contains(t, lines[0], "the database is not migrated")
					require.Contains(t, lines[0], "limiter=login")

					db.set(nil)
					for range 100 {
						_, err := l.Allow(t.Context(), "personal")
						require.NoError(t, err)
					}
					lines = log.Lines()
					require.Len(t, lines, 1)
					require.Contains(t, lines[0], `level=INFO msg="ratelimit: Postgres decides again" after=1h40m0s`)
					require.Contains(t, lines[0], "trouble=not_migrated")
				}
				require.NotContains(t, log.String(), "personal")
			})
		})
	}
}

// What fails now and then has one line as long as it does.
func TestFlakyDatabaseIsLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := newModelDB()
		l := newLimiter(t, db, Config{
			Name: "test", Policy: FixedWindow{Limit: 1 << 20, Window: time.Hour}, OnFailure: FailOpen(),
		}, ClientConfig{Logger: log.Logger()})
		ask := func(away func(context.Context) error, source Source) {
			t.Helper()
			db.set(away)
			result, err := l.Allow(t.Context(), "personal")
			require.NoError(t, err)
			require.Equal(t, source, result.Source)
			elapse(engine.Calm / 4)
		}
		for range 50 {
			ask(turnedAway, SourceFailedOpen)
			ask(nil, SourceDatabase)
			ask(nil, SourceDatabase)
		}
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], `level=WARN msg="ratelimit: Postgres is away or slow"`)
		require.Contains(t, lines[0], "57P03")
		ask(nil, SourceDatabase)
		require.Empty(t, log.Lines())
		ask(nil, SourceDatabase)
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "level=INFO")
		require.NotContains(t, log.String(), "personal")
	})
}

// One limiter may lack what another one has: the other's decisions do not end its trouble.
func TestFaultOfOneLimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := newModelDB()
		client := newClient(t, db, ClientConfig{Logger: log.Logger()})
		lacking := client.limiter(t, Config{Name: "lacking", Policy: hourly})
		fine := client.limiter(t, Config{Name: "fine", Policy: hourly})
		for range 10 {
			db.set(sqlState("42501"))
			_, err := lacking.Allow(t.Context(), "key")
			require.ErrorIs(t, err, ErrNotPermitted)
			elapse(2 * engine.Calm)
			db.set(nil)
			_, err = fine.Allow(t.Context(), "key")
			require.NoError(t, err)
			elapse(2 * engine.Calm)
		}
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "limiter=lacking")
		_, err := lacking.Allow(t.Context(), "key")
		require.NoError(t, err)
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "limiter=lacking")

		// Another trouble has lines of its own.
		db.set(turnedAway)
		_, _ = fine.Allow(t.Context(), "key")
		db.set(fatal("28P01"))
		_, _ = fine.Allow(t.Context(), "key")
		require.Len(t, log.Lines(), 2)
		elapse(engine.Calm)
		db.set(nil)
		_, _ = lacking.Allow(t.Context(), "key")
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "trouble=away")
		_, _ = fine.Allow(t.Context(), "key")
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "trouble=setup")
	})
}

// What concerns a key, a caller or a transaction is no trouble of the database.
func TestWhatIsNotLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := newModelDB()
		l := newLimiter(t, db, Config{Name: "test", Policy: hourly}, ClientConfig{Logger: log.Logger()})
		for _, key := range []string{"", "a\x00b", strings.Repeat("k", 513)} {
			_, err := l.Allow(t.Context(), key)
			require.ErrorIs(t, err, ErrInvalidKey)
		}
		_, err := l.AllowN(t.Context(), "key", 101)
		require.ErrorIs(t, err, ErrCostExceedsLimit)
		db.held = map[string]int64{"held": 1}
		_, err = l.Allow(t.Context(), "held")
		require.ErrorIs(t, err, ErrKeyHeld)
		db.held = nil
		db.set(func(context.Context) error { elapse(time.Second / 2); return nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err = l.Allow(ctx, "key")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		synctest.Wait()
		elapse(time.Second)
		require.Empty(t, log.String())
	})
	var log testkit.Journal
	db := pgtest.Empty(t)
	l := newLimiter(t, db.Pool, Config{
		Name: "test", Policy: hourly,
	}, ClientConfig{Logger: log.Logger()})
	tx := pgtest.Begin(t, db)
	_, err := l.WithTx(tx).Allow(t.Context(), "key") // whose caller has the error
	require.ErrorIs(t, err, ErrNotMigrated)
	require.Empty(t, log.String())
}

// Calls that were not asked, because the statements before them took too long, are answered by OnFailure. So there is
// a line, though no statement has failed.
func TestCallsThatAreNotAskedAreLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := newModelDB()
		db.set(func(context.Context) error { elapse(950 * time.Millisecond); return nil })
		l := newLimiter(t, db, Config{
			Name: "test", Policy: hourly, OnFailure: FailOpen(),
		}, ClientConfig{Timeout: time.Second, MaxInFlight: 1, MaxBatch: 1, Logger: log.Logger()})
		var opened atomic.Int32
		testkit.Together(10, func(int) {
			result, err := l.Allow(t.Context(), "key")
			if err == nil && result.Source == SourceFailedOpen {
				opened.Add(1)
			}
		})
		require.EqualValues(t, 9, opened.Load())
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "it was not asked")
	})
}

// A logger may ask a limiter of the client itself.
func TestLoggerThatAsksTheLimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := newModelDB()
		db.set(turnedAway)
		var l *Limiter
		asking := &askingHandler{ask: func() { _, _ = l.Allow(context.Background(), "key") }}
		l = newLimiter(t, db, Config{Name: "test", Policy: hourly}, ClientConfig{Logger: slog.New(asking)})
		_, err := l.Allow(t.Context(), "key")
		require.ErrorIs(t, err, ErrUnavailable)
		require.EqualValues(t, 1, asking.asked.Load())
	})
}

type askingHandler struct {
	slog.Handler
	ask   func()
	asked atomic.Int32
}

func (*askingHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h *askingHandler) Handle(context.Context, slog.Record) error {
	h.asked.Add(1)
	h.ask()
	return nil
}

// Without a Logger the lines go to what slog.Default is when they are written, and slog.DiscardHandler has none.
//
//nolint:paralleltest // it replaces slog.Default
func TestLoggerDefaultsToThatOfTheProcess(t *testing.T) {
	db := pgtest.Empty(t)
	config := Config{Name: "test", Policy: hourly, OnFailure: FailOpen()}
	l := newLimiter(t, db.Pool, config)
	clientConfig := ClientConfig{Logger: slog.New(slog.DiscardHandler)}
	silent := newLimiter(t, db.Pool, config, clientConfig)
	var log testkit.Journal
	before := slog.Default()
	slog.SetDefault(log.Logger())
	defer slog.SetDefault(before)
	for range 10 {
		_, err1 := l.Allow(t.Context(), "personal")
		_, err2 := silent.Allow(t.Context(), "personal")
		require.ErrorIs(t, errors.Join(err1, err2), ErrNotMigrated)
		require.ErrorIs(t, err2, ErrNotMigrated)
	}
	lines := log.Lines()
	require.Len(t, lines, 1, log.String())
	require.Contains(t, lines[0], "level=ERROR")
	require.Contains(t, lines[0], "not migrated")
	require.NotContains(t, lines[0], "personal")
}

// A role without USAGE on the schema does not see the functions. That is an error in every mode, too, whether or not
// the schema is named.
func TestSchemaWithoutUsage(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE USAGE ON SCHEMA public FROM PUBLIC, pg_database_owner, CURRENT_USER")
	superuser := pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
	pool := db.OwnerPool(t, func(c *pgxpool.Config) {
		if superuser { // it is permitted everything
			c.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		}
	})
	for schema, want := range map[string]error{"": ErrNotMigrated, "public": ErrNotPermitted} {
		for _, mode := range modes {
			var log testkit.Journal
			l := newLimiter(t, pool, Config{
				Name: "test", Policy: hourly, OnFailure: mode,
			}, ClientConfig{Schema: schema, Logger: log.Logger()})
			for range 2 * engine.BreakerFailures {
				_, err := l.Allow(t.Context(), "personal key")
				requireKinds(t, err, want)
			}
			require.Len(t, log.Lines(), 1)
		}
	}
}
