package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgserver"

	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/cli"
	"github.com/pgratelimit/ratelimit/cmd/pgratelimit/internal/keys"
)

// testStandby turns a migrated server without problems into a standby. TestDoctorOfAServer has such a server.
func testStandby(t *testing.T, server *pgserver.Server) {
	t.Helper()
	require.NoError(t, server.Stop(t.Context(), pgserver.Fast))
	signal := filepath.Join(server.DataDir(), "standby.signal")
	require.NoError(t, os.WriteFile(signal, nil, 0o666))
	require.NoError(t, os.Chmod(signal, 0o666))
	require.NoError(t, server.Restart(t.Context()))

	// doctor does not ask a standby for what a standby cannot know or do.
	for check, f := range examined(t, server.URL()) {
		if check == "standby" {
			require.Equal(t, cli.Problem, f.Level)
			require.Contains(t, f.Found, "this is a standby")
			require.Contains(t, f.Do, "target_session_attrs=read-write")
			continue
		}
		require.Contains(t, []string{"locks", "server", "connection", "migrations", "objects", "rights", "schema", "additions", "jit", "policies",
			"rate_limit_ephemeral: kind", "rate_limit_durable: kind", "rate_limit_ephemeral_hold: kind",
			"rate_limit_durable_hold: kind"}, check)
		if check != "schema" { // Postgres 14 grants CREATE to PUBLIC
			require.Equal(t, cli.Fine, f.Level, f)
		}
	}
	const policy = "--policy=fixed 1/1m"
	for _, args := range [][]string{{"limits"}, {"take", "login", "a", policy}, {"take", "login", "a", policy, "--durable"}, {"reset", "login", "a", "--durable"},
		{"ban", "login", "a", "--for=1h", why}, {"slots", "login"}} {
		invoke(t, server.URL(), args...).complains(t, exitFailed, "connect to the primary")
	}
	require.True(
		t,
		decode[keys.Answer](t, invoke(t, server.URL(), "peek", "login", "a", policy, "--durable", "--json")).Allowed,
	)
	require.Empty(t, decode[keys.TopResult](t, invoke(t, server.URL(), "top", "login", policy, "--durable", "--json")).Keys)
	require.Equal(t, "there is none\n", invoke(t, server.URL(), "policy", "list").done(t))
	invoke(t, server.URL(), "policy", "set", "login", "--key=a", "fixed 1/1m", why, "--dry-run").done(t)
}
