package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// terminal is a command that runs on a new terminal.
type terminal struct {
	t    *testing.T
	cmd  *exec.Cmd
	file *os.File

	mu     sync.Mutex
	screen bytes.Buffer
	closed chan struct{}
}

func onTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	file, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 24, Cols: 100})
	require.NoError(t, err)
	p := &terminal{t: t, cmd: cmd, file: file, closed: make(chan struct{})}
	t.Cleanup(func() { _ = file.Close() })
	go func() {
		defer close(p.closed)
		_, _ = io.Copy(p, file) // Copy ends when the command closes its end of the terminal
	}()
	return p
}

func (p *terminal) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.screen.Write(b)
}

func (p *terminal) shown() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return strings.ReplaceAll(p.screen.String(), "\r\n", "\n")
}

func (p *terminal) waitFor(text string) {
	p.t.Helper()
	require.Eventually(
		p.t,
		func() bool { return strings.Contains(p.shown(), text) },
		patience,
		5*time.Millisecond,
		"%q does not come",
		text,
	)
}

func (p *terminal) typeIn(text string) {
	p.t.Helper()
	_, err := p.file.WriteString(text)
	require.NoError(p.t, err)
}

// wait waits for the command, and returns its exit code and output.
func (p *terminal) wait() (int, string) {
	p.t.Helper()
	_ = p.cmd.Wait() // the exit code is enough
	<-p.closed
	return p.cmd.ProcessState.ExitCode(), p.shown()
}

func TestResetAllAsksFirst(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	fill(t, db, "rate_limit_ephemeral", "login", 20, 1)
	const question = "Reset all keys of limiter login in rate_limit_ephemeral? [y/N] "
	ask := func() *terminal {
		p := onTerminal(t, command(t, db.URL, "reset", "login", "--all"))
		p.waitFor(question)
		require.Equal(
			t,
			20,
			pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"),
			"it did not wait for the answer",
		)
		return p
	}
	for answer, says := range map[string]string{
		"\n":       "pgratelimit reset: nothing was done\n",
		"yellow\n": "pgratelimit reset: nothing was done\n",
		"\x04":     "pgratelimit reset: nothing was done\n", // Ctrl-D
		"\x03":     "\npgratelimit reset: interrupted\n",    // Ctrl-C
	} {
		p := ask()
		p.typeIn(answer)
		code, shown := p.wait()
		require.Equal(t, exitFailed, code)
		require.True(t, strings.HasSuffix(shown, says), shown)
		require.Equal(t, 20, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
	}

	p := ask()
	p.typeIn("Yes\n")
	code, shown := p.wait()
	require.Zero(t, code, shown)
	require.True(t, strings.HasSuffix(shown, "reset 20 in rate_limit_ephemeral\n"), shown)
	require.Zero(t, pgtest.Scalar[int](t, db.Pool, "SELECT count(*) FROM rate_limit_ephemeral"))
}

func TestMigrateDownAsksFirst(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	before := pgtest.Objects(t, db.Pool)
	p := onTerminal(t, command(t, db.URL, "migrate", "down", "--to", "0"))
	p.waitFor("Roll back all migrations? The tables go too, and with them all counts and policies. [y/N] ")
	p.typeIn("n\n")
	code, _ := p.wait()
	require.Equal(t, exitFailed, code)
	require.Equal(t, before, pgtest.Objects(t, db.Pool))

	p = onTerminal(t, command(t, db.URL, "migrate", "down"))
	p.waitFor("[y/N] ")
	p.typeIn("y\n")
	code, shown := p.wait()
	require.Zero(t, code, shown)
	require.NotEqual(t, before, pgtest.Objects(t, db.Pool))
}

// Ctrl-C also ends the statement on the server.
func TestInterruptedStatementsEnd(t *testing.T) {
	t.Parallel()

	db := pgtest.New(t)
	tx, err := db.Pool.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "LOCK TABLE rate_limit_ephemeral")
	require.NoError(t, err)
	p := onTerminal(t, command(t, db.URL, "limits", "--timeout", "1h"))
	waiting := func() int {
		return pgtest.Scalar[int](
			t,
			db.Pool,
			"SELECT count(*) FROM pg_stat_activity WHERE application_name = 'pgratelimit' AND datname = current_database()",
		)
	}
	testkit.WaitUntil(t, func() bool {
		// Databases of other tests are clones too, so their tables have the same number.
		return pgtest.Scalar[bool](t, db.Pool, `SELECT count(*) = 1 FROM pg_locks JOIN pg_database d ON d.oid = database
			WHERE NOT granted AND relation = 'rate_limit_ephemeral'::regclass AND datname = current_database()`)
	})
	p.typeIn("\x03")
	code, shown := p.wait()
	require.Equal(t, exitFailed, code)
	require.True(t, strings.HasSuffix(shown, "pgratelimit limits: interrupted\n"), shown)
	require.Eventually(t, func() bool { return waiting() == 0 }, patience, 5*time.Millisecond)
	require.NoError(t, tx.Rollback(t.Context()))
}

// A terminal shows how much of a log has been read, and the bar is gone when the result comes. Other outputs have no bar.
func TestReplayShowsProgress(t *testing.T) {
	t.Parallel()

	file := filepath.Join(t.TempDir(), "log.csv") // more than is read at once
	log := []byte("time,key\n" + strings.Repeat("1700000000,<Anna>\n", 40_000))
	require.NoError(t, os.WriteFile(file, log, 0o600))
	plain := invoke(t, "", "replay", file, "--policy", "fixed 10/1m", "--show-keys")
	require.Empty(t, plain.stderr)
	text := plain.done(t)
	p := onTerminal(t, command(t, "", "replay", file, "--policy", "fixed 10/1m", "--show-keys"))
	code, shown := p.wait()
	require.Zero(t, code, shown)
	require.Regexp(t, `^\rreading [ \d]+% `, shown)
	require.True(t, strings.HasSuffix(shown, "\r"+text), shown)

	cmd := command(t, "", "replay", "-", "--policy", "fixed 10/1m", "--show-keys")
	piped := exec.Command("sh", append([]string{"-c", `exec "$0" "$@" <` + file, cmd.Path}, cmd.Args[1:]...)...)
	piped.Env = cmd.Env
	p = onTerminal(t, piped)
	code, shown = p.wait()
	require.Zero(t, code, shown)
	require.Regexp(t, `\r. reading: 0\.\d MB `, shown)
	require.True(t, strings.HasSuffix(shown, "\r"+text), shown)
}
