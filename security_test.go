package ratelimit

import (
	"context"
	"errors"
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

	"github.com/pgratelimit/ratelimit/internal/modeltest"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// application returns a pool of a role that has the grants of docs/operating.md and nothing else. Every connection does
// what it can to have other things mistaken for the tables and functions. It has tables, types and functions of
// these names in pg_temp. Its search_path looks first into a schema that has them too, along with operators and a
// clock of its own.
func application(t *testing.T, db *pgtest.DB) *pgxpool.Pool {
	t.Helper()
	if !pgtest.Scalar[bool](t, db.Pool, "SELECT rolsuper FROM pg_roles WHERE rolname = current_user") {
		t.Skip("foreign roles: the URL of the server has to name a superuser") // as on servers that the tests start
	}
	const role = "pg_monitor" // which every server has, and which may do nothing here
	document, err := os.ReadFile("docs/operating.md")
	require.NoError(t, err)
	grants := regexp.MustCompile(`(?s)GRANT [^;]* TO app;`).FindAllString(string(document), -1)
	require.Len(t, grants, 2)
	pgtest.Exec(t, db.Pool, strings.ReplaceAll(strings.Join(grants, "\n"), "TO app;", "TO "+role+";"))
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA decoy AUTHORIZATION "+role)

	decoys := func(schema string) string {
		const columns = `(prefix text, key text, algorithm smallint DEFAULT 0, count bigint DEFAULT 0, prev_count bigint DEFAULT 0,
			window_start bigint DEFAULT 0, credit bigint DEFAULT 0, scale bigint DEFAULT 0, expires_at bigint DEFAULT 0, log bigint[],
			CONSTRAINT rate_limit_%s_pkey PRIMARY KEY (key, prefix));`
		return strings.ReplaceAll(fmt.Sprintf(`
			CREATE TABLE IF NOT EXISTS $.rate_limit_ephemeral `+columns+`
			CREATE TABLE IF NOT EXISTS $.rate_limit_durable `+columns+`
			CREATE OR REPLACE FUNCTION $.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS 'SELECT ''2001-01-01Z''::timestamptz';
			CREATE OR REPLACE FUNCTION $.set_config(text, text, boolean) RETURNS text LANGUAGE sql AS 'SELECT (1 / 0)::text';
			CREATE OR REPLACE FUNCTION $.cardinality(anyarray) RETURNS integer LANGUAGE sql AS 'SELECT 0';
			CREATE OR REPLACE FUNCTION $.rate_limit_all(integer[], text[], text[], boolean[], smallint[], bigint[], bigint[], bigint[], bigint[], bigint[],
				integer, boolean, timestamptz, bigint[], bigint[], bigint[], bigint[], boolean, text[], bigint[])
				RETURNS SETOF public.rate_limit_decision LANGUAGE sql AS 'SELECT NULL::public.rate_limit_decision WHERE false';
			CREATE OR REPLACE FUNCTION $._rate_limit_late() RETURNS boolean LANGUAGE sql AS 'SELECT true';
			CREATE OR REPLACE FUNCTION $.yes(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';`,
			"ephemeral", "durable"), "$", schema)
	}
	pgtest.Exec(t, db.Pool, "SET ROLE "+role+";"+decoys("decoy")+`
		CREATE OPERATOR decoy.<= (FUNCTION = decoy.yes, LEFTARG = bigint, RIGHTARG = bigint);
		CREATE OPERATOR decoy.>= (FUNCTION = decoy.yes, LEFTARG = bigint, RIGHTARG = bigint);
		RESET ROLE`)
	pool := db.OwnerPool(t, func(config *pgxpool.Config) {
		config.ConnConfig.RuntimeParams["role"] = role
		config.ConnConfig.RuntimeParams["search_path"] = "decoy, pg_catalog, public"
		config.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
			_, err := conn.Exec(ctx, decoys("pg_temp"))
			return err
		}
	})
	require.Equal(t, role, pgtest.Scalar[string](t, pool, "SELECT current_user"))
	require.Equal(t, 2001, pgtest.Scalar[time.Time](t, pool, "SELECT clock_timestamp()").Year()) // the decoys are in place
	return pool
}

