package engine_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/engine"
	"github.com/pgratelimit/ratelimit/internal/limitertest"
	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/migrations"
)

// The functions of the library run as a superuser. A second role may create objects in the library's schema and in
// public. It has made decoys of all functions and operators that the library calls. No decoy ever runs, whoever calls
// the library's functions.
func TestThoroughNothingThatOthersCreateIsRun(t *testing.T) {
	t.Parallel()

	db, pool := amongDecoys(t)
	require.NoError(t, callEverything(t, db, pool))
}

// A decoy runs if the schema is in search_path, or if an argument's type differs from the parameter's type.
func TestMistakesThatRunADecoy(t *testing.T) {
	t.Parallel()

	db, pool := amongDecoys(t)
	const pinned = `SET search_path TO 'pg_catalog', 'pg_temp'`
	for name, test := range map[string]struct{ function, old, new string }{
		"schema in search_path":    {"rate_limit_take_fixed_window", pinned, `SET search_path TO 'limits', 'pg_temp'`},
		"schema behind pg_catalog": {"rate_limit_take_fixed_window", pinned, `SET search_path TO 'pg_catalog', 'limits', 'pg_temp'`},
		"public":                   {"rate_limit_all", pinned, `SET search_path TO 'pg_catalog', 'public', 'pg_temp'`},
		"sweeper":                  {"rate_limit_sweep", pinned, `SET search_path TO 'limits', 'pg_temp'`},
		"argument of another type": {"rate_limit_take_fixed_window", `1::smallint`, `1`},
	} {
		var definition string
		row := db.Pool.QueryRow(
			t.Context(),
			"SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = $1 AND proowner = current_user::regrole",
			test.function,
		)
		require.NoError(t, row.Scan(&definition))
		require.Contains(t, definition, test.old)
		pgtest.Exec(t, db.Pool, strings.ReplaceAll(definition, test.old, test.new))
		pool.Reset()
		err := callEverything(t, db, pool)
		require.Error(t, err, name)
		// A decoy that compares times causes the error "too many rows".
		require.Regexp(t, "decoy|is not unique|too many rows|cannot|does not exist|must have type|does not match", err.Error(), name)
		pgtest.Exec(t, db.Pool, definition)
	}
}

// amongDecoys returns a database with functions and decoys in the schema limits, and a pool of an application's role.
func amongDecoys(t *testing.T) (*pgtest.DB, *pgxpool.Pool) {
	t.Helper()
	const role = "pg_signal_backend" // every server has this role, and it has not made the decoys
	db := pgtest.Empty(t)
	if !pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Skip("foreign roles: the URL of the server has to name a superuser") // true for servers that the tests start
	}
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA limits")
	owner := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = "limits"
	})
	require.NoError(t, migrations.Up(t.Context(), owner))
	document, err := os.ReadFile("../../docs/operating.md")
	require.NoError(t, err)
	grants := strings.Join(regexp.MustCompile(`(?s)GRANT [^;]* TO app;`).FindAllString(string(document), -1), "\n")
	pgtest.Exec(t, owner, strings.NewReplacer("TO app;", "TO "+role+";", "SCHEMA public", "SCHEMA limits").Replace(grants))

	db.Decoys(t, "limits", pgtest.Statements(t, "../..")...)
	_, err = owner.Exec(t.Context(), "SELECT cardinality(ARRAY['a'])")
	require.ErrorContains(t, err, "decoy limits.cardinality(text[]) was run by") // this error shows that the decoys exist

	return db, db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = role
		config.ConnConfig.RuntimeParams["search_path"] = "limits, public"
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, `
				CREATE TEMPORARY TABLE rate_limit_ephemeral (decoy pg_catalog.text);
				CREATE TEMPORARY TABLE rate_limit_durable (decoy pg_catalog.text);
				CREATE TEMPORARY TABLE rate_limit_sweeper (decoy pg_catalog.text);
				CREATE TYPE pg_temp.rate_limit_row AS (decoy pg_catalog.text);
				CREATE TYPE pg_temp.rate_limit_decision AS (decoy pg_catalog.text);`)
			return err
		}
	})
}

