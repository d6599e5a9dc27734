package main

import (
	"context"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/policytable"
)

// If a command gives units to a key, it tells processes to drop remembered denials of the key. So does a reset by a
// role that may only call functions. Other commands tell processes nothing.
func TestProcessesAreToldToForget(t *testing.T) {
	t.Parallel()

	const policy = "--policy=fixed 5/1h"
	db := pgtest.New(t)
	pgtest.Exec(t, db.Pool, `GRANT SELECT ON rate_limit_ephemeral TO pg_monitor;
		GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA public TO pg_monitor`)
	conn := pgtest.Connect(t, db)
	pgtest.Exec(t, conn, "LISTEN "+policytable.Channel)
	told := func(want ...string) {
		t.Helper()
		pgtest.Exec(t, db.Pool, "NOTIFY "+policytable.Channel+", 'last'")
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		hashes, wanted := map[string]bool{}, map[string]bool{}
		for {
			notification, err := conn.WaitForNotification(ctx)
			require.NoError(t, err)
			more, ok := policytable.ReadForget(notification.Payload)
			if !ok {
				break
			}
			for hash := range more {
				hashes[hash] = true
			}
		}
		for _, key := range want {
			wanted[policytable.KeyHash("login", key)] = true
		}
		require.Equal(t, wanted, hashes)
	}
	receipt := filepath.Join(t.TempDir(), "receipt")
	take := func() {
		pgtest.Exec(t, db.Pool, "SELECT rate_limit_allow('login', key, 'fixed 5/1h') FROM unnest('{a,b,c}'::text[]) AS key")
	}
	take()
	invoke(t, db.URL, "take", "login", "c", policy, "--receipt", receipt).done(t)
	invoke(t, db.URL, "peek", "login", "c", policy).done(t)
	told()
	invoke(t, db.URL, "refund", receipt).done(t)
	told("c")
	invoke(t, db.URL, "grant", "login", "d", policy, "--cost", "1").done(t)
	told("d")
	held := invoke(t, db.URL, "hold", "login", "e", policy, "--cost=5", "--for=1h").done(t)
	told()
	for _, args := range [][]string{{"extend", "--for=2h"}, {"settle", "--used=1"}, {"cancel"}} {
		invoke(t, db.URL, append([]string{args[0], strings.TrimSpace(held)}, args[1:]...)...).done(t)
		told("e")
	}
	invoke(t, db.URL, "reset", "login", "a").done(t)
	told("a")
	take()
	invoke(t, db.URL, "reset", "login", "--all", "--yes").done(t)
	told("a", "b", "c", "d", "e")
	take()
	require.Contains(t, invoke(t, urlWith(t, db, "role=pg_monitor"), "reset", "login", "--all", "--yes").done(t), "reset 3")
	told("a", "b", "c")

	// A grant succeeds even if the notification fails. If the command failed, the user would grant the credit again.
	pgtest.Exec(t, db.Pool, "REVOKE EXECUTE ON FUNCTION pg_notify FROM PUBLIC")
	o := invoke(t, urlWith(t, db, "role=pg_monitor"), "grant", "login", "secret", policy, "--cost", "1")
	require.Zero(t, o.code)
	require.Contains(t, o.stdout, "granted: 6 of 5 remaining")
	require.Regexp(t, "^warning: it is given, but .*pg_notify.*\n$", o.stderr)
	require.NotContains(t, o.stderr, "secret")
	told()
}
