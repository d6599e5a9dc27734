// Package pgserver provides a throwaway Postgres for the demo command, the tests and the benchmarks.
//
// A server that Start has started lives until Close. If its owner ends without calling Close (Ctrl-C, a panic, os.Exit,
// the timeout of go test, even kill -9) then a watchdog stops the server and removes what it left on disk, see watchdog.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"sync"
	"time"
)

const (
	// defaultImage is what Config.Image says.
	defaultImage = "postgres:17"

	// startTimeout bounds how long a server may take until it answers, if the caller's context has no deadline.
	startTimeout = 30 * time.Second
)

// Config says where Start gets a server from and how that server is set. The zero value is useful: binaries or Docker,
// whichever this machine has, tuned for speed.
type Config struct {
	// URL is the connection string of a server to use as it is; nothing is started then and all other fields are
	// ignored. Commands fill it from DATABASE_URL, tests from RATELIMIT_TEST_DATABASE_URL. Defaults to starting a server.
	URL string

	// BinDir is the folder of the postgres and initdb programs. Defaults to the first folder that has both, of PATH,
	// what "pg_config --bindir" prints, and the usual install folders, newest version first.
	BinDir string

	// Fsync leaves fsync, full_page_writes and synchronous_commit at the server's own defaults, for tests of durability
	// and for benchmarks. Defaults to all three off: commits are faster, but the last of them are lost by Kill and by an
	// Immediate stop.
	Fsync bool

	// Settings are further server settings, named as in postgresql.conf; they win over those of this package. The port
	// and the data directory are not for them to choose.
	Settings map[string]string

	// Image is the Docker image used if there are no binaries. Defaults to "postgres:17".
	Image string
}

// Mode says how Stop treats the clients of the server; the names are those of pg_ctl.
type Mode int

const (
	// Fast ends all sessions, rolls their transactions back and shuts down cleanly. It is the zero value.
	Fast Mode = iota
	// Smart waits until all clients have left, then shuts down cleanly.
	Smart
	// Immediate ends all processes without a checkpoint; the next start recovers from the log.
	Immediate
)

// Server is a Postgres server that Start found or started. Its methods may be called concurrently.
type Server struct {
	engine  engine
	version string
	owned   bool

	closing  sync.Once
	closeErr error
}

// engine is one way to have a server: binaries of this machine, Docker, or a server given by URL.
type engine interface {
	// start starts the server, the first time or again, and returns its version once it answers.
	start(ctx context.Context) (version string, err error)
	stop(ctx context.Context, mode Mode) error
	kill() error
	freeze() error
	thaw() error
	// close stops the server and removes all that belongs to it. It is called once.
	close() error

	url() string
	origin() string
	dataDir() string
	pid() int
	pids() ([]int, error)
}

// host is what Start finds around it. Tests put something else there.
type host struct {
	tempDir  string
	lookPath func(name string) (string, error)
	folders  []string
	port     func() (int, error)
}

func newHost() host {
	return host{tempDir: tempDir(), lookPath: exec.LookPath, folders: installFolders(), port: freePort}
}

// memoryDir is a folder in memory, on Linux. To make a database there takes a tenth of the time that it takes on a disk.
const memoryDir = "/dev/shm"

// tempDir is where servers keep their files: where TMPDIR says, else in memory if there is plenty, else where temporary files go.
func tempDir() string {
	const plenty = 4 << 30 // bytes; the tests need a tenth of it
	if os.Getenv("TMPDIR") == "" && freeBytes(memoryDir) >= plenty {
		return memoryDir
	}
	return os.TempDir()
}

// Start returns a server that answers: the one of config.URL, else one started from the Postgres binaries of this machine,
// else one started by Docker, else an error that matches ErrNotFound and names all these ways.
//
// The context bounds the start alone, not the life of the server. Without a deadline the server gets 30 seconds until it
// answers; the time to pull a Docker image does not count.
func Start(ctx context.Context, config Config) (*Server, error) {
	return start(ctx, config, newHost())
}

func start(ctx context.Context, config Config, host host) (*Server, error) {
	if config.Image == "" {
		config.Image = defaultImage
	}

	if config.Fsync && host.tempDir == memoryDir {
		host.tempDir = os.TempDir() // whoever wants fsync wants a disk
	}

	engine, err := newEngine(ctx, config, host)
	if err != nil {
		return nil, err
	}

	version, err := engine.start(ctx)
	if err != nil {
		return nil, errors.Join(err, engine.close())
	}

	return &Server{engine: engine, version: version, owned: config.URL == ""}, nil
}

