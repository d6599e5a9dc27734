//go:build unix

package pgserver

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	// maxSocketPath is what sockaddr_un holds on macOS; on Linux it is 107.
	maxSocketPath = 103

	// logTail is how much of the log goes into an error.
	logTail = 2000

	// killTimeout bounds the wait for killed processes. They end within milliseconds, unless the kernel holds one up.
	killTimeout = 10 * time.Second
)

// localWatchdog removes the server in folder $1. Each line of its input is the id of a process that was started there.
//
// It trusts an id only while that process has our data directory on its command line: ids are used again. A postmaster that
// was killed leaves its small shared memory segment, whose id ends line 7 of postmaster.pid; after an orderly end there is
// no such file. Backends frozen with the postmaster would make it wait five seconds before it kills them, hence pkill.
const localWatchdog = `
trap '' HUP INT TERM
dir=$1 pid=
while read -r line; do pid=$line; done

alive() {
	if [ -d /proc/self ]; then
		grep -qF "$dir/data" "/proc/$pid/cmdline"
	else
		ps -ww -o args= -p "$pid" | grep -qF "$dir/data"
	fi
}

pause() { sleep 0.05 || sleep 1; }

n=0
while [ -n "$pid" ] && alive; do
	if [ $n -eq 0 ]; then
		kill -QUIT "$pid"
		kill -CONT "$pid"
		pkill -CONT -P "$pid"
	elif [ $n -ge 200 ]; then
		kill -KILL "$pid"
		break
	fi
	n=$((n + 1))
	pause
done

shm=$(sed -n '7s/.* //p' "$dir/data/postmaster.pid")
[ -n "$shm" ] && ipcrm -m "$shm"

n=0
until rm -rf "$dir"; do
	n=$((n + 1))
	[ $n -ge 200 ] && exit 1
	pause
done
exit 0
`

// local is a server started from binaries: a child process, with all its files in one temporary folder.
type local struct {
	binDir   string
	dir      string
	port     int
	freePort func() (int, error)
	account  *account
	watchdog *watchdog

	starting sync.Mutex // held by start
	mu       sync.Mutex // guards the rest
	server   *process   // the last that was started; nil before the first
	started  bool       // it has answered once, so the port is settled
}

var _ engine = (*local)(nil)

