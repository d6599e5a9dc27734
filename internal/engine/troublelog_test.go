package engine_test

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

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// A fault that only a person can mend is an error in every mode of OnFailure. The fault is logged once, and its end is
// logged once.
func TestFaultIsLoggedOnceUntilItIsMended(t *testing.T) {
	t.Parallel()
	for name, mode := range map[string]ratelimit.FailureMode{
		"none": {}, "error": ratelimit.ReturnError(), "open": ratelimit.FailOpen(), "closed": ratelimit.FailClosed(), "fallback": ratelimit.FallbackLocal(0.1),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				var log testkit.Journal
				db := limitertest.NewModelDB()
				l := limitertest.New(t, db, ratelimit.Config{
					Name: "login", Policy: ratelimit.FixedWindow{Limit: 1000, Window: time.Hour}, OnFailure: mode,
				}, ratelimit.ClientConfig{Logger: log.Logger()})
				for range 2 {
					db.Set(limitertest.SQLState("42883"))
					for range 100 {
						_, err := l.Allow(t.Context(), "personal")
						require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
						limitertest.Elapse(time.Minute)
					}
					lines := log.Lines()
					require.Len(t, lines, 1)
					require.Contains(t, lines[0], "level=ERROR")
					require.Contains(t, lines[0], "the database is not migrated")
					require.Contains(t, lines[0], "limiter=login")

					db.Set(nil)
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

// If statements fail now and then, the failures are logged only once until no more statements fail.
func TestFlakyDatabaseIsLoggedOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := limitertest.NewModelDB()
		l := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: ratelimit.FixedWindow{Limit: 1 << 20, Window: time.Hour}, OnFailure: ratelimit.FailOpen(),
		}, ratelimit.ClientConfig{Logger: log.Logger()})
		ask := func(away func(context.Context) error, source ratelimit.Source) {
			t.Helper()
			db.Set(away)
			result, err := l.Allow(t.Context(), "personal")
			require.NoError(t, err)
			require.Equal(t, source, result.Source)
			limitertest.Elapse(engine.Calm / 4)
		}
		for range 50 {
			ask(limitertest.TurnedAway, ratelimit.SourceFailedOpen)
			ask(nil, ratelimit.SourceDatabase)
			ask(nil, ratelimit.SourceDatabase)
		}
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], `level=WARN msg="ratelimit: Postgres is away or slow"`)
		require.Contains(t, lines[0], "57P03")
		ask(nil, ratelimit.SourceDatabase)
		require.Empty(t, log.Lines())
		ask(nil, ratelimit.SourceDatabase)
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "level=INFO")
		require.NotContains(t, log.String(), "personal")
	})
}

// A fault may concern only one limiter. Decisions of another limiter do not end the trouble of the first limiter.
func TestFaultOfOneLimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := limitertest.NewModelDB()
		client := limitertest.NewClient(t, db, ratelimit.ClientConfig{Logger: log.Logger()})
		lacking := limitertest.Of(t, client, ratelimit.Config{Name: "lacking", Policy: limitertest.Hourly})
		fine := limitertest.Of(t, client, ratelimit.Config{Name: "fine", Policy: limitertest.Hourly})
		for range 10 {
			db.Set(limitertest.SQLState("42501"))
			_, err := lacking.Allow(t.Context(), "key")
			require.ErrorIs(t, err, ratelimit.ErrNotPermitted)
			limitertest.Elapse(2 * engine.Calm)
			db.Set(nil)
			_, err = fine.Allow(t.Context(), "key")
			require.NoError(t, err)
			limitertest.Elapse(2 * engine.Calm)
		}
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "limiter=lacking")
		_, err := lacking.Allow(t.Context(), "key")
		require.NoError(t, err)
		lines = log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "limiter=lacking")

		db.Set(limitertest.TurnedAway)
		_, _ = fine.Allow(t.Context(), "key")
		db.Set(limitertest.Fatal("28P01"))
		_, _ = fine.Allow(t.Context(), "key")
		require.Len(t, log.Lines(), 2)
		limitertest.Elapse(engine.Calm)
		db.Set(nil)
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

// Errors that concern only a key, a caller or a transaction are not logged.
func TestWhatIsNotLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := limitertest.NewModelDB()
		l := limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{Logger: log.Logger()})
		for _, key := range []string{"", "a\x00b", strings.Repeat("k", 513)} {
			_, err := l.Allow(t.Context(), key)
			require.ErrorIs(t, err, ratelimit.ErrInvalidKey)
		}
		_, err := l.AllowN(t.Context(), "key", 101)
		require.ErrorIs(t, err, ratelimit.ErrCostExceedsLimit)
		db.Held = map[string]int64{"held": 1}
		_, err = l.Allow(t.Context(), "held")
		require.ErrorIs(t, err, ratelimit.ErrKeyHeld)
		db.Held = nil
		db.Set(func(context.Context) error { limitertest.Elapse(time.Second / 2); return nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
		defer cancel()
		_, err = l.Allow(ctx, "key")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		synctest.Wait()
		limitertest.Elapse(time.Second)
		require.Empty(t, log.String())
	})
	var log testkit.Journal
	db := pgtest.Empty(t)
	l := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: limitertest.Hourly,
	}, ratelimit.ClientConfig{Logger: log.Logger()})
	tx := pgtest.Begin(t, db)
	_, err := l.WithTx(tx).Allow(t.Context(), "key") // the caller gets the error
	require.ErrorIs(t, err, ratelimit.ErrNotMigrated)
	require.Empty(t, log.String())
}

