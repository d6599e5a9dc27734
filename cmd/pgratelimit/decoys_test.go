package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// A superuser runs commands in a database where another role can create objects in public and in the functions' schema.
func TestThoroughNothingThatOthersCreateIsRun(t *testing.T) {
	t.Parallel()

	db := pgtest.Empty(t)
	pgtest.Exec(t, db.Pool, "CREATE SCHEMA limits")
	url := urlWith(t, db, "search_path=limits,public")
	invoke(t, url, "migrate", "up").done(t)
	var statements []string
	for _, pattern := range []string{"internal/*/sql/*.sql", "../../cleanup/*.sql", "../../internal/*/call/*.sql"} {
		files, err := filepath.Glob(pattern)
		require.NoError(t, err)
		for _, file := range files {
			content, err := os.ReadFile(file)
			require.NoError(t, err)
			statements = append(statements, string(content))
		}
	}
	db.Decoys(t, "limits", statements...)
	pool := db.OwnerPool(
		t,
		func(config *pgxpool.Config) { config.ConnConfig.RuntimeParams["search_path"] = "limits, public" },
	)
	_, err := pool.Exec(t.Context(), "SELECT cardinality(ARRAY['a'])")
	require.ErrorContains(t, err, "decoy limits.cardinality(text[]) was run by") // the decoys work

	for _, schema := range [][]string{nil, {"--schema", "limits"}} {
		more := schema
		if schema != nil {
			more = append(more, "--durable")
		}
		for _, args := range [][]string{{"take", "login", "a"}, {"take", "login", "b"}, {"peek", "login", "a"}, {"top", "login"}, {"hold", "login", "a", "--cost=1", "--for=1m"}} {
			invoke(t, url, append(append(args, "--policy", "log 100/1h"), more...)...).done(t)
		}
		for _, args := range [][]string{{"reset", "login", "a"}, {"reset", "login", "--all", "--yes"}} {
			invoke(t, url, append(args, more...)...).done(t)
		}
		// The command's statements are the same for all policies. The engine's test calls the functions of all.
		for _, policy := range []string{"fixed 100/1h", "sliding 100/1h", "bucket 100 1/1h"} {
			if schema == nil {
				invoke(t, url, "take", policy, "a", "--policy", policy).done(t)
			}
		}
		for _, args := range [][]string{{"limits"}, {"limits", "--exact", "--policy", "login=fixed 100/1h"}, {"sweep"}, {"migrate", "status"}, {"migrate", "up"},
			{"policy", "set", "login", "--key=a", "sliding 9/1h", why}, {"policy", "set", "login", "--prefix=a", "sliding 9/1h", why},
			{"policy", "set", "login", "--key=a", "sliding 8/1h", why, "--force", "--until=1h"}, {"policy", "list"}, {"policy", "get", "login", "a"},
			{"explain", "login", "a"}, {"ban", "login", "a", "--for=1h", why}, {"unban", "login", "a"}, {"policy", "unset", "login", "--key=a"},
			{"policy", "history", "login", "--key=a"}, {"slots", "login"}} {
			invoke(t, url, append(args, schema...)...).done(t)
		}
		o := invoke(t, url, append([]string{"doctor"}, schema...)...)
		require.Equal(t, exitFailed, o.code)
		require.NotContains(t, o.stdout+o.stderr, "was run")
		require.NotContains(t, o.stdout, "could not be looked at")
		require.Contains(t, o.stdout, "REVOKE CREATE ON SCHEMA limits FROM pg_monitor")
	}
}
