package command

import (
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// All commands work through a pooler, except those that migrate. doctor reports the pooler.
func TestThroughAPooler(t *testing.T) {
	t.Parallel()

	binary := buildCommand(t)
	for mode, finding := range map[string]string{
		"session":     `ok +connection +through a pooler that keeps each client's session\n`,
		"transaction": `warning +connection +through a pooler in transaction mode, with default_query_exec_mode=cache_statement\n +→ add default_query_exec_mode=exec`,
	} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			db := pgtest.New(t)
			_, err := db.Pool.Exec(t.Context(), "CREATE SCHEMA limits")
			require.NoError(t, err)
			url := pgtest.PgBouncer(t, db, mode, 20)
			run := func(url string, args ...string) (string, error) {
				cmd := exec.CommandContext(t.Context(), binary, args...)
				cmd.Env = []string{"DATABASE_URL=" + url}
				output, err := cmd.CombinedOutput()
				return string(output), err
			}
			output, err := run(db.URL, "migrate", "up", "--schema", "limits")
			require.NoError(t, err, output)

			for _, more := range [][]string{nil, {"--schema", "limits"}} {
				for _, args := range [][]string{
					{"take", "login", "a", "--policy", "sliding 10/1m"},
					{"peek", "login", "a", "--policy", "sliding 10/1m"},
					{"top", "login", "--policy", "sliding 10/1m"},
					{"limits", "--policy", "login=sliding 10/1m"},
					{"reset", "login", "a"},
					{"reset", "login", "--all", "--yes"},
					{"sweep"},
				} {
					output, err := run(url, append(args, more...)...)
					require.NoError(t, err, "%v: %s", args, output)
				}
			}
			output, err = run(url, "doctor")
			require.NoError(t, err, output)
			require.Regexp(t, `(?m)^`+finding, output)
			output, err = run(db.URL, "doctor")
			require.NoError(t, err, output)
			require.Regexp(t, `(?m)^ok +connection +directly to Postgres$`, output)
			if mode == "transaction" {
				output, err = run(url+" default_query_exec_mode=exec", "doctor")
				require.NoError(t, err, output)
				require.Regexp(
					t,
					`(?m)^ok +connection +through a pooler in transaction mode, with default_query_exec_mode=exec;`,
					output,
				)
			}
			// doctor cannot read the migrations through the pooler, and must not report an error for that.
			output, err = run(url, "doctor", "--schema", "limits")
			require.NoError(t, err, output)
			require.Contains(t, output, "could not be looked at")
			require.NotContains(t, output, "DROP ")
			output, err = run(url, "migrate", "status", "--schema", "limits")
			require.ErrorAs(t, err, new(*exec.ExitError))
			require.Contains(t, output, "connect to Postgres itself rather than to a pooler\n")
		})
	}
}