// If earlier statements take too long, OnFailure answers the calls that were never sent. Such an answer is logged,
// although no statement has failed.
func TestCallsThatAreNotAskedAreLogged(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log testkit.Journal
		db := limitertest.NewModelDB()
		db.Set(func(context.Context) error { limitertest.Elapse(950 * time.Millisecond); return nil })
		l := limitertest.New(t, db, ratelimit.Config{
			Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen(),
		}, ratelimit.ClientConfig{Timeout: time.Second, MaxInFlight: 1, MaxBatch: 1, Logger: log.Logger()})
		var opened atomic.Int32
		testkit.Together(10, func(int) {
			result, err := l.Allow(t.Context(), "key")
			if err == nil && result.Source == ratelimit.SourceFailedOpen {
				opened.Add(1)
			}
		})
		require.EqualValues(t, 9, opened.Load())
		lines := log.Lines()
		require.Len(t, lines, 1)
		require.Contains(t, lines[0], "was not sent")
	})
}

// A logger may call a limiter of the same client.
func TestLoggerThatAsksTheLimiter(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := limitertest.NewModelDB()
		db.Set(limitertest.TurnedAway)
		var l *ratelimit.Limiter
		asking := &askingHandler{ask: func() { _, _ = l.Allow(context.Background(), "key") }}
		l = limitertest.New(t, db, ratelimit.Config{Name: "test", Policy: limitertest.Hourly}, ratelimit.ClientConfig{Logger: slog.New(asking)})
		_, err := l.Allow(t.Context(), "key")
		require.ErrorIs(t, err, ratelimit.ErrUnavailable)
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

// Without a Logger, lines go to slog.Default at the time of logging. A logger with slog.DiscardHandler discards them.
//
//nolint:paralleltest // replaces slog.Default
func TestLoggerDefaultsToThatOfTheProcess(t *testing.T) {
	db := pgtest.Empty(t)
	config := ratelimit.Config{Name: "test", Policy: limitertest.Hourly, OnFailure: ratelimit.FailOpen()}
	l := limitertest.New(t, db.Pool, config)
	clientConfig := ratelimit.ClientConfig{Logger: slog.New(slog.DiscardHandler)}
	silent := limitertest.New(t, db.Pool, config, clientConfig)
	var log testkit.Journal
	before := slog.Default()
	slog.SetDefault(log.Logger())
	defer slog.SetDefault(before)
	for range 10 {
		_, err1 := l.Allow(t.Context(), "personal")
		_, err2 := silent.Allow(t.Context(), "personal")
		require.ErrorIs(t, errors.Join(err1, err2), ratelimit.ErrNotMigrated)
		require.ErrorIs(t, err2, ratelimit.ErrNotMigrated)
	}
	lines := log.Lines()
	require.Len(t, lines, 1, log.String())
	require.Contains(t, lines[0], "level=ERROR")
	require.Contains(t, lines[0], "not migrated")
	require.NotContains(t, lines[0], "personal")
}

// A role without USAGE on the schema does not see the functions. The error is the same in every mode of OnFailure, with
// and without a schema in the config.
func TestSchemaWithoutUsage(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "REVOKE USAGE ON SCHEMA public FROM PUBLIC, pg_database_owner, CURRENT_USER")
	superuser := pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user")
	pool := db.OwnerPool(t, func(c *pgxpool.Config) {
		if superuser { // a superuser is permitted everything
			c.ConnConfig.RuntimeParams["role"] = "pg_monitor"
		}
	})
	for schema, want := range map[string]error{"": ratelimit.ErrNotMigrated, "public": ratelimit.ErrNotPermitted} {
		for _, mode := range limitertest.Modes {
			var log testkit.Journal
			l := limitertest.New(t, pool, ratelimit.Config{
				Name: "test", Policy: limitertest.Hourly, OnFailure: mode,
			}, ratelimit.ClientConfig{Schema: schema, Logger: log.Logger()})
			for range 2 * engine.BreakerFailures {
				_, err := l.Allow(t.Context(), "personal key")
				limitertest.RequireKinds(t, err, want)
			}
			require.Len(t, log.Lines(), 1)
		}
	}
}
