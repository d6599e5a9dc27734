package testkit

import (
	"bytes"
	"context"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

// FreeAddress returns a local address where no program listens now.
func FreeAddress(t testing.TB) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, listener.Close())
	return listener.Addr().String()
}

// OpenDir returns a temporary folder where every user may create files. Other users cannot enter t.TempDir, and its
// path may be too long for a socket.
func OpenDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ratelimit-test-") //nolint:usetesting // see above
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, os.RemoveAll(dir)) })
	require.NoError(t, os.Chmod(dir, 0o777))
	return dir
}

// WriteProgram writes a program that every user may run. ForkLock prevents the error "text file busy": a process that
// another test forks during the write would keep the file open for writing.
func WriteProgram(t testing.TB, path string, content []byte) {
	t.Helper()
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	require.NoError(t, os.WriteFile(path, content, 0o700))
	require.NoError(t, os.Chmod(path, 0o755)) // 0o755 regardless of the umask
}

// Program returns the path of a program in PATH or /usr/sbin. Program returns "" if the program is not there.
func Program(name string) string {
	for _, path := range []string{name, "/usr/sbin/" + name} {
		if found, err := exec.LookPath(path); err == nil {
			return found
		}
	}
	return ""
}

// Start runs a server until the test ends. Start returns as soon as the function ready returns nil.
func Start(t testing.TB, ready func() error, program string, args ...string) {
	t.Helper()
	cmd := exec.CommandContext(context.Background(), program, args...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &log, &log
	require.NoError(t, cmd.Start())
	ended := make(chan struct{})
	go func() {
		_ = cmd.Wait() // the error is that the server was killed
		close(ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		<-ended
		if t.Failed() {
			t.Log(log.String())
		}
	})
	WaitUntil(t, func() bool {
		select {
		case <-ended:
			require.Fail(t, program+" has ended")
		default:
		}
		return ready() == nil
	}, "%s does not get ready", program)
}

// Accepts returns a ready function for Start. That function returns nil as soon as a server accepts connections at the
// address.
func Accepts(address string) (ready func() error) {
	return func() error {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return err
		}
		return conn.Close()
	}
}
