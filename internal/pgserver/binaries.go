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
	// maxSocketPath is what sockaddr_un holds on macOS, in bytes. On Linux it holds 107.
	maxSocketPath = 103

	// logTail is how much of the log goes into an error, in bytes.
	logTail = 2000

	// killTimeout bounds the wait for killed processes. They end within milliseconds, unless the kernel holds one
	// up.
	killTimeout = 10 * time.Second
)

// binariesWatchdog removes the server in folder $1. Each line of its input is the id of a process that was
// started there.
//
// It trusts an id only while that process has our data directory on its command line, because ids are used again.
// A postmaster that was killed leaves its small shared memory segment, whose id ends line 7 of postmaster.pid.
// After an orderly end there is no such file. Backends that are frozen together with the postmaster would make it
// wait five seconds before it kills them, so the script wakes them with pkill.
const binariesWatchdog = `
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

// binaries is a server started from binaries on this machine, with all its files in one temporary folder.
//
// The postmaster is a child of this process. One that pg_ctl starts would be an orphan. Until it has written its
// id to a file, nobody could tell the watchdog of it. After Kill it would stay a zombie until init reaps it,
// which in some containers never happens. Postgres takes the zombie for a server that runs, and does not start on
// the same data. So this process has to send the signals that pg_ctl would send.
type binaries struct {
	binDir   string
	from     string // where the binaries come from, for people
	dir      string
	port     int
	freePort func() (int, error)
	account  *account
	watchdog *watchdog

	starting sync.Mutex // held by start
	mu       sync.Mutex // guards the rest
	server   *process   // the last one that was started; nil before the first
	started  bool       // the server has answered once, so the port is settled
}

var _ engine = (*binaries)(nil)

// newBinaries makes the folder, and in it the data directory.
func newBinaries(ctx context.Context, config Config, host host, binDir, from string) (engine, error) {
	account, err := serverAccount()
	if err != nil {
		return nil, err
	}
	port, err := host.port()
	if err != nil {
		return nil, err
	}

	tempDir, err := filepath.Abs(host.tempDir) // the watchdog has another working directory
	if err != nil {
		return nil, fmt.Errorf("pgserver: folder of temporary files: %w", err)
	}
	dir, err := os.MkdirTemp(tempDir, "pgserver-")
	if err != nil {
		return nil, fmt.Errorf("pgserver: make a folder for the server: %w", err)
	}
	watchdog, err := startWatchdog(binariesWatchdog, dir)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}

	b := &binaries{
		binDir: binDir, from: from, dir: dir, port: port, freePort: host.port, account: account, watchdog: watchdog,
	}
	if err := b.init(ctx, config); err != nil {
		return nil, errors.Join(err, b.close())
	}
	return b, nil
}

// init makes the data directory.
func (b *binaries) init(ctx context.Context, config Config) error {
	// A strict umask may have taken rights from the folder that its owner needs.
	if err := errors.Join(os.Chmod(b.dir, 0o700), b.account.own(b.dir)); err != nil {
		return fmt.Errorf("pgserver: prepare the folder of the server: %w", err)
	}
	if err := b.account.checkAccess(b.dir, b.binDir); err != nil {
		return err
	}

	initdb, err := b.spawn("initdb", "-D", b.dataDir(), "-U", "postgres",
		"--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync")
	if err != nil {
		return err
	}
	select {
	case <-initdb.done:
	case <-ctx.Done():
		err := initdb.signal(syscall.SIGQUIT) // it ends once its present child has ended
		<-initdb.done
		return fmt.Errorf("pgserver: initdb: %w", errors.Join(context.Cause(ctx), err))
	}
	if initdb.err != nil {
		return fmt.Errorf("pgserver: initdb: %w\n%s", initdb.err, b.log(0))
	}

	return b.configure(config)
}

// configure appends to postgresql.conf. Unlike options of the command line, the settings there can be changed by
// ALTER SYSTEM.
func (b *binaries) configure(config Config) error {
	socketDir := b.dir
	if len(socketDir)+len("/.s.PGSQL.65535") > maxSocketPath {
		socketDir = ""
	}

	var lines strings.Builder
	quote := strings.NewReplacer(`'`, `''`, `\`, `\\`)
	for _, setting := range config.settings(map[string]string{
		"listen_addresses":        "127.0.0.1",
		"unix_socket_directories": socketDir,
		// Files in the data directory go with it. The default, files in /dev/shm, stay there after kill -9.
		"dynamic_shared_memory_type": "mmap",
		"logging_collector":          "off",
		"log_destination":            "stderr",
	}) {
		fmt.Fprintf(&lines, "%s = '%s'\n", setting.name, quote.Replace(setting.value))
	}

	file, err := os.OpenFile(filepath.Join(b.dataDir(), "postgresql.conf"), os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}
	_, err = file.WriteString(lines.String())
	if err := errors.Join(err, file.Close()); err != nil {
		return fmt.Errorf("pgserver: %w", err)
	}
	return nil
}