// callEverything calls all functions in all ways, and returns the first error.
func callEverything(t *testing.T, db *pgtest.DB, pool *pgxpool.Pool) error {
	t.Helper()
	const stories, stepsOf = 8, 25
	seed := limitertest.Seed(t)
	for story := range uint64(stories) { // stories of one key or several keys, under all policies
		steps, err := modeltest.NewStory(rand.New(rand.NewPCG(seed, story)), stepsOf)
		require.NoError(t, err)
		for _, step := range steps {
			limiter := limitertest.New(t, pool, ratelimit.Config{
				Name: fmt.Sprint(
					story,
					step.Name,
				), Policy: limitertest.Policy(step.Policy.Numbers()), Durable: step.Durable,
			}, ratelimit.ClientConfig{Test: limitertest.Frozen(time.UnixMicro(step.Clock))})
			if err := decide(t.Context(), limiter, pool, slices.Clone(step.Elements), engine.Transaction{}); err != nil {
				return fmt.Errorf("%s=%d: %v: %w", modeltest.SeedVariable, seed, step, err)
			}
		}
	}

	for _, schema := range []string{"", "limits"} {
		for _, durable := range []bool{false, true} {
			var requests []ratelimit.Request
			client := limitertest.NewClient(t, pool, ratelimit.ClientConfig{Schema: schema})
			for name, policy := range limitertest.SlowPolicies(10) {
				config := ratelimit.Config{Name: schema + name, Policy: policy, Durable: durable, SynchronousCommit: durable}
				limiter := limitertest.Of(t, client, config)
				for name, call := range limitertest.Calls(limiter, "key") {
					if err := call(); err != nil {
						return fmt.Errorf("%s of %s: %w", name, config.Name, err)
					}
				}
				several := []modeltest.Element{{Key: "three", Cost: 6, Count: 2}, {Key: "four", Cost: 6, Count: 2}} // one fits
				if err := decide(t.Context(), limiter, pool, several, engine.Transaction{}); err != nil {
					return fmt.Errorf("several keys of %s: %w", config.Name, err)
				}
				config.Name, config.Policy = config.Name+" and more", ratelimit.All(
					policy,
					ratelimit.FixedWindow{Limit: 100, Window: time.Hour},
				)
				for name, call := range limitertest.Calls(limitertest.Of(t, client, config), "key") {
					if err := call(); err != nil {
						return fmt.Errorf("%s of %s: %w", name, config.Name, err)
					}
				}
				for _, key := range []string{"one", "two"} {
					requests = append(requests, limiter.Request(key, 1))
				}
			}
			for _, requests := range [][]ratelimit.Request{requests, requests[:1], requests[:2]} {
				if _, err := ratelimit.AllowAll(t.Context(), requests...); err != nil {
					return err
				}
			}
		}
	}

	owner := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["search_path"] = "limits, public"
	})
	for _, call := range []string{
		"rate_limit_allow('n'::text, 'k'::text, 'fixed 9/1h'::text, 1::bigint, false)",
		"rate_limit_allow('n'::text, 'k'::text, 'bucket 9 1/1.5h, log 9/1d12h'::text, 2::bigint, true)",
		"rate_limit_peek('n'::text, 'k'::text, 'sliding 9/1us'::text, false)",
	} {
		if _, err := owner.Exec(t.Context(), "SELECT * FROM limits."+call); err != nil {
			return err
		}
	}

	// Write policies and bans, and read them as processes do.
	for _, sql := range []string{
		"INSERT INTO limits.rate_limit_policy (name, key, policy, comment) VALUES ('n', 'k', 'fixed 9/1h', 'why')",
		"UPDATE limits.rate_limit_policy SET policy = 'bucket 9 1/1.5h', valid_until = '2100-01-01' WHERE mode = 'enforce'",
		"SELECT * FROM limits.rate_limit_policies(NULL::bigint, NULL::bigint)",
		"DELETE FROM limits.rate_limit_policy",
		"SELECT * FROM limits.rate_limit_policies((SELECT version FROM limits.rate_limit_policy_history ORDER BY version LIMIT 1), NULL::bigint)",
		"SELECT * FROM limits.rate_limit_ban('n'::text, 'k'::text, '1us'::interval, '1h'::interval, '1h'::interval, 'why'::text, 60000)",
		"SELECT * FROM limits.rate_limit_ban('n'::text, 'k'::text, '1us'::interval, '1h'::interval, '1h'::interval, 'why'::text, 60000)",
		"SELECT * FROM limits.rate_limit_policies(999999::bigint, 0::bigint)",
	} {
		if _, err := owner.Exec(t.Context(), sql); err != nil {
			return err
		}
	}
	if _, err := owner.Exec(t.Context(), "TRUNCATE limits.rate_limit_policy"); err == nil ||
		!strings.Contains(err.Error(), "cannot be truncated") {
		return fmt.Errorf("TRUNCATE: %w", err)
	}

	// Run the sweeper as the superuser. There are more expired rows than one call deletes.
	sweep, err := os.ReadFile("../../cleanup/sweep.sql")
	require.NoError(t, err)
	later := time.Now().Add(10 * limitertest.Year)
	for range 4 {
		for _, names := range [][]string{nil, {"one", "two"}} {
			if _, err := owner.Exec(t.Context(), string(sweep), 2, 1000, names, "me", nil, later); err != nil {
				return err
			}
		}
	}
	for i := range 2 { // until two passes have ended
		if _, err := owner.Exec(t.Context(), string(sweep), 10_000, 1000, []string{"none"}, "me", time.Microsecond, later.Add(time.Duration(i+1)*time.Second)); err != nil {
			return err
		}
	}
	require.Zero(
		t,
		pgtest.Scalar[int](
			t,
			owner,
			"SELECT (SELECT count(*) FROM rate_limit_durable) + (SELECT count(*) FROM rate_limit_ephemeral)",
		),
	)
	return nil
}