func newEngine(ctx context.Context, config Config, host host) (engine, error) {
	if config.URL != "" {
		return external{connString: config.URL}, nil
	}

	binDir, err := findBinaries(ctx, config.BinDir, host)
	if err != nil {
		return nil, err
	}
	if binDir != "" {
		return newLocal(ctx, config, host, binDir)
	}

	docker, err := findDocker(ctx, host)
	if err != nil {
		return nil, &notFoundError{folders: host.folders, docker: err}
	}

	return newContainer(ctx, config, host, docker)
}

// URL returns the connection string of the database "postgres" as a superuser, for pgxpool.New and the like. It stays the
// same over Restart. With Config.URL it is that one.
func (s *Server) URL() string { return s.engine.url() }

// Describe returns one line for people: which Postgres, how it was found and where it listens, for example
// "PostgreSQL 17.5 from /usr/lib/postgresql/17/bin, started on 127.0.0.1:21432". It holds no password.
func (s *Server) Describe() string {
	return fmt.Sprintf("PostgreSQL %s %s", s.version, s.engine.origin())
}

// Owned reports whether Start has started the server, rather than been given it by Config.URL. Only an owned server can be
// stopped, killed, frozen and restarted: for another these methods return ErrNotOwned.
func (s *Server) Owned() bool { return s.owned }

// Stop shuts the server down and returns when it has ended; its data stays, for Restart. The context bounds the wait, so a
// Smart stop that clients hold up goes on after it. A server that does not run is left as it is.
func (s *Server) Stop(ctx context.Context, mode Mode) error { return s.engine.stop(ctx, mode) }

// Kill ends all processes of the server as kill -9 does: at once, with no chance to write anything. It returns when they
// are gone. A server that does not run is left as it is.
func (s *Server) Kill() error { return s.engine.kill() }

// Restart starts the server again after Stop or Kill, with the same data on the same port, and returns when it answers,
// which after Kill means that it has recovered. If the port or the shared memory is still in use then it tries until the
// context ends, or for 30 seconds if that has no deadline. If it fails then the server does not run, and Restart may be
// called again.
func (s *Server) Restart(ctx context.Context) error {
	if !s.owned {
		return ErrNotOwned
	}
	_, err := s.engine.start(ctx)
	return err
}

// Freeze suspends all processes of the server. New connections are still accepted, by the operating system, but nothing
// answers until Thaw. Stop, Kill and Close work on a frozen server.
func (s *Server) Freeze() error { return s.engine.freeze() }

// Thaw undoes Freeze. A server that is not frozen is left as it is.
func (s *Server) Thaw() error { return s.engine.thaw() }

// Close stops an owned server at once and removes everything that belongs to it; a server given by URL is left as it is.
// It is safe to call twice.
func (s *Server) Close() error {
	s.closing.Do(func() { s.closeErr = s.engine.close() })
	return s.closeErr
}

// DataDir returns the data directory of a server started from binaries, else "".
func (s *Server) DataDir() string { return s.engine.dataDir() }

// PID returns the process id of the postmaster of a server started from binaries; 0 for another and while it does not run.
func (s *Server) PID() int { return s.engine.pid() }

// PIDs returns the process ids of the postmaster, first, and all its descendants; none where PID returns 0.
func (s *Server) PIDs() ([]int, error) { return s.engine.pids() }

// setting is one line of postgresql.conf.
type setting struct{ name, value string }

// settings merges the caller's settings over ours and those of the engine, in a fixed order.
func (c Config) settings(engine map[string]string) []setting {
	merged := map[string]string{"max_connections": "200", "shared_buffers": "128MB"}
	if !c.Fsync {
		merged["fsync"] = "off"
		merged["full_page_writes"] = "off"
		merged["synchronous_commit"] = "off"
		merged["max_wal_size"] = "256MB" // it may lie in memory
	}
	maps.Copy(merged, engine)
	maps.Copy(merged, c.Settings)

	sorted := make([]setting, 0, len(merged))
	for _, name := range slices.Sorted(maps.Keys(merged)) {
		sorted = append(sorted, setting{name, merged[name]})
	}
	return sorted
}
