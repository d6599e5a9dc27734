package pgtest

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// PgBouncer starts a PgBouncer in front of a test's database, and returns a connection string. All clients share the
// given number of connections to the database. The argument more has additional lines of pgbouncer.ini. If PgBouncer is
// missing, the test is skipped, or fails if RATELIMIT_TEST_PGBOUNCER names the program.
func PgBouncer(t testing.TB, db *DB, mode string, connections int, more ...string) (connString string) {
	t.Helper()
	program := os.Getenv("RATELIMIT_TEST_PGBOUNCER")
	if program == "" {
		if program = testkit.Program("pgbouncer"); program == "" {
			t.Skip("PgBouncer: install it (Debian: pgbouncer), or name the program in RATELIMIT_TEST_PGBOUNCER")
		}
	}
	version, err := exec.CommandContext(t.Context(), program, "--version").Output()
	require.NoError(t, err)

	// PgBouncer listens on a socket in a new folder, so its port is free. PgBouncer refuses to run as root.
	dir := testkit.OpenDir(t)
	to := db.Pool.Config().ConnConfig
	quote := func(value string) string { return "'" + strings.ReplaceAll(value, "'", "''") + "'" }
	login := fmt.Sprintf("host=%s port=%d user=%s", quote(to.Host), to.Port, quote(to.User))
	if to.Password != "" {
		login += " password=" + quote(to.Password)
	}
	settings := fmt.Sprintf(`
		[databases]
		%s = %s
		[pgbouncer]
		listen_addr =
		listen_port = 6432
		unix_socket_dir = %s
		auth_type = any
		pool_mode = %s
		default_pool_size = %d
		server_login_retry = 0.1
		`, to.Database, login, dir, mode, connections)
	var minor int
	if _, err := fmt.Sscanf(string(version), "PgBouncer 1.%d", &minor); err != nil || minor >= 21 {
		settings += "max_prepared_statements = 0\n" // as in all earlier versions
	}
	settings += strings.Join(more, "\n") + "\n"
	file := filepath.Join(dir, "pgbouncer.ini")
	require.NoError(t, os.WriteFile(file, []byte(strings.ReplaceAll(settings, "\t", "")), 0o644))

	args := []string{file}
	if os.Geteuid() == 0 {
		args = append(args, "-u", "nobody")
	}
	connString = fmt.Sprintf("host=%s port=6432 user=%s dbname=%s sslmode=disable", dir, quote(to.User), to.Database)
	testkit.Start(t, func() error {
		conn, err := pgx.Connect(t.Context(), connString)
		if err != nil {
			return err
		}
		return conn.Close(t.Context())
	}, program, args...)
	return connString
}
