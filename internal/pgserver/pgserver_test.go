//go:build unix

package pgserver

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// ownerVariable makes this test binary start a server and then do the action in the variable.
const ownerVariable = "PGSERVER_TEST_OWNER"

func TestMain(m *testing.M) {
	if os.Getenv(ownerVariable) == "" {
		os.Exit(m.Run())
	}
	server, err := Start(context.Background(), Config{})
	if err == nil && os.Getenv(ownerVariable) == "freeze" {
		err = server.Freeze()
	}
	if err != nil {
		fmt.Fprintln(os.Stdout, err)
		os.Exit(1)
	}
	fmt.Fprintln(os.Stdout, server.URL())
	_, _ = io.Copy(io.Discard, os.Stdin) // stdin stays open
}

// owner starts a child process that owns a server, with the server's files in dir.
func owner(t *testing.T, dir, action string) (cmd *exec.Cmd, stdout io.Reader) {
	t.Helper()
	needPrograms(t)
	cmd = exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), ownerVariable+"="+action, "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a shell also starts a command in a new process group
	_, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err = cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd, stdout
}

// requireGone waits until a folder has no files. A server without files has ended or will soon end.
func requireGone(t *testing.T, dir string) {
	t.Helper()
	testkit.WaitUntil(t, func() bool {
		entries, err := os.ReadDir(dir)
		return err == nil && len(entries) == 0
	}, "files of a server are left in "+dir)
	processes, _ := exec.Command("pgrep", "-f", "--", "-D "+dir).Output()
	require.Empty(t, string(processes), "processes of the server are left")
}

func needPrograms(t *testing.T) {
	t.Helper()
	way, err := find(t.Context(), Config{})
	if _, ok := way.(programs); err != nil || !ok {
		t.Skip("a server of the test's own processes: install Postgres (Debian: postgresql), or npm")
	}
}

// startServer starts a server for a test. At the end of the test, startServer closes the server and checks that no
// files remain.
func startServer(t *testing.T, config Config) *Server {
	t.Helper()
	needPrograms(t)
	server, err := Start(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, server.Close())
		require.NoDirExists(t, server.process.dir)
		require.NoError(t, server.Close(), "a second close")
		require.Error(t, server.Restart(context.Background()))
	})
	return server
}

// query runs a statement on a new connection, and returns the only value.
func query(t *testing.T, url, sql string) (value string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer conn.Close(context.Background())
	require.NoError(t, conn.QueryRow(t.Context(), sql).Scan(&value))
	return value
}

func hostOf(t *testing.T, serverURL string) string {
	t.Helper()
	parsed, err := url.Parse(serverURL)
	require.NoError(t, err)
	return parsed.Host
}

func TestServer(t *testing.T) {
	t.Parallel()

	server := startServer(t, Config{Fsync: true, Settings: map[string]string{"application_name": `it's a \ test`}})
	require.True(t, server.Owned())
	require.Regexp(t, `^PostgreSQL \d+\S* from (/|the npm package )\S.*, started on 127\.0\.0\.1:\d+$`, server.Describe())
	require.Equal(t, "postgres", query(t, server.URL(), "SELECT current_user::text"))
	require.Equal(t, "on", query(t, server.URL(), "SHOW fsync"))
	require.Equal(t, `it's a \ test`, query(t, server.URL(), "SHOW application_name"))
	info, err := os.Stat(server.DataDir())
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o700), info.Mode().Perm())

	// The server keeps its data however it ends.
	kept := 0
	for name, end := range map[string]func() error{
		"fast":      func() error { return server.Stop(t.Context(), Fast) },
		"smart":     func() error { return server.Stop(t.Context(), Smart) },
		"immediate": func() error { return server.Stop(t.Context(), Immediate) },
		"frozen":    func() error { require.NoError(t, server.Freeze()); return server.Stop(t.Context(), Fast) },
		"killed":    func() error { return server.Kill() },
	} {
		kept++
		query(t, server.URL(), fmt.Sprintf("SELECT lo_create(%d)::text", kept))
		pids, err := server.PIDs()
		require.NoError(t, err)
		require.Greater(t, len(pids), 4)
		require.ErrorContains(t, server.Restart(t.Context()), "running already", name)
		require.NoError(t, end(), name)
		require.NoError(t, end(), "%s again", name)
		pids, err = server.PIDs()
		require.NoError(t, err)
		require.Empty(t, pids, name)
		require.NoError(t, server.Restart(t.Context()), name)
		require.Equal(t, strconv.Itoa(kept), query(t, server.URL(), "SELECT count(*)::text FROM pg_largeobject_metadata"))
	}

	// A frozen server accepts connections but does not answer.
	require.NoError(t, server.Freeze())
	conn, err := net.Dial("tcp", hostOf(t, server.URL()))
	require.NoError(t, err)
	defer conn.Close()
	pids, err := server.PIDs()
	require.NoError(t, err)
	for _, pid := range pids { // while the postmaster is frozen, ended sessions are zombies
		testkit.WaitUntil(t, func() bool {
			state, err := exec.Command("ps", "-o", "stat=", "-p", strconv.Itoa(pid)).Output()
			return err == nil && strings.ContainsAny(string(state[:1]), "TZ")
		})
	}
	require.NoError(t, server.Thaw())
	require.Equal(t, "1", query(t, server.URL(), "SELECT '1'"))

	// The server keeps its port, because other programs use its URL.
	theirs, err := Start(t.Context(), Config{URL: server.URL()})
	require.NoError(t, err)
	require.False(t, theirs.Owned())
	require.Regexp(t, `^PostgreSQL \d+\S* from the given URL, at 127\.0\.0\.1:\d+$`, theirs.Describe())
	require.NoError(t, theirs.Close())
	require.NoError(t, server.Stop(t.Context(), Fast))
	_, err = Start(t.Context(), Config{URL: "postgres://me:secret@" + hostOf(t, server.URL()) + "/"})
	require.ErrorContains(t, err, "use the server of the given URL")
	require.NotContains(t, err.Error(), "secret")
	thief, err := net.Listen("tcp", hostOf(t, server.URL()))
	require.NoError(t, err)
	restarted := testkit.Later(func() (bool, error) { return true, server.Restart(t.Context()) })
	testkit.WaitUntil(t, func() bool { return strings.Contains(server.process.log(), "in use") })
	require.NoError(t, thief.Close())
	_, err = restarted()
	require.NoError(t, err)
}

