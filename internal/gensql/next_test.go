package main

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	ratelimit "github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	published "github.com/pgratelimit/ratelimit/migrations"
)

// repository is a copy of sql/ and migrations/, in which migrations can be added.
type repository struct {
	root string
	list []migration
}

// newRepository returns a copy in which all migrations are released.
func newRepository(t *testing.T) *repository {
	t.Helper()
	r := &repository{root: t.TempDir(), list: migrations()}
	for _, folder := range []string{"sql", "migrations"} {
		require.NoError(t, os.CopyFS(filepath.Join(r.root, folder), os.DirFS("../../"+folder)))
	}
	r.release(t)
	return r
}

// release marks all migrations as released.
func (r *repository) release(t *testing.T) {
	t.Helper()
	for i, m := range r.list {
		sum := sha256.Sum256([]byte(r.read(t, "migrations/"+m.file)))
		r.list[i].released = hex.EncodeToString(sum[:])
	}
}

func (r *repository) read(t *testing.T, file string) string {
	t.Helper()
	content, err := os.ReadFile(filepath.Join(r.root, file))
	require.NoError(t, err)
	return string(content)
}

// edit replaces a text that a file has once.
func (r *repository) edit(t *testing.T, file, old, now string) {
	t.Helper()
	content := r.read(t, file)
	require.Equal(t, 1, strings.Count(content, old), old)
	require.NoError(t, os.WriteFile(filepath.Join(r.root, file), []byte(strings.Replace(content, old, now, 1)), 0o600))
}

// run runs a half of a migration.
func (r *repository) run(t *testing.T, pool *pgxpool.Pool, number int, down bool) error {
	t.Helper()
	up, back, found := strings.Cut(r.read(t, "migrations/"+r.list[number-1].file), "-- +goose Down\n")
	require.True(t, found)
	if down {
		up = back
	}
	_, err := pool.Exec(t.Context(), up, pgx.QueryExecModeSimpleProtocol)
	return err
}

