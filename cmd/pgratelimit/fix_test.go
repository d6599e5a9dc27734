package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/catalog"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// What commits while fix runs is not lost: fix waits for it, and others wait for fix.
func TestFixLosesNothingThatCommitsMeanwhile(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `REVOKE CREATE ON SCHEMA public FROM PUBLIC;
		ALTER TABLE rate_limit_ephemeral ALTER count SET DEFAULT 5;
		ALTER TABLE rate_limit_policy ALTER mode SET DEFAULT 'off'`, pgx.QueryExecModeSimpleProtocol)
	tx := pgtest.Begin(t, db)
	require.True(t, pgtest.Scalar[bool](t, tx, "SELECT allowed FROM rate_limit_allow('login', 'a', 'fixed 1/365d')"))
	pgtest.Exec(t, tx, "SELECT FROM rate_limit_ban('login', 'b', '1 hour', '1 week', '1 day', 'too many')")

	cmd := command(t, db.URL, "doctor", "--fix", "--timeout=10m")
	out := new(bytes.Buffer)
	cmd.Stdout, cmd.Stderr = out, out
	require.NoError(t, cmd.Start())
	pgtest.WaitUntilBlocked(t, db.Pool, 1)
	require.NoError(t, tx.Commit(t.Context()))
	require.NoError(t, cmd.Wait(), out)
	require.Contains(t, out.String(), "what was wrong is mended")
	require.False(t, pgtest.Scalar[bool](t, db.Pool, "SELECT allowed FROM rate_limit_allow('login', 'a', 'fixed 1/365d')"))
	require.Equal(t, 1, pgtest.Scalar[int](t, db.Pool, "SELECT count(*)::integer FROM rate_limit_policy WHERE key = 'b'"))
}

// Whoever keeps fix from the tables is named, and nothing changes.
func TestFixSaysWhoHasTheTables(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, "ALTER TABLE rate_limit_ephemeral ALTER count SET DEFAULT 5")
	holder := pgtest.Connect(t, db)
	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	pgtest.Exec(t, tx, "SELECT rate_limit_allow('login', 'secret', 'fixed 1/365d')")
	o := invoke(t, db.URL, "doctor", "--fix", "--timeout=3s")
	require.Equal(t, exitFailed, o.code)
	pid := holder.PgConn().PID()
	require.Regexp(t, fmt.Sprintf(`(?m)^pgratelimit doctor: nothing was changed, .*process %d \(.*pg_terminate_backend\(%[1]d\)`, pid),
		o.stderr)
	require.NotContains(t, o.stderr, "secret")
	require.NoError(t, tx.Rollback(t.Context()))
}

// All tables that fix may touch are locked.
func TestFixLocksAllTables(t *testing.T) {
	t.Parallel()

	made, ok := catalog.Made(5)
	require.True(t, ok)
	var tables []string
	for object := range made {
		if name, ok := strings.CutPrefix(object, "table "); ok {
			tables = append(tables, name)
		}
	}
	require.ElementsMatch(t, tables, slices.Clone(allTables))
}
