package command

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// Debian's cron runs deploy/pgratelimit.cron every minute, with another path and database, and deletes the expired
// rows. cron sees folders of the test instead of the machine's crontabs.
func TestCron(t *testing.T) {
	t.Parallel()

	if os.Geteuid() != 0 {
		t.Skip("cron: it runs its jobs as other users, which takes root")
	}
	cron, err := exec.LookPath("/usr/sbin/cron")
	if err != nil {
		t.Skip("cron: install it (Debian: cron)")
	}
	db := pgtest.New(t)
	binary := buildCommand(t)

	file, err := os.ReadFile(filepath.Join(repository, "deploy/pgratelimit.cron"))
	require.NoError(t, err)
	crontab := string(file)
	for from, to := range map[string]string{
		"DATABASE_URL=postgres://sweeper:secret@localhost/app?search_path=rate_limit": "DATABASE_URL=" + db.URL,
		"\n*/5 * * * * ":             "\n* * * * * ",
		"/usr/local/bin/pgratelimit": binary,
	} {
		require.Equal(t, 1, strings.Count(crontab, from), from)
		crontab = strings.ReplaceAll(crontab, from, to)
	}

	dir := testkit.OpenDir(t)
	for _, folder := range []string{"cron.d", "spool", "run"} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, folder), 0o755))
	}
	require.NoError(t, os.WriteFile(filepath.Join(dir, "crontab"), nil, 0o644))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "cron.d/pgratelimit"), []byte(crontab), 0o600))

	// cron runs in a new mount namespace, which ends with cron.
	cmd := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-ec", `
		mount --bind "$1/cron.d" /etc/cron.d
		mount --bind "$1/crontab" /etc/crontab
		mount --bind "$1/spool" /var/spool/cron
		mount --bind "$1/run" /run
		exec "$2" -f`, "sh", dir, cron)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // cron was killed
		if t.Failed() {
			t.Log(log.String())
		}
	})

	rows := func() (n int) {
		require.NoError(t, db.Pool.QueryRow(t.Context(), "SELECT count(*) FROM rate_limit_ephemeral").Scan(&n))
		return n
	}
	_, err = db.Pool.Exec(t.Context(), `
		INSERT INTO rate_limit_ephemeral (prefix, key, expires_at) SELECT 'login', i::text, 1 FROM generate_series(1, 1500) AS i`)
	require.NoError(t, err)
	require.Equal(t, 1500, rows())
	require.Eventually(t, func() bool { return rows() == 0 }, patience, 100*time.Millisecond)
}
