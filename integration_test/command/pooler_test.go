package command

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
)

// startPooler starts a PgBouncer in front of a database, and returns the connection string of its own.
func startPooler(t *testing.T, db *pgtest.DB, mode string) string {
	t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program, err = exec.LookPath("/usr/sbin/pgbouncer")
	}
	if err != nil {
		t.Skip("there is no pgbouncer: install it")
	}
	dir := openDir(t)
	require.NoError(t, os.Chmod(dir, 0o777)) // it does not run as root
	to := db.Pool.Config().ConnConfig
	login := fmt.Sprintf("host='%s' port=%d user='%s'", to.Host, to.Port, to.User)
	if to.Password != "" {
		login += fmt.Sprintf(" password='%s'", to.Password)
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "pgbouncer.ini"), fmt.Appendf(nil, `
[databases]
%s = %s
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = %s
auth_type = any
pool_mode = %s
`, to.Database, login, dir, mode), 0o644))
	args := []string{filepath.Join(dir, "pgbouncer.ini")}
	if os.Geteuid() == 0 {
		args = append(args, "-u", "nobody")
	}
	cmd := exec.CommandContext(t.Context(), program, args...)
	var log strings.Builder
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // it was killed
		if t.Failed() {
			t.Log(log.String())
		}
	})
	url := fmt.Sprintf("host=%s port=6432 user=%s dbname=%s sslmode=disable", dir, to.User, to.Database)
	require.Eventually(t, func() bool {
		conn, err := pgx.Connect(t.Context(), url)
		if err == nil {
			err = conn.Close(t.Context())
		}
		return err == nil
	}, patience, 20*time.Millisecond)
	return url
}

// All commands work through a pooler, but for those that migrate, and doctor sees it.
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
			url := startPooler(t, db, mode)
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
				require.Regexp(t, `(?m)^ok +connection +through a pooler in transaction mode, with default_query_exec_mode=exec;`, output)
			}
			output, err = run(url, "migrate", "status", "--schema", "limits")
			require.ErrorAs(t, err, new(*exec.ExitError))
			require.Contains(t, output, "connect to Postgres itself rather than to a pooler\n")
		})
	}
}