// spawn starts a program of the server, and tells the watchdog at once.
func (b *binaries) spawn(name string, args ...string) (*process, error) {
	var child *process
	err := b.watchdog.do(func() (string, error) {
		log, err := os.OpenFile(b.logFile(), os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
		if err != nil {
			return "", fmt.Errorf("pgserver: %w", err)
		}
		defer log.Close()

		cmd := exec.Command(filepath.Join(b.binDir, name), args...)
		cmd.Dir = b.dir // the account may have no access to our own working directory
		cmd.Env = serverEnvironment(os.Environ())
		cmd.Stdout, cmd.Stderr = log, log
		cmd.SysProcAttr = detached(b.account)
		if child, err = run(cmd); err != nil {
			return "", fmt.Errorf("pgserver: start %s: %w", name, err)
		}
		return strconv.Itoa(child.pid()), nil
	})
	if err != nil {
		if child != nil { // the child runs, but the watchdog does not
			err = errors.Join(err, child.signal(syscall.SIGKILL))
		}
		return nil, err
	}
	return child, nil
}

// serverEnvironment drops what would change the server without our knowledge: its variables, and the locale,
// which also decides in which language the server reports that a port is taken.
func serverEnvironment(environment []string) []string {
	kept := slices.DeleteFunc(slices.Clone(environment), func(variable string) bool {
		return strings.HasPrefix(variable, "PG") || strings.HasPrefix(variable, "LC_") ||
			strings.HasPrefix(variable, "LANG")
	})
	return append(kept, "LC_ALL=C")
}

func (b *binaries) start(ctx context.Context) (version string, err error) {
	b.starting.Lock()
	defer b.starting.Unlock()
	if b.running() != nil {
		return "", ErrRunning
	}
	ctx, cancel := withStartTimeout(ctx)
	defer cancel()

	var before error // of the previous attempt, since the present one may be cut short and tell nothing
	for {
		offset := b.logSize()
		server, err := b.spawn("postgres", "-D", b.dataDir(), "-p", strconv.Itoa(b.port))
		if err != nil {
			return "", errors.Join(err, before)
		}
		b.mu.Lock()
		b.server = server
		b.mu.Unlock()

		version, err = awaitReady(ctx, b.url(), b.dataDir(), func(ctx context.Context) error {
			select {
			case <-server.done:
				return fmt.Errorf("it has ended: %s", server.cmd.ProcessState)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		if err == nil {
			b.mu.Lock()
			b.started = true
			b.mu.Unlock()
			return version, nil
		}

		ended := server.ended()
		output := b.log(offset)
		err = errors.Join(fmt.Errorf("%w\n%s", err, output), b.kill())
		if !ended || !transient(output) {
			return "", errors.Join(err, before)
		}
		before = err
		select {
		case <-ctx.Done():
			return "", err
		case <-time.After(50 * time.Millisecond):
		}
		if err := b.movePort(); err != nil {
			return "", err
		}
	}
}

// transient reports whether a server that ended with this output may start at the next attempt. That is so if
// something else uses its port, or if processes of its predecessor have not ended yet.
func transient(output string) bool {
	return portTaken(output) ||
		strings.Contains(output, "is still in use") || // shared memory
		strings.Contains(output, `lock file "postmaster.pid" already exists`)
}

// movePort takes another port, unless callers know the present one.
func (b *binaries) movePort() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.started {
		return nil
	}
	port, err := b.freePort()
	if err == nil {
		b.port = port
	}
	return err
}

// running returns the postmaster, or nil if there is none.
func (b *binaries) running() *process {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.server == nil || b.server.ended() {
		return nil
	}
	return b.server
}

func (b *binaries) stop(ctx context.Context, mode Mode) error {
	server := b.running()
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
	if err := errors.Join(b.thaw(), server.signal(signal)); err != nil {
		return fmt.Errorf("pgserver: stop the server: %w", err)
	}

	select {
	case <-server.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgserver: the server has not stopped yet: %w", context.Cause(ctx))
	}
}

// kill first suspends the postmaster, so that it neither starts new children nor reaps dead ones. If it reaped
// them, their ids could go to other processes in between.
func (b *binaries) kill() error {
	server := b.running()
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

func (b *binaries) freeze() error {
	server := b.running()
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

func (b *binaries) thaw() error {
	pids, err := b.pids()
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

// close leaves the work to the watchdog. What follows only matters if somebody has killed the watchdog.
func (b *binaries) close() error {
	watchdogErr := b.watchdog.close()
	if err := errors.Join(b.kill(), os.RemoveAll(b.dir)); err != nil {
		return fmt.Errorf("pgserver: remove the server: %w", errors.Join(err, watchdogErr))
	}
	return nil
}

func (b *binaries) dataDir() string { return filepath.Join(b.dir, "data") }
func (b *binaries) logFile() string { return filepath.Join(b.dir, "postgres.log") }

func (b *binaries) url() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", b.port)
}

func (b *binaries) origin() string {
	return fmt.Sprintf("from %s, started on 127.0.0.1:%d", b.from, b.port)
}

func (b *binaries) pid() int {
	if server := b.running(); server != nil {
		return server.pid()
	}
	return 0
}

func (b *binaries) pids() ([]int, error) {
	pid := b.pid()
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
func (b *binaries) logSize() int64 {
	info, err := os.Stat(b.logFile())
	if err != nil {
		return 0
	}
	return info.Size()
}

// log returns the end of what was logged from offset on.
func (b *binaries) log(offset int64) string {
	file, err := os.Open(b.logFile())
	if err != nil {
		return err.Error()
	}
	defer file.Close()

	offset = max(offset, b.logSize()-logTail)
	text, err := io.ReadAll(io.NewSectionReader(file, offset, logTail))
	if err != nil {
		return err.Error()
	}
	return string(bytes.TrimSpace(text))
}
