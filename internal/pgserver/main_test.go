//go:build unix

package pgserver

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/ratelimit/internal/testkit"
)

// The test binary runs itself as another process: one that owns a server and ends in the way named by ownerEnd, or the
// forwarder behind the fake docker command.
const (
	helperVariable     = "PGSERVER_TEST_HELPER"
	ownerEndVariable   = "PGSERVER_TEST_OWNER_END"
	fakeDockerVariable = "PGSERVER_TEST_DOCKER"

	// patience is for things that take a moment on an idle machine.
	patience = testkit.Amply
	poll     = 20 * time.Millisecond
)

func TestMain(m *testing.M) {
	var err error
	switch os.Getenv(helperVariable) {
	case "":
		os.Exit(m.Run())
	case "owner":
		err = ownServer(context.Background(), os.Getenv(ownerEndVariable))
	case "forwarder":
		err = forward(os.Args[1], os.Args[2])
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// ownerReport is what an owner prints, as one line of JSON, when its server answers.
type ownerReport struct {
	URL     string
	DataDir string
	PIDs    []int
}

// ownServer starts a server, forgets all but the report, and ends without Close.
func ownServer(ctx context.Context, end string) error {
	host := newHost()
	if docker := os.Getenv(fakeDockerVariable); docker != "" {
		host = dockerHost(docker)
	}
	server, err := start(ctx, Config{}, host)
	if err != nil {
		return err
	}
	pids, err := server.PIDs()
	if err != nil {
		return err
	}
	report := ownerReport{URL: server.URL(), DataDir: server.DataDir(), PIDs: pids}

	switch end {
	case "freeze and panic":
		err = server.Freeze()
	case "kill and exit":
		err = server.Kill()
	}
	if err != nil {
		return err
	}
	if err := json.NewEncoder(os.Stdout).Encode(report); err != nil {
		return err
	}

	switch end {
	case "freeze and panic":
		panic("on purpose")
	case "wait":
		_, err = io.Copy(io.Discard, os.Stdin) // which nobody closes
		return err
	}
	os.Exit(3)
	return nil
}

// forward copies the bytes of each connection to a server, as the port of a container does.
func forward(from, to string) error {
	listener, err := net.Listen("tcp", from)
	if err != nil {
		return err
	}
	for {
		client, err := listener.Accept()
		if err != nil {
			return err
		}
		server, err := net.Dial("tcp", to)
		if err != nil {
			return err
		}
		go func() {
			_, _ = io.Copy(server, client)
			_ = server.Close()
		}()
		go func() {
			_, _ = io.Copy(client, server)
			_ = client.Close()
		}()
	}
}

// owner is a process that runs ownServer.
type owner struct {
	cmd    *exec.Cmd
	stdin  io.Closer
	stdout io.Reader
	// tempDir holds whatever the owner leaves behind.
	tempDir string
}

// startOwner leaves it to the test to await the report, and to end the owner.
func startOwner(t *testing.T, end string, environment ...string) *owner {
	t.Helper()
	needPrograms(t)

	tempDir := testkit.OpenDir(t)
	cmd := exec.Command(testBinary(t))
	cmd.Env = append(os.Environ(), helperVariable+"=owner", ownerEndVariable+"="+end, "TMPDIR="+tempDir)
	cmd.Env = append(cmd.Env, environment...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // as a shell does with a command
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("the owner wrote: %s", stderr.String())
		}
	})
	return &owner{cmd: cmd, stdin: stdin, stdout: stdout, tempDir: tempDir}
}

func (o *owner) report(t *testing.T) ownerReport {
	t.Helper()
	var report ownerReport
	line, err := bufio.NewReader(o.stdout).ReadBytes('\n')
	require.NoError(t, err, "the owner has ended without a report")
	require.NoError(t, json.Unmarshal(line, &report))
	return report
}

// requireNothingLeft waits until the folder of temporary files is empty and all the processes are gone.
func requireNothingLeft(t *testing.T, tempDir string, pids []int) {
	t.Helper()
	require.Eventually(t, func() bool {
		entries, err := os.ReadDir(tempDir)
		return err == nil && len(entries) == 0
	}, patience, poll, "files of the server are left in %s", tempDir)
	require.Eventually(t, func() bool {
		table, err := listProcesses(t.Context())
		return err == nil && !table.anyAlive(pids)
	}, patience, poll, "of the processes %v of the server, some still run", pids)
}

func testBinary(t *testing.T) string {
	t.Helper()
	path, err := os.Executable()
	require.NoError(t, err)
	return path
}

// needPrograms skips a test where only Docker has a Postgres, or only somebody who has given a server to other tests.
func needPrograms(t *testing.T) {
	t.Helper()
	if way, err := newHost().Find(t.Context(), ""); err != nil || way.Docker != "" {
		t.Skip("a server of the test's own processes: install Postgres (Debian: postgresql), or npm")
	}
}

// startServer starts a server that ends with the test, in a folder which must be empty then.
func startServer(t *testing.T, config Config) *Server {
	t.Helper()
	host := newHost()
	host.tempDir = testkit.OpenDir(t)
	return startServerOn(t, config, host)
}

func startServerOn(t *testing.T, config Config, host host) *Server {
	t.Helper()
	needPrograms(t)
	server, err := start(t.Context(), config, host)
	require.NoError(t, err)
	t.Cleanup(func() {
		pids, err := server.PIDs()
		require.NoError(t, err)
		require.NoError(t, server.Close())
		requireGone(t, pids)
		entries, err := os.ReadDir(host.tempDir)
		require.NoError(t, err)
		require.Empty(t, entries, "Close has left files behind")
	})
	return server
}

// requireGone fails if one of the processes still runs, now.
func requireGone(t *testing.T, pids []int) {
	t.Helper()
	table, err := listProcesses(t.Context())
	if err != nil { // the context of a test ends before its cleanup
		table, err = listProcesses(context.Background())
	}
	require.NoError(t, err)
	require.False(t, table.anyAlive(pids), "processes of the server still run")
	for _, pid := range pids {
		require.NotEqual(t, os.Getpid(), table[pid].parent, "our child %d has not been reaped", pid)
	}
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close(context.Background()) })
	return conn
}

// query runs one statement on a connection of its own, and scans its only value if there is one.
func query(t *testing.T, url, sql string) string {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close(context.Background())) }()

	results, err := conn.PgConn().Exec(t.Context(), sql).ReadAll()
	require.NoError(t, err)
	last := results[len(results)-1]
	if len(last.Rows) == 0 {
		return ""
	}
	return string(last.Rows[0][0])
}

// sharedMemoryID reads the segment that a postmaster has announced.
func sharedMemoryID(t *testing.T, dataDir string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dataDir, "postmaster.pid"))
	require.NoError(t, err)
	lines := strings.Split(string(text), "\n")
	require.Greater(t, len(lines), 6)
	fields := strings.Fields(lines[6])
	require.Len(t, fields, 2)
	return fields[1]
}

func sharedMemoryExists(t *testing.T, id string) bool {
	t.Helper()
	text, err := os.ReadFile("/proc/sysvipc/shm")
	if err != nil {
		t.Skip("shared memory: only Linux lists its segments")
	}
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[1] == id {
			return true
		}
	}
	return false
}

func portOf(t *testing.T, url string) int {
	t.Helper()
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	return int(config.Port)
}

func address(port int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(port)) }