// newLocal makes the folder, and in it the data directory.
func newLocal(ctx context.Context, config Config, host host, binDir string) (engine, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	port, err := host.port()
	if err != nil {
		return nil, err
	}

	tempDir, err := filepath.Abs(host.tempDir) // the watchdog works elsewhere
	if err != nil {
		return nil, fmt.Errorf("pgserver: folder of temporary files: %w", err)
	}
	dir, err := os.MkdirTemp(tempDir, "pgserver-")
	if err != nil {
		return nil, fmt.Errorf("pgserver: make a folder for the server: %w", err)
	}
	watchdog, err := startWatchdog(localWatchdog, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}

	l := &local{binDir: binDir, dir: dir, port: port, freePort: host.port, account: account, watchdog: watchdog}
	if err := l.init(ctx, config); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// init makes the data directory.
func (l *local) init(ctx context.Context, config Config) error {
	// A strict umask may have taken rights from the folder that its owner needs.
	if err := errors.Join(os.Chmod(l.dir, 0o700), l.account.own(l.dir)); err != nil {
		return fmt.Errorf("pgserver: prepare the folder of the server: %w", err)
	}
	if err := l.account.checkAccess(l.dir, l.binDir); err != nil {
		return err
	}

	initdb, err := l.spawn("initdb", "-D", l.dataDir(), "-U", "postgres",
		"--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	if err != nil {
		return err
	}
	select {
	case <-initdb.done:
	case <-ctx.Done():
		err := initdb.signal(syscall.SIGQUIT) // it ends once its present child has
		<-initdb.done
		return fmt.Errorf("pgserver: initdb: %w", errors.Join(context.Cause(ctx), err))
	}
	if initdb.err != nil {
		return fmt.Errorf("pgserver: initdb: %w\n%s", initdb.err, l.log(0))
	}

	return l.configure(config)
}

// configure appends to postgresql.conf: unlike options of the command line, what stands there can be changed by ALTER SYSTEM.
func (l *local) configure(config Config) error {
	socketDir := l.dir
	if len(socketDir)+len("/.s.PGSQL.65535") > maxSocketPath {
		socketDir = ""
	}

	var lines strings.Builder
	quote := strings.NewReplacer(`'`, `''`, `\`, `\\`)
	for _, setting := range config.settings(map[string]string{
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": socketDir,
		// Files in the data directory go with it. The default, files in /dev/shm, stays there after kill -9.
		"dynamic_shared_memory_type": "mmap",
		"logging_collector":          "off",
		"log_destination":            "stderr",
	}) {
		fmt.Fprintf(&lines, "%s = '%s'\n", setting.name, quote.Replace(setting.value))
	}

	file, err := os.OpenFile(filepath.Join(l.dataDir(), "postgresql.conf"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}
	_, err = file.WriteString(lines.String())
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}
	return nil
}

// spawn starts a program of the server. The watchdog learns of it at once.
func (l *local) spawn(name string, args ...string) (*process, error) {
	var child *process
	err := l.watchdog.do(func() (string, error) {
		log, err := os.OpenFile(l.logFile(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return "", fmt.Errorf("pgserver: %w", err)
		}
		defer log.Close()

		cmd := exec.Command(filepath.Join(l.binDir, name), args...)
		cmd.Dir = l.dir // ours may be closed to the account
		cmd.Env = serverEnvironment(os.Environ())
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = detached(l.account)
		if child, err = run(cmd); err != nil {
			return "", fmt.Errorf("pgserver: start %s: %w", name, err)
		}
		return strconv.Itoa(child.pid()), nil
	})
	if err != nil {
		if child != nil { // it runs, but the watchdog does not
			err = errors.Join(err, child.signal(syscall.SIGKILL))
		}
		return nil, err
	}
	return child, nil
}

// serverEnvironment drops what would change the server behind our back: its variables, and the locale, which also decides
// in which language it reports that a port is taken.
func serverEnvironment(environment []string) []string {
	kept := slices.DeleteFunc(slices.Clone(environment), func(variable string) bool {
		return strings.HasPrefix(variable, "PG") || strings.HasPrefix(variable, "LC_") || strings.HasPrefix(variable, "LANG")
	})
	return append(kept, "LC_ALL=C")
}

func (l *local) start(ctx context.Context) (version string, err error) {
	l.starting.Lock()
	defer l.starting.Unlock()
	if l.running() != nil {
		return "", ErrRunning
	}
	ctx, cancel := withStartTimeout(ctx)
	defer cancel()

	var before error // of the last attempt; the present one may be cut short, and tell nothing
	for {
		offset := l.logSize()
		server, err := l.spawn("postgres", "-D", l.dataDir(), "-p", strconv.Itoa(l.port))
		if err != nil {
			return "", errors.Join(err, before)
		}
		l.mu.Lock()
		l.server = server
		l.mu.Unlock()

		version, err = awaitReady(ctx, l.url(), l.dataDir(), func(ctx context.Context) error {
			select {
			case <-server.done:
				return fmt.Errorf("it has ended: %s", server.cmd.ProcessState)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		if err == nil {
			l.mu.Lock()
			l.started = true
			l.mu.Unlock()
			return version, nil
		}

		ended := server.ended()
		output := l.log(offset)
		err = errors.Join(fmt.Errorf("%w\n%s", err, output), l.kill())
		if !ended || !transient(output) {
			return "", errors.Join(err, before)
		}
		before = err
		select {
		case <-ctx.Done():
			return "", err
		case <-time.After(50 * time.Millisecond):
		}
		if err := l.movePort(); err != nil {
			return "", err
		}
	}
}

// transient reports whether a server that ended with this output may well start at the next attempt: somebody uses its
// port, or processes of its predecessor have not ended yet.
func transient(output string) bool {
	return portTaken(output) ||
		strings.Contains(output, "is still in use") || // shared memory
		strings.Contains(output, `lock file "postmaster.pid" already exists`)
}

// movePort takes another port, unless callers know the present one.
func (l *local) movePort() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.started {
		return nil
	}
	port, err := l.freePort()
	if err == nil {
		l.port = port
	}
	return err
}

// running returns the postmaster; nil if there is none.
func (l *local) running() *process {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.server == nil || l.server.ended() {
		return nil
	}
	return l.server
}

func (l *local) stop(ctx context.Context, mode Mode) error {
	server := l.running()
	if server == nil {
		return nil
	}

	signal := syscall.SIGINT
	switch mode {
	case Fast:
	case Smart:
		signal = syscall.SIGTERM
	case Immediate:
		signal = syscall.SIGQUIT
	}
	if err := errors.Join(l.thaw(), server.signal(signal)); err != nil {
		return fmt.Errorf("pgserver: stop the server: %w", err)
	}

	select {
	case <-server.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgserver: the server has not stopped yet: %w", context.Cause(ctx))
	}
}

// kill suspends the postmaster, so that it neither has new children nor reaps the dead ones: their ids cannot go to others
// in between.
func (l *local) kill() error {
	server := l.running()
	if server == nil {
		return nil
	}
	children, err := server.suspend()
	for _, child := range children {
		err = errors.Join(err, signal(child, syscall.SIGKILL))
	}
	if err := errors.Join(err, server.signal(syscall.SIGKILL)); err != nil {
		return fmt.Errorf("pgserver: kill the server: %w", err)
	}

	// Postgres does not start while a process of the last run is attached to its shared memory.
	ctx, cancel := context.WithTimeout(context.Background(), killTimeout)
	defer cancel()
	<-server.done
	err = until(ctx, func() (bool, error) {
		table, err := listProcesses(ctx)
		return !table.anyAlive(children), err
	})
	if err != nil {
		return fmt.Errorf("pgserver: processes of the server are still there: %w", err)
	}
	return nil
}

func (l *local) freeze() error {
	server := l.running()
	if server == nil {
		return nil
	}
	children, err := server.suspend()
	for _, child := range children {
		err = errors.Join(err, signal(child, syscall.SIGSTOP))
	}
	if err != nil {
		return fmt.Errorf("pgserver: freeze the server: %w", err)
	}
	return nil
}

func (l *local) thaw() error {
	pids, err := l.pids()
	for _, pid := range pids {
		err = errors.Join(err, signal(pid, syscall.SIGCONT))
	}
	if err != nil {
		return fmt.Errorf("pgserver: thaw the server: %w", err)
	}
	return nil
}

// signal does nothing if there is no such process any more.
func signal(pid int, signal syscall.Signal) error {
	if err := syscall.Kill(pid, signal); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process %d: %w", pid, err)
	}
	return nil
}

// close leaves the work to the watchdog. What follows only matters if somebody has killed that.
func (l *local) close() error {
	watchdogErr := l.watchdog.close()
	if err := errors.Join(l.kill(), os.RemoveAll(l.dir)); err != nil {
		return fmt.Errorf("pgserver: remove the server: %w", errors.Join(err, watchdogErr))
	}
	return nil
}

func (l *local) dataDir() string { return filepath.Join(l.dir, "data") }
func (l *local) logFile() string { return filepath.Join(l.dir, "postgres.log") }

func (l *local) url() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", l.port)
}

func (l *local) origin() string {
	return fmt.Sprintf("from %s, started on 127.0.0.1:%d", l.binDir, l.port)
}

func (l *local) pid() int {
	if server := l.running(); server != nil {
		return server.pid()
	}
	return 0
}

func (l *local) pids() ([]int, error) {
	pid := l.pid()
	if pid == 0 {
		return nil, nil
	}
	table, err := listProcesses(context.Background())
	if err != nil {
		return nil, err
	}
	return append([]int{pid}, table.descendants(pid)...), nil
}

// logSize returns where the output of the next program begins.
func (l *local) logSize() int64 {
	info, err := os.Stat(l.logFile())
	if err != nil {
		return 0
	}
	return info.Size()
}

// log returns the end of what was logged from offset on.
func (l *local) log(offset int64) string {
	file, err := os.Open(l.logFile())
	if err != nil {
		return err.Error()
	}
	defer file.Close()

	offset = max(offset, l.logSize()-logTail)
	text, err := io.ReadAll(io.NewSectionReader(file, offset, logTail))
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text))
}