// TestTheNextMigration rehearses the way in CONTRIBUTING.md: two migrations after a release, on a database in use.
func TestTheNextMigration(t *testing.T) {
	t.Parallel()
	pgtest.NotThroughProxy(t, "the migrations")

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, "ALTER DEFAULT PRIVILEGES GRANT EXECUTE ON FUNCTIONS TO pg_signal_backend")
	require.NoError(t, published.Up(t.Context(), db.Pool))
	pgtest.Exec(t, db.Pool, `
		GRANT EXECUTE ON FUNCTION rate_limit_take_sliding_window, rate_limit_all TO pg_monitor;
		GRANT EXECUTE ON FUNCTION rate_limit_allow TO pg_monitor WITH GRANT OPTION`)
	application := db.OwnerPool(t, func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["role"] = "pg_monitor" })
	client, err := ratelimit.NewClient(application, ratelimit.ClientConfig{Timeout: time.Minute})
	require.NoError(t, err)
	var limiters []*ratelimit.Limiter
	for _, durable := range []bool{false, true} {
		limiter, err := client.Limiter(ratelimit.Config{
			Name: "test", Durable: durable, Policy: ratelimit.SlidingWindow{Limit: 1 << 30, Window: time.Hour}})
		require.NoError(t, err)
		limiters = append(limiters, limiter)
	}
	stop, done, calls := make(chan struct{}), make(chan error, 1), 0
	ask := func() error {
		for _, limiter := range limiters {
			if _, err := limiter.Allow(t.Context(), "key"); err != nil {
				return err
			}
			calls++
		}
		return nil
	}
	require.NoError(t, ask())
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
				if err := ask(); err != nil {
					done <- err
					return
				}
			}
		}
	}()
	version3 := pgtest.Catalog(t, db.Pool, "public")

	// The fourth migration changes bodies, one of a function that has a twin, and adds a function.
	r := newRepository(t)
	r.edit(t, "sql/version.sql", "SELECT 3::", "SELECT 4::")
	r.edit(t, "sql/sliding.sql", "    ignored := _rate_limit_set(",
		"    IF name = 'changed' THEN RAISE EXCEPTION 'changed for ephemeral keys'; END IF;\n"+
			"    ignored := _rate_limit_set(")
	const more = "CREATE FUNCTION _rate_limit_more() RETURNS integer LANGUAGE sql AS $$ SELECT 1 $$;\n\n"
	r.edit(t, "sql/sliding.sql", "CREATE FUNCTION _rate_limit_sliding(", more+"CREATE FUNCTION _rate_limit_sliding(")
	r.list = append(r.list, migration{
		file: "00004_change_sliding.sql", comment: "Changes.", sources: []string{"sliding", "allow", "policies"}})
	require.ErrorContains(t, generate(r.root, r.list, true), "00004_change_sliding.sql is not what sql/ says")
	require.NoError(t, generate(r.root, r.list, false))
	require.NoError(t, generate(r.root, r.list, true))

	pgtest.Exec(t, db.Pool, "ALTER FUNCTION _rate_limit_sliding_fits OWNER TO pg_read_all_stats")
	require.ErrorContains(t, r.run(t, db.Pool, 4, false), "belongs to pg_read_all_stats, and not to ")
	pgtest.Exec(t, db.Pool, "ALTER FUNCTION _rate_limit_sliding_fits OWNER TO CURRENT_USER")

	require.NoError(t, r.run(t, db.Pool, 4, false))
	pgtest.Exec(t, application, "SELECT rate_limit_allow('people', 'key', 'sliding 10/1m')")
	close(stop)
	require.NoError(t, <-done)
	require.NoError(t, ask())
	for _, table := range []string{"rate_limit_ephemeral", "rate_limit_durable"} {
		require.EqualValues(t, calls/2, pgtest.Scalar[int64](t, db.Pool,
			"SELECT count FROM "+table+" WHERE prefix = 'test'"))
	}
	require.EqualValues(t, 4, pgtest.Scalar[int64](t, application, "SELECT rate_limit_version()"))
	for durable, want := range map[string]string{"false": "changed for ephemeral", "true": "changed for durable"} {
		_, err := application.Exec(t.Context(),
			"SELECT rate_limit_take_sliding_window('changed', '{key}', 10, 1000000, durable => "+durable+")")
		require.ErrorContains(t, err, want)
	}
	version4 := pgtest.Catalog(t, db.Pool, "public")
	for object, value := range version3 {
		if strings.HasSuffix(object, ", acl") {
			require.Equal(t, value, version4[object], object)
		}
	}

	// The way down makes the functions of version 3 again, and the grants stay.
	require.NoError(t, r.run(t, db.Pool, 4, true))
	require.Empty(t, pgtest.Differences(version3, pgtest.Catalog(t, db.Pool, "public")))
	require.NoError(t, r.run(t, db.Pool, 4, false))
	require.Empty(t, pgtest.Differences(version4, pgtest.Catalog(t, db.Pool, "public")))

	// The fifth migration changes the arguments of a function, which loses its grants, and drops another function.
	r.release(t)
	r.edit(t, "sql/version.sql", "SELECT 4::", "SELECT 5::")
	r.edit(t, "sql/sliding.sql", "now_us bigint DEFAULT NULL\n", "now_us bigint DEFAULT NULL, more text DEFAULT NULL\n")
	r.edit(t, "sql/sliding.sql", more, "")
	const drop = "DROP FUNCTION rate_limit_take_sliding_window, _rate_limit_take_sliding_window_durable;\n"
	r.list = append(r.list, migration{
		file: "00005_change_sliding.sql", comment: "Changes.", sources: []string{"sliding"},
		up: drop + "DROP FUNCTION _rate_limit_more;\n", down: drop})
	require.NoError(t, generate(r.root, r.list, false))
	require.NoError(t, r.run(t, db.Pool, 5, false))
	require.NoError(t, r.run(t, db.Pool, 5, true))
	pgtest.Exec(t, db.Pool, "GRANT EXECUTE ON FUNCTION rate_limit_take_sliding_window TO pg_monitor")
	require.Empty(t, pgtest.Differences(version4, pgtest.Catalog(t, db.Pool, "public")))
	require.NoError(t, r.run(t, db.Pool, 5, false))
	_, err = application.Exec(t.Context(), "SELECT rate_limit_take_sliding_window('test', '{key}', 10, 1000000)")
	require.ErrorContains(t, err, "permission denied")

	// All this equals a new database, and the files of sql/.
	pgtest.Exec(t, db.Pool, "REVOKE ALL ON ALL FUNCTIONS IN SCHEMA public FROM pg_monitor")
	want := pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, "public"), "public")
	fresh, direct := db.InSchema(t, "fresh"), db.InSchema(t, "direct")
	for number := range r.list {
		require.NoError(t, r.run(t, fresh, number+1, false))
	}
	for _, file := range loaded(t) {
		pgtest.Exec(t, direct, r.read(t, "sql/"+file))
	}
	for _, schema := range []string{"fresh", "direct"} {
		require.Empty(t, pgtest.Differences(want, pgtest.WithoutSchema(pgtest.Catalog(t, db.Pool, schema), schema)), schema)
	}

	// A released file is not written, and a change of it is an error.
	r.edit(t, "migrations/00004_change_sliding.sql", "-- Changes.", "-- Changes!")
	for _, check := range []bool{true, false} {
		require.ErrorContains(t, generate(r.root, r.list, check), "00004_change_sliding.sql is not what was released")
	}
}
