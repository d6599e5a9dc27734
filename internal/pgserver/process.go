//go:build unix

package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// process is a child of this process.
type process struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the child has ended and been reaped
	err  error         // how it ended; valid once done is closed
}

// run starts a child, and the goroutine that reaps it.
func run(cmd *exec.Cmd) (*process, error) {
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan struct{})}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	return p, nil
}

func (p *process) pid() int { return p.cmd.Process.Pid }

func (p *process) ended() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// signal does nothing if the child has ended.
func (p *process) signal(signal syscall.Signal) error {
	if err := p.cmd.Process.Signal(signal); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	return nil
}

// suspend stops the child, so that it starts no further children, and returns its descendants.
func (p *process) suspend() ([]int, error) {
	if err := p.signal(syscall.SIGSTOP); err != nil {
		return nil, err
	}

	// The signal may still be under way when kill returns, and the child may fork before it arrives.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	var table processTable
	err := until(ctx, func() (bool, error) {
		var err error
		table, err = listProcesses(ctx)
		entry, ok := table[p.pid()]
		return !ok || entry.suspended() || entry.zombie(), err
	})
	if err != nil {
		return nil, fmt.Errorf("pgserver: suspend process %d: %w", p.pid(), err)
	}
	return table.descendants(p.pid()), nil
}

// processTable is the parent and state of each process.
type processTable map[int]processEntry

type processEntry struct {
	parent int
	state  string // its first letter is that of ps: T for suspended, Z for a zombie
}

func (e processEntry) suspended() bool { return strings.HasPrefix(e.state, "T") }
func (e processEntry) zombie() bool    { return strings.HasPrefix(e.state, "Z") }

// descendants returns the living children of a process, their children and so on.
func (t processTable) descendants(pid int) []int {
	var all []int
	for child, entry := range t {
		if entry.parent == pid && child != pid && !entry.zombie() {
			all = append(all, child)
			all = append(all, t.descendants(child)...)
		}
	}
	return all
}

// anyAlive reports whether one of the processes still runs. A zombie does not run. Whether anything reaps an
// orphan depends on the init of a container, if there is one.
func (t processTable) anyAlive(pids []int) bool {
	for _, pid := range pids {
		if entry, ok := t[pid]; ok && !entry.zombie() {
			return true
		}
	}
	return false
}

func listProcesses(ctx context.Context) (processTable, error) {
	if _, err := os.Stat("/proc/self/stat"); err == nil {
		return readProc()
	}
	return runPS(ctx)
}

// readProc is for Linux. It is quick, and small containers have no ps.
func readProc() (processTable, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}

	table := make(processTable, len(files))
	for _, file := range files {
		stat, err := os.ReadFile(file)
		if err != nil {
			continue // the process has ended
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, err
		}
		// The line is: pid (name) state parent …, where a name may hold spaces and parentheses.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if err := table.add(pid, fields, 1, 0); err != nil {
			return nil, err
		}
	}
	return table, nil
}

// runPS is for macOS and the BSDs.
func runPS(ctx context.Context) (processTable, error) {
	output, err := exec.CommandContext(ctx, "ps", "-axo", "pid=,ppid=,stat=").Output()
	if err != nil {
		return nil, fmt.Errorf("pgserver: list processes: %w", err)
	}

	table := processTable{}
	for line := range strings.Lines(string(output)) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		if err != nil {
			return nil, err
		}
		if err := table.add(pid, fields, 1, 2); err != nil {
			return nil, err
		}
	}
	return table, nil
}

func (t processTable) add(pid int, fields []string, parentField, stateField int) error {
	if len(fields) <= max(parentField, stateField) {
		return fmt.Errorf("pgserver: list processes: unexpected entry %q", fields)
	}
	parent, err := strconv.Atoi(fields[parentField])
	if err != nil {
		return err
	}
	t[pid] = processEntry{parent: parent, state: fields[stateField]}
	return nil
}

// until polls, at short intervals, until condition returns true or an error.
func until(ctx context.Context, condition func() (bool, error)) error {
	ticker := time.NewTicker(5 * time.Millisecond)
	defer ticker.Stop()

	for {
		if ok, err := condition(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}
