//go:build unix

package pgserver

import (
	"context"
	"errors"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNothingFoundNamesAllWays(t *testing.T) {
	t.Parallel()

	host := emptyHost(t)
	_, err := start(t.Context(), Config{}, host)
	require.ErrorIs(t, err, ErrNotFound)
	for _, way := range []string{
		"DATABASE_URL", "RATELIMIT_TEST_DATABASE_URL",
		"apt-get install postgresql", "brew install postgresql", host.folders[0],
		"Docker", "no docker command in PATH",
	} {
		require.ErrorContains(t, err, way)
	}

	_, err = start(t.Context(), Config{BinDir: host.tempDir}, host)
	require.ErrorContains(t, err, "no programs postgres and initdb in "+host.tempDir)
}

// emptyHost has an empty PATH and no other programs.
func emptyHost(t *testing.T) host {
	t.Helper()
	dir := openTempDir(t)
	return host{
		tempDir:  dir,
		lookPath: func(name string) (string, error) { return "", &exec.Error{Name: name, Err: exec.ErrNotFound} },
		folders:  []string{filepath.Join(dir, "nowhere/*")},
		port:     freePort,
	}
}

func TestBinariesAreFoundInOrder(t *testing.T) {
	t.Parallel()

	root := t.TempDir()
	install := func(folder string, names ...string) string {
		folder = filepath.Join(root, folder)
		require.NoError(t, os.MkdirAll(folder, 0o700))
		for _, name := range names {
			require.NoError(t, os.WriteFile(filepath.Join(folder, name), []byte("#!/bin/sh\n"), 0o700))
		}
		return folder
	}
	install("lib/9.6/bin", "postgres", "initdb")
	install("lib/18/bin", "initdb") // the client alone
	newest := install("pgsql-17/bin", "postgres", "initdb")
	install("lib/16/bin", "postgres", "initdb")
	unnumbered := install("pgsql/bin", "postgres", "initdb")
	inPath := install("path", "postgres", "initdb")
	configured := install("configured", "postgres", "initdb")
	pgConfig := filepath.Join(configured, "pg_config")
	writeProgram(t, pgConfig, []byte("#!/bin/sh\n[ $1 = --bindir ] && echo "+configured+"\n"))

	for name, test := range map[string]struct {
		binDir  string
		path    map[string]string
		folders []string
		want    string
	}{
		"the folder asked for": {
			binDir: unnumbered, path: map[string]string{"initdb": filepath.Join(inPath, "initdb")}, want: unnumbered,
		},
		"PATH": {
			path: map[string]string{"initdb": filepath.Join(inPath, "initdb"), "pg_config": pgConfig}, want: inPath,
		},
		"pg_config": {
			path: map[string]string{"pg_config": pgConfig}, folders: []string{"lib/*/bin"}, want: configured,
		},
		"the newest of the install folders": {folders: []string{"pgsql/bin", "lib/*/bin", "pgsql-*/bin"}, want: newest},
		"a folder without a number":         {folders: []string{"pgsql/bin"}, want: unnumbered},
		"nothing":                           {folders: []string{"none/*"}},
	} {
		host := host{lookPath: func(name string) (string, error) {
			if path, ok := test.path[name]; ok {
				return path, nil
			}
			return "", exec.ErrNotFound
		}}
		for _, folder := range test.folders {
			host.folders = append(host.folders, filepath.Join(root, folder))
		}
		found, err := findBinaries(t.Context(), test.binDir, host)
		require.NoError(t, err, name)
		require.Equal(t, test.want, found, name)
	}
}

func TestFailedStartTellsWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()

	host := newHost()
	host.tempDir = openTempDir(t)
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
	host.tempDir = filepath.Join(openTempDir(t), strings.Repeat("deep", 25))
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
		t.Skip("only root runs the server as another user")
	}

	host := newHost()
	closed := openTempDir(t)
	require.NoError(t, os.Chmod(closed, 0o700))
	host.tempDir = closed
	_, err := start(t.Context(), Config{}, host)
	require.ErrorContains(t, err, "set TMPDIR to a folder that every user may enter")
	requireNothingLeft(t, closed, nil)

	host.tempDir = openTempDir(t)
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
		t.Skip("all the tests run as an ordinary user already")
	}

	home := openTempDir(t)
	require.NoError(t, account.own(home))
	binary := filepath.Join(home, "pgserver.test")
	content, err := os.ReadFile(testBinary(t))
	require.NoError(t, err)
	writeProgram(t, binary, content)
	tempDir := filepath.Join(home, "tmp")
	require.NoError(t, os.Mkdir(tempDir, 0o700))
	require.NoError(t, account.own(tempDir))

	cmd := exec.CommandContext(t.Context(), binary, "-test.v",
		"-test.run", `^(TestKillThenRestartRecoversCommittedData|TestOwnerEnds)$/^killed$`)
	cmd.Dir = home
	cmd.Env = append(os.Environ(), "HOME="+home, "TMPDIR="+tempDir)
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
