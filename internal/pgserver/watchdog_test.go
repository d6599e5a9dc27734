//go:build unix

package pgserver

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOwnerEnds proves the promise of the package: whichever way the owner of a server ends without Close, neither a
// process nor a file is left.
func TestOwnerEnds(t *testing.T) {
	t.Parallel()

	for name, test := range map[string]struct {
		end    string         // what the owner does by itself
		signal syscall.Signal // what is sent to its process group, as a terminal does
	}{
		"killed":                           {end: "wait", signal: syscall.SIGKILL},
		"interrupted":                      {end: "wait", signal: syscall.SIGINT},
		"panic while the server is frozen": {end: "freeze and panic"},
		"exit after the server was killed": {end: "kill and exit"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			owner := startOwner(t, test.end)
			report := owner.report(t)
			if test.signal != 0 {
				requireRunning(t, report.PIDs)
				require.NoError(t, syscall.Kill(-owner.cmd.Process.Pid, test.signal))
			}
			require.Error(t, owner.cmd.Wait())
			requireNothingLeft(t, owner.tempDir, report.PIDs)
		})
	}
}

func TestOwnerEndsDuringInitdb(t *testing.T) {
	t.Parallel()

	owner := startOwner(t, "wait")
	require.Eventually(t, func() bool {
		files, err := filepath.Glob(filepath.Join(owner.tempDir, "*/data/base/*"))
		return err == nil && len(files) > 0
	}, patience, poll)
	require.NoError(t, owner.cmd.Process.Kill())
	require.Error(t, owner.cmd.Wait())

	requireNothingLeft(t, owner.tempDir, nil)
	require.Eventually(t, func() bool { return !processMentions(t, owner.tempDir) }, patience, poll)
}

// TestDroppedServerRuns: many a caller keeps the URL alone. A pipe that the garbage collector closes would end its
// server.
func TestDroppedServerRuns(t *testing.T) {
	t.Parallel()

	watchdog, err := startWatchdog("read -r line")
	require.NoError(t, err)
	done := watchdog.done
	watchdog = nil //nolint:wastedassign // the point of the test
	require.Never(t, func() bool {
		runtime.GC()
		select {
		case <-done:
			return true
		default:
			return false
		}
	}, 100*time.Millisecond, poll)
}

func TestCloseWithoutWatchdog(t *testing.T) {
	t.Parallel()

	server := startServer(t, Config{})
	watchdog := server.engine.(*binaries).watchdog
	children, err := listProcesses(t.Context())
	require.NoError(t, err)
	for _, pid := range children.descendants(os.Getpid()) {
		if processHas(t, pid, "pgserver-watchdog") && processHas(t, pid, filepath.Dir(server.DataDir())) {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
		}
	}
	<-watchdog.done
	require.NoError(t, server.Stop(t.Context(), Fast))
	require.ErrorContains(t, server.Restart(t.Context()), "watchdog")
	// Close, in the cleanup, does the work itself.
}

func requireRunning(t *testing.T, pids []int) {
	t.Helper()
	table, err := listProcesses(t.Context())
	require.NoError(t, err)
	alive := slices.DeleteFunc(slices.Clone(pids), func(pid int) bool { return !table.anyAlive([]int{pid}) })
	require.Greater(t, len(alive), 4) // backends of clients may have ended
}

func processMentions(t *testing.T, text string) bool {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "ps", "-axo", "args=").Output()
	require.NoError(t, err)
	return strings.Contains(string(output), text)
}

func processHas(t *testing.T, pid int, text string) bool {
	t.Helper()
	output, err := exec.CommandContext(t.Context(), "ps", "-o", "args=", "-p", strconv.Itoa(pid)).Output()
	return err == nil && strings.Contains(string(output), text)
}
