package ratelimit_test

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

func TestNamesAndTablesKeepLimitersApart(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	base := ratelimit.Config{Name: "a", Policy: ratelimit.FixedWindow{Limit: 3, Window: limitertest.Year}}
	durable, other, swapped, same := base, base, base, base
	durable.Durable = true
	other.Name = "b"
	swapped.Name = "key"
	one := limitertest.New(t, db.Pool, base)
	for _, config := range []ratelimit.Config{durable, other, swapped} {
		_, err := one.Allow(t.Context(), "key")
		require.NoError(t, err)
		key := "key"
		if config.Name == "key" {
			key = "a"
		}
		result, err := limitertest.New(t, db.Pool, config).Allow(t.Context(), key)
		require.NoError(t, err)
		require.EqualValues(t, 2, result.Remaining)
	}
	result, err := limitertest.New(t, db.Pool, same).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.False(t, result.Allowed)
	require.Len(t, pgtest.StoredRows(t, db.Pool, false), 3)
	require.Len(t, pgtest.StoredRows(t, db.Pool, true), 1)
}

func TestNowReplacesTheDatabaseClock(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	now := limitertest.T0
	limiter := limitertest.New(t, db.Pool, ratelimit.Config{
		Name: "test", Policy: ratelimit.SlidingWindow{Limit: 10, Window: time.Minute}, NoDenialCache: true,
	}, ratelimit.ClientConfig{Test: ratelimit.TestConfig{Now: func() time.Time { return now }}})
	for _, step := range []struct {
		at   time.Duration
		n    int64
		want ratelimit.Result
	}{
		// This is the example in the comments of Result.
		{0, 3, ratelimit.Result{Allowed: true, Remaining: 7, ResetAfter: 2 * time.Minute}},
		{0, 7, ratelimit.Result{Allowed: true, Remaining: 0, ResetAfter: 2 * time.Minute}},
		{5 * time.Second, 1, ratelimit.Result{RetryAfter: 61 * time.Second, ResetAfter: 115 * time.Second}},
		{66*time.Second - time.Microsecond, 1, ratelimit.Result{RetryAfter: time.Microsecond, ResetAfter: 54*time.Second + time.Microsecond}},
		{66 * time.Second, 1, ratelimit.Result{Allowed: true, Remaining: 0, ResetAfter: 114 * time.Second}},
		{180 * time.Second, 0, ratelimit.Result{Allowed: true, Remaining: 10}},
	} {
		now = limitertest.T0.Add(step.at)
		got, err := limiter.AllowN(t.Context(), "key", step.n)
		require.NoError(t, err)
		step.want.Limit, step.want.DecidedAt = 10, now
		require.Equal(t, step.want, limitertest.Plain(got), step.at)
	}
}

func TestDatabaseClockDecides(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	limiter := limitertest.New(
		t,
		db.Pool,
		ratelimit.Config{Name: "test", Policy: ratelimit.FixedWindow{Limit: 1, Window: limitertest.Year}},
	)
	for _, n := range []int64{1, 0} {
		before := pgtest.Scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
		result, err := limiter.AllowN(t.Context(), "key", n)
		require.NoError(t, err)
		after := pgtest.Scalar[time.Time](t, db.Pool, "SELECT clock_timestamp()")
		require.False(t, result.DecidedAt.Before(before))
		require.False(t, result.DecidedAt.After(after))
	}
}

// migrateInto migrates into a new schema of the database.
func migrateInto(t *testing.T, db *pgtest.DB, schema string) {
	t.Helper()
	quoted := pgx.Identifier{schema}.Sanitize()
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA "+quoted)
	require.NoError(t, migrations.Up(t.Context(), withSearchPath(t, db, quoted)))
}

func withSearchPath(t *testing.T, db *pgtest.DB, path string) *pgxpool.Pool {
	t.Helper()
	return db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = path })
}

func TestSchema(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.Empty(t)
	const odd, alike = `Limits; of "us", $1`, "rate_limit_"
	migrateInto(t, db, odd)
	migrateInto(t, db, alike)
	oddPath := withSearchPath(t, db, `"$user", nowhere, `+pgx.Identifier{odd}.Sanitize())
	for name, policy := range limitertest.SlowPolicies(10) {
		config := ratelimit.Config{Name: name, Policy: policy}
		in := func(schema string) ratelimit.ClientConfig { return ratelimit.ClientConfig{Schema: schema} }
		limiters := []*ratelimit.Limiter{
			limitertest.New(t, db.Pool, config, in(odd)),
			limitertest.New(t, oddPath, config, in("")),
			limitertest.New(t, oddPath, config, in(odd)),
			limitertest.New(t, db.Pool, config, in(alike)),
		}
		for i, want := range []int64{9, 8, 7, 9} {
			result, err := limiters[i].Allow(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}
		require.NoError(t, limiters[2].Reset(t.Context(), "key"))
		for i, want := range []int64{10, 10, 10, 9} {
			result, err := limiters[i].Peek(t.Context(), "key")
			require.NoError(t, err)
			require.Equal(t, want, result.Remaining)
		}

		// No part of a schema's name is run as SQL.
		for _, schema := range []string{
			"", "public", "nowhere", `limits; of "us", $1`, `rate_limit_"; DROP SCHEMA rate_limit_ CASCADE; --`, `x'); DROP SCHEMA rate_limit_ CASCADE; --`,
		} {
			_, err := limitertest.New(t, db.Pool, config, in(schema)).Allow(t.Context(), "key")
			require.ErrorIs(t, err, ratelimit.ErrNotMigrated, schema)
			require.ErrorIs(t, limitertest.New(t, db.Pool, config, in(schema)).Reset(t.Context(), "key"), ratelimit.ErrNotMigrated, schema)
		}
	}
	require.True(t, pgtest.Scalar[bool](t, db.Pool, "SELECT EXISTS (SELECT FROM pg_namespace WHERE nspname = $1)", alike))
}