// Close removes shared memory that a killed Postgres leaves, because the number of segments is limited.
func TestCloseRemovesSharedMemory(t *testing.T) {
	t.Parallel()

	server := startServer(t, Config{})
	file, err := os.ReadFile(filepath.Join(server.DataDir(), "postmaster.pid"))
	require.NoError(t, err)
	id := strings.Fields(strings.Split(string(file), "\n")[6])[1]
	require.NoError(t, exec.Command("ipcs", "-m", "-i", id).Run())
	require.NoError(t, server.Kill())
	require.NoError(t, server.Close())
	output, _ := exec.Command("ipcs", "-m", "-i", id).CombinedOutput()
	require.NotContains(t, string(output), "shmid="+id)
}

// If the owner of a server ends without Close, no process and no file remains.
func TestOwnerEnds(t *testing.T) {
	t.Parallel()

	for name, signal := range map[string]syscall.Signal{
		"killed": syscall.SIGKILL, "interrupted": syscall.SIGINT, "freeze": syscall.SIGKILL, "initdb": syscall.SIGKILL,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := testkit.OpenDir(t)
			cmd, stdout := owner(t, dir, name)
			if name == "initdb" {
				testkit.WaitUntil(t, func() bool {
					files, _ := filepath.Glob(filepath.Join(dir, "*/data/base/*"))
					return len(files) > 0
				})
			} else {
				line, err := bufio.NewReader(stdout).ReadString('\n')
				require.NoError(t, err)
				require.True(t, strings.HasPrefix(line, "postgres://"), line)
			}
			require.NoError(t, syscall.Kill(-cmd.Process.Pid, signal)) // a terminal also signals the process group
			require.Error(t, cmd.Wait())
			requireGone(t, dir)
		})
	}
}

func TestFailedStartTellsWhyAndLeavesNothing(t *testing.T) {
	t.Parallel()
	needPrograms(t)

	_, err := Start(t.Context(), Config{Settings: map[string]string{"max_connections": "nonsense"}})
	require.ErrorContains(t, err, `invalid value for parameter "max_connections": "nonsense"`)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = launch(ctx, Config{})
	require.ErrorIs(t, err, context.Canceled)

	if os.Geteuid() != 0 {
		return
	}
	closed := t.TempDir()
	require.NoError(t, os.Chmod(closed, 0o700))
	_, stdout := owner(t, closed, "fail")
	output, err := io.ReadAll(stdout)
	require.NoError(t, err)
	require.Contains(t, string(output), "that user must be able to enter TMPDIR")
	requireGone(t, closed)
}

// An ordinary user can start a server too. As root, pgserver switches users and sets permissions.
func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	_, credential, err := otherUser()
	require.NoError(t, err)
	if credential == nil {
		t.Skip("a server of another user: run the tests as root")
	}
	needPrograms(t)

	dir := testkit.OpenDir(t)
	binary := filepath.Join(dir, "pgserver.test")
	content, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)
	testkit.WriteProgram(t, binary, content)
	cmd := exec.CommandContext(t.Context(), binary, "-test.v", "-test.run", "^(TestServer|TestOwnerEnds)$/^killed$")
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "HOME="+dir, "XDG_CACHE_HOME=", "TMPDIR="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: credential}
	output, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", output)
	require.Contains(t, string(output), "--- PASS: TestServer")
	require.Contains(t, string(output), "--- PASS: TestOwnerEnds/killed")
}