// Whatever the application's role puts in the way, the functions decide as the model does.
func TestApplicationsDecoysChangeNoDecision(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const stories, stepsOf = 25, 40
	db := pgtest.New(t)
	pool := application(t, db)
	seed := testSeed(t)
	for story := range uint64(stories) {
		steps, err := modeltest.NewStory(rand.New(rand.NewPCG(seed, story)), stepsOf)
		require.NoError(t, err)
		for _, step := range steps {
			limiter := newLimiter(t, pool, Config{
				Name: fmt.Sprint(
					story,
					step.Name,
				), Policy: policyOf(step.Policy.Numbers()), Durable: step.Durable, Client: ClientConfig{Schema: "public", Timeout: amply, Test: frozen(time.UnixMicro(step.Clock))},
			})
			got := slices.Clone(step.Elements)
			require.NoError(t, limiter.decide(t.Context(), pool, got, transaction{}), "%s=%d", seedVariable, seed)
			for i, want := range step.Elements {
				got, want := got[i].Decision, want.Decision
				got.DecidedAt = want.DecidedAt // in time of this century they are the same: TestTimesAreReadExactly
				require.Equal(t, want, got, "%s=%d: %v", seedVariable, seed, step)
			}
		}
	}
	for _, decoy := range []string{"decoy.rate_limit_ephemeral", "decoy.rate_limit_durable"} {
		require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM "+decoy))
	}
}

// The application's role is admitted exactly Limit, by the database's clock, and has every method.
func TestApplicationNeedsNothingButExecute(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	const limit = 50
	db := pgtest.New(t)
	pool := application(t, db)
	for name, policy := range slowPolicies(limit) {
		for _, durable := range []bool{false, true} {
			config := Config{
				Name:              name,
				Policy:            policy,
				Durable:           durable,
				SynchronousCommit: durable,
				Client:            ClientConfig{Schema: "public", Timeout: amply},
			}
			limiters := []*Limiter{newLimiter(t, pool, config), newLimiter(t, pool, config)}
			results, errs := make([]Result, 2*limit), make([]error, 2*limit)
			testkit.Together(len(errs), func(i int) { results[i], errs[i] = limiters[i%2].Allow(t.Context(), "key") })
			require.NoError(t, errors.Join(errs...))
			admitted := 0
			for _, result := range results {
				require.Greater(t, result.DecidedAt.Year(), 2001)
				if result.Allowed {
					admitted++
				}
			}
			require.Equal(t, limit, admitted)
			require.EqualValues(t, limit, taken(t, db.Pool, config, "key"))

			for name, call := range everyCall(limiters[0], "another") {
				require.NoError(t, call(), name)
			}
			require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				result, err := limiters[0].WithTx(tx).AllowN(t.Context(), "third", limit)
				require.True(t, result.Allowed)
				return errors.Join(err, limiters[0].WithTx(tx).Reset(t.Context(), "key"))
			}))
			require.Zero(t, taken(t, db.Pool, config, "key"))
		}
	}
}

// Negative control: functions that look names up where their caller does take the decoys for the real ones.
func TestFunctionsWithoutTheirSearchPathTakeDecoys(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "what a migrated database has")

	db := pgtest.New(t)
	pool := application(t, db)
	config := Config{
		Name:   "test",
		Policy: FixedWindow{Limit: 10, Window: year},
		Client: ClientConfig{Schema: "public", Timeout: amply},
	}
	_, err := newLimiter(t, pool, config).Allow(t.Context(), "key")
	require.NoError(t, err)
	require.EqualValues(t, 1, taken(t, db.Pool, config, "key"))

	pgtest.Exec(t, db.Pool, "ALTER FUNCTION rate_limit_take_fixed_window RESET search_path")
	pool.Reset()
	_, err = newLimiter(t, pool, config).Allow(t.Context(), "key")
	stored := taken(t, db.Pool, config, "key")
	require.True(t, err != nil || stored != 2, "no decoy was taken")
}
